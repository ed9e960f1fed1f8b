"""Thresholds chosen by meaning: drop a share of the lag-0 tokens, or keep as much as another rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import Decisions
from estr_diag.rules.language.plan import plan
from estr_diag.rules.language.tree import Compare, Logic, Number
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.rules.replay import Replay
from estr_diag.rules.score import Score, score_of
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, relation, run


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value of a rule's parameter, and what it really reaches.

    Attributes
    ----------
    value
        None where no value reaches it.
    kept_share
        Of the decided tokens asked about; equal scores are kept or dropped together, so it may miss the aim.
    n
        Decided tokens asked about.
    """

    rule: str
    parameter: str
    value: float | None
    aim: float
    kept_share: float | None
    n: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def at_kept_share(store: Store, rule: Rule, share: float, parameter: str | None = None) -> Threshold:
    """Return the tightest threshold that keeps at least a share of the decided tokens."""
    return _reach(store, rule, parameter or rule.score, share, "true")


def at_drop_rate(store: Store, rule: Rule, rate: float, parameter: str | None = None) -> Threshold:
    """Return the tightest threshold that drops at most a share of the tokens of lag 0, whose gap is engine noise alone.

    Raises
    ------
    MissingColumnError
        The log has no versions, so no token is known to have lag 0.
    """
    present = store.present()
    lacking = {"policy_version", "trainer_version"} - present
    if lacking:
        raise MissingColumnError("a threshold by the drop rate at lag 0", sorted(lacking), how_to_get(lacking))
    return _reach(store, rule, parameter or rule.score, 1 - rate, "lag = 0")


def equal_share(
    store: Store, rules: Sequence[Rule], share: float, grid: EntropyGrid | None, parameters: Sequence[str] | None = None
) -> tuple[list[Threshold], list[Rule], Result, Result | None]:
    """Bring several rules to one kept share, by the parameter that each is swept by.

    Returns
    -------
    tuple
        Thresholds, the rules at them, what they keep (`Replay`), and their errors (`MaskErrors`; None without entropy).
    """
    names = parameters or [rule.score for rule in rules]
    found = [at_kept_share(store, rule, share, name) for rule, name in zip(rules, names, strict=True)]
    reached = [
        rule.with_parameters({t.parameter: t.value})
        for rule, t in zip(rules, found, strict=True)
        if t.value is not None
    ]
    if not reached:
        raise UsageError(f"no rule can be brought to a kept share of {share:g}")
    wanted = {"kept": Replay(tuple(reached))}
    outcome = run(store, wanted if grid is None else {**wanted, "errors": MaskErrors(tuple(reached), grid)})
    return found, reached, outcome.results["kept"], outcome.results.get("errors")


def _reach(store: Store, rule: Rule, parameter: str, share: float, among: str) -> Threshold:
    if not 0 < share <= 1:
        raise UsageError(f"a share of {share:g}; expected more than 0 and at most 1")
    if not parameter:
        raise UsageError(f"rule '{rule.key}' has no parameter that it is swept by; name one")
    present = store.present()
    if lacking := rule.lacking(present):
        raise MissingColumnError(f"mask rule {rule.key}", sorted(lacking), how_to_get(lacking))
    score = score_of(rule, parameter, present)
    if score is None:
        raise UsageError(
            f"rule '{rule.key}': no token's threshold of {parameter} can be read off (it stands in more than one place, "
            "or inside an expression); sweep it over a grid instead"
        )
    return _by_score(store, rule, parameter, score, share, among, present)


def _by_score(
    store: Store, rule: Rule, parameter: str, score: Score, share: float, among: str, present: frozenset[str]
) -> Threshold:
    both = Logic("and", (score.rest, Compare("<=", score.value, Number(0.0))))
    found = plan([both])
    # Dropped whatever the threshold: what fails the rest, and NaN.
    sign = "" if score.keeps_small else "-"
    x = f"({found.decision(score.value, rule.dtype)})::double"
    never = f"not ({found.decision(score.rest, rule.dtype)}) or isnan({x})"
    value = f"case when {never} then 'infinity'::double else {sign}{x} end"
    row = store.rows(
        f"{relation(present, found.view)} select count(*) as n, quantile_disc(x, {share!r}) as cut from "
        f"(select {value} as x from viewed where ({found.decision(both, rule.dtype)}) is not null and {among})"
    )[0]
    n, cut = int(row["n"]), row["cut"]
    if not n:
        why = "no token has lag 0" if among != "true" else "no token is decided"
        return Threshold(rule.label, parameter, None, share, None, 0, f"cannot tell: {why}")
    if not math.isfinite(cut):
        return Threshold(rule.label, parameter, None, share, None, n, "not reached: the rest of the rule drops more")
    at = float(cut if score.keeps_small else -cut)
    # An open bound drops a token whose score is the bound itself: step over it.
    if score.operator in ("<", ">"):
        at = math.nextafter(at, math.inf if score.keeps_small else -math.inf)
    if score.logarithm:
        at = _exponential(at, score)
    chosen = rule.with_parameters({parameter: at})
    decisions = Decisions.of((chosen,), present)
    got = store.rows(
        f"{relation(present, decisions.plan.view)} select avg(({decisions.keep(0)})::integer) as kept from viewed where {among}"
    )[0]["kept"]
    note = "" if abs(got - share) < 1e-3 + 1 / n else "equal scores are kept together, so the aim is missed"
    return Threshold(chosen.label, parameter, at, share, float(got), n, note)


def _exponential(at: float, score: Score) -> float:
    """Return a value whose logarithm is not tighter than `at`, rounding included."""
    value = math.exp(at)
    loose = math.inf if score.keeps_small else -math.inf
    for _ in range(4):
        if (math.log(value) >= at) if score.keeps_small else (math.log(value) <= at):
            break
        value = math.nextafter(value, loose)
    return value
