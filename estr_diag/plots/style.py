"""What all pictures share: colours that the colour-blind can tell apart, markers that repeat them, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result

PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9", "#949494", "#fbafe4", "#ece133")
"""seaborn's ``colorblind`` palette as constants, so that a picture need not import seaborn."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
"""Repeat the colour, for print and for those who see no colours."""

LINES = ("-", "--", "-.", ":")
GREY = "#7f7f7f"

Floats = NDArray[np.float64]


def axes(ax: Axes | None, size: tuple[float, float] = (6.4, 4.0)) -> Axes:
    """Return `ax`, or the axes of a new figure that pyplot does not know of."""
    if ax is not None:
        return ax
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def column(result: Result, name: str) -> Floats:
    """Return a column of numbers, NaN where it is null."""
    values = result.table[name].to_pylist()
    return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)


def texts(result: Result, name: str) -> list[str]:
    """Return a column as texts."""
    return ["unknown" if v is None else str(v) for v in result.table[name].to_pylist()]


def titled(ax: Axes, title: str, x: str, y: str) -> Axes:
    """Set title and axis labels; every axis says its unit."""
    ax.set_title(title, loc="left", fontsize="medium")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(visible=True, alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def legend(ax: Axes, *, beside: bool = False, **options: Any) -> None:
    """Draw the legend where there is something to tell apart; `beside` the axes where it would hide points."""
    handles, labels = ax.get_legend_handles_labels()
    if beside:
        options |= {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    if handles:
        ax.legend(handles, labels, frameon=False, fontsize="small", **options)


def nothing(ax: Axes, why: str) -> Axes:
    """Say in the picture why there is none."""
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, wrap=True, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])
    return ax


def positive(*values: Floats) -> Any:
    """Return where all of some arrays are finite and above 0, as a logarithmic axis needs."""
    return np.logical_and.reduce([np.isfinite(v) & (v > 0) for v in values])


def shortened(labels: Sequence[str], length: int = 28) -> list[str]:
    """Return labels that fit beside a bar."""
    return [label if len(label) <= length else label[: length - 1] + "…" for label in labels]
