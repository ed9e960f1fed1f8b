"""Exact quantiles of |delta|.

A quantile is no partial: those of two shards do not give that of the whole, and a histogram gives it only
to the width of a cell. So this statistic reads the tokens a second time, and cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from estr_diag.expressions import tok
from estr_diag.result import Result
from estr_diag.schema import quote_text
from estr_diag.store.engine import Request

QUANTILES: dict[str, float] = {
    "p50_abs_delta": 0.5,
    "p90_abs_delta": 0.9,
    "p99_abs_delta": 0.99,
    "p999_abs_delta": 0.999,
}
"""Metric name -> level."""


@dataclass(frozen=True, slots=True)
class AbsDeltaQuantiles:
    """Quantiles of |d| over counted tokens, interpolated linearly between order statistics.

    How to read it: `p50_abs_delta` is the typical token; a `p99_abs_delta` a hundred times above it means
    that a mean of |d| or d^2 is ruled by one token in a hundred.

    Parameters
    ----------
    by
        ``overall``, ``step`` or ``lag``.
    """

    by: Literal["overall", "step", "lag"] = "overall"
    name: ClassVar[str] = "abs_delta_quantiles"

    @property
    def needs(self) -> frozenset[str]:
        """Columns."""
        lag = frozenset({"policy_version", "trainer_version"}) if self.by == "lag" else frozenset()
        return frozenset({"logp_infer", "logp_train"}) | lag

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for no partials: there are none."""
        return ()

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Sort the tokens of each group once for all levels."""
        levels = ", ".join(repr(level) for level in QUANTILES.values())
        names = ", ".join(quote_text(name) for name in QUANTILES)
        # Without a token there is no list to unnest, and still a row for each level.
        nothing = ", ".join("null" for _ in QUANTILES)
        group = "" if self.by == "overall" else self.by
        return f"""
with {tok(present)},
sorted as (
    select {group + ", " if group else ""}count(*) as n, quantile_cont(abs(delta), [{levels}]) as q
    from tok
    {"group by " + group if group else ""}
)
select {group + ", " if group else ""}unnest([{names}]) as metric, unnest(coalesce(q, [{nothing}])) as value, n
from sorted
{"order by " + group + " nulls last" if group else ""}"""

    def finish(self, result: Result) -> Result:
        """Leave the table as it is."""
        return result
