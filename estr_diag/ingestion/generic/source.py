"""A table together with what its columns mean, and the whole sequences that come out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.generic.columns import BadValueError, text_type, to_canonical
from estr_diag.ingestion.generic.tables import Table
from estr_diag.ingestion.mapping import Mapping as ColumnMapping

ROW = "row"
"""Number of the row that a token came from, from 1; kept with it through every reordering."""


@dataclass(frozen=True)
class Source:
    """A table together with what its columns mean."""

    table: Table
    columns: Mapping[str, str]
    """Canonical column -> column of the table."""
    mapping: ColumnMapping

    def holds_lists(self, name: str) -> bool:
        """Whether the table has a list in the canonical column `name`."""
        return self.table.columns[self.columns[name]]

    def only(self, *names: str) -> Source:
        """Return the same table with fewer columns."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name in names})

    def read(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches as they are in the table; the same column may serve two canonical ones."""
        types = {column: text_type(name, self.mapping) for name, column in self.columns.items()}
        return self.table.batches(types, rows)

    def convert(self, name: str, values: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
        """Return canonical values; `rows` are the row numbers of the values, for the error."""
        try:
            return to_canonical(name, values, self.mapping)
        except BadValueError as bad:
            row = int(rows[bad.index])
            raise InputError(
                f"a value in row {row} that cannot be {name}",
                path=self.table.place,
                line=self.table.line(row),
                key=self.columns[name],
                found=bad.found,
                expected=bad.expected,
            ) from None


@dataclass(frozen=True)
class Part:
    """Some whole sequences.

    Attributes
    ----------
    ragged
        Canonical token columns as Arrow arrays, and ``row``.
    sequences
        Canonical columns with one value a sequence.
    records
        Number of the (first) row of each sequence, from 1.
    """

    ragged: Ragged
    sequences: dict[str, pa.Array]
    records: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row number of each token."""
        return self.ragged[ROW]
