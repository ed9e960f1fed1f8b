"""The tokens behind a number: those that a condition selects, in the order of a value, with what stands around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.fitted import on_log
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.parse import parse
from estr_diag.rules.language.plan import Plan, plan
from estr_diag.rules.language.tree import Flag, Kind, Node, needs
from estr_diag.rules.names import parse_rules
from estr_diag.schema import quote_ident
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, relation

MAX_TOP, MAX_CONTEXT = 10_000, 200

_SHOWN = (
    "logp_infer", "logp_train", "logp_update", "logp_replay", "delta", "ratio", "entropy", "p_infer", "p_train",
    "policy_version", "trainer_version", "lag", "advantage", "turn", "trainer_keep",
)  # fmt: skip


def token_list(
    store: Store,
    where: str = "true",
    by: str = "s",
    *,
    top: int = 50,
    context: int = 8,
    rules: Mapping[str, Rule] | None = None,
    ascending: bool = False,
) -> Result:
    """Return the counted tokens that a condition selects, largest value first.

    How to read it: the top of the list by ``s`` are the tokens that a threshold on delta^2 / (H + 0.01) masks first. If
    they are one token id, one position or one sequence, that is where to look; if they are spread, it is the engines.

    Parameters
    ----------
    where
        Condition in the language of rules; it may name columns and rules, as in ``estr and not icepop``, and
        presets in double quotes, as in ``"icepop@verl"``. A token on which it is undecided is not selected.
    by
        Value to order by; a token that has none comes not at all. Ties are in order of sequence and position.
    top
        Rows.
    context
        Tokens before and after, of the same sequence, uncounted ones included.
    rules
        Rules of a file, by name.

    Returns
    -------
    Result
        One row a token: where it stands, its columns, ``value``, a column for each rule that `where` names, and
        ``before``, ``token``, ``after``.

    Raises
    ------
    MissingColumnError
        The condition or the value needs a column that the log lacks.
    """
    if not 1 <= top <= MAX_TOP or not 0 <= context <= MAX_CONTEXT:
        raise UsageError(f"top {top}, context {context}: expected 1 to {MAX_TOP} and 0 to {MAX_CONTEXT}")
    present = store.present()
    if lacking := frozenset({"logp_infer", "logp_train"}) - present:
        raise MissingColumnError("list of tokens", sorted(lacking), how_to_get(lacking))
    if by in ("s", "S") and "entropy" not in present:
        by = "delta * delta"
    named = _Named(rules or {})
    condition = bind(parse(where, {}, want=Kind.BOOLEAN, rule_of=named.find), present)
    value = bind(parse(by, {}, want=Kind.NUMBER, rule_of=named.find), present)
    condition, value = on_log(condition, store), on_log(value, store)
    trees = {name: on_log(bind(tree, present), store) for name, tree in named.found.items()}
    for what, tree in ((f"condition {where!r}", condition), (f"value {by!r}", value)):
        if lacking := needs(tree) - present:
            raise MissingColumnError(what, sorted(lacking), how_to_get(lacking))
    planned = plan([condition, value, *trees.values()])
    table = _selected(store, planned, condition, value, trees, top, ascending, present)
    counts = _counts(store, planned, condition, present)
    notes = [
        f"{counts['matching']:,} of {counts['n']:,} counted tokens match, in {counts['sequences']:,} sequences; "
        f"{len(table):,} shown"
    ]
    if counts["undecided"]:
        notes.append(
            f"{counts['undecided']:,} tokens are undecided: a column that the condition needs is missing on them"
        )
    table = _with_context(store, table, context)
    return Result("tokens", table, {"where": where, "by": by, "top": top, "context": context}, {}, tuple(notes))


@dataclass(slots=True)
class _Named:
    """Looks rules up and remembers which were named."""

    own: Mapping[str, Rule]
    found: dict[str, Node]

    def __init__(self, own: Mapping[str, Rule]) -> None:
        self.own, self.found = own, {}

    def find(self, name: str, parameters: Mapping[str, float]) -> Node | None:
        try:
            rule = self.own[name] if name in self.own else parse_rules(name)[0]
        except (UsageError, IndexError):
            return None
        tree = rule.with_parameters(parameters).tree()
        if not parameters:
            self.found.setdefault(name, tree)
        else:
            self.found[rule.with_parameters(parameters).label] = tree
            self.found.pop(name, None)
        return tree


def _selected(
    store: Store,
    planned: Plan,
    condition: Node,
    value: Node,
    trees: Mapping[str, Node],
    top: int,
    ascending: bool,
    present: frozenset[str],
) -> pa.Table:
    available = [
        row["column_name"] for row in store.rows(f"describe {relation(present, planned.view)} select * from viewed")
    ]
    shown = [name for name in _SHOWN if name in available]
    columns = [quote_ident(name) for name in shown]
    if "entropy" in shown:
        columns.append("delta * delta / (entropy + 0.01) as s")
    columns += [f"({planned.decision(tree)}) as {quote_ident(name)}" for name, tree in trees.items()]
    score = f"({planned.decision(value)})::double"
    chosen = "true" if condition == Flag(True) else f"({planned.decision(condition)})"
    order = f"value {'asc' if ascending else 'desc'}, seq_id, pos"
    return store.table(
        f"{relation(present, planned.view)} select * from (select step, seq_id, pos, {score} as value, "
        f"{', '.join(columns)} from viewed where {chosen}) where value is not null and not isnan(value) order by {order} limit {top}"
    )


def _counts(store: Store, planned: Plan, condition: Node, present: frozenset[str]) -> dict[str, Any]:
    chosen = planned.decision(condition)
    return store.rows(
        f"{relation(present, planned.view)} select count(*) as n, count(*) filter ({chosen}) as matching, "
        f"count(distinct seq_id) filter ({chosen}) as sequences, count(*) filter (({chosen}) is null) as undecided from viewed"
    )[0]


def _with_context(store: Store, table: pa.Table, context: int) -> pa.Table:
    """Join the names of the sequences, and the texts around each token: a few rows against the whole log, once."""
    store.connection.register("listed_tokens", table.append_column("row", pa.array(range(len(table)), pa.int64())))
    shown = "coalesce(t.token_text, '<' || t.token_id || '>', '·')"
    try:
        around = store.table(
            f"""
select l."row", any_value(s.seq_key) as seq_key, any_value(s.group_id) as group_id,
    any_value(t.token_id) filter (t.pos = l.pos) as token_id,
    coalesce(string_agg({shown}, '' order by t.pos) filter (t.pos < l.pos), '') as before,
    any_value({shown}) filter (t.pos = l.pos) as token,
    coalesce(string_agg({shown}, '' order by t.pos) filter (t.pos > l.pos), '') as after
from listed_tokens l
join sequences s using (seq_id)
join tokens t on t.seq_id = l.seq_id and t.pos between l.pos - {int(context)} and l.pos + {int(context)}
group by 1
order by 1"""
        )
    finally:
        store.connection.unregister("listed_tokens")
    for name in ("group_id", "seq_key"):
        table = table.add_column(2, name, around[name])
    for name in ("token_id", "before", "token", "after"):
        table = table.append_column(name, around[name])
    return table
