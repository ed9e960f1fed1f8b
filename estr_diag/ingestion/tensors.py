"""Take the declared tensors of one record of a dump, and check them against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion import field_errors
from estr_diag.ingestion.adapter import Layout
from estr_diag.ingestion.align import Ragged

Tensors = dict[str, NDArray[Any]]


def take(record: Any, layout: Layout, path: Path, number: int | None = None) -> Tensors:
    """Return the fields of `layout` that a record holds, as arrays; a field that is None counts as absent.

    Parameters
    ----------
    record
        A dict of tensors (already NumPy arrays) and lists.
    layout
        The fields to take; others are not looked at.
    path, number
        Where, for messages: the file and the 1-based record.

    Raises
    ------
    InputError
        A required field is absent, or a field holds no numbers.
    """
    if not isinstance(record, Mapping):
        raise InputError("not a dict of tensors", path=path, line=number, found=type(record).__name__)
    present = [str(name) for name, value in record.items() if value is not None]
    field_errors.require(path, layout, present, record=number)
    taken: Tensors = {}
    for field in layout.fields:
        value = record.get(field.name)
        if value is None:
            continue
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.asarray(None)
        if array.dtype.kind not in "biuf":
            raise InputError(
                "not a tensor of numbers",
                path=path,
                line=number,
                key=field.name,
                found=type(value).__name__,
                expected=field.type,
            )
        taken[field.name] = array
    return taken


def require_shape(
    tensors: Tensors, names: Sequence[str], shape: tuple[int, ...], why: str, path: Path, number: int | None = None
) -> None:
    """Raise when one of the tensors `names` that is there does not have `shape`; `why` says where `shape` is from."""
    for name in names:
        if name in tensors and tensors[name].shape != shape:
            raise InputError(
                "tensors of unequal length",
                path=path,
                line=number,
                key=name,
                found=f"shape {list(tensors[name].shape)} of '{name}'",
                expected=f"{list(shape)}, {why}",
            )


def token_names(layout: Layout, axes: str) -> list[str]:
    """Return the fields of `layout` whose declared type has these axes, such as ``[B,L]``."""
    return [field.name for field in layout.fields if field.type.endswith(axes)]


def joined(parts: Sequence[Ragged]) -> Ragged:
    """Put the sequences of several records one after the other; a column that a record lacks is NaN there."""
    names = dict.fromkeys(name for part in parts for name in part.columns)

    def column(name: str) -> NDArray[Any]:
        missing = (np.full(int(part.lengths.sum()), np.nan, dtype=np.float32) for part in parts)
        return np.concatenate([part.columns.get(name, gap) for part, gap in zip(parts, missing, strict=True)])

    return Ragged(np.concatenate([part.lengths for part in parts]), {name: column(name) for name in names})


def per_sequence(records: Sequence[Tensors], name: str, rows: Sequence[int]) -> NDArray[Any] | None:
    """Join a field that has one value a sequence; None when no record has it, NaN for the records that lack it."""
    if not any(name in record for record in records):
        return None
    return np.concatenate([r.get(name, np.full(n, np.nan)) for r, n in zip(records, rows, strict=True)])
