"""Cache bytes really allocated on SmolLM2-135M, base against hybrid, in one run.

    python scripts/cache_smollm2.py --out results/cache_smollm2.json     # about two minutes on 2 cores

The hybrid keeps full attention in 8 of 30 layers, window 128 + 4 sinks in the rest. Bytes are sums over storages.
"""

import argparse

import torch

import hybridize as hz
from hybridize.loading import load
from hybridize.results import results, write_results

LAYERS = (0, 7, 15, 17, 18, 20, 22, 23)  # greedy at 1/4, results/nll_smollm2.json


def base_bytes(cache):
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/cache_smollm2.json")
    parser.add_argument("--contexts", default="1024,2048,4096,8192")
    args = parser.parse_args()
    base = load("smollm2").model
    plan = hz.AttentionPlan.from_layers(hz.geometry_of(base.config), LAYERS, hz.Window(128, 4))
    hybrid = hz.convert(base, plan)
    rows = []
    for context in map(int, args.contexts.split(",")):
        ids = torch.randint(3, 49000, (1, context), generator=torch.Generator().manual_seed(0))
        theirs = base_bytes(base.model(ids, use_cache=True).past_key_values)
        mine = hybrid.new_cache()
        hybrid.model(ids, past_key_values=mine)
        row = dict(what="cache_bytes", context=context, batch=1, base_bytes=theirs, bytes=mine.bytes())
        rows.append(row | dict(formula=plan.cache_bytes(context), ratio=mine.bytes() / theirs))
        print(rows[-1], flush=True)
    write_results(args.out, results("cache_smollm2", rows, layers=LAYERS, window=128, sinks=4))


if __name__ == "__main__":
    main()
