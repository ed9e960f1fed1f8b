"""Read JSON lines with declared types through DuckDB, as flat Arrow columns.

DuckDB parses declared columns at about the speed of the fastest JSON parser, in parallel, and accepts
the ``NaN`` and ``-Infinity`` that Python writers emit. Only declared fields are read.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field
from estr_diag.ingestion.align import Ragged
from estr_diag.store.database import quiet

_MAX_OBJECT_BYTES = 1 << 28
_ROWS_PER_BATCH = 2048


def read_records(
    path: Path, fields: Sequence[Field], rows_per_batch: int = _ROWS_PER_BATCH
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (record number of the first row, batch) in file order.

    A field that a line lacks is null in its row; the caller decides whether that is an error.

    Raises
    ------
    InputError
        A line is not JSON, or a field does not have its declared type; names the line.
    """
    connection = duckdb.connect()
    try:
        quiet(connection)
        query = """
            select * from read_json($path, columns = $columns, format = 'newline_delimited',
                                    maximum_object_size = $size)
        """
        parameters = {"path": str(path), "columns": {f.name: f.type for f in fields}, "size": _MAX_OBJECT_BYTES}
        record = 1
        try:
            for batch in connection.sql(query, params=parameters).to_arrow_reader(rows_per_batch):
                if batch.num_rows:
                    yield record, batch
                    record += batch.num_rows
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise _locate(path, fields, str(error)) from None
    finally:
        connection.close()


def first_records(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield up to `count` records, parsed; ends at a line that cannot be parsed, which `read_records` reports."""
    lines = (raw for _, raw in _lines(path) if raw.strip())
    for raw in islice(lines, count):
        try:
            record = json.loads(raw)
        except ValueError:
            return
        if isinstance(record, dict):
            yield record


def line_of_record(path: Path, record: int) -> int:
    """Return the 1-based physical line of the 1-based record (blank lines are no records)."""
    seen = 0
    for number, line in _lines(path):
        seen += bool(line.strip())
        if seen == record:
            return number
    return record


def ragged(path: Path, batch: pa.RecordBatch, record: int, names: Sequence[str]) -> Ragged:
    """Flatten the list columns `names` of a batch.

    Raises
    ------
    InputError
        Two lists of one record differ in length; names the line and both lengths.
    """
    lengths: NDArray[np.int64] | None = None
    columns: dict[str, NDArray[Any]] = {}
    for name in names:
        lists = batch.column(name)
        found = np.asarray(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        if lengths is None:
            lengths = found
        elif bad := np.flatnonzero(found != lengths).tolist():
            raise InputError(
                "lists of unequal length",
                path=path,
                line=line_of_record(path, record + bad[0]),
                key=name,
                found=f"{found[bad[0]]} values of '{name}' and {lengths[bad[0]]} of '{names[0]}'",
                expected="one value a token in every list",
                hint=f"{len(bad)} record(s) of this batch differ; a list cut by the writer cannot be aligned by guessing",
            )
        columns[name] = _values(lists.flatten())
    assert lengths is not None
    return Ragged(lengths, columns)


def require(path: Path, batch: pa.RecordBatch, record: int, names: Sequence[str]) -> None:
    """Raise when a record lacks one of the fields `names`."""
    for name in names:
        column = batch.column(name)
        if column.null_count:
            first = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(
                f"{column.null_count} of {batch.num_rows} records lack a field",
                path=path,
                line=line_of_record(path, record + first),
                key=name,
                found="no such key, or null",
                expected="the field on every line",
            )


def _values(flat: pa.Array) -> NDArray[Any]:
    if pa.types.is_floating(flat.type):
        # Arrow nulls become NaN: both mean "no value", and the sentinel step counts them together.
        return np.asarray(flat.to_numpy(zero_copy_only=False))
    if flat.null_count:
        missing = flat.is_null().to_numpy(zero_copy_only=False)
        filled = flat.fill_null(False if pa.types.is_boolean(flat.type) else 0)
        values: NDArray[Any] = np.ma.array(filled.to_numpy(zero_copy_only=False), mask=missing)
        return values
    return np.asarray(flat.to_numpy(zero_copy_only=False))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        yield from enumerate(stream, start=1)


def _locate(path: Path, fields: Sequence[Field], message: str) -> InputError:
    # DuckDB's line number is exact for malformed JSON and off for a value of the wrong type, so the
    # offending line is looked for again, by declared type; this runs only when reading has failed.
    short = message.splitlines()[0]
    for number, raw in _lines(path):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except ValueError as error:
            return InputError(
                "not valid JSON",
                path=path,
                line=number,
                found=str(error),
                expected="one JSON object on each line",
                hint="A cut-off last line usually means that the file was still being written",
            )
        if not isinstance(record, dict):
            return InputError(
                "not a JSON object", path=path, line=number, found=type(record).__name__, expected="an object"
            )
        for f in fields:
            if f.name in record and (wrong := _mismatch(record[f.name], f.type)):
                return InputError("wrong type", path=path, line=number, key=f.name, found=wrong, expected=f.type)
    return InputError(re.sub(r"^[\w ]+ Error: ", "", short), path=path)


def _mismatch(value: Any, declared: str) -> str | None:
    """Describe `value` when it cannot be of the DuckDB type `declared`."""
    if value is None:
        return None
    if declared.endswith("[]"):
        if not isinstance(value, list):
            return f"{type(value).__name__} {str(value)[:40]!r}"
        return next((wrong for item in value if (wrong := _mismatch(item, declared[:-2]))), None)
    if declared == "VARCHAR" or declared == "JSON" or declared.startswith("STRUCT"):
        return None
    if isinstance(value, bool | int | float):
        return None
    return f"{type(value).__name__} {str(value)[:40]!r}"
