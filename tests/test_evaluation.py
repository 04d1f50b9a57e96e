"""Perplexity by position, intervals, and the results format."""

import math

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan
from hybridize.evaluation.perplexity import position_cells, sliding_cell
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


@pytest.mark.parametrize(("length", "stride"), [(64, 16), (64, 64), (64, None), (50, 7), (1000, None)])
def test_sliding_perplexity_scores_every_token_once(tokenizer, length, stride):
    base = make_base("llama")
    text = "the quick brown fox jumps over the lazy dog. " * 5
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    cell = sliding_cell(base, tokenizer, [text], task="t", length=length, stride=stride)
    step = stride or max(1, length // 2)
    total, tokens, end = 0.0, 0, 1
    for start in range(0, len(ids), step):  # token by token: from the latest view that has the most before it
        stop = min(start + length, len(ids))
        with torch.no_grad():
            logits = base(torch.tensor([ids[start:stop]])).logits[0].log_softmax(-1)
        for i in range(max(end, start + 1), stop):
            total -= float(logits[i - 1 - start, ids[i]])
            tokens += 1
        end = max(end, stop)
        if stop == len(ids):
            break
    assert sum(cell.weights) == tokens == len(ids) - 1 - (len(range(length, len(ids), length)) if step == length else 0)
    assert cell.mean == pytest.approx(total / tokens, rel=1e-4)
    assert cell.row()["score"] == pytest.approx(math.exp(total / tokens), rel=1e-3)


def test_sliding_perplexity_refuses(tokenizer):
    base = make_base("llama")
    for length, stride, text in ((64, 65, "long enough"), (64, 16, "x")):
        with pytest.raises(hz.HybridizeError, match=r"stride|text"):
            sliding_cell(base, tokenizer, [text], task="t", length=length, stride=stride)


def test_results_head():
    head = results("x", [{"a": 1}], command="c")
    assert set(head) == {"name", "date", "device", "versions", "commit", "command", "rows"}
    assert {"python", "torch", "transformers", "hybridize"} <= set(head["versions"])
