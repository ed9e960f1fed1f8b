"""What each mean rests on: the tokens that it is over, and the sequences that hold any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from estr_diag.measures import MEASURES
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY, rolled_up
from estr_diag.stats.metric import Metric
from estr_diag.stats.metrics import METRICS
from estr_diag.store.engine import Request


def averaged(metric: Metric) -> bool:
    """Whether a metric is a mean, and has a standard error by sequence."""
    return metric.mean_of is not None or metric.aggregation == "sequence mean"


def base(metric: Metric) -> str:
    """Return the measure that counts what a mean is over."""
    return metric.mean_of[1] if metric.mean_of else metric.count


@dataclass(frozen=True, slots=True)
class MeanBases:
    """Tokens and sequences behind each mean of `Consistency`, one row a counting measure.

    How to read it: a mean over the tokens of lag 0 may rest on a tenth of the sequences of its log, and its standard error
    is then one from so many.
    """

    name: ClassVar[str] = "mean_bases"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: those without which no metric is computed."""
        return frozenset({"logp_infer"})

    def _measures(self, present: frozenset[str]) -> tuple[str, ...]:
        named = dict.fromkeys(["n", *(base(m) for m in METRICS if averaged(m))])
        return tuple(name for name in named if MEASURES[name].needs <= present)

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for the counts by sequence."""
        return (Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY}, self._measures(present)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one wide row; `finish` makes it long."""
        names = self._measures(present)
        listed = ", ".join(
            f"coalesce(sum({n}), 0)::bigint as {n}, count(*) filter ({n} > 0) as {n}_sequences" for n in names
        )
        return f"""
select {listed}
from (select {SEQUENCE_KEY}, {rolled_up(names, {})} from {quote_ident(scans["sums"])} group by {SEQUENCE_KEY})"""

    def finish(self, result: Result) -> Result:
        """Turn the row into (base, n, n_sequences)."""
        (row,) = result.table.to_pylist()
        rows: list[dict[str, Any]] = [
            {"base": name, "n": row[name], "n_sequences": row[f"{name}_sequences"]}
            for name in row
            if f"{name}_sequences" in row
        ]
        schema = pa.schema([("base", pa.string()), ("n", pa.int64()), ("n_sequences", pa.int64())])
        return Result(self.name, pa.Table.from_pylist(rows, schema=schema), {}, result.provenance)
