"""open-instruct: ``{run}_rollouts_{shard}.jsonl`` of ``--save_traces``.

Response only, inference engine only, and without the loss mask: tool tokens have log-prob 0.0 by
convention, so the mask can only be guessed. Lines that a one-line hook has given a mask are read as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from estr_diag.ingestion import jsonl
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.head import FileHead

ROLLOUTS = Layout(
    "rollouts",
    "{run}_rollouts_{shard}.jsonl: no loss mask and no training-engine log-prob",
    (
        Field("step", "INTEGER", "trainer step", "step"),
        Field("sample_idx", "BIGINT", "index of the sample in its step", "seq_key"),
        Field("prompt_idx", "BIGINT", "index of the prompt in its step", "group_id", required=False),
        Field("prompt_tokens", "INTEGER[]", "prompt", "prompt_len"),
        Field("response_tokens", "INTEGER[]", "response, tool tokens included", "token_id"),
        Field("logprobs", "FLOAT[]", "inference engine; 0.0 on tool tokens, NaN on an added end", "logp_infer"),
        Field("reward", "FLOAT", "reward of the sequence", "reward", required=False),
        Field("advantage", "FLOAT", "of the sequence", "advantage", required=False),
        Field("finish_reason", "VARCHAR", "stop, length ...", "finish", required=False),
        Field("dataset", "VARCHAR", "data set", "env", required=False),
    ),
)
WITH_MASK = Layout(
    "rollouts_with_mask",
    "the same with two fields of a hook: mask=result.masks[i], model_step=result.model_step",
    (
        *ROLLOUTS.fields,
        Field("mask", "TINYINT[]", "1 where the model sampled", "loss_mask"),
        Field("model_step", "INTEGER", "training step of the sampling weights", "policy_version", required=False),
    ),
)

_GUESS = "logprobs not 0.0; loses tokens of probability 1"
_REFUSAL = (
    "open-instruct's rollouts have no loss mask, so tool tokens cannot be told from sampled ones. Add two fields to "
    "the record in open_instruct/rl_utils.py, mask=result.masks[i] and model_step=result.model_step, or accept a guess "
    f"({_GUESS}) with --guess-mask"
)
# Of these one line may lack what another has.
_FACTS = {"finish_reason": "finish", "dataset": "env", "reward": "reward", "advantage": "advantage"}


class OpenInstructAdapter:
    """Reads saved rollouts."""

    name: ClassVar[str] = "open-instruct"
    title: ClassVar[str] = "open-instruct"
    layouts: ClassVar[tuple[Layout, ...]] = (ROLLOUTS, WITH_MASK)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "save the trainer's log-probs: save_traces writes the engine's only",
        "entropy": "open-instruct writes no entropy by token",
        "policy_version": "add model_step=result.model_step to the record in _save_rollouts",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise by the two token lists and the index; without a mask it is refused."""
        keys = head.json_keys
        if not {"response_tokens", "prompt_tokens", "sample_idx"} <= keys:
            return None
        layout = WITH_MASK if "mask" in keys else ROLLOUTS
        step = head.json_record.get("step")
        return Probe(
            self.name,
            head.path,
            layout.name,
            why="keys response_tokens, prompt_tokens and sample_idx",
            columns=layout.columns(keys),
            step=step if isinstance(step, int) else None,
            refusal=_REFUSAL if layout is ROLLOUTS else None,
            guessable=layout is ROLLOUTS,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file."""
        layout = WITH_MASK if unit.probe.layout == WITH_MASK.name else ROLLOUTS
        for record, batch in jsonl.read_records(unit.path, layout.fields):
            yield _batch(unit, layout, record, batch)


def _batch(unit: Unit, layout: Layout, record: int, batch: pa.RecordBatch) -> TokenBatch:
    jsonl.require(unit.path, batch, record, [f.name for f in layout.fields if f.required])
    lists = ["response_tokens", "logprobs", *(["mask"] if layout is WITH_MASK else [])]
    response = jsonl.ragged(unit.path, batch, record, lists)
    notes: tuple[str, ...] = ()
    if layout is WITH_MASK:
        sampled = np.ma.filled(response["mask"], 0) != 0
    else:
        # NaN is not 0: the added end token stays in, and counts as a missing log-prob.
        sampled = response["logprobs"] != 0
        notes = (f"the loss mask is a guess: {_GUESS} (--guess-mask)",)
    tokens: dict[str, Any] = {
        "token_id": response["response_tokens"],
        "logp_infer": response["logprobs"],
        "loss_mask": sampled,
    }
    steps = batch.column("step").to_pylist()
    sequences: dict[str, Any] = {
        "seq_key": [str(i) for i in batch.column("sample_idx").to_pylist()],
        "step": steps,
        "prompt_len": batch.column("prompt_tokens").value_lengths().to_numpy(zero_copy_only=False),
        # The index of a prompt starts again with every step.
        "group_id": [
            None if group is None else f"{step}:{group}"
            for step, group in zip(steps, batch.column("prompt_idx").to_pylist(), strict=True)
        ],
        **{name: batch.column(field).to_pylist() for field, name in _FACTS.items()},
    }
    facts = RunFacts(trainer="open-instruct")
    if "policy_version" in unit.probe.columns:
        sequences["version_first"] = sequences["version_last"] = batch.column("model_step").to_pylist()
        facts = RunFacts(trainer="open-instruct", version_unit="step", version_granularity="sequence")
    return TokenBatch(response.lengths, tokens, sequences, facts, notes=notes)
