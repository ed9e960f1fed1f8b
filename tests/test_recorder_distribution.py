"""logprobs_and_entropy against float64, in chunks, on slices, and without touching the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from estr_diag.errors import UsageError
from estr_diag.recorder import logprobs_and_entropy


def reference(logits: NDArray[Any], tokens: NDArray[np.int64], temperature: float) -> list[NDArray[np.float64]]:
    x = logits.astype(np.float64) / temperature
    x = x - x.max(-1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    p = np.exp(logp)
    with np.errstate(invalid="ignore"):
        entropy = -np.where(p > 0, p * logp, 0.0).sum(-1)
    return [np.take_along_axis(logp, tokens[..., None], -1)[..., 0], entropy, (p * p).sum(-1)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1,), (7,), (3, 5), (2, 2, 3)]),
    vocabulary=st.integers(1, 300),
    scale=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    chunk=st.sampled_from([None, 1, 2, 4]),
    kind=st.sampled_from(["float32", "float64", "bfloat16", "numpy32", "numpy64"]),
)
def test_it_is_the_float64_value(
    seed: int, shape: tuple[int, ...], vocabulary: int, scale: float, temperature: float, chunk: int | None, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, scale, (*shape, vocabulary))
    tokens = rng.integers(0, vocabulary, shape)
    if kind.startswith("numpy"):
        logits: Any = values.astype("float" + kind[5:])
        exact = logits
        given_tokens: Any = tokens
    else:
        logits = torch.tensor(values).to(getattr(torch, kind)).requires_grad_()
        exact, given_tokens = logits.detach().double().numpy(), torch.tensor(tokens)
    found = logprobs_and_entropy(logits, given_tokens, temperature, chunk)
    for one, expected in zip(found, reference(exact, tokens, temperature), strict=True):
        assert tuple(one.shape) == shape
        # float32 holds a log-prob of -2000 to 1e-4.
        np.testing.assert_allclose(np.asarray(one), expected, rtol=3e-6, atol=3e-6)
    if not kind.startswith("numpy"):
        assert not any(one.requires_grad for one in found)


def test_truncated_logits_have_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, -torch.inf, -torch.inf]])
    for given_logits, tokens in ((logits, torch.tensor([2, 0])), (logits.numpy(), np.array([2, 0]))):
        logp, entropy, collision = logprobs_and_entropy(given_logits, tokens)
        np.testing.assert_allclose(np.asarray(logp), [-np.inf, 0.0])
        np.testing.assert_allclose(np.asarray(entropy), [np.log(2), 0.0], rtol=1e-6)
        np.testing.assert_allclose(np.asarray(collision), [0.5, 1.0], rtol=1e-6)


def test_the_logits_are_not_changed_and_padding_tokens_are_nan() -> None:
    logits = torch.randn(2, 4, 11)
    before = logits.clone()
    found = logprobs_and_entropy(logits, torch.tensor([[0, 1, 2, -100], [0, 11, 2, 3]]), temperature=0.5)
    assert torch.equal(logits, before)
    assert torch.isnan(found.logp).tolist() == [[False, False, False, True], [False, True, False, False]]
    assert bool(torch.isfinite(found.entropy).all())


def test_a_nan_logit_is_loud() -> None:
    logits = torch.zeros(2, 3)
    logits[0, 1] = torch.nan
    for values in logprobs_and_entropy(logits, torch.tensor([0, 0])):
        assert torch.isnan(values).tolist() == [True, False]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_slice_is_not_copied(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = torch.randn(3, 6, 17), torch.randint(0, 17, (3, 5))
    whole = logprobs_and_entropy(logits[:, :-1].contiguous(), tokens)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    parts = logprobs_and_entropy(logits[:, :-1], tokens, chunk=chunk)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other)
    column_major = torch.randn(17, 5).t()
    assert logprobs_and_entropy(column_major, tokens[0], chunk=chunk).logp.shape == (5,)


@pytest.mark.parametrize(
    ("logits", "tokens", "options", "says"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, 4).long(), {}, r"tokens have shape \[2, 4\]; expected \[2, 3\]"),
        (torch.zeros(2, 5), torch.zeros(2), {}, "expected whole numbers"),
        (np.zeros((2, 5)), np.zeros(2), {}, "expected whole numbers"),
        (torch.zeros(2, 5), torch.zeros(2).long(), {"temperature": 0.0}, "temperature is 0.0"),
        (torch.zeros(2, 5), torch.zeros(2).long(), {"chunk": 0}, "chunk is 0"),
    ],
)
def test_a_wrong_argument_is_named(logits: Any, tokens: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        logprobs_and_entropy(logits, tokens, **options)


def test_no_rows() -> None:
    for logits, tokens in ((torch.zeros(0, 5), torch.zeros(0).long()), (np.zeros((0, 5)), np.zeros(0, dtype=int))):
        assert all(values.shape == (0,) for values in logprobs_and_entropy(logits, tokens))
