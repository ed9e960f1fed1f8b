"""Framework metric names: equal to the frameworks' own code, to NumPy, and indifferent to how the log is split."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.errors import UsageError
from estr_diag.expressions import EDGES
from estr_diag.result import Result
from estr_diag.stats.alias import EDGE, OVER
from estr_diag.stats.aliases import BY_KEY, aliases_of, candidates
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.framework_metrics import FrameworkMetrics
from estr_diag.stats.framework_names import ALIASES
from estr_diag.stats.metrics import BY_NAME
from estr_diag.stats.quantiles import QUANTILES, AbsDeltaQuantiles
from estr_diag.store.database import Store
from estr_diag.store.engine import run, scan_query
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays, Floats

ORACLE_NAME = {
    # how the recorded values call a framework; names lose what is cut, and gain what is added
    "ms-swift": ("swift", "rollout_correction/", ""),
    "nemo-rl": ("nemo", "", ""),
    "open-instruct": ("oi", "", ""),
    "prime-rl": ("prime", "", ""),
    "tinker-cookbook": ("tinker", "", ""),
    "roll": ("roll", "", "@sum"),
}

FLOAT32 = {"areal": 1e-4}
"""Frameworks that compute in float32."""

CANCELS = {"ms-swift:rollout_correction/chi2_seq"}
"""exp(x) - 1 of a tiny x: float32 log-probs carry 1e-8 of the 1, so the comparison is before the subtraction."""

NOT_COVERED = {
    # plain names of the recorded values that stand for a rule, a loss or a clip, and not for the log-probs
    r"nemo:(kl_penalty|loss|positive_nll_loss|probs_ratio_clamped.*)": "the loss and its PPO clip",
    r"openrlhf:ppo_clip_ratio": "PPO's clip",
    r"prime:(dppo|ipo)/.*": "DPPO and IPO masks",
    r"roll:actor/train_infer_(final_mask|token_ratio_mask)_mean.*": "ROLL's filters",
    r"slime:mis_(batch_norm_factor|is_ratio_.*|tis_weight_after_bound)": "weights after truncation and masks",
    r"verl:rollout_corr/rollout_rs_.*": "verl's rejection sampling",
    r"skyrl:minibatch_rollout_logprobs_abs_diff_min": "0 whenever anything is masked: says nothing about the log",
}


def log_of(data: Path) -> Arrays:
    """The log that the frameworks' code was run on, in this project's column names."""
    table = pq.read_table(data / "oracle" / "synthetic.parquet").sort_by(
        [("seq_id", "ascending"), ("pos", "ascending")]
    )
    names = {
        "seq_id": "seq_id", "turn": "turn", "loss_mask": "loss_mask", "entropy": "entropy", "advantage": "advantage",
        "logp_infer": "logp_infer", "logp_train": "logp_prox", "logp_update": "logp_train",
        "policy_version": "version", "trainer_version": "trainer_version",
    }  # fmt: skip
    arrays = {ours: table[theirs].to_numpy() for ours, theirs in names.items()}
    return arrays | {name: arrays[name].astype(np.int32) for name in ("policy_version", "trainer_version", "turn")}


def plain_values(data: Path) -> dict[str, float]:
    """The recorded values by name; a name recorded under several rules counts when they all agree."""
    recorded = json.loads((data / "oracle" / "synthetic.float64.json").read_text())
    found: dict[str, set[float]] = {}
    for name, value in recorded.items():
        if not isinstance(value, dict | list):
            plain = re.sub(r"\[.*\]+", "", name)
            found.setdefault(plain.replace("areal2026-05:", "areal:").replace("verl2025:", "verl:"), set()).add(value)
    agreed = {name: values.pop() for name, values in found.items() if len(values) == 1}
    return agreed | {name: value for name, value in recorded.items() if "[" not in name and name[0] != "_"}


def oracle_key(framework: str, name: str) -> str:
    prefix, cut, added = ORACLE_NAME.get(framework, (framework, "", ""))
    return f"{prefix}:{name.removeprefix(cut)}{added}"


def computed(store: Store, statistic: FrameworkMetrics | None = None) -> dict[str, dict[str, Any]]:
    rows = run(store, {"it": statistic or FrameworkMetrics()}).results["it"].table.to_pylist()
    return {f"{row['framework']}:{row['name']}": row for row in rows}


def close(found: float | None, expected: float | None, *, rel: float = 1e-9, context: str = "") -> None:
    if expected is None or found is None:
        assert found is expected, f"{context}: {found} is not {expected}"
    else:
        assert math.isclose(found, expected, rel_tol=rel, abs_tol=1e-12), f"{context}: {found} is not {expected}"


@pytest.fixture(scope="module")
def found(data: Path) -> Iterator[dict[str, dict[str, Any]]]:
    with store_of(log_of(data)) as store:
        yield computed(store)


@pytest.mark.parametrize("key", [alias.key for alias in ALIASES if alias.executed])
def test_equals_the_frameworks_own_code(found: Mapping[str, Mapping[str, Any]], data: Path, key: str) -> None:
    alias = BY_KEY[key]
    expected = plain_values(data)[oracle_key(alias.framework, alias.name)]
    shift = 1.0 if key in CANCELS else 0.0
    value = found[key]["value"]
    assert value is not None
    close(value + shift, expected + shift, rel=FLOAT32.get(alias.framework, 2e-6), context=key)


def test_every_recorded_plain_name_is_covered_or_named_as_not(data: Path) -> None:
    recorded = json.loads((data / "oracle" / "synthetic.float64.json").read_text())
    plain = {
        name.replace("areal2026-05:", "areal:").replace("verl2025:", "verl:")
        for name, value in recorded.items()
        if "[" not in name and not isinstance(value, dict | list)
    }
    covered = {oracle_key(a.framework, a.name) for a in ALIASES}
    rest = {name for name in plain - covered if not any(re.fullmatch(p, name) for p in NOT_COVERED)}
    assert not rest, f"recorded names without an alias: {sorted(rest)}"
    for pattern in NOT_COVERED:
        assert any(re.fullmatch(pattern, name) for name in plain), f"{pattern} names nothing any more"
        assert not any(re.fullmatch(pattern, oracle_key(a.framework, a.name)) for a in ALIASES if a.executed), pattern


def test_most_names_are_executed() -> None:
    assert sum(a.executed for a in ALIASES) >= 95


def test_the_registry_is_sound() -> None:
    assert len(BY_KEY) == len(ALIASES), "a framework has one name twice"
    assert set(EDGE) == set(EDGES)
    for alias in ALIASES:
        assert alias.over in OVER
        assert alias.needs, alias.key
        assert alias.differs or (alias.edge == "B" and alias.over in ("T", "S")), f"{alias.key} says no difference"
        assert alias.empty == 0 or alias.over == "S0"
        if alias.metric.name in BY_NAME:
            assert alias.metric is BY_NAME[alias.metric.name], f"{alias.key} has our name for another formula"
            assert alias in aliases_of(alias.metric.name)
        assert candidates(alias.key) == (alias,)
        if alias.edge == "B":
            assert not alias.needs & {"logp_update"} or "proximal" in alias.metric.name
        else:
            assert "logp_update" in alias.needs


# The same numbers in NumPy. A formula is a function of a group of tokens (the batch or one sequence).


def on_edge(tokens: Arrays, edge: str) -> Arrays:
    """The tokens with the pair of an edge in the place of logp_infer and logp_train; without those that lack it."""
    over, under = {
        "B": ("logp_train", "logp_infer"), "U": ("logp_update", "logp_train"), "E": ("logp_update", "logp_infer")
    }[edge]  # fmt: skip
    known = np.isfinite(tokens[over]) & np.isfinite(tokens[under])
    moved = tokens | {"logp_train": tokens[over], "logp_infer": tokens[under]}
    out = {name: values[known] for name, values in moved.items()}
    out["delta"] = out["logp_train"] - out["logp_infer"]
    return out


def alpha(t: Arrays) -> Floats:
    v, proximal = t["policy_version"].astype(float), t["trainer_version"].astype(float)
    theta = proximal + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip((proximal - v) / (theta - v), 0, 1)
    return np.asarray(np.where((v < 0) | (v >= theta), 0, share))


def by_turn(t: Arrays) -> Floats:
    out = np.empty(len(t["delta"]))
    for key in {(s, u) for s, u in zip(t["seq_id"].tolist(), t["turn"].tolist(), strict=True)}:
        at = (t["seq_id"] == key[0]) & (t["turn"] == key[1])
        out[at] = np.exp(t["delta"][at].mean())
    return out


def c20(d: Floats) -> Floats:
    return np.clip(d, -20, 20)


def k3(d: Floats) -> Floats:
    return np.asarray(np.exp(d) - 1 - d)


FRAMEWORK_FORMULAS: dict[str, Callable[[Arrays], Any]] = {
    "clamped_k1": lambda t: -c20(t["delta"]).mean(),
    "capped_k3": lambda t: np.minimum(k3(c20(t["delta"])), 10).mean(),
    "k3_max": lambda t: k3(t["delta"]).max(),
    "k3_min": lambda t: k3(t["delta"]).min(),
    "raw_ratio_mean": lambda t: np.exp(t["delta"]).mean(),
    "raw_ratio_abs_gap": lambda t: np.abs(np.exp(t["delta"]) - 1).mean(),
    "raw_ess": lambda t: np.exp(t["delta"]).sum() ** 2 / len(t["delta"]) / np.exp(2 * t["delta"]).sum(),
    "geometric_chi2": lambda t: np.exp(2 * t["delta"].mean()) - 1,
    "seq_ratio_mean": lambda t: np.exp(t["delta"].sum()),
    "geo_ratio_mean": lambda t: np.exp(t["delta"].mean()),
    "turn_ratio_mean": lambda t: by_turn(t).mean(),
    "seq_prob_diff_sum": lambda t: (np.exp(t["logp_train"]) - np.exp(t["logp_infer"])).sum(),
    "seq_mult_prob_error_mean": lambda t: np.exp(np.abs(t["delta"])).mean(),
    "sampled_entropy": lambda t: -t["logp_infer"].mean(),
    "sampled_entropy_weighted": lambda t: (-np.exp(t["delta"]) * t["logp_train"]).mean(),
    "staleness_theta_mean": lambda t: (t["trainer_version"] - t["policy_version"]).mean() + 1,
    "staleness_theta_max": lambda t: (t["trainer_version"] - t["policy_version"]).max() + 1,
    "staleness_theta_min": lambda t: (t["trainer_version"] - t["policy_version"]).min() + 1,
    "counted_sequences": lambda t: len(np.unique(t["seq_id"])),
    "switched_sequences": lambda t: sum(
        len(np.unique(t["policy_version"][t["seq_id"] == s])) > 1 for s in np.unique(t["seq_id"])
    ),
    "any_counted": lambda t: 1.0,
}
"""Over one group of tokens; the next ones need the log-prob of the update beside the pair."""


def proximal_error(t: Arrays, *, linear: bool) -> Any:
    known = np.isfinite(t["logp_update"])
    mu, q, pi, a = t["logp_infer"][known], t["logp_train"][known], t["logp_update"][known], alpha(t)[known]
    guess = np.log((1 - a) * np.exp(mu) + a * np.exp(pi) + 1e-10) if linear else mu + a * (pi - mu)
    return np.abs(guess - q).mean()


FRAMEWORK_FORMULAS["proximal_linear_error"] = lambda t: proximal_error(t, linear=True)
FRAMEWORK_FORMULAS["proximal_loglinear_error"] = lambda t: proximal_error(t, linear=False)
OVER_SEQUENCES: dict[str, Callable[..., Any]] = {"seq_mult_prob_error_max": max, "seq_mult_prob_error_min": min}


def one_group(name: str, tokens: Arrays) -> float | None:
    """A metric of one group, by any means that is not the package's."""
    if name in FRAMEWORK_FORMULAS:
        return float(FRAMEWORK_FORMULAS[name](tokens))
    if name in ("prob_pearson",):
        return oracles.pearson(np.exp(tokens["logp_infer"]), np.exp(tokens["logp_train"]))
    return (oracles.token_metrics(tokens) | oracles.sequence_metrics(tokens))[name]


def expected_value(key: str, counted: Arrays, n_logged: int) -> float | None:
    alias = BY_KEY[key]
    name, tokens = alias.metric.name, on_edge(counted, alias.edge)
    if name == "kl_over_entropy":
        # a ratio of two means, each over the tokens that have its column
        return float(k3(tokens["delta"]).mean() / counted["entropy"].mean())
    if alias.over in ("T", "SS", "N"):
        return one_group(name, tokens)
    pick = OVER_SEQUENCES.get(name)
    for word in ("_max", "_min"):
        if name == f"log_ppl_diff{word}":
            pick = max if word == "_max" else min
    name = {"log_ppl_diff_max": "log_ppl_diff", "log_ppl_diff_min": "log_ppl_diff"}.get(name, name)
    name = "seq_mult_prob_error_mean" if name.startswith("seq_mult") else name
    parts = [{k: v[tokens["seq_id"] == s] for k, v in tokens.items()} for s in np.unique(tokens["seq_id"])]
    values = [value for part in parts if (value := one_group(name, part)) is not None]
    values += [alias.empty] * (n_logged - len(values)) if alias.over == "S0" else []
    return pick(values) if pick else math.fsum(values) / len(values)


def full_log(seed: int) -> Arrays:
    """A log with every column, gaps in the update's, versions that change inside a sequence, and one masked away."""
    rng = np.random.default_rng(seed + 1)
    log = make_log(seed, sequences=8, mean_length=15)
    n = len(log["seq_id"])
    log["logp_update"] = np.minimum(log["logp_train"] + rng.normal(0, 0.2, n), 0).astype(np.float32)
    log["logp_update"][rng.random(n) < 0.05] = np.nan
    later = rng.random(n) < 0.3
    log["policy_version"] = np.where(later, log["policy_version"] + 1, log["policy_version"]).astype(np.int32)
    log["turn"] = np.concatenate([np.arange(k) // 7 for k in np.unique(log["seq_id"], return_counts=True)[1]])
    log["turn"] = log["turn"].astype(np.int16)
    log["loss_mask"][log["seq_id"] == 3] = False
    return log


def counted_tokens(log: Arrays) -> Arrays:
    tokens = oracles.counted(log)
    return tokens | {"logp_update": tokens["logp_update"].astype(np.float64)}


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_alias_equals_numpy(seed: int) -> None:
    log = full_log(seed)
    with store_of(log) as store:
        found = computed(store)
    tokens = counted_tokens(log)
    assert set(found) == set(BY_KEY)
    for key in BY_KEY:
        close(found[key]["value"], expected_value(key, tokens, 8), context=key)


def test_our_metrics_equal_numpy_where_versions_change_inside_a_sequence() -> None:
    for seed in range(5):
        log = full_log(seed)
        tokens = oracles.counted(log)
        with store_of(log) as store:
            rows = run(store, {"it": Consistency()}).results["it"].table.to_pylist()
        found = {row["metric"]: row["value"] for row in rows}
        expected = oracles.token_metrics(tokens) | oracles.sequence_metrics(tokens)
        for name in ("intra_mean", "intra_max", "inter_mean", "inter_max", "switch_share", "staleness_mean"):
            close(found[name], expected[name], context=f"{seed} {name}")
        assert found["intra_max"] == 1


@pytest.mark.parametrize(("shift", "end"), [(0.5, "max"), (-0.5, "min")])
def test_a_row_without_counted_tokens_bounds_the_extremes_of_verl(shift: float, end: str) -> None:
    log = full_log(1)
    log["logp_infer"] = np.full(len(log["seq_id"]), -1.0, dtype=np.float32)
    log["logp_train"] = log["logp_infer"] + np.float32(shift)
    with store_of(log) as store:
        ours = run(store, {"it": Consistency()}).results["it"].table.to_pylist()
        theirs = computed(store)
    assert {row["metric"]: row["value"] for row in ours}[f"log_ppl_diff_{end}"] == -shift
    assert theirs[f"verl:rollout_corr/log_ppl_diff_{end}"]["value"] == 0
    log["loss_mask"][:] = True
    with store_of(log) as store:
        assert computed(store)[f"verl:rollout_corr/log_ppl_diff_{end}"]["value"] == -shift


def test_by_step_equals_a_log_of_that_step_alone() -> None:
    log = full_log(3)
    with store_of(log) as store:
        rows = run(store, {"it": FrameworkMetrics("step")}).results["it"].table.to_pylist()
    steps = sorted({row["step"] for row in rows})
    assert steps == sorted(set(log["step"].tolist()))
    for step in steps:
        with store_of({k: v[log["step"] == step] for k, v in log.items()}) as store:
            alone = computed(store)
        for row in rows:
            if row["step"] == step:
                other = alone[f"{row['framework']}:{row['name']}"]
                close(row["value"], other["value"], context=f"{step} {row['name']}")
                assert row["n_logged"] == other["n_logged"]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 7))
def test_any_split_by_sequence_merges_to_the_whole(seed: int, cut: int) -> None:
    log, statistic = full_log(seed), FrameworkMetrics("step")
    with store_of(log) as store:
        present = frozenset(store.column_counts())
        expected = run(store, {"it": statistic}).results["it"]
        at = store.rows(f"select min(seq_id) + {cut} as s from sequences")[0]["s"]
        requests, tables = statistic.requests(present), {}
        for request in requests:
            queries = []
            for name, condition in (("a", f"seq_id < {at}"), ("b", f"seq_id >= {at}")):
                for table in ("tokens", "sequences"):
                    store.connection.execute(
                        f"create or replace temp table {table}_{name} as select * from {table} where {condition}"
                    )
                queries.append(scan_query([request], present, f"tokens_{name}", f"sequences_{name}"))
            merged = f"merged_{request.scan}"
            union = " union all by name ".join(f"select * from ({query})" for query in queries)
            store.connection.execute(f"create temp table {merged} as {union}")
            tables[request.scan] = merged
        wide = store.table(statistic.merge(tables, present))
    found = statistic.finish(Result("it", wide)).table.to_pylist()
    for row, whole in zip(found, expected.table.to_pylist(), strict=True):
        assert row["name"] == whole["name"]
        close(row["value"], whole["value"], context=f"{row['step']} {row['framework']}:{row['name']}")


@pytest.mark.parametrize("case", ["one token", "all masked", "no gap", "plus 800", "minus 800", "one sequence"])
def test_degenerate_logs_give_a_value_or_none(case: str) -> None:
    n = 1 if case == "one token" else 5
    gap = {"no gap": 0.0, "plus 800": 800.0, "minus 800": -800.0}.get(case, 0.1)
    log = full_log(1)
    log = {name: values[:n] for name, values in log.items()}
    base = np.full(n, -801.0, dtype=np.float32)
    log |= {"logp_infer": base, "logp_train": (base + gap).astype(np.float32)}
    log |= {"logp_update": (base + gap).astype(np.float32), "loss_mask": np.full(n, case != "all masked")}
    log["seq_id"] = np.zeros(n, dtype=np.int64)
    with store_of(log) as store:
        outcome = run(store, {"theirs": FrameworkMetrics(), "ours": Consistency()})
    for result in outcome.results.values():
        for row in result.table.to_pylist():
            value = row["value"]
            assert value is None or not math.isnan(value), row
            if case == "all masked":
                assert value is None, row
    if case == "no gap":
        found = {f"{r['framework']}:{r['name']}": r["value"] for r in outcome.results["theirs"].rows()}
        assert found["verl:rollout_corr/kl"] == 0
        assert found["nemo-rl:js_divergence_error"] == 0
        assert found["pipelinerl:rl/ess"] == 1
    if case == "plus 800":
        found = {r["metric"]: r["value"] for r in outcome.results["ours"].rows()}
        close(found["js_divergence"], 400 - math.log(2), context="js at 800 nats")


def test_a_missing_column_is_named_and_nothing_else_is_lost() -> None:
    log = full_log(1)
    del log["logp_update"]
    with store_of(log) as store:
        result = run(store, {"it": FrameworkMetrics()}).results["it"]
    rows = {f"{row['framework']}:{row['name']}": row for row in result.table.to_pylist()}
    assert set(rows) == set(BY_KEY)
    for key, row in rows.items():
        if "logp_update" in BY_KEY[key].needs:
            assert row["missing"] == "logp_update", key
            assert row["value"] is None
        else:
            assert row["missing"] is None
            assert row["value"] is not None, key
    (note,) = result.notes
    assert "no logp_update" in note
    assert "training forward pass" in note
    assert "openrlhf:ppo_kl" in note
    assert "openrlhf:vllm_kl" not in note


def test_only_one_engine() -> None:
    log = {k: v for k, v in full_log(1).items() if k in ("seq_id", "step", "logp_infer", "loss_mask")}
    with store_of(log) as store:
        rows = run(store, {"it": FrameworkMetrics()}).results["it"].table.to_pylist()
    assert {f"{r['framework']}:{r['name']}" for r in rows if r["value"] is not None} == {
        "verl:rollout_corr/rollout_ppl", "verl:rollout_corr/rollout_log_ppl",
        "ms-swift:rollout_correction/rollout_ppl", "ms-swift:rollout_correction/rollout_log_ppl",
        "slime:mis_rollout_ppl", "slime:mis_rollout_log_ppl", "tinker-cookbook:optim/entropy",
    }  # fmt: skip


def test_one_framework() -> None:
    with store_of(full_log(1)) as store:
        rows = run(store, {"it": FrameworkMetrics(framework="openrlhf")}).results["it"].rows()
    assert [row["name"] for row in rows] == ["vllm_kl", "ppo_kl"]
    with pytest.raises(UsageError, match="did you mean 'openrlhf'"):
        FrameworkMetrics(framework="openrlfh")


def test_fused_with_our_metrics_the_numbers_stay() -> None:
    with store_of(full_log(2)) as store:
        alone = computed(store)
        both = run(store, {"a": Consistency("lag"), "b": Consistency("step"), "it": FrameworkMetrics()})
    for row in both.results["it"].table.to_pylist():
        key = f"{row['framework']}:{row['name']}"
        close(row["value"], alone[key]["value"], context=key)


def test_a_formula_cannot_move_to_an_edge_that_its_sums_do_not_have() -> None:
    with pytest.raises(ValueError, match="prob_pearson"):
        BY_NAME["prob_pearson"].on("U")


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_quantiles_equal_numpy(seed: int) -> None:
    log = full_log(seed)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        results = run(store, {by: AbsDeltaQuantiles(by) for by in ("overall", "step", "lag")}).results
    lag = tokens["trainer_version"] - tokens["policy_version"]
    for by, key in (("overall", np.zeros(len(lag))), ("step", tokens["step"]), ("lag", lag)):
        rows = results[by].table.to_pylist()
        assert len(rows) == len(QUANTILES) * len(np.unique(key))
        for row in rows:
            part = np.abs(tokens["delta"][key == row.get(by, 0)])
            close(row["value"], float(np.quantile(part, QUANTILES[row["metric"]])), context=f"{by} {row}")
            assert row["n"] == len(part)


def test_quantiles_of_nothing_are_none() -> None:
    log = full_log(1)
    log["loss_mask"][:] = False
    with store_of(log) as store:
        rows = run(store, {"it": AbsDeltaQuantiles()}).results["it"].rows()
    assert [row["metric"] for row in rows] == list(QUANTILES)
    assert all(row["value"] is None and row["n"] == 0 for row in rows)
