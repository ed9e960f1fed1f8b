"""Every number of a framework's dashboard that the log allows, under the name that the dashboard has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import pyarrow as pa

from estr_diag.errors import UsageError, nearest
from estr_diag.measures import MEASURES
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.alias import Alias
from estr_diag.stats.aliases import FRAMEWORKS
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.framework_names import ALIASES, TURN_RATIO
from estr_diag.stats.metrics import BY_NAME
from estr_diag.store.engine import Request, how_to_get

_SCHEMA = [
    ("framework", pa.string()), ("name", pa.string()), ("value", pa.float64()), ("metric", pa.string()),
    ("edge", pa.string()), ("over", pa.string()), ("missing", pa.string()),
    ("n_tokens", pa.int64()), ("n_sequences", pa.int64()), ("n_logged", pa.int64()),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FrameworkMetrics:
    """The frameworks' own metrics, with the frameworks' own means.

    How to read it: find the name that the dashboard shows; `value` is the same number, computed from this
    log. Where it differs from our metric of column `metric`, ``estr-diag explain NAME`` says how. A name
    whose columns the log lacks has no value and says which in `missing`. `n_logged` counts sequences with
    and `n_sequences` without those that hold no counted token (they stay in the mean of over = S0).

    Parameters
    ----------
    by
        ``overall`` or ``step``; dashboards show steps.
    framework
        One framework only.
    """

    by: Literal["overall", "step"] = "overall"
    framework: str | None = None
    name: ClassVar[str] = "framework_metrics"

    def __post_init__(self) -> None:
        if self.framework is not None and self.framework not in FRAMEWORKS:
            raise UsageError(f"no framework '{self.framework}'; {nearest(self.framework, FRAMEWORKS)}")

    @property
    def needs(self) -> frozenset[str]:
        """Columns: one engine is enough for its own metrics."""
        return frozenset({"logp_infer"})

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The names that are asked for."""
        return tuple(a for a in ALIASES if self.framework in (None, a.framework))

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for the sums by sequence (and turn), and for the number of sequences that hold no counted token."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, "step": "step", **({"turn": "turn"} if "turn" in present else {})}
        sums = Request("sums", keys, self._measures(present))
        return sums, Request("logged_sequences", {"step": "step"}, ("n",), view="select step from log_sequences")

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up to one wide row a group; `finish` makes it long."""
        measures = ", ".join(MEASURES[name].merged for name in self._measures(present))
        step = self.by == "step"
        lead = "step, " if step else ""
        pair = {"logp_infer", "logp_train"} <= present
        mean_of_turn = "exp(sum_delta / n)" if pair else "null"
        values = "".join(
            f",\n    {alias.over_group()} as {quote_ident(alias.key)}"
            for alias in self.aliases
            if alias.needs <= present
        )
        turns = f"{lead}{SEQUENCE_KEY}" + (", turn" if "turn" in present else "")
        return f"""
with turns as (
    select {turns}, {measures}
    from {quote_ident(scans["sums"])}
    group by {turns}
),
per_sequence as (
    select {lead}{SEQUENCE_KEY}, {measures}, sum(n * {mean_of_turn}) as {TURN_RATIO}
    from turns
    group by {lead}{SEQUENCE_KEY}
),
logged as (
    select {lead}sum(n) as n_logged
    from {quote_ident(scans["logged_sequences"])}
    {"group by step" if step else ""}
)
select {"logged.step as step, " if step else ""}coalesce(sum(n), 0)::bigint as n_tokens,
    count(*) filter (n > 0) as n_sequences,
    any_value(n_logged)::bigint as n_logged,
    {sorted(present)!r} as present{values}
from logged
left join per_sequence on {"logged.step is not distinct from per_sequence.step" if step else "true"}
{"group by logged.step order by logged.step nulls last" if step else ""}"""

    def finish(self, result: Result) -> Result:
        """Turn the wide rows into (group, framework, name, value ...)."""
        rows, lacking = [], set()
        for row in result.table.to_pylist():
            present = frozenset(row["present"])
            counts = {name: row[name] for name in ("n_tokens", "n_sequences", "n_logged")}
            for alias in self.aliases:
                missing = sorted(alias.needs - present)
                lacking |= set(missing)
                rows.append(
                    {
                        **({"step": row["step"]} if self.by == "step" else {}),
                        "framework": alias.framework,
                        "name": alias.name,
                        "value": row.get(alias.key) if row["n_tokens"] else None,
                        "metric": alias.metric.name if alias.metric.name in BY_NAME else None,
                        "edge": alias.edge,
                        "over": alias.over,
                        "missing": ", ".join(missing) or None,
                        **counts,
                    }
                )
        columns = [("step", pa.int32()), *_SCHEMA] if self.by == "step" else _SCHEMA
        notes = tuple(self._note(column) for column in sorted(lacking))
        table = pa.Table.from_pylist(rows, schema=pa.schema(columns))
        return Result(self.name, table, result.parameters, result.provenance, (*result.notes, *notes))

    def _note(self, column: str) -> str:
        names = [alias.key for alias in self.aliases if column in alias.needs]
        return f"not computed: this log has no {column}. {how_to_get({column})}. Names that need it: {', '.join(names)}"

    def _measures(self, present: frozenset[str]) -> tuple[str, ...]:
        named = {m for a in self.aliases if a.needs <= present for m in a.on_edge.measures}
        named |= {"sum_delta"} if {"logp_infer", "logp_train"} <= present else set()
        return ("n", *(name for name in MEASURES if name in named and name != "n"))
