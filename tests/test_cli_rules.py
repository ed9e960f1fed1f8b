"""The commands about mask rules, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from estr_diag.cli import schemas
from estr_diag.cli.app import app
from tests.logs import PRIME_RL, prime_log

LOG = str(PRIME_RL)


def invoke(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def as_json(*arguments: str, schema: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    jsonschema.validate(document, schemas.get(schema))
    return document


def test_compare_names_the_rule_that_reproduces_the_trainers_mask(tmp_path: Path) -> None:
    document = as_json("compare", LOG, "--rules", "estr:tau=0.1,icepop>geo,kpop@areal", schema="compare")
    assert [r["name"] for r in document["rules"]][-1] == "trainer"
    exact = [m for m in document["reproduces_trainer"] if m["exact"]]
    assert exact
    assert exact[0]["rules"][0].startswith("dppo_tv@prime-rl"), "the trainer's own preset comes first"
    assert exact[0]["masked"] == 4
    for rule in document["rules"]:
        assert rule["kept_tokens"] + rule["masked_tokens"] + rule["undecided_tokens"] == rule["n"] == 816
        for by in ("entropy_bin", "lag", "step", "position"):
            groups = rule[f"by_{by}"]
            assert sum(g["n"] for g in groups) == 816
            assert sum(g["kept_tokens"] for g in groups) == rule["kept_tokens"]
            assert all(0 <= g["kept_sequences"] <= g["n_sequences"] <= 16 for g in groups)
            assert all(0 <= g["kept_advantage_share"] <= 1 for g in groups)
    page = invoke("compare", LOG, "--rules", "estr:tau=0.1,icepop:low=0.8:high=1.2")
    assert "reproduced by" in page
    assert "dppo_tv@prime-rl" in page
    assert "exploration masked" in page


def test_a_rule_on_an_edge_that_the_log_lacks_is_told() -> None:
    document = as_json("compare", LOG, "--rules", "ppo,opsm@trl", schema="compare")
    assert document["rules"][0]["kept_share"] == 1.0
    notes = " ".join(document["notes"])
    assert "edge U" in notes
    assert "keeps all that it judges by the ratio" in notes


def test_sweep() -> None:
    document = as_json(
        "sweep", LOG, "--rule", "estr", "--grid", "0.01:1:log:5", "--match", "kpop", "--drop-lag0", "0.01",
        "--families", "estr,band", schema="sweep",
    )  # fmt: skip
    assert [p["value"] for p in document["points"]] == [0.01, 0.0316227766017, 0.1, 0.316227766017, 1.0]
    shares = [p["kept_share"] for p in document["points"]]
    assert shares == sorted(shares)
    assert document["thresholds"][0]["why"].startswith("as many tokens as kpop")
    assert document["thresholds"][0]["kept_share"] == pytest.approx(0.9424, abs=2e-3)
    assert len(document["families"]) == 2
    assert "noise admitted" in invoke("sweep", LOG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", LOG, "--rules", "ester"], "did you mean 'estr'"),
        (["compare", LOG, "--rules", "estr@slime"], "no rule 'estr@slime'"),
        (["compare", LOG, "--rules", "icepop@nobody"], "of that name there are icepop@verl"),
        (["sweep", LOG, "--rule", "estr", "--param", "tao"], "did you mean 'tau'"),
        (["sweep", LOG, "--rule", "estr", "--grid", "1:2"], "0.25:16:log"),
        (["sweep", LOG, "--rule", "none"], "no parameter"),
        (["sweep", LOG, "--families", "estr"], "--keep"),
        (["sweep", LOG, "--rule", "estr,kpop"], "one rule"),
        (["sweep", LOG, "--keep", "1.5"], "expected more than 0"),
        (["sweep", LOG, "--match", "kpop", "--keep", "0.5"], "--match takes one rule"),
    ],
)
def test_wrong_use_says_what_to_do(arguments: list[str], said: str) -> None:
    assert said in " ".join(invoke(*arguments, code=2).split())


RULES_TOML = """
[rules.mine]
keep = "delta * delta / (entropy + eps) <= tau"
parameters = { tau = 0.1, eps = 0.01 }
score = "tau"
says = "ours"

[rules.with_veto]
and = ["mine", "veto:c=0.5"]

[rules.chain]
then = ["icepop:low=0.8:high=1.2", "geo"]
"""


def test_a_rule_file_takes_part_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULES_TOML)
    document = as_json("compare", LOG, "--rules", f"estr:tau=0.1,{path}", schema="compare")
    by_name = {r["name"]: r for r in document["rules"]}
    assert by_name["mine"]["kept_tokens"] == by_name["estr"]["kept_tokens"] == 804
    assert by_name["with_veto"]["kept_tokens"] <= by_name["mine"]["kept_tokens"]
    assert "mine" in invoke("rules", str(path))
    listed = json.loads(invoke("tokens", LOG, "--where", "not mine", "--rules", str(path), "--json"))
    assert len(listed["tokens"]) == 12
    (tmp_path / "bad.toml").write_text("[rules.x]\nkeep = \"read_text('/etc/passwd') is null\"\n")
    said = invoke("compare", LOG, "--rules", str(tmp_path / "bad.toml"), code=2)
    assert "bad.toml" in said
    assert "not allowed" in said


def test_rules_are_listed_and_explained() -> None:
    listed = json.loads(invoke("rules", "--json"))
    assert "icepop@verl" in json.dumps(listed)
    assert "clip_cov" in json.dumps(listed)
    page = " ".join(invoke("explain", "token_k1@verl").split())
    assert "mirror" in page
    assert "verl:2025" in page
    assert "did you mean 'icepop'" in invoke("explain", "icepopp", code=2)
    assert "exp(-d)" in invoke("explain", "kl_k3") or "nat" in invoke("explain", "kl_k3"), "the metric comes first"
    assert json.loads(invoke("explain", "estr", "--json"))["key"] == "estr"


def test_from_python(tmp_path: Path) -> None:
    import estr_diag as ed

    path = tmp_path / "rules.toml"
    path.write_text(RULES_TOML)
    with prime_log() as log:
        found = log.compare([ed.rules.estr(tau=0.1), ed.rules.from_toml(path)])
        assert [r.key for r in found.rules] == ["estr", "mine", "with_veto", "chain", "trainer"]
        assert found.to_pandas().shape[0] == 5
        assert len(log.sweep(ed.rules.estr(), values="0.01:1:log:3")) == 3
        assert log.threshold(ed.rules.estr(), keep=0.9).kept_share == pytest.approx(0.9, abs=0.01)


def test_a_preset_goes_by_the_version_that_it_dates_from() -> None:
    document = as_json(
        "compare",
        LOG,
        "--rules",
        "token_k1@verl:2026-01:high=1.2,token_k1@verl:2025:high=1.2,tis@slime",
        schema="compare",
    )
    today, natural, weighted, _ = document["rules"]
    assert today["name"] == "token_k1@verl"
    assert natural["kept_share"] != today["kept_share"], "one string, two mirrored bands"
    assert weighted["name"] == "tis_token@slime"
    assert weighted["weights"]["ess"] < 1 == weighted["kept_share"]


def test_what_cannot_be_replayed_and_what_has_two_meanings_is_said() -> None:
    assert "random generator" in " ".join(invoke("explain", "clip_cov").split())
    assert "explain mult_prob_error@nemo-rl" in CliRunner().invoke(app, ["explain", "mult_prob_error"]).stderr
