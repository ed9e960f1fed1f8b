"""The lab on tiny settings: bit-identical, exact at lag 0, and every planted fault leaves its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

import estr_diag as ed
from estr_diag.cli.app import app
from estr_diag.errors import UsageError
from estr_diag.lab.comparison import arms, compare, final
from estr_diag.lab.engine import Engine
from estr_diag.lab.model import Model, rounded
from estr_diag.lab.run import LabResult, run, warm_up_of
from estr_diag.lab.settings import Fault, LabSettings
from estr_diag.lab.task import HIGHEST, NUMBERS, PROMPT_LENGTH, VOCABULARY, Prompt, encode, reward
from estr_diag.lab.trainer import Trainer
from estr_diag.lab.warmup import WarmWeights
from estr_diag.rules import Rule, get, parse_rules

TINY: dict[str, Any] = {
    "steps": 5, "groups": 4, "group_size": 4, "slots": 24, "warmup_steps": 350, "width": 48, "learning_rate": 3e-3,
    "engine": "int8",
}  # fmt: skip


_WARM: dict[str, WarmWeights] = {}


def warm() -> WarmWeights:
    """One warm-up for all runs of this file: a model that never earns a reward never moves."""
    if not _WARM:
        _WARM["it"] = warm_up_of(LabSettings(**TINY))
    return _WARM["it"]


def log_of(folder: Path, rule: Rule | None = None, **settings: Any) -> tuple[LabResult, dict[str, NDArray[Any]]]:
    chosen = LabSettings(**{**TINY, **settings})
    given = dict(warm().weights)
    # Responses may be shorter than the teacher's: so are the places.
    given["place.weight"] = given["place.weight"][: Model(chosen).context]
    done = run(chosen, folder, rule, warm=WarmWeights(given, warm().loss))
    assert done.path is not None
    table = pq.read_table(done.path)
    return done, {name: np.array(table[name].to_pylist()) for name in table.column_names}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[Any]]:
    return log_of(tmp_path_factory.mktemp("lab"))[1]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, _ = log_of(tmp_path / "a")
    torch.manual_seed(123)
    torch.rand(7)
    second, _ = log_of(tmp_path / "b")
    assert first.path is not None
    assert second.path is not None
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.curve == second.curve
    other, _ = log_of(tmp_path / "c", seed=1)
    assert other.curve != first.curve
    assert first.warmup_loss < 1.5


def test_at_lag_zero_the_two_log_probs_are_equal_bit_for_bit(healthy: dict[str, NDArray[Any]]) -> None:
    lag = healthy["trainer_version"] - healthy["policy_version"]
    assert set(np.unique(lag)) >= {0, 1}
    np.testing.assert_array_equal(healthy["logp_train"][lag == 0], healthy["logp_replay"][lag == 0])
    assert (healthy["logp_train"][lag > 0] != healthy["logp_replay"][lag > 0]).mean() > 0.5


def test_the_columns_are_what_they_say(healthy: dict[str, NDArray[Any]]) -> None:
    p, h, g = np.exp(healthy["logp_infer"]), healthy["entropy"], healthy["collision"]
    floor = -p * np.log(p) - (1 - p) * np.log(np.maximum(1 - p, 1e-300))
    assert (h >= floor - 1e-5).all(), "no distribution that gives the token p has a lower entropy"
    assert ((g > 0) & (g <= 1 + 1e-6)).all()
    assert (h <= np.log(VOCABULARY)).all()
    for group in np.unique(healthy["group_id"]):
        at = healthy["group_id"] == group
        rewards = {k: healthy["reward"][healthy["seq_key"] == k][0] for k in np.unique(healthy["seq_key"][at])}
        advantages = {k: healthy["advantage"][healthy["seq_key"] == k][0] for k in rewards}
        assert abs(sum(advantages.values())) < 1e-4
        assert len(rewards) == TINY["group_size"]


def test_weights_change_inside_responses(healthy: dict[str, NDArray[Any]]) -> None:
    same = healthy["seq_id"][1:] == healthy["seq_id"][:-1]
    change = np.diff(healthy["policy_version"])[same]
    assert (change >= 0).all()
    assert (change > 0).any()


def test_synchronous_has_lag_zero_only(tmp_path: Path) -> None:
    _, log = log_of(tmp_path, synchronous=True)
    assert (log["trainer_version"] == log["policy_version"]).all()
    with pytest.raises(UsageError, match="no delay"):
        LabSettings(synchronous=True, delay=1)


def test_a_delay_leaves_no_lag_zero(tmp_path: Path) -> None:
    _, log = log_of(tmp_path, delay=1)
    later = log["step"] >= 2
    assert ((log["trainer_version"] - log["policy_version"])[later] >= 1).all()


@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.NONE])
def test_every_fault_leaves_its_signature(healthy: dict[str, NDArray[Any]], tmp_path: Path, fault: Fault) -> None:
    short: dict[str, Any] = {"max_response": 14} if fault is Fault.SYNTHETIC_EOS else {}
    _, log = log_of(tmp_path, fault=fault, **short)
    delta, clean = log["logp_train"] - log["logp_infer"], healthy["logp_train"] - healthy["logp_infer"]
    lag = log["trainer_version"] - log["policy_version"]
    fresh, clean_fresh = delta[lag == 0], clean[healthy["trainer_version"] == healthy["policy_version"]]
    if fault is Fault.TEMPERATURE:
        sure = log["logp_infer"] > np.log(0.5)
        assert fresh[sure[lag == 0]].mean() < 5 * clean_fresh.mean() - 0.01, "the trainer is less sure of likely tokens"
    elif fault is Fault.FROZEN_ENGINE:
        late = log["step"] == log["step"].max()
        assert (delta[late & (lag == 0)] ** 2).mean() > 20 * (clean_fresh**2).mean()
    elif fault is Fault.WRONG_VERSION:
        assert (lag == 0).all()
        assert (log["logp_train"] != log["logp_replay"]).any(), "and yet the weights had moved"
    elif fault is Fault.SHIFT:
        assert np.corrcoef(log["logp_train"], log["logp_infer"])[0, 1] < 0.5
        same = log["seq_id"][1:] == log["seq_id"][:-1]
        assert np.corrcoef(log["logp_train"][:-1][same], log["logp_infer"][1:][same])[0, 1] > 0.7
    elif fault is Fault.TOP_P:
        assert (fresh <= 0.05).mean() > 0.99, "one-sided"
        assert fresh.min() > -4
        assert (log["logp_infer"] == 0).any()
    elif fault is Fault.STALE_CACHE:
        assert (fresh**2).mean() > 2 * (clean_fresh**2).mean()
    elif fault is Fault.SYNTHETIC_EOS:
        forced = (log["finish"] == "length") & (log["logp_infer"] == 0)
        assert forced.any()
        assert delta[forced].mean() < -1
    else:
        far = log["pos"][lag == 0] > 18
        assert (fresh[far] ** 2).mean() > 4 * (fresh[~far] ** 2).mean()


def test_the_cache_decodes_as_whole_sequences_do() -> None:
    settings = LabSettings(**TINY)
    trainer = Trainer(settings, get("none"))
    trainer.start(warm())
    engine = Engine(LabSettings(**{**TINY, "engine": "exact"}), trainer.model)
    engine.add_group()
    done = [r for _ in range(60) for r in engine.tick()]
    assert len(done) == settings.group_size
    scored = trainer.score(done)
    torch.testing.assert_close(scored.logp_train[scored.mask], scored.logp_infer[scored.mask], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(scored.logp_train, scored.logp_replay, atol=0, rtol=0)


@pytest.mark.parametrize("grid", ["int8", "bf16", "fp8"])
def test_weights_lie_on_the_grid(grid: str) -> None:
    settings = LabSettings(**TINY)
    source, target = Trainer(settings, get("none")).model, Model(settings)
    rounded(target, source, grid)
    weight, given = (dict(m.named_parameters())["blocks.0.mix.weight"].detach() for m in (target, source))
    if grid == "bf16":
        assert torch.equal(weight, weight.bfloat16().float())
    elif grid == "fp8":
        scaled = weight / (given.abs().amax(1, keepdim=True) / 448)
        assert ((scaled - given / (given.abs().amax(1, keepdim=True) / 448)).abs() <= scaled.abs() / 16 + 2**-9).all()
        assert len(torch.unique(scaled[0].abs().round(decimals=6))) <= 127
    else:
        levels = weight / (given.abs().amax(1, keepdim=True) / 127)
        torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)
    assert 0 < (weight - given).abs().max() < 0.05


def test_a_rule_masks_in_the_loss_and_is_logged(tmp_path: Path) -> None:
    rule = parse_rules("estr:tau=0.0005")[0]
    done, _ = log_of(tmp_path, rule)
    with ed.open(tmp_path) as opened:
        row = opened.compare([rule]).kept.rows()
    assert 0 < row[0]["masked_tokens"] == row[1]["masked_tokens"], "the trainer's decision is the rule's"
    assert max(p.masked_share for p in done.curve) > 0


def moved_by(rule: Rule) -> float:
    """How far one step moves the weights."""
    settings = LabSettings(**TINY)
    trainer = Trainer(settings, rule)
    trainer.start(warm())
    engine = Engine(settings, trainer.model)
    engine.add_group()
    done = [r for _ in range(60) for r in engine.tick()]
    # A group in which all rewards are equal has no advantage.
    done[0].reward, done[1].reward = 0.0, 1.0
    plain: Any = torch.optim.SGD(trainer.model.parameters(), lr=1e-3)  # Adam would hide the size of a gradient
    trainer.optimiser = plain
    trainer.step(trainer.score(done))
    now, before = trainer.history[1], trainer.history[0]
    return float(torch.stack([(now[k] - before[k]).square().sum() for k in now]).sum().sqrt())


def test_the_weight_and_the_denominator_of_a_rule_stand_in_the_loss() -> None:
    # Small weights, so that the limit on the gradient's norm does not act.
    whole = moved_by(Rule("whole", weight="0.01 * ratio"))
    assert moved_by(Rule("tenth", weight="0.001 * ratio")) == pytest.approx(whole / 10, rel=0.01)
    masked = Rule("masked", "pos < 4", weight="0.01 * ratio")
    shrunk = Rule("shrunk", "pos < 4", weight="0.01 * ratio", denominator="shrinks")
    assert moved_by(shrunk) > 2 * moved_by(masked) > 0
    assert moved_by(Rule("nothing", "delta > 1000")) == 0


def test_the_caller_s_random_state_and_settings_stay() -> None:
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = torch.random.get_rng_state()
        run(LabSettings(**{**TINY, "steps": 1}), warm=warm())
        warm_up_of(LabSettings(**{**TINY, "warmup_steps": 1}))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_warm_up_apart_is_the_one_of_the_run(tmp_path: Path) -> None:
    settings = LabSettings(**{**TINY, "warmup_steps": 4, "steps": 2})
    alone = run(settings)
    assert run(settings, warm=warm_up_of(settings)) == alone
    # responses shorter than what the warm-up shows
    assert run(LabSettings(**{**TINY, "warmup_steps": 2, "steps": 2, "max_response": 4})).curve[0].tokens > 0


def test_the_comparison_trains_every_arm_from_one_start() -> None:
    rules = parse_rules("none,estr:tau=0.00001,tis:high=1.5")
    assert [arm.name for arm in arms(rules)][:2] == ["synchronous", "asynchronous"]
    settings = LabSettings(**{**TINY, "warmup_steps": 20, "steps": 3})
    told: list[int] = []
    curves = compare(settings, rules, (0, 1), lambda done, of, _: told.append(done * 100 // of), processes=2)
    assert told[-1] == 100
    rows = curves.rows()
    assert len(rows) == 4 * 2 * 3
    for seed in (0, 1):
        first = {r["arm"]: r for r in rows if r["seed"] == seed and r["step"] == 0}
        assert len({r["reward"] for name, r in first.items() if name != "synchronous"}) == 1, (
            "the first batch is the same"
        )
    assert all(r["mean_lag"] == 0 and r["masked_share"] == 0 for r in rows if r["arm"] == "synchronous")
    assert any(r["masked_share"] > 0 for r in rows if r["arm"].startswith("estr"))
    ends = final(curves)
    assert [e["arm"] for e in ends] == curves.parameters["arms"]
    by_seed = [np.mean([r["reward"] for r in rows if r["arm"] == "asynchronous" and r["seed"] == s]) for s in (0, 1)]
    assert ends[1]["reward"] == pytest.approx(np.mean(by_seed))
    assert ends[1]["reward_se"] == pytest.approx(np.std(by_seed, ddof=1) / np.sqrt(2))
    with pytest.raises(UsageError, match="each once"):
        compare(settings, rules, (1, 1))


def test_rewards() -> None:
    three = Prompt(1, 2)
    assert reward(three, "the sum is three⏹", finished=True) == 1.0
    assert reward(three, "the sum is nine⏹", finished=True) == 0.1
    assert reward(three, "the sum is", finished=True) == 0.0
    assert reward(three, "the sum is three", finished=False) == 0.0
    assert len(encode(three.text)) == PROMPT_LENGTH
    assert Prompt(HIGHEST, HIGHEST).answer == NUMBERS[2 * HIGHEST]


def test_the_command(tmp_path: Path) -> None:
    for arguments, said in ((["--fault", "shft"], "did you mean 'shift'"), (["--engine", "int4"], "expected fp8")):
        found = CliRunner().invoke(app, ["lab", "-o", str(tmp_path), *arguments])
        assert found.exit_code == 2
        assert said in found.output
    (tmp_path / "log.parquet").touch()
    with pytest.raises(UsageError, match="exists already"):
        run(LabSettings(**TINY), tmp_path)
    (tmp_path / "log.parquet").unlink()
    for arguments, said in (
        (["--compare", "estr", "--rule", "kpop"], "--rule"),
        (["--compare", "estr", "--seeds", "0"], "1 or more"),
    ):
        found = CliRunner().invoke(app, ["lab", "-o", str(tmp_path), *arguments])
        assert found.exit_code == 2
        assert said in found.output
