"""OpenRLHF: experiences saved by a hook, since the trainer writes nothing.

Action tensors have one entry fewer than there are tokens: entry t belongs to token t + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.tensors import Tensors, joined, per_sequence, require_shape, take, token_names
from estr_diag.ingestion.unpickle import load_torch

EXPERIENCES = Layout(
    "experiences",
    "hook: torch.save({'global_step': N, 'experiences': [fields of each Experience as a dict]})",
    (
        Field("sequences", "int64 [B,T]", "prompt and response", "token_id"),
        Field("attention_mask", "int64 [B,T]", "1 on real tokens"),
        Field("action_mask", "bool [B,T-1]", "entry t: the model sampled token t + 1", "loss_mask"),
        Field("rollout_log_probs", "float32 [B,T-1]", "inference engine; 0.0 where it gave none", "logp_infer"),
        Field("action_log_probs", "float32 [B,T-1]", "training engine before the update", "logp_train"),
        Field("advantages", "float32 [B,T-1]", "per token", "advantage", required=False),
        Field("rewards", "float32 [B]", "of the sequence", "reward", required=False),
        Field("truncated", "bool [B]", "generation ran out of length", "finish", required=False),
        Field("index", "list of int [B]", "number of the prompt", "group_id", required=False),
    ),
)

_ACTIONS = token_names(EXPERIENCES, "[B,T-1]")
_STEP = re.compile(r"step[_-]?(\d+)")


class OpenRLHFAdapter:
    """Reads saved experiences."""

    name: ClassVar[str] = "openrlhf"
    title: ClassVar[str] = "OpenRLHF"
    layouts: ClassVar[tuple[Layout, ...]] = (EXPERIENCES,)
    hints: ClassVar[Mapping[str, str]] = {
        "entropy": "add the entropy to the saved fields of Experience",
        "policy_version": "add the weight version to the saved fields of Experience",
        "logp_infer": "switch on an importance-sampling correction, so that vLLM returns log-probs",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise by the key of the list and the fields of an Experience."""
        strings = frozenset(head.pickle.strings) if head.kind == "torch" else frozenset()
        if not {"experiences", "sequences", "action_mask"} <= strings:
            return None
        step = _STEP.search(head.path.name)
        return Probe(
            self.name,
            head.path,
            EXPERIENCES.name,
            why="torch file with keys experiences, sequences, action_mask",
            columns=EXPERIENCES.columns(strings),
            step=int(step[1]) if step else None,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file."""
        content = load_torch(unit.path)
        if not isinstance(content, Mapping) or not isinstance(content.get("experiences"), list):
            raise InputError("a field is missing", path=unit.path, key="experiences", expected="a list of dicts")
        stated = content.get("global_step")
        step = stated if isinstance(stated, int) else unit.probe.step
        records = enumerate(content["experiences"], start=1)
        experiences = [_experience(record, unit.path, number) for number, record in records]
        if experiences:
            yield _batch(experiences, step, unit.path.stem)


def _experience(record: Any, path: Path, number: int) -> Tensors:
    tensors = take(record, EXPERIENCES, path, number)
    for name in ("sequences", "attention_mask", *_ACTIONS):
        # An experience that was split into single samples has lost its batch dimension.
        if name in tensors:
            tensors[name] = np.atleast_2d(tensors[name])
    if tensors["sequences"].ndim != 2:
        found = f"shape {list(tensors['sequences'].shape)}"
        raise InputError("not a batch of sequences", path=path, line=number, key="sequences", found=found)
    rows, width = tensors["sequences"].shape
    early = f"one fewer than the {width} tokens of 'sequences'"
    require_shape(tensors, ["attention_mask"], (rows, width), "the shape of 'sequences'", path, number)
    require_shape(tensors, _ACTIONS, (rows, width - 1), early, path, number)
    for name in ("rewards", "truncated", "index"):
        if name in tensors:
            tensors[name] = np.atleast_1d(tensors[name])
    require_shape(tensors, ["rewards", "truncated", "index"], (rows,), "one a sequence", path, number)
    return tensors


def _batch(experiences: Sequence[Tensors], step: int | None, stem: str) -> TokenBatch:
    full = joined([_actions(tensors) for tensors in experiences])
    response, _ = full.cut_prompt(full["action_mask"])
    canonical = EXPERIENCES.columns(frozenset(response.columns))
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items()}
    rows = [len(tensors["sequences"]) for tensors in experiences]
    real = np.concatenate([tensors["attention_mask"].sum(axis=1, dtype=np.int64) for tensors in experiences])
    sequences: dict[str, Any] = {
        "seq_key": [f"{stem}:{number}:{row}" for number, n in enumerate(rows) for row in range(n)],
        "step": [step] * len(response),
        # Not the cut: the first token of a sequence has no action entry and was never in it.
        "prompt_len": real - response.lengths,
    }
    if (rewards := per_sequence(experiences, "rewards", rows)) is not None:
        sequences["reward"] = rewards
    if (cut := per_sequence(experiences, "truncated", rows)) is not None:
        sequences["finish"] = [None if np.isnan(c) else "length" if c else "stop" for c in cut.tolist()]
    if (index := per_sequence(experiences, "index", rows)) is not None:
        # The number of a prompt comes back in every epoch; a group lives in one step.
        sequences["group_id"] = [None if np.isnan(i) else f"{step}:{int(i)}" for i in index.tolist()]
    return TokenBatch(response.lengths, tokens, sequences, RunFacts(trainer="OpenRLHF", train_logp="proximal"))


def _actions(tensors: Tensors) -> Ragged:
    """Return the tokens of one experience from the second on: those that have an action entry."""
    columns = {name: tensors[name] for name in _ACTIONS if name in tensors}
    columns["action_mask"] = columns["action_mask"] != 0
    columns["sequences"] = tensors["sequences"][:, 1:]
    return Ragged.from_padded(columns, tensors["attention_mask"][:, 1:] != 0)
