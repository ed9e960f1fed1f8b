"""TRL: record what GRPOTrainer generated and scored.

Where the call goes: into a subclass of ``GRPOTrainer`` (with ``use_vllm=True``, which gives the sampling log-probs).
``old_per_token_logps`` is there when a batch serves more than one update or an importance-sampling correction is on.

    class RecordingTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            record_trl(self.recorder, output, self.state.global_step)
            return output

    trainer.recorder = TokenRecorder("dumps/", trainer="TRL", facts=FACTS, rank=trainer.accelerator.process_index)
"""

from __future__ import annotations

from typing import Any

from estr_diag.recorder import TokenRecorder

FACTS = {"train_logp": "proximal", "version_unit": "step"}


def record_trl(recorder: TokenRecorder, output: dict[str, Any], step: int) -> None:
    """Record the dict: completions [B, R] are padded on the right, everything sits at its token."""
    mask = output["completion_mask"]
    recorder.write(
        step=step,
        response_mask=mask,
        loss_mask=mask if output.get("tool_mask") is None else mask * output["tool_mask"],
        token_id=output["completion_ids"],
        logp_infer=output["sampling_per_token_logps"],
        logp_train=output.get("old_per_token_logps"),
        advantage=output["advantages"],
        prompt_len=output["prompt_mask"].sum(-1),
        policy_version=step,  # vLLM gets the weights before it generates, and the scores are of the same ones
        trainer_version=step,
    )
