"""Whether noise is told from exploration at equal position in the response.

Lag falls along a response that is generated while weights are pushed, and noise can grow along it (a cache of
rounded keys, a context that gets longer): then tokens of lag 0 are late and noisy, and a contrast that ignores the position
takes their noise for everybody's. On lab runs with a float8 engine it found noise shares of 1.3 and 1.5 where 0.64 and 0.53 were
true. At equal position it does not, but only tokens with others of lag 0 (or of several lags) at their position take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estr_diag.stats.contrast import MIN_LAGS, Method

Floats = NDArray[np.float64]

REFERENCE = 20
"""Tokens of one lag in a bin and position bucket that a mean can be taken over."""

ENOUGH = 0.5
"""Share of the tokens that must have a reference at their position."""


@dataclass(frozen=True, slots=True)
class Strata:
    """Whether contrasts are formed inside position buckets, and a sentence that says why."""

    by_position: bool
    note: str


def judge(n: Floats, lag: Floats, keys: Sequence[Floats], method: Method = "lag_contrast") -> Strata:
    """Stratify where most tokens have a reference in their bin and position bucket.

    Parameters
    ----------
    n
        Tokens of each row of some partials.
    lag
        Their lag; for a contrast anything that is 0 at lag 0 and above 0 where the weights have moved.
    keys
        Bin and position bucket of each row.
    method
        ``lag_contrast``, whose reference is lag 0, or ``extrapolated``, whose reference are `contrast.MIN_LAGS` lags.
    """
    if method not in ("lag_contrast", "extrapolated") or not (lag > 0).any():
        return Strata(False, "")
    _, cell = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    cell = cell.reshape(-1)

    def tokens(at: NDArray[np.bool_]) -> Floats:
        return np.bincount(cell[at], weights=n[at], minlength=cell.max() + 1).astype(np.float64)

    if method == "lag_contrast":
        concerned, has, what = tokens(lag > 0), tokens(lag == 0) >= REFERENCE, "lag-0 tokens"
    else:
        lags = [tokens(lag == k) >= REFERENCE for k in np.unique(lag[lag >= 0])]
        concerned, has = tokens(lag >= 0), np.sum(lags, axis=0) >= MIN_LAGS
        what = f"tokens of each of {MIN_LAGS} lags"
    share = float(concerned[has].sum() / concerned.sum())
    if share >= ENOUGH:
        return Strata(True, "")
    return Strata(
        False,
        f"not at equal position: {share:.0%} of the tokens have {REFERENCE} {what} in their bin and position bucket; noise that grows "
        "along a response, as lag falls, is then taken for more noise and less exploration everywhere",
    )
