"""Sequences of a table that has one sequence a row, with its token columns as lists."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.generic.source import ROW, Part, Source
from estr_diag.schema import SEQUENCE_COLUMNS_IN_LOG

_ONE_A_SEQUENCE = frozenset(
    {*SEQUENCE_COLUMNS_IN_LOG, "seq_id", "step", "policy_version", "trainer_version", "advantage"}
)
"""Columns of which a record may hold one value for all of its tokens."""


def from_lists(source: Source, rows: int) -> Generator[Part]:
    """Yield the sequences of a table, `rows` at a time.

    Raises
    ------
    InputError
        Lists of one record differ in length, or hold a value that its column cannot be.
    """
    first = 1
    for batch in source.read(rows):
        yield _flatten(source, batch, np.arange(first, first + batch.num_rows))
        first += batch.num_rows


def _flatten(source: Source, batch: pa.RecordBatch, records: NDArray[np.int64]) -> Part:
    lists: dict[str, pa.Array] = {}
    sequences: dict[str, pa.Array] = {}
    for name, column in source.columns.items():
        values = batch.column(column)
        if source.holds_lists(name):
            lists[name] = values
        elif name in _ONE_A_SEQUENCE:
            sequences[name] = source.convert(name, values, records)
        elif values.null_count < len(values):
            row = int(records[np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))[0]])
            raise InputError(
                f"one value in row {row} where the other token columns have lists",
                path=source.table.place,
                line=source.table.line(row),
                key=column,
                found=str(values.type),
                expected=f"a list with one {name} a token",
            )
    lengths = _lengths(source, lists, records)
    token_rows = np.repeat(records, lengths)
    flat: dict[str, Any] = {}
    for name, values in lists.items():
        held = np.repeat(values.is_valid().to_numpy(zero_copy_only=False), lengths)
        canonical = source.convert(name, values.flatten(), token_rows[held])
        # Tokens of a record without the list have no value.
        flat[name] = canonical.take(pa.array(np.cumsum(held) - 1, mask=~held)) if values.null_count else canonical
    return Part(Ragged(lengths, {**flat, ROW: token_rows}), sequences, records)


def _lengths(source: Source, lists: Mapping[str, pa.Array], records: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = np.full(len(records), -1, dtype=np.int64)
    given_by = np.full(len(records), next(iter(lists)), dtype=object)
    for name, values in lists.items():
        found = np.asarray(pc.list_value_length(values).fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
        # A null list is a column that this record lacks; it takes its length from the others.
        bad = np.flatnonzero((found >= 0) & (lengths >= 0) & (found != lengths))
        if len(bad):
            at = int(bad[0])
            row, column, other = int(records[at]), source.columns[name], source.columns[given_by[at]]
            raise InputError(
                f"lists of unequal length in row {row}",
                path=source.table.place,
                line=source.table.line(row),
                key=column,
                found=f"{found[at]} values of '{column}' and {lengths[at]} of '{other}'",
                expected="one value a token in every list",
                hint="A list that the writer cut cannot be aligned by guessing; "
                "a column that sits early has a list of full length and a shift",
            )
        given_by[lengths < 0] = name
        lengths = np.where(lengths < 0, found, lengths)
    return np.maximum(lengths, 0)
