"""Pareto k-hat of importance ratios, from their largest values alone.

PSIS (Vehtari et al., JMLR 2024) fits a generalized Pareto distribution to the k largest ratios, k about 3 sqrt(n),
above the next smaller one. Nothing else of the sample enters k-hat but n. So the k + 1 largest log ratios of the
whole log are all that is fetched, and those of any shards merge exactly: the k + 1 largest of the union are among
the k + 1 largest of each shard, for the k of the union.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GOOD, USABLE = 0.5, 0.7
"""k < 0.5: finite variance; k < 0.7: smoothed weights still converge at practical sample sizes (PSIS paper)."""

MIN_TAIL = 5
"""arviz-stats fits no shorter tail; a fifth of the sample is the tail of small ones, so 25 ratios are needed."""

_SMALL_SAMPLE = 225


def tail_length(n: int) -> int:
    """Return how many ratios PSIS takes as the tail: 3 sqrt(n), or n / 5 up to 225 ratios."""
    return math.floor(3 * n**0.5) if n > _SMALL_SAMPLE else n // 5


@dataclass(frozen=True, slots=True)
class Tail:
    """The largest log ratios of a sample.

    Attributes
    ----------
    n
        Size of the sample.
    largest
        Its largest log ratios, ascending; k-hat needs `needed(n)` of them.
    """

    n: int
    largest: tuple[float, ...]

    @staticmethod
    def needed(n: int) -> int:
        """Return how many of the largest log ratios of n are needed: tail and cutoff, or all of a small sample."""
        return tail_length(n) + 1 if n > _SMALL_SAMPLE else n

    @classmethod
    def of(cls, log_ratios: Iterable[float] | Floats) -> Tail:
        """Return the tail of a sample that is held in memory."""
        values = np.sort(np.asarray(log_ratios, dtype=np.float64))
        n = len(values)
        return cls(n, tuple(values[n - cls.needed(n) :].tolist()))

    @staticmethod
    def merged(shards: Sequence[Tail]) -> Tail:
        """Return the tail of the union of samples, each of which kept enough values for the union's size."""
        n = sum(shard.n for shard in shards)
        needed = Tail.needed(n)
        if any(len(shard.largest) < min(needed, shard.n) for shard in shards):
            raise ValueError(f"each shard must keep its {needed} largest log ratios, as {n} ratios in all need them")
        values = np.sort(np.concatenate([np.asarray(shard.largest) for shard in shards]))
        return Tail(n, tuple(values[len(values) - needed :].tolist()))


def khat(tail: Tail) -> tuple[float | None, str]:
    """Return Pareto k-hat and its reading, or None and the reason.

    Parameters
    ----------
    tail
        Of the log ratios, unclamped.
    """
    length, values = tail_length(tail.n), np.asarray(tail.largest)
    if length < MIN_TAIL:
        return None, f"cannot tell: {tail.n} ratios; a tail of {MIN_TAIL} needs {5 * MIN_TAIL}"
    cut, above = values[-length - 1], values[-length:]
    # What arviz-stats will see, relative to the largest ratio; ties there end in an error or in 0 / 0.
    excess = np.exp(above - above[-1]) - np.exp(cut - above[-1])
    if above[-1] == above[0]:
        return None, f"cannot tell: the {length} largest ratios are all the same"
    if excess[int(length / 4 + 0.5) - 1] <= 0:
        if cut < above[int(length / 4 + 0.5) - 1]:
            return None, "cannot tell, not usable: the largest ratios dwarf the others beyond the range of a double"
        return None, f"cannot tell: more than a quarter of the {length} largest ratios are tied"
    value = _fit(tail.n, values, length)
    if value is None:
        return None, "cannot tell: the fit of the tail has no finite value"
    return value, reading(value)


def reading(value: float) -> str:
    """Return what a value of k-hat means."""
    if value < GOOD:
        return "good: the ratios have a finite variance"
    if value < USABLE:
        return "usable: the variance may be infinite, importance weighting still works if smoothed or truncated"
    return "not usable: a few ratios rule any weighted mean"


def _fit(n: int, values: Floats, length: int) -> float | None:
    # Slow to import: about 3 s cold.
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    r_eff = 1.0
    if n > _SMALL_SAMPLE:
        # arviz-stats sets the tail length from the sample size. Below the cutoff only the number of ratios
        # matters, so a sample of 6 tail lengths stands in for all n: padded with the cutoff, and with the
        # r_eff at which 3 sqrt(size / r_eff) is this length.
        size = 6 * length
        r_eff = 9 * size / (length + 0.5) ** 2
        values = np.concatenate([np.full(size - length - 1, values[0]), values])
    with np.errstate(all="ignore"):
        # SIGN: psislw takes minus the log ratio (a log-likelihood, in leave-one-out); plus it gives the other tail.
        _, fitted = array_stats.psislw(-values, r_eff=r_eff, axis=-1)  # type: ignore[no-untyped-call]
    return float(fitted) if np.isfinite(fitted) else None
