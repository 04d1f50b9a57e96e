"""Perplexity by position, intervals, and the results format."""

import math

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan
from hybridize.evaluation.perplexity import position_cells
from hybridize.evaluation.statistics import wilson
from hybridize.results import results


def test_perplexity_is_the_models_loss(tokenizer):
    base = make_base("llama")
    text = "the quick brown fox jumps over the lazy dog. " * 40
    rows = [cell.row() for cell in position_cells(base, tokenizer, [text], length=300, windows=3)]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:900]).view(3, 300)
    with torch.no_grad():
        nll = [-base(row[None]).logits[0, :-1].log_softmax(-1)[range(299), row[1:]] for row in ids]
    nll = torch.stack(nll)
    assert rows[0]["score"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    assert rows[0]["positions"] == [0, 300] and rows[0]["n"] == 3 * 299
    assert [r["positions"] for r in rows[1:]] == [[0, 128], [128, 256], [256, 300]]
    assert rows[1]["score"] == pytest.approx(math.exp(nll[:, :127].mean()), rel=1e-4)
    assert rows[2]["score"] == pytest.approx(math.exp(nll[:, 127:255].mean()), rel=1e-4)
    assert sum(r["n"] for r in rows[1:]) == rows[0]["n"]
    assert rows[0]["low"] < rows[0]["score"] < rows[0]["high"]
    with pytest.raises(hz.HybridizeError, match="text"):
        position_cells(base, tokenizer, ["short"], length=300)


def test_a_window_only_hurts_far_positions(tokenizer):
    base = make_base("llama")
    model = hz.convert(base, make_plan(base, "window"))
    text = "".join(chr(97 + i * i % 23) for i in range(2000))
    how = dict(length=500, windows=2, buckets=[5, 100])
    full, near = ([c.row() for c in position_cells(m, tokenizer, [text], **how)] for m in (base, model))
    assert full[1]["score"] == pytest.approx(near[1]["score"], rel=1e-5)  # the first 5 positions see everything either way
    assert full[3]["score"] != pytest.approx(near[3]["score"], rel=1e-3)


def test_wilson():
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-3), 1.0)
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-3))
    assert wilson(50, 100) == (pytest.approx(0.4038, abs=1e-3), pytest.approx(0.5962, abs=1e-3))


def test_results_head():
    head = results("x", [{"a": 1}], command="c")
    assert set(head) == {"name", "date", "device", "versions", "commit", "command", "rows"}
    assert {"python", "torch", "transformers", "hybridize"} <= set(head["versions"])
