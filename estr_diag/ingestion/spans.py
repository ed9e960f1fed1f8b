"""Weight versions that an engine reports as spans of a response, as one version a token.

SGLang, and trainers over it, report ``(version, start, end)`` for each stretch of a response that one set
of weights sampled. The canonical log has a version for each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def spans_to_tokens(
    starts: ArrayLike, ends: ArrayLike, versions: ArrayLike, length: int, *, sampled: NDArray[np.bool_] | None = None
) -> np.ma.MaskedArray[Any, np.dtype[np.int64]]:
    """Return the version of each token of one response.

    Parameters
    ----------
    starts, ends
        Half-open spans [start, end) of positions in the response, 0-based, in any order, shape (K,). Empty
        spans are allowed: weights that arrived and sampled nothing.
    versions
        Version of each span, shape (K,).
    length
        Tokens of the response.
    sampled
        True where the model sampled, shape (length,). These tokens must be covered; without it, all must.

    Returns
    -------
    numpy.ma.MaskedArray
        int64, shape (length,); masked where no span lies (tool tokens).

    Raises
    ------
    ValueError
        Spans of unequal number, out of range, reversed, overlapping, or with a gap over sampled tokens.
    """
    start, end, version = (np.asarray(values, dtype=np.int64).reshape(-1) for values in (starts, ends, versions))
    if not len(start) == len(end) == len(version):
        raise ValueError(
            f"version spans: found {len(start)} starts, {len(end)} ends and {len(version)} versions; "
            "expected as many of each"
        )
    if sampled is not None and len(sampled) != length:
        raise ValueError(f"version spans: found a mask of {len(sampled)} tokens for a response of {length}")
    for wrong, problem in (
        (end < start, "ends before it starts"),
        ((start < 0) | (end > length), f"is outside the response of {length} tokens"),
    ):
        if wrong.any():
            raise ValueError(f"version spans: {_named(start, end, version, int(np.argmax(wrong)))} {problem}")

    filled = np.flatnonzero(end > start)
    filled = filled[np.argsort(start[filled], kind="stable")]
    over = np.flatnonzero(start[filled[1:]] < end[filled[:-1]])
    if len(over):
        first, second = (_named(start, end, version, int(filled[i])) for i in (over[0], over[0] + 1))
        raise ValueError(f"version spans: {first} overlaps {second}")

    # Sorted and disjoint spans hold each token at most once, in order.
    size = (end - start)[filled]
    inside = np.arange(size.sum()) + np.repeat(start[filled] - (np.cumsum(size) - size), size)
    values = np.zeros(length, dtype=np.int64)
    gap = np.ones(length, dtype=bool)
    values[inside], gap[inside] = np.repeat(version[filled], size), False
    bare = gap if sampled is None else gap & sampled
    if bare.any():
        raise ValueError(
            f"version spans: {np.count_nonzero(bare)} {'tokens' if sampled is None else 'sampled tokens'} in no span, "
            f"the first at position {int(np.argmax(bare))}"
        )
    return np.ma.masked_array(values, gap)


def _named(start: NDArray[np.int64], end: NDArray[np.int64], version: NDArray[np.int64], i: int) -> str:
    return f"span {i} [{start[i]}, {end[i]}) of version {version[i]}"
