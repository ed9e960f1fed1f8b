"""Ratio scale against entropy: the moments of delta in bins of H (Zhao et al., Fig. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from estr_diag.expressions import CELLS_PER_OCTAVE, grid_cell
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.engine import Request

QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "p999": 0.999}
"""Quantiles of |delta| that are reported, from a histogram of 16 cells an octave (within 4.5 % always, 0.1 % typically)."""

_BIN = "entropy_bin"
_ZERO_CELL = -(1 << 20)


@dataclass(frozen=True, slots=True)
class EntropyBins:
    """Moments and quantiles of delta by entropy bin, and by lag within it.

    How to read it: the paper's law is E[delta^2 | H] ~ H, so `sq_delta_over_entropy` is about constant
    over bins of a healthy log. A rise of it towards low H is engine noise on off-mode tokens (see
    `off_mode_mean_sq_delta`); a rise with lag at high H is legitimate exploration.

    Parameters
    ----------
    grid
        The bins.
    by_lag
        Also split by trainer_version - policy_version.
    """

    grid: EntropyGrid
    by_lag: bool = False
    name: ClassVar[str] = "entropy_bins"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines and the entropy, and versions for the split by lag."""
        return frozenset({"logp_infer", "logp_train", "entropy"}) | (
            frozenset({"policy_version", "trainer_version"}) if self.by_lag else frozenset()
        )

    @property
    def _keys(self) -> dict[str, str]:
        return {_BIN: self.grid.sql()} | ({"lag": "lag"} if self.by_lag else {})

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, and for a histogram of |delta|."""
        measures = (
            "n",
            "sum_abs_delta",
            "sum_delta2",
            "sum_entropy",
            "n_entropy",
            "sum_scaled2",
            "n_off_mode",
            "sum_delta2_off_mode",
        )
        cell = f"case when delta = 0 then {_ZERO_CELL} else {grid_cell('abs(delta)')} end"
        return (
            Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY, **self._keys}, measures),
            Request("histogram", {**self._keys, "delta_cell": cell}, ("n",)),
        )

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up the sums and read the quantiles off the histogram."""
        keys = list(self._keys)
        means = {
            "mean_entropy": ("sum_entropy", "n"),
            "mean_abs_delta": ("sum_abs_delta", "n"),
            "mean_sq_delta": ("sum_delta2", "n"),
            "mean_scaled_sq": ("sum_scaled2", "n"),
            "off_mode_mean_sq_delta": ("sum_delta2_off_mode", "n_off_mode"),
        }
        extra = {
            "rms_delta": "sqrt(sum(sum_delta2) / sum(n))",
            "sq_delta_over_entropy": "sum(sum_delta2) / nullif(sum(sum_entropy), 0)",
            "n_off_mode": "sum(n_off_mode)::bigint",
            "mode_mean_sq_delta": "(sum(sum_delta2) - sum(sum_delta2_off_mode)) / nullif(sum(n) - sum(n_off_mode), 0)",
        }
        same = " and ".join(f"m.{k} is not distinct from q.{k}" for k in keys)
        order = ", ".join(f"m.{k} nulls last" for k in keys)
        listed = ", ".join(f"q.{name}" for name in QUANTILES)
        return f"""
select m.*, {listed}
from ({cluster_means(scans["sums"], keys, means, extra)}) m
left join ({quantiles(scans["histogram"], keys)}) q on {same}
where m.{_BIN} is not null
order by {order}"""

    def finish(self, result: Result) -> Result:
        """Put the edges of each bin beside it."""
        bounds = [self.grid.bounds(b) for b in result.table[_BIN].to_pylist()]
        table = result.table
        for position, name in ((1, "lo"), (2, "hi")):
            table = table.add_column(position, name, pa.array([b[position - 1] for b in bounds], pa.float64()))
        note = f"bin edges lie on a grid of {CELLS_PER_OCTAVE} cells an octave; bin 0 holds tokens with H = 0"
        return Result(self.name, table, {"n_bins": self.grid.n_bins, "by_lag": self.by_lag}, result.provenance, (note,))


def quantiles(histogram: str, keys: list[str]) -> str:
    """Return the query for `QUANTILES` of |delta| by `keys`, interpolated on the log scale inside a cell."""
    listed = "".join(f"{quote_ident(k)}, " for k in keys)
    partition = f"partition by {', '.join(quote_ident(k) for k in keys)}" if keys else ""
    picks = ",\n    ".join(
        f"""arg_min(
        case when delta_cell = {_ZERO_CELL} then 0
             else power(2.0, (delta_cell + ({p} * total - (upto - n)) / n) / {CELLS_PER_OCTAVE}) end,
        delta_cell) filter (upto >= {p} * total) as {name}"""
        for name, p in QUANTILES.items()
    )
    return f"""
with cells as (
    select {listed}delta_cell, sum(n) as n from {quote_ident(histogram)} group by {listed}delta_cell
),
cumulated as (
    select *, sum(n) over ({partition} order by delta_cell) as upto, sum(n) over ({partition}) as total from cells
)
select {listed}{picks}
from cumulated
{f"group by {listed.rstrip(', ')}" if keys else ""}"""


def bin_count(result: Result) -> int:
    """Return the number of distinct bins in a result."""
    return int(pc.count_distinct(result.table[_BIN]).as_py())
