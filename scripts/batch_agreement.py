"""Are answers in a left-padded batch of 16 those that each prompt gets alone?

    python scripts/batch_agreement.py --dtype float32 bfloat16 --out results/batch_agreement.json

Prompts are RULER's, of unequal length; answers are greedy, of transformers' own model, of ours under the full plan, and of a
hybrid.
"""

import argparse
import itertools
from pathlib import Path

import torch

import hybridize as hz
from hybridize.answers import left_pad
from hybridize.data.ruler import ruler_prompts
from hybridize.data.ruler_tasks import TASKS
from hybridize.data.text import bundled_text
from hybridize.loading import load
from hybridize.results import results, write_results


def answers(model, tokenizer, rows, tokens):
    ids, mask = left_pad(rows, model.device)
    end = tokenizer.eos_token_id
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=end)
    found = out[:, ids.shape[1] :].tolist()
    return [row[: row.index(end)] if end in row else row for row in found]


def agreement(together, alone):
    """Whole answers alike, and single choices: a choice is only compared where all before it were alike."""
    common = [sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b))) for a, b in zip(together, alone)]
    parted = [a != b for a, b in zip(together, alone)]
    return dict(same=parted.count(False), choices=sum(common) + sum(parted), same_choices=sum(common))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--plan", default="results/plans/smollm2_greedy_long.json")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", default="results/batch_agreement.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else None
    rows = []
    for dtype in args.dtype:
        loaded = load(args.model, dtype=dtype, device_map=device)
        tasks = itertools.cycle([name for name in TASKS if name != "cwe"])
        lengths = [700 + (args.longest - 700) * i // max(1, args.prompts - 1) for i in range(args.prompts)]
        prompts = [
            next(ruler_prompts(loaded.tokenizer, task, bundled_text("evaluation"), length=n, count=1, seed=5)).ids
            for task, n in zip(tasks, lengths)
        ]
        base = hz.AttentionPlan.base(hz.geometry_of(loaded.model.config))
        hybrid = hz.convert(loaded.model, base)
        for name, plan in (
            ("stock transformers", None),
            ("full", base),
            (Path(args.plan).stem, hz.AttentionPlan.load(args.plan)),
        ):
            model = loaded.model if plan is None else hybrid
            if plan is not None:
                hybrid.set_plan(plan)
            together = []
            for first in range(0, len(prompts), 16):
                together += answers(model, loaded.tokenizer, prompts[first : first + 16], args.tokens)
            alone = [answers(model, loaded.tokenizer, [prompt], args.tokens)[0] for prompt in prompts]
            rows.append(dict(plan=name, dtype=dtype, prompts=len(prompts)) | agreement(together, alone))
            print(rows[-1], flush=True)
    write_results(args.out, results("batch_agreement", rows, longest=args.longest, new_tokens=args.tokens, seed=5))


if __name__ == "__main__":
    main()
