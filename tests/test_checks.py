"""Detectors: each finds its own fault at several sizes and no other's, and all are silent on sound logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import estr_diag as ed
from estr_diag.checks import CHECKS, SHARED, by_id, ranked, run_checks
from estr_diag.checks.base import Finding
from tests.fault_logs import sampled_log
from tests.logs import PRIME_RL, make_log, store_of
from tests.test_cli import cli


def findings(log: Any) -> dict[str, Finding]:
    with store_of(log) as store:
        return {finding.id: finding for finding in run_checks(store)}


def found(log: Any) -> set[str]:
    return {finding.id for finding in findings(log).values() if finding.verdict == "found"}


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.6}, "temperature"), ({"temperature": 0.8}, "temperature"), ({"temperature": 1.25}, "temperature"),
    ({"temperature": 2.0}, "temperature"), ({"top_p": 0.95}, "renormalised"), ({"top_p": 0.9}, "renormalised"), ({"top_p": 0.7}, "renormalised"),
    ({"frozen": True, "moved": 0.15}, "undelivered_weights"), ({"frozen": True, "moved": 0.3}, "undelivered_weights"),
    ({"forced": 4}, "forced_tokens"), ({"forced": 20}, "forced_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda x: str(x))
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_fires_its_own_detector_and_no_other(fault: dict[str, Any], check: str, seed: int) -> None:
    assert found(sampled_log(seed, **fault)) == {check}


@pytest.mark.parametrize(
    "sound",
    [
        {}, {"noise": 0.0}, {"noise": 0.003}, {"moved": 0.3}, {"moved": 0.0}, {"tokens": 400}, {"steps": 2, "tokens": 400}, {"noise": 0.1, "tokens": 6000},
    ],
    ids=str,
)  # fmt: skip
def test_sound_logs_make_no_alarm(sound: dict[str, Any]) -> None:
    """200 logs in all, of several sizes; a log without noise has lag-0 columns that are equal, which is a copy by right."""
    for seed in range(25):
        assert found(sampled_log(1000 + seed, **sound)) <= ({"copied_column"} if sound.get("noise") == 0 else set())


@pytest.mark.parametrize("seed", range(20))
def test_other_sound_logs_make_no_alarm(seed: int) -> None:
    """Tool spans, missing values, tokens of entropy 0, and a few extreme ones."""
    assert found(make_log(seed, sequences=30)) == set()
    assert found(make_log(seed, sequences=2, mean_length=4)) == set()


def test_the_bundled_logs_make_no_alarm() -> None:
    with ed.demo() as log:
        assert [f.id for f in log.check() if f.verdict != "clear"] == []
    with ed.open(PRIME_RL) as log:
        assert [f.id for f in log.check() if f.verdict == "found"] == []


def test_the_size_of_a_temperature_is_told() -> None:
    """Between two outcomes the slope of the logits is the temperature; with many it lies between that and 1."""
    temperatures = (0.6, 0.8, 1.25, 1.6)
    sizes = []
    for temperature in temperatures:
        one = findings(sampled_log(3, temperature=temperature, tokens=12_000))["temperature"]
        assert one.control == 1.0
        assert one.spoils == ("logp_infer", "logp_train")
        assert one.size is not None
        sizes.append(one.size)
        assert 0.6 < (one.size - 1) / (temperature - 1) < 1.1
    assert sizes == sorted(sizes)


def test_the_kept_mass_is_told() -> None:
    log = sampled_log(3, top_p=0.7, tokens=12_000)
    found = findings(log)["renormalised"]
    lag0 = log["trainer_version"] == log["policy_version"]
    delta = (log["logp_train"].astype(np.float64) - log["logp_infer"])[lag0]
    assert found.evidence[0]["mean_ratio_below"] == pytest.approx(np.exp(delta[delta < -0.02]).mean(), rel=1e-6)
    assert found.size == pytest.approx((delta > 0.02).sum() / (np.abs(delta) > 0.02).sum(), rel=1e-9)


def test_a_temperature_that_undelivered_weights_explain_is_not_named() -> None:
    log = sampled_log(1, frozen=True, moved=0.3, steps=24, tokens=6000)
    steep = findings(log)["temperature"]
    assert steep.verdict in ("clear", "cannot_tell")
    if steep.verdict == "cannot_tell":
        assert "undelivered_weights" in steep.cause


def test_what_a_log_lacks_cannot_be_told() -> None:
    log = sampled_log(1)
    without = {k: v for k, v in log.items() if k not in ("policy_version", "trainer_version")}
    said = findings(without)
    assert said["undelivered_weights"].verdict == "cannot_tell"
    assert "policy_version" in said["undelivered_weights"].cause
    assert said["temperature"].verdict == "clear"
    one = {k: v for k, v in log.items() if k != "logp_train"}
    assert {f.verdict for f in findings(one).values()} <= {"cannot_tell", "clear"}
    assert found(
        {k: v for k, v in sampled_log(2, temperature=0.6).items() if k not in ("policy_version", "trainer_version")}
    ) == {"temperature"}


def test_every_check_explains_itself() -> None:
    checks = by_id()
    assert len(checks) == len(CHECKS) + len(SHARED)
    for check in checks.values():
        assert len(check.__doc__ or "") > 40


def test_findings_are_ranked() -> None:
    def one(name: str, verdict: Any, level: Any) -> Finding:
        return Finding(name, verdict, level, "", "", "")

    listed = [
        one("a", "clear", "fatal"),
        one("b", "found", "warning"),
        one("c", "cannot_tell", "fatal"),
        one("d", "found", "fatal"),
    ]
    assert [f.id for f in ranked(listed)] == ["d", "b", "c", "a"]


def test_the_command(tmp_path: Path) -> None:
    pq.write_table(pa.table(sampled_log(1, temperature=0.6)), tmp_path / "hot.parquet")
    pq.write_table(pa.table(sampled_log(1)), tmp_path / "sound.parquet")
    done = cli("check", tmp_path / "hot.parquet")
    assert done.returncode == 0, done.stderr
    assert "1 found" in done.stdout
    assert done.stdout.index("temperature") < done.stdout.index("copied_column")
    assert "next:" in done.stdout
    assert cli("check", tmp_path / "hot.parquet", "--fail-level", "error").returncode == 1
    assert cli("check", tmp_path / "hot.parquet", "--fail-level", "fatal").returncode == 0
    assert cli("check", tmp_path / "sound.parquet", "--fail-level", "info").returncode == 0
    document = json.loads(cli("check", tmp_path / "hot.parquet", "--json").stdout)
    assert document["findings"][0]["id"] == "temperature"
    assert 0.6 < document["findings"][0]["size"] < 0.8
    explained = cli("check", tmp_path / "hot.parquet", "--explain", "temperature").stdout
    assert "multiplies the logits" in explained
    assert "copied_column" not in explained
    for arguments, said in (
        (["--fail-level", "bad"], "fatal"),
        (["--explain", "temprature"], "did you mean 'temperature'"),
    ):
        refused = cli("check", tmp_path / "hot.parquet", *arguments)
        assert refused.returncode == 2
        assert said in refused.stderr
