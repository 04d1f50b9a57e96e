"""Write the tables of docs/ from results/: what stands between two markers is never typed by hand.

python scripts/tables.py           # rewrite
python scripts/tables.py --check   # fail where a table is not what its results say
"""

import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head, rows):
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "|".join(" --- " for _ in head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def cell(score):
    return f"{score:.2f}"


def needle(rows, **match):
    """Scores by length of the rows that match, in the order of lengths; None where there are none."""
    found = {r["context"]: r for r in rows if r["task"] == "needle" and all(r.get(k) == v for k, v in match.items())}
    return [found[n] for n in sorted(found)] or None


SELECTORS = ("nll", "drop", "greedy", "backward", "lazy")


def nll_main(data):
    """One row a selection: periodic by best and worst phase, random by mean of seeds."""
    rows = [r for r in data["rows"] if not r.get("explore")]
    lengths = sorted({r["context"] for r in rows if r["task"] == "needle"})
    blocks = []
    base = needle(rows, selector="full")
    for size, decode in ((128, "window"), (512, "window"), (128, "full"), (512, "full")):
        body = [["full", "30", *[cell(r["score"]) for r in base], cell(mean(base)), "1.00"]]
        for budget in (0.5, 0.25, 0.125):
            at = dict(window=size, decode=decode, budget=budget)
            shown = [(name, needle(rows, selector=name, **at)) for name in SELECTORS]
            periodic = {r["selector"]: needle(rows, selector=r["selector"], **at) for r in rows if "periodic" in r["selector"]}
            periodic = {k: v for k, v in periodic.items() if v}
            best, worst = max(periodic, key=lambda k: mean(periodic[k])), min(periodic, key=lambda k: mean(periodic[k]))
            shown += [(f"periodic, best phase ({best[-1]})", periodic[best]), ("periodic, worst phase", periodic[worst])]
            for name, cells in shown:
                scores = [cell(r["score"]) for r in cells]
                body.append([name, len(cells[0]["layers"]), *scores, cell(mean(cells)), cell(mean(cells) / mean(base))])
            seeds = [needle(rows, selector=f"random-{s}", **at) for s in range(5)]
            scores = [cell(sum(s[i]["score"] for s in seeds) / 5) for i in range(len(lengths))]
            share = sum(mean(s) for s in seeds) / 5
            body.append(["random, mean of 5", len(seeds[0][0]["layers"]), *scores, cell(share), cell(share / mean(base))])
        none = needle(rows, selector="all-window", window=size, decode=decode)
        body.append(["all-window", 0, *[cell(r["score"]) for r in none], cell(mean(none)), cell(mean(none) / mean(base))])
        title = f"**Window {size} + 4 sinks, decode {decode}**"
        blocks.append(f"{title}\n\n{table(['selection', 'layers', *lengths, 'mean', 'of full'], body)}")
    return "\n\n".join(blocks)


def mean(cells):
    return sum(r["score"] for r in cells) / len(cells)


def nll_explore(data):
    rows = [r for r in data["rows"] if r.get("explore")]
    base = needle(data["rows"], selector="full")
    body = []
    seen = sorted({(r["calibration"], r["unit"], r["selector"]) for r in rows})
    for calibration, unit, selector in seen:
        cells = needle(rows, calibration=calibration, unit=unit, selector=selector)
        body.append(
            [calibration, selector, *[cell(r["score"]) for r in cells], cell(mean(cells)), cell(mean(cells) / mean(base))]
        )
    main = [r for r in data["rows"] if not r.get("explore")]
    for selector in ("nll", "drop", "greedy"):
        cells = needle(main, selector=selector, window=128, decode="window", budget=0.25)
        body.append(["main", selector, *[cell(r["score"]) for r in cells], cell(mean(cells)), cell(mean(cells) / mean(base))])
    body.sort(key=lambda row: -float(row[-2]))
    return table(["calibration", "selector", *sorted({r["context"] for r in base}), "mean", "of full"], body)


def nll_cost(data):
    body = [
        [s["scorer"], s["prompts"], s["forwards_per_prompt"], f"{s['seconds']:.1f}"]
        for s in data["selection"]
        if s["name"].startswith("128-window") and s["name"].endswith("main-layer")
    ]
    return table(["scores", "prompts", "forward passes a prompt", "seconds on the H200"], body)


def nll_perplexity(data):
    body = []
    for size in (128, 512):
        for selector in ("full", "greedy", "drop", "nll", "all-window"):
            rows = [r for r in data["rows"] if r["task"] == "perplexity" and (r["selector"], r["window"]) == (selector, size)]
            whole = next(r for r in rows if r["positions"] == [0, r["context"]])
            last = max(rows, key=lambda r: r["positions"][0])
            body.append([size, selector, f"{whole['score']:.2f}", f"{last['score']:.2f}"])
    return table(["window", "selection", "perplexity, 4K tokens", "of the last bucket"], body)


def nll_layers(data):
    """The drop score with its standard error and how often a bootstrap keeps the layer at 1/4."""
    item = next(s for s in data["selection"] if s["name"] == "128-window-drop-main-layer")
    order = item["ranking"][:12]
    body = [[i, item["values"][i], item["standard_error"][i], f"{100 * item['stability'][i]:.0f} %"] for i in order]
    return table(["layer", "drop score, nats", "standard error", "kept by a bootstrap at 1/4"], body)


def demo(data):
    rows, body = data["rows"], []
    means = {r["selector"]: r["score"] for r in rows if r["task"] == "needle" and r["depth"] is None}
    periodic = {k: v for k, v in means.items() if k.startswith("periodic")}
    best, worst = max(periodic, key=periodic.get), min(periodic, key=periodic.get)
    for selector, name in (
        ("full", "full (the base)"), ("drop", "NLL-guided (drop)"), (best, f"{best}, the best phase"),
        (worst, f"{worst}, the worst"), ("all-window", "all-window"),
    ):  # fmt: skip
        mine = [r for r in rows if r["selector"] == selector]
        right = next(r for r in mine if r["task"] == "needle" and r["depth"] is None)
        loss = next(r for r in mine if r["task"] == "perplexity" and r["positions"] == [0, r["context"]])
        costs = [f"{100 * mine[0][k]:.0f} %" for k in ("cache_ratio", "prefill_ratio", "decode_ratio")]
        score = f"{right['score']:.2f} ({right['low']:.2f}–{right['high']:.2f})"
        body.append([name, mine[0]["kept"], score, f"{loss['score']:.2f}", *costs])
    text = table(["selection", "layers", "needle, 1K", "perplexity", "cache", "attention, prefill", "attention, decode"], body)
    phases = ", ".join(f"{name} {value:.0f} s" for name, value in data["seconds"].items())
    return f"{text}\n\n{phases}; {sum(data['seconds'].values()):.0f} s in all ({data['device']})."


def fresh(data):
    body = []
    for selector in ("full", "hybrid"):
        cells = needle(data["rows"], selector=selector, depth=None)
        body.append([selector, *[f"{r['score']:.2f} ({r['low']:.2f}–{r['high']:.2f})" for r in cells]])
    lengths = sorted({r["context"] for r in data["rows"] if r["task"] == "needle"})
    return table(["", *lengths], body)


def cache(data):
    body = [
        [r["context"], f"{r['base_bytes'] / 1e6:.1f} MB", f"{r['bytes'] / 1e6:.1f} MB", f"{100 * r['ratio']:.1f} %",
         "yes" if r["bytes"] == r["formula"] else "no"]
        for r in data["rows"]
    ]  # fmt: skip
    return table(["tokens", "base cache", "hybrid cache", "ratio", "equals plan.cache_bytes()"], body)


def agreement(data):
    body, names = [], list(dict.fromkeys(r["by"] for r in data["rows"]))
    for key in dict.fromkeys((r["dtype"], r["task"], r["metric"]) for r in data["rows"]):
        cells = {r["by"]: r for r in data["rows"] if (r["dtype"], r["task"], r["metric"]) == key}
        body.append([*key, *[f"{cells[n]['hits']} of {cells[n]['n']}" if n in cells else "–" for n in names]])
    return table(["dtype", "set", "metric", *names], body)


def interval(row, digits=3):
    return f"{row['score']:.{digits}f} ({row['low']:.{digits}f}–{row['high']:.{digits}f})"


def base_ruler(data):
    rows = [r for r in data["rows"] if r["context"] and r["depth"] is None and r["metric"] in ("score", "exact")]
    lengths, body = sorted({r["context"] for r in rows}), []
    for task in dict.fromkeys(r["task"] for r in rows):
        body.append([task, *[interval(r, 2) for n in lengths for r in rows if (r["task"], r["context"]) == (task, n)]])
    tasks = [[r["score"] for r in rows if r["metric"] == "score" and r["context"] == n] for n in lengths]
    body.append(["**RULER, mean of 11**", *[f"**{sum(scores) / len(scores):.3f}**" for scores in tasks]])
    return table(["task", *lengths], body)


def rtpurbo(data):
    """One row a plan: needles, RULER and perplexity, and what its index chose at the longest length."""
    rows = [r for r in data["rows"] if r["depth"] is None]
    lengths = sorted({r["context"] for r in rows if r["task"] == "needle"})
    heads = [(task, n) for task in dict.fromkeys(r["task"] for r in rows if r["task"] != "perplexity") for n in lengths]
    body = []
    for name in dict.fromkeys(r["selector"] for r in rows):
        mine = [r for r in rows if r["selector"] == name]
        found = [next(interval(r, 2) for r in mine if (r["task"], r["context"]) == head) for head in heads]
        whole = next(r for r in mine if r["task"] == "perplexity" and r["positions"] == [0, r["context"]])
        chose = (data["sparsity"].get(name) or [None])[-1]
        share = ["", ""] if chose is None else [f"{100 * chose[key]:.0f} %" for key in ("chosen", "captured")]
        pairs = f"{100 * (chose['pairs'] if chose else mine[0]['prefill_ratio']):.0f} %"
        body.append([name, *found, f"{whole['score']:.2f}", *share, pairs, f"{100 * mine[0]['cache_ratio']:.0f} %"])
    tasks = [f"{task.removeprefix('niah_')}, {n // 1024}K" for task, n in heads]
    return table(["what chooses", *tasks, "perplexity", "chosen", "captured", "pairs", "cache"], body)


def base_sets(data):
    body = []
    for row in data["rows"]:
        if row["context"] is None or (row["metric"] == "perplexity" and "positions" not in row):
            view = f"{row['context']} tokens at once" if row["context"] else ""
            body.append([row["task"], row["metric"], interval(row, 2 if "perplexity" in row["metric"] else 3), row["n"], view])
    return table(["set", "metric", "score", "n", ""], body)


def batches(data):
    body = [
        [r["plan"], r["dtype"], f"{r['same']} of {r['prompts']}", f"{r['same_choices']} of {r['choices']}"]
        for r in data["rows"]
    ]
    return table(["plan", "dtype", "whole answers alike", "single choices alike"], body)


def drift(data):
    body, names = [], [entry["name"] for entry in data["entries"]]
    for row in data["rows"]:
        if row["selector"] == "full" and row["task"].startswith("drift"):
            where = f"{row['positions'][0]}–{row['positions'][1]}" if "positions" in row else f"0–{row['context']}"
            key = ("task", "metric", "positions")
            cells = {r["selector"]: r for r in data["rows"] if all(r.get(k) == row.get(k) for k in key)}
            digits = 2 if row["metric"] == "perplexity" else 3
            body.append([row["task"], row["metric"], where, *[f"{cells[n]['score']:.{digits}f}" for n in names]])
    return table(["continuation", "metric", "new tokens", *names], body)


def speed(data, whats):
    body = []
    for r in data["rows"]:
        if r["what"] not in whats or (r["baseline"] == "window flex" and not r["variant"].startswith("window")):
            continue  # a full span against a window says nothing
        against = "–" if r["variant"] == r["baseline"] else f"{r['ratio']:.2f} x {r['baseline']}"
        value = f"{r['value']:,.0f}" if r["value"] >= 1000 else f"{r['value']:.3g}"
        value += f" {r['unit']}"
        if r["what"] == "batch_max":
            value += f", {r['tokens_per_second']:,.0f} tokens/s"
        shares = [f"{100 * r['of_limit']:.0f} %", f"{100 * r['spread']:.1f} %"]
        body.append([r["what"], r["variant"], f"{r['context']:,}", value, against, *shares])
    return table(["what", "variant", "tokens", "median", "against, in the same run", "of the limit", "spread"], body)


def scored(data):
    rows, body = data["rows"], []
    lengths = sorted({r["context"] for r in rows if r["task"] == "needle"})
    for entry in data["entries"]:
        mine = [r for r in rows if r["selector"] == entry["name"] and r["depth"] is None and r["task"] == "needle"]
        cells = {r["context"]: r for r in mine}
        worse = {n: " ▼" if r.get("p", 1.0) < 0.05 and r["difference"] < 0 else "" for n, r in cells.items()}
        seconds, tokens = entry["conversion"]["seconds"], entry["conversion"]["tokens"]
        cost = "–" if not seconds else f"{seconds:.0f} s, {tokens:,} tokens"
        needles = [interval(cells[n], 2) + worse[n] for n in lengths]
        body.append([entry["name"], f"{100 * mine[0]['cache_ratio']:.0f} %", *needles, cost])
    return table(["entry", f"cache at {data['match_at']}", *[f"needle, {n}" for n in lengths], "selection"], body)


def compared(data):
    rows, body = data["rows"], []
    lengths = sorted({r["context"] for r in rows if r["task"] == "ruler_average"})
    for entry in data["entries"]:
        mine = [r for r in rows if r["selector"] == entry["name"] and r["depth"] is None]
        first = mine[0]
        cells = [entry["name"], *[f"{100 * first[k]:.0f} %" for k in ("cache_ratio", "prefill_ratio")]]
        shown = [next(r for r in mine if r["task"] == "ruler_average" and r["context"] == n) for n in lengths]
        shown.append(next(r for r in mine if r["task"] == "choice_average"))
        for row in shown:
            worse = row.get("p", 1.0) < 0.05 and row["difference"] < 0
            cells.append(f"{interval(row)}{' ▼' if worse else ''}")
        cells.append(f"{next(r for r in mine if r['task'] == 'wikitext2_raw_test')['score']:.2f}")
        seconds, tokens = entry["conversion"]["seconds"], entry["conversion"]["tokens"]
        cells.append("–" if not seconds else f"{seconds:.0f} s, {tokens:,} tokens")
        body.append(cells)
    heads = ["entry", "cache", "prefill", *[f"RULER {n}" for n in lengths], "choice, mean acc", "WikiText-2", "selection"]
    return table(heads, body)


def needles(data):
    """Needles by length, perplexity where there is one, and the cache at the length of a comparison; a line a plan."""
    rows, body = data["rows"], []
    lengths = sorted({r["context"] for r in rows if r["task"] == "needle"})
    whole = [r for r in rows if r["task"] == "perplexity" and r["positions"] == [0, r["context"]]]
    for name in dict.fromkeys(r["selector"] for r in rows):
        cells = {r["context"]: r for r in rows if r["selector"] == name and r["task"] == "needle" and r["depth"] is None}
        shown = [interval(cells[n], 2) if n in cells else "–" for n in lengths]
        shown += [f"{r['score']:.2f}" for r in whole if r["selector"] == name]
        body.append([name, *shown, f"{100 * next(iter(cells.values()))['cache_ratio']:.1f} %"])
    heads = [f"needle, {n:,}" for n in lengths] + (["perplexity"] if whole else [])
    return table(["", *heads, f"cache at {data.get('match_at', lengths[-1]):,}"], body)


def gates(data):
    """The twelve gates that ended highest, with their place among NLL-guided's greedy picks (window 128, 64 prompts)."""
    path = data["training"]["selection"]["gates"]
    last, mean = path[-1], [sum(step[i][0] for step in path) / len(path) for i in range(len(path[-1]))]
    order = sorted(range(len(last)), key=lambda i: (-last[i][0], -mean[i]))
    scores = load("nll_smollm2")["selection"]
    greedy = next(s["ranking"] for s in scores if s["name"] == "128-window-greedy-main-layer")
    kept = sorted(order[: round(0.2667 * len(last))])
    body = [[i, f"{last[i][0]:.3f}", f"{mean[i]:.3f}", "yes" if i in kept else "", greedy.index(i) + 1] for i in order[:12]]
    return table(["layer", "gate, last step", "gate, mean", "stays full", "place among greedy's picks"], body)


def cache_igal(data):
    body = []
    for r in data["rows"]:
        assert r["bytes"] == r["formula"] and r["base_bytes"] == r["base_formula"], r
        held = f"{r['bytes'] / 2**20:.1f} MiB of {r['base_bytes'] / 2**30:.1f} GiB"
        body.append(
            [r["variant"], str(r["features"]), f"{r['window']} + 4", f"{r['context']:,}", held, f"{r['smaller']:.0f} x"]
        )
    return table(["groups", "features", "window + sinks", "tokens", "cache held", "smaller"], body)


TABLES = {
    "docs/evaluation.md": {
        "agreement": (agreement, "lm_eval_agreement"),
        "compared": (compared, "compare_smollm2"),
        "base-ruler": (base_ruler, "base_smollm2"),
        "base-sets": (base_sets, "base_smollm2"),
        "batches": (batches, "batch_agreement"),
        "batches-h200": (batches, "batch_agreement_h200"),
        "drift": (drift, "drift_smollm2"),
    },
    "docs/flashmorph.md": {
        "flashmorph-gates": (gates, "flashmorph_cpu_gates"),
        "flashmorph-cpu": (needles, "flashmorph_cpu_compared"),
    },
    "docs/igal.md": {
        "cache-igal": (cache_igal, "cache_igal"),
        "igal-cpu": (needles, "igal_cpu_smollm2"),
        "igal-cpu-window": (needles, "igal_cpu_all_window"),
        "igal-cpu-long": (needles, "igal_cpu_long"),
        "igal-cpu-multikey": (needles, "igal_cpu_multikey"),
        "igal-cpu-unseen": (needles, "igal_cpu_unseen"),
    },
    "docs/rtpurbo.md": {"rtpurbo-cpu": (rtpurbo, "rtpurbo_cpu_smollm2")},
    "docs/nll.md": {
        "nll-main": (nll_main, "nll_smollm2"),
        "nll-explore": (nll_explore, "nll_smollm2"),
        "nll-cost": (nll_cost, "nll_smollm2"),
        "nll-perplexity": (nll_perplexity, "nll_smollm2"),
        "nll-layers": (nll_layers, "nll_smollm2"),
        "fresh": (fresh, "fresh_smollm2"),
        "cache": (cache, "cache_smollm2"),
    },
    "docs/scores.md": {f"scores-{n}": (scored, f"scores_smollm2_{n}") for n in (15, 25, 50)},
    "docs/speed.md": {
        mark: (partial(speed, whats=whats), "speed_window_h200")
        for mark, whats in {
            "attention": ("kernel_forward", "kernel_backward", "kernel_decode"),
            "prefill": ("prefill",),
            "decode": ("decode",),
            "rows": ("decode_ragged", "batch_max"),
        }.items()
    },
    "README.md": {"demo": (demo, "demo_smollm2")},
}


def main():
    stale = []
    for name, tables in TABLES.items():
        path = ROOT / name
        text = made = path.read_text()
        for mark, (make, source) in tables.items():
            start, end = f"<!-- {mark}: from results/{source}.json -->\n", "<!-- end -->"
            before, found, rest = made.partition(start)
            if not found:
                raise SystemExit(f"{name}: no marker {start.strip()}")
            made = before + start + make(load(source)) + "\n" + end + rest.partition(end)[2]
        if made != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(made)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"not what results/ say: {', '.join(stale)}; run python scripts/tables.py")


if __name__ == "__main__":
    main()
