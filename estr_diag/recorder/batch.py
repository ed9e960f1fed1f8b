"""One batch of a trainer, checked and copied: what the writer thread turns into a shard."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import UsageError
from estr_diag.recorder.columns import (
    NAMES,
    PER_SEQUENCE,
    SPREAD,
    STORED_ONCE,
    Typed,
    cast_while_copying,
    column_of,
    typed,
)
from estr_diag.recorder.host import HostValues, describe, to_host
from estr_diag.recorder.layout import Layout, layout_of

_ENGINES = ("logp_infer", "logp_train")
_MAX_TOKENS = 2**31 - 1
_BYTES_A_TEXT = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Some whole sequences of one step, in memory that belongs to the recorder.

    Attributes
    ----------
    step
        Trainer step that consumes them.
    lengths
        Response tokens of each sequence, shape (B,).
    tokens
        Column -> values of the response tokens, one sequence after another, shape (sum of lengths,).
    sequences
        Column -> one value a sequence, shape (B,).
    """

    step: int
    lengths: NDArray[np.int64]
    tokens: Mapping[str, Typed]
    sequences: Mapping[str, Typed]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        columns = (*self.tokens.values(), *self.sequences.values())
        return sum(len(c) * _BYTES_A_TEXT if isinstance(c, list) else c.nbytes for c in columns)


def copied(step: Any, columns: Mapping[str, Any], cuts: Mapping[str, Any]) -> Batch:
    """Check the arguments of a write and copy their response tokens.

    Raises
    ------
    UsageError
        An unknown column, shapes that contradict each other, or a value that its column cannot hold.
    """
    for name in columns:
        column_of(name)
    # In the order of the schema, so that every shard of a run has its columns in the same order.
    host = {name: to_host(name, columns[name]) for name in NAMES if columns.get(name) is not None}
    anchor = _anchor(host)
    layout = layout_of(host, anchor, {name: to_host(name, cut) for name, cut in cuts.items() if cut is not None})
    if layout.lengths.sum() > _MAX_TOKENS:
        raise UsageError(
            f"write(): {layout.lengths.sum()} tokens in one call; expected at most {_MAX_TOKENS}: split it"
        )
    tokens: dict[str, Typed] = {}
    sequences: dict[str, Typed] = {}
    for name, values in host.items():
        column = column_of(name)
        if name in PER_SEQUENCE or (name in STORED_ONCE and not layout.is_per_token(values)):
            sequences[name] = typed(column, _one_each(name, values, layout))
        elif name in SPREAD and not layout.is_per_token(values):
            tokens[name] = typed(column, np.repeat(_one_each(name, values, layout), layout.lengths))
        else:
            kind = np.dtype(object) if isinstance(values, list) and not _numeric(values) else _kind(values)
            tokens[name] = typed(column, layout.flat(name, values, cast_while_copying(column, kind)))
    _unique(sequences.get("seq_key"))
    return Batch(_step(step), layout.lengths, tokens, sequences)


def _anchor(host: Mapping[str, HostValues]) -> str:
    if "loss_mask" not in host:
        raise UsageError(
            "write(): no loss_mask: sampled tokens cannot be told from tool tokens and padding. "
            "Pass the trainer's mask, or loss_mask=True where the model sampled every token"
        )
    for name in _ENGINES:
        if name in host:
            return name
    raise UsageError("write(): neither logp_infer nor logp_train: nothing to compare")


def _one_each(name: str, values: HostValues, layout: Layout) -> NDArray[Any]:
    """Return one value a sequence, shape (B,), of an array of shape (), (B,) or (B, 1)."""
    n = len(layout.lengths)
    if isinstance(values, list) and not values and not n:
        return np.empty(0)
    if not isinstance(values, list):
        if values.ndim == 0:
            return np.repeat(values, n)
        if values.shape in ((n,), (n, 1)):
            return values.reshape(n).copy()
    per_token = "" if name in PER_SEQUENCE else f", or one value a token as {layout.anchor} has"
    raise UsageError(f"write(): {name} is {describe(values)}; expected one value, or shape [{n}]{per_token}")


def _numeric(parts: list[NDArray[Any]]) -> bool:
    return all(part.dtype.kind in "biuf" for part in parts)


def _kind(values: HostValues) -> np.dtype[Any]:
    if not isinstance(values, list):
        return values.dtype
    # An empty list has no type of its own.
    return np.result_type(*({part.dtype for part in values if len(part)} or {np.dtype(np.float64)}))


def _unique(keys: Typed | None) -> None:
    if keys is None:
        return
    key, n = Counter(keys).most_common(1)[0] if len(keys) else (None, 0)
    if n > 1:
        raise UsageError(
            f"write(): seq_key names {n} sequences '{key}'; expected a name of its own for each sequence of a step "
            "(the prompt group goes into group_id; without seq_key the recorder names them)"
        )


def _step(step: Any) -> int:
    try:
        number = operator.index(step.item() if hasattr(step, "item") else step)
    except TypeError:
        raise UsageError(f"write(): step is {step!r}; expected a whole number") from None
    if not 0 <= number < 2**31:
        raise UsageError(f"write(): step is {number}; expected 0 or more, within int32")
    return number
