"""Scaling law: every number equal to NumPy, intervals that cover, and the closed form for logit noise."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import UsageError
from estr_diag.result import Result
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.empirical_scale import EmpiricalScale
from estr_diag.stats.entropy_bins import EntropyBins
from estr_diag.stats.grid import ENTROPY, GINI, ValueGrid, explicit_grid, quantile_grid
from estr_diag.stats.scaling import Scaling
from estr_diag.store.engine import Statistic, run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays
from tests.test_grid import bin_of

EDGES = tuple(2.0**k for k in (-5, -4, -3, -2, -1, 0, 1))


def log_of(sequence: Any, entropy: Any, delta: Any, collision: Any = None, base: float = -60) -> Arrays:
    """A log whose deltas are given; log-probs lie so far below 0 that no delta is cut there."""
    delta = np.asarray(delta, dtype=float)
    infer = np.full(len(delta), base, dtype=np.float32)
    log = {
        "seq_id": np.asarray(sequence),
        "logp_infer": infer,
        "logp_train": (infer + delta).astype(np.float32),
        "entropy": np.asarray(entropy, dtype=np.float32),
        "loss_mask": np.ones(len(delta), dtype=bool),
    }
    return log if collision is None else {**log, "collision": np.asarray(collision, dtype=np.float32)}


def power_log(seed: int, exponent: float, sequences: int = 60, length: int = 100) -> Arrays:
    """E[delta^2 | H] = 0.01 H^exponent, where the noise level and the entropies of a sequence go together."""
    rng = np.random.default_rng(seed)
    seq = np.repeat(np.arange(sequences), length)
    level = np.repeat(rng.normal(0, 0.7, sequences), length)
    entropy = np.exp(-1.5 + level + rng.normal(0, 0.7, len(seq)))
    noise = np.repeat(np.exp(rng.normal(0, 0.3, sequences)), length)
    return log_of(seq, entropy, 0.1 * entropy ** (exponent / 2) * noise * rng.normal(0, 1, len(seq)))


def softmax_log(seed: int, s: float, tokens: int = 60_000, vocabulary: int = 30, length: int = 200) -> Arrays:
    """Independent noise of variance s^2 on the logits of softmaxes of every concentration."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (tokens, vocabulary)) * np.exp(rng.uniform(-1.5, 1.2, (tokens, 1)))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    sampled = np.minimum((p.cumsum(axis=1) < rng.random((tokens, 1))).sum(axis=1), vocabulary - 1)
    noise = rng.normal(0, s, p.shape)
    delta = noise[np.arange(tokens), sampled] - np.log((p * np.exp(noise)).sum(axis=1))
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
    return log_of(np.arange(tokens) // length, entropy, delta, (p**2).sum(axis=1), base=-1)


def scaling(
    log: Arrays, *grids: ValueGrid, parts: list[Arrays] | None = None, n_bins: int = 12, **options: Any
) -> Result:
    with store_of(*(parts or [log])) as store:
        present = frozenset(store.column_counts())
        grids = grids or (quantile_grid(store, present, n_bins),)
        return run(store, {"it": Scaling(grids, **options)}).results["it"]


def oracle_points(log: Arrays, grid: ValueGrid, column: str = "entropy", min_tokens: int = 200) -> tuple[Any, ...]:
    """Bin, n, log mean x, log mean delta^2 of every bin that can be used, by looking at single tokens."""
    tokens = oracles.counted(log)
    value = tokens["entropy"] if column == "entropy" else 1 - tokens["collision"].astype(float)
    index = bin_of(grid, value)
    out = []
    for b in range(1, grid.n_bins):
        d, x = tokens["delta"][index == b], value[index == b]
        if len(d) >= min_tokens and np.any(d != 0):
            out.append((b, len(d), math.log(math.fsum(x) / len(x)), math.log(math.fsum(d**2) / len(d))))
    return tuple(np.array(c) for c in zip(*out, strict=True))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_fit_equals_polyfit(seed: int, exponent: float) -> None:
    log, grid = power_log(seed, exponent), explicit_grid(EDGES)
    row = scaling(log, grid).table.to_pylist()[0]
    bins, n, x, y = oracle_points(log, grid)
    slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(n))
    left = y - slope * x - intercept
    mean = np.average(y, weights=n)
    expected = {
        "exponent": slope,
        "amplitude": math.exp(intercept),
        "r2": 1 - np.sum(n * left**2) / np.sum(n * (y - mean) ** 2),
        "rms_residual": math.sqrt(np.average(left**2, weights=n) * len(n) / (len(n) - 2)),
    }
    for name, value in expected.items():
        assert math.isclose(row[name], value, rel_tol=1e-9), name
    assert (row["n_tokens"], row["n_bins"], row["n_sequences"]) == (n.sum(), len(bins), 60)
    steps = row["local_exponents"]
    np.testing.assert_allclose([s["exponent"] for s in steps], np.diff(y) / np.diff(x), rtol=1e-9)
    assert [(s["bin"], s["next_bin"]) for s in steps] == list(pairwise(bins.tolist()))
    assert all(s["ci_low"] < s["exponent"] < s["ci_high"] for s in steps)


def test_interval_equals_a_bootstrap_of_tokens_by_sequence() -> None:
    log, grid = power_log(3, 1.2), explicit_grid(EDGES)
    row = scaling(log, grid, replicates=2000).table.to_pylist()[0]
    tokens = oracles.counted(log)
    index, names = bin_of(grid, tokens["entropy"]), np.unique(tokens["seq_id"])
    bins = oracle_points(log, grid)[0]
    rng, slopes, locals_ = np.random.default_rng(99), [], []
    rows_of = {s: np.flatnonzero(tokens["seq_id"] == s) for s in names}
    for _ in range(1000):
        drawn = np.concatenate([rows_of[s] for s in rng.choice(names, len(names))])
        i, d2, h = index[drawn], tokens["delta"][drawn] ** 2, tokens["entropy"][drawn]
        n, total, sums = (np.bincount(i, w, grid.n_bins)[bins] for w in (None, h, d2))
        x, y = np.log(total / n), np.log(sums / n)
        slopes.append(np.polyfit(x, y, 1, w=np.sqrt(n))[0])
        locals_.append(np.diff(y) / np.diff(x))
    low, high = np.quantile(slopes, [0.025, 0.975])
    # Two bootstraps with other random numbers: their ends differ by their own noise, some 4 % of the width.
    np.testing.assert_allclose([row["ci_low"], row["ci_high"]], [low, high], atol=0.12 * (high - low))
    ends = np.quantile(locals_, [0.025, 0.975], axis=0)
    found = np.array([[s["ci_low"], s["ci_high"]] for s in row["local_exponents"]]).T
    assert np.all(np.abs(found - ends) < 0.15 * (ends[1] - ends[0]))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [1.0, 1.5])
def test_intervals_cover_the_true_exponent(exponent: float) -> None:
    """Sequences as clusters cover; taking tokens for independent does not, so the test can tell."""
    covered, naive, verdicts = [], [], []
    for seed in range(40):
        log = power_log(seed, exponent, length=60)
        row = scaling(log, replicates=300).table.to_pylist()[0]
        covered.append(row["ci_low"] <= exponent <= row["ci_high"])
        verdicts.append(row["law_holds"])
        if exponent == 1:
            alone = {**log, "seq_id": np.arange(len(log["seq_id"]))}
            row = scaling(alone, replicates=100).table.to_pylist()[0]
            naive.append(row["ci_low"] <= exponent <= row["ci_high"])
    assert np.mean(covered) >= 0.85, np.mean(covered)
    if exponent == 1:
        assert np.mean(naive) < 0.8, np.mean(naive)
        assert np.mean(verdicts) >= 0.85
    else:
        assert not any(verdicts), "an exponent of 1.5 is not taken for the law"


def grids_of(log: Arrays, n_bins: int = 16) -> tuple[ValueGrid, ValueGrid]:
    with store_of(log) as store:
        present = frozenset(store.column_counts())
        return quantile_grid(store, present, n_bins), quantile_grid(store, present, n_bins, GINI)


@pytest.mark.parametrize(("seed", "s"), [(5, 0.03), (8, 0.1)])
def test_logit_noise_follows_one_minus_g(seed: int, s: float) -> None:
    """E[delta^2] = s^2 (1 - G) to first order in s^2, and no power of H."""
    log = softmax_log(seed, s)
    result = scaling(log, *grids_of(log))
    entropy, gini = result.table.to_pylist()
    assert gini["law_holds"] is True
    assert abs(gini["exponent"] - 1) < 0.08, "its standard error is 0.045"
    assert abs(gini["amplitude"] / s**2 - 1) < 0.03
    assert gini["r2"] > 0.99 > entropy["r2"]
    assert (entropy["better"], gini["better"]) == (False, True)
    assert entropy["law_holds"] is False
    assert "gini is the better scale" in " ".join(result.notes)


def test_a_law_in_entropy_is_named_too() -> None:
    log = softmax_log(6, 0.1)
    rng = np.random.default_rng(1)
    log["logp_train"] = (
        log["logp_infer"] + 0.1 * np.sqrt(log["entropy"]) * rng.normal(size=len(log["entropy"]))
    ).astype(np.float32)
    entropy, gini = scaling(log, *grids_of(log)).table.to_pylist()
    assert (entropy["better"], gini["better"]) == (True, False)
    assert abs(entropy["exponent"] - 1) < 0.06, "its standard error is 0.018"
    assert gini["law_holds"] is False


def test_scales_are_compared_on_the_same_tokens() -> None:
    log = softmax_log(7, 0.1, tokens=8000)
    holes = np.random.default_rng(0).random(8000)
    log["collision"][holes < 0.3] = np.nan
    log["entropy"][holes > 0.9] = np.nan
    log["entropy"][(holes > 0.85) & (holes <= 0.9)] = 0.0
    grids = grids_of(log)
    rows = scaling(log, *grids).table.to_pylist()
    common = (log["collision"] < 1) & (log["entropy"] > 0)
    part = {k: v[common] for k, v in log.items()}
    for row, grid, column in zip(rows, grids, ("entropy", "collision"), strict=True):
        known = (log[column] > 0) if column == "entropy" else (log[column] < 1)
        _, n, x, y = oracle_points({k: v[known] for k, v in log.items()}, grid, column)
        slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(n))
        assert math.isclose(row["exponent"], slope, rel_tol=1e-9)
        assert row["n_tokens"] == n.sum()
        _, n, x, y = oracle_points(part, grid, column)
        slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(n))
        left = np.average((y - slope * x - intercept) ** 2, weights=n) * len(n) / (len(n) - 2)
        assert math.isclose(row["common_rms_residual"], math.sqrt(left), rel_tol=1e-9)
    assert rows[0]["n_tokens_at_zero"] == np.count_nonzero(log["entropy"] == 0)


def test_scales_that_fit_alike_are_not_ranked() -> None:
    log = power_log(1, 1.0)
    log["collision"] = (1 - np.clip(log["entropy"], 0, 4) / 8).astype(np.float32)
    rows = scaling(log, *grids_of(log)).table.to_pylist()
    assert [r["better"] for r in rows] == [None, None]


def same(left: Result, right: Result) -> None:
    for a, b in zip(left.table.to_pylist(), right.table.to_pylist(), strict=True):
        flat_a, flat_b = ([x for s in r.pop("local_exponents") for x in s.values()] for r in (a, b))
        for x, y in zip([*a.values(), *flat_a], [*b.values(), *flat_b], strict=True):
            assert x == y or math.isclose(x, y, rel_tol=1e-9), (x, y)


@pytest.mark.parametrize("seed", range(3))
def test_any_split_by_sequence_and_any_order_give_the_same(seed: int) -> None:
    log = softmax_log(seed, 0.1, tokens=6000)
    grids = grids_of(log, 8)
    whole = scaling(log, *grids)
    rng = np.random.default_rng(seed)
    part = rng.integers(0, 3, 30)[log["seq_id"]]
    parts = [{k: v[part == i] for k, v in log.items()} for i in range(3)]
    same(whole, scaling(log, *grids, parts=parts))
    with store_of(log) as store:
        store.connection.execute("create or replace table tokens as select * from tokens order by hash(seq_id, pos)")
        same(whole, run(store, {"it": Scaling(grids)}).results["it"])
        again = run(store, {"it": Scaling(grids, seed=1)}).results["it"]
    assert again.rows()[0]["ci_low"] != whole.rows()[0]["ci_low"], "the seed is used"


ONE = np.ones(2000)
DEGENERATE: dict[str, tuple[Arrays, str]] = {
    "one token": (log_of([0], [0.5], [0.1]), "0 bins"),
    "one sequence": (
        {**power_log(1, 1.0), "seq_id": np.zeros(6000, dtype=int)},
        "1 sequence",
    ),
    "constant entropy": (log_of(np.arange(2000) // 50, 0.5 * ONE, np.sin(np.arange(2000))), "1 bins"),
    "every delta 0": (
        log_of(np.arange(2000) // 50, np.geomspace(0.01, 2, 2000), 0 * ONE),
        "with every delta 0",
    ),
    "every entropy 0": (log_of(np.arange(2000) // 50, 0 * ONE, np.sin(np.arange(2000))), "2000 tokens at 0"),
    "few tokens": (log_of(np.arange(100) // 5, np.geomspace(0.01, 2, 100), np.sin(np.arange(100))), "smaller"),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_what_cannot_be_told_has_a_reason(case: str) -> None:
    log, reason = DEGENERATE[case]
    log = {**log, "collision": np.clip(1 - log["entropy"] / 4, 0, 1).astype(np.float32)}
    result = scaling(log, *grids_of(log, 6))
    json.dumps(result.to_json(), allow_nan=False)
    result.to_polars()
    for row in result.table.to_pylist():
        assert row["law_holds"] is None
        assert row["ci_low"] is None
        assert row["better"] is None
        assert reason in row["reason"]
    assert result.notes


def test_one_sequence_still_has_an_exponent() -> None:
    log = {**power_log(1, 1.0), "seq_id": np.zeros(6000, dtype=int)}
    assert abs(scaling(log).table.to_pylist()[0]["exponent"] - 1) < 0.3


def test_no_counted_token_at_all() -> None:
    log = power_log(1, 1.0, sequences=3)
    log["loss_mask"][:] = False
    result = scaling(log)
    assert result.rows()[0]["law_holds"] is None
    json.dumps(result.to_json(), allow_nan=False)


def test_extreme_deltas_and_a_bin_without_moment() -> None:
    """Deltas of +-50 are used as they are; a bin whose deltas are all 0 is left out and counted."""
    log = power_log(4, 1.0)
    d = log["logp_train"].astype(float) - log["logp_infer"]
    d[::500] = 50 * np.sign(d[::500])
    low = log["entropy"] < EDGES[1]
    d[low] = 0
    log = log_of(log["seq_id"], log["entropy"], d)
    result = scaling(log, explicit_grid(EDGES))
    row = result.table.to_pylist()[0]
    _, n, x, y = oracle_points(log, explicit_grid(EDGES))
    assert math.isclose(row["exponent"], np.polyfit(x, y, 1, w=np.sqrt(n))[0], rel_tol=1e-9)
    assert row["n_bins_zero_moment"] >= 1
    json.dumps(result.to_json(), allow_nan=False)


def test_constant_moment_has_exponent_0_and_no_r2() -> None:
    rng = np.random.default_rng(0)
    log = log_of(np.arange(4000) // 50, np.exp(rng.uniform(-3, 0, 4000)), 0.25 * np.sign(rng.normal(size=4000)))
    row = scaling(log).table.to_pylist()[0]
    assert abs(row["exponent"]) < 1e-9
    assert row["r2"] is None
    assert row["law_holds"] is False


def test_min_tokens_leaves_out_bins_and_counts_them() -> None:
    log, grid = power_log(2, 1.0), explicit_grid(EDGES)
    all_bins = scaling(log, grid, min_tokens=1).table.to_pylist()[0]
    sizes = np.bincount(bin_of(grid, oracles.counted(log)["entropy"]), minlength=grid.n_bins)[1:]
    few = scaling(log, grid, min_tokens=600).table.to_pylist()[0]
    assert all_bins["n_bins"] == np.count_nonzero(sizes)
    assert few["n_bins"] == np.count_nonzero(sizes >= 600) < all_bins["n_bins"]
    assert few["n_bins_small"] == np.count_nonzero((sizes > 0) & (sizes < 600))


def test_it_shares_the_scan() -> None:
    log = softmax_log(1, 0.1, tokens=2000)
    entropy, gini = grids_of(log, 5)
    with store_of(log) as store:
        present = frozenset(store.column_counts())
        statistics: dict[str, Statistic] = {
            "scaling": Scaling((entropy, gini), min_tokens=50),
            "scale": EmpiricalScale(entropy),
            "bins": EntropyBins(entropy),
            "gini": EntropyBins(gini),
            "consistency": Consistency(),
        }
        assert {r.scan for s in statistics.values() for r in s.requests(present)} == {"sums", "histogram"}
        together = run(store, statistics).results
        for label, statistic in statistics.items():
            alone = run(store, {"it": statistic}).results["it"]
            if label == "scaling":
                same(together[label], alone)
            else:
                assert together[label].rows() == alone.rows()


def test_scales_must_differ() -> None:
    with pytest.raises(UsageError, match="one or two different scales"):
        Scaling((ValueGrid((0, 16)), ValueGrid((0, 32), ENTROPY)))
    with pytest.raises(UsageError, match="one or two different scales"):
        Scaling(())


def test_missing_collision_is_loud() -> None:
    with store_of(make_log(1)) as store:
        outcome = run(store, {"it": Scaling((explicit_grid([0.1]), explicit_grid([0.1], GINI)))})
    assert list(outcome.missing["it"].columns) == ["collision"]
