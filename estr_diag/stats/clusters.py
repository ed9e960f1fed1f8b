"""Means with standard errors that respect sequences.

Tokens of one sequence are correlated, so a token-level error bar is too small. From per-sequence sums
s_i and counts n_i of C sequences: m = sum s_i / sum n_i and
var(m) = sum (s_i - m n_i)^2 / (sum n_i)^2 * C / (C - 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from estr_diag.measures import measure
from estr_diag.schema import quote_ident

SEQUENCE_KEY = "seq_id"


def cluster_means(
    partials: str, by: Sequence[str], means: Mapping[str, tuple[str, str]], extra: Mapping[str, str] | None = None
) -> str:
    """Return a query for means with cluster-robust standard errors.

    Parameters
    ----------
    partials
        Table of partials with a ``seq_id`` key.
    by
        Keys to report by; may be empty. Null is a group of its own.
    means
        Name -> (measure of the sum, measure of the count). Gives columns NAME and NAME_se; the error
        is null with fewer than two sequences.
    extra
        Name -> aggregate over the per-sequence rows, for anything else that is wanted by group
        (``sum(sum_delta2)``, ``max(max_abs_delta)``).

    Notes
    -----
    The query also gives `n` (tokens) and `n_sequences` (sequences with at least one token).
    """
    keys = [quote_ident(k) for k in by]
    columns = sorted({c for pair in means.values() for c in pair} | {"n"})
    extras = dict(extra or {})
    partition = f"partition by {', '.join(keys)}" if keys else ""
    listed = "".join(f"{k}, " for k in keys)
    centred = ",\n        ".join(
        f"sum({s}) over w / nullif(sum({n}) over w, 0) as {quote_ident('mean_' + name)}"
        for name, (s, n) in means.items()
    )
    finals = ",\n    ".join(
        f"""any_value({quote_ident("mean_" + name)}) as {quote_ident(name)},
    sqrt(sum(power({s} - {quote_ident("mean_" + name)} * {n}, 2))
         * count(*) filter ({n} > 0) / nullif(count(*) filter ({n} > 0) - 1, 0))
        / nullif(sum({n}), 0) as {quote_ident(name + "_se")}"""
        for name, (s, n) in means.items()
    )
    others = "".join(f",\n    {sql} as {quote_ident(name)}" for name, sql in extras.items())
    group = f"group by {', '.join(keys)} order by {', '.join(k + ' nulls last' for k in keys)}" if keys else ""
    return f"""
with per_sequence as (
    select {listed}{SEQUENCE_KEY}, {rolled_up(columns, extras)}
    from {quote_ident(partials)}
    group by {listed}{SEQUENCE_KEY}
),
centred as (
    select *{("," + centred) if centred else ""}
    from per_sequence
    window w as ({partition})
)
select {listed}
    coalesce(sum(n), 0)::bigint as n,
    count(*) filter (n > 0) as n_sequences{("," + finals) if finals else ""}{others}
from centred
{group}"""


def rolled_up(partials_columns: Sequence[str], extras: Mapping[str, str]) -> str:
    """Return the roll-up of the measures that a query names, in columns or anywhere in `extras`."""
    named = set(partials_columns) | set(re.findall(r"\w+", " ".join(extras.values())))
    return ", ".join(found.merged for name in sorted(named) if (found := measure(name)))
