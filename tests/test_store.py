"""The store: one transaction, read-only by default, clear errors, nothing twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from estr_diag import opening, schema
from estr_diag.errors import InputError, StoreError, StoreIncompatibleError, StoreLockedError
from estr_diag.opening import ingest, open_log
from estr_diag.store import database
from estr_diag.store.database import Store, is_store

KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from estr_diag.ingestion import pipeline
from estr_diag.opening import ingest
real, seen = pipeline._ingest_unit, []
def killing(store, unit, options, count):
    if seen:
        # after the first unit has been appended and before the commit, as the kernel's OOM killer would
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(unit)
    return real(store, unit, options, count)
pipeline._ingest_unit = killing
ingest([Path(p) for p in sys.argv[2:]], into=sys.argv[1], append=True)
"""


@pytest.fixture
def two_steps(data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "exp_001"
    shutil.copytree(data / "nemo-rl" / "exp_001", folder)
    return folder


def counts(path: Path) -> tuple[int, int]:
    with open_log(path) as log:
        row = log.store.rows("select (select count(*) from tokens) as t, (select count(*) from sources) as s")[0]
    return row["t"], row["s"]


def test_ingest_and_read_back(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    with ingest(two_steps, into=store) as log:
        assert log.ingested is not None
        assert [s.status for s in log.ingested.sources] == ["ingested", "ingested"]
        assert not log.store.writable
    assert is_store(store)
    assert counts(store) == (779, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exp_001", "run.duckdb"], "no work file is left"


def test_the_same_content_is_never_ingested_twice(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps / "train_data_step5.jsonl", into=store).close()
    renamed = tmp_path / "elsewhere.jsonl"
    shutil.copy(two_steps / "train_data_step5.jsonl", renamed)
    with ingest([two_steps, renamed], into=store, append=True) as log:
        assert log.ingested is not None
        found = {s.path.name: s.status for s in log.ingested.sources}
    assert found == {
        "train_data_step5.jsonl": "known",
        "train_data_step6.jsonl": "ingested",
        "elsewhere.jsonl": "known",
    }
    assert counts(store) == (779, 2)


@pytest.mark.parametrize("existing", [True, False])
def test_killed_half_way_leaves_the_store_as_it_was(
    two_steps: Path, data: Path, tmp_path: Path, existing: bool
) -> None:
    store = tmp_path / "run.duckdb"
    before = None
    if existing:
        # another file of the same trainer, so that the append has something to leave alone
        renamed = tmp_path / "train_data_step4.jsonl"
        renamed.write_text((data / "nemo-rl" / "exp_001" / "train_data_step5.jsonl").read_text().splitlines()[0] + "\n")
        ingest(renamed, into=store).close()
        before = counts(store)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_HALF_WAY, str(store), str(two_steps)], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    if existing:
        assert counts(store) == before
    else:
        assert not store.exists()
        assert len(list(tmp_path.glob(".*.building"))) == 1
    # and the next ingest works as if nothing had happened
    ingest(two_steps, into=store, append=existing).close()
    assert counts(store)[0] == 779 + (before[0] if before else 0)
    assert not list(tmp_path.glob(".*.building*")), "the next ingest clears what the killed one left"


def test_a_failing_file_leaves_the_store_as_it_was(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps / "train_data_step5.jsonl", into=store).close()
    text = (two_steps / "train_data_step6.jsonl").read_text()
    (two_steps / "train_data_step7.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match=r"train_data_step7.jsonl:2"):
        ingest(two_steps, into=store, append=True)
    assert counts(store) == (620, 1)
    with ingest(two_steps, into=store, append=True, skip_unreadable=True) as log:
        assert log.ingested is not None
        assert [s.status for s in log.ingested.sources] == ["known", "ingested", "refused"]
    assert counts(store)[0] == 779


def test_a_locked_store_names_the_process(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps, into=store).close()
    hold = "import duckdb, sys, time; c = duckdb.connect(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(store)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        try:
            with pytest.raises(StoreLockedError, match=rf"PID {holder.pid}\) holds it open") as error:
                Store.open(store)
            assert int(error.value.exit_code) == 4
        finally:
            holder.kill()
    for _ in range(50):
        try:
            Store.open(store).close()
            break
        except StoreLockedError:
            time.sleep(0.1)


def test_two_readers_at_once(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps, into=store).close()
    with open_log(store) as first:
        script = "import sys, estr_diag as ed; print(len(ed.open(sys.argv[1]).consistency()))"
        done = subprocess.run([sys.executable, "-c", script, str(store)], capture_output=True, text=True, check=True)
        assert int(done.stdout) == len(first.consistency())


def _foreign(path: Path) -> None:
    duckdb.connect(str(path)).execute("create table meta (key varchar, value varchar)").close()


def _other_database(path: Path) -> None:
    duckdb.connect(str(path)).execute("create table t (i integer)").close()


def _newer(path: Path) -> None:
    connection = duckdb.connect(str(path))
    for table in schema.TABLES:
        connection.execute(table.ddl())
    connection.execute("insert into meta values ('schema_version', '99'), ('estr_diag_version', '9.9')")
    connection.close()


def _garbage(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 500)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_other_database, "not an estr-diag store"),
        (_foreign, "schema version none"),
        (_newer, "schema version 99"),
        (_garbage, "cannot be opened"),
    ],
)
def test_something_else_than_a_store_is_refused(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "x.duckdb"
    make(path)
    with pytest.raises(StoreIncompatibleError, match=says):
        Store.open(path)


def test_a_new_store_needs_a_free_name_and_a_folder(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps, into=store).close()
    with pytest.raises(StoreError, match="--append"):
        ingest(two_steps, into=store)
    with pytest.raises(StoreError, match="no such folder"):
        ingest(two_steps, into=tmp_path / "nowhere" / "run.duckdb")
    with pytest.raises(StoreError, match="no such store"):
        Store.open(tmp_path / "absent.duckdb")


def test_reading_never_writes(two_steps: Path, tmp_path: Path) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps, into=store).close()
    os.chmod(store, 0o444)
    before = store.stat().st_mtime_ns
    with open_log(store) as log:
        log.report()
        with pytest.raises(duckdb.Error):
            log.store.connection.execute("delete from tokens")
    assert store.stat().st_mtime_ns == before


def test_the_tables_are_generated_from_the_schema() -> None:
    with Store.memory() as store:
        for table in schema.TABLES:
            columns = store.rows(
                f"select column_name, is_nullable from information_schema.columns where table_name = '{table.name}' order by ordinal_position"
            )
            assert tuple(c["column_name"] for c in columns) == table.names
            assert [c["is_nullable"] == "NO" for c in columns] == [c.required for c in table.columns]
            arrow = store.table(f"select * from {table.name}").schema
            assert [str(f.type) for f in arrow] == [str(f.type) for f in table.arrow()], table.name


def test_a_store_in_a_folder_that_cannot_be_written_still_spills(two_steps: Path, tmp_path: Path) -> None:
    """The spill folder is the system's, whatever the working folder is; nothing of it stays."""
    store = tmp_path / "run.duckdb"
    with ingest(two_steps, into=store) as log:
        folder = log.store.rows("select current_setting('temp_directory') as d")[0]["d"]
        log.store.connection.execute("set memory_limit = '60MB'")
        log.store.connection.execute("create temp table big as select range as i, hash(range) as h from range(6000000)")
        assert log.store.rows("select count(*) as n from (select * from big order by h)")[0]["n"] == 6_000_000
    assert Path(folder).name == f"estr-diag-{os.getpid()}"
    assert not list(Path(folder).glob("*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exp_001", "run.duckdb"]


def test_a_large_ingest_is_committed_as_it_grows_and_still_appears_at_once(
    two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_COMMIT_ROWS", 100)
    seen: list[bool] = []
    store = tmp_path / "run.duckdb"
    with ingest(two_steps, into=store, progress=lambda *_: seen.append(store.exists())):
        pass
    assert not any(seen[:-1])
    assert counts(store) == (779, 2)


def test_a_failing_large_ingest_leaves_nothing(
    two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_COMMIT_ROWS", 100)
    text = (two_steps / "train_data_step6.jsonl").read_text()
    (two_steps / "train_data_step7.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(InputError):
        ingest(two_steps, into=tmp_path / "run.duckdb")
    assert [p.name for p in tmp_path.iterdir()] == ["exp_001"]


def test_an_append_is_one_transaction_however_large(
    two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "run.duckdb"
    ingest(two_steps / "train_data_step5.jsonl", into=store).close()
    monkeypatch.setattr(database, "_COMMIT_ROWS", 10)
    text = (two_steps / "train_data_step6.jsonl").read_text()
    (two_steps / "train_data_step7.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(InputError):
        ingest(two_steps, into=store, append=True)
    assert counts(store) == (620, 1)


def test_large_files_are_read_into_a_temporary_store(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_log(two_steps) as log:
        expected = log.consistency().rows()
        assert log.store.path is None
    monkeypatch.setattr(opening, "_IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr(database, "_COMMIT_ROWS", 100)
    with open_log(two_steps) as log:
        path = log.store.path
        assert path is not None
        assert path.exists()
        assert log.consistency().rows() == expected
    assert not path.exists()
    assert not list(path.parent.glob(path.name + "*"))
