"""SnapKV against its definition written out, learned gates, plans of equal bytes, components off."""

import numpy as np
import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan
from hybridize.data.needles import needle_prompts
from hybridize.data.text import bundled_text
from hybridize.methods.baselines import baseline_plan, matched_plan
from hybridize.operators.contract import Chunk, Heads
from hybridize.operators.snapkv import SnapKVAttention
from hybridize.scoring.duo import duo_scores

GEOMETRY = hz.Geometry("llama", layers=6, heads=6, kv_heads=3, head_dim=8, context=4096)


def heads(q, k, v, prompt):
    batch, tokens = q.shape[0], q.shape[2]
    chunk = Chunk(torch.arange(tokens)[None], 0, None, prompt, batch)
    return Heads(q, k, v, chunk, 0.3, 0.0, q, lambda: q, lambda: k, lambda n: q)


@pytest.mark.parametrize(("prompt", "tokens"), [(23, 30), (12, 20), (30, 31)])
def test_snapkv_is_its_definition(prompt, tokens):
    """Query by query in fp64: full in the prompt; behind it, the tokens with the most votes of the last queries."""
    spec = hz.SnapKV(10, observe=4, pool=3)
    generator = torch.Generator().manual_seed(prompt)
    q = torch.randn(1, 4, tokens, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, tokens, 8, generator=generator, dtype=torch.float64) for _ in "kv")
    out, _ = SnapKVAttention(spec)(heads(q, k, v, torch.tensor([prompt])), None)
    for group in range(2):
        votes = torch.zeros(prompt)
        for n in range(prompt - 4, prompt):
            for head in (2 * group, 2 * group + 1):
                votes[: n + 1] += torch.softmax(0.3 * k[0, group, : n + 1] @ q[0, head, n], 0)
        padded = torch.nn.functional.pad(votes, (1, 1))
        pooled = [float(padded[i : i + 3].mean()) for i in range(prompt - 4)]
        chosen = sorted(range(prompt - 4), key=lambda i: -pooled[i])[:6]
        kept = sorted({*chosen, *range(prompt - 4, prompt)})
        for head in (2 * group, 2 * group + 1):
            for n in range(tokens):
                seen = list(range(n + 1)) if n < prompt else [*kept, *range(prompt, n + 1)]
                weights = torch.softmax(0.3 * k[0, group, seen] @ q[0, head, n], 0)
                torch.testing.assert_close(out[0, head, n], weights @ v[0, group, seen], rtol=1e-5, atol=1e-6)


def test_snapkv_really_drops():
    base = make_base("qwen3")
    plan = hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [], hz.SnapKV(12, observe=4, pool=3))
    model = hz.convert(base, plan).eval()
    ids = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache, prompt_len=torch.tensor([60, 60]))
    per_token = 2 * 16 * 4 * 3 * 3
    assert cache.bytes() == 2 * (12 * per_token + 16) == plan.cache_bytes(60, 2, "float32")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    full = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert out.shape == full.shape and not torch.equal(out, full)
    assert torch.equal(out[:, :61], full[:, :61])  # the first token is the prompt's, and the prompt is full


@pytest.mark.parametrize(
    "options", [dict(budget=4, observe=4), dict(budget=40, pool=4), dict(budget=0), dict(budget=4, observe=0)]
)
def test_bad_snapkv(options):
    with pytest.raises(hz.HybridizeError, match=r"snapkv\."):
        hz.SnapKV(**options)


# -- learned gates --------------------------------------------------------------------------------------------------


def test_gates_find_the_group_that_looks_far(tokenizer):
    """A model in which one group of one layer alone sees past the window: its gate stays, the others close."""
    base = make_base("llama", num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
        far = base.model.layers[1].self_attn
        far.k_proj.weight[16:32] = 0  # group 1 looks at everything alike
        far.k_proj.bias[16:32] = 0
        far.o_proj.weight[:, 32:64] *= 3000
    model = hz.convert(base, make_plan(base, "full")).eval()
    prompts = needle_prompts(tokenizer, bundled_text("calibration"), length=760, count=3, kinds=("number",), seed=1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    scores = duo_scores(model, prompts, hz.Window(8, 1), steps=60, price=0.001)
    assert scores.unit == "group" and scores.samples.shape == (1, 2, 3)
    assert scores.ranking()[0] == 4 and scores.values[1, 1] > 2 * np.delete(scores.values.ravel(), 4).max()
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
    assert model.plan.assignment == make_plan(base, "full").assignment
    with torch.no_grad():
        ids = torch.arange(3, 43)[None]
        assert torch.equal(model(ids).logits, base(ids).logits)  # the operators are back
    again = duo_scores(model, prompts, hz.Window(8, 1), steps=60, price=0.001)
    assert np.array_equal(again.values, scores.values)


# -- equal bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["streaming", "snapkv"])
@pytest.mark.parametrize("context", [256, 1000, 4096])
def test_baselines_take_the_bytes_they_may_and_no_more(name, context):
    match = hz.AttentionPlan.from_layers(GEOMETRY, [0, 3], hz.Window(64, 4))
    plan = baseline_plan(name, match, context)
    (spec,) = plan.specs()
    assert spec.kind == ("window" if name == "streaming" else "snapkv")
    budget, got = match.cache_bytes(context), plan.cache_bytes(context)
    one_more = 18 * 2 * 8 * 2
    assert got <= budget < got + one_more
    if name == "streaming":
        assert spec.sink_positions == "rebased"


def test_scores_become_plans_of_equal_bytes():
    match = hz.AttentionPlan.from_layers(GEOMETRY, [0, 3], hz.Window(64, 4))
    values = np.random.default_rng(0).normal(size=(1, 6, 3))
    plan = matched_plan(hz.Scores("group", values), match, 1000, hz.Window(64, 4), {"method": "x"})
    best = sorted(divmod(int(i), 3) for i in np.argsort(-values.ravel())[:6])
    assert plan.kept_groups == best and plan.cache_bytes(1000) == match.cache_bytes(1000)
    assert plan.provenance == {"method": "x", "matched_at": 1000}
    by_layer = matched_plan(hz.Scores("layer", values[:, :, 0]), match, 1000, hz.Window(64, 4), {})
    assert by_layer.kept_layers == sorted(int(i) for i in np.argsort(-values[0, :, 0])[:2])
    wide = matched_plan(hz.Scores("group", values), match, 1000, hz.Window(128, 4), {})
    assert len(wide.kept_groups) == 5  # a wider window leaves less for full attention
    with pytest.raises(hz.HybridizeError, match="cache bytes"):
        matched_plan(hz.Scores("group", values), match, 1000, hz.Window(900, 4), {})
    with pytest.raises(hz.HybridizeError, match="baseline"):
        baseline_plan("h2o", match, 100)


# -- components off -------------------------------------------------------------------------------------------------


def test_without():
    plan = hz.AttentionPlan.from_layers(GEOMETRY, [1], hz.Window(64, 4, "rebased"))
    off = plan.without("sinks")
    assert off.operators["window"] == hz.Window(64, 0) and off.operators["full"] == hz.Full()
    assert off.assignment == plan.assignment and off.provenance["without"] == "sinks"
    assert plan.without("window").operators["window"] == hz.Window(1, 4, "rebased")
    assert hz.AttentionPlan.from_dict(off.to_dict()) == off
    for part in ("gate", ""):
        with pytest.raises(hz.HybridizeError, match="without"):
            plan.without(part)
    with pytest.raises(hz.HybridizeError, match="without"):
        hz.AttentionPlan.base(GEOMETRY).without("sinks")
    with pytest.raises(hz.HybridizeError, match="without"):
        off.without("sinks")
