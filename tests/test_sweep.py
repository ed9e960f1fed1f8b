"""Sweeps: NumPy, one scan against a bit a value, and thresholds chosen by meaning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.rules import Rule, get, parse_rules
from estr_diag.rules.replay import Replay
from estr_diag.rules.score import score_of
from estr_diag.rules.sweep import Sweep, parse_grid
from estr_diag.rules.thresholds import at_drop_rate, at_kept_share, equal_share
from estr_diag.stats.grid import fitting_grid
from estr_diag.store.database import Store
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.test_mask_errors import float32, truth_log

PRESENT = frozenset({"logp_infer", "logp_train", "entropy"})
SWEEPS: list[tuple[Rule, str, tuple[float, ...]]] = [
    (get("estr"), "tau", (0.01, 0.05, 0.2, 1.0, 4.0)),
    (get("icepop"), "high", (1.0, 1.05, 1.2, 2.0)),
    (get("icepop"), "low", (0.5, 0.8, 0.95, 1.0)),
    (get("band"), "c", (1.02, 1.1, 1.5)),
    (get("kpop"), "phi", (0.001, 0.01, 0.1)),
    (get("veto"), "c", (0.01, 0.5, 0.9)),
    (get("geo"), "high", (0.99, 1.0, 1.01)),
    (get("top_entropy"), "rho", (0.1, 0.5, 0.9)),
    (get("m2po"), "c", (0.001, 0.01)),
    (Rule("strict", "abs(delta) < c", {"c": 0.1}), "c", (0.0, 0.05, 0.3)),
    (Rule("large", "entropy > low and delta < 1", {"low": 0.1}), "low", (0.0, 0.1, 0.4)),
]


def rows_of(store: Store, rule: Rule, parameter: str, values: tuple[float, ...], **more: Any) -> list[dict[str, Any]]:
    grid = fitting_grid(store, store.present(), 4)
    return run(store, {"it": Sweep(rule, parameter, values, grid, **more)}).results["it"].rows()


@pytest.mark.parametrize(("rule", "parameter", "values"), SWEEPS, ids=[f"{r.name}:{p}" for r, p, _ in SWEEPS])
def test_one_scan_equals_a_bit_a_value(rule: Rule, parameter: str, values: tuple[float, ...]) -> None:
    with store_of(make_log(8, sequences=30, scale=5.0)) as store:
        fast = rows_of(store, rule, parameter, values)
        slow = rows_of(store, rule, parameter, values, by_score=False)
        direct = [
            run(store, {"it": Replay((r,))}).results["it"].rows()[0] for r in Sweep(rule, parameter, values).rules
        ]
    assert fast == slow
    for row, replayed in zip(fast, direct, strict=True):
        for name in ("n", "kept_tokens", "masked_tokens", "undecided_tokens", "kept_share"):
            assert row[name] == replayed[name]
        assert row["kept_share_se"] == pytest.approx(replayed["kept_share_se"], rel=1e-9, abs=1e-12)
        assert row["kept_tokens"] + row["masked_tokens"] + row["undecided_tokens"] == row["n"]


def test_which_parameters_have_a_score() -> None:
    scored = {(r.name, p): score_of(r, p, PRESENT) is not None for r, p, _ in SWEEPS}
    assert scored["estr", "tau"]
    assert scored["kpop", "phi"]
    assert scored["band", "c"]
    assert scored["icepop", "low"]
    assert not scored["m2po", "c"]
    assert not scored["veto", "c"], "it stands inside an aggregate"


def test_the_curve_equals_numpy() -> None:
    log = make_log(8, sequences=30, scale=5.0)
    tokens = oracles.counted(log)
    values = (0.01, 0.1, 1.0, 10.0)
    with store_of(log) as store:
        rows = rows_of(store, get("estr"), "tau", values)
    shares = []
    for row, tau in zip(rows, values, strict=True):
        kept = oracles.keep("estr", tokens, tau=tau, eps=0.01)
        assert row["kept_tokens"] == kept.sum()
        assert math.isclose(row["kept_mean_sq_delta"], (tokens["delta"][kept] ** 2).mean(), rel_tol=1e-9)
        shares.append(row["kept_share"])
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1]


def test_both_methods_are_named_where_the_log_allows_them() -> None:
    with store_of(float32(truth_log(3))) as store:
        rows = rows_of(store, get("estr"), "tau", (0.005, 0.02, 0.1))
    assert {r["method"] for r in rows} == {"exact", "lag_contrast"}
    exact = [r for r in rows if r["method"] == "exact"]
    assert [r["noise_admitted"] for r in exact] == sorted(r["noise_admitted"] for r in exact)
    assert [r["exploration_masked"] for r in exact] == sorted((r["exploration_masked"] for r in exact), reverse=True)


@pytest.mark.parametrize("rule", ["estr", "band", "kpop", "icepop"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_a_threshold_keeps_the_share_that_is_asked_for(rule: str, share: float) -> None:
    with store_of(make_log(4, sequences=40, scale=5.0)) as store:
        found = at_kept_share(store, get(rule), share)
        if found.value is None:
            assert rule == "icepop", "the lower bound alone drops more"
            return
        assert found.kept_share is not None
        assert found.kept_share >= share - 1e-9
        tighter = get(rule).with_parameters({found.parameter: np.nextafter(found.value, -np.inf)})
        row = run(store, {"it": Sweep(tighter, found.parameter, (float(tighter.parameters[found.parameter]),))})
        assert row.results["it"].rows()[0]["kept_share"] <= found.kept_share


def test_the_drop_rate_at_lag_zero() -> None:
    log = float32(truth_log(6))
    tokens = oracles.counted(log)
    zero = tokens["trainer_version"] == tokens["policy_version"]
    with store_of(log) as store:
        found = at_drop_rate(store, get("estr"), 0.02)
    assert found.n == zero.sum()
    assert found.value is not None
    dropped = ~oracles.keep("estr", {k: v[zero] for k, v in tokens.items()}, tau=found.value, eps=0.01)
    assert 0 < dropped.mean() <= 0.02
    assert dropped.mean() > 0.02 - 2 / zero.sum()


def test_open_bounds_step_over_the_score() -> None:
    log = make_log(1, holes=False)
    log["logp_train"] = (log["logp_infer"] - np.tile([0.25, 0.5], len(log["seq_id"]))[: len(log["seq_id"])]).astype(
        np.float32
    )
    with store_of(log) as store:
        closed = at_kept_share(store, Rule("c", "abs(delta) <= c", {"c": 1.0}), 0.3, "c")
        opened = at_kept_share(store, Rule("o", "abs(delta) < c", {"c": 1.0}), 0.3, "c")
    assert closed.kept_share == opened.kept_share
    assert opened.value is not None
    assert closed.value is not None
    assert opened.value > closed.value
    assert closed.note.startswith("equal scores")


def test_families_at_equal_kept_share() -> None:
    with store_of(float32(truth_log(3))) as store:
        grid = fitting_grid(store, store.present(), 6)
        found, rules, kept, errors = equal_share(store, parse_rules("estr,band,kpop"), 0.95, grid)
    assert len(found) == len(rules) == 3
    assert all(abs(r["kept_share"] - 0.95) < 0.005 for r in kept.rows())
    assert errors is not None
    exact = {r["rule"]: r["exploration_masked"] for r in errors.rows() if r["method"] == "exact"}
    assert len(exact) == 3
    # the log has noise and exploration that grow with the entropy alike: a fixed band pays more exploration
    assert exact[rules[0].label] < exact[rules[1].label]


def test_what_cannot_be_told_is_said() -> None:
    log = make_log(2)
    for name in ("policy_version", "trainer_version"):
        del log[name]
    with store_of(log) as store:
        with pytest.raises(MissingColumnError, match="lag 0"):
            at_drop_rate(store, get("estr"), 0.01)
        with pytest.raises(UsageError, match="read off"):
            at_kept_share(store, get("m2po"), 0.9)
        with pytest.raises(UsageError, match="expected more than 0"):
            at_kept_share(store, get("estr"), 0.0)
        rows = rows_of(store, get("estr"), "tau", (1.0,))
        assert rows[0]["method"] == "none"
        assert rows[0]["noise_admitted"] is None
        with pytest.raises(UsageError, match="no parameter 'tao'"):
            rows_of(store, get("estr"), "tao", (1.0,))
    log = float32(truth_log(6, lags=(1, 2)))
    with store_of(log) as store:
        assert at_drop_rate(store, get("estr"), 0.01).value is None


def test_grids() -> None:
    assert parse_grid("0.25:16:log:7") == (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    assert parse_grid("0:1:lin:5") == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert parse_grid("0.1,0.5") == (0.1, 0.5)
    assert len(parse_grid("0.25:16:log")) == 25
    for bad in ("", "1:2", "2:1:lin", "0:1:log", "1,1", "a,b", "1:2:cubic", "1:2:lin:1", "1:2:lin:1000", "nan,1"):
        with pytest.raises(UsageError):
            parse_grid(bad)
