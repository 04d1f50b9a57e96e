"""Operators against attention written out with a dense mask: outputs and gradients, poisoned memory, odd shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridize.operators import dense
from hybridize.operators.banded import banded_attention
from hybridize.operators.contract import Chunk, write_at
from hybridize.operators.specs import Window
from hybridize.operators.window import WindowState


def oracle(q, k, v, visible, q_sink=None, sinks=0, size=None):
    """Softmax attention with everything written out in fp64; visible [T, S]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1).double() for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2)
    if q_sink is not None:
        far = q_sink.double() @ k.transpose(-1, -2)
        logits = torch.where(torch.arange(k.shape[2]) < sinks, far, logits)
    weights = (logits / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf).softmax(-1)
    return weights @ v


def window_mask(start, t, size, sinks):
    n, j = torch.arange(start, start + t)[:, None], torch.arange(start + t)
    return (j <= n) & ((n - j < size) | (j < sinks))


@given(
    t=st.integers(1, 70),
    start=st.integers(0, 40),
    size=st.integers(1, 33),
    sinks=st.integers(0, 6),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    rebased=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_banded_is_masked_attention(t, start, size, sinks, groups, repeats, rebased, seed):
    generator = torch.Generator().manual_seed(seed)
    h, d = groups * repeats, 4
    q, q_sink = (torch.randn(2, h, t, d, generator=generator, requires_grad=True) for _ in range(2))
    k, v = (torch.randn(2, groups, start + t, d, generator=generator, requires_grad=True) for _ in range(2))
    first = max(0, start - size + 1)
    # history shorter than size - 1 tokens is filled with poison: it must never be seen
    poison = torch.full((2, groups, size - 1 - (start - first), d), 1e9)
    past_k, past_v = (torch.cat([poison, x[:, :, first:]], dim=2) for x in (k, v))
    positions = torch.arange(start, start + t)[None]
    out = banded_attention(
        q,
        past_k,
        past_v,
        k[:, :, :sinks],
        v[:, :, :sinks],
        positions,
        size,
        1 / math.sqrt(d),
        q_sink=q_sink if rebased else None,
    )
    expected = oracle(q, k, v, window_mask(start, t, size, sinks), q_sink if rebased else None, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(out.shape, generator=generator)
    inputs = [q, k, v, *([q_sink] if rebased and sinks else [])]
    mine = torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((expected * weight.double()).sum(), inputs)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_window_covers_everything_is_causal():
    q, k, v = torch.randn(1, 4, 37, 8), torch.randn(1, 2, 37, 8), torch.randn(1, 2, 37, 8)
    out = banded_attention(q, k, v, k[:, :, :4], v[:, :, :4], torch.arange(37)[None], 64, 8**-0.5)
    torch.testing.assert_close(out, dense.causal_attention(q, k, v, 8**-0.5))


def test_window_counts_the_token_itself():
    # size 1 without sinks: a token sees itself alone
    q, k, v = (torch.randn(1, 1, 9, 4) for _ in range(3))
    out = banded_attention(q, k, v, k[:, :, :0], v[:, :, :0], torch.arange(9)[None], 1, 0.5)
    torch.testing.assert_close(out, v)


def test_many_blocks_at_once_or_few(monkeypatch):
    q, k, v = torch.randn(1, 2, 300, 4), torch.randn(1, 1, 300, 4), torch.randn(1, 1, 300, 4)
    arguments = (q, k, v, k[:, :, :2], v[:, :, :2], torch.arange(300)[None], 9, 0.5)
    whole = banded_attention(*arguments)
    monkeypatch.setattr("hybridize.operators.banded.GROUP_ELEMENTS", 1)
    torch.testing.assert_close(banded_attention(*arguments), whole)


def test_masked_sdpa_is_never_used_above_its_limit(monkeypatch):
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 21, 8), torch.randn(1, 2, 21, 8)
    visible = torch.rand(1, 1, 5, 21) > 0.3
    visible[..., 0] = True
    expected = dense.masked_attention(q, k, v, visible, 0.3)
    monkeypatch.setattr(dense, "MASKED_SDPA_LIMIT", 20)
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("masked SDPA was used"))
    torch.testing.assert_close(dense.masked_attention(q, k, v, visible, 0.3), expected)
    torch.testing.assert_close(dense.explicit_attention(q, k, v, visible, 0.3, rows=2), expected)


@given(size=st.integers(1, 9), sinks=st.integers(0, 4), split=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_window_state_holds_what_its_positions_say(size, sinks, split):
    """Keys carry their own content position, so a slot that holds another token shows."""
    state, done = WindowState(Window(size, sinks)), 0
    for tokens in split:
        k = torch.arange(done, done + tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3).contiguous()
        state.append(k, k, Chunk(torch.arange(done, done + tokens)[None], done, None, None, 1))
        done += tokens
        held = state.held_positions(torch.tensor([done - 1]))[0]
        expected = sorted({*range(min(sinks, done)), *range(max(0, done - size), done)})
        assert sorted(set(held.tolist()) - {-1}) == expected
        for slot, position in enumerate(held.tolist()):
            if position >= 0:
                assert state.k[0, 0, slot, 0] == position
        assert state.k.shape[2] == min(done, size + sinks)


def test_write_at():
    target = torch.zeros(2, 1, 5, 1)
    write_at(target, torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(2, 1, 2, 1), torch.tensor([0, 3]))
    assert target[:, 0, :, 0].tolist() == [[1, 2, 0, 0, 0], [0, 0, 0, 1, 2]]
