"""verl's TransferQueue batches: ``tq_batch.pt`` of ``skip.rollout_tq``, or of a hook with the same outer layout.

``torch.save`` of {tensordict, tags, keys, global_steps}. Token fields are jagged nested tensors without
padding; versions are in the tags, the prompt group is in the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, TokenBatch, Unit
from estr_diag.ingestion.align import Ints
from estr_diag.ingestion.field_errors import require, unequal
from estr_diag.ingestion.trainers.verl_dataproto import TENSORDICT_ALLOWED
from estr_diag.ingestion.trainers.verl_facts import MISSING, remarks, run_facts, steps
from estr_diag.ingestion.unpickle import Jagged, load_torch

TRANSFER_QUEUE = Layout(
    "transfer_queue",
    "torch.save of {tensordict, tags, keys, global_steps}: tq_batch.pt of skip.rollout_tq",
    (
        Field("keys", "list of str", "{uid}_{session}_{index}; the part before the last two _ is the group", "seq_key"),
        Field("tags", "list of dict", "per sequence; is_padding marks rows that only fill up the batch"),
        Field("global_steps", "int", "trainer step", "step", required=False),
        Field("responses", "int64, jagged", "response, tool tokens included", "token_id"),
        Field("response_mask", "int64, jagged", "1 where the model sampled, 0 on tool tokens", "loss_mask"),
        Field("rollout_log_probs", "float32, jagged", "inference engine; 0.0 on tool tokens", "logp_infer"),
        Field("old_log_probs", "float32, jagged", "training engine, before the update", "logp_train", required=False),
        Field("entropy", "float32, jagged", "training engine, full vocabulary", "entropy", required=False),
        Field("advantages", "float32, jagged", "per token", "advantage", required=False),
        Field("rm_scores", "float32, jagged", "reward, on the last response token", "reward", required=False),
        Field("prompts", "int64, jagged", "prompt; only its length is read", "prompt_len", required=False),
        Field("min_global_steps", "int in tags", "step of the oldest weights", "version_first", required=False),
        Field("max_global_steps", "int in tags", "step of the newest weights", "version_last", required=False),
    ),
)
_TOKEN_FIELDS = {
    f.name: str(f.canonical)
    for f in TRANSFER_QUEUE.fields
    if f.type.endswith("jagged") and f.canonical not in ("reward", "prompt_len")
}


def read_transfer_queue(unit: Unit) -> TokenBatch:
    """Read one ``tq_batch.pt``.

    Raises
    ------
    InputError
        Damaged, without a required field, or with token lists of unequal length.
    """
    path = unit.path
    payload = load_torch(path, TENSORDICT_ALLOWED)
    fields = payload.get("tensordict") if isinstance(payload, dict) else None
    if not isinstance(fields, dict):
        raise InputError("no TransferQueue batch in this file", path=path, expected="a dict with a tensordict")
    require(path, TRANSFER_QUEUE, {*payload, *fields}, hint=MISSING)
    keys = [str(key) for key in payload["keys"]]
    tags: list[Mapping[str, Any]] = [tag or {} for tag in payload["tags"]]
    if len(tags) != len(keys):
        raise InputError("a tag a key is missing", path=path, key="tags", found=len(tags), expected=len(keys))
    keep = np.array([not tag.get("is_padding") for tag in tags], dtype=bool)

    names = [name for name in _TOKEN_FIELDS if name in fields]
    columns, lengths = _columns(path, fields, names, keep)
    tokens: dict[str, Any] = {_TOKEN_FIELDS[name]: values for name, values in columns.items()}
    tokens["loss_mask"] = tokens["loss_mask"] != 0
    kept = np.flatnonzero(keep).tolist()
    step = payload.get("global_steps", unit.probe.step)
    sequences: dict[str, Sequence[Any]] = {
        "seq_key": [keys[i] for i in kept],
        "step": [step] * len(kept),
        "group_id": [keys[i].rsplit("_", 2)[0] for i in kept],
        "version_first": steps([tags[i].get("min_global_steps") for i in kept]),
        "version_last": steps([tags[i].get("max_global_steps") for i in kept]),
    }
    if isinstance(step, int):
        # A version is the step whose update made the weights: those that step s starts from are s - 1.
        sequences["trainer_version"] = [step - 1] * len(kept)
    if "prompts" in fields:
        sequences["prompt_len"] = _rows(path, "prompts", fields["prompts"], keep)[1].tolist()
    if "rm_scores" in fields:
        scores, per_row = _rows(path, "rm_scores", fields["rm_scores"], keep)
        row = np.repeat(np.arange(len(kept)), per_row)
        sequences["reward"] = np.bincount(row, scores, minlength=len(kept)).tolist()
    counts = Counter({"padding rows left out (is_padding)": int(np.count_nonzero(~keep))})
    return TokenBatch(lengths, tokens, sequences, run_facts(), +counts, remarks(tokens))


def _columns(
    path: Path, fields: Mapping[str, Any], names: Sequence[str], keep: NDArray[np.bool_]
) -> tuple[dict[str, NDArray[Any]], Ints]:
    """Return the flat token columns of the rows in `keep`, and their lengths."""
    columns: dict[str, NDArray[Any]] = {}
    _, expected = _rows(path, "responses", fields["responses"], keep)
    for name in names:
        columns[name], lengths = _rows(path, name, fields[name], keep)
        if (wrong := np.flatnonzero(lengths != expected)).size:
            first = int(wrong[0])
            raise unequal(
                path, int(np.flatnonzero(keep)[first]) + 1, name, int(lengths[first]), int(expected[first]),
                "Token fields hold the response only: pass log_probs through response_from_nested, as the trainer does",
            )  # fmt: skip
    return columns, expected


def _rows(path: Path, name: str, value: Any, keep: NDArray[np.bool_]) -> tuple[NDArray[Any], Ints]:
    """Return the flat values of the rows in `keep`, and how many each row has."""
    if isinstance(value, Jagged):
        flat, lengths = value.values, np.diff(value.offsets)
    elif isinstance(value, np.ndarray) and value.ndim == 2:
        # TransferQueue stacks a field densely when all its rows are equally long.
        flat, lengths = value.reshape(-1), np.full(len(value), value.shape[1], dtype=np.int64)
    else:
        shape = f"an array of shape {list(value.shape)}" if isinstance(value, np.ndarray) else "no tensor"
        raise InputError("not one list a sequence", path=path, key=name, found=shape, expected="a jagged tensor")
    if len(lengths) != len(keep) or lengths.sum() != len(flat) or (lengths < 0).any():
        raise InputError(
            "not one row a key", path=path, key=name, found=f"{len(lengths)} rows", expected=f"{len(keep)} whole rows"
        )
    return flat[np.repeat(keep, lengths)], lengths[keep]
