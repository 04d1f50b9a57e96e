"""L2A: the price of looking far, and a conversion from the command line."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hybridize as hz
from conftest import make_base, make_hybrid, make_tokenizer
from hybridize import adapting, looking, pruning, workflows
from hybridize.data.mixture import Mixture
from hybridize.data.text import bundled_text
from hybridize.evaluation import suite
from hybridize.methods.l2a import CONTROLS, STAGES, l2a_plan, pruned_plan
from hybridize.training import stages
from hybridize.training.looking import GAIN, LookFar, collapse, look_far
from hybridize.training.recipe import Recipe
from test_cli import run

RECIPE = Recipe(
    steps=6, rows=4, length=400, kinds=("number",), text_share=0.25, save_every=2, warmup=2, rate=1e-4, branch_rate=1e-3,
    trains="attention_norms", strength=0.5,
)  # fmt: skip
SPEC = hz.Gated(window=8, leak=0.5)


@pytest.fixture(scope="module")
def rows():
    return Mixture(
        make_tokenizer(), bundled_text("calibration")[:20000], count=24, length=400, kinds=("number",), text_share=0.25, seed=0
    )


def new_hybrid(spec=SPEC):
    return hz.convert(make_base("llama"), l2a_plan(hz.AttentionPlan.base(hz.geometry_of(make_base("llama").config)), spec))


def test_the_price_rises_after_the_warm_up():
    stage = LookFar(new_hybrid(), RECIPE)
    weights = []
    for step in range(6):
        stage.begin(step, [])
        weights.append(stage.weight)
    assert weights == [0.0, 0.0, 0.125, 0.25, 0.375, 0.5]
    stage.begin(5, [{"push": 0.1}, {"loss": 1.0}, {"push": 0.7}])
    assert stage.weight == pytest.approx(0.5 * math.exp(0.7))


def test_the_price_of_a_token_does_not_depend_on_the_length(ids):
    """R is the mean over tokens and gated layers of sigmoid(z / tau)^2."""
    model = make_hybrid(make_base("llama"), "gated").eval()
    stage = LookFar(model, replace(RECIPE, ce=1.0))
    stage.begin(5, [])
    start = torch.ones(2, dtype=torch.long)
    once = stage(ids, start)["loss"] - stages.FineTune(model)(ids, start)["loss"]
    aux = model.model(ids, use_cache=False).aux
    strength = torch.stack([aux[f"{i}.far.strength"] for i in range(3)]).mean()
    torch.testing.assert_close(once, 0.5 * strength, rtol=1e-4, atol=1e-5)
    rows = torch.cat([ids, ids])
    more = stage(rows, start.repeat(2))["loss"] - stages.FineTune(model)(rows, start.repeat(2))["loss"]
    torch.testing.assert_close(more, once, rtol=1e-4, atol=1e-5)


def test_the_controller_pushes_towards_the_wanted_share():
    stage = LookFar(new_hybrid(), replace(RECIPE, skip=0.8))
    stage.begin(5, [])
    stage.open = [torch.tensor([1.0, 0.6, 0.8])]
    stage.settle()
    assert stage.skip == pytest.approx([0.0, 0.4, 0.2]) and stage.push == pytest.approx(GAIN * 0.6) and not stage.open
    stage.open = [torch.tensor([0.0, 0.1, 0.2])]
    stage.settle()
    assert stage.push == pytest.approx(GAIN * (0.6 - 0.1))
    stage.begin(0, [])
    stage.open = [torch.tensor([1.0, 1.0, 1.0])]
    stage.settle()
    assert stage.push == 0.0  # a price of nothing cannot be pushed


def test_a_price_closes_tokens(rows, tmp_path):
    """A high one all of them, which is said; and only what is named moves."""
    free, dear = new_hybrid(), new_hybrid()
    before = {name: p.detach().clone() for name, p in free.named_parameters()}
    torch.manual_seed(0)
    nothing = look_far(free, rows, replace(RECIPE, strength=0.0), tmp_path / "free")
    torch.manual_seed(0)
    costly = look_far(dear, rows, replace(RECIPE, strength=50.0), tmp_path / "dear")
    assert nothing["skip"][0] == costly["skip"][0] == [0.0, 0.0, 0.0]  # a router starts at 0: all are open
    assert sum(costly["skip"][-1]) > sum(nothing["skip"][-1]) + 1
    assert "hardly one looks far" in costly["warning"]
    moved = {name for name, p in free.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {
        n for n in before if ".far." in n or "norm" in n or any(f"{p}_proj" in n and "mlp" not in n for p in "qkvo")
    }


def test_collapse():
    assert "all" not in (collapse([0.5, 0.9]) or "") and collapse([0.5, 0.9]) is None
    assert "100% of tokens are open" in collapse([0.0, 0.01]) and "look.strength" in collapse([1.0, 1.0])


class Stop(Exception):
    pass


def test_resume_goes_on_mid_ramp(rows, tmp_path):
    recipe = replace(RECIPE, skip=0.6, strength=5.0)

    def stop(done, of):
        if done == 5:
            raise Stop

    whole = new_hybrid()
    torch.manual_seed(4)
    expected = look_far(whole, rows, recipe, tmp_path / "whole")
    model = new_hybrid()
    torch.manual_seed(4)
    with pytest.raises(Stop):
        look_far(model, rows, recipe, tmp_path / "cut", report=stop)
    model = new_hybrid()
    made = look_far(model, rows, recipe, tmp_path / "cut")
    assert made["skip"] == expected["skip"] and made["push"] == expected["push"] and made["losses"] == expected["losses"]
    assert expected["push"][-1] != 0
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_with_a_teacher(rows, tmp_path):
    """The base itself: it has no far half, and does not move."""
    made = look_far(new_hybrid(), rows, replace(RECIPE, steps=2, ce=0.0, kl=1.0, strength=0.0), tmp_path)
    assert made["losses"][0] > 0


def test_plans():
    base = hz.AttentionPlan.base(hz.geometry_of(make_base("llama").config))
    plan = l2a_plan(base, SPEC)
    assert all(plan.gate(layer) == SPEC for layer in range(3)) and plan.provenance == {"method": "l2a"}
    found = {control: l2a_plan(base, SPEC, control) for control in CONTROLS}
    assert found["random-gate"].gate(1) == replace(SPEC, gate="random")
    assert found["position-gate"].gate(1).gate == "position" and found["all-open"].gate(0).gate == "open"
    assert found["all-closed"].spec(2, 0) == hz.Window(8, 0)
    assert found["standard"].assignment == base.assignment
    assert all(each.provenance["control"] == control for control, each in found.items())
    with pytest.raises(hz.HybridizeError, match=r"plan: got 'no gated layer'"):
        look_far(hz.convert(make_base("llama"), base), None, RECIPE, None)
    assert STAGES["look"].trains == "attention_norms" and STAGES["look"].skip == 0.8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (workflows, suite, adapting, pruning, looking):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])
    make_base("llama").save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


WORDS = [
    "--method", "l2a", "--window", 16, "--gated", "tau=0.2,leak=0.5", "--test-prompts", 2, "--lengths", 760,
    "--train", "steps=3,rows=2,length=400,kinds=number,save_every=1,strength=0.01",
]  # fmt: skip


def test_convert(capsys, folder, tmp_path):
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *WORDS, "--json")
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.plan.gate(2) == hz.Gated(window=16, tau=0.2, leak=0.5)
    assert model.plan.provenance["trained_tokens"] == 3 * 2 * 400
    assert model.model.layers[0].far.router.weight.abs().max() > 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {(r["selector"], r["component"]) for r in metrics["rows"]} == {
        ("full", "all"), ("hybrid", "all"), ("far off", "far_off")}  # fmt: skip
    assert len(metrics["training"]["look"]["skip"]) == 3
    page = (tmp_path / "out" / "report.html").read_text()
    assert "9 of 9 groups look far where a gate opens the token" in page and 'id="skip"' in page and 'id="closing"' in page
    (row,) = metrics["closing"]
    assert row["length"] == 760 and row["least"] <= row["closed"] <= row["most"]
    full, near = hz.Full().visible_pairs(760), hz.Window(16, 0).visible_pairs(760)
    assert row["pairs"] == pytest.approx(sum(near / full + 1 - share for share in row["layers"]) / 3)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(".far.router." in name for name in stored) == 3

    given = ["--test-prompts", 2, "--lengths", 760, "--perplexity-windows", 0]
    code, _, err = run(capsys, "eval", tmp_path / "out", "--out", tmp_path / "eval", *given)
    assert code == 0, err
    assert json.loads((tmp_path / "eval" / "metrics.json").read_text())["closing"] == metrics["closing"]

    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "standard", *WORDS, "--control", "standard")
    assert code == 0, err
    control = AutoModelForCausalLM.from_pretrained(tmp_path / "standard")
    assert control.plan.gate(0) is None and control.plan.provenance["trained_tokens"] == 3 * 2 * 400


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--control", "none"], "control"),
        (["--gated", "tau=0"], "gated.tau"),
        (["--gated", "size=3"], "gated"),
        (["--linear", "dim=3"], "linear"),
        (["--sinks", "4"], "sinks"),
        (["--budget", "0.5"], "budget"),
        (["--train", "skip=1"], "train.skip"),
        (["--train", "length=100000"], "train.length"),
        (["--link"], "link"),
        (["--method", "igal", "--gated", "tau=1"], "gated"),
    ],
)
def test_bad_words(capsys, folder, tmp_path, words, field):
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *WORDS, *words)
    assert code == 2 and f"error: {field}: got" in err, err
    assert not (tmp_path / "out").exists()


def test_pruned_plans():
    base = hz.AttentionPlan.base(hz.geometry_of(make_base("llama").config))
    plan = l2a_plan(base, SPEC)
    closed = [0.5, 0.99, 0.9]
    made = pruned_plan(plan, closed, 100, threshold=0.9)
    assert [made.gate(layer) is None for layer in range(3)] == [False, True, True] and made.spec(1, 0) == hz.Window(8, 0)
    assert made.provenance["pruned"] == [1, 2] and made.provenance["closed"] == closed
    assert pruned_plan(plan, closed, 100, threshold=1.0).assignment == plan.assignment
    share = made.cache_bytes(100) / plan.cache_bytes(100)
    assert pruned_plan(plan, closed, 100, budget=share).provenance["pruned"] == [1, 2]
    assert pruned_plan(plan, closed, 100, budget=share + 0.01).provenance["pruned"] == [1, 2]
    assert pruned_plan(plan, closed, 100, budget=0.99).provenance["pruned"] == [1]
    again = pruned_plan(made, [0.5, None, None], 100, threshold=0.4)
    assert all(again.gate(layer) is None for layer in range(3))
    with pytest.raises(hz.HybridizeError, match=r"budget: got 0\.01, expected at least 0\.0"):
        pruned_plan(plan, closed, 100, budget=0.01)
    for wrong in ({"threshold": 0.0}, {"budget": 1.5}):
        with pytest.raises(hz.HybridizeError, match=f"{next(iter(wrong))}: got"):
            pruned_plan(plan, closed, 100, **wrong)


def test_prune(capsys, folder, tmp_path):
    """Measured on the model itself; a pruned layer is its gate forced shut, and what it kept is gone from file and cache."""
    made = make_hybrid(make_base("llama"), "gated").eval()
    made.save_pretrained(tmp_path / "gated")
    make_tokenizer().save_pretrained(tmp_path / "gated")
    words = ["--prompts", 2, "--test-prompts", 2, "--lengths", 760, "--budget", 0.7]
    code, out, err = run(capsys, "prune", tmp_path / "gated", "--out", tmp_path / "out", *words, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert len(said["pruned"]) == 1 and said["closed"][said["pruned"][0]] == max(said["closed"])
    assert {row["selector"] for row in said["rows"]} == {"as it was", "pruned"}
    assert 'id="closing"' in (tmp_path / "out" / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layer = said["pruned"][0]
    assert model.plan.gate(layer) is None and model.plan.cache_bytes(760) <= 0.7 * made.plan.cache_bytes(760)
    assert not any(f"layers.{layer}.far" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        made.model.layers[layer].far.router.weight.zero_()
        made.model.layers[layer].far.spec = replace(made.plan.gate(layer), theta=0.9)
        torch.testing.assert_close(model(ids).logits, made(ids).logits)
    code, _, err = run(capsys, "prune", folder, "--out", tmp_path / "no", "--budget", 0.5)
    assert code == 2 and "error: model: got" in err
    code, _, err = run(capsys, "prune", tmp_path / "gated", "--out", tmp_path / "no")
    assert code == 2 and "error: threshold, budget: got" in err
