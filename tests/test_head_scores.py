"""Scores of query heads, against loops over transformers' own attention maps."""

import numpy as np
import pytest
import torch

import hybridize as hz
from conftest import make_base
from hybridize.answers import collate
from hybridize.data.needles import Prompt, needle_of, needle_prompts
from hybridize.data.text import bundled_text
from hybridize.scoring.echo import echo_prompt
from hybridize.scoring.scorers import UNITS, kinds_of, score, unit_of
from hybridize.scoring.watch import watch

CHEAP = hz.Window(16, 2)


@pytest.fixture(scope="module")
def model():
    base = make_base("qwen3")
    return hz.convert(base, hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [1], CHEAP)).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    text = bundled_text("calibration")
    return [
        needle_prompts(tokenizer, text, length=length, count=1, kinds=[kind], depths=[depth], seed=3)[0]
        for length, kind, depth in ((900, "number", 0.5), (1000, "courier", 0.8), (950, "multikey", 0.1))
    ]


@torch.no_grad()
def maps(ids):
    """transformers' attention maps of one row, [L, H, T, T]."""
    base = make_base("qwen3", attn_implementation="eager")
    return torch.stack([a[0] for a in base(torch.tensor([ids]), output_attentions=True).attentions])


def test_prompts_say_where_their_needle_lies(tokenizer, prompts):
    for prompt in prompts:
        (start, stop), (first, last) = needle_of(prompt)
        needle = tokenizer.decode(prompt.ids[start:stop])
        assert prompt.answer in needle and needle.rstrip().endswith(".") and first <= start < stop <= last
        assert "courier" not in prompt.kind or " is called " in needle
        assert tokenizer.decode(prompt.ids[last:]).strip().startswith("What is the")
    with pytest.raises(hz.HybridizeError, match="prompts"):
        needle_of(Prompt((1, 2), 1, "number", 2, 0.0, "x"))


def test_watched_weights_are_the_bases(model, prompts):
    batch = collate(prompts[:2], "cpu")
    queries = torch.tensor([[5, 60, 899], [17, 0, 400]])
    found = watch(model, batch, queries, lambda weights: weights)
    for row, prompt in enumerate(prompts[:2]):
        expected = maps(prompt.ids)[:, :, queries[row]]
        torch.testing.assert_close(found[row][..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-6)
    assert model.plan.assignment == hz.AttentionPlan.from_layers(model.plan.geometry, [1], CHEAP).assignment


def test_echo_is_the_mass_from_the_copy_on_the_first(model, tokenizer, prompts):
    document = echo_prompt(prompts[0])
    (start, stop), _ = needle_of(document)
    size = stop - start
    assert document.ids[start:stop] == document.ids[-size:] == prompts[0].ids[slice(*needle_of(prompts[0])[0])]
    assert start < 0.2 * len(document.ids) and tokenizer.decode(document.ids).count(prompts[0].answer) == 2
    expected = maps(document.ids)[:, :, -size:, start:stop].sum(-1).mean(-1)
    for batch_tokens in (1, 4000):  # alone, and beside longer rows
        scores = score(model, prompts, CHEAP, "echo", batch_tokens=batch_tokens)
        assert scores.unit == "head" and scores.samples.shape == (3, 3, 6)
        np.testing.assert_allclose(scores.samples[0], expected.double().numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("selector", ["retrieval", "reasoning"])
def test_retrieval_and_reasoning_step_by_step(model, prompts, selector):
    scores = score(model, prompts, CHEAP, selector, batch_tokens=4000)
    base = make_base("qwen3")
    for row, prompt in enumerate(prompts):
        start, stop = needle_of(prompt)[0]
        ids, steps = list(prompt.ids[: prompt.prompt_len]), []
        for _ in range(len(prompt.ids) - prompt.prompt_len):
            with torch.no_grad():
                written = int(base(torch.tensor([ids])).logits[0, -1].argmax())
            weights = maps(ids)[:, :, -1]
            if selector == "retrieval":
                top = weights.argmax(-1)
                same = torch.tensor(ids)[top] == written
                steps.append(((top >= start) & (top < stop) & same).double())
            else:
                value, place = weights.topk(stop - start, dim=-1)
                steps.append((value * ((place >= start) & (place < stop))).sum(-1).double() / (stop - start))
            ids.append(written)
        np.testing.assert_allclose(scores.samples[row], torch.stack(steps).mean(0).numpy(), rtol=1e-3, atol=1e-6)


def test_a_head_that_copies_is_found(prompts):
    """Weights planted on the token that is written next: retrieval is 1 for that head, 0 for one that looks elsewhere."""
    from hybridize.scoring import retrieval

    batch = collate(prompts[:1], "cpu")
    spans = torch.tensor([needle_of(prompts[0])[0]])
    start, stop = needle_of(prompts[0])[0]
    weights = torch.full((1, 2, batch.targets.shape[1], batch.ids.shape[1]), 1e-4)
    for step, token in enumerate(batch.targets[0].tolist()):
        place = next(i for i in range(start, stop) if prompts[0].ids[i] == token)
        weights[0, 0, step, place] = 0.5
        weights[0, 1, step, 3] = 0.5
    assert retrieval._retrieval(weights, batch, spans).mean(-1).tolist() == [[1.0, 0.0]]
    fetched = retrieval._reasoning(weights, spans)[0] * (stop - start)
    assert fetched[0].min() >= 0.5 - 1e-6 and fetched[1].max() < 0.1


def test_units(model, prompts):
    heads = score(model, prompts[:1], CHEAP, "echo")
    groups = score(model, prompts[:1], CHEAP, "echo", unit="group")
    assert np.array_equal(groups.values, heads.values.reshape(3, 3, 2).max(-1))
    assert {name: unit_of(name, None) for name in ("drop", "duo", "reasoning")} == {
        "drop": "layer", "duo": "group", "reasoning": "head"
    }  # fmt: skip
    assert kinds_of("reasoning") == ("courier",) and "courier" not in kinds_of("drop")
    for selector, unit in (("echo", "layer"), ("lazy", "head"), ("best", None)):
        with pytest.raises(hz.HybridizeError, match="selector"):
            score(model, prompts, CHEAP, selector, unit=unit)
    with pytest.raises(hz.HybridizeError, match="prompts"):
        score(model, [Prompt((1, 2, 3), 2, "mine", 3, 0.0, "x")], CHEAP, "retrieval")
    assert set(UNITS) >= {"echo", "retrieval", "reasoning"}
