"""Intervals, and paired tests of a plan against the base on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FLIPS, SEED, EXACT = 10_000, 0, 14


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default: right near 0 and 1, where the normal one is not."""
    if n == 0:
        return 0.0, 1.0
    p = hits / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def standard_error(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Of the (weighted) mean; 0 for one value, which says nothing of its spread."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return 0.0
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = float(np.average(x, weights=w))
    return math.sqrt(float(np.sum((w * (x - mean)) ** 2)) / float(w.sum()) ** 2 * len(x) / (len(x) - 1))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of "the mean paired difference is 0": each difference as likely to have had the other sign.

    All sign patterns for up to 14 differences that are not 0, else 10,000 seeded ones (p is then at least 1/10,001). For
    right/wrong items this is McNemar's test.
    """
    d = np.asarray([x for x in differences if x != 0], dtype=np.float64)
    if not len(d):
        return 1.0
    seen = abs(d.sum()) - 1e-12
    if len(d) <= EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
        return float(np.mean(np.abs(signs @ d) >= seen))
    signs = np.random.default_rng(SEED).choice(np.array([-1.0, 1.0]), size=(FLIPS, len(d)))
    return float((np.sum(np.abs(signs @ d) >= seen) + 1) / (FLIPS + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment for testing several hypotheses at once (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = highest
    return adjusted
