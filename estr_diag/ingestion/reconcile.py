"""Checks of what one file added against the rest of the log, in SQL, before the transaction commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from estr_diag.errors import InputError
from estr_diag.schema import TOKENS, quote_ident
from estr_diag.store.database import Store

_CERTAIN_NATS = 0.01
"""An all-zero column is honest only if the other engine is as certain everywhere: closer to 0 than this."""


@dataclass(frozen=True, slots=True)
class Added:
    """The rows that one file has just added: its source, and every sequence from `first_seq` on."""

    source_id: int
    first_seq: int
    path: Path


def remove(store: Store, added: Added) -> None:
    """Take the rows of a file out again."""
    for table in ("tokens", "sequences"):
        store.connection.execute(f"delete from {table} where seq_id >= ?", [added.first_seq])


def copy_of(store: Store, added: Added) -> str | None:
    """Return the file that already gave every sequence of this one, if there is one.

    Single sequences may honestly repeat (a short answer sampled twice), so only a file all of whose
    sequences, with their multiplicity, are in the log for the same step is a copy.
    """
    query = """
        with new as (
            select step, content_hash, count(*) as n from sequences where source_id = $source group by all
        ), old as (
            select step, content_hash, count(*) as n, min(source_id) as source_id
            from sequences where source_id <> $source group by all
        )
        select
            count(*) as kinds,
            count(*) filter (where old.n >= new.n) as covered,
            min(old.source_id) as source_id
        from new left join old on new.step is not distinct from old.step and new.content_hash = old.content_hash
    """
    found = store.rows(query, {"source": added.source_id})[0]
    if not found["kinds"] or found["covered"] < found["kinds"]:
        return None
    path = store.rows("select path from sources where source_id = $source", {"source": found["source_id"]})
    return str(path[0]["path"])


def refuse_repeated_keys(store: Store, added: Added) -> None:
    """Raise when a sequence of this file has the step and key of another one."""
    query = """
        select new.step, new.seq_key, source.path as other, old.source_id = new.source_id as same_file
        from sequences new
        join sequences old on new.step is not distinct from old.step and new.seq_key = old.seq_key and new.seq_id > old.seq_id
        left join sources source on source.source_id = old.source_id
        where new.source_id = $source
        order by new.seq_id
        limit 1
    """
    if repeated := store.rows(query, {"source": added.source_id}):
        row = repeated[0]
        other = "this file" if row["same_file"] else row["other"]
        of_step = "" if row["step"] is None else f" of step {row['step']}"
        raise InputError(
            f"sequence '{row['seq_key']}'{of_step} is there twice, with different values",
            path=added.path,
            found=f"it in {other} as well",
            expected="one record a sequence",
            hint="Leave one of the two out; a file that has grown since it was ingested belongs into a new store",
        )


def drop_empty_forward(store: Store, added: Added) -> Sequence[str]:
    """Set an all-zero log-prob column to null: the trainer wrote it without running the forward pass.

    NeMo-RL (force_on_policy_ratio) and ROLL fill a skipped forward pass with zeros. Read as log-probs,
    they would make delta = -logp_infer.
    """
    notes: list[str] = []
    query = """
        select count(logp_train) as n_train, count(logp_infer) as n_infer,
               max(abs(logp_train)) as max_train, max(abs(logp_infer)) as max_infer
        from tokens where seq_id >= $first and coalesce(loss_mask, true)
    """
    found = store.rows(query, {"first": added.first_seq})[0]
    for name, other in (("train", "infer"), ("infer", "train")):
        if found[f"n_{name}"] and found[f"max_{name}"] == 0 and (found[f"max_{other}"] or 0) > _CERTAIN_NATS:
            column = f"logp_{name}"
            store.connection.execute(
                f"update tokens set {quote_ident(column)} = null where seq_id >= ?", [added.first_seq]
            )
            notes.append(
                f"{column} is 0.0 on all {found[f'n_{name}']} sampled tokens: the forward pass was skipped "
                f"(NeMo-RL force_on_policy_ratio, ROLL) and the column is treated as missing"
            )
    return notes


_CHANCE_NATS = -14.0
"""Log-probability of a response, about one in a million, below which nobody draws it twice in a step."""


def repeated_content(store: Store, added: Added) -> Sequence[str]:
    """Say how many sequences have the same tokens and engine log-probs as an earlier one of their step.

    A response that its prompt makes likely is drawn twice by chance; one that is not, is a copy.
    """
    query = f"""
        select count(*) as n from sequences new
        where new.source_id = $source and new.n_tokens > 0 and exists (
            select 1 from sequences old
            where old.content_hash = new.content_hash and old.step is not distinct from new.step and old.seq_id < new.seq_id
        ) and not coalesce((
            select sum(coalesce(logp_infer, logp_train)) from tokens t where t.seq_id = new.seq_id and t.loss_mask
        ) > {_CHANCE_NATS}, false)
    """
    n = store.rows(query, {"source": added.source_id})[0]["n"]
    if not n:
        return []
    return [
        f"{n} sequence(s) have exactly the tokens and engine log-probs of another one of the same step; kept (was a file appended twice?)"
    ]


def column_counts(store: Store, added: Added) -> dict[str, int]:
    """Count the values of each token column that this file added."""
    counts = ", ".join(f"count({quote_ident(name)}) as {quote_ident(name)}" for name in TOKENS.names)
    found = store.rows(f"select {counts} from tokens where seq_id >= $first", {"first": added.first_seq})[0]
    return {name: int(n) for name, n in found.items() if n}
