"""Triton kernels of indexed attention against the reference in Triton's interpreter; and all kernels, compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hybridize as hz
from conftest import make_base
from hybridize.kernels.dispatch import index_tile_fits
from hybridize.operators.choosing import WIDTH
from hybridize.operators.choosing import chosen as chosen_tokens
from hybridize.operators.dense import explicit_attention

pytest.importorskip("triton")
from hybridize.kernels import indexed
from hybridize.kernels.indexed import choose, indexed_attention, indexed_token_attention

pytestmark = pytest.mark.usefixtures("poison")
DEVICE = "cpu"  # scripts/gpu_check.py is the GPU's


INDEXED = {  # b, g, r, t, columns, starts, d, i, block, sinks, p, dense_until, heads that retrieve
    "one head": (1, 1, 1, 75, 75, [0], 16, 16, 16, 0, 0.9, [0], [0]),
    "a head of each group of three": (2, 2, 3, 100, 100, [0, 0], 16, 16, 16, 4, 0.8, [0, 0], [1, 3]),
    "all heads, some rows dense": (2, 1, 2, 70, 70, [0, 0], 24, 8, 16, 4, 0.7, [40, 0], [0, 1]),
    "rows of other lengths, memory to spare": (2, 2, 2, 40, 190, [120, 57], 16, 4, 16, 20, 0.6, [0, 70], [0, 2, 3]),
    "blocks of 32": (1, 2, 2, 150, 150, [0], 32, 16, 32, 2, 0.9, [0], [0, 3]),
    "an index wider than heads": (1, 1, 2, 65, 80, [15], 16, 40, 16, 4, 0.6, [0], [1]),
}


def indexed_case(case, scale=2.0):
    b, g, r, t, columns, starts, d, i, block, sinks, p, dense, which = INDEXED[case]
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(b, heads, n, d, generator=rng) for heads, n in ((g * r, t), (g, columns), (g, columns)))
    index_q = scale * torch.randn(b, g * r, t, i, generator=rng) / i**0.5
    index_k = torch.randn(b, g, columns, i, generator=rng)
    for row, start in enumerate(starts):  # columns that hold nothing yet
        for x in (k, v, index_k):
            x[row, :, start + t :] = float("nan")
    starts, dense, which = (torch.tensor(x) for x in (starts, dense, which))
    spec = hz.Indexed(top_p=p, dim=i, block=block, sinks=sinks)
    positions = starts[:, None] + torch.arange(t)
    scores = index_q[:, which] @ index_k.nan_to_num()[:, which // r].transpose(-1, -2)
    seen = torch.arange(columns) <= positions[:, None, :, None]
    mask = chosen_tokens(scores, positions, spec) | (seen & (positions < dense[:, None])[:, None, :, None])
    return (
        (q, k, v, index_q, index_k, which, starts, dense),
        (block, sinks, p, 0.3),
        mask,
        scores.masked_fill(~seen, -torch.inf),
    )


def indexed_by_hand(q, k, v, which, mask, scale):
    group = which // (q.shape[1] // k.shape[1])
    return explicit_attention(q[:, which], k.nan_to_num()[:, group], v.nan_to_num()[:, group], mask, scale)


@pytest.mark.parametrize("case", INDEXED)
def test_indexed_kernel_is_the_reference(case):
    given, how, mask, _ = indexed_case(case)
    results = []
    for function in (
        lambda *x: indexed_attention(*x, *given[3:], *how),
        lambda *x: indexed_by_hand(*x, given[5], mask, how[3]),
    ):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        out = function(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    assert results[0][0].transpose(1, 2).is_contiguous()
    assert mask.float().mean() < (torch.isfinite(indexed_case(case)[3])).float().mean()  # something was left out


@pytest.mark.parametrize("pieces", [(128, 1024), (2, 4)])  # blocks of a part, and read together
@pytest.mark.parametrize("case", INDEXED)
def test_indexed_token_kernel_is_the_reference(case, pieces, monkeypatch):
    for name, value in zip(("PICK_AT_ONCE", "PICK_WIDE"), pieces, strict=True):
        monkeypatch.setattr(indexed, name, value)
    (q, k, v, index_q, index_k, which, starts, dense), how, mask, _ = indexed_case(case)
    for back in (1, 17):  # the last token, and one in the middle of a block
        at = q.shape[2] - back
        out = indexed_token_attention(
            q[:, :, at : at + 1], k, v, index_q[:, :, at : at + 1], index_k, which, starts + at, dense, *how
        )
        theirs = indexed_by_hand(q[:, :, at : at + 1], k, v, which, mask[:, :, at : at + 1], how[3])
        torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", INDEXED)
def test_what_the_kernel_chooses_holds_the_share(case):
    """Held to exact top-p: the mass of what is taken is p or more, and without the lowest bin that is taken it is less."""
    given, (block, sinks, p, _), _, scores = indexed_case(case, scale=6.0)
    peak, limit = choose(*given[3:], block, sinks, p)
    t, positions = scores.shape[2], given[6][:, None] + torch.arange(scores.shape[2])
    assert torch.equal(limit.isinf(), (positions < given[7][:, None])[:, None].expand_as(limit)) and t == peak.shape[2]
    torch.testing.assert_close(peak[limit.isfinite()], scores.amax(-1)[limit.isfinite()])
    blocks = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % block), value=-torch.inf).unflatten(-1, (-1, block))
    first = torch.arange(blocks.shape[-2]) * block
    n = positions[:, None, :, None]
    always = (first < sinks) | (first == n // block * block)
    below = peak[..., None] - blocks.amax(-1)
    share = scores.softmax(-1)
    share = torch.nn.functional.pad(share, (0, -scores.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
    rows = limit.isfinite()
    assert (share * ((below < limit[..., None]) | always)).sum(-1)[rows].min() >= p - 1e-5
    fewer = (below < limit[..., None] - WIDTH) | always
    assert (share * fewer).sum(-1)[rows & (limit > WIDTH)].max() < p + 1e-5


def test_indexed_padding_comes_out_as_zero_and_gets_no_gradient():
    given, how, *_ = indexed_case("a head of each group of three")
    counts = torch.tensor([100, 33])
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    with torch.no_grad():
        leaves[0][1, :, 33:] = float("nan")
    out = indexed_attention(*leaves, *given[3:], *how, counts)
    assert (out[1, :, 33:] == 0).all()
    weight = torch.ones_like(out)
    weight[1, :, 33:] = float("nan")
    gradients = torch.autograd.grad(out, leaves, weight)
    assert all(x.isfinite().all() for x in gradients)
    assert all((x[1, :, 33:] == 0).all() for x in gradients)


def test_indexed_refusals_and_fallbacks(ids, monkeypatch):
    given, (block, sinks, p, scale), *_ = indexed_case("one head")
    for wrong, name in (
        ((8, sinks, p, scale), "block"),
        ((block, sinks, 1.0, scale), "top_p"),
        ((block, sinks, p, 0), "scale"),
    ):
        with pytest.raises(hz.HybridizeError, match=name):
            indexed_attention(*given, *wrong)
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    base = make_base("qwen3")
    for spec, why in ((hz.Indexed(block=4), "block is 4"), (hz.Indexed(block=16, max_tokens=32), "max_tokens")):
        model = hz.convert(base, hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [], spec))
        with torch.no_grad(), pytest.raises(hz.HybridizeError, match=why):
            model(ids)


def test_a_block_is_as_large_as_a_program_can_hold():
    """Keys of 64 KiB, head_dim padded to a power of 2 (scripts/compile_check.py)."""
    assert index_tile_fits(torch.bfloat16, 256, 128) and index_tile_fits(torch.float32, 128, 128)
    assert not index_tile_fits(torch.float32, 256, 128) and not index_tile_fits(torch.float32, 136, 128)
    q, k = torch.zeros(1, 2, 3, 136), torch.zeros(1, 1, 3, 136)
    where = torch.tensor([0]), torch.tensor([0]), torch.tensor([0])
    with pytest.raises(hz.HybridizeError, match="block: got 128"):
        indexed_attention(q, k, k, q[..., :4], k[..., :4], *where, 128, 4, 0.9, 1.0)


def test_every_kernel_compiles_for_hopper_and_fits():
    """No GPU is needed to compile; what a compiler refuses or cannot place would fail on the user's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "scripts" / "compile_check.py"
    words = [sys.executable, str(script), "--kinds", "bfloat16:128:64"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}_kernel" in done.stdout for name in ("forward", "dkv", "decode", "attend", "index_dkv", "read"))
    too_little = subprocess.run([*words, "--shared", "64"], env=environment, capture_output=True, text=True)
    assert too_little.returncode == 1 and "DOES NOT FIT" in too_little.stdout
