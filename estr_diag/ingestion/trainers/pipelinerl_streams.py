"""From lines of PipelineRL's streams to aligned tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estr_diag.errors import InputError
from estr_diag.ingestion import field_errors
from estr_diag.ingestion.adapter import Layout, RunFacts, TokenBatch
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.tensors import Tensors, joined, require_shape, token_names

_IGNORED_LABEL = -100
_DTYPES = {"BIGINT": np.int64, "FLOAT": np.float32}
_SCALARS: dict[str, Any] = {
    "BIGINT": int,
    "FLOAT": (int, float),
    "VARCHAR": (str, int),
    "BOOLEAN": bool,
    "JSON": Mapping,
}
_FINISH = {True: "finished", False: "unfinished"}
_FACTS = RunFacts(trainer="PipelineRL", version_unit="sample", version_granularity="sequence")
_AT_LAUNCH = "model_version is the one when the rollout was launched: updates in flight do not show"
_MINIMUM = (
    "model_version is the minimum over the sequences packed into a line: a bound for each of them and the version of "
    "no token; the actor stream has the version of each sequence"
)


def groups_batch(lines: Sequence[tuple[int, Any]], layout: Layout, path: Path) -> TokenBatch | None:
    """Read lines of the actor stream: each a list of records, each record one sequence.

    Parameters
    ----------
    lines
        (Line number, parsed line).
    layout
        The fields of a record.
    path
        The stream file, for names and messages.

    Raises
    ------
    InputError
        A record lacks a field, or has not one log-prob for each label.
    """
    records = [
        (f"{number}.{i}", number, record)
        for number, group in lines
        for i, record in enumerate(_group(group, path, number))
    ]
    if not records:
        return None
    full = joined([_record(record, layout, path, number) for _, number, record in records])
    response, prompt_len = full.cut_prompt(full["loss_mask"])
    given = [record for _, _, record in records]
    versions = [(record.get("metadata") or {}).get("model_version") for record in given]
    sequences: dict[str, Any] = {
        "seq_key": [f"{_stream(path)}:{name}" for name, _, _ in records],
        "step": [None] * len(given),
        "prompt_len": prompt_len,
        "group_id": [None if record.get("group_id") is None else str(record["group_id"]) for record in given],
        "reward": [record.get("reward") for record in given],
        "finish": [_FINISH.get(record.get("finished")) for record in given],
        "version_first": versions,
        "version_last": versions,
    }
    return TokenBatch(response.lengths, dict(response.columns), sequences, _FACTS, notes=(_AT_LAUNCH,))


def packed_batch(lines: Sequence[tuple[int, Any]], layout: Layout, path: Path) -> TokenBatch | None:
    """Read lines of the training_data stream: each several sequences in one row.

    Parameters
    ----------
    lines, layout, path
        As in `groups_batch`.

    Raises
    ------
    InputError
        A line lacks a field, its lists differ in length, or its boundaries do not cover the row.
    """
    counts: Counter[str] = Counter()
    parts: list[Ragged] = []
    sequences: dict[str, Any] = {"seq_key": [], "prompt_len": [], "version_first": []}
    for number, line in lines:
        if isinstance(line, Mapping) and line.get("sentinel"):
            counts["sentinel lines"] += 1
            continue
        part = _packed(line, layout, path, number)
        response, prompt_len = part.cut_prompt(part["loss_mask"])
        # What has no label trains nothing: padding, and examples that only fill up the batch.
        kept = np.flatnonzero(response.lengths)
        counts["packed sequences without a label"] += len(part) - len(kept)
        parts.append(Ragged(response.lengths[kept], response.columns))
        sequences["seq_key"] += [f"{_stream(path)}:{number}.{i}" for i in kept]
        sequences["prompt_len"] += prompt_len[kept].tolist()
        sequences["version_first"] += [line.get("model_version")] * len(kept)
    if not sequences["seq_key"]:
        return None
    full = joined(parts)
    tokens: dict[str, Any] = {name: values for name, values in full.columns.items() if name != "reward"}
    tokens["policy_version"] = np.ma.masked_array(np.zeros(len(full.row), dtype=np.int64), mask=True)
    sequences |= {"step": [None] * len(full), "version_last": sequences["version_first"]}
    if "reward" in full.columns:
        sequences["reward"] = full["reward"][full.starts]
    return TokenBatch(full.lengths, tokens, sequences, _FACTS, +counts, notes=(_MINIMUM,))


def _stream(path: Path) -> str:
    """Name the stream file by its folders: every stream has a file of the same name."""
    return "/".join([*path.parts[-4:-1], path.stem])


def _group(group: Any, path: Path, number: int) -> Sequence[Any]:
    if not isinstance(group, list):
        found = type(group).__name__
        raise InputError("not a group", path=path, line=number, found=found, expected="a list of records")
    return group


def _record(record: Any, layout: Layout, path: Path, number: int) -> Ragged:
    arrays = _arrays(record, layout, path, number)
    ids, logps = arrays["input_ids"], np.full(arrays["input_ids"].shape, np.nan, dtype=np.float32)
    require_shape(arrays, ["labels"], ids.shape, "one a token of 'input_ids'", path, number)
    sampled = arrays["labels"] != _IGNORED_LABEL
    # PipelineRL skips a log-prob that it cannot parse: what is left cannot be told apart.
    require_shape(arrays, ["logprobs"], (int(sampled.sum()),), "one a label that is not -100", path, number)
    logps[sampled] = arrays["logprobs"]
    return Ragged(np.array([len(ids)]), {"token_id": ids, "loss_mask": sampled, "logp_infer": logps})


def _packed(line: Any, layout: Layout, path: Path, number: int) -> Ragged:
    arrays = _arrays(line, layout, path, number)
    shape = arrays["input_ids"].shape
    require_shape(arrays, token_names(layout, "[][]"), shape, "the shape of 'input_ids'", path, number)
    lengths = np.full(shape[0], shape[1])
    if "seq_boundaries" in arrays:
        bounds = arrays["seq_boundaries"]
        lengths = np.diff(bounds)
        if shape[0] != 1 or not len(lengths) or bounds[0] != 0 or bounds[-1] != shape[1] or lengths.min() < 0:
            raise InputError(
                "boundaries that do not cover the row",
                path=path,
                line=number,
                key="seq_boundaries",
                found=f"{bounds.tolist()[:8]} for 'input_ids' of shape {list(shape)}",
                expected="from 0 to the length of one row, not falling",
                hint="A slice of a row (seq_parallel > 1) cuts sequences and cannot be read; name the actor stream",
            )
    flat = Ragged(lengths.astype(np.int64), {name: a.reshape(-1) for name, a in arrays.items() if a.ndim == 2})
    present = np.arange(len(flat.row)) < len(flat.row) - int(line.get("padding") or 0)
    if "attention_mask" in flat.columns:
        present &= flat["attention_mask"] != 0
    flat = flat.select(present)
    canonical = layout.columns(frozenset(flat.columns))
    columns = {name: flat[field] for name, field in canonical.items()}
    columns["loss_mask"] = flat["labels"] != _IGNORED_LABEL
    return _at_labels(Ragged(flat.lengths, columns))


def _at_labels(full: Ragged) -> Ragged:
    """Undo ``prepare_rl_fields``: it puts the log-probs of the labels at the end of the sequence, without gaps.

    That is their place in a response of one span. After a masked span inside the response they would be
    late, which shows as log-probs at positions that have no label.
    """
    sampled, logps = full["loss_mask"], full["logp_infer"]
    if not (logps[~sampled] != 0).any():
        return full
    labels = np.bincount(full.row[sampled], minlength=len(full))
    moved = np.zeros_like(logps)
    moved[sampled] = logps[full.position >= (full.lengths - labels)[full.row]]
    return full.with_columns(logp_infer=moved)


def _arrays(record: Any, layout: Layout, path: Path, number: int) -> Tensors:
    """Return the lists of a record as arrays of the declared type and dimension; check its other fields."""
    if not isinstance(record, Mapping):
        raise InputError("not a record", path=path, line=number, found=type(record).__name__, expected="an object")
    field_errors.require(path, layout, [name for name, value in record.items() if value is not None], record=number)
    arrays: Tensors = {}
    for field in layout.fields:
        value = record.get(field.name)
        if value is None:
            continue
        if not field.type.endswith("[]"):
            if not isinstance(value, _SCALARS[field.type]):
                raise InputError(
                    "wrong type",
                    path=path,
                    line=number,
                    key=field.name,
                    found=type(value).__name__,
                    expected=field.type,
                )
            continue
        dimensions = field.type.count("[]")
        try:
            array = np.array(value, dtype=_DTYPES[field.type.removesuffix("[]" * dimensions)])
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                "wrong type, or rows of unequal length",
                path=path,
                line=number,
                key=field.name,
                found=str(error),
                expected=field.type,
            ) from None
        if array.ndim != dimensions:
            raise InputError(
                "wrong type",
                path=path,
                line=number,
                key=field.name,
                found=f"{array.ndim} dimension(s)",
                expected=field.type,
            )
        arrays[field.name] = array
    return arrays
