"""A ladder: one rule at several values of one parameter, all of whose decisions are read off one score."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from estr_diag.errors import UsageError
from estr_diag.rules.base import Rule
from estr_diag.rules.language.plan import Plan
from estr_diag.rules.language.tree import Call, Compare, Logic, Node, Number
from estr_diag.rules.score import Score, score_of

SCORE = "rule_score"
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rules that differ in one parameter, which all hold one score against it.

    Parameters
    ----------
    score
        What is held against the parameter; the same for every value.
    rule
        Any of the rules: its arithmetic and name.
    values
        The parameter at each of them.
    """

    score: Score
    rule: Rule
    values: tuple[float, ...] = ()
    column: ClassVar[str] = SCORE

    @classmethod
    def of(cls, rules: Sequence[Rule], present: Collection[str]) -> Ladder | None:
        """Return the ladder that some rules are, or None where they differ in more, or have no score."""
        if len(rules) < 2:
            return None
        first = rules[0]
        if any(replace(rule, parameters=first.parameters) != first for rule in rules):
            return None
        moving = [k for k in first.parameters if len({rule.parameters.get(k) for rule in rules}) > 1]
        if len(moving) != 1 or any(rule.parameters.keys() != first.parameters.keys() for rule in rules):
            return None
        score = score_of(first, moving[0], present)
        return None if score is None else cls(score, first, tuple(float(r.parameters[moving[0]]) for r in rules))

    @property
    def trees(self) -> tuple[Node, ...]:
        """What has to be planned."""
        return (self._decided,)

    @property
    def _decided(self) -> Node:
        return Logic("and", (self.score.rest, Compare("<=", self.score.value, Number(0.0))))

    def view(self, plan: Plan) -> str:
        """Return the plan's rows with the score beside each token.

        Null where the rule is undecided; infinite, on the side that no value keeps, where the rest of the rule drops
        the token or the score is NaN.
        """
        never = f"'{'' if self.score.keeps_small else '-'}infinity'::{_SQL[self.rule.dtype]}"
        value, rest = (plan.decision(node, self.rule.dtype) for node in (self.score.value, self.score.rest))
        known = plan.decision(self._decided, self.rule.dtype)
        # Two steps, so that the value is computed once.
        return f"""select * exclude (score_known, score_rest, score_value), case when not score_known then null
    when not score_rest or isnan(score_value) then {never} else score_value end as {SCORE}
from (select *, ({known}) is not null as score_known, {rest} as score_rest,
    ({value})::{_SQL[self.rule.dtype]} as score_value from ({plan.view or "select * from tok"}))"""

    def keep(self, i: int, plan: Plan) -> str:
        """Return the decision of rule i over a row of the view."""
        value = self.values[i]
        if not self.score.logarithm:
            return f"({SCORE} {self.score.operator} {plan.value(Number(value), self.rule.dtype)})"
        if value <= 0:
            raise UsageError(f"rule '{self.rule.key}' takes the logarithm of this parameter; expected values above 0")
        return f"({SCORE} {self.score.operator} {plan.value(Call('ln', (Number(value),)), self.rule.dtype)})"

    def keeping(self, score: float) -> float:
        """Return the tightest value of the parameter that keeps a score, in the rule's arithmetic."""
        dtype: Any = np.float32 if self.rule.dtype == "float32" else np.float64
        loose = dtype(math.inf if self.score.keeps_small else -math.inf)
        at = dtype(score)
        # An open bound drops a token whose score is the bound itself: step over it.
        bound = at if self.score.operator in ("<=", ">=") else np.nextafter(at, loose)
        if not self.score.logarithm:
            return float(bound)
        value = dtype(math.exp(bound))
        while not _HOLDS[self.score.operator](at, dtype(math.log(value))):
            value = np.nextafter(value, loose)
        return float(value)


_SQL = {"float64": "double", "float32": "real"}
