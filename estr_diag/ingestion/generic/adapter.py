"""Any table of tokens: Parquet, CSV, TSV, JSON lines or Arrow; one row a token, or one row a sequence with lists.

Columns with canonical names are taken as they are; ``mapping.toml`` says what the others mean.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from estr_diag.errors import InputError, UnrecognisedError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.generic.assembly import Assembly
from estr_diag.ingestion.generic.lists import from_lists
from estr_diag.ingestion.generic.rows import from_rows
from estr_diag.ingestion.generic.source import Source
from estr_diag.ingestion.generic.tables import Table, open_table, table_in_memory
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.mapping import KNOWN_COLUMNS
from estr_diag.ingestion.mapping import Mapping as ColumnMapping
from estr_diag.schema import LOGP_COLUMNS, SEQUENCE_COLUMNS_IN_LOG, SEQUENCES, TOKENS, Column

TOKENS_PER_BATCH = 1 << 16
SEQUENCES_PER_BATCH = 512

_ENGINES = ("logp_infer", "logp_train")
_ASKED_FOR = ("seq_id", "pos", *_ENGINES, "loss_mask", "token_id", "entropy", "policy_version", "step")
_STEP = re.compile(r"step[_\-=]?(\d+)")
_DUCKDB = {"int16": "SMALLINT", "int32": "INTEGER", "float32": "FLOAT", "string": "VARCHAR", "bool": "BOOLEAN"}


def _field(column: Column, *, listed: bool, required: bool) -> Field:
    kind = _DUCKDB[column.dtype] + ("[]" if listed else "")
    unit = f" ({column.unit})" if column.unit else ""
    return Field(column.name, kind, column.meaning + unit, column.name, required)


def _seq_id(meaning: str, *, required: bool) -> Field:
    return Field("seq_id", "VARCHAR", meaning, "seq_key", required)


_PER_SEQUENCE = tuple(_field(SEQUENCES[name], listed=False, required=False) for name in SEQUENCE_COLUMNS_IN_LOG)
_PER_TOKEN = tuple(column for column in TOKENS.columns if column.name not in ("seq_id", "pos", "step"))
_STEP_FIELD = _field(TOKENS["step"], listed=False, required=False)

ROWS = Layout(
    "token_rows",
    "one row a token, under canonical names or those of --map",
    (
        _seq_id("names the sequence, number or text, unique within its step", required=True),
        _field(TOKENS["pos"], listed=False, required=False),
        _STEP_FIELD,
        *(_field(column, listed=False, required=column.name == "loss_mask") for column in _PER_TOKEN),
        *_PER_SEQUENCE,
    ),
)
LISTS = Layout(
    "sequence_rows",
    "one row a sequence, with a list for every token column",
    (
        _seq_id("names the sequence; without it, the number of the record does", required=False),
        _STEP_FIELD,
        *(_field(column, listed=True, required=column.name == "loss_mask") for column in _PER_TOKEN),
        *_PER_SEQUENCE,
    ),
)


class GenericAdapter:
    """Reads any table that has a log-prob column, under its canonical name or the one of a mapping."""

    name: ClassVar[str] = "generic"
    title: ClassVar[str] = "any table of tokens"
    layouts: ClassVar[tuple[Layout, ...]] = (ROWS, LISTS)
    hints: ClassVar[Mapping[str, str]] = {}

    def __init__(self, mapping: ColumnMapping | None = None) -> None:
        self.mapping = mapping or ColumnMapping()

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise a table by a log-prob column, under its canonical name or the one of the mapping."""
        table = open_table(head)
        if table is None:
            return None
        columns = self.mapping.match(table.columns)
        engines = [columns[name] for name in _ENGINES if name in columns]
        if not engines:
            return None
        lists = _has_lists(table, columns)
        why = ("one row a sequence" if lists else "one row a token") + ", columns " + " and ".join(engines)
        return Probe(
            self.name,
            head.path,
            (LISTS if lists else ROWS).name,
            why,
            columns,
            step=None if "step" in columns else _step_of(head.path),
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file."""
        table = open_table(FileHead(unit.path))
        if table is None:
            raise UnrecognisedError("not a table", path=unit.path)
        yield from _read(table, options.mapping or self.mapping, options)


def batches_from_table(
    table: Any, mapping: ColumnMapping | None, options: ReadOptions, *, rows_per_batch: int | None = None
) -> Iterator[TokenBatch]:
    """Read a table in memory as if it were a file.

    Parameters
    ----------
    table
        Any object with ``__arrow_c_stream__``: a pandas, polars or pyarrow table, a DuckDB relation.
    mapping
        What its columns mean; None takes canonical names.
    options
        As for a file.
    rows_per_batch
        Rows read at a time.

    Raises
    ------
    InputError
        No log-prob column, no loss mask, or values that cannot be what their column is.
    """
    yield from _read(table_in_memory(table), mapping or options.mapping or ColumnMapping(), options, rows_per_batch)


def unrecognised(table: Table, mapping: ColumnMapping | None = None) -> InputError:
    """Return the error for a table without a log-prob column: what it holds, and a mapping to fill in.

    With a mapping it names the column of it that is not there.
    """
    try:
        (mapping or ColumnMapping()).bind(table.columns, table.place)
    except InputError as error:
        return error
    return UnrecognisedError(
        "a table without a log-prob column under a canonical name",
        path=table.place,
        found="columns " + ", ".join(table.columns),
        expected="logp_infer or logp_train",
        hint="Say what the columns mean in a file mapping.toml, and pass --map mapping.toml:\n\n"
        + _snippet(list(table.columns)),
    )


def _read(table: Table, mapping: ColumnMapping, options: ReadOptions, rows: int | None = None) -> Iterator[TokenBatch]:
    columns = mapping.bind(table.columns, table.place)
    if not any(name in columns for name in _ENGINES):
        raise unrecognised(table, mapping)
    source = Source(table, columns, mapping)
    lists = _has_lists(table, columns)
    if not lists and "seq_id" not in columns:
        raise InputError(
            "no seq_id: which tokens make up a sequence is not known",
            path=table.place,
            found="columns " + ", ".join(table.columns),
            expected="a column that names the sequence of each token",
            hint=f'Name it in --map: [columns] seq_id = "{_nearest("seq_id", list(table.columns)) or "..."}"',
        )
    all_sampled = options.all_sampled or mapping.mask.all_sampled
    if "loss_mask" not in columns and not all_sampled:
        raise InputError(
            "no loss_mask: tool and observation tokens cannot be told from sampled ones",
            path=table.place,
            found="columns " + ", ".join(table.columns),
            hint='Name it in --map ([columns] loss_mask = "..."), '
            "or say that the model sampled every token with --all-sampled",
        )
    step = _step_of(table.path) if table.path is not None and "step" not in columns else None
    notes = tuple(_notes(source, options, all_sampled, step))
    assembly = Assembly(source, mapping.run.facts(_granularity(source), table.run_facts), notes, all_sampled, step)
    if lists:
        parts = from_lists(source, rows or SEQUENCES_PER_BATCH)
    else:
        parts = from_rows(source, rows or TOKENS_PER_BATCH)
    # Closed at once when a part is refused: a sort holds a database and its folder.
    with closing(parts):
        for part in parts:
            yield assembly.batch(part)


def _notes(source: Source, options: ReadOptions, all_sampled: bool, step: int | None) -> Iterator[str]:
    used = set(source.columns.values())
    if unused := [name for name in source.table.columns if name not in used]:
        yield "columns not used: " + ", ".join(unused)
    if all_sampled and "loss_mask" in source.columns:
        yield "all_sampled has no effect: there is a loss_mask, and it is used"
    elif all_sampled:
        yield "no loss_mask: every token is taken as sampled, as the user said"
    for name, by in source.mapping.shift.items():
        if by and name in source.columns:
            where = "later" if by > 0 else "earlier"
            yield f"{name} moved {abs(by)} position(s) {where} in each sequence: shift of the mapping"
    if step is not None and options.step is None:
        yield f"step {step} is taken from the file's name"


def _granularity(source: Source) -> str | None:
    if "policy_version" in source.columns:
        in_lists = not _has_lists(source.table, source.columns) or source.holds_lists("policy_version")
        return "token" if in_lists else "sequence"
    return "sequence" if "version_first" in source.columns else None


def _has_lists(table: Table, columns: Mapping[str, str]) -> bool:
    return any(table.columns[columns[name]] for name in LOGP_COLUMNS if name in columns)


def _step_of(path: Path) -> int | None:
    """Return the step that the file or its folder is named after."""
    found = _STEP.search(path.name) or _STEP.search(path.parent.name)
    return int(found[1]) if found else None


def _snippet(columns: list[str]) -> str:
    lines = ["[columns]"]
    left = list(columns)
    for name in _ASKED_FOR:
        if name in columns:
            continue
        guess = _nearest(name, left)
        if guess is not None:
            left.remove(guess)
        # A JSON string is a TOML string as well.
        lines.append(f'# {name} = "..."' if guess is None else f"{name} = {json.dumps(guess)}  # a guess")
    return "\n".join(lines)


def _nearest(name: str, columns: list[str]) -> str | None:
    close = difflib.get_close_matches(name, [c for c in columns if c not in KNOWN_COLUMNS], n=1, cutoff=0.5)
    return close[0] if close else None
