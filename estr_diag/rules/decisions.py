"""The decisions of many rules as keys of one scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.measures import Measure
from estr_diag.rules.base import Rule
from estr_diag.rules.ladder import Ladder
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.plan import Plan, plan
from estr_diag.rules.language.tree import Name, Node, walk
from estr_diag.store.engine import Keys, Request, how_to_get

MAX_RULES = 60
"""Decisions are packed into the bits of one integer key."""

PAIR = frozenset({"logp_infer", "logp_train"})
KEPT, UNDECIDED = "rule_kept", "rule_undecided"
"""The packed decisions in what a statistic reads."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Rules bound to the columns of a log, and planned together.

    Bit i of the key `kept` is rule i's decision; bit i of the key `undecided` says that it has none.

    Parameters
    ----------
    ladder
        Where the rules are one at several values of a parameter: decisions are read off its score.
    """

    rules: tuple[Rule, ...]
    trees: tuple[Node, ...]
    weights: tuple[Node | None, ...]
    plan: Plan
    ladder: Ladder | None = None

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
        ladder = Ladder.of(rules, present)
        planned = [*(trees if ladder is None else ladder.trees), *(w for w in weights if w is not None)]
        return cls(tuple(rules), trees, weights, plan(planned), ladder)

    @property
    def kept(self) -> str:
        """Name of the key of decisions: statistics about the same rules share it in one scan, others have their own."""
        return f"{KEPT}_{self._digest}"

    @property
    def undecided(self) -> str:
        """Name of the key of what is not decided."""
        return f"{UNDECIDED}_{self._digest}"

    @property
    def packed(self) -> tuple[str, str]:
        """The two keys as columns of a query over partials, under the names that statistics read."""
        return f"{self.kept} as {KEPT}", f"{self.undecided} as {UNDECIDED}"

    @property
    def _digest(self) -> str:
        return digest(self.rules)

    @property
    def view(self) -> str | None:
        """The relation whose rows `keep` and `keys` read; None for ``tok``."""
        return self.plan.view if self.ladder is None else self.ladder.view(self.plan)

    def keep(self, i: int) -> str:
        """Return the decision of rule i as SQL; null where it is undecided."""
        if self.ladder is not None:
            return self.ladder.keep(i, self.plan)
        return self.plan.decision(self.trees[i], self.rules[i].dtype)

    def keys(self) -> dict[str, str]:
        """Return the two packed keys."""
        kept, undecided = [], []
        for i in range(len(self.rules)):
            keep = self.keep(i)
            kept.append(f"case when {keep} then {1 << i} else 0 end")
            if self.ladder is None and "then null" in keep:
                undecided.append(f"case when ({keep}) is null then {1 << i} else 0 end")
        if self.ladder is not None:
            undecided.append(f"case when {self.ladder.column} is null then {(1 << len(self.rules)) - 1} else 0 end")
        packed = {self.kept: kept, self.undecided: undecided}
        return {name: f"({' + '.join(bits) or '0'})::bigint" for name, bits in packed.items()}

    def weight_measures(self) -> tuple[Measure, ...]:
        """Return sum, sum of squares and maximum of the weights of kept tokens, for the rules that have one."""
        measures = []
        for i, weight in enumerate(self.weights):
            if weight is not None:
                value = f"case when {self.keep(i)} then {self.plan.decision(weight, self.rules[i].dtype)} end"
                total, squares, largest = weight_columns(self.rules, i)
                measures += [
                    Measure(total, value, frozenset()),
                    Measure(squares, f"power({value}, 2)", frozenset()),
                    Measure(largest, value, frozenset(), "max"),
                ]
        return tuple(measures)

    def request(self, keys: Keys, measures: Sequence[str | Measure], *, apart: str = "") -> Request:
        """Return a request for sums by decision; see `scan` for `apart`."""
        return Request(self.scan(apart), {**keys, **self.keys()}, tuple(measures), self.view)

    def scan(self, apart: str = "") -> str:
        """Return the name of the scan of `request`.

        It is the one that all statistics share where no rule needs an aggregate, else one over the plan's relation.
        A key that would cut the partials of all of them finer (`apart` names it) has a scan of its own.
        """
        shared = "sums" if self.view is None else f"rules_{self._digest}"
        return f"{shared}_by_{apart}" if apart else shared


def digest(rules: Sequence[Rule]) -> str:
    """Return a name for what some rules say, their parameters included."""
    return sha256(repr(tuple(rules)).encode()).hexdigest()[:12]


def weight_columns(rules: Sequence[Rule], i: int) -> tuple[str, str, str]:
    """Return the names of sum, sum of squares and maximum of the weights of rule i."""
    end = f"{digest(rules)}_{i}"
    return f"sum_w_{end}", f"sum_w2_{end}", f"max_w_{end}"


def refuse_unfitted(rules: Sequence[Rule], trees: Sequence[Node | None]) -> None:
    """Refuse a rule that names ``scale`` and has not been fitted to a log."""
    for rule, tree in zip(rules, trees, strict=True):
        if tree is not None and any(part == Name("scale") for part in walk(tree)):
            raise UsageError(f"rule '{rule.key}' names scale, the m2(H) of a log; fit it first: log.fitted(rule)")


def require(rule: Rule, present: frozenset[str]) -> None:
    """Refuse a rule that the log does not allow.

    Raises
    ------
    MissingColumnError
        Columns that it names, or one engine's log-probs, are not in the log.
    """
    if lacking := (rule.lacking(present) | PAIR) - present:
        raise MissingColumnError(f"mask rule {rule.key}", sorted(lacking), how_to_get(lacking))


def needs(rules: Sequence[Rule], present: Collection[str] = ()) -> frozenset[str]:
    """Return the columns that some rules need; a log without ``logp_update`` still answers for edges U and E."""
    return PAIR.union(*(rule.needs - {"logp_update"} for rule in rules))
