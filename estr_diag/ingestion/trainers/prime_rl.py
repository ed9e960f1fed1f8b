"""prime-rl: token exports, joined with the traces of the same step for versions, groups and rewards.

``token_exports/step_N/rank_R.jsonl`` holds both engines' log-probs and the entropy, and no version.
``rollouts/step_N/train/*/traces.jsonl`` (on by default) holds the versions. The two share no id, so
they are joined by exact token ids. ``rollouts/step_N/rank_R.bin`` holds the same sequences as the
export with less, and is read only where there is no export.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from estr_diag.ingestion import jsonl
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.prime_bin import BIN, BIN_OLD, MicroBatch, read_micro_batches, recognise
from estr_diag.ingestion.trainers.prime_traces import Branch, read_branches

TOKEN_EXPORT = Layout(
    "token_export",
    "token_exports/step_{N}/rank_{R}.jsonl, schema_version 1",
    (
        Field("step", "INTEGER", "trainer step, from 1", "step"),
        Field("rank", "INTEGER", "trainer rank"),
        Field("export_sequence_idx", "INTEGER", "index of the sequence in the file", "seq_key"),
        Field("env_name", "VARCHAR", "environment", "env", required=False),
        Field("token_ids", "INTEGER[]", "prompt and response", "token_id"),
        Field("loss_mask", "BOOLEAN[]", "true where the model sampled", "loss_mask"),
        Field("inference_logprobs", "FLOAT[]", "inference engine; 0.0 outside the mask", "logp_infer"),
        Field("trainer_logprobs", "FLOAT[]", "current policy at this micro step, before its update", "logp_train"),
        Field("entropy", "FLOAT[]", "of the trainer, full vocabulary, at the token's temperature", "entropy"),
        Field("advantages", "FLOAT[]", "per token", "advantage"),
        Field(
            "is_masked",
            "BOOLEAN[]",
            "true where the trainer's own rule drops the token",
            "trainer_keep",
            required=False,
        ),
    ),
)
TRACES = Layout(
    "traces",
    "rollouts/step_{N}/train/{all|effective}/traces.jsonl: verifiers episodes",
    (
        Field("id", "VARCHAR", "episode", "seq_key"),
        Field("group", "JSON", "group.id", "group_id"),
        Field("run", "JSON", "run.work.policy start and end: version at dispatch and at the end", "policy_version"),
        Field("traces", "JSON", "tree of nodes with token_ids, mask and compact logprobs", "logp_infer"),
    ),
)
_STEP = re.compile(r"step_(\d+)")
_FACTS = RunFacts(
    trainer="prime-rl",
    logprobs="processed",
    entropy_of="train",
    train_logp="current",
    version_unit="update",
    version_granularity="sequence",
)
_TRACES_PER_BATCH = 512
_JOINED = {"policy_version": "traces: run.work.policy", "group_id": "traces: group.id", "reward": "traces: rewards"}


class PrimeRLAdapter:
    """Reads token exports, and micro batches or traces where there is no export."""

    name: ClassVar[str] = "prime-rl"
    title: ClassVar[str] = "prime-rl"
    layouts: ClassVar[tuple[Layout, ...]] = (TOKEN_EXPORT, TRACES, BIN, BIN_OLD)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "set trainer.enable_token_export = true and name token_exports/",
        "entropy": "set trainer.enable_token_export = true and name token_exports/",
        "policy_version": "keep rollouts/step_N/train/effective/traces.jsonl (monitors.file, on by default) beside token_exports/",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise an export by its log-prob keys, a trace by its episode keys, micro batches by their slots."""
        keys = head.json_keys
        step = _STEP.search(str(head.path))
        number = int(step[1]) if step else None
        if {"inference_logprobs", "trainer_logprobs", "export_sequence_idx"} <= keys:
            return Probe(
                self.name,
                head.path,
                TOKEN_EXPORT.name,
                why="keys inference_logprobs, trainer_logprobs, export_sequence_idx",
                columns=TOKEN_EXPORT.columns(keys),
                step=head.json_record.get("step", number),
            )
        if {"traces", "run", "group"} <= keys and isinstance(head.json_record.get("traces"), list):
            return Probe(
                self.name,
                head.path,
                TRACES.name,
                why="verifiers episodes: keys traces, run, group",
                columns=TRACES.columns(keys),
                step=number,
                companion=True,
            )
        if found := recognise(head):
            layout, slots = found
            return Probe(
                self.name,
                head.path,
                layout.name,
                why=f"msgpack list of micro batches with {slots} slots",
                columns=layout.columns(),
                step=number,
            )
        return None

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Join each export, or micro batches of a step without one, with the traces of its step.

        Traces that are joined to nothing stand alone.
        """
        exported = {p.step for p in probes if p.layout == TOKEN_EXPORT.name}
        exports = [p for p in probes if p.layout == TOKEN_EXPORT.name or (not p.companion and p.step not in exported)]
        traces = {p.path: p for p in probes if p.companion}
        units, joined = [], set()
        for probe in exports:
            beside = _traces_beside(probe.path)
            companions = beside or [t.path for t in traces.values() if t.step == probe.step and probe.step is not None]
            joined.update(companions)
            columns = {**probe.columns, **(_JOINED if companions else {})}
            units.append(Unit(_with_columns(probe, columns), tuple(companions)))
        return units + [Unit(t) for path, t in traces.items() if path not in joined]

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read an export with its traces, or traces alone."""
        if unit.probe.layout == TRACES.name:
            yield from _read_traces(unit)
            return
        episodes: dict[bytes, list[Branch]] = defaultdict(list)
        for path in unit.companions:
            for branch in read_branches(path):
                episodes[branch.identity].append(branch)
        if unit.probe.layout in (BIN.name, BIN_OLD.name):
            layout = BIN if unit.probe.layout == BIN.name else BIN_OLD
            for micro_batch in read_micro_batches(unit.path, layout):
                yield _micro_batch(unit, micro_batch, episodes)
            return
        for record, batch in jsonl.read_records(unit.path, TOKEN_EXPORT.fields):
            yield _export_batch(unit, record, batch, episodes)


def _with_columns(probe: Probe, columns: dict[str, str]) -> Probe:
    return Probe(probe.adapter, probe.path, probe.layout, probe.why, columns, probe.step)


def _traces_beside(export: Path) -> list[Path]:
    """Return the traces that prime-rl writes beside `export`; the effective ones are those that trained."""
    step_folder = export.parent
    if step_folder.parent.name != "token_exports":
        return []
    train = step_folder.parent.parent / "rollouts" / step_folder.name / "train"
    for kind in ("effective", "all"):
        if (train / kind / "traces.jsonl").is_file():
            return [train / kind / "traces.jsonl"]
    return []


def _export_batch(unit: Unit, record: int, batch: pa.RecordBatch, episodes: dict[bytes, list[Branch]]) -> TokenBatch:
    jsonl.require(unit.path, batch, record, [f.name for f in TOKEN_EXPORT.fields if f.required])
    lists = [f.name for f in TOKEN_EXPORT.fields if f.type.endswith("[]") and f.canonical in unit.probe.columns]
    full = jsonl.ragged(unit.path, batch, record, lists)
    response, prompt_len = full.cut_prompt(full["loss_mask"])
    canonical = TOKEN_EXPORT.columns()
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items() if field in response.columns}
    if "trainer_keep" in tokens:
        tokens["trainer_keep"] = ~tokens["trainer_keep"]
    steps = batch.column("step").to_pylist()
    sequences: dict[str, Any] = {
        "seq_key": [
            f"rank{rank}:{i}"
            for rank, i in zip(
                batch.column("rank").to_pylist(), batch.column("export_sequence_idx").to_pylist(), strict=True
            )
        ],
        "step": steps,
        "prompt_len": prompt_len.tolist(),
        "env": batch.column("env_name").to_pylist(),
        # Versions count from 0 and steps from 1: the weights that step s starts from are version s - 1.
        "trainer_version": [step - 1 for step in steps],
    }
    notes: list[str] = []
    if unit.companions:
        notes = _join(
            sequences, [full["token_ids"][s : s + n] for s, n in zip(full.starts, full.lengths, strict=True)], episodes
        )
    else:
        notes = ["no traces.jsonl of this step beside the export: versions, groups and rewards are not known"]
    return TokenBatch(response.lengths, tokens, sequences, _FACTS, Counter(), tuple(notes))


def _micro_batch(unit: Unit, micro_batch: MicroBatch, episodes: dict[bytes, list[Branch]]) -> TokenBatch:
    full = micro_batch.tokens
    response, prompt_len = full.cut_prompt(full["loss_mask"])
    step = unit.probe.step
    sequences: dict[str, Any] = {
        "seq_key": [f"{unit.path.stem}:{micro_batch.number}.{i}" for i in micro_batch.index],
        "step": [step] * len(full),
        "prompt_len": prompt_len.tolist(),
        "env": micro_batch.env,
        "trainer_version": [None if step is None else step - 1] * len(full),
    }
    notes = ["micro batches hold no training-engine log-prob; switch on trainer.enable_token_export = true"]
    if unit.companions:
        ids = [full["token_id"][s : s + n] for s, n in zip(full.starts, full.lengths, strict=True)]
        notes += _join(sequences, ids, episodes)
    if micro_batch.slots not in (10, 16):
        notes.append(f"micro batches of {micro_batch.slots} slots, and 10 or 16 are known: the first six were read")
    facts = replace(_FACTS, entropy_of=None, train_logp=None)
    counts = +Counter({"segments without a loss token (padding, dummy batches)": micro_batch.dropped})
    return TokenBatch(response.lengths, dict(response.columns), sequences, facts, counts, tuple(notes))


def _join(
    sequences: dict[str, Sequence[Any]], token_ids: Sequence[Any], episodes: dict[bytes, list[Branch]]
) -> list[str]:
    """Fill per-sequence facts from the episodes with exactly the same tokens; return what is to be said."""
    found = [episodes.get(np.asarray(ids, dtype=np.int32).tobytes(), []) for ids in token_ids]
    for column in ("version_first", "version_last", "group_id", "reward"):
        # Two episodes may hold the same tokens; where they disagree the fact is not known.
        values = [{getattr(branch, column) for branch in branches} for branches in found]
        sequences[column] = [next(iter(v)) if len(v) == 1 else None for v in values]
    missing = sum(not branches for branches in found)
    if not missing:
        return []
    return [
        f"{missing} of {len(found)} sequences have no episode with exactly their token ids: no version, group or reward"
    ]


def _read_traces(unit: Unit) -> Iterator[TokenBatch]:
    pending: list[Branch] = []
    for branch in read_branches(unit.path):
        pending.append(branch)
        if len(pending) == _TRACES_PER_BATCH:
            yield _traces_batch(unit, pending)
            pending = []
    if pending:
        yield _traces_batch(unit, pending)


def _traces_batch(unit: Unit, branches: Sequence[Branch]) -> TokenBatch:
    flat = Ragged.from_sequences(
        [{"token_id": b.token_ids, "loss_mask": b.sampled, "logp_infer": b.logp_infer} for b in branches],
        ("token_id", "loss_mask", "logp_infer"),
    )
    response, prompt_len = flat.cut_prompt(flat["loss_mask"])
    steps = [b.step if b.step is not None else unit.probe.step for b in branches]
    sequences: dict[str, Any] = {
        "seq_key": [b.key for b in branches],
        "step": steps,
        "prompt_len": prompt_len.tolist(),
        "trainer_version": [None if s is None else s - 1 for s in steps],
        **{
            name: [getattr(b, name) for b in branches]
            for name in ("version_first", "version_last", "group_id", "env", "reward", "finish")
        },
    }
    note = "traces alone hold no training-engine log-prob; switch on trainer.enable_token_export = true"
    return TokenBatch(response.lengths, dict(response.columns), sequences, _FACTS, Counter(), (note,))
