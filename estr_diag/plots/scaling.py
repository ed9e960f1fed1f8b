"""The scaling law: E[delta^2] against the entropy, with the fit and the paper's exponent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import GREY, PALETTE, axes, column, legend, nothing, positive, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result

_UNITS = {"entropy": "entropy H of the bin, nat", "gini": "1 − G of the bin"}


def plot_scaling(scaling: Result, bins: Result, *, scale: str = "entropy", ax: Axes | None = None) -> Axes:
    """Draw the moments of the bins with 95 % intervals, the fitted power law, and the line of exponent 1.

    Points that leave the grey line at low entropy are where the law does not hold: engine noise on tokens that the
    sampler was sure of.

    Parameters
    ----------
    scaling
        Of `Scaling`.
    bins
        Of `EntropyBins`, over the same scale.
    """
    ax = axes(ax)
    x, y, se = (column(bins, name) for name in (f"mean_{scale}", "mean_sq_delta", "mean_sq_delta_se"))
    at = positive(x, y)
    if not at.any():
        return nothing(ax, "no bins to draw")
    x, y, se = x[at], y[at], np.nan_to_num(se[at])
    low = np.minimum(1.96 * se, y * 0.99)
    ax.errorbar(x, y, yerr=[low, 1.96 * se], fmt="o", color=PALETTE[0], markersize=4, linewidth=1, label="bins, 95 %")
    fit = next((row for row in scaling.rows() if row["scale"] == scale), None)
    grid = np.geomspace(x.min(), x.max(), 100)
    if fit is not None and fit["exponent"] is not None:
        b, a = fit["exponent"], fit["amplitude"]
        interval = "" if fit["ci_low"] is None else f" [{fit['ci_low']:.2f}, {fit['ci_high']:.2f}]"
        ax.plot(grid, a * grid**b, color=PALETTE[3], label=f"fit, exponent {b:.2f}{interval}")
        middle = np.exp(np.log(x).mean())
        ax.plot(grid, a * middle**b * grid / middle, "--", color=GREY, label="exponent 1 (the paper's law)")
    ax.set_xscale("log")
    ax.set_yscale("log")
    titled(ax, "Scaling law", _UNITS.get(scale, scale), "E[δ²], nat²")
    legend(ax)
    return ax
