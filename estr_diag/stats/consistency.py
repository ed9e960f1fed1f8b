"""Consistency metrics of the two engines: overall, by step, by lag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyarrow as pa

from estr_diag.result import Result
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.stats.metric import Metric
from estr_diag.stats.metrics import BY_NAME, METRICS
from estr_diag.store.engine import Request

By = Literal["overall", "step", "lag"]


@dataclass(frozen=True, slots=True)
class Consistency:
    """Every consistency metric with its standard error.

    How to read it: `mean_abs_delta` is the size of the gap (bf16 engines of a small dense model sit near
    0.014 nats), `kl_k3` its cost, `ess_token` the share of the batch that importance weighting leaves.
    A mean that is ruled by a few tokens shows as `max_abs_delta` far above `rms_delta`.

    Parameters
    ----------
    by
        ``overall``, ``step`` or ``lag`` (trainer_version - policy_version; a null lag is a group of its
        own). Sequence metrics have no value by lag, since one sequence may span lags.
    """

    by: By = "overall"
    name: ClassVar[str] = "consistency"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: one engine is enough for its own metrics."""
        lag = frozenset({"policy_version", "trainer_version"}) if self.by == "lag" else frozenset()
        return frozenset({"logp_infer"}) | lag

    def metrics(self, present: frozenset[str]) -> tuple[Metric, ...]:
        """Return the metrics that the log's columns allow."""
        return tuple(m for m in METRICS if m.needs <= present and not (m.per_sequence and self.by == "lag"))

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for the sums of every metric, by sequence."""
        keys: dict[str, str] = {SEQUENCE_KEY: SEQUENCE_KEY}
        if self.by != "overall":
            keys[self.by] = self.by
        measures = dict.fromkeys(name for m in self.metrics(present) for name in m.measures)
        return (Request("sums", keys, ("n", *(m for m in measures if m != "n"))),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up to one wide row a group; `finish` makes it long."""
        keys = [] if self.by == "overall" else [self.by]
        means: dict[str, tuple[str, str]] = {}
        extra: dict[str, str] = {}
        for metric in self.metrics(present):
            if metric.mean_of:
                means[metric.name] = metric.mean_of
                continue
            extra[metric.name] = metric.over_group()
            if metric.aggregation == "sequence mean":
                value = metric.over_sequence()
                extra[f"{metric.name}_se"] = f"stddev_samp({value}) / sqrt(nullif(count({value}), 0))"
        return cluster_means(scans["sums"], keys, means, extra)

    def finish(self, result: Result) -> Result:
        """Turn the wide rows into (group, metric, value, se, n)."""
        rows = []
        for row in result.table.to_pylist():
            group: dict[str, Any] = {} if self.by == "overall" else {self.by: row[self.by]}
            counts = {"n_tokens": row["n"], "n_sequences": row["n_sequences"]}
            for name, metric in BY_NAME.items():
                if name in row:
                    n = row["n_sequences"] if metric.per_sequence else row["n"]
                    value = row[name] if row["n"] else None
                    rows.append(
                        {**group, "metric": name, "value": value, "se": row.get(f"{name}_se"), "n": n, **counts}
                    )
        columns = [("metric", pa.string()), ("value", pa.float64()), ("se", pa.float64()), ("n", pa.int64())]
        columns += [("n_tokens", pa.int64()), ("n_sequences", pa.int64())]
        if self.by != "overall":
            columns = [(self.by, pa.int32()), *columns]
        return Result(
            self.name, pa.Table.from_pylist(rows, schema=pa.schema(columns)), result.parameters, result.provenance
        )
