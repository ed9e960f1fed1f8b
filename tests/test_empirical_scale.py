"""Empirical scale: equal to the min-max formula of isotonic regression, and to what it is for."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr_diag.result import Result
from estr_diag.stats.empirical_scale import EmpiricalScale, isotonic, scale_at
from estr_diag.stats.grid import GINI, ValueGrid, explicit_grid, log_grid, quantile_grid
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays, Floats
from tests.test_grid import bin_of, log_with_collision
from tests.test_scaling import log_of, power_log


def min_max(values: Floats, weights: Floats) -> Floats:
    """Isotonic regression by its closed form: max over a <= i of min over b >= i of the mean of a..b."""
    n = len(values)
    mean = {(a, b): np.average(values[a : b + 1], weights=weights[a : b + 1]) for b in range(n) for a in range(b + 1)}
    return np.array([max(min(mean[a, b] for b in range(i, n)) for a in range(i + 1)) for i in range(n)])


def fitted(log: Arrays, grid: ValueGrid) -> Result:
    with store_of(log) as store:
        return run(store, {"it": EmpiricalScale(grid)}).results["it"]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000)), min_size=1, max_size=15))
def test_isotonic_is_the_min_max_formula(points: list[tuple[float, int]]) -> None:
    values, weights = (np.array(c, dtype=float) for c in zip(*points, strict=True))
    m2, block = isotonic(values, weights)
    np.testing.assert_allclose(m2, min_max(values, weights), rtol=1e-9, atol=1e-9)
    assert all((block[i] == block[i + 1]) <= math.isclose(m2[i], m2[i + 1]) for i in range(len(m2) - 1))


@pytest.mark.parametrize("seed", range(4))
def test_table_equals_numpy(seed: int) -> None:
    log = make_log(seed, sequences=30)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 10)
        result = run(store, {"it": EmpiricalScale(grid)}).results["it"]
    index, d2 = bin_of(grid, tokens["entropy"]), tokens["delta"] ** 2
    bins, n = np.unique(index, return_counts=True)
    means = np.array([d2[index == b].mean() for b in bins])
    rows = result.table.to_pylist()
    assert [r["entropy_bin"] for r in rows] == bins.tolist()
    assert [r["n"] for r in rows] == n.tolist()
    np.testing.assert_allclose([r["mean_sq_delta"] for r in rows], means, rtol=1e-9)
    m2 = min_max(means, n.astype(float))
    np.testing.assert_allclose([r["m2"] for r in rows], m2, rtol=1e-9)
    assert not np.allclose(m2, means), "this log has bins to pool"
    assert "bins were pooled" in " ".join(result.notes)
    scaled = scale_at(result, tokens["entropy"])
    np.testing.assert_allclose(scaled, m2[np.searchsorted(bins, index)], rtol=1e-9)
    assert math.isclose(np.sum(d2), np.sum(scaled), rel_tol=1e-9), "delta^2 / m2 is 1 on average"


def test_it_recovers_a_curve_that_is_no_power() -> None:
    rng = np.random.default_rng(0)
    entropy = rng.uniform(0.01, 3, 60_000)
    true = 0.01 * entropy + 0.05 * (entropy > 1)
    log = log_of(np.arange(60_000) // 100, entropy, np.sqrt(true) * rng.normal(size=60_000))
    with store_of(log) as store:
        result = run(store, {"it": EmpiricalScale(log_grid(store, frozenset(store.column_counts()), 120))}).results[
            "it"
        ]
    at = np.array([0.2, 0.5, 0.9, 1.1, 2.0, 2.8])
    np.testing.assert_allclose(scale_at(result, at), 0.01 * at + 0.05 * (at > 1), rtol=0.12)


def test_values_outside_the_bins() -> None:
    log = log_of(np.repeat([0, 1], 4), [0, 0.3, 0.6, 1.2] * 2, [0.5, 1, 2, 3] * 2)
    result = fitted(log, explicit_grid([0.25, 0.5, 1]))
    got = scale_at(result, np.array([-1, 0, 1e-9, 0.3, 0.6, 50, np.nan]))
    np.testing.assert_allclose(got, [0.25, 0.25, 1, 1, 4, 9, np.nan], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_any_split_and_any_order_give_the_same(seed: int) -> None:
    log = make_log(seed, sequences=30)
    grid = explicit_grid([0.01, 0.05, 0.2, 0.5, 1, 2])
    part = np.random.default_rng(seed).integers(0, 3, 30)[log["seq_id"]]
    whole = fitted(log, grid).rows()
    with store_of(*({k: v[part == i] for k, v in log.items()} for i in range(3))) as store:
        store.connection.execute("create or replace table tokens as select * from tokens order by hash(seq_id, pos)")
        split = run(store, {"it": EmpiricalScale(grid)}).results["it"].rows()
    for a, b in zip(whole, split, strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] == b[k] or math.isclose(a[k], b[k], rel_tol=1e-9) for k in a)


def test_one_minus_g_has_a_scale_too() -> None:
    log = log_with_collision(2)
    result = fitted(log, explicit_grid([0.25, 0.5], GINI))
    assert result.table.column_names[0] == "gini_bin"
    known = np.isfinite(oracles.counted(log)["collision"])
    assert sum(r["n"] for r in result.rows()) == np.count_nonzero(known)


@pytest.mark.parametrize(
    "log",
    [
        log_of([0], [0.5], [0.1]),
        log_of([0, 0], [0, 0], [50, -50]),
        log_of([0, 1], [0.5, 0.5], [0, 0]),
        {**power_log(1, 1.0, sequences=2), "loss_mask": np.zeros(200, dtype=bool)},
    ],
)
def test_degenerate_logs(log: Arrays) -> None:
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()))
        result = run(store, {"it": EmpiricalScale(grid)}).results["it"]
    json.dumps(result.to_json(), allow_nan=False)
    found = scale_at(result, np.array([0.0, 1.0]))
    counted = log["loss_mask"].any()
    assert np.all(np.isfinite(found)) == counted
    if counted and not np.any(log["logp_train"] != log["logp_infer"]):
        assert "m2 is 0" in " ".join(result.notes)
