"""What the log holds and what of it counts: the numbers above every report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estr_diag.expressions import counted
from estr_diag.store.database import Store


def coverage(store: Store) -> dict[str, Any]:
    """Return token, sequence, step, version and lag counts, and why tokens do not count.

    Returns
    -------
    dict
        ``n_tokens`` (response tokens, tool tokens included), ``n_counted``, ``n_sequences``, ``steps``,
        ``versions`` as [lo, hi] or None, ``lags`` (lag -> tokens, "unknown" for tokens without one),
        ``columns`` (column -> values), ``skipped`` (reason -> tokens).
    """
    columns = store.column_counts()
    present = frozenset(columns)
    missing = {
        f"{name} missing inside the mask": f"count(*) filter (where loss_mask and {name} is null)"
        for name in ("logp_infer", "logp_train")
        if name in present
    }
    reasons = {"outside the loss mask": "count(*) filter (where not loss_mask)", **missing}
    listed = "".join(f', {sql} as "{name}"' for name, sql in reasons.items())
    found = store.rows(
        f"""
        select count(*) as n_tokens, count(*) filter (where {counted(present)}) as n_counted,
               min(step) as step_lo, max(step) as step_hi{listed}
        from tokens
        """
    )[0]
    sequences = store.rows(
        """
        select count(*) as n, count(*) filter (where version_first is not null) as n_versioned,
               min(version_first) as lo, max(version_last) as hi,
               count(*) filter (where version_first <> version_last) as switched,
               count(*) filter (where version_last < version_first) as falling
        from sequences
        """
    )[0]
    return {
        "n_tokens": found["n_tokens"],
        "n_counted": found["n_counted"],
        "n_sequences": sequences["n"],
        "n_sequences_with_switch": sequences["switched"] if sequences["n_versioned"] else None,
        "steps": _range(found["step_lo"], found["step_hi"]),
        "versions": _range(sequences["lo"], sequences["hi"]),
        "lags": _lags(store, present),
        "columns": columns,
        "skipped": {name: found[name] for name in reasons if found[name]},
    }


def _lags(store: Store, present: frozenset[str]) -> Mapping[str, int]:
    if not {"policy_version", "trainer_version"} <= present:
        return {}
    rows = store.rows(
        f"""
        select trainer_version - policy_version as lag, count(*) as n
        from tokens where {counted(present)} group by 1 order by 1 nulls last
        """
    )
    return {"unknown" if r["lag"] is None else str(r["lag"]): r["n"] for r in rows}


def _range(low: int | None, high: int | None) -> list[int] | None:
    return None if low is None or high is None else [low, high]
