"""``explain``: every name resolves, says what it needs, and a wrong one says what was meant."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from estr_diag.cli.explain import render, to_json
from estr_diag.errors import UsageError
from estr_diag.schema import TOKENS
from estr_diag.stats.aliases import BY_KEY
from estr_diag.stats.explain import Explanation, explain, names
from estr_diag.stats.metrics import BY_NAME, METRICS, YARDSTICKS


@pytest.mark.parametrize("name", names())
def test_every_name_is_explained(name: str) -> None:
    told = explain(name)
    assert told.name == name
    assert told.kind == ("alias" if name in BY_KEY else "metric")
    assert told.formula
    assert told.unit
    assert told.aggregation
    assert told.meaning
    assert told.direction in ("lower", "higher", "near 0", "near 1", "none")
    assert told.needs
    for column, how in told.needs.items():
        assert how or column == "turn", f"nothing says how to log {column}"
    assert json.loads(json.dumps(to_json(told), allow_nan=False))["name"] == name
    page = _page(told)
    assert name in re.sub(r"\s", "", page)
    assert re.sub(r"\s", "", told.formula) in re.sub(r"\s", "", page)


def _page(told: Explanation, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    with console.capture() as drawn:
        console.print(render(told))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def test_a_metric_lists_its_names_elsewhere_with_the_difference() -> None:
    told = explain("kl_k1")
    named = {other.name: other for other in told.aliases}
    assert named["verl:rollout_corr/kl"].edge == "B"
    assert named["openrlhf:ppo_kl"].edge == "U"
    assert named["slime:mis_kl"].over == "S0"
    assert "1e-8" in named["verl:rollout_corr/kl"].differs
    assert "openrlhf:vllm_kl" in _page(told, width=200)
    assert told.yardsticks[0].source.startswith("verl docs")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("verl:rollout_corr/kl", "verl:rollout_corr/kl"),
        ("rollout_corr/kl", "verl:rollout_corr/kl"),
        ("vllm_kl", "openrlhf:vllm_kl"),
        ("kl_sample_train_v2", "tinker-cookbook:optim/kl_sample_train_v2"),
        ("chi2_token", "chi2_token"),
    ],
)
def test_short_names(asked: str, meant: str) -> None:
    assert explain(asked).name == meant


def test_an_alias_says_what_differs_and_what_to_log() -> None:
    told = explain("rollout_correction/chi2_seq")
    assert told.same_as is None, "the framework's chi2_seq is another quantity than ours"
    assert "mean d" in told.formula
    assert "another quantity" in told.differs
    told = explain("areal:compute_logp/kl_div_direct")
    assert told.same_as == "kl_k1"
    assert told.edge == "E: d = logp_update - logp_infer"
    assert set(told.needs or {}) == {"logp_infer", "logp_update"}
    assert (told.needs or {})["logp_update"] == TOKENS["logp_update"].get_it


def test_an_ambiguous_name_lists_its_meanings() -> None:
    with pytest.raises(UsageError, match="ambiguous") as error:
        explain("rollout_ppl")
    assert "verl:rollout_corr/rollout_ppl" in str(error.value)
    assert "ms-swift:rollout_correction/rollout_ppl" in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("kl_k4", "kl_k3"), ("mean_abs_dleta", "mean_abs_delta"), ("rollout_corr/k3_lk", "k3_kl")]
)
def test_a_wrong_name_says_what_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '.*{meant}'"):
        explain(wrong)


def test_other_things_can_be_explained() -> None:
    rule = Explanation("icepop", "rule", "0.5 <= r <= 5", "1", "token", "none", "double-sided mask")
    assert explain("icepop", [rule]) is rule
    with pytest.raises(UsageError, match="did you mean 'icepop'"):
        explain("icepopp", [rule])
    assert explain("kl_k3", [rule]).kind == "metric"


def test_yardsticks_name_their_source() -> None:
    assert set(YARDSTICKS) <= set(BY_NAME)
    assert all(value and source for value, source in YARDSTICKS.values())
    assert len(BY_NAME) == len(METRICS), "two metrics share a name"
