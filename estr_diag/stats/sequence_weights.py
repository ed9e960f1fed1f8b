"""Ratios of whole sequences: their distribution, and the length at which they stop being useful."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pyarrow as pa

from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY, rolled_up
from estr_diag.stats.metrics import BY_NAME
from estr_diag.stats.weights import LOW_ESS
from estr_diag.store.engine import Request

MIN_SEQUENCES = 20
"""The ESS of C sequences cannot fall below 1 / C, so a bucket of fewer says nothing about an ESS of 0.3."""

QUANTILES: Mapping[str, float] = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}

_PAIR = frozenset({"logp_infer", "logp_train"})
_VALUES = {
    "sum": "sum_delta",
    "mean": "sum_delta / n",
    "max_abs": "max_abs_delta",
}


def _per_sequence(table: str, measures: Sequence[str]) -> str:
    columns = rolled_up(measures, {})
    return f"""
per_sequence as (select {SEQUENCE_KEY}, {columns} from {quote_ident(table)} group by {SEQUENCE_KEY} having sum(n) > 0)"""


@dataclass(frozen=True, slots=True)
class SequenceRatios:
    """Distribution over sequences of the sum, the mean and the largest |delta| of a sequence.

    How to read it: `sum` is the log of the product ratio, `mean` the log of the geometric ratio (GSPO), `max_abs` the
    worst token. A sum outside +-20 is clamped by every trainer: the sequence's weight is then a constant.
    A `max_abs` of several nats in the median sequence is trouble; in the maximum alone, it is one token to look at.
    """

    name: ClassVar[str] = "sequence_ratios"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines."""
        return _PAIR

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums and extremes by sequence."""
        return (Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY}, ("n", "sum_delta", "max_abs_delta")),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row a quantity; quantiles are exact, over one value a sequence."""
        picks = ", ".join(f"quantile_cont(x, {p}) as {name}" for name, p in QUANTILES.items())
        longs = " union all ".join(
            f"select {i} as place, '{name}' as quantity, {sql} as x from per_sequence"
            for i, (name, sql) in enumerate(_VALUES.items())
        )
        return f"""
with {_per_sequence(scans["sums"], ("n", "sum_delta", "max_abs_delta"))},
long as ({longs})
select quantity, count(*) as n_sequences, avg(x order by x) as mean, min(x) as min, {picks}, max(x) as max
from long
group by place, quantity
order by place"""

    def finish(self, result: Result) -> Result:
        """Nothing to add: there is no parameter."""
        return Result(self.name, result.table, {}, result.provenance)


@dataclass(frozen=True, slots=True)
class WeightsByLength:
    """Sequence ratios by length: where T x KL makes them useless.

    How to read it: a sequence of T tokens has a log ratio of about -T x KL +- sqrt(2 T x KL), so its weight degenerates
    once T x KL passes about 0.6 (log-normal weights then have an ESS of exp(-1.2) = 0.3). A bucket with
    `ess_sequence` below 0.3 is too long for sequence-level importance weights; token or geometric ratios are
    not affected. The note names the length; buckets of fewer than 20 sequences are shown but not used for it.
    """

    name: ClassVar[str] = "weights_by_length"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines."""
        return _PAIR

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence."""
        return (Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY}, ("n", "sum_delta", "sum_k3")),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row a log2 bucket of the number of counted tokens."""
        return f"""
with {_per_sequence(scans["sums"], ("n", "sum_delta", "sum_k3"))}
select
    floor(log2(n))::integer as length_bucket,
    count(*) as n_sequences,
    sum(n)::bigint as n_tokens,
    avg(n) as mean_length,
    -sum(sum_delta order by sum_delta) / sum(n) as kl_k1,
    sum(sum_k3 order by sum_k3) / sum(n) as kl_k3,
    -avg(sum_delta order by sum_delta) as length_times_k1,
    avg(sum_k3 order by sum_k3) as length_times_k3,
    {BY_NAME["ess_sequence"].over_group()} as ess_sequence
from per_sequence
group by 1
order by 1"""

    def finish(self, result: Result) -> Result:
        """Name the buckets by their lengths, and the length at which the weights degenerate."""
        buckets = result.table["length_bucket"].to_pylist()
        table = result.table.add_column(0, "length_lo", pa.array([2**b for b in buckets], pa.int64()))
        table = table.add_column(1, "length_hi", pa.array([2 ** (b + 1) - 1 for b in buckets], pa.int64()))
        table = table.drop_columns(["length_bucket"])
        _, sentence = length_limit(table.to_pylist())
        return Result(self.name, table, {}, result.provenance, (sentence,))


def length_limit(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Return the length at which the sequence ESS first falls below 0.3, and a sentence that says so or why not.

    Parameters
    ----------
    rows
        Of a `WeightsByLength` result. Interpolated in log length between the mean lengths of two buckets.
    """
    usable = [row for row in rows if row["n_sequences"] >= MIN_SEQUENCES]
    if not usable:
        return None, f"cannot tell at which length sequence weights degenerate: no length has {MIN_SEQUENCES} sequences"
    for before, after in pairwise(usable):
        if before["ess_sequence"] >= LOW_ESS > after["ess_sequence"]:
            share = (before["ess_sequence"] - LOW_ESS) / (before["ess_sequence"] - after["ess_sequence"])
            low, high = math.log(before["mean_length"]), math.log(after["mean_length"])
            length = math.exp(low + share * (high - low))
            return length, f"the ESS of sequence weights falls below {LOW_ESS} at about {length:.3g} tokens"
    lengths = usable[0]["mean_length"], usable[-1]["mean_length"]
    if usable[0]["ess_sequence"] < LOW_ESS:
        return (
            None,
            f"the ESS of sequence weights is below {LOW_ESS} from the shortest sequences on ({lengths[0]:.3g} tokens)",
        )
    return None, f"the ESS of sequence weights stays above {LOW_ESS}, up to sequences of {lengths[1]:.3g} tokens"
