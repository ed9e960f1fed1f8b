"""What a statistic returns: a table, how it was made, and every way out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

SIGNIFICANT_DIGITS = 12
"""Sums over threads differ in the last two to four digits of a double; what is shown or compared is rounded here."""

_SHOWN_ROWS = 50


@dataclass(frozen=True, slots=True)
class Result:
    """A table of numbers with its provenance.

    Parameters
    ----------
    name
        The statistic.
    table
        One row per group; columns carry their meaning in the docs of the statistic.
    parameters
        What the statistic was asked with.
    provenance
        Where the numbers come from: source, counted tokens and sequences, versions.
    notes
        What a reader must know: assumptions, resolution, groups that were left out.
    """

    name: str
    table: pa.Table
    parameters: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_arrow(self) -> pa.Table:
        """Return the table."""
        return self.table

    def to_polars(self) -> pl.DataFrame:
        """Return a Polars frame."""
        import polars as pl

        frame = pl.from_arrow(self.table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas frame."""
        frame: pd.DataFrame = self.table.to_pandas()
        return frame

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries of JSON values, numbers rounded to `SIGNIFICANT_DIGITS`."""
        return [{key: json_number(value) for key, value in row.items()} for row in self.table.to_pylist()]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; never NaN."""
        return {
            "name": self.name,
            "parameters": json_number(dict(self.parameters)),
            "provenance": json_number(dict(self.provenance)),
            "notes": list(self.notes),
            "rows": self.rows(),
        }

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _repr_html_(self) -> str:
        from html import escape

        names = self.table.column_names
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        shown = self.rows()[:_SHOWN_ROWS]
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(row[name]))}</td>" for name in names) + "</tr>" for row in shown
        )
        more = f"<p>{len(self) - len(shown)} more rows</p>" if len(self) > len(shown) else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><caption>{escape(self.name)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}{notes}"


def json_number(value: Any) -> Any:
    """Return `value` as JSON allows it: non-finite numbers become None, floats are rounded."""
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_number(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_number(v) for v in value]
    if hasattr(value, "item"):
        return json_number(value.item())
    return str(value) if not hasattr(value, "__float__") else json_number(float(value))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
