"""The invariants of the design, for every operator and for mixed plans, in every family."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybridize as hz
from conftest import BASES, OPERATORS, make_base, make_hybrid
from hybridize.conversion import is_learned
from hybridize.operators.choosing import chosen
from hybridize.operators.gated import open_by_score
from hybridize.operators.indexed import Index

pytestmark = pytest.mark.matrix
PROMPT_LEN = 30
CLOSE = dict(rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module", params=BASES)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=[*OPERATORS, "mixed"])
def operator(request):
    return request.param


@pytest.fixture(scope="module")
def base(family):
    return make_base(family)


@pytest.fixture
def hybrid(base, operator):
    return make_hybrid(base, operator)


def lens(ids):
    return torch.full((len(ids),), PROMPT_LEN)


@torch.no_grad()
def whole(model, ids):
    return model(ids, prompt_len=lens(ids)).logits


@torch.no_grad()
def in_chunks(model, ids, split, max_tokens=None, mask=None, prompt_len=None):
    cache, parts, start = model.new_cache(max_tokens), [], 0
    for size in split:
        seen = None if mask is None else mask[:, : start + size]
        out = model(
            ids[:, start : start + size],
            attention_mask=seen,
            past_key_values=cache,
            prompt_len=lens(ids) if prompt_len is None else prompt_len,
        )
        parts.append(out.logits)
        start += size
    return torch.cat(parts, dim=1), cache


def padded(ids, by=9):
    """Row 0 whole, row 1 behind `by` padding columns."""
    row = torch.cat([torch.zeros(by, dtype=torch.long), ids[1, :-by]])
    mask = torch.ones_like(ids)
    mask[1, :by] = 0
    return torch.stack([ids[0], row]), mask


def replay_choices(monkeypatch):
    """What an index or a gate chooses is written down, and given again in the same order once `replay` is set."""
    made = SimpleNamespace(replay=False, masks=[])

    def written_down(choose):
        def again(*given):
            if made.replay:
                return made.masks.pop(0)
            made.masks.append(choose(*given))
            return made.masks[-1]

        return again

    monkeypatch.setattr("hybridize.operators.indexed.chosen", written_down(chosen))
    monkeypatch.setattr("hybridize.far.open_by_score", written_down(open_by_score))
    return made


GENERATE = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)


def test_full_plan_is_the_base(base, hybrid, ids, operator):
    plan = hz.AttentionPlan.base(hz.geometry_of(base.config))
    hybrid.set_plan(plan)
    with torch.no_grad():
        assert torch.equal(hybrid(ids).logits, base(ids).logits)
        theirs = base(ids[:, :20], use_cache=True)
        cache = hybrid.new_cache()
        mine = hybrid(ids[:, :20], past_key_values=cache)
        for step in range(20, 25):
            mine = hybrid(ids[:, step : step + 1], past_key_values=cache)
            theirs = base(ids[:, step : step + 1], past_key_values=theirs.past_key_values)
            if mine.logits.is_cuda:  # decoding runs on a kernel of our own there
                torch.testing.assert_close(mine.logits, theirs.logits, **CLOSE)
            else:
                assert torch.equal(mine.logits, theirs.logits)


def test_decode_is_prefill(hybrid, ids):
    out, _ = in_chunks(hybrid, ids, [1] * 40)
    torch.testing.assert_close(out, whole(hybrid, ids), **CLOSE)


def test_chunks_are_prefill(hybrid, ids):
    for split in ([7, 1, 20, 12], [3, 3, 3, 31], [39, 1], [40], [1, 1, 38], [29, 2, 9]):
        out, _ = in_chunks(hybrid, ids, split)
        torch.testing.assert_close(out, whole(hybrid, ids), **CLOSE)


def test_static_is_dynamic(hybrid, ids):
    for split in ([7, 1, 20, 12], [39, 1], [1] * 40):
        out, _ = in_chunks(hybrid, ids, split, max_tokens=45)
        torch.testing.assert_close(out, whole(hybrid, ids), **CLOSE)


def test_left_padding_is_the_row_alone(hybrid, ids):
    alone = torch.cat([whole(hybrid, ids[:1])[0], whole(hybrid, ids[1:])[0, :-9]])
    rows, mask = padded(ids)
    with torch.no_grad():
        out = hybrid(rows, attention_mask=mask, prompt_len=lens(ids)).logits
    torch.testing.assert_close(torch.cat([out[0], out[1, 9:]]), alone, **CLOSE)
    for max_tokens in (None, 45):
        for split in ([4, 10, 1, 1, 20, 1, 1, 1, 1], [12, 28], [40]):
            out, _ = in_chunks(hybrid, rows, split, max_tokens, mask)
            torch.testing.assert_close(torch.cat([out[0], out[1, 9:]]), alone, **CLOSE)


def test_greedy(hybrid, ids):
    torch._dynamo.reset()  # on a GPU generate compiles static caches, and there is a limit to one function's graphs
    mask = torch.ones_like(ids)
    expected = hybrid.generate(ids, attention_mask=mask, use_cache=False, **GENERATE)
    for how in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}):
        assert torch.equal(hybrid.generate(ids, attention_mask=mask, **GENERATE, **how), expected)
    rows, mask = padded(ids)
    out = hybrid.generate(rows, attention_mask=mask, **GENERATE)
    alone = hybrid.generate(ids[1:, :-9], attention_mask=mask[1:, 9:], **GENERATE)
    assert torch.equal(out[1, 9:], alone[0])


def test_beam(hybrid, ids):
    rows, mask = padded(ids)
    expected = hybrid.generate(rows, attention_mask=mask, num_beams=3, use_cache=False, **GENERATE)
    for how in ({}, {"cache_implementation": "static"}):
        assert torch.equal(hybrid.generate(rows, attention_mask=mask, num_beams=3, **GENERATE, **how), expected)


def test_sampling(hybrid, ids):
    rows, mask = padded(ids)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {**GENERATE, "do_sample": True, "use_cache": use_cache, "num_return_sequences": 2}
        drawn.append(hybrid.generate(rows, attention_mask=mask, **options))
    assert torch.equal(*drawn)


def test_gradient_checkpointing(base, operator, ids):
    gradients = []
    for checkpointing in (False, True):
        model = make_hybrid(base, operator).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, prompt_len=lens(ids)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.gradient_checkpointing_disable()
    base.eval()
    unlearned = {name for name in gradients[0] if "k_proj.bias" in name}
    indexes = {name for name, module in model.named_modules() if isinstance(module, Index)}
    chosen_by = {f"{name}.{part}" for name in indexes for part in ("map_q", "map_k")}  # a choice has no gradient
    assert all((g.abs().sum() > 0) != (name in chosen_by) for name, g in gradients[0].items() if name not in unlearned)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_save_and_load(hybrid, ids, tmp_path):
    expected = whole(hybrid, ids)
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(hybrid)
    assert loaded.plan.assignment == hybrid.plan.assignment
    assert torch.equal(whole(loaded, ids), expected)


def test_cache_bytes(hybrid, ids):
    for tokens in (1, 3, 6, 7, 8, 25, 40):
        _, cache = in_chunks(hybrid, ids[:, :tokens], [tokens])
        assert cache.bytes() == hybrid.plan.cache_bytes(tokens, 2, "float32", PROMPT_LEN)
    _, cache = in_chunks(hybrid, ids, [1] * 40)
    assert cache.bytes() == hybrid.plan.cache_bytes(40, 2, "float32", PROMPT_LEN)
    _, cache = in_chunks(hybrid, ids, [40], max_tokens=64)
    # what a static cache holds does not change when a prompt ends
    assert cache.bytes() == hybrid.plan.cache_bytes(64, 2, "float32", prompt=65)


def test_batch_order(hybrid, ids):
    torch.testing.assert_close(whole(hybrid, ids.flip(0)), whole(hybrid, ids).flip(0), **CLOSE)


def test_bf16_is_close(base, operator, ids, monkeypatch):
    made = replay_choices(monkeypatch)  # a choice is the same or another one; what is chosen is what can be close
    hybrid = make_hybrid(base, operator)
    expected = whole(hybrid, ids)
    made.replay = True
    half = make_base(base.config.model_type).to(torch.bfloat16)
    out = whole(make_hybrid(half, operator), ids).float()
    reference = base(ids).logits
    theirs = (half(ids).logits.float() - reference).norm() / reference.norm()
    # no worse than what bf16 costs the base itself, with room for another order of sums
    assert (out - expected).norm() / expected.norm() < 2 * theirs + 0.01


def test_permutation_round_trip(base, hybrid):
    state = hybrid.state_dict()
    learned = {name for name in state if is_learned(name)}
    assert bool(learned) == any(hybrid.branches())
    assert set(state) - learned == set(base.state_dict())
    for name, tensor in base.state_dict().items():
        assert torch.equal(state[name], tensor), name
    back = hz.to_base(hybrid)
    assert type(back) is type(base)
    for name, tensor in base.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_load_state_dict(base, hybrid, ids):
    expected = whole(hybrid, ids)
    learned = {name: tensor for name, tensor in hybrid.state_dict().items() if is_learned(name)}
    state = {name: tensor.clone() for name, tensor in {**base.state_dict(), **learned}.items()}
    other = hz.convert(make_base(base.config.model_type), hybrid.plan)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert torch.equal(whole(other.eval(), ids), expected)


def test_rows_reorder(hybrid, ids):
    _, cache = in_chunks(hybrid, ids, [33])
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        out = hybrid(ids.flip(0)[:, 33:], past_key_values=cache).logits
    torch.testing.assert_close(out, whole(hybrid, ids).flip(0)[:, 33:], **CLOSE)
    _, cache = in_chunks(hybrid, ids, [33])
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        out = hybrid(ids.repeat_interleave(2, 0)[:, 33:], past_key_values=cache).logits
    torch.testing.assert_close(out, whole(hybrid, ids).repeat_interleave(2, 0)[:, 33:], **CLOSE)
