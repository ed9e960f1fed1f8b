"""SkyRL: ``global_step_{N}_training_input.pkl``, a pickled TrainingInputBatch (``trainer.dump_data_batch=true``).

The pickle's state holds every tensor as raw bytes, so it is read without SkyRL. Until 2026-03 each
tensor was pickled a second time, as an item of the dict: the state is used and the items are ignored.
Response tensors are right-aligned since 2026-03-18 and left-aligned before. In both layouts the last R
columns of ``sequences`` are their tokens; ``response_mask`` tells the two apart and says which are real.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.tensors import Tensors, require_shape, take, token_names
from estr_diag.ingestion.unpickle import Allowed, load_pickle, load_torch_bytes

TRAINING_INPUT = Layout(
    "training_input",
    "dumped_data/global_step_{N}_training_input.pkl: pickled TrainingInputBatch",
    (
        Field("sequences", "int64 [B,S]", "prompt and response; its last R columns are the response", "token_id"),
        Field("attention_mask", "int64 [B,S]", "1 on real tokens"),
        Field("response_mask", "int64 [B,R]", "1 on response tokens, tool tokens included"),
        Field("loss_mask", "float32 [B,R]", "not 0 where the model sampled", "loss_mask"),
        Field("rollout_logprobs", "float32 [B,R]", "inference engine; -9999.0 where it gave none", "logp_infer"),
        Field("action_log_probs", "float32 [B,R]", "training engine before the update", "logp_train", required=False),
        Field("advantages", "float32 [B,R]", "per token", "advantage", required=False),
    ),
)

_RESPONSE = token_names(TRAINING_INPUT, "[B,R]")
_STEP = re.compile(r"global_step_(\d+)")


class _Batch:
    """Stand-in for TrainingInputBatch: keeps the state and ignores the items."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _rebuild(_cls: Any, state: Any) -> _Batch:
    batch = _Batch()
    batch.state = state
    return batch


# The package moved from skyrl_train to skyrl.backends.skyrl_train in 2026-02/03; the pickle names either.
_ALLOWED: Allowed = {
    (f"{package}.training_batch", name): stand_in
    for package in ("skyrl.backends.skyrl_train", "skyrl_train")
    for name, stand_in in (("TrainingInputBatch", _Batch), ("_rebuild_tensor_batch", _rebuild))
}


class SkyRLAdapter:
    """Reads the dumped training input of either layout."""

    name: ClassVar[str] = "skyrl"
    title: ClassVar[str] = "SkyRL"
    layouts: ClassVar[tuple[Layout, ...]] = (TRAINING_INPUT,)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "choose a loss that uses the old policy, so that its forward pass is run",
        "entropy": "SkyRL keeps no entropy by token; add it to the TrainingInputBatch before dump_data",
        "policy_version": "add metadata['weight_version'] to the batch before dump_data",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise a pickle that names TrainingInputBatch and its module."""
        if head.kind != "pickle":
            return None
        words = frozenset(head.pickle.strings) | frozenset(head.pickle.globals)
        parts = ("TrainingInputBatch", "skyrl_train")
        if not all(any(part in word for word in words) for part in parts):
            return None
        step = _STEP.search(head.path.name)
        return Probe(
            self.name,
            head.path,
            TRAINING_INPUT.name,
            why="pickle of skyrl_train's TrainingInputBatch",
            columns=TRAINING_INPUT.columns(words),
            step=int(step[1]) if step else None,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file as one batch."""
        batch = load_pickle(unit.path, _ALLOWED)
        state = getattr(batch, "state", None)
        if not isinstance(state, Mapping) or not isinstance(state.get("batch_dict"), Mapping):
            raise InputError(
                "not a SkyRL training batch", path=unit.path, key="batch_dict", found="no such key in the state"
            )
        # Only declared fields are decoded: others may be lists of pixels or expert indices.
        names = [f.name for f in TRAINING_INPUT.fields]
        record = {name: _decode(state["batch_dict"].get(name), name, unit.path) for name in names}
        tensors = take(record, TRAINING_INPUT, unit.path)
        metadata = state.get("metadata")
        yield _batch(unit, tensors, metadata if isinstance(metadata, Mapping) else {})


def _decode(value: Any, name: str, path: Path) -> NDArray[Any] | None:
    if value is None:
        return None
    try:
        if value.get("format") == "torch":  # a type NumPy lacks, such as bfloat16
            return np.asarray(load_torch_bytes(value["data"], path))
        return np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            "not a serialised tensor",
            path=path,
            key=name,
            found=f"{type(error).__name__}: {error}",
            expected="data, shape and dtype that fit together",
        ) from None


def _batch(unit: Unit, tensors: Tensors, metadata: Mapping[Any, Any]) -> TokenBatch:
    path = unit.path
    shape, response_shape = tensors["sequences"].shape, tensors["response_mask"].shape
    if len(shape) != 2 or len(response_shape) != 2 or response_shape[0] != shape[0] or response_shape[1] > shape[1]:
        raise InputError(
            "tensors of unequal length",
            path=path,
            key="response_mask",
            found=f"shape {list(response_shape)} of 'response_mask' and {list(shape)} of 'sequences'",
            expected="[B,R] and [B,S], R at most S",
        )
    require_shape(tensors, ["attention_mask"], shape, "the shape of 'sequences'", path)
    require_shape(tensors, _RESPONSE, response_shape, "the shape of 'response_mask'", path)
    real, dropped = _real_rows(tensors, metadata)
    tensors = {name: values[:real] for name, values in tensors.items()}
    present = tensors["response_mask"] != 0
    side = _padded_side(present, path)
    tensors["sequences"] = tensors["sequences"][:, shape[1] - response_shape[1] :]
    columns = {name: tensors[name] for name in ("sequences", *_RESPONSE) if name in tensors}
    response = Ragged.from_padded(columns, present)
    canonical = TRAINING_INPUT.columns(frozenset(response.columns))
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items()}
    tokens["loss_mask"] = tokens["loss_mask"] != 0
    stated = metadata.get("global_step")
    sequences: dict[str, Any] = {
        "seq_key": [f"{path.stem}:{row}" for row in range(real)],
        "step": [stated if isinstance(stated, int) else unit.probe.step] * real,
        "prompt_len": tensors["attention_mask"].sum(axis=1, dtype=np.int64) - response.lengths,
    }
    facts = RunFacts(trainer="SkyRL", train_logp="proximal" if "action_log_probs" in tensors else None)
    notes = [f"responses are {side} padded" + (" (the layout before 2026-03-18)" if side == "right" else "")]
    if "action_log_probs" not in tensors:
        notes.append("action_log_probs is None: the loss uses rollout log-probs only, and the forward was skipped")
    counts = +Counter({"rows that only fill up the batch": dropped})
    return TokenBatch(response.lengths, tokens, sequences, facts, counts, tuple(notes))


def _real_rows(tensors: Tensors, metadata: Mapping[Any, Any]) -> tuple[int, int]:
    """Return how many rows are real; the last ``pad_size`` are copies of the first with an empty loss mask."""
    rows = len(tensors["loss_mask"])
    padding = metadata.get("pad_size")
    if not isinstance(padding, int) or not 0 < padding < rows or tensors["loss_mask"][rows - padding :].any():
        return rows, 0
    return rows - padding, padding


def _padded_side(present: NDArray[np.bool_], path: Path) -> str:
    """Say on which side responses are padded; every row must be one run at the same edge."""
    lengths = present.sum(axis=1)
    width = present.shape[1]
    column = np.arange(width)
    at_right = (present == (column >= width - lengths[:, None])).all(axis=1)
    at_left = (present == (column < lengths[:, None])).all(axis=1)
    if at_right.all():
        return "left"
    if at_left.all():
        return "right"
    row = int(np.flatnonzero(~at_right)[0])
    raise InputError(
        "rows contradict each other on the padded side",
        path=path,
        key="response_mask",
        found=f"{int(at_right.sum())} of {len(lengths)} rows at the right edge, {int(at_left.sum())} at the left one; "
        f"row {row} is not at the right one",
        expected="every response one run at the same edge",
    )
