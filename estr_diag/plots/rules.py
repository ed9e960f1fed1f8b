"""What mask rules keep, where they mask, what that costs, and how they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from estr_diag.plots.style import GREY, MARKERS, PALETTE, axes, column, legend, nothing, shortened, texts, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_rules(kept: Result, *, ax: Axes | None = None) -> Axes:
    """Draw the share of tokens that each rule masks, with 95 % intervals from whole sequences.

    Parameters
    ----------
    kept
        Of `Replay`, overall.
    """
    rows = kept.rows()
    ax = axes(ax, (6.4, 0.6 + 0.35 * max(len(rows), 2)))
    if not rows:
        return nothing(ax, "no rules")
    labels, shares = [row["rule"] for row in rows], [row["masked_share"] or 0.0 for row in rows]
    errors = [1.96 * (row["kept_share_se"] or 0.0) for row in rows]
    y = np.arange(len(rows))
    ax.barh(y, [100 * s for s in shares], xerr=[100 * e for e in errors], color=PALETTE[0], ecolor=GREY, height=0.6)
    ax.set_yticks(y, shortened(labels, 40))
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    return titled(ax, "Masked tokens (ρ_mask)", "share of the decided tokens, %", "")


def plot_mask_by_entropy(
    kept_by_bin: Result, bounds: Sequence[tuple[float, float | None]], *, ax: Axes | None = None
) -> Axes:
    """Draw the masked share of each rule against entropy.

    A rule that masks the high entropies only removes exploration; one that masks the low ones removes engine noise.

    Parameters
    ----------
    kept_by_bin
        Of `Replay` by entropy bin.
    bounds
        Lower and upper edge of bin 0, 1, ..., nat.
    """
    ax = axes(ax)
    rows = [row for row in kept_by_bin.rows() if row["entropy_bin"] is not None and row["kept_share"] is not None]
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    if not rules:
        return nothing(ax, "no entropy bins")
    for i, rule in enumerate(rules):
        points = []
        for row in rows:
            low, high = bounds[row["entropy_bin"]]
            if row["rule"] == rule and low > 0:
                points.append((np.sqrt(low * (high or 2 * low)), 100 * (1 - row["kept_share"])))
        if points:
            x, y = np.array(points).T
            style: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}
            ax.plot(x, y, label=shortened([rule], 40)[0], markersize=4, linewidth=1, **style)
    ax.set_xscale("log")
    titled(ax, "Where a rule masks", "entropy H of the bin, nat", "masked tokens, %")
    legend(ax, beside=len(rules) > 3)
    return ax


def plot_tradeoff(errors: Result, kept: Result | None = None, *, curve: bool = False, ax: Axes | None = None) -> Axes:
    """Draw noise admitted against exploration masked: the lower left corner is the better mask.

    The dashed line is a rule that ignores what it masks.

    Parameters
    ----------
    errors
        Of `MaskErrors` (one point a rule) or `Sweep` (one point a threshold).
    kept
        Of `Replay`: the label then says how much each rule masks.
    curve
        Join the points in order, as thresholds of one rule are.
    """
    ax = axes(ax)
    x, y = column(errors, "exploration_masked"), column(errors, "noise_admitted")
    labels = texts(errors, "rule") if "rule" in errors.table.column_names else [""] * len(x)
    methods = texts(errors, "method") if "method" in errors.table.column_names else ["lag_contrast"] * len(x)
    shares = {row["rule"]: row["masked_share"] for row in kept.rows()} if kept is not None else {}
    at = np.isfinite(x) & np.isfinite(y)
    if not at.any():
        return nothing(ax, "the errors of these masks cannot be told from this log")
    for m, method in enumerate(dict.fromkeys(methods)):
        chosen = at & np.array([v == method for v in methods])
        if curve:
            ax.plot(x[chosen], y[chosen], "-" if m == 0 else "--", color=PALETTE[m], marker=MARKERS[m], markersize=4,
                    label=method.replace("_", " "))  # fmt: skip
            continue
        for i in np.flatnonzero(chosen):
            rule = list(dict.fromkeys(labels)).index(labels[i])
            share = shares.get(labels[i])
            masked = "" if share is None else f", masks {share:.2%}"
            ax.plot(
                x[i], y[i], MARKERS[rule % len(MARKERS)], color=PALETTE[rule % len(PALETTE)],
                markerfacecolor=PALETTE[rule % len(PALETTE)] if method == "exact" else "none",
                label=f"{shortened([labels[i]], 40)[0]}{masked} ({method.replace('_', ' ')})",
            )  # fmt: skip
    ax.plot([0, 1], [1, 0], "--", color=GREY, linewidth=0.8, label="masks at random")
    titled(ax, "The two errors of a mask", "exploration masked, share", "noise admitted, share")
    legend(ax, beside=not curve)
    return ax


def plot_agreement(agreement: Result, *, ax: Axes | None = None) -> Axes:
    """Draw Cohen's kappa of each pair of rules; 1 is the same mask, 0 no more than chance.

    Parameters
    ----------
    agreement
        Of `Agreement`.
    """
    ax = axes(ax, (5.6, 4.8))
    rows = agreement.rows()
    names = list(dict.fromkeys([row["a"] for row in rows] + [row["b"] for row in rows]))
    if not names:
        return nothing(ax, "one rule has nothing to agree with")
    grid = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(grid, 1.0)
    for row in rows:
        i, j = names.index(row["a"]), names.index(row["b"])
        grid[i, j] = grid[j, i] = np.nan if row["kappa"] is None else row["kappa"]
    image = ax.imshow(grid, cmap="cividis", vmin=0, vmax=1)
    for i in range(len(names)):
        for j in range(len(names)):
            if i == j:
                continue
            said = "–" if np.isnan(grid[i, j]) else f"{grid[i, j]:.2f}"
            colour = "black" if not np.isnan(grid[i, j]) and grid[i, j] > 0.5 else "white"
            ax.text(j, i, said, ha="center", va="center", fontsize="small", color=GREY if said == "–" else colour)
    ax.set_xticks(range(len(names)), shortened(names, 24), rotation=35, ha="right")
    ax.set_yticks(range(len(names)), shortened(names, 24))
    ax.figure.colorbar(image, ax=ax, label="κ of the keep decisions")
    ax.set_title("Agreement (–: one keeps or masks all)", loc="left", fontsize="medium")
    return ax
