"""The wheel holds what the README promises, and the docs agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import estr_diag
from estr_diag.ingestion.registry import adapters
from estr_diag.opening import DEMO
from tests.test_cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_the_package_its_schemas_and_the_demo_log(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    committed = {f"estr_diag/{p.relative_to(ROOT)}" for p in (ROOT / "data_schemas").rglob("*.json")}
    assert len(committed) > 10
    assert committed <= names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "estr_diag").rglob("*.py")}
    assert sources <= names
    assert "estr_diag/py.typed" in names
    assert {str(p.relative_to(ROOT)) for p in DEMO.rglob("*.parquet")} <= names
    assert not any(n.startswith(("tests/", "estr_diag/tests")) for n in names)
    assert sum(i.file_size for i in wheel.infolist()) < 5_000_000


def test_the_wheel_names_its_commands_and_adapters(wheel: zipfile.ZipFile) -> None:
    points = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "estr-diag = estr_diag.cli.app:main" in points
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    assert f"Version: {estr_diag.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert not re.search(r"^Requires-Dist: torch(?!.*extra)", metadata, re.M), "torch is an extra"


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {estr_diag.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_shows_what_the_demo_prints() -> None:
    shown = README.split("estr-diag demo\n```\n")[1].split("```\n")[1].split("```")[0]
    begins, marks, rest = shown.strip().partition("\n...")
    assert marks, "the beginning of the page, and a line of dots"
    assert not rest
    assert len(begins) > 2000
    assert cli("demo", env={"COLUMNS": "80"}).stdout.strip().startswith(begins), "run estr-diag demo and paste it"


def test_every_command_is_in_the_readme() -> None:
    listed = re.findall(r"│ (\w+) ", cli("--help", env={"COLUMNS": "100", "NO_COLOR": "1"}).stdout)
    commands = set(listed) - {"Options"}
    assert {"report", "demo", "ingest", "formats", "schema", "sql", "export"} <= commands
    for command in commands:
        assert f"estr-diag {command}" in README, command


def test_every_trainer_is_in_the_readme() -> None:
    for name, adapter in adapters().items():
        if name != "generic":
            assert adapter.title in README, adapter.title


def test_module_sizes_stay_readable() -> None:
    long = {p.name: n for p in (ROOT / "estr_diag").rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long, "one idea, one file"


def test_the_declared_python_is_the_tested_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
