"""Per-token columns of many sequences in flat form, and the moves that align them.

Trainers keep token columns padded left or right, one position early, with the prompt or without it.
Every such layout becomes a `Ragged`: flat arrays plus the length of each sequence. The moves below
are whole-array operations; no function here loops over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Flat token columns of S sequences.

    Parameters
    ----------
    lengths
        Tokens of each sequence, shape (S,).
    columns
        Name -> flat values, each of shape (sum of lengths,).
    """

    lengths: Ints
    columns: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, values in self.columns.items():
            if len(values) != total:
                raise ValueError(f"column '{name}' has {len(values)} values for {total} tokens")

    @classmethod
    def from_padded(cls, columns: Mapping[str, NDArray[Any]], present: Bools) -> Ragged:
        """Take the cells of [S, R] arrays where `present` is true, row by row."""
        return cls(present.sum(axis=1, dtype=np.int64), {name: values[present] for name, values in columns.items()})

    @classmethod
    def from_sequences(cls, sequences: Sequence[Mapping[str, NDArray[Any]]], names: Sequence[str]) -> Ragged:
        """Join per-sequence arrays; `names[0]` gives the lengths. The arrays of one sequence must be equally long."""
        lengths = np.array([len(s[names[0]]) for s in sequences], dtype=np.int64)
        if not sequences:
            return cls(lengths, {name: np.empty(0) for name in names})
        return cls(lengths, {name: np.concatenate([s[name] for s in sequences]) for name in names})

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    @cached_property
    def starts(self) -> Ints:
        """Index of the first token of each sequence."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def row(self) -> Ints:
        """Sequence index of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def position(self) -> Ints:
        """Position of each token in its sequence, 0-based."""
        return np.arange(len(self.row)) - self.starts[self.row]

    def spread(self, values: Any) -> NDArray[Any]:
        """Repeat one value per sequence over its tokens."""
        return np.repeat(np.asarray(values), self.lengths)

    def select(self, keep: Bools) -> Ragged:
        """Keep the tokens where `keep` is true; a sequence may end up empty."""
        lengths = np.bincount(self.row[keep], minlength=len(self.lengths)).astype(np.int64)
        return Ragged(lengths, {name: values[keep] for name, values in self.columns.items()})

    def first(self, flag: Bools) -> Ints:
        """Return, per sequence, the position of its first true flag, or its length when there is none."""
        where = self.lengths.copy()
        hits = np.flatnonzero(flag)
        # Written backwards, so that the first hit of a sequence is the one that stays.
        where[self.row[hits[::-1]]] = self.position[hits[::-1]]
        return where

    def cut_prompt(self, sampled: Bools) -> tuple[Ragged, Ints]:
        """Drop what comes before the first sampled token; return the rest and the prompt lengths."""
        prompt = self.first(sampled)
        return self.select(self.position >= prompt[self.row]), prompt

    def with_columns(self, **columns: NDArray[Any]) -> Ragged:
        """Return the same sequences with columns added or replaced."""
        return Ragged(self.lengths, {**self.columns, **columns})

    def delayed(self, name: str, by: int = 1) -> NDArray[Any]:
        """Return a column moved `by` positions later inside each sequence.

        For tensors that sit early, where entry t - 1 holds token t. Positions without a value become
        NaN in a float column and 0 in any other.
        """
        values = self.columns[name]
        moved = np.full_like(values, np.nan if np.issubdtype(values.dtype, np.floating) else 0)
        source = np.arange(len(values)) - by
        inside = (self.position >= by) & (self.position - by < self.lengths[self.row])
        moved[inside] = values[source[inside]]
        return moved


def first_and_last(ragged: Ragged, values: NDArray[Any], where: Bools) -> tuple[Any, Any]:
    """Return the first and last value per sequence among the tokens in `where`, as masked arrays."""
    hits = np.flatnonzero(where)
    first: Any = np.ma.masked_all(len(ragged), dtype=values.dtype)  # type: ignore[no-untyped-call]
    last: Any = first.copy()
    first[ragged.row[hits[::-1]]] = values[hits[::-1]]
    last[ragged.row[hits]] = values[hits]
    return first, last


def turns(ragged: Ragged, sampled: Bools) -> NDArray[np.int16]:
    """Number the turns of each sequence: turn k is the k-th run of sampled tokens and what follows it."""
    previous = np.concatenate([[False], sampled[:-1]])
    previous[ragged.starts[ragged.lengths > 0]] = False
    begun = np.cumsum(sampled & ~previous)
    before = np.concatenate([[0], begun])[ragged.starts]
    numbers: NDArray[np.int16] = np.maximum(begun - before[ragged.row] - 1, 0).astype(np.int16)
    return numbers
