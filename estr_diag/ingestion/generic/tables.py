"""Tables of any container format, opened cheaply and read in batches of declared columns.

A table knows its column names and which of them hold lists before a row is read. Text formats are
parsed by DuckDB with declared types; a value that does not fit is looked up again and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from estr_diag.errors import InputError
from estr_diag.ingestion import jsonl
from estr_diag.ingestion.adapter import Field
from estr_diag.ingestion.generic.csv import CsvTable
from estr_diag.ingestion.head import FileHead
from estr_diag.schema import RUN_FACTS_KEY

_SHAPE_RECORDS = 64
Reader = Callable[[Sequence[str], int], Iterator[pa.RecordBatch]]


class Table(Protocol):
    """A table that can be read more than once.

    Attributes
    ----------
    path
        Its file; None for a table in memory.
    place
        What messages call it.
    columns
        Column name -> whether it holds lists, in file order.
    run_facts
        Facts of the run that the file carries as JSON, as `TokenRecorder` and ``export`` write them; or None.
    """

    @property
    def path(self) -> Path | None: ...  # noqa: D102

    @property
    def place(self) -> str: ...  # noqa: D102

    @property
    def columns(self) -> Mapping[str, bool]: ...  # noqa: D102

    @property
    def run_facts(self) -> bytes | None: ...  # noqa: D102

    def batches(self, types: Mapping[str, str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `rows` rows in file order, with the columns of `types`.

        Text formats parse a column as its DuckDB type in `types` (lists: as lists of it); the others
        have types of their own.
        """
        ...

    def line(self, row: int) -> int:
        """Return what a message calls the 1-based row: its line in a text file, else its number."""
        ...


def open_table(head: FileHead) -> Table | None:
    """Return the table in a file, or None when it is no table."""
    if head.kind == "json" and isinstance(head.json_record, dict):
        return JsonTable(head)
    if not head.columns:
        return None
    table: Table
    if head.kind == "parquet":
        table = ArrowTable(head.path, str(head.path), pq.read_schema(head.path), _parquet(head.path))
    elif head.kind == "arrow":
        table = _ipc_table(head.path, is_file=head.prefix[:6] == b"ARROW1")
    else:
        table = CsvTable(head)
    return table


def table_in_memory(data: Any) -> Table:
    """Return the table behind any object with ``__arrow_c_stream__`` (pandas, polars, pyarrow, DuckDB)."""
    if not hasattr(data, "__arrow_c_stream__"):
        raise InputError(
            f"a {type(data).__name__} is no table",
            expected="an object with __arrow_c_stream__: a pandas, polars or pyarrow table",
        )
    if isinstance(data, pa.RecordBatchReader):
        # A reader can be read once; sorting needs two passes.
        data = data.read_all()

    def read(names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        for batch in pa.RecordBatchReader.from_stream(data):
            yield from _slices(batch.select(list(names)), rows)

    try:
        schema = pa.RecordBatchReader.from_stream(data).schema
    except pa.ArrowException as error:
        raise InputError("not convertible to Arrow", path="table", found=str(error).splitlines()[0]) from None
    return ArrowTable(None, "table", schema, read)


class ArrowTable:
    """A Parquet or Arrow file, or a table in memory."""

    def __init__(self, path: Path | None, place: str, schema: pa.Schema, read: Reader) -> None:
        self.path, self.place, self._read = path, place, read
        self.columns = {field.name: _holds_lists(field.type) for field in schema}
        self.run_facts: bytes | None = (schema.metadata or {}).get(RUN_FACTS_KEY.encode())

    def batches(self, types: Mapping[str, str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches; see `Table`."""
        try:
            yield from self._read(list(types), rows)
        except (pa.ArrowException, OSError) as error:
            raise InputError("cannot be read to its end", path=self.place, found=str(error).splitlines()[0]) from None

    def line(self, row: int) -> int:
        """Return the row number itself."""
        return row


class JsonTable:
    """JSON lines; the first records say which columns there are."""

    run_facts: bytes | None = None

    def __init__(self, head: FileHead) -> None:
        self.path, self.place = head.path, str(head.path)
        # One record is enough unless it holds nulls, which hide whether the field is a list.
        shapes: dict[str, bool | None] = {}
        for record in jsonl.first_records(head.path, _SHAPE_RECORDS):
            for name, value in record.items():
                if shapes.get(name) is None:
                    shapes[name] = None if value is None else isinstance(value, list)
            if None not in shapes.values():
                break
        self.columns = {name: bool(lists) for name, lists in shapes.items()}

    def batches(self, types: Mapping[str, str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches; see `Table`."""
        fields = [Field(name, kind + "[]" * self.columns[name], "") for name, kind in types.items()]
        for _, batch in jsonl.read_records(self.path, fields, rows):
            yield batch

    def line(self, row: int) -> int:
        """Return the line of a record; blank lines are no records."""
        return jsonl.line_of_record(self.path, row)


def _holds_lists(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _slices(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _parquet(path: Path) -> Reader:
    def read(names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=rows, columns=list(names)):
                # Nested prefixes match as well: `a` would bring `a.b` along.
                yield batch.select(list(names))

    return read


def _ipc_table(path: Path, *, is_file: bool) -> ArrowTable:
    def read(names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        # Mapped, so that a file written as one huge batch is not loaded at once.
        with pa.memory_map(str(path)) as source:
            if is_file:
                options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
                reader = pa.ipc.open_file(source, options=options)
                found = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                found = iter(pa.ipc.open_stream(source))
            for batch in found:
                yield from _slices(batch.select(list(names)), rows)

    with pa.memory_map(str(path)) as source:
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema
    return ArrowTable(path, str(path), schema, read)
