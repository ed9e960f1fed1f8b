"""Sweeps: NumPy, one scan against a bit a value, and thresholds chosen by meaning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.rules import Rule, get, parse_rules
from estr_diag.rules.agreement import Agreement
from estr_diag.rules.decisions import Decisions
from estr_diag.rules.ladder import Ladder
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.rules.replay import Replay
from estr_diag.rules.score import score_of
from estr_diag.rules.sweep import sweep
from estr_diag.rules.sweep_values import around, over_shares, parse_grid
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
    (Rule("single", "abs(delta) < c", {"c": 0.1}, dtype="float32"), "c", (0.0, 0.05, 0.1, 0.3)),
    (Rule("single_log", "abs(delta) <= ln(c)", {"c": 2.0}, dtype="float32"), "c", (1.01, 1.1, 1.5)),
    (Rule("single_ratio", "ratio >= low and entropy > 0.01", {"low": 0.5}, dtype="float32"), "low", (0.5, 0.9, 0.99)),
    (get("tis"), "high", (0.5, 1.0, 2.0)),
]


def rows_of(store: Store, rule: Rule, parameter: str, values: tuple[float, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = sweep(
        store, rule, parameter, values, fitting_grid(store, store.present(), 4)
    ).table.to_pylist()
    return rows


def close(value: float | None) -> Any:
    """Equal but for the order in which threads add up."""
    return None if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)


def moved(rule: Rule, parameter: str, value: float) -> Rule:
    return rule.with_parameters({parameter: value})


def replayed(store: Store, rule: Rule) -> dict[str, Any]:
    row: dict[str, Any] = run(store, {"it": Replay((rule,))}).results["it"].table.to_pylist()[0]
    return row


@pytest.mark.parametrize(("rule", "parameter", "values"), SWEEPS, ids=[f"{r.name}:{p}" for r, p, _ in SWEEPS])
def test_a_sweep_is_the_rule_at_each_value(
    rule: Rule, parameter: str, values: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(make_log(8, sequences=30, scale=5.0)) as store:
        fast = rows_of(store, rule, parameter, values)
        direct = [replayed(store, moved(rule, parameter, value)) for value in values]
        monkeypatch.setattr(Ladder, "of", lambda *_: None)
        slow = rows_of(store, rule, parameter, values)
    for row, other in zip(fast, slow, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == (other[name] if isinstance(value, str) else close(other[name])), name
    for row, one in zip(fast, direct, strict=True):
        for name in ("rule", "n", "kept_tokens", "masked_tokens", "undecided_tokens"):
            assert row[name] == one[name], name
        for name in ("kept_share", "kept_share_se", "kept_mean_sq_delta", "kept_advantage_share", "weight_mean", "ess"):
            assert row[name] == close(one[name]), name
        assert row["kept_tokens"] + row["masked_tokens"] + row["undecided_tokens"] == row["n"]


def test_a_float32_rule_is_swept_in_float32() -> None:
    """0.1 is no float32: a score equal to its rounding is kept by <= and dropped by <, as the rule itself does."""
    log = make_log(3, holes=False)
    tie = np.float32(0.1)
    log["logp_infer"] = np.zeros(len(log["seq_id"]), dtype=np.float32)
    log["logp_train"] = np.where(np.arange(len(log["seq_id"])) % 3 == 0, -tie, np.float32(-0.5)).astype(np.float32)
    tied = int((oracles.counted(log)["logp_train"] == -tie).sum())
    assert tied > 10
    with store_of(log) as store:
        for text, kept in (("abs(delta) <= c", tied), ("abs(delta) < c", 0)):
            rule = Rule("r", text, {"c": 1.0}, dtype="float32")
            rows = rows_of(store, rule, "c", (0.05, 0.1))
            assert (
                [r["kept_tokens"] for r in rows]
                == [0, kept]
                == [0, replayed(store, moved(rule, "c", 0.1))["kept_tokens"]]
            )


def test_errors_by_sequence_in_a_log_of_many_sequences() -> None:
    with store_of(make_log(5, sequences=700, scale=5.0)) as store:
        row = rows_of(store, get("estr"), "tau", (0.2,))[0]
        exact = replayed(store, get("estr").with_parameters({"tau": 0.2}))["kept_share_se"]
    assert row["kept_share_se"] == pytest.approx(exact, rel=1e-12)


def test_statistics_about_different_rules_share_a_run() -> None:
    a = parse_rules("estr:tau=0.1,tis")
    b = parse_rules("tis:high=0.5,icepop,m2po")
    with store_of(make_log(5, sequences=20, scale=5.0)) as store:
        grid = fitting_grid(store, store.present(), 4)
        together = run(
            store,
            {f"{what.__name__}{i}": what(rules) for i, rules in enumerate((a, b)) for what in (Replay, Agreement)}
            | {f"errors{i}": MaskErrors(rules, grid) for i, rules in enumerate((a, b))},
        ).results
        for i, rules in enumerate((a, b)):
            assert together[f"Replay{i}"].rows() == run(store, {"it": Replay(rules)}).results["it"].rows()
            assert together[f"Agreement{i}"].rows() == run(store, {"it": Agreement(rules)}).results["it"].rows()
            assert together[f"errors{i}"].rows() == run(store, {"it": MaskErrors(rules, grid)}).results["it"].rows()


def test_more_values_than_one_scan_takes() -> None:
    values = tuple(float(v) for v in np.geomspace(0.001, 10, 130))
    with store_of(make_log(5, sequences=20, scale=5.0)) as store:
        rows = [r for r in rows_of(store, get("estr"), "tau", values) if r["method"] == "lag_contrast"]
        some = [replayed(store, moved(get("estr"), "tau", values[i]))["kept_tokens"] for i in (0, 59, 60, 129)]
    assert [rows[i]["value"] for i in (0, 59, 60, 129)] == [values[i] for i in (0, 59, 60, 129)]
    assert [rows[i]["kept_tokens"] for i in (0, 59, 60, 129)] == some


def test_rules_that_are_no_ladder_are_decided_one_by_one() -> None:
    for text in (
        "estr:tau=1,estr:tau=2,icepop",
        "icepop:low=0.5:high=2,icepop:low=0.4:high=3",
        "estr",
        "band,kpop",
        "kpop,band",
    ):
        assert Decisions.of(parse_rules(text), PRESENT).ladder is None
    assert Decisions.of(parse_rules("estr:tau=1,estr:tau=2"), PRESENT).ladder is not None


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


def untied(seed: int) -> dict[str, Any]:
    """A log on which no two tokens have the same delta (others have exact zeros)."""
    log = make_log(seed, sequences=12, scale=5.0, holes=False)
    rng = np.random.default_rng(seed)
    log["logp_train"] = (log["logp_train"] + rng.normal(0, 1e-3, len(log["seq_id"]))).astype(np.float32)
    return log


def a_bit_tighter(rule: Rule, value: float) -> float:
    dtype = np.float32 if rule.dtype == "float32" else np.float64
    tight = math.inf if rule is LARGE else -math.inf
    # Some steps: next to a bound that is compared by its logarithm, one may change nothing.
    at = dtype(value)
    for _ in range(16):
        at = np.nextafter(at, dtype(tight))
    return float(at)


SINGLE = Rule("single", "abs(delta) < c", {"c": 0.1}, dtype="float32", score="c")
SINGLE_LOG = Rule("single_log", "abs(delta) < ln(c)", {"c": 2.0}, dtype="float32", score="c")
LARGE = Rule("large", "p_infer > c", {"c": 0.1}, score="c")


@pytest.mark.parametrize(
    "rule", [get("estr"), get("band"), get("kpop"), SINGLE, SINGLE_LOG, LARGE], ids=lambda r: r.name
)
def test_a_threshold_keeps_exactly_the_share_that_is_asked_for(rule: Rule) -> None:
    """Every k / n of a log without equal scores is met to the token: --match asks for such shares."""
    with store_of(untied(4)) as store:
        n = replayed(store, rule)["kept_tokens"] + replayed(store, rule)["masked_tokens"]
        for k in np.linspace(1, n, 40).astype(int):
            found = at_kept_share(store, rule, int(k) / n)
            assert found.value is not None
            row = replayed(store, moved(rule, found.parameter, found.value))
            assert row["kept_share"] == found.kept_share
            ties = 0 if not found.note else int(found.note.split()[0])
            assert row["kept_tokens"] == k + ties, (k, found)
            assert ties < 3 or rule.name in ("kpop", "large", "single_log"), "scores of its own for each token"
            tighter = replayed(store, moved(rule, found.parameter, a_bit_tighter(rule, found.value)))
            assert tighter["kept_tokens"] < k


def test_shares_that_are_not_of_whole_tokens_round_up() -> None:
    with store_of(untied(4)) as store:
        for share in (1e-9, 0.123456, 0.5, 0.9, 0.97, 0.9999999, 1.0):
            found = at_kept_share(store, get("estr"), share)
            assert found.kept_share is not None
            assert share <= found.kept_share < share + 1 / found.n


def test_a_share_that_the_rest_of_the_rule_drops_is_not_reached() -> None:
    with store_of(make_log(4, sequences=40, scale=5.0)) as store:
        found = at_kept_share(store, get("icepop"), 0.97)
    assert found.value is None
    assert "the rest of the rule" in found.note


@pytest.mark.parametrize("rule", [get("estr"), get("band")], ids=lambda r: r.name)
@pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
def test_bisection_finds_what_the_score_says(rule: Rule, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of(make_log(4, sequences=40, scale=5.0, holes=False)) as store:
        direct = at_kept_share(store, rule, share)
        monkeypatch.setattr("estr_diag.rules.thresholds.score_of", lambda *_: None)
        found = at_kept_share(store, rule, share)
    if found.value is None or direct.value is None or found.note:
        assert direct.value is not None
        low, *_, high = around(rule, rule.score)
        assert not low < direct.value < high, "outside what a bisection looks at, which it says"
        return
    assert found.kept_share == direct.kept_share


def test_a_rule_without_a_score_is_bisected() -> None:
    with store_of(make_log(4, sequences=40, scale=5.0)) as store:
        for rule, share in (("m2po", 0.9), ("veto", 0.7)):
            found = at_kept_share(store, get(rule), share)
            assert found.value is not None
            assert found.kept_share is not None
            assert found.kept_share >= share
            assert found.kept_share < share + 1 / found.n or found.note


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
    assert "tells them apart" in closed.note


def test_families_at_equal_kept_share() -> None:
    with store_of(float32(truth_log(3))) as store:
        grid = fitting_grid(store, store.present(), 6)
        found = equal_share(store, parse_rules("estr,band,kpop,icepop:high=1.0001:low=0.9999"), 0.95, grid)
    assert len(found.thresholds) == 4
    assert len(found.rules) == 3
    assert [t.value is None for t in found.thresholds] == [False, False, False, True]
    assert "not reached" in found.thresholds[3].note
    assert all(0.95 <= r["kept_share"] < 0.955 for r in found.kept.rows())
    exact = {r["rule"]: r["exploration_masked"] for r in found.errors.rows() if r["method"] == "exact"}
    assert len(exact) == 3
    # the log has noise and exploration that grow with the entropy alike: a fixed band pays more exploration
    assert exact[found.rules[0].label] < exact[found.rules[1].label]


def test_a_family_that_the_log_does_not_allow_says_what_it_lacks() -> None:
    log = make_log(2)
    del log["entropy"]
    with store_of(log) as store:
        found = equal_share(store, parse_rules("estr,band"), 0.9, None)
        assert found.thresholds[0].value is None
        assert "entropy" in found.thresholds[0].note
        assert [rule.name for rule in found.rules] == ["band"]
        curve = sweep(store, get("band"), "c", (1.1, 2.0))
        for ask in (lambda: over_shares(store, get("estr"), "tau"), lambda: sweep(store, get("estr"), "tau", (1.0,))):
            with pytest.raises(MissingColumnError, match="entropy"):
                ask()
    assert {r["method"] for r in curve.rows()} == {"none"}
    assert any("entropy" in note for note in curve.notes)
    assert not any("log policy_version" in note for note in curve.notes), "the log has versions"


def test_rules_on_the_scale_of_the_log_are_fitted_to_it() -> None:
    rule = Rule("scaled", "delta * delta <= c * scale", {"c": 4.0}, score="c")
    with store_of(make_log(5, sequences=30, scale=5.0)) as store:
        rows = rows_of(store, rule, "c", (1.0, 4.0))
        assert 0 < rows[0]["kept_share"] < rows[1]["kept_share"] < 1
        found = at_kept_share(store, rule, 0.9)
        assert found.value is not None


def test_a_label_reads_back_as_the_same_rule() -> None:
    for value in (0.1, 1 / 3, 1.0000000000000002, 123456789.5, 4.0):
        rule = get("estr").with_parameters({"tau": value})
        assert parse_rules(rule.label)[0].parameters == rule.parameters
    assert get("estr").with_parameters({"tau": 4}).label == "estr:tau=4:eps=0.01"


def test_what_cannot_be_told_is_said() -> None:
    log = make_log(2)
    for name in ("policy_version", "trainer_version"):
        del log[name]
    with store_of(log) as store:
        with pytest.raises(MissingColumnError, match="lag 0"):
            at_drop_rate(store, get("estr"), 0.01)
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


def test_the_default_grid_is_spaced_in_what_is_compared() -> None:
    tau = around(get("estr"), "tau")
    assert tau[0] == pytest.approx(get("estr").parameters["tau"] / 16)
    assert tau[-1] == pytest.approx(get("estr").parameters["tau"] * 16)
    band = around(get("band"), "c")
    c = float(get("band").parameters["c"])
    assert [math.log(v) for v in (band[0], band[-1])] == pytest.approx([math.log(c) / 16, math.log(c) * 16])
    assert len(tau) == len(band) == 25
    with pytest.raises(UsageError, match="--grid"):
        around(get("band").with_parameters({"c": 1}), "c")
    with pytest.raises(UsageError, match="no parameter"):
        around(get("band"), "d")


def test_by_default_a_sweep_looks_where_the_log_tells_values_apart() -> None:
    log = untied(4)
    for rule in (get("estr"), get("band"), LARGE, SINGLE):
        with store_of(log) as store:
            values = over_shares(store, rule, rule.score)
            shares = [r["kept_share"] for r in sweep(store, rule, rule.score, values).rows()]
        assert float(rule.parameters[rule.score]) in values
        assert min(shares) < 0.51
        assert sorted(abs(s - 0.9) for s in shares)[0] < 0.03
        assert len(set(shares)) > 8
    with store_of(log) as store:
        assert over_shares(store, get("m2po"), "c") == around(get("m2po"), "c")
