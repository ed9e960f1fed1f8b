"""Weights: effective sample sizes and k-hat equal NumPy and arviz-stats, from tails that merge exactly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.result import Result
from estr_diag.stats.psis import Tail, khat, tail_length
from estr_diag.stats.sequence_weights import QUANTILES, SequenceRatios, WeightsByLength, length_limit
from estr_diag.stats.weights import Weights, token_tail
from estr_diag.store.database import Store
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays, Floats


def arviz(log_ratios: Floats) -> float:
    """K-hat of all ratios at once."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    return float(array_stats.psislw(-log_ratios, axis=-1)[1])  # type: ignore[no-untyped-call]


def compute(store: Store) -> tuple[Result, Result, Result]:
    tail = token_tail(store, frozenset(store.column_counts()))
    outcome = run(store, {"w": Weights(tail), "s": SequenceRatios(), "l": WeightsByLength()})
    assert not outcome.missing
    for result in outcome.results.values():
        json.dumps(result.to_json(), allow_nan=False)
        assert not any(
            isinstance(v, float) and not math.isfinite(v) for r in result.table.to_pylist() for v in r.values()
        )
    return outcome.results["w"], outcome.results["s"], outcome.results["l"]


def by_name(result: Result) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in result.table.to_pylist()}


@pytest.mark.parametrize("n", [25, 100, 224, 225, 226, 300, 2000, 60_000])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 8.0])
def test_khat_of_the_tail_is_khat_of_all_ratios(n: int, alpha: float) -> None:
    log_ratios = np.log(np.random.default_rng(n).pareto(alpha, n) + 1)
    tail = Tail.of(log_ratios)
    assert len(tail.largest) <= max(225, 3 * math.sqrt(n) + 1)
    value, _ = khat(tail)
    assert value == pytest.approx(arviz(log_ratios), rel=1e-12)


def test_khat_of_pareto_ratios_is_one_over_alpha_and_the_sign_is_right() -> None:
    log_ratios = np.log(np.random.default_rng(0).pareto(2, 100_000) + 1)
    value, reading = khat(Tail.of(log_ratios))
    assert value is not None
    assert value == pytest.approx(0.5, abs=0.06)
    assert value != pytest.approx(arviz(-log_ratios), abs=0.5), "the other tail"
    assert reading.startswith("usable" if value >= 0.5 else "good")
    heavy, reading = khat(Tail.of(np.log(np.random.default_rng(0).pareto(1, 100_000) + 1)))
    assert heavy is not None
    assert heavy > 0.9
    assert reading.startswith("not usable")
    light, reading = khat(Tail.of(np.random.default_rng(0).normal(0, 0.05, 10_000)))
    assert light is not None
    assert light < 0.3
    assert reading.startswith("good")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 3000), cuts=st.lists(st.floats(0, 1), max_size=4))
def test_tails_of_any_shards_merge_to_the_tail_of_the_whole(seed: int, n: int, cuts: list[float]) -> None:
    values = np.random.default_rng(seed).standard_t(3, n)
    keep = Tail.needed(n)
    shards = [
        Tail(len(part), tuple(np.sort(part)[-keep:].tolist()))
        for part in np.split(values, sorted(int(c * n) for c in cuts))
    ]
    assert Tail.merged(shards) == Tail.of(values)


def test_shards_that_kept_too_little_are_refused() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    with pytest.raises(ValueError, match="each shard must keep its 135 largest"):
        Tail.merged([Tail.of(values[:1000]), Tail.of(values[1000:])])


@pytest.mark.parametrize("n", [0, 1, 24])
def test_too_few_ratios_have_no_khat_but_a_reason(n: int) -> None:
    value, reason = khat(Tail.of(np.random.default_rng(0).normal(size=n)))
    assert value is None
    assert f"{n} ratios; a tail of 5 needs 25" in reason


@pytest.mark.parametrize(
    ("log_ratios", "reason"),
    [
        (np.zeros(1000), "are all the same"),
        (np.repeat([0.0, 1.0], 500), "are all the same"),
        (np.concatenate([np.zeros(990), np.linspace(0.1, 1, 10)]), "tied"),
        (np.concatenate([np.zeros(900), np.linspace(1, 4000, 100)]), "beyond the range of a double"),
    ],
)
def test_ratios_that_cannot_be_fitted_have_a_reason(log_ratios: Floats, reason: str) -> None:
    value, text = khat(Tail.of(log_ratios))
    assert value is None
    assert reason in text


@pytest.mark.parametrize("seed", range(3))
def test_weights_equal_numpy_and_arviz(seed: int) -> None:
    log = make_log(seed, sequences=60, mean_length=50)
    tokens = oracles.counted(log)
    names = np.unique(tokens["seq_id"])
    sums = np.array([tokens["delta"][tokens["seq_id"] == s].sum() for s in names])
    with store_of(log) as store:
        rows = by_name(compute(store)[0])
    expected = {
        "ess_token": (oracles.token_metrics(tokens)["ess_token"], len(tokens["delta"])),
        "ess_sequence": (oracles.sequence_metrics(tokens)["ess_sequence"], len(names)),
        "khat_token": (arviz(tokens["delta"]), len(tokens["delta"])),
        "khat_sequence": (arviz(sums), len(names)),
    }
    assert set(rows) == set(expected)
    for name, (value, n) in expected.items():
        assert rows[name]["value"] == pytest.approx(value, rel=1e-9)
        assert rows[name]["n"] == n
        assert rows[name]["reading"]


def test_only_the_tail_leaves_the_database() -> None:
    log = make_log(1, sequences=100, mean_length=100, holes=False)
    delta = np.sort(oracles.counted(log)["delta"])
    with store_of(log) as store:
        tail = token_tail(store, frozenset(store.column_counts()))
    assert tail.n == len(delta)
    assert len(tail.largest) == tail_length(tail.n) + 1 < 3 * math.sqrt(tail.n) + 2
    assert tail.largest == tuple(delta[-len(tail.largest) :])


@pytest.mark.parametrize("seed", range(3))
def test_sequence_ratios_equal_numpy(seed: int) -> None:
    log = make_log(seed, sequences=30)
    tokens = oracles.counted(log)
    parts = [tokens["delta"][tokens["seq_id"] == s] for s in np.unique(tokens["seq_id"])]
    values = {
        "sum": np.array([p.sum() for p in parts]),
        "mean": np.array([p.mean() for p in parts]),
        "max_abs": np.array([np.abs(p).max() for p in parts]),
    }
    with store_of(log) as store:
        rows = by_name(compute(store)[1])
    assert list(rows) == list(values)
    for name, x in values.items():
        expected = {"n_sequences": len(x), "mean": x.mean(), "min": x.min(), "max": x.max()}
        expected |= {q: np.quantile(x, p) for q, p in QUANTILES.items()}
        for key, value in expected.items():
            assert rows[name][key] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)


@pytest.mark.parametrize("seed", range(3))
def test_weights_by_length_equal_numpy(seed: int) -> None:
    log = make_log(seed, sequences=60)
    tokens = oracles.counted(log)
    parts = [tokens["delta"][tokens["seq_id"] == s] for s in np.unique(tokens["seq_id"])]
    bucket = np.array([len(p).bit_length() - 1 for p in parts])
    with store_of(log) as store:
        rows = compute(store)[2].table.to_pylist()
    assert [r["length_lo"] for r in rows] == [2**b for b in np.unique(bucket)]
    for row in rows:
        assert row["length_hi"] == 2 * row["length_lo"] - 1
        mine = [p for p, b in zip(parts, bucket, strict=True) if 2**b == row["length_lo"]]
        d, w = np.concatenate(mine), np.exp(np.clip([p.sum() for p in mine], -20, 20))
        k3 = np.exp(d) - 1 - d
        expected = {
            "n_sequences": len(mine), "n_tokens": len(d), "mean_length": len(d) / len(mine), "kl_k1": -d.mean(),
            "kl_k3": k3.mean(), "length_times_k1": -d.sum() / len(mine), "length_times_k3": k3.sum() / len(mine),
            "ess_sequence": w.sum() ** 2 / (len(w) * (w**2).sum()),
        }  # fmt: skip
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_sequence_weights_degenerate_at_the_length_that_theory_says() -> None:
    """Log-normal ratios of mean 1 and variance s^2 a token: the ESS is exp(-T s^2), so 0.3 at T = 1.2 / s^2."""
    rng = np.random.default_rng(0)
    variance, lengths = 0.005, np.repeat([16, 32, 64, 128, 256, 512], 2000)
    sums = rng.normal(-lengths * variance / 2, np.sqrt(lengths * variance))
    w = np.exp(sums)
    rows = [
        {
            "n_sequences": 2000,
            "mean_length": float(t),
            "ess_sequence": w[lengths == t].sum() ** 2 / (2000 * (w[lengths == t] ** 2).sum()),
        }
        for t in np.unique(lengths)
    ]
    length, sentence = length_limit(rows)
    assert length == pytest.approx(1.2 / variance, rel=0.2)
    assert "falls below 0.3 at about" in sentence
    assert length_limit(rows[:3])[0] is None
    assert "stays above 0.3, up to sequences of 64 tokens" in length_limit(rows[:3])[1]
    assert "from the shortest sequences on (512 tokens)" in length_limit(rows[5:])[1]
    assert "cannot tell" in length_limit([{**rows[0], "n_sequences": 19}])[1]


def test_any_split_by_sequence_merges_to_the_whole_and_row_order_does_not_matter() -> None:
    log = make_log(5, sequences=60, mean_length=60)
    with store_of(log) as store:
        whole = compute(store)
        store.connection.execute(
            "create temp table shuffled as select * from tokens order by hash(seq_id * 7919 + pos)"
        )
        store.connection.execute("delete from tokens")
        store.connection.execute("insert into tokens select * from shuffled")
        shuffled = compute(store)
    shards = [{k: v[np.isin(log["seq_id"], range(a, a + 20))] for k, v in log.items()} for a in (40, 0, 20)]
    with store_of(*shards) as store:
        parts = compute(store)
    for others in (shuffled, parts):
        for a, b in zip(whole, others, strict=True):
            assert a.notes == b.notes
            for left, right in zip(a.table.to_pylist(), b.table.to_pylist(), strict=True):
                for name, value in left.items():
                    exact = not isinstance(value, float)
                    assert right[name] == (value if exact else pytest.approx(value, rel=1e-9, abs=1e-12)), name


def tiny(n: int, sequences: int, delta: Any, *, mask: bool = True) -> Arrays:
    delta = np.broadcast_to(np.asarray(delta, dtype=float), n)
    return {
        "seq_id": np.sort(np.arange(n) % sequences), "step": np.full(n, 3), "logp_infer": np.full(n, -64.0),
        "logp_train": -64 + delta, "loss_mask": np.full(n, mask),
    }  # fmt: skip


@pytest.mark.parametrize(
    "log",
    [
        tiny(1, 1, 0.5),
        tiny(40, 1, np.linspace(-1, 1, 40)),
        tiny(400, 40, 0.0),
        tiny(400, 40, 50 * (2 * (np.arange(400) % 2) - 1)),
        tiny(400, 40, np.linspace(-50, 50, 400)),
        tiny(400, 40, 50),
        tiny(400, 40, -50),
        tiny(9, 3, 0.1, mask=False),
    ],
    ids=["one token", "one sequence", "zeros", "alternating 50", "ramp", "all 50", "all -50", "no counted token"],
)
def test_degenerate_logs_give_a_value_or_a_reason(log: Arrays) -> None:
    with store_of(log) as store:
        weights, ratios, lengths = compute(store)
    for row in weights.table.to_pylist():
        assert row["value"] is not None or row["reading"].startswith("cannot tell")
    assert bool(len(ratios)) == bool(len(lengths)) == bool(log["loss_mask"].any())
    assert lengths.notes[0]


def test_neither_scipy_nor_arviz_is_imported_with_the_statistics() -> None:
    code = (
        "import sys, estr_diag.stats.weights, estr_diag.stats.sequence_weights, estr_diag.stats.decomposition;"
        "assert not {'scipy', 'arviz_stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
