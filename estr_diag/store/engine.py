"""Run statistics: fuse what they need into as few scans as possible, then roll up.

A statistic asks for additive partials: sums, minima and maxima of `Measure`s, kept apart by some keys.
Requests that name the same scan are fused: one pass over the tokens with the union of keys and
measures, into a temporary table of a few rows a sequence. Every printed number is then rolled up from
that table by the statistic's own `merge` query. The partials of any shards add up, so the same two
steps give the same numbers on one file, many files or many machines.

A partial that one row of ``tok`` cannot tell (what stands near a token, what its sequence is) comes from
rows of its own: the request brings a `Request.view`, and is grouped and summed as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from estr_diag import __version__
from estr_diag.errors import MissingColumnError
from estr_diag.expressions import tok
from estr_diag.measures import Measure, measure
from estr_diag.result import Result
from estr_diag.schema import TOKENS, quote_ident
from estr_diag.store.database import Store

Keys = Mapping[str, str]
"""Key name -> SQL over one row of ``tok``, or of the request's view."""

LOG_TOKENS, LOG_SEQUENCES = "log_tokens", "log_sequences"
"""What a view calls the tables of the log, so that it also runs on a shard of them."""


@dataclass(frozen=True, slots=True)
class Request:
    """Additive partials that a statistic needs.

    Parameters
    ----------
    scan
        Requests with the same scan are computed in one pass.
    keys
        What the partials are kept apart by.
    measures
        Names that `measures.measure` knows, or measures of the statistic's own.
    view
        Query whose rows are aggregated in place of those of ``tok``; it may read ``tok``,
        ``log_tokens`` (all of them, uncounted too) and ``log_sequences``. Each of its rows must follow
        from one sequence, or shards would not add up.
    """

    scan: str
    keys: Keys
    measures: tuple[str | Measure, ...]
    view: str | None = None


class Statistic(Protocol):
    """A statistic: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]

    @property
    def needs(self) -> frozenset[str]:
        """Token columns without which it cannot be computed."""
        ...

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Return the partials it needs, given the columns that the log holds."""
        ...

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return the query over the partials; `scans` names the table of each scan."""
        ...

    def finish(self, result: Result) -> Result:
        """Complete the merged table (what SQL cannot say)."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run, and the statistics that could not be computed, with the reason."""

    results: Mapping[str, Result]
    missing: Mapping[str, MissingColumnError] = field(default_factory=dict)


def run(store: Store, statistics: Mapping[str, Statistic], provenance: Mapping[str, Any] | None = None) -> Outcome:
    """Compute several statistics together, each under the label that it is given.

    Statistics whose columns the log lacks are reported in `Outcome.missing`, never filled in.
    """
    present = store.present()
    possible: dict[str, Statistic] = {}
    missing: dict[str, MissingColumnError] = {}
    for label, statistic in statistics.items():
        if lacking := statistic.needs - present:
            missing[label] = MissingColumnError(statistic.name, sorted(lacking), how_to_get(lacking))
        else:
            possible[label] = statistic
    if not possible:
        return Outcome({}, missing)
    tables = _scan(store, [r for s in possible.values() for r in s.requests(present)], present)
    facts = {"estr_diag": __version__, "source": str(store.path or "memory"), **(provenance or {})}
    results = {}
    try:
        for label, statistic in possible.items():
            table = store.table(statistic.merge(tables, present))
            parameters = {name: getattr(statistic, name) for name in getattr(statistic, "__dataclass_fields__", ())}
            results[label] = statistic.finish(Result(statistic.name, table, parameters, facts))
    finally:
        for name in tables.values():
            store.connection.execute(f"drop table if exists {quote_ident(name)}")
    return Outcome(results, missing)


def how_to_get(columns: frozenset[str] | set[str]) -> str:
    """Say how a trainer is made to log these columns."""
    hints = [TOKENS[name].get_it for name in sorted(columns) if name in TOKENS]
    return "; ".join(dict.fromkeys(h for h in hints if h)) or "log these columns"


def scan_query(
    requests: Sequence[Request], present: frozenset[str], source: str = "tokens", sequences: str = "sequences"
) -> str:
    """Return the one query that serves `requests` (all of one scan) from two tables of the log."""
    keys: dict[str, str] = {}
    measures: dict[str, Measure] = {}
    for request in requests:
        for name, sql in request.keys.items():
            if keys.setdefault(name, sql) != sql:
                raise ValueError(f"key '{name}' is asked for with two meanings in scan '{request.scan}'")
        for asked in request.measures:
            found = measure(asked) if isinstance(asked, str) else asked
            if found is None:
                raise KeyError(asked)
            if measures.setdefault(found.name, found) != found:
                raise ValueError(f"measure '{found.name}' is asked for with two meanings in scan '{request.scan}'")
    views = {request.view for request in requests}
    if len(views) > 1:
        raise ValueError(f"scan '{requests[0].scan}' is asked for over two views")
    view = views.pop()
    columns = [f"{sql} as {quote_ident(name)}" for name, sql in keys.items()]
    columns += [m.aggregate for m in measures.values()]
    group = f"group by {', '.join(str(i + 1) for i in range(len(keys)))}" if keys else ""
    rows = "tok" if view is None else "viewed"
    return f"{relation(present, view, source, sequences)}\nselect {', '.join(columns)}\nfrom {rows}\n{group}"


def relation(
    present: frozenset[str], view: str | None = None, source: str = "tokens", sequences: str = "sequences"
) -> str:
    """Return the ``with`` clause that defines ``tok``, and ``viewed`` over it: the rows of `view` or ``tok`` itself."""
    if view is None:
        return f"with {tok(present, source)},\nviewed as not materialized (select * from tok)"
    # A CTE that is read twice would be written to memory whole: here that is the log.
    return f"""with {LOG_TOKENS} as not materialized (select * from {source}),
{LOG_SEQUENCES} as not materialized (select * from {sequences}),
{tok(present, source)},
viewed as (
{view}
)"""


def _scan(store: Store, requests: Sequence[Request], present: frozenset[str]) -> dict[str, str]:
    tables: dict[str, str] = {}
    for scan in dict.fromkeys(r.scan for r in requests):
        name = f"partials_{scan}"
        query = scan_query([r for r in requests if r.scan == scan], present)
        store.connection.execute(f"create or replace temp table {quote_ident(name)} as {query}")
        tables[scan] = name
    return tables
