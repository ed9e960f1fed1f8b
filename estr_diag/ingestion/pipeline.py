"""Ingest: read units through their adapter, clean them, and put them into a store in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from estr_diag import __version__
from estr_diag.errors import InputError, UsageError
from estr_diag.ingestion import reconcile
from estr_diag.ingestion.adapter import Probe, ReadOptions, RunFacts, TokenBatch, Unit
from estr_diag.ingestion.canonical import to_tables
from estr_diag.ingestion.discovery import Discovery, Skipped
from estr_diag.ingestion.guard import reading
from estr_diag.ingestion.registry import GENERIC, adapter
from estr_diag.schema import RUNS, SEQUENCES, SOURCES, TOKENS
from estr_diag.store.database import Store

Progress = Callable[[int, int, Path, int], None]
"""Called as (units done, units in all, current file, tokens so far)."""

_HASH_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What came of one file. `status` is ingested, known, copy or refused."""

    path: Path
    status: str
    adapter: str | None = None
    layout: str | None = None
    n_sequences: int = 0
    n_tokens: int = 0
    columns: tuple[tuple[str, int], ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """What an ingest did, file by file."""

    sources: tuple[SourceReport, ...]

    @property
    def n_sequences(self) -> int:
        """Sequences added."""
        return sum(s.n_sequences for s in self.sources if s.status == "ingested")

    @property
    def n_tokens(self) -> int:
        """Response tokens added."""
        return sum(s.n_tokens for s in self.sources if s.status == "ingested")


def ingest(
    store: Store,
    discovery: Discovery,
    options: ReadOptions | None = None,
    *,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> IngestSummary:
    """Read everything that `discovery` found into `store`, or nothing.

    Raises
    ------
    InputError
        A file cannot be read or contradicts itself; the store is left as it was.
    """
    options = options or ReadOptions()
    reports: list[SourceReport] = []
    tokens = 0
    with store.transaction():
        for number, unit in enumerate(discovery.units):
            so_far = _Counting(progress, number, len(discovery.units), unit.path, tokens)
            so_far.add(0)
            try:
                report = _ingest_unit(store, unit, options, so_far.add)
            except InputError as error:
                if not skip_unreadable:
                    raise
                report = SourceReport(unit.path, "refused", unit.probe.adapter, unit.probe.layout, notes=(str(error),))
                _record(store, report, None)
            tokens += report.n_tokens
            reports.append(report)
        for skipped in discovery.refused:
            reports.append(_refuse(store, skipped))
    if progress and discovery.units:
        progress(len(discovery.units), len(discovery.units), discovery.units[-1].path, tokens)
    return IngestSummary(tuple(reports))


@dataclass(slots=True)
class _Counting:
    """Passes on progress inside a file, so that one huge file is seen to move."""

    progress: Progress | None
    done: int
    units: int
    path: Path
    tokens: int

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        if self.progress:
            self.progress(self.done, self.units, self.path, self.tokens)


def ingest_batches(store: Store, name: str, batches: Iterator[TokenBatch]) -> IngestSummary:
    """Put the batches of a table in memory into `store`, or nothing; `name` stands for the file."""
    unit = Unit(Probe(GENERIC, Path(name), "table", "a table in memory"))
    with store.transaction():
        return IngestSummary((_add(store, unit, batches, None, None, lambda _: None),))


def _ingest_unit(store: Store, unit: Unit, options: ReadOptions, count: Callable[[int], None]) -> SourceReport:
    digest = _sha256(unit.path)
    if known := store.rows(
        "select path from sources where sha256 = $digest and status in ('ingested', 'copy')", {"digest": digest}
    ):
        note = f"the same content as {known[0]['path']}, which is in the log already"
        return SourceReport(unit.path, "known", unit.probe.adapter, unit.probe.layout, notes=(note,))
    batches = adapter(unit.probe.adapter).read(unit, options)
    report = _add(store, unit, batches, digest, options.step, count)
    for companion in unit.companions:
        _record(store, SourceReport(companion, "companion", unit.probe.adapter), _sha256(companion))
    return report


def _add(
    store: Store,
    unit: Unit,
    batches: Iterator[TokenBatch],
    digest: str | None,
    step: int | None,
    count: Callable[[int], None],
) -> SourceReport:
    source_id = store.next_id(SOURCES, "source_id")
    first_seq = next_seq = store.next_id(SEQUENCES, "seq_id")
    counts: Counter[str] = Counter()
    notes: dict[str, None] = {}
    facts: RunFacts | None = None
    n_tokens = 0
    try:
        while True:
            with reading(unit.path, unit.probe.adapter):
                batch = next(batches, None)
                if batch is None:
                    break
                tables = to_tables(batch, first_seq=next_seq, source_id=source_id, step=step)
            store.append(SEQUENCES, tables.sequences)
            store.append(TOKENS, tables.tokens)
            counts.update(tables.counts)
            notes.update(dict.fromkeys(batch.notes))
            facts = batch.facts
            next_seq += len(batch.lengths)
            n_tokens += tables.tokens.num_rows
            count(tables.tokens.num_rows)
        if next_seq == first_seq:
            raise InputError("no sequences in this file", path=unit.path, hint="Is the trainer still writing it?")
        assert facts is not None
        added = reconcile.Added(source_id, first_seq, unit.path)
        if copy_of := reconcile.copy_of(store, added):
            reconcile.remove(store, added)
            note = f"all {next_seq - first_seq} sequences are in the log already, from {copy_of} (same step, tokens and engine log-probs)"
            report = SourceReport(unit.path, "copy", unit.probe.adapter, unit.probe.layout, notes=(note,))
        else:
            reconcile.refuse_repeated_keys(store, added)
            notes.update(dict.fromkeys(reconcile.drop_empty_forward(store, added)))
            notes.update(dict.fromkeys(reconcile.repeated_content(store, added)))
            notes.update(dict.fromkeys(_merge_facts(store, unit, facts)))
            report = SourceReport(
                unit.path,
                "ingested",
                unit.probe.adapter,
                unit.probe.layout,
                next_seq - first_seq,
                n_tokens,
                tuple(reconcile.column_counts(store, added).items()),
                tuple(counts.items()),
                tuple(notes),
            )
    except InputError:
        reconcile.remove(store, reconcile.Added(source_id, first_seq, unit.path))
        raise
    _record(store, report, digest, source_id)
    return report


def _refuse(store: Store, skipped: Skipped) -> SourceReport:
    store.connection.execute("delete from sources where path = ? and status = 'refused'", [str(skipped.path)])
    report = SourceReport(skipped.path, "refused", skipped.adapter, notes=(skipped.reason,))
    _record(store, report, None)
    return report


def _record(store: Store, report: SourceReport, digest: str | None, source_id: int | None = None) -> None:
    row = {
        "source_id": store.next_id(SOURCES, "source_id") if source_id is None else source_id,
        "path": str(report.path),
        "bytes": report.path.stat().st_size if report.path.is_file() else None,
        "sha256": digest,
        "adapter": report.adapter,
        "layout": report.layout,
        "status": report.status,
        "n_sequences": report.n_sequences,
        "n_tokens": report.n_tokens,
        "columns": json.dumps(dict(report.columns)) if report.columns else None,
        "notes": json.dumps(list(report.notes)),
        "counts": json.dumps(dict(report.counts)),
        "ingested_at": datetime.now(UTC).replace(tzinfo=None),
    }
    store.append(SOURCES, pa.Table.from_pylist([row], schema=SOURCES.arrow()))


def _merge_facts(store: Store, unit: Unit, facts: RunFacts) -> Sequence[str]:
    """Merge run facts into the one row of `runs`; a fact on which files disagree becomes unknown."""
    new: dict[str, Any] = asdict(facts)
    rows = store.rows("select * from runs")
    notes: list[str] = []
    if rows:
        old = rows[0]
        if old["trainer"] != new["trainer"]:
            raise UsageError(
                f"the store holds a log of {old['trainer']}, and {unit.path} is one of {new['trainer']}; "
                "use another store with -o"
            )
        for f in fields(facts):
            before, now = old[f.name], new[f.name]
            if before is not None and now is not None and before != now:
                notes.append(f"{f.name} is {now} here and {before} in files read before: treated as unknown")
                new[f.name] = None
            elif now is None:
                new[f.name] = before
        store.connection.execute("delete from runs")
    row = {"run": "run", "adapter": unit.probe.adapter, "adapter_version": __version__, **new}
    store.append(RUNS, pa.Table.from_pylist([row], schema=RUNS.arrow()))
    return notes


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
