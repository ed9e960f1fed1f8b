"""How a trainer's batch is laid out, and the cut of its columns into response tokens of one sequence after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import UsageError
from estr_diag.recorder.host import Array, HostValues, describe

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where the response tokens of a batch are.

    Attributes
    ----------
    anchor
        The column that the others are compared with.
    shape
        Of a token column: (B, T) padded, (N,) packed, (B,) a list of sequences.
    lengths
        Response tokens of each sequence, shape (B,).
    starts
        Padded: column of the first response token of each row, shape (B,). None for the other layouts.
    """

    anchor: str
    shape: tuple[int, ...]
    lengths: Ints
    starts: Ints | None = None
    is_list: bool = False

    def is_per_token(self, values: HostValues) -> bool:
        """Whether values have the shape of a token column."""
        return isinstance(values, list) or (not self.is_list and _packed_row(self, values).shape == self.shape)

    def flat(self, name: str, values: HostValues, kind: np.dtype[Any]) -> Array:
        """Return a copy of the response tokens, one sequence after another, shape (sum of lengths,).

        Raises
        ------
        UsageError
            The column has another shape than the anchor.
        """
        if isinstance(values, list):
            return self._joined(name, values, kind)
        row = _packed_row(self, values)
        if self.is_list or row.shape != self.shape:
            raise UsageError(f"write(): {name} is {describe(values)}; expected {self._expected()}")
        if self.starts is None:
            return row.astype(kind)
        # Row by row, because a row's tokens stand together: twice as fast as a mask over the padded array, and
        # the change of type costs no second pass.
        ends = (self.starts + self.lengths).tolist()
        parts = [cells[a:b] for cells, a, b in zip(row, self.starts.tolist(), ends, strict=True)]
        return _concatenated(parts, kind)

    def _joined(self, name: str, values: list[Array], kind: np.dtype[Any]) -> Array:
        if not self.is_list:
            raise UsageError(f"write(): {name} is {describe(values)}; expected {self._expected()}")
        found = np.array([len(part) for part in values])
        if len(found) != len(self.lengths):
            raise UsageError(f"write(): {name} is {describe(values)}; expected {self._expected()}")
        if np.any(found != self.lengths):
            at = int(np.flatnonzero(found != self.lengths)[0])
            raise UsageError(
                f"write(): {name} has {found[at]} values in sequence {at}; expected {self.lengths[at]}, as {self.anchor} has"
            )
        return _concatenated(values, kind)

    def _expected(self) -> str:
        if self.is_list:
            return f"a list of {len(self.lengths)} sequences, as {self.anchor} is"
        return f"shape {list(self.shape)}, as {self.anchor} has"


def layout_of(columns: Mapping[str, HostValues], anchor: str, cuts: Mapping[str, HostValues]) -> Layout:
    """Work out the layout of a batch from one of its token columns and the arguments that cut it.

    Parameters
    ----------
    columns
        The batch on the host.
    anchor
        Name of a column with one value a token.
    cuts
        Those of ``seq_lens``, ``cu_seqlens``, ``response_mask`` and ``starts`` that were given.

    Raises
    ------
    UsageError
        The arguments do not say where sequences end, or contradict the shape.
    """
    values = columns[anchor]
    if isinstance(values, list):
        _refuse(cuts, "a list has one item a sequence", "cu_seqlens", "response_mask", "starts")
        lengths = np.array([len(part) for part in values], dtype=np.int64)
        stated = _ints("seq_lens", cuts["seq_lens"], (len(values),)) if "seq_lens" in cuts else lengths
        if np.any(stated != lengths):
            raise UsageError(f"write(): seq_lens does not agree with the lengths of the lists of {anchor}")
        return Layout(anchor, (len(values),), lengths, is_list=True)
    if values.ndim == 1 or (values.ndim == 2 and len(values) == 1 and "cu_seqlens" in cuts):
        _refuse(cuts, "packed tensors have no padding", "response_mask", "starts")
        n = values.size
        return Layout(anchor, (n,), _packed_lengths(anchor, n, cuts))
    if values.ndim != 2:
        raise UsageError(
            f"write(): {anchor} is {describe(values)}; expected [B, T] (padded), [N] (packed) or a list of sequences"
        )
    _refuse(cuts, f"{anchor} is padded: {describe(values)}", "cu_seqlens")
    return _padded(anchor, (values.shape[0], values.shape[1]), columns, cuts)


def _packed_lengths(anchor: str, n: int, cuts: Mapping[str, HostValues]) -> Ints:
    if "cu_seqlens" in cuts and "seq_lens" in cuts:
        raise UsageError("write(): cu_seqlens and seq_lens say the same; pass one of them")
    if "cu_seqlens" in cuts:
        ends = _ints("cu_seqlens", cuts["cu_seqlens"], None)
        if not len(ends) or ends[0] != 0:
            raise UsageError("write(): cu_seqlens has to begin with 0: it has one entry more than there are sequences")
        lengths, name = np.diff(ends), "cu_seqlens"
    elif "seq_lens" in cuts:
        lengths, name = _ints("seq_lens", cuts["seq_lens"], None), "seq_lens"
    else:
        raise UsageError(f"write(): {anchor} is packed (shape [{n}]); pass cu_seqlens or seq_lens, where sequences end")
    if np.any(lengths < 0) or lengths.sum() != n:
        raise UsageError(
            f"write(): {name} ends at token {lengths.sum()}, and {anchor} has {n}; cut padding off the end of packed tensors"
        )
    return lengths


def _padded(
    anchor: str, shape: tuple[int, int], columns: Mapping[str, HostValues], cuts: Mapping[str, HostValues]
) -> Layout:
    rows, width = shape
    starts = _ints("starts", cuts["starts"], (rows,)) if "starts" in cuts else np.zeros(rows, dtype=np.int64)
    if "seq_lens" in cuts:
        lengths = _ints("seq_lens", cuts["seq_lens"], (rows,))
    else:
        name = "response_mask" if "response_mask" in cuts else "loss_mask"
        mask = cuts.get(name, columns.get(name))
        if isinstance(mask, list) or mask is None or mask.shape != shape:
            found = "" if mask is None else f"{name} is {describe(mask)}; "
            raise UsageError(
                f"write(): {found}where the padding begins is not known: pass seq_lens [{rows}], "
                f"or a response_mask or loss_mask of shape {list(shape)}, as {anchor} has"
            )
        # Through the last token of the mask: holes in it are tool tokens, not padding.
        held = np.asarray(mask) != 0
        last = np.where(held.any(axis=1), width - np.argmax(held[:, ::-1], axis=1), starts)
        lengths = np.maximum(last - starts, 0)
    if np.any((starts < 0) | (lengths < 0) | (starts + lengths > width)):
        at = int(np.flatnonzero((starts < 0) | (lengths < 0) | (starts + lengths > width))[0])
        raise UsageError(
            f"write(): row {at} would have tokens {starts[at]} to {starts[at] + lengths[at]}; {anchor} has {width} columns"
        )
    return Layout(anchor, shape, lengths, starts)


def _ints(name: str, values: HostValues, shape: tuple[int] | None) -> Ints:
    if (
        isinstance(values, list)
        or values.ndim != 1
        or values.dtype.kind not in "iu"
        or shape not in (None, values.shape)
    ):
        wanted = "[B]" if shape is None else f"{list(shape)}"
        raise UsageError(f"write(): {name} is {describe(values)}; expected whole numbers of shape {wanted}")
    return values.astype(np.int64)


def _refuse(cuts: Mapping[str, HostValues], why: str, *names: str) -> None:
    for name in names:
        if name in cuts:
            raise UsageError(f"write(): {name} has no meaning here: {why}")


def _packed_row(layout: Layout, values: Array) -> Array:
    """Return a packed column without its leading axis of one, which many trainers keep."""
    return values[0] if len(layout.shape) == 1 and values.ndim == 2 and len(values) == 1 else values


def _concatenated(parts: list[Array], kind: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return np.concatenate(parts, dtype=kind, casting="unsafe") if parts else np.empty(0, dtype=kind)
