"""The paper's Figure 3: what happens around a switch of weights; and how stale the tokens are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import GREY, PALETTE, axes, column, legend, nothing, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result

_LABELS = {
    "mean_abs_delta": "mean |δ|, nat", "mean_sq_delta": "E[δ²], nat²", "mean_entropy": "mean entropy, nat",
    "mean_scaled_sq": "E[z²]",
}  # fmt: skip


def plot_switches(event_study: Result, *, metric: str = "mean_abs_delta", ax: Axes | None = None) -> Axes:
    """Draw a mean by distance from the nearest version switch, beside matched positions without one; bands are 95 %.

    A step at 0 that the control does not have is what the new weights changed.

    Parameters
    ----------
    event_study
        Of `EventStudy`.
    metric
        ``mean_abs_delta``, ``mean_sq_delta``, ``mean_entropy`` or ``mean_scaled_sq``.
    """
    from matplotlib.ticker import MaxNLocator

    ax = axes(ax)
    if not len(event_study):
        return nothing(ax, "no switch with a known position")
    x = column(event_study, "offset")
    for i, (name, label) in enumerate(((metric, "around a switch"), (f"{metric}_control", "matched, no switch"))):
        y, se = column(event_study, name), np.nan_to_num(column(event_study, f"{name}_se"))
        ax.plot(x, y, ("-", "--")[i], color=(PALETTE[0], GREY)[i], label=label)
        ax.fill_between(x, y - 1.96 * se, y + 1.96 * se, color=(PALETTE[0], GREY)[i], alpha=0.2, linewidth=0)
    ax.axvline(0, color=PALETTE[3], linewidth=1, linestyle=":", label="first token of the new weights")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    titled(ax, "Around a version switch", "tokens from the switch", _LABELS.get(metric, metric))
    legend(ax)
    return ax


def plot_staleness(staleness: Result, *, ax: Axes | None = None) -> Axes:
    """Draw the distributions of lag (tokens), intra and inter (sequences).

    Parameters
    ----------
    staleness
        Of `Staleness`.
    """
    ax = axes(ax)
    rows = [row for row in staleness.rows() if row["value"] is not None]
    if not rows:
        return nothing(ax, "no versions in the log")
    names = list(dict.fromkeys(row["quantity"] for row in rows))
    units = {"lag": "lag of tokens", "intra": "intra of sequences", "inter": "inter of sequences"}
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        part = [row for row in rows if row["quantity"] == name]
        x = np.array([row["value"] for row in part]) + (i - (len(names) - 1) / 2) * width
        hatch = ("", "//", "..")[i % 3]
        shares = [row["share"] for row in part]
        ax.bar(x, shares, width, color=PALETTE[i], label=units.get(name, name), hatch=hatch, edgecolor="white")
    ax.set_xticks(sorted({row["value"] for row in rows}))
    titled(ax, "Staleness", "weight versions", "share")
    legend(ax)
    return ax
