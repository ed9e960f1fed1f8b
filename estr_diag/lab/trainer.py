"""The trainer: GRPO on finished groups, with a mask rule between the two policies, and the truth beside what it logs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from estr_diag.lab.engine import Response
from estr_diag.lab.model import Model
from estr_diag.lab.settings import Fault, LabSettings
from estr_diag.lab.task import PROMPT_LENGTH, encode, padded
from estr_diag.lab.warmup import WarmWeights
from estr_diag.rules.base import Rule
from estr_diag.rules.tensors import decide

MICRO_BATCH = 64
"""Rows of one forward pass: always so many, so that the same weights give the same bits."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a step knows of its batch; tensors of shape [responses, tokens]."""

    responses: Sequence[Response]
    mask: Tensor
    logp_infer: Tensor
    logp_train: Tensor
    logp_replay: Tensor
    entropy: Tensor
    advantage: Tensor
    keep: Tensor
    weight: Tensor
    version: int


class Trainer:
    """Full-precision weights, their history, and the optimiser."""

    def __init__(self, settings: LabSettings, rule: Rule) -> None:
        self.settings, self.rule, self.version = settings, rule, 0
        torch.manual_seed(settings.seed)
        self.model = Model(settings)
        self.scorer = Model(settings)
        self.history: dict[int, dict[str, Tensor]] = {}
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)

    def start(self, warm: WarmWeights) -> None:
        """Begin at weights that were warmed up."""
        self.model.load_state_dict(warm.weights)
        self.remember()

    def remember(self) -> None:
        """Keep the weights of this version."""
        self.history[self.version] = copy.deepcopy(self.model.state_dict())

    def score(self, responses: Sequence[Response]) -> Scored:
        """Score a batch with the weights before its step, and with those that generated each token."""
        rows = [[*encode(r.prompt.text), *r.tokens] for r in responses]
        tokens, lengths = torch.tensor(padded(rows)), torch.tensor([len(r.tokens) for r in responses])
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths.unsqueeze(1)
        versions = _columns([r.version for r in responses], longest, torch.long)
        logp_train, entropy = self._logp(self.version, tokens, longest)
        replay = logp_train.clone()
        for version in torch.unique(versions[mask]).tolist():
            scored, _ = self._logp(version, tokens, longest)
            replay = torch.where(versions == version, scored, replay)
        advantage = _advantages(responses)
        batch: dict[str, Tensor] = {
            "logp_train": logp_train, "logp_infer": _columns([r.logp for r in responses], longest),
            "entropy": _columns([r.entropy for r in responses], longest), "loss_mask": mask, "advantage": advantage,
            "collision": _columns([r.collision for r in responses], longest), "policy_version": versions,
            "trainer_version": torch.full_like(versions, self.version),
        }  # fmt: skip
        said = decide(self.rule, compute_dtype=None, **batch)
        return Scored(
            responses, mask, batch["logp_infer"], logp_train, replay, entropy, advantage, said.keep, said.weight,
            self.version,
        )  # fmt: skip

    def step(self, scored: Scored) -> None:
        """Take one policy-gradient step on what the rule keeps, and count a version up.

        A kept token of a rule without a weight counts with its importance ratio against the engine, one of a rule with a
        weight with that weight in its place (and the ratio of this update, which is 1 on the only update of a batch).
        """
        rows = [[*encode(r.prompt.text), *r.tokens] for r in scored.responses]
        tokens, longest = torch.tensor(padded(rows)), scored.mask.shape[1]
        logits = self.model(tokens[:, :-1])[:, PROMPT_LENGTH - 1 :][:, :longest] / self.settings.temperature
        target = tokens[:, PROMPT_LENGTH:][:, :longest]
        logp = torch.log_softmax(logits, -1).gather(-1, target.unsqueeze(-1))[..., 0]
        against = scored.logp_infer if self.rule.weight_tree() is None else scored.logp_train
        ratio = scored.weight * torch.exp((logp - against).clamp(-20, 20))
        kept = scored.mask & scored.keep
        gain = torch.where(kept, ratio * scored.advantage.unsqueeze(1), torch.zeros_like(ratio))
        over = kept if self.rule.denominator == "shrinks" else scored.mask
        loss = -gain.sum() / over.sum().clamp(min=1)
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.version += 1
        self.remember()
        for old in [v for v in self.history if v < self.version - 64]:
            del self.history[old]

    @torch.no_grad()
    def _logp(self, version: int, tokens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return log-probs of the responses and entropies under the weights of a version."""
        self.scorer.load_state_dict(self.history[version])
        # The same shapes and rows for every version: at lag 0 the two log-probs are the same computation, bit for bit.
        logits = self.scorer(tokens[:, :-1])[:, PROMPT_LENGTH - 1 :][:, :longest]
        temperature = 1.0 if self.settings.fault is Fault.TEMPERATURE else self.settings.temperature
        logp = torch.log_softmax(logits / temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, tokens[:, PROMPT_LENGTH:][:, :longest].unsqueeze(-1))[..., 0], entropy


def _columns(rows: Sequence[Sequence[float]], longest: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def _advantages(responses: Sequence[Response]) -> Tensor:
    """Return (r - mean) / std inside each group; 0 where all rewards are equal."""
    rewards, groups = torch.tensor([r.reward for r in responses]), torch.tensor([r.group for r in responses])
    out = torch.zeros_like(rewards)
    for group in torch.unique(groups):
        at = groups == group
        spread = rewards[at].std(correction=0)
        if spread > 0:
            out[at] = (rewards[at] - rewards[at].mean()) / spread
    return out
