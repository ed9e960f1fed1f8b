"""The command as a user meets it: in a subprocess, with its output, its exit codes and its messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest

from estr_diag import __version__
from estr_diag.report.document import report_json_schema
from tests.logs import PRIME_RL

HEAVY = (
    "duckdb",
    "pyarrow",
    "numpy",
    "pandas",
    "polars",
    "matplotlib",
    "seaborn",
    "scipy",
    "torch",
    "sqlglot",
    "msgpack",
)


def cli(*arguments: object, env: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run estr-diag in a fresh interpreter."""
    command = [sys.executable, "-m", "estr_diag", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}, **kwargs
    )


def fails(code: int, *arguments: object, says: str) -> str:
    """Run, and expect one line on stderr, nothing on stdout, and an exit code."""
    done = cli(*arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["report", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = f"""
import sys
sys.argv = ["estr-diag", *{arguments!r}]
from estr_diag.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", sorted(set(sys.modules) & set({HEAVY!r})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = f"import sys, estr_diag; print(sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert cli("--version").stdout.strip() == f"estr-diag {__version__}"


def test_demo_prints_a_page_without_colour_codes() -> None:
    done = cli("demo", env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for text in (
        "estr_diag lab",
        "126,533 counted",
        "mean_abs_delta",
        "kpop:phi=0.1",
        "By lag",
        "is engine noise",
    ):
        assert text in done.stdout, text


def test_demo_is_wider_on_a_wide_terminal() -> None:
    wide = cli("demo", env={"COLUMNS": "140"}).stdout
    assert "p99 |δ|" in wide
    assert "p99 |δ|" not in cli("demo", env={"COLUMNS": "80"}).stdout


def test_json_is_data_only_and_valid() -> None:
    done = cli("demo", "--json")
    document = json.loads(done.stdout)
    assert done.stderr == ""
    jsonschema.Draft202012Validator(report_json_schema()).validate(document)
    assert document["schema"] == "estr-diag/report/v1"
    assert document["log"]["n_counted"] == 126_533


def test_markdown_and_json_files(tmp_path: Path) -> None:
    done = cli("report", PRIME_RL, "-o", tmp_path / "r.md")
    assert done.stdout == ""
    assert "| `mean_abs_delta` | 0.0454 ± 0.0054 | nat |" in (tmp_path / "r.md").read_text()
    cli("report", PRIME_RL, "-o", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["log"]["trainer"] == "prime-rl"
    fails(2, "demo", "-o", tmp_path / "r.pdf", says=".md or .json")


def test_gates(tmp_path: Path) -> None:
    log = Path(__file__).parent / "data" / "prime-rl" / "token_exports"
    assert cli("report", log, "--fail-on", "kl_k3>0.5").returncode == 0
    done = cli("report", log, "--json", "--fail-on", "kl_k3>0.001", "--fail-on", "ess_token<0.3")
    assert done.returncode == 1
    assert "kl_k3 is 0.00377" in done.stderr
    assert "ess_token" not in done.stderr
    json.loads(done.stdout)
    fails(2, "report", log, "--fail-on", "kl_k4>1", says="no metric 'kl_k4'")
    fails(2, "report", log, "--fail-on", "kl_k3=1", says="METRIC>NUMBER")


def test_a_gate_on_something_not_computed_is_not_passed(data: Path) -> None:
    done = cli("report", data / "nemo-rl" / "exp_001" / "train_data_step6.jsonl", "--fail-on", "kl_k3>1000")
    assert done.returncode == 1
    assert "was not computed" in done.stderr


def test_ingest_dry_run_shows_columns_and_their_sources(data: Path, tmp_path: Path) -> None:
    done = cli("ingest", data / "prime-rl" / "token_exports", "--dry-run", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for text in (
        "layout token_export, step 7",
        "joined with",
        "traces.jsonl",
        "logp_infer",
        "← inference_logprobs",
        "policy_version",
        "← traces: run.work.policy",
    ):
        assert text in done.stdout, text
    found = json.loads(cli("ingest", data / "nemo-rl" / "exp_001", "--dry-run", "--json").stdout)
    assert [u["step"] for u in found["units"]] == [5, 6]
    assert found["units"][0]["columns"]["logp_train"] == "prev_logprobs"


def test_ingest_then_report_sql_and_export(data: Path, tmp_path: Path) -> None:
    store, parquet = tmp_path / "run.duckdb", tmp_path / "log.parquet"
    done = cli("ingest", data / "prime-rl" / "token_exports", "-o", store)
    assert done.returncode == 0, done.stderr
    assert "16 sequences and 845 response tokens added" in done.stdout
    assert json.loads(cli("sql", store, "select count(*) as n from tokens", "--json").stdout) == [{"n": 845}]
    assert cli("export", store, "-o", parquet).returncode == 0
    direct, stored, exported = (
        json.loads(cli("report", log, "--json").stdout) for log in (data / "prime-rl" / "token_exports", store, parquet)
    )
    assert stored["consistency"] == direct["consistency"]
    assert stored["entropy_bins"] == direct["entropy_bins"]
    assert exported["consistency"]["overall"] == direct["consistency"]["overall"]
    assert exported["entropy_bins"] == direct["entropy_bins"]
    assert exported["rules"] == direct["rules"]
    fails(2, "export", store, "-o", parquet, says="exists already")
    fails(4, "ingest", data / "prime-rl" / "token_exports", "-o", store, says="--append")


def test_sql_reads_the_log_and_nothing_else(data: Path, tmp_path: Path) -> None:
    log = data / "nemo-rl" / "exp_001"
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    for query in (
        f"select * from read_text('{secret}')",
        f"copy tokens to '{tmp_path / 'out.csv'}'",
        "select nonsense from tokens",
    ):
        fails(2, "sql", log, query, says="query")
    assert not (tmp_path / "out.csv").exists()


def test_a_locked_store_is_exit_4(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    cli("ingest", data / "nemo-rl" / "exp_001", "-o", store)
    holder = duckdb.connect(str(store))
    try:
        assert f"PID {os.getpid()}" in fails(4, "report", store, says="is locked")
    finally:
        holder.close()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["report", "nowhere"], 3, "no such file or folder"),
        (["report"], 2, "Missing argument"),
        (["reprot", "x"], 2, "report"),
        (["report", "x", "--rules", "ester"], 2, "did you mean 'estr'"),
        (["report", "x", "--format", "verll"], 2, "did you mean 'verl'"),
        (["report", "missing.duckdb"], 4, "no such store"),
        (["ingest", "x"], 2, "no store named"),
        (["schema", "reprot"], 2, "did you mean 'report.v1'"),
    ],
)
def test_usage_errors(arguments: list[str], code: int, says: str) -> None:
    fails(code, *arguments, says=says)


def test_a_closed_pipe_is_no_error(data: Path) -> None:
    command = f"{sys.executable} -m estr_diag schema report | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


def test_interrupting_is_130(data: Path, tmp_path: Path) -> None:
    script = """
import sys
from estr_diag.cli import app
from estr_diag import opening
def interrupted(*a, **k): raise KeyboardInterrupt
opening.open_log = interrupted
sys.argv = ["estr-diag", "report", "x"]
app.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "interrupted" in done.stderr


def test_formats_and_schemas_are_listed(data: Path) -> None:
    formats = json.loads(cli("formats", "--json").stdout)
    assert {"verl", "slime", "nemo-rl", "prime-rl", "generic"} <= {f["adapter"] for f in formats}
    assert "train_data" in cli("formats", env={"COLUMNS": "200"}).stdout
    names = cli("schema").stdout.split()
    assert {"token_log.v1", "report.v1", "trainers/verl"} <= set(names)
    assert json.loads(cli("schema", "token_log").stdout)["required"] == ["seq_id", "pos", "logp_infer", "logp_train"]


def test_progress_goes_to_stderr(data: Path, tmp_path: Path) -> None:
    """A slow ingest without a terminal writes a line now and then, on stderr only."""
    script = """
import sys, time
from estr_diag.cli import output
output._PLAIN_PROGRESS_SECONDS = 0.0
sys.argv = ["estr-diag", "report", "--json", sys.argv[1]]
from estr_diag.cli.app import main
main()
"""
    folder = tmp_path / "exp"
    shutil.copytree(data / "nemo-rl" / "exp_001", folder)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    json.loads(done.stdout)
    assert "reading: 1 of 2 files, 620 tokens" in done.stderr
