"""RTPurbo on SmolLM2-135M: one ratio of heads, one window, an index trained once, against all that may choose instead.

    python scripts/rtpurbo_smollm2.py --out RUN --ratio 0.15 --window 1024 --lengths 1024,2048,4096,8192 --text books.jsonl

Writes RUN/rtpurbo.json (rows of the results format, and what was chosen: "sparsity"). A killed run goes on where it was.
Top-k, page bounds and random scores choose as many tokens as the index did on average at the longest length.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from hybridize.data.ruler_tasks import TASKS
from hybridize.evaluation.suite import Proof, measures
from hybridize.files import write_json
from hybridize.indexing import index, sparsity_rows, with_trained
from hybridize.loading import load
from hybridize.methods import rtpurbo
from hybridize.operators.specs import Indexed
from hybridize.plan import AttentionPlan
from hybridize.results import results
from hybridize.runs import RunFolder, quiet_libraries
from hybridize.training.recipe import recipes_from_text
from hybridize.workflows import Selection, compute_scores, hybrid_of, prove

SELECTED = ("oracle", "dense", "top-k", "pages", "random")
HEADS = ("lowest", "random-heads-0")  # other heads, dense


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--dense-below", type=int, default=512)
    parser.add_argument("--top-p", default="0.9,0.8,0.95", help="the first one gives the number of tokens of the controls")
    parser.add_argument("--controls", default=",".join((*SELECTED, *HEADS, "all-window")))
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--perplexity-windows", type=int, default=16)
    parser.add_argument("--ruler", default="", help="tasks, comma-separated, or 'one': those with one right answer")
    parser.add_argument("--choice", nargs="*", default=[])
    parser.add_argument("--train", default="", help="stage.key=value,... as `convert --train`")
    parser.add_argument("--text", default="calibration")
    parser.add_argument("--batch-tokens", type=int, default=131072 if torch.cuda.is_available() else 4096)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def proof_of(args):
    tasks = (
        tuple(task for task in TASKS if TASKS[task].one) if args.ruler == "one" else tuple(filter(None, args.ruler.split(",")))
    )
    return Proof(
        prompts=args.prompts,
        lengths=tuple(map(int, args.lengths.split(","))),
        kinds=("number",),
        perplexity_windows=args.perplexity_windows,
        batch_tokens=args.batch_tokens,
        ruler=tasks,
        ruler_method="argmax" if tasks else "generate",
        choice=tuple(args.choice),
    )


def main():
    args = arguments()
    proof, levels = proof_of(args), [float(p) for p in args.top_p.split(",")]
    controls = args.controls.split(",")
    if unknown := set(controls) - {*SELECTED, *HEADS, "all-window"}:
        raise SystemExit(f"--controls: got {sorted(unknown)}")
    recipes = recipes_from_text(args.train, rtpurbo.STAGES)
    config = {name: value for name, value in vars(args).items() if name not in ("out", "overwrite", "choice")}
    run = RunFolder(args.out, {"script": "rtpurbo_smollm2", **config}, args.overwrite)
    with quiet_libraries():
        loaded = load("smollm2", dtype=args.dtype, device_map="cuda" if torch.cuda.is_available() else None)
        model = hybrid_of(loaded)
        base = AttentionPlan.base(model.plan.geometry)
        ask = Selection(
            "echo", args.ratio, args.window, unit="head", prompts=8, lengths=(1024,), batch_tokens=args.batch_tokens
        )
        scores = compute_scores(run, loaded, model, ask)
        todo = measures(loaded.tokenizer, proof, run.step)
        prove(run, loaded, model, {"full": base}, proof, asked=todo)  # before weights change
        spec = Indexed(top_p=levels[0], block=args.block, dense_below=args.dense_below, window=args.window)
        with model.holding_branches():
            plan = rtpurbo.rtpurbo_plan(scores, base, spec, args.ratio)
            trained = index(run, loaded, model, plan, recipes, args.text)
            names, sparse = {}, {}
            for p in levels:
                names[f"top-p {p:g}"] = rtpurbo.rtpurbo_plan(scores, base, replace(spec, top_p=p), args.ratio)
            model.set_plan(plan)
            first = sparsity_rows(run, loaded, model, proof, step="sparsity-first")
            count = max(args.block, round(first[-1]["tokens"] / args.block) * args.block)
            for control in filter(controls.__contains__, SELECTED):
                fixed = replace(spec, max_tokens=0 if control in ("oracle", "dense") else count)
                names[control] = rtpurbo.rtpurbo_plan(scores, base, fixed, args.ratio, control)
            for control in filter(controls.__contains__, HEADS):
                dense = replace(spec, select="all")
                names[f"{control}, dense"] = rtpurbo.rtpurbo_plan(scores, base, dense, args.ratio, control)
            if "all-window" in controls:
                names["all-window"] = rtpurbo.rtpurbo_plan(None, base, spec, args.ratio, "all-window")
            names = {name: with_trained(each, trained) for name, each in names.items()}
            rows = prove(run, loaded, model, {"full": base, **names}, proof, asked=todo)
            for name, each in names.items():
                with model.temporary_plan(each):
                    sparse[name] = sparsity_rows(run, loaded, model, proof, step=f"sparsity-{name}")
    for row in rows:
        row |= {"ratio": args.ratio, "tokens": count, "heads_window": args.window}
    run.begin()
    facts = {"sparsity": sparse, "training": trained, "asked": config | {"choice": [Path(x).name for x in args.choice]}}
    facts |= {"scores": scores.values.round(5).tolist(), "prove": proof.as_config()}
    write_json(run.path / "rtpurbo.json", results("rtpurbo_smollm2", rows, seconds=dict(run.seconds), **facts, **run.where))
    print(run.finish())


if __name__ == "__main__":
    main()
