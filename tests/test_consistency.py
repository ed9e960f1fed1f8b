"""Consistency metrics: equal to NumPy, to the frameworks' own code, and indifferent to how the log is split."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.schema import quote_ident
from estr_diag.stats.consistency import By, Consistency
from estr_diag.stats.metrics import BY_NAME, METRICS, YARDSTICKS
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, run, scan_query
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays

SEEDS = st.integers(0, 10_000)


def computed(store: Store, by: By = "overall") -> dict[Any, dict[str, dict[str, Any]]]:
    rows = run(store, {"it": Consistency(by)}).results["it"].table.to_pylist()
    out: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(row.get(by), {})[row["metric"]] = row
    return out


def close(found: float | None, expected: float | None, *, rel: float = 1e-9, context: str = "") -> None:
    if expected is None:
        assert found is None, context
    else:
        assert found is not None, context
        assert math.isclose(found, expected, rel_tol=rel, abs_tol=1e-12), f"{context}: {found} is not {expected}"


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_equals_numpy(seed: int) -> None:
    log = make_log(seed)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        found = computed(store)[None]
    expected = oracles.token_metrics(tokens) | oracles.sequence_metrics(tokens)
    for name, value in expected.items():
        close(found[name]["value"], value, context=name)
    for name, x, y in (
        ("prob_pearson", np.exp(tokens["logp_infer"]), np.exp(tokens["logp_train"])),
        ("logp_pearson", tokens["logp_infer"], tokens["logp_train"]),
    ):
        close(found[name]["value"], oracles.pearson(x, y), context=name)
    missing = set(BY_NAME) - set(expected) - {"prob_pearson", "logp_pearson"}
    assert not missing, f"metrics without an oracle: {missing}"


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_standard_errors_are_by_sequence(seed: int) -> None:
    log = make_log(seed)
    tokens = oracles.counted(log)
    d = tokens["delta"]
    with store_of(log) as store:
        found = computed(store)[None]
    known = np.isfinite(tokens["entropy"])
    for name, values in {
        "mean_delta": d,
        "mean_abs_delta": np.abs(d),
        "mean_sq_delta": d**2,
        "ratio_mean": oracles.ratio(d),
        "kl_k3": np.exp(d) - 1 - d,
        "entropy_mean": tokens["entropy"][known],
    }.items():
        mean, se = oracles.cluster_mean(values, tokens["seq_id"][known] if name == "entropy_mean" else tokens["seq_id"])
        close(found[name]["value"], mean, context=name)
        close(found[name]["se"], se, context=f"{name} se")


@pytest.mark.parametrize("by", ["step", "lag"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_equal_numpy(by: By, seed: int) -> None:
    log = make_log(seed)
    tokens = oracles.counted(log)
    key = tokens["step"] if by == "step" else tokens["trainer_version"] - tokens["policy_version"]
    with store_of(log) as store:
        found = computed(store, by)
    assert set(found) == {int(k) for k in np.unique(key)}
    for group, metrics in found.items():
        part = {name: values[key == group] for name, values in tokens.items()}
        expected = oracles.token_metrics(part)
        if by == "step":
            expected |= oracles.sequence_metrics(part)
        else:
            assert not any(BY_NAME[name].per_sequence for name in metrics), "a sequence has no single lag"
        for name, value in expected.items():
            close(metrics[name]["value"], value, context=f"{by} {group} {name}")
        assert metrics["mean_delta"]["n"] == len(part["delta"])


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, cut=st.integers(1, 11))
def test_any_split_by_sequence_merges_to_the_whole(seed: int, cut: int) -> None:
    log = make_log(seed)
    parts = [{k: v[log["seq_id"] < cut] for k, v in log.items()}, {k: v[log["seq_id"] >= cut] for k, v in log.items()}]
    statistic = Consistency("step")
    with store_of(log) as whole, store_of(*parts) as both:
        present = frozenset(whole.column_counts())
        requests = statistic.requests(present)
        first = both.rows("select max(seq_id) as s from sequences where source_id = 0")[0]["s"]
        for name, condition in (("a", f"seq_id <= {first}"), ("b", f"seq_id > {first}")):
            both.connection.execute(f"create temp table shard_{name} as select * from tokens where {condition}")
        union = " union all ".join(f"select * from ({scan_query(requests, present, f'shard_{name}')})" for name in "ab")
        both.connection.execute(f"create temp table merged as {union}")
        found = {(r["step"],): r for r in both.rows(statistic.merge({"sums": "merged"}, present))}
        expected = {
            (r["step"],): r
            for r in run(whole, {"it": cast("Statistic", _Raw(statistic))}).results["it"].table.to_pylist()
        }
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for name, value in row.items():
            close(found[key][name], value, context=f"{key} {name}")


class _Raw:
    """The same statistic without the reshaping at the end."""

    __dataclass_fields__: ClassVar[dict[str, Any]] = {}

    def __init__(self, inner: Consistency) -> None:
        self.name, self.needs = inner.name, inner.needs
        self.requests, self.merge = inner.requests, inner.merge

    def finish(self, result: Any) -> Any:
        return result


def test_the_order_of_rows_does_not_matter() -> None:
    log = make_log(4)
    with store_of(log) as store:
        before = computed(store)[None]
        store.connection.execute("create temp table shuffled as select * from tokens order by hash(seq_id, pos)")
        store.connection.execute("delete from tokens")
        store.connection.execute("insert into tokens select * from shuffled")
        after = computed(store)[None]
    for name, row in before.items():
        close(after[name]["value"], row["value"], context=name)


FRAMEWORK_VALUES = {
    # the frameworks' own code on the same log, aggregated as the metric is
    "mean_abs_delta": ("trl:sampling/sampling_logp_difference/mean", "oi:debug/vllm_vs_local_logprob_diff_mean"),
    "max_abs_delta": ("trl:sampling/sampling_logp_difference/max",),
    "std_abs_delta": ("oi:debug/vllm_vs_local_logprob_diff_std",),
    "kl_k1": ("verl:rollout_corr/kl", "tinker:optim/kl_sample_train_v1", "swift:kl", "openrlhf:vllm_kl"),
    "kl_k2": ("tinker:optim/kl_sample_train_v2",),
    "kl_k3": ("verl:rollout_corr/k3_kl", "nemo:gen_kl_error"),
    "reverse_kl_k3": ("nemo:policy_kl_error",),
    "reverse_kl_weighted": ("oi:debug/vllm_local_reverse_kl",),
    "mult_prob_error": ("nemo:token_mult_prob_error",),
    "prob_diff_mean": ("verl:training/rollout_probs_diff_mean",),
    "prob_diff_max": ("verl:training/rollout_probs_diff_max",),
    "prob_diff_std": ("verl:training/rollout_probs_diff_std",),
    "prob_pearson": ("verl:training/rollout_actor_probs_pearson_corr",),
    "chi2_token": ("verl:rollout_corr/chi2_token", "swift:chi2_token"),
    "infer_ppl": ("verl:rollout_corr/rollout_ppl", "swift:rollout_ppl"),
    "train_ppl": ("verl:rollout_corr/training_ppl", "swift:training_ppl"),
    "log_ppl_diff": ("verl:rollout_corr/log_ppl_diff", "swift:log_ppl_diff"),
    "log_ppl_abs_diff": ("verl:rollout_corr/log_ppl_abs_diff", "swift:log_ppl_abs_diff"),
    "log_ppl_diff_max": ("verl:rollout_corr/log_ppl_diff_max",),
    "log_ppl_diff_min": ("verl:rollout_corr/log_ppl_diff_min",),
    "ppl_ratio": ("verl:rollout_corr/ppl_ratio", "swift:ppl_ratio"),
}

VALUE_OF_AN_EMPTY_ROW = {
    "infer_ppl": 1.0,
    "train_ppl": 1.0,
    "ppl_ratio": 1.0,
    "log_ppl_diff": 0.0,
    "log_ppl_abs_diff": 0.0,
}


@pytest.fixture(scope="module")
def framework_log(data: Path) -> Iterator[Store]:
    with store_of(oracle_arrays(data)) as store:
        yield store


def oracle_arrays(data: Path) -> Arrays:
    """The log that the frameworks' code was run on, in this project's column names (its q is our logp_train)."""
    table = pq.read_table(data / "oracle" / "synthetic.parquet").sort_by(
        [("seq_id", "ascending"), ("pos", "ascending")]
    )
    names = {
        "logp_infer": "logp_infer",
        "logp_prox": "logp_train",
        "entropy": "entropy",
        "advantage": "advantage",
        "loss_mask": "loss_mask",
        "seq_id": "seq_id",
    }
    return {ours: table[theirs].to_numpy() for theirs, ours in names.items()}


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, aliases in FRAMEWORK_VALUES.items() for a in aliases])
def test_equals_the_frameworks_own_code(framework_log: Store, data: Path, name: str, alias: str) -> None:
    values = json.loads((data / "oracle" / "synthetic.float64.json").read_text())
    found = computed(framework_log)[None][name]["value"]
    if name in VALUE_OF_AN_EMPTY_ROW:
        # verl and ms-swift keep a row without counted tokens in the mean (aggregation S0); ours leaves it out.
        rows = framework_log.rows(
            "select count(*) as n, count(*) filter (k > 0) as counted from (select count(*) filter (loss_mask) as k from tokens group by seq_id)"
        )[0]
        assert rows["n"] == 48
        assert rows["counted"] == 47
        found = (found * 47 + VALUE_OF_AN_EMPTY_ROW[name]) / 48
    # The frameworks add 1e-8 to denominators, and some compute in float32.
    close(found, values[alias], rel=2e-6, context=f"{name} against {alias}")


def _one(delta: float, *, n: int = 1, entropy: float = 0.5, mask: bool = True) -> Arrays:
    train = np.full(n, -25.0 if delta < 0 else -0.5, dtype=np.float32)
    return {
        "seq_id": np.zeros(n, dtype=np.int64),
        "step": np.zeros(n, dtype=np.int64),
        "logp_infer": (train - np.float32(delta)).astype(np.float32),
        "logp_train": train,
        "entropy": np.full(n, entropy, dtype=np.float32),
        "loss_mask": np.full(n, mask),
    }


@pytest.mark.parametrize(
    "case", ["one token", "all masked", "no gap", "plus 50", "minus 20", "zero entropy", "constant"]
)
def test_degenerate_logs_give_a_value_or_none(case: str) -> None:
    log = {
        "one token": _one(0.1),
        "all masked": _one(0.1, n=5, mask=False),
        "no gap": _one(0.0, n=5),
        "plus 50": _one(50.0, n=5),
        "minus 20": _one(-20.0, n=5),
        "zero entropy": _one(0.1, n=5, entropy=0.0),
        "constant": _one(0.1, n=50),
    }[case]
    with store_of(log) as store:
        result = run(store, {"it": Consistency()}).results["it"]
    found = {row["metric"]: row for row in result.rows()}
    assert "NaN" not in json.dumps(result.to_json(), allow_nan=False)
    if case == "all masked":
        assert found["mean_abs_delta"]["value"] is None
        assert found["mean_abs_delta"]["n"] == 0
        return
    expected = oracles.token_metrics(oracles.counted(log))
    for name in ("mean_abs_delta", "kl_k3", "ratio_mean", "ess_token", "n_clamped"):
        close(found[name]["value"], expected[name], context=f"{case} {name}")
    assert found["mean_abs_delta"]["se"] is None, "one sequence has no standard error"
    assert found["prob_pearson"]["value"] is None, "a constant column has no correlation"


def test_missing_columns_are_loud() -> None:
    log = make_log(1)
    only_engine = {k: v for k, v in log.items() if k not in ("logp_train", "entropy", "policy_version")}
    with store_of(only_engine) as store:
        outcome = run(store, {"overall": Consistency(), "lag": Consistency("lag")})
    assert set(outcome.missing) == {"lag"}
    assert "policy_version" in str(outcome.missing["lag"])
    names = {row["metric"] for row in outcome.results["overall"].rows()}
    assert names == {"logp_infer_mean", "infer_ppl", "infer_log_ppl"}, "one engine allows its own metrics and no other"


def test_every_metric_explains_itself() -> None:
    for metric in METRICS:
        assert metric.formula
        assert metric.unit
        assert metric.meaning
        assert (metric.mean_of is None) != (metric.sql is None)
        assert metric.measures
    assert set(YARDSTICKS) <= set(BY_NAME)
    assert quote_ident('a"b') == '"a""b"'
