"""verl's ``DataProto`` batches (``.dp``), read without verl, torch or tensordict.

The pickle holds (tensors, other per-sequence values, facts of the batch). The tensors are in one of two
forms: the bytes of a ``torch.save`` archive with one flat buffer and a table of what lies where, or (with
``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``) a dict of typed byte arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, TokenBatch, Unit
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.field_errors import require
from estr_diag.ingestion.trainers.verl_facts import MISSING, remarks, run_facts, steps
from estr_diag.ingestion.unpickle import Allowed, Inert, load_pickle, load_torch_bytes

DATAPROTO = Layout(
    "dataproto",
    "pickle of a DataProto: batch.save_to_disk(path), or gen_batch.dp of skip.rollout",
    (
        Field("responses", "int64 [B, R]", "response, tool tokens included; right padded", "token_id"),
        Field("attention_mask", "int64 [B, P+R]", "1 on real tokens; its last R columns are the response"),
        Field("response_mask", "int64 [B, R]", "1 where the model sampled; tool tokens and padding 0", "loss_mask"),
        Field("rollout_log_probs", "float32 [B, R]", "inference engine; 0.0 on tools and padding", "logp_infer"),
        Field("old_log_probs", "float32 [B, R]", "training engine, before the update", "logp_train", required=False),
        Field("entropys", "float32 [B, R]", "training engine, full vocabulary", "entropy", required=False),
        Field("entropy", "float32 [B, R]", "the same, as V1 calls it", "entropy", required=False),
        Field("advantages", "float32 [B, R]", "per token", "advantage", required=False),
        Field("rm_scores", "float32 [B, R]", "reward, on the last response token", "reward", required=False),
        Field("token_level_scores", "float32 [B, R]", "the same, after the reward manager", "reward", required=False),
        Field("uid", "object [B]", "prompt group", "group_id", required=False),
        Field("min_global_steps", "object [B]", "step of the oldest weights; None: unknown", "version_first", False),
        Field("max_global_steps", "object [B]", "step of the newest weights; None: unknown", "version_last", False),
    ),
)
"""Entries of the batch, of non_tensor_batch and of meta_info that are read; B sequences, prompt width P."""

_TOKEN_FIELDS = {
    f.name: f.canonical
    for f in DATAPROTO.fields
    if f.canonical in ("token_id", "loss_mask", "logp_infer", "logp_train", "entropy", "advantage")
}
_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip


class _DataProto:
    """Stand-in for verl's class; keeps the state that was pickled."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _consolidated(metadata: Mapping[str, Any], storage: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Stand-in for tensordict's rebuild function: named pieces of one flat buffer."""
    tensors: dict[str, NDArray[Any]] = {}
    # tensordict once wrote the device as third entry of a leaf; the last three have stayed.
    for name, (dtype, shape, *_, start, stop, _pad) in metadata["leaves"].items():
        _put(tensors, name, dtype, shape, storage[start:stop])
    return tensors


def _make_tensordict(_cls: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Stand-in for tensordict's constructor: its entries by name."""
    return dict(state["_tensordict"])


TENSORDICT_ALLOWED: Allowed = {
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): _consolidated,
    ("tensordict._reductions", "_make_td"): _make_tensordict,
    ("tensordict._td", "TensorDict"): Inert,
    ("tensordict.tensorclass", "NonTensorStack"): Inert,
    ("tensordict.tensorclass", "NonTensorData"): Inert,
}


def read_dataproto(unit: Unit) -> TokenBatch:
    """Read one ``.dp`` file.

    Raises
    ------
    InputError
        Damaged, without a required field, or with tensors whose shapes contradict each other.
    """
    path = unit.path
    proto = load_pickle(path, {("verl.protocol", "DataProto"): _DataProto})
    state = proto.state if isinstance(proto, _DataProto) else None
    if not (isinstance(state, tuple) and len(state) == 3):
        raise InputError("no verl batch in this pickle", path=path, found=type(proto).__name__, expected="a DataProto")
    tensors, others, meta = _tensors(state[0], path), state[1] or {}, state[2] or {}
    require(path, DATAPROTO, tensors.keys(), hint=MISSING)
    _check_shapes(path, tensors)

    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"] != 0
    prompt, response = attended[:, : attended.shape[1] - width], attended[:, attended.shape[1] - width :]
    ragged = Ragged.from_padded({name: tensors[name] for name in _TOKEN_FIELDS if name in tensors}, response)
    tokens: dict[str, Any] = {str(_TOKEN_FIELDS[name]): values for name, values in ragged.columns.items()}
    tokens["loss_mask"] = tokens["loss_mask"] != 0

    step = unit.probe.step if unit.probe.step is not None else meta.get("global_steps")
    rows = len(ragged)
    sequences: dict[str, Sequence[Any]] = {
        # The batch has no name for a row; the row number is the same however often the batch is saved.
        "seq_key": [f"row{i}" for i in range(rows)],
        "step": [step] * rows,
        "prompt_len": prompt.sum(axis=1).tolist(),
    }
    if isinstance(step, int):
        # A version is the step whose update made the weights: those that step s starts from are s - 1.
        sequences["trainer_version"] = [step - 1] * rows
    if (scores := next((tensors[n] for n in ("token_level_scores", "rm_scores") if n in tensors), None)) is not None:
        sequences["reward"] = scores.sum(axis=1, dtype=np.float64).tolist()
    for column, name in (("version_first", "min_global_steps"), ("version_last", "max_global_steps")):
        if name in others:
            sequences[column] = steps(_per_row(path, others, name, rows))
    if "uid" in others:
        sequences["group_id"] = [None if u is None else str(u) for u in _per_row(path, others, "uid", rows)]
    facts = run_facts(meta.get("temperature"))
    return TokenBatch(ragged.lengths, tokens, sequences, facts, Counter(), remarks(tokens))


def _tensors(batch: Any, path: Path) -> dict[str, NDArray[Any]]:
    if isinstance(batch, bytes):
        found = load_torch_bytes(batch, path, TENSORDICT_ALLOWED)
        return {k: v for k, v in found.items() if isinstance(v, np.ndarray)} if isinstance(found, dict) else {}
    if not (isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict)):
        return {}
    tensors: dict[str, NDArray[Any]] = {}
    for name, encoded in batch[2].items():
        try:
            if len(encoded) == 3:  # nested tensors have two entries; no field that is read here is one
                _put(tensors, name, *encoded)
        except (TypeError, ValueError) as error:
            raise InputError("this file is damaged", path=path, key=name, found=str(error)) from None
    return tensors


def _put(tensors: dict[str, NDArray[Any]], name: str, dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> None:
    """Add the tensor in `raw`; one of a type that NumPy lacks (float8) is no field that is read, and left out."""
    kind = dtype.removeprefix("torch.")
    if kind not in _DTYPES:
        return
    values = np.asarray(raw).view(_DTYPES[kind])[: math.prod(shape)].reshape(tuple(shape))
    if kind == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    tensors[name] = values


def _check_shapes(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    expected = tensors["responses"].shape
    masks = tensors["attention_mask"].shape
    wrong = [(n, tensors[n].shape, expected) for n in _TOKEN_FIELDS if n in tensors and tensors[n].shape != expected]
    if len(expected) != 2 or len(masks) != 2 or masks[0] != expected[0] or masks[1] < expected[1]:
        wrong = [("attention_mask", masks, ("B", "P+R"))]
    for name, found, shape in wrong:
        raise InputError(
            "tensors of one batch do not fit together",
            path=path,
            key=name,
            found=f"shape {list(found)} beside responses of shape {list(expected)}",
            expected=f"shape {list(shape)}",
            hint="Save the batch with every tensor padded to data.max_response_length, as DataProto holds it",
        )


def _per_row(path: Path, others: Mapping[str, Any], name: str, rows: int) -> Sequence[Any]:
    values = np.asarray(others[name], dtype=object).tolist()
    if not isinstance(values, list) or len(values) != rows:
        raise InputError(
            "a value a sequence is missing", path=path, key=name, found=f"{np.size(others[name])} values", expected=rows
        )
    return values
