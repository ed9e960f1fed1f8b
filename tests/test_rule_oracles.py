"""Every built-in family of rules against its NumPy twin: keep sets and weights, on logs with boundary values."""

from __future__ import annotations

import numpy as np
import pytest

from estr_diag.rules.library import FAMILIES
from tests.rule_oracles import TWINS, Tokens
from tests.test_rules_torch import Both, rich_log

SEEDS = (3, 8, 21)


@pytest.fixture(scope="module", params=SEEDS)
def both(request: pytest.FixtureRequest) -> tuple[Both, Tokens]:
    log = Both(rich_log(request.param, holes=False))
    rows = log.store.connection.sql(
        "select t.*, s.group_id, s.reward, s.finish, s.version_first, s.version_last from tokens t "
        "join sequences s using (seq_id) where loss_mask and logp_train is not null and logp_infer is not null "
        "order by t.seq_id, t.pos"
    ).to_arrow_table()

    def column(name: str) -> np.ndarray:
        return np.array(rows[name].to_pylist(), dtype=np.float64)

    groups = rows["group_id"].to_pylist()
    tokens = Tokens(
        column("seq_id"), column("pos"), column("turn"), np.array([sorted(set(groups)).index(g) for g in groups]),
        column("step"), column("logp_infer"), column("logp_train"), column("logp_update"), column("entropy"),
        column("collision"), column("advantage"), column("reward"), column("policy_version"), column("trainer_version"),
        column("version_first"), column("version_last"), np.array([f == "stop" for f in rows["finish"].to_pylist()]),
    )  # fmt: skip
    return log, tokens


def test_every_family_has_a_twin() -> None:
    assert {rule.name for rule in FAMILIES} == {*TWINS, "trainer"}


@pytest.mark.parametrize("name", TWINS)
def test_decides_and_weighs_as_its_twin(both: tuple[Both, Tokens], name: str) -> None:
    log, tokens = both
    rule = next(r for r in FAMILIES if r.name == name)
    keep, weight = log.sql(rule)
    expected, weights = TWINS[name](tokens, {k: float(v) for k, v in rule.parameters.items()}, rule.edge)
    np.testing.assert_array_equal(np.array(keep, dtype=bool), expected, err_msg=rule.keep)
    if weights is None:
        assert not rule.weight
    else:
        found = np.array(weight, dtype=np.float64)
        np.testing.assert_allclose(found[expected], weights[expected], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("name", [n for n in TWINS if next(r for r in FAMILIES if r.name == n).score])
def test_a_wider_threshold_keeps_no_less(both: tuple[Both, Tokens], name: str) -> None:
    log, _ = both
    rule = next(r for r in FAMILIES if r.name == name)
    value = float(rule.parameters[rule.score])
    if rule.parameters.get("low", value) > value:
        pytest.fail("the bounds are the wrong way round")
    wide = rule.with_parameters({rule.score: min(value * 2, 0.99) if name == "top_entropy" else value * 2})
    narrow_set, wide_set = (np.array(log.sql(r)[0], dtype=bool) for r in (rule, wide))
    assert (wide_set | ~narrow_set).all()
