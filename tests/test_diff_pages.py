"""`estr-diag diff` as a user meets it: page, Markdown, JSON, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from estr_diag.cli.app import app
from estr_diag.opening import ingest
from estr_diag.report import diff_page
from estr_diag.report.diff_document import diff_json_schema
from estr_diag.report.difference import Side, difference
from estr_diag.rules import DEFAULT_RULES
from estr_diag.store.database import Store
from tests.logs import make_log, store_of
from tests.test_cli import HEAVY
from tests.test_diff import MADE


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    paths = folder / "a.duckdb", folder / "b.duckdb"
    shifted = make_log(51, sequences=120, steps=12)
    shifted["entropy"] = shifted["entropy"] * 3
    for path, log in zip(paths, (make_log(50, sequences=120, steps=12), shifted), strict=True):
        with store_of(log, store=Store.create(path)) as made:
            made.publish()
    return paths


def test_json_obeys_its_schema(stores: tuple[Path, Path]) -> None:
    schema = diff_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for arguments in (stores, (stores[0], "--steps", "5:10", "--against", "11:"), (*stores, "--steps", "5:9")):
        done = cli(*arguments, "--json")
        assert done.exit_code == 0, done.stderr
        document = json.loads(done.stdout)
        jsonschema.Draft202012Validator(schema).validate(document)
    assert document["schema"] == "estr-diag/diff/v1"
    assert (document["a"]["window"], document["b"]["window"]) == ("5:9", "5:9")
    assert document["b"]["steps"] == [5, 9]


def test_page_and_files(stores: tuple[Path, Path], tmp_path: Path) -> None:
    done = cli(*stores)
    assert done.exit_code == 0, done.stderr
    assert "What changed most" in done.stdout
    assert "entropy_mean" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    markdown = tmp_path / "diff.md"
    assert cli(*stores, "-o", markdown).stdout == ""
    text = markdown.read_text()
    assert "| entropy_mean |" in text
    assert "Share of tokens that a rule masks" in text
    assert cli(*stores, "-o", tmp_path / "diff.json").exit_code == 0
    assert json.loads((tmp_path / "diff.json").read_text())["changed"][0]["name"] == "entropy_mean"


def test_fail_on_change(stores: tuple[Path, Path]) -> None:
    changed = cli(*stores, "--fail-on-change")
    assert changed.exit_code == 1
    assert "--fail-on-change" in changed.stderr
    assert "entropy_mean" in changed.stderr
    assert cli(stores[0], stores[0], "--fail-on-change").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{a}"], 2, "nothing to compare it with"),
        (["{a}", "--steps", "5:6"], 2, "nothing to compare it with"),
        (["{a}", "{b}", "{a}"], 2, "3 logs; diff takes two"),
        (["{a}", "{b}", "-o", "diff.pdf"], 2, "found '.pdf'"),
        (["{a}", "{b}", "--steps", "x"], 2, "expected FIRST:LAST"),
        (["{a}", "{b}", "--against", "500:"], 2, "b.duckdb hold no sequence; it has steps 5 to 16"),
        (["{a}", "{b}", "--bins", "x"], 2, "expected a number of quantile bins"),
        (["{a}", "nowhere"], 3, "nowhere"),
    ],
)
def test_errors(stores: tuple[Path, Path], arguments: list[str], code: int, says: str) -> None:
    done = cli(*(text.format(a=stores[0], b=stores[1]) for text in arguments))
    assert done.exit_code == code
    assert says in done.stderr
    assert done.stdout == ""


def test_what_a_log_says_is_inert() -> None:
    with store_of(make_log(60, **MADE)) as a, store_of(make_log(61, **MADE)) as b:
        b.connection.execute("update runs set engine = $1", ["\x1b[31m[red](http://x) <b>|\n# x"])
        document = difference(Side(a, "a\x1b[2J"), Side(b, "[bold]b"), DEFAULT_RULES)
    from rich.console import Console

    for width in (80, 140):
        console = Console(width=width)
        with console.capture() as drawn:
            console.print(diff_page.render(document, width))
        assert "\x1b" not in drawn.get()
        assert "[bold]b" in drawn.get()
    text = diff_page.markdown(document)
    assert "\x1b" not in text
    assert "<b>" not in text
    assert "[red](http" not in text
    assert "\n# x" not in text


def test_the_command_imports_nothing_heavy() -> None:
    script = f"import sys, estr_diag.cli.diff_command; print(sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_trainers_run_against_a_store(data: Path, tmp_path: Path) -> None:
    with ingest(data / "prime-rl-run", into=tmp_path / "run.duckdb"):
        pass
    done = cli(data / "prime-rl-run", tmp_path / "run.duckdb", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["changed"] == []
    assert document["shared_sequences"] == 16
