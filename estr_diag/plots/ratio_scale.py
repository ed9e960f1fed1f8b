"""The paper's Figure 1: how far the engines differ at each entropy, and where thresholds cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from estr_diag.expressions import EPS
from estr_diag.plots.style import GREY, LINES, MARKERS, PALETTE, axes, column, legend, nothing, positive, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_ratio_scale(
    bins: Result,
    *,
    taus: Sequence[float] = (4.0,),
    bands: Sequence[tuple[float, float]] = ((0.5, 5.0),),
    ax: Axes | None = None,
) -> Axes:
    """Draw |delta| against entropy with the boundaries of ESTR and of fixed bands.

    A fixed band is a horizontal line: it cuts the high entropies, where |delta| is large by nature, and lets the noise
    at low entropy pass. ESTR's boundary sqrt(tau (H + 0.01)) rises with the points.

    Parameters
    ----------
    bins
        Of `EntropyBins`, overall or by lag.
    taus
        Thresholds of ESTR.
    bands
        Bounds (low, high) on the ratio; drawn at ln(high) and -ln(low).
    """
    ax = axes(ax)
    if not len(bins):
        return nothing(ax, "no entropy bins: the log has no entropy")
    x = column(bins, "mean_entropy")
    lags = bins.table["lag"].to_pylist() if "lag" in bins.table.column_names else None
    if lags is None:
        for i, (name, label) in enumerate((("p50", "median"), ("rms_delta", "root mean square"), ("p99", "99 %"))):
            y = column(bins, name)
            at = positive(x, y)
            ax.plot(x[at], y[at], MARKERS[i], color=PALETTE[i], label=f"|δ|, {label}", markersize=4.5, linestyle="none")
    else:
        y = column(bins, "rms_delta")
        for i, lag in enumerate(dict.fromkeys(lags)):
            at = positive(x, y) & np.array([v == lag for v in lags])
            style: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}
            name = "unknown" if lag is None else str(lag)
            ax.plot(x[at], y[at], label=f"rms δ, lag {name}", markersize=4, linewidth=1, **style)
    drawn = x[positive(x)]
    if len(drawn):
        h = np.geomspace(drawn.min(), drawn.max(), 200)
        for i, tau in enumerate(taus):
            line = LINES[i % len(LINES)]
            ax.plot(h, np.sqrt(tau * (h + EPS)), line, color=PALETTE[3], label=f"ESTR boundary, τ = {tau:g}")
    for i, (low, high) in enumerate(bands):
        for bound, side in (
            (math.log(high), f"ln {high:g}"),
            (-math.log(low) if low > 0 else math.nan, f"ln 1/{low:g}"),
        ):
            if math.isfinite(bound) and bound > 0:
                ax.axhline(bound, linestyle=LINES[1 + i % 3], color=GREY, linewidth=1, label=f"fixed band, {side}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    titled(ax, "Ratio scale against entropy", "entropy H of the bin, nat", "|δ|, nat")
    legend(ax, beside=True)
    return ax
