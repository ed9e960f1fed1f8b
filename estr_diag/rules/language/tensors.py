"""A rule's tree on torch tensors: the same values and the same three-valued decisions as its SQL.

Tokens are flat and counted only. A value comes with where it is known: None stands for everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import sqlglot
from sqlglot import exp

from estr_diag.expressions import DERIVED, EDGES, RATIO, renamed
from estr_diag.rules.language import scatter
from estr_diag.rules.language.tree import (
    Aggregate,
    Call,
    Choose,
    Compare,
    Flag,
    Logic,
    Name,
    Node,
    Number,
    Settled,
    strict,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Tokens:
    """Counted tokens as flat tensors.

    Attributes
    ----------
    columns
        Stored columns by name, floats already in the dtype of the evaluation; NaN where a value is missing.
    missing
        Column -> where its value is missing; a column without holes is not in it.
    scopes
        Scope -> (index of each token's scope, number of scopes, or where the scope is not known).
    pos, sequence
        Position in the response and sequence of each token, for ordered quantities.
    """

    columns: Mapping[str, Tensor]
    missing: Mapping[str, Tensor]
    scopes: Mapping[str, tuple[Tensor, int]]
    pos: Tensor
    sequence: Tensor
    dtype: torch.dtype
    values: dict[Node, Tensor] = field(default_factory=dict)
    known: dict[Node, Tensor | None] = field(default_factory=dict)

    def decision(self, node: Node) -> tuple[Tensor, Tensor | None]:
        """Return a tree's value, and where it is known (None: everywhere)."""
        return self.value(node), self._all_known(node)

    def value(self, node: Node) -> Tensor:
        """Return a tree's value on every token; meaningless where it is not known."""
        if node not in self.values:
            self.values[node] = self._value(node)
        return self.values[node]

    def _value(self, node: Node) -> Tensor:
        import torch

        match node:
            case Number(value):
                return torch.full_like(self.pos, value, dtype=self.dtype)
            case Flag(value):
                return torch.full_like(self.pos, value, dtype=torch.bool)
            case Name(name):
                return self._name(name)
            case Call(function, arguments):
                return self._call(function, arguments)
            case Compare(operator, left, right):
                return _COMPARE[operator](self.value(left), self.value(right))
            case Logic("not", (part,)):
                return ~self.value(part)
            case Logic(operator, parts):
                found = self.value(parts[0])
                for part in parts[1:]:
                    found = found & self.value(part) if operator == "and" else found | self.value(part)
                return found
            case Choose(condition, then, otherwise):
                return torch.where(self.value(condition), self.value(then), self.value(otherwise))
            case Settled(part, default):
                found, known = self.decision(part)
                return found if known is None else torch.where(known, found, torch.full_like(found, default))
            case Aggregate():
                return self._aggregate(node)
        raise AssertionError(node)

    def _name(self, name: str) -> Tensor:
        if name in self.columns:
            return self.columns[name]
        if name == "pos":
            return self.pos.to(self.dtype)
        return self.value(derived(name))

    def _call(self, function: str, arguments: tuple[Node, ...]) -> Tensor:
        import torch

        if function == "clip":
            x, low, high = (self.value(a) for a in arguments)
            return torch.minimum(torch.maximum(x, low), high)
        given = [self.value(a) for a in arguments]
        if function in ("least", "greatest"):
            found = given[0]
            for x in given[1:]:
                found = torch.minimum(found, x) if function == "least" else torch.maximum(found, x)
            return found
        return _call_of(function)(*given)

    def _all_known(self, node: Node) -> Tensor | None:
        """Return where everything that a tree reads is known."""
        known: Tensor | None = None
        for part in strict(node):
            here = self._is_known(part)
            if here is not None:
                known = here if known is None else known & here
        return known

    def _is_known(self, part: Name | Aggregate) -> Tensor | None:
        if part not in self.known:
            if isinstance(part, Aggregate):
                self._aggregate_known(part)
            elif part.name in self.columns or part.name == "pos":
                hole = self.missing.get(part.name)
                self.known[part] = None if hole is None else ~hole
            else:
                self.known[part] = self._all_known(derived(part.name))
        return self.known[part]

    def _taking_part(self, node: Aggregate) -> Tensor | None:
        """Return which tokens an aggregate is over; None for all. An unknown filter leaves its token out."""
        if node.where is None:
            return None
        value, known = self.decision(node.where)
        return value if known is None else value & known

    def _aggregate_known(self, node: Aggregate) -> None:
        import torch

        index, n = self.scopes[node.scope]
        known = None if bool(self._scope_is_known(node.scope)) else index >= 0
        inner = None if node.argument is None else self._all_known(node.argument)
        if inner is not None:
            part = self._taking_part(node)
            holes = ~inner if part is None else ~inner & part
            at = index.clamp(min=0)
            bad = torch.zeros(max(n, 1), dtype=self.dtype, device=index.device)
            bad = bad.index_add(0, at, (holes & (index >= 0)).to(self.dtype))
            complete = bad[at] == 0
            known = complete if known is None else known & complete
        if node.function in ("max", "min", "mean", "quantile"):
            some = self.value(Aggregate(node.scope, "count", None, None, node.where)) > 0
            known = some if known is None else known & some
        if node.function == "discounted" and node.parameter is not None:
            power = node.parameter ** self.pos.to(self.dtype)
            known = power != 0 if known is None else known & (power != 0)
        self.known[node] = known

    def _scope_is_known(self, scope: str) -> bool:
        return scope == "seq" or scope == "run"

    def _aggregate(self, node: Aggregate) -> Tensor:
        import torch

        raw, n = self.scopes[node.scope]
        n = max(n, 1)
        index = raw.clamp(min=0)
        part = self._taking_part(node)
        # A token whose scope is not known takes part in none.
        if not self._scope_is_known(node.scope):
            part = raw >= 0 if part is None else part & (raw >= 0)
        if node.function == "count":
            one = torch.ones_like(self.pos, dtype=self.dtype)
            one = one if part is None else torch.where(part, one, torch.zeros_like(one))
            return scatter.scope_sum(one, index, n)[index]
        assert node.argument is not None
        x, inner = self.value(node.argument), self._all_known(node.argument)
        takes = part if inner is None else (inner if part is None else part & inner)
        if node.function in ("any", "all", "any_before"):
            return self._truth(node, x, takes, index, n)
        if node.function == "budget":
            return self._budget(node, x, takes, index)
        zero = torch.zeros_like(x)
        if node.function in ("sum", "mean"):
            total = scatter.scope_sum(x if takes is None else torch.where(takes, x, zero), index, n)
            if node.function == "mean":
                count = self.value(Aggregate(node.scope, "count", None, None, node.where))
                return total[index] / count.clamp(min=1)
            return total[index]
        if node.function in ("max", "min"):
            largest = node.function == "max"
            out = torch.full_like(x, float("-inf") if largest else float("inf"))
            chosen = x if takes is None else torch.where(takes, x, out)
            return scatter.scope_extreme(chosen, index, n, largest=largest)[index]
        assert node.parameter is not None
        if node.function == "quantile":
            at = torch.arange(len(x), device=x.device) if takes is None else takes.nonzero().squeeze(1)
            return scatter.scope_quantile(x[at], index[at], n, node.parameter)[index]
        power = node.parameter ** self.pos.to(self.dtype)
        terms = power * (x if takes is None else torch.where(takes, x, zero))
        order = self._by_position(descending=True)
        return scatter.running(terms, index, order) / power

    def _truth(self, node: Aggregate, x: Tensor, takes: Tensor | None, index: Tensor, n: int) -> Tensor:
        yes = x if node.function != "all" else ~x
        hits = (yes if takes is None else yes & takes).to(self.dtype)
        if node.function == "any_before":
            return scatter.running(hits, index, self._by_position(descending=False)) - hits > 0
        found = scatter.scope_sum(hits, index, n)[index] > 0
        return found if node.function == "any" else ~found

    def _budget(self, node: Aggregate, x: Tensor, takes: Tensor | None, index: Tensor) -> Tensor:
        import torch

        assert node.parameter is not None
        at = torch.arange(len(x), device=x.device) if takes is None else takes.nonzero().squeeze(1)
        order = at[torch.argsort(self.pos[at], stable=True)]
        order = order[torch.argsort(self.sequence[order], stable=True)]
        order = order[torch.argsort(x.detach()[order], stable=True)]
        order = order[torch.argsort(index[order], stable=True)]
        inside = torch.arange(len(order), device=x.device)
        total = scatter.running(x[order], index[order], inside)
        count = scatter.running(torch.ones_like(total), index[order], inside)
        keep = torch.zeros_like(x, dtype=torch.bool)
        keep[order] = (total / count < node.parameter) | (count == 1)
        return keep

    def _by_position(self, *, descending: bool) -> Tensor:
        import torch

        order = torch.argsort(self.pos, stable=True, descending=descending)
        return order[torch.argsort(self.sequence[order], stable=True)]


@cache
def derived(name: str) -> Node:
    """Return the tree behind a derived name, from the one place where its formula stands as SQL."""
    for edge in EDGES:
        if name == renamed("ratio", edge):
            return _plain(renamed(RATIO, edge))
    return _plain(DERIVED[name][1])


def _plain(text: str) -> Node:
    """Read a formula of our own, whose columns stand for themselves."""
    return _read(sqlglot.parse_one(text, read="duckdb"))


def _read(node: exp.Expr) -> Node:
    match node:
        case exp.Paren():
            return _read(node.this)
        case exp.Column():
            return Name(node.name)
        case exp.Literal():
            return Number(float(node.this))
        case exp.Neg():
            return Call("neg", (_read(node.this),))
        case exp.Sub():
            return Call("-", (_read(node.this), _read(node.expression)))
        case exp.Exp():
            return Call("exp", (_read(node.this),))
        case exp.LT() | exp.GT():
            return Compare("<" if isinstance(node, exp.LT) else ">", _read(node.this), _read(node.expression))
        case exp.Case():
            found = _read(node.args["default"])
            for arm in reversed(node.args["ifs"]):
                found = Choose(_read(arm.this), _read(arm.args["true"]), found)
            return found
    raise NotImplementedError(f"{type(node).__name__} in a formula of expressions.py")


def _call_of(function: str) -> Callable[..., Tensor]:
    import torch

    calls: dict[str, Any] = {
        "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "neg": torch.neg, "abs": torch.abs,
        "exp": torch.exp, "ln": torch.log, "sqrt": torch.sqrt, "sign": torch.sign,
    }  # fmt: skip
    return cast("Callable[..., Tensor]", calls[function])


_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    # IEEE has NaN unequal to everything; the language has every comparison with NaN false.
    "<>": lambda a, b: (a < b) | (a > b),
}
