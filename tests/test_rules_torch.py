"""One text, two engines: torch decides as DuckDB does, undecided tokens and boundaries included."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from estr_diag.errors import UsageError
from estr_diag.rules import LIBRARY, Rule, parse_rules
from estr_diag.rules.decisions import Decisions
from estr_diag.rules.tensors import decide
from estr_diag.store.database import Store
from estr_diag.store.engine import relation
from tests.logs import make_log, store_of
from tests.oracles import Arrays

GRID = 2.0**-6
"""Log-probs are multiples of it, so that every sum is exact in both engines and thresholds are really met."""


def rich_log(seed: int, *, holes: bool = True, update: bool = True) -> Arrays:
    """A log with every column that a rule can name, boundary values and holes."""
    rng = np.random.default_rng(seed)
    log = make_log(seed, sequences=8, mean_length=14, holes=holes, scale=20.0)
    n = len(log["seq_id"])

    def snapped(x: NDArray[Any]) -> NDArray[Any]:
        return np.round(x / GRID) * GRID

    for name in ("logp_infer", "logp_train", "entropy"):
        log[name] = snapped(log[name].astype(np.float64)).astype(np.float32)
    log["logp_update"] = snapped(np.minimum(log["logp_train"] + rng.normal(0, 0.3, n), 0)).astype(np.float32)
    log["collision"] = snapped(rng.uniform(0.1, 1, n)).astype(np.float32)
    log["advantage"] = np.repeat(rng.choice([-1.0, 0.0, 0.5], 60), 60)[:n].astype(np.float32)
    log["turn"] = (np.arange(n) // 7 % 3).astype(np.int16)
    if holes:
        for name in ("entropy", "advantage", "logp_update"):
            log[name][rng.random(n) < 0.04] = np.nan
    if not update:
        del log["logp_update"]
    return log


class Both:
    """A log in a store and as flat tensors with sequence numbers."""

    def __init__(self, log: Arrays) -> None:
        self.log = log
        self.store = store_of(log)
        self.store.connection.execute(
            "update sequences set group_id = 'g' || (seq_id // 2), reward = (seq_id % 3) - 1, "
            "finish = case when seq_id % 4 = 0 then 'length' else 'stop' end, "
            "version_first = trainer_version - 2, version_last = trainer_version - seq_id % 2"
        )
        self.present = self.store.present()
        names = [r["column_name"] for r in self.store.rows("describe tokens")]
        rows = self.store.connection.sql(
            "select t.*, s.group_id, s.reward, s.finish, s.version_first, s.version_last "
            "from tokens t join sequences s using (seq_id) order by t.seq_id, t.pos"
        ).to_arrow_table()
        self.tensors: dict[str, Any] = {"seq_ids": torch.tensor(rows["seq_id"].to_pylist())}
        for name in names:
            if name in ("seq_id", "abs_pos", "token_id", "token_text") or name not in self.present:
                continue
            values = rows[name].to_pylist()
            if isinstance(values[0], bool) or name in ("pos", "step", "turn", "policy_version", "trainer_version"):
                self.tensors[name] = torch.tensor(values)
            else:
                self.tensors[name] = torch.tensor(
                    [float("nan") if v is None else v for v in values], dtype=torch.float32
                )
        groups = rows["group_id"].to_pylist()
        self.tensors["group_id"] = torch.tensor([sorted(set(groups)).index(g) for g in groups])
        self.tensors["reward"] = torch.tensor(rows["reward"].to_pylist())
        self.tensors["finished"] = torch.tensor([f == "stop" for f in rows["finish"].to_pylist()])
        for name in ("version_first", "version_last"):
            self.tensors[name] = torch.tensor(rows[name].to_pylist())
        self.pairs = [(s, p) for s, p in zip(rows["seq_id"].to_pylist(), rows["pos"].to_pylist(), strict=True)]

    def sql(self, rule: Rule) -> tuple[list[bool | None], list[float | None]]:
        found = Decisions.of((rule,), self.present)
        weight = found.weights[0]
        value = "1e0" if weight is None else found.plan.decision(weight, rule.dtype)
        rows = self.store.rows(
            f"{relation(self.present, found.plan.view)} select seq_id, pos, ({found.keep(0)}) as keep, "
            f"({value})::double as weight from viewed order by seq_id, pos"
        )
        self.counted = [(r["seq_id"], r["pos"]) for r in rows]
        return [r["keep"] for r in rows], [r["weight"] for r in rows]

    def torch(self, rule: Rule) -> tuple[list[bool | None], list[float]]:
        found = decide(rule, **self.tensors)
        at = {pair: i for i, pair in enumerate(self.pairs)}
        places = [at[pair] for pair in self.counted]
        outside = sorted(set(range(len(self.pairs))) - set(places))
        assert not found.keep[outside].any(), "an uncounted token is kept"
        decisions = [None if found.undecided[i] else bool(found.keep[i]) for i in places]
        return decisions, [float(found.weight[i]) for i in places]


@pytest.fixture(scope="module")
def rich() -> Both:
    return Both(rich_log(5))


def assert_same(both: Both, rule: Rule) -> list[bool | None]:
    keep, weight = both.sql(rule)
    found, weights = both.torch(rule)
    assert found == keep, rule.keep
    for k, ours, theirs in zip(keep, weights, weight, strict=True):
        if k and theirs is not None and abs(theirs) < 1e30:
            # The weight comes back in the dtype of the log-probs.
            assert ours == pytest.approx(theirs, rel=3e-7, abs=1e-37), rule.weight
    return keep


@pytest.mark.parametrize("key", LIBRARY)
def test_every_built_in_rule_decides_alike(rich: Both, key: str) -> None:
    rule = LIBRARY[key]
    if rule.lacking(rich.present | {"trainer_keep"}):
        pytest.fail(f"{key} cannot be tried: {rule.lacking(rich.present)}")
    if "trainer_keep" in rule.needs:
        rich.tensors["trainer_keep"] = torch.ones(len(rich.pairs), dtype=torch.bool)
        return
    assert_same(rich, rule)


TEXTS = [
    "delta <= 0.25", "delta < 0.25", "not (delta >= 0.25)", "delta = 0.25 or delta <> 0.5", "delta between -0.5 and 0.5",
    "s <= 4 and z > -1", "abs(delta) < sqrt(entropy)", "ln(entropy) > -2", "entropy / delta > 1", "1 / entropy < 3",
    "sign(delta) * advantage > 0", "sign(ln(entropy)) > 0", "clip(ln(entropy), -1, 1) >= 0",
    "greatest(delta, delta_u, 0) <= 0.25", "least(ln(entropy), delta) > -1", "greatest(ln(entropy), 1 / delta) > 0.5",
    "case when advantage > 0 then ratio <= 1.25 when advantage < 0 then ratio >= 0.8 else true end",
    "seq_mean(delta) <= 0", "seq_sum(delta) < 0.5 and seq_max(abs(delta)) > 0.25", "seq_min(entropy) = 0",
    "turn_mean(delta) <= 0.125", "run_sum(delta) > -0.5", "run_count() > 3", "group_mean(abs(delta)) < 0.5",
    "group_any(advantage <> 0)", "step_quantile(abs(delta), 0.9) >= abs(delta)", "seq_quantile(delta, 0.5) <= delta",
    "step_mean(ratio) < 1.1", "seq_any(delta > 1)", "seq_all(delta > -3)", "not seq_any(entropy > 1)",
    "seq_any_before(delta > 0.5)", "seq_discounted(delta, 0.5) < 0.25", "step_budget(delta * delta, 0.01)",
    "seq_mean(delta) filter (where ratio < 1.25) < 0", "seq_count() filter (where advantage > 0) > 0",
    "seq_max(delta) filter (where entropy > 1) < 1", "step_budget(delta * delta, 0.02) and entropy > 0",
    "seq_mean(case when delta > seq_mean(delta) then 1 else 0 end) < 0.5", "lag <= 1", "intra + inter < 3",
    "reward > 0", "finished", "pos < 10 or turn = 1", "delta_e - delta_u - delta_b < 0.001", "p_update < p_infer",
    "gini > 0.5", "exp(delta) > exp(delta_u)", "estr and not icepop(low=0.8, high=1.2)", "policy_version >= seq_max(policy_version)",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("edge", ["B", "U", "E"])
def test_texts_decide_alike(rich: Both, text: str, edge: Any) -> None:
    assert_same(rich, Rule("text", text, edge=edge))


def test_compositions_decide_alike(rich: Both) -> None:
    decided = [
        assert_same(rich, rule)
        for rule in parse_rules(
            "icepop:low=0.8:high=1.2>geo:low=0.99:high=1.01,estr:tau=1+veto:c=0.5,estr:tau=0.5>m2po:c=0.01>geo"
        )
    ]
    icepop, geo = parse_rules("icepop:low=0.8:high=1.2,geo:low=0.99:high=1.01")
    together = assert_same(rich, icepop & geo)
    assert together != decided[0], "what is left has another mean than what was there"
    assert_same(rich, ~icepop | geo)
    assert_same(rich, Rule("kept", "entropy > 0.5", on_missing="keep"))
    assert_same(rich, Rule("dropped", "entropy > 0.5", on_missing="drop"))


_NUMBERS = st.sampled_from(
    ["delta", "entropy", "ratio", "p_new", "advantage", "lag", "pos", "0.25", "1", "-0.5", "delta_u"]
)


def _numbers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    scope, function = (
        st.sampled_from(["seq", "turn", "run", "group", "step"]),
        st.sampled_from(["sum", "mean", "max", "min"]),
    )
    return st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["abs", "sign"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"greatest({t[0]}, {t[1]})"),
        st.tuples(inner).map(lambda t: f"clip({t[0]}, -1, 1)"),
        st.tuples(scope, function, inner).map(lambda t: f"{t[0]}_{t[1]}({t[2]})"),
    )


_VALUES = st.recursive(_NUMBERS, _numbers, max_leaves=5)
_CONDITIONS = st.recursive(
    st.tuples(_VALUES, st.sampled_from(["<", "<=", ">", ">=", "=", "<>"]), _VALUES).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"(not {t})"),
        st.tuples(inner, inner, inner).map(lambda t: f"(case when {t[0]} then {t[1]} else {t[2]} end)"),
        inner.map(lambda t: f"seq_any({t})"),
    ),
    max_leaves=4,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=_CONDITIONS)
def test_generated_texts_decide_alike(rich: Both, text: str) -> None:
    # ratios are no multiples of the grid: a sum of them differs in its last bit by the order of its terms
    if any(f"{f}(" in text for f in ("_sum", "_mean")) and ("ratio" in text or "p_new" in text):
        text = text.replace("ratio", "delta").replace("p_new", "delta")
    assert_same(rich, Rule("text", text))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), update=st.booleans())
def test_generated_logs_decide_alike(seed: int, update: bool) -> None:
    both = Both(rich_log(seed, update=update))
    for text in (
        "s <= 1",
        "seq_mean(delta) <= 0.125",
        "step_budget(delta * delta, 0.02)",
        "advantage > 0 and delta < 0.5",
    ):
        for edge in ("B", "U", "E"):
            assert_same(both, Rule("text", text, edge=edge))
    both.store.close()


def padded(log: Arrays) -> dict[str, Any]:
    """The same log as right-padded rows."""
    _, starts, lengths = np.unique(log["seq_id"], return_index=True, return_counts=True)
    out: dict[str, Any] = {}
    for name in ("logp_infer", "logp_train", "entropy", "advantage", "loss_mask"):
        rows = np.zeros((len(starts), lengths.max()), dtype=log[name].dtype)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows[i, :length] = log[name][start : start + length]
        out[name] = torch.from_numpy(rows)
    return out


@pytest.mark.parametrize("key", ["estr", "icepop", "geo", "veto", "segment", "opsm@trl", "m2po", "top_entropy"])
def test_padded_and_packed_decide_alike(key: str) -> None:
    log = rich_log(9, holes=False)
    rows = padded(log)
    keep = decide(LIBRARY[key], **rows).keep
    flat: dict[str, Any] = {name: torch.from_numpy(log[name]) for name in rows}
    packed = decide(LIBRARY[key], **flat, seq_ids=torch.from_numpy(log["seq_id"])).keep
    lengths = np.unique(log["seq_id"], return_counts=True)[1]
    assert torch.equal(torch.cat([keep[i, :n] for i, n in enumerate(lengths)]), packed)
    assert not any(keep[i, n:].any() for i, n in enumerate(lengths)), "padding is kept"


def test_bfloat16_is_widened_before_the_subtraction() -> None:
    rows = {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in padded(rich_log(4, holes=False)).items()}
    wide = {k: v.double() if v.dtype == torch.bfloat16 else v for k, v in rows.items()}
    for rule in parse_rules("estr:tau=1,icepop,kpop,geo"):
        assert torch.equal(rule.torch(**rows), rule.torch(**wide))


def test_a_weight_is_differentiable_and_masked_tokens_send_no_gradient() -> None:
    train = torch.tensor([[-1.0, -0.5, -3.0, -0.1]], requires_grad=True)
    infer = torch.tensor([[-1.2, -2.0, -1.0, -0.1]])
    rule = parse_rules("icepop:low=0.5:high=2")[0]
    weight = rule.torch_weight(logp_train=train, logp_infer=infer, loss_mask=torch.ones(1, 4, dtype=torch.bool))
    ratio = torch.exp(train.detach() - infer)
    keep = (ratio >= 0.5) & (ratio <= 2)
    torch.testing.assert_close(weight.detach(), torch.where(keep, ratio, 0.0))
    torch.autograd.backward(weight.sum())
    assert train.grad is not None
    torch.testing.assert_close(train.grad, torch.where(keep, ratio, 0.0))
    train.grad = None
    geo = parse_rules("tis_geo:high=3")[0]
    torch.autograd.backward(geo.torch_weight(logp_train=train, logp_infer=infer, loss_mask=torch.ones(1, 4)).sum())
    value = torch.exp((train.detach() - infer).mean())
    torch.testing.assert_close(train.grad, value.expand(1, 4).contiguous())


def test_what_is_not_given_is_named() -> None:
    rows = padded(rich_log(1))
    del rows["entropy"]
    with pytest.raises(UsageError, match="needs entropy"):
        parse_rules("estr")[0].torch(**rows)
    with pytest.raises(UsageError, match="did you mean 'entropy'"):
        parse_rules("estr")[0].torch(**rows, entropies=rows["logp_train"])
    with pytest.raises(UsageError, match=r"entropy has shape \[3\]"):
        parse_rules("estr")[0].torch(**rows, entropy=torch.zeros(3))
    flat = torch.zeros(5)
    with pytest.raises(UsageError, match="seq_ids"):
        parse_rules("icepop")[0].torch(logp_train=flat, logp_infer=flat, loss_mask=flat)


def test_an_empty_batch_keeps_nothing() -> None:
    nothing = torch.zeros(2, 3)
    for key in ("estr", "geo", "m2po", "top_entropy", "opsm", "segment"):
        found = LIBRARY[key].torch(
            logp_train=nothing, logp_infer=nothing, entropy=nothing, advantage=nothing, loss_mask=nothing.bool()
        )
        assert not found.any()


def test_float32_loses_the_tokens_that_areals_kpop_loses() -> None:
    logp = torch.tensor([[0.0, -1e-9, -0.5, -2.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    kept = LIBRARY["kpop@areal"].torch(logp_train=logp, logp_infer=logp, loss_mask=mask)
    assert kept.tolist() == [[False, False, True, True]], (
        "1 - 1e-8 is 1 in float32: 0 log 0 is NaN, and NaN is not kept"
    )
    assert LIBRARY["kpop"].torch(logp_train=logp, logp_infer=logp, loss_mask=mask).all()


def test_rules_run_in_a_trainer_without_duckdb() -> None:
    code = """
import sys
for name in ("duckdb", "polars", "pandas", "matplotlib", "pyarrow"):
    sys.modules[name] = None
import torch
import estr_diag as ed
rule = ed.rules.estr(tau=1.0)
x = torch.zeros(2, 3)
keep = rule.torch(logp_train=x, logp_infer=x, entropy=x, loss_mask=torch.ones(2, 3))
assert keep.all() and keep.dtype == torch.bool
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rules_are_read_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import estr_diag as ed; ed.rules.estr().tree(); ed.rules.geo().tree()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stores_are_closed(rich: Both) -> None:
    assert isinstance(rich.store, Store)
