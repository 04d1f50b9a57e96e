"""NLL-guided selection: exact suffix reuse and its cost, the score itself, selectors and controls."""

import re

import numpy as np
import pytest
import torch

import hybridize as hz
from conftest import make_base
from hybridize.answers import answer_hits, batches, collate, run_answers
from hybridize.data.needles import KINDS, Prompt, needle_prompts
from hybridize.data.text import bundled_text
from hybridize.evaluation.retrieval import retrieval_cells, retrieval_hits
from hybridize.methods.baselines import RANDOM_SEEDS, random_group_plans
from hybridize.methods.nll import control_plans, periodic_layers, plan_from_scores, random_layers
from hybridize.scoring.nll import greedy_scores, nll_scores
from hybridize.scoring.scorers import score
from hybridize.scoring.suffix import SuffixRunner

WINDOW = hz.Window(16, 2)


@pytest.fixture(scope="module")
def model():
    base = make_base("llama", num_hidden_layers=6)
    return hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(base.config))).eval()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(5):
        ids = torch.randint(3, 300, (60 + 3 * i,), generator=generator).tolist()
        made.append(Prompt(tuple(ids), len(ids) - 3 - i % 2, "number", 60, 0.5, "x"))
    return made


def naive_nll(model, prompt, plan):
    """Mean answer NLL by transformers' own labels, one prompt, a whole run."""
    ids = torch.tensor([prompt.ids])
    labels = ids.clone()
    labels[:, : prompt.prompt_len] = -100
    phase = {"prompt_len": torch.tensor([prompt.prompt_len])} if plan.phased else {}
    with torch.no_grad(), model.temporary_plan(plan):
        return float(model(ids, labels=labels, use_cache=False, **phase).loss)


@pytest.mark.parametrize("cheap", [WINDOW, hz.Window(16, 2, decode="full")])
@pytest.mark.parametrize("base", ["window", "full"])
def test_scores_are_the_definition(model, prompts, cheap, base):
    geometry = model.plan.geometry
    scores = nll_scores(model, prompts, cheap, base=base, batch_tokens=70)
    everything = set(range(6))
    reference = hz.AttentionPlan.from_layers(geometry, [] if base == "window" else everything, cheap)
    for row, prompt in enumerate(prompts):
        start = naive_nll(model, prompt, reference)
        for layer in everything:
            kept = {layer} if base == "window" else everything - {layer}
            end = naive_nll(model, prompt, hz.AttentionPlan.from_layers(geometry, kept, cheap))
            delta = start - end if base == "window" else end - start
            assert scores.samples[row, layer] == pytest.approx(delta, abs=2e-5)


def test_suffix_reuse_is_exact_and_cheap(prompts):
    base = make_base("llama", num_hidden_layers=30)
    model = hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(base.config)))
    geometry = model.plan.geometry
    (batch,) = batches(prompts, 10**6, "cpu")
    reference = hz.AttentionPlan.from_layers(geometry, [], WINDOW)
    toggles = [hz.AttentionPlan.from_layers(geometry, [layer], WINDOW) for layer in range(30)]
    reuse, naive = SuffixRunner(model, batch), SuffixRunner(model, batch)
    fast = [reuse.base(reference), *(reuse.toggled(plan, layer) for layer, plan in enumerate(toggles))]
    slow = [naive.base(plan) for plan in (reference, *toggles)]
    assert all(torch.equal(a, b) for a, b in zip(fast, slow))
    assert reuse.layers_run == 30 + 30 * 31 // 2
    assert reuse.layers_run / naive.layers_run <= 0.6


def test_decode_full_scores_the_mode_of_the_plan(model, prompts):
    """With full decode, answer positions see everything and the last prompt position does not."""
    cheap = hz.Window(16, 2, decode="full")
    plan = hz.AttentionPlan.from_layers(model.plan.geometry, [], cheap)
    windowed = hz.AttentionPlan.from_layers(model.plan.geometry, [], WINDOW)
    batch = collate(prompts[:1], "cpu")
    with model.temporary_plan(plan):
        full = run_answers(model, batch)
    with model.temporary_plan(windowed):
        near = run_answers(model, batch)
    torch.testing.assert_close(full[:, 0], near[:, 0])  # predicted by the last prompt position
    assert not torch.allclose(full[:, 1], near[:, 1], atol=1e-3)
    assert nll_scores(model, prompts, cheap).provenance["decode"] == "full"


def test_greedy_picks_what_naive_greedy_picks(model, prompts):
    geometry, kept = model.plan.geometry, []
    for _ in range(3):
        nll = {
            layer: np.mean(
                [naive_nll(model, p, hz.AttentionPlan.from_layers(geometry, [*kept, layer], WINDOW)) for p in prompts]
            )
            for layer in range(6)
            if layer not in kept
        }
        kept.append(min(nll, key=nll.get))
    assert greedy_scores(model, prompts, WINDOW, 3).ranking()[:3] == kept


def test_backward_drops_what_naive_backward_drops(model, prompts):
    geometry, left = model.plan.geometry, list(range(6))
    for _ in range(4):
        nll = {
            layer: np.mean(
                [
                    naive_nll(model, p, hz.AttentionPlan.from_layers(geometry, [i for i in left if i != layer], WINDOW))
                    for p in prompts
                ]
            )
            for layer in left
        }
        left.remove(min(nll, key=nll.get))
    assert sorted(greedy_scores(model, prompts, WINDOW, 4, backward=True).ranking()[:2]) == left


@pytest.mark.parametrize("selector", ["nll", "drop", "greedy", "backward"])
def test_groups(model, prompts, selector):
    scores = score(model, prompts[:2], WINDOW, selector, budget=2 / 18, unit="group")
    assert scores.values.shape == (6, 3)
    plan = plan_from_scores(scores, hz.AttentionPlan.base(model.plan.geometry), WINDOW, 2 / 18)
    assert len(plan.kept_groups) == 2
    for layer, group in [(1, 1), (4, 2)]:
        if selector == "drop":
            keep = [(i, j) for i in range(6) for j in range(3) if (i, j) != (layer, group)]
            dropped = hz.AttentionPlan.from_groups(model.plan.geometry, keep, WINDOW)
            full = hz.AttentionPlan.base(model.plan.geometry)
            delta = naive_nll(model, prompts[0], dropped) - naive_nll(model, prompts[0], full)
            assert scores.samples[0, layer, group] == pytest.approx(delta, abs=2e-5)


def test_lazy_is_the_mass_on_sinks_and_window(model, prompts):
    scores = score(model, prompts[:1], WINDOW, "lazy")
    everything = score(model, prompts[:1], hz.Window(10**4, 2), "lazy")
    assert (everything.values == pytest.approx(-1, abs=1e-5)) and (scores.values > everything.values).all()
    ids = torch.tensor([prompts[0].ids])
    with torch.no_grad():
        attentions = make_base("llama", num_hidden_layers=6, attn_implementation="eager")(
            ids, output_attentions=True
        ).attentions
    n, last = torch.arange(ids.shape[1])[:, None], prompts[0].prompt_len
    near = (torch.arange(ids.shape[1]) > n - 16) | (torch.arange(ids.shape[1]) < 2)
    queries = [max(last - 1 - i, 0) for i in range(64)]
    mass = [-float((a[0] * near).sum(-1)[:, queries].mean()) for a in attentions]
    assert scores.values == pytest.approx(mass, abs=1e-5)


def test_unknown_selectors(model, prompts):
    for arguments in (("best", "layer"), ("lazy", "group")):
        with pytest.raises(hz.HybridizeError, match="selector"):
            score(model, prompts, WINDOW, arguments[0], unit=arguments[1])
    with pytest.raises(hz.HybridizeError, match="unit"):
        nll_scores(model, prompts, WINDOW, unit="head")


def test_random_groups(model):
    plans = random_group_plans(model.plan, WINDOW, 0.25)
    assert list(plans) == [f"random-groups-{seed}" for seed in RANDOM_SEEDS]
    counts = [[name for row in plan.assignment for name in row].count("full") for plan in plans.values()]
    assert counts == [5] * 5 and len({plan.assignment for plan in plans.values()}) == 5  # 18 groups / 4, half up
    assert plans == random_group_plans(model.plan, WINDOW, 0.25)


def test_same_seed_same_plan(model, prompts):
    runs = [
        plan_from_scores(score(model, prompts, WINDOW), hz.AttentionPlan.base(model.plan.geometry), WINDOW, 0.5) for _ in "ab"
    ]
    assert runs[0] == runs[1]


def test_the_model_keeps_its_plan(model, prompts):
    before = model.plan
    for selector in ("nll", "drop", "greedy", "backward", "lazy"):
        score(model, prompts[:1], WINDOW, selector)
    assert model.plan is before


def test_periodic_covers_every_phase_at_equal_k():
    for layers in (6, 30, 32, 36):
        for keep in range(1, layers + 1):
            phases = periodic_layers(layers, keep)
            assert all(len(set(kept)) == keep and min(kept) >= 0 and max(kept) < layers for kept in phases)
            assert len({tuple(kept) for kept in phases}) == len(phases)
            assert max(phases[-1]) == layers - 1  # there is no later phase
    assert periodic_layers(32, 8)[1] == list(range(1, 32, 4))
    assert periodic_layers(30, 0) == []


def test_controls(model):
    plans = control_plans(model.plan, WINDOW, 0.5)
    assert plans["full"] == hz.AttentionPlan.base(model.plan.geometry)
    assert plans["all-window"].kept_layers == []
    assert [len(p.kept_layers) for name, p in plans.items() if name[:6] in ("period", "random")] == [3] * (
        2 + len(RANDOM_SEEDS)
    )
    assert random_layers(30, 8, 0) == random_layers(30, 8, 0) != random_layers(30, 8, 1)


# -- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_needle_prompts(tokenizer, kind):
    text = bundled_text("evaluation")
    made = needle_prompts(tokenizer, text, length=1500, count=3, kinds=[kind], seed=5)
    assert made == needle_prompts(tokenizer, text, length=1500, count=3, kinds=[kind], seed=5)
    assert made != needle_prompts(tokenizer, text, length=1500, count=3, kinds=[kind], seed=6)
    for prompt in made:
        assert len(prompt.ids) == prompt.length == 1500
        whole, answer = tokenizer.decode(prompt.ids), tokenizer.decode(prompt.ids[prompt.prompt_len :])
        assert answer.strip() == prompt.answer
        assert whole.count(prompt.answer) == 2  # in the needle, and as the answer
        place = whole.index(prompt.answer) / len(whole)
        assert abs(place - prompt.depth) < 0.25
        statement = (
            re.escape(KINDS[kind].statement)
            .replace(r"\{key\}", r"[\w-]+")
            .replace(r"\{name\}", r"\w+")
            .replace(r"\{value\}", r"[\w -]+")
        )
        assert len(re.findall(statement, whole)) == 1 + KINDS[kind].decoys


def test_chat_template_is_used(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}[assistant]"
    try:
        prompt = needle_prompts(tokenizer, bundled_text("evaluation"), length=900, count=1)[0]
    finally:
        tokenizer.chat_template = None
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("[user]")
    assert "[/][assistant]The special magic number" in text


@pytest.mark.parametrize(
    ("change", "field"),
    [(dict(length=100), "length"), (dict(length=10**7), "text"), (dict(kinds=["x"]), "kinds"), (dict(depths=[2.0]), "depths")],
)
def test_bad_prompts(tokenizer, change, field):
    with pytest.raises(hz.HybridizeError, match=field):
        needle_prompts(tokenizer, bundled_text("evaluation"), **{"length": 900, "count": 1, **change})


# -- retrieval ----------------------------------------------------------------------------------------------------


def test_argmax_is_greedy_decoding(model, prompts):
    """On prompts whose answers the model itself wrote, and on the same with one token changed."""
    made = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids[: prompt.prompt_len]])
        out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
        if i % 2:
            out[-2] = out[-2] % 299 + 1
        made.append(Prompt(tuple(out), prompt.prompt_len, "number", 60, i / 5, "x"))
    expected = [True, False, True, False, True]
    assert retrieval_hits(model, made) == expected
    assert retrieval_hits(model, made, method="generate") == expected
    rows = [cell.row() for cell in retrieval_cells(made, expected)]
    assert rows[0]["score"] == 0.6 and rows[0]["n"] == 5 and rows[0]["low"] < 0.6 < rows[0]["high"]
    (batch,) = batches(made, 10**6, "cpu")
    assert answer_hits(run_answers(model, batch), batch).tolist() == expected
    with pytest.raises(hz.HybridizeError, match="method"):
        retrieval_hits(model, made, method="guess")
