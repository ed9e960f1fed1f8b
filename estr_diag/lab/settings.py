"""Everything that a lab run depends on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from estr_diag.errors import UsageError


class Fault(StrEnum):
    """Something that goes wrong in real trainers, planted on purpose."""

    NONE = "none"
    TEMPERATURE = "temperature"  # the engine samples at 0.7, the trainer scores at 1
    FROZEN_ENGINE = "frozen_engine"  # pushes change the label and not the weights
    WRONG_VERSION = "wrong_version"  # every token carries the trainer's version at consumption
    SHIFT = "shift"  # logp_train sits one position early
    TOP_P = "top_p"  # the engine renormalises over the nucleus
    STALE_CACHE = "stale_cache"  # the KV cache outlives the weights that made it
    SYNTHETIC_EOS = "synthetic_eos"  # a sequence at the limit gets an end token that nobody sampled
    POSITION = "position"  # the engine counts positions wrongly from some place on


@dataclass(frozen=True, slots=True)
class LabSettings:
    """Settings of a run; the defaults give about 125,000 tokens in two minutes.

    Parameters
    ----------
    steps
        Trainer steps.
    groups, group_size
        Prompts a step, and responses to each.
    slots
        Sequences that the engine decodes at once.
    synchronous
        Wait for every response before a step, so that all tokens have lag 0.
    delay
        Steps that a finished group waits before it is trained on, once the run has begun; no token has a smaller lag.
    engine
        Grid on which the engine's weights are rounded: float8 or int8 with one scale a row, or bfloat16's.
    warmup_steps
        Supervised steps before the run; their text has wrong answers, so that there is something to learn.
    """

    seed: int = 0
    steps: int = 120
    groups: int = 8
    group_size: int = 8
    slots: int = 256
    synchronous: bool = False
    delay: int = 0
    engine: Literal["fp8", "int8", "bf16", "exact"] = "int8"
    temperature: float = 1.0
    learning_rate: float = 4e-4
    warmup_steps: int = 600
    wrong_answers: float = 0.5
    fault: Fault = Fault.NONE
    width: int = 96
    layers: int = 2
    heads: int = 4
    max_response: int = 56
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "groups",
            "group_size",
            "slots",
            "warmup_steps",
            "width",
            "layers",
            "heads",
            "threads",
            "max_response",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"lab: {name} is {getattr(self, name)}; expected 1 or more")
        if self.group_size < 2:
            raise UsageError("lab: a group of one response has no advantage; expected group_size of 2 or more")
        if self.synchronous and self.delay:
            raise UsageError("lab: a synchronous run has no delay")
        if not 0 <= self.wrong_answers < 1 or self.delay < 0 or self.temperature <= 0:
            raise UsageError("lab: expected wrong_answers in [0, 1), delay of 0 or more and a temperature above 0")
