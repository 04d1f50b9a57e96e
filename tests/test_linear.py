"""Linear attention: the maths against its definition, what a spec may say, and what a model makes of it."""

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_hybrid, make_plan
from hybridize.operators.contract import Chunk
from hybridize.operators.mixing import mixed_keys
from hybridize.operators.recurrence import chunked, power_features, recurrent
from hybridize.operators.specs import spec_from_dict, spec_to_dict

CLOSE = dict(rtol=1e-5, atol=1e-5)
VARIANTS = {
    "hedgehog": hz.Linear("hedgehog", 1, 8, "sum"),
    "quadratic": hz.Linear(degree=2, dim=6, rule="sum"),
    "quadratic_delta": hz.Linear(degree=2, dim=6, rule="delta"),
    "cubic_delta": hz.Linear(degree=3, dim=4, rule="delta"),
    "quartic": hz.Linear(degree=4, dim=4, rule="sum"),
    "quartic_delta": hz.Linear(degree=4, dim=4, rule="delta"),
    "delta": hz.Linear(degree=1, dim=16, rule="delta"),
    "simple_decay": hz.Linear(degree=1, dim=16, rule="sum", decay="head"),
    "gla": hz.Linear(degree=1, dim=16, rule="sum", decay="channel"),
    "gated_delta": hz.Linear(degree=1, dim=16, rule="delta", decay="token"),
    "quadratic_gated_delta": hz.Linear(degree=2, dim=6, rule="delta", decay="token"),
}


def drawn(spec, tokens=150, batch=2, groups=2, repeats=3, values=5, dtype=torch.float32):
    """What the maths is given: unit keys, as the operator makes them, or Hedgehog's features."""
    torch.manual_seed(0)
    q = torch.randn(batch, groups, repeats, tokens, spec.dim, dtype=torch.float64)
    k = torch.randn(batch, groups, tokens, spec.dim, dtype=torch.float64)
    if spec.features == "hedgehog":
        q, k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k))
    else:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = torch.randn(batch, groups, tokens, values, dtype=torch.float64)
    b = torch.rand(batch, groups, tokens, dtype=torch.float64)
    shape = k.shape if spec.decay == "channel" else k.shape[:-1]
    g = None if spec.decay == "none" else -torch.rand(*shape, dtype=torch.float64) * 0.2
    return [None if x is None else x.to(dtype).requires_grad_() for x in (q, k, v, b, g)]


def zeros(spec, v):
    return v.new_zeros(*v.shape[:2], spec.width, v.shape[-1])


def how(spec):
    return dict(degree=spec.degree, delta=spec.rule == "delta")


@pytest.fixture(params=VARIANTS)
def spec(request):
    return VARIANTS[request.param]


def gradients(outs, inputs):
    torch.manual_seed(5)
    loss = sum((out * torch.randn_like(out)).sum() for out in outs)
    return torch.autograd.grad(loss, [x for x in inputs if x is not None])


def test_power_features_have_the_power_as_their_product():
    x, y = torch.randn(2, 7, 5, dtype=torch.float64)
    for degree in (1, 2, 3, 4):
        product = (power_features(x, degree) * power_features(y, degree)).sum(-1)
        torch.testing.assert_close(product, (x * y).sum(-1) ** degree)


def test_the_state_is_its_definition():
    """Both rules and a decay, written out with matrices."""
    spec = VARIANTS["quadratic_gated_delta"]
    q, k, v, b, g = (x[0, 0].detach() for x in drawn(spec, 12, dtype=torch.float64))
    state = torch.zeros(spec.width, v.shape[-1], dtype=torch.float64)
    plain = state.clone()
    for t in range(12):
        key = power_features(k[t], 2)
        state = g[t].exp() * (state - b[t] * torch.outer(key, key @ state)) + b[t] * torch.outer(key, v[t])
        plain = g[t].exp() * plain + b[t] * torch.outer(key, v[t])
    given = (q[None, None], k[None, None], v[None, None], b[None, None], g[None, None], torch.zeros_like(state)[None, None])
    torch.testing.assert_close(recurrent(*given, degree=2, delta=True)[1][0, 0], state)
    torch.testing.assert_close(recurrent(*given, degree=2, delta=False)[1][0, 0], plain)


@pytest.mark.parametrize("size", [1, 7, 64, 200, None])
def test_chunked_is_recurrent(spec, size):
    """Outputs, states and gradients, from a state that is not zero."""
    inputs = drawn(spec)
    state = torch.randn_like(zeros(spec, inputs[2])).requires_grad_()
    expected = recurrent(*inputs, state, **how(spec))
    got = chunked(*inputs, state, **how(spec), size=size)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    both = [gradients(outs, [*inputs, state]) for outs in (got, expected)]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_one_chunk_needs_no_state(spec):
    inputs = drawn(spec)
    expected, _ = recurrent(*inputs, zeros(spec, inputs[2]), **how(spec))
    got, state = chunked(*inputs, None, **how(spec), keep_state=False)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert state is None or spec.decay == "channel"


def test_split_prefill_then_decode(spec):
    q, k, v, b, g = drawn(spec)
    expected, end = recurrent(q, k, v, b, g, zeros(spec, v), **how(spec))
    state, outs = None, []
    for first, last in ((0, 70), (70, 99), (99, 140)):
        part = slice(first, last)
        decay = None if g is None else g[:, :, part]
        out, state = chunked(q[:, :, :, part], k[:, :, part], v[:, :, part], b[:, :, part], decay, state, **how(spec))
        outs.append(out)
    decay = None if g is None else g[:, :, 140:]
    out, state = recurrent(q[:, :, :, 140:], k[:, :, 140:], v[:, :, 140:], b[:, :, 140:], decay, state, **how(spec))
    torch.testing.assert_close(torch.cat([*outs, out], dim=3), expected, **CLOSE)
    torch.testing.assert_close(state, end, **CLOSE)


@pytest.mark.parametrize("name", [name for name, spec in VARIANTS.items() if spec.decay != "none"])
def test_strong_decay_does_not_overflow(name):
    spec = VARIANTS[name]
    q, k, v, b, g = drawn(spec)
    out, state = chunked(q, k, v, b, g * 1000, None, **how(spec))
    grads = gradients([out, state], [q, k, v, b])
    assert all(torch.isfinite(x).all() for x in (out, state, *grads))


def test_state_survives_16k_tokens(spec):
    inputs = [None if x is None else x.detach() for x in drawn(spec, 16384, 1, 1, 1, 4, torch.float64)]
    _, exact = chunked(*inputs, None, **how(spec))
    _, state = chunked(*(None if x is None else x.float() for x in inputs), None, **how(spec))
    assert (state - exact).norm() / exact.norm() < 1e-3
    half = [None if x is None else x[:, :, ..., :2048, :] if x.dim() > 3 else x[..., :2048] for x in inputs]
    stepped = recurrent(*(None if x is None else x.float() for x in half), zeros(spec, half[2]).float(), **how(spec))[1]
    exact = chunked(*half, None, **how(spec))[1]
    assert (stepped - exact).norm() / exact.norm() < 1e-3


def test_mixed_keys_are_a_convolution_in_any_parts():
    torch.manual_seed(0)
    k, weights = torch.randn(2, 3, 20, 4), torch.randn(3, 3, 4)
    whole, _ = mixed_keys(k, weights, None, Chunk(torch.arange(20)[None], 0, None, None, 2))
    for t in (0, 1, 2, 19):
        expected = sum(weights[:, j] * k[:, :, t - j] for j in range(3) if t >= j)
        torch.testing.assert_close(whole[:, :, t], expected)
    parts, before = [], None
    for first, last in ((0, 1), (1, 12), (12, 13), (13, 20)):
        chunk = Chunk(torch.arange(first, last)[None], first, None, None, 2)
        mixed, before = mixed_keys(k[:, :, first:last], weights, before, chunk)
        parts.append(mixed)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)


def test_mixed_keys_of_padded_rows_go_on_from_real_tokens():
    torch.manual_seed(0)
    k, weights = torch.randn(2, 1, 12, 4), torch.randn(1, 3, 4)
    chunk = Chunk(torch.arange(8)[None], 0, torch.tensor([8, 1]), None, 2)
    poisoned = k[:, :, :8].clone()
    poisoned[1, :, 1:] = float("nan")
    _, recent = mixed_keys(poisoned, weights, None, chunk)
    torch.testing.assert_close(recent[0], k[0, :, 6:8])
    torch.testing.assert_close(recent[1], torch.cat([torch.zeros(1, 1, 4), k[1, :, :1]], dim=1))


# -- specs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("features", {"features": "relu"}),
        ("degree", {"degree": 5}),
        ("dim", {"dim": 0}),
        ("rule", {"rule": "max"}),
        ("rule", {"rule": "sum", "degree": 1}),
        ("decay", {"decay": "slow"}),
        ("decay", {"decay": "channel"}),
        ("mixing", {"mixing": 0}),
        ("rope", {"rope": 1}),
        ("window", {"window": -1}),
        ("sinks", {"window": 0}),
        ("sink_positions", {"sink_positions": "far"}),
        ("features", {"features": "hedgehog"}),
        ("mix", {"mix": "third"}),
        ("mix", {"mix": "half", "window": 0, "sinks": 0}),
        ("mix", {"mix": "joint"}),
        ("mix", {"mix": "joint", "rule": "sum", "rope": True, "sinks": 4}),
        ("mix", {"mix": "joint", "rule": "sum", "rope": True, "sinks": 0, "mixing": 2}),
    ],
)
def test_bad_specs_name_the_field(field, options):
    with pytest.raises(hz.HybridizeError, match=rf"linear\.{field}: got"):
        hz.Linear(**options)


def test_specs_round_trip(spec):
    assert spec_from_dict(spec_to_dict(spec)) == spec


def test_costs_of_the_headline_plan():
    """Llama-3.1-8B, 16 of 256 groups with 528 features, windows of 64 with 4 sinks everywhere, 32K: the spec's arithmetic."""
    geometry = hz.Geometry("llama", 32, 32, 8, 128, 131072)
    rows = [["linear" if i % 2 == 0 and j == 0 else "window" for j in range(8)] for i in range(32)]
    operators = {"linear": hz.Linear(), "window": hz.Window(64, 4, "rebased")}
    plan = hz.AttentionPlan(geometry, operators, tuple(map(tuple, rows)))
    assert operators["linear"].width == 528
    full = hz.AttentionPlan.base(geometry)
    assert full.cache_bytes(32768) / plan.cache_bytes(32768) > 320
    assert plan.cache_bytes(10**6) == plan.cache_bytes(32768)
    # a state is written once, asked once (delta) and read by 4 heads; 528 x 128 multiply-adds each
    window = hz.AttentionPlan.from_layers(geometry, [], operators["window"])
    assert plan.decode_flops(1000) - window.decode_flops(1000) == 16 * 6 * 2 * 528 * 128


def test_without():
    spec = hz.Linear(window=64, sinks=4)
    assert spec.without("linear") == hz.Window(64, 4, "rebased")
    assert spec.without("window") == hz.Linear(window=1, sinks=4)
    assert spec.without("sinks") == hz.Linear(window=64, sinks=0, sink_positions="absolute")
    assert hz.Linear(window=0, sinks=0).without("linear") == hz.Window(1, 0)


# -- in a model -----------------------------------------------------------------------------------------------------


def test_conversion_begins_at_the_window(ids):
    base = make_base("qwen3")
    linear = hz.convert(base, make_plan(base, "linear"))
    window = hz.convert(base, make_plan(base, "window_rebased"))
    with torch.no_grad():
        assert torch.equal(linear(ids).logits, window(ids).logits)
    loss = linear.train()(ids, labels=ids).loss
    loss.backward()
    assert all(branch.gate.grad.abs().max() > 0 for branches in linear.branches() for branch in branches.values())


def test_state_off_is_the_window_alone(ids):
    base = make_base("llama")
    model = make_hybrid(base, "linear")
    with torch.no_grad():
        whole, without = model(ids).logits, hz.convert(base, make_plan(base, "window_rebased")).eval()(ids).logits
        with model.temporary_plan(model.plan.without("linear")):
            assert torch.equal(model(ids).logits, without)
        assert torch.equal(model(ids).logits, whole)  # what is learned comes back
        with model.temporary_plan(make_plan(base, "linear_channel")):
            assert not torch.allclose(model(ids).logits, whole)
        assert torch.equal(model(ids).logits, whole)
        assert not torch.allclose(whole, without)


def test_learned_parameters_follow_their_group(ids):
    """A re-cut keeps them where a group stays linear, wherever that group lies in memory now."""
    base = make_base("llama")
    geometry, operators = hz.geometry_of(base.config), {"linear": hz.Linear(dim=4, window=5), "window": hz.Window(5)}
    first = hz.AttentionPlan(geometry, operators, (("linear", "window", "linear"),) * 3)
    second = hz.AttentionPlan(geometry, operators, (("window", "window", "linear"),) * 3)
    model = hz.convert(base, first)
    kept = model.branches()[1][2]
    model.set_plan(second)
    assert model.branches()[1] == {2: kept}
    assert sum(".branches." in name for name in model.state_dict()) == 3 * len(list(kept.parameters()))


def test_parameters_stay_fp32(ids, tmp_path):
    model = make_hybrid(make_base("qwen2"), "linear")
    exact = {name: p.clone() for name, p in model.named_parameters() if ".branches." in name}
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = hz.families.HybridQwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    for name, parameter in loaded.named_parameters():
        if ".branches." in name:
            assert torch.equal(parameter, exact[name]), name
    cache = loaded.new_cache()
    with torch.no_grad():
        assert loaded(ids, past_key_values=cache).logits.dtype == torch.bfloat16
    assert all(state.memory.dtype == torch.float32 for layer in cache.layers for state in layer.states)


def test_rows_of_nothing_but_padding_stay_finite(ids):
    for operator in ("linear", "linear_alone", "linear_channel"):
        mask = torch.ones_like(ids)
        mask[1] = 0
        model = make_hybrid(make_base("llama"), operator).train()
        logits = model(ids, attention_mask=mask).logits
        logits[0].sum().backward()
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_two_conversions_with_one_seed_are_one(ids):
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(hz.convert(make_base("llama"), make_plan(make_base("llama"), "linear")).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_joint_is_the_definition(ids):
    """Both parts written out with whole matrices, for one layer's heads."""
    from hybridize.operators.contract import Heads
    from hybridize.operators.joint import JointAttention
    from hybridize.operators.linear import Branch

    torch.manual_seed(0)
    spec = hz.Linear("hedgehog", 1, 5, "sum", rope=True, window=6, sinks=0, mix="joint")
    operator = JointAttention(spec, {0: Branch(spec, 8, 2)})
    q, k, v = torch.randn(2, 2, 40, 8), torch.randn(2, 1, 40, 8), torch.randn(2, 1, 40, 8)
    none = lambda *_: None  # noqa: E731
    heads = Heads(q, k, v, Chunk(torch.arange(40)[None], 0, None, None, 2), 0.3, 0.0, q, none, none, none)
    out, _ = operator(heads, None)
    fq, fk, _, write, _ = operator.inputs(heads, None)
    far = (fq[:, 0] @ fk.transpose(-1, -2)) * write[:, :, None]
    logits = q @ k.transpose(-1, -2) * 0.3
    behind = torch.arange(40)[:, None] - torch.arange(40)
    near = logits.masked_fill(~((behind >= 0) & (behind < 6)), float("-inf"))
    near = 0.1 * (near - near.amax(-1, keepdim=True)).exp()
    weights = near + far * (behind >= 6)
    torch.testing.assert_close(out, (weights / weights.sum(-1, keepdim=True)) @ v, rtol=1e-4, atol=1e-5)
