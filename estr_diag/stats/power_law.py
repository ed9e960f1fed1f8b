"""Weighted least squares of one log on another, for all replicates of a bootstrap at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estr_diag.stats.bootstrap import Floats

MIN_BINS = 3
"""Two bins lie on a line whatever the law."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Weighted least squares of log E[delta^2] on log x, one of each number a replicate; NaN where there is none."""

    exponent: Floats
    log_amplitude: Floats
    r2: Floats
    rms_residual: Floats


def usable_bins(sums: Floats, min_tokens: int) -> NDArray[np.int64]:
    """Return the bins that a fit can use: x > 0, enough tokens, and a moment that has a logarithm.

    Parameters
    ----------
    sums
        Shape (bins, 3): n, sum of delta^2, sum of x.
    """
    usable = (sums[:, 0] >= max(min_tokens, 1)) & (sums[:, 1] > 0) & (sums[:, 2] > 0)
    usable[0] = False
    return np.flatnonzero(usable)


def weighted_fit(sums: Floats) -> Fit:
    """Fit every replicate at once; a bin that a replicate did not draw has weight 0.

    Parameters
    ----------
    sums
        Shape (B, bins, 3): n, sum of delta^2, sum of x.
    """
    weight, x, y = _logs(sums)
    known = weight > 0
    weight, x, y = (np.where(known, v, 0.0) for v in (weight, x, y))
    bins = known.sum(axis=1)
    mass = np.where(bins > 0, weight.sum(axis=1), np.nan)
    mean_x, mean_y = (weight * x).sum(axis=1) / mass, (weight * y).sum(axis=1) / mass
    dx, dy = (np.where(known, v - m[:, None], 0.0) for v, m in ((x, mean_x), (y, mean_y)))
    sxx, sxy, syy = ((weight * a * b).sum(axis=1) for a, b in ((dx, dx), (dx, dy), (dy, dy)))
    exponent = _divide(sxy, np.where(bins > 1, sxx, 0.0))
    left = (weight * (dy - exponent[:, None] * dx) ** 2).sum(axis=1)
    # Two bins leave no residual to judge by; and where every moment is the same up to rounding, R^2 is noise.
    judged = bins >= MIN_BINS
    varies = judged & (syy > 1e-20 * mass * (1 + mean_y**2))
    return Fit(
        exponent,
        mean_y - exponent * mean_x,
        1 - _divide(left, np.where(varies, syy, 0.0)),
        np.sqrt(_divide(left * bins, np.where(judged, mass * (bins - 2), 0.0))),
    )


def slopes(sums: Floats) -> Floats:
    """Return the exponent from each bin to the next, shape (B, bins - 1)."""
    _, x, y = _logs(sums)
    return _divide(np.diff(y, axis=1), np.diff(x, axis=1))


def _logs(sums: Floats) -> tuple[Floats, Floats, Floats]:
    """Return weight, log mean x and log mean delta^2; weight 0 and NaN where a logarithm does not exist."""
    n, moment, total = np.moveaxis(sums, -1, 0)
    known = (n > 0) & (moment > 0) & (total > 0)
    safe = np.where(known, n, 1.0)
    x, y = (np.where(known, np.log(np.where(known, s, 1.0) / safe), np.nan) for s in (total, moment))
    return np.where(known, n, 0.0), x, y


def _divide(above: Floats, below: Floats) -> Floats:
    """Return above / below, NaN where below is not positive."""
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
