"""Indexed attention: what is chosen, what heads see, what the index learns."""

import pytest
import torch

import hybridize as hz
from conftest import make_base
from hybridize.data.mixture import Mixture
from hybridize.data.text import load_text
from hybridize.operators.choosing import WIDTH, chosen, page_bounds, random_scores
from hybridize.operators.full import FullAttention
from hybridize.operators.indexed import Index
from hybridize.operators.window import WindowAttention
from hybridize.training.index import Moments, learn_index, start_index
from hybridize.training.losses import chunked_top_kl
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune, masters, teaching
from hybridize.training.top import TopRows, write_top


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
        ("sinks", -1), ("min_tokens", -1), ("max_tokens", 2.5), ("dense_below", -1), ("dense_prefill", 1),
        ("retrieves", (False, False)), ("retrieves", (1, 0)),
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


# -- what the index learns ----------------------------------------------------------------------------------------


def rows_of(tokenizer, count=4, length=96):
    text = "\n\n".join(load_text("calibration"))
    return Mixture(tokenizer, text, count=count, length=length, kinds=(), text_share=1.0, seed=0)


def errors_of(model, ids):
    """KL of every span of every layer from the base's attention."""
    with torch.no_grad(), teaching(model):
        aux = model.model(input_ids=ids, use_cache=False).aux
    return {name: float(value) for name, value in aux.items() if name.endswith(".error")}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_index_starts_near_and_learns(family, tokenizer, tmp_path):
    base = make_base(family)
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = hz.convert(base, mixed_plan(base, block=4))
    rows = rows_of(tokenizer, 60)
    ids = torch.tensor([rows[i].ids for i in range(50, 54)])
    random = errors_of(model, ids)
    assert len(random) == 3  # the window learns nothing
    with masters(model), teaching(model):
        start_index(model, rows)
    started = errors_of(model, ids)
    assert sum(started.values()) < 0.8 * sum(random.values())
    recipe = Recipe(steps=12, rows=4, length=96, trains="branches", branch_rate=1e-2, warmup=2)
    record = learn_index(model, rows, recipe, tmp_path)
    learned = errors_of(model, ids)
    assert sum(learned.values()) < 0.9 * sum(started.values())
    assert record["losses"][-1] < record["losses"][0] and record["tokens"] == 12 * 4 * 96
    for name, parameter in hz.to_base(model).named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_start_is_the_best_of_its_rank():
    """Against any other projection of as many dimensions: the mean squared error of scores, keys centred."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(400, 12, generator=rng) @ torch.randn(12, 12, generator=rng)
    k = torch.randn(500, 12, generator=rng) @ torch.randn(12, 12, generator=rng) + 3
    index, moments = Index(hz.Indexed(dim=4), 12, 2), Moments(12, torch.device("cpu"))
    with torch.no_grad():
        moments.add(q[:200], k[:100])
        moments.add(q[200:], k[100:])
        moments.give(index, 0.5)
    centred = k - k.mean(0)
    wanted = 0.5 * q @ centred.T

    def error(to_q, to_k):
        return float(((q @ to_q) @ (centred @ to_k).T - wanted).pow(2).sum())

    # Eckart and Young: no matrix of rank 4 is nearer than the first four singular values
    best = float(torch.linalg.svdvals(wanted.double())[4:].pow(2).sum())
    assert error(index.map_q[0].detach(), index.map_k.detach()) == pytest.approx(best, rel=1e-3)
    assert torch.equal(index.map_q[0], index.map_q[1])


def test_the_error_is_the_kl(ids):
    """Written out for one head that retrieves, and no gradient reaches the layer's input."""
    base = make_base("llama")
    model = hz.convert(base, mixed_plan(base, block=4))
    seen = {}

    def keep(module, args):
        seen["heads"] = args[0]

    operator = model.attentions()[0].operators[0]
    hook = operator.register_forward_pre_hook(keep)
    model(ids)
    hook.remove()
    heads = seen["heads"]
    error = operator.error(heads, heads.q)
    parts = []
    for head, group, column in [(1, 0, 1), (2, 1, 0), (3, 1, 1)]:  # in memory: group 0 of the base, then group 2
        index = list(operator.branches.values())[group]
        scores = (heads.q_raw()[:, head] @ index.map_q[column]) @ (heads.k_raw()[:, group] @ index.map_k).transpose(-1, -2)
        true = heads.q[:, head] @ heads.k[:, group].transpose(-1, -2) * heads.scale
        future = torch.ones(40, 40, dtype=torch.bool).triu(1)
        mine, true = (x.masked_fill(future, float("-inf")).log_softmax(-1) for x in (scores, true))
        parts.append(true.exp() * (true - mine).masked_fill(future, 0.0))
    torch.testing.assert_close(error, torch.stack(parts).sum(-1).mean(), rtol=1e-4, atol=1e-5)
    error.backward()
    assert model.model.embed_tokens.weight.grad is None
    assert all(branch.map_k.grad.abs().sum() > 0 for branch in operator.branches.values())


def test_top_tokens_of_a_teacher(tokenizer, tmp_path, monkeypatch):
    """What is written down is what a teacher beside the student would say, and the student comes nearer to it."""
    base = make_base("llama")
    model = hz.convert(base, mixed_plan(base, block=4, top_p=0.3))
    rows = rows_of(tokenizer, 24)
    monkeypatch.setattr("hybridize.training.top.AT_ONCE", 7)
    count = write_top(model, rows, 10, 5, tmp_path / "top.safetensors")
    top = TopRows(rows, tmp_path / "top.safetensors")
    assert count == sum(len(rows[i].ids) - rows[i].start for i in range(24)) and len(top) == 24
    for i in (0, 7, 23):
        row = top[i]
        with torch.no_grad():
            logits = base(torch.tensor([row.ids])).logits[0, row.start - 1 : -1]
        wanted = logits.topk(10)
        torch.testing.assert_close(row.top_logits, wanted.values, rtol=1e-4, atol=1e-5)
        assert (row.top_ids == wanted.indices).float().mean() > 0.95  # ties
    frozen = [p.detach().clone() for branches in model.branches() for b in branches.values() for p in b.parameters()]
    recipe = Recipe(steps=6, rows=4, length=96, trains="base", rate=1e-3, ce=0.0, kl=1.0, top=10, warmup=1)
    record = fine_tune(model, top, recipe, tmp_path / "distil")
    assert record["losses"][-1] < record["losses"][0]
    now = [p for branches in model.branches() for b in branches.values() for p in b.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(frozen, now))
    with pytest.raises(hz.HybridizeError, match="24 rows"):
        TopRows(rows_of(tokenizer, 25), tmp_path / "top.safetensors")


def test_top_kl_is_the_kl():
    hidden, head = torch.randn(9, 6, requires_grad=True), torch.nn.Linear(6, 20, bias=False)
    ids, logits = torch.randn(9, 20).topk(3).indices, torch.randn(9, 3)
    losses = chunked_top_kl(hidden, head, ids, logits, chunk=4)
    p, q = logits.softmax(-1), head(hidden).softmax(-1).gather(-1, ids)
    torch.testing.assert_close(losses, (p * (p / q).log()).sum(-1))
    losses.sum().backward()
    assert hidden.grad.abs().sum() > 0
