"""FlashMorph: gates that keep what copying needs, selectors at the same place, stages that can be stopped."""

import json
import random
from dataclasses import replace

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan, make_tokenizer
from hybridize import adapting, workflows
from hybridize.data.mixture import Row
from hybridize.data.needles import Haystack, Prompt
from hybridize.data.passkeys import COUNT, WORDS, passkeys_prompt
from hybridize.data.text import bundled_text
from hybridize.methods.flashmorph import LINEAR, STAGES, flashmorph_plan
from hybridize.morphing import morphing
from hybridize.scoring.scorers import score
from hybridize.training.gates import Gates, collapse, gate_scores, learn_gates
from hybridize.training.recipe import Recipe, recipes_from_text
from hybridize.training.trainer import collate
from test_cli import run
from test_training import Stop, stop_at

T, LAYERS = 40, 4
CHEAP = hz.Linear(dim=4, window=5, sinks=0, sink_positions="absolute")
RECIPE = Recipe(steps=50, rows=4, length=T, warmup=0, floor=0.1, save_every=20)
TEXT = bundled_text("calibration")[:20000]


def planted(layer, seed):
    """A model that at its end writes down the one marked token of its prompt; `layer` alone copies it."""
    torch.manual_seed(seed)
    base = make_base("llama", num_hidden_layers=LAYERS, attention_bias=False, tie_word_embeddings=False)
    with torch.no_grad():
        for each in base.model.layers:
            for name, parameter in each.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.03)
        base.model.norm.weight.fill_(1.0)
        words = base.model.embed_tokens.weight.normal_(0, 1)
        words[:, 40:] = 0
        words[280:, 40], words[:, 42] = 6.0, 3.0  # a mark, and a constant
        attention = base.model.layers[layer].self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.zero_()
        for head in range(6):
            attention.q_proj.weight[16 * head + 7, 42] = 6.0  # the slowest pair: near enough the same at every distance
        for group in range(3):
            attention.k_proj.weight[16 * group + 7, 40] = 6.0
            for i in range(16):
                attention.v_proj.weight[16 * group + i, 16 * group + i] = 1.0
                for head in (2 * group, 2 * group + 1):
                    attention.o_proj.weight[16 * group + i, 16 * head + i] = 2.0
        base.lm_head.weight.zero_()[280:, :40] = words[280:, :40]  # marked tokens are the only answers
    return hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(base.config))).eval()


class Marked:
    """Rows of random tokens, a marked one at their third place and again as the answer."""

    def __init__(self, count, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(count):
            ids = [rng.randrange(3, 280) for _ in range(T)]
            ids[2] = ids[-1] = rng.randrange(280, 300)
            self.rows.append(Row(tuple(ids), T - 1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def prompts(count=6):
    return [Prompt(row.ids, row.start, "marked", T, 0.0, "", (2, 3), (0, T - 1)) for row in Marked(count, 9).rows]


# -- gates ----------------------------------------------------------------------------------------------------------


def test_the_planted_model_copies():
    model = planted(1, 0)
    batch = collate([Marked(1, 3)[0]])
    with torch.no_grad():
        assert int(model(batch["input_ids"]).logits[0, -2].argmax()) == int(batch["input_ids"][0, -1])
        with model.temporary_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [0, 2, 3], hz.Window(5, 0))):
            assert int(model(batch["input_ids"]).logits[0, -2].argmax()) != int(batch["input_ids"][0, -1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_that_copies_keeps_its_gate(tmp_path, layer, seed):
    model = planted(layer, seed)
    before = {name: p.clone() for name, p in model.named_parameters()}
    made = learn_gates(model, CHEAP, "layer", Marked(200, seed), RECIPE, tmp_path)
    scores = gate_scores(made["gates"], "layer", model.plan.geometry, CHEAP, RECIPE)
    assert scores.ranking()[0] == layer and scores.values[layer] > 0.8 > 0.5 > sorted(scores.values)[-2]
    assert len(made["gates"]) == len(made["losses"]) == 50
    assert made["gates"][0][layer][0] < 1  # one step behind the start
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())


def test_one_run_of_groups(tmp_path):
    """A gate a group, by the same code."""
    model = planted(1, 0)
    made = learn_gates(model, CHEAP, "group", Marked(200, 0), RECIPE, tmp_path)
    scores = gate_scores(made["gates"], "group", model.plan.geometry, CHEAP, RECIPE)
    assert scores.samples.shape == (1, LAYERS, 3)
    assert sorted(scores.ranking()[:3]) == [3, 4, 5]
    plan = flashmorph_plan(scores, hz.AttentionPlan.base(model.plan.geometry), CHEAP, 0.25, "gates")
    assert plan.kept_groups == [(1, 0), (1, 1), (1, 2)]


def test_open_gates_are_the_teacher(ids):
    """alpha = 1: no error at all; alpha = 0: the branches alone; between, the mix goes on upwards."""
    model = planted(1, 0)
    stage, batch = Gates(model, CHEAP, "layer", 0.25), collate([Marked(2, 1)[i] for i in range(2)])
    with morphing(model, CHEAP, stage.gates) as stage.morphs, torch.no_grad():
        assert float(stage(**batch)["loss"]) == 0.25 * LAYERS
        for morph in stage.morphs:
            morph.shut = False
        stage.gates.zero_()
        shut = model(ids).logits
        stage.gates.fill_(0.5)
        assert float(stage(**batch)["loss"]) > 0.5 * 0.25 * LAYERS
    with model.temporary_plan(make_window_plan(model)), torch.no_grad():
        torch.testing.assert_close(shut, model(ids).logits, rtol=1e-4, atol=1e-4)


def make_window_plan(model):
    """What an untrained branch computes: its window, its gate being 0."""
    return hz.AttentionPlan.from_layers(model.plan.geometry, [], hz.Window(5, 0))


def test_gates_stay_in_bounds_and_resume_exactly(tmp_path):
    recipe = replace(RECIPE, steps=12, save_every=4, gate_rate=0.3)
    whole = learn_gates(planted(1, 0), CHEAP, "layer", Marked(48, 0), recipe, tmp_path / "whole")
    assert all(0 <= gate <= 1 for step in whole["gates"] for (gate,) in step)
    assert any(gate == 0 for (gate,) in whole["gates"][-1])
    with pytest.raises(Stop):
        learn_gates(planted(1, 0), CHEAP, "layer", Marked(48, 0), recipe, tmp_path / "cut", stop_at(7))
    again = learn_gates(planted(1, 0), CHEAP, "layer", Marked(48, 0), recipe, tmp_path / "cut")
    assert again["gates"] == whole["gates"] and again["losses"] == whole["losses"]


def test_equal_gates_are_ranked_by_their_mean():
    path = [[[1.0], [1.0], [1.0]], [[0.5], [0.2], [0.9]], [[0.0], [0.0], [1.0]]]
    geometry = hz.Geometry("llama", 3, 6, 3, 16, 2048)
    scores = gate_scores(path, "layer", geometry, CHEAP, RECIPE)
    assert scores.ranking() == [2, 0, 1] and collapse(scores) is None
    assert "gates.price" in collapse(gate_scores([[[0.0], [0.0], [0.0]]], "layer", geometry, CHEAP, RECIPE))
    assert "gates.steps" in collapse(gate_scores([[[1.0], [1.0], [1.0]]], "layer", geometry, CHEAP, RECIPE))


def test_held_branches_come_back(ids):
    base = make_base("llama")
    geometry = hz.geometry_of(base.config)
    everything = hz.AttentionPlan.from_layers(geometry, [], CHEAP)
    model = hz.convert(base, everything).eval()
    with torch.no_grad():
        for branches in model.branches():
            for branch in branches.values():
                branch.gate.fill_(0.7)
        expected = model(ids).logits
    with model.holding_branches():
        model.set_plan(hz.AttentionPlan.base(geometry))
        assert not any(model.branches())
        model.set_plan(hz.AttentionPlan.from_groups(geometry, [(0, 1), (2, 0)], CHEAP))
        model.set_plan(everything)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
    model.set_plan(hz.AttentionPlan.base(geometry))
    model.set_plan(everything)
    assert all(float(b.gate.abs().max()) == 0 for branches in model.branches() for b in branches.values())


# -- other selectors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["nll", "drop", "kl", "halo"])
def test_selectors_find_the_planted_layer(selector):
    """With linear branches in the others' place, which the model holds."""
    model = planted(2, 1)
    with model.holding_branches():
        model.set_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [], CHEAP))
        before = [id(b) for branches in model.branches() for b in branches.values()]
        scores = score(model, prompts(), CHEAP, selector, batch_tokens=3 * T)
        assert [id(b) for branches in model.branches() for b in branches.values()] == before
    assert scores.ranking()[0] == 2 and scores.provenance["scorer"] == selector
    if selector == "halo":
        recall = scores.provenance["recall"]
        assert recall[2] < 0.5 and min(r for i, r in enumerate(recall) if i != 2) == 1.0
        assert scores.values[2] <= 50


def test_lazy_needs_a_window():
    model = planted(2, 1)
    with pytest.raises(hz.HybridizeError, match=r"^selector: got 'lazy'"):
        score(model, prompts(2), CHEAP, "lazy")


# -- data and recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count", "words"), [(700, 2, 2), (2048, 10, 3), (12000, COUNT, WORDS)])
def test_passkeys(length, count, words):
    hay = Haystack(make_tokenizer(), bundled_text("calibration"))
    prompt = passkeys_prompt(hay, length, random.Random(0))
    text = hay.tokenizer.decode(list(prompt.ids))
    body, answer = text[: -len(prompt.answer)], text[-len(prompt.answer) :]
    lines = answer.splitlines()
    assert len(prompt.ids) == length and answer == prompt.answer and len(lines) == count
    places = []
    for line in lines:
        key, value = line.split(": ")
        assert len(value.split()) == words
        places.append(body.index(f"The passkey of {key} is: {value}."))
    assert places == sorted(places) and places[0] < 0.4 * len(body)
    start = hay.tokenizer.decode(list(prompt.ids[prompt.prompt_len :]))
    assert prompt.answer.endswith(start.strip()) and len(start) >= len(prompt.answer) - 3
    with pytest.raises(hz.HybridizeError, match=r"^length: got 120"):
        passkeys_prompt(hay, 120, random.Random(0))


def test_recipes_of_stages():
    made = recipes_from_text("gates.steps=3,gates.length=700,seed=5,distil.kinds=number+code", STAGES)
    assert made["gates"].steps == 3 and made["gates"].length == 700 and made["branches"].length == 512
    assert all(recipe.seed == 5 for recipe in made.values()) and made["distil"].kinds == ("number", "code")
    assert recipes_from_text(None, STAGES) == STAGES
    assert made["distil"].ce == 0 and made["distil"].kl == 1
    for text, field in (("gate.steps=3", "train"), ("gates.stops=3", "train.gates"), ("distil.steps=x", "train.distil.steps")):
        with pytest.raises(hz.HybridizeError, match=f"^{field}: got"):
            recipes_from_text(text, STAGES)


# -- the verb ---------------------------------------------------------------------------------------------------------

TRAIN = (
    "branches.steps=2,gates.steps=3,distil.steps=2,long.steps=2,rows=2,length=620,distil.watch=1,long.watch=1,"
    "long.checkpointing=false,gates.save_every=1"
)
WORDS = ["--method", "flashmorph", "--budget", 0.34, "--window", 16, "--sinks", 2, "--prompts", 2, "--length", 760]
WORDS += ["--linear", "dim=4", "--train", TRAIN, "--test-prompts", 2, "--lengths", 760]


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    from hybridize.evaluation import suite

    for module in (workflows, suite, adapting):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:9000]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("morph") / "base"
    make_base("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_flashmorph(capsys, base, tmp_path):
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "out", *WORDS)
    assert code == 0, err
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    training = metrics["training"]
    assert set(training) == {"branches", "selection", "distil", "long"}
    assert len(training["selection"]["gates"]) == 3 and training["selection"]["tokens"] == 3 * 2 * 620
    assert training["selection"]["flops"] > 0 and training["selection"]["passes"] == 4
    assert [step for step, _ in training["distil"]["recall"]] == [1, 2]
    plan = hz.AttentionPlan.load(tmp_path / "out" / "plan.json")
    scores = hz.Scores.load(tmp_path / "out" / "scores.json")
    assert plan.kept_layers == scores.top(0.34) and len(plan.kept_layers) == 1 and scores.provenance["scorer"] == "gates"
    assert plan.provenance["trained_tokens"] == 3 * 2 * 2 * 620 and plan.provenance["method"] == "flashmorph"
    spec = next(spec for spec in plan.specs() if spec.kind == "linear")
    assert (spec.window, spec.dim, spec.degree, spec.rule) == (16, 4, LINEAR["degree"], LINEAR["rule"])
    assert {row["selector"] for row in metrics["rows"]} == {"full", "hybrid", "state off"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="path') == 3 and page.count("path chosen") == 1 and 'id="selection"' in page
    assert "were kept" in page
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.plan.assignment == plan.assignment and sum(len(b) for b in model.branches()) == 6


@pytest.mark.parametrize("selector", ["periodic-1", "random-3", "kl", "nll"])
def test_flashmorph_by_other_selectors(capsys, base, tmp_path, selector):
    """Between the same branches, which stay as they were taught."""
    words = [*WORDS, "--train", "branches.steps=1,distil.steps=1,distil.watch=0,rows=2,length=620"]
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "out", *words, "--selector", selector)
    assert code == 0, err
    plan = hz.AttentionPlan.load(tmp_path / "out" / "plan.json")
    assert len(plan.kept_layers) == 1 and plan.provenance["selector"] == selector
    training = json.loads((tmp_path / "out" / "metrics.json").read_text())["training"]
    assert ("selection" in training) == (selector in ("kl", "nll"))
    if selector == "periodic-1":
        assert plan.kept_layers == [1]


def test_flashmorph_at_full_budget_is_the_base(capsys, base, tmp_path, ids):
    words = [*WORDS, "--budget", 1, "--train", "branches.steps=0,gates.steps=1,distil.steps=0,rows=2,length=620"]
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "out", *words)
    assert code == 0, err
    from transformers import AutoModelForCausalLM

    theirs, mine = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (base, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(mine(ids).logits, theirs(ids).logits)


def test_flashmorph_goes_on_where_it_was(capsys, base, tmp_path, monkeypatch):
    """Stopped in the gates and in the distillation: the same files' contents as without a stop."""
    words = [*WORDS, "--train", f"{TRAIN},long.steps=0,branches.steps=1", "--test-prompts", 1]
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "whole", *words)
    assert code == 0, err
    from hybridize import morphed

    for name, function in (("learn_gates", learn_gates), ("fine_tune", morphed.fine_tune)):

        def cut(*given, function=function, **how):
            given = list(given)
            given[-1] = stop_at(2)
            return function(*given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(morphed, name, cut)
            with pytest.raises(Stop):
                run(capsys, "convert", base, "--out", tmp_path / "cut", *words)
    code, out, err = run(capsys, "convert", base, "--out", tmp_path / "cut", *words)
    assert code == 0 and "going on" in out + err, err
    for file in ("model.safetensors", "plan.json", "scores.json"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_flashmorph_dry_run(capsys, base, tmp_path):
    for more in ([], ["--selector", "periodic-0"]):
        code, out, err = run(capsys, "convert", base, "--out", tmp_path / "out", *WORDS, *more, "--dry-run")
        assert code == 0 and "gates:" in err + out and not list(tmp_path.iterdir()), err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--selector", "gate"], "selector"),
        (["--selector", "periodic-x"], "selector"),
        (["--selector", "periodic-9"], "selector"),
        (["--unit", "head"], "unit"),
        (["--selector", "periodic-0", "--unit", "group"], "unit"),
        (["--control", "lowest"], "control"),
        (["--train", "gates.length=4096"], "train.length"),
        (["--train", "steps=2,gate.steps=1"], "train"),
        (["--link"], "link"),
    ],
)
def test_bad_flashmorph(capsys, base, tmp_path, words, field):
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "out", *WORDS, *words)
    assert code == 2 and f"{field}: got" in err, err
    assert not list(tmp_path.iterdir())


def test_recall_decides_which_weights_stay(tmp_path):
    """The best of the watched steps, not the last; a stop between changes nothing."""
    from hybridize.data.mixture import Mixture
    from hybridize.training import stages

    rows = Mixture(make_tokenizer(), TEXT, count=24, length=500, kinds=("number",), text_share=0.5, seed=0)
    recipe = replace(RECIPE, steps=6, length=500, kinds=("number",), save_every=2, watch=2, floor=0.0)
    said = {2: 0.25, 4: 0.75, 6: 0.5}

    def tuned(folder, report=None):
        base = make_base("llama")
        torch.manual_seed(1)
        model = hz.convert(base, make_plan(base, "linear"))
        seen, steps = {}, iter(())

        def recall():
            step = next(steps)
            seen[step] = model.lm_head.weight.detach().clone(), [p.detach().clone() for p in model.parameters()]
            return said[step]

        from hybridize.training.trainer import last_whole

        done = last_whole(folder)
        steps = iter(range(2 + (0 if done is None else int(done.name.rpartition("-")[2])), 8, 2))
        made = stages.fine_tune(model, rows, recipe, folder, report, recall)
        return made, model, seen

    made, model, seen = tuned(tmp_path / "a")
    assert made["recall"] == [[2, 0.25], [4, 0.75], [6, 0.5]] and made["best_step"] == 4
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seen[4][1]))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), seen[6][1]))
    with pytest.raises(Stop):
        tuned(tmp_path / "b", stop_at(5))
    again, other, _ = tuned(tmp_path / "b")
    assert again["recall"] == made["recall"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
