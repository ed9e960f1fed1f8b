"""AReaL: trajectory tensors saved by a hook; its own dump holds text and is refused.

The same dict comes in two stages. Before ``compute_advantages`` everything sits at its token except
``prox_logp``, which sits one position early; after it ``logprobs``, ``loss_mask``, ``prox_logp`` and
``advantages`` all sit one early, while ``input_ids`` and ``versions`` do not. Nothing in the file names
the stage, so it is told from the mask: versions mark the sampled tokens at their own place in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, RunFacts, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.tensors import Tensors, joined, per_sequence, require_shape, take, token_names
from estr_diag.ingestion.unpickle import load_torch

TRAJECTORY = Layout(
    "trajectory",
    "hook: torch.save of the trajectory dict, or of the list of them, before or after compute_advantages",
    (
        Field("input_ids", "int32 [B,L]", "prompt and response, right padded", "token_id"),
        Field("attention_mask", "bool [B,L]", "true on real tokens"),
        Field("loss_mask", "int32 or float32 [B,L]", "1 on sampled tokens; one early in the late stage", "loss_mask"),
        Field("logprobs", "float32 [B,L]", "inference engine; one early in the late stage", "logp_infer"),
        Field("versions", "int32 [B,L]", "at the token; -1 where not generated, 0 on padding", "policy_version"),
        Field("prox_logp", "float32 [B,L]", "training engine, before the update; early", "logp_train", required=False),
        Field("advantages", "float32 [B,L]", "per token; one early", "advantage", required=False),
        Field("rewards", "float32 [B]", "of the sequence", "reward", required=False),
    ),
)
TEXT = Layout(
    "text",
    "rollout/{version}/{task}.jsonl of rollout.dump_to_file: text only, refused",
    (
        Field("task_id", "BIGINT", "the prompt"),
        Field("seqlen", "BIGINT", "tokens of prompt and response"),
        Field("head_version", "BIGINT", "minimum over all positions: -1, because the prompt has -1"),
        Field("tail_version", "BIGINT", "maximum over all positions"),
        Field("prompt", "VARCHAR", "text"),
        Field("completion", "VARCHAR", "text"),
    ),
)

_TOKENS = token_names(TRAJECTORY, "[B,L]")
_EARLY_BEFORE = ("prox_logp", "advantages")
_EARLY_AFTER = ("logprobs", "loss_mask", "prox_logp", "advantages")
_STEP = re.compile(r"step[_-]?(\d+)")
_REFUSAL = (
    "AReaL's rollout dump (rollout.dump_to_file) holds text and no log-probs, and its head_version is -1 by fault "
    "(the minimum includes the prompt). Save the tensors with a hook: in areal/trainer/rl_trainer.py, right after "
    "prox_logp is attached, torch.save(trajectories, f'rollout_batch_step_{global_step}.pt')"
)


class ARealAdapter:
    """Reads trajectory tensors of either stage."""

    name: ClassVar[str] = "areal"
    title: ClassVar[str] = "AReaL"
    layouts: ClassVar[tuple[Layout, ...]] = (TRAJECTORY, TEXT)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": "save the trajectories after prox_logp is attached, with use_decoupled_loss on",
        "entropy": "AReaL keeps no entropy by token; add it to the trajectory dict where prox_logp is attached",
        "policy_version": "keep the versions tensor in the saved trajectory",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise tensors by their keys, versions among them; the text dump by its keys."""
        if {"task_id", "seqlen", "completion"} <= head.json_keys:
            return Probe(self.name, head.path, TEXT.name, why="keys task_id, seqlen, completion", refusal=_REFUSAL)
        strings = frozenset(head.pickle.strings) if head.kind == "torch" else frozenset()
        if not {"input_ids", "loss_mask", "versions"} <= strings:
            return None
        step = _STEP.search(head.path.name)
        return Probe(
            self.name,
            head.path,
            TRAJECTORY.name,
            why="torch file with keys input_ids, loss_mask and versions",
            columns=TRAJECTORY.columns(strings),
            step=int(step[1]) if step else None,
        )

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file; the stage is decided over all of its rows."""
        content = load_torch(unit.path)
        records = content if isinstance(content, list) else [content]
        trajectories = [_trajectory(record, unit.path, number) for number, record in enumerate(records, start=1)]
        after = _is_after_advantages(trajectories, unit.path)
        step = unit.probe.step if options.step is None else options.step
        if trajectories:
            yield _batch(trajectories, after, step, unit.path.stem)


def _trajectory(record: Any, path: Path, number: int) -> Tensors:
    tensors = take(record, TRAJECTORY, path, number)
    shape = tensors["input_ids"].shape
    if len(shape) != 2:
        raise InputError(
            "not a batch of sequences",
            path=path,
            line=number,
            key="input_ids",
            found=f"shape {list(shape)}",
            expected="[B,L]",
        )
    require_shape(tensors, _TOKENS, shape, "the shape of 'input_ids'", path, number)
    require_shape(tensors, ["rewards"], shape[:1], "one a sequence", path, number)
    return tensors


def _is_after_advantages(trajectories: Sequence[Tensors], path: Path) -> bool:
    """Say whether the mask sits one early.

    At its token, the last masked-in position of a row is ``length - 1``; one early it is ``length - 2``.
    That alone misjudges a row which ends in a tool token, so whole rows are compared with the places
    that have a version, and every row must agree.
    """
    votes: list[NDArray[np.int64]] = []
    for tensors in trajectories:
        mask = tensors["loss_mask"] != 0
        generated = (tensors["versions"] >= 0) & (tensors["attention_mask"] != 0)
        wrong_at_token = (mask != generated).sum(axis=1)
        wrong_early = (mask != np.roll(generated, -1, axis=1)).sum(axis=1)
        # A row that trains on nothing says nothing.
        votes.append(np.where(mask.any(axis=1), np.sign(wrong_at_token - wrong_early), 0))
    vote = np.concatenate(votes) if votes else np.zeros(0, dtype=np.int64)
    before, after = np.flatnonzero(vote < 0), np.flatnonzero(vote > 0)
    if len(before) and len(after):
        raise InputError(
            "rows contradict each other on where loss_mask sits",
            path=path,
            key="loss_mask",
            found=f"at the token in {len(before)} row(s), such as row {before[0]}, and one position early "
            f"in {len(after)}, such as row {after[0]}",
            expected="one stage a file: before compute_advantages, or after it",
        )
    if len(vote) and not len(before) and not len(after):
        raise InputError(
            "cannot tell whether this was saved before or after compute_advantages",
            path=path,
            key="loss_mask",
            found="no row whose loss_mask follows its versions",
            expected="loss_mask 1 where versions are not -1",
        )
    return bool(len(after))


def _batch(trajectories: Sequence[Tensors], after: bool, step: int | None, stem: str) -> TokenBatch:
    full = joined([_aligned(tensors, after) for tensors in trajectories])
    # A sequence that trains on nothing still has its response: versions mark it.
    response, prompt_len = full.cut_prompt(full["loss_mask"] | (full["versions"] >= 0))
    canonical = TRAJECTORY.columns(frozenset(response.columns))
    tokens: dict[str, Any] = {name: response[field] for name, field in canonical.items()}
    tokens["policy_version"] = np.ma.masked_less(response["versions"], 0)
    rows = [len(tensors["input_ids"]) for tensors in trajectories]
    sequences: dict[str, Any] = {
        "seq_key": [f"{stem}:{number}:{row}" for number, n in enumerate(rows) for row in range(n)],
        "step": [step] * len(response),
        "prompt_len": prompt_len,
        # Versions count updates from 0: the weights that step s starts from are version s.
        "trainer_version": [step] * len(response),
    }
    if (rewards := per_sequence(trajectories, "rewards", rows)) is not None:
        sequences["reward"] = rewards
    facts = RunFacts(
        trainer="AReaL",
        train_logp="proximal" if "prox_logp" in full.columns else None,
        version_unit="update",
        version_granularity="token",
    )
    stage = "after compute_advantages: logprobs, loss_mask and" if after else "before compute_advantages:"
    return TokenBatch(response.lengths, tokens, sequences, facts, notes=(f"saved {stage} prox_logp one early",))


def _aligned(tensors: Tensors, after: bool) -> Ragged:
    """Return the real tokens of one trajectory dict, with every column at its token."""
    full = Ragged.from_padded(
        {name: tensors[name] != 0 if name == "loss_mask" else tensors[name] for name in _TOKENS if name in tensors},
        tensors["attention_mask"] != 0,
    )
    early = [name for name in (_EARLY_AFTER if after else _EARLY_BEFORE) if name in full.columns]
    return full.with_columns(**{name: full.delayed(name) for name in early})
