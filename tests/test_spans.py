"""Version spans: every token gets the version of its span, and nothing that cannot be true is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr_diag.ingestion.spans import spans_to_tokens

Span = tuple[int, int, int]


def expand(spans: list[Span], length: int, sampled: list[bool] | None = None) -> list[int | None]:
    starts, ends, versions = ([s[i] for s in spans] for i in range(3))
    mask = None if sampled is None else np.array(sampled, dtype=bool)
    values: Any = spans_to_tokens(starts, ends, versions, length, sampled=mask)
    assert values.dtype == np.int64
    assert len(values) == length
    return list(values.tolist())


@given(
    pieces=st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 9))), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_spans_in_any_order_give_back_what_they_were_cut_from(pieces: list[tuple[int, int | None]], order: Any) -> None:
    expected = [version for size, version in pieces for _ in range(size)]
    spans, at = [], 0
    for size, version in pieces:
        if version is not None:
            spans.append((at, at + size, version))
        at += size
    order.shuffle(spans)
    assert expand(spans, at, [v is not None for v in expected]) == expected
    if None in expected:
        with pytest.raises(ValueError, match=f"in no span, the first at position {expected.index(None)}$"):
            expand(spans, at)
    else:
        assert expand(spans, at) == expected


def test_an_empty_response_and_an_empty_span() -> None:
    assert expand([], 0) == []
    assert expand([(0, 0, 4)], 0) == []
    assert expand([(0, 2, 4), (1, 1, 5), (2, 3, 6)], 3) == [4, 4, 6]


@pytest.mark.parametrize(
    ("spans", "length", "why"),
    [
        ([(0, 3, 1), (2, 4, 2)], 4, r"span 0 \[0, 3\) of version 1 overlaps span 1 \[2, 4\) of version 2"),
        ([(2, 4, 2), (0, 3, 1)], 4, r"span 1 \[0, 3\) of version 1 overlaps span 0 \[2, 4\)"),
        ([(0, 4, 1), (1, 2, 2)], 4, "overlaps"),
        ([(0, 2, 1), (0, 2, 1)], 2, "overlaps"),
        ([(0, 5, 1)], 4, r"span 0 \[0, 5\) of version 1 is outside the response of 4 tokens"),
        ([(-1, 4, 1)], 4, "outside the response"),
        ([(0, 4, 1), (7, 7, 2)], 4, "span 1 .* outside the response"),
        ([(3, 1, 1)], 4, "ends before it starts"),
        ([(0, 1, 1), (2, 4, 2)], 4, "1 tokens in no span, the first at position 1"),
        ([], 2, "2 tokens in no span, the first at position 0"),
    ],
)
def test_what_cannot_be_true_is_an_error(spans: list[Span], length: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        expand(spans, length)


def test_only_sampled_tokens_must_be_covered() -> None:
    assert expand([(0, 1, 1), (2, 4, 2)], 4, [True, False, True, True]) == [1, None, 2, 2]
    with pytest.raises(ValueError, match="1 sampled tokens in no span, the first at position 1"):
        expand([(0, 1, 1), (2, 4, 2)], 5, [True, True, True, True, False])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="found 1 starts, 2 ends and 1 versions"):
        spans_to_tokens([0], [1, 2], [3], 2)
    with pytest.raises(ValueError, match="mask of 1 tokens for a response of 2"):
        spans_to_tokens([0], [2], [3], 2, sampled=np.array([True]))
