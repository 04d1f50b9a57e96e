"""Stages: what they train, what they say, and that stopping, splitting and sharing out change nothing."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import hybridize as hz
from conftest import index_parameters, make_base, make_hybrid, make_plan
from hybridize.data.mixture import Mixture
from hybridize.data.text import bundled_text
from hybridize.training import stages
from hybridize.training.forecast import forecast
from hybridize.training.losses import chunked_cross_entropy, chunked_kl, row_means
from hybridize.training.recipe import Recipe, from_text
from hybridize.training.trainer import WHOLE, collate, last_whole

TEXT = bundled_text("calibration")[:20000]
RECIPE = Recipe(steps=6, rows=4, length=500, kinds=("number",), text_share=0.25, save_every=2, warmup=1, rate=1e-3)


@pytest.fixture(scope="module")
def rows(request):
    from conftest import make_tokenizer

    return Mixture(make_tokenizer(), TEXT, count=24, length=500, kinds=("number", "words"), text_share=0.25, seed=0)


def hybrid(operator="linear"):
    torch.manual_seed(0)
    base = make_base("llama")
    return hz.convert(base, make_plan(base, operator)).eval()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows(tokenizer, rows):
    drawn = [rows[i] for i in range(24)]
    assert all(len(row.ids) == 500 for row in drawn)
    assert [row.start == 1 for row in drawn] == [i % 4 == 3 for i in range(24)]
    again = Mixture(tokenizer, TEXT, count=24, length=500, kinds=("number", "words"), text_share=0.25, seed=0)
    assert again[17] == drawn[17] and len(set(drawn)) == 24
    for row in drawn:
        answer = tokenizer.decode(list(row.ids[row.start :]))
        assert row.start == 1 or answer.strip() in tokenizer.decode(list(row.ids[: row.start]))
    with pytest.raises(IndexError):
        rows[24]


@pytest.mark.parametrize(
    ("field", "options"), [("kinds", {"kinds": ("x",)}), ("text_share", {"text_share": 2}), ("text", {"length": 10**6})]
)
def test_bad_mixtures(tokenizer, field, options):
    asked = {"count": 2, "length": 500, "kinds": ("number",), "text_share": 0.5, "seed": 0}
    with pytest.raises(hz.HybridizeError, match=f"^{field}: got"):
        Mixture(tokenizer, TEXT, **{**asked, **options})


def test_recipes_from_text():
    recipe = from_text(Recipe, "steps=7,rate=1e-3,kinds=number+words,checkpointing=true,trains=lora", "train")
    assert (recipe.steps, recipe.rate, recipe.kinds, recipe.checkpointing) == (7, 1e-3, ("number", "words"), True)
    assert from_text(Recipe, None, "train") == Recipe()
    assert from_text(hz.Linear, "degree=1,rope=true", "linear") == hz.Linear(degree=1, rope=True)
    for text, field in (
        ("stops=7", "train"),
        ("steps", "train"),
        ("steps=x", "train.steps"),
        ("checkpointing=1", "train.checkpointing"),
        ("trains=some", "train.trains"),
        ("rows=0", "train.rows"),
        ("steps=-1", "train.steps"),
        ("kl=-1", "train.kl"),
        ("micro=5", "train.micro"),
    ):
        with pytest.raises(hz.HybridizeError, match=f"^{field}: got"):
            from_text(Recipe, text, "train")


def test_forecast():
    """Bytes by hand: masters, and three more words for what is trained, four with a teacher."""
    model = hybrid("window")
    every = sum(p.numel() for p in model.parameters())
    attention = sum(p.numel() for n, p in model.named_parameters() if "_proj" in n and "self_attn" in n)
    recipe = replace(RECIPE, steps=3)
    asked = [("finetune", recipe), ("distil", replace(recipe, trains="all", kl=1.0)), ("gates", recipe)]
    plain, taught, gates = forecast(model, asked, model.plan)
    assert plain.tokens == 3 * 4 * 500 and plain.bytes == 4 * every + 12 * attention
    assert taught.bytes == 4 * every + 16 * every and gates.bytes == 4 * every
    assert plain.seconds > 0 and "about" in plain.text()
    assert forecast(model, [("long", replace(recipe, steps=0))], model.plan) == []


# -- losses ---------------------------------------------------------------------------------------------------------


def test_chunked_cross_entropy():
    torch.manual_seed(0)
    hidden, targets = torch.randn(37, 8, requires_grad=True), torch.randint(0, 50, (37,))
    head = torch.nn.Linear(8, 50)
    expected = F.cross_entropy(head(hidden), targets, reduction="none")
    got = chunked_cross_entropy(hidden, head, targets, chunk=5)
    torch.testing.assert_close(got, expected)
    both = [torch.autograd.grad((x * torch.arange(37)).sum(), [hidden, head.weight]) for x in (got, expected)]
    for mine, theirs in zip(*both):
        torch.testing.assert_close(mine, theirs)
    assert chunked_cross_entropy(hidden[:0], head, targets[:0]).shape == (0,)
    torch.testing.assert_close(row_means(torch.tensor([1.0, 3, 5]), torch.tensor([0, 0, 2]), 3), torch.tensor([2.0, 0, 5]))


def test_fine_tune_loss_is_the_mean_of_row_means(rows):
    model = hybrid()
    batch = collate([rows[2], rows[3]])
    with torch.no_grad():
        loss = stages.FineTune(model)(**batch)["loss"]
        logits = model(batch["input_ids"]).logits
    means = []
    for row, start in enumerate(batch["start"]):
        ids = batch["input_ids"][row]
        means.append(F.cross_entropy(logits[row, start - 1 : -1], ids[start:]))
    torch.testing.assert_close(loss, torch.stack(means).mean())


def test_chunked_kl():
    torch.manual_seed(0)
    mine, theirs = torch.randn(37, 8, requires_grad=True), torch.randn(37, 8)
    head, other = torch.nn.Linear(8, 50), torch.nn.Linear(8, 50)
    wanted = other(theirs).softmax(-1).detach()
    expected = (wanted * (wanted.log() - head(mine).log_softmax(-1))).sum(-1)
    got = chunked_kl(mine, head, theirs, other, chunk=5)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x.sum(), [mine, head.weight]) for x in (got, expected))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert chunked_kl(mine, head, mine.detach(), head).abs().max() < 1e-5


@pytest.mark.parametrize("trains", ["branches", "lora", "attention", "all"])
def test_the_teacher_is_the_base_and_stays(rows, tmp_path, trains, ids, monkeypatch):
    made, seen = [], []
    real = stages.frozen_teacher

    def close(teacher):
        with torch.no_grad():
            return torch.allclose(teacher(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)

    def watched(*given):
        made.append(real(*given))
        seen.append(close(made[-1]))
        return made[-1]

    monkeypatch.setattr(stages, "frozen_teacher", watched)
    model = hybrid("mixed")
    with torch.no_grad(), model.temporary_plan(hz.AttentionPlan.base(model.plan.geometry)):
        expected = model(ids).logits
    plain = hybrid("mixed")
    with_kl = stages.fine_tune(model, rows, replace(RECIPE, steps=2, kl=1.0, trains=trains), tmp_path / "kl")
    without = stages.fine_tune(plain, rows, replace(RECIPE, steps=2, trains=trains), tmp_path / "plain")
    assert with_kl["losses"][0] > without["losses"][0] + 1e-4
    assert seen[0] and (trains == "lora" or close(made[0]))  # merging moves weights that the teacher shares, when it is done
    assert set(weights(model)) == set(weights(plain))


# -- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", ["branches", "lora", "attention", "all"])
def test_only_what_is_named_is_trained(rows, tmp_path, trains):
    model = hybrid("mixed")
    before = weights(model)
    recipe = replace(RECIPE, trains=trains, steps=3)
    made = stages.fine_tune(model, rows, recipe, tmp_path)
    after = weights(model)
    assert set(after) == set(before)  # factors of LoRA are merged
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    branches = {name for name in before if ".branches." in name} - index_parameters(model)
    projections = {n for n in before if any(part in n for part in ("q_proj.w", "k_proj.w", "v_proj.w", "o_proj.w"))}
    assert branches <= moved and not moved & index_parameters(model)
    if trains == "branches":
        assert moved == branches
    elif trains == "lora":
        assert moved == branches | projections
    elif trains == "attention":
        assert branches | projections <= moved and not any("mlp" in name or "norm" in name for name in moved)
    else:
        assert any("mlp" in name for name in moved) and any("norm" in name for name in moved)
    assert len(made["losses"]) == 3 and made["tokens"] == 3 * 4 * 500 and made["seconds"] > 0
    assert all(p.requires_grad for p in model.parameters()) and not model.training


def test_training_lowers_the_loss(rows, tmp_path):
    model = hybrid()
    made = stages.fine_tune(model, rows, replace(RECIPE, rate=1e-2, trains="all"), tmp_path)
    assert made["losses"][-1] < 0.8 * made["losses"][0]


def test_lora_merges_exactly(rows, tmp_path, ids):
    from hybridize.training.adapters import add_lora, merge_lora

    model = make_hybrid(make_base("llama"), "mixed")
    expected = {name: p.clone() for name, p in model.state_dict().items()}
    add_lora(model, 4, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
        adapted = model(ids).logits
        merge_lora(model)
        torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    assert set(model.state_dict()) == set(expected)


def test_transfer_teaches_branches_only(rows, tmp_path):
    """On the base's own activations, whatever the plan is; the rest of the model does not move."""
    model = hybrid("mixed")
    before = weights(model)
    with stages.teaching(model), torch.no_grad():
        taught = model(collate([rows[0]])["input_ids"], use_cache=False).logits
    with model.temporary_plan(hz.AttentionPlan.base(model.plan.geometry)), torch.no_grad():
        torch.testing.assert_close(taught, model(collate([rows[0]])["input_ids"], use_cache=False).logits)
    made = stages.transfer(model, rows, replace(RECIPE, transfer_steps=6), tmp_path)
    assert made["losses"][-1] < made["losses"][0]
    after = weights(model)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if ".branches." in n}


def test_nothing_to_train(rows, tmp_path):
    with pytest.raises(hz.HybridizeError, match=r"train\.trains: got"):
        stages.fine_tune(hybrid("window"), rows, replace(RECIPE, trains="branches"), tmp_path)


class Stop(Exception):
    pass


def stop_at(step):
    def report(done, of):
        if done == step:
            raise Stop

    return report


@pytest.mark.parametrize("trains", ["attention", "lora"])
def test_resume_is_exact(rows, tmp_path, trains):
    """Stopped between checkpoints, with a half-written one lying about: the same bits as without a stop."""
    recipe = replace(RECIPE, trains=trains)
    whole = hybrid("mixed")
    torch.manual_seed(4)
    expected = stages.fine_tune(whole, rows, recipe, tmp_path / "whole")
    model = hybrid("mixed")
    torch.manual_seed(4)
    with pytest.raises(Stop):
        stages.fine_tune(model, rows, recipe, tmp_path / "cut", stop_at(5))
    half = tmp_path / "cut" / "checkpoint-5"
    half.mkdir()
    (half / "trainer_state.json").write_text("{")
    assert last_whole(tmp_path / "cut").name == "checkpoint-4" and (tmp_path / "cut/checkpoint-4" / WHOLE).exists()
    again = hybrid("mixed")
    got = stages.fine_tune(again, rows, recipe, tmp_path / "cut")
    assert got["losses"] == expected["losses"]
    for (name, mine), theirs in zip(weights(again).items(), weights(whole).values()):
        assert torch.equal(mine, theirs), name


def test_resume_at_the_end_trains_nothing(rows, tmp_path):
    """Stopped behind the last checkpoint, before anyone wrote down that it was done."""
    recipe = replace(RECIPE, steps=2)
    first, again = hybrid(), hybrid()
    expected = stages.fine_tune(first, rows, recipe, tmp_path)
    got = stages.fine_tune(again, rows, recipe, tmp_path)
    assert got["losses"] == expected["losses"]
    assert all(torch.equal(a, b) for a, b in zip(weights(first).values(), weights(again).values()))


def test_micro_batches_and_checkpointing_change_nothing(rows, tmp_path):
    models = []
    for i, change in enumerate(({}, {"micro": 1}, {"checkpointing": True})):
        models.append(hybrid())
        stages.fine_tune(models[-1], rows, replace(RECIPE, steps=2, **change), tmp_path / str(i))
    for name, expected in weights(models[0]).items():
        for model in models[1:]:
            torch.testing.assert_close(weights(model)[name], expected, rtol=1e-4, atol=1e-5)


def test_two_processes_are_one(tmp_path):
    """Rows are shared out over two gloo ranks; the weights are those of one process, as fresh as they are."""
    made = []
    for count in (1, 2):
        script = tmp_path / f"run{count}.py"
        script.write_text(f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import os, torch
from test_training import *
from conftest import make_tokenizer
rows = Mixture(make_tokenizer(), TEXT, count=24, length=500, kinds=("number", "words"), text_share=0.25, seed=0)
model = hybrid()
start = weights(model)
made = stages.fine_tune(model, rows, replace(RECIPE, steps=3), __import__("pathlib").Path({str(tmp_path / str(count))!r}))
if os.environ["RANK"] == "0":
    torch.save((made["losses"], start, weights(model)), {str(tmp_path / f"{count}.pt")!r})
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
""")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={count}",
            "--master-port=0",
            "--standalone",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        made.append(torch.load(tmp_path / f"{count}.pt"))
    (expected, start, one), (losses, same, found) = made
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    # Adam makes a step of full size of a gradient that is all rounding (saturated heads have some): a few entries may differ
    off = sum(float((found[name] - one[name]).pow(2).sum()) for name in one)
    way = sum(float((one[name] - start[name]).pow(2).sum()) for name in one)
    assert all(torch.equal(same[name], start[name]) for name in one) and way > 0 and off < 0.02**2 * way
