"""Gated attention (L2A): which tokens look far, what they see there, and what the router learns from it."""

import pytest
import torch
import torch.nn.functional as F

import hybridize as hz
from conftest import make_base, make_hybrid
from hybridize.operators.dense import explicit_attention
from hybridize.operators.gated import open_attention, open_by_rule, open_first

WINDOW = 5


def gated(base, spec):
    return hz.convert(base, hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [], spec)).eval()


def two_attentions(base, ids, opens, window=WINDOW):
    """Logits by the layer's formula, from the base's weights alone: the second attention has copies of the first's.

    opens(layer, z): which tokens are open, bool [B, T].
    """
    body, config = base.model, base.config
    hidden, n = body.embed_tokens(ids), torch.arange(ids.shape[1])
    cos, sin = body.rotary_emb(hidden, position_ids=n[None])

    def attend(layer, h, size):
        attention, shape = layer.self_attn, (*h.shape[:-1], -1, layer.self_attn.head_dim)
        q, k, v = (getattr(attention, f"{x}_proj")(h).view(shape) for x in "qkv")
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def turn(x):
            half = x.shape[-1] // 2
            return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]

        q, k = turn(q), turn(k)
        k, v = (x.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=1) for x in (k, v))
        seen = (n <= n[:, None]) & (n[:, None] - n < size)
        weights = (q @ k.transpose(-1, -2) * attention.scaling).masked_fill(~seen, float("-inf")).softmax(-1)
        return attention.o_proj((weights @ v).transpose(1, 2).flatten(2))

    for i, layer in enumerate(body.layers):
        hidden = hidden + attend(layer, layer.input_layernorm(hidden), window)
        far = attend(layer, layer.input_layernorm(hidden), len(n))
        hidden = hidden + opens(i)[..., None] * far
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return base.lm_head(body.norm(hidden))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_new_layer_is_two_attentions(family, ids):
    """The router starts at 0, where every token is open (tau, theta: sigmoid(0) >= 0.5)."""
    base = make_base(family)
    everything = torch.ones_like(ids, dtype=torch.float32)
    model = gated(base, hz.Gated(window=WINDOW))
    torch.testing.assert_close(model(ids).logits, two_attentions(base, ids, lambda i: everything), rtol=1e-4, atol=1e-4)
    shared = gated(base, hz.Gated(window=WINDOW, share_projections=True))
    torch.testing.assert_close(shared(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    sizes = [sum(p.numel() for b in m.branches() for x in b.values() for p in x.parameters()) for m in (model, shared)]
    assert sizes[1] == 3 * 2 * base.config.hidden_size < sizes[0]  # norms and routers


@pytest.mark.parametrize("gate", ["random", "position"])
@torch.no_grad()
def test_controls_open_by_rule(gate, ids):
    base = make_base("llama")
    n = torch.arange(ids.shape[1])[None].expand_as(ids)
    expected = two_attentions(base, ids, lambda i: open_by_rule(gate, 0.3, n, i).float())
    model = gated(base, hz.Gated(window=WINDOW, gate=gate, rate=0.3))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    said = model.model(ids, use_cache=False).aux
    assert set(said) == {f"{i}.far.open" for i in range(3)}
    many = torch.arange(10_000)[None]
    assert abs(float(open_by_rule(gate, 0.3, many, 1).float().mean()) - 0.3) < 0.02
    layers = [open_by_rule(gate, 0.3, many, i) for i in (0, 1)]
    assert torch.equal(*layers) == (gate == "position")


@torch.no_grad()
def test_closed_is_the_window_alone(ids):
    """A pruned layer is a gate that is shut; an identity's copies add nothing at first."""
    base = make_base("qwen2")
    window = gated(base, hz.Window(WINDOW, 0))(ids).logits
    shut = gated(base, hz.Gated(window=WINDOW))
    for branches in shut.branches():
        branches[-1].norm.weight.fill_(1.0)
        branches[-1].router.weight.fill_(0.0)
    shut.set_plan(hz.AttentionPlan.from_layers(shut.plan.geometry, [], hz.Gated(window=WINDOW, theta=0.6)))
    assert torch.equal(shut(ids).logits, window)
    assert all(float(x) == 0 for name, x in shut.model(ids, use_cache=False).aux.items() if name.endswith("open"))
    torch.testing.assert_close(gated(base, hz.Gated(window=WINDOW, init="identity"))(ids).logits, window)
    never = gated(base, hz.Gated(window=WINDOW, gate="random", rate=0.0))
    assert torch.equal(never(ids).logits, window)
    assert torch.equal(gated(base, shut.plan.without("far").operators["gated"])(ids).logits, window)


@torch.no_grad()
def test_padding_is_never_open(ids):
    model = make_hybrid(make_base("llama"), "gated")
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    padded = model.model(ids, attention_mask=mask, use_cache=False).aux
    alone = [model.model(row, use_cache=False).aux for row in (ids[:1], ids[1:, 15:])]
    for name, value in padded.items():
        weighted = (40 * alone[0][name] + 25 * alone[1][name]) / 65
        torch.testing.assert_close(value, weighted)


def router_gradient(leak, ids, train=True):
    """(gradient of each layer's router input's weight by token is open or not, open share): one loss over everything."""
    torch.manual_seed(3)
    model = make_hybrid(make_base("llama"), "gated")
    model.set_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [], hz.Gated(window=WINDOW, tau=0.5, leak=leak)))
    model.train(train)
    far, kept = model.model.layers[-1].far, []  # no other router behind it
    real = type(far)._gate

    def watched(self, h, chunk):
        weight, is_open, aux = real(self, h, chunk)
        if self is far:
            weight.retain_grad()
            kept.append((weight, is_open))
        return weight, is_open, aux

    type(far)._gate = watched
    try:
        logits = model(ids).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    finally:
        type(far)._gate = real
    (weight, is_open), *_ = kept
    return weight.grad, is_open, far.router.weight.grad


def test_closed_tokens_teach_the_router_only_in_a_leak(ids):
    gradient, is_open, _ = router_gradient(0.0, ids)
    assert 0 < is_open.float().mean() < 1
    assert (gradient[~is_open] == 0).all() and (gradient[is_open] != 0).any()
    leaked, is_open, router = router_gradient(1.0, ids)
    assert (leaked[~is_open] != 0).any() and router.abs().max() > 0
    torch.testing.assert_close(leaked[is_open], gradient[is_open], rtol=1e-3, atol=1e-6)  # the function is the same


def test_a_leak_is_replayed_under_checkpointing(ids):
    def gradients(checkpointing):
        torch.manual_seed(5)
        model = make_hybrid(make_base("llama"), "gated").train()
        model.set_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [], hz.Gated(window=WINDOW, tau=0.5, leak=0.5)))
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(11)
        for _ in range(3):  # leaks in some layers and not in others
            F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, again = gradients(False), gradients(True)
    assert all(x is not None for x in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


def test_every_parameter_has_a_gradient_where_nothing_is_open(ids):
    model = gated(make_base("llama"), hz.Gated(window=WINDOW, theta=0.9, leak=0.0)).train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all((p.grad == 0).all() for branches in model.branches() for p in branches[-1].parameters())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("offset", [0, 7])
def test_open_queries_see_what_dense_attention_shows_them(share, offset):
    torch.manual_seed(0)
    b, g, r, t, d = 2, 2, 3, 33, 8
    q = torch.randn(b, g * r, t, d, requires_grad=True)
    k, v = (torch.randn(b, g, offset + t, d, requires_grad=True) for _ in "kv")
    is_open = torch.rand(b, t) < share
    is_open[1] &= torch.arange(t) < 20  # a shorter row
    at = offset + torch.arange(t).expand(b, -1)
    seen = torch.arange(offset + t) <= at[:, None, :, None]
    dense = explicit_attention(q, k, v, seen, 0.4) * is_open[:, None, :, None]
    index = open_first(is_open, least=1)
    assert index.shape[1] == max(1, int(is_open.sum(1).max()))
    there = index[:, None, :, None].expand(-1, g * r, -1, d)
    few = open_attention(q.gather(2, there), k, v, at.gather(1, index), is_open.sum(1), 0.4)
    few = few * is_open.gather(1, index)[:, None, :, None]
    mine = torch.zeros_like(q).scatter(2, there, few)
    torch.testing.assert_close(mine, dense)
    weight = torch.randn_like(dense)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (mine, dense)), strict=True):
        torch.testing.assert_close(a, b)


def test_refusals():
    base = make_base("llama")
    geometry = hz.geometry_of(base.config)
    rows = [("gated", "window", "gated"), ("window",) * 3, ("window",) * 3]
    with pytest.raises(hz.HybridizeError, match=r"plan.assignment\[0\].*whole layer"):
        hz.AttentionPlan(geometry, {"gated": hz.Gated(window=8), "window": hz.Window(8, 0)}, rows)
    wrong = {"window": 0, "gate": "maybe", "tau": 0, "theta": 1, "leak": 1.5, "rate": -0.1, "init": "zero"}
    for name, value in wrong.items():
        with pytest.raises(hz.HybridizeError, match=f"gated.{name}: got"):
            hz.Gated(**{name: value})
    with pytest.raises(hz.HybridizeError, match=r"gated\.init"):
        hz.Gated(share_projections=True, init="identity")


def test_what_was_learned_comes_back_and_leaves(ids):
    """A temporary plan keeps the second attention; another kind of gate gets its own."""
    model = make_hybrid(make_base("llama"), "gated")
    with torch.no_grad():
        expected = model(ids).logits
        with model.temporary_plan(hz.AttentionPlan.base(model.plan.geometry)):
            assert all(-1 not in branches for branches in model.branches())
        assert torch.equal(model(ids).logits, expected)
        with model.holding_branches():
            plan = model.plan
            model.set_plan(hz.AttentionPlan.base(plan.geometry))
            model.set_plan(plan)
            assert torch.equal(model(ids).logits, expected)
        base = hz.to_base(model)
        assert torch.equal(base(ids).logits, make_base("llama")(ids).logits)
    norms = [branches[-1].norm for branches in model.branches()]
    model.set_plan(hz.AttentionPlan.from_layers(plan.geometry, [], hz.Gated(window=WINDOW, tau=0.2)))
    assert [branches[-1].norm for branches in model.branches()] == norms
    model.set_plan(hz.AttentionPlan.from_layers(plan.geometry, [], hz.Gated(window=WINDOW, gate="open")))
    assert all(not hasattr(branches[-1], "router") for branches in model.branches())


def test_costs():
    geometry = hz.geometry_of(make_base("llama").config)
    window, every = hz.Window(8, 0), hz.Full()
    spec = hz.Gated(window=8, gate="position", rate=0.25)
    assert spec.cached_tokens(100) == 108
    assert spec.visible_pairs(100) == window.visible_pairs(100) + round(0.25 * every.visible_pairs(100))
    assert hz.Gated(window=8).visible_keys(100) == 108  # at most: the text decides
    assert spec.longest_distance(64) == every.longest_distance(64)
    plan = hz.AttentionPlan.from_layers(geometry, [0], spec)
    assert plan.gate(0) is None and plan.gate(1) == spec
    assert (1, 0) in plan.far_groups and "g = gated" in plan.map()
    assert hz.AttentionPlan.from_dict(plan.to_dict()) == plan
