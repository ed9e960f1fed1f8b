"""Write a log as one flat canonical file, which reads back as the same log."""

from __future__ import annotations

import json
from pathlib import Path

from estr_diag.errors import InputError, UsageError
from estr_diag.schema import RUN_FACTS, RUN_FACTS_KEY, SEQUENCE_COLUMNS_IN_LOG, TOKENS, quote_ident, quote_text
from estr_diag.store.database import Store

_FORMATS = {
    # Row groups of 122,880 rows scan on all threads; one big group would scan on one.
    ".parquet": "format parquet, compression zstd, row_group_size 122880",
    ".csv": "format csv, header",
    ".jsonl": "format json",
}


def export(store: Store, target: Path) -> int:
    """Write tokens with their per-sequence columns, one row a token; return the number of rows.

    Raises
    ------
    UsageError
        A file ending that is not .parquet, .csv or .jsonl, or the file exists.
    """
    if target.suffix not in _FORMATS:
        raise UsageError(
            f"{target}: expected a file ending in {', '.join(_FORMATS)}, found {target.suffix or 'none'!r}"
        )
    if target.exists():
        raise UsageError(f"{target} exists already; choose another name with -o")
    if not target.parent.is_dir():
        raise InputError("no such folder", path=target.parent, hint="Make it first")
    present = store.column_counts()
    names = ["seq_id", "pos", *(n for n in TOKENS.names if n in present and n not in ("seq_id", "pos", "abs_pos"))]
    # logp_train and logp_infer are part of the format even when the log has only one of them.
    names += [n for n in ("logp_infer", "logp_train") if n not in names]
    columns = [f"t.{quote_ident(n)}" for n in names]
    columns += [f"s.{quote_ident(n)}" for n in SEQUENCE_COLUMNS_IN_LOG]
    building = target.with_name(f".{target.name}.building")
    query = f"""
        copy (
            select {", ".join(columns)} from tokens t join sequences s using (seq_id) order by t.step, t.seq_id, t.pos
        ) to {quote_text(str(building))} ({_FORMATS[target.suffix]}{_metadata(store, target)})
    """
    try:
        store.connection.execute(query)
        building.replace(target)
    finally:
        building.unlink(missing_ok=True)
    return int(store.rows("select count(*) as n from tokens")[0]["n"])


def _metadata(store: Store, target: Path) -> str:
    """Return the option that writes the facts of the run into a Parquet file."""
    runs = store.rows("select * from runs")
    if target.suffix != ".parquet" or not runs:
        return ""
    facts = {name: runs[0][name] for name in RUN_FACTS if runs[0][name] is not None}
    return f", kv_metadata {{{quote_text(RUN_FACTS_KEY)}: {quote_text(json.dumps(facts))}}}"
