"""The names that a trainer may record, and the conversion of their values to the types of the schema."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import UsageError, nearest
from estr_diag.schema import SEQUENCE_COLUMNS_IN_LOG, SEQUENCES, TOKENS, Column

Typed = NDArray[Any] | np.ma.MaskedArray[Any, np.dtype[Any]] | list[str | None]


class TokenColumns(TypedDict, total=False):
    """What `TokenRecorder.write` takes; ``estr_diag.schema`` says what each column means, and its unit.

    The first block has one value a token. Of the second, a sequence or the whole batch may have one value.
    The third has one value a sequence.
    """

    logp_infer: Any
    logp_train: Any
    logp_replay: Any
    logp_update: Any
    entropy: Any
    collision: Any
    token_id: Any
    token_text: Any

    policy_version: Any
    trainer_version: Any
    advantage: Any
    loss_mask: Any
    trainer_keep: Any
    turn: Any

    seq_key: Any
    group_id: Any
    prompt_key: Any
    prompt_len: Any
    reward: Any
    version_first: Any
    version_last: Any
    finish: Any
    env: Any


NAMES: tuple[str, ...] = tuple(TokenColumns.__annotations__)

PER_SEQUENCE = frozenset(SEQUENCE_COLUMNS_IN_LOG)
STORED_ONCE = frozenset({"policy_version", "trainer_version", "advantage"})
"""Token columns that a file may hold once a sequence; readers know that they are for all of its tokens."""

SPREAD = frozenset({"loss_mask", "trainer_keep", "turn"})
"""Token columns of which one value may be given, and which are then written for every token."""


def column_of(name: str) -> Column:
    """Return the column of the schema.

    Raises
    ------
    UsageError
        Not the name of a column that can be recorded; gives the nearest.
    """
    if name not in NAMES:
        raise UsageError(f"write(): '{name}' is no column of the token log; {nearest(name, NAMES)}")
    return TOKENS[name] if name in TOKENS else SEQUENCES[name]


def cast_while_copying(column: Column, kind: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type to copy values as: the column's where every value fits it, else their own."""
    if column.dtype == "float32" and kind.kind in "iuf":
        return np.dtype(np.float32)
    if column.dtype.startswith("int") and kind.kind in "iu" and np.can_cast(kind, np.dtype(column.dtype)):
        return np.dtype(column.dtype)
    return kind


def typed(column: Column, values: NDArray[Any]) -> Typed:
    """Return values in the type of their column; None, and NaN in a column of whole numbers, is missing.

    NaN and infinities of a float column stay as they are: what they mean is for the reader to judge.

    Raises
    ------
    UsageError
        A value that the column cannot hold.
    """
    if column.dtype == "string":
        return [_text(value) for value in values.tolist()]
    if values.dtype.kind == "O":
        return _with_gaps(column, values)
    allowed = "biuf" if column.dtype == "bool" else "iuf"
    if values.dtype.kind not in allowed:
        raise UsageError(f"write(): {column.name} holds {values.dtype.name}; expected {_expected(column)}")
    if column.dtype == "float32":
        with np.errstate(over="ignore"):
            return values.astype(np.float32, copy=False)
    return _whole(column, values)


def _whole(column: Column, values: NDArray[Any]) -> Typed:
    """Return flags or whole numbers."""
    kind = np.dtype(column.dtype)
    if values.dtype == kind or (kind.kind == "i" and np.can_cast(values.dtype, kind)):
        return values.astype(kind, copy=False)
    missing = np.isnan(values) if values.dtype.kind == "f" else None
    filled = values if missing is None else np.where(missing, 0, values)
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    bad = (filled < low) | (filled > high)
    if filled.dtype.kind == "f":
        bad |= filled != np.trunc(filled)
    if bad.any():
        found = filled[np.flatnonzero(bad)[0]]
        raise UsageError(f"write(): {column.name} holds {found}; expected {_expected(column)}")
    if missing is None or not missing.any():
        return filled.astype(kind)
    return np.ma.masked_array(filled.astype(kind), missing)


def _with_gaps(column: Column, values: NDArray[Any]) -> Typed:
    """Return numbers of which some are None, as trainers keep columns that they know in part."""
    gaps = np.array([value is None for value in values.tolist()], dtype=bool)
    try:
        found: Any = typed(column, np.where(gaps, 0, values).astype(np.float64))
    except (TypeError, ValueError):
        wrong = next(v for v in values.tolist() if v is not None and not isinstance(v, int | float))
        raise UsageError(
            f"write(): {column.name} holds {wrong!r} ({type(wrong).__name__}); expected {_expected(column)}"
        ) from None
    return np.ma.masked_array(found, np.ma.getmaskarray(found) | gaps)


def _text(value: Any) -> str | None:
    if value is None or value != value:
        return None
    # Whole numbers that passed through a float column are names all the same: 3.0 is the group 3.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _expected(column: Column) -> str:
    if column.dtype == "bool":
        return "0 or 1, true or false"
    if column.dtype == "float32":
        return "numbers"
    limits = np.iinfo(column.dtype)
    return f"whole numbers from {limits.min} to {limits.max}"
