"""The entropy at which exploration overtakes noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def crossovers(entropy: Floats, exploration: Floats, noise: Floats) -> Floats:
    """Return where exploration first exceeds noise going up in entropy, interpolated in log H.

    Parameters
    ----------
    entropy
        Mean entropy of each bin, ascending and above 0, shape (bins,).
    exploration, noise
        Second moments, shape (R, bins).

    Returns
    -------
    ndarray
        Shape (R,); NaN where exploration never exceeds noise, or does so in the lowest bin already.
    """
    ahead = exploration - noise
    above = ahead > 0
    first = above.argmax(axis=1)
    rows = np.arange(len(ahead))
    crosses = above.any(axis=1) & (first > 0) & np.isfinite(ahead).all(axis=1)
    before = np.maximum(first - 1, 0)
    low, high = ahead[rows, before], ahead[rows, first]
    # ahead is <= 0 below the crossing and > 0 above it, so the denominator is positive where it is used
    share = np.divide(-low, high - low, out=np.full(len(rows), np.nan), where=crosses)
    log_h = np.log(entropy)
    found: Floats = np.exp(log_h[before] + share * (log_h[first] - log_h[before]))
    return found


def describe(entropy: Floats, exploration: Floats, noise: Floats) -> tuple[float | None, str]:
    """Return the crossover of one curve (shapes (bins,)), and in words what it is or why there is none."""
    if not len(entropy):
        return None, "cannot tell: no entropy bin has 200 tokens on both sides of the contrast"
    value = float(crossovers(entropy, exploration[None], noise[None])[0])
    if np.isfinite(value):
        return value, f"exploration overtakes noise at H = {value:.3g} nats"
    if exploration[0] > noise[0]:
        return None, f"exploration exceeds noise from the lowest bin on (mean H = {entropy[0]:.3g} nats)"
    return None, f"exploration never exceeds noise, up to mean H = {entropy[-1]:.3g} nats"
