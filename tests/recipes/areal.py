"""AReaL: record trajectories.

Where the call goes: in areal/trainer/rl_trainer.py, right after ``prox_logp`` is attached to the trajectories and
before ``compute_advantages`` moves ``logprobs`` and ``loss_mask`` one position early. Needs ``use_decoupled_loss``.

    recorder = TokenRecorder("dumps/", trainer="AReaL", facts=FACTS, rank=rank)
    ...
    for trajectory in trajectories:
        record_areal(recorder, trajectory, global_step)
"""

from __future__ import annotations

from typing import Any

import torch

from estr_diag.recorder import TokenRecorder

FACTS = {"train_logp": "proximal", "version_unit": "update"}


def record_areal(recorder: TokenRecorder, trajectory: dict[str, Any], step: int) -> None:
    """Record a trajectory dict: tensors [B, L] hold the prompt too, and ``prox_logp`` sits one early."""
    starts = trajectory["loss_mask"].int().argmax(-1)
    recorder.write(
        step=step,
        starts=starts,
        seq_lens=trajectory["attention_mask"].sum(-1) - starts,
        loss_mask=trajectory["loss_mask"],
        token_id=trajectory["input_ids"],
        logp_infer=trajectory["logprobs"],
        logp_train=torch.roll(trajectory["prox_logp"], 1, dims=-1),
        policy_version=trajectory["versions"],  # by token; -1, where the model did not generate, reads as missing
        trainer_version=step,  # updates count from 0: step s starts from version s
        prompt_len=starts,
        reward=trajectory.get("rewards"),
    )
