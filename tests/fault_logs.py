"""Logs of a made-up policy with one fault planted: real categorical distributions, so that every column belongs to one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles import Arrays

VOCABULARY = 24


def sampled_log(
    seed: int,
    *,
    tokens: int = 3000,
    steps: int = 12,
    noise: float = 0.03,
    moved: float = 0.08,
    temperature: float = 1.0,
    top_p: float = 1.0,
    frozen: bool = False,
    forced: int = 0,
) -> Arrays:
    """Draw tokens from an engine's distribution and score them with a trainer's.

    Parameters
    ----------
    noise
        Of the engine's logits, nat.
    moved
        How far the weights move in a step: logits, nat.
    temperature
        The engine samples at it; the trainer scores at 1.
    top_p
        The engine renormalises over this nucleus.
    frozen
        The engine keeps its first weights; the labels say that it does not.
    forced
        Tokens with an exact 0.0 that the engine did not sample.
    """
    rng = np.random.default_rng(seed)
    length = tokens // (steps * 4)
    n = steps * 4 * length
    step = np.repeat(np.arange(steps), 4 * length)
    seq = np.arange(n) // length
    # Two sequences in four are of the step before.
    lag = np.where((seq % 4 < 2) | (step == 0), 0, 1)
    sharp = rng.choice([0.3, 1.5, 4.0], n)[:, None]
    base = sharp * rng.normal(size=(n, VOCABULARY))
    drift = rng.normal(size=(n, VOCABULARY)) * moved
    behind = np.where(frozen, step, lag)[:, None]
    trainer = base + drift * np.sqrt(behind)
    engine = (base + noise * rng.normal(size=base.shape)) / temperature
    logp, truth = engine - _log_sum(engine), trainer - _log_sum(trainer)
    p = np.exp(logp)
    entropy = -(p * logp).sum(1)
    if top_p < 1:
        order = np.argsort(-p, axis=1)
        ranked = np.take_along_axis(p, order, 1)
        kept = np.cumsum(ranked, 1) - ranked < top_p
        p = np.zeros_like(p)
        np.put_along_axis(p, order, np.where(kept, ranked, 0), 1)
        p /= p.sum(1, keepdims=True)
        logp = np.log(np.maximum(p, 1e-300))
    token = (np.cumsum(p, 1) > rng.random((n, 1))).argmax(1)
    at = np.arange(n)
    log: dict[str, Any] = {
        "seq_id": seq, "step": step, "pos": at % length, "token_id": token, "loss_mask": np.ones(n, dtype=bool),
        "logp_infer": logp[at, token], "logp_train": truth[at, token], "entropy": entropy,
        "policy_version": step - lag, "trainer_version": step,
    }  # fmt: skip
    if forced:
        ends = rng.choice(np.flatnonzero(log["pos"] == length - 1), forced, replace=False)
        log["logp_infer"][ends], log["logp_train"][ends] = 0.0, -3.0
    for name in ("logp_infer", "logp_train", "entropy"):
        log[name] = log[name].astype(np.float32)
    return log


def _log_sum(logits: Any) -> Any:
    top = logits.max(1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(1, keepdims=True))
