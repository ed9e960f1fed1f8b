"""One sequence along its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.errors import UsageError, nearest
from estr_diag.plots.style import GREY, PALETTE, axes, column, legend, nothing, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_sequence(tokens: Result, *, value: str = "delta", ax: Axes | None = None) -> Axes:
    """Draw a quantity of one sequence token by token, with its version switches and masked positions.

    Parameters
    ----------
    tokens
        One row a token of one sequence, in order: ``log.sequence(seq_id)``.
    value
        Column to draw.
    """
    ax = axes(ax, (8.0, 3.2))
    if not len(tokens):
        return nothing(ax, "no such sequence")
    names = tokens.table.column_names
    if value not in names:
        raise UsageError(f"no column '{value}'; {nearest(value, names)}")
    x, y = column(tokens, "pos"), column(tokens, value)
    ax.axhline(0, color=GREY, linewidth=0.6)
    ax.vlines(x, np.minimum(y, 0), np.maximum(y, 0), color=PALETTE[0], linewidth=1, label=value)
    if "loss_mask" in names:
        out = np.array([v is False for v in tokens.table["loss_mask"].to_pylist()])
        for i, at in enumerate(np.flatnonzero(out)):
            label = "outside the loss mask" if i == 0 else None
            ax.axvspan(x[at] - 0.5, x[at] + 0.5, color=GREY, alpha=0.2, linewidth=0, label=label)
    if "policy_version" in names:
        versions = column(tokens, "policy_version")
        switch = np.flatnonzero(
            (versions[1:] != versions[:-1]) & np.isfinite(versions[1:]) & np.isfinite(versions[:-1])
        )
        for i, at in enumerate(switch):
            label = "new weights" if i == 0 else None
            ax.axvline(x[at + 1] - 0.5, color=PALETTE[3], linestyle=":", linewidth=1, label=label)
    unit = {"delta": "δ, nat", "entropy": "entropy, nat"}.get(value, value)
    titled(ax, f"{value} along the sequence", "position in the response, tokens", unit)
    legend(ax)
    return ax
