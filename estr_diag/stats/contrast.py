"""Split a second moment into noise and exploration: the estimators, on arrays of sums.

delta = xi + d, with noise xi (two engines, same weights) and exploration d (same engine, weights moved).
Everything here is a function of sums over tokens, so a bootstrap replicate is one more row of the same arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Method = Literal["exact", "lag_contrast", "extrapolated", "none"]

METHODS: tuple[Method, ...] = ("exact", "lag_contrast", "extrapolated")
"""Best first."""

MIN_LAGS = 3
"""Distinct lags that a parabola in lag needs."""

ASSUMPTIONS: Mapping[Method, str] = {
    "exact": "none: logp_replay gives noise and exploration of each token",
    "lag_contrast": "given the bin, engine noise does not depend on lag, nor on the position that lag goes with",
    "extrapolated": (
        "given the bin, engine noise does not depend on lag and exploration is a k + b k^2 of lag k with a, b >= 0; "
        "the noise is extrapolated to lag 0, not observed"
    ),
    "none": "nothing is split; only the total is given",
}


@dataclass(frozen=True, slots=True)
class Split:
    """Second moments by replicate, entropy bin and lag; each of shape (R, bins, lags), NaN where unknown.

    Attributes
    ----------
    n
        Tokens that the moments are over: those whose stratum has a noise estimate.
    noise, exploration, cross
        E[xi^2], E[d^2], 2 E[xi d]; they add up to `total`. Only the exact method has a cross term.
    total
        E[delta^2] of the same tokens.
    n_noise
        Tokens that the noise was estimated from.
    """

    n: Floats
    noise: Floats
    exploration: Floats
    cross: Floats
    total: Floats
    n_noise: Floats

    def pooled(self, lags: Sequence[int], *, by_bin: bool = False) -> Split:
        """Return the moments over the lags at these indices together: shape (R, bins, 1) or (R, 1, 1)."""
        at, axis = list(lags), (2,) if by_bin else (1, 2)
        known = np.isfinite(self.noise)
        # Without a split there is still a total.
        n = np.where(known if known.any() else np.isfinite(self.total), self.n, 0)[..., at]
        whole = n.sum(axis=axis, keepdims=True)

        def mean(values: Floats) -> Floats:
            return divide((np.where(n > 0, values[..., at], 0) * n).sum(axis=axis, keepdims=True), whole)

        # A contrast uses the same tokens for every lag of a bin; the exact split uses each cell's own.
        own = bool((self.n_noise == self.n).all())
        n_noise = self.n_noise[..., at]
        based_on = n_noise.sum(axis=2, keepdims=True) if own else n_noise.max(axis=2, initial=0, keepdims=True)
        return Split(
            n=whole,
            noise=mean(self.noise),
            exploration=mean(self.exploration),
            cross=mean(self.cross),
            total=mean(self.total),
            n_noise=based_on if by_bin else based_on.sum(axis=1, keepdims=True),
        )


def divide(a: Floats, b: Floats) -> Floats:
    """Return a / b, NaN where b is 0."""
    out: Floats = np.divide(a, b, out=np.full(np.broadcast_shapes(a.shape, b.shape), np.nan), where=b != 0)
    return out


def choose(asked: Method | None, lags: Sequence[int | None], n_replay: float) -> tuple[Method, str]:
    """Return the best method that the log allows, or the one asked for, and why nothing better was taken.

    Parameters
    ----------
    asked
        None to take the best one.
    lags
        Distinct known lags of counted tokens; [None] for a log without versions.
    n_replay
        Counted tokens that have logp_replay.
    """
    known = [k for k in lags if k is not None]
    forward = [k for k in known if k >= 0]
    lacking: dict[Method, str] = {}
    if not n_replay:
        lacking["exact"] = "the log has no logp_replay"
    if not known:
        lacking["lag_contrast"] = "no token has a known lag (trainer_version - policy_version)"
    elif 0 not in known:
        lacking["lag_contrast"] = "no token has lag 0"
    if len(forward) < MIN_LAGS:
        lacking["extrapolated"] = f"{len(forward)} distinct lags; a parabola needs {MIN_LAGS}"
    if asked is not None and asked != "none":
        return (asked, "") if asked not in lacking else ("none", f"{asked} was asked for, but {lacking[asked]}")
    if asked == "none":
        return "none", "no split was asked for"
    for method in METHODS:
        if method not in lacking:
            return method, "; ".join(f"not {m}: {lacking[m]}" for m in METHODS[: METHODS.index(method)])
    return "none", "; ".join(f"not {m}: {reason}" for m, reason in lacking.items())


def split(method: Method, sums: Mapping[str, Floats], lags: Sequence[int | None]) -> Split:
    """Split the second moment of delta.

    Parameters
    ----------
    method
        As chosen by `choose`.
    sums
        Measure -> sums over tokens, shape (R, strata, bins, lags). Contrasts are formed inside a stratum
        of a bin and averaged with the tokens of the cell as weights.
    lags
        The lag of each index of the last axis.
    """
    n, squares = sums["n"], sums["sum_delta2"]
    whole = divide(squares.sum(axis=1), n.sum(axis=1))
    unknown = np.full_like(whole, np.nan)
    if method == "none":
        return Split(n.sum(axis=1), unknown, unknown, unknown, whole, np.zeros_like(whole))
    if method == "exact":
        used = sums["n_replay"].sum(axis=1)
        xi2, d2, cross = (divide(sums[m].sum(axis=1), used) for m in ("sum_xi2", "sum_d2", "sum_xi_d"))
        return Split(used, xi2, d2, 2 * cross, xi2 + d2 + 2 * cross, used)
    at_zero = [i for i, lag in enumerate(lags) if lag == 0]
    if method == "lag_contrast":
        zero = at_zero[0]
        noise, based_on = divide(squares[..., zero], n[..., zero]), n[..., zero]
    else:
        noise, based_on = _intercepts(n, squares, lags)
    known = np.isfinite(noise)
    used = np.where(known[..., None], n, 0)
    tokens = used.sum(axis=1)
    from_noise = divide((used * np.where(known, noise, 0)[..., None]).sum(axis=1), tokens)
    total = divide(np.where(known[..., None], squares, 0).sum(axis=1), tokens)
    exploration = total - from_noise
    if method == "lag_contrast":
        from_noise[..., at_zero], exploration[..., at_zero] = total[..., at_zero], 0 * total[..., at_zero]
    total = np.where(tokens > 0, total, whole)
    n_noise = np.broadcast_to(np.where(known, based_on, 0).sum(axis=1)[..., None], total.shape)
    return Split(np.where(tokens > 0, tokens, n.sum(axis=1)), from_noise, exploration, unknown, total, n_noise)


def _intercepts(n: Floats, squares: Floats, lags: Sequence[int | None]) -> tuple[Floats, Floats]:
    """Fit mean squares on (1, k, k^2) with coefficients >= 0, weighted by tokens; NaN with fewer than 3 lags.

    One call of `scipy.optimize.nnls` a replicate and bin: 11 microseconds each.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    forward = [i for i, lag in enumerate(lags) if lag is not None and lag >= 0]
    k = np.array([float(lags[i] or 0) for i in forward])
    n, means = n[..., forward], divide(squares, n)[..., forward]
    design = np.stack([np.ones_like(k), k, k * k], axis=1)
    noise = np.full(n.shape[:-1], np.nan)
    for cell in zip(*np.nonzero((n > 0).sum(axis=-1) >= MIN_LAGS), strict=True):
        held = n[cell] > 0
        weight = np.sqrt(n[cell][held])
        scale = means[cell][held].max() or 1.0  # nnls stops on an absolute tolerance
        noise[cell] = scale * nnls(design[held] * weight[:, None], means[cell][held] / scale * weight)[0][0]
    return noise, n.sum(axis=-1)
