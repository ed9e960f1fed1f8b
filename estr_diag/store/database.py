"""Create, open and fill the one DuckDB file that holds a log.

A store opens read-only unless it is being filled. Filling is one transaction on one connection, and a
new store is built beside its final name and renamed when complete, so that a killed ingest leaves
what was there before and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from estr_diag import schema
from estr_diag.errors import InputError, StoreError, StoreIncompatibleError, StoreLockedError
from estr_diag.schema import quote_text

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY = ":memory:"
SUFFIXES = (".duckdb", ".ddb", ".db")
"""File endings that name a store; everything else is a log to be ingested."""

_COMMIT_ROWS = 1_000_000
_MAGIC = b"DUCK"
_MAGIC_OFFSET = 8


def is_store(path: Path) -> bool:
    """Whether `path` is a DuckDB file, by its first bytes (or, where it does not exist yet, by its name)."""
    if not path.is_file():
        return path.suffix in SUFFIXES and not path.is_dir()
    with path.open("rb") as stream:
        head = stream.read(_MAGIC_OFFSET + len(_MAGIC))
    return head[_MAGIC_OFFSET:] == _MAGIC


class Store:
    """An open store. Use `Store.open`, `Store.create` or `Store.memory`; close it or use it in ``with``."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, path: Path | None, *, writable: bool) -> None:
        self.connection = connection
        self.path = path
        self.writable = writable
        self._final: Path | None = None
        self._temporary = False
        self._pending = 0
        _configure(connection)

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def memory(cls) -> Store:
        """Return an empty store that lives in memory and spills to disk if it has to."""
        store = cls(duckdb.connect(MEMORY), None, writable=True)
        store._create_tables()
        return store

    @classmethod
    def temporary(cls) -> Store:
        """Return an empty store in a file of the system's temporary folder, removed when it is closed.

        For logs that are too large to be read into memory.
        """
        handle, name = tempfile.mkstemp(prefix="estr-diag-", suffix=".duckdb")
        os.close(handle)
        path = Path(name)
        path.unlink()
        store = cls(_connect(path, read_only=False), path, writable=True)
        store._temporary = True
        store._create_tables()
        return store

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Store:
        """Open an existing store, read-only unless `writable`.

        Raises
        ------
        StoreLockedError
            Another process holds it open for writing.
        StoreIncompatibleError
            It is not a store of this package, or of another schema version.
        """
        if not path.exists():
            raise StoreError(f"{path}: no such store. Make one with: estr-diag ingest PATH -o {path}")
        store = cls(_connect(path, read_only=not writable), path, writable=writable)
        try:
            store._check_version()
        except Exception:
            store.close()
            raise
        return store

    @classmethod
    def create(cls, path: Path) -> Store:
        """Start a new store; it appears under `path` only when `publish` is called.

        Raises
        ------
        StoreError
            `path` exists already, or its folder cannot be written.
        """
        if path.exists():
            raise StoreError(f"{path} exists already. Add to it with --append, or choose another name with -o")
        if not path.parent.is_dir():
            raise StoreError(f"{path.parent}: no such folder. Make it first, or choose another name with -o")
        _clear_abandoned(path)
        building = path.with_name(f".{path.name}.{os.getpid()}.building")
        store = cls(_connect(building, read_only=False), building, writable=True)
        store._final = path
        store._create_tables()
        return store

    def publish(self) -> None:
        """Give a store made with `create` its name. Does nothing for an opened or in-memory store."""
        if self._final is None or self.path is None:
            return
        building, final = self.path, self._final
        self.connection.execute("checkpoint")
        self.connection.close()
        building.replace(final)
        self.path, self._final = final, None
        self.connection = _connect(final, read_only=True)
        _configure(self.connection)
        self.writable = False

    def close(self) -> None:
        """Close the connection; a temporary or unpublished new store is removed."""
        self.connection.close()
        if self._private and self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path.with_name(self.path.name + ".wal").unlink(missing_ok=True)

    @property
    def _private(self) -> bool:
        """Whether nobody else can see the file yet."""
        return self._temporary or self._final is not None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- filling ---------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end of the block, or leave the store as it was."""
        self.connection.execute("begin transaction")
        self._pending = 0
        try:
            yield
        except BaseException:
            self.connection.execute("rollback")
            raise
        self.connection.execute("commit")

    def append(self, table: schema.Table, rows: pa.Table) -> None:
        """Append `rows`; columns that it lacks become null.

        Uncommitted rows stay in memory. A file that nobody else can see yet is therefore committed as it
        grows: it is its name that makes it appear, all at once.
        """
        present = [name for name in table.names if name in rows.column_names]
        columns = ", ".join(schema.quote_ident(name) for name in present)
        self.connection.register("incoming_rows", rows)
        try:
            self.connection.execute(
                f"insert into {schema.quote_ident(table.name)} ({columns}) select {columns} from incoming_rows"
            )
        finally:
            self.connection.unregister("incoming_rows")
        self._pending += rows.num_rows
        if self._private and self._pending >= _COMMIT_ROWS:
            self.connection.execute("commit")
            self.connection.execute("begin transaction")
            self._pending = 0

    def next_id(self, table: schema.Table, column: str) -> int:
        """Return the smallest number above every stored value of `column`."""
        row = self.rows(f"select coalesce(max({schema.quote_ident(column)}) + 1, 0) as n from {table.name}")
        return int(row[0]["n"])

    # -- reading ---------------------------------------------------------------------------------

    def rows(self, query: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run `query` and return its rows as dictionaries (for small results)."""
        rows: list[dict[str, Any]] = self.table(query, parameters).to_pylist()
        return rows

    def table(self, query: str, parameters: dict[str, Any] | None = None) -> pa.Table:
        """Run `query` and return an Arrow table."""
        return self.connection.sql(query, params=parameters or None).to_arrow_table()

    def column_counts(self) -> dict[str, int]:
        """Return how many values each token column holds (columns with none are left out).

        Ingest writes the numbers down, so that asking costs no scan. A column is absent from a log
        when all of it is null: that is how an adapter says "not logged".
        """
        counts: dict[str, int] = {}
        for row in self.rows("select columns from sources where columns is not null"):
            for name, n in json.loads(row["columns"]).items():
                counts[name] = counts.get(name, 0) + n
        return {name: n for name, n in counts.items() if n}

    def present(self) -> frozenset[str]:
        """Return the columns that hold any value: those of tokens, and those that only sequences have."""
        only = [c.name for c in schema.SEQUENCES.columns if c.name not in schema.TOKENS and not c.required]
        counted = ", ".join(f"count({schema.quote_ident(n)}) as {schema.quote_ident(n)}" for n in only)
        counts = self.rows(f"select {counted} from sequences")
        return frozenset(self.column_counts()) | {name for name, n in counts[0].items() if n}

    # -- versions --------------------------------------------------------------------------------

    def _create_tables(self) -> None:
        from estr_diag import __version__

        for table in schema.TABLES:
            self.connection.execute(table.ddl())
        facts = {
            "schema_version": str(schema.SCHEMA_VERSION),
            "estr_diag_version": __version__,
            "duckdb_version": duckdb.__version__,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.connection.executemany("insert into meta values (?, ?)", [list(item) for item in facts.items()])

    def _check_version(self) -> None:
        try:
            meta = {row["key"]: row["value"] for row in self.rows("select key, value from meta")}
        except duckdb.CatalogException:
            raise StoreIncompatibleError(
                f"{self.path} is a DuckDB file, but not an estr-diag store (it has no table `meta`). "
                "Ingest the log it came from, or export it to Parquet and ingest that"
            ) from None
        found = meta.get("schema_version", "none")
        if found != str(schema.SCHEMA_VERSION):
            raise StoreIncompatibleError(
                f"{self.path} has schema version {found} (written by estr-diag {meta.get('estr_diag_version', '?')}); "
                f"this is version {schema.SCHEMA_VERSION}. Ingest the log again into a new store"
            )


def _configure(connection: duckdb.DuckDBPyConnection) -> None:
    quiet(connection)
    # By default it spills beside the store or into the working folder, and neither need be writable.
    spill = Path(tempfile.gettempdir()) / f"estr-diag-{os.getpid()}"
    # A database that this process has open already, and that has spilled, keeps the folder that it has.
    with suppress(duckdb.Error):
        connection.execute(f"set temp_directory = {quote_text(str(spill))}")


def quiet(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep DuckDB from drawing a progress bar on stdout, which would break ``--json``."""
    # In a notebook without ipywidgets the setting cannot even be named, and there is no bar.
    with suppress(duckdb.InvalidInputException):
        connection.execute("set enable_progress_bar = false")


def _clear_abandoned(path: Path) -> None:
    """Remove what ingests into a new `path` have left that were killed."""
    for left in path.parent.glob(f".{path.name}.*.building*"):
        process = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        if process.isdigit() and int(process) != os.getpid() and _alive(int(process)):
            continue
        left.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _connect(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    try:
        return duckdb.connect(str(path), read_only=read_only)
    except duckdb.Error as error:
        text = str(error)
        if lock := re.search(r"lock is held in (.+?) \(PID (\d+)\)", text):
            program, pid = lock.groups()
            raise StoreLockedError(
                f"{path} is locked: {program} (PID {pid}) holds it open"
                f"{' for writing' if read_only else ''}. Close that notebook or wait for that ingest to end, "
                f"then run this again"
            ) from None
        if "lock" in text.lower() and "Conflicting" in text:
            raise StoreLockedError(f"{path} is locked by another process. {text}") from None
        if "not a valid DuckDB" in text or "version number" in text or "storage version" in text.lower():
            raise StoreIncompatibleError(
                f"{path} cannot be opened by DuckDB {duckdb.__version__}: {text.splitlines()[0]}"
            ) from None
        if "Permission denied" in text or isinstance(error, duckdb.IOException):
            raise StoreError(f"{path}: {text.splitlines()[0]}") from None
        raise InputError(text.splitlines()[0], path=path) from None
