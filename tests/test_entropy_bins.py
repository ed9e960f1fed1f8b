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
from estr_diag.stats.grid import GINI, explicit_grid, quantile_grid, snap
from estr_diag.store.engine import Statistic, run
from tests import oracles
from tests.logs import make_log, store_of
from tests.test_grid import bin_of, log_with_collision


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
            "p_ratio_beyond_2": (np.abs(d) > math.log(2)).mean(), "p_ratio_beyond_5": (np.abs(d) > math.log(5)).mean(),
            "p_ratio_beyond_2_se": oracles.cluster_mean((np.abs(d) > math.log(2)).astype(float), part["seq_id"])[1],
            "small": len(d) < 200 or len(np.unique(part["seq_id"])) < 2,
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
        off = np.exp(tokens["logp_infer"][index == row["entropy_bin"]]) < 0.5
        gaps = np.abs(tokens["delta"][index == row["entropy_bin"]])
        for prefix, values in (("", gap), ("mode_", np.sort(gaps[~off])), ("off_mode_", np.sort(gaps[off]))):
            for name, p in QUANTILES.items():
                found = row[prefix + name]
                if not len(values):
                    assert found is None
                    continue
                exact = values[max(0, math.ceil(p * len(values)) - 1)]
                if exact == 0:
                    assert found == 0
                else:
                    assert abs(math.log2(found / exact)) <= 1 / 16 + 1e-9, (prefix, name, found, exact)


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


@pytest.mark.parametrize("by_lag", [False, True])
def test_exceedances_of_any_bound(by_lag: bool) -> None:
    log = make_log(3, sequences=40)
    tokens = oracles.counted(log)
    bounds = (1.05, 1.28, 2, 10000)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 3)
        both = {"it": EntropyBins(grid, by_lag, ratio_bounds=bounds), "default": EntropyBins(grid)}
        result = run(store, both).results["it"]
    index, lag = bin_of(grid, tokens["entropy"]), tokens["trainer_version"] - tokens["policy_version"]
    for row in result.table.to_pylist():
        cell = (index == row["entropy_bin"]) & ((lag == row["lag"]) if by_lag else True)
        gap = np.abs(tokens["delta"][cell])
        for bound in bounds:
            assert math.isclose(row[f"p_ratio_beyond_{bound}"], np.mean(gap > math.log(bound)), rel_tol=1e-9)
    assert "p_ratio_beyond_5" not in result.table.column_names


@pytest.mark.parametrize("bound", [1.0, 0.5, -2.0, math.inf, math.nan, 1e10])
def test_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(UsageError, match="ratio bounds"):
        EntropyBins(explicit_grid([0.1]), ratio_bounds=(bound,))


def test_bins_of_one_minus_g_equal_numpy() -> None:
    log = log_with_collision(5)
    tokens = oracles.counted(log)
    known = np.isfinite(tokens["collision"])
    gini, d = 1 - tokens["collision"][known].astype(float), tokens["delta"][known]
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 5, GINI)
        result = run(store, {"it": EntropyBins(grid)}).results["it"]
    index = bin_of(grid, gini)
    rows = result.table.to_pylist()
    assert result.name == "gini_bins"
    assert [r["gini_bin"] for r in rows] == np.unique(index).tolist()
    for row in rows:
        at = index == row["gini_bin"]
        assert row["n"] == np.count_nonzero(at)
        assert math.isclose(row["mean_gini"], gini[at].mean(), rel_tol=1e-9, abs_tol=1e-15)
        assert math.isclose(row["mean_sq_delta"], (d[at] ** 2).mean(), rel_tol=1e-9)
        if gini[at].any():
            assert math.isclose(row["sq_delta_over_gini"], (d[at] ** 2).sum() / gini[at].sum(), rel_tol=1e-9)


def test_small_cells_say_so() -> None:
    log = make_log(2, sequences=30, mean_length=60)
    with store_of(log) as store:
        result = run(store, {"it": EntropyBins(explicit_grid([1e-4, 0.05, 3]))}).results["it"]
    rows = result.table.to_pylist()
    assert [r["small"] for r in rows] == [r["n"] < 200 or r["n_sequences"] < 2 for r in rows]
    n = sum(r["small"] for r in rows)
    assert 0 < n < len(rows)
    assert f"{n} of {len(rows)} cells are small: fewer than 200 tokens or 2 sequences" in result.notes
