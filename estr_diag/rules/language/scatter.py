"""Aggregates over scopes on flat torch tensors: one value a scope, put back on its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def scope_sum(x: Tensor, index: Tensor, n: int) -> Tensor:
    """Return the sum of each scope; shape (n,)."""
    return x.new_zeros(n).index_add(0, index, x)


def scope_extreme(x: Tensor, index: Tensor, n: int, *, largest: bool) -> Tensor:
    """Return the largest or smallest value of each scope; infinite where it is empty."""
    empty = float("-inf") if largest else float("inf")
    start = x.new_full((n,), empty)
    return start.scatter_reduce(0, index, x, "amax" if largest else "amin", include_self=True)


def scope_quantile(x: Tensor, index: Tensor, n: int, level: float) -> Tensor:
    """Return a quantile of each scope by linear interpolation; NaN where it is empty."""
    import torch

    order = torch.argsort(x.detach(), stable=True)
    order = order[torch.argsort(index[order], stable=True)]
    sorted_x = x[order]
    count = torch.bincount(index, minlength=n)
    start = torch.cumsum(count, 0) - count
    place = (count - 1).clamp(min=0).to(x.dtype) * level
    low = torch.floor(place)
    last = max(len(x) - 1, 0)
    at = (start + low.long()).clamp(max=last)
    above = torch.minimum(at + 1, (start + count - 1).clamp(min=0)).clamp(max=last)
    if not len(x):
        return x.new_full((n,), float("nan"))
    value = sorted_x[at] + (place - low) * (sorted_x[above] - sorted_x[at])
    return torch.where(count > 0, value, torch.full_like(value, float("nan")))


def running(x: Tensor, index: Tensor, order: Tensor) -> Tensor:
    """Return running sums inside each scope along `order` (scopes contiguous in it), on the tokens' own places."""
    import torch

    along, scope = x[order], index[order]
    total = torch.cumsum(along, 0)
    first = torch.ones_like(scope, dtype=torch.bool)
    first[1:] = scope[1:] != scope[:-1]
    # What had been summed before the scope began, taken away from all of its tokens.
    before = torch.where(first, total - along, torch.zeros_like(total))
    number = torch.cumsum(first.long(), 0) - 1
    offsets = before[first]
    out = torch.empty_like(total)
    out[order] = total - offsets[number]
    return out
