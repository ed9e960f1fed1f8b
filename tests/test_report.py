"""Reports: on every sample, valid against the schema, loud about what is missing, stamped when a column is broken."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from estr_diag.errors import UsageError
from estr_diag.log import Log
from estr_diag.opening import open_log
from estr_diag.report import Report
from estr_diag.report.document import report_json_schema
from estr_diag.report.verdict import number, with_error
from tests.logs import make_log, prime_log, store_of

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
    assert "found" not in checks.values(), checks
    assert {checks[name] for name in ("copied_column", "shifted_column", "positive_logp", "impossible_versions")} == {
        "clear"
    }


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
    with prime_log() as log:
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
    with prime_log() as log:
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
    with prime_log() as log:
        report = log.report()
    assert isinstance(report, Report)
    assert json.loads(report.save(tmp_path / "r.json").read_text()) == report.to_json()
    assert report.save(tmp_path / "r.md").read_text() == report.to_markdown()


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (0.0454321, 0.0054, "0.0454 ± 0.0054"),
        (-0.0014, 0.0026, "-0.0014 ± 0.0026"),
        (123.456, 12.3, "123 ± 12"),
        (0.5, None, "0.5"),
        (0.5, 0.0, "0.5"),
        (None, None, "–"),
        (9.3e8, 9.3e8, "(9.3 ± 9.3)e8"),
        (1.2e-12, 3e-13, "(1.20 ± 0.30)e-12"),
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


def test_the_papers_statistics_in_the_report_are_those_of_the_python_api() -> None:
    log = make_log(9, sequences=60, mean_length=150)
    with store_of(log) as store:
        opened = Log(store, "made up")
        d = opened.report(bins=6).to_json()
        scaling, share = opened.scaling(6).rows()[0], opened.noise_share(bins=6).rows()[0]
        weights = {r["quantity"]: r["value"] for r in opened.weights().rows()}
        cells = opened.decomposition(bins=6).rows()
    assert d["scaling"]["exponent"] == scaling["exponent"]
    assert d["scaling"]["ci"] == [scaling["ci_low"], scaling["ci_high"]]
    assert d["decomposition"]["method"] == "lag_contrast"
    assert d["decomposition"]["noise_share"] == share["noise_share"]
    assert len(d["decomposition"]["cells"]) == len(cells)
    by_bin = {(d["entropy_bins"][c["bin"]]["lo"], c["lag"]): c["exploration"] for c in d["decomposition"]["cells"]}
    assert by_bin == {(c["lo"], c["lag"]): c["exploration"] for c in cells}
    assert {k: d["weights"][k] for k in weights} == weights
    assert d["weights"]["ess_token"] == d["consistency"]["overall"]["ess_token"]["value"]
    assert "engine noise is" in d["verdict"].lower()


def test_what_versions_by_sequence_cannot_say_is_not_computed() -> None:
    with prime_log() as log:
        d = log.report().to_json()
    assert d["switches"]["n_sequences_with_switch"] == 8
    assert d["switches"]["event_study"] == []
    assert d["switches"]["intra"] == {"0": 8, "1": 6, "2": 2}
    assert any("event study" in item["what"] for item in d["not_computed"])


def test_a_log_with_versions_by_token_has_an_event_study(data: Path) -> None:
    d = report_of(data / "areal" / "hook" / "rollout_batch_step_12.pt")
    offsets = [row["offset"] for row in d["switches"]["event_study"]]
    assert 0 in offsets
    assert offsets == sorted(offsets)
    assert d["scaling"] is None
    assert d["decomposition"] is None
    assert any("scaling law" in item["what"] for item in d["not_computed"])


def test_one_sequence_has_no_interval() -> None:
    log = make_log(9, sequences=1, mean_length=400)
    with store_of(log) as store:
        d = Log(store, "one").report().to_json()
    assert d["scaling"]["ci"] == [None, None]
    assert d["decomposition"] is None or d["decomposition"]["ci"] == [None, None]


@pytest.mark.parametrize("case", ["one token", "all masked", "no gap", "constant entropy", "zero entropy", "one lag"])
def test_degenerate_logs_have_a_report(case: str) -> None:
    log = make_log(6, sequences=8, holes=False)
    n = len(log["seq_id"])
    if case == "one token":
        log = {k: v[:1] for k, v in log.items()}
    elif case == "all masked":
        log["loss_mask"] = np.zeros(n, dtype=bool)
    elif case == "no gap":
        log["logp_train"] = log["logp_infer"].copy()
    elif case == "constant entropy":
        log["entropy"] = np.full(n, 0.5, dtype=np.float32)
    elif case == "zero entropy":
        log["entropy"] = np.zeros(n, dtype=np.float32)
    elif case == "one lag":
        log["policy_version"] = log["trainer_version"] - 1
    with store_of(log) as store:
        made = Log(store, case).report()
    jsonschema.Draft202012Validator(report_json_schema()).validate(made.to_json())
    json.dumps(made.to_json(), allow_nan=False)
    assert made.to_markdown()
    from estr_diag.cli import output
    from estr_diag.report import terminal

    with output.stdout_console().capture() as drawn:
        output.stdout_console().print(terminal.render(made.document, 80))
    assert "nan" not in drawn.get().lower()


@pytest.mark.parametrize(("bins", "edges"), [("log:3", 3), ("0.01,0.1,1", 4), ("5", 5), ([0.05, 0.5], 3)])
def test_bins_can_be_quantiles_log_or_edges(bins: str | list[float], edges: int) -> None:
    with prime_log() as log:
        d = log.report(bins=bins).to_json()
    assert len([b for b in d["entropy_bins"] if b["hi"] != 0]) == edges
    assert sum(b["n"] for b in d["entropy_bins"]) == 816
    jsonschema.Draft202012Validator(report_json_schema()).validate(d)


@pytest.mark.parametrize("bins", ["many", "log:x", "1,0.5", "0", "-3"])
def test_bins_of_another_form_are_a_usage_error(bins: str) -> None:
    with prime_log() as log, pytest.raises(UsageError):
        log.report(bins=bins)


def test_exact_quantiles_are_in_the_report() -> None:
    with prime_log() as log:
        overall = log.report().to_json()["consistency"]["overall"]
        frame = log.sql("select abs(logp_train::double - logp_infer) as x from tokens where loss_mask").to_pandas()
    for name, level in (("p50_abs_delta", 0.5), ("p99_abs_delta", 0.99), ("p999_abs_delta", 0.999)):
        assert overall[name]["value"] == pytest.approx(frame.x.dropna().quantile(level), rel=1e-9)


def test_the_terminal_and_markdown_show_the_same_numbers(data: Path) -> None:
    from estr_diag.report import sentences

    with open_log(data / "areal" / "hook" / "rollout_batch_step_12.pt") as log:
        made = log.report()
    switches = made.document.switches
    assert switches is not None
    _, rows = sentences.event_study(switches)
    assert any(row[0] == "+0" for row in rows)
    for row in rows:
        assert "| " + " | ".join(row) + " |" in made.to_markdown()


def test_what_a_log_says_is_no_markup_and_turns_nothing_around() -> None:
    from rich.console import Console

    from estr_diag.report.markdown import _foreign
    from estr_diag.report.terminal import cells

    console = Console(width=80, file=io.StringIO())
    console.print(cells((("what", "n"), [("a[bold red]b[/]", "1"), ("x[noise²]", "2")]), left=1))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a[bold red]b[/]" in printed
    assert "x[noise²]" in printed
    assert _foreign("a\x1b[31m\u202eb\nc <i>") == "a\\\\x1b\\[31m\\\\u202eb c &lt;i>"
