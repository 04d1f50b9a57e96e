"""Cells, intervals and paired tests against sums written out and known values."""

import itertools
import math

import numpy as np
import pytest

import hybridize as hz
from hybridize.evaluation.cells import Cell, against, average, average_against, merged
from hybridize.evaluation.statistics import holm, sign_flip_p, standard_error, wilson


def test_wilson():
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-3), 1.0)
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-3))
    assert wilson(50, 100) == (pytest.approx(0.4038, abs=1e-3), pytest.approx(0.5962, abs=1e-3))


def test_standard_error():
    x = [1.0, 2.0, 4.0, 8.0]
    assert standard_error(x) == pytest.approx(np.std(x, ddof=1) / 2)
    assert standard_error(x, [3, 3, 3, 3]) == pytest.approx(standard_error(x))
    assert standard_error([5.0]) == 0.0
    # an item of weight 0 says nothing
    assert standard_error([1.0, 2.0, 99.0], [1, 1, 0]) == pytest.approx(standard_error([1.0, 2.0]) * math.sqrt(3 / 2 / 2))


def test_sign_flip_is_mcnemar_for_hits():
    def mcnemar(worse, better):  # exact: binomial with p = 1/2 over the items that changed
        n, k = worse + better, min(worse, better)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)

    for worse, better in ((5, 0), (7, 2), (4, 4), (10, 3), (0, 0)):
        d = [-1.0] * worse + [1.0] * better + [0.0] * 20
        assert sign_flip_p(d) == pytest.approx(mcnemar(worse, better))
    assert sign_flip_p([-1.0] * 30 + [1.0] * 10) == pytest.approx(mcnemar(30, 10), abs=3e-3)  # by sampling


def test_sign_flip_by_enumeration():
    d = [0.5, -0.2, 0.9, 0.1, 0.4]
    sums = [abs(sum(s * x for s, x in zip(signs, d))) for signs in itertools.product([-1, 1], repeat=5)]
    assert sign_flip_p(d) == pytest.approx(np.mean([s >= abs(sum(d)) - 1e-12 for s in sums]))


def test_sign_flip_is_calibrated():
    rng = np.random.default_rng(0)
    p = [sign_flip_p(rng.normal(size=12)) for _ in range(400)]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_rows():
    share = Cell("t", "acc", "share", [1, 0, 1, 1]).row()
    assert (share["score"], share["n"]) == (0.75, 4) and (share["low"], share["high"]) == wilson(3, 4)
    mean = Cell("t", "score", "mean", [0.0, 0.5, 1.0, 1.0], context=9).row()
    assert mean["score"] == 0.625 and mean["context"] == 9 and 0 <= mean["low"] < 0.625 < mean["high"] <= 1
    nats = Cell("t", "perplexity", "nats", [1.0, 3.0], [30, 10]).row()
    assert nats["score"] == pytest.approx(math.exp(1.5)) and nats["n"] == 40
    with pytest.raises(hz.HybridizeError, match=r"cell\.kind"):
        Cell("t", "m", "median", [1])


def test_batches_may_cut_a_cell_anywhere():
    whole = Cell("t", "m", "nats", range(6), range(1, 7), context=3)
    parts = [Cell("t", "m", "nats", range(a, b), range(a + 1, b + 1), context=3) for a, b in ((0, 2), (2, 3), (3, 6))]
    other = Cell("t", "m", "mean", [1.0], context=4)
    assert merged([parts[0], other, *parts[1:]]) == [whole, other]
    assert Cell(**whole.to_dict()) == whole


def test_against_is_paired():
    base = Cell("t", "m", "share", [1, 1, 1, 0, 0, 1, 1, 1])
    plan = Cell("t", "m", "share", [0, 0, 0, 0, 0, 1, 0, 0])
    found = against(plan, base)
    assert found["difference"] == pytest.approx(-5 / 8) and found["p"] == pytest.approx(2 / 2**5)
    assert found["difference_low"] < -5 / 8 < found["difference_high"] < 0
    weighted = against(Cell("t", "m", "nats", [1.0, 2.0], [3, 1]), Cell("t", "m", "nats", [1.0, 1.0], [3, 1]))
    assert weighted["difference"] == 0.25
    for other in (Cell("u", "m", "share", base.values), Cell("t", "m", "share", base.values[:-1])):
        with pytest.raises(hz.HybridizeError, match="cell"):
            against(plan, other)


def test_averages_count_tasks_alike():
    a, b = Cell("a", "score", "mean", [1.0, 1.0], context=8), Cell("b", "score", "mean", [0.0, 0.5, 0.5, 0.0], context=8)
    row = average([a, b], "both")
    assert row["score"] == pytest.approx((1 + 0.25) / 2) and row["n"] == 6
    assert row["high"] - row["score"] == pytest.approx(1.96 * standard_error(b.values) / 2)
    worse = [Cell("a", "score", "mean", [0.5, 1.0], context=8), b]
    found = average_against(worse, [a, b])
    assert found["difference"] == pytest.approx(-0.125) and found["p"] == 1.0  # one item alone is no evidence
