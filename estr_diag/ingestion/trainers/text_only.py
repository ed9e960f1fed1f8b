"""Dumps of text, scores or lengths: recognised, and refused with the way to token-level data.

Parsed as a log they would give an empty table, and a report with nothing in it. None of the trainers
below writes log-probs to disk, so the way out is always to record them in the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from estr_diag.errors import RefusedError
from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.head import FileHead

ROLL_RLVR = Layout(
    "rollout_dump",
    "rollout_dump_data.step_{N}.jsonl of rollout_dump_dir: one line with a dict of lists, text only, refused",
    (
        Field("global_step", "BIGINT[]", "trainer step"),
        Field("responses", "VARCHAR[]", "decoded response"),
        Field("scores", "DOUBLE[]", "score of the response"),
        Field("id", "VARCHAR[]", "name of the prompt", required=False),
        Field("prompt", "VARCHAR[]", "text", required=False),
        Field("domain", "VARCHAR[]", "data set", required=False),
        Field("sampling_params", "VARCHAR[]", "meta_info as JSON text", required=False),
    ),
)
ROLL_AGENTIC = Layout(
    "agentic_rollout_dump",
    "the same file of the agentic pipeline: trajectories as text, refused",
    (
        Field("global_step", "BIGINT[]", "trainer step"),
        Field("trajectory_data", "VARCHAR[]", "trajectory as JSON text"),
        Field("messages", "VARCHAR[]", "conversation", required=False),
    ),
)
SWIFT_COMPLETIONS = Layout(
    "completions",
    "completions.jsonl of log_completions: one dict of lists a log call, text only, refused",
    (
        Field("step", "VARCHAR[]", "trainer step, as text"),
        Field("prompt", "VARCHAR[]", "text"),
        Field("completion", "VARCHAR[]", "text"),
        Field("advantages", "DOUBLE[]", "of the completion"),
        Field("entropy", "DOUBLE[]", "log_entropy: one mean a completion, no value a token", required=False),
    ),
)
TINKER_SUMMARIES = Layout(
    "rollout_summaries",
    "iteration_*/*_rollout_summaries.jsonl of rollout_json_export: lengths and rewards, refused",
    (
        Field("iteration", "BIGINT", "training iteration"),
        Field("group_idx", "BIGINT", "prompt group"),
        Field("traj_idx", "BIGINT", "trajectory in the group"),
        Field("total_reward", "DOUBLE", "of the trajectory"),
        Field("steps", "JSON", "lengths and rewards of each turn"),
        Field("sampling_client_step", "BIGINT", "step of the weights that sampled", required=False),
        Field("split", "VARCHAR", "train or test", required=False),
    ),
)


class TextOnlyAdapter:
    """Recognises a dump by its keys and the types of its values; reads nothing."""

    name: ClassVar[str]
    title: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]]
    hints: ClassVar[Mapping[str, str]] = {}
    step_key: ClassVar[str]
    refusal: ClassVar[str]

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise the first layout all of whose required fields are there, lists where it has lists."""
        for layout in self.layouts:
            required = [f for f in layout.fields if f.required]
            if all(f.name in head.json_keys and _fits(f, head.json_record[f.name]) for f in required):
                why = "keys " + ", ".join(f.name for f in required)
                step = _step(head.json_record[self.step_key])
                return Probe(self.name, head.path, layout.name, why, step=step, refusal=self.refusal)
        return None

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Keep files apart."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Refuse."""
        raise RefusedError(self.refusal, path=unit.path)


class RollAdapter(TextOnlyAdapter):
    """ROLL's rollout dump."""

    name = "roll"
    title = "ROLL"
    layouts = (ROLL_RLVR, ROLL_AGENTIC)
    step_key = "global_step"
    refusal = (
        "ROLL's rollout dump (rollout_dump_dir) holds decoded text and scores, no tokens and no log-probs. "
        "The batch of the pipeline has both: infer_logprobs and, after the actor recomputed them, old_log_probs "
        "[B, L-1], one position early. Record them there with estr_diag.TokenRecorder, or write them as a table and "
        "read it with --map (shift = 1)"
    )


class MsSwiftAdapter(TextOnlyAdapter):
    """ms-swift's completions."""

    name = "ms-swift"
    title = "ms-swift"
    layouts = (SWIFT_COMPLETIONS,)
    step_key = "step"
    refusal = (
        "ms-swift's completions.jsonl (log_completions) holds text, and with log_entropy a mean entropy each; "
        "no tokens and no log-probs. The inputs of GRPOTrainer's loss have rollout_per_token_logps (sampling engine) "
        "and old_per_token_logps (training engine). Record them there with estr_diag.TokenRecorder, or write them as a "
        "table and read it with --map"
    )


class TinkerAdapter(TextOnlyAdapter):
    """tinker-cookbook's rollout summaries."""

    name = "tinker-cookbook"
    title = "tinker-cookbook"
    layouts = (TINKER_SUMMARIES,)
    step_key = "iteration"
    refusal = (
        "tinker-cookbook's rollout summaries (rollout_json_export) hold lengths, rewards and sampling_client_step, no "
        "tokens and no log-probs. In train_step the data have loss_fn_inputs logprobs (sampler), mask and "
        "target_tokens, and forward_backward returns the trainer's logprobs in loss_fn_outputs, all at their target "
        "token. Record them there with estr_diag.TokenRecorder, or write them as a table and read it with --map"
    )


def _fits(field: Field, value: Any) -> bool:
    return isinstance(value, list) == field.type.endswith("[]") or field.type == "JSON"


def _step(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    try:
        return int(first)
    except (TypeError, ValueError):
        return None
