"""verl: record a training batch.

Where the call goes: in ``RayPPOTrainer.fit`` (verl/trainer/ppo/ray_trainer.py), after ``compute_advantage`` and
*before* rollout correction rejects tokens, because it overwrites ``response_mask``. For the entropy, delete the
line that pops ``entropys`` from ``old_log_prob``.

    recorder = TokenRecorder("dumps/", trainer="verl", facts=FACTS | {"temperature": config.rollout.temperature})
    ...
    record_verl(recorder, batch, self.global_steps)
"""

from __future__ import annotations

from typing import Any

from estr_diag.recorder import TokenRecorder

FACTS = {"logprobs": "processed", "entropy_of": "train", "train_logp": "proximal", "version_unit": "step"}


def record_verl(recorder: TokenRecorder, batch: Any, global_steps: int) -> None:
    """Record a ``DataProto``: responses [B, R] are padded on the right, everything sits at its token."""
    tensors, extra = batch.batch, batch.non_tensor_batch
    prompt_mask, response_mask = tensors["attention_mask"].tensor_split([-tensors["responses"].shape[1]], dim=1)
    recorder.write(
        step=global_steps,
        response_mask=response_mask,  # of padding; what verl calls response_mask leaves tool tokens out
        loss_mask=tensors["response_mask"],
        token_id=tensors["responses"],
        logp_infer=tensors["rollout_log_probs"],
        logp_train=tensors["old_log_probs"],
        entropy=tensors.get("entropys"),
        advantage=tensors.get("advantages"),
        group_id=extra["uid"],
        prompt_len=prompt_mask.sum(-1),
        version_first=extra.get("min_global_steps"),
        version_last=extra.get("max_global_steps"),
        trainer_version=global_steps - 1,  # step s starts from the weights that step s - 1 made
    )
