"""NumPy twins of the built-in rules, from their definitions in papers and trainers; they share no code with the package.

`Tokens` are the counted tokens in order of sequence and position: mu is the sampler's log-prob, q the trainer's before
the update, pi the trainer's during it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Values = dict[str, float]
Twin = Callable[["Tokens", Values, str], "tuple[Bools, Floats | None]"]


@dataclass
class Tokens:
    seq: NDArray[Any]
    pos: NDArray[Any]
    turn: NDArray[Any]
    group: NDArray[Any]
    step: NDArray[Any]
    mu: Floats
    q: Floats
    pi: Floats
    entropy: Floats
    collision: Floats
    advantage: Floats
    reward: Floats
    version: NDArray[Any]
    trainer_version: NDArray[Any]
    first: NDArray[Any]
    last: NDArray[Any]
    finished: Bools

    def logs(self, edge: str) -> tuple[Floats, Floats]:
        """Numerator and denominator of the ratio."""
        return {"B": (self.q, self.mu), "U": (self.pi, self.q), "E": (self.pi, self.mu)}[edge]

    @property
    def run(self) -> NDArray[Any]:
        """Number of the run of consecutive positions."""
        starts = np.r_[True, (np.diff(self.seq) != 0) | (np.diff(self.pos) != 1)]
        return np.cumsum(starts)

    def over(self, scope: NDArray[Any], x: Floats, how: Callable[[Floats], float]) -> Floats:
        """An aggregate over a scope, on each of its tokens."""
        out = np.empty(len(x))
        for s in np.unique(scope):
            out[scope == s] = how(x[scope == s])
        return out


def c20(d: Floats) -> Floats:
    return np.clip(d, -20, 20)


def k(kind: int, d: Floats) -> Floats:
    return {1: -d, 2: d**2 / 2, 3: np.exp(d) - 1 - d}[kind]


def binary_kl(a: Floats, b: Floats, eps: float) -> Floats:
    a, b = np.clip(a, eps, 1 - eps), np.clip(b, eps, 1 - eps)
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def both_kl(a: Floats, b: Floats, eps: float) -> Floats:
    return np.maximum(binary_kl(a, b, eps), binary_kl(b, a, eps))


HOW: dict[str, Callable[[Floats], float]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def token(condition: Callable[[Floats, Values], Bools], weight: Callable[[Floats], Floats] | None = None) -> Twin:
    """A rule of the log ratio alone."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        d = new - old
        return condition(d, p), None if weight is None else weight(d)

    return twin


def probability(condition: Callable[[Floats, Floats, Floats, Values], Bools], weighted: bool) -> Twin:
    """A rule of the two probabilities and the sign of the advantage."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        return condition(np.exp(new), np.exp(old), t.advantage, p), np.exp(new - old) if weighted else None

    return twin


def sequence(
    x: Callable[[Floats], Floats], how: str, condition: Callable[[Floats, Values], Bools], scope: str = "seq",
    weight: Callable[[Tokens, Floats, Floats], Floats] | None = None,
) -> Twin:  # fmt: skip
    """A rule of an aggregate of a function of the log ratio over a scope."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        d = new - old
        value = t.over(getattr(t, scope), x(d), HOW[how])
        return condition(value, p), None if weight is None else weight(t, d, value)

    return twin


def everything(weight: Callable[[Tokens, Floats, Values], Floats]) -> Twin:
    """A weight that masks nothing."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        return np.ones(len(t.seq), dtype=bool), weight(t, new - old, p)

    return twin


def ppo_keeps(ratio: Floats, advantage: Floats, low: float, high: float) -> Bools:
    return ~(((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low)))


def mean_by_sequence(t: Tokens, x: Floats) -> Floats:
    return t.over(t.seq, x, np.mean)


def product(t: Tokens, d: Floats) -> Floats:
    return np.exp(c20(t.over(t.seq, d, np.sum)))


def step_normalised(t: Tokens, w: Floats) -> Floats:
    mean = t.over(t.step, w, np.mean)
    return np.where(mean > 1e-8, w / mean, w)


def step_normalised_by_sequence(t: Tokens, w: Floats) -> Floats:
    out = w.copy()
    for s in np.unique(t.step):
        at = t.step == s
        mean = np.mean([w[at & (t.seq == q)][0] for q in np.unique(t.seq[at])])
        if mean > 1e-8:
            out[at] = w[at] / mean
    return out


def clipper(ratio: Callable[[Tokens, Floats], Floats], weight: Callable[[Tokens, Floats, Floats], Floats]) -> Twin:
    """PPO's clip on some ratio."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        r = ratio(t, new - old)
        keep = ppo_keeps(r, t.advantage, p["low"], p["high"])
        if "c" in p:
            keep &= ~((t.advantage < 0) & (r > p["c"]))
        return keep, weight(t, new - old, r)

    return twin


def m2po(t: Tokens, p: Values, edge: str) -> tuple[Bools, None]:
    new, old = t.logs(edge)
    square, keep = (new - old) ** 2, np.ones(len(t.seq), dtype=bool)
    for s in np.unique(t.step):
        at = np.flatnonzero(t.step == s)
        # largest first; of equal ones the later token goes first
        order = at[np.lexsort((-t.pos[at], -t.seq[at], -square[at]))]
        left = square[at].sum()
        for dropped in range(len(order)):
            rest = len(order) - dropped
            if left / rest < p["c"] or rest == 1:
                break
            keep[order[dropped]] = False
            left = square[order[dropped + 1 :]].sum()
    return keep, None


def fipo(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats]:
    new, old = t.logs(edge)
    d, out = new - old, np.empty(len(t.seq))
    for i in range(len(d)):
        later = np.flatnonzero((t.seq == t.seq[i]) & (t.pos >= t.pos[i]))
        out[i] = np.exp(sum(p["gamma"] ** (t.pos[j] - t.pos[i]) * d[j] for j in later))
    small = (t.advantage < 0) & (np.exp(d) > 4)
    return np.ones(len(d), dtype=bool), np.where(small, np.clip(out, 0.8, 1), np.clip(out, 1, p["high"]))


def geo_mean(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats]:
    new, old = t.logs(edge)
    d, a = new - old, t.advantage
    keep = ~(((a > 0) & (d > p["high"])) | ((a < 0) & (d < -p["low"])))
    cut = np.where(a >= 0, np.minimum(d, p["high"]), np.maximum(d, -p["low"]))
    return keep, np.exp(mean_by_sequence(t, cut)) / t.over(t.seq, cut, len)


def sapo(t: Tokens, d: Floats, p: Values) -> Floats:
    r = np.exp(c20(d))
    g = 1 / (1 + np.exp(-np.where(t.advantage > 0, p["t_pos"], p["t_neg"]) * (r - 1)))
    return np.asarray(4 * g * (1 - g) * r, dtype=np.float64)


def vespo(t: Tokens, d: Floats, p: Values) -> Floats:
    log_w = np.clip(t.over(t.seq, c20(d), np.sum), np.log(1e-8), 20)
    positive = t.advantage >= 0
    kk, ll = np.where(positive, p["k_pos"], p["k_neg"]), np.where(positive, p["l_pos"], p["l_neg"])
    return np.asarray(np.exp(ll + kk * log_w - ll * np.exp(log_w)), dtype=np.float64)


def simple(condition: Callable[[Tokens, Values], Bools]) -> Twin:
    """A rule that looks at no ratio."""
    return lambda t, p, edge: (condition(t, p), None)


def dppo_kl(a: Floats, b: Floats, advantage: Floats, p: Values) -> Bools:
    kl = b * (np.log(b) - np.log(a)) + (1 - b) * np.log((1 - b + 1e-8) / (1 - a + 1e-8))
    return np.asarray(np.where(advantage > 0, (kl <= p["high"]) | (a <= b), (kl <= p["low"]) | (a >= b)), dtype=bool)


def verl_sequence(how: str, kind: int) -> Twin:
    """verl's rejection by a sequence's sum, mean or max of an estimator of the clamped log ratio."""

    def condition(x: Floats, p: Values) -> Bools:
        return (np.log(p["low"]) <= x) & (x <= np.log(p["high"])) if kind == 1 else x <= p["c"]

    return sequence(lambda d: k(kind, c20(d)), how, condition)


def areal_binary_kl(how: str) -> Twin:
    """AReaL's rejection by a sequence's binary KL."""

    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats | None]:
        new, old = t.logs(edge)
        value = t.over(t.seq, both_kl(np.exp(new), np.exp(old), p["eps"]), HOW[how])
        return value <= p["high"], np.exp(new - old)

    return twin


def decoupled(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats]:
    r_u, r_b = np.exp(c20(t.pi - t.q)), np.exp(c20(t.q - t.mu))
    return ppo_keeps(r_u, t.advantage, p["clip_low"], p["clip_high"]), np.clip(r_b, 0, p["high"]) * r_u


def tv_seq_sign(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats]:
    new, old = t.logs(edge)
    d = new - old
    r = np.exp(np.clip(d, -10, 10))
    return ~((mean_by_sequence(t, np.abs(r - 1)) > p["high"]) & (np.sign(d) * t.advantage > 0)), r


def prime_2026_02(t: Tokens, p: Values, edge: str) -> tuple[Bools, Floats]:
    new, old = t.logs(edge)
    r, geo = np.exp(new - old), np.exp(mean_by_sequence(t, new - old))
    keep = (r >= p["low"]) & (r <= p["high"]) & (geo >= p["geo_low"]) & (geo <= p["geo_high"])
    return keep & (t.over(t.seq, r, np.min) >= p["min_low"]) & (t.over(t.seq, r, np.max) <= p["max_high"]), r


def band(x: Floats, p: Values) -> Bools:
    return (x >= p["low"]) & (x <= p["high"])


def mean_difference(scope: str, how: str) -> Twin:
    def twin(t: Tokens, p: Values, edge: str) -> tuple[Bools, None]:
        new, old = t.logs(edge)
        return band(t.over(getattr(t, scope), np.exp(new) - np.exp(old), HOW[how]), p), None

    return twin


TWINS: dict[str, Twin] = {
    "none": simple(lambda t, p: np.ones(len(t.seq), dtype=bool)),
    "estr": lambda t, p, e: (np.subtract(*t.logs(e)) ** 2 / (t.entropy + p["eps"]) <= p["tau"], None),
    "gini_scaled": lambda t, p, e: (np.subtract(*t.logs(e)) ** 2 / (1 - t.collision + p["eps"]) <= p["tau"], None),
    "icepop": token(lambda d, p: band(np.exp(c20(d)), p), lambda d: np.exp(c20(d))),
    "band": token(lambda d, p: np.abs(d) <= np.log(p["c"])),
    "kpop": probability(lambda a, b, adv, p: both_kl(a, b, p["eps"]) <= p["phi"], weighted=False),
    "token_k1": token(lambda d, p: (np.log(p["low"]) <= -c20(d)) & (-c20(d) <= np.log(p["high"]))),
    "token_k2": token(lambda d, p: k(2, c20(d)) <= p["c"]),
    "token_k3": token(lambda d, p: k(3, c20(d)) <= p["c"]),
    "kl_k1": token(band, np.exp),
    "kl_k2": token(lambda d, p: d**2 / 2 <= p["high"], np.exp),
    "kl_k3": token(lambda d, p: np.exp(-d) - 1 + d <= p["high"], np.exp),
    "prob_diff": probability(lambda a, b, adv, p: band(a - b, p), weighted=False),
    "dppo_tv": probability(lambda a, b, adv, p: np.where(adv > 0, a - b <= p["high"], a - b >= -p["low"]), weighted=True),
    "dppo_kl": probability(dppo_kl, weighted=True),
    "ipo": probability(lambda a, b, adv, p: np.abs(a - b) <= p["c"], weighted=True),
    "ref_kl_region": probability(lambda a, b, adv, p: a - b >= -p["low"], weighted=False),
    "rollout_is": token(
        lambda d, p: (1 - p["low"] < np.exp(c20(d))) & (np.exp(c20(d)) < 1 + p["high"]), lambda d: np.exp(c20(d))
    ),
    "partial_offpolicy": simple(lambda t, p: t.version == t.over(t.seq, t.version.astype(float), np.max)),
    "staleness": simple(lambda t, p: t.trainer_version - t.version <= p["k"]),
    "staleness_first": simple(lambda t, p: t.trainer_version - t.first <= p["k"]),
    "staleness_last": simple(lambda t, p: t.trainer_version - t.last <= p["k"]),
    "overlong": simple(lambda t, p: t.finished),
    "zero_adv_group": simple(
        lambda t, p: t.over(t.step * 1000 + t.group, (t.advantage != 0).astype(float), np.max) > 0
    ),
    "top_entropy": simple(
        lambda t, p: t.entropy >= t.over(t.step, t.entropy, lambda x: float(np.quantile(x, 1 - p["rho"])))
    ),
    "geo": sequence(lambda d: d, "mean", lambda x, p: band(np.exp(x), p)),
    "product": sequence(lambda d: d, "sum", lambda x, p: band(np.exp(c20(x)), p)),
    "outlier_seq": sequence(
        lambda d: ((np.exp(c20(d)) > 100.0) | (np.exp(c20(d)) < 1e-4)).astype(float), "max", lambda x, p: x == 0
    ),
    "veto": sequence(lambda d: d, "min", lambda x, p: x >= np.log(p["c"])),
    "mult_prob_error": sequence(lambda d: np.exp(np.abs(d)), "mean", lambda x, p: x <= p["c"]),
    "segment": sequence(lambda d: d, "mean", lambda x, p: band(np.exp(x), p), "run"),
    "segment_diff": mean_difference("run", "mean"),
    "sequence_diff": mean_difference("seq", "sum"),
    "opsm": lambda t, p, e: (
        (t.advantage >= 0) | (mean_by_sequence(t, -np.subtract(*t.logs(e))) <= p["threshold"]), None
    ),
    "turn_ppo": clipper(
        lambda t, d: np.exp(t.over(t.seq * 1000 + t.turn, d, np.mean)), lambda t, d, r: r
    ),
    "prime_2026_02": prime_2026_02,
    "tv_seq_sign": tv_seq_sign,
    "m2po": m2po,
    **{
        f"seq_{how}_k{kind}": verl_sequence(how, kind)
        for how in ("sum", "mean", "max")
        for kind in (1, 2, 3)
        if (how, kind) != ("max", 1)
    },
    **{
        f"seq_{name}_{how}": sequence(x, how, condition, "seq", weight)
        for how in ("sum", "mean", "max")
        for name, x, condition, weight in (
            ("ratio", lambda d: d, lambda v, p: band(np.exp(v), p), lambda t, d, v: np.exp(mean_by_sequence(t, d))),
            ("kl_k1", lambda d: d, band, lambda t, d, v: np.exp(d)),
            ("kl_k2", lambda d: d**2 / 2, lambda v, p: v <= p["high"], lambda t, d, v: np.exp(d)),
            ("kl_k3", lambda d: np.exp(-d) - 1 + d, lambda v, p: v <= p["high"], lambda t, d, v: np.exp(d)),
        )
    },
    **{f"seq_binary_kl_{how}": areal_binary_kl(how) for how in ("sum", "mean", "max")},
    "tis_token": everything(lambda t, d, p: np.clip(np.exp(c20(d)), p["low"], p["high"])),
    "tis_sequence": everything(lambda t, d, p: np.clip(product(t, d), p["low"], p["high"])),
    "tis_geo": everything(lambda t, d, p: np.clip(np.exp(mean_by_sequence(t, d)), p["low"], p["high"])),
    "tis_segment": everything(lambda t, d, p: np.clip(np.exp(t.over(t.run, d, np.mean)), p["low"], p["high"])),
    "tis_token_norm": everything(lambda t, d, p: step_normalised(t, np.clip(np.exp(c20(d)), p["low"], p["high"]))),
    "tis_sequence_norm": everything(
        lambda t, d, p: step_normalised_by_sequence(t, np.clip(product(t, d), p["low"], p["high"]))
    ),
    "tis_pg": everything(lambda t, d, p: np.clip(np.exp(d), 0, p["high"])),
    "topr": everything(lambda t, d, p: np.where(t.reward > 0, 1.0, np.clip(np.exp(d), 0, 1))),
    "decoupled": decoupled,
    "fipo": fipo,
    "ppo": clipper(lambda t, d: np.exp(c20(d)), lambda t, d, r: r),
    "ppo_dual": clipper(lambda t, d: np.exp(c20(d)), lambda t, d, r: r),
    "gspo": clipper(lambda t, d: np.exp(mean_by_sequence(t, d)), lambda t, d, r: r),
    "luspo": clipper(lambda t, d: np.exp(mean_by_sequence(t, d)), lambda t, d, r: r * t.over(t.seq, d, len)),
    "geo_mean": geo_mean,
    "cispo": everything(lambda t, d, p: np.clip(np.exp(c20(d)), 1 - p["low"], 1 + p["high"])),
    "sapo": everything(sapo),
    "vespo": everything(vespo),
}  # fmt: skip
