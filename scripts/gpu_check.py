"""Every kernel against the fp32 torch reference on this machine's GPU, in under 3 minutes; exit code 1 where one is wrong.

    python scripts/gpu_check.py --out results/gpu_check.json

Random shapes, odd lengths, GQA, padding, history, re-based sinks, poisoned outputs, offsets past 2^31 elements; three dtypes.
Index values are multiples of 1/8, so that scores are exact in any order and kernels must choose the reference's very blocks.
An error is the norm of the difference over the norm of the reference (or of values of 0.01, where that is less); RoPE and
what is written into a cache ("differ": the share of entries) must be the base's bits. On a CPU the same runs in Triton's
interpreter, fp32 and few cases only (set TRITON_INTERPRET=1).
"""

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybridize.kernels.decode import one_token_attention
from hybridize.kernels.dispatch import INDEX_BLOCKS
from hybridize.kernels.indexed import indexed_attention, indexed_token_attention
from hybridize.kernels.matvec import matvec
from hybridize.kernels.opened import open_attention
from hybridize.kernels.rotary import rotate
from hybridize.kernels.window import window_attention
from hybridize.operators.banded import banded_attention
from hybridize.operators.choosing import chosen
from hybridize.operators.contract import write_at
from hybridize.operators.dense import explicit_attention
from hybridize.operators.gated import open_first
from hybridize.operators.specs import Indexed
from hybridize.results import results, write_results

LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
REAL_EMPTY = torch.empty


def poisoned(*args, **kwargs):
    x = REAL_EMPTY(*args, **kwargs)
    return x.fill_(float("nan")) if x.is_floating_point() else x


def error(mine, reference):
    if mine.isnan().any():
        return float("inf")
    least = 0.01 * reference.numel() ** 0.5  # where one key is seen, the gradient of q is 0, and its norm is rounding
    return float((mine.float() - reference).norm() / reference.norm().clamp_min(least))


def differ(mine, expected):
    return float((mine != expected).float().mean())


def window_case(rng, dtype, d, r, sinks, rebased):
    """(description, errors of the output and of each gradient)."""
    b, g = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    t = rng.randint(1, 1500 if GPU else 90)
    size = rng.randint(1, 700 if GPU else 50)
    start = rng.choice([0, rng.randint(1, 900 if GPU else 60)])
    ragged = start == 0 and rng.random() < 0.4
    torch.manual_seed(rng.randrange(10**6))
    past = 0 if start == 0 else size - 1
    q, k, v = (torch.randn(b, heads, n, d, device=DEVICE) for heads, n in ((g * r, t), (g, past + t), (g, past + t)))
    sink_k, sink_v = (torch.randn(b, g, min(sinks, start + t), d, device=DEVICE) for _ in "kv")
    sinks = sink_k.shape[2]
    for column in range(sinks):  # a sink that is still in the chunk or its history is the same key
        at = column - start + past
        if 0 <= at < past + t:
            sink_k[:, :, column], sink_v[:, :, column] = k[:, :, at], v[:, :, at]
    positions = start + torch.arange(t, device=DEVICE)[None]
    q_sink = None
    if rebased:
        q_sink = torch.where((positions < size + sinks)[:, None, :, None], q, torch.randn_like(q))
    counts = torch.randint(0, t + 1, (b,), device=DEVICE) if ragged else None
    real = torch.ones(b, t, device=DEVICE) if counts is None else (positions < counts[:, None]).float()
    given = [x.to(dtype) for x in (q, k, v, sink_k, sink_v)] + ([] if q_sink is None else [q_sink.to(dtype)])
    weight = torch.randn(b, g * r, t, d, device=DEVICE).to(dtype).float() * real[:, None, :, None]
    found = []
    for function, leaves in ((window_attention, given), (banded_attention, [x.float() for x in given])):
        leaves = [x.clone().requires_grad_() for x in leaves]
        how = {"size": size, "scale": d**-0.5, "q_sink": leaves[5] if rebased else None}
        if function is window_attention:
            torch.empty, how["counts"] = poisoned, counts
        out = function(*leaves[:5], positions, **how)
        grads = [None] * len(leaves)
        if not (GPU and dtype is FP32):  # not run there either (kernels/dispatch.py)
            grads = torch.autograd.grad(out, leaves, weight.to(out.dtype), allow_unused=True)
        torch.empty = REAL_EMPTY
        grads = [torch.zeros_like(x) if y is None else y.float() for x, y in zip(leaves, grads)]
        for column in range(sinks):
            at = column - start + past
            if 0 <= at < past + t:  # one key, one gradient
                for full, own in ((1, 3), (2, 4)):
                    grads[full][:, :, at] += grads[own][:, :, column]
                    grads[own][:, :, column] = 0
        if rebased:
            near = (positions < size + sinks)[:, None, :, None]
            grads[0] = torch.where(near, grads[0] + grads[5], grads[0])
            grads[5] = torch.where(near, 0.0, grads[5])
        found.append([out.detach() * real[:, None, :, None], *grads])
    names = ["out", "dq", "dk", "dv", "dsink_k", "dsink_v", "dq_sink"]
    errors = {n: error(a, b.float()) for n, a, b in zip(names, *found) if b.numel() and b.abs().max() > 0}
    shape = dict(b=b, g=g, r=r, t=t, d=d, size=size, sinks=sinks, start=start, rebased=rebased, ragged=ragged)
    return shape, errors


def decode_case(rng, dtype, d, r, most, rebased):
    b = rng.choice([1, 2, 5])
    torch.manual_seed(rng.randrange(10**6))
    none, spans = torch.zeros(0, device=DEVICE), []
    for i in range(3):
        g, s, sinks = rng.choice([1, 2, 4]), rng.randint(1, 9000 if GPU else 300), most * (i > 0)
        k, v = (torch.randn(b, g, s, d, device=DEVICE).to(dtype) for _ in "kv")
        count = torch.randint(1, s + 1, (rng.choice([1, b]),), device=DEVICE)
        start = (count - rng.randint(1, 200)).clamp_min(0) if i == 1 else none.long()
        q_sink = torch.randn(b, g * r, 1, d, device=DEVICE).to(dtype) if rebased and i == 2 else none
        spans.append((k, v, count, start, q_sink, min(sinks, s)))
    q = torch.randn(b, r * sum(x[0].shape[1] for x in spans), 1, d, device=DEVICE).to(dtype)
    torch.empty = poisoned
    mine = one_token_attention(q, *[list(x) for x in zip(*spans)], [False] * len(spans), [], d**-0.5)
    torch.empty = REAL_EMPTY
    expected, first = [], 0
    for k, v, count, start, q_sink, sinks in spans:
        g, columns = k.shape[1], torch.arange(k.shape[2], device=DEVICE)[None]
        seen = columns < count.expand(b)[:, None]
        if start.numel():
            seen = seen & ((columns >= start.expand(b)[:, None]) | (columns < sinks))
        part = q[:, first : first + g * r].float().view(b, g, r, d)
        logits = part @ k.float().transpose(-1, -2)
        if q_sink.numel():
            other = q_sink.float().view(b, g, r, d) @ k.float().transpose(-1, -2)
            logits = torch.where(columns < sinks, other, logits)
        weights = (logits * d**-0.5).masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        expected.append((weights @ v.float()).view(b, g * r, 1, d))
        first += g * r
    return dict(b=b, r=r, d=d, spans=len(spans)), {"out": error(mine, torch.cat(expected, dim=1))}


def taken_case(rng, dtype, d, r, most, rebased):
    """A new token that the kernel rotates, writes into a growing span and a ring, and sees."""
    b, columns, size = rng.choice([1, 2, 5]), rng.randint(1, 9000 if GPU else 300), rng.randint(1, 600 if GPU else 40)
    torch.manual_seed(rng.randrange(10**6))
    counts = torch.randint(0, columns, (b,), device=DEVICE)
    spans, held, g = [], [], rng.choice([1, 2, 4])
    q, new_k, new_v = (torch.randn(b, n, 1, d, device=DEVICE).to(dtype) for n in (2 * g * r, 2 * g, 2 * g))
    angle = torch.randn(b, 1, d // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turned_q, turned_k = apply_rotary_pos_emb(q, new_k, cos, sin)
    none = torch.zeros(0, device=DEVICE)
    for i, (width, sinks, ring) in enumerate(((columns, 0, False), (most + size, most, True))):
        k, v = (torch.randn(b, g, width, d, device=DEVICE).to(dtype) for _ in "kv")
        spans.append((k.clone(), v.clone(), counts, none.long(), none, sinks, ring))
        slot = torch.where(counts < width, counts, sinks + (counts - sinks) % max(1, width - sinks))
        for x, token in ((k, turned_k), (v, new_v)):
            write_at(x, token[:, i * g : (i + 1) * g], slot)
        held.append((k, v, (counts + 1).clamp_max(width)))
    torch.empty = poisoned
    mine = one_token_attention(q, *[list(x) for x in zip(*spans)], [new_k, new_v, cos, sin], d**-0.5)
    torch.empty = REAL_EMPTY
    expected = []
    for i, (k, v, count) in enumerate(held):
        seen = torch.arange(k.shape[2], device=DEVICE) < count[:, None, None, None]
        part = turned_q[:, i * g * r : (i + 1) * g * r].float()
        expected.append(explicit_attention(part, k.float(), v.float(), seen, d**-0.5))
    written = max(differ(a, b) for x, y in zip(spans, held) for a, b in ((x[0], y[0]), (x[1], y[1])))
    errors = {"out": error(mine, torch.cat(expected, dim=1)), "differ": written}
    return dict(b=b, r=r, d=d, columns=columns, size=size), errors


def indexed_case(rng, dtype, d, r, most, rebased):
    """A chunk behind earlier tokens with its gradients, and its last token alone; some heads of the groups retrieve."""
    b, g, t = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.randint(1, 900 if GPU else 70)
    block, dim, top_p = rng.choice(INDEX_BLOCKS), rng.choice([8, 16, 32]), rng.choice([0.5, 0.8, 0.9, 0.95])
    start = rng.choice([0, rng.randint(1, 2000 if GPU else 90)])
    ragged = start == 0 and rng.random() < 0.4
    torch.manual_seed(rng.randrange(10**6))
    columns, spec = start + t, Indexed(top_p=top_p, block=block, sinks=most, dim=dim)
    which = torch.tensor(sorted(rng.sample(range(g * r), rng.randint(1, g * r))), device=DEVICE)
    leaves = [torch.randn(b, n, m, d, device=DEVICE).to(dtype) for n, m in ((g * r, t), (g, columns), (g, columns))]
    index_q, index_k = (torch.randint(-12, 13, (b, *x.shape[1:3], dim), device=DEVICE) / 8 for x in leaves[:2])
    starts, dense = torch.full((b,), start, device=DEVICE), torch.randint(0, columns + 1, (b,), device=DEVICE)
    counts = torch.randint(0, t + 1, (b,), device=DEVICE) if ragged else None
    positions, n = start + torch.arange(t, device=DEVICE)[None], torch.arange(columns, device=DEVICE)
    keys = index_k.repeat_interleave(r, dim=1)[:, which]
    seen = chosen(index_q[:, which] @ keys.transpose(-1, -2), positions, spec)
    seen = seen | ((n <= positions[..., None]) & (positions < dense[:, None])[..., None])[:, None]
    real = torch.ones(b, t, device=DEVICE) if counts is None else (positions < counts[:, None]).float()
    weight = torch.randn(b, len(which), t, d, device=DEVICE).to(dtype).float() * real[:, None, :, None]
    index_q, index_k, found = index_q.to(dtype), index_k.to(dtype), []
    for kernel in (True, False):
        q, k, v = given = [(x if kernel else x.float()).clone().requires_grad_() for x in leaves]
        if kernel:
            torch.empty = poisoned
            how = (which, starts, dense, block, most, top_p, d**-0.5)
            out = indexed_attention(*given, index_q, index_k, *how, counts=counts)
        else:
            # GQA by hand: heads that retrieve are any of a group's
            k, v = (x.repeat_interleave(r, dim=1)[:, which] for x in (k, v))
            out = explicit_attention(q[:, which], k, v, seen, d**-0.5)
        grads = []
        if not (GPU and dtype is FP32):
            grads = [x.float() for x in torch.autograd.grad(out, given, weight.to(out.dtype))]
        torch.empty = REAL_EMPTY
        found.append([out.detach() * real[:, None, :, None], *grads])
    errors = {name: error(x, y.float()) for name, x, y in zip(("out", "dq", "dk", "dv"), *found)}
    last = leaves[0][:, :, -1:], *leaves[1:], index_q[:, :, -1:], index_k
    torch.empty = poisoned
    token = indexed_token_attention(*last, which, starts + t - 1, dense, block, most, top_p, d**-0.5)
    torch.empty = REAL_EMPTY
    errors["token"] = error(token, out.detach()[:, :, -1:])
    facts = dict(b=b, g=g, r=r, t=t, d=d, start=start, block=block, dim=dim, top_p=top_p, heads=len(which), ragged=ragged)
    return facts | {"chosen": round(float(seen.float().mean()), 3)}, errors


def opened_case(rng, dtype, d, r, most, rebased):
    """Open queries of a chunk behind earlier tokens, in rows of their own number, with gradients."""
    b, g, t = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.randint(1, 1500 if GPU else 80)
    start, share = rng.choice([0, rng.randint(1, 2000 if GPU else 90)]), rng.choice([0.0, 0.2, 0.5, 1.0])
    torch.manual_seed(rng.randrange(10**6))
    is_open = torch.rand(b, t, device=DEVICE) < share
    index, counts = open_first(is_open, least=1), is_open.sum(1)
    n, at = index.shape[1], start + index
    real = (torch.arange(n, device=DEVICE) < counts[:, None])[:, None, :, None]
    leaves = [torch.randn(b, x, m, d, device=DEVICE).to(dtype) for x, m in ((g * r, n), (g, start + t), (g, start + t))]
    weight = torch.randn(b, g * r, n, d, device=DEVICE).to(dtype).float() * real
    seen, found = torch.arange(start + t, device=DEVICE) <= at[:, None, :, None], []
    for kernel in (True, False):
        given = [(x if kernel else x.float()).clone().requires_grad_() for x in leaves]
        torch.empty = poisoned if kernel else REAL_EMPTY
        out = open_attention(*given, at, counts, d**-0.5) if kernel else explicit_attention(*given, seen, d**-0.5) * real
        grads = []
        if not (GPU and dtype is FP32):
            grads = [x.float() for x in torch.autograd.grad(out, given, weight.to(out.dtype))]
        torch.empty = REAL_EMPTY
        found.append([out.detach(), *grads])
    errors = {name: error(x, y.float()) for name, x, y in zip(("out", "dq", "dk", "dv"), *found)}
    return dict(b=b, g=g, r=r, t=t, d=d, start=start, share=share), errors


def rotary_case(rng, dtype, d, r, most, rebased):
    b, g, t = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, rng.randint(2, 5000 if GPU else 60)])
    torch.manual_seed(rng.randrange(10**6))
    leaves = [torch.randn(b, t, n, d, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_() for n in (g * r, g)]
    angle = torch.randn(rng.choice([1, b]), t, d // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = [torch.randn_like(x) for x in leaves]
    torch.empty = poisoned
    mine = rotate(*leaves, cos, sin)
    mine = [*mine, *torch.autograd.grad(mine, leaves, weights)]
    torch.empty = REAL_EMPTY
    exact = [x.detach().float().requires_grad_() for x in leaves]
    theirs = apply_rotary_pos_emb(*exact, cos.float(), sin.float())
    theirs = [*theirs, *torch.autograd.grad(theirs, exact, [w.float() for w in weights])]
    errors = {n: error(x.detach(), y.detach()) for n, x, y in zip(("q", "k", "dq", "dk"), mine, theirs)}
    bits = apply_rotary_pos_emb(*leaves, cos, sin)
    return dict(b=b, g=g, r=r, t=t, d=d), errors | {"differ": max(differ(x, y) for x, y in zip(mine, bits))}


def matvec_case(rng, dtype, d, r, most, rebased):
    e, sizes = rng.randint(1, 15000 if GPU else 3000), [rng.randint(1, 3000 if GPU else 40) for _ in range(rng.randint(1, 3))]
    torch.manual_seed(rng.randrange(10**6))
    x, *weights = (torch.randn(n, e, device=DEVICE).to(dtype) for n in (1, *sizes))
    torch.empty = poisoned
    mine = matvec(x, weights)
    torch.empty = REAL_EMPTY
    return dict(e=e, rows=sizes), {"out": error(mine, x.float() @ torch.cat(weights).float().T)}


def far_offsets():
    """Tensors of more than 2^31 elements: the last tokens of the last head must be theirs."""
    t, h, d, size = (1 << 17) + 5, 130, 128, 64
    assert t * h * d > 1 << 31
    q, k, v = (torch.randn(1, t, h, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv")
    positions = torch.arange(t, device=DEVICE)[None]
    out = window_attention(q, k, v, k[:, :, :4], v[:, :, :4], positions, size=size, scale=d**-0.5)
    tail = slice(t - 200, t)
    n, j = positions[0, tail][:, None], torch.cat([torch.arange(4, device=DEVICE), torch.arange(t - 300, t, device=DEVICE)])
    seen = (j <= n) & ((n - j < size) | (j < 4))
    few = (x[:, -1:].index_select(2, j).float() for x in (k, v))
    expected = explicit_attention(q[:, -1:, tail].float(), *few, seen[None, None], d**-0.5)
    return dict(t=t, h=h, d=d), {"out": error(out[:, -1:, tail], expected)}


# a kernel is compiled once for each of these, then runs on many random shapes
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPU_KINDS = [  # dtype, head_dim, query heads a group, sinks at most, re-based
    (BF16, 128, 4, 4, False), (BF16, 128, 4, 4, True), (BF16, 128, 1, 0, False), (BF16, 128, 7, 20, False),
    (BF16, 64, 3, 4, False), (BF16, 64, 8, 4, True), (BF16, 96, 2, 1, False), (BF16, 256, 2, 4, False),
    (BF16, 256, 5, 0, True), (FP16, 128, 4, 4, False), (FP16, 64, 1, 20, False), (FP16, 96, 3, 4, True),
    (FP32, 64, 3, 4, False), (FP32, 128, 4, 4, True),
]  # fmt: skip
CPU_KINDS = [(FP32, 16, 2, 4, False), (FP32, 24, 3, 20, True), (FP32, 32, 1, 0, False)]


def check_kind(number, kind, cases, until):
    """Rows of one kind's random cases, of both kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rng, (dtype, *shape), rows = random.Random(number), kind, []
    for case in (window_case, decode_case, taken_case, indexed_case, opened_case, rotary_case, matvec_case) * cases:
        if time.time() > until:
            break
        facts, errors = case(rng, dtype, *shape)
        row = dict(kernel=case.__name__, dtype=str(dtype)[6:], **facts, errors=errors)
        rows.append(row | {"right": all(e <= (0 if name == "differ" else LIMIT[dtype]) for name, e in errors.items())})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8 if GPU else 1, help="of each kind and kernel")
    parser.add_argument("--seconds", type=float, default=140, help="start no new case after this long")
    parser.add_argument("--workers", type=int, default=7, help="processes, on a GPU: most of the time goes into compiling")
    parser.add_argument("--out")
    args = parser.parse_args()
    started, kinds = time.time(), GPU_KINDS if GPU else CPU_KINDS
    given = [(i, kind, args.cases, started + args.seconds) for i, kind in enumerate(kinds)]
    if GPU:
        with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
            parts = list(pool.map(check_kind, *zip(*given)))
    else:
        parts = [check_kind(*each) for each in given]
    rows = [row for part in parts for row in part]
    for row in rows:
        if not row["right"]:
            print("WRONG", row, flush=True)
    if GPU:
        shape, errors = far_offsets()
        rows.append(dict(kernel="far_offsets", dtype="bfloat16", **shape, errors=errors, right=errors["out"] <= 1e-2))
    worst = {}
    for row in rows:
        key = (row["kernel"], row["dtype"])
        worst[key] = max([worst.get(key, 0.0), *row["errors"].values()])
    for (kernel, dtype), value in worst.items():
        count = sum((row["kernel"], row["dtype"]) == (kernel, dtype) for row in rows)
        print(f"{kernel:12} {dtype:9} {count:4} cases, worst {value:.2e}")
    print(f"{sum(r['right'] for r in rows)} of {len(rows)} right, {time.time() - started:.0f} s")
    if args.out:
        write_results(args.out, results("gpu_check", rows))
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
