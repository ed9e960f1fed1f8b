"""Kills, failures, resumed runs, several ranks: shards are whole or not there, and nothing is lost in silence."""

from __future__ import annotations

import errno
import gc
import inspect
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import estr_diag as ed
from estr_diag.errors import UsageError
from estr_diag.ingestion.discovery import discover
from estr_diag.recorder import RecordingError, TokenRecorder
from estr_diag.recorder.shard import write_shard
from estr_diag.recorder.writer import BackgroundWriter

LENGTH = 64
WRITE_SHARD = "estr_diag.recorder.recorder.write_shard"


def record(recorder: TokenRecorder, step: int, sequences: int = 4) -> None:
    logp = -np.random.default_rng(step).exponential(1.0, (sequences, LENGTH))
    recorder.write(step=step, logp_infer=logp, logp_train=logp - 0.1, loss_mask=True, seq_lens=[LENGTH] * sequences)


def shards(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.parquet"))


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    # The function itself, not an import of it: this module would bring DuckDB and all the rest along.
    text = "import sys\nimport numpy as np\nfrom estr_diag.recorder import TokenRecorder\n"
    text += f"LENGTH = {LENGTH}\n{inspect.getsource(record)}\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_process_leaves_only_whole_shards(tmp_path: Path) -> None:
    code = """
        recorder = TokenRecorder(sys.argv[1], trainer="mine", rank=int(sys.argv[2]))
        print("ready", flush=True)
        for step in range(100_000):
            record(recorder, step, 32)
    """
    chance = random.Random(0)
    written = 0
    for rank in range(12):
        process = python(code, tmp_path, rank)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = list(tmp_path.glob(f"*-rank_{rank:03d}-*.parquet"))
        written += len(found)
        for path in found:
            assert pq.read_table(path).num_rows == 32, path
        # In order, and without a gap: what is lost is the end.
        assert sorted(int(p.name[5:13]) for p in found) == list(range(len(found)))
    assert written > 12
    hidden = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert {unit.path.name for unit in discover([tmp_path]).units} == set(shards(tmp_path))
    assert not {p.name for p in hidden} & set(shards(tmp_path))
    json.loads((tmp_path / "manifest.json").read_text())


def test_a_leftover_and_the_manifest_are_not_read(tmp_path: Path) -> None:
    with TokenRecorder(tmp_path, trainer="mine") as recorder:
        record(recorder, 1)
    whole = (tmp_path / shards(tmp_path)[0]).read_bytes()
    (tmp_path / f".{shards(tmp_path)[0]}.0123456789ab.tmp").write_bytes(whole[: len(whole) // 2])
    with ed.open(tmp_path) as log:
        assert log.ingested is not None
        assert [source.status for source in log.ingested.sources] == ["ingested"]


def test_an_error_of_the_thread_comes_out_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    failing.set()

    def write(path: Path, table: Any) -> None:
        if failing.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_shard(path, table)

    monkeypatch.setattr(WRITE_SHARD, write)
    recorder = TokenRecorder(tmp_path, trainer="mine")
    record(recorder, 1)
    record_after = weakref.ref(recorder)
    with pytest.raises(
        RecordingError, match=r"step_00000001-rank_000-part_0000.parquet: .*4 sequences of step 1.*No space"
    ):
        recorder.flush()
    recorder.flush()
    record(recorder, 2)
    while recorder.pending_bytes:
        time.sleep(0.001)
    with pytest.raises(RecordingError, match="step 2"):
        record(recorder, 3)
    failing.clear()
    record(recorder, 3)
    recorder.close()
    assert shards(tmp_path) == ["step_00000003-rank_000-part_0000.parquet"]
    assert record_after() is recorder


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    recorder = TokenRecorder(tmp_path, trainer="mine")
    before = {p.name for p in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", fsync)
    record(recorder, 1)
    with pytest.raises(RecordingError, match="Input/output error"):
        recorder.close()
    recorder.close()
    assert {p.name for p in tmp_path.iterdir()} == before


def test_the_error_of_the_trainer_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: Path, table: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WRITE_SHARD, write)
    recorder = TokenRecorder(tmp_path, trainer="mine")
    record(recorder, 1)
    # What a `with` does when its body has raised.
    recorder.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert "No space left" in caplog.text
    with pytest.raises(RecordingError, match="No space left"), TokenRecorder(tmp_path, trainer="mine") as recorder:
        record(recorder, 1)


def test_memory_is_bounded_and_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = 0

    def write(path: Path, table: Any) -> None:
        nonlocal most
        most = max(most, recorder.pending_bytes)
        time.sleep(0.003)
        write_shard(path, table)

    monkeypatch.setattr(WRITE_SHARD, write)
    bound = 3 * 4 * LENGTH * 9 + 100  # three batches of float32, float32 and bool
    recorder = TokenRecorder(tmp_path, trainer="mine", max_pending_bytes=bound)
    for step in range(30):
        record(recorder, step)
        assert recorder.pending_bytes <= bound
    record(recorder, 30, sequences=100)  # larger than the bound: taken once nothing else waits
    recorder.close()
    assert most > 0
    assert len(shards(tmp_path)) == 31
    assert [r.message for r in caplog.records if "waits for the disk" in r.message] != []
    assert caplog.text.count("waits for the disk") == 1


def test_a_batch_is_let_go_when_it_is_written() -> None:
    class Job:
        pass

    writer: BackgroundWriter[Job] = BackgroundWriter(lambda job: None, 10)
    job = Job()
    alive = weakref.ref(job)
    writer.submit(job, 1)
    del job
    writer.flush()
    assert alive() is None
    writer.close()


def test_write_returns_before_the_disk_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def write(path: Path, table: Any) -> None:
        assert go.wait(30)
        write_shard(path, table)

    monkeypatch.setattr(WRITE_SHARD, write)
    with TokenRecorder(tmp_path, trainer="mine") as recorder:
        record(recorder, 1)
        record(recorder, 2)
        assert shards(tmp_path) == []
        go.set()
        recorder.flush()
        assert len(shards(tmp_path)) == 2


def test_a_resumed_run_adds_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TokenRecorder(tmp_path, trainer="mine", facts={"temperature": 1.0}) as recorder:
        record(recorder, 1)
        record(recorder, 2)
    before = {name: (tmp_path / name).read_bytes() for name in shards(tmp_path)}
    assert not caplog.records
    with TokenRecorder(tmp_path, trainer="mine", facts={"temperature": 0.5}) as recorder:
        record(recorder, 2, sequences=3)
        record(recorder, 3)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert set(shards(tmp_path)) - set(before) == {
        "step_00000002-rank_000-part_0001.parquet",
        "step_00000003-rank_000-part_0000.parquet",
    }
    assert caplog.text.count("step 2 was recorded before this session") == 1
    assert "temperature was 1.0 and is 0.5 from now on" in caplog.text
    assert caplog.text.count("\n") == 2


def test_two_recorders_of_one_rank_do_not_overwrite_each_other(tmp_path: Path) -> None:
    with TokenRecorder(tmp_path, trainer="mine") as one, TokenRecorder(tmp_path, trainer="mine") as other:
        for _ in range(5):
            record(one, 1)
            record(other, 1)
    assert len(shards(tmp_path)) == 10


def test_without_links_no_shard_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(os, "link", link)
    test_two_recorders_of_one_rank_do_not_overwrite_each_other(tmp_path)


def test_ranks_share_a_folder(tmp_path: Path) -> None:
    code = """
        with TokenRecorder(sys.argv[1], trainer="mine", rank=int(sys.argv[2])) as recorder:
            record(recorder, 1, 2 + recorder.directory.exists() + int(sys.argv[2]))
    """
    processes = [python(code, tmp_path, rank) for rank in range(4)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert json.loads((tmp_path / "manifest.json").read_text())["ranks"] == [0, 1, 2, 3]
    with ed.open(tmp_path) as log:
        assert log.sql(
            "select count(*) as n, count(distinct seq_key) as keys from sequences"
        ).to_arrow().to_pylist() == [{"n": 3 + 4 + 5 + 6, "keys": 18}]


def test_another_trainer_or_folder_is_refused(tmp_path: Path) -> None:
    TokenRecorder(tmp_path, trainer="mine").close()
    with pytest.raises(UsageError, match="a recording of trainer 'mine'; found 'yours'"):
        TokenRecorder(tmp_path, trainer="yours")
    (tmp_path / "manifest.json").write_text('{"name": "of a web page"}')
    with pytest.raises(UsageError, match="not written by a TokenRecorder"):
        TokenRecorder(tmp_path, trainer="mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="cannot be a folder"):
        TokenRecorder(tmp_path / "file", trainer="mine")


def test_a_closed_recorder_refuses(tmp_path: Path) -> None:
    recorder = TokenRecorder(tmp_path, trainer="mine")
    recorder.close()
    recorder.close()
    recorder.flush()
    with pytest.raises(UsageError, match="after close"):
        record(recorder, 1)


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "1 / 0", "del recorder"])
def test_what_is_pending_at_exit_is_written(tmp_path: Path, end: str) -> None:
    code = f"""
        recorder = TokenRecorder(sys.argv[1], trainer="mine")
        for step in range(20):
            record(recorder, step, 64)
        {end}
    """
    process = python(code, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ("1 / 0" in end), errors
    assert len(shards(tmp_path)) == 20


def test_a_dropped_recorder_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TokenRecorder(tmp_path, trainer="mine")
    record(recorder, 1)
    del recorder
    gc.collect()
    assert len(shards(tmp_path)) == 1
    assert not [t for t in threading.enumerate() if t.name == "estr-diag-recorder"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_refuses_and_ends(tmp_path: Path) -> None:
    code = """
        import os, warnings
        from estr_diag.errors import UsageError
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads, which is what this is about
        recorder = TokenRecorder(sys.argv[1], trainer="mine")
        record(recorder, 1)
        child = os.fork()
        if child == 0:
            try:
                record(recorder, 2)
            except UsageError as error:
                print(error, flush=True)
            recorder.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        record(recorder, 3)
        recorder.close()
    """
    process = python(code, tmp_path)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "made in another process" in out
    assert [name[:13] for name in shards(tmp_path)] == ["step_00000001", "step_00000003"]
