"""Lag, intra, inter and statistics by version: equal to counting in Python, any split, any log."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estr_diag as ed
from estr_diag.result import Result
from estr_diag.stats.staleness import Staleness, Versions
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, run, scan_query
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays

SEEDS = st.integers(0, 10_000)


def drifting_log(seed: int) -> Arrays:
    """Versions that rise inside some sequences, with gaps; tool tokens carry a false one."""
    rng = np.random.default_rng(seed)
    log = make_log(seed)
    n = len(log["seq_id"])
    version = np.ma.masked_array(log["policy_version"].astype(np.int64), rng.random(n) < 0.3)
    for s in np.unique(log["seq_id"])[::2]:
        at = np.flatnonzero(log["seq_id"] == s)
        version[int(rng.choice(at)) : at[-1] + 1] += 1
    version[~log["loss_mask"]] = 99
    log["policy_version"] = version
    return log


def one(store: Store, statistic: Statistic) -> Result:
    result = run(store, {"it": statistic}).results["it"]
    json.dumps(result.to_json(), allow_nan=False)
    return result


def distributions(log: Arrays) -> dict[str, Counter[int | None]]:
    out: dict[str, Counter[int | None]] = {"lag": Counter(), "intra": Counter(), "inter": Counter()}
    tokens = oracles.counted(log)
    for v, target in zip(tokens["policy_version"], tokens["trainer_version"].tolist(), strict=True):
        out["lag"][None if v is np.ma.masked else target - int(v)] += 1
    for s in np.unique(log["seq_id"]):
        at = np.flatnonzero((log["seq_id"] == s) & log["loss_mask"])
        known = [int(v) for v in log["policy_version"][at] if v is not np.ma.masked]
        target = int(log["trainer_version"][log["seq_id"] == s][0])
        out["intra"][known[-1] - known[0] if known else None] += 1
        out["inter"][target - known[-1] if known else None] += 1
    return {name: counts for name, counts in out.items() if set(counts) != {None}}


def as_counts(rows: list[dict[str, Any]]) -> dict[str, Counter[int | None]]:
    out: dict[str, Counter[int | None]] = {}
    for row in rows:
        out.setdefault(row["quantity"], Counter())[row["value"]] += row["n"]
    return out


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_distributions_equal_counting(seed: int) -> None:
    log = drifting_log(seed)
    with store_of(log) as store:
        rows = one(store, Staleness()).table.to_pylist()
    expected = distributions(log)
    assert as_counts(rows) == expected
    for row in rows:
        assert math.isclose(row["share"], row["n"] / expected[row["quantity"]].total(), rel_tol=1e-12)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_statistics_by_version_equal_numpy(seed: int) -> None:
    log = drifting_log(seed)
    tokens = oracles.counted(log)
    key = np.ma.filled(tokens["policy_version"], -1)
    with store_of(log) as store:
        rows = one(store, Versions()).table.to_pylist()
    assert {r["policy_version"] for r in rows} == {None if v == -1 else v for v in np.unique(key).tolist()}
    for row in rows:
        here = key == (-1 if row["policy_version"] is None else row["policy_version"])
        d, seq = tokens["delta"][here], tokens["seq_id"][here]
        assert row["n"] == len(d)
        assert row["n_sequences"] == len(np.unique(seq))
        assert math.isclose(row["share"], len(d) / len(key), rel_tol=1e-12)
        for name, x in (("mean_abs_delta", np.abs(d)), ("mean_sq_delta", d**2)):
            for column, value in zip((name, f"{name}_se"), oracles.cluster_mean(x, seq), strict=True):
                assert (row[column] is None) == (value is None)
                assert value is None or math.isclose(row[column], value, rel_tol=1e-9, abs_tol=1e-12), column


@pytest.mark.parametrize("statistic", [Staleness(), Versions()])
@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_any_split_by_sequence_merges_to_the_whole(statistic: Statistic, cut: int) -> None:
    with store_of(drifting_log(4)) as store:
        whole = run(store, {"it": statistic}).results["it"].rows()
        present = frozenset(store.column_counts())
        scans = {}
        for request in statistic.requests(present):
            parts = []
            for name, condition in (("a", f"seq_id < {cut}"), ("b", f"seq_id >= {cut}")):
                for table in ("tokens", "sequences"):
                    store.connection.execute(
                        f"create or replace temp table {table}_{name} as select * from {table} where {condition}"
                    )
                parts.append(f"select * from ({scan_query([request], present, f'tokens_{name}', f'sequences_{name}')})")
            scans[request.scan] = f"merged_{request.scan}"
            store.connection.execute(f"create temp table {scans[request.scan]} as {' union all '.join(parts)}")
        merged = Result("merged", store.table(statistic.merge(scans, present))).rows()
    assert merged == whole


def test_versions_by_sequence_give_intra_and_inter() -> None:
    import pyarrow as pa

    rows = [
        {
            "seq_id": s, "pos": p, "step": 9, "logp_infer": -1.0, "logp_train": -1.1, "trainer_version": 9,
            "version_first": 5, "version_last": 5 + s,
        }
        for s in range(1, 4)
        for p in range(s)
    ]  # fmt: skip
    with ed.from_frame(pa.Table.from_pylist(rows), all_sampled=True) as log:
        result = one(log.store, Staleness())
        missing = run(log.store, {"it": Versions()}).missing
    assert as_counts(result.rows()) == {"intra": Counter({1: 1, 2: 1, 3: 1}), "inter": Counter({3: 1, 2: 1, 1: 1})}
    assert [n.split(" not computed")[0] for n in result.notes] == ["lag"]
    assert missing["it"].columns == ("policy_version",), "which token has which version is not known"


@pytest.mark.parametrize("drop", [("policy_version",), ("trainer_version",), ("policy_version", "trainer_version")])
def test_what_a_log_lacks_is_left_out_with_a_reason(drop: tuple[str, ...]) -> None:
    log = make_log(2)
    for name in drop:
        del log[name]
    with store_of(log) as store:
        result = one(store, Staleness())
    there = set() if "policy_version" in drop else {"intra"}
    assert set(as_counts(result.rows())) == there
    assert {n.split()[0] for n in result.notes} == {"lag", "intra", "inter"} - there
    assert all("log" in n.split("; ")[1] for n in result.notes)


def test_no_engine_and_no_counted_token_are_no_error() -> None:
    log = make_log(2)
    log["loss_mask"][:] = False
    with store_of(log) as store:
        result = one(store, Staleness())
        assert one(store, Versions()).rows() == []
    assert as_counts(result.rows()) == {}
    assert len(result.notes) == 3
