"""Differences between logs: NumPy, false alarms, planted changes, windows, and what cannot be compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from estr_diag.cli import diff_command  # noqa: F401  registers the command
from estr_diag.errors import UsageError
from estr_diag.report import diff_page
from estr_diag.report.diff_document import DiffDocument, DiffRow
from estr_diag.report.difference import Side, difference
from estr_diag.rules import DEFAULT_RULES, Rule, get
from estr_diag.stats.common_grid import common_grid
from estr_diag.stats.decomposition import NoiseShare
from estr_diag.stats.grid import Bins, histogram
from estr_diag.stats.split_errors import SplitErrors
from estr_diag.stats.two_samples import Estimate, holm
from estr_diag.stats.two_samples import difference as between
from estr_diag.store.engine import run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays

MADE: dict[str, Any] = {"sequences": 60, "mean_length": 60, "steps": 12}


def diff(a: Arrays, b: Arrays, rules: tuple[Rule, ...] = DEFAULT_RULES, bins: Bins | None = None) -> DiffDocument:
    with store_of(a) as first, store_of(b) as second:
        return difference(Side(first, "a"), Side(second, "b"), rules, bins)


def row(document: DiffDocument, name: str) -> DiffRow:
    return next(r for _, r in document.rows() if r.name == name)


def close(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=1e-9, abs=1e-11)


@pytest.fixture(scope="module")
def pair() -> tuple[Arrays, Arrays, DiffDocument]:
    a, b = make_log(1, **MADE), make_log(2, **(MADE | {"sequences": 40}))
    return a, b, diff(a, b, bins=6)


# -- NumPy ---------------------------------------------------------------------------------------


def test_values_are_those_of_the_oracles(pair: tuple[Arrays, Arrays, DiffDocument]) -> None:
    a, b, document = pair
    twins = [oracles.token_metrics(oracles.counted(x)) | oracles.sequence_metrics(oracles.counted(x)) for x in (a, b)]
    compared = [r for r in document.metrics if r.verdict != "not_compared"]
    assert len(compared) > 40
    for r in compared:
        assert r.a.value == close(twins[0][r.name]), r.name
        assert r.b.value == close(twins[1][r.name]), r.name
    for shown in document.without_error:
        if shown.name in twins[0]:
            assert (shown.a, shown.b) == (close(twins[0][shown.name]), close(twins[1][shown.name])), shown.name


def token_values(log: Arrays, rules: bool = False) -> dict[str, tuple[oracles.Floats, Any, Any]]:
    """Name -> values of tokens, their sequences, their steps."""
    t = oracles.counted(log)
    fresh = t["trainer_version"] == t["policy_version"]
    sure = (np.exp(t["logp_infer"]) > 0.5) & (t["delta"] < -2)
    values: dict[str, tuple[Any, Any]] = {
        "mean_abs_delta": (np.abs(t["delta"]), slice(None)),
        "mean_sq_delta": (t["delta"] ** 2, slice(None)),
        "entropy_mean": (t["entropy"], slice(None)),
        "share_above_1_2": ((oracles.ratio(t["delta"]) > 1.2).astype(float), slice(None)),
        "confident_disagreement_lag0": (sure.astype(float), fresh),
    }
    if rules:
        values = {r.label: ((~oracles.keep(r.key, t)).astype(float), slice(None)) for r in DEFAULT_RULES[1:]}
    return {name: (v[at], t["seq_id"][at], t["step"][at]) for name, (v, at) in values.items()}


@pytest.mark.parametrize("rules", [False, True])
def test_differences_and_errors_are_those_of_numpy(pair: tuple[Arrays, Arrays, DiffDocument], rules: bool) -> None:
    a, b, document = pair
    first, second = token_values(a, rules), token_values(b, rules)
    for name in first:
        check(row(document, name), first[name], second[name])


def check(found: DiffRow, a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> None:
    """Every number of a row, from tokens."""
    means, errors, step_errors, sizes = [], [], [], []
    for values, sequences, steps in (a, b):
        mean, se = oracles.cluster_mean(values, sequences)
        _, by_step = oracles.cluster_mean(values, steps)
        assert se is not None
        assert by_step is not None
        means.append(mean)
        errors.append(se)
        step_errors.append(by_step)
        sizes.append((len(np.unique(sequences)), len(values), len(np.unique(steps))))
    assert found.difference == close(means[1] - means[0]), found.name
    assert found.se == close(math.hypot(*errors))
    assert found.se_steps == close(math.hypot(*step_errors))
    alike = []
    for unit in (0, 1):
        (na, nb), weights = (s[unit] for s in sizes), [s[0] - 1 for s in sizes]
        spread = (weights[0] * errors[0] ** 2 * na + weights[1] * errors[1] ** 2 * nb) / sum(weights)
        alike.append(math.sqrt(spread / na + spread / nb))
    assert found.se_alike == close(max(alike))

    def reach(e: list[float], n: list[int]) -> tuple[float, float]:
        df = sum(x * x for x in e) ** 2 / sum(x**4 / (k - 1) for x, k in zip(e, n, strict=True))
        return float(stats.t.ppf(0.975, df)), df

    quantile, df = reach(errors, [s[0] for s in sizes])
    step_quantile, step_df = reach(step_errors, [s[2] for s in sizes])
    options = [(quantile * math.hypot(*errors), math.hypot(*errors), df), (quantile * max(alike), max(alike), df)]
    widest, error, df = max([*options, (step_quantile * math.hypot(*step_errors), math.hypot(*step_errors), step_df)])
    assert (found.low, found.high) == (close(means[1] - means[0] - widest), close(means[1] - means[0] + widest))
    assert found.z == close((means[1] - means[0]) / error)
    assert found.df == close(df)
    assert found.p == close(2 * float(stats.t.sf(abs((means[1] - means[0]) / error), df)))
    assert found.relative == close((means[1] - means[0]) / abs(means[0]) if means[0] else None)


def test_sequence_means(pair: tuple[Arrays, Arrays, DiffDocument]) -> None:
    a, b, document = pair
    sides = []
    for log in (a, b):
        t = oracles.counted(log)
        names = np.unique(t["seq_id"])
        values = np.array([np.abs(t["delta"][t["seq_id"] == s]).max() for s in names])
        sides.append((values, names, np.array([t["step"][t["seq_id"] == s][0] for s in names])))
    check(row(document, "seq_delta_max_abs"), *sides)


def test_bins_are_common_and_their_means_are_those_of_numpy(pair: tuple[Arrays, Arrays, DiffDocument]) -> None:
    a, b, document = pair
    compared = [r for r in document.entropy_bins if r.verdict != "not_compared"]
    assert len(compared) >= 4
    sides = [oracles.counted(x) for x in (a, b)]
    for r in compared:
        picked = []
        for t in sides:
            inside = (t["entropy"] >= r.lo) & (t["entropy"] < (r.hi or np.inf))
            inside = t["entropy"] == 0 if r.hi == 0 else inside
            picked.append((t["delta"][inside] ** 2, t["seq_id"][inside], t["step"][inside]))
        check(r, *picked)
    assert sum(r.a.n or 0 for r in document.entropy_bins) == len(sides[0]["delta"])


def test_each_side_weighs_one_half_in_the_bins() -> None:
    long, short = make_log(3, sequences=200), make_log(4, sequences=20)
    short["entropy"] = short["entropy"] * 8
    with store_of(long) as a, store_of(short) as b:
        grid = common_grid(a, b, 8)
        assert grid is not None
        cells = [histogram(s, s.present()) for s in (a, b)]
        shares = []
        for low, high in zip(grid.cells, grid.cells[1:], strict=False):
            both = [sum(n for c, n in h.items() if low <= c < high) / sum(h.values()) for h in cells]
            shares.append(sum(both) / 2)
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([1 / 8] * 8, abs=0.04)


@pytest.mark.parametrize("bins", [5, "5", "log", "log:4", "0.01,0.1,1", (0.01, 0.1, 1.0)])
def test_bins_as_everywhere(bins: Bins) -> None:
    with store_of(make_log(5)) as a, store_of(make_log(6)) as b:
        grid = common_grid(a, b, bins)
    assert grid is not None
    assert 2 <= grid.n_bins <= 26


@pytest.mark.parametrize("bins", [0, -3, 1000, "x", "log:x", "log:0", "3,2,1"])
def test_bad_bins_are_refused(bins: Bins) -> None:
    with store_of(make_log(5)) as a, store_of(make_log(6)) as b, pytest.raises(UsageError, match="expected"):
        common_grid(a, b, bins)


def test_noise_is_that_of_the_report(pair: tuple[Arrays, Arrays, DiffDocument]) -> None:
    a, b, document = pair
    assert document.split_method == "lag_contrast"
    # One side has lag-0 tokens at most positions, and the other has not.
    assert any("without regard to position, which both sides allow" in note for note in document.notes)
    for log, letter in ((a, "a"), (b, "b")):
        with store_of(log) as store, store_of(a) as first, store_of(b) as second:
            grid = common_grid(first, second, 6)
            assert grid is not None
            statistics = {
                "own": SplitErrors(grid, "lag_contrast", False),
                "report": NoiseShare(grid, "lag_contrast", False),
            }
            found = run(store, statistics).results
        whole, own = found["report"].rows()[0], {r["quantity"]: r for r in found["own"].rows()}
        for name in ("noise_share", "noise", "exploration"):
            assert own[name]["value"] == whole[name]
        assert (own["noise_share"]["ci_low"], own["noise_share"]["ci_high"]) == (whole["ci_low"], whole["ci_high"])
        t = oracles.counted(log)
        fresh = t["trainer_version"] == t["policy_version"]
        assert own["noise"]["n_sequences"] == len(np.unique(t["seq_id"][fresh]))
        shown = getattr(row(document, "noise_share"), letter)
        assert (shown.value, shown.se) == (own["noise_share"]["value"], own["noise_share"]["se"])


def test_one_method_for_both_sides() -> None:
    a, b = make_log(7, **MADE, holes=False), make_log(8, **MADE, holes=False)
    a["logp_replay"] = (a["logp_infer"] + a["logp_train"]) / 2
    document = diff(a, b)
    assert document.split_method == "lag_contrast"
    assert any("which both sides allow" in note for note in document.notes)
    assert row(document, "noise_share").verdict != "not_compared"
    assert diff(a, a).split_method == "exact"


# -- two estimates -------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_an_event_that_a_short_side_has_not_seen_is_no_change() -> None:
    long, short = Estimate(3.2e-4, 5e-5, 7680, 126_000), Estimate(0.0, 0.0, 16, 816)
    assert between(long, short).p > 0.1  # 0.3 events were expected
    assert between(short, long).p > 0.1
    assert between(long, Estimate(0.0, 0.0, 7680, 126_000)).p < 1e-6


def test_without_any_spread_few_sequences_prove_little() -> None:
    few, many = (between(Estimate(0.0, 0.0, n, n), Estimate(1.0, 0.0, n, n)) for n in (2, 40))
    assert few.z is None
    assert few.p == pytest.approx(1 / 3)
    assert many.p < 1e-9
    assert between(Estimate(1.0, 0.0, 9, 9), Estimate(1.0, 0.0, 9, 9)).p == 1


# -- false alarms and planted changes ------------------------------------------------------------


def alarms(pairs: list[tuple[Arrays, Arrays]]) -> tuple[int, float]:
    """Pages on which anything changed, and the share of rows beyond their own 95 % interval."""
    pages, beyond, rows = 0, 0, 0
    for a, b in pairs:
        document = diff(a, b)
        pages += bool(document.changed)
        compared = [r for _, r in document.rows() if r.p is not None]
        rows += len(compared)
        beyond += sum(r.p < 0.05 for r in compared if r.p is not None)
    return pages, beyond / rows


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(60, 60), (12, 12), (150, 12)])
def test_false_alarms_of_healthy_logs_are_rare(first: int, second: int) -> None:
    pairs = [(make_log(1000 + 2 * i, sequences=first), make_log(1001 + 2 * i, sequences=second)) for i in range(50)]
    pages, beyond = alarms(pairs)
    assert pages <= 3  # 2.5 pages at 5 %
    assert beyond <= 0.05


@pytest.mark.slow
def test_what_moves_from_step_to_step_is_no_change() -> None:
    def moving(seed: int) -> Arrays:
        log = make_log(seed, sequences=120, steps=12, mean_length=20)
        rng = np.random.default_rng(seed)
        log["entropy"] = (log["entropy"] * np.exp(rng.normal(0, 0.5, 12))[log["step"] - 5]).astype(np.float32)
        return log

    pages, beyond = alarms([(moving(100 + 2 * i), moving(101 + 2 * i)) for i in range(20)])
    assert pages <= 2
    assert beyond <= 0.06


def test_the_same_log_twice_has_not_changed() -> None:
    log = make_log(11, **MADE)
    document = diff(log, log)
    assert document.changed == []
    assert all(r.difference == 0 for _, r in document.rows() if r.verdict != "not_compared")
    assert document.shared_sequences == document.a.n_sequences == 60
    assert any("60 of A's 60 sequences are in B as well" in note and "overstated" in note for note in document.notes)
    assert "Nothing is told apart" in document.verdict
    assert document.facts == []


def test_a_planted_shift_is_found_with_its_size() -> None:
    a, b = make_log(12, **MADE), make_log(13, **MADE)
    b["logp_train"] = b["logp_train"] - np.float32(0.3)
    document = diff(a, b)
    # One and the same number: by token, and by sequence under two names.
    assert {"mean_delta", "log_ppl_diff", "seq_delta_mean"} <= {c.name for c in document.changed}
    found = row(document, "mean_delta")
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.3 < found.high
    assert row(document, "entropy_mean").verdict == "not_told_apart"
    sizes = [abs(c.z) for c in document.changed if c.z is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert document.verdict.startswith(f"{len(document.changed)} of {document.correction.comparisons} compared numbers")


def test_a_planted_factor_is_ranked_first_with_its_size() -> None:
    a, b = make_log(14, sequences=400, steps=12), make_log(15, sequences=400, steps=12)
    b["entropy"] = b["entropy"] * 2
    document = diff(a, b)
    assert document.changed[0].name == "entropy_mean"
    assert document.changed[0].relative == pytest.approx(1.0, abs=0.15)
    assert row(document, "mean_abs_delta").verdict == "not_told_apart"


def test_a_change_without_spread_stands_first() -> None:
    a, b = make_log(16, **MADE, lags=1), make_log(17, **MADE, lags=1)
    b["policy_version"] = b["policy_version"] - 1
    document = diff(a, b)
    assert (document.changed[0].z, document.changed[0].b) == (None, 1.0)
    assert {c.name for c in document.changed} >= {"staleness_mean", "inter_mean"}
    assert "no spread on either side" in document.verdict


# -- what cannot be compared ---------------------------------------------------------------------


def without(log: Arrays, *names: str) -> Arrays:
    return {name: values for name, values in log.items() if name not in names}


def test_what_one_side_lacks_is_said() -> None:
    a, b = make_log(30, **MADE), without(make_log(31, **MADE), "entropy")
    document = diff(a, b)
    found = row(document, "entropy_mean")
    assert (found.verdict, found.why) == ("not_compared", "B has no entropy")
    assert "full-vocabulary entropy" in found.how_to_get_it
    assert found.difference is None
    assert found.a.value is not None
    assert row(document, "mean_abs_delta").verdict == "not_told_apart"
    assert row(document, "estr:tau=4:eps=0.01").why == "B has no entropy"
    assert row(document, "icepop:low=0.5:high=5").verdict == "not_told_apart"
    assert {r.why for r in document.split} == {"B has no entropy"}
    assert document.entropy_bins == []
    assert (document.only_a, document.only_b) == (["entropy"], [])
    text = diff_page.markdown(document)
    assert "entropy\\_mean, scaled\\_sq\\_delta, noise\\_share" in text
    assert "B has no entropy. To get it: log the full-vocabulary entropy" in text
    both = diff(without(a, "entropy"), b)
    assert row(both, "entropy_mean").why == "neither side has entropy"
    one_engine = diff(a, without(b, "logp_train"))
    assert row(one_engine, "mean_abs_delta").why == "B has no logp_train"
    assert row(one_engine, "logp_infer_mean").verdict == "not_told_apart"
    assert one_engine.entropy_bins == []


def test_what_cannot_be_split_says_why() -> None:
    a, b = make_log(32, **MADE), without(make_log(33, **MADE), "policy_version")
    document = diff(a, b)
    found = row(document, "noise_share")
    assert found.verdict == "not_compared"
    assert found.why.startswith("B cannot be split: ")
    assert "weight version" in found.how_to_get_it
    assert document.split_method == "none"
    assert row(document, "staleness_mean").why == "B has no policy_version"
    thin = diff(make_log(34, **MADE), make_log(35, sequences=6, steps=2, mean_length=20))
    assert "from" in row(thin, "noise").why
    assert row(thin, "noise").verdict == "not_compared"


def test_one_sequence_has_no_error() -> None:
    document = diff(make_log(36, **MADE), make_log(37, sequences=1))
    found = row(document, "mean_abs_delta")
    assert (found.verdict, found.b.se) == ("not_compared", None)
    assert found.why == "B has no standard error: it is from 1 sequences"


def test_no_counted_token_on_one_side() -> None:
    empty = make_log(38)
    empty["loss_mask"][:] = False
    document = diff(make_log(39, **MADE), empty)
    assert {r.verdict for _, r in document.rows()} == {"not_compared"}
    assert document.verdict.startswith("Nothing can be compared")
    assert row(document, "mean_abs_delta").why == "B has no counted token for it"


def test_entropies_of_two_engines_are_not_compared() -> None:
    with store_of(make_log(40, **MADE)) as a, store_of(make_log(41, **MADE)) as b:
        b.connection.execute("update runs set entropy_of = 'train', temperature = 0.7, trainer = 'other'")
        document = difference(Side(a, "a"), Side(b, "b"), DEFAULT_RULES)
    assert "infer engine's entropy in A and the train engine's in B" in row(document, "entropy_mean").why
    assert document.entropy_bins == []
    assert {f.fact: (f.a, f.b) for f in document.facts} == {
        "trainer": ("made up", "other"),
        "temperature": (None, 0.7),
        "entropy_of": ("infer", "train"),
    }
    assert any(note.startswith("temperature is not known in A and 0.7 in B") for note in document.notes)


def test_a_rule_with_scale_has_one_scale() -> None:
    rule = Rule("scaled", "delta * delta <= tau * scale", {"tau": 9.0})
    document = diff(make_log(42, **MADE), make_log(43, **MADE), (rule,))
    assert row(document, rule.label).verdict == "not_told_apart"
    assert any("m2(H) of A on both sides" in note for note in document.notes)


def test_the_trainers_own_mask_takes_part() -> None:
    a, b = make_log(44, **MADE), make_log(45, **MADE)
    b["trainer_keep"] = np.arange(len(b["step"])) % 10 > 0
    assert row(diff(a, b), "trainer").why == "A has no trainer_keep"
    a["trainer_keep"] = np.ones(len(a["step"]), dtype=bool)
    assert row(diff(a, b, (get("none"),)), "trainer").verdict == "changed"
