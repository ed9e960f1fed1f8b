"""Names that depend on a bound: equal to the frameworks' own code, to NumPy, and indifferent to how the log is split."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.errors import UsageError
from estr_diag.measures import MEASURES, measure, side_name, weight_name
from estr_diag.result import Result
from estr_diag.stats.corrections import CORRECTIONS, PARTS, Correction
from estr_diag.stats.explain import explain
from estr_diag.stats.framework_metrics import FrameworkMetrics
from estr_diag.stats.threshold_metrics import ThresholdMetrics
from estr_diag.stats.threshold_names import THRESHOLD_NAMES, threshold_candidates
from estr_diag.store.database import Store
from estr_diag.store.engine import run, scan_query
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays, Floats
from tests.test_aliases import close, full_log, log_of

It = ThresholdMetrics

CASES: list[tuple[str, str, ThresholdMetrics]] = [
    # how the recorded values call a configuration: text before the name, text after it
    ("verl[is=token,2.0,norm=False]:", "", It("verl", "token", "truncate", None, 2.0)),
    ("verl[is=sequence,2.0,norm=False]:", "", It("verl", "sequence", "truncate", None, 2.0)),
    ("verl[is=token,0.5_5.0,norm=False]:", "", It("verl", "token", "mask", 0.5, 5.0)),
    ("verl[is=sequence,0.5_5.0,norm=False]:", "", It("verl", "sequence", "mask", 0.5, 5.0)),
    ("verl[is=token,2.0,norm=True]:", "", It("verl", "token", "truncate", None, 2.0)),
    ("verl[is=sequence,2.0,norm=True]:", "", It("verl", "sequence", "truncate", None, 2.0)),
    ("verl[is=token,0.5_5.0,norm=True]:", "", It("verl", "token", "mask", 0.5, 5.0)),
    ("verl[is=sequence,0.5_5.0,norm=True]:", "", It("verl", "sequence", "mask", 0.5, 5.0)),
    ("trl:", "[token_truncate,0.5,2.0]", It("trl", "token", "truncate", 0.5, 2.0)),
    ("trl:", "[token_truncate,None,3.0]", It("trl", "token", "truncate")),
    ("trl:", "[token_mask,0.5,2.0]", It("trl", "token", "mask", 0.5, 2.0)),
    ("trl:", "[token_mask,None,3.0]", It("trl", "token", "mask")),
    ("trl:", "[sequence_truncate,0.5,2.0]", It("trl", "sequence", "truncate", 0.5, 2.0)),
    ("trl:", "[sequence_truncate,None,3.0]", It("trl", "sequence", "truncate")),
    ("trl:", "[sequence_mask,0.5,2.0]", It("trl", "sequence", "mask", 0.5, 2.0)),
    ("trl:", "[sequence_mask,None,3.0]", It("trl", "sequence", "mask")),
    ("nemo[tis[0,2]]:", "", It("nemo-rl", "token", "truncate")),
    ("nemo[icepop[0.5,2]]:", "", It("nemo-rl", "token", "mask", 0.5, 2)),
    ("nemo[icepop[0.5,5]]:", "", It("nemo-rl", "token", "mask", 0.5, 5)),
    ("nemo[seq-mask-tis[0.99,1.02]]:", "", It("nemo-rl", "sequence", "mask", 0.99, 1.02)),
    ("nemo[seq_logprob_error=1.05]:", "", It("nemo-rl", "sequence", "reject", None, 1.05)),
    ("nemo[seq_logprob_error=2.0]:", "", It("nemo-rl", "sequence", "reject")),
    ("swift[token_truncate=2.0]:", "", It("ms-swift", "token", "truncate")),
    ("swift[token_mask=2.0]:", "", It("ms-swift", "token", "mask")),
    ("swift[sequence_truncate=1.02]:", "", It("ms-swift", "sequence", "truncate", None, 1.02)),
    ("swift[sequence_mask=1.02]:", "", It("ms-swift", "sequence", "mask", None, 1.02)),
    ("skyrl[tis_token[2]]:", "", It("skyrl", "token", "truncate")),
    ("skyrl[tis_sequence[5]]:", "", It("skyrl", "sequence", "truncate")),
    ("skyrl[token_mask[0.5,2]]:", "", It("skyrl", "token", "mask")),
    ("skyrl[product_mask[0.5,2]]:", "", It("skyrl", "sequence", "mask")),
    ("skyrl[geo_mask[0.99,1.01]]:", "", It("skyrl", "geometric", "mask")),
    ("skyrl[geo_mask[0.99,1.02]]:", "", It("skyrl", "geometric", "mask", 0.99, 1.02)),
    ("skyrl[outlier_token[1e-4,100]]:", "", It("skyrl", "token", "reject")),
    ("oi[default_tis[0,2]]:", "", It("open-instruct", "token", "truncate")),
    ("oi[icepop[0.5,2]]:", "", It("open-instruct", "token", "mask")),
    ("slime:", "[tis,0.0,2.0]", It("slime", "token", "truncate")),
    ("slime:", "[icepop,0.5,2.0]", It("slime", "token", "mask", 0.5, 2.0)),
    ("slime:", "[icepop,0.5,5.0]", It("slime", "token", "mask", 0.5, 5.0)),
]  # fmt: skip

NOT_COVERED = {
    r"verl\[is=.*\]:.*/rollout_is_batch_norm_factor": "batch normalisation",
    r"nemo\[seq_log.*\]:masked_correct_pct": "needs the reward of a sequence, which a token log does not have",
    r"nemo\[seq_log.*\]:(max|mean|min)_seq_mult_prob_error": "no threshold: in the alias registry",
    r"skyrl\[.*\]:is_ratio_(std|min)": "over the cells of the padded batch",
    r"oi\[default_tis.*\]:val/rho_drop_.*": "0 by construction: a clamp drops nothing",
    r"oi\[icepop.*\]:val/rho_clipfrac": "0 by construction: a mask clamps nothing",
    r"slime:(tis|tis_abs)\[.*": "before the bounds: in the alias registry",
}
"""Recorded under one of these configurations (or beside them), and not here."""


def values_of(tables: Callable[[ThresholdMetrics], Result], statistic: ThresholdMetrics) -> dict[str, float | None]:
    rows = tables(statistic).table.to_pylist()
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row["value"] for row in rows}


def over(store: Store, statistic: ThresholdMetrics, sources: Mapping[str, tuple[str, str]]) -> Result:
    """The statistic over one or more pairs of tables (tokens, sequences), merged as the shards of one log."""
    present = frozenset(store.column_counts())
    tables = {}
    for request in statistic.requests(present):
        queries = [scan_query([request], present, *pair) for pair in sources.values()]
        table = f"merged_{request.scan}"
        union = " union all by name ".join(f"select * from ({query})" for query in queries)
        store.connection.execute(f"create or replace temp table {table} as {union}")
        tables[request.scan] = table
    return statistic.finish(Result("it", store.table(statistic.merge(tables, present))))


@pytest.fixture(scope="module")
def given_log(data: Path) -> Iterator[Store]:
    """The log that the frameworks' code was run on, in the double precision that it was given.

    A log stores float32 as trainers do, and boundary cases (a ratio of exactly 0.5 or 2) are planted in
    double: in float32 they fall on either side. So the values are held against a float64 table.
    """
    arrays = log_of(data)
    with store_of(arrays) as store:
        n = len(arrays["seq_id"])
        frame = pa.table({**arrays, "pos": np.arange(n), "step": np.zeros(n, dtype=np.int32)})
        store.connection.register("frame", frame)
        store.connection.execute("create temp table given as select * from frame")
        yield store


@pytest.mark.parametrize(("before", "after", "statistic"), CASES, ids=[a + b for a, b, _ in CASES])
def test_equals_the_frameworks_own_code(
    given_log: Store, data: Path, before: str, after: str, statistic: ThresholdMetrics
) -> None:
    recorded = json.loads((data / "oracle" / "synthetic.float64.json").read_text())
    found = values_of(lambda it: over(given_log, it, {"all": ("given", "sequences")}), statistic)
    assert found
    for name, value in found.items():
        expected = recorded[f"{before}{name.removeprefix('rollout_correction/')}{after}"]
        close(value, expected, rel=2e-6, context=f"{before}{name}{after}")


def test_in_float32_only_tokens_on_a_bound_move(given_log: Store) -> None:
    moved = 0
    for _, _, statistic in CASES:
        double = values_of(lambda it: over(given_log, it, {"all": ("given", "sequences")}), statistic)
        stored = values_of(lambda it: run(given_log, {"it": it}).results["it"], statistic)
        for name, value in stored.items():
            other = double[name]
            assert value is not None
            assert other is not None
            if not math.isclose(value, other, rel_tol=2e-6, abs_tol=1e-12):
                moved += 1
                assert statistic.level == "token", f"{statistic} {name}: no sequence lies on a bound"
                if name.endswith(("frac", "fraction_high", "fraction_low", "oob_ratio", "mask_ratio")):
                    assert abs(value - other) < 2.5 / 1521, f"{statistic} {name}: two tokens lie on bounds"
    assert moved > 0, "the table in double precision is not needed"


def test_every_recorded_name_of_these_configurations_is_covered_or_named_as_not(data: Path) -> None:
    recorded = json.loads((data / "oracle" / "synthetic.float64.json").read_text())
    names = {name for name, value in recorded.items() if not isinstance(value, dict | list)}
    mine = r"(verl\[is=|trl:sampling/importance|nemo\[(tis|icepop|seq)|swift\[(token|sequence)_|slime:tis|oi\[(default|icepop)).*"
    skyrl = r"skyrl\[(tis|token_mask|product|geo|outlier).*"
    there = {name for name in names if re.fullmatch(f"{mine}|{skyrl}", name)}
    covered = {
        f"{before}{entry.name.removeprefix('rollout_correction/')}{after}"
        for before, after, statistic in CASES
        for entry in statistic.names
    }
    assert len(there & covered) >= 180
    assert {statistic.correction for _, _, statistic in CASES} == set(CORRECTIONS), "a correction is not executed"
    rest = {name for name in there - covered if not any(re.fullmatch(p, name) for p in NOT_COVERED)}
    assert not rest, sorted(rest)
    for pattern in NOT_COVERED:
        assert any(re.fullmatch(pattern, name) for name in there), f"{pattern} names nothing any more"
        assert not any(re.fullmatch(pattern, name) for name in covered), pattern


# The same numbers in NumPy, from the definitions: arrays of tokens, no sums by sequence.


def sequence_sums(t: Arrays, values: Floats) -> Floats:
    _, at = np.unique(t["seq_id"], return_inverse=True)
    return np.asarray(np.bincount(at, weights=values), dtype=np.float64)


def twin(statistic: ThresholdMetrics, t: Arrays, n_logged: int) -> dict[str, float | None]:
    """Every name of a correction; `n_logged` counts sequences without counted tokens too."""
    low, high = statistic.bounds
    kind = (statistic.framework, statistic.level)
    lo, lower = low or 0.0, 1 / high if low is None else low
    d, (_, at, n) = t["delta"], np.unique(t["seq_id"], return_inverse=True, return_counts=True)
    empty = n_logged - len(n)
    total = sequence_sums(t, d)
    geometric = statistic.level == "geometric" or kind in (("ms-swift", "sequence"), ("nemo-rl", "sequence"))
    log = total / n if geometric else total
    clip: Callable[[Floats], Floats] = (
        (lambda x: np.clip(x, -20, 20)) if statistic.framework in ("verl", "ms-swift", "skyrl") else np.asarray
    )
    token, sequence = np.exp(clip(d)), np.exp(clip(log))
    decided = token if statistic.level == "token" else sequence[at]

    def bound(x: Floats, own: Floats) -> Floats:
        return np.clip(own, lo, high) if statistic.mode == "truncate" else np.where((x < lo) | (x > high), 0, own)

    own = token if kind in (("ms-swift", "sequence"), ("nemo-rl", "sequence")) and statistic.mode == "mask" else decided
    w = bound(decided, own)
    all_sequences = np.concatenate([sequence, np.ones(empty)])
    all_logs = np.concatenate([log, np.zeros(empty)])
    rows = np.concatenate([sequence_sums(t, w) / n, np.zeros(empty)])
    rows_before = np.concatenate([sequence_sums(t, decided) / n, np.zeros(empty)])
    outside = (decided < lo) | (decided > high)
    out: dict[str, Any] = {}
    if statistic.framework == "verl":
        at_name = "rollout_corr/rollout_is_"
        by_token = statistic.level == "token"
        out = {
            "mean": w.mean(), "std": np.std(w), "eff_sample_size": w.mean() ** 2 / np.mean(w**2) if w.any() else None,
            "max": w.max() if by_token else np.exp(min(all_logs.max(), 20)),
            "min": w.min() if by_token else np.exp(all_logs.min()),
            "ratio_fraction_high": np.mean(token > high) if by_token else np.mean(all_logs > np.log(high)),
            "ratio_fraction_low": np.mean(token < lower) if by_token else np.mean(all_logs < np.log(lower)),
            "seq_mean": rows.mean(), "seq_std": np.std(rows, ddof=1) if len(rows) > 1 else 0.0, "seq_max": rows.max(),
            "seq_min": rows.min(), "seq_max_deviation": np.abs(rows - 1).max(),
            "seq_fraction_high": np.mean(rows_before > high), "seq_fraction_low": np.mean(rows_before < lower),
        }  # fmt: skip
        out |= {"oob_ratio": outside.mean()} if statistic.mode == "mask" else {}
        out = {at_name + name: value for name, value in out.items()}
    elif statistic.framework == "trl":
        x = w if statistic.level == "token" else bound(all_sequences, all_sequences)
        out = {f"sampling/importance_sampling_ratio/{word}": getattr(x, word)() for word in ("min", "mean", "max")}
    elif statistic.framework == "nemo-rl" and statistic.mode == "reject":
        error = sequence_sums(t, np.exp(np.abs(d))) / n
        kept = error[error <= high]
        out = {f"{word}_seq_mult_prob_error_after_mask": getattr(kept, word)() if len(kept) else None for word in ("max", "mean", "min")}  # fmt: skip
        out["num_masked_seqs"] = np.count_nonzero(error > high)
    elif statistic.framework == "nemo-rl":
        oob = outside if statistic.level == "token" else (sequence < lo) | (sequence > high)
        oob = token > high if statistic.mode == "truncate" else oob
        out = {"sampling_importance_ratio": w.mean(), "is_oob_ratio": oob.mean()}
    elif statistic.framework == "ms-swift":
        raised = np.clip(w, 1 / high, high)
        cut = np.mean(token > high) if statistic.level == "token" else np.mean(all_sequences > high)
        out = {"is_weight_mean": w.mean(), "ess": raised.mean() ** 2 / np.mean(raised**2), "clipped_frac": cut}
        out = {f"rollout_correction/{name}": value for name, value in out.items()}
    elif statistic.framework == "open-instruct":
        out = {"val/rho_weight": w.mean()}
        if statistic.mode == "truncate":
            out["val/rho_clipfrac"] = outside.mean()
        else:
            out["val/rho_drop_frac"] = outside.mean()
            out["val/rho_drop_high_frac"], out["val/rho_drop_low_frac"] = np.mean(token > high), np.mean(token < lo)
    elif statistic.framework == "slime":
        out = {"tis_clipfrac": (sequence_sums(t, outside.astype(float)) / n).sum() / n_logged}
    elif statistic.framework == "skyrl":
        out = {"is_ratio_mean": token.mean(), "is_ratio_max": token.max()}
        if statistic.mode == "reject":
            high_rows, low_rows = (sequence_sums(t, side.astype(float)) > 0 for side in (token > high, token < lo))
            out["outlier_seq_masked_ratio"] = (high_rows | low_rows).sum() / n_logged
            out["outlier_seq_over_high_ratio"] = high_rows.sum() / n_logged
            out["outlier_seq_under_low_ratio"] = low_rows.sum() / n_logged
        elif statistic.mode == "truncate":
            name = "tis_token_clip_high_ratio" if statistic.level == "token" else "tis_seq_clip_high_ratio"
            out[name] = np.mean((token if statistic.level == "token" else all_sequences) > high)
        elif statistic.level == "token":
            out["token_mask_ratio"] = outside.mean()
        else:
            high_rows, low_rows = all_sequences > high, all_sequences < lo
            prefix = "geo" if statistic.level == "geometric" else "product"
            out[f"{prefix}_sequence_mask_masked_ratio"] = np.mean(high_rows | low_rows)
            out[f"{prefix}_sequence_mask_over_high_ratio"] = np.mean(high_rows)
            out[f"{prefix}_sequence_mask_under_low_ratio"] = np.mean(low_rows)
    return {name: None if value is None else float(value) for name, value in out.items()}


def statistic_of(correction: Correction, low: float | None = None, high: float | None = None) -> ThresholdMetrics:
    low = low if "low" in correction.bounds else None
    return ThresholdMetrics(correction.framework, correction.level, correction.mode, low, high)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    low=st.floats(0.05, 0.999),
    high=st.floats(1.0001, 4),
    scale=st.sampled_from([1.0, 5.0]),
)
def test_every_name_equals_numpy(seed: int, low: float, high: float, scale: float) -> None:
    log = full_log(seed)
    log["logp_train"] = (log["logp_infer"] + scale * (log["logp_train"] - log["logp_infer"])).astype(np.float32)
    t = oracles.counted(log)
    with store_of(log) as store:
        for correction in CORRECTIONS:
            statistic = statistic_of(correction, low, high)
            found = values_of(lambda it: run(store, {"it": it}).results["it"], statistic)
            expected = twin(statistic, t, 8)
            assert set(found) == set(expected) == {entry.name for entry in statistic.names}
            for name, value in found.items():
                # a variance from sums cancels: its root is held to half the digits
                rel = 1e-6 if name.endswith("rollout_is_std") else 1e-9
                other = expected[name]
                if name.endswith("rollout_is_std") and other is not None and other < 1e-6:
                    assert value is not None
                    assert value < 1e-6
                else:
                    close(value, other, rel=rel, context=f"{correction.key} {low} {high} {name}")


def test_a_bound_changes_what_depends_on_it() -> None:
    with store_of(make_log(4, scale=20.0, sequences=20)) as store:
        for correction in CORRECTIONS:
            tight, loose = (
                values_of(lambda it: run(store, {"it": it}).results["it"], statistic_of(correction, low, high))
                for low, high in ((0.9, 1.01), (0.05, 6.0))
            )
            stays = {name for name in tight if tight[name] == loose[name]}
            # before any bound: SkyRL's ratio and verl's extremes of sequences; a least weight of 0 or of a token below both
            free = {name for name in tight if name.endswith(("is_ratio_mean", "is_ratio_max", "_min", "/min", "min_seq_mult_prob_error_after_mask"))}  # fmt: skip
            free |= {"rollout_corr/rollout_is_max"} if correction.level == "sequence" else set()
            assert not stays - free - {"rollout_corr/rollout_is_seq_max_deviation"}, correction.key


@pytest.mark.parametrize("by", ["overall", "step"])
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_split_merges_to_the_whole(by: Any, cut: int) -> None:
    with store_of(full_log(cut)) as store:
        at = store.rows(f"select min(seq_id) + {cut} as s from sequences")[0]["s"]
        pairs = {}
        for name, condition in (("a", f"seq_id < {at}"), ("b", f"seq_id >= {at}")):
            for table in ("tokens", "sequences"):
                store.connection.execute(f"create temp table {table}_{name} as select * from {table} where {condition}")
            pairs[name] = (f"tokens_{name}", f"sequences_{name}")
        for correction in CORRECTIONS:
            statistic = ThresholdMetrics(*correction.key, by=by)
            parts = over(store, statistic, pairs).table.to_pylist()
            whole = run(store, {"it": statistic}).results["it"].table.to_pylist()
            for part, row in zip(parts, whole, strict=True):
                rel = 1e-6 if row["name"].endswith("rollout_is_std") else 1e-9
                close(part.pop("value"), row.pop("value"), rel=rel, context=f"{correction.key} {row}")
                assert part == row


def test_by_step_equals_a_log_of_that_step_alone() -> None:
    log = full_log(3)
    steps = np.unique(log["step"]).tolist()
    assert len(steps) == 2
    for correction in CORRECTIONS:
        with store_of(log) as store:
            rows = run(store, {"it": ThresholdMetrics(*correction.key, by="step")}).results["it"].table.to_pylist()
        for step in steps:
            with store_of({name: values[log["step"] == step] for name, values in log.items()}) as store:
                alone = run(store, {"it": ThresholdMetrics(*correction.key)}).results["it"].table.to_pylist()
            for row, other in zip([r for r in rows if r["step"] == step], alone, strict=True):
                close(row["value"], other["value"], context=f"{correction.key} {step} {row['name']}")
                assert row["n_logged"] == other["n_logged"]


@pytest.mark.parametrize("case", ["one token", "all masked", "no gap", "plus 800", "minus 800", "one sequence"])
def test_degenerate_logs_give_a_value_or_none(case: str) -> None:
    n = 1 if case == "one token" else 5
    gap = {"no gap": 0.0, "plus 800": 800.0, "minus 800": -800.0}.get(case, 0.1)
    log = {name: values[:n] for name, values in full_log(1).items()}
    base = np.full(n, -801.0, dtype=np.float32)
    log |= {"logp_infer": base, "logp_train": (base + gap).astype(np.float32)}
    log |= {"loss_mask": np.full(n, case != "all masked"), "seq_id": np.zeros(n, dtype=np.int64)}
    with store_of(log) as store:
        for correction in CORRECTIONS:
            result = run(store, {"it": ThresholdMetrics(*correction.key)}).results["it"]
            for row in result.table.to_pylist():
                value = row["value"]
                assert value is None or not math.isnan(value), row
                if case == "all masked":
                    assert value is None, row
                if case == "no gap" and row["name"].endswith(("_mean", "/mean", "ess", "size")):
                    assert value == 1, row


def test_an_empty_log_has_a_row_for_each_name() -> None:
    log = full_log(1)
    log["loss_mask"][:] = False
    with store_of(log) as store:
        rows = run(store, {"it": ThresholdMetrics("verl")}).results["it"].rows()
    assert len(rows) == 14
    assert all(row["value"] is None and row["n_tokens"] == 0 and row["n_logged"] == 8 for row in rows)


def test_fused_statistics_keep_their_numbers() -> None:
    statistics: dict[str, Any] = {str(c.key): ThresholdMetrics(*c.key) for c in CORRECTIONS}
    statistics |= {"tighter": ThresholdMetrics("verl", high=1.5), "by": ThresholdMetrics("trl", by="step")}
    statistics |= {"theirs": FrameworkMetrics()}
    with store_of(full_log(2)) as store:
        together = run(store, statistics).results
        for label, statistic in statistics.items():
            alone = run(store, {"it": statistic}).results["it"].table.to_pylist()
            for row, other in zip(together[label].table.to_pylist(), alone, strict=True):
                close(row["value"], other["value"], context=f"{label} {row['name']}")


def test_the_result_says_which_bounds() -> None:
    with store_of(full_log(1)) as store:
        result = run(store, {"it": ThresholdMetrics("verl", "token", "truncate")}).results["it"]
    assert result.parameters["high"] == 2
    assert {(row["low"], row["high"]) for row in result.table.to_pylist()} == {(None, 2.0)}
    assert "rollout_is_threshold" in result.notes[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("velr",), "did you mean 'verl'"),
        (("verl", "geometric"), "no correction 'geometric truncate'; it has token truncate"),
        (("verl", "token", "truncate", 0.5, 2.0), "takes no lower bound"),
        (("trl", "token", "mask", 3.0, 2.0), "low <= high"),
        (("trl", "token", "mask", None, math.nan), "low <= high"),
        (("trl", "token", "mask", None, math.inf), "up to 1e"),
        (("trl", "token", "mask", None, 0.0), "low <= high"),
    ],
)
def test_what_a_framework_cannot_be_asked(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ThresholdMetrics(*arguments)


def test_a_measure_has_its_bounds_in_its_name() -> None:
    a, b = (weight_name("sum", "c20", "mask", 0.1, high) for high in (2.0, 2.0 + 1e-15))
    assert a != b
    for name in (a, b, weight_name("max", "raw", "truncate", 1e-7, 1e9), side_name("below", "raw", 1e-5)):
        found = measure(name)
        assert found is not None
        assert found.name == name
        assert name.isidentifier()
        assert name not in MEASURES
    assert weight_name("sum", "c20", "truncate", 0, 2, 0.5) == weight_name("sum", "c20", "truncate", 0.5, 2)
    for wrong in ("sum_weight_c20_mask_x_2p0_0p0", "n_above_raw_", "n_above_c20_2pp0", "n_ratio_beyond_x", "nothing"):
        assert measure(wrong) is None
    with pytest.raises(ValueError, match="low <= high"):
        weight_name("sum", "c20", "mask", 3.0, 2.0)
    with pytest.raises(ValueError, match="a bound"):
        side_name("above", "c20", -1.0)


def test_the_registry_is_sound() -> None:
    assert len({c.key for c in CORRECTIONS}) == len(CORRECTIONS)
    for entry in THRESHOLD_NAMES:
        assert len(entry.corrections()) == len(entry.under), f"{entry.key} is under a correction that does not exist"
        assert set(re.findall(r"\{(\w+)\}", entry.sql)) <= set(PARTS), entry.key
    for correction in CORRECTIONS:
        names = [entry.name for entry in ThresholdMetrics(*correction.key).names]
        assert names
        assert len(names) == len(set(names)), f"{correction.key} has a name twice"
        assert {c.key for e in THRESHOLD_NAMES for c in e.corrections()} >= {correction.key}


@pytest.mark.parametrize("key", sorted({entry.key for entry in THRESHOLD_NAMES}))
def test_every_name_is_explained(key: str) -> None:
    told = explain(key)
    assert told.name == key
    assert told.kind == "alias"
    assert told.formula
    assert told.meaning
    assert "depends on the trainer's bounds" in told.differs
    assert "high (default" in told.differs
    assert set(told.needs or {}) >= {"logp_infer", "logp_train"}


def test_short_names_and_misspelt_ones() -> None:
    assert explain("rollout_corr/rollout_is_mean").name == "verl:rollout_corr/rollout_is_mean"
    assert "rollout_is_threshold" in explain("rollout_is_mean").differs
    assert explain("clipped_frac").name == "ms-swift:rollout_correction/clipped_frac"
    with pytest.raises(UsageError, match=r"ambiguous.*pipelinerl:rl/ess.*ms-swift:rollout_correction/ess"):
        explain("ess")
    with pytest.raises(UsageError, match=r"did you mean '.*rollout_is_mean'"):
        explain("rollout_corr/rollout_is_maen")
    told = explain("sampling_importance_ratio")
    assert "d not clamped" in told.differs, "without a correction it is the plain ratio"
    assert "icepop" in told.differs
    assert not threshold_candidates("nothing at all")
