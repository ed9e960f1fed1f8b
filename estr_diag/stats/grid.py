"""Bins of a positive quantity whose edges lie on a fixed log2 grid, so that histograms of any shards merge."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from estr_diag.errors import UsageError
from estr_diag.expressions import CELLS_PER_OCTAVE, cell_edge, grid_cell, tok
from estr_diag.store.database import Store

DEFAULT_BINS = 24
_MIN_BINS, _MIN_TOKENS_PER_BIN = 4, 200
MAX_BINS = 250
"""Bin numbers are looked up in a list of bytes."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What E[delta^2] may be proportional to.

    Parameters
    ----------
    name
        Used in column names: NAME_bin, mean_NAME.
    sql
        Its value, over one row of ``tok``; null where it is not known.
    needs
        Token columns.
    total
        The measure that sums it.
    """

    name: str
    sql: str
    needs: frozenset[str]
    total: str

    @property
    def key(self) -> str:
        """Name of the bin number among the keys of a scan."""
        return f"{self.name}_bin"


ENTROPY = Scale("entropy", "entropy", frozenset({"entropy"}), "sum_entropy")
"""H, the scale of the paper's law."""

GINI = Scale("gini", "gini", frozenset({"collision"}), "sum_gini")
"""1 - G, which is exact for independent noise on the logits."""


@dataclass(frozen=True, slots=True)
class ValueGrid:
    """Bins of a scale by grid cells.

    Parameters
    ----------
    cells
        Ascending cell indices. Bin i + 1 holds values in [2^(cells[i]/16), 2^(cells[i+1]/16)); bin 0
        holds values <= 0, where no logarithm exists. Values beyond the first and last edge belong to
        the outermost bins.
    scale
        What is binned.
    open_ended
        Below the first and above the last edge lie bins of their own: bin 1 is (0, first edge) and the
        last bin has no upper edge.
    asked
        The edges that a user named, where these differ from the cells.
    """

    cells: tuple[int, ...]
    scale: Scale = ENTROPY
    open_ended: bool = False
    asked: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """Name of the bin number among the keys of a scan."""
        return self.scale.key

    @property
    def n_bins(self) -> int:
        """Number of bins, the one of values <= 0 included."""
        return len(self.cells) + 2 if self.open_ended else max(len(self.cells), 1)

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges on the grid, ascending."""
        return tuple(cell_edge(cell) for cell in self.cells)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the bins must know."""
        name = "H = 0" if self.scale == ENTROPY else f"{self.scale.name} = 0"
        notes = [f"bin edges lie on a grid of {CELLS_PER_OCTAVE} cells an octave; bin 0 holds tokens with {name}"]
        if self.asked:
            asked, used = (", ".join(f"{e:.6g}" for e in edges) for edges in (self.asked, self.edges))
            notes.append(f"edges asked for: {asked}; on the grid: {used}")
        return tuple(notes)

    def bounds(self, bin_index: int) -> tuple[float, float | None]:
        """Return (lower, upper) edge of a bin; the upper is None where there is none."""
        if bin_index == 0:
            return (0.0, 0.0)
        if not self.open_ended:
            return (cell_edge(self.cells[bin_index - 1]), cell_edge(self.cells[bin_index]))
        below = cell_edge(self.cells[bin_index - 2]) if bin_index >= 2 else 0.0
        return (below, cell_edge(self.cells[bin_index - 1]) if bin_index <= len(self.cells) else None)

    def sql(self) -> str:
        """Return the bin number over one row of ``tok``; null where the value is."""
        value = self.scale.sql
        if len(self.cells) < 2 and not self.open_ended:
            return f"case when {value} is null then null else 0 end::integer"
        cell, outer = grid_cell(value), int(self.open_ended)
        first, last = self.cells[0] - outer, self.cells[-1] + outer
        # A lookup in a constant list: one index operation a token, where a CASE of 24 arms takes ten.
        lookup = [bisect_right(self.cells, c) + outer for c in range(first, last)]
        index = f"greatest(least({cell}, {last - 1}), {first}) - {first} + 1"
        return (
            f"case when {value} is null then null when {value} <= 0 then 0 "
            f"else ({lookup}::utinyint[])[{index}] end::integer"
        )


EntropyGrid = ValueGrid
"""The grid of H, which is what a grid is unless it says otherwise."""


Bins = int | str | Sequence[float]
"""How bins are asked for: a number (quantiles), ``log`` or ``log:12`` (equal widths), or explicit edges."""


def choose_grid(store: Store, present: frozenset[str], bins: Bins, scale: Scale = ENTROPY) -> ValueGrid:
    """Return the bins that `bins` asks for.

    Raises
    ------
    UsageError
        A text of another form, or edges that are not ascending.
    """
    if isinstance(bins, int):
        return quantile_grid(store, present, bins, scale)
    if not isinstance(bins, str):
        return explicit_grid(bins, scale)
    kind, _, number = bins.partition(":")
    try:
        if kind == "log":
            return log_grid(store, present, int(number) if number else DEFAULT_BINS, scale)
        if "," in bins:
            return explicit_grid([float(edge) for edge in bins.split(",")], scale)
        return quantile_grid(store, present, int(bins), scale)
    except ValueError:
        raise UsageError(
            f"bins {bins!r}: expected a number of quantile bins, log or log:12, or edges as in 0.01,0.1,1"
        ) from None


def fitting_grid(store: Store, present: frozenset[str], bins: Bins | None = None) -> ValueGrid | None:
    """Return the entropy bins asked for, by default as many as leave 200 tokens in each; None without entropy."""
    if "entropy" not in present:
        return None
    if bins is None:
        n = int(store.rows(f"with {tok(present)} select count(entropy) as n from tok")[0]["n"])
        bins = max(_MIN_BINS, min(DEFAULT_BINS, n // _MIN_TOKENS_PER_BIN))
    return choose_grid(store, present, bins)


def quantile_grid(
    store: Store, present: frozenset[str], n_bins: int = DEFAULT_BINS, scale: Scale = ENTROPY
) -> ValueGrid:
    """Return bins of about equally many tokens: quantile edges, each snapped down to the grid.

    One scan of the column. Edges that fall into one cell collapse, so a log of few distinct values has
    fewer bins.
    """
    _check(n_bins)
    return snap(histogram(store, present, scale), n_bins, scale)


def log_grid(store: Store, present: frozenset[str], n_bins: int = DEFAULT_BINS, scale: Scale = ENTROPY) -> ValueGrid:
    """Return bins of equal log2 width from the lowest to the highest value.

    One scan of the column. The width is a whole number of grid cells, so there may be fewer bins than
    `n_bins`, and the last may reach beyond the highest value.
    """
    _check(n_bins)
    return equal_width(histogram(store, present, scale), n_bins, scale)


def explicit_grid(edges: Sequence[float], scale: Scale = ENTROPY) -> ValueGrid:
    """Return bins between given edges, each moved to the nearest edge of the grid (by at most 2.2 %).

    What lies below the first and above the last edge has a bin of its own, so that every token is
    counted. Edges that fall together collapse. The result's notes say which edges were used.

    Raises
    ------
    UsageError
        Edges that are not positive, finite and ascending. A first edge of 0 is allowed: it is there anyway.
    """
    asked = tuple(float(e) for e in edges)
    inner = asked[1:] if asked and asked[0] == 0 else asked
    if (
        not inner
        or not all(math.isfinite(e) and e > 0 for e in inner)
        or any(high <= low for low, high in pairwise(inner))
    ):
        raise UsageError(f"bin edges are {list(asked)}; expected positive, finite numbers in ascending order")
    if len(inner) > MAX_BINS:
        raise UsageError(f"{len(inner)} bin edges; expected at most {MAX_BINS}")
    cells = tuple(sorted({round(CELLS_PER_OCTAVE * math.log2(e)) for e in inner}))
    return ValueGrid(cells, scale, open_ended=True, asked=inner)


def histogram(store: Store, present: frozenset[str], scale: Scale = ENTROPY) -> dict[int, int]:
    """Return how many counted tokens lie in each grid cell; values <= 0 are in none."""
    query = f"""
        with {tok(present)}
        select {grid_cell(scale.sql)} as cell, count(*) as n from tok where {scale.sql} > 0 group by 1 order by 1
    """
    return {int(r["cell"]): int(r["n"]) for r in store.rows(query)}


def snap(histogram: Mapping[int, int], n_bins: int, scale: Scale = ENTROPY) -> ValueGrid:
    """Choose `n_bins` quantile bins from a histogram of grid cells."""
    if not histogram:
        return ValueGrid((), scale)
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
    return ValueGrid(tuple(sorted(set(edges))), scale)


def equal_width(histogram: Mapping[int, int], n_bins: int, scale: Scale = ENTROPY) -> ValueGrid:
    """Choose at most `n_bins` bins of equal log2 width that cover a histogram of grid cells."""
    if not histogram:
        return ValueGrid((), scale)
    first, last = min(histogram), max(histogram) + 1
    width = math.ceil((last - first) / n_bins)
    return ValueGrid((*range(first, last, width), first + width * math.ceil((last - first) / width)), scale)


def _check(n_bins: int) -> None:
    if n_bins < 1:
        raise UsageError(f"number of bins is {n_bins}; expected 1 or more")
    if n_bins > MAX_BINS:
        raise UsageError(f"number of bins is {n_bins}; expected at most {MAX_BINS}")
