"""What a metric is: one number over rolled-up measures, with everything a reader must know about it.

A metric is written over measures, never over tokens, so that any split of the log gives the same value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from estr_diag.expressions import Edge
from estr_diag.measures import MEASURES, on_edge

Aggregation = Literal[
    "token mean", "token extreme", "token moments", "sequence mean", "sequence extreme", "sequence moments"
]
Direction = Literal["lower", "higher", "near 0", "near 1", "none"]
"""Which way is good. ``none``: the number describes the log and no value of it is better."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number: its formula, unit, aggregation and meaning.

    Parameters
    ----------
    mean_of
        (sum, count) measures when the metric is a plain mean of tokens; it then has a standard error.
    sql
        Otherwise, SQL over the roll-up: over the measures of a group for a token metric, over one
        sequence's measures for a sequence metric (aggregated by `over_sequences`).
    over_sequences
        avg, max, min or an aggregate text with ``{x}`` for the per-sequence value.
    count
        Measure that counts the tokens a sequence metric is made of; a sequence with none has no value.
    """

    name: str
    formula: str
    unit: str
    aggregation: Aggregation
    direction: Direction
    meaning: str
    mean_of: tuple[str, str] | None = None
    sql: str | None = None
    over_sequences: str | None = None
    count: str = "n"

    @property
    def measures(self) -> tuple[str, ...]:
        """Measures that it is made of."""
        if self.mean_of:
            return self.mean_of
        assert self.sql is not None
        named = set(re.findall(r"\{(\w+)\}", self.sql)) | ({self.count} if self.per_sequence else set())
        return tuple(name for name in MEASURES if name in named)

    @property
    def needs(self) -> frozenset[str]:
        """Columns without which it cannot be computed."""
        return frozenset().union(*(MEASURES[m].needs for m in self.measures))

    @property
    def per_sequence(self) -> bool:
        """Whether it is made of one value a sequence."""
        return self.over_sequences is not None

    def over_sequence(self) -> str:
        """Return the value over one sequence's row of measures; null for a sequence without counted tokens."""
        if self.mean_of:
            total, count = self.mean_of
            return f"case when {count} > 0 then {total} / {count} end"
        assert self.sql is not None
        return f"case when {self.count} > 0 then {self.sql.format(**{name: name for name in self.measures})} end"

    def over_group(self) -> str:
        """Return the value as an aggregate over the rows of a group."""
        if self.mean_of:
            total, count = self.mean_of
            return f"sum({total}) / nullif(sum({count}), 0)"
        assert self.sql is not None
        if self.over_sequences is not None:
            return self.over_sequences.format(x=self.over_sequence())
        return self.sql.format(**{name: f"{MEASURES[name].how}({name})" for name in self.measures})

    def on(self, edge: Edge) -> Metric:
        """Return the same formula over another pair of log-probs (see `expressions.EDGES`).

        Raises
        ------
        ValueError
            A sum of it is of one engine alone, and is not kept for other edges.
        """
        if edge == "B":
            return self
        pair = {"logp_infer", "logp_train"}
        # A sum that names logp_update itself is of the edge that it is asked for.
        stuck = [m for m in self.measures if MEASURES[m].needs & pair and on_edge(m, edge) == m]
        if stuck and "logp_update" not in self.needs:
            raise ValueError(f"{self.name} has no edge {edge}: {', '.join(stuck)}")
        mean_of = (on_edge(self.mean_of[0], edge), on_edge(self.mean_of[1], edge)) if self.mean_of else None
        sql = re.sub(r"\{(\w+)\}", lambda m: f"{{{on_edge(m[1], edge)}}}", self.sql) if self.sql else None
        return replace(self, mean_of=mean_of, sql=sql, count=on_edge(self.count, edge))


def mean(
    name: str, total: str, formula: str, unit: str, direction: Direction, meaning: str, count: str = "n"
) -> Metric:
    """Return a metric that is a plain mean over tokens."""
    return Metric(name, formula, unit, "token mean", direction, meaning, mean_of=(total, count))


def moments(name: str, sql: str, formula: str, unit: str, direction: Direction, meaning: str) -> Metric:
    """Return a metric made of sums over tokens."""
    return Metric(name, formula, unit, "token moments", direction, meaning, sql=sql)


def extreme(name: str, sql: str, formula: str, unit: str, direction: Direction, meaning: str) -> Metric:
    """Return a metric that is a minimum or maximum over tokens."""
    return Metric(name, formula, unit, "token extreme", direction, meaning, sql=sql)


def sequence(
    name: str,
    sql: str,
    formula: str,
    unit: str,
    direction: Direction,
    meaning: str,
    over: str = "avg({x})",
    count: str = "n",
) -> Metric:
    """Return a metric made of one value a sequence."""
    kinds: dict[str, Aggregation] = {
        "avg({x})": "sequence mean", "max({x})": "sequence extreme", "min({x})": "sequence extreme"
    }  # fmt: skip
    kind = kinds.get(over, "sequence moments")
    return Metric(name, formula, unit, kind, direction, meaning, sql=sql, over_sequences=over, count=count)


def sample_std(total: str, squares: str) -> str:
    """Return the sample standard deviation (ddof 1) from a sum and a sum of squares; null for one token."""
    variance = f"({{{squares}}} - {{{total}}} * {{{total}}} / {{n}}) / ({{n}} - 1)"
    return f"sqrt(case when {{n}} > 1 then greatest({variance}, 0) end)"


def pearson(x: str, y: str, xx: str, yy: str, xy: str) -> str:
    """Return Pearson's correlation from five sums; null for a column that does not vary."""
    # The products cancel when a column hardly varies; below 1e-12 of its size what is left is rounding.
    varies = f"({{n}} * {{{xx}}} - {{{x}}} * {{{x}}} > 1e-12 * {{n}} * {{{xx}}}) and ({{n}} * {{{yy}}} - {{{y}}} * {{{y}}} > 1e-12 * {{n}} * {{{yy}}})"
    return (
        f"case when {varies} then ({{n}} * {{{xy}}} - {{{x}}} * {{{y}}}) / "
        f"(sqrt({{n}} * {{{xx}}} - {{{x}}} * {{{x}}}) * sqrt({{n}} * {{{yy}}} - {{{y}}} * {{{y}}})) end"
    )
