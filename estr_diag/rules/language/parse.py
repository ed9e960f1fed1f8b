"""Rule text: read with sqlglot, checked against the vocabulary, turned into a typed tree.

The text is untrusted. Nothing is compiled that has not passed through here, and what passes is made of the
nodes of `tree` alone: there is no node for a table, a sub-select or a function that reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast

import sqlglot
from sqlglot import exp

from estr_diag.errors import UsageError, nearest
from estr_diag.expressions import Edge
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
    Scope,
    extent,
    kind,
)
from estr_diag.rules.language.vocabulary import (
    AGGREGATES,
    DEFINED,
    FUNCTIONS,
    MACROS,
    ORDERED_AGGREGATES,
    SCOPES,
    bound_name,
    functions,
    names,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHARACTERS = 10_000
MAX_DEPTH = 100
MAX_NODES = 5_000
MAX_TERMS = 20_000
"""Of a tree, with everything that its names and functions stand for."""

_ARITHMETIC: dict[type[exp.Expression], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/"}
_COMPARISONS: dict[type[exp.Expression], Literal["<", "<=", ">", ">=", "=", "<>"]] = {
    exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=", exp.EQ: "=", exp.NEQ: "<>",
}  # fmt: skip
_FUNCTIONS: dict[type[exp.Expression], str] = {
    exp.Abs: "abs", exp.Exp: "exp", exp.Ln: "ln", exp.Sqrt: "sqrt", exp.Sign: "sign", exp.Least: "least",
    exp.Greatest: "greatest",
}  # fmt: skip


def parse(
    text: str,
    parameters: Mapping[str, float],
    *,
    want: Kind,
    edge: Edge = "B",
    rule_of: Callable[[str, Mapping[str, float]], Node | None] | None = None,
    symbol: str | None = None,
) -> Node:
    """Read one expression.

    Parameters
    ----------
    text
        An expression in SQL's syntax over the names and functions of `vocabulary`.
    parameters
        Name -> value.
    want
        What it must be: a keep is true or false, a weight is a number.
    edge
        What ``delta``, ``ratio``, ``p_new`` ... are made of.
    rule_of
        Looks up other rules, which a text may name as it names a column.
    symbol
        A parameter that stays a `Name`, for who wants to know where it stands.

    Raises
    ------
    UsageError
        It is not one expression of that type over known names; says where, and the nearest valid name.
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"a rule of {len(text)} characters; at most {MAX_CHARACTERS} are read")
    reader = _Reader(text, edge, rule_of)
    environment: dict[str, Node] = {name: Number(float(value)) for name, value in parameters.items()}
    if symbol is not None:
        environment[symbol] = Name(symbol)
    try:
        node = reader.read(reader.syntax(), environment)
    except RecursionError:
        raise UsageError(f"rule {_short(text)!r} is nested too deeply") from None
    if (terms := extent(node)[0]) > MAX_TERMS:
        raise UsageError(f"rule {_short(text)!r} has {terms:,} terms with all that it names; at most {MAX_TERMS:,}")
    if kind(node) is not want:
        raise UsageError(f"rule {_short(text)!r} is {kind(node)}; expected {want}")
    return node


class _Reader:
    def __init__(
        self, text: str, edge: Edge, rule_of: Callable[[str, Mapping[str, float]], Node | None] | None
    ) -> None:
        self.text, self.edge, self.rule_of = text, edge, rule_of
        self.depth = self.nodes = 0

    def syntax(self) -> exp.Expression:
        try:
            statements = sqlglot.parse(self.text, read="duckdb")
        except (sqlglot.errors.SqlglotError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else _plain(str(error))
            raise UsageError(f"rule {_short(self.text)!r} cannot be read: {reason}") from None
        found = [s for s in statements if s is not None]
        if len(found) != 1 or len(statements) != 1:
            raise UsageError(f"rule {_short(self.text)!r}: expected one expression, found {len(found)}")
        return cast("exp.Expression", found[0])

    def read(self, node: exp.Expression, env: Mapping[str, Node]) -> Node:
        """Turn a node of sqlglot's into one of ours."""
        self.depth += 1
        self.nodes += 1
        if self.depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise UsageError(f"rule {_short(self.text)!r} is nested too deeply")
        found = self._read(node, env)
        self.depth -= 1
        return found

    def _read(self, node: exp.Expression, env: Mapping[str, Node]) -> Node:
        match node:
            case exp.Paren():
                return self.read(node.this, env)
            case exp.Literal():
                return self._number(node)
            case exp.Boolean():
                return Flag(bool(node.this))
            case exp.Column():
                return self._name(node, env)
            case exp.Neg():
                inner = self._typed(node.this, env, Kind.NUMBER)
                return Number(-inner.value) if isinstance(inner, Number) else Call("neg", (inner,))
            case exp.Not():
                return Logic("not", (self._typed(node.this, env, Kind.BOOLEAN),))
            case exp.And() | exp.Or():
                parts = tuple(self._typed(cast("exp.Expression", part), env, Kind.BOOLEAN) for part in node.flatten())
                return Logic("and" if isinstance(node, exp.And) else "or", parts)
            case exp.Between():
                value, low, high = (self._typed(node.args[k], env, Kind.NUMBER) for k in ("this", "low", "high"))
                return Logic("and", (Compare(">=", value, low), Compare("<=", value, high)))
            case exp.Case():
                return self._case(node, env)
            case exp.Filter():
                return self._aggregate_where(node, env)
        if type(node) in _ARITHMETIC:
            left, right = (self._typed(side, env, Kind.NUMBER) for side in (node.this, node.expression))
            return _folded(Call(_ARITHMETIC[type(node)], (left, right)))
        if type(node) in _COMPARISONS:
            left, right = (self._typed(side, env, Kind.NUMBER) for side in (node.this, node.expression))
            return Compare(_COMPARISONS[type(node)], left, right)
        if type(node) in _FUNCTIONS:
            arguments = [node.this, *node.expressions]
            return self._function(node, _FUNCTIONS[type(node)], arguments, env)
        if isinstance(node, exp.Anonymous):
            return self._call(node, env)
        raise self._refusal(node, f"{_what(node)} is not allowed in a rule")

    def _number(self, node: exp.Literal) -> Node:
        if node.is_string:
            raise self._refusal(node, "a text is not allowed in a rule; expected a number")
        value = float(node.this)
        if not math.isfinite(value):
            raise self._refusal(node, f"{node.this} is too large a number")
        return Number(value)

    def _name(self, node: exp.Column, env: Mapping[str, Node]) -> Node:
        if node.table:
            raise self._refusal(node, f"'{node.sql()}' names another table; a rule reads the token log only")
        name = node.name
        if name in env:
            return env[name]
        known = {n: n for n in names()} | {"S": "s"}
        if name in known:
            name = known[name]
            if name in DEFINED:
                return self._text(DEFINED[name], {})
            return Name(bound_name(name, self.edge))
        if self.rule_of is not None and (rule := self.rule_of(name, {})) is not None:
            return rule
        if name.lower() != name and name.lower() in known:
            raise self._refusal(node, f"no column or parameter '{name}'; did you mean '{name.lower()}'?")
        raise self._refusal(node, f"no column or parameter '{name}'; {nearest(name, [*known, *env])}")

    def _text(self, text: str, env: Mapping[str, Node]) -> Node:
        """Read a text of our own (a macro, a defined name) in an environment of its own."""
        return self.read(cast("exp.Expression", sqlglot.parse_one(text, read="duckdb")), env)

    def _call(self, node: exp.Anonymous, env: Mapping[str, Node]) -> Node:
        name, arguments = node.name.lower(), node.expressions
        if name in MACROS:
            expected, text = MACROS[name]
            self._count(node, name, len(expected), len(arguments))
            given = [self._typed(argument, env, Kind.NUMBER) for argument in arguments]
            return self._text(text, dict(zip(expected, given, strict=True)))
        if name in FUNCTIONS:
            return self._function(node, name, arguments, env)
        scope, _, function = name.partition("_")
        if name in ORDERED_AGGREGATES or (scope in SCOPES and function in AGGREGATES):
            return self._aggregate(node, cast("Scope", scope), function, env)
        # One look-up: each may read a text that looks up others.
        if (
            self.rule_of is not None
            and all(isinstance(argument, exp.EQ) for argument in arguments)
            and (rule := self.rule_of(name, self._settings(node))) is not None
        ):
            return rule
        raise self._refusal(node, f"function '{node.name}' is not allowed; {nearest(name, functions())}")

    def _settings(self, node: exp.Anonymous) -> dict[str, float]:
        settings = {}
        for argument in node.expressions:
            value = argument.expression if isinstance(argument, exp.EQ) else None
            number = value.this if isinstance(value, exp.Neg) else value
            if not isinstance(number, exp.Literal) or number.is_string or not isinstance(argument.this, exp.Column):
                raise self._refusal(node, f"{node.name} takes parameters as name = number")
            settings[argument.this.name] = float(number.this) * (-1 if isinstance(value, exp.Neg) else 1)
        return settings

    def _function(
        self, node: exp.Expression, name: str, arguments: list[exp.Expression], env: Mapping[str, Node]
    ) -> Node:
        given = tuple(self._typed(argument, env, Kind.NUMBER) for argument in arguments)
        if name not in ("least", "greatest") or len(given) < 2:
            self._count(node, name, FUNCTIONS[name], len(given))
        return Call(name, given)

    def _aggregate(self, node: exp.Anonymous, scope: Scope, function: str, env: Mapping[str, Node]) -> Aggregate:
        expected, over = {**AGGREGATES, **{n.partition("_")[2]: v for n, v in ORDERED_AGGREGATES.items()}}[function]
        self._count(node, node.name.lower(), expected, len(node.expressions))
        if over == "none":
            return Aggregate(scope, function, None)
        argument = self._typed(node.expressions[0], env, Kind.BOOLEAN if over == "boolean" else Kind.NUMBER)
        if expected == 1:
            return Aggregate(scope, function, argument)
        parameter = self._typed(node.expressions[1], env, Kind.NUMBER)
        if not isinstance(parameter, Number):
            raise self._refusal(node, f"the second argument of {node.name.lower()} must be a number or a parameter")
        if function in ("quantile", "discounted") and not 0 <= parameter.value <= 1:
            raise self._refusal(
                node, f"the second argument of {node.name.lower()} is {parameter.value:g}; expected 0 to 1"
            )
        return Aggregate(scope, function, argument, parameter.value)

    def _aggregate_where(self, node: exp.Filter, env: Mapping[str, Node]) -> Node:
        inner = self.read(node.this, env)
        if not isinstance(inner, Aggregate):
            raise self._refusal(
                node, "a filter stands behind an aggregate, as in seq_mean(delta) filter (where ratio < 2)"
            )
        where = self._typed(node.expression.this, env, Kind.BOOLEAN)
        return Aggregate(inner.scope, inner.function, inner.argument, inner.parameter, where)

    def _case(self, node: exp.Case, env: Mapping[str, Node]) -> Node:
        if node.this is not None or node.args.get("default") is None:
            raise self._refusal(node, "expected case when CONDITION then .. else .. end")
        found = self.read(node.args["default"], env)
        for arm in reversed(node.args["ifs"]):
            condition = self._typed(arm.this, env, Kind.BOOLEAN)
            then = self._typed(arm.args["true"], env, kind(found))
            found = Choose(condition, then, found)
        return found

    def _typed(self, node: exp.Expression, env: Mapping[str, Node], want: Kind) -> Node:
        found = self.read(node, env)
        if kind(found) is not want:
            raise self._refusal(node, f"{node.sql(dialect='duckdb')[:60]!r} is {kind(found)}; expected {want} here")
        return found

    def _count(self, node: exp.Expression, name: str, expected: int, found: int) -> None:
        if expected != found:
            raise self._refusal(node, f"{name} takes {expected} argument{'s' * (expected != 1)}, found {found}")

    def _refusal(self, node: exp.Expression, why: str) -> UsageError:
        return UsageError(f"rule {_short(self.text)!r}{_place(node, self.text)}: {why}")


def _folded(call: Call) -> Node:
    """Return sums and products of constants as one constant, so that ``1 - rho`` may stand where a number must."""
    match call:
        case Call("+", (Number(a), Number(b))):
            return Number(a + b)
        case Call("-", (Number(a), Number(b))):
            return Number(a - b)
        case Call("*", (Number(a), Number(b))):
            return Number(a * b)
        case _:
            return call


def _place(node: exp.Expression, text: str) -> str:
    """Return where a node begins, in characters from 1."""
    starts = [part.meta["start"] for part in node.walk() if "start" in part.meta]
    if not starts or min(starts) >= len(text):
        return ""
    return f", at character {min(starts) + 1}"


def _what(node: exp.Expression) -> str:
    written = node.sql(dialect="duckdb")
    return f"{type(node).__name__.lower()} ({written[:60]}{'...' if len(written) > 60 else ''})"


def _plain(message: str) -> str:
    # sqlglot underlines the place with terminal codes; the line and column stand in the first line anyway.
    return message.splitlines()[0] if message else "unreadable"


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
