"""Ways to a log: a store, a trainer's files, a table in memory, the log that comes with the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError
from estr_diag.ingestion.adapter import ReadOptions
from estr_diag.ingestion.discovery import Discovery, discover
from estr_diag.ingestion.pipeline import IngestSummary, Progress, ingest_batches
from estr_diag.ingestion.pipeline import ingest as run_ingest
from estr_diag.log import Log
from estr_diag.store.database import Store, is_store

DEMO = Path(__file__).parent / "samples" / "lab"
"""What ``estr-diag lab --engine fp8 -o estr_diag/samples/lab`` wrote: a run whose noise and exploration are known."""


_IN_MEMORY_BYTES = 64 << 20
"""Files that hold more than this are read into a temporary store on disk."""


def open_log(
    path: str | Path | Iterable[str | Path],
    *,
    format: str = "auto",  # noqa: A002  the command's flag has this name
    options: ReadOptions | None = None,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Log:
    """Open a store, or read a trainer's files into memory.

    Parameters
    ----------
    path
        A store (``*.duckdb``), a file, a run folder, or several files.
    format, options, skip_unreadable
        As in `ingest`; a store needs none of them.
    """
    paths = _paths(path)
    if len(paths) == 1 and is_store(paths[0]):
        return Log(Store.open(paths[0]), str(paths[0]))
    store = Store.memory() if _bytes(paths) <= _IN_MEMORY_BYTES else Store.temporary()
    try:
        summary = _read(store, paths, format, options, skip_unreadable, progress)
    except BaseException:
        store.close()
        raise
    return Log(store, ", ".join(str(p) for p in paths), summary)


def ingest(
    path: str | Path | Iterable[str | Path],
    *,
    into: str | Path,
    format: str = "auto",  # noqa: A002
    options: ReadOptions | None = None,
    append: bool = False,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Log:
    """Read a trainer's files into a store.

    Parameters
    ----------
    path
        Files and folders.
    into
        The store. It must not exist, unless `append`.
    format
        Adapter name, or ``auto`` to recognise by content.
    options
        Mapping and other reading options.
    append
        Add to an existing store; files that are in it already are left out.
    skip_unreadable
        Report files that cannot be read, and go on without them.
    progress
        Called with (units done, units in all, file, tokens so far).
    """
    target = Path(into)
    store = Store.open(target, writable=True) if append and target.exists() else Store.create(target)
    try:
        summary = _read(store, _paths(path), format, options, skip_unreadable, progress)
        store.publish()
    except BaseException:
        store.close()
        raise
    return Log(store, str(target), summary)


def from_frame(frame: Any, mapping: Mapping[str, str] | None = None, *, all_sampled: bool = False) -> Log:
    """Take a pandas, Polars or Arrow table, or anything with ``__arrow_c_stream__``, as a log.

    Parameters
    ----------
    frame
        One row a token, or one row a sequence with list columns.
    mapping
        Canonical column -> column of the frame, for those with another name.
    all_sampled
        The frame has no loss mask because the model sampled every token of it.
    """
    from pydantic import ValidationError

    from estr_diag.ingestion.generic.adapter import batches_from_table
    from estr_diag.ingestion.mapping import Mapping as ColumnMapping

    try:
        meaning = ColumnMapping(columns=dict(mapping or {}))
    except ValidationError as error:
        said = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        raise UsageError(f"mapping of the frame: {said}") from None
    store = Store.memory()
    try:
        summary = ingest_batches(
            store, "frame", batches_from_table(frame, meaning, ReadOptions(all_sampled=all_sampled))
        )
    except BaseException:
        store.close()
        raise
    return Log(store, "frame", summary)


def demo() -> Log:
    """Open the log that comes with the package: a run of the lab, with the truth beside it."""
    log = open_log(DEMO)
    log.source = "the bundled demo log"
    return log


def find(
    path: str | Path | Iterable[str | Path],
    *,
    format: str = "auto",  # noqa: A002
    options: ReadOptions | None = None,
    skip_unreadable: bool = False,
) -> Discovery:
    """Say what would be read, and by which adapter, without reading it."""
    return discover(_paths(path), format, options, skip_unreadable=skip_unreadable)


def _read(
    store: Store,
    paths: Sequence[Path],
    name: str,
    options: ReadOptions | None,
    skip_unreadable: bool,
    progress: Progress | None,
) -> IngestSummary:
    if any(is_store(path) for path in paths):
        raise UsageError("a store cannot be ingested into another one; export it to Parquet and ingest that")
    found = discover(paths, name, options, skip_unreadable=skip_unreadable)
    return run_ingest(store, found, options, skip_unreadable=skip_unreadable, progress=progress)


def _bytes(paths: Sequence[Path]) -> int:
    files = (f for p in paths for f in (p.rglob("*") if p.is_dir() else [p]) if f.is_file())
    return sum(f.stat().st_size for f in files)


def _paths(path: str | Path | Iterable[str | Path]) -> list[Path]:
    if isinstance(path, str | Path):
        return [Path(path)]
    return [Path(p) for p in path]
