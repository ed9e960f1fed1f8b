"""From the sequences of a table to a batch of canonical columns: order, shifts, and one value a sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import RunFacts, TokenBatch
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.generic.source import Part, Source
from estr_diag.schema import SEQUENCE_COLUMNS_IN_LOG, TOKENS

_TOKEN_COLUMNS = tuple(name for name in TOKENS.names if name not in ("seq_id", "pos", "step"))
_PER_SEQUENCE = (*SEQUENCE_COLUMNS_IN_LOG, "step")
_OFTEN_PER_SEQUENCE = ("trainer_version", "advantage")
"""Token columns that are kept for the sequence as well, where all of its tokens have the same value."""

_VERSIONS = ("policy_version", "trainer_version", "version_first", "version_last")
_NO_VERSION = -1
"""AReaL and others write this where no weights generated the token."""


@dataclass(frozen=True)
class Assembly:
    """What is the same for every batch of a table."""

    source: Source
    facts: RunFacts
    notes: tuple[str, ...]
    all_sampled: bool
    step: int | None

    def batch(self, part: Part) -> TokenBatch:
        """Return the canonical columns of some sequences.

        Raises
        ------
        InputError
            A position is there twice, is missing, or lies before the first.
        """
        counts: Counter[str] = Counter()
        part = ordered(self.source, part, counts)
        ragged = part.ragged
        shifts = self.source.mapping.shift
        tokens: dict[str, Any] = {
            name: shifted(ragged, name, shifts[name]) if shifts.get(name) else ragged[name]
            for name in _TOKEN_COLUMNS
            if name in ragged.columns
        }
        if "loss_mask" not in tokens and self.all_sampled:
            tokens["loss_mask"] = pa.array(np.ones(len(ragged.row), dtype=bool))
        sampled = tokens["loss_mask"].fill_null(False)
        counts["loss_mask: null, taken as not sampled"] = tokens["loss_mask"].null_count
        for name in _VERSIONS:
            if name in tokens:
                tokens[name] = _known_versions(name, tokens[name], sampled, counts)
        sequences = self._sequences(part, counts)
        kept = {name: _plain(values) for name, values in tokens.items()}
        return TokenBatch(ragged.lengths, kept, sequences, self.facts, +counts, self.notes)

    def _sequences(self, part: Part, counts: Counter[str]) -> dict[str, Sequence[Any]]:
        found = dict(part.sequences)
        for name in (*_PER_SEQUENCE, *_OFTEN_PER_SEQUENCE):
            if name in part.ragged.columns:
                found[name], differing = one_value(part.ragged, part.ragged[name])
                if name in _PER_SEQUENCE:
                    counts[f"{name}: differs within a sequence, left out there"] = differing
        if "policy_version" in found:
            version = found.pop("policy_version")
            found.setdefault("version_first", version)
            found.setdefault("version_last", version)
        for name in _VERSIONS:
            if name in found:
                found[name] = _known_versions(name, found[name], None, counts)
        sequences = {name: values.to_pylist() for name, values in found.items()}
        names = sequences.pop("seq_id", None) or self._record_names(part)
        keys = sequences.get("seq_key", [None] * len(names))
        sequences["seq_key"] = [str(name) if key is None else key for key, name in zip(keys, names, strict=True)]
        if "step" not in sequences and self.step is not None:
            sequences["step"] = [self.step] * len(names)
        return sequences

    def _record_names(self, part: Part) -> list[str]:
        path = self.source.table.path
        prefix = "" if path is None else f"{path.name.split('.')[0]}:"
        return [f"{prefix}{record}" for record in part.records.tolist()]


def ordered(source: Source, part: Part, counts: Counter[str]) -> Part:
    """Put the tokens of each sequence in the order of ``pos``, and count positions that have no token."""
    ragged = part.ragged
    if "pos" not in ragged.columns:
        return part
    values: Any = ragged["pos"]
    base = source.mapping.pos_base
    if values.null_count:
        at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise _bad_position(source, part, at, "no pos", "null")
    pos = values.to_numpy().astype(np.int64)
    inside = ragged.row[1:] == ragged.row[:-1]
    if np.any(inside & (np.diff(pos) < 0)):
        order = np.lexsort((pos, ragged.row))
        pos = pos[order]
        part = replace(part, ragged=_taken(ragged, pa.array(order)))
        ragged = part.ragged
    twice = np.flatnonzero(inside & (np.diff(pos) == 0))
    if len(twice):
        at = int(twice[0]) + 1
        one, other = sorted(part.rows[at - 1 : at + 1].tolist())
        raise _bad_position(source, part, at, f"pos {pos[at]} is there twice", f"it in row {one} and in row {other}")
    if len(pos) and pos.min() < base:
        at = int(np.flatnonzero(pos < base)[0])
        raise _bad_position(source, part, at, f"pos {pos[at]} is before the first", f"{pos[at]} with pos_base = {base}")
    held = ragged.lengths > 0
    last = pos[(ragged.starts + ragged.lengths - 1)[held]]
    counts["pos: positions without a token, numbered through"] = int(np.sum(last - base + 1 - ragged.lengths[held]))
    return part


def _bad_position(source: Source, part: Part, at: int, problem: str, found: str) -> InputError:
    row = int(part.rows[at])
    sequence = part.sequences["seq_id"][int(part.ragged.row[at])] if "seq_id" in part.sequences else f"of row {row}"
    return InputError(
        f"sequence '{sequence}': {problem}",
        path=source.table.place,
        line=source.table.line(row),
        key=source.columns["pos"],
        found=found,
        expected=f"each position once, from {source.mapping.pos_base}",
    )


def shifted(ragged: Ragged, name: str, by: int) -> pa.Array:
    """Return a column moved `by` positions later in each sequence; positions without a value are null."""
    index = Ragged(ragged.lengths, {name: np.arange(len(ragged.row), dtype=np.float64)}).delayed(name, by)
    gaps = np.isnan(index)
    return ragged[name].take(pa.array(np.where(gaps, 0, index).astype(np.int64), mask=gaps))


def one_value(ragged: Ragged, values: pa.Array) -> tuple[pa.Array, int]:
    """Return the value that a column repeats on the tokens of each sequence, and for how many it differs.

    Tokens without a value do not count; where two values differ there is none for the sequence.
    """
    encoded = values.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    held = np.flatnonzero(codes >= 0)
    found = np.full(len(ragged), -1, dtype=np.int64)
    # Written backwards, so that the first value of a sequence is the one that stays.
    found[ragged.row[held[::-1]]] = codes[held[::-1]]
    differs = np.zeros(len(ragged), dtype=bool)
    differs[ragged.row[held][codes[held] != found[ragged.row[held]]]] = True
    missing = differs | (found < 0)
    index = pa.array(np.where(missing, 0, found), mask=missing)
    return encoded.dictionary.take(index), int(np.count_nonzero(differs))


def _taken(ragged: Ragged, order: pa.Array) -> Ragged:
    columns: dict[str, Any] = {}
    for name, values in ragged.columns.items():
        columns[name] = values[order.to_numpy()] if isinstance(values, np.ndarray) else values.take(order)
    return Ragged(ragged.lengths, columns)


def _known_versions(name: str, values: pa.Array, sampled: pa.Array | None, counts: Counter[str]) -> pa.Array:
    none = pc.equal(values, _NO_VERSION).fill_null(False)
    counted = none if sampled is None else pc.and_(none, sampled)
    counts[f"{name}: -1, taken as missing"] += pc.sum(counted).as_py() or 0
    return pc.if_else(none, None, values)


def _plain(values: pa.Array) -> Any:
    """Return NumPy values: NaN for a missing float, a mask for anything else; text stays Arrow."""
    if pa.types.is_string(values.type):
        return values
    if pa.types.is_floating(values.type) or not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    filled = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return np.ma.masked_array(filled.to_numpy(zero_copy_only=False), missing)
