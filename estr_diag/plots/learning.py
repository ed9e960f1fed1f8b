"""Learning curves of the lab: the same budget, trained in several ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import LINES, PALETTE, axes, legend, nothing, texts, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result

_LABELS = {
    "reward": "mean reward", "masked_share": "masked share of tokens (ρ_mask)", "kl_k3": "rollout-target KL (k3), nat a token",
    "entropy": "mean entropy, nat", "mean_lag": "mean lag, weight versions",
}  # fmt: skip


def plot_learning(curves: Result, *, metric: str = "reward", smooth: int = 5, ax: Axes | None = None) -> Axes:
    """Draw a metric over the steps, one line an arm: the mean over seeds, with a band of one standard error.

    Parameters
    ----------
    curves
        Of `lab.comparison.compare`.
    metric
        ``reward``, ``masked_share``, ``kl_k3``, ``entropy`` or ``mean_lag``.
    smooth
        Steps that a point is the mean of, itself and those before it.
    """
    ax = axes(ax)
    if not len(curves):
        return nothing(ax, "no run")
    frame = curves.to_pandas()
    for i, arm in enumerate(dict.fromkeys(texts(curves, "arm"))):
        runs = frame[frame["arm"] == arm].pivot_table(index="step", columns="seed", values=metric)
        runs = runs.rolling(smooth, min_periods=1).mean()
        mean, n = runs.mean(axis=1).to_numpy(), runs.shape[1]
        color = PALETTE[i % len(PALETTE)]
        ax.plot(runs.index, mean, LINES[i % len(LINES)], label=arm, color=color)
        if n > 1:
            se = runs.std(axis=1, ddof=1).to_numpy() / np.sqrt(n)
            ax.fill_between(runs.index, mean - se, mean + se, color=color, alpha=0.15, linewidth=0)
    seeds = frame["seed"].nunique()
    titled(ax, f"{seeds} seed{'s' * (seeds > 1)}, mean of {smooth} steps", "trainer step", _LABELS.get(metric, metric))
    legend(ax, beside=True)
    return ax
