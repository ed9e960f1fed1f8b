"""Entropy bins: edges on the grid, every token in one bin, moments and quantiles equal to NumPy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.errors import UsageError
from estr_diag.stats.entropy_bins import QUANTILES, EntropyBins
from estr_diag.stats.grid import EntropyGrid, quantile_grid, snap
from estr_diag.store.engine import Statistic, run
from tests import oracles
from tests.logs import make_log, store_of


def bin_of(grid: EntropyGrid, entropy: np.ndarray) -> np.ndarray:
    """NumPy twin of the bin index: by comparing with the edges."""
    if len(grid.cells) < 2:
        return np.zeros(len(entropy), dtype=int)
    edges = 2.0 ** (np.array(grid.cells) / 16)
    index = np.searchsorted(edges, entropy, side="right")
    return np.where(entropy <= 0, 0, np.clip(index, 1, len(edges) - 1))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n_bins=st.sampled_from([1, 2, 5, 24]))
def test_moments_equal_numpy(seed: int, n_bins: int) -> None:
    log = make_log(seed)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), n_bins)
        rows = run(store, {"it": EntropyBins(grid)}).results["it"].table.to_pylist()
    index = bin_of(grid, tokens["entropy"])
    assert sum(r["n"] for r in rows) == len(index), "every counted token is in exactly one bin"
    assert {r["entropy_bin"] for r in rows} == set(np.unique(index).tolist())
    for row in rows:
        part = {name: values[index == row["entropy_bin"]] for name, values in tokens.items()}
        d, h, off = part["delta"], part["entropy"], np.exp(part["logp_infer"]) < 0.5
        mean, se = oracles.cluster_mean(d**2, part["seq_id"])
        expected = {
            "n": len(d), "n_sequences": len(np.unique(part["seq_id"])), "mean_entropy": h.mean(),
            "mean_abs_delta": np.abs(d).mean(), "mean_sq_delta": mean, "mean_sq_delta_se": se,
            "rms_delta": math.sqrt(mean), "sq_delta_over_entropy": mean / h.mean() if h.mean() > 0 else None,
            "mean_scaled_sq": (d**2 / (h + 0.01)).mean(), "n_off_mode": off.sum(),
            "off_mode_mean_sq_delta": (d[off] ** 2).mean() if off.any() else None,
            "mode_mean_sq_delta": (d[~off] ** 2).mean() if not off.all() else None,
        }  # fmt: skip
        for name, value in expected.items():
            if value is None:
                assert row[name] is None, name
            else:
                # mode = total - off-mode cancels where nearly all of the moment is off-mode
                scale = mean * 1e-9 if name == "mode_mean_sq_delta" else 1e-15
                assert math.isclose(row[name], value, rel_tol=1e-9, abs_tol=scale), (name, row[name], value)


@pytest.mark.parametrize("seed", range(4))
def test_quantiles_are_within_a_grid_cell(seed: int) -> None:
    log = make_log(seed, sequences=60, mean_length=100, holes=False)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 4)
        rows = run(store, {"it": EntropyBins(grid)}).results["it"].table.to_pylist()
    index = bin_of(grid, tokens["entropy"])
    for row in rows:
        gap = np.sort(np.abs(tokens["delta"][index == row["entropy_bin"]]))
        for name, p in QUANTILES.items():
            exact = gap[max(0, math.ceil(p * len(gap)) - 1)]
            if exact == 0:
                assert row[name] == 0
            else:
                assert abs(math.log2(row[name] / exact)) <= 1 / 16 + 1e-9, (name, row[name], exact)


@pytest.mark.parametrize("seed", [1, 2])
def test_cells_by_lag_add_up_to_the_bin(seed: int) -> None:
    log = make_log(seed)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 4)
        outcome = run(store, {"all": EntropyBins(grid), "lag": EntropyBins(grid, by_lag=True)})
    whole = {r["entropy_bin"]: r for r in outcome.results["all"].table.to_pylist()}
    cells = outcome.results["lag"].table.to_pylist()
    assert {c["lag"] for c in cells} == {0, 1, 2}
    for b, row in whole.items():
        parts = [c for c in cells if c["entropy_bin"] == b]
        assert sum(c["n"] for c in parts) == row["n"]
        moment = sum(c["n"] * c["mean_sq_delta"] for c in parts) / row["n"]
        assert math.isclose(moment, row["mean_sq_delta"], rel_tol=1e-9)


@given(
    histogram=st.dictionaries(st.integers(-300, 60), st.integers(1, 1000), min_size=1, max_size=80),
    n_bins=st.integers(1, 30),
)
def test_quantile_edges_cover_the_data_and_balance_it(histogram: dict[int, int], n_bins: int) -> None:
    grid = snap(histogram, n_bins)
    cells = list(grid.cells)
    assert cells == sorted(set(cells))
    assert cells[0] == min(histogram)
    assert cells[-1] == max(histogram) + 1
    assert len(cells) - 1 <= n_bins
    total, largest = sum(histogram.values()), max(histogram.values())
    for low, high in pairwise(cells):
        inside = sum(n for c, n in histogram.items() if low <= c < high)
        assert inside <= total / n_bins + 2 * largest, "a bin holds its share, up to the cell that cannot be cut"


def test_no_entropy_above_zero_leaves_one_bin() -> None:
    log = make_log(1)
    log["entropy"] = np.zeros_like(log["entropy"])
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()))
        rows = run(store, {"it": EntropyBins(grid)}).results["it"].table.to_pylist()
    assert [(r["entropy_bin"], r["lo"], r["hi"]) for r in rows] == [(0, 0.0, 0.0)]
    assert rows[0]["sq_delta_over_entropy"] is None


def test_one_scan_serves_all_statistics() -> None:
    from estr_diag.stats.consistency import Consistency

    with store_of(make_log(1)) as store:
        present = frozenset(store.column_counts())
        grid = quantile_grid(store, present, 4)
        statistics: list[Statistic] = [
            Consistency(),
            Consistency("step"),
            Consistency("lag"),
            EntropyBins(grid),
            EntropyBins(grid, by_lag=True),
        ]
        scans = {r.scan for s in statistics for r in s.requests(present)}
    assert scans == {"sums", "histogram"}


def test_a_bad_number_of_bins_is_a_usage_error() -> None:
    with store_of(make_log(1)) as store, pytest.raises(UsageError, match="expected 1 or more"):
        quantile_grid(store, frozenset(store.column_counts()), 0)
