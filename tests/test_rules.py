"""Mask rules: NumPy twins, boundary cases, replay and agreement, and hostile text refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag import rules
from estr_diag.errors import UsageError
from estr_diag.rules import DEFAULT_RULES, Rule, parse_rules
from estr_diag.rules.agreement import Agreement
from estr_diag.rules.decisions import Decisions
from estr_diag.rules.language.tree import Aggregate, Logic, walk
from estr_diag.rules.replay import Replay
from estr_diag.stats.grid import quantile_grid
from estr_diag.store.database import Store
from estr_diag.store.engine import relation, run
from tests import oracles
from tests.logs import make_log, store_of
from tests.oracles import Arrays


def decisions(store: Store, rule: Rule, source: str = "tokens") -> list[bool | None]:
    """The keep decision of every counted token, in order."""
    present = store.present()
    decisions = Decisions.of((rule,), present)
    clause = relation(present, decisions.plan.view, source)
    rows = store.rows(f"{clause} select ({decisions.keep(0)}) as keep from viewed order by seq_id, pos")
    return [row["keep"] for row in rows]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1.0, 5.0, 30.0]))
def test_decisions_equal_numpy(seed: int, scale: float) -> None:
    log = make_log(seed, scale=scale)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        for rule in DEFAULT_RULES:
            found = np.array(decisions(store, rule))
            expected = oracles.keep(rule.name, tokens, **{k: float(v) for k, v in rule.parameters.items()})
            np.testing.assert_array_equal(found, expected, err_msg=rule.label)


def test_boundaries_are_inside() -> None:
    log: Arrays = {
        "seq_id": np.zeros(3, dtype=np.int64),
        "logp_infer": np.array([-2.0, -2.0, -2.0], dtype=np.float32),
        "logp_train": np.array([-1.0, -0.5, -2.0], dtype=np.float32),
        "entropy": np.array([0.25, 0.25, 0.25], dtype=np.float32),
        "loss_mask": np.ones(3, dtype=bool),
    }
    with store_of(log) as store:
        # delta = 1, 1.5, 0; S = delta^2 / 0.25 with eps 0
        assert decisions(store, rules.estr(tau=4.0, eps=0.0)) == [True, False, True]
        assert decisions(store, rules.estr(tau=9.0, eps=0.0)) == [True, True, True]
        assert decisions(store, rules.icepop(low=1.0, high=math.e)) == [True, False, True]


def test_a_missing_entropy_is_undecided_and_counted() -> None:
    log = make_log(3, holes=False)
    hole = np.zeros(len(log["entropy"]), dtype=bool)
    hole[::5] = True
    log["entropy"][hole] = np.nan
    with store_of(log) as store:
        row = run(store, {"it": Replay((rules.estr(), rules.icepop()))}).results["it"].table.to_pylist()
    estr, icepop = row
    tokens = oracles.counted(log)
    decided = np.isfinite(tokens["entropy"])
    kept = decided & oracles.keep("estr", tokens)
    for name, mass in (("sq_delta", tokens["delta"] ** 2), ("advantage", np.abs(tokens["advantage"].astype(float)))):
        assert math.isclose(estr[f"kept_{name}_share"], mass[kept].sum() / mass[decided].sum(), rel_tol=1e-9)
    assert estr["undecided_tokens"] == np.count_nonzero(hole & log["loss_mask"]) > 0
    assert icepop["undecided_tokens"] == 0
    for r in row:
        assert r["kept_tokens"] + r["masked_tokens"] + r["undecided_tokens"] == r["n"]


@pytest.mark.parametrize("by", ["overall", "step", "lag", "entropy_bin"])
def test_replay_equals_numpy(by: str) -> None:
    log = make_log(11, scale=6.0)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        grid = quantile_grid(store, frozenset(store.column_counts()), 4)
        rows = run(store, {"it": Replay(DEFAULT_RULES, grid, by=by)}).results["it"].table.to_pylist()
    edges = 2.0 ** (np.array(grid.cells) / 16)
    group = {
        "overall": np.zeros(len(tokens["delta"])),
        "step": tokens["step"],
        "lag": tokens["trainer_version"] - tokens["policy_version"],
        "entropy_bin": np.where(
            tokens["entropy"] <= 0, 0, np.clip(np.searchsorted(edges, tokens["entropy"], "right"), 1, len(edges) - 1)
        ),
    }[by]
    assert len(rows) == len(DEFAULT_RULES) * len(np.unique(group))
    some_masked = 0
    for row in rows:
        at = group == (0 if by == "overall" else row[by])
        part = {name: values[at] for name, values in tokens.items()}
        rule = next(r for r in DEFAULT_RULES if r.label == row["rule"])
        kept = oracles.keep(rule.name, part, **{k: float(v) for k, v in rule.parameters.items()})
        d, a = part["delta"], np.abs(part["advantage"].astype(float))
        assert row["kept_tokens"] == kept.sum()
        assert row["masked_tokens"] == (~kept).sum()
        some_masked += row["masked_tokens"]
        assert math.isclose(row["kept_share"], kept.mean())
        if a.sum():
            assert math.isclose(row["kept_advantage_share"], a[kept].sum() / a.sum(), rel_tol=1e-9)
        if kept.any():
            assert math.isclose(row["kept_mean_sq_delta"], (d[kept] ** 2).mean(), rel_tol=1e-9)
            assert math.isclose(row["kept_kl_k3"], (np.exp(d[kept]) - 1 - d[kept]).mean(), rel_tol=1e-9, abs_tol=1e-15)
    assert some_masked > 0


def test_agreement_equals_numpy() -> None:
    log = make_log(11, scale=6.0)
    tokens = oracles.counted(log)
    with store_of(log) as store:
        pairs = run(store, {"it": Agreement(DEFAULT_RULES)}).results["it"].table.to_pylist()
    assert len(pairs) == 6
    for pair in pairs:
        a, b = (oracles.keep(pair[side].split(":")[0], tokens) for side in ("a", "b"))
        cells = ((a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum())
        assert (pair["both"], pair["only_a"], pair["only_b"], pair["neither"]) == cells
        observed, chance = (a == b).mean(), a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean())
        if chance == 1:
            assert pair["kappa"] is None
        else:
            assert math.isclose(pair["kappa"], (observed - chance) / (1 - chance), rel_tol=1e-9, abs_tol=1e-12)


@given(low=st.floats(0.1, 10), more=st.floats(0, 10))
@settings(max_examples=10, deadline=None)
def test_estr_is_monotone_in_its_threshold(low: float, more: float) -> None:
    with store_of(make_log(7, scale=6.0)) as store:
        tight, loose = (decisions(store, rules.estr(tau=t)) for t in (low, low + more))
    assert all(wide or not narrow for narrow, wide in zip(tight, loose, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "read_text('/etc/passwd') is null",
        "(select count(*) from tokens) > 0",
        "true; drop table tokens",
        "exists (select 1)",
        "delta < (select max(delta) from tokens)",
        "tokens.delta < 1",
        "getenv('HOME') = 'x'",
        "delta < 1 -- comment \n; attach 'x.db'",
        "unknown_column < 1",
        "delta in (select 1)",
        "list_sum([1]) > 0",
        "delta::varchar = 'x'",
        "sleep(10)",
        "",
        "delta <",
        "(" * 5000 + "delta" + ")" * 5000 + " < 1",
        "delta < 1 or " * 3000 + "true",
    ],
)
def test_hostile_text_is_refused(text: str) -> None:
    rule = Rule("bad", text)
    with pytest.raises(UsageError):
        rule.tree()


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'delta'"):
        Rule("bad", "dela < 1").tree()
    with pytest.raises(UsageError, match="did you mean 'estr'"):
        parse_rules("ester:tau=4")
    with pytest.raises(UsageError, match="did you mean 'tau'"):
        parse_rules("estr:tao=4")
    with pytest.raises(UsageError, match="parameter=number"):
        parse_rules("estr:tau=four")
    with pytest.raises(UsageError, match="finite"):
        parse_rules("estr:tau=nan")


def test_rule_texts_on_the_command_line() -> None:
    estr, icepop = parse_rules("estr:tau=2,icepop:low=0.2:high=3")
    assert estr.parameters["tau"] == 2
    assert estr.parameters["eps"] == 0.01
    assert (icepop.parameters["low"], icepop.parameters["high"]) == (0.2, 3)
    assert estr.needs == {"logp_infer", "logp_train", "entropy"}
    assert icepop.needs == {"logp_infer", "logp_train"}


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda r: r.name)
def test_every_rule_explains_itself(rule: Rule) -> None:
    assert rule.says
    assert rule.reference
    assert rule.needs <= {"logp_infer", "logp_train", "entropy"}
    assert parse_rules(rule.name) == (rule,)


def test_a_log_without_counted_tokens_has_a_row_for_each_rule() -> None:
    log = make_log(3)
    log["loss_mask"] = np.zeros_like(log["loss_mask"])
    with store_of(log) as store:
        rows = run(store, {"it": Replay(DEFAULT_RULES)}).results["it"].table.to_pylist()
    assert [r["rule"] for r in rows] == [r.label for r in DEFAULT_RULES]
    assert all(r["n"] == 0 and r["kept_share"] is None for r in rows)


def test_parts_of_a_chain_weigh_and_keep_on_the_same_tokens() -> None:
    """From the third part on, a weight's aggregates are over what the first two left, as its keep's are."""
    first, second = parse_rules("icepop:low=0.8:high=1.2,geo:low=0.9:high=1.1")
    third = Rule("third", "seq_mean(delta) < 1", weight="seq_mean(delta)")
    chain = first.then(second)
    direct = Rule("all", parts=(first, second, third), combine="then")
    weight = direct.weight_tree()
    assert weight is not None
    keep = direct.tree()
    assert isinstance(keep, Logic)
    kept_on = next(
        a.where for a in walk(keep.parts[-1]) if isinstance(a, Aggregate) and a.where not in (None, keep.parts[0])
    )
    weighed_on = [a.where for a in walk(weight) if isinstance(a, Aggregate) and a.where is not None]
    assert weighed_on[-1] == Logic("and", (keep.parts[0], keep.parts[1]))
    assert kept_on is not None
    assert chain.combine == "then"


def test_one_arithmetic_for_a_combination() -> None:
    assert (parse_rules("kpop@areal")[0] & parse_rules("kpop@areal:phi=1")[0]).dtype == "float32"
    with pytest.raises(UsageError, match="float32 and one in float64"):
        parse_rules("kpop@areal+estr")


def test_what_a_text_stands_for_is_bounded() -> None:
    text = "p_new"
    for _ in range(9):
        text = f"binary_kl({text}, {text}, 0.001)" if len(text) < 2000 else f"binary_kl({text}, p_old, 0.001)"
    with pytest.raises(UsageError, match=r"terms|characters|deeply"):
        Rule("big", f"{text} < 1").tree()
    rule = Rule("r0", "delta < 1")
    for level in range(1, 25):
        rule = Rule(f"r{level}", f"r{level - 1}() or r{level - 1}()", uses={rule.name: rule})
    with pytest.raises(UsageError, match="terms"):
        rule.tree()
