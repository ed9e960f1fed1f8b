"""A consistency metric over the steps of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import PALETTE, axes, nothing, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_consistency(by_step: Result, metric: str = "kl_k3", *, ax: Axes | None = None) -> Axes:
    """Draw a metric step by step with 95 % intervals from whole sequences.

    A trend says drift; a step that leaves the interval of its neighbours is where to look first.

    Parameters
    ----------
    by_step
        Of ``Consistency("step")``.
    metric
        One of its metrics.
    """
    from matplotlib.ticker import MaxNLocator

    from estr_diag.errors import UsageError, nearest
    from estr_diag.stats.metrics import BY_NAME

    ax = axes(ax)
    rows = [row for row in by_step.rows() if row["metric"] == metric and row["value"] is not None]
    if not rows:
        names = {row["metric"] for row in by_step.rows()}
        if names and metric not in names:
            raise UsageError(f"no metric '{metric}' in this result; {nearest(metric, names)}")
        return nothing(ax, f"no {metric} by step")
    x = np.array([np.nan if row["step"] is None else row["step"] for row in rows], dtype=np.float64)
    y = np.array([row["value"] for row in rows], dtype=np.float64)
    se = np.array([row["se"] or 0.0 for row in rows], dtype=np.float64)
    ax.plot(x, y, "o-", color=PALETTE[0], markersize=3.5, linewidth=1.2, label=metric)
    ax.fill_between(x, y - 1.96 * se, y + 1.96 * se, color=PALETTE[0], alpha=0.2, linewidth=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    unit = BY_NAME[metric].unit if metric in BY_NAME else ""
    return titled(ax, f"{metric} by step", "trainer step", f"{metric}, {unit}" if unit not in ("", "1") else metric)
