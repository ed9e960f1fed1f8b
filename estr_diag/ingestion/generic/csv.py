"""CSV and TSV tables, read by DuckDB with declared types."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any, TextIO

import duckdb
import pyarrow as pa

from estr_diag.errors import InputError
from estr_diag.ingestion.head import FileHead
from estr_diag.schema import quote_ident
from estr_diag.store.database import quiet

_ROW_BYTES = 1 << 28
_SHAPE_ROWS = 64


class CsvTable:
    """Comma- or tab-separated text with a header; lists are written ``[1, 2]``."""

    run_facts: bytes | None = None

    def __init__(self, head: FileHead) -> None:
        self.path, self.place = head.path, str(head.path)
        names = [name.lower() for name in head.columns]
        if twice := [name for number, name in enumerate(head.columns) if name.lower() in names[:number]]:
            raise InputError("two columns of one name (case does not count)", path=self.path, line=1, key=twice[0])
        # One row is enough unless it has empty fields, which hide whether the column holds lists.
        seen = [""] * len(names)
        with self._open() as stream:
            header = stream.readline()
            self._delimiter = "\t" if header.count("\t") > header.count(",") else ","
            try:
                for row in islice(csv.reader(stream, delimiter=self._delimiter), _SHAPE_ROWS):
                    seen = [old or new for old, new in zip_longest(seen, row[: len(seen)], fillvalue="")]
                    if all(seen):
                        break
            except (OSError, EOFError, csv.Error) as error:
                raise InputError("cannot be read", path=self.path, found=str(error)) from None
        self.columns = {name: value.lstrip().startswith("[") for name, value in zip(head.columns, seen, strict=True)}

    def batches(self, types: Mapping[str, str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches; see `generic_tables.Table`."""
        declared = {
            name: types[name] + "[]" * lists if name in types else "VARCHAR" for name, lists in self.columns.items()
        }
        # An empty field is a missing value and "" an empty text: a token may be the text `null` or ``.
        source = """
            read_csv($path, columns = $columns, header = true, delim = $delimiter, quote = '"', escape = '"',
                     nullstr = '', allow_quoted_nulls = false, auto_detect = false, max_line_size = $size)
        """
        parameters = {"path": self.place, "columns": declared, "delimiter": self._delimiter, "size": _ROW_BYTES}
        wanted = ", ".join(quote_ident(name) for name in types)
        connection = duckdb.connect()
        try:
            quiet(connection)
            yield from connection.sql(f"select {wanted} from {source}", params=parameters).to_arrow_reader(rows)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise self._locate(declared, types, str(error)) from None
        finally:
            connection.close()

    def line(self, row: int) -> int:
        """Return the line at which a row begins; a quoted field may hold line breaks."""
        return next((line for number, (line, _) in enumerate(self._rows(), start=1) if number == row), row + 1)

    def _open(self) -> TextIO:
        opener: Any = gzip.open if self.path.suffix == ".gz" else open
        stream: TextIO = opener(self.path, "rt", encoding="utf-8-sig", errors="replace", newline="")
        return stream

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        with self._open() as stream:
            reader = csv.reader(stream, delimiter=self._delimiter)
            next(reader, None)
            begun = reader.line_num + 1
            for row in reader:
                if row:
                    yield begun, row
                begun = reader.line_num + 1

    def _locate(self, declared: Mapping[str, str], types: Mapping[str, str], message: str) -> InputError:
        for line, row in self._rows():
            if len(row) != len(declared):
                return InputError(
                    "a row with another number of fields",
                    path=self.path,
                    line=line,
                    found=len(row),
                    expected=f"{len(declared)} as in the header",
                    hint="A cut-off last line usually means that the file was still being written",
                )
            for (name, kind), text in zip(declared.items(), row, strict=True):
                if name in types and text and not _parses(text, kind):
                    return InputError(
                        "wrong type", path=self.path, line=line, key=name, found=repr(text[:40]), expected=kind
                    )
        # Lines of DuckDB's message: where, the line itself, what is wrong, and advice.
        where, _, *rest = [*message.splitlines(), "", ""]
        number = re.search(r"on Line: (\d+)", where)
        return InputError(
            "not readable as CSV",
            path=self.path,
            line=int(number[1]) if number else None,
            found=(rest[0] if number else where) or message,
        )


def _parses(text: str, kind: str) -> bool:
    if kind.endswith("[]"):
        inner = text.strip()
        if not (inner.startswith("[") and inner.endswith("]")):
            return False
        items = (item.strip() for item in inner[1:-1].split(","))
        return all(_parses(item, kind[:-2]) for item in items if item not in ("", "NULL"))
    if kind == "VARCHAR":
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
