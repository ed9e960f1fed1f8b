"""Sequences of a table that has one token a row."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.generic.source import ROW, Part, Source
from estr_diag.schema import quote_ident
from estr_diag.store.database import quiet

_SORT_MEMORY = "1GB"
"""What a sort may take before it goes on in its folder; DuckDB's own limit is most of the machine."""


def from_rows(source: Source, rows: int) -> Generator[Part]:
    """Yield the sequences of a table, about `rows` tokens at a time.

    Sequences that stand together are streamed. With ``pos``, rows in any other order are first sorted by
    step, sequence and position, on disk; without it their order is the order of the tokens, so they must
    stand together.

    Raises
    ------
    InputError
        A sequence is torn and there is no ``pos``, or a value cannot be what its column is.
    """
    in_order = _converted(source, rows)
    if "pos" not in source.columns:
        try:
            yield from _whole(in_order)
        except _ScatteredError as error:
            raise InputError(
                f"sequence {error.key!r} goes on in row {error.row}, after rows of other sequences",
                path=source.table.place,
                line=source.table.line(error.row),
                key=source.columns["seq_id"],
                expected="the rows of a sequence one after the other, where there is no pos",
                hint="Add the position of each token as a column pos, or sort the table by sequence",
            ) from None
    elif _stand_together(source, rows):
        yield from _whole(in_order)
    else:
        yield from _whole(_sorted(in_order, rows))


class _ScatteredError(Exception):
    """A sequence goes on after another one has begun."""

    def __init__(self, key: Any, row: int) -> None:
        self.key, self.row = key, row
        super().__init__(f"{key} in row {row}")


def _converted(source: Source, rows: int) -> Iterator[pa.Table]:
    first = 1
    for batch in source.read(rows):
        numbers = np.arange(first, first + batch.num_rows)
        columns = {name: source.convert(name, batch.column(column), numbers) for name, column in source.columns.items()}
        yield pa.table({**columns, ROW: numbers})
        first += batch.num_rows


def _stand_together(source: Source, rows: int) -> bool:
    # Reads the key columns alone, and only up to the first sequence that is torn.
    try:
        for _ in _whole(_converted(source.only("step", "seq_id"), rows)):
            pass
    except _ScatteredError:
        return False
    return True


def _whole(batches: Iterator[pa.Table]) -> Iterator[Part]:
    """Cut a stream of rows at the ends of sequences; rows of an unfinished one are carried over."""
    seen: set[tuple[Any, ...]] = set()
    carried: pa.Table | None = None
    for batch in batches:
        table = batch if carried is None else pa.concat_tables([carried, batch])
        if not table.num_rows:
            continue
        table = table.combine_chunks()
        starts = _starts(table)
        if len(starts) > 1:
            yield _part(table.slice(0, int(starts[-1])), starts[:-1], seen)
        carried = table.slice(int(starts[-1]))
    if carried is not None and carried.num_rows:
        yield _part(carried.combine_chunks(), np.zeros(1, dtype=np.int64), seen)


def _starts(table: pa.Table) -> NDArray[np.int64]:
    """Return the rows at which another sequence begins, the first row included."""
    begins = np.zeros(table.num_rows, dtype=bool)
    begins[0] = True
    for name in _keys(table):
        codes = table.column(name).chunk(0).dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
        begins[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(begins)


def _keys(table: pa.Table) -> list[str]:
    return [name for name in ("step", "seq_id") if name in table.column_names]


def _part(table: pa.Table, starts: NDArray[np.int64], seen: set[tuple[Any, ...]]) -> Part:
    named = table.select([*_keys(table), ROW]).take(pa.array(starts)).to_pydict()
    for *key, row in zip(*named.values(), strict=True):
        if tuple(key) in seen:
            raise _ScatteredError(key[-1], row)
        seen.add(tuple(key))
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    columns[ROW] = columns[ROW].to_numpy()
    keys = columns.pop("seq_id").take(pa.array(starts)).cast(pa.string())
    return Part(Ragged(np.diff(np.append(starts, table.num_rows)), columns), {"seq_id": keys}, columns[ROW][starts])


def _sorted(batches: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Sort rows by step, sequence and position, stably, in a temporary database that may be larger than memory."""
    with (
        tempfile.TemporaryDirectory(prefix="estr-diag-") as folder,
        duckdb.connect(str(Path(folder, "rows.duckdb"))) as sorter,
    ):
        quiet(sorter)
        sorter.execute(f"set memory_limit = '{_SORT_MEMORY}'")
        order: Sequence[str] = ()
        for batch in batches:
            sorter.register("batch", batch)
            if not order:
                sorter.execute("create table unsorted as select * from batch limit 0")
                order = [quote_ident(name) for name in (*_keys(batch), "pos", ROW)]
            sorter.execute("insert into unsorted select * from batch")
            sorter.unregister("batch")
        for batch in sorter.sql(f"select * from unsorted order by {', '.join(order)}").to_arrow_reader(rows):
            yield pa.Table.from_batches([batch])
