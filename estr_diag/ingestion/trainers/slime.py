"""slime: the train dump joined with the rollout dump of the same ``rollout_id`` (``--dump-details DIR``).

The train dump has both engines' log-probs and, with ``--use-rollout-entropy``, the entropy; the rollout
dump has weight versions, groups and rewards. ``rollout_position`` is the index of a sample in the latter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, TokenBatch, Unit
from estr_diag.ingestion.field_errors import require
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.slime_samples import HOW, Sample, to_batch
from estr_diag.ingestion.unpickle import Allowed, Inert, load_torch

_TRAIN_FIELDS = (
    Field("tokens", "int64 [total]", "prompt and response", "token_id"),
    Field("total_lengths", "int", "prompt and response tokens", "prompt_len"),
    Field("response_lengths", "int", "response tokens, tool tokens included"),
    Field("loss_masks", "int32 [response]", "1 where trainable; tool tokens and removed samples 0", "loss_mask"),
    Field("rollout_log_probs", "float32 [response]", "inference engine; 0.0 on tool tokens", "logp_infer"),
    Field("log_probs", "float32 [response]", "training engine, at the token", "logp_train", required=False),
    Field("entropy", "float32 [response]", "training engine, full vocabulary", "entropy", required=False),
    Field("advantages", "float32 [response]", "per token", "advantage", required=False),
)
TRAIN_DATA = Layout(
    "train_data",
    "train_data/{rollout_id}.pt, format_version 2: a list of samples",
    (
        *_TRAIN_FIELDS,
        Field("rollout_position", "int", "index of the sample in the rollout dump", required=False),
        Field("sample_index", "int", "number of the sample in the run", "seq_key", required=False),
        Field("source_names", "str", "data set", "env", required=False),
        Field("raw_reward", "list of float", "reward by rollout_position", "reward", required=False),
    ),
)
OLD_TRAIN_DATA = Layout(
    "train_data_v1",
    "train_data/{rollout_id}_{rank}.pt until 2026-08-12: a dict of lists, one file a rank",
    (*_TRAIN_FIELDS, Field("sample_indices", "int", "number of the sample in the run", "seq_key", required=False)),
)
ROLLOUT_DATA = Layout(
    "rollout_data",
    "rollout_data/{rollout_id}.pt: the samples as generated; no training-engine log-probs",
    (
        Field("tokens", "list of int", "prompt and response", "token_id"),
        Field("response_length", "int", "response tokens, tool tokens included"),
        Field("loss_mask", "list of int or None", "1 where the model sampled; None: everywhere", "loss_mask"),
        Field("rollout_log_probs", "list of float", "inference engine; 0.0 on tool tokens", "logp_infer"),
        Field("weight_versions", "list of str", "version at each generate call", "policy_version", required=False),
        Field("group_index", "int", "prompt group", "group_id", required=False),
        Field("index", "int", "number of the sample in the run", "seq_key", required=False),
        Field("reward", "float or dict", "reward of the sample", "reward", required=False),
        Field("status", "str", "completed, truncated, aborted, failed", "finish", required=False),
        Field("remove_sample", "bool", "true: not trained on", required=False),
    ),
)
_JOINED = {
    column: f"rollout_data: {name}"
    for column, name in ROLLOUT_DATA.columns().items()
    if column in ("policy_version", "group_id", "reward", "finish")
}
_ROLLOUT_ID = re.compile(rb"X\x0a\x00\x00\x00rollout_id(?:q.|r.{4})?(?:K(.)|M(..)|J(....))", re.DOTALL)
_ALLOWED: Allowed = {("slime.utils.tensor_store", "DiskTensorRef"): Inert}
"""Left in rollout dumps for routed experts that were spilled to disk; not needed."""

_EVAL_REFUSAL = "evaluation samples, which are not trained on; name the rollout_data/{rollout_id}.pt of training"


class SlimeAdapter:
    """Reads train dumps with their rollout dumps, and rollout dumps alone."""

    name: ClassVar[str] = "slime"
    title: ClassVar[str] = "slime"
    layouts: ClassVar[tuple[Layout, ...]] = (TRAIN_DATA, OLD_TRAIN_DATA, ROLLOUT_DATA)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "train with --dump-details DIR, and name DIR or DIR/train_data",
        "logp_infer": "let the rollout return log-probs (--use-tis or --get-mismatch-metrics)",
        "entropy": "train with --use-rollout-entropy beside --dump-details",
        "policy_version": "keep DIR/rollout_data beside DIR/train_data: versions and groups are in it (slime of 2025-09 or later)",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise a dump by the keys of its outer dict and of its samples."""
        if head.kind != "torch":
            return None
        strings = head.pickle.strings
        names = frozenset(strings)
        if strings[:1] == ("format_version",) and {"rollout_id", "samples", "response_lengths"} <= names:
            return self._found(head, TRAIN_DATA, "keys format_version, rollout_id, samples")
        if strings[:3] == ("rollout_id", "rank", "rollout_data"):
            return self._found(head, OLD_TRAIN_DATA, "keys rollout_id, rank, rollout_data")
        if strings[:2] == ("rollout_id", "samples") and {"group_index", "tokens"} <= names:
            refusal = _EVAL_REFUSAL if head.path.name.startswith("eval_") else None
            return self._found(head, ROLLOUT_DATA, "keys rollout_id, samples, group_index", refusal)
        return None

    def _found(self, head: FileHead, layout: Layout, why: str, refusal: str | None = None) -> Probe:
        seen = frozenset(head.pickle.strings)
        # Lists of Python numbers may fill what probing reads of a long file; then its layout has to speak for it.
        cut = head.size > len(head.prefix) and layout.missing(seen)
        number = _ROLLOUT_ID.search(head.prefix)
        return Probe(
            self.name,
            head.path,
            layout.name,
            why=why + (" (too long to list all its keys here)" if cut else ""),
            columns=layout.columns(None if cut else seen),
            step=int.from_bytes(next(g for g in number.groups() if g is not None), "little") if number else None,
            refusal=refusal,
            companion=layout is ROLLOUT_DATA,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Join each train dump with the rollout dump of its id; a rollout dump without one stands alone."""
        rollouts = [p for p in probes if p.companion]
        units: list[Unit] = []
        joined: set[Path] = set()
        for probe in probes:
            if probe.companion:
                continue
            beside = probe.path.parent.parent / "rollout_data" / f"{probe.step}.pt"
            named = [r.path for r in rollouts if r.step == probe.step is not None]
            # Two rollout dumps of one id are of two runs; which of them is meant cannot be told.
            companions = (beside,) if beside.is_file() else tuple(named) if len(named) == 1 else ()
            joined.update(companions)
            units.append(Unit(replace(probe, columns={**probe.columns, **(_JOINED if companions else {})}), companions))
        return units + [Unit(r) for r in rollouts if r.path not in joined]

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read a train dump with its rollout dump, or a rollout dump alone; a dump comes in one piece."""
        layout = next(layout for layout in self.layouts if layout.name == unit.probe.layout)
        payload = _payload(unit.path)
        step = payload["rollout_id"]
        samples = _samples(unit.path, layout, payload)
        notes: list[str] = []
        if layout is ROLLOUT_DATA:
            records: Sequence[Sample | None] = samples
            notes.append(f"a rollout dump alone holds no training-engine log-prob: {HOW}")
        else:
            records = [None] * len(samples)
            for path in unit.companions:
                records = _join(samples, _samples(path, ROLLOUT_DATA, _payload(path)))
            if missing := sum(r is None for r in records):
                why = f"not found in {unit.companions[0]}" if unit.companions else f"without rollout_data/{step}.pt"
                notes.append(
                    f"{missing} of {len(samples)} samples {why}: their weight versions and groups are not known; {HOW}"
                )
        prefix = f"rank{payload.get('rank')}:" if layout is OLD_TRAIN_DATA else ""
        batch = to_batch(unit.path, layout, samples, records, step, prefix)
        if layout is not ROLLOUT_DATA and "logp_train" not in batch.tokens:
            notes.append("no log_probs: the training engine did not score this batch (--use-rollout-logprobs)")
        yield replace(batch, notes=tuple(notes))


def _payload(path: Path) -> Mapping[str, Any]:
    payload = load_torch(path, _ALLOWED)
    if not isinstance(payload, dict) or not isinstance(payload.get("rollout_id"), int):
        raise InputError("not a dump of slime", path=path, key="rollout_id", expected="a dict with an integer there")
    if payload.get("format_version", 2) != 2:
        raise InputError(
            "a train dump of an unknown version",
            path=path,
            key="format_version",
            found=payload["format_version"],
            expected=2,
            hint="Report it, with the slime commit that wrote it",
        )
    return payload


def _samples(path: Path, layout: Layout, payload: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a dump, one mapping each."""
    if layout is not OLD_TRAIN_DATA:
        samples = payload.get("samples")
        if not isinstance(samples, list) or not all(isinstance(s, dict) for s in samples):
            raise InputError("no list of samples", path=path, key="samples", expected="a list of dicts")
        rewards = payload.get("raw_reward") or ()
        # Rewards are those of the whole rollout, in its order.
        positions = [s.get("rollout_position") for s in samples]
        known = [None if p is None or not 0 <= p < len(rewards) else rewards[p] for p in positions]
        return [{**s, "raw_reward": reward} for s, reward in zip(samples, known, strict=True)]
    lists = payload["rollout_data"]
    require(path, layout, lists)
    columns = {f.name: lists[f.name] for f in layout.fields if lists.get(f.name) is not None}
    for name, values in columns.items():
        if len(values) != len(columns["response_lengths"]):
            raise InputError(
                "not one value a sample",
                path=path,
                key=name,
                found=f"{len(values)} values",
                expected=f"{len(columns['response_lengths'])}, as many as response_lengths",
            )
    columns["sample_index"] = columns.pop("sample_indices", [None] * len(columns["response_lengths"]))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _join(samples: Sequence[Sample], rollout: Sequence[Sample]) -> list[Sample | None]:
    """Return the sample of the rollout dump for each of `samples`; None where it holds no such sample."""
    numbers = Counter(r.get("index") for r in rollout)
    by_number = {r.get("index"): r for r in rollout if numbers[r.get("index")] == 1}
    found: list[Sample | None] = []
    for sample in samples:
        position = sample.get("rollout_position")
        if position is None:  # dumps of before 2026-08-12
            number = sample.get("sample_index")
            record = None if number is None else by_number.get(int(number))
        else:
            record = rollout[position] if 0 <= position < len(rollout) else None
        # A dump of another run, or of another try of this one, has other tokens at the same place.
        same = record is not None and np.array_equal(record.get("tokens", ()), sample.get("tokens", ()))
        found.append(record if same else None)
    return found
