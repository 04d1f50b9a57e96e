"""Scores: ranking, spread, budgets, files."""

import json

import numpy as np
import pytest

from hybridize.errors import HybridizeError
from hybridize.scores import Scores
from hybridize.verbs import most_needed


def layer_scores(n=6, seed=0):
    return Scores("layer", np.random.default_rng(seed).normal(size=(n, 8)), {"scorer": "nll", "identity": "x"})


def test_ranking_top_and_error():
    scores = Scores("layer", [[0.0, 3.0, 1.0, 2.0], [0.0, 5.0, 1.0, 2.0]])
    assert scores.ranking() == [1, 3, 2, 0]
    assert scores.top(0.5) == [1, 3]
    assert scores.standard_error.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert scores.top_groups(0.25, 2) == [(1, 0), (1, 1)]
    assert Scores("layer", [[1.0, 2.0]], order=(0, 1)).top(0.5) == [0]


def test_heads_to_groups():
    heads = Scores("head", np.array([[[0.0, 4.0, 1.0, 1.0], [3.0, 3.0, 0.0, 9.0]]]))
    assert heads.to_groups(2).values.tolist() == [[4.0, 1.0], [3.0, 9.0]]
    assert heads.to_groups(2, "mean").values.tolist() == [[2.0, 1.0], [3.0, 4.5]]
    assert heads.top_groups(0.5, 2) == [(0, 0), (1, 1)]
    with pytest.raises(HybridizeError, match="kv_heads"):
        heads.to_groups(3)


def test_stability_is_certain_without_spread_and_seeded():
    certain = Scores("layer", np.tile([5.0, 0.0, 0.0, 4.0], (6, 1)))
    assert certain.stability(0.5).tolist() == [1.0, 0.0, 0.0, 1.0]
    noisy = layer_scores()
    assert (noisy.stability(0.25) == noisy.stability(0.25)).all()
    assert noisy.stability(0.25).sum() == pytest.approx(2)


def test_spearman():
    scores = Scores("layer", [[1.0, 2.0, 3.0, 4.0]])
    assert scores.spearman(scores) == pytest.approx(1)
    assert scores.spearman(Scores("layer", [[4.0, 3.0, 2.0, 1.0]])) == pytest.approx(-1)


def test_round_trip(tmp_path):
    scores = layer_scores()
    again = Scores.load(scores.save(tmp_path / "scores.json"))
    assert (again.samples == scores.samples).all()
    assert again.provenance == scores.provenance


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"unit": "token"}, "scores.unit"),
        ({"samples": [[1.0], [2.0, 3.0]]}, "scores.samples"),
        ({"samples": []}, "scores.samples"),
        ({"samples": [["a"]]}, "scores.samples"),
        ({"order": [0, 0]}, "scores.order"),
        ({"format": "hybridize-plan"}, "format"),
        ({"format_version": 2}, "format_version"),
    ],
)
def test_bad_scores_name_the_field(change, field):
    with pytest.raises(HybridizeError, match=field):
        Scores.from_dict({**json.loads(json.dumps(layer_scores().to_dict())), **change})


def test_not_finite():
    with pytest.raises(HybridizeError, match="finite"):
        Scores("layer", [[1.0, float("nan")]])


def test_duo_attention_table(tmp_path):
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text("0.1\t0.9\n1.0\t0.0\n")
    scores = Scores.load(path)
    assert scores.top_groups(0.5, 2) == [(0, 1), (1, 0)]
    path.write_text("0.1\tx\n")
    with pytest.raises(HybridizeError, match="DuoAttention"):
        Scores.from_duo_attention(path)


def test_the_most_needed_are_named_with_their_stability():
    samples = np.zeros((4, 2, 3))
    samples[:, 1, 2], samples[:3, 0, 1], samples[3:, 0, 0] = 5, 1, 1
    text = most_needed(Scores("group", samples), 0.34, shown=2)
    assert text.startswith("1.2 (100 %), 0.1 (") and text.endswith("%), ... (layer.group)")
    assert most_needed(Scores("layer", [[0.1, 0.3, 0.2]]), 0.5) == "1, 2, 0"
