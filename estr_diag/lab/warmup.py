"""The warm-up: the model learns to write sentences, with many wrong sums among them, so that a reward has work to do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from estr_diag.lab.model import Model
from estr_diag.lab.settings import LabSettings
from estr_diag.lab.task import END, PROMPT_LENGTH, draw, encode, padded, written

RATE, RISE, BATCH = 3e-3, 50, 64
"""Learning rate, the steps in which it rises to that, and texts a step."""


@dataclass(frozen=True, slots=True)
class WarmWeights:
    """What a run starts from, and the last loss of the warm-up in nats a token."""

    weights: Mapping[str, Tensor]
    loss: float


def warm_up(settings: LabSettings) -> WarmWeights:
    """Train a model of these settings on written responses; runs that differ in what follows may share it."""
    rng = random.Random(settings.seed + 3)
    torch.manual_seed(settings.seed)
    model = Model(settings)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss = torch.zeros(())
    for step in range(settings.warmup_steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / RISE) * (1 - 0.9 * step / settings.warmup_steps)
        rows = []
        for _ in range(BATCH):
            prompt = draw(rng)
            rows.append([*encode(prompt.text), *encode(written(prompt, rng, settings.wrong_answers)), END])
        tokens = torch.tensor(padded(rows))
        target = tokens[:, 1:].clone()
        target[:, : PROMPT_LENGTH - 1] = 0
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return WarmWeights({name: value.clone() for name, value in model.state_dict().items()}, float(loss.detach()))
