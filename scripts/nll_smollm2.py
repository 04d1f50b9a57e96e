"""NLL-guided selection against every control on SmolLM2-135M: selection, evaluation, collection.

    python scripts/nll_smollm2.py check    --state S           # operators against the CPU reference, throughput
    python scripts/nll_smollm2.py select   --state S           # scores for every window and decode mode
    python scripts/nll_smollm2.py explore  --state S           # what lifts selection: calibration, groups, stepwise
    python scripts/nll_smollm2.py evaluate --state S           # 100 prompts a cell, teacher-forced argmax
    python scripts/nll_smollm2.py perplexity --state S         # of full, all-window and the selections at 1/4
    python scripts/nll_smollm2.py generate --state S           # the headline again, by generating
    python scripts/nll_smollm2.py collect  --state S --out results/nll_smollm2.json

Every finished piece is a file in S, so a stopped run goes on where it was. `--small` runs the same on a CPU in minutes.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import hybridize as hz
from hybridize.answers import batches, run_answers
from hybridize.data.needles import CALIBRATION_KINDS, needle_prompts
from hybridize.data.text import bundled_text
from hybridize.evaluation.perplexity import position_cells
from hybridize.evaluation.retrieval import retrieval_cells, retrieval_hits
from hybridize.files import read_json, write_json
from hybridize.loading import load
from hybridize.methods.nll import control_plans, plan_from_scores
from hybridize.results import device_name, quality_row, results, versions, write_results
from hybridize.scoring.scorers import score

SINKS = 4
SCORERS = ["nll", "drop", "greedy", "backward", "lazy"]
BUDGETS = (0.125, 0.25, 0.5)
CALIBRATION_SEED, TEST_SEED = 1, 2


class Experiment:
    def __init__(self, args):
        self.args, self.state = args, Path(args.state)
        self.state.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        gpu = torch.cuda.is_available()
        self.tokens = 131072 if gpu else 4096
        loaded = load(args.model, dtype="bfloat16", device_map="cuda" if gpu else None)
        self.base, self.tokenizer = loaded.model, loaded.tokenizer
        self.full = hz.AttentionPlan.base(hz.geometry_of(self.base.config))
        self.model = hz.convert(self.base, self.full)
        self.lengths = [1024] if args.small else [1024, 2048, 4096, 8192]
        self.count = 4 if args.small else 100
        self.made = {}
        self.modes = [(size, decode) for decode in ("window", "full") for size in (128, 512)]

    def time_left(self):
        return self.args.seconds - (time.time() - self.started)

    def once(self, name, make):
        """The piece `name` from its file, or made now and written."""
        path = self.state / f"{name}.json"
        if not path.exists():
            if self.time_left() < 0:
                raise SystemExit(f"time is up before {name}; run again to go on")
            start = time.time()
            data = make()
            write_json(path, {"seconds": time.time() - start, "data": data})
            print(f"{name}: {time.time() - start:.1f} s", flush=True)
        return read_json(path)

    def prompts(self, count, lengths, kinds, seed, part):
        key = (count, tuple(lengths), tuple(kinds), seed, part)
        if key not in self.made:
            text, made = bundled_text(part), []
            for length in lengths:
                made += needle_prompts(self.tokenizer, text, length=length, count=count, kinds=kinds, seed=seed)
            self.made[key] = made
        return self.made[key]

    def calibration(self, name="main"):
        few = 2 if self.args.small else None
        choices = {
            "main": (few or 32, [1024, 2048], CALIBRATION_KINDS),  # 64 prompts
            "number-1k": (few or 64, [1024], ["number"]),
            "number-2k": (few or 64, [2048], ["number"]),
            "kinds-1k": (few or 64, [1024], CALIBRATION_KINDS),
            "long": (few or 8, [1024, 2048, 4096, 8192], CALIBRATION_KINDS),
            "few-1k": (few or 16, [1024], ["number"]),
            "multikey": (few or 32, [1024, 2048], ["multikey"]),
            "short": (few or 64, [128 + SINKS], ["number", "words", "code", "friend"]),
        }
        count, lengths, kinds = choices[name]
        return self.prompts(count, lengths, kinds, CALIBRATION_SEED, "calibration")

    def scores(self, size, decode, selector, calibration="main", unit="layer", budget=None):
        window = hz.Window(size, SINKS, decode=decode)
        if budget is None:
            budget = {"greedy": 0.5, "backward": 0.125}.get(selector, 0.25)

        def make():
            prompts = self.calibration(calibration)
            tokens = self.tokens // 2
            made = score(self.model, prompts, window, selector, budget=budget, unit=unit, batch_tokens=tokens)
            return made.to_dict()

        piece = self.once(f"scores-{size}-{decode}-{selector}-{calibration}-{unit}", make)
        return hz.Scores.from_dict(piece["data"])

    def plan(self, scores, size, decode, budget):
        return plan_from_scores(scores, self.full, hz.Window(size, SINKS, decode=decode), budget)

    def evaluate(self, name, plan, lengths=None, count=None, kinds=("number",)):
        def make():
            prompts = self.prompts(count or self.count, lengths or self.lengths, kinds, TEST_SEED, "evaluation")
            with self.model.temporary_plan(plan):
                hits = retrieval_hits(self.model, prompts, batch_tokens=self.tokens)
            return {
                "rows": [cell.row() for cell in retrieval_cells(prompts, hits)],
                "layers": plan.kept_layers,
                "groups": len(plan.kept_groups),
            }

        return self.once(f"eval-{name}", make)["data"]


def check(x):
    """The device's operators against the CPU in fp32, then tokens a second."""
    prompts = x.prompts(1, [1024], ["number"], 3, "evaluation")
    cpu = load(x.args.model, dtype="float32")
    hybrid = hz.convert(cpu.model, x.full)
    for spec in (hz.Full(), hz.Window(128, 4), hz.Window(128, 4, sink_positions="rebased"), hz.Window(128, 4, decode="full")):
        plan = hz.AttentionPlan.from_groups(x.full.geometry, [(i, 1) for i in range(x.full.geometry.layers)], spec)
        hybrid.set_plan(plan)
        x.model.set_plan(plan)
        (here,), (there,) = (list(batches(prompts, 4096, m.device)) for m in (x.model, hybrid))
        a, b = run_answers(x.model, here).cpu(), run_answers(hybrid, there)
        print(spec.label(), "bf16 device against fp32 CPU:", float((a - b).norm() / b.norm()), flush=True)
    for length in (x.lengths[0], x.lengths[-1]):
        prompts = x.prompts(max(1, x.tokens // length), [length], ["number"], 3, "evaluation")
        for name, plan in (("full", x.full), ("window", hz.AttentionPlan.from_layers(x.full.geometry, [], hz.Window(128, 4)))):
            x.model.set_plan(plan)
            retrieval_hits(x.model, prompts, batch_tokens=x.tokens)
            start = time.time()
            retrieval_hits(x.model, prompts, batch_tokens=x.tokens)
            print(f"{length} {name}: {len(prompts) * length / (time.time() - start):,.0f} tokens/s", flush=True)
    x.model.set_plan(x.full)


def select(x):
    for size, decode in x.modes:
        for selector in SCORERS:
            x.scores(size, decode, selector)
    x.scores(128, "window", "nll", "short")


def evaluate(x):
    x.evaluate("full", x.full)
    for size, decode in x.modes:
        window = hz.Window(size, SINKS, decode=decode)
        for budget in BUDGETS:
            plans = {k: p for k, p in control_plans(x.full, window, budget).items() if k != "full"}
            for selector in SCORERS:
                plans[selector] = x.plan(x.scores(size, decode, selector), size, decode, budget)
            for selector, plan in plans.items():
                share = "0" if selector == "all-window" else budget
                x.evaluate(f"{size}-{decode}-{share}-{selector}", plan)


def explore(x):
    """At 1/4, window 128, decode window: which calibration and unit give the best selection."""
    for calibration in ("long", "number-1k", "kinds-1k", "multikey", "number-2k"):
        for selector in ("nll", "drop", "greedy"):
            scores = x.scores(128, "window", selector, calibration, budget=0.25)
            x.evaluate(f"explore-{selector}-{calibration}-layer", x.plan(scores, 128, "window", 0.25))
    for selector in ("nll", "drop"):
        scores = x.scores(128, "window", selector, unit="group")
        x.evaluate(f"explore-{selector}-main-group", x.plan(scores, 128, "window", 0.25))
    scores = x.scores(128, "window", "greedy", "few-1k", unit="group", budget=0.25)
    x.evaluate("explore-greedy-few-1k-group", x.plan(scores, 128, "window", 0.25))


def perplexity(x):
    """On the evaluation text; decode="full" prefills like decode="window", so one of them is enough."""
    for size in (128, 512):
        window = hz.Window(size, SINKS)
        plans = {"full": x.full, "all-window": control_plans(x.full, window, 0.25)["all-window"]}
        plans |= {name: x.plan(x.scores(size, "window", name), size, "window", 0.25) for name in ("nll", "drop", "greedy")}
        for name, plan in plans.items():

            def make(plan=plan):
                with x.model.temporary_plan(plan):
                    length, windows = (1024, 2) if x.args.small else (4096, 16)
                    text = [bundled_text("evaluation")]
                    cells = position_cells(x.model, x.tokenizer, text, length=length, windows=windows)
                    return [cell.row() for cell in cells]

            x.once(f"ppl-{size}-{name}", make)


def generate(x):
    """Teacher-forced argmax against greedy exact match, prompt by prompt, at 1/4."""
    for decode in ("window", "full"):
        plan = x.plan(x.scores(128, decode, "backward"), 128, decode, 0.25)

        def make(plan=plan):
            prompts = x.prompts(8 if x.args.small else 10, x.lengths, ["number"], TEST_SEED, "evaluation")
            with x.model.temporary_plan(plan):
                argmax = retrieval_hits(x.model, prompts, batch_tokens=x.tokens)
                generated = retrieval_hits(x.model, prompts, method="generate")
            same = sum(a == b for a, b in zip(argmax, generated, strict=True))
            return {"n": len(prompts), "same": same, "argmax": sum(argmax), "generate": sum(generated)}

        print(decode, x.once(f"generate-{decode}", make)["data"])


def collect(x):
    rows, extra = [], {"calibration": {}, "generate": {}, "selection": []}
    for path in sorted(x.state.glob("eval-*.json")):
        name, data = path.stem[5:], json.loads(path.read_text())["data"]
        parts = name.split("-", 3)
        if name == "full":
            head = dict(method="base", selector="full", operators="full", budget=1.0, window=None, sinks=None, decode="full")
        elif parts[0] == "explore":
            _, selector, rest = name.split("-", 2)
            calibration, unit = rest.rsplit("-", 1)
            head = dict(selector=selector, operators="full,window", budget=0.25, window=128, sinks=SINKS, decode="window")
            head |= dict(calibration=calibration, unit=unit, explore=True)
        else:
            size, decode, budget, selector = parts
            operators = "window" if budget == "0" else "full,window"
            head = dict(selector=selector, operators=operators, budget=float(budget), window=int(size), sinks=SINKS)
            head |= dict(decode=decode)
        for cell in data["rows"]:
            if cell["depth"] is None:
                rows.append(quality_row(**head, seed=TEST_SEED, layers=data["layers"], groups=data["groups"], **cell))
    for path in sorted(x.state.glob("ppl-*.json")):
        _, size, selector = path.stem.split("-", 2)
        head = dict(selector=selector, operators="full,window", budget={"full": 1.0, "all-window": 0.0}.get(selector, 0.25))
        head |= dict(window=int(size), sinks=SINKS, decode="window", seed=TEST_SEED)
        rows += [quality_row(**head, **cell) for cell in json.loads(path.read_text())["data"]]
    for path in sorted(x.state.glob("scores-*.json")):
        piece = json.loads(path.read_text())
        scores = hz.Scores.from_dict(piece["data"])
        item = {"name": path.stem[7:], "seconds": round(piece["seconds"], 2), **scores.provenance, "ranking": scores.ranking()}
        item["values"] = [round(float(v), 4) for v in scores.values.ravel()]
        item["standard_error"] = [round(float(v), 4) for v in scores.standard_error.ravel()]
        if scores.unit == "layer" and scores.order is None:
            item["stability"] = [round(float(v), 3) for v in scores.stability(0.25)]
        extra["selection"].append(item)
    short, long = (x.state / f"scores-128-window-nll-{name}-layer.json" for name in ("short", "main"))
    if short.exists() and long.exists():
        pair = [hz.Scores.from_dict(json.loads(p.read_text())["data"]) for p in (short, long)]
        extra["short_prompt_spearman"] = round(pair[0].spearman(pair[1]), 3)
    for path in sorted(x.state.glob("generate-*.json")):
        extra["generate"][path.stem[9:]] = json.loads(path.read_text())["data"]
    seeds = {"calibration": CALIBRATION_SEED, "test": TEST_SEED}
    data = results("nll_smollm2", rows, command="python scripts/nll_smollm2.py (all steps)", seeds=seeds, **extra)
    if (x.state / "where.json").exists():
        data |= json.loads((x.state / "where.json").read_text())
    write_results(x.args.out, data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {f.__name__: f for f in (check, select, evaluate, perplexity, generate, explore, collect)}
    parser.add_argument("steps", nargs="+", choices=steps)
    parser.add_argument("--state", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", default="results/nll_smollm2.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new piece after this long")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    experiment = Experiment(args)
    if args.steps != ["collect"]:
        write_json(experiment.state / "where.json", {"device": device_name(), "versions": versions()})
    for step in args.steps:
        start = time.time()
        steps[step](experiment)
        print(f"== {step}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
