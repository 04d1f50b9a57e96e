"""Cache bytes really allocated at Llama-3.1-8B's attention shape, IGAL's plan against the base, in one run.

    python scripts/cache_igal.py --out results/cache_igal.json     # some minutes on 2 cores, 5 GiB

32 layers of 32 query heads and 8 KV heads of 128, between matrices that are tiny: a cache does not know them. The hybrid's
cache is filled by a real prefill in chunks, growing; the base's is a static one of as many columns, in memory. bf16.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybridize as hz
from hybridize.benchmark.run import Bench
from hybridize.results import results, write_results

CHUNK = 2048
PLANS = (  # share of groups, linear attention, window
    (0.0625, "dim=32", 64),
    (0.0625, "dim=16", 64),
    (0.0625, "dim=32", 128),
    (0.125, "dim=32", 64),
    (0.25, "dim=32", 64),
)


def model_of_shape():
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(config))).eval()


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/cache_igal.json")
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, rows = model_of_shape(), []
    full = model.new_cache(args.context)
    model(torch.zeros(1, 1, dtype=torch.long), past_key_values=full)
    theirs = full.bytes()
    del full
    ids = torch.randint(2, 64, (1, args.context))
    for budget, linear, window in PLANS:
        name, plan = Bench(budget=budget, linear=linear, window=window).hybrid(model.plan.geometry)
        model.set_plan(plan)
        cache = model.new_cache()
        for first in range(0, args.context, CHUNK):
            model.model(ids[:, first : first + CHUNK], past_key_values=cache)
        row = dict(what="cache_bytes", variant=name, linear=linear, features=plan.operators["linear"].width, window=window)
        row |= dict(context=args.context, batch=1, base_bytes=theirs, bytes=cache.bytes(), smaller=theirs / cache.bytes())
        rows.append(row | dict(formula=plan.cache_bytes(args.context), base_formula=hz.AttentionPlan.base(plan.geometry)
                               .cache_bytes(args.context)))  # fmt: skip
        print(rows[-1], flush=True)
    write_results(args.out, results("cache_igal", rows, shape="llama-3.1-8b, attention only", sinks=4))


if __name__ == "__main__":
    main()
