"""The additive partials that statistics are made of: each a fragment over one row of ``tok``, summed.

Most have a fixed name in `MEASURES`. Those that carry a threshold of a trainer's configuration carry it in
their name, and `measure` reads it back; so a scan is asked for by names alone, whoever asks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from estr_diag.expressions import (
    EDGES,
    EPS,
    EXP_LIMIT,
    FINITE_EXP,
    FINITE_EXP_NEGATIVE,
    RATIO_CLAMP,
    Edge,
    clamp,
    renamed,
)


@dataclass(frozen=True, slots=True)
class Measure:
    """An additive partial: `sql` over one row of ``tok``, aggregated and merged by `how`.

    A sum skips nulls, so a column that is null on some counted tokens needs a measure that counts
    the values it does have.
    """

    name: str
    sql: str
    needs: frozenset[str]
    how: Literal["sum", "min", "max"] = "sum"

    @property
    def aggregate(self) -> str:
        """Return the aggregate over tokens."""
        return f"{self.how}({self.sql}) as {self.name}"

    @property
    def merged(self) -> str:
        """Return the aggregate over partials."""
        return f"{self.how}({self.name}) as {self.name}"


RATIO_ABOVE, RATIO_BELOW = (1.2, 2.0, 5.0, 100.0), (0.8, 0.5, 0.2, 1e-4)
"""Bounds of the bands in circulation: PPO's clip, IS masks and their mirror images, SkyRL's and slime's outliers."""

CONFIDENT = "p_infer > 0.5 and delta < -2.0"
"""The sampler was sure of the token and the trainer finds it at least e^2 times less likely."""

PROXIMAL_WEIGHT = (
    f"case when policy_version < 0 or lag <= -1 then 0.0 else {clamp('lag::double / (lag + 1)', 0.0, 1.0)} end"
)
"""AReaL's alpha = (v_prox - v) / (v_theta - v), v_prox = v_theta - 1: its v_prox is our trainer_version."""


def band_name(side: str, bound: float) -> str:
    """Return ``above_2``, ``below_0_5`` ... for a bound of the ratio."""
    return f"{side}_{f'{bound:.4f}'.rstrip('0').rstrip('.').replace('.', '_')}"


def on_edge(name: str, edge: Edge) -> str:
    """Return the name of a measure on an edge; a measure that is made of no pair is the same on all."""
    moved = f"{name}_{edge.lower()}"
    return moved if edge != "B" and moved in MEASURES else name


def _measures() -> dict[str, Measure]:
    infer, train, pair = frozenset({"logp_infer"}), frozenset({"logp_train"}), frozenset({"logp_infer", "logp_train"})
    entropy, replay = frozenset({"entropy"}), pair | {"logp_replay"}
    version, versions = frozenset({"policy_version"}), frozenset({"policy_version", "trainer_version"})
    ends, four = frozenset({"logp_infer", "logp_update"}), pair | versions | {"logp_update"}
    rows: list[Measure] = [
        Measure("n", "1.0::double", frozenset()),
        Measure("sum_delta", "delta", pair),
        Measure("sum_abs_delta", "abs(delta)", pair),
        Measure("sum_delta2", "delta * delta", pair),
        Measure("max_abs_delta", "abs(delta)", pair, "max"),
        Measure("min_delta", "delta", pair, "min"),
        Measure("max_delta", "delta", pair, "max"),
        Measure("n_clamped", f"(abs(delta) > {RATIO_CLAMP!r})::integer::double", pair),
        Measure("sum_ratio", "ratio", pair),
        Measure("sum_ratio2", "ratio * ratio", pair),
        Measure("sum_k3", f"{FINITE_EXP} - 1 - delta", pair),
        Measure("sum_reverse_k3", f"{FINITE_EXP_NEGATIVE} - 1 + delta", pair),
        Measure("sum_mult_prob_error", f"exp({clamp('abs(delta)', 0.0, EXP_LIMIT)})", pair),
        Measure("sum_abs_ratio_gap", "abs(ratio - 1)", pair),
        Measure("sum_prob_diff", "p_train - p_infer", pair),
        Measure("sum_abs_prob_diff", "abs(p_train - p_infer)", pair),
        Measure("sum_prob_diff2", "(p_train - p_infer) * (p_train - p_infer)", pair),
        Measure("max_prob_diff", "abs(p_train - p_infer)", pair, "max"),
        # Jensen-Shannon with k3 against the midpoint m is exactly ln cosh(d / 2); this form does not overflow.
        Measure("sum_js", f"abs(delta) / 2 + ln((1 + exp({clamp('-abs(delta)', -EXP_LIMIT, 0.0)})) / 2)", pair),
        Measure("sum_reverse_kl_weighted", "p_infer * (logp_infer - logp_train)", pair),
        Measure("sum_p_infer", "p_infer", infer),
        Measure("sum_p_train", "p_train", train),
        Measure("sum_p_infer2", "p_infer * p_infer", infer),
        Measure("sum_p_train2", "p_train * p_train", train),
        Measure("sum_p_cross", "p_infer * p_train", pair),
        Measure("sum_logp_infer", "logp_infer", infer),
        Measure("sum_logp_train", "logp_train", train),
        Measure("sum_logp_infer2", "logp_infer * logp_infer", infer),
        Measure("sum_logp_train2", "logp_train * logp_train", train),
        Measure("sum_logp_cross", "logp_infer * logp_train", pair),
        Measure("n_entropy", "(entropy is not null)::integer::double", entropy),
        Measure("sum_entropy", "entropy", entropy),
        Measure("sum_gini", "gini", frozenset({"collision"})),
        Measure(
            "sum_scaled2", f"case when entropy + {EPS} > 0 then delta * delta / (entropy + {EPS}) end", pair | entropy
        ),
        Measure("n_off_mode", "(p_infer < 0.5)::integer::double", infer),
        Measure("sum_delta2_off_mode", "case when p_infer < 0.5 then delta * delta else 0 end", pair),
        # delta = xi + d: null, and so left out of the sums, where logp_replay is
        Measure("n_replay", "(d is not null)::integer::double", replay),
        Measure("sum_xi2", "xi * xi", replay),
        Measure("sum_d2", "d * d", replay),
        Measure("sum_xi_d", "xi * d", replay),
        # what single frameworks compute under a name of their own (`stats.framework_names`)
        Measure("sum_clamped_delta", clamp("delta", -RATIO_CLAMP, RATIO_CLAMP), pair),
        Measure("sum_capped_k3", f"least(ratio - 1 - {clamp('delta', -RATIO_CLAMP, RATIO_CLAMP)}, 10.0)", pair),
        Measure("sum_raw_ratio", FINITE_EXP, pair),
        Measure("sum_raw_ratio_gap", f"abs({FINITE_EXP} - 1)", pair),
        Measure("sum_raw_ratio2", f"exp(2 * {clamp('delta', -EXP_LIMIT / 2, EXP_LIMIT / 2)})", pair),
        Measure("min_k3", f"{FINITE_EXP} - 1 - delta", pair, "min"),
        Measure("max_k3", f"{FINITE_EXP} - 1 - delta", pair, "max"),
        *(
            Measure(f"n_{band_name(side, bound)}", f"(ratio {sign} {bound!r})::integer::double", pair)
            for side, sign, bounds in (("above", ">", RATIO_ABOVE), ("below", "<", RATIO_BELOW))
            for bound in bounds
        ),
        Measure("n_confident_disagreement", f"({CONFIDENT})::integer::double", pair),
        Measure("n_confident_lag0", f"({CONFIDENT} and lag = 0)::integer::double", pair | versions),
        Measure("n_lag0", "(lag = 0)::integer::double", versions),
        Measure("n_lag", "(lag is not null)::integer::double", versions),
        Measure("sum_lag", "lag::double", versions),
        Measure("min_lag", "lag::double", versions, "min"),
        Measure("max_lag", "lag::double", versions, "max"),
        Measure("n_version", "(policy_version is not null)::integer::double", version),
        Measure("min_version", "policy_version::double", version, "min"),
        Measure("max_version", "policy_version::double", version, "max"),
        Measure("sum_sampled_entropy", f"-{renamed(FINITE_EXP, 'E')} * logp_update", ends),
        Measure("n_proximal", f"({PROXIMAL_WEIGHT} * logp_update is not null)::integer::double", four),
        Measure(
            "sum_loglinear_error",
            f"abs(logp_infer + {PROXIMAL_WEIGHT} * (logp_update - logp_infer) - logp_train)",
            four,
        ),
        Measure(
            "sum_linear_error",
            f"abs(ln((1 - {PROXIMAL_WEIGHT}) * p_infer + {PROXIMAL_WEIGHT} * p_update + 1e-10) - logp_train)",
            four,
        ),
        Measure("sum_abs_advantage", "abs(advantage)", frozenset({"advantage"})),
    ]
    # A pair that is known on some tokens only has a count of its own, so "n" moves with its sums.
    known = Measure("n", "(delta is not null)::integer::double", pair)
    paired = [known, *(m for m in rows if pair <= m.needs <= pair | entropy)]
    rows += [_on_edge(m, edge) for edge in EDGES if edge != "B" for m in paired]
    return {m.name: m for m in rows}


def _on_edge(row: Measure, edge: Edge) -> Measure:
    needs = frozenset(EDGES[edge].get(name, name) for name in row.needs)
    return replace(row, name=f"{row.name}_{edge.lower()}", sql=renamed(row.sql, edge), needs=needs)


MEASURES: dict[str, Measure] = _measures()
"""Every additive partial by name, but for those that carry a number in their name (see `measure`)."""

_BEYOND = "n_ratio_beyond_"
MAX_RATIO_BOUND = 1e9


def ratio_beyond(bound: float) -> str:
    """Return the name of the measure that counts tokens whose ratio lies outside [1/bound, bound].

    Raises
    ------
    ValueError
        `bound` is not above 1, or so large that its name would need an exponent.
    """
    if not 1 < bound <= MAX_RATIO_BOUND:
        raise ValueError(f"a bound on the ratio is {bound}; expected a number above 1 and up to {MAX_RATIO_BOUND:g}")
    return _BEYOND + f"{bound:.12g}".replace(".", "_")


Ratio = Literal["raw", "c20"]
"""How a weight is made of d: ``exp(d)``, or with d clamped to +-20 first."""

_WEIGHT = re.compile(r"(sum|sum2|min|max)_weight_(raw|c20)_(truncate|mask)_([0-9a-z]+)_([0-9a-z]+)_([0-9a-z]+)")
_SIDE = re.compile(r"n_(above|below)_(raw|c20)_([0-9a-z]+)")


def weight_name(
    what: Literal["sum", "sum2", "min", "max"],
    ratio: Ratio,
    mode: Literal["truncate", "mask"],
    low: float,
    high: float,
    floor: float = 0.0,
) -> str:
    """Return the name of a measure of bounded importance weights.

    Parameters
    ----------
    what
        Sum, sum of squares, minimum or maximum of the weight.
    mode
        ``truncate`` moves a ratio outside [low, high] to the nearer bound, ``mask`` to 0.
    floor
        Raise the weight to at least this, a masked one too.

    Raises
    ------
    ValueError
        The bounds are not 0 <= floor, 0 <= low <= high <= `MAX_RATIO_BOUND`.
    """
    if not 0 <= low <= high <= MAX_RATIO_BOUND or not 0 <= floor <= high or high == 0:
        raise ValueError(f"weights between {low} and {high}, at least {floor}: expected 0 <= low <= high, high above 0")
    if mode == "truncate":
        low = floor = max(low, floor)
    return f"{what}_weight_{ratio}_{mode}_{_in_name(low)}_{_in_name(high)}_{_in_name(floor)}"


def side_name(side: Literal["above", "below"], ratio: Ratio, bound: float) -> str:
    """Return the name of the measure that counts tokens whose ratio is above (below) `bound`.

    Raises
    ------
    ValueError
        `bound` is not between 0 and `MAX_RATIO_BOUND`.
    """
    if not 0 <= bound <= MAX_RATIO_BOUND:
        raise ValueError(f"a bound on the ratio is {bound}; expected a number from 0 to {MAX_RATIO_BOUND:g}")
    return f"n_{side}_{ratio}_{_in_name(bound)}"


def _in_name(number: float) -> str:
    # repr keeps every digit, so two thresholds that differ never share a measure
    return repr(float(number)).replace(".", "p").replace("-", "m").replace("+", "")


def _from_name(text: str) -> float:
    return float(text.replace("p", ".").replace("m", "-"))


def measure(name: str) -> Measure | None:
    """Return the additive partial of that name, or None.

    A measure with a parameter has it in its name, so that requests of two statistics fuse exactly when
    they mean the same.
    """
    if name in MEASURES:
        return MEASURES[name]
    pair = frozenset({"logp_infer", "logp_train"})
    try:
        if name.startswith(_BEYOND):
            threshold = math.log(float(name.removeprefix(_BEYOND).replace("_", ".")))
            return Measure(name, f"(abs(delta) > {threshold!r})::integer::double", pair)
        if found := _SIDE.fullmatch(name):
            side, ratio, bound = found[1], _RATIOS[found[2]], _from_name(found[3])
            return Measure(name, f"({ratio} {'>' if side == 'above' else '<'} {bound!r})::integer::double", pair)
        if found := _WEIGHT.fullmatch(name):
            low, high, floor = (_from_name(text) for text in found.groups()[3:])
            return _weight_measure(name, found[1], _RATIOS[found[2]], found[3], low, high, floor)
    except ValueError:
        return None
    return None


_RATIOS = {"raw": FINITE_EXP, "c20": "ratio"}


def _weight_measure(name: str, what: str, ratio: str, mode: str, low: float, high: float, floor: float) -> Measure:
    weight = clamp(ratio, max(low, floor), high)
    if mode == "mask":
        weight = (
            f"case when {ratio} < {low!r} or {ratio} > {high!r} then {floor!r} else greatest({ratio}, {floor!r}) end"
        )
    pair = frozenset({"logp_infer", "logp_train"})
    if what == "sum2":
        return Measure(name, f"power({weight}, 2)", pair)
    how: Literal["sum", "min", "max"] = "max" if what == "max" else "min" if what == "min" else "sum"
    return Measure(name, weight, pair, how)
