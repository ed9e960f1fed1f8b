"""Rule text: read with sqlglot, checked against an allow-list, compiled to DuckDB SQL.

A rule file is untrusted input. Its text may name the columns and functions below and nothing else, so a
rule can read the token log and nothing beside it. Nothing is compiled that has not been checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import sqlglot
from sqlglot import exp

from estr_diag.errors import UsageError, nearest
from estr_diag.expressions import DERIVED

COLUMNS: dict[str, frozenset[str]] = {
    "delta": DERIVED["delta"][0],
    "ratio": DERIVED["delta"][0],
    "p_infer": DERIVED["p_infer"][0],
    "p_train": DERIVED["p_train"][0],
    "lag": DERIVED["lag"][0],
    **{
        name: frozenset({name})
        for name in ("logp_infer", "logp_train", "logp_update", "entropy", "collision", "advantage")
    },
    "trainer_keep": frozenset({"trainer_keep"}),
}
"""Columns a rule may name -> log columns that it then needs."""

MACROS: dict[str, tuple[tuple[str, ...], str]] = {
    "clip": (("x", "lo", "hi"), "case when x < lo then lo when x > hi then hi else x end"),
    "binary_kl": (
        ("p", "q", "eps"),
        "clip(p, eps, 1 - eps) * ln(clip(p, eps, 1 - eps) / clip(q, eps, 1 - eps)) + "
        "(1 - clip(p, eps, 1 - eps)) * ln((1 - clip(p, eps, 1 - eps)) / (1 - clip(q, eps, 1 - eps)))",
    ),
}
"""Functions of the rule language that are written in it: name -> (arguments, text)."""

_ALLOWED_NODES = (
    exp.Column, exp.Identifier, exp.Literal, exp.Boolean, exp.Paren, exp.Neg, exp.Not, exp.And, exp.Or,
    exp.Add, exp.Sub, exp.Mul, exp.Div, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.EQ, exp.NEQ, exp.Between,
    exp.Case, exp.If, exp.Abs, exp.Exp, exp.Ln, exp.Sqrt, exp.Sign,
)  # fmt: skip
_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 200


def parse(text: str, parameters: Mapping[str, float]) -> exp.Expression:
    """Read a rule text, put in its parameters, and check every node.

    Raises
    ------
    UsageError
        Not one expression, or it names a column or function that is not allowed; says which, and
        the nearest allowed name.
    """
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"a rule of {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    try:
        statements = sqlglot.parse(text, read="duckdb")
    except (sqlglot.errors.SqlglotError, RecursionError) as error:
        raise UsageError(f"rule {text!r} cannot be read: {str(error).splitlines()[0]}") from None
    if len(statements) != 1 or statements[0] is None:
        raise UsageError(f"rule {text!r}: expected one expression, found {len(statements)}")
    tree = _expand(cast("exp.Expression", statements[0]), text)
    _check(tree, text, parameters)
    return tree.transform(lambda node: _bind(node, parameters))


def needs(text: str, parameters: Mapping[str, float]) -> frozenset[str]:
    """Return the log columns that a rule text needs."""
    names = {column.name for column in parse(text, parameters).find_all(exp.Column)}
    return frozenset().union(*(COLUMNS[name] for name in names))


def to_sql(text: str, parameters: Mapping[str, float]) -> str:
    """Compile a rule text to DuckDB SQL over one row of ``tok``; null where a column it uses is null."""
    return parse(text, parameters).sql(dialect="duckdb")


def _expand(tree: exp.Expression, text: str) -> exp.Expression:
    for _ in range(_MAX_DEPTH):
        call = next((c for c in tree.find_all(exp.Anonymous) if c.name.lower() in MACROS), None)
        if call is None:
            return tree
        arguments, body = MACROS[call.name.lower()]
        if len(call.expressions) != len(arguments):
            raise UsageError(
                f"rule {text!r}: {call.name} takes {len(arguments)} arguments, found {len(call.expressions)}"
            )
        given = {name: exp.Paren(this=value.copy()) for name, value in zip(arguments, call.expressions, strict=True)}
        written = sqlglot.parse_one(body, read="duckdb").transform(
            lambda node, given=given: (
                given[node.name].copy() if isinstance(node, exp.Column) and node.name in given else node
            )
        )
        replacement = exp.Paren(this=written)
        if call is tree:
            tree = replacement
        else:
            call.replace(replacement)
    raise UsageError(f"rule {text!r} is nested too deeply")


def _check(tree: exp.Expression, text: str, parameters: Mapping[str, float]) -> None:
    for node in tree.walk():
        if isinstance(node, exp.Anonymous):
            known = {*MACROS, "abs", "exp", "ln", "sqrt", "sign"}
            raise UsageError(
                f"rule {text!r}: function '{node.name}' is not allowed; {nearest(node.name.lower(), known)}"
            )
        if not isinstance(node, _ALLOWED_NODES):
            raise UsageError(
                f"rule {text!r}: {type(node).__name__} ({node.sql(dialect='duckdb')[:60]}) is not allowed in a rule"
            )
        if isinstance(node, exp.Column):
            if node.table:
                raise UsageError(f"rule {text!r}: '{node.sql()}' names another table; a rule reads the token log only")
            if node.name not in COLUMNS and node.name not in parameters:
                raise UsageError(
                    f"rule {text!r}: no column or parameter '{node.name}'; {nearest(node.name, {*COLUMNS, *parameters})}"
                )


def _bind(node: exp.Expression, parameters: Mapping[str, float]) -> exp.Expression:
    if isinstance(node, exp.Column) and node.name in parameters:
        # A cast, since DuckDB would read a bare 0.1 as a decimal and compare in decimals.
        value = exp.Literal.number(repr(abs(float(parameters[node.name]))))
        cast = exp.Cast(this=value, to=exp.DataType.build("double"))
        return exp.Neg(this=cast) if parameters[node.name] < 0 else cast
    return node
