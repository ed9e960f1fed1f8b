"""Every formula once, as a SQL fragment over the ``tok`` relation.

``tok`` is the log as statistics see it: one row per counted token, columns cast to double before any
arithmetic, and the derived quantities of Zhao et al. (arXiv 2607.22186) by name. A token is counted
when the loss mask is true and every log-prob column that the log holds at all has a value. The store
guarantees that a log-prob or entropy is finite or null, so no expression here tests for NaN.

The independent twin of each formula is in ``tests/oracles.py`` (NumPy).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

EPS = 0.01
"""epsilon of ESTR: z = delta / sqrt(H + eps), S = delta^2 / (H + eps)."""

RATIO_CLAMP = 20.0
"""delta is clamped to +-20 before exp, as every trainer does; the clamped tokens are counted."""

CELLS_PER_OCTAVE = 16
"""Grid on which entropy edges and |delta| buckets lie, so that histograms of any shards merge."""

_EXP_LIMIT = 700.0  # exp overflows a double at 709


def clamp(expression: str, low: float, high: float) -> str:
    """Clamp with CASE: on doubles it is 25 times faster in DuckDB than least(greatest(...))."""
    return f"case when {expression} < {low!r} then {low!r} when {expression} > {high!r} then {high!r} else {expression} end"


def grid_cell(expression: str) -> str:
    """Return the index of the log2 grid cell that holds a positive value."""
    return f"floor({CELLS_PER_OCTAVE} * log2({expression}))::integer"


def cell_edge(cell: int) -> float:
    """Return the lower edge of a grid cell."""
    return float(2.0 ** (cell / CELLS_PER_OCTAVE))


DERIVED: dict[str, tuple[frozenset[str], str]] = {
    # name: (columns it needs, SQL over base columns already cast to double)
    "delta": (frozenset({"logp_train", "logp_infer"}), "logp_train - logp_infer"),
    "p_infer": (frozenset({"logp_infer"}), "exp(logp_infer)"),
    "p_train": (frozenset({"logp_train"}), "exp(logp_train)"),
    "p_update": (frozenset({"logp_update"}), "exp(logp_update)"),
    "delta_u": (frozenset({"logp_train", "logp_update"}), "logp_update - logp_train"),
    "delta_e": (frozenset({"logp_infer", "logp_update"}), "logp_update - logp_infer"),
    "lag": (frozenset({"trainer_version", "policy_version"}), "trainer_version - policy_version"),
    "gini": (frozenset({"collision"}), "1 - collision"),
    "xi": (frozenset({"logp_replay", "logp_infer"}), "logp_replay - logp_infer"),
    "d": (frozenset({"logp_train", "logp_replay"}), "logp_train - logp_replay"),
}
"""Derived columns of ``tok``, one level above the stored ones."""

RATIO = f"exp({clamp('delta', -RATIO_CLAMP, RATIO_CLAMP)})"
"""Importance ratio pi_train / mu_infer."""

FINITE_EXP = f"exp({clamp('delta', -_EXP_LIMIT, _EXP_LIMIT)})"
"""exp(delta) without the +-20 clamp: KL estimators are defined on the raw ratio."""

FINITE_EXP_NEGATIVE = f"exp({clamp('-delta', -_EXP_LIMIT, _EXP_LIMIT)})"

Edge = Literal["B", "U", "E"]
"""A pair of log-probs: **B** logp_train - logp_infer, **U** logp_update - logp_train, **E** logp_update - logp_infer."""

EDGES: dict[Edge, dict[str, str]] = {
    # what each name of edge B is called on the other edges
    "B": {},
    "U": {
        "delta": "delta_u", "ratio": "ratio_u", "logp_infer": "logp_train", "logp_train": "logp_update",
        "p_infer": "p_train", "p_train": "p_update",
    },
    "E": {"delta": "delta_e", "ratio": "ratio_e", "logp_train": "logp_update", "p_train": "p_update"},
}  # fmt: skip


def renamed(sql: str, edge: Edge) -> str:
    """Return a fragment written for edge B over the names of another edge."""
    return re.sub(r"\w+", lambda m: EDGES[edge].get(m[0], m[0]), sql)


_BASE_DOUBLES = ("logp_infer", "logp_train", "logp_replay", "logp_update", "entropy", "collision", "advantage")
_BASE_AS_IS = ("seq_id", "step", "pos", "turn", "policy_version", "trainer_version", "loss_mask", "trainer_keep")


def counted(present: Iterable[str]) -> str:
    """Return the condition that makes a token count."""
    present = set(present)
    needed = [name for name in ("logp_infer", "logp_train") if name in present]
    return " and ".join(["loss_mask", *(f"{name} is not null" for name in needed)])


def tok(present: Iterable[str], source: str = "tokens") -> str:
    """Return the CTEs that define ``tok`` over `source`, for the columns that the log holds."""
    present = set(present)
    base = [f"{name}::double as {name}" for name in _BASE_DOUBLES if name in present]
    base += [name for name in _BASE_AS_IS if name in present or name in ("seq_id", "step", "pos")]
    first = [f"{sql} as {name}" for name, (needs, sql) in DERIVED.items() if needs <= present]
    second = [
        f"{renamed(RATIO, edge)} as {renamed('ratio', edge)}"
        for edge in EDGES
        if DERIVED[renamed("delta", edge)][0] <= present
    ]
    return f"""
base as (
    select {", ".join(base)}
    from {source}
    where {counted(present)}
),
derived as (select base.*{"".join(", " + c for c in first)} from base),
tok as (select derived.*{"".join(", " + c for c in second)} from derived)"""


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
        Measure("sum_mult_prob_error", f"exp({clamp('abs(delta)', 0.0, _EXP_LIMIT)})", pair),
        Measure("sum_abs_ratio_gap", "abs(ratio - 1)", pair),
        Measure("sum_prob_diff", "p_train - p_infer", pair),
        Measure("sum_abs_prob_diff", "abs(p_train - p_infer)", pair),
        Measure("sum_prob_diff2", "(p_train - p_infer) * (p_train - p_infer)", pair),
        Measure("max_prob_diff", "abs(p_train - p_infer)", pair, "max"),
        # Jensen-Shannon with k3 against the midpoint m is exactly ln cosh(d / 2); this form does not overflow.
        Measure("sum_js", f"abs(delta) / 2 + ln((1 + exp({clamp('-abs(delta)', -_EXP_LIMIT, 0.0)})) / 2)", pair),
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
        Measure("sum_raw_ratio2", f"exp(2 * {clamp('delta', -_EXP_LIMIT / 2, _EXP_LIMIT / 2)})", pair),
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
