"""Ratio scale against entropy: the moments of delta in bins of H (Zhao et al., Fig. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from estr_diag.errors import UsageError
from estr_diag.expressions import CELLS_PER_OCTAVE, grid_cell
from estr_diag.measures import MAX_RATIO_BOUND, ratio_beyond
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.stats.grid import ENTROPY, ValueGrid
from estr_diag.store.engine import Request

QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "p999": 0.999}
"""Quantiles of |delta| that are reported, from a histogram of 16 cells an octave (within 4.5 % always, 0.1 % typically)."""

SMALL_TOKENS, SMALL_SEQUENCES = 200, 2
"""A cell with fewer is marked `small`: its moments are ruled by a few tokens, or have no standard error."""

HALVES: dict[str, str] = {"mode": "not off_mode", "off_mode": "off_mode"}
"""Mode tokens (p_infer >= 0.5) and off-mode tokens."""

_ZERO_CELL = -(1 << 20)


RATIO_BOUNDS: tuple[float, ...] = (2.0, 5.0)
"""r of the fixed bands [1/r, r] in play: what a fixed threshold would cut, by entropy."""


@dataclass(frozen=True, slots=True)
class EntropyBins:
    """Moments and quantiles of delta by entropy bin, and by lag within it.

    How to read it: the paper's law is E[delta^2 | H] ~ H, so `sq_delta_over_entropy` is about constant
    over bins of a healthy log. A rise of it towards low H is engine noise on off-mode tokens (see
    `off_mode_mean_sq_delta`); a rise with lag at high H is legitimate exploration. `p_ratio_beyond_2` is
    the share of tokens whose ratio a band [0.5, 2] cuts, that is P(|delta| > ln 2). Nothing should be
    concluded from a cell that is `small`.

    Parameters
    ----------
    grid
        The bins. Over a grid of 1 - G the columns say `gini` where they otherwise say `entropy`.
    by_lag
        Also split by trainer_version - policy_version.
    ratio_bounds
        The r for which the share of tokens outside [1/r, r] is given.
    """

    grid: ValueGrid
    by_lag: bool = False
    ratio_bounds: tuple[float, ...] = RATIO_BOUNDS
    name: ClassVar[str] = "entropy_bins"

    def __post_init__(self) -> None:
        if bad := [r for r in self.ratio_bounds if not 1 < r <= MAX_RATIO_BOUND]:
            raise UsageError(f"ratio bounds {bad}: expected numbers above 1 and up to {MAX_RATIO_BOUND:g}")

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines and the entropy, and versions for the split by lag."""
        return (
            frozenset({"logp_infer", "logp_train"})
            | self.grid.scale.needs
            | (frozenset({"policy_version", "trainer_version"}) if self.by_lag else frozenset())
        )

    @property
    def _keys(self) -> dict[str, str]:
        return {self.grid.key: self.grid.sql()} | ({"lag": "lag"} if self.by_lag else {})

    @property
    def _beyond(self) -> dict[str, str]:
        return {f"p_ratio_beyond_{r:.12g}": ratio_beyond(r) for r in self.ratio_bounds}

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, and for a histogram of |delta|."""
        # z is defined by H; a bin of 1 - G may hold tokens whose H is not known.
        scaled = ("sum_scaled2",) if self.grid.scale == ENTROPY else ()
        measures = (
            "n",
            "sum_abs_delta",
            "sum_delta2",
            self.grid.scale.total,
            *scaled,
            "n_off_mode",
            "sum_delta2_off_mode",
            *self._beyond.values(),
        )
        cell = f"case when delta = 0 then {_ZERO_CELL} else {grid_cell('abs(delta)')} end"
        return (
            Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY, **self._keys}, measures),
            Request("histogram", {**self._keys, "off_mode": "p_infer < 0.5", "delta_cell": cell}, ("n",)),
        )

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up the sums and read the quantiles off the histogram."""
        keys, scale = list(self._keys), self.grid.scale
        means = {
            f"mean_{scale.name}": (scale.total, "n"),
            "mean_abs_delta": ("sum_abs_delta", "n"),
            "mean_sq_delta": ("sum_delta2", "n"),
            **({"mean_scaled_sq": ("sum_scaled2", "n")} if scale == ENTROPY else {}),
            "off_mode_mean_sq_delta": ("sum_delta2_off_mode", "n_off_mode"),
            **{column: (name, "n") for column, name in self._beyond.items()},
        }
        extra = {
            "rms_delta": "sqrt(sum(sum_delta2) / sum(n))",
            f"sq_delta_over_{scale.name}": f"sum(sum_delta2) / nullif(sum({scale.total}), 0)",
            "n_off_mode": "sum(n_off_mode)::bigint",
            "mode_mean_sq_delta": "(sum(sum_delta2) - sum(sum_delta2_off_mode)) / nullif(sum(n) - sum(n_off_mode), 0)",
            "small": f"sum(n) < {SMALL_TOKENS} or count(*) filter (n > 0) < {SMALL_SEQUENCES}",
        }
        order = ", ".join(f"m.{k} nulls last" for k in keys)
        listed = "".join(f", q.{name}" for name in QUANTILES)
        joins = f"\nleft join ({quantiles(scans['histogram'], keys)}) q on {_same(keys, 'q')}"
        for half, condition in HALVES.items():
            listed += "".join(f", {half}.{name} as {half}_{name}" for name in QUANTILES)
            joins += f"\nleft join ({quantiles(scans['histogram'], keys, condition)}) {half} on {_same(keys, half)}"
        return f"""
select m.*{listed}
from ({cluster_means(scans["sums"], keys, means, extra)}) m{joins}
where m.{self.grid.key} is not null
order by {order}"""

    def finish(self, result: Result) -> Result:
        """Put the edges of each bin beside it."""
        bounds = [self.grid.bounds(b) for b in result.table[self.grid.key].to_pylist()]
        table = result.table
        for position, name in ((1, "lo"), (2, "hi")):
            table = table.add_column(position, name, pa.array([b[position - 1] for b in bounds], pa.float64()))
        parameters = {
            "scale": self.grid.scale.name,
            "n_bins": self.grid.n_bins,
            "by_lag": self.by_lag,
            "ratio_bounds": list(self.ratio_bounds),
        }
        notes = list(self.grid.notes)
        if small := pc.sum(table["small"]).as_py():
            notes.append(
                f"{small} of {table.num_rows} cells are small: fewer than {SMALL_TOKENS} tokens "
                f"or {SMALL_SEQUENCES} sequences"
            )
        return Result(f"{self.grid.scale.name}_bins", table, parameters, result.provenance, tuple(notes))


def _same(keys: list[str], other: str) -> str:
    return " and ".join(f"m.{k} is not distinct from {other}.{k}" for k in keys)


def quantiles(histogram: str, keys: list[str], condition: str = "true") -> str:
    """Return the query for `QUANTILES` of |delta| by `keys` where `condition` holds, interpolated on the log scale inside a cell."""
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
    select {listed}delta_cell, sum(n) as n
    from {quote_ident(histogram)}
    where {condition}
    group by {listed}delta_cell
),
cumulated as (
    select *, sum(n) over ({partition} order by delta_cell) as upto, sum(n) over ({partition}) as total from cells
)
select {listed}{picks}
from cumulated
{f"group by {listed.rstrip(', ')}" if keys else ""}"""
