"""Block shapes of the window kernels, timed on this machine's GPU: what kernels/window.py's launch_shape chooses from.

    python scripts/tune_window.py --kernels forward dq dkv --context 131072 --out results/tune_window.json

Each shape must give what the shape in use gives. One kernel at a time, inputs in turns.
"""

import argparse
import itertools

import torch
import triton

from hybridize.kernels import window
from hybridize.results import results, write_results

SHAPES = {  # (BLOCK_M, BLOCK_N), warps, stages
    "forward": [*itertools.product([(128, 64)], [4, 8], [2, 3, 4]), *itertools.product([(64, 64)], [4], [2, 3, 4]),
                *itertools.product([(128, 32)], [4, 8], [3, 4]), *itertools.product([(128, 128)], [8], [2, 3]),
                *itertools.product([(64, 128)], [4], [2, 3]), *itertools.product([(64, 32)], [4], [3]),
                *itertools.product([(256, 64)], [8], [2, 3])],
    "dq": [*itertools.product([(64, 64)], [4], [1, 2, 3]), *itertools.product([(128, 64)], [8], [1, 2, 3]),
           *itertools.product([(64, 32), (128, 32)], [4, 8], [2, 3]), *itertools.product([(64, 128)], [4, 8], [1, 2])],
    "dkv": [*itertools.product([(64, 64)], [4, 8], [1, 2, 3]), *itertools.product([(64, 128)], [8], [1, 2]),
            *itertools.product([(128, 64)], [8], [1, 2]), *itertools.product([(128, 128)], [8], [1, 2]),
            *itertools.product([(64, 32)], [4], [2, 3])],
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, so that another run only times")
    parser.add_argument("--out")
    args = parser.parse_args()
    (h, g, d), chosen, rows = args.heads, window.launch_shape, []
    t = 2048 if args.compile_only else args.context
    sets = [
        [torch.randn(1, t, n, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in (h, g, g)]
        for _ in "ab"
    ]
    positions = torch.arange(t, device="cuda")[None]

    def run(number):
        q, k, v = sets[number % 2]
        sinks = (x[:, :, :4] for x in (k, v))
        return window.window_attention(q, k, v, *sinks, positions, size=args.window, scale=d**-0.5)

    def both(number):
        out = run(number)
        return torch.autograd.grad(out, sets[number % 2], out.detach())

    def seconds(job, rounds):
        times = []
        for number in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            job(number)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times)[rounds // 2]

    for kernel in args.kernels:
        expected = [run(0).detach()] if kernel == "forward" else list(both(0))
        for (m, n), warps, stages in SHAPES[kernel]:
            block_t = m // triton.next_power_of_2(h // g)
            shape = dict(BLOCK_T=block_t, BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)
            window.launch_shape = lambda name, *a, s=shape, k=kernel: s if name == k else chosen(name, *a)
            job = run if kernel == "forward" else both
            try:
                found = [run(0).detach()] if kernel == "forward" else list(both(0))
                error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected))
                with torch.no_grad() if kernel == "forward" else torch.enable_grad():
                    ms = seconds(job, 2 if args.compile_only else 9)
                rows.append(dict(kernel=kernel, **shape, ms=ms, error=error))
            except Exception as failure:
                rows.append(dict(kernel=kernel, **shape, ms=None, error=f"{type(failure).__name__}: {failure}"[:120]))
            print(rows[-1], flush=True)
        window.launch_shape = chosen
    if args.out:
        write_results(args.out, results("tune_window", rows, context=t, heads=args.heads, window=args.window))


if __name__ == "__main__":
    main()
