"""The pages of ``estr-diag diff``: right differences, on every page, and inert."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from estr_diag.report.diff_document import diff_json_schema
from tests import oracles
from tests.browser import CHROMIUM, visit
from tests.fault_logs import sampled_log
from tests.test_cli import cli

HOSTILE = "run <script>window.hit=1</script>.parquet"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("diff")
    out = []
    for name, log in (
        ("a.parquet", sampled_log(1, tokens=6000)),
        (HOSTILE.replace("/", "∕"), sampled_log(2, tokens=6000, noise=0.3)),
    ):
        pq.write_table(pa.table(log), folder / name)
        out.append(folder / name)
    return out


def by_sequence(tokens: dict[str, Any], values: Any) -> tuple[float, float]:
    """Mean over tokens with the standard error by sequence."""
    sums = np.array([values[tokens["seq_id"] == s].sum() for s in np.unique(tokens["seq_id"])])
    counts = np.array([(tokens["seq_id"] == s).sum() for s in np.unique(tokens["seq_id"])])
    mean = sums.sum() / counts.sum()
    spread = ((sums - mean * counts) ** 2).sum() * len(sums) / (len(sums) - 1)
    return float(mean), float(math.sqrt(spread) / counts.sum())


def test_differences_equal_numpy(logs: list[Path]) -> None:
    document = json.loads(cli("diff", *logs, "--json").stdout)
    jsonschema.Draft202012Validator(diff_json_schema()).validate(document)
    row = next(r for r in document["metrics"] if r["name"] == "mean_abs_delta")
    sides = []
    for side, log in zip(
        ("a", "b"), (sampled_log(1, tokens=6000), sampled_log(2, tokens=6000, noise=0.3)), strict=True
    ):
        tokens = oracles.counted(log)
        mean, se = by_sequence(tokens, np.abs(tokens["delta"]))
        assert row[side]["value"] == pytest.approx(mean, rel=1e-6)
        assert row[side]["se"] == pytest.approx(se, rel=1e-6)
        sides.append((mean, se))
    (a, se_a), (b, se_b) = sides
    assert row["difference"] == pytest.approx(b - a, rel=1e-6)
    assert row["se"] == pytest.approx(math.hypot(se_a, se_b), rel=1e-6)
    assert row["low"] < b - a < row["high"]
    assert row["verdict"] == "changed"
    assert document["changed"][0]["z"] > 5


def test_alike_logs_do_not_differ(tmp_path: Path) -> None:
    for seed in (1, 2):
        pq.write_table(pa.table(sampled_log(seed)), tmp_path / f"{seed}.parquet")
    alike = json.loads(cli("diff", tmp_path / "1.parquet", tmp_path / "2.parquet", "--json").stdout)
    assert alike["changed"] == []
    same = json.loads(cli("diff", tmp_path / "1.parquet", tmp_path / "1.parquet", "--json").stdout)
    assert same["changed"] == []
    assert same["shared_sequences"] > 0
    assert cli("diff", tmp_path / "1.parquet", tmp_path / "2.parquet", "--fail-on-change").returncode == 0


def test_windows_are_the_log_of_those_steps(tmp_path: Path) -> None:
    log = sampled_log(3, tokens=6000)
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    late = {k: v[log["step"] >= 8] for k, v in log.items()}
    document = json.loads(cli("diff", tmp_path / "log.parquet", "--steps", "0:3", "--against", "8:11", "--json").stdout)
    tokens = oracles.counted(late)
    row = next(r for r in document["metrics"] if r["name"] == "mean_abs_delta")
    assert row["b"]["value"] == pytest.approx(np.abs(tokens["delta"]).mean(), rel=1e-6)
    assert document["b"]["steps"] == [8, 11]
    for arguments, said in (
        (["--steps", "0:3"], "nothing to compare"),
        (["--steps", "50:60", "--against", "0:3"], "steps 0 to 11"),
        (["--steps", "x", "--against", "0:3"], "FIRST:LAST"),
    ):
        refused = cli("diff", tmp_path / "log.parquet", *arguments)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_every_page_says_what_changed(logs: list[Path], tmp_path: Path) -> None:
    page = cli("diff", *logs)
    assert page.returncode == 0, page.stderr
    assert "What changed most" in page.stdout
    for ending in ("html", "md", "json"):
        assert cli("diff", *logs, "-o", tmp_path / f"d.{ending}").returncode == 0
        text = (tmp_path / f"d.{ending}").read_text("utf-8")
        assert "mean_abs_delta" in text
        assert ending == "json" or "<script>window.hit" not in text
    assert cli("diff", *logs, "--fail-on-change").returncode == 1
    assert cli("diff", *logs, "-o", tmp_path / "d.pdf").returncode == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_in_a_browser(logs: list[Path], tmp_path: Path) -> None:
    cli("diff", *logs, "-o", tmp_path / "d.html")
    seen = visit(
        tmp_path / "d.html",
        "({ hit: window.hit || 0, tables: document.querySelectorAll('table').length, wide: document.documentElement.scrollWidth <= innerWidth })",
        width=390,
    )
    assert seen.console == []
    assert seen.requests == []
    assert seen.answer["hit"] == 0
    assert seen.answer["tables"] >= 3
    assert seen.answer["wide"]
