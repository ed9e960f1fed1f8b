"""Event study of version switches: every number equals plain loops over tokens, planted effects are found."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estr_diag as ed
from estr_diag.result import Result
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.switches import MEANS, EventStudy
from estr_diag.store.database import Store
from estr_diag.store.engine import Request, run, scan_query
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays

SEEDS = st.integers(0, 10_000)


def switching_log(seed: int, *, entropy: bool = True) -> Arrays:
    """None to three switches a sequence, tool spans over them, unknown versions, values missing everywhere."""
    rng = np.random.default_rng(seed)
    log = make_log(seed, sequences=14, mean_length=30)
    version: Any = np.ma.masked_array(log["policy_version"].astype(np.int64), np.zeros(len(log["seq_id"]), dtype=bool))
    log["entropy"][rng.random(len(version)) < 0.05] = np.nan
    for s in np.unique(log["seq_id"]):
        at = np.flatnonzero(log["seq_id"] == s)
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            start = int(rng.choice(at))
            version[start : at[-1] + 1] += rng.choice([1, 2, -1])
            if rng.random() < 0.5:  # a tool call at the switch, which says nothing true about versions
                tool = slice(max(at[0], start - 2), min(at[-1] + 1, start + 3))
                log["loss_mask"][tool] = False
                version[tool] = 77
                version.mask[tool] = rng.random() < 0.5
    version.mask |= rng.random(len(version)) < 0.03
    log["policy_version"] = version
    if not entropy:
        del log["entropy"]
    return log


def kinds(log: Arrays) -> dict[int, tuple[str, list[int]]]:
    """What each sequence is, and the positions of its switches."""
    out: dict[int, tuple[str, list[int]]] = {}
    for s in np.unique(log["seq_id"]).tolist():
        at = np.flatnonzero(log["seq_id"] == s)
        sampled = [(p, log["policy_version"][i]) for p, i in enumerate(at) if log["loss_mask"][i]]
        known = [(p, int(v)) for p, v in sampled if v is not np.ma.masked]
        switches = [known[i][0] for i in range(1, len(known)) if known[i][1] != known[i - 1][1]]
        ends = bool(sampled) and sampled[0][1] is not np.ma.masked and sampled[-1][1] is not np.ma.masked
        out[s] = ("switch" if switches else "control" if ends else "unknown", switches)
    return out


def event_study(log: Arrays, window: int, *, exact: bool) -> dict[int, dict[str, float | None]]:
    """The whole table by loops over tokens."""
    found = kinds(log)
    position = np.arange(len(log["seq_id"])) - np.searchsorted(log["seq_id"], log["seq_id"])
    tokens = oracles.counted(log | {"position": position})
    d, h = tokens["delta"], tokens.get("entropy")
    values = {"mean_abs_delta": np.abs(d), "mean_sq_delta": d**2}
    if h is not None:
        values |= {"mean_entropy": h, "mean_scaled_sq": d**2 / (h + 0.01)}
    around: dict[int, list[int]] = defaultdict(list)
    controls: dict[int, list[int]] = defaultdict(list)
    cells = [p if exact else math.floor(16 * math.log2(p + 1)) for p in tokens["position"].tolist()]
    for i, (s, p) in enumerate(zip(tokens["seq_id"].tolist(), tokens["position"].tolist(), strict=True)):
        kind, switches = found[s]
        if kind == "switch":
            nearest = min(switches, key=lambda q: (abs(p - q), q))
            if abs(p - nearest) <= window:
                around[p - nearest].append(i)
        elif kind == "control":
            controls[cells[i]].append(i)
    table: dict[int, dict[str, float | None]] = {}
    for offset in range(-window, window + 1):
        here = around[offset]
        row: dict[str, float | None] = {
            "n": len(here), "n_sequences": len({tokens["seq_id"][i] for i in here}), "n_matched": 0, "n_control": 0,
            "n_sequences_control": 0,
        }  # fmt: skip
        for name, x in values.items():
            row |= _one(name, x, here, controls, cells, tokens["seq_id"])
        matched = [i for i in here if len({tokens["seq_id"][j] for j in controls[cells[i]]}) >= 2]
        row["n_matched"] = len(matched)
        used = [j for c in {cells[i] for i in matched} for j in controls[c]]
        row["n_control"], row["n_sequences_control"] = len(used), len({tokens["seq_id"][j] for j in used})
        table[offset] = row
    return table


def _one(
    name: str, x: oracles.Floats, here: list[int], controls: dict[int, list[int]], cells: list[int], seq: Any
) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        f"{name}{end}": None for end in ("", "_se", "_control", "_control_se", "_diff", "_diff_se")
    }
    here = [i for i in here if math.isfinite(x[i])]
    if not here:
        return row
    row[name], row[f"{name}_se"] = oracles.cluster_mean(x[here], seq[here])
    cell_tokens, cell_mean = {}, {}
    for c in {cells[i] for i in here}:
        inside = [j for j in controls[c] if math.isfinite(x[j])]
        if len({seq[j] for j in inside}) >= 2:
            cell_tokens[c], cell_mean[c] = inside, math.fsum(x[inside]) / len(inside)
    matched = [i for i in here if cells[i] in cell_mean]
    if not matched:
        return row
    row[f"{name}_control"] = math.fsum(cell_mean[cells[i]] for i in matched) / len(matched)
    residuals = np.array([x[i] - cell_mean[cells[i]] for i in matched])
    row[f"{name}_diff"], spread = oracles.cluster_mean(residuals, seq[matched])
    pull: dict[int, float] = defaultdict(float)
    for c, inside in cell_tokens.items():
        weight = sum(cells[i] == c for i in matched) / len(inside)
        for j in inside:
            pull[seq[j]] += weight * (x[j] - cell_mean[c])
    n = len(pull)
    control = math.sqrt(math.fsum(u * u for u in pull.values()) * n / (n - 1)) / len(matched)
    row[f"{name}_control_se"] = control
    row[f"{name}_diff_se"] = None if spread is None else math.hypot(spread, control)
    return row


def study(store: Store, window: int = 32, *, exact: bool = False) -> Result:
    # Beside another statistic, as in a report.
    result = run(store, {"it": EventStudy(window, exact), "beside": Consistency()}).results["it"]
    json.dumps(result.to_json(), allow_nan=False)
    return result


def same(found: Result, expected: dict[int, dict[str, float | None]]) -> None:
    rows = {row.pop("offset"): row for row in found.table.to_pylist()}
    assert rows.keys() == expected.keys()
    for offset, row in expected.items():
        assert rows[offset].keys() == row.keys()
        for name, value in row.items():
            other = rows[offset][name]
            assert (other is None) == (value is None), (offset, name, other, value)
            if value is not None:
                assert math.isclose(other, value, rel_tol=1e-9, abs_tol=1e-12), (offset, name, other, value)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, window=st.sampled_from([0, 3, 32]), exact=st.booleans(), entropy=st.booleans())
def test_every_number_equals_loops_over_tokens(seed: int, window: int, *, exact: bool, entropy: bool) -> None:
    log = switching_log(seed, entropy=entropy)
    what = [kind for kind, _ in kinds(log).values()]
    with store_of(log) as store:
        result = study(store, window, exact=exact)
    if "switch" not in what:
        assert len(result) == 0
        assert "not computed" in result.notes[0]
        return
    same(result, event_study(log, window, exact=exact))
    assert result.notes[0].startswith(f"{what.count('switch')} sequences have a switch; {what.count('control')} ")


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, cut=st.integers(0, 14), exact=st.booleans())
def test_any_split_by_sequence_merges_to_the_whole(seed: int, cut: int, *, exact: bool) -> None:
    log = switching_log(seed)
    statistic = EventStudy(8, exact)
    with store_of(log) as store:
        whole = run(store, {"it": statistic}).results["it"]
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
        merged = statistic.finish(Result("event_study", store.table(statistic.merge(scans, present))))
    assert merged.notes == whole.notes
    same(merged, {row.pop("offset"): row for row in whole.table.to_pylist()})


def test_the_order_of_rows_does_not_matter() -> None:
    with store_of(switching_log(3)) as store:
        before = study(store)
        store.connection.execute("create table shuffled as select * from tokens order by hash(seq_id * 1000 + pos)")
        store.connection.execute("drop table tokens")
        store.connection.execute("alter table shuffled rename to tokens")
        after = study(store)
    assert after.notes == before.notes
    same(after, {row.pop("offset"): row for row in before.table.to_pylist()})


def planted(
    seed: int, *, sequences: int = 400, bump: float = 0.0, trend: float = 0.0, late: bool = False, several: bool = False
) -> Arrays:
    """Half of the sequences switch; delta^2 has mean 0.01 (1 + trend * pos), plus `bump` for 8 tokens from the switch on."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(120, 200, sequences)
    seq = np.repeat(np.arange(sequences), lengths)
    pos = np.arange(len(seq)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    switches = np.where(np.arange(sequences) % 2, rng.integers(90 if late else 40, 110, sequences), 10_000)
    distance = pos - switches[seq]
    version = (distance >= 0).astype(np.int32)
    if several:
        version += (distance >= 12).astype(np.int32)
    # sequences differ in scale, as prompts do
    scale = np.repeat(rng.gamma(20, 1 / 20, sequences), lengths)
    variance = scale * 0.01 * (1 + trend * pos) + bump * ((distance >= 0) & (distance < 8))
    delta = np.sqrt(variance) * rng.normal(size=len(seq))
    infer = -rng.exponential(1.0, len(seq)) - 2
    return {
        "seq_id": seq,
        "step": np.full(len(seq), 3),
        "logp_infer": infer.astype(np.float32),
        "logp_train": (infer + delta).astype(np.float32),
        "entropy": (0.3 + rng.gamma(2, 0.5, len(seq))).astype(np.float32),
        "policy_version": version,
        "trainer_version": np.full(len(seq), 3, dtype=np.int32),
        "loss_mask": rng.random(len(seq)) < 0.95,
    }


def z_scores(rows: list[dict[str, Any]], name: str, truth: dict[int, float]) -> dict[int, float]:
    return {r["offset"]: (r[f"{name}_diff"] - truth.get(r["offset"], 0.0)) / r[f"{name}_diff_se"] for r in rows}


@pytest.mark.parametrize("exact", [False, True])
def test_a_planted_bump_is_recovered_within_its_interval(exact: bool) -> None:
    bump = 0.03
    truth = dict.fromkeys(range(8), bump)
    missed, total = 0, 0
    for seed in range(3):
        with store_of(planted(seed, bump=bump)) as store:
            rows = study(store, 16, exact=exact).table.to_pylist()
        scores = z_scores(rows, "mean_sq_delta", truth)
        assert max(abs(z) for z in scores.values()) < 5, scores
        assert all(z > 5 for o, z in z_scores(rows, "mean_sq_delta", {}).items() if 0 <= o < 8), "the bump stands out"
        missed += sum(abs(z) > 1.96 for z in scores.values())
        total += len(scores)
    assert missed / total < 0.12


def test_a_healthy_log_has_no_bump_and_its_intervals_cover_zero() -> None:
    scores: list[float] = []
    for seed in range(6):
        with store_of(planted(100 + seed)) as store:
            rows = study(store).table.to_pylist()
        for name in MEANS:
            scores += z_scores(rows, name, {}).values()
    missed = np.mean(np.abs(scores) > 1.96)
    assert len(scores) == 6 * 4 * 65
    assert 0.03 < missed < 0.08, missed
    assert np.max(np.abs(scores)) < 6


def test_a_trend_over_positions_is_matched_away() -> None:
    log = planted(5, trend=0.1, late=True)
    with store_of(log) as store:
        rows = study(store).table.to_pylist()
    scores = list(z_scores(rows, "mean_sq_delta", {}).values())
    assert np.mean(np.abs(scores) > 1.96) < 0.12
    assert np.max(np.abs(scores)) < 4.5
    tokens = oracles.counted(log)
    unmatched = np.mean(tokens["delta"][tokens["seq_id"] % 2 == 0] ** 2)
    off = [(r["mean_sq_delta"] - unmatched) / r["mean_sq_delta_se"] for r in rows if r["offset"] > 20]
    assert np.mean(off) > 2, "without matching the late switches would seem to do harm"


def test_a_bump_after_one_of_several_switches_belongs_to_it() -> None:
    with store_of(planted(7, bump=0.03, several=True)) as store:
        rows = {r["offset"]: r for r in study(store, 16).table.to_pylist()}
    # The second switch, without a bump, stands 12 tokens later: up to 6 after the first belong to the first.
    assert rows[0]["n"] > 1.8 * rows[7]["n"]
    for offset, truth in ((0, 0.015), (6, 0.015), (7, 0.0), (-5, 0.015), (-6, 0.0)):
        z = (rows[offset]["mean_sq_delta_diff"] - truth) / rows[offset]["mean_sq_delta_diff_se"]
        assert abs(z) < 4, (offset, z)


def tiny(*sequences: list[int | None], mask: list[list[bool]] | None = None) -> Arrays:
    """Sequences by the version of each token."""
    flat = [v for s in sequences for v in s]
    lengths = [len(s) for s in sequences]
    n = len(flat)
    rng = np.random.default_rng(n)
    return {
        "seq_id": np.repeat(np.arange(len(sequences)), lengths),
        "step": np.full(n, 9),
        "logp_infer": np.full(n, -1.0, dtype=np.float32),
        "logp_train": (-1 + 0.1 * rng.normal(size=n)).astype(np.float32),
        "entropy": np.full(n, 0.5, dtype=np.float32),
        "policy_version": np.ma.masked_array([v or 0 for v in flat], [v is None for v in flat]),
        "trainer_version": np.full(n, 9),
        "loss_mask": np.array([m for s in mask for m in s]) if mask else np.ones(n, dtype=bool),
    }


@pytest.mark.parametrize(
    "log",
    [
        tiny([1, 2, 2], [1, 1, 1], [1, 1, 1]),
        tiny([1, 1, 2], [1, 1, 1], [1, 1]),
        tiny([1, 2], [5]),
        tiny([1, 2, 1, 2]),
        tiny([1, 1, 2], [1, 2, 2], [3, 3, 4]),
        tiny([1, None, None, 2], [3, 3], [3, 3]),
        tiny([1, 5, 5, 2, 2], [3, 3], [3, 3], mask=[[True, False, False, True, True], [True] * 2, [True] * 2]),
    ],
    ids=["first", "last", "one token", "one sequence", "no controls", "unknown before", "tool at the switch"],
)
@pytest.mark.parametrize("window", [0, 2, 32])
def test_small_logs_have_values_or_nulls(log: Arrays, window: int) -> None:
    with store_of(log) as store:
        result = study(store, window)
    same(result, event_study(log, window, exact=False))
    at = {r["offset"]: r for r in result.table.to_pylist()}
    assert at[0]["n"] == sum(len(switches) for _, switches in kinds(log).values())
    if sum(kind == "control" for kind, _ in kinds(log).values()) < 2:
        assert all(r["n_matched"] == 0 and r["mean_sq_delta_diff"] is None for r in at.values())
        assert "no control" in result.notes[1]


def test_a_tie_goes_to_the_earlier_switch_and_a_token_to_one_only() -> None:
    with store_of(tiny([1, 1, 2, 2, 3, 3], [1] * 6, [1] * 6)) as store:
        rows = {r["offset"]: r["n"] for r in study(store, 3).table.to_pylist()}
    assert rows == {-3: 0, -2: 1, -1: 1, 0: 2, 1: 2, 2: 0, 3: 0}


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (tiny([1, 1, 1], [2, 2]), "none of the 2 sequences with known versions has a switch"),
        (tiny([4]), "none of the 1 sequences with known versions has a switch"),
        (tiny([None, 1, None], [None, 2]), "no sequence has a policy_version at its first and last sampled token"),
        (tiny([1, 2, 1], mask=[[True, False, True]]), "none of the 1 sequences"),
        (tiny([1, 2], mask=[[False, False]]), "no sequence has a policy_version"),
    ],
)
def test_without_a_switch_there_is_a_reason(log: Arrays, why: str) -> None:
    with store_of(log) as store:
        result = study(store)
    assert result.rows() == []
    assert "mean_sq_delta_diff" in result.table.column_names
    assert why in result.notes[0]


def test_without_versions_the_column_is_named_and_how_to_get_it() -> None:
    log = make_log(1)
    del log["policy_version"]
    with store_of(log) as store:
        result = study(store)
    assert result.rows() == []
    assert "no sequence has a policy_version" in result.notes[0]
    assert "log the weight version with each generated token" in result.notes[0]


@pytest.mark.parametrize(("every", "switching"), [(2, 2), (1, 5)])
def test_versions_by_sequence_only_are_said_to_be_too_coarse(every: int, switching: int) -> None:
    import pyarrow as pa

    # With every sequence switching no token has a version, and policy_version is not even a column.
    first = [1 if s % every == every - 1 else 2 for s in range(5)]
    rows = [
        {"seq_id": s, "pos": p, "logp_infer": -1.0, "logp_train": -1.1, "version_first": first[s], "version_last": 2}
        for s in range(5)
        for p in range(4)
    ]
    with ed.from_frame(pa.Table.from_pylist(rows), all_sampled=True) as log:
        result = study(log.store)
    assert result.rows() == []
    assert "versions by sequence only (runs.version_granularity), switch positions are lost" in result.notes[0]
    assert f"{switching} sequences have a switch somewhere" in result.notes[0]


def test_a_scan_has_one_view() -> None:
    requests = [Request("s", {}, ("n",), view) for view in (None, "select 1 as one")]
    with pytest.raises(ValueError, match="over two views"):
        scan_query(requests, frozenset({"logp_infer"}))


def test_a_view_is_grouped_and_summed_as_tok_is() -> None:
    view = "select seq_id, count(*) over () as sequences from log_sequences"
    with store_of(tiny([1, 1], [1], [1])) as store:
        present = frozenset(store.column_counts())
        rows = store.rows(scan_query([Request("s", {"of": "sequences"}, ("n",), view)], present))
    assert rows == [{"of": 3, "n": 3.0}]
