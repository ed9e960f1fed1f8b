"""The score of a rule: what is held against one of its parameters, so that a token's threshold can be read off it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from estr_diag.errors import UsageError, nearest
from estr_diag.rules.base import Rule, stepped
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.parse import parse
from estr_diag.rules.language.tree import Aggregate, Call, Compare, Flag, Kind, Logic, Name, Node, walk

_FLIPPED: dict[str, Literal["<", "<=", ">", ">="]] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class Score:
    """A rule written as ``rest and value OPERATOR parameter``.

    Parameters
    ----------
    value
        What is compared with the parameter, or with its logarithm where `logarithm`.
    operator
        ``<=`` and ``<`` keep small values, ``>=`` and ``>`` large ones.
    rest
        What must hold besides.
    """

    value: Node
    operator: Literal["<", "<=", ">", ">="]
    rest: Node
    logarithm: bool = False

    @property
    def keeps_small(self) -> bool:
        """Whether a larger threshold keeps more."""
        return self.operator in ("<", "<=")


def score_of(rule: Rule, parameter: str, present: Collection[str]) -> Score | None:
    """Return the score behind a parameter, or None where it stands in another place, or in more than one.

    Raises
    ------
    UsageError
        The rule has no such parameter.
    """
    if parameter not in rule.parameters:
        known = nearest(parameter, rule.parameters) if rule.parameters else "it has none"
        raise UsageError(f"rule '{rule.key}' has no parameter '{parameter}'; {known}")
    if rule.parts or rule.on_missing != "undecided":
        return None
    rule.tree()
    try:
        tree = parse(
            rule.keep, rule.parameters, want=Kind.BOOLEAN, edge=rule.edge, rule_of=rule.rule_of, symbol=parameter
        )
    except UsageError:
        # The text is sound, so the parameter stands where only a number may: the level of a quantile, a budget.
        return None
    tree = stepped(bind(tree, present), rule.knots)
    flat = _conjuncts(tree)
    holding = [part for part in flat if _holds(part, parameter)]
    if len(holding) != 1 or not isinstance(holding[0], Compare) or holding[0].operator in ("=", "<>"):
        return None
    compare = holding[0]
    left, right, operator = compare.left, compare.right, compare.operator
    if _holds(left, parameter):
        left, right, operator = right, left, _FLIPPED[operator]
    logarithm = isinstance(right, Call) and right.function == "ln" and right.arguments == (Name(parameter),)
    if _holds(left, parameter) or not (right == Name(parameter) or logarithm) or operator in ("=", "<>"):
        return None
    others = tuple(part for part in flat if part is not compare)
    rest: Node = Flag(True) if not others else others[0] if len(others) == 1 else Logic("and", others)
    return Score(left, _operator(operator), rest, logarithm)


def _operator(text: str) -> Literal["<", "<=", ">", ">="]:
    return _FLIPPED[_FLIPPED[text]]


def _conjuncts(node: Node) -> list[Node]:
    if isinstance(node, Logic) and node.operator == "and":
        return [inner for part in node.parts for inner in _conjuncts(part)]
    return [node]


def _holds(node: Node, parameter: str) -> bool:
    # The second argument of an aggregate is a number already, so a parameter there was refused by the reader.
    return any(isinstance(part, Name) and part.name == parameter for part in walk(node)) or any(
        isinstance(part, Aggregate) and part.where is not None and _holds(part.where, parameter) for part in walk(node)
    )
