"""Reports: on every sample, valid against the schema, loud about what is missing, stamped when a column is broken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from estr_diag.log import Log, demo, open_log
from estr_diag.report import Report
from estr_diag.report.document import report_json_schema
from estr_diag.report.verdict import number, with_error
from tests.logs import make_log, store_of

SAMPLES = {
    # sample -> (counted tokens, columns that the report must ask for)
    "verl/hook/global_step_12.dp": (1085, []),
    "verl/hook_numpy": (1085, []),
    "verl/rollout_skip": (1085, ["logp_train", "entropy"]),
    "verl/rollout_tq": (419, ["logp_train", "entropy"]),
    "slime/dump_details": (917, []),
    "slime/no_entropy": (370, ["entropy", "policy_version"]),
    "slime/old_format": (395, ["entropy", "policy_version"]),
    "nemo-rl/exp_001/train_data_step5.jsonl": (576, ["entropy", "policy_version"]),
    "nemo-rl/exp_001/train_data_step6.jsonl": (154, ["logp_train", "entropy", "policy_version"]),
    "nemo-rl": (576 + 154, ["entropy", "policy_version"]),
    "prime-rl/token_exports": (816, []),
}


def report_of(path: Path) -> dict[str, Any]:
    with open_log(path) as log:
        document = log.report().to_json()
    jsonschema.Draft202012Validator(report_json_schema()).validate(document)
    json.dumps(document, allow_nan=False)
    return document


@pytest.mark.parametrize(("sample", "counted", "missing"), [(s, *v) for s, v in SAMPLES.items()], ids=list(SAMPLES))
def test_every_supported_sample(data: Path, sample: str, counted: int, missing: list[str]) -> None:
    document = report_of(data / sample)
    if sample == "nemo-rl":
        # One file lacks the training column: its tokens are counted as missing it, not dropped in silence.
        assert document["log"]["n_counted"] == 576
        assert document["log"]["skipped"]["logp_train missing inside the mask"] == 154
        assert [f["status"] for f in document["log"]["files_left_out"]] == ["refused"]
    else:
        assert document["log"]["n_counted"] == counted
    asked = " ".join(item["why"] for item in document["not_computed"])
    for column in ("logp_train", "entropy", "policy_version"):
        assert (column in asked) == (column in missing), (column, document["not_computed"])
    assert all(item["how_to_get_it"] for item in document["not_computed"])
    has_gap = "logp_train" not in missing
    assert bool(document["rules"]) == has_gap
    assert ("mean_abs_delta" in document["consistency"]["overall"]) == has_gap
    assert bool(document["entropy_bins"]) == ("entropy" not in missing and has_gap)
    if not has_gap:
        assert "one engine" in document["verdict"]


def test_a_copied_column_is_said_first_and_stamped(data: Path) -> None:
    document = report_of(data / "verl" / "hook_bypass")
    assert document["verdict"].startswith("Do not read the numbers below: logp_train is a copy")
    assert "bypass_mode" in document["verdict"]
    assert document["stamped"] == ["logp_train"]
    found = {c["id"]: c["verdict"] for c in document["checks"]}
    assert found["copied_column"] == "found"
    assert document["consistency"]["overall"]["mean_abs_delta"]["value"] == 0.0


def test_a_skipped_forward_pass_is_missing_and_not_zero(data: Path) -> None:
    document = report_of(data / "nemo-rl" / "exp_001" / "train_data_step6.jsonl")
    assert "mean_abs_delta" not in document["consistency"]["overall"]
    assert any("forward pass was skipped" in note for note in document["log"]["notes"])


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_shifted_column_is_found(shift: int) -> None:
    log = make_log(5, sequences=30, holes=False)
    log["logp_train"] = np.roll(log["logp_train"], shift)
    with store_of(log) as store:
        document = Log(store, "made up").report().to_json()
    check = next(c for c in document["checks"] if c["id"] == "shifted_column")
    assert check["verdict"] == "found"
    assert f"{abs(shift)} position(s) {'late' if shift > 0 else 'early'}" in check["cause"]
    assert document["verdict"].startswith("Do not read")


@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_log_makes_no_alarm(seed: int) -> None:
    with store_of(make_log(seed, sequences=20, scale=0.5)) as store:
        checks = {c.id: c.verdict for c in Log(store, "healthy").check()}
    assert set(checks.values()) == {"clear"}, checks


def test_too_few_tokens_is_cannot_tell() -> None:
    log = make_log(1, sequences=2, mean_length=3, holes=False)
    with store_of(log) as store:
        checks = {c.id: c.verdict for c in Log(store, "tiny").check()}
    assert checks["copied_column"] == checks["shifted_column"] == "cannot_tell"


def test_honest_zeros_are_no_copy() -> None:
    log = make_log(2, sequences=20, holes=False)
    certain = np.random.default_rng(0).random(len(log["logp_infer"])) < 0.7
    log["logp_infer"][certain] = log["logp_train"][certain] = 0.0
    with store_of(log) as store:
        checks = {c.id: c.verdict for c in Log(store, "certain").check()}
    assert checks["copied_column"] == "clear"


def test_impossible_versions_and_positive_log_probs_are_found() -> None:
    log = make_log(2, sequences=20, holes=False)
    log["policy_version"] = log["policy_version"] + 2
    log["logp_infer"][::50] = 0.05
    with store_of(log) as store:
        checks = {c.id: c for c in Log(store, "broken").check()}
    assert checks["impossible_versions"].verdict == "found"
    assert "newer than the trainer's" in checks["impossible_versions"].cause
    assert checks["positive_logp"].verdict == "found"
    assert checks["positive_logp"].level == "warning"
    log["logp_infer"][::50] = 0.7
    with store_of(log) as store:
        positive = next(c for c in Log(store, "broken").check() if c.id == "positive_logp")
    assert positive.level == "error"


def test_the_number_of_bins_follows_the_size_of_the_log() -> None:
    small, large = make_log(1, sequences=10), make_log(1, sequences=80, mean_length=150)
    sizes = []
    for log in (small, large):
        with store_of(log) as store:
            bins = Log(store, "x").report().to_json()["entropy_bins"]
            sizes.append(sum(b["hi"] > 0 for b in bins))
    assert sizes[0] == 4
    assert sizes[1] == 24


def test_sections_add_up() -> None:
    with demo() as log:
        d = log.report().to_json()
    assert sum(b["n"] for b in d["entropy_bins"]) == d["log"]["n_counted"]
    assert sum(d["log"]["lags"].values()) == d["log"]["n_counted"]
    assert d["log"]["n_tokens"] == d["log"]["n_counted"] + sum(d["log"]["skipped"].values())
    for rule in d["rules"]:
        assert rule["kept_tokens"] + rule["masked_tokens"] + rule["undecided_tokens"] == d["log"]["n_counted"]
        for by in ("by_entropy_bin", "by_lag", "by_step"):
            assert sum(g["kept_tokens"] for g in rule[by]) == rule["kept_tokens"], (rule["name"], by)
    for b in d["entropy_bins"]:
        assert sum(cell["n"] for cell in b["by_lag"]) == b["n"]
        assert b["mode"]["n"] + b["off_mode"]["n"] == b["n"]


def test_the_same_log_gives_the_same_report() -> None:
    with demo() as log:
        first, second = log.report().to_json(), log.report().to_json()
    assert first == second


def test_hostile_names_are_inert_in_markdown(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "x|<img src=x onerror=alert(1)>[a](b)`"
    folder.mkdir()
    (folder / "train_data_step5.jsonl").write_bytes((data / "nemo-rl/exp_001/train_data_step5.jsonl").read_bytes())
    with open_log(folder) as log:
        text = log.report().to_markdown()
    title = text.splitlines()[0]
    assert "<img" not in text
    assert "\\[a\\](b)\\`" in title


def test_a_report_is_saved_by_its_ending(tmp_path: Path) -> None:
    with demo() as log:
        report = log.report()
    assert isinstance(report, Report)
    assert json.loads(report.save(tmp_path / "r.json").read_text()) == report.to_json()
    assert report.save(tmp_path / "r.md").read_text() == report.to_markdown() == report._repr_markdown_()


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (0.0454321, 0.0054, "0.0454 ± 0.0054"),
        (-0.0014, 0.0026, "-0.0014 ± 0.0026"),
        (123.456, 12.3, "123 ± 12"),
        (0.5, None, "0.5"),
        (0.5, 0.0, "0.5"),
        (None, None, "–"),
        (9.3e8, 9.3e8, "9.3e+08 ± 9e+08"),
        (1.2e-12, 3e-13, "1.2e-12 ± 3e-13"),
    ],
)
def test_numbers_are_shown_as_precisely_as_their_error(value: float | None, se: float | None, text: str) -> None:
    assert with_error({"value": value, "se": se}) == text


def test_three_digits() -> None:
    assert [number(v) for v in (None, 0.0, 0.01234567, 1234567.0)] == ["–", "0", "0.0123", "1.23e+06"]
    assert math.isclose(float(number(0.0123)), 0.0123)


def test_tokens_without_an_entropy_are_said_to_be_in_no_bin() -> None:
    log = make_log(3, holes=False)
    log["entropy"][::7] = np.nan
    inside = int(np.count_nonzero(log["loss_mask"][::7]))
    with store_of(log) as store:
        d = Log(store, "holes").report().to_json()
    assert any(note.startswith(f"{inside:,} counted tokens have no entropy") for note in d["log"]["notes"])
    assert sum(b["n"] for b in d["entropy_bins"]) == d["log"]["n_counted"] - inside
    estr = next(r for r in d["rules"] if r["name"] == "estr")
    assert estr["undecided_tokens"] == inside
