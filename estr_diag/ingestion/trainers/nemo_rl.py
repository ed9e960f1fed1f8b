"""NeMo-RL: ``train_data_step{N}.jsonl``, written by its logger by default.

One line a sequence; every value is a list of length one, because the logged row is a batch of one.
Token lists hold prompt and response, right padded to the width of the batch; both log-probs are aligned
at their token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from estr_diag.ingestion import jsonl
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.head import FileHead

TRAIN_DATA = Layout(
    "train_data",
    "train_data_step{N}.jsonl since 2026-02: token ids and both masks",
    (
        Field("idx", "BIGINT", "index of the sequence in the step", "seq_key"),
        Field("input_lengths", "BIGINT[]", "real length; what follows is padding"),
        Field("token_ids", "INTEGER[][]", "prompt and response", "token_id"),
        Field(
            "token_loss_mask",
            "FLOAT[][]",
            "1 where the model sampled; prompt, tool and old assistant turns 0",
            "loss_mask",
        ),
        Field("sample_loss_mask", "FLOAT[]", "0 switches the whole sequence off"),
        Field(
            "generation_logprobs",
            "FLOAT[][]",
            "inference engine; 0.0 wherever the model did not generate",
            "logp_infer",
        ),
        Field(
            "prev_logprobs",
            "FLOAT[][]",
            "training engine before the update; all 0.0 when the forward was skipped",
            "logp_train",
        ),
        Field("advantages", "FLOAT[][]", "per token", "advantage", required=False),
        Field("rewards", "FLOAT[]", "reward of the sequence", "reward", required=False),
    ),
)
OLD = Layout(
    "train_data_without_mask",
    "train_data_step{N}.jsonl until 2026-02: no token ids and no mask",
    tuple(
        f
        for f in TRAIN_DATA.fields
        if f.name in ("idx", "input_lengths", "generation_logprobs", "prev_logprobs", "advantages", "rewards")
    ),
)

_STEP = re.compile(r"train_data_step(\d+)")
_OLD_REFUSAL = (
    "NeMo-RL's layout of before 2026-02 has no token_loss_mask, so tool and prompt tokens cannot be told from "
    "sampled ones. Log with NeMo-RL of 2026-03 or later (NVIDIA-NeMo/RL#1989), or accept a guess "
    "(generation_logprobs not 0 before input_lengths; loses tokens of probability 1) with --guess-mask"
)


class NemoRLAdapter:
    """Reads the logger's train data."""

    name: ClassVar[str] = "nemo-rl"
    title: ClassVar[str] = "NeMo-RL"
    layouts: ClassVar[tuple[Layout, ...]] = (TRAIN_DATA, OLD)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "switch loss_fn.force_on_policy_ratio off, so that the forward pass is run",
        "entropy": "NeMo-RL logs no entropy by token (NVIDIA-NeMo/RL#1200); add it to the batch that log_batched_dict_as_jsonl writes",
        "policy_version": "NeMo-RL writes no versions; they are in replay_buffer.pt of an async checkpoint, per group",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise by the pair of log-prob keys, each wrapped in a list of one."""
        keys = head.json_keys
        if not {"generation_logprobs", "prev_logprobs", "input_lengths"} <= keys:
            return None
        layout = OLD if "token_loss_mask" not in keys else TRAIN_DATA
        step = _STEP.search(head.path.name)
        return Probe(
            self.name,
            head.path,
            layout.name,
            why="keys generation_logprobs, prev_logprobs and input_lengths",
            columns=layout.columns(keys),
            step=int(step[1]) if step else None,
            refusal=_OLD_REFUSAL if layout is OLD else None,
            guessable=layout is OLD,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file."""
        layout = OLD if unit.probe.layout == OLD.name else TRAIN_DATA
        for record, batch in jsonl.read_records(unit.path, layout.fields):
            yield _batch(unit, layout, record, _unwrap(batch))


def _batch(unit: Unit, layout: Layout, record: int, batch: pa.RecordBatch) -> TokenBatch:
    needed = [f.name for f in layout.fields if f.required]
    jsonl.require(unit.path, batch, record, needed)
    lists = [f.name for f in layout.fields if f.type.endswith("[][]") and f.canonical in unit.probe.columns]
    full = jsonl.ragged(unit.path, batch, record, lists)
    real = full.select(full.position < full.spread(_column(batch, "input_lengths")))
    counts: Counter[str] = Counter()
    notes: tuple[str, ...] = ()
    if layout is OLD:
        sampled = real["generation_logprobs"] != 0
        notes = ("the loss mask is a guess: generation_logprobs not 0 (--guess-mask)",)
    else:
        sampled = real["token_loss_mask"] != 0
    # The prompt ends where the model first sampled; a sequence that is switched off keeps its tokens
    # in the log and out of every statistic.
    response, prompt_len = real.with_columns(loss_mask=sampled).cut_prompt(sampled)
    mask = response["loss_mask"]
    if layout is TRAIN_DATA:
        on = _column(batch, "sample_loss_mask") != 0
        counts["sequences switched off by sample_loss_mask"] = int(np.count_nonzero(~on))
        mask = mask & response.spread(on)
    canonical = {f.name: f.canonical for f in layout.fields if f.canonical}
    tokens: dict[str, Any] = {canonical[n]: response[n] for n in lists if n != "token_loss_mask" and canonical.get(n)}
    tokens["loss_mask"] = mask
    step = unit.probe.step
    sequences: dict[str, Sequence[Any]] = {
        "seq_key": [f"{unit.path.stem}:{i}" for i in batch.column("idx").to_pylist()],
        "step": [step] * len(response),
        "prompt_len": prompt_len.tolist(),
    }
    if batch.column("rewards").null_count == 0:
        sequences["reward"] = _column(batch, "rewards")
    facts = RunFacts(trainer="NeMo-RL", train_logp="proximal")
    return TokenBatch(response.lengths, tokens, sequences, facts, +counts, notes)


def _column(batch: pa.RecordBatch, name: str) -> Any:
    return batch.column(name).to_numpy(zero_copy_only=False)


def _unwrap(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Take the batch dimension of one off every list column."""
    arrays = [
        pa.compute.list_element(column, 0) if pa.types.is_list(column.type) else column for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
