"""Grids: edges on the log2 grid, every token in one bin, the same bin in SQL and NumPy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.errors import UsageError
from estr_diag.stats.entropy_bins import EntropyBins
from estr_diag.stats.grid import (
    ENTROPY,
    GINI,
    ValueGrid,
    equal_width,
    explicit_grid,
    histogram,
    log_grid,
    quantile_grid,
)
from estr_diag.store.database import Store
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Floats


def bin_of(grid: ValueGrid, values: Floats) -> np.ndarray:
    """NumPy twin of the bin number: by comparing with the edges."""
    edges = 2.0 ** (np.array(grid.cells) / 16)
    if grid.open_ended:
        return np.where(values <= 0, 0, np.searchsorted(edges, values, side="right") + 1)
    if len(edges) < 2:
        return np.zeros(len(values), dtype=int)
    return np.where(values <= 0, 0, np.clip(np.searchsorted(edges, values, side="right"), 1, len(edges) - 1))


def bins_in_sql(store: Store, grid: ValueGrid) -> list[tuple[float, int | None]]:
    column = "entropy" if grid.scale == ENTROPY else "collision"
    query = (
        f"select {column}::double as v, {grid.sql()} as bin from (select *, 1 - collision::double as gini from tokens)"
    )
    return [(r["v"], r["bin"]) for r in store.rows(query)]


def log_with_collision(seed: int) -> oracles.Arrays:
    log = make_log(seed)
    rng = np.random.default_rng(seed)
    g = rng.uniform(0, 1, len(log["entropy"])).astype(np.float32)
    g[:5] = 1.0
    g[5:9] = np.nan
    return {**log, "collision": g}


@settings(max_examples=25, deadline=None)
@given(
    edges=st.lists(st.floats(1e-9, 50), min_size=1, max_size=30, unique=True).map(sorted),
    seed=st.integers(0, 20),
)
def test_explicit_bins_equal_numpy(edges: list[float], seed: int) -> None:
    grid = explicit_grid(edges)
    assert all(min(abs(math.log2(e / u)) for u in grid.edges) <= 1 / 32 + 1e-9 for e in edges), "moved by half a cell"
    with store_of(make_log(seed)) as store:
        found = bins_in_sql(store, grid)
    values = np.array([v for v, _ in found])
    assert [b for _, b in found] == bin_of(grid, values).tolist()
    for value, b in found:
        assert b is not None
        lo, hi = grid.bounds(b)
        assert lo <= value
        assert b == 0 or hi is None or value < hi


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_bins", [1, 3, 24])
def test_log_and_gini_bins_equal_numpy(seed: int, n_bins: int) -> None:
    with store_of(log_with_collision(seed)) as store:
        present = frozenset(store.column_counts())
        for make in (log_grid, quantile_grid):
            for scale in (ENTROPY, GINI):
                grid = make(store, present, n_bins, scale)
                assert grid.n_bins <= n_bins + 1
                found = bins_in_sql(store, grid)
                known = [(1 - v if scale == GINI else v, b) for v, b in found if v is not None]
                assert [b for _, b in known] == bin_of(grid, np.array([v for v, _ in known])).tolist()
                assert all(b is None for v, b in found if v is None)


@given(
    counts=st.dictionaries(st.integers(-300, 60), st.integers(1, 1000), min_size=1, max_size=80),
    n_bins=st.integers(1, 30),
)
def test_equal_width_bins_are_equal_and_cover(counts: dict[int, int], n_bins: int) -> None:
    cells = equal_width(counts, n_bins).cells
    widths = {high - low for low, high in pairwise(cells)}
    assert len(widths) == 1
    assert len(cells) - 1 <= n_bins
    assert cells[0] == min(counts)
    assert cells[-1] - widths.pop() <= max(counts) < cells[-1]


def test_histogram_counts_positive_counted_tokens() -> None:
    log = log_with_collision(1)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        present = frozenset(store.column_counts())
        for scale, values in ((ENTROPY, tokens["entropy"]), (GINI, 1 - tokens["collision"].astype(float))):
            positive = values[values > 0]
            cells, n = np.unique(np.floor(16 * np.log2(positive)).astype(int), return_counts=True)
            assert histogram(store, present, scale) == dict(zip(cells.tolist(), n.tolist(), strict=True))


def test_snapping_is_reported() -> None:
    grid = explicit_grid([0, 0.1, 0.5, 2])
    assert grid.edges == pytest.approx((2 ** (-53 / 16), 0.5, 2.0))
    with store_of(make_log(1)) as store:
        result = run(store, {"it": EntropyBins(grid)}).results["it"]
    assert "edges asked for: 0.1, 0.5, 2; on the grid: 0.100656, 0.5, 2" in result.notes
    rows = {r["entropy_bin"]: (r["lo"], r["hi"]) for r in result.rows()}
    assert rows[1] == (0.0, pytest.approx(0.100656, rel=1e-5))
    assert rows[4] == (2.0, None)
    assert sum(r["n"] for r in result.rows()) == len(oracles.counted(make_log(1))["delta"])


def test_edges_that_fall_together_collapse() -> None:
    assert explicit_grid([0.5, 0.505, 1]).cells == (-16, 0)


@pytest.mark.parametrize("edges", [[], [0], [-1, 1], [1, 0.5], [1, 1], [math.nan], [1, math.inf]])
def test_edges_that_cannot_be_used(edges: list[float]) -> None:
    with pytest.raises(UsageError, match="expected positive, finite numbers in ascending order"):
        explicit_grid(edges)


@pytest.mark.parametrize("make", [log_grid, quantile_grid])
def test_numbers_of_bins_that_cannot_be_used(make: object) -> None:
    assert callable(make)
    with store_of(make_log(1)) as store:
        present = frozenset(store.column_counts())
        with pytest.raises(UsageError, match="expected 1 or more"):
            make(store, present, 0)
        with pytest.raises(UsageError, match="expected at most 250"):
            make(store, present, 251)
    with pytest.raises(UsageError, match="expected at most 250"):
        explicit_grid(np.arange(1, 300).tolist())


def test_most_bins_that_are_allowed() -> None:
    log = make_log(1, sequences=60)
    log["entropy"] = np.geomspace(1e-6, 8, len(log["entropy"])).astype(np.float32)
    grid = explicit_grid(np.geomspace(1e-5, 4, 250).tolist())
    with store_of(log) as store:
        found = bins_in_sql(store, grid)
    assert [b for _, b in found] == bin_of(grid, np.array([v for v, _ in found])).tolist()
    assert max(b for _, b in found if b is not None) == grid.n_bins - 1 > 230


def test_no_positive_value_leaves_one_bin() -> None:
    assert equal_width({}, 5).n_bins == 1
    assert equal_width({}, 5).bounds(0) == (0.0, 0.0)
