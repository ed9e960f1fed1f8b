"""Entropy bins whose edges lie on a fixed log2 grid, so that histograms of any shards merge."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from estr_diag.errors import UsageError
from estr_diag.expressions import cell_edge, grid_cell, tok
from estr_diag.store.database import Store

DEFAULT_BINS = 24


@dataclass(frozen=True, slots=True)
class EntropyGrid:
    """Bins of H by grid cells.

    Parameters
    ----------
    cells
        Ascending cell indices. Bin i + 1 holds H in [2^(cells[i]/16), 2^(cells[i+1]/16)); bin 0 holds
        H <= 0, where no logarithm exists.
    """

    cells: tuple[int, ...]

    @property
    def n_bins(self) -> int:
        """Number of bins, the one of H <= 0 included."""
        return max(len(self.cells), 1)

    def bounds(self, bin_index: int) -> tuple[float, float]:
        """Return (lower, upper) edge of a bin in nats."""
        if bin_index == 0:
            return (0.0, 0.0)
        return (cell_edge(self.cells[bin_index - 1]), cell_edge(self.cells[bin_index]))

    def sql(self, entropy: str = "entropy") -> str:
        """Return the bin index of an entropy; null where the entropy is."""
        if len(self.cells) < 2:
            return f"case when {entropy} is null then null else 0 end::integer"
        cell = grid_cell(entropy)
        first, last = self.cells[0], self.cells[-1]
        # A lookup in a constant list: one index operation a token, where a CASE of 24 arms takes ten.
        lookup = [bisect_right(self.cells, c) for c in range(first, last)]
        index = f"greatest(least({cell}, {last - 1}), {first}) - {first} + 1"
        return (
            f"case when {entropy} is null then null when {entropy} <= 0 then 0 "
            f"else ({lookup}::utinyint[])[{index}] end::integer"
        )


def quantile_grid(store: Store, present: frozenset[str], n_bins: int = DEFAULT_BINS) -> EntropyGrid:
    """Return bins of about equally many tokens: quantile edges, each snapped down to the grid.

    One scan of the entropy column. Edges that fall into one cell collapse, so a log of few distinct
    entropies has fewer bins.
    """
    if n_bins < 1:
        raise UsageError(f"number of entropy bins is {n_bins}; expected 1 or more")
    query = f"""
        with {tok(present)}
        select {grid_cell("entropy")} as cell, count(*) as n from tok where entropy > 0 group by 1 order by 1
    """
    return snap({int(r["cell"]): int(r["n"]) for r in store.rows(query)}, n_bins)


def snap(histogram: Mapping[int, int], n_bins: int) -> EntropyGrid:
    """Choose `n_bins` quantile bins from a histogram of grid cells."""
    if not histogram:
        return EntropyGrid(())
    cells: Sequence[int] = sorted(histogram)
    total = sum(histogram.values())
    edges, seen, wanted = [cells[0]], 0, 1
    for cell in cells:
        # The edge goes below the cell in which the quantile falls; a cell cannot be cut.
        while wanted < n_bins and seen + histogram[cell] > total * wanted / n_bins:
            edges.append(cell)
            wanted += 1
        seen += histogram[cell]
    edges.append(cells[-1] + 1)
    return EntropyGrid(tuple(sorted(set(edges))))
