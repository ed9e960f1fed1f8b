"""Tables in a page, and the same numbers as CSV to take away."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estr_diag.report.html.page import MAX_TEXT, text
from estr_diag.report.sentences import Cells
from estr_diag.result import Result

MAX_ROWS = 600
"""Rows of one table in a page; the store and ``--json`` have them all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, and the value that its column is sorted by."""

    shown: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a page, and where there are numbers behind it a CSV as a data address."""

    headers: tuple[str, ...]
    rows: list[list[Cell]]
    csv: str = ""
    left_out: int = 0

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers only, after its first: those are aligned at the right."""
        filled = [[row[i] for row in self.rows if row[i].shown not in ("", "–")] for i in range(len(self.headers))]
        return [bool(cells) and all(cell.value for cell in cells) for cells in filled]


def of_cells(cells: Cells) -> Table:
    """Return a table of texts that are written out already."""
    headers, rows = cells
    return Table(tuple(headers), [[_from_text(value) for value in row] for row in rows])


def of_result(result: Result, columns: Sequence[str] = ()) -> Table:
    """Return the numbers of a Result: all its columns of single values, or some in an order; the CSV has all of them."""
    rows = result.rows()
    single = [n for n in result.table.column_names if not any(isinstance(row[n], list | dict) for row in rows)]
    names = [name for name in columns or single if name in single]
    shown = [[_cell(row[name]) for name in names] for row in rows[:MAX_ROWS]]
    return Table(tuple(names), shown, _csv(single, rows), max(0, len(rows) - MAX_ROWS))


def _csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_plain(row[name]) for name in names] for row in rows[: 20 * MAX_ROWS]])
    return "data:text/csv;base64," + base64.b64encode(out.getvalue().encode("utf-8", "backslashreplace")).decode(
        "ascii"
    )


def _plain(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    cut = value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "…"
    # A text that a spreadsheet would take for a formula is given as text.
    return f"'{cut}" if cut[:1] in "=+-@\t\r" else cut


def _cell(value: Any) -> Cell:
    if value is None:
        return Cell("–")
    if isinstance(value, bool):
        return Cell("yes" if value else "no", str(int(value)))
    if isinstance(value, float):
        return Cell(f"{value:.4g}", repr(value))
    return Cell(
        f"{value:,}" if isinstance(value, int) else text(value, 80), str(value) if isinstance(value, int) else ""
    )


def _from_text(value: str) -> Cell:
    """Return a cell that sorts by the number that its text begins with."""
    import re

    found = re.match(r"\(?([-+]?[\d,]*\.?\d+)(?: ± [\d.]+\))?(e[-+]?\d+)?", value)
    number = "" if found is None else found[1].replace(",", "") + (found[2] or "")
    return Cell(text(value, 120), number)
