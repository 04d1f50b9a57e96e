"""Triton kernels against the torch reference, forward and backward, in Triton's interpreter (fp32 only there)."""

import pytest
import torch
import torch._dynamo.testing
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import conftest
import hybridize as hz
from conftest import BASES, make_base, make_hybrid, make_plan
from hybridize.kernels import dispatch
from hybridize.operators.banded import banded_attention
from hybridize.operators.contract import write_at

pytest.importorskip("triton")
from hybridize.kernels import proof
from hybridize.kernels.decode import one_token_attention
from hybridize.kernels.matvec import matvec
from hybridize.kernels.rotary import rotate
from hybridize.kernels.window import window_attention

pytestmark = pytest.mark.usefixtures("poison")
DEVICE = "cpu"  # scripts/gpu_check.py is the GPU's


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """The kernels' blocks have 16 tokens at least; the matrix has smaller ones."""
    spec = hz.Indexed(top_p=0.5, dim=4, block=16, window=5, sinks=2, retrieves=(True, False))
    monkeypatch.setitem(conftest.OPERATORS, "indexed", spec)


def inputs(b, g, r, t, d, size, sinks, start, history, rebased, seed=0):
    """The chunk of positions start..start + t, its history of size - 1 tokens where asked, and its row's first tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q = normal(b, g * r, t, d)
    k, v = normal(b, g, start + t, d), normal(b, g, start + t, d)
    sink_k, sink_v = k[:, :, :sinks].clone(), v[:, :, :sinks].clone()
    if history:
        before = max(0, size - 1 - start)  # columns before position 0: anything may stand there
        first = max(0, start - size + 1)
        k, v = (torch.cat([normal(b, g, before, d) * 50, x[:, :, first:]], dim=2) for x in (k, v))
    positions = start + torch.arange(t, device=DEVICE)[None]
    q_sink = None
    if rebased:  # as long as a sink is in the window, its distance is the true one
        q_sink = torch.where((positions < size + sinks)[:, None, :, None], q, normal(b, g * r, t, d))
    return q, k, v, sink_k, sink_v, positions, q_sink


def gradients(function, q, k, v, sink_k, sink_v, positions, q_sink, weight, **how):
    """(output, gradients); what a token's key gets as key and as sink is one sum, for it is one key."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink_k, sink_v)]
    near = None if q_sink is None else q_sink.clone().requires_grad_()
    out = function(*leaves, positions, q_sink=near, **how)
    (out * weight).sum().backward()
    dq, dk, dv, dsk, dsv = (torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in leaves)
    size, start = how["size"], int(positions[0, 0])
    for sink in range(sink_k.shape[2]):
        column = sink - start + k.shape[2] - q.shape[2]
        if 0 <= column < k.shape[2]:
            for x, y in ((dk, dsk), (dv, dsv)):
                x[:, :, column] += y[:, :, sink]
                y[:, :, sink] = 0
    found = [dq, dk, dv, dsk, dsv]
    if near is not None:
        same = (positions < size + sink_k.shape[2])[:, None, :, None]
        found = [torch.where(same, dq + near.grad, dq), torch.where(same, 0.0, near.grad), *found[1:]]
    return out.detach(), found


CASES = {  # b, g, r, t, d, size, sinks, start, history, rebased
    "one head": (1, 1, 1, 40, 16, 7, 2, 0, False, False),
    "groups of three": (2, 2, 3, 100, 16, 20, 4, 0, False, False),
    "groups of seven": (1, 2, 7, 70, 16, 33, 4, 0, False, False),
    "no sinks": (1, 2, 1, 33, 16, 5, 0, 0, False, False),
    "window of one": (1, 1, 2, 64, 16, 1, 2, 0, False, False),
    "window over everything": (2, 2, 2, 50, 16, 1000, 4, 0, False, False),
    "long window": (1, 1, 2, 300, 16, 200, 4, 0, False, False),
    "a later chunk": (2, 2, 2, 50, 16, 20, 4, 30, True, False),
    "a chunk soon after the start": (2, 1, 4, 70, 32, 64, 4, 5, True, True),
    "a chunk far behind": (1, 1, 2, 200, 16, 33, 6, 100, True, True),
    "re-based": (1, 2, 4, 150, 16, 100, 4, 0, False, True),
    "one query": (2, 2, 2, 1, 16, 9, 2, 40, True, False),
    "many sinks": (1, 1, 2, 90, 16, 10, 20, 0, False, False),
    "a head_dim between powers of two": (2, 2, 3, 70, 24, 20, 4, 0, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_window_kernel_is_the_reference(case):
    b, g, r, t, d, size, *_ = CASES[case]
    given = inputs(*CASES[case])
    weight = torch.randn(b, g * r, t, d, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    how = dict(size=size, scale=0.3)
    expected, theirs = gradients(banded_attention, *given, weight, **how)
    out, mine = gradients(window_attention, *given, weight, **how)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_strided_inputs_and_head_dim_256():
    q, k, v = (torch.randn(1, 37, 3, heads, 256, device=DEVICE)[:, :, 1].transpose(1, 2) for heads in (4, 2, 2))
    positions = torch.arange(37, device=DEVICE)[None]
    given = (q, k, v, k[:, :, :2], v[:, :, :2], positions)
    out = window_attention(*given, size=9, scale=0.1)
    torch.testing.assert_close(out, banded_attention(*given, size=9, scale=0.1), rtol=1e-4, atol=1e-5)


def test_padding_comes_out_as_zero_and_gets_no_gradient():
    q, k, v, sink_k, sink_v, positions, _ = inputs(3, 2, 2, 60, 16, 11, 2, 0, False, False)
    counts = torch.tensor([60, 33, 0], device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink_k, sink_v)]
    out = window_attention(*leaves, positions, size=11, scale=0.3, counts=counts)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight[1, :, 33:] = weight[2] = float("nan")  # what comes in for padding is not looked at
    out.backward(weight)
    for row, n in ((0, 60), (1, 33)):
        alone = [x[row : row + 1, :, :n].clone().requires_grad_() for x in (q, k, v)]
        alone += [x[row : row + 1].clone().requires_grad_() for x in (sink_k, sink_v)]
        expected = window_attention(*alone, positions[:, :n], size=11, scale=0.3)
        torch.testing.assert_close(out[row : row + 1, :, :n], expected, rtol=1e-4, atol=1e-5)
        expected.backward(weight[row : row + 1, :, :n])
        for leaf, single in zip(leaves, alone):
            torch.testing.assert_close(leaf.grad[row : row + 1, :, : single.shape[2]], single.grad, rtol=1e-4, atol=1e-5)
    assert all(not leaf.grad.isnan().any() for leaf in leaves) and not out.isnan().any()
    assert all((leaf.grad[2] == 0).all() for leaf in leaves)
    assert all((leaf.grad[1, :, 33:] == 0).all() for leaf in leaves[:3])


def test_output_in_memory_of_the_layer():
    q, k, v, sink_k, sink_v, positions, _ = inputs(2, 3, 2, 90, 16, 12, 3, 0, False, False)
    joined = torch.empty(2, 90, 10, 16, device=DEVICE)
    given = (q, k, v, sink_k, sink_v, positions)
    out = joined[:, :, 4:].transpose(1, 2)
    assert window_attention(*given, size=12, scale=0.3, out=out) is out
    torch.testing.assert_close(out, banded_attention(*given, size=12, scale=0.3), rtol=1e-4, atol=1e-5)
    assert joined[:, :, :4].isnan().all()
    with pytest.raises(hz.HybridizeError, match="out"):
        window_attention(q.requires_grad_(), *given[1:], size=12, scale=0.3, out=out)


def test_refusals():
    q = torch.zeros(1, 2, 4, 12, device=DEVICE)
    where = torch.arange(4, device=DEVICE)[None]
    with pytest.raises(hz.HybridizeError, match="head_dim"):
        window_attention(q, q, q, q[:, :, :1], q[:, :, :1], where, size=3, scale=1.0)
    q = torch.zeros(1, 2, 4, 16, device=DEVICE)
    with pytest.raises(hz.HybridizeError, match="scale"):
        window_attention(q, q, q, q[:, :, :1], q[:, :, :1], where, size=3, scale=-1.0)


@pytest.mark.parametrize("d", [16, 24])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotary_kernel_is_the_bases(d, rows):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 37, n, d, generator=generator).to(DEVICE).transpose(1, 2) for n in (9, 3))
    angle = torch.randn(rows, 37, d // 2, generator=generator).repeat(1, 1, 2).to(DEVICE)
    results = []
    for function in (rotate, apply_rotary_pos_emb):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = function(*leaves, angle.cos(), angle.sin())
        sum((x * x.cos()).sum() for x in out).backward()
        results.append([*(x.detach() for x in out), *(x.grad for x in leaves)])
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(*pair) for pair in list(zip(*results))[:2])
    assert all(x.transpose(1, 2).is_contiguous() for x in rotate(q, k, angle.cos(), angle.sin()))


# -- the choice -----------------------------------------------------------------------------------------------------


def test_the_choice_is_the_users(monkeypatch):
    q = torch.zeros(1, 2, 4, 16)
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "fast")
    with pytest.raises(hz.HybridizeError, match="HYBRIDIZE_KERNELS"):
        dispatch.kernels_for("window", q)
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "reference")
    assert dispatch.kernels_for("window", q) is None
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "auto")
    assert dispatch.kernels_for("window", q) is None  # a CPU tensor
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    assert dispatch.kernels_for("window", q).window_attention is window_attention
    for other, dropout in ((torch.zeros(1, 2, 4, 12), 0.0), (q, 0.1)):
        with pytest.raises(hz.HybridizeError, match="HYBRIDIZE_KERNELS"):
            dispatch.kernels_for("window", other, dropout)


def test_a_fallback_is_announced(monkeypatch):
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "auto")
    on_gpu = torch.zeros(1, 2, 4, 12, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
    assert dispatch.kernels_for("window", on_gpu) is None
    assert len(said) == 1 and "head_dim is 12" in said[0]


@pytest.mark.parametrize(
    "operator", ["window", "window_no_sinks", "window_rebased", "window_full_decode", "linear", "indexed", "mixed"]
)
def test_models_run_on_the_kernels(ids, operator, monkeypatch):
    """Whole models, padding, chunks and gradients: kernels and reference side by side."""
    model = make_hybrid(make_base("qwen3"), operator)
    rows = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids[1:, :-9]], dim=1)
    rows, mask = torch.cat([ids[:1], rows]), torch.ones_like(ids)
    mask[1, :9] = 0
    labels = rows.masked_fill(mask == 0, -100)
    labels[1, 9] = -100  # what padding predicts is nobody's business
    results = []
    for chosen in ("reference", "triton"):
        monkeypatch.setenv("HYBRIDIZE_KERNELS", chosen)
        model.zero_grad()
        out = model.train()(rows, attention_mask=mask, labels=labels, prompt_len=torch.tensor([30, 25]))
        out.loss.backward()
        found = [out.logits.detach() * mask[..., None], *(p.grad.clone() for p in model.parameters())]
        cache, start = model.eval().new_cache(), 0
        with torch.no_grad():
            for size in (13, 20, 1, 1, 5):
                part = model(rows[:, start : start + size], attention_mask=mask[:, : start + size], past_key_values=cache,
                             prompt_len=torch.tensor([30, 25]))  # fmt: skip
                found.append(part.logits * mask[:, start : start + size, None])
                start += size
        results.append(found)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("operator", ["window_rebased", "linear", "mixed"])
def test_training_under_autocast(family, operator, ids, monkeypatch):
    """fp32 masters: projections come out in half precision, norms and cosines do not, and kernels take one dtype."""
    model = make_hybrid(make_base(family), operator).train()
    results, taken = [], []
    monkeypatch.setattr(
        "hybridize.kernels.window.window_attention",
        lambda *a, **k: taken.append({x.dtype for x in (*a[:5], k["q_sink"]) if x is not None}) or window_attention(*a, **k),
    )
    for chosen in ("reference", "triton"):
        monkeypatch.setenv("HYBRIDIZE_KERNELS", chosen)
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):  # Triton's interpreter has no bf16
            loss = model(ids, labels=ids, prompt_len=torch.tensor([30, 25])).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert taken and all(dtypes == {torch.float16} for dtypes in taken)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-3 * max(1.0, b.abs().max().item()))


def test_gradients_where_only_values_are_trained(ids, monkeypatch):
    """Queries without gradient say nothing about keys and values."""
    base = make_base("qwen3")
    model = hz.convert(base, make_plan(base, "mixed")).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("layers.0.self_attn.v_proj.weight"))
    weight = model.model.layers[0].self_attn.v_proj.weight
    found = []
    for chosen in ("reference", "triton"):
        monkeypatch.setenv("HYBRIDIZE_KERNELS", chosen)
        weight.grad = None
        model(ids, labels=ids, prompt_len=torch.tensor([30, 30])).loss.backward()
        found.append(weight.grad.clone())
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


# -- one decoded token ----------------------------------------------------------------------------------------------


def one_by_hand(q, spans, scale):
    """The definition: columns below count, from start on or among the sinks, each sink scored by its own query."""
    out, first = [], 0
    repeats = q.shape[1] // sum(k.shape[1] for k, *_ in spans)
    for k, v, count, start, q_sink, sinks in spans:
        b, g, s, d = k.shape
        mine, columns = q[:, first : first + g * repeats].view(b, g, repeats, d), torch.arange(s, device=q.device)[None]
        seen = columns < count.expand(b)[:, None]
        if start.numel():
            seen = seen & ((columns >= start.expand(b)[:, None]) | (columns < sinks))
        logits = mine @ k.transpose(-1, -2)
        if q_sink.numel():
            logits = torch.where(columns < sinks, q_sink.view(b, g, repeats, d) @ k.transpose(-1, -2), logits)
        weights = (logits * scale).masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        out.append((weights @ v).view(b, g * repeats, 1, d))
        first += g * repeats
    return torch.cat(out, dim=1)


ONE = {  # rows, heads a group, [(groups, columns, sinks, from a start, re-based)]
    "one span": (1, 1, [(2, 300, 0, False, False)]),
    "growing and ring": (2, 3, [(1, 200, 0, False, False), (2, 20, 4, False, True)]),
    "a piece of a prompt": (3, 4, [(2, 500, 4, True, False), (1, 16, 0, False, False)]),
    "three spans": (2, 2, [(1, 90, 0, False, False), (1, 22, 4, True, False), (1, 200, 2, False, True)]),
    "shorter than a block": (2, 2, [(1, 5, 0, False, False)]),
    "one column": (1, 7, [(2, 1, 1, False, False)]),
    "a head_dim between powers of two": (2, 2, [(1, 150, 4, True, True), (1, 70, 0, False, False)]),
}


@pytest.mark.parametrize("case", ONE)
@pytest.mark.parametrize("ragged", [False, True])
def test_decode_kernel_is_the_definition(case, ragged):
    rows, repeats, shapes = ONE[case]
    d = 24 if "head_dim" in case else 16
    generator = torch.Generator().manual_seed(3)
    none = torch.zeros(0, device=DEVICE)
    spans = []
    for groups, columns, sinks, from_start, rebased in shapes:
        k, v = (torch.randn(rows, groups, columns, d, generator=generator).to(DEVICE) for _ in "kv")
        count = torch.randint((columns + 1) // 2, columns + 1, (rows if ragged else 1,), generator=generator).to(DEVICE)
        for row in range(rows):  # what is not filled is never read into a sum
            k[row, :, int(count.expand(rows)[row]) :] = v[row, :, int(count.expand(rows)[row]) :] = 1e4
        start = (count - 9).clamp_min(0) if from_start else none.long()
        q_sink = torch.randn(rows, groups * repeats, 1, d, generator=generator).to(DEVICE) if rebased else none
        spans.append((k, v, count, start, q_sink, sinks))
    q = torch.randn(rows, repeats * sum(s[0] for s in shapes), 1, d, generator=generator).to(DEVICE)
    lists = [list(x) for x in zip(*spans)]
    out = one_token_attention(q, *lists, [False] * len(spans), [], 0.3)
    torch.testing.assert_close(out, one_by_hand(q, spans, 0.3), rtol=1e-4, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("e", [1, 48, 1024, 2500])
@pytest.mark.parametrize("sizes", [(7,), (5, 1), (6, 2, 3)])
def test_matvec_kernel_is_the_linear_layers(e, sizes):
    x = torch.randn(1, e, device=DEVICE)
    weights = [torch.randn(n, 2 * e, device=DEVICE)[:, :e] for n in sizes]
    torch.testing.assert_close(matvec(x, weights), torch.cat([x @ w.T for w in weights], dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", BASES)
def test_a_step_of_one_row_is_the_modules_own(family, ids, monkeypatch):
    """Biases, no biases; a layer that is more than its weight keeps its own forward."""
    model = make_hybrid(make_base(family, num_attention_heads=3), "window")
    found, calls = [], []
    monkeypatch.setattr("hybridize.kernels.matvec.matvec", lambda x, w: calls.append(len(w)) or matvec(x, w))
    for chosen in ("reference", "triton"):
        monkeypatch.setenv("HYBRIDIZE_KERNELS", chosen)
        for max_tokens in (None, 48):
            cache = model.new_cache(max_tokens)
            with torch.no_grad():
                model(ids[:1, :20], past_key_values=cache)
                found.append(model(ids[:1, 20:21], past_key_values=cache).logits)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=2e-5)
    assert calls == [3, 1, 2, 1] * 3 * 2
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0)
    with torch.no_grad():
        model(ids[:1, 21:22], past_key_values=cache)
    assert calls[24:] == [3, 1, 1, *[3, 1, 2, 1] * 2]


TAKEN = {  # rows' counts, [(groups, columns, sinks, ring, re-based, from a start)]
    "room behind": ([7, 130], [(2, 140, 0, False, False, False)]),
    "an empty cache": ([0, 0], [(1, 20, 0, False, False, False), (1, 9, 2, True, False, False)]),
    "a ring that fills": ([8, 3], [(2, 9, 2, True, False, False)]),
    "a full ring": ([9, 200], [(1, 9, 2, True, False, False), (1, 210, 0, False, False, False)]),
    "a large ring": ([500, 141], [(2, 140, 4, True, False, False)]),
    "re-based sinks in a ring": ([1, 77], [(1, 20, 4, True, True, False), (2, 20, 0, True, False, False)]),
    "a piece of a prompt": ([90, 12], [(1, 100, 4, False, False, True)]),
}


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("d", [16, 24])
def test_decode_kernel_takes_the_token_in(case, d):
    """Rotates queries and key, writes the token into its slot, and sees what a cache with the token in it holds."""
    counts, shapes = TAKEN[case]
    generator, none = torch.Generator().manual_seed(4), torch.zeros(0, device=DEVICE)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    repeats, groups, count = 3, sum(s[0] for s in shapes), torch.tensor(counts, device=DEVICE)
    q, new_k, new_v = normal(2, groups * repeats, 1, d), normal(2, groups, 1, d), normal(2, groups, 1, d)
    angle = normal(2, 1, d // 2).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    turned_q, turned_k = apply_rotary_pos_emb(q, new_k, cos, sin)
    given, held, first = [], [], 0
    for g, columns, sinks, ring, rebased, from_start in shapes:
        k, v = normal(2, g, columns, d), normal(2, g, columns, d)
        slot = torch.where(count < columns, count, sinks + (count - sinks) % (columns - sinks))
        for row in range(2):  # what is not filled, or is written over, is never read into a sum
            for x in (k, v):
                x[row, :, counts[row] :] = x[row, :, int(slot[row])] = 1e4
        start = (count - 9).clamp_min(0) if from_start else none.long()
        q_sink = normal(2, g * repeats, 1, d) if rebased else none
        if rebased:  # a token that is a sink itself sees itself at distance 0
            near = (count < sinks)[:, None, None, None]
            q_sink = torch.where(near, turned_q[:, first * repeats : (first + g) * repeats], q_sink)
        given.append((k.clone(), v.clone(), count, start, q_sink, sinks, ring))
        for x, token in ((k, turned_k), (v, new_v)):
            write_at(x, token[:, first : first + g], slot)
        held.append((k, v, (count + 1).clamp_max(columns), start, q_sink, sinks))
        first += g
    out = one_token_attention(q, *[list(x) for x in zip(*given)], [new_k, new_v, cos, sin], 0.3)
    torch.testing.assert_close(out, one_by_hand(turned_q, held, 0.3), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(given, held):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("operator", ["full", "window_rebased", "linear", "linear_channel", "indexed", "mixed"])
def test_generation_on_the_kernels(ids, operator, monkeypatch):
    model = make_hybrid(make_base("qwen3"), operator)
    rows = torch.cat([ids[:1, :20], torch.cat([torch.zeros(1, 6, dtype=torch.long), ids[1:, :14]], dim=1)])
    mask = torch.ones_like(rows)
    mask[1, :6] = 0
    answers = []
    for chosen in ("reference", "triton"):
        monkeypatch.setenv("HYBRIDIZE_KERNELS", chosen)
        for how in ({}, {"cache_implementation": "static"}):
            out = model.generate(rows, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0,
                                 eos_token_id=None, **how)  # fmt: skip
            answers.append(out)
    assert all(torch.equal(answers[0], other) for other in answers[1:])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("operator", ["window", "linear", "indexed"])
def test_a_compiled_step_has_one_graph_with_the_kernels_in_it(ids, operator, rows, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    model = make_hybrid(make_base("qwen3"), operator)
    cache, eager, ids = model.new_cache(48), model.new_cache(48), ids[:rows]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for c in (cache, eager):
            model(ids[:, :20], past_key_values=c)
        for i in range(20, 21 + rows):
            mine = step(ids[:, i : i + 1], past_key_values=cache).logits
            theirs = model(ids[:, i : i + 1], past_key_values=eager).logits
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 1


BROKEN = {  # kernel: (part of the proof, what it says of a kernel made from the real one)
    "window_attention": (
        "_window_errors",
        lambda real: {
            "window by": lambda *a, **k: real(*a, **{**k, "size": 49}),
            "nan": lambda *a, **k: real(*a, **k) * float("nan"),
        },
    ),
    "rotate": ("_rotary_errors", lambda real: {"rotary by": lambda q, k, cos, sin: real(q, k, cos, -sin)}),
    "one_token_attention": (
        "_token_errors",
        lambda real: {"what is written of it by": lambda *a: real(*a[:8], [x * 0.9 for x in a[8]], a[9])},
    ),
    "matvec": ("_matvec_errors", lambda real: {"matvec by": lambda x, weights: real(x, weights[::-1])}),
    "open_attention": ("_opened_errors", lambda real: {"opened by": lambda *a: real(*a[:3], a[3] - 1, *a[4:])}),
    "indexed_attention": ("_indexed_errors", lambda real: {"indexed by": lambda *a: real(*a[:-2], 0.5, a[-1])}),
    "indexed_token_attention": (
        "_indexed_errors",
        lambda real: {"indexed token by": lambda *a: real(*a[:-3], 40, *a[-2:])},
    ),
}


def test_kernels_prove_themselves(monkeypatch):
    """A kernel that computes something else, or none, is found out on the device, and the reference runs."""
    device = torch.device(DEVICE)
    assert proof.why_wrong(device, torch.float32, 16) is None
    real = {name: getattr(proof, name) for name in BROKEN}
    parts = [name for name in vars(proof) if name.endswith("_errors")]
    for name, (part, breaks) in BROKEN.items():
        for said, broken in breaks(real[name]).items():
            with monkeypatch.context() as patch:
                patch.setattr(proof, name, broken)
                for other in set(parts) - {part}:
                    patch.setattr(proof, other, lambda *_: {})
                assert said in proof.why_wrong(device, torch.float32, 16)

    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(proof, "window_attention", broken)
    said, q = [], torch.zeros(1, 2, 4, 16, device=device)
    monkeypatch.setattr(dispatch, "PROVEN", {})
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    with pytest.raises(hz.HybridizeError, match="no such instruction"):
        dispatch.kernels_for("window", q)
