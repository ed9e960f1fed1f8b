"""Log-prob, entropy and collision of sampled tokens from logits, without a second copy of the logits.

The twin formulas are in ``statistics.md``: for p = softmax(logits / T), logp = log p[token],
entropy = -sum p log p (nats) and collision = sum p^2, over the full vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import UsageError

_CHUNK_BYTES = 64 << 20


class TokenDistribution(NamedTuple):
    """What the recorder takes from the next-token distribution, each of the shape of the tokens, in float32.

    Attributes
    ----------
    logp
        Log-prob of the token, in nats; NaN where the token is outside the vocabulary (padding of -100).
    entropy
        Of the full distribution, in nats.
    collision
        Sum of squared probabilities, without unit.
    """

    logp: Any
    entropy: Any
    collision: Any


def logprobs_and_entropy(
    logits: Any, tokens: Any, temperature: float = 1.0, chunk: int | None = None
) -> TokenDistribution:
    """Return log-prob, entropy and collision of each token under ``softmax(logits / temperature)``.

    Works on a few rows at a time in float32 (float64 for float64 logits): beside the logits it needs two
    chunks. No gradient. Logits of -inf, as top-k sampling leaves them, have probability 0.

    Parameters
    ----------
    logits
        Torch tensor or NumPy array of shape [..., V]; row t predicts token t. Not changed. A slice such as
        ``logits[:, :-1]`` is not copied.
    tokens
        Whole numbers of shape [...].
    temperature
        Sampling temperature; above 0.
    chunk
        Rows at a time; by default as many as fit 64 MiB.

    Returns
    -------
    TokenDistribution
        Tensors on the device of the logits, or arrays.

    Raises
    ------
    UsageError
        Shapes that contradict each other, tokens that are not whole numbers, a temperature of 0.
    """
    shape = tuple(logits.shape)
    if not shape or tuple(tokens.shape) != shape[:-1]:
        raise UsageError(
            f"logprobs_and_entropy: tokens have shape {list(tokens.shape)}; expected {list(shape[:-1])}, "
            f"the shape of logits {list(shape)} without the vocabulary"
        )
    if not temperature > 0:
        raise UsageError(f"logprobs_and_entropy: temperature is {temperature}; expected a number above 0")
    if chunk is not None and chunk < 1:
        raise UsageError(f"logprobs_and_entropy: chunk is {chunk}; expected 1 or more rows")
    rows = chunk or max(1, _CHUNK_BYTES // (4 * max(1, shape[-1])))
    with np.errstate(invalid="ignore", divide="ignore"):
        if isinstance(logits, np.ndarray):
            return _numpy(logits, np.asarray(tokens), temperature, rows)
    return _torch(logits, tokens, temperature, rows)


def _torch(logits: Any, tokens: Any, temperature: float, rows: int) -> TokenDistribution:
    # The caller holds a tensor, so torch is loaded; this package does not import it.
    torch: Any = sys.modules["torch"]
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise UsageError(f"logprobs_and_entropy: tokens are {tokens.dtype}; expected whole numbers")
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    n = tokens.numel()
    out = [torch.empty(n, dtype=torch.float32, device=logits.device) for _ in TokenDistribution._fields]
    flat = tokens.detach().reshape(-1).to(logits.device, torch.int64)
    vocabulary = logits.shape[-1]
    at = 0
    with torch.no_grad():
        for block in _blocks(logits.detach(), rows):
            end = at + len(block)
            token = flat[at:end, None]
            # A copy in any case: float32 logits would be changed in place otherwise.
            x = block.to(kind, copy=True)
            # The maximum first: logits have more digits before the division than float32 has after it.
            x.sub_(x.amax(dim=-1, keepdim=True))
            if temperature != 1.0:
                x.div_(temperature)
            chosen = x.gather(-1, token.clamp(0, vocabulary - 1))[:, 0]
            p = x.exp()
            total = p.sum(dim=-1)
            # 0 * -inf is NaN, and a token of probability 0 adds nothing to the entropy.
            mean = x.clamp_(min=torch.finfo(kind).min).mul_(p).sum(dim=-1) / total
            inside = (token[:, 0] >= 0) & (token[:, 0] < vocabulary)
            out[0][at:end] = torch.where(inside, chosen - total.log(), torch.nan)
            out[1][at:end] = total.log() - mean
            out[2][at:end] = p.square_().sum(dim=-1) / total.square()
            at = end
            # Before the next chunk is made, or there would be three.
            del x, p
    return TokenDistribution(*(values.reshape(tokens.shape) for values in out))


def _blocks(logits: Any, rows: int) -> Iterator[Any]:
    """Yield [n, V] views of at most `rows` rows, in order; a slice of a larger tensor is never made contiguous."""
    try:
        flat = logits.view(-1, logits.shape[-1])
    except RuntimeError:
        flat = None
    if flat is None and logits.ndim > 2:
        for part in logits:
            yield from _blocks(part, rows)
        return
    flat = logits if flat is None else flat
    for start in range(0, len(flat), rows):
        yield flat[start : start + rows]


def _numpy(logits: NDArray[Any], tokens: NDArray[Any], temperature: float, rows: int) -> TokenDistribution:
    if tokens.dtype.kind not in "iu":
        raise UsageError(f"logprobs_and_entropy: tokens are {tokens.dtype}; expected whole numbers")
    kind = np.dtype(np.float64 if logits.dtype == np.float64 else np.float32)
    vocabulary = logits.shape[-1]
    flat, token = logits.reshape(-1, vocabulary), tokens.reshape(-1)
    out = np.empty((3, len(token)), dtype=np.float32)
    for start in range(0, len(token), rows):
        here = slice(start, start + rows)
        x = flat[here].astype(kind)
        x -= x.max(axis=-1, keepdims=True)
        x /= temperature
        picked = np.clip(token[here], 0, vocabulary - 1)
        chosen = np.take_along_axis(x, picked[:, None], axis=-1)[:, 0]
        p = np.exp(x)
        total = p.sum(axis=-1)
        mean = (np.maximum(x, float(np.finfo(np.float32).min)) * p).sum(axis=-1) / total
        out[0, here] = np.where(picked == token[here], chosen - np.log(total), np.nan)
        out[1, here] = np.log(total) - mean
        out[2, here] = (p * p).sum(axis=-1) / total**2
    return TokenDistribution(*(values.reshape(tokens.shape) for values in out))
