"""A larger RoPE base for a longer context: what it covers, and a conversion that learns it."""

import json

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import hybridize as hz
from conftest import make_base, make_tokenizer
from hybridize import adapting, looking, workflows
from hybridize.conversion import extended
from hybridize.data.text import bundled_text
from hybridize.evaluation import suite
from hybridize.rope import covered, raised
from test_cli import run


def config(**more):
    return make_base("llama", max_position_embeddings=640, **more).config


def test_the_slowest_pair_turns_no_further():
    """The published extension, 32K to 128K by a base of 1e6 to 5e6, is covered; the least that covers is."""
    assert covered(32768, 1e6, 5e6, 128) == int(32768 * 5 ** (126 / 128)) > 131072
    before = config()
    theta = before.rope_parameters["rope_theta"]
    made = raised(before, 2560)
    dim = before.head_dim
    assert made.max_position_embeddings == 2560 and before.max_position_embeddings == 640
    assert covered(640, theta, made.rope_parameters["rope_theta"], dim) >= 2560
    assert covered(640, theta, made.rope_parameters["rope_theta"] - 1, dim) < 2560
    slowest = [c.rope_parameters["rope_theta"] ** (-(dim - 2) / dim) for c in (before, made)]
    assert slowest[1] * 2560 == pytest.approx(slowest[0] * 640, rel=1e-3)
    assert raised(before, 1280, 1e9).rope_parameters["rope_theta"] == 1e9


@pytest.mark.parametrize(
    ("context", "theta", "message"),
    [
        (640, None, "context: got 640, expected more than 640"),
        (2560, 1.0, "rope_theta: got 1.0, expected more than"),
        (100_000, 20_000.0, "context: got 100000, expected at most"),
    ],
)
def test_what_is_not_covered(context, theta, message):
    with pytest.raises(hz.HybridizeError, match=message):
        raised(config(), context, theta)


def test_a_scaled_base_is_refused():
    scaled = config()
    scaled.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(hz.HybridizeError, match="context: got 'yarn', expected a base whose RoPE is not scaled"):
        raised(scaled, 1280)


def test_extended_is_the_stock_model_of_that_config(ids):
    base = make_base("llama", max_position_embeddings=640)
    longer = raised(base.config, 2560)
    wanted = type(base)(longer).eval()
    wanted.load_state_dict(base.state_dict())
    before = base(ids).logits
    hybrid = hz.convert(extended(base, longer), hz.AttentionPlan.base(hz.geometry_of(longer)))
    assert torch.equal(hybrid(ids).logits, wanted(ids).logits) and not torch.equal(before, wanted(ids).logits)


# -- from the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (workflows, suite, adapting, looking):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])
    make_base("llama", max_position_embeddings=640).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


WORDS = [
    "--method", "l2a", "--window", 16, "--test-prompts", 2, "--lengths", "600,900", "--context", 1000,
    "--train", "steps=2,rows=1,kinds=number,save_every=1",
]  # fmt: skip


def test_a_conversion_to_a_longer_context(capsys, folder, tmp_path):
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *WORDS)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rope = raised(AutoConfig.from_pretrained(folder), 1000).rope_parameters
    assert model.config.rope_parameters == rope and model.config.max_position_embeddings == 1000
    assert model.plan.geometry.context == 1000 and model.plan.provenance["extended"]["context"] == [640, 1000]
    assert model.plan.provenance["trained_tokens"] == 2 * 1 * 1000  # rows as long as the context
    fresh = type(model.model.rotary_emb)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)

    # the base is measured as it was, with its own RoPE, and no further
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["rows"]
    needles = {(r["selector"], r["context"]) for r in rows if r["task"] == "needle"}
    assert needles == {("full", 600), ("hybrid", 600), ("hybrid", 900), ("far off", 600), ("far off", 900)}
    given = ["--test-prompts", 2, "--lengths", 600]
    code, _, err = run(capsys, "eval", folder, "--out", tmp_path / "eval", *given)
    assert code == 0, err
    alone = json.loads((tmp_path / "eval" / "metrics.json").read_text())["rows"]
    scores = [
        {r["task"]: r["score"] for r in found if r["selector"] == "full" and r["context"] == 600 and r["depth"] is None}
        for found in (rows, alone)
    ]
    assert scores[0] == scores[1] and scores[0]

    # beside its base, on what both reach
    asked = {
        "model": str(folder),
        "match_at": 600,
        "prove": {"lengths": [600, 900], "prompts": 2, "perplexity_windows": 0, "beyond": True},
        "entries": ["out"],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(asked))
    code, _, err = run(capsys, "compare", tmp_path / "c.yaml", "--out", tmp_path / "compared")
    assert code == 0, err
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**asked, "entries": ["out/plan.json"]}))  # without its weights
    code, _, err = run(capsys, "compare", tmp_path / "c.yaml", "--out", tmp_path / "no")
    assert code == 2 and "error: plan.geometry.identity: got" in err, err


def test_a_killed_conversion_goes_on_with_the_longer_context(capsys, folder, tmp_path, monkeypatch):
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "whole", *WORDS, "--control", "standard")
    assert code == 0, err
    monkeypatch.setattr("hybridize.converting.write_run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys, "convert", folder, "--out", tmp_path / "cut", *WORDS, "--control", "standard")
    monkeypatch.undo()
    for module in (workflows, suite, adapting, looking):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "cut", *WORDS, "--control", "standard")
    assert code == 0, err
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", 640], "context: got 640, expected more than 640"),
        (["--rope-theta", 20], "rope_theta: got 20.0, expected more than"),
        (["--lengths", "600,1200"], "length: got '1200 tokens', expected at most 1000"),
        (["--train", "steps=2,length=400"], "train.look.length: got 400, expected 1000"),
        (["--train", "steps=2,kl=1"], "train.look.kl: got 1.0, expected 0 with a context"),
        (["--method", "igal"], "context: got 1000, expected nothing"),
    ],
)
def test_bad_words(capsys, folder, tmp_path, words, message):
    code, _, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *WORDS, *words)
    assert code == 2 and f"error: {message}" in err.replace("\n", " "), err


def test_a_base_without_a_context_to_cover(capsys, folder, tmp_path):
    given = ["--method", "l2a", "--out", tmp_path / "out", "--rope-theta", 1e6]
    code, _, err = run(capsys, "convert", folder, *given)
    assert code == 2 and "error: rope-theta: got 1000000.0, expected nothing without --context" in err.replace("\n", " ")


def test_dry_run(capsys, folder, tmp_path):
    code, out, err = run(capsys, "convert", folder, "--out", tmp_path / "out", *WORDS, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["plan"]["geometry"]["context"] == 1000, err
