"""Stretches of sequences around tokens, with every token's numbers and each rule's decision: what the token view shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import MAX_RULES, Decisions
from estr_diag.store.database import Store
from estr_diag.store.engine import relation

VALUES = (
    "delta", "entropy", "p_infer", "p_train", "logp_infer", "logp_train", "logp_replay", "advantage", "lag",
    "policy_version", "trainer_version",
)  # fmt: skip
"""Columns of a token that a view shows, as far as the log has them."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a window.

    Attributes
    ----------
    text
        Its text, or ``<id>`` where the log has none.
    counted
        Inside the loss mask, with both log-probs.
    switched
        The first one of new weights.
    listed
        One that the window was asked for.
    values
        Column -> number, missing ones left out.
    decisions
        Rule -> kept, masked, or None where it is undecided.
    """

    pos: int
    text: str
    counted: bool
    switched: bool
    listed: bool
    values: Mapping[str, float]
    decisions: Mapping[str, bool | None]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one sequence."""

    seq_id: int
    seq_key: str
    step: int | None
    reward: float | None
    length: int
    tokens: list[Token] = field(default_factory=list)


def windows(
    store: Store, listed: Result, rules: Sequence[Rule] = (), *, sequences: int = 12, width: int = 60
) -> list[Window]:
    """Return a window around the first listed token of each of the first sequences.

    Parameters
    ----------
    listed
        Of `token_list`; rows with ``seq_id`` and ``pos``.
    rules
        Whose decisions are shown; each must find its columns in the log.
    sequences
        At most so many windows.
    width
        Tokens before and after.
    """
    spots: dict[int, list[int]] = {}
    for row in listed.table.select(["seq_id", "pos"]).to_pylist():
        if row["seq_id"] in spots or len(spots) < sequences:
            spots.setdefault(row["seq_id"], []).append(row["pos"])
    if not spots:
        return []
    present = store.present()
    decisions = Decisions.of(tuple(rules)[:MAX_RULES], present)
    table = pa.table({"seq_id": list(spots), "at": [places[0] for places in spots.values()], "rank": range(len(spots))})
    store.connection.register("asked", table)
    try:
        rows = store.rows(_query(present, decisions, len(rules), width))
    finally:
        store.connection.unregister("asked")
    return _gathered(rows, spots, [rule.label for rule in rules])


def _query(present: frozenset[str], decisions: Decisions, n_rules: int, width: int) -> str:
    known = [name for name in VALUES if name in _columns(present)]
    decided = "".join(f", ({decisions.keep(i)}) as rule_{i}" for i in range(n_rules))
    near = f"join asked a on a.seq_id = {{0}}.seq_id and {{0}}.pos between a.at - {int(width)} and a.at + {int(width)}"
    shown = ", ".join(f"v.{name}" for name in known)
    picked = "".join(f", v.rule_{i}" for i in range(n_rules))
    return f"""
{relation(present, decisions.view)},
near as (select v.seq_id, v.pos, {shown}{picked} from (select *{decided} from viewed) v {near.format("v")})
select a.rank, t.seq_id, t.pos, s.seq_key, s.step, s.reward, s.n_tokens, t.policy_version as version,
    coalesce(t.token_text, '<' || t.token_id || '>', '·') as text, v.pos is not null as counted, {shown}{picked}
from tokens t {near.format("t")}
join sequences s on s.seq_id = t.seq_id
left join near v on v.seq_id = t.seq_id and v.pos = t.pos
order by a.rank, t.pos"""


def _columns(present: frozenset[str]) -> frozenset[str]:
    derived = {"delta": {"logp_infer", "logp_train"}, "lag": {"policy_version", "trainer_version"}}
    derived |= {"p_infer": {"logp_infer"}, "p_train": {"logp_train"}}
    return present | {name for name, needs in derived.items() if needs <= present}


def _gathered(rows: Sequence[Mapping[str, Any]], spots: Mapping[int, list[int]], labels: Sequence[str]) -> list[Window]:
    found: dict[int, Window] = {}
    before: dict[int, Any] = {}
    for row in rows:
        seq = row["seq_id"]
        window = found.setdefault(
            seq, Window(seq, str(row["seq_key"] or seq), row["step"], row["reward"], row["n_tokens"])
        )
        last, version = before.get(seq), row["version"]
        before[seq] = version
        window.tokens.append(
            Token(
                row["pos"], row["text"], row["counted"], last is not None and version is not None and version != last,
                row["pos"] in spots[seq], {k: float(row[k]) for k in VALUES if row.get(k) is not None},
                {label: row[f"rule_{i}"] for i, label in enumerate(labels)} if row["counted"] else {},
            )
        )  # fmt: skip
    return list(found.values())
