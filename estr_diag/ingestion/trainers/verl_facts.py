"""What holds for every verl batch, in whichever container it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.ingestion.adapter import RunFacts

HOOK = (
    "add one line to RayPPOTrainer.fit, after batch = batch.union(old_log_prob): "
    "batch.save_to_disk(f'dump/global_step_{self.global_steps}.dp'), and delete the line that pops 'entropys'. "
    "With trainer.use_v1, after _compute_advantage: torch.save({tensordict, tags, keys, global_steps}) of "
    "tq.kv_batch_get(keys, partition_id, select_fields=[prompts, responses, response_mask, rollout_log_probs, "
    "old_log_probs, entropy, advantages])"
)
"""How a verl user gets both log-probs and the entropy."""

MISSING = (
    "The engine's log-probs need actor_rollout_ref.rollout.calculate_log_probs=true; everything else needs the "
    f"whole batch: {HOOK}"
)


def run_facts(temperature: Any = None) -> RunFacts:
    """Return the run facts; whether log-probs are processed depends on the engine's version and is not known."""
    return RunFacts(
        trainer="verl",
        temperature=float(temperature) if isinstance(temperature, int | float) else None,
        entropy_of="train",
        train_logp="proximal",
        version_unit="step",
        version_granularity="sequence",
    )


def remarks(tokens: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the reader of a report must know about the log-probs in `tokens`."""
    if "logp_train" not in tokens:
        return (f"no old_log_probs: this batch was saved before the training engine scored it. For both, {HOOK}",)
    sampled = tokens["loss_mask"]
    if sampled.any() and np.array_equal(tokens["logp_train"][sampled], tokens["logp_infer"][sampled]):
        return (
            "old_log_probs is a copy of rollout_log_probs (algorithm.rollout_correction.bypass_mode): delta is 0 by "
            "construction and says nothing; switch bypass_mode off for one step to measure it",
        )
    return ()


def steps(values: Sequence[Any] | NDArray[Any]) -> list[int | None]:
    """Return versions as integers; None where the server gave none."""
    return [None if value is None else int(value) for value in values]
