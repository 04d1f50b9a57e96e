"""The page of `hybridize compare`, and the table that the terminal shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hybridize.files import write_text
from hybridize.report.charts import scatter
from hybridize.report.page import template

SIGNIFICANT = 0.05
COLORS = 10
LOWER_IS_BETTER = ("perplexity", "gold_perplexity")


def headline(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int | None]]:
    """(task, metric, context) of the few numbers that say most, in the order they are shown."""
    keys = list(dict.fromkeys(_key(row) for row in rows if _whole(row)))
    lengths = [key for key in keys if key[0] == "ruler_average"] or [key for key in keys if key[0] == "needle"]
    lengths = lengths or [key for key in keys if key[1] == "score"]
    rest = [key for key in keys if key[0] == "choice_average"] or [key for key in keys if key[1] == "acc"][:1]
    perplexity = [key for key in keys if key[1] == "perplexity" and not key[0].startswith("drift")]
    return [*lengths, *rest, *perplexity][:8]


def summary(rows: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], match_at: int) -> dict[str, Any]:
    """{"heads": [label], "lines": [{entry, "cells": [row or None], cache, prefill, decode}]}."""
    keys = headline(rows)
    lines = []
    for entry in entries:
        mine = [row for row in rows if row["selector"] == entry["name"]]
        cells = [next((row for row in mine if _key(row) == key and _whole(row)), None) for key in keys]
        costs = {name: mine[0][f"{name}_ratio"] for name in ("cache", "prefill", "decode")}
        lines.append(
            {
                **entry,
                **costs,
                "kept": mine[0]["budget"],
                "cells": [None if c is None else {**c, "mark": mark(c)} for c in cells],
            }
        )
    return {"heads": [label(*key) for key in keys], "match_at": match_at, "lines": lines}


def label(task: str, metric: str, context: int | None) -> str:
    """A column's or line's name."""
    names = {"ruler_average": "RULER", "choice_average": "choice acc"}
    shown = names.get(task, task if metric in ("score", "exact", "perplexity") else f"{task} {metric}")
    if metric == "perplexity" and task != "perplexity":
        shown = f"{task} perplexity"
    return shown if context is None else f"{shown} {context}"


def mark(row: Mapping[str, Any]) -> str:
    """ "worse" or "better" than the base where the difference is significant, else ""."""
    p = row.get("p_holm", row.get("p", 1.0))
    if p >= SIGNIFICANT:
        return ""
    return "better" if (row["difference"] > 0) != (row["metric"] in LOWER_IS_BETTER) else "worse"


def write_comparison(path: str | Path, data: Mapping[str, Any]) -> Path:
    """Write the page from compare.json's content."""
    rows, entries, match_at = data["rows"], data["entries"], data["match_at"]
    main = [row for row in rows if _whole(row)]
    parts = [row for row in rows if row["depth"] is None and not _whole(row)]
    facts = {
        "model": f"{data['model']}, {data['dtype']}",
        "budget": f"{100 * data['select']['budget']:.0f} % of layers with the base's attention, window "
        f"{data['select']['window']} + {data['select']['sinks']} sinks in the others; the baselines have as many cache bytes "
        f"at {match_at} tokens",
        "device": data["device"],
        "date": data["date"],
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
    }
    html = template("comparison.html").render(
        facts=facts,
        summary=summary(rows, entries, match_at),
        charts=_charts(rows, entries),
        tasks=_lines(main, entries),
        positions=_lines(parts, entries),
        entries=entries,
        contexts=list(entries[0]["cache_bytes"]),
        seconds=data["seconds"],
        chance=SIGNIFICANT,
    )
    return write_text(path, html)


def _charts(rows: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """Quality over bytes and over attention FLOPs, at each length of the headline."""
    charts = []
    for key in headline(rows):
        if key[2] is None or key[1] == "perplexity":
            continue
        for what, name in (("cache_bytes", "cache bytes"), ("prefill_flops", "prefill attention FLOPs")):
            points = []
            for i, entry in enumerate(entries):
                row = next((r for r in rows if r["selector"] == entry["name"] and _key(r) == key and _whole(r)), None)
                if row is not None:
                    share = entry[what][str(key[2])] / entries[0][what][str(key[2])]
                    point = {"name": entry["name"], "x": share, "y": row["score"], "color": i % COLORS}
                    points.append(point | {"low": row["low"], "high": row["high"]})
            title = f"{label(*key)} over {name}"
            charts.append((title, Markup(scatter(points, f"{name}, share of the base", label(*key)))))
    return charts


def _lines(rows: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line a cell's key, one cell an entry."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        positions = tuple(row["positions"]) if row.get("positions") else None
        line = found.setdefault((*_key(row), positions), {"row": row, "positions": positions, "cells": {}})
        line["cells"][row["selector"]] = {**row, "mark": mark(row)}
    return [{**line, "cells": [line["cells"].get(entry["name"]) for entry in entries]} for line in found.values()]


def _key(row: Mapping[str, Any]) -> tuple[str, str, int | None]:
    return row["task"], row["metric"], row["context"]


def _whole(row: Mapping[str, Any]) -> bool:
    """Not one depth or position bucket of a larger cell."""
    return row["depth"] is None and row.get("positions") in (None, [0, row["context"]], (0, row["context"]))
