"""What the user sees while a verb runs and at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hybridize.report.charts import short


class Terminal:
    """Progress bars and tables on stderr and stdout; with `as_json`, stdout carries one JSON document only."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 120)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self.tasks: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def report(self, what: str, done: float, of: int) -> None:
        """A progress callback: one bar for each phase, made when it is first heard of."""
        if what not in self.tasks:
            self.progress.start()
            self.tasks[what] = self.progress.add_task(what, total=of)
        self.progress.update(self.tasks[what], completed=done, total=of)

    def close(self) -> None:
        self.progress.stop()

    def result(self, data: dict[str, Any]) -> None:
        """The machine-readable end of a verb."""
        if self.as_json:
            print(json.dumps(data, ensure_ascii=False))

    def quality_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """Quality kept and cost saved of every plan, against the base in the same run."""
        lengths = sorted({row["context"] for row in rows if row["task"] == "needle"})
        table = Table(title="kept and saved (needle: share right, 95 % interval; costs: share of the base)")
        table.add_column("selection", no_wrap=True)
        table.add_column("layers", justify="right")
        for length in lengths:
            table.add_column(f"needle {length}", justify="right", no_wrap=True)
        for name in ("ppl", "cache", "prefill", "decode"):
            table.add_column(name, justify="right")
        for selector in dict.fromkeys(row["selector"] for row in rows):
            mine = [row for row in rows if row["selector"] == selector]
            cells = [selector, str(mine[0]["kept"])]
            for length in lengths:
                found = (r for r in mine if r["task"] == "needle" and r["context"] == length and r["depth"] is None)
                if (cell := next(found, None)) is None:
                    cells.append("–")
                    continue
                between = " " if len(lengths) == 1 else "\n"  # several lengths: the interval goes below, so that they fit
                cells.append(f"{cell['score']:.2f}{between}({cell['low']:.2f}–{cell['high']:.2f})")
            whole = [r for r in mine if r["task"] == "perplexity" and r["positions"] == [0, r["context"]]]
            cells.append(f"{whole[0]['score']:.2f}" if whole else "–")
            cells += [f"{100 * mine[0][key]:.0f} %" for key in ("cache_ratio", "prefill_ratio", "decode_ratio")]
            table.add_row(*cells)
        self.console.print(table)

    def sparsity_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """What indexed attention chose; nothing where there is none."""
        table = Table(title="tokens that retrieving heads chose")
        shown = ("length", "tokens", "p10", "p50", "p90", "chosen", "captured", "pairs", "groups", "cache")
        for name in shown:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(f"{row[n]:,.0f}" for n in shown[:5]), *(f"{100 * row[n]:.1f} %" for n in shown[5:]))
        if rows:
            self.console.print(table)

    def closing_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """What gates left closed; nothing where there is none."""
        table = Table(title="tokens that gates left closed")
        shown = ("closed", "least", "most", "pairs")
        for name in ("length", *shown):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(f"{row['length']:,}", *(f"{100 * row[name]:.1f} %" for name in shown))
        if rows:
            self.console.print(table)

    def task_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """RULER tasks and choice sets, a column a plan; nothing where none was measured."""
        rows = [row for row in rows if row["task"] not in ("needle", "perplexity")]
        selectors = list(dict.fromkeys(row["selector"] for row in rows))
        table = Table(title="tasks (95 % interval)")
        for name in ("task", "metric", "length"):
            table.add_column(name)
        for selector in selectors:
            table.add_column(selector, justify="right")
        for key in dict.fromkeys((row["task"], row["metric"], row["context"]) for row in rows):
            cells = [row for row in rows if (row["task"], row["metric"], row["context"]) == key]
            shown = [f"{cell['score']:.3f} ({cell['low']:.3f}–{cell['high']:.3f})" for cell in cells]
            table.add_row(key[0], key[1], "" if key[2] is None else str(key[2]), *shown)
        if rows:
            self.console.print(table)

    def comparison_table(self, summary: dict[str, Any]) -> None:
        """Entries of a comparison: quality against the base, costs at the matched length."""
        table = Table(title=f"costs at {summary['match_at']} tokens; - and +: worse or better than the base, p < 0.05")
        table.add_column("entry")
        for name in (*summary["heads"], "cache", "prefill", "decode"):
            table.add_column(name, justify="right")
        for line in summary["lines"]:
            cells = [
                "–" if c is None else f"{c['score']:.3f}{'-' if c['mark'] == 'worse' else '+' if c['mark'] else ''}"
                for c in line["cells"]
            ]
            table.add_row(line["name"], *cells, *(f"{100 * line[k]:.0f} %" for k in ("cache", "prefill", "decode")))
        self.console.print(table)

    def speed_table(self, rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Times against the baselines of the same run, and how far from what the machine could do."""
        lists = {k: v for k, v in facts.items() if isinstance(v, dict)}
        single = {k: short(v) if isinstance(v, float) else v for k, v in facts.items() if k not in lists}
        table = Table(title=", ".join(f"{k} {v}" for k, v in single.items()))
        for name in ("what", "variant", "context", "batch", "value", "spread", "against", "ratio", "of limit"):
            table.add_column(name, justify="left" if name in ("what", "variant", "against") else "right")
        for row in rows:
            limit = "–" if row["of_limit"] is None else f"{100 * row['of_limit']:.0f} %"
            value = f"{row['value']:.3g} {row['unit']}"
            cells = [row["what"], row["variant"], f"{row['context']:,}", str(row["batch"]), value]
            cells += [f"{100 * row['spread']:.0f} %", row["baseline"], f"{row['ratio']:.2f}x", limit]
            table.add_row(*cells)
        self.console.print(table)
        for name, values in lists.items():
            self.console.print(f"{name}:")
            for of, value in values.items():
                self.console.print(f"  {of}: {'–' if value is None else value}")

    def seconds_table(self, seconds: dict[str, float]) -> None:
        table = Table(title="seconds by phase")
        table.add_column("phase")
        table.add_column("seconds", justify="right")
        for name, value in [*seconds.items(), ("all", sum(seconds.values()))]:
            table.add_row(name, f"{value:.1f}")
        self.console.print(table)

    def cost_table(self, rows: Sequence[dict[str, Any]]) -> None:
        """Predicted cost over contexts."""
        table = Table(title="predicted cost (bf16; attention FLOPs)")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            costs = [short(v) if isinstance(v, int) else f"{100 * v:.1f} %" for k, v in row.items() if k != "context"]
            table.add_row(f"{row['context']:,}", *costs)
        self.console.print(table)
