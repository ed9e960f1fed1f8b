"""Scalars by step: every tracker's own library reads back what the log's statistics say."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import estr_diag as ed
from estr_diag.cli import scalars_command
from estr_diag.cli.app import app
from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.exporters import WRITERS, default_run, export_scalars
from estr_diag.exporters import wandb as wandb_exporter
from estr_diag.exporters.scalars import METRICS, collect, left_out
from estr_diag.exporters.wandb_file import records
from estr_diag.log import Log
from estr_diag.opening import DEMO
from tests.logs import make_log, store_of

Points = dict[tuple[int, str], float]

assert callable(scalars_command.scalars), "importing it registers the command"


def read_jsonl(path: Path) -> Points:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "one line a step, in order"
    return {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}


def read_tensorboard(path: Path) -> Points:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return {(e.step, tag): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def read_wandb(path: Path) -> Points:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = path.glob("run-*.wandb")
    points: Points = {}
    for data in records(file.read_bytes()):
        record = proto.Record.FromString(data)
        if not record.HasField("history"):
            continue
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        assert record.history.step.num == values["_step"], "the x axis is the training step"
        points |= {(values["_step"], name): v for name, v in values.items() if not name.startswith("_")}
    return points


def read_mlflow(path: Path) -> Points:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=path.parents[1].resolve().as_uri())
    run = client.get_run(path.name)
    assert run.info.status == "FINISHED"
    history = {name: client.get_metric_history(path.name, name) for name in run.data.metrics}
    return {(m.step, name): m.value for name, metrics in history.items() for m in metrics}


READERS: dict[str, Callable[[Path], Points]] = {
    "jsonl": read_jsonl, "mlflow": read_mlflow, "tensorboard": read_tensorboard, "wandb": read_wandb,
}  # fmt: skip
KINDS = sorted(WRITERS)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """An exporter whose library is installed."""
    name: str = request.param
    if name != "jsonl":
        pytest.importorskip(name)
    return name


@pytest.fixture
def made_up() -> Iterator[Log]:
    with Log(store_of(make_log(3, sequences=30, steps=4)), "made-up.parquet") as log:
        yield log


def expected(log: Log) -> Points:
    points: Points = {}
    for row in log.consistency(by="step").rows():
        if row["metric"] in METRICS and row["value"] is not None:
            points[row["step"], f"estr_diag/{row['metric']}"] = row["value"]
            if row["se"] is not None:
                points[row["step"], f"estr_diag/{row['metric']}_se"] = row["se"]
    for row in log.compare().by["step"].rows():
        name = f"estr_diag/masked_share_{row['rule'].split(':')[0]}"
        if row["rule"] != "none" and row["masked_share"] is not None:
            points[row["step"], name] = row["masked_share"]
            if row["kept_share_se"] is not None:
                points[row["step"], f"{name}_se"] = row["kept_share_se"]
    return points


def same(found: Points, wanted: Points, kind: str) -> None:
    assert found.keys() == wanted.keys()
    relative = 1e-6 if kind == "tensorboard" else 1e-9  # its scalars are float32
    assert found == pytest.approx(wanted, rel=relative, abs=0)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("which", ["demo", "made up"])
def test_the_trackers_library_reads_what_the_statistics_say(
    kind: str, which: str, made_up: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a folder" / "of runs"
    with ed.demo() if which == "demo" else made_up as log:
        path = export_scalars(log, target, kind, "first")
        wanted = expected(log)
    assert path.is_relative_to(target)
    assert not [name for name in os.environ if name.startswith("MLFLOW_")], "the environment is as it was"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    same(READERS[kind](path), wanted, kind)
    steps = {step for step, _ in wanted}
    assert len(steps) > 2
    assert {(step, f"estr_diag/{name}") for step in steps for name in (*METRICS, "masked_share_kpop")} <= wanted.keys()


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_run_is_written_once_and_a_folder_holds_several(
    kind: str, made_up: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path = export_scalars(made_up, tmp_path, kind)
    with pytest.raises(UsageError, match=r"run 'made-up' is in .* already, expected a new one; name it with --run"):
        export_scalars(made_up, tmp_path, kind)
    other = export_scalars(made_up, tmp_path, kind, "again")
    assert other != path
    for written in (path, other):  # the attempt that failed added nothing to the first
        same(READERS[kind](written), expected(made_up), kind)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_file_where_a_folder_is_needed(kind: str, made_up: Log, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UsageError, match="found a file, expected a folder; name a folder"):
        export_scalars(made_up, tmp_path / "taken", kind)
    with pytest.raises(UsageError, match="cannot be made: Not a directory"):
        export_scalars(made_up, tmp_path / "taken" / "below", kind)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jsonl"])
def test_a_library_that_is_not_installed(
    kind: str, made_up: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == kind]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UsageError, match=rf"pip install 'estr_diag\[{kind}\]'"):
        export_scalars(made_up, tmp_path, kind)
    assert not any(tmp_path.iterdir())


def test_wrong_names(made_up: Log, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        export_scalars(made_up, tmp_path, "tensorbord")
    for run in ("", "../up", "a/b", ".hidden", "it's", "-x", "a\n"):
        with pytest.raises(UsageError, match="expected letters, digits"):
            export_scalars(made_up, tmp_path, "jsonl", run)
    assert not any(tmp_path.iterdir())
    for source, name in [("/x/run 7.duckdb", "run-7"), ("a.parquet, b.parquet", "a"), ("", "estr_diag"), ("..", "estr_diag")]:  # fmt: skip
        assert default_run(Log(made_up.store, source)) == name


def test_a_log_without_steps(tmp_path: Path) -> None:
    arrays = make_log(1)
    del arrays["step"]
    with Log(store_of(arrays), "x") as log, pytest.raises(UsageError, match="found 12 sequences without a step"):
        export_scalars(log, tmp_path, "jsonl")


def test_what_the_log_lacks_is_left_out_and_said() -> None:
    with_steps, without = make_log(1), make_log(2)
    del without["step"]
    with Log(store_of(with_steps, without), "x") as log:
        assert {step for step, _, _ in collect(log)} == {5, 6}
        assert left_out(log) == ["12 sequences without a step are left out"]
    del with_steps["entropy"]
    with Log(store_of(with_steps), "x") as log:
        names = {name for _, name, _ in collect(log)}
        assert "estr_diag/kl_k3" in names
        assert "estr_diag/masked_share_kpop" in names
        assert "estr_diag/masked_share_estr" not in names
        assert left_out(log) == ["masked_share_estr is left out: this log has no entropy"]
    del with_steps["logp_train"]
    with Log(store_of(with_steps), "x") as log, pytest.raises(MissingColumnError, match="logp_train"):
        collect(log)


def test_a_step_of_one_sequence_has_values_and_no_errors() -> None:
    with Log(store_of(make_log(1, sequences=1, steps=1)), "x") as log:
        scalars = collect(log)
    assert scalars
    assert all(math.isfinite(value) for _, _, value in scalars)
    assert not [name for _, name, _ in scalars if name.endswith("_se")]


def test_a_failed_export_leaves_nothing(made_up: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        export_scalars(made_up, tmp_path, "jsonl")
    assert not any(tmp_path.iterdir())


def test_wandb_is_offline_unless_told(made_up: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    assert export_scalars(made_up, tmp_path, "wandb").name.startswith("offline-run-")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UsageError, match=r"found WANDB_MODE=disabled.*expected offline or online"):
        export_scalars(made_up, tmp_path, "wandb", "second")
    assert not (tmp_path / "second").exists()


def test_wandb_drops_steps_below_0(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found step -2"):
        wandb_exporter.write([(-2, "estr_diag/kl_k3", 0.1), (0, "estr_diag/kl_k3", 0.1)], tmp_path, "r")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [1, 3000])
def test_a_wandb_file_is_complete_when_the_export_returns(steps: int, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    scalars = [(step, "estr_diag/kl_k3", step / 7) for step in range(steps)]
    path = wandb_exporter.write(scalars, tmp_path, "r")
    assert read_wandb(path) == {(step, name): value for step, name, value in scalars}


def test_the_command(tmp_path: Path) -> None:
    source = str(DEMO)
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["scalars", source, "--to", "jsonl", "-o", str(out), "--run", "r", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == {"kind": "jsonl", "path": str(out / "r.jsonl")}
    assert len((out / "r.jsonl").read_text().splitlines()) == 120
    again = CliRunner().invoke(app, ["scalars", source, "--to", "jsonl", "-o", str(out), "--run", "r"])
    assert again.exit_code == 2
    assert "already" in again.stderr
    assert again.stdout == ""
    page = CliRunner().invoke(app, ["scalars", source, "--to", "jsonl", "-o", str(out)])
    assert page.exit_code == 0
    assert "wrote" in page.stderr
