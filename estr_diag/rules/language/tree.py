"""What a rule's text means: a small typed tree, from which SQL and torch are made.

Every node knows its type, the log columns that it reads, and whether its value is always finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Literal

from estr_diag.rules.language.vocabulary import FINITE_NAMES, FLAGS, columns_of

Scope = Literal["seq", "turn", "run", "group", "step"]


class Kind(StrEnum):
    """Type of a value."""

    NUMBER = "a number"
    BOOLEAN = "true or false"


@dataclass(frozen=True, slots=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True, slots=True)
class Flag:
    """``true`` or ``false``."""

    value: bool


@dataclass(frozen=True, slots=True)
class Name:
    """A column of ``tok``, stored or derived, with the edge already bound."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function of numbers: + - * / neg abs exp ln sqrt sign least greatest clip."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """A comparison; false where a side is NaN, as in IEEE arithmetic (SQL has NaN above everything)."""

    operator: Literal["<", "<=", ">", ">=", "=", "<>"]
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Logic:
    """``and`` and ``or`` of two or more, ``not`` of one."""

    operator: Literal["and", "or", "not"]
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choose:
    """``case when condition then .. else .. end``."""

    condition: Node
    then: Node
    otherwise: Node


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate over the counted tokens of a scope, or an ordered quantity inside it.

    Parameters
    ----------
    scope
        Sequence, turn, run of the loss mask, prompt group, or trainer step.
    function
        sum, mean, max, min, any, all, count, quantile; any_before, discounted, budget.
    argument
        What is aggregated; None for count.
    parameter
        The level of a quantile, the factor of a discounted sum, the budget.
    where
        Which tokens take part; all of them where it is None.
    """

    scope: Scope
    function: str
    argument: Node | None
    parameter: float | None = None
    where: Node | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision with a policy for tokens on which a column that it reads is missing."""

    part: Node
    default: bool


Node = Number | Flag | Name | Call | Compare | Logic | Choose | Aggregate | Settled
Mapper = Callable[[Node], Node]

ORDERED = frozenset({"any_before", "discounted", "budget"})
"""Aggregates whose value differs from token to token."""

WINDOWS = frozenset({"any_before", "discounted"})
"""Those that look along a sequence."""

BOOLEAN_AGGREGATES = frozenset({"any", "all", "any_before", "budget"})


def kind(node: Node) -> Kind:
    """Return the type of a node's value."""
    match node:
        case Flag() | Compare() | Logic() | Settled():
            return Kind.BOOLEAN
        case Name(name):
            return Kind.BOOLEAN if name in FLAGS else Kind.NUMBER
        case Choose():
            return kind(node.then)
        case Aggregate():
            return Kind.BOOLEAN if node.function in BOOLEAN_AGGREGATES else Kind.NUMBER
        case _:
            return Kind.NUMBER


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below."""
    match node:
        case Call():
            return node.arguments
        case Compare():
            return (node.left, node.right)
        case Logic():
            return node.parts
        case Choose():
            return (node.condition, node.then, node.otherwise)
        case Aggregate():
            return tuple(part for part in (node.argument, node.where) if part is not None)
        case Settled():
            return (node.part,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it, lower ones first."""
    for child in children(node):
        yield from walk(child)
    yield node


def extent(node: Node) -> tuple[int, int]:
    """Return how many nodes a tree has when written out, and how deep it is; a shared part is measured once."""
    known: dict[int, tuple[int, int]] = {}

    def measure(part: Node) -> tuple[int, int]:
        if id(part) not in known:
            below = [measure(child) for child in children(part)]
            known[id(part)] = (1 + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0))
        return known[id(part)]

    return measure(node)


def mapped(node: Node, change: Mapper) -> Node:
    """Return the tree with `change` applied to every node, lower ones first."""
    match node:
        case Call():
            node = replace(node, arguments=tuple(mapped(a, change) for a in node.arguments))
        case Compare():
            node = replace(node, left=mapped(node.left, change), right=mapped(node.right, change))
        case Logic():
            node = replace(node, parts=tuple(mapped(p, change) for p in node.parts))
        case Choose():
            node = Choose(*(mapped(getattr(node, f.name), change) for f in fields(node)))
        case Aggregate():
            argument = None if node.argument is None else mapped(node.argument, change)
            where = None if node.where is None else mapped(node.where, change)
            node = replace(node, argument=argument, where=where)
        case Settled():
            node = replace(node, part=mapped(node.part, change))
        case _:
            pass
    return change(node)


def needs(node: Node) -> frozenset[str]:
    """Return the log columns that a tree reads."""
    found: set[str] = set()
    for part in walk(node):
        if isinstance(part, Name):
            found |= columns_of(part.name)
        if isinstance(part, Aggregate):
            found |= {"turn": {"turn"}, "group": {"group_id"}, "step": {"step"}}.get(part.scope, set())
    return frozenset(found)


def strict(node: Node) -> tuple[Name | Aggregate, ...]:
    """Return the names and aggregates that must be known on a token for the value to be known.

    What lies inside an aggregate is the aggregate's business (it is unknown when one of its tokens is), and a
    `Settled` part is always known.
    """
    found: dict[Name | Aggregate, None] = {}

    def visit(part: Node) -> None:
        if isinstance(part, Name | Aggregate):
            found.setdefault(part)
        elif not isinstance(part, Settled):
            for child in children(part):
                visit(child)

    visit(node)
    return tuple(found)


def is_finite(node: Node) -> bool:
    """Say whether a number is finite whatever the tokens are (overflow of plain sums and products aside)."""
    match node:
        case Number(value):
            return math.isfinite(value)
        case Name(name):
            return name in FINITE_NAMES
        case Call("exp", (argument,)):
            return isinstance(argument, Call) and argument.function == "clip" and is_finite(argument)
        case Call("clip", (_, low, high)):
            return is_finite(low) and is_finite(high) and is_finite(node.arguments[0])
        case Call("/", (left, Number(value))):
            return value != 0 and is_finite(left)
        case Call("/" | "ln" | "sqrt", _):
            return False
        case Call(_, arguments):
            return all(is_finite(a) for a in arguments)
        case Choose():
            return is_finite(node.then) and is_finite(node.otherwise)
        case _:
            return False
