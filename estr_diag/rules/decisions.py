"""The decisions of many rules as keys of one scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from estr_diag.errors import UsageError
from estr_diag.measures import Measure
from estr_diag.rules.base import Rule
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.plan import Plan, plan
from estr_diag.rules.language.tree import Name, Node, walk
from estr_diag.store.engine import Keys, Request

MAX_RULES = 60
"""Decisions are packed into the bits of one integer key."""

KEPT, UNDECIDED = "rule_kept", "rule_undecided"


@dataclass(frozen=True, slots=True)
class Decisions:
    """Rules bound to the columns of a log, and planned together.

    Bit i of the key ``rule_kept`` is rule i's decision; bit i of ``rule_undecided`` says that it has none.
    """

    rules: tuple[Rule, ...]
    trees: tuple[Node, ...]
    weights: tuple[Node | None, ...]
    plan: Plan

    @classmethod
    def of(cls, rules: Sequence[Rule], present: Collection[str]) -> Decisions:
        """Bind rules to the columns that a log holds.

        Raises
        ------
        UsageError
            More rules than fit into one scan.
        """
        if len(rules) > MAX_RULES:
            raise UsageError(f"{len(rules)} rules at once; at most {MAX_RULES}")
        trees = tuple(bind(rule.tree(), present) for rule in rules)
        refuse_unfitted(rules, trees)
        found = (rule.weight_tree() for rule in rules)
        weights = tuple(None if weight is None else bind(weight, present) for weight in found)
        return cls(tuple(rules), trees, weights, plan([*trees, *(w for w in weights if w is not None)]))

    def keep(self, i: int) -> str:
        """Return the decision of rule i as SQL; null where it is undecided."""
        return self.plan.decision(self.trees[i], self.rules[i].dtype)

    def keys(self) -> dict[str, str]:
        """Return the two packed keys."""
        kept, undecided = [], []
        for i in range(len(self.rules)):
            keep = self.keep(i)
            kept.append(f"case when {keep} then {1 << i} else 0 end")
            if "then null" in keep:
                undecided.append(f"case when ({keep}) is null then {1 << i} else 0 end")
        packed = {KEPT: kept, UNDECIDED: undecided}
        return {name: f"({' + '.join(bits) or '0'})::bigint" for name, bits in packed.items()}

    def weight_measures(self) -> tuple[Measure, ...]:
        """Return sum, sum of squares and maximum of the weights of kept tokens, for the rules that have one."""
        measures = []
        for i, weight in enumerate(self.weights):
            if weight is not None:
                value = f"case when {self.keep(i)} then {self.plan.decision(weight, self.rules[i].dtype)} end"
                measures += [
                    Measure(f"sum_w_{i}", value, frozenset()),
                    Measure(f"sum_w2_{i}", f"power({value}, 2)", frozenset()),
                    Measure(f"max_w_{i}", value, frozenset(), "max"),
                ]
        return tuple(measures)

    def request(self, keys: Keys, measures: Sequence[str | Measure], *, apart: str = "") -> Request:
        """Return a request for sums by decision; see `scan` for `apart`."""
        return Request(self.scan(apart), {**keys, **self.keys()}, tuple(measures), self.plan.view)

    def scan(self, apart: str = "") -> str:
        """Return the name of the scan of `request`.

        It is the one that all statistics share where no rule needs an aggregate, else one over the plan's relation.
        A key that would cut the partials of all of them finer (`apart` names it) has a scan of its own.
        """
        shared = "sums" if self.plan.view is None else "rules"
        return f"{shared}_by_{apart}" if apart else shared


def refuse_unfitted(rules: Sequence[Rule], trees: Sequence[Node | None]) -> None:
    """Refuse a rule that names ``scale`` and has not been fitted to a log."""
    for rule, tree in zip(rules, trees, strict=True):
        if tree is not None and any(part == Name("scale") for part in walk(tree)):
            raise UsageError(f"rule '{rule.key}' names scale, the m2(H) of a log; fit it first: log.fitted(rule)")


def needs(rules: Sequence[Rule], present: Collection[str] = ()) -> frozenset[str]:
    """Return the columns that some rules need; a log without ``logp_update`` still answers for edges U and E."""
    pair = frozenset({"logp_infer", "logp_train"})
    return pair.union(*(rule.needs - {"logp_update"} for rule in rules))
