"""Intervals by resampling whole sequences.

Tokens of one sequence depend on each other, so the unit that is drawn is the sequence. A statistic that is a
function of sums over tokens is a function of sums over sequences, and a bootstrap replicate of it needs no
token: only the per-sequence sums, weighted by how often each sequence was drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REPLICATES = 1000
SEED = 20260722
"""Fixed, so that the same log gives the same interval."""

_CHUNK_BYTES = 1 << 27


def resampled_sums(sums: Floats, replicates: int = REPLICATES, seed: int = SEED) -> Floats:
    """Draw C sequences with replacement, `replicates` times, and add up their sums.

    Parameters
    ----------
    sums
        Per-sequence sums, shape (C, K): one column for each additive quantity.
    replicates
        Number of bootstrap samples, B.
    seed
        Of the generator.

    Returns
    -------
    ndarray
        Shape (B, K).
    """
    clusters, width = sums.shape
    rng = np.random.default_rng(seed)
    out = np.empty((replicates, width))
    step = max(1, _CHUNK_BYTES // (8 * max(clusters, 1)))
    for start in range(0, replicates, step):
        size = min(step, replicates - start)
        drawn = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=size).astype(np.float64)
        out[start : start + size] = drawn @ sums
    return out


def percentile_interval(
    sums: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    level: float = 0.95,
    replicates: int = REPLICATES,
    seed: int = SEED,
) -> tuple[Floats, Floats]:
    """Return the percentile interval of a statistic of the sums.

    Parameters
    ----------
    sums
        Per-sequence sums, shape (C, K).
    statistic
        Maps summed columns of shape (B, K) to values of shape (B, ...); NaN where it cannot be computed.
    level
        Coverage.

    Returns
    -------
    tuple of ndarray
        Lower and upper end; NaN with fewer than two sequences, or where more than half of the replicates
        cannot be computed.
    """
    values = np.asarray(statistic(resampled_sums(sums, replicates, seed)), dtype=np.float64)
    if len(sums) < 2:
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing.copy()
    known = np.isfinite(values)
    values = np.where(known, values, np.nan)
    enough = known.mean(axis=0) > 0.5
    tail = (1 - level) / 2
    low, high = np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
    if np.any(enough):
        ends = np.nanquantile(values[:, enough] if values.ndim > 1 else values, [tail, 1 - tail], axis=0)
        low[enough], high[enough] = ends
    return low, high
