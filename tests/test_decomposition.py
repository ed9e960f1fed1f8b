"""Noise against exploration: planted truths come back, intervals cover them, nothing is made up."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls  # type: ignore[import-untyped]

from estr_diag.errors import UsageError
from estr_diag.result import Result
from estr_diag.stats.crossover import find
from estr_diag.stats.decomposition import Decomposition, NoiseShare
from estr_diag.stats.entropy_bins import EntropyBins
from estr_diag.stats.grid import EntropyGrid, quantile_grid
from estr_diag.stats.positions import Strata, judge
from estr_diag.store.engine import Statistic, run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays, Floats

LEVELS = np.array([0.02, 0.06, 0.2, 0.6, 1.2, 2.4])
"""Entropies of the simulated log, one a bin."""
NOISE = 3e-3 + 0.002 * LEVELS
GRID = EntropyGrid(tuple(round(16 * math.log2(h)) for h in (0.01, 0.04, 0.1, 0.4, 0.9, 2.0, 4.0)))


def exploration(level: Floats, lag: Floats) -> Floats:
    """E[d^2] of a bin (by its entropy) and lag."""
    return np.asarray(0.012 * level * (lag + 0.25 * lag**2))


def simulate(seed: int, *, sequences: int = 400, length: int = 120, lags: tuple[int, ...] = (0, 1, 2, 3)) -> Arrays:
    """A log whose noise and exploration are known by bin and lag.

    Noise and drift have a size and a sign of their own in each sequence (so its tokens are correlated); lag falls
    along a sequence at in-flight updates, and differs between sequences.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 4, 2 * length, sequences)
    n, seq = int(lengths.sum()), np.repeat(np.arange(sequences), lengths)
    level = LEVELS[rng.choice(len(LEVELS), n, p=[0.35, 0.2, 0.15, 0.1, 0.12, 0.08])]
    pos = np.concatenate([np.arange(k) for k in lengths])
    start = rng.integers(0, len(lags), sequences)
    switches = (pos > rng.integers(1, 2 * length, sequences)[seq]).astype(int)
    lag = np.array(lags)[np.maximum(start[seq] - switches, 0)]

    def correlated(scale: Floats, share: float) -> Floats:
        size = rng.gamma(6, 1 / 6, sequences)[seq]
        common = rng.normal(size=(sequences, 1))[seq, 0]
        return np.asarray(
            np.sqrt(scale * size) * (math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=n))
        )

    xi = correlated(3e-3 + 0.002 * level, 0.1)
    d = correlated(exploration(level, lag), 0.1)
    infer = np.full(n, -2.0)
    step = np.full(n, 9)
    return {
        "seq_id": seq, "step": step, "logp_infer": infer.astype(np.float32),
        "logp_train": (infer + xi + d).astype(np.float32), "logp_replay": (infer + xi).astype(np.float32),
        "entropy": level.astype(np.float32), "policy_version": (step - lag).astype(np.int32),
        "trainer_version": step.astype(np.int32), "loss_mask": np.ones(n, dtype=bool),
    }  # fmt: skip


def without(log: Arrays, *names: str) -> Arrays:
    return {k: v for k, v in log.items() if k not in names}


def compute(log: Arrays, *statistics: Statistic) -> list[Result]:
    with store_of(log) as store:
        outcome = run(store, {str(i): s for i, s in enumerate(statistics)})
    assert not outcome.missing
    results = [outcome.results[str(i)] for i in range(len(statistics))]
    for result in results:
        json.dumps(result.to_json(), allow_nan=False)
        assert not any(
            isinstance(v, float) and not math.isfinite(v) for r in result.table.to_pylist() for v in r.values()
        )
    return results


def coverage(seeds: range) -> tuple[int, int, list[dict[str, Any]]]:
    """How many intervals of cells with n >= 200 hold the truth."""
    rows = []
    for seed in seeds:
        log = without(simulate(seed), "logp_replay")
        for row in compute(log, Decomposition(GRID))[0].table.to_pylist():
            if row["lag"] and row["n"] >= 200:
                truth = float(exploration(LEVELS[row["entropy_bin"] - 1], row["lag"]))
                rows.append({**row, "truth": truth, "hit": row["ci_low"] <= truth <= row["ci_high"]})
    return sum(r["hit"] for r in rows), len(rows), rows


@pytest.mark.slow
def test_intervals_of_the_lag_contrast_cover_the_planted_exploration() -> None:
    hits, cells, rows = coverage(range(15))
    assert cells == 15 * 18
    assert hits / cells >= 0.9, hits / cells
    # Neither by being too wide: at high entropy the truth is many standard errors from 0.
    strong = [r for r in rows if r["entropy_bin"] >= 4]
    assert np.median([r["se"] / r["truth"] for r in strong]) < 0.2
    assert abs(np.mean([r["exploration"] / r["truth"] for r in strong]) - 1) < 0.03


def cells_of(log: Arrays) -> dict[tuple[int, int], Arrays]:
    """Counted tokens of each entropy bin and lag, by comparing with the edges."""
    tokens = oracles.counted(log)
    edges = 2.0 ** (np.array(GRID.cells) / 16)
    bins = np.where(
        tokens["entropy"] <= 0, 0, np.clip(np.searchsorted(edges, tokens["entropy"], "right"), 1, len(edges) - 1)
    )
    lag = tokens["trainer_version"] - tokens["policy_version"]
    keys = sorted(set(zip(bins.tolist(), lag.tolist(), strict=True)))
    return {(b, k): {name: v[(bins == b) & (lag == k)] for name, v in tokens.items()} for b, k in keys}


def close(a: float | None, b: float, scale: float = 0.0) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 * scale + 1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_the_lag_contrast_equals_numpy(seed: int) -> None:
    log = make_log(seed, sequences=40, mean_length=80)
    result, share = compute(log, Decomposition(GRID, by_position=False), NoiseShare(GRID, by_position=False))
    cells = cells_of(log)
    rows = {(r["entropy_bin"], r["lag"]): r for r in result.table.to_pylist()}
    assert set(rows) == set(cells)
    assert result.parameters["method"] == "lag_contrast"
    noise_sum = total_sum = 0.0
    for (b, k), part in cells.items():
        row, d2 = rows[b, k], part["delta"] ** 2
        base = float(np.mean(cells[b, 0]["delta"] ** 2))
        assert (row["n"], row["n_sequences"]) == (len(d2), len(np.unique(part["seq_id"])))
        assert row["n_noise"] == len(cells[b, 0]["delta"])
        assert row["small"] == (len(d2) < 200 or row["n_noise"] < 200)
        assert close(row["noise"], base)
        assert close(row["total"], float(d2.mean()))
        assert close(row["exploration"], float(d2.mean()) - base, scale=base)
        assert row["cross"] is None
        assert close(row["mean_entropy"], float(part["entropy"].mean()))
        noise_sum, total_sum = noise_sum + base * len(d2), total_sum + float(d2.sum())
        if k == 0:
            assert row["exploration"] == 0
            assert row["se"] is None
            assert row["ci_low"] is None
    whole, *by_lag = share.table.to_pylist()
    assert close(whole["noise_share"], noise_sum / total_sum)
    assert whole["lag"] is None
    assert whole["n"] == sum(len(p["delta"]) for p in cells.values())
    for row in by_lag:
        mine = {b: p for (b, k), p in cells.items() if k == row["lag"]}
        noise = sum(len(p["delta"]) * float(np.mean(cells[b, 0]["delta"] ** 2)) for b, p in mine.items())
        assert close(row["noise_share"], noise / sum(float((p["delta"] ** 2).sum()) for p in mine.values()))
    assert by_lag[0]["noise_share"] == pytest.approx(1, rel=1e-12)


def test_the_standard_error_is_that_of_resampled_sequences() -> None:
    log = without(simulate(2, sequences=200), "logp_replay")
    row = next(
        r
        for r in compute(log, Decomposition(GRID, replicates=4000))[0].table.to_pylist()
        if (r["entropy_bin"], r["lag"]) == (1, 2)
    )
    cells, names = cells_of(log), np.unique(log["seq_id"])

    def sums(part: Arrays) -> tuple[Floats, Floats]:
        return (
            np.array([np.count_nonzero(part["seq_id"] == s) for s in names], dtype=float),
            np.array([(part["delta"][part["seq_id"] == s] ** 2).sum() for s in names]),
        )

    (n0, s0), (n2, s2) = sums(cells[1, 0]), sums(cells[1, 2])
    # Delta method on the same clusters: lag-0 and lag-2 tokens of one sequence move together.
    influence = (s2 - s2.sum() / n2.sum() * n2) / n2.sum() - (s0 - s0.sum() / n0.sum() * n0) / n0.sum()
    expected = math.sqrt(float((influence**2).sum()) * len(names) / (len(names) - 1))
    naive = math.sqrt(sum(float(np.var(p["delta"] ** 2)) / len(p["delta"]) for p in (cells[1, 0], cells[1, 2])))
    assert row["se"] == pytest.approx(expected, rel=0.1)
    assert row["se"] > 1.2 * naive


def test_the_exact_method_equals_direct_sums() -> None:
    log = simulate(3, sequences=30)
    log["logp_replay"][::7] = np.nan
    result, share = compute(log, Decomposition(GRID), NoiseShare(GRID))
    assert result.parameters["method"] == share.table["method"][0].as_py() == "exact"
    whole = np.zeros(4)
    for row in result.table.to_pylist():
        part = cells_of(log)[row["entropy_bin"], row["lag"]]
        replay = part["logp_replay"].astype(float)
        known = np.isfinite(replay)
        xi, d = (replay - part["logp_infer"])[known], (part["logp_train"] - replay)[known]
        assert row["n"] == len(known)
        assert row["n_used"] == known.sum()
        assert close(row["noise"], float((xi**2).mean()))
        assert close(row["exploration"], float((d**2).mean()))
        assert close(row["cross"], float(2 * (xi * d).mean()), scale=row["noise"])
        assert close(row["total"], float(((xi + d) ** 2).mean()))
        whole += [(xi**2).sum(), (d**2).sum(), ((xi + d) ** 2).sum(), known.sum()]
    overall = share.table.to_pylist()[0]
    assert close(overall["noise_share"], whole[0] / whole[2])
    assert close(overall["exploration"], whole[1] / whole[3])
    missing = int(np.isnan(log["logp_replay"]).sum())
    assert any(f"{missing:,} counted tokens have no logp_replay" in note for note in result.notes)


def test_exact_and_contrast_agree_on_the_same_log() -> None:
    exact, contrast = compute(simulate(4), Decomposition(GRID), Decomposition(GRID, "lag_contrast"))
    pairs = list(zip(exact.table.to_pylist(), contrast.table.to_pylist(), strict=True))
    stale = [(a, b) for a, b in pairs if a["lag"] and a["n"] >= 200]
    assert all(abs(a["exploration"] - b["exploration"]) < 5 * b["se"] for a, b in stale)
    assert np.mean([b["ci_low"] <= a["exploration"] <= b["ci_high"] for a, b in stale]) >= 0.8


def planted(moments: dict[tuple[int, int], float], each: int = 300) -> Arrays:
    """A log whose E[delta^2] by (bin, lag) is exactly as given: delta = +- its root."""
    keys = [key for key in moments for _ in range(each)]
    level, lag = LEVELS[[b - 1 for b, _ in keys]], np.array([k for _, k in keys])
    delta = np.sqrt([moments[key] for key in keys]) * np.where(np.arange(len(keys)) % 2, 1, -1)
    n = len(keys)
    order = np.arange(n) % 10
    order.sort()
    mix = np.random.default_rng(0).permutation(n)
    log = {
        "logp_infer": np.full(n, -16.0), "logp_train": -16.0 + delta[mix], "entropy": level[mix],
        "policy_version": (9 - lag[mix]).astype(np.int32), "trainer_version": np.full(n, 9, dtype=np.int32),
        "step": np.full(n, 9), "loss_mask": np.ones(n, dtype=bool),
    }  # fmt: skip
    return {"seq_id": order, **log}


def test_a_planted_parabola_is_extrapolated() -> None:
    truth = {(b, k): 0.01 * b + 0.02 * k + 0.005 * b * k * k for b in (1, 3, 5) for k in (1, 2, 4)}
    result, share = compute(planted(truth), Decomposition(GRID), NoiseShare(GRID))
    assert result.parameters["method"] == "extrapolated"
    assert "extrapolated to lag 0" in result.notes[0]
    assert share.table["method"].to_pylist() == ["extrapolated"] * 4
    for row in result.table.to_pylist():
        b, k = row["entropy_bin"], row["lag"]
        assert row["noise"] == pytest.approx(0.01 * b, rel=1e-4)
        assert row["exploration"] == pytest.approx(truth[b, k] - 0.01 * b, rel=1e-4)


def test_extrapolation_equals_nnls_of_the_cells() -> None:
    log = without(simulate(5, sequences=80, lags=(1, 2, 3, 5)), "logp_replay")
    rows, cells = compute(log, Decomposition(GRID, by_position=False))[0].table.to_pylist(), cells_of(log)
    for b in range(1, 7):
        k = np.array([float(lag) for bin_, lag in cells if bin_ == b])
        n = np.array([len(p["delta"]) for (bin_, _), p in cells.items() if bin_ == b])
        m = np.array([np.mean(p["delta"] ** 2) for (bin_, _), p in cells.items() if bin_ == b])
        w = np.sqrt(n)
        intercept = nnls(np.stack([w, w * k, w * k * k], 1), w * m)[0][0]
        found = [r["noise"] for r in rows if r["entropy_bin"] == b]
        assert found == pytest.approx([intercept] * 4, rel=1e-6, abs=1e-12)


def test_negative_estimates_are_kept() -> None:
    result = compute(planted({(2, 0): 0.04, (2, 1): 0.01}), Decomposition(GRID))[0]
    stale = result.table.to_pylist()[1]
    assert stale["exploration"] == pytest.approx(-0.03, rel=1e-5)
    assert stale["ci_high"] < 0


def test_the_crossover_of_a_planted_curve() -> None:
    noise = 0.01
    moments = {(b, 0): noise for b in range(1, 7)} | {(b, 1): noise + 0.02 * LEVELS[b - 1] for b in range(1, 7)}
    rows = compute(planted(moments), NoiseShare(GRID))[0].table.to_pylist()
    whole = rows[0]
    # exploration = 0.02 H meets the noise at H = 0.5, between 0.2 and 0.6: linear in log H there
    gap = 0.02 * LEVELS - noise
    share = -gap[2] / (gap[3] - gap[2])
    expected = math.exp(math.log(0.2) + share * math.log(3))
    assert whole["crossover_entropy"] == pytest.approx(expected, rel=1e-3)
    assert whole["crossover_low"] <= whole["crossover_entropy"] <= whole["crossover_high"]
    assert rows[1]["crossover_entropy"] is None
    assert "lag 0" in rows[1]["crossover"]
    assert rows[2]["crossover_entropy"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("factor", "word"), [(100.0, "exploration leads wherever it can be told"), (0.1, "noise leads wherever")]
)
def test_no_crossover_says_which_leads(factor: float, word: str) -> None:
    moments = {(b, k): 0.01 + k * 0.01 * factor for b in (1, 2, 3) for k in (0, 1)}
    whole = compute(planted(moments), NoiseShare(GRID))[0].table.to_pylist()[0]
    assert whole["crossover_entropy"] is None
    assert word in whole["crossover"]


def _replicates(ahead: list[float], error: list[float]) -> Floats:
    return np.asarray(np.array(ahead) + np.random.default_rng(0).normal(size=(500, len(ahead))) * np.array(error))


def test_a_lead_by_chance_at_low_entropy_is_no_crossover() -> None:
    """The point estimates cross twice; only the upper crossing is beyond sampling error."""
    ahead, error = [0.5, -0.2, -1.0, 2.0], [5.0, 5.0, 0.1, 0.1]
    found = find(np.array([0.001, 0.01, 0.1, 1.0]), np.array(ahead), _replicates(ahead, error))
    assert found.value == pytest.approx(math.exp(math.log(0.1) + math.log(10) / 3))
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert 0.1 <= found.low < found.value < found.high <= 1.0


def test_what_cannot_be_told_is_said() -> None:
    entropy = np.array([0.01, 0.1, 1.0])
    nothing = find(entropy, np.array([0.1, -0.1, 0.1]), _replicates([0.1, -0.1, 0.1], [5.0, 5.0, 5.0]))
    assert nothing.text.startswith("cannot tell where exploration overtakes noise: in no entropy bin")
    from_above = find(entropy, np.array([0.1, 0.1, 3.0]), _replicates([0.1, 0.1, 3.0], [5.0, 5.0, 0.1]))
    assert (
        from_above.text
        == "exploration leads wherever it can be told, from mean H = 1 nats on; below, it cannot be told"
    )
    mixed = find(entropy, np.array([3.0, -3.0, 3.0]), _replicates([3.0, -3.0, 3.0], [0.1, 0.1, 0.1]))
    assert "no single crossover" in mixed.text
    assert {nothing.value, from_above.value, mixed.value} == {None}
    assert find(entropy, np.ones(3), None).text.endswith("fewer than two sequences")


def test_few_tokens_have_no_crossover() -> None:
    assert "cannot tell" in find(np.array([]), np.array([]), None).text


def test_contrasts_inside_position_buckets() -> None:
    """Noise grows with position and lag falls along a sequence: only the stratified contrast is right."""
    rng = np.random.default_rng(0)
    sequences, length = 200, 64
    n, seq = sequences * length, np.repeat(np.arange(sequences), length)
    pos = np.tile(np.arange(length), sequences)
    lag = np.where(pos < rng.integers(5, 60, sequences)[seq], 1, 0)
    noise = 0.001 * 4.0 ** np.floor(np.log2(pos + 1))
    delta = np.sqrt(noise) * rng.normal(size=n)
    log = {
        "seq_id": seq, "step": np.full(n, 9), "logp_infer": np.full(n, -9.0),
        "logp_train": (-9.0 + delta).astype(np.float32),
        "entropy": np.full(n, LEVELS[3]), "policy_version": 9 - lag, "trainer_version": np.full(n, 9),
        "loss_mask": np.ones(n, dtype=bool),
    }  # fmt: skip
    plain, inside = (
        next(r for r in result.table.to_pylist() if r["lag"] == 1)
        for result in compute(log, Decomposition(GRID, by_position=False), Decomposition(GRID, by_position=True))
    )
    assert plain["ci_high"] < 0, "confounded: early tokens are stale and quiet"
    assert inside["ci_low"] < 0 < inside["ci_high"]
    bucket, tokens = np.floor(np.log2(pos + 1)), oracles.counted(log)
    expected = used = 0.0
    for b in np.unique(bucket):
        stale, fresh = (tokens["delta"][(bucket == b) & (lag == k)] ** 2 for k in (1, 0))
        if len(stale) and len(fresh):
            expected, used = expected + len(stale) * (stale.mean() - fresh.mean()), used + len(stale)
    assert inside["n_used"] == used < inside["n"]
    assert plain["n_used"] == plain["n"]
    assert close(inside["exploration"], expected / used, scale=inside["noise"])
    assert inside["noise"] + inside["exploration"] == pytest.approx(inside["total"])


def test_by_position_where_lag_zero_stands_at_most_positions() -> None:
    n, lag, bins = np.array([100.0, 19, 50, 50]), np.array([0.0, 0, 1, 2]), np.zeros(4)
    assert judge(n, lag, (bins, np.array([1.0, 2, 1, 1]))) == Strata(True, "")
    apart = judge(np.array([100.0, 19, 50, 100]), lag, (bins, np.array([1.0, 2, 1, 2])))
    assert not apart.by_position
    assert apart.note.startswith("not at equal position: 33% of the tokens have 20 lag-0 tokens")
    unknown = np.array([np.nan, 0, np.nan, 0])
    assert judge(n, unknown, (bins, bins)) == Strata(False, "")
    assert judge(n[:0], lag[:0], (bins[:0], bins[:0])) == Strata(False, "")
    log = without(simulate(1, sequences=60), "logp_replay")
    chosen, inside, plain = compute(
        log, Decomposition(GRID), Decomposition(GRID, by_position=True), Decomposition(GRID, by_position=False)
    )
    assert chosen.parameters["by_position"] is True
    assert chosen.rows() == inside.rows() != plain.rows()
    assert "position bucket" in chosen.parameters["assumption"]
    few = compute(without(simulate(1, sequences=4), "logp_replay"), Decomposition(GRID))[0]
    assert few.parameters["by_position"] is False
    assert any(note.startswith("not at equal position") for note in few.notes)


def test_tokens_without_lag_or_entropy_are_counted_not_used() -> None:
    log = without(simulate(1, sequences=20), "logp_replay")
    whole = compute(log, Decomposition(GRID))[0]
    extra = {k: np.concatenate([v, v[:50]]) for k, v in log.items()}
    extra["seq_id"][-50:] = 1000
    extra["policy_version"] = np.ma.masked_array(extra["policy_version"])
    extra["policy_version"][-50:-20] = np.ma.masked
    extra["entropy"][-20:] = np.nan
    result = compute(extra, Decomposition(GRID))[0]
    assert any("30 counted tokens have no lag" in note for note in result.notes)
    assert any("20 counted tokens have no entropy" in note for note in result.notes)
    same = ("entropy_bin", "lag", "n", "noise", "exploration", "total")
    assert [[r[k] for k in same] for r in result.rows()] == [[r[k] for k in same] for r in whole.rows()]


@pytest.mark.parametrize(
    ("lags", "dropped", "method", "reason"),
    [
        ((0, 1, 2), ("policy_version",), "none", "log policy_version and trainer_version"),
        ((1, 2), (), "none", "no token has lag 0"),
        ((1, 2), (), "none", "2 distinct lags"),
        ((1, 2, 3), (), "extrapolated", "no token has lag 0"),
        ((0, 1), (), "lag_contrast", "no logp_replay"),
        ((0,), (), "lag_contrast", "every token has lag 0"),
    ],
)
def test_the_method_follows_the_log(lags: tuple[int, ...], dropped: tuple[str, ...], method: str, reason: str) -> None:
    log = without(simulate(1, sequences=20, lags=lags), "logp_replay", *dropped)
    cells, share = compute(log, Decomposition(GRID, by_position=False), NoiseShare(GRID, by_position=False))
    assert cells.parameters["method"] == method
    assert any(reason in note for note in cells.notes), cells.notes
    whole = share.table.to_pylist()[0]
    assert close(whole["total"], float(np.mean(oracles.counted(log)["delta"] ** 2)))
    assert (whole["noise_share"] is None) == (method == "none")


def test_a_forced_method_that_the_log_does_not_allow_says_why() -> None:
    log = without(simulate(1, sequences=20), "logp_replay")
    result = compute(log, Decomposition(GRID, "exact"))[0]
    assert result.parameters["method"] == "none"
    assert any("exact was asked for, but the log has no logp_replay" in note for note in result.notes)
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        Decomposition(GRID, "exakt")  # type: ignore[arg-type]


def test_any_split_by_sequence_merges_to_the_whole_and_row_order_does_not_matter() -> None:
    log = simulate(6, sequences=24)
    for chosen in (log, without(log, "logp_replay")):
        whole = compute(chosen, Decomposition(GRID), NoiseShare(GRID))
        shards = [{k: v[np.isin(chosen["seq_id"], range(a, a + 8))] for k, v in chosen.items()} for a in (0, 8, 16)]
        with store_of(*shards) as store:
            parts = run(store, {"0": Decomposition(GRID), "1": NoiseShare(GRID)}).results
        with store_of(chosen) as store:
            store.connection.execute(
                "create temp table shuffled as select * from tokens order by hash(seq_id * 7919 + pos)"
            )
            store.connection.execute("delete from tokens")
            store.connection.execute("insert into tokens select * from shuffled")
            shuffled = run(store, {"0": Decomposition(GRID), "1": NoiseShare(GRID)}).results
        for i, expected in enumerate(whole):
            for other in (parts[str(i)], shuffled[str(i)]):
                for a, b in zip(expected.table.to_pylist(), other.table.to_pylist(), strict=True):
                    for name, value in a.items():
                        assert b[name] == (
                            pytest.approx(value, rel=1e-9, abs=1e-15) if isinstance(value, float) else value
                        )


def tiny(n: int = 1, sequences: int = 1, **columns: Any) -> Arrays:
    base: dict[str, Any] = {
        "seq_id": np.arange(n) % sequences, "step": 3, "logp_infer": -60.0, "logp_train": -60.0, "entropy": 0.2,
        "policy_version": 3, "trainer_version": 3, "loss_mask": True,
    }  # fmt: skip
    log = {k: np.broadcast_to(np.asarray(columns.get(k, v)), n).copy() for k, v in base.items()}
    log["seq_id"].sort()
    return log


ALTERNATING = np.arange(40) % 2
DEGENERATE = {
    "one token": tiny(),
    "one sequence": tiny(40, policy_version=3 - ALTERNATING, logp_train=-60 + ALTERNATING),
    "one lag": tiny(40, 4, policy_version=2),
    "all deltas zero": tiny(40, 4, policy_version=3 - ALTERNATING),
    "entropy exactly 0": tiny(40, 4, entropy=0.0, policy_version=3 - ALTERNATING),
    "extreme deltas": tiny(40, 4, logp_train=-60 + 50 * (2 * ALTERNATING - 1), policy_version=3 - ALTERNATING),
    "no counted token": tiny(5, loss_mask=False),
    "negative lag": tiny(40, 4, policy_version=4),
    "three lags, zero deltas": tiny(60, 6, policy_version=np.arange(60) % 3),
    "no lag known": tiny(40, 4, logp_train=-59.0)
    | {"policy_version": np.ma.masked_array(np.zeros(40, np.int32), mask=True)},
}


@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("method", [None, "exact", "lag_contrast", "extrapolated", "none"])
@pytest.mark.parametrize("by_position", [False, True])
def test_degenerate_logs_give_a_value_or_a_reason(name: str, method: Any, by_position: bool) -> None:
    log = dict(DEGENERATE[name], logp_replay=DEGENERATE[name]["logp_infer"]) if method == "exact" else DEGENERATE[name]
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 4)
    cells, share = compute(log, Decomposition(grid, method, by_position), NoiseShare(grid, method, by_position))
    assert len(cells.notes) >= 1
    assert share.parameters["method"] in ("exact", "lag_contrast", "extrapolated", "none")
    assert sum(r["n"] for r in cells.table.to_pylist()) == share.table.to_pylist()[0]["n"]
    if name == "all deltas zero" and method is None:
        assert share.table.to_pylist()[0]["noise_share"] is None, "0 / 0 is no share"
        assert [r["noise"] for r in cells.table.to_pylist()] == [0, 0]
    if name == "one sequence" and method is None:
        assert all(r["se"] is None and r["ci_low"] is None for r in cells.table.to_pylist())


def test_scans_are_shared() -> None:
    with store_of(make_log(1)) as store:
        present = frozenset(store.column_counts())
        grid = quantile_grid(store, present, 4)
        statistics: list[Statistic] = [Decomposition(grid), NoiseShare(grid), EntropyBins(grid, by_lag=True)]
        assert {r.scan for s in statistics for r in s.requests(present)} == {"sums", "sums_by_position", "histogram"}
        assert len(run(store, {str(i): s for i, s in enumerate(statistics)}).results) == 3


def test_many_sequences_are_pooled_without_changing_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    log = without(simulate(1, sequences=400), "logp_replay")
    plain = compute(log, Decomposition(GRID))[0].table.to_pylist()
    monkeypatch.setattr("estr_diag.stats.split_log._MAX_CELLS", 1)
    pooled = compute(log, Decomposition(GRID))[0].table.to_pylist()
    ratios = [b["se"] / a["se"] for a, b in zip(plain, pooled, strict=True) if a["se"]]
    assert ratios != [1.0] * len(ratios)
    assert np.mean(ratios) == pytest.approx(1, abs=0.1)
    assert all(close(b["noise"], a["noise"]) for a, b in zip(plain, pooled, strict=True))
