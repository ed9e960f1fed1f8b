"""Probabilities of the sampled tokens under the two engines, as counts in cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from estr_diag.plots.style import GREY, axes, column, legend, nothing, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estr_diag.result import Result


def plot_prob_scatter(counts: Result, *, ax: Axes | None = None) -> Axes:
    """Draw how many tokens have which pair of probabilities; the diagonal is agreement.

    A cloud that bends off the diagonal is a scale (temperature), one below it only is renormalisation, an arm along an
    axis is single tokens on which one engine was sure and the other was not.

    Parameters
    ----------
    counts
        Of `ProbabilityPairs`: cells of p_infer and p_train with their number of tokens.
    """
    from matplotlib.colors import LogNorm

    ax = axes(ax, (5.0, 4.4))
    n = int(counts.parameters.get("cells", 0))
    if not len(counts) or not n:
        return nothing(ax, "no token has both probabilities")
    grid = np.full((n, n), np.nan)
    x, y = (column(counts, name).astype(int) for name in ("infer_cell", "train_cell"))
    grid[y, x] = column(counts, "n")
    edges = np.linspace(0, 1, n + 1)
    mesh = ax.pcolormesh(
        edges, edges, grid, norm=LogNorm(1, max(2.0, float(np.nanmax(grid)))), cmap="cividis", rasterized=True
    )
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--", label="agreement")
    ax.figure.colorbar(mesh, ax=ax, label="tokens")
    titled(ax, "Probability of the sampled token", "inference engine", "training engine")
    ax.set_aspect("equal")
    legend(ax, loc="upper left")
    return ax
