"""The difference of two estimates from different sequences, and which of many differences chance does not explain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05
"""Chance of any false alarm among all differences that are judged together."""


MIN_STEPS = 5
"""Steps a side from which an error by step is taken."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its standard error by sequence, and the sequences and tokens that it rests on.

    Attributes
    ----------
    se_steps, n_steps
        The error with a step as the unit, and the steps; None and 0 where it is not known.
    """

    value: float
    se: float
    n_sequences: int
    n: int
    se_steps: float | None = None
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """b - a.

    Attributes
    ----------
    value, se
        The difference, and sqrt(se_a^2 + se_b^2).
    se_alike
        Its standard error if the sequences of both sides scattered alike (`_alike`).
    se_steps
        Its standard error by step; None with fewer than `MIN_STEPS` steps a side.
    low, high
        Ends of the 95 % interval, by Student's t and the error that makes it widest.
    z
        value over that error; None where neither side varies.
    df
        Welch's degrees of freedom for that error; None where neither side varies.
    p
        Two-sided probability of so large a difference by chance.
    """

    value: float
    se: float
    se_alike: float
    se_steps: float | None
    low: float
    high: float
    z: float | None
    df: float | None
    p: float


def difference(a: Estimate, b: Estimate) -> Difference:
    """Compare two estimates from independent sequences; both errors must be from two or more.

    The error by sequence is too small where sequences of one step have something in common, and those of a training run
    have its weights and prompts: of random halves of the steps of one run, a third of all numbers differed at 5 %. So the
    widest of three intervals is taken. Student's t with Welch's degrees of freedom stands in place of the normal
    distribution: with a dozen sequences a side, what is one in a thousand by the normal is three in a thousand.
    """
    # Light beside scipy.stats, whose import takes half a second.
    from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

    value, se = b.value - a.value, math.hypot(a.se, b.se)
    if se == 0:
        return Difference(value, 0.0, 0.0, None, value, value, None, None, _separated(a, b) if value else 1.0)
    alike, by_step = _alike(a, b), None
    df = _welch((a.se, a.n_sequences), (b.se, b.n_sequences))
    errors = [(se, df), (alike, df)]
    if a.se_steps is not None and b.se_steps is not None and min(a.n_steps, b.n_steps) >= MIN_STEPS:
        by_step = math.hypot(a.se_steps, b.se_steps)
        if by_step:
            errors.append((by_step, _welch((a.se_steps, a.n_steps), (b.se_steps, b.n_steps))))
    reach, error, df = max((float(stdtrit(df, 0.975)) * error, error, df) for error, df in errors)
    p = min(1.0, 2 * float(stdtr(df, -abs(value) / error)))
    return Difference(value, se, alike, by_step, value - reach, value + reach, value / error, df, p)


def cluster_error(values: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the standard error of a mean from the means of clusters and what each is over; None with fewer than two.

    The formula of `clusters.cluster_means`, for the rare case where the means by cluster are there already.
    """
    total, size = math.fsum(counts), len(values)
    if size < 2 or not total:
        return None
    mean = math.fsum(v * n for v, n in zip(values, counts, strict=True)) / total
    squares = math.fsum(((v - mean) * n) ** 2 for v, n in zip(values, counts, strict=True))
    return math.sqrt(squares * size / (size - 1)) / total


def _welch(a: tuple[float, int], b: tuple[float, int]) -> float:
    whole = a[0] ** 2 + b[0] ** 2
    return 1 / sum((se**2 / whole) ** 2 / (size - 1) for se, size in (a, b))


def _alike(a: Estimate, b: Estimate) -> float:
    """Return the error of the difference with the spread of a sequence (or of a token) pooled over both sides.

    A short side on which an event has not happened scatters by nothing, or by too little where it happened once, and
    would be told apart from a long side on which it happens now and then: 0 of 800 tokens against 41 of 126,000.
    The larger of the scales by sequences and by tokens is taken, since rare events scatter by tokens.
    """

    def pooled(counts: tuple[int, int]) -> float:
        weights = [x.n_sequences - 1 for x in (a, b)]
        spreads = [x.se**2 * n for x, n in zip((a, b), counts, strict=True)]
        spread = sum(w * s for w, s in zip(weights, spreads, strict=True)) / sum(weights)
        return math.sqrt(spread * (1 / counts[0] + 1 / counts[1]))

    return max(pooled((a.n_sequences, b.n_sequences)), pooled((a.n, b.n)))


def _separated(a: Estimate, b: Estimate) -> float:
    """Return the permutation test's p where every sequence of a side has one value, and the other side's has another."""
    return min(1.0, 2 / math.comb(a.n_sequences + b.n_sequences, min(a.n_sequences, b.n_sequences)))


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted probabilities: below alpha, with a chance of any false alarm of at most alpha.

    It holds for any dependence between the comparisons, and metrics of one log depend on each other.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    out, largest = [1.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        out[i] = largest
    return out
