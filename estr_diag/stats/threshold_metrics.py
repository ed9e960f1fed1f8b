"""The numbers of a framework's dashboard that depend on the bounds of its importance weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import pyarrow as pa

from estr_diag.errors import UsageError, nearest
from estr_diag.measures import MAX_RATIO_BOUND, measure
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.corrections import CORRECTIONS, Correction, Level, Mode
from estr_diag.stats.threshold_names import THRESHOLD_NAMES, ThresholdName
from estr_diag.store.engine import Request

_SCHEMA = [
    ("framework", pa.string()), ("name", pa.string()), ("value", pa.float64()),
    ("level", pa.string()), ("mode", pa.string()), ("low", pa.float64()), ("high", pa.float64()),
    ("over", pa.string()), ("n_tokens", pa.int64()), ("n_sequences", pa.int64()), ("n_logged", pa.int64()),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThresholdMetrics:
    """What a framework would log about its weights under given bounds.

    How to read it: `level`, `mode`, `low` and `high` are the framework's configuration; `value` is what its
    dashboard shows under `name` with that configuration, computed from this log on edge B (logp_train -
    logp_infer). Another bound gives another number under the same name, so compare only runs with the same
    bounds. `low` is empty where the weights have no lower bound.

    Parameters
    ----------
    framework
        As in ``CORRECTIONS``.
    level
        ``token`` or ``sequence`` as the framework's option calls it; skyrl also has ``geometric``.
    mode
        ``truncate``, ``mask``, or ``reject`` (NeMo-RL's sequence error threshold).
    low, high
        Bounds of the ratio; the framework's default where left out.
    by
        ``overall`` or ``step``; dashboards show steps.

    Raises
    ------
    UsageError
        The framework has no such correction, or a bound is not one that it takes.
    """

    framework: str
    level: Level = "token"
    mode: Mode = "truncate"
    low: float | None = None
    high: float | None = None
    by: Literal["overall", "step"] = "overall"
    name: ClassVar[str] = "threshold_metrics"

    def __post_init__(self) -> None:
        known = sorted({c.framework for c in CORRECTIONS})
        if self.framework not in known:
            raise UsageError(f"no framework '{self.framework}' with bounds; {nearest(self.framework, known)}")
        low, high = self.bounds
        if self.low is not None and "low" not in self.correction.bounds:
            raise UsageError(f"{self.framework} takes no lower bound here: {self.correction.config}")
        if not 0 < high <= MAX_RATIO_BOUND or not 0 <= (low or 0.0) <= high:
            raise UsageError(f"bounds are {low} and {high}; expected 0 <= low <= high, high up to {MAX_RATIO_BOUND:g}")

    @property
    def correction(self) -> Correction:
        """The way in which the framework bounds its weights."""
        for correction in CORRECTIONS:
            if correction.key == (self.framework, self.level, self.mode):
                return correction
        options = ", ".join(f"{c.level} {c.mode}" for c in CORRECTIONS if c.framework == self.framework)
        raise UsageError(f"{self.framework} has no correction '{self.level} {self.mode}'; it has {options}")

    @property
    def bounds(self) -> tuple[float | None, float]:
        """The bounds in use."""
        correction = self.correction
        low = correction.low if self.low is None else float(self.low)
        return low, correction.high if self.high is None else float(self.high)

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines."""
        return frozenset({"logp_infer", "logp_train"})

    @property
    def names(self) -> tuple[ThresholdName, ...]:
        """The names that the framework logs under this correction."""
        return tuple(
            entry
            for entry in THRESHOLD_NAMES
            if entry.framework == self.framework and (self.level, self.mode) in entry.under
        )

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for the sums by sequence, and for the number of sequences that hold no counted token."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, "step": "step"}
        sums = Request("sums", keys, self._measures())
        return sums, Request("logged_sequences", {"step": "step"}, ("n",), view="select step from log_sequences")

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up to sequences, add a row for each that holds nothing, then to one wide row a group."""
        found = [m for name in self._measures() if (m := measure(name))]
        rolled = ", ".join(m.merged for m in found)
        nothing = ", ".join(f"{'0.0' if m.how == 'sum' else 'null'}::double as {m.name}" for m in found)
        step = self.by == "step"
        lead, group = ("step, ", "group by step") if step else ("", "")
        same = "counted.step is not distinct from logged.step" if step else "true"
        values = "".join(f",\n    {sql} as {quote_ident(name)}" for name, sql in self._values().items())
        return f"""
with counted as (
    select {lead}{SEQUENCE_KEY}, {rolled}
    from {quote_ident(scans["sums"])}
    group by {lead}{SEQUENCE_KEY}
),
logged as (
    select {lead}sum(n)::bigint as n_logged
    from {quote_ident(scans["logged_sequences"])}
    {group}
),
empty as (
    select {lead}unnest(range(n_logged - (select count(*) from counted where {same}))) as {SEQUENCE_KEY}
    from logged
),
rows as (
    select * from counted
    union all by name
    select {lead}{SEQUENCE_KEY}, {nothing} from empty
)
select {lead}coalesce(sum(n), 0)::bigint as n_tokens,
    count(*) filter (n > 0) as n_sequences,
    count(*) as n_logged{values}
from rows
{f"{group} order by step nulls last" if step else ""}"""

    def finish(self, result: Result) -> Result:
        """Turn the wide rows into (group, framework, name, value, bounds ...)."""
        low, high = self.bounds
        rows = [
            {
                **({"step": row["step"]} if self.by == "step" else {}),
                "framework": self.framework,
                "name": entry.name,
                "value": row[entry.name] if row["n_tokens"] else None,
                "level": self.level,
                "mode": self.mode,
                "low": low,
                "high": high,
                "over": entry.aggregation,
                **{name: row[name] for name in ("n_tokens", "n_sequences", "n_logged")},
            }
            for row in result.table.to_pylist()
            for entry in self.names
        ]
        columns = [("step", pa.int32()), *_SCHEMA] if self.by == "step" else _SCHEMA
        table = pa.Table.from_pylist(rows, schema=pa.schema(columns))
        parameters = {**result.parameters, "low": low, "high": high}
        notes = (*result.notes, f"bounds: {self.correction.config}")
        return Result(self.name, table, parameters, result.provenance, notes)

    def _values(self) -> dict[str, str]:
        parts = self.correction.parts(*self.bounds)
        return {entry.name: entry.over_group(parts) for entry in self.names}

    def _measures(self) -> tuple[str, ...]:
        words = re.findall(r"\w+", " ".join(self._values().values()))
        return ("n", *sorted({word for word in words if word != "n" and measure(word)}))
