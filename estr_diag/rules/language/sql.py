"""A rule's tree as DuckDB SQL over one row of ``tok``.

Semantics are those of IEEE arithmetic and of the language, where SQL's differ: NaN compares false (SQL has it above
everything), a condition on something unknown does not fall through to ``else``, least and greatest do not skip nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from estr_diag.rules.language.tree import (
    Aggregate,
    Call,
    Choose,
    Compare,
    Flag,
    Kind,
    Logic,
    Name,
    Node,
    Number,
    Settled,
    is_finite,
    kind,
    strict,
)

Dtype = Literal["float64", "float32"]
"""In which arithmetic a rule is evaluated; float32 reproduces trainers whose clamps vanish in it."""

_SQL_TYPE: dict[Dtype, str] = {"float64": "double", "float32": "real"}

Columns = Mapping[Aggregate, str]
"""Aggregate -> the column that holds it (see `plan`)."""


def literal(value: float, dtype: Dtype = "float64") -> str:
    """Return a number as SQL reads it: exactly, and never as a decimal (a bare 0.1 would be one)."""
    text = repr(float(value))
    text = text if "e" in text else f"{text}e0"
    text = text if dtype == "float64" else f"{text}::real"
    return f"({text})" if value < 0 else text


def decision(node: Node, columns: Columns, always: frozenset[str], dtype: Dtype = "float64") -> str:
    """Return a keep as SQL: true, false, or null where something that it reads is missing.

    Parameters
    ----------
    always
        Names that no counted token lacks, so that nothing is asked about them.
    """
    unknown = [
        f"{reference(part, columns)} is null"
        for part in strict(node)
        if not (isinstance(part, Name) and part.name in always)
    ]
    value = expression(node, columns, always, dtype)
    return f"case when {' or '.join(unknown)} then null else {value} end" if unknown else value


def reference(part: Name | Aggregate, columns: Columns) -> str:
    """Return the column of a name or of an aggregate."""
    return part.name if isinstance(part, Name) else columns[part]


def expression(node: Node, columns: Columns, always: frozenset[str], dtype: Dtype = "float64") -> str:
    """Return the value of a tree as SQL, for tokens on which everything that it reads is known."""
    return _Writer(columns, always, dtype).write(node)


class _Writer:
    def __init__(self, columns: Columns, always: frozenset[str], dtype: Dtype) -> None:
        self.columns, self.always, self.dtype = columns, always, dtype

    def write(self, node: Node) -> str:
        match node:
            case Number(value):
                return literal(value, self.dtype)
            case Flag(value):
                return "true" if value else "false"
            case Name() | Aggregate():
                column = reference(node, self.columns)
                return column if kind(node) is Kind.BOOLEAN else self._cast(column, always=self.dtype == "float32")
            case Call():
                return self._call(node)
            case Compare():
                return self._compare(node)
            case Logic("not", (part,)):
                return f"(not {self.write(part)})"
            case Logic(operator, parts):
                return "(" + f" {operator} ".join(self.write(part) for part in parts) + ")"
            case Choose(condition, then, otherwise):
                return f"case when {self.write(condition)} then {self.write(then)} else {self.write(otherwise)} end"
            case Settled(part, default):
                return f"coalesce({decision(part, self.columns, self.always, self.dtype)}, {str(default).lower()})"

    def _call(self, node: Call) -> str:
        arguments = [self.write(argument) for argument in node.arguments]
        match node.function, arguments:
            case "+" | "-" | "*" | "/", [left, right]:
                return f"({left} {node.function} {right})"
            case "neg", [x]:
                return f"(-{x})"
            case "abs", [x]:
                return f"abs({x})"
            case "sign", [x]:
                return self._cast(self._unless_nan(node, x, f"sign({x})"), always=True)
            case "clip", [x, low, high]:
                return self._unless_nan(node, x, f"when {x} < {low} then {low} when {x} > {high} then {high} else {x}")
            case "least" | "greatest", [first, *rest]:
                return self._extreme(node, first, rest)
            case _:
                return self._cast(f"{node.function}({', '.join(arguments)})", always=self.dtype == "float32")

    def _extreme(self, node: Call, first: str, rest: list[str]) -> str:
        # CASE: on doubles it is 25 times faster in DuckDB than least and greatest.
        better = "<" if node.function == "least" else ">"
        for x in rest:
            arms = f"when {x} {better} {first} then {x} else {first}"
            nan = "" if is_finite(node) else f"when isnan({first}) then {first} when isnan({x}) then {x} "
            first = f"case {nan}{arms} end"
        return first

    def _unless_nan(self, node: Call, x: str, otherwise: str) -> str:
        guard = "" if is_finite(node.arguments[0]) else f"when isnan({x}) then {x} "
        if otherwise.startswith("when "):
            return f"case {guard}{otherwise} end"
        return f"case {guard}else {otherwise} end" if guard else otherwise

    def _compare(self, node: Compare) -> str:
        if split := _over_each(node):
            return self.write(split)
        left, right = self.write(node.left), self.write(node.right)
        compared = f"{left} {node.operator} {right}"
        # NaN stands above every number in SQL: that is false by itself on the left of < and on the right of >.
        exposed = {"<": (node.right,), "<=": (node.right,), ">": (node.left,), ">=": (node.left,)}
        sides = [side for side in exposed.get(node.operator, (node.left, node.right)) if not is_finite(side)]
        guards = [f"not isnan({self.write(side)})" for side in dict.fromkeys(sides)]
        return f"({' and '.join([compared, *guards])})"

    def _cast(self, sql: str, *, always: bool) -> str:
        return f"{sql}::{_SQL_TYPE[self.dtype]}" if always else sql


def _over_each(node: Compare) -> Node | None:
    """Return ``greatest(x, y) <= c`` as ``x <= c and y <= c``: a CASE of long expressions repeats them all."""
    left = node.left
    matches = {("greatest", "<="), ("greatest", "<"), ("least", ">="), ("least", ">")}
    if not isinstance(left, Call) or (left.function, node.operator) not in matches:
        return None
    return Logic("and", tuple(Compare(node.operator, x, node.right) for x in left.arguments))
