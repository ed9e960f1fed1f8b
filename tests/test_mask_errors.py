"""Noise admitted and exploration masked: against NumPy, and the contrast against the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import MissingColumnError
from estr_diag.rules import Rule, parse_rules
from estr_diag.rules.comparison import compare
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.stats.grid import fitting_grid, quantile_grid
from estr_diag.stats.positions import Strata
from estr_diag.store.database import Store
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays

RULES = parse_rules("none,estr:tau=0.05,icepop:low=0.9:high=1.1,kpop:phi=0.01")


def truth_log(seed: int, sequences: int = 60, lags: tuple[int, ...] = (0, 1, 2)) -> Arrays:
    """A log whose noise and exploration are known: delta = xi + d, d = 0 at lag 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(60, 140, sequences)
    n = int(lengths.sum())
    seq = np.repeat(np.arange(sequences), lengths)
    entropy = np.exp(rng.normal(-1.5, 1.2, n))
    lag = np.repeat(rng.choice(lags, sequences), lengths)
    infer = -entropy * rng.exponential(1.0, n) - 0.7
    xi = rng.normal(0, np.sqrt(0.004 * entropy))
    # A random effect of each sequence: its tokens are correlated.
    effect = np.repeat(rng.lognormal(0, 0.4, sequences), lengths)
    d = np.where(lag > 0, rng.normal(0, np.sqrt(0.01 * lag * entropy)) * effect, 0.0)
    replay = infer + xi
    step = np.full(n, 9)
    return {
        "seq_id": seq,
        "step": step,
        "logp_infer": infer,
        "logp_replay": replay,
        "logp_train": replay + d,
        "entropy": entropy,
        "policy_version": (step - lag).astype(np.int32),
        "trainer_version": step.astype(np.int32),
        "loss_mask": np.ones(n, dtype=bool),
    }


def float32(log: Arrays) -> Arrays:
    return {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in log.items()}


def rows_of(store: Store, rules: tuple[Rule, ...] = RULES, bins: int = 6) -> list[dict[str, Any]]:
    grid = quantile_grid(store, store.present(), bins)
    return run(store, {"it": MaskErrors(rules, grid)}).results["it"].rows()


@pytest.mark.parametrize("by_position", [True, False])
def test_equals_numpy_by_both_methods(by_position: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estr_diag.rules.error_table.judge", lambda *_: Strata(by_position, ""))
    log = float32(truth_log(3))
    tokens = oracles.counted(log)
    with store_of(log) as store:
        grid = quantile_grid(store, store.present(), 6)
        found = {(r["rule"], r["method"]): r for r in run(store, {"it": MaskErrors(RULES, grid)}).results["it"].rows()}
    assert len(found) == 2 * len(RULES)
    edges = 2.0 ** (np.array(grid.cells) / 16)
    bins = np.clip(np.searchsorted(edges, tokens["entropy"], "right"), 1, len(edges) - 1)
    begins = np.searchsorted(tokens["seq_id"], tokens["seq_id"], "left")
    position = np.arange(len(begins)) - begins
    cells = bins * 64 + np.floor(np.log2(position + 1)).astype(int) * by_position
    lag, delta = tokens["trainer_version"] - tokens["policy_version"], tokens["delta"]
    replay = tokens["logp_replay"].astype(np.float64)
    xi, d = replay - tokens["logp_infer"], tokens["logp_train"] - replay
    for rule in RULES:
        kept = oracles.keep(rule.name, tokens, **{k: float(v) for k, v in rule.parameters.items()})
        exact = found[rule.label, "exact"]
        assert math.isclose(exact["noise_admitted"], (xi**2)[kept].sum() / (xi**2).sum(), rel_tol=1e-9)
        assert math.isclose(
            exact["exploration_masked"], (d**2)[~kept].sum() / (d**2).sum(), rel_tol=1e-9, abs_tol=1e-12
        )
        noise = noise_kept = total = masked = tokens_masked = moved = 0.0
        for cell in np.unique(cells):
            at, zero, later = cells == cell, (cells == cell) & (lag == 0), (cells == cell) & (lag > 0)
            if not zero.any():
                continue
            noise += at.sum() * (delta**2)[zero].mean()
            noise_kept += at.sum() * (delta**2 * kept)[zero].mean()
            total += later.sum() * ((delta**2)[later].mean() - (delta**2)[zero].mean())
            masked += later.sum() * ((delta**2 * ~kept)[later].mean() - (delta**2 * ~kept)[zero].mean())
            tokens_masked += later.sum() * ((~kept)[later].mean() - (~kept)[zero].mean())
            moved += later.sum()
        contrast = found[rule.label, "lag_contrast"]
        for name, value in (
            ("noise_admitted", noise_kept / noise),
            ("exploration_masked", masked / total),
            ("exploration_masked_tokens", tokens_masked / moved),
        ):
            assert math.isclose(contrast[name], value, rel_tol=1e-9, abs_tol=1e-12), (rule.label, name)
            assert contrast[f"{name}_low"] <= value + 1e-12
            assert value <= contrast[f"{name}_high"] + 1e-12


@pytest.mark.slow
def test_the_contrast_holds_what_it_estimates_and_bounds_the_exact_errors() -> None:
    """What noise alone would have admitted, and what is masked beyond it; both at least the exact shares."""
    inside: dict[str, list[bool]] = {"noise_admitted": [], "exploration_masked": []}
    above: list[float] = []
    rules = parse_rules("estr:tau=0.015,icepop:low=0.9:high=1.1,kpop:phi=0.003")
    for seed in range(30):
        log = float32(truth_log(seed, sequences=120))
        tokens = oracles.counted(log)
        with store_of(log) as store:
            rows = {(r["rule"], r["method"]): r for r in rows_of(store, rules)}
        replay = tokens["logp_replay"].astype(np.float64)
        xi = replay - tokens["logp_infer"]
        alone = {**tokens, "delta": xi, "logp_train": replay}
        later = tokens["trainer_version"] > tokens["policy_version"]
        for rule in rules:
            parameters = {k: float(v) for k, v in rule.parameters.items()}
            kept, kept_alone = (oracles.keep(rule.name, t, **parameters) for t in (tokens, alone))
            square = tokens["delta"] ** 2
            masked = (square * ~kept)[later].sum() - (xi**2 * ~kept_alone)[later].sum()
            truth = {
                "noise_admitted": (xi**2)[kept_alone].sum() / (xi**2).sum(),
                "exploration_masked": masked / (square[later].sum() - (xi**2)[later].sum()),
            }
            exact, contrast = rows[rule.label, "exact"], rows[rule.label, "lag_contrast"]
            for name, value in truth.items():
                inside[name].append(contrast[f"{name}_low"] <= value <= contrast[f"{name}_high"])
                above.append(contrast[name] - exact[name])
    for name, hits in inside.items():
        assert np.mean(hits) >= 0.9, (name, np.mean(hits))
    assert np.mean(np.array(above) > 0) > 0.95


def test_keeping_all_has_no_error_but_noise() -> None:
    with store_of(float32(truth_log(5))) as store:
        for row in rows_of(store, parse_rules("none")):
            assert row["noise_admitted"] == 1
            assert row["exploration_masked"] == 0


def test_a_log_without_exploration_cannot_tell_what_is_masked_of_it() -> None:
    log = truth_log(7)
    log["logp_train"] = log["logp_replay"]
    del log["logp_replay"]
    with store_of(float32(log)) as store:
        rows = rows_of(store, parse_rules("estr:tau=0.01"))
    assert [r["method"] for r in rows] == ["lag_contrast"]
    assert rows[0]["exploration_masked"] is None, "the whole is not above 0, so no share of it is told"
    assert 0 < rows[0]["noise_admitted"] < 1


def test_no_lag_zero_is_said() -> None:
    log = truth_log(7, lags=(1, 2))
    del log["logp_replay"]
    with store_of(float32(log)) as store:
        found = compare(store, RULES, fitting_grid(store, store.present()))
    assert found.errors is not None
    assert len(found.errors) == 0
    assert any("no token has lag 0" in note for note in found.errors.notes)
    assert any("exploration masked" in e["what"] for e in found.to_json()["not_computed"])


def test_undecided_tokens_take_no_part() -> None:
    log = float32(truth_log(9))
    log["advantage"] = np.where(np.arange(len(log["seq_id"])) % 3 == 0, np.nan, 1.0).astype(np.float32)
    rule = Rule("signed", "advantage > 0 and abs(delta) <= 0.05")
    with store_of(log) as store:
        rows = {r["method"]: r for r in rows_of(store, (rule,))}
    tokens = oracles.counted(log)
    decided = np.isfinite(tokens["advantage"])
    kept = decided & (np.abs(tokens["delta"]) <= 0.05)
    xi = tokens["logp_replay"].astype(np.float64) - tokens["logp_infer"]
    assert math.isclose(rows["exact"]["noise_admitted"], (xi**2)[kept].sum() / (xi**2)[decided].sum(), rel_tol=1e-9)
    assert rows["lag_contrast"]["coverage"] > 0.99, "few cells have no lag-0 token at their position"


def test_a_log_without_entropy_says_what_is_not_computed() -> None:
    log = make_log(4)
    del log["entropy"]
    with store_of(log) as store:
        found = compare(store, parse_rules("icepop,estr"))
        document = found.to_json()
    assert [r["name"] for r in document["rules"]] == ["icepop"]
    whats = " ".join(e["what"] for e in document["not_computed"])
    assert "estr" in whats
    assert "noise admitted" in whats
    with store_of({k: v for k, v in log.items() if k != "logp_train"}) as store, pytest.raises(MissingColumnError):
        compare(store, RULES)
