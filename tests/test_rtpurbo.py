"""RTPurbo: heads by their echo, an index for each that retrieves, and what it is held against."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hybridize as hz
from conftest import make_base, make_tokenizer
from hybridize import adapting, indexing, workflows
from hybridize.data.text import bundled_text
from hybridize.evaluation import suite
from hybridize.evaluation.sparsity import sparsity
from hybridize.methods.rtpurbo import CONTROLS, INDEXED, STAGES, rtpurbo_plan
from test_cli import run

SPEC = hz.Indexed(dim=4, block=4, window=8, sinks=2)


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    for module in (workflows, suite, adapting, indexing):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rtpurbo") / "base"
    make_base("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def full():
    return hz.AttentionPlan.base(hz.geometry_of(make_base("llama").config))


def echoes():
    """Heads 1 and 5 of layer 0, head 4 of layer 2 are the best, head 3 of layer 1 is the worst."""
    values = torch.full((3, 6), 0.5)
    values[0, 1], values[0, 5], values[2, 4], values[1, 3] = 0.9, 0.8, 0.7, 0.1
    return hz.Scores("head", values[None].numpy(), {"scorer": "echo"})


def retrieving(plan):
    """(layer, query head) of those that retrieve."""
    found = set()
    for layer, row in enumerate(plan.assignment):
        for group, name in enumerate(row):
            spec = plan.operators[name]
            if spec.kind == "indexed":
                found |= {(layer, 2 * group + i) for i, x in enumerate(spec.retrieves or (True, True)) if x}
    return found


def test_the_best_heads_retrieve(full):
    plan = rtpurbo_plan(echoes(), full, SPEC, 3 / 18)
    assert retrieving(plan) == {(0, 1), (0, 5), (2, 4)}
    assert plan.assignment[0] == ("indexed_01", "window", "indexed_01") and plan.assignment[1] == ("window",) * 3
    assert plan.provenance == {"method": "rtpurbo", "selector": "echo", "budget": 3 / 18, "groups": 3 / 9}
    assert plan.spec(1, 0) == hz.Window(8, 2) and plan.spec(0, 0).near == hz.Window(8, 2)
    # memory by group: a key, a value and an index key of every token, where one head retrieves
    assert plan.cache_bytes(100) == 16 + 3 * 100 * (32 + 4) * 2 + 6 * 10 * 32 * 2


@pytest.mark.parametrize("control", [c for c in CONTROLS if not c.startswith("random-heads") or c.endswith("-0")])
def test_controls(full, control):
    spec = hz.Indexed(dim=4, block=4, window=8, sinks=2, max_tokens=24)
    plan = rtpurbo_plan(echoes(), full, spec, 3 / 18, control)
    heads, best = retrieving(plan), {(0, 1), (0, 5), (2, 4)}
    assert len(heads) == (0 if control == "all-window" else 3)
    assert (heads == best) == (control in ("dense", "top-k", "pages", "oracle", "random"))
    assert control != "lowest" or (1, 3) in heads
    selects = {"dense": "all", "pages": "pages", "oracle": "exact", "random": "random"}
    assert {spec.select for spec in plan.specs() if spec.kind == "indexed"} <= {selects.get(control, "index")}
    assert plan.provenance["control"] == control


def test_what_is_refused(full):
    with pytest.raises(hz.HybridizeError, match="control"):
        rtpurbo_plan(echoes(), full, SPEC, 0.2, "best")
    with pytest.raises(hz.HybridizeError, match=r"indexed.max_tokens: got 0.*'top-k'"):
        rtpurbo_plan(echoes(), full, SPEC, 0.2, "top-k")
    with pytest.raises(hz.HybridizeError, match="'head'"):
        rtpurbo_plan(echoes().to_groups(3), full, SPEC, 0.2)
    with pytest.raises(hz.HybridizeError, match="budget"):
        rtpurbo_plan(echoes(), full, SPEC, 0.01)


def test_sparsity_is_counted(tokenizer):
    """Tokens that queries see, against the masks themselves; what is captured is all of it where everything is seen."""
    base = make_base("llama")
    plan = rtpurbo_plan(echoes(), hz.AttentionPlan.base(hz.geometry_of(base.config)), SPEC, 3 / 18)
    model = hz.convert(base, plan)
    prompts = hz_prompts(tokenizer, 2)
    (row,) = sparsity(model, prompts)
    assert row["length"] == 400 and row["prompts"] == 2 and row["groups"] == 3 / 9
    assert {(layer, head) for layer, head, _ in row["heads"]} == retrieving(plan)
    assert 0 < row["chosen"] < 1 and row["p10"] <= row["p50"] <= row["p90"] <= 400
    local = 15 / 18 * hz.Window(8, 2).visible_pairs(400) / (400 * 401 / 2)
    assert row["pairs"] == pytest.approx(local + sum(tokens for *_, tokens in row["heads"]) / 18 / 200.5, rel=1e-6)
    fixed = hz.Indexed("exact", top_p=1.0, block=4, max_tokens=40, window=8, sinks=2)
    model.set_plan(rtpurbo_plan(echoes(), model.plan, fixed, 3 / 18))
    (row,) = sparsity(model, prompts)
    assert 37 <= row["at_the_end"] <= 40
    model.set_plan(rtpurbo_plan(echoes(), model.plan, SPEC, 3 / 18, "dense"))
    (row,) = sparsity(model, prompts)
    assert row["chosen"] == pytest.approx(1) and row["captured"] == pytest.approx(1)
    assert sparsity(hz.convert(base, hz.AttentionPlan.base(model.plan.geometry)), prompts) == []


def hz_prompts(tokenizer, count):
    from hybridize.data.needles import needle_prompts

    return needle_prompts(tokenizer, bundled_text("evaluation")[:6000], length=400, count=count, kinds=("number",), seed=0)


WORDS = [
    "--method", "rtpurbo", "--ratio", 0.2, "--top-p", 0.8, "--window", 16, "--indexed", "dim=4,block=8,dense_below=0",
    "--prompts", 2, "--length", 760, "--test-prompts", 2, "--lengths", 760,
    "--train", "rows=2,length=400,save_every=1,kinds=number,index.steps=3,distil.steps=2,distil.top=5",
]  # fmt: skip


def test_rtpurbo(capsys, folder, tmp_path, monkeypatch):
    """Scores, plan, index, distillation, proof with the index off beside it; a killed run ends with the same bits."""
    out = tmp_path / "out"
    code, _, err = run(capsys, "convert", folder, "--out", out, *WORDS, "--json")
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(retrieving(model.plan)) == 4 and model.plan.provenance["trained_tokens"] == 5 * 2 * 400
    specs = [spec for spec in model.plan.specs() if spec.kind == "indexed"]
    assert all((spec.top_p, spec.dim, spec.block, spec.window) == (0.8, 4, 8, 16) for spec in specs)
    metrics = json.loads((out / "metrics.json").read_text())
    assert {(r["selector"], r["component"]) for r in metrics["rows"]} == {
        ("full", "all"), ("hybrid", "all"), ("index off", "indexed_off")}  # fmt: skip
    assert {name: len(record["losses"]) for name, record in metrics["training"].items()} == {"index": 3, "distil": 2}
    assert [row["length"] for row in metrics["sparsity"]] == [760]
    page = (out / "report.html").read_text()
    assert "groups find their tokens by an index" in page and 'id="sparsity"' in page and "indexed by index of 4" in page
    assert not (out / "training").exists()

    killed = tmp_path / "killed"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(indexing, "fine_tune", stop)
    assert run(capsys, "convert", folder, "--out", killed, *WORDS)[0] != 0
    monkeypatch.undo()
    for module in (workflows, suite, adapting, indexing):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])
    monkeypatch.setattr(indexing, "learn_index", stop)  # done before the kill, not again
    monkeypatch.setattr(indexing, "write_top", stop)
    code, _, err = run(capsys, "convert", folder, "--out", killed, *WORDS)
    assert code == 0, err
    mine, theirs = (load_file(path / "model.safetensors") for path in (killed, out))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--control", "none"], "control"),
        (["--control", "top-k"], "indexed.max_tokens"),
        (["--indexed", "size=3"], "indexed"),
        (["--top-p", "2"], "indexed.top_p"),
        (["--linear", "dim=3"], "linear"),
        (["--selector", "duo"], "selector, unit"),
        (["--sink-positions", "rebased"], "sink_positions, decode"),
        (["--train", "steps=many"], "train.index.steps"),
        (["--ratio", "0.01"], "budget"),
        (["--link"], "link"),
        (["--method", "igal", "--top-p", "0.5"], "top-p"),
        (["--method", "nll", "--indexed", "dim=3"], "indexed"),
    ],
)
def test_bad_words(capsys, folder, tmp_path, words, field):
    given = ["--method", "rtpurbo", "--prompts", 1, "--length", 760, "--test-prompts", 2, "--lengths", 760]
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *given, *words)
    assert code == 2 and f"error: {field}: got" in err, err
    assert not (tmp_path / "out").exists()


def test_dry_run(capsys, folder, tmp_path):
    scores = echoes().save(tmp_path / "scores.json")
    given = ["convert", folder, "--out", tmp_path / "out", "--method", "rtpurbo", "--ratio", 0.17, "--dry-run", "--json"]
    code, printed, err = run(capsys, *given, "--scores", scores)
    assert code == 0, err
    assert retrieving(hz.AttentionPlan.from_dict(json.loads(printed)["plan"])) == {(0, 1), (0, 5), (2, 4)}
    code, printed, err = run(capsys, *given)
    assert code == 0 and json.loads(printed) == {"heads": 3}, err


def test_defaults_are_specs_and_recipes():
    assert hz.Indexed(**INDEXED).top_p == 0.9 and hz.Indexed(**INDEXED).dim == 16
    assert STAGES["index"].branch_rate == 1e-3 and STAGES["distil"].top == 10 and STAGES["distil"].trains == "base"
