"""Turn a batch that an adapter read into rows of the canonical tables."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.ingestion.adapter import TokenBatch
from estr_diag.ingestion.align import Ragged, first_and_last, turns
from estr_diag.ingestion.sentinels import clean_entropy, clean_logp
from estr_diag.schema import LOGP_COLUMNS, SEQUENCES, TOKENS, Table

_ENTROPY_COLUMNS = ("entropy", "collision")


@dataclass(frozen=True, slots=True)
class CanonicalRows:
    """Rows ready for the store, and the counts of values that were set to null, by reason."""

    tokens: pa.Table
    sequences: pa.Table
    counts: Counter[str]


def to_tables(batch: TokenBatch, *, first_seq: int, source_id: int, step: int | None) -> CanonicalRows:
    """Number, clean and complete a batch.

    Fills what follows from other columns: positions, turns (runs of the mask), first and last version,
    per-token versions of a sequence that one version generated, and the content hash.
    """
    ragged = Ragged(batch.lengths, batch.tokens)
    tokens: dict[str, Any] = dict(batch.tokens)
    sequences: dict[str, Any] = dict(batch.sequences)
    counts = Counter(batch.counts)
    if step is not None:
        sequences["step"] = [step] * len(ragged)

    sampled = _sampled(tokens)
    for name in LOGP_COLUMNS:
        if name in tokens:
            tokens[name], reasons = clean_logp(name, tokens[name], sampled)
            counts.update(reasons)
    for name in _ENTROPY_COLUMNS:
        if name in tokens:
            tokens[name], reasons = clean_entropy(name, tokens[name], sampled)
            counts.update(reasons)

    tokens["seq_id"] = first_seq + ragged.row
    tokens["pos"] = ragged.position
    if sampled is not None and "turn" not in tokens:
        tokens["turn"] = turns(ragged, sampled)
    _versions(ragged, tokens, sequences, sampled)
    for name in ("step", "trainer_version"):
        if name in sequences:
            tokens.setdefault(name, _spread(ragged, sequences[name]))
    if "prompt_len" in sequences:
        tokens["abs_pos"] = _spread(ragged, sequences["prompt_len"]) + ragged.position
    if "advantage" in sequences and "advantage" not in tokens:
        tokens["advantage"] = _spread(ragged, sequences["advantage"])

    sequences["seq_id"] = first_seq + np.arange(len(ragged))
    sequences["source_id"] = np.full(len(ragged), source_id)
    sequences["n_tokens"] = ragged.lengths
    sequences["content_hash"] = _content_hashes(ragged, tokens)
    return CanonicalRows(_table(TOKENS, tokens), _table(SEQUENCES, sequences), counts)


def _sampled(tokens: dict[str, Any]) -> NDArray[np.bool_] | None:
    if "loss_mask" not in tokens:
        return None
    return np.asarray(np.ma.filled(np.ma.asarray(tokens["loss_mask"]), False), dtype=bool)


def _versions(
    ragged: Ragged, tokens: dict[str, Any], sequences: dict[str, Any], sampled: NDArray[np.bool_] | None
) -> None:
    where = np.ones(len(ragged.row), dtype=bool) if sampled is None else sampled
    if "policy_version" in tokens:
        known = np.ma.asarray(tokens["policy_version"])
        first, last = first_and_last(ragged, known.filled(0), where & ~np.ma.getmaskarray(known))
        sequences.setdefault("version_first", first)
        sequences.setdefault("version_last", last)
    elif "version_first" in sequences and "version_last" in sequences:
        first, last = _masked(sequences["version_first"]), _masked(sequences["version_last"])
        # With one version for the whole sequence every token has it; between two, where the switch
        # happened is not known, and a guess would put tokens at the wrong lag.
        one = np.ma.masked_where(
            np.ma.getmaskarray(first) | np.ma.getmaskarray(last) | (first.data != last.data), first.data
        )
        tokens["policy_version"] = np.ma.masked_array(ragged.spread(one.data), ragged.spread(np.ma.getmaskarray(one)))


def _masked(values: Any) -> np.ma.MaskedArray[Any, np.dtype[Any]]:
    if isinstance(values, np.ma.MaskedArray):
        return values
    listed = list(values)
    gaps = np.array([v is None for v in listed], dtype=bool)
    return np.ma.masked_array(np.array([0 if v is None else v for v in listed]), gaps)


def _spread(ragged: Ragged, values: Any) -> Any:
    masked = _masked(values)
    return np.ma.masked_array(ragged.spread(masked.data), ragged.spread(np.ma.getmaskarray(masked)))


def _content_hashes(ragged: Ragged, tokens: dict[str, Any]) -> NDArray[np.uint64]:
    parts = [
        np.ascontiguousarray(np.ma.filled(np.ma.asarray(tokens[name]), 0), dtype=kind)
        for name, kind in (("token_id", "<i4"), ("logp_infer", "<f4"))
        if name in tokens
    ]
    hashes = np.empty(len(ragged), dtype=np.uint64)
    ends = ragged.starts + ragged.lengths
    for i, (start, end) in enumerate(zip(ragged.starts.tolist(), ends.tolist(), strict=True)):
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(part[start:end].tobytes())
        hashes[i] = int.from_bytes(digest.digest(), "little")
    return hashes


def _table(table: Table, columns: dict[str, Any]) -> pa.Table:
    schema = table.arrow()
    arrays, kept = [], []
    for column in schema:
        if column.name in columns:
            arrays.append(_array(columns[column.name], column.type))
            kept.append(column)
    return pa.Table.from_arrays(arrays, schema=pa.schema(kept))


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(kind)
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, mask=np.ma.getmaskarray(values)).cast(kind)
    if isinstance(values, np.ndarray):
        # In a float column NaN is how adapters write "missing".
        return pa.array(values, from_pandas=np.issubdtype(values.dtype, np.floating)).cast(kind)
    return pa.array(list(values), type=kind)
