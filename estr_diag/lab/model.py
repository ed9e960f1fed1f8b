"""A decoder-only transformer, small enough for a CPU: whole sequences for the trainer, one token at a time for the engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from estr_diag.lab.settings import LabSettings
from estr_diag.lab.task import LONGEST_WRITTEN, PROMPT_LENGTH, VOCABULARY

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, shape [slots, heads, context, width / heads]."""


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before each."""

    def __init__(self, settings: LabSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [batch, heads, tokens, width / heads]."""
        batch, tokens, width = x.shape
        parts = self.mix(self.before(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        return q, k, v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the block's output from what its heads attended to."""
        batch, _, tokens, _ = attended.shape
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        y: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return y


class Model(nn.Module):
    """The policy; its logits are of the next token."""

    def __init__(self, settings: LabSettings) -> None:
        super().__init__()
        self.context = PROMPT_LENGTH + max(settings.max_response, LONGEST_WRITTEN) + 2
        self.token = nn.Embedding(VOCABULARY, settings.width)
        self.place = nn.Embedding(self.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.last, self.head = nn.LayerNorm(settings.width), nn.Linear(settings.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None, shift_from: int | None = None) -> Tensor:
        """Return logits of whole sequences, shape [batch, tokens, vocabulary]; fills `cache` where it is given."""
        places = self._places(torch.arange(tokens.shape[1]), shift_from)
        x = self.token(tokens) + self.place(places)
        for i, block in enumerate(self.blocks):
            q, k, v = block.qkv(x)  # type: ignore[operator]
            if cache is not None:
                cache[i][0][:, :, : tokens.shape[1]], cache[i][1][:, :, : tokens.shape[1]] = k, v
            x = block.rest(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True))  # type: ignore[operator]
        logits: Tensor = self.head(self.last(x))
        return logits

    def step(self, tokens: Tensor, at: Tensor, cache: Cache, shift_from: int | None = None) -> Tensor:
        """Return logits after one more token a slot, at its own position; shape [slots, vocabulary]."""
        x = (self.token(tokens) + self.place(self._places(at, shift_from))).unsqueeze(1)
        rows = torch.arange(len(tokens))
        for i, block in enumerate(self.blocks):
            q, k, v = block.qkv(x)  # type: ignore[operator]
            keys, values = cache[i]
            keys[rows, :, at], values[rows, :, at] = k[:, :, 0], v[:, :, 0]
            longest = int(at.max()) + 1
            seen = (torch.arange(longest) <= at.unsqueeze(1))[:, None, None]
            attended = functional.scaled_dot_product_attention(
                q, keys[:, :, :longest], values[:, :, :longest], attn_mask=seen
            )
            x = block.rest(x, attended)  # type: ignore[operator]
        logits: Tensor = self.head(self.last(x))[:, 0]
        return logits

    def empty_cache(self, slots: int) -> Cache:
        """Return a cache for some slots."""
        blocks = [b for b in self.blocks if isinstance(b, Block)]
        width = self.token.embedding_dim
        shape = (slots, blocks[0].heads, self.context, width // blocks[0].heads)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in blocks]

    def _places(self, at: Tensor, shift_from: int | None) -> Tensor:
        # The planted fault: from some place on, positions are counted two too far.
        return at if shift_from is None else torch.where(at >= shift_from, (at + 2).clamp(max=self.context - 1), at)


def rounded(model: Model, source: Model, grid: str) -> None:
    """Copy weights on a coarser grid: bfloat16's, or float8 (e4m3) or 127 levels (int8) with one scale a row."""
    with torch.no_grad():
        for to, given in zip(model.parameters(), source.parameters(), strict=True):
            if grid == "exact" or given.dim() < 2:
                to.copy_(given)
            elif grid == "bf16":
                to.copy_(given.bfloat16().float())
            else:
                scale = given.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (448 if grid == "fp8" else 127)
                levels = (
                    (given / scale).to(torch.float8_e4m3fn).float() if grid == "fp8" else torch.round(given / scale)
                )
                to.copy_(levels * scale)
