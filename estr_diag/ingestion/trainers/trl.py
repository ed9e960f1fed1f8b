"""TRL: tensors of a GRPO hook, samples of the async worker; the completions table holds text and is refused.

``old`` names two things. In the GRPO dict ``old_per_token_logps`` is the training engine before the
update; in the async worker's ``RolloutSample`` ``old_log_probs`` is the inference engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from estr_diag.errors import InputError
from estr_diag.ingestion import jsonl
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.tensors import require_shape, take, token_names
from estr_diag.ingestion.unpickle import load_torch

GENERATED = Layout(
    "generate_and_score",
    "hook: torch.save of the dict that GRPOTrainer._generate_and_score_completions returns",
    (
        Field("prompt_mask", "int64 [B,P]", "1 on prompt tokens, left padded"),
        Field("completion_ids", "int64 [B,R]", "response, right padded", "token_id"),
        Field("completion_mask", "int64 [B,R]", "1 on response tokens", "loss_mask"),
        Field("tool_mask", "int64 [B,R]", "0 on tool tokens, 1 elsewhere, padding too", "loss_mask", required=False),
        Field("sampling_per_token_logps", "float32 [B,R]", "inference engine; padding 0.0", "logp_infer"),
        Field("old_per_token_logps", "float32 [B,R]", "training engine, before the update", "logp_train", False),
        Field("advantages", "float32 [B]", "of the sequence", "advantage", required=False),
    ),
)
ASYNC = Layout(
    "async_rollout_sample",
    "hook: the fields of each RolloutSample of the async GRPO worker, one JSON object a line",
    (
        Field("input_ids", "INTEGER[]", "prompt and response", "token_id"),
        Field("completion_mask", "TINYINT[]", "1 where the model sampled", "loss_mask"),
        Field("old_log_probs", "FLOAT[]", "inference engine (not the old policy); 0.0 outside the mask", "logp_infer"),
        Field("model_version", "INTEGER", "weight syncs when the group started", "policy_version", required=False),
        Field("group_id", "BIGINT", "prompt group", "group_id", required=False),
        Field("advantage", "FLOAT", "of the sequence", "advantage", required=False),
    ),
)
COMPLETIONS = Layout(
    "completions",
    "completions/completions_{step}.parquet of log_completions: text only, refused",
    (
        Field("step", "BIGINT", "trainer step"),
        Field("prompt", "VARCHAR", "text"),
        Field("completion", "VARCHAR", "text"),
        Field("advantage", "DOUBLE", "of the sequence"),
    ),
)

_RESPONSE = token_names(GENERATED, "[B,R]")
_STEP = re.compile(r"(?:step|score|rollout)s?[_-]?(\d+)")
_REFUSAL = (
    "TRL's completions table (log_completions=True) holds text and no tokens. Save the tensors with a hook: subclass "
    "GRPOTrainer, call super()._generate_and_score_completions(inputs), and torch.save what it returns as "
    "generate_and_score_{step}_rank{rank}.pt (needs use_vllm=True for the sampling log-probs)"
)
_NOT_FLIGHT = "model_version is the one when the group started: weight syncs during generation do not show"


class TRLAdapter:
    """Reads the two hooks."""

    name: ClassVar[str] = "trl"
    title: ClassVar[str] = "TRL"
    layouts: ClassVar[tuple[Layout, ...]] = (GENERATED, ASYNC, COMPLETIONS)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "log a step where old_per_token_logps is computed (num_iterations > 1 or an importance-sampling correction)",
        "logp_infer": "use vLLM, which returns sampling_per_token_logps",
        "entropy": "TRL keeps entropy as an aggregate; save it per token in the subclass that saves the batch",
        "policy_version": "only AsyncGRPO has versions: save its RolloutSample records",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise tensors and samples by their keys, the completions table by its columns."""
        if head.kind == "parquet" and {"step", "prompt", "completion", "advantage"} <= set(head.columns):
            why = "Parquet with columns step, prompt, completion, advantage"
            return Probe(self.name, head.path, COMPLETIONS.name, why=why, refusal=_REFUSAL)
        step = _STEP.search(head.path.name)
        number = int(step[1]) if step else None
        if {"input_ids", "completion_mask", "old_log_probs"} <= head.json_keys:
            return Probe(
                self.name,
                head.path,
                ASYNC.name,
                why="keys input_ids, completion_mask, old_log_probs",
                columns=ASYNC.columns(head.json_keys),
                step=number,
            )
        strings = frozenset(head.pickle.strings) if head.kind == "torch" else frozenset()
        if {"completion_ids", "completion_mask"} <= strings:
            return Probe(
                self.name,
                head.path,
                GENERATED.name,
                why="torch file with keys completion_ids and completion_mask",
                columns=GENERATED.columns(strings),
                step=number,
            )
        return None

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file."""
        if unit.probe.layout == GENERATED.name:
            yield _generated(unit)
            return
        fields = [f for f in ASYNC.fields if f.required or f.canonical in unit.probe.columns]
        for record, batch in jsonl.read_records(unit.path, fields):
            yield _samples(unit, record, batch)


def _generated(unit: Unit) -> TokenBatch:
    path = unit.path
    tensors = take(load_torch(path), GENERATED, path)
    shape = tensors["completion_ids"].shape
    if len(shape) != 2:
        raise InputError("not a batch of sequences", path=path, key="completion_ids", found=f"shape {list(shape)}")
    require_shape(tensors, _RESPONSE, shape, "the shape of 'completion_ids'", path)
    require_shape(tensors, ["advantages"], shape[:1], "one a sequence", path)
    prompt_shape = (shape[0], *tensors["prompt_mask"].shape[-1:])
    require_shape(tensors, ["prompt_mask"], prompt_shape, "one row a sequence", path)
    present = tensors["completion_mask"] != 0
    response = Ragged.from_padded({name: tensors[name] for name in _RESPONSE if name in tensors}, present)
    # Without tools there is no tool_mask; it never marks padding, which `present` has left out already.
    sampled = response["tool_mask"] != 0 if "tool_mask" in response.columns else response["completion_mask"] != 0
    canonical = GENERATED.columns(frozenset(response.columns))
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items()}
    tokens["loss_mask"] = sampled
    sequences: dict[str, Any] = {
        "seq_key": [f"{path.stem}:{row}" for row in range(len(response))],
        "step": [unit.probe.step] * len(response),
        "prompt_len": (tensors["prompt_mask"] != 0).sum(axis=1),
    }
    if "advantages" in tensors:
        sequences["advantage"] = tensors["advantages"]
    notes: tuple[str, ...] = ()
    if "old_per_token_logps" not in tensors:
        notes = ("no old_per_token_logps: TRL computes them only when a batch is used for more than one update",)
    facts = RunFacts(trainer="TRL", train_logp=None if notes else "proximal")
    return TokenBatch(response.lengths, tokens, sequences, facts, notes=notes)


def _samples(unit: Unit, record: int, batch: pa.RecordBatch) -> TokenBatch:
    lists = ["input_ids", "completion_mask", "old_log_probs"]
    jsonl.require(unit.path, batch, record, lists)
    full = jsonl.ragged(unit.path, batch, record, lists)
    sampled = np.ma.filled(full["completion_mask"], 0) != 0
    response, prompt_len = full.with_columns(completion_mask=sampled).cut_prompt(sampled)
    canonical = ASYNC.columns(frozenset(response.columns))
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items()}
    n = len(response)
    given = {name: batch.column(name).to_pylist() for name in batch.schema.names if name not in lists}
    sequences: dict[str, Any] = {
        "seq_key": [f"{unit.path.stem}:{record + row}" for row in range(n)],
        "step": [unit.probe.step] * n,
        "prompt_len": prompt_len,
    }
    if "group_id" in given:
        sequences["group_id"] = [None if group is None else str(group) for group in given["group_id"]]
    if "advantage" in given:
        sequences["advantage"] = given["advantage"]
    if "model_version" not in given:
        return TokenBatch(response.lengths, tokens, sequences, RunFacts(trainer="TRL"))
    sequences["version_first"] = sequences["version_last"] = given["model_version"]
    facts = RunFacts(trainer="TRL", version_unit="update", version_granularity="sequence")
    return TokenBatch(response.lengths, tokens, sequences, facts, notes=(_NOT_FLIGHT,))
