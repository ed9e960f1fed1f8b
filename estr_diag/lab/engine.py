"""The inference engine: weights on a coarser grid, continuous batching, new weights in the middle of a response."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from estr_diag.lab.model import Model, rounded
from estr_diag.lab.settings import Fault, LabSettings
from estr_diag.lab.task import END, PROMPT_LENGTH, Prompt, decode, draw, encode, reward

TOP_P = 0.9
ENGINE_TEMPERATURE = 0.7
"""Of the planted faults."""


@dataclass(slots=True)
class Response:
    """One response while it is being generated, and after."""

    group: int
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    collision: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    finish: str = ""
    reward: float = 0.0

    @property
    def text(self) -> str:
        """The response as text."""
        return decode(self.tokens)


class Engine:
    """Decodes all slots together, one token a tick; a slot that ends takes the next response."""

    def __init__(self, settings: LabSettings, weights: Model) -> None:
        self.settings, self.version, self.groups = settings, 0, 0
        self.model = Model(settings)
        self.generator = torch.Generator().manual_seed(settings.seed + 1)
        self.prompts = random.Random(settings.seed + 2)
        self.waiting: list[Response] = []
        self.slots: list[Response | None] = [None] * settings.slots
        self.cache = self.model.empty_cache(settings.slots)
        self.next_token = torch.zeros(settings.slots, dtype=torch.long)
        self.at = torch.zeros(settings.slots, dtype=torch.long)
        rounded(self.model, weights, settings.engine)

    def push(self, weights: Model, version: int) -> None:
        """Take new weights at once, in the middle of what is being generated."""
        self.version = version
        if self.settings.fault is Fault.FROZEN_ENGINE:
            return
        rounded(self.model, weights, self.settings.engine)
        if self.settings.fault is not Fault.STALE_CACHE:
            self._recompute()

    def add_group(self) -> None:
        """Queue the responses to one more prompt."""
        prompt = draw(self.prompts)
        self.waiting += [Response(self.groups, prompt) for _ in range(self.settings.group_size)]
        self.groups += 1

    @property
    def busy(self) -> bool:
        """Whether anything is being generated or waits to be."""
        return bool(self.waiting) or any(slot is not None for slot in self.slots)

    @torch.no_grad()
    def tick(self) -> list[Response]:
        """Decode one token in every slot; return what ended."""
        fresh = False
        for i, slot in enumerate(self.slots):
            if slot is None and self.waiting:
                self.slots[i], fresh = self.waiting.pop(0), True
        if fresh:
            self._recompute()
        logits = self.model.step(self.next_token, self.at, self.cache, self._shift())
        logp, sampled, entropy, collision = self._sample(logits)
        ended = []
        for i, slot in enumerate(self.slots):
            if slot is None:
                continue
            token = int(sampled[i])
            slot.tokens.append(token)
            slot.logp.append(float(logp[i]))
            slot.entropy.append(float(entropy[i]))
            slot.collision.append(float(collision[i]))
            slot.version.append(self.version)
            self.next_token[i], self.at[i] = token, self.at[i] + 1
            if token == END or len(slot.tokens) >= self.settings.max_response:
                ended.append(self._ended(slot))
                self.slots[i], self.next_token[i], self.at[i] = None, 0, 0
        return ended

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        temperature = ENGINE_TEMPERATURE if self.settings.fault is Fault.TEMPERATURE else self.settings.temperature
        logp = torch.log_softmax(logits / temperature, -1)
        p = logp.exp()
        if self.settings.fault is Fault.TOP_P:
            ordered, order = p.sort(-1, descending=True)
            dropped = ordered.cumsum(-1) - ordered >= TOP_P
            kept = torch.where(dropped, torch.zeros_like(ordered), ordered)
            p = torch.zeros_like(p).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
            logp = torch.where(p > 0, p.clamp(min=1e-38).log(), torch.full_like(p, -1e9))
        sampled = torch.multinomial(p, 1, generator=self.generator)
        entropy = -(p * logp.clamp(min=-1e4)).sum(-1)
        return logp.gather(-1, sampled)[:, 0], sampled[:, 0], entropy, (p * p).sum(-1)

    def _ended(self, slot: Response) -> Response:
        finished = slot.tokens[-1] == END
        slot.finish = "stop" if finished else "length"
        slot.reward = reward(slot.prompt, slot.text, finished=finished)
        if self.settings.fault is Fault.SYNTHETIC_EOS and not finished:
            # An end that nobody sampled, with the log-prob 0 of a token that had to come.
            slot.tokens[-1], slot.logp[-1] = END, 0.0
        return slot

    def _shift(self) -> int | None:
        return PROMPT_LENGTH + 16 if self.settings.fault is Fault.POSITION else None

    @torch.no_grad()
    def _recompute(self) -> None:
        """Fill the cache for every slot with the weights as they are, and stand before the next token."""
        rows = [[] if s is None else encode(s.prompt.text) + s.tokens for s in self.slots]
        stale = self.settings.fault is Fault.STALE_CACHE
        longest = max((len(row) for row in rows), default=0)
        if not longest:
            return
        padded = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        old = [(k.clone(), v.clone()) for k, v in self.cache] if stale else None
        self.model.forward(padded, self.cache, self._shift())
        for i, row in enumerate(rows):
            if row:
                self.next_token[i], self.at[i] = row[-1], len(row) - 1
            slot = self.slots[i]
            if old is not None and slot is not None and slot.tokens:
                for (k, v), (old_k, old_v) in zip(self.cache, old, strict=True):
                    k[i], v[i] = old_k[i], old_v[i]
