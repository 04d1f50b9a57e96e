"""Indexed attention: what is chosen, what heads see, what the index learns."""

import pytest
import torch

import hybridize as hz
from conftest import make_base
from hybridize.operators.choosing import WIDTH, chosen, page_bounds, random_scores
from hybridize.operators.full import FullAttention
from hybridize.operators.window import WindowAttention


def mixed_plan(base, **more):
    """Groups that retrieve with both heads, with one of them, and with none."""
    both, one = (
        hz.Indexed(dim=4, window=5, sinks=2, **more),
        hz.Indexed(dim=4, window=5, sinks=2, retrieves=(False, True), **more),
    )
    operators = {"both": both, "one": one, "window": hz.Window(5, 2)}
    return hz.AttentionPlan(hz.geometry_of(base.config), operators, [("one", "window", "both")] * 3)


def random_case(block, tokens=75, scale=4.0):
    rng = torch.Generator().manual_seed(block)
    positions = torch.arange(tokens)[None].expand(2, -1)
    return scale * torch.randn(2, 3, tokens, tokens, generator=rng), positions


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_chosen_is_the_smallest_set_to_within_a_bin(block, p):
    scores, positions = random_case(block)
    spec = hz.Indexed(top_p=p, block=block, sinks=3)
    mask = chosen(scores, positions, spec)
    tokens = scores.shape[-1]
    for b, h, n in [(0, 0, 74), (1, 2, 60), (0, 1, 33), (1, 0, 5), (0, 2, 0)]:
        row = scores[b, h, n, : n + 1].double()
        weights = row.softmax(-1)
        blocks = torch.arange(n + 1) // block
        always = {int(x) for x in torch.unique(blocks) if x * block < 3 or x == n // block}
        peaks = {int(x): float(row[blocks == x].max()) for x in torch.unique(blocks)}
        order = sorted(always) + sorted(set(peaks) - always, key=lambda x: -peaks[x])
        smallest, share = [], 0.0
        for x in order:
            if share >= p and x not in always:
                break
            smallest.append(x)
            share += float(weights[blocks == x].sum())
        seen = {int(x) for x in torch.unique(blocks[mask[b, h, n, : n + 1]])}
        assert seen >= set(smallest) and not mask[b, h, n, n + 1 :].any()
        last = min((peaks[x] for x in smallest if x not in always), default=float(row.max()))
        # what is beyond it shares the bin of its last one, and always-seen blocks count before the bin of the largest score
        assert all(peaks[x] > last - WIDTH - 1e-4 or peaks[x] > float(row.max()) - WIDTH - 1e-4 for x in seen - set(smallest))
        whole = torch.tensor([int(x) in seen for x in blocks])
        assert torch.equal(mask[b, h, n, : n + 1], whole) and tokens == 75
        assert float(weights[whole].sum()) >= min(p, 1.0) - 1e-6


def test_tokens_that_tie_are_chosen_together():
    """The same token twice has one index key in the first layer: which of them is seen must not hang on the order of sums."""
    scores, positions = random_case(1)
    scores[..., 40] = scores[..., 20] + 1e-6 * torch.randn(scores.shape[:-1])
    mask = chosen(scores, positions, hz.Indexed(block=1, top_p=0.7, sinks=0))
    late = mask[..., 41:, :]
    assert torch.equal(late[..., 20], late[..., 40]) and 0 < late[..., 20].float().mean() < 1


def test_bounds_on_how_many():
    scores, positions = random_case(4)
    few = chosen(scores, positions, hz.Indexed(block=4, top_p=1.0, max_tokens=20, sinks=2))
    counted = few[:, :, 40:].sum(-1)
    assert counted.max() <= 20 and counted.min() >= 17  # five blocks, the last of them not whole
    assert few[..., :2].sum(-1).min() >= 1  # sinks are always there
    many = chosen(scores, positions, hz.Indexed(block=4, top_p=0.01, min_tokens=32, sinks=2))
    assert many[:, :, 40:].sum(-1).min() >= 29
    loose = chosen(scores, positions, hz.Indexed(block=4, top_p=0.5, sinks=2))
    assert (loose <= chosen(scores, positions, hz.Indexed(block=4, top_p=0.9, sinks=2))).all()


def test_page_bounds_are_bounds():
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 21, 8)
    bounds, exact = page_bounds(q, k, 4), q @ k.transpose(-1, -2)
    assert (bounds >= exact - 1e-5).all()
    each = k[:, :, :20].unflatten(2, (5, 4))
    low, high = each.amin(3)[:, :, None], each.amax(3)[:, :, None]
    wanted = torch.maximum(q[:, :, :, None] * low, q[:, :, :, None] * high).sum(-1)
    torch.testing.assert_close(bounds[..., :20:4], wanted)


def test_random_scores_do_not_hang_on_the_call():
    positions = torch.arange(30)[None]
    whole = random_scores(positions, 3, 30)
    assert torch.equal(random_scores(positions[:, 17:], 3, 40)[..., :30], whole[:, :, 17:])
    assert abs(float(whole.mean()) - 0.5) < 0.02 and len(whole.unique()) > 2600


def test_heads_of_a_group_see_their_own(ids):
    """A head that retrieves everything is the base's, one that does not is a window's; groups that differ are one span."""
    base = make_base("qwen3")
    model = hz.convert(base, mixed_plan(base, select="exact", top_p=1.0))
    assert [groups for _, groups in model.plan.spans(0)] == [(0, 2), (1,)]
    found = {}

    def keep(module, args, out):
        found["indexed"] = args[0], out[0]

    operators = model.attentions()[0].operators
    hook = operators[0].register_forward_hook(keep)
    with torch.no_grad():
        model(ids)
        hook.remove()
        heads, out = found["indexed"]
        full = FullAttention(hz.Full())(heads, None)[0]
        near = WindowAttention(hz.Window(5, 2))(heads, None)[0]
    torch.testing.assert_close(out[:, [1, 2, 3]], full[:, [1, 2, 3]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[:, [0]], near[:, [0]], rtol=1e-5, atol=1e-6)
    assert (full[:, 0] - near[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("select", ["all", "pages", "random"])
def test_controls_decode_as_they_prefill(ids, select):
    base = make_base("llama")
    more = {"all": {}, "pages": dict(top_p=1.0, max_tokens=12), "random": dict(top_p=1.0, max_tokens=12)}[select]
    model = hz.convert(base, mixed_plan(base, select=select, block=4, **more))
    with torch.no_grad():
        whole, cache = model(ids).logits, model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([13, 1, 20, 1, 5], dim=1)]
        full = base(ids).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=2e-5)
    assert cache.bytes() == model.plan.cache_bytes(40, 2, "float32")
    assert not any(model.branches()) and (whole - full).abs().max() > 1e-3


def test_dense_below(ids):
    base = make_base("llama")
    plan = hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [], hz.Indexed(dim=4, block=4, top_p=0.3, dense_below=25))
    model = hz.convert(base, plan)
    with torch.no_grad():
        mine, theirs = model(ids).logits, base(ids).logits
    torch.testing.assert_close(mine[:, :25], theirs[:, :25], rtol=1e-4, atol=2e-5)
    assert (mine[:, 30:] - theirs[:, 30:]).abs().max() > 1e-3


def test_costs_are_what_is_seen():
    """Pairs by hand, where the number of tokens is bounded, and index keys among the bytes."""
    geometry = hz.Geometry("llama", 1, 4, 2, 64, 4096)
    spec = hz.Indexed(top_p=1.0, max_tokens=96, block=32, dense_below=100, window=50, sinks=4, retrieves=(True, False))
    far = sum(n + 1 if n < 100 else min(n + 1, 96) for n in range(300))
    near = sum(min(n + 1, 54) for n in range(300))
    assert spec.visible_pairs(300) == round((far + near) / 2)
    assert spec.visible_keys(300) == (96 + 54) // 2 and spec.visible_keys(90) == (90 + 54) // 2
    assert hz.Indexed(top_p=0.9).visible_pairs(300) == 300 * 301 // 2  # at most: how many depends on the text
    plan = hz.AttentionPlan(geometry, {"i": spec, "w": hz.Window(50, 4)}, [("i", "w")])
    assert plan.cache_bytes(300) == 16 + 300 * (2 * 64 + 16) * 2 + 54 * 2 * 64 * 2
    assert plan.decode_flops(300) == 4 * 64 * 2 * (75 + 54) + 2 * 16 * 300
    off = plan.without("indexed")
    assert off.spec(0, 0) == hz.Window(50, 4) and plan.far_groups == [(0, 0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("select", "best"), ("top_p", 0), ("top_p", 1.5), ("top_p", True), ("dim", 0), ("block", 0), ("window", 0),
        ("sinks", -1), ("min_tokens", -1), ("max_tokens", 2.5), ("dense_below", -1), ("dense_prefill", 1), ("retrieves", (False, False)),
        ("retrieves", (1, 0)),
    ],
)  # fmt: skip
def test_bad_fields_are_named(field, value):
    with pytest.raises(hz.HybridizeError, match=f"indexed.{field}"):
        hz.Indexed(**{field: value})


def test_fields_that_do_not_go_together():
    with pytest.raises(hz.HybridizeError, match="max_tokens"):
        hz.Indexed("pages")
    with pytest.raises(hz.HybridizeError, match="min_tokens=64"):
        hz.Indexed(min_tokens=64, max_tokens=32)
    geometry = hz.Geometry("llama", 1, 6, 2, 64, 4096)
    with pytest.raises(hz.HybridizeError, match="3 query heads"):
        hz.AttentionPlan.from_layers(geometry, [], hz.Indexed(retrieves=(True, False)))


def test_plan_round_trip(tmp_path):
    base = make_base("llama")
    plan = mixed_plan(base)
    assert hz.AttentionPlan.load(plan.save(tmp_path / "plan.json")) == plan
    assert plan.map().count("indexed by") == 1
