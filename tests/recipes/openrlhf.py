"""OpenRLHF: record experiences.

Where the call goes: in the trainer's ``fit`` loop, after ``make_experience_batch``. Switch an importance-sampling
correction on, so that vLLM is asked for log-probs.

    recorder = TokenRecorder("dumps/", trainer="OpenRLHF", facts=FACTS)
    ...
    for experience in experiences:
        record_openrlhf(recorder, experience, global_step)
"""

from __future__ import annotations

from typing import Any

from estr_diag.recorder import TokenRecorder

FACTS = {"logprobs": "processed", "train_logp": "proximal"}


def record_openrlhf(recorder: TokenRecorder, experience: Any, step: int) -> None:
    """Record an ``Experience``: action tensors [B, T - 1] hold the prompt too, and entry t belongs to token t + 1."""
    starts = experience.action_mask.int().argmax(-1)
    real = experience.attention_mask
    recorder.write(
        step=step,
        starts=starts,
        response_mask=real[:, 1:],
        loss_mask=experience.action_mask,
        token_id=experience.sequences[:, 1:],
        logp_infer=experience.rollout_log_probs,
        logp_train=experience.action_log_probs,
        advantage=experience.advantages,
        prompt_len=real.cumsum(-1).gather(-1, starts[:, None]),
        reward=experience.rewards,
        group_id=[f"{step}:{number}" for number in experience.index],  # the number of a prompt returns in every epoch
    )
