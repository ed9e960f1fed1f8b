"""Many trees, one relation: the aggregates that rules name become columns beside the tokens.

Aggregates of the same depth and scope share one pass; a tree without aggregates needs none. A scope wider than
a sequence (group, step) asks that its tokens lie in one shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from estr_diag.rules.language.sql import Dtype, decision, literal
from estr_diag.rules.language.tree import ORDERED, WINDOWS, Aggregate, Name, Node, children, walk
from estr_diag.rules.language.vocabulary import OF_SEQUENCE
from estr_diag.schema import quote_ident

ALWAYS_KNOWN = frozenset({"logp_infer", "logp_train", "delta", "ratio", "p_infer", "p_train", "pos"})
"""Names that no counted token lacks: a token with one of the two log-probs missing is not counted."""

_SCOPE_KEYS: dict[str, tuple[str, ...]] = {
    "seq": ("seq_id",), "turn": ("seq_id", "turn"), "run": ("seq_id", "run"), "group": ("step", "group_id"),
    "step": ("step",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """How a set of trees is computed.

    Parameters
    ----------
    view
        Query over ``tok`` (and the log's sequences) whose rows have a column for each aggregate; None
        when no tree has one, so that ``tok`` itself serves.
    columns
        Aggregate -> its column.
    whole
        The widest scope whose tokens must lie in one shard.
    """

    view: str | None
    columns: dict[Aggregate, str] = field(default_factory=dict)
    whole: str = "seq"

    def decision(self, node: Node, dtype: Dtype = "float64") -> str:
        """Return a keep as SQL over a row of the plan's relation; null where it cannot be told."""
        return decision(node, self.columns, ALWAYS_KNOWN, dtype)

    def value(self, node: Node, dtype: Dtype = "float64") -> str:
        """Return a number as SQL over a row of the plan's relation; null where it cannot be told."""
        return decision(node, self.columns, ALWAYS_KNOWN, dtype)


def plan(trees: Iterable[Node]) -> Plan:
    """Plan the aggregates and columns of several trees together."""
    parts = [part for tree in trees for part in walk(tree)]
    names = {part.name for part in parts if isinstance(part, Name)}
    found = list(dict.fromkeys(part for part in parts if isinstance(part, Aggregate)))
    of_sequence = sorted(names & OF_SEQUENCE.keys())
    if not found and not of_sequence:
        return Plan(None)
    columns = {aggregate: f"agg_{i}" for i, aggregate in enumerate(found)}
    scopes: set[str] = {aggregate.scope for aggregate in found}
    levels: defaultdict[int, list[Aggregate]] = defaultdict(list)
    for aggregate in found:
        levels[_depth(aggregate)].append(aggregate)
    ctes = [("rows_0", _rows(of_sequence, scopes))]
    for level, aggregates in sorted(levels.items()):
        ctes += _level(level, aggregates, columns)
    written = ",\n".join(
        f"{name} as {'not ' * (not name.startswith('scope'))}materialized ({query})" for name, query in ctes
    )
    whole = next((scope for scope in ("step", "group") if scope in scopes), "seq")
    return Plan(f"with {written}\nselect * from {ctes[-1][0]}", columns, whole)


def _depth(node: Node) -> int:
    below = max((_depth(child) for child in children(node)), default=0)
    return below + isinstance(node, Aggregate)


def _rows(of_sequence: list[str], scopes: set[str]) -> str:
    """Return ``tok`` with the columns of the sequence and the run that its scopes need."""
    extra = []
    if "run" in scopes:
        # Counted positions without a gap have the same difference to their rank.
        extra.append("t.pos - row_number() over (partition by t.seq_id order by t.pos) as run")
    joined = [f"({OF_SEQUENCE[name][1]}) as {name}" for name in of_sequence]
    joined += ["group_id"] if "group" in scopes else []
    if not joined:
        return f"select t.*{''.join(', ' + e for e in extra)} from tok t"
    listed = "".join(f", s.{name.rpartition(' ')[2]}" for name in joined)
    return (
        f"select t.*{listed}{''.join(', ' + e for e in extra)} from tok t "
        f"join (select seq_id, {', '.join(joined)} from log_sequences) s using (seq_id)"
    )


def _level(level: int, aggregates: list[Aggregate], columns: dict[Aggregate, str]) -> list[tuple[str, str]]:
    source, ctes, joins, selected = f"rows_{level - 1}", [], [], []
    windows = [f"{_ordered(a, columns)} as {columns[a]}" for a in aggregates if a.function in WINDOWS]
    if windows:
        ctes.append((f"ordered_{level}", f"select *, {', '.join(windows)} from {source}"))
        source = f"ordered_{level}"
    by_scope: defaultdict[str, list[Aggregate]] = defaultdict(list)
    for aggregate in aggregates:
        if aggregate.function not in ORDERED:
            by_scope[aggregate.scope].append(aggregate)
    for scope, members in by_scope.items():
        name, keys = f"scope_{level}_{scope}", _SCOPE_KEYS[scope]
        # Another name than the rows', so that a text that names a key is not ambiguous beside the join.
        listed = ", ".join(f"{quote_ident(key)} as {quote_ident('of_' + key)}" for key in keys)
        inner = ", ".join(f"{_grouped(member, columns)} as {columns[member]}" for member in members)
        ctes.append((name, f"select {listed}, {inner} from {source} group by {', '.join(map(quote_ident, keys))}"))
        joins.append(_join(name, keys))
        selected += [f"{name}.{columns[member]}" for member in members]
    for aggregate in aggregates:
        if aggregate.function == "budget":
            name, keys = f"scope_{level}_{columns[aggregate]}", _SCOPE_KEYS[aggregate.scope]
            ctes.append((name, _budget(aggregate, columns, source)))
            joins.append(_join(name, keys))
            selected.append(f"{_within(aggregate, columns, name)} as {columns[aggregate]}")
    ctes.append((f"rows_{level}", f"select {', '.join(['r.*', *selected])} from {source} r {' '.join(joins)}"))
    return ctes


def _join(name: str, keys: tuple[str, ...]) -> str:
    on = " and ".join(f"r.{quote_ident(key)} = {name}.{quote_ident('of_' + key)}" for key in keys)
    return f"left join {name} on {on}"


def _argument(aggregate: Aggregate, columns: dict[Aggregate, str]) -> str:
    assert aggregate.argument is not None
    return decision(aggregate.argument, columns, ALWAYS_KNOWN)


def _where(aggregate: Aggregate, columns: dict[Aggregate, str]) -> str:
    return "true" if aggregate.where is None else f"coalesce({decision(aggregate.where, columns, ALWAYS_KNOWN)}, false)"


def _grouped(aggregate: Aggregate, columns: dict[Aggregate, str]) -> str:
    """Return an aggregate of a group-by; null where one of its tokens is unknown."""
    part = _where(aggregate, columns)
    only = "" if aggregate.where is None else f" filter (where {part})"
    if aggregate.function == "count":
        return f"(count(*){only})::double"
    x = _argument(aggregate, columns)
    match aggregate.function:
        case "any" | "all":
            value = f"coalesce(bool_{'or' if aggregate.function == 'any' else 'and'}({x}){only}, {str(aggregate.function == 'all').lower()})"
        case "quantile":
            assert aggregate.parameter is not None
            value = f"quantile_cont({x}, {literal(aggregate.parameter)}){only}"
        case "mean":
            value = f"avg({x}){only}"
        case "sum":
            value = f"coalesce(sum({x}){only}, 0e0)"
        case function:
            value = f"{function}({x}){only}"
    return f"case when count(*){only} = count({x}){only} then {value} end"


def _ordered(aggregate: Aggregate, columns: dict[Aggregate, str]) -> str:
    """Return a window over the tokens of a sequence; null where one of its tokens is unknown."""
    keys = ", ".join(quote_ident(key) for key in _SCOPE_KEYS[aggregate.scope])
    x, part = _argument(aggregate, columns), _where(aggregate, columns)
    known = f"bool_and(not ({part}) or ({x}) is not null) over (partition by {keys})"
    if aggregate.function == "any_before":
        before = f"over (partition by {keys} order by pos rows between unbounded preceding and 1 preceding)"
        value = f"coalesce(bool_or({part} and {x}) {before}, false)"
    else:
        assert aggregate.parameter is not None
        value = _discounted(x, part, aggregate.parameter, keys)
    return f"case when {known} then {value} end"


def _budget(aggregate: Aggregate, columns: dict[Aggregate, str], source: str) -> str:
    """Return, for each scope, the last token in order of x whose running mean is below the budget.

    The mean of the i smallest rises with i, so what stays below the budget is a prefix; one token stays in any case.
    Only x and the token's name are sorted: with the whole row a step of ten million tokens takes five times as long.
    """
    assert aggregate.parameter is not None
    keys = ", ".join(quote_ident(key) for key in _SCOPE_KEYS[aggregate.scope])
    named = ", ".join(f"{quote_ident(key)} as {quote_ident('of_' + key)}" for key in _SCOPE_KEYS[aggregate.scope])
    x, part = _argument(aggregate, columns), _where(aggregate, columns)
    kept = f"avg(x) over w < {literal(aggregate.parameter)} or row_number() over w = 1"
    return (
        f"select {named}, bool_and(x is not null) as known, max(case when kept then {_TOKEN} end) as cut from ("
        f"select *, ({kept}) as kept from (select {keys}, seq_id, pos, {x} as x from {source} where {part}) "
        f"window w as (partition by {keys} order by x, seq_id, pos rows unbounded preceding)) group by {keys}"
    )


def _within(aggregate: Aggregate, columns: dict[Aggregate, str], name: str) -> str:
    x, part = _argument(aggregate, columns), _where(aggregate, columns)
    before = (
        f"({x}) < {name}.cut.x or (({x}) = {name}.cut.x and (r.seq_id < {name}.cut.s or "
        f"(r.seq_id = {name}.cut.s and r.pos <= {name}.cut.p)))"
    )
    return f"case when {name}.known then coalesce(({part}) and ({before}), false) end"


_TOKEN = "struct_pack(x := x, s := seq_id, p := pos)"


def _discounted(x: str, part: str, factor: float, keys: str) -> str:
    """Return sum over s >= t of factor^(s - t) x_s.

    Powers of the position span factor^length; where they underflow (32,000 tokens at a half-life of 32) the
    value is null rather than wrong.
    """
    power = f"power({literal(factor)}, pos::double)"
    over = f"over (partition by {keys} order by pos desc rows unbounded preceding)"
    return f"sum(case when {part} then ({x}) * {power} else 0e0 end) {over} / nullif({power}, 0e0)"
