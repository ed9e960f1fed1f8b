"""The entropy at which exploration overtakes noise, as far as sampling error lets it be told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SURE = 0.975
"""A bin is told when one of the two leads in this share of bootstrap replicates: a two-sided 5 % test."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where exploration overtakes noise: `value` with its 95 % interval (nats), or None and why, in `text`."""

    value: float | None
    low: float | None
    high: float | None
    text: str


def _none(text: str) -> Crossover:
    return Crossover(None, None, None, text)


def find(entropy: Floats, ahead: Floats, replicates: Floats | None) -> Crossover:
    """Locate the crossover.

    Estimates of exploration are differences, so at low entropy, where both are small, either may seem to lead
    by chance. Only bins in which one leads beyond sampling error are used: the crossover lies between the
    last in which noise leads and the first in which exploration does.

    Parameters
    ----------
    entropy
        Mean entropy of each bin, ascending and above 0, shape (bins,).
    ahead
        Exploration minus noise, shape (bins,).
    replicates
        The same for each bootstrap replicate, shape (R, bins); None with fewer than two sequences.
    """
    if not len(entropy):
        return _none(
            "cannot tell where exploration overtakes noise: no entropy bin has 200 tokens on both sides of the contrast"
        )
    if replicates is None:
        return _none("cannot tell where exploration overtakes noise: fewer than two sequences")
    lead = np.nanmean(np.where(np.isfinite(replicates), replicates > 0, np.nan), axis=0)
    noise, exploration = np.flatnonzero(lead <= 1 - SURE), np.flatnonzero(lead >= SURE)
    if not len(noise) and not len(exploration):
        return _none(
            "cannot tell where exploration overtakes noise: in no entropy bin one of the two leads beyond sampling error"
        )
    if not len(exploration):
        return _none(f"noise leads wherever it can be told, up to mean H = {entropy[noise[-1]]:.3g} nats")
    if not len(noise):
        below = "; below, it cannot be told" if exploration[0] else ", the lowest bin"
        start = entropy[exploration[0]]
        return _none(f"exploration leads wherever it can be told, from mean H = {start:.3g} nats on{below}")
    first, last = int(noise[-1]), int(exploration[0])
    if last < first:
        return _none(
            f"no single crossover: exploration leads at mean H = {entropy[last]:.3g} nats "
            f"and noise at {entropy[first]:.3g}"
        )
    between = slice(first, last + 1)
    value = float(_crossings(entropy[between], ahead[None, between])[0])
    if not np.isfinite(value):
        return _none(f"exploration overtakes noise between mean H = {entropy[first]:.3g} and {entropy[last]:.3g} nats")
    found = _crossings(entropy[between], replicates[:, between])
    low, high = np.nanpercentile(found, [2.5, 97.5]) if np.isfinite(found).any() else (np.nan, np.nan)
    return Crossover(value, _known(low), _known(high), f"exploration overtakes noise at H = {value:.3g} nats")


def _crossings(entropy: Floats, ahead: Floats) -> Floats:
    """Return where each row of `ahead` first rises above 0, interpolated in log H; NaN where it does not."""
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


def _known(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None
