"""Turn a column of any type into its canonical type, or say which value cannot be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from estr_diag.ingestion.mapping import NATS_PER, Mapping
from estr_diag.ingestion.sentinels import ENGINE_FLOOR, PLACEHOLDER
from estr_diag.schema import LOGP_COLUMNS, SEQUENCES, TOKENS, Column

_TRUE, _FALSE = frozenset({"true", "t", "yes", "1", "1.0"}), frozenset({"false", "f", "no", "0", "0.0"})


class BadValueError(ValueError):
    """One value cannot be what its column needs; `index` counts from 0."""

    def __init__(self, index: int, found: str, expected: str) -> None:
        self.index, self.found, self.expected = index, found, expected
        super().__init__(f"value {index}: found {found}, expected {expected}")


def text_type(name: str, mapping: Mapping) -> str:
    """Return the DuckDB type as which a text format parses the canonical column `name`.

    Integers come as DOUBLE, because a cast to an integer type would round 1.5 without a word.
    """
    if name == "seq_id":
        return "VARCHAR"
    kind = _column(name).dtype
    if kind == "float32":
        return "FLOAT" if _nats_per(name, mapping) == 1.0 else "DOUBLE"
    return "DOUBLE" if kind.startswith("int") else "VARCHAR"


def to_canonical(name: str, values: pa.Array, mapping: Mapping) -> pa.Array:
    """Return `values` as the canonical column `name`, in its type and unit; missing values are null.

    Raises
    ------
    BadValueError
        A value is of another kind, or out of range.
    """
    values = _decoded(values)
    if name == "seq_id":
        return _names(values)
    kind = _column(name).dtype
    if kind == "float32":
        return _floats(values, _nats_per(name, mapping), sentinels=name in LOGP_COLUMNS)
    if kind.startswith("int"):
        return _integers(values, np.dtype(kind))
    if kind == "bool":
        return _flags(values, mapping.mask.counted if name == "loss_mask" else True)
    return _texts(values)


def _decoded(values: pa.Array) -> pa.Array:
    """Return plain values of an extension type, a dictionary or string views (which lack most kernels)."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_dictionary(values.type):
        return _decoded(values.dictionary).take(values.indices)
    return values.cast(pa.string()) if pa.types.is_string_view(values.type) else values


def _column(name: str) -> Column:
    return TOKENS[name] if name in TOKENS else SEQUENCES[name]


def _nats_per(name: str, mapping: Mapping) -> float:
    if name in LOGP_COLUMNS:
        return NATS_PER[mapping.units.logp]
    return NATS_PER[mapping.units.entropy] if name == "entropy" else 1.0


def _names(values: pa.Array) -> pa.Array:
    if values.null_count:
        raise BadValueError(_first(_nulls(values)), "null", "a name or number for every sequence")
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return _integers(values, np.dtype("int64"))
    return _texts(values)


def _floats(values: pa.Array, nats_per: float, *, sentinels: bool) -> pa.Array:
    if not (_is_number(values.type) or pa.types.is_null(values.type)):
        raise _wrong_kind(values, "a number")
    if nats_per == 1.0 and not pa.types.is_decimal(values.type):
        return pc.cast(values, pa.float32(), safe=False)
    wide = pc.cast(values, pa.float64(), safe=False)
    nats = pc.multiply(wide, nats_per)
    if sentinels:
        # What an engine writes for "nothing here" has no unit, and is looked for later.
        nothing = pc.or_(pc.less_equal(wide, ENGINE_FLOOR), pc.equal(wide, PLACEHOLDER))
        nats = pc.if_else(nothing, wide, nats)
    return pc.cast(nats, pa.float32(), safe=False)


def _integers(values: pa.Array, kind: np.dtype[Any]) -> pa.Array:
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.from_numpy_dtype(kind))
    if not _is_number(values.type):
        raise _wrong_kind(values, "a whole number")
    if pa.types.is_decimal(values.type):
        values = pc.cast(values, pa.float64())
    missing = _nulls(values)
    numbers = _numpy(values.fill_null(0))
    limits = np.iinfo(kind)
    # float64 cannot hold the largest int64; from 2^63 on it is out of range.
    bad = (numbers < limits.min) | ((numbers >= 2.0**63) if kind.itemsize == 8 else (numbers > limits.max))
    if np.issubdtype(numbers.dtype, np.floating):
        missing = missing | np.isnan(numbers)
        numbers = np.where(missing, 0, numbers)
        bad |= numbers != np.trunc(numbers)
    if np.any(bad & ~missing):
        index = _first(bad & ~missing)
        raise BadValueError(index, str(values[index]), f"a whole number from {limits.min} to {limits.max}")
    return pa.array(np.where(bad, 0, numbers).astype(kind), mask=missing)


def _texts(values: pa.Array) -> pa.Array:
    if pa.types.is_floating(values.type):
        # pandas keeps whole numbers with gaps as floats: 3.0 is the name 3.
        try:
            values = _integers(values, np.dtype("int64"))
        except BadValueError:
            return values.cast(pa.string())
    if pa.types.is_nested(values.type):
        raise _wrong_kind(values, "a text or a number")
    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        raise BadValueError(_first(~_nulls(values)), f"{values.type} that is no text", "UTF-8 text") from None


def _flags(values: pa.Array, counted: bool | float | str) -> pa.Array:
    """Return where a mask counts: where it has the value `counted`."""
    if isinstance(counted, str):
        return pc.equal(_texts(values), counted)
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.bool_())
    # A mask has two or three values, so the work is done once for each of them.
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if not (_is_number(values.type) or _is_text(values.type)):
        raise _wrong_kind(values, "a mask value")
    encoded = values.dictionary_encode()
    distinct = [_flag(value, counted) for value in encoded.dictionary.to_pylist()]
    codes = encoded.indices
    if unknown := [code for code, flag in enumerate(distinct) if flag == "?"]:
        index = _first(_numpy(pc.equal(codes, unknown[0]).fill_null(False)))
        expected = "true, false, 0 or 1" if isinstance(counted, bool) else "a number"
        expected += ", or another mask.counted in the mapping"
        raise BadValueError(index, repr(values[index].as_py()), expected)
    return pa.array([None if flag == "?" else flag for flag in distinct], pa.bool_()).take(codes)


def _flag(value: Any, counted: bool | float) -> bool | str | None:
    """Return whether one mask value counts, None when it is missing, and "?" when it cannot be told."""
    if isinstance(value, float) and np.isnan(value):
        return None
    if isinstance(counted, bool):
        word = str(value).strip().lower()
        if word in _TRUE or word in _FALSE:
            return (word in _TRUE) is counted
        return "?"
    try:
        return float(value) == float(counted)
    except ValueError:
        return "?"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _wrong_kind(values: pa.Array, expected: str) -> BadValueError:
    index = _first(~_nulls(values)) if values.null_count < len(values) else 0
    return BadValueError(index, f"{values.type} {str(values[index].as_py())[:40]!r}", expected)


def _nulls(values: pa.Array) -> NDArray[np.bool_]:
    return _numpy(values.is_null())


def _numpy(values: pa.Array) -> NDArray[Any]:
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _first(where: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(where)[0])
