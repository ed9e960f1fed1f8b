"""PipelineRL: the streams of the file backend, with log-probs of the inference engine only.

``streams/actor/.../N.jsonl``: a line is one group, a list of TrainingText records.
``streams/training_data/.../N.jsonl``: a line is one micro batch, several sequences packed into one row.
Versions count the samples that the trainer had seen. Numbers are the shortest decimals of a float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.pipelinerl_streams import groups_batch, packed_batch

ACTOR = Layout(
    "actor",
    "streams/actor/{instance}/{partition}/{N}.jsonl: a list of TrainingText records a line",
    (
        Field("input_ids", "BIGINT[]", "prompt and response", "token_id"),
        Field("labels", "BIGINT[]", "-100 where the model did not sample", "loss_mask"),
        Field("logprobs", "FLOAT[]", "inference engine; one for each label that is not -100", "logp_infer"),
        Field("metadata", "JSON", "model_version: samples seen at launch", "policy_version", required=False),
        Field("group_id", "VARCHAR", "prompt group", "group_id", required=False),
        Field("reward", "FLOAT", "of the sequence", "reward", required=False),
        Field("finished", "BOOLEAN", "the model ended the text itself", "finish", required=False),
    ),
)
TRAINING_DATA = Layout(
    "training_data",
    "streams/training_data/{instance}/{partition}/{N}.jsonl: a packed micro batch a line",
    (
        Field("input_ids", "BIGINT[][]", "packed sequences", "token_id"),
        Field("labels", "BIGINT[][]", "-100 where the model did not sample", "loss_mask"),
        Field("old_logprobs", "FLOAT[][]", "inference engine, full length", "logp_infer"),
        Field("attention_mask", "BIGINT[][]", "0 on the padding of a batch that is not packed", required=False),
        Field("advantages", "FLOAT[][]", "per token", "advantage", required=False),
        Field("rewards", "FLOAT[][]", "of the sequence, at each token", "reward", required=False),
        Field("model_version", "BIGINT", "minimum over the packed sequences", required=False),
        Field("seq_boundaries", "BIGINT[]", "first token of each packed sequence, and the end", required=False),
        Field("padding", "BIGINT", "tokens at the end that only fill up the row", required=False),
        Field("sentinel", "BOOLEAN", "a line without data", required=False),
    ),
)

_LINES_PER_BATCH = 256
_EVAL_STREAM = "actor_test"
_EVAL_REFUSAL = (
    "PipelineRL's actor_test stream holds rollouts of evaluation, which train nothing; name streams/actor or "
    "streams/training_data (streams=files)"
)


class PipelineRLAdapter:
    """Reads both streams; where they hold the same sequences, the actor's, which has groups and versions."""

    name: ClassVar[str] = "pipelinerl"
    title: ClassVar[str] = "PipelineRL"
    layouts: ClassVar[tuple[Layout, ...]] = (ACTOR, TRAINING_DATA)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "save new_logprobs in rl_step beside old_logprobs, segment_ids and model_version",
        "entropy": "save entropy in rl_step beside new_logprobs",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise a group by the keys of its first record, a micro batch by its keys."""
        if {"input_ids", "labels", "old_logprobs"} <= head.json_keys:
            return Probe(
                self.name,
                head.path,
                TRAINING_DATA.name,
                why="keys input_ids, labels and old_logprobs",
                columns=TRAINING_DATA.columns(head.json_keys),
            )
        group = head.json_record
        if not isinstance(group, list) or not group or not isinstance(group[0], dict):
            return None
        keys = frozenset(group[0])
        if not {"input_ids", "labels", "n_predicted"} <= keys:
            return None
        return Probe(
            self.name,
            head.path,
            ACTOR.name,
            why="a list of records with keys input_ids, labels and n_predicted",
            columns=ACTOR.columns(keys),
            refusal=_EVAL_REFUSAL if _EVAL_STREAM in head.path.parts else None,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one stream file, some lines at a time."""
        build, layout = (groups_batch, ACTOR) if unit.probe.layout == ACTOR.name else (packed_batch, TRAINING_DATA)
        lines = _lines(unit.path)
        while pending := list(islice(lines, _LINES_PER_BATCH)):
            if batch := build(pending, layout, unit.path):
                yield batch


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw)
            except ValueError as error:
                raise InputError(
                    "not valid JSON",
                    path=path,
                    line=number,
                    found=str(error),
                    expected="one JSON value on each line",
                    hint="A cut-off last line usually means that the stream was still being written",
                ) from None
