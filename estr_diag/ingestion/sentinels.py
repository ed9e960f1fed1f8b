"""Turn the values that trainers write for "nothing here" into nulls, and count them.

Sentinels seen on disk: NaN and null (vLLM, open-instruct), infinities, -9999 (vLLM's floor, kept by
SkyRL), 1.0 (open-instruct), and 0.0 on tokens that the model did not sample. A null is reported; a
sentinel read as a log-prob is a wrong number.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENGINE_FLOOR = -9990.0
"""Log-probs at or below this are an engine's floor value (-9999), not a probability."""

PLACEHOLDER = 1.0
"""A log-prob of exactly 1.0 is a placeholder: it would be a probability of 2.7."""


def clean_logp(
    name: str, values: NDArray[Any], sampled: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float32], Counter[str]]:
    """Return log-probs with NaN for every missing value, and what was found by reason.

    Parameters
    ----------
    name
        Column name, for the reasons.
    values
        Log-probs in nats, shape (N,).
    sampled
        The loss mask; None when the log has none. Reasons count sampled tokens only, since the others
        enter no statistic.
    """
    clean = np.array(values, dtype=np.float32)
    counted = np.ones(len(clean), dtype=bool) if sampled is None else sampled
    reasons: Counter[str] = Counter()

    def drop(where: NDArray[np.bool_], reason: str) -> None:
        reasons[f"{name}: {reason}"] += int(np.count_nonzero(where & counted))
        clean[where] = np.nan

    drop(~np.isfinite(clean), "null, NaN or infinite")
    with np.errstate(invalid="ignore"):
        drop(clean <= ENGINE_FLOOR, "engine floor (-9999)")
        drop(clean == PLACEHOLDER, "placeholder 1.0")
        positive = int(np.count_nonzero((clean > 0) & counted))
    if sampled is not None:
        # Fill, not a probability of 1: the model did not sample these tokens.
        clean[(clean == 0) & ~sampled] = np.nan
    if positive:
        reasons[f"{name}: positive, kept (bf16 rounding gives up to +0.1)"] = positive
    return clean, Counter({reason: n for reason, n in reasons.items() if n})


def clean_entropy(
    name: str, values: NDArray[Any], sampled: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float32], Counter[str]]:
    """Return entropies (or collision probabilities) with NaN for non-finite values, and the count of those."""
    clean = np.array(values, dtype=np.float32)
    counted = np.ones(len(clean), dtype=bool) if sampled is None else sampled
    missing = ~np.isfinite(clean)
    clean[missing] = np.nan
    found = int(np.count_nonzero(missing & counted))
    negative = int(np.count_nonzero((clean < 0) & counted))
    reasons = Counter({f"{name}: null, NaN or infinite": found, f"{name}: negative, kept": negative})
    return clean, Counter({reason: n for reason, n in reasons.items() if n})
