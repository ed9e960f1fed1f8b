"""Noise and exploration at each entropy, and their shares at each lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import GREY, MARKERS, PALETTE, axes, column, legend, nothing, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_decomposition(decomposition: Result, *, ax: Axes | None = None) -> Axes:
    """Draw the second moments of noise and of exploration against entropy, exploration at each lag with 95 % intervals.

    Where the exploration of a lag runs above the noise, a mask on delta removes more signal than engine error there.
    Estimates below 0 are drawn as they are: they are sampling error of a contrast.

    Parameters
    ----------
    decomposition
        Of `Decomposition`.
    """
    ax = axes(ax)
    method = decomposition.parameters.get("method")
    if not len(decomposition) or method == "none":
        return nothing(ax, "not split: the log has neither known lags nor logp_replay")
    x, noise, exploration = (column(decomposition, name) for name in ("mean_entropy", "noise", "exploration"))
    low, high = (column(decomposition, name) for name in ("ci_low", "ci_high"))
    small = np.array(decomposition.table["small"].to_pylist(), dtype=bool)
    lags = decomposition.table["lag"].to_pylist()
    bins, n = np.array(decomposition.table["entropy_bin"].to_pylist()), column(decomposition, "n_used")
    # The noise that exploration is held against: that of the tokens whose weights have moved, where there are any.
    moved = np.array([lag not in (0, None) for lag in lags]) & np.isfinite(noise) & (x > 0)
    judged = (moved if moved.any() else np.isfinite(noise) & (x > 0)) & ~small
    line = []
    for bin_ in np.unique(bins[judged]):
        at = judged & (bins == bin_) & (n > 0)
        if at.any():
            line.append((np.average(x[at], weights=n[at]), np.average(noise[at], weights=n[at])))
    if line:
        ax.plot(*np.array(line).T, color=GREY, linewidth=2, label="engine noise E[ξ²] of the same tokens")
    for i, lag in enumerate(k for k in dict.fromkeys(lags) if k not in (0, None)):
        at = np.array([v == lag for v in lags]) & ~small & (x > 0) & np.isfinite(exploration)
        if not at.any():
            continue
        bounds = [np.clip(exploration[at] - low[at], 0, None), np.clip(high[at] - exploration[at], 0, None)]
        ax.errorbar(
            x[at], exploration[at], yerr=np.nan_to_num(bounds), label=f"exploration E[d²], lag {lag}", markersize=4,
            linewidth=1, color=PALETTE[i % len(PALETTE)], marker=MARKERS[i % len(MARKERS)],
        )  # fmt: skip
    if not ax.has_data():
        return nothing(ax, "no entropy bin has enough tokens to read")
    ax.axhline(0, color=GREY, linewidth=0.6)
    ax.set_xscale("log")
    titled(
        ax,
        f"Noise and exploration ({str(method).replace('_', ' ')})",
        "entropy H of the bin, nat",
        "second moment, nat²",
    )
    legend(ax, beside=True)
    return ax


def plot_noise_share(noise_share: Result, *, ax: Axes | None = None) -> Axes:
    """Draw the share of the squared deviation that is engine noise, at each lag, with 95 % intervals.

    Near 1 the ratios are engine error; near 0 they are moved weights.

    Parameters
    ----------
    noise_share
        Of `NoiseShare`.
    """
    ax = axes(ax)
    rows = [row for row in noise_share.rows() if row["lag"] is not None and row["noise_share"] is not None]
    if not rows:
        return nothing(ax, "no noise share by lag: the log has no known lags")
    for row in rows:
        share, low, high = row["noise_share"], row["ci_low"], row["ci_high"]
        error = None if low is None else [[max(share - low, 0)], [max(high - share, 0)]]
        ax.errorbar([row["lag"]], [share], yerr=error, fmt="o", color=PALETTE[0], capsize=3)
    ax.axhline(0.5, color=GREY, linestyle="--", linewidth=0.8, label="half of it")
    ax.set_ylim(min(0, ax.get_ylim()[0]), max(1.02, min(ax.get_ylim()[1], 1.5)))
    ax.set_xticks([row["lag"] for row in rows])
    titled(ax, "Share of δ² that is engine noise", "lag, weight versions", "share")
    legend(ax)
    return ax
