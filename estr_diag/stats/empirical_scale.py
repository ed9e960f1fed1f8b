"""Empirical scale m2(H): what delta^2 to expect at an entropy, with no law assumed but that it rises with H."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.result import Result
from estr_diag.stats.bootstrap import Floats
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.stats.grid import ValueGrid
from estr_diag.store.engine import Request


@dataclass(frozen=True, slots=True)
class EmpiricalScale:
    """Isotonic regression of delta^2 on H: the non-decreasing step function closest to the bin means.

    How to read it: `m2` is the squared deviation that is usual at this entropy in this log, so
    delta^2 / m2 is about 1 on average at every H; a rule that divides by it needs no law. Where `m2` differs from
    `mean_sq_delta`, the log's moment falls with H there and neighbouring bins were pooled (they share
    `block`): a long pooled block at low H means engine noise on off-mode tokens, which a scale that
    rises with H cannot describe. It is fitted to the log that it judges, faults included.

    Parameters
    ----------
    grid
        The bins inside which m2 is constant; of H, or of 1 - G.

    Notes
    -----
    The bin means are weighted by their tokens, which is the least-squares fit to the single tokens
    among functions that are constant inside each bin. Tokens with H = 0 are the lowest bin.
    """

    grid: ValueGrid
    name: ClassVar[str] = "empirical_scale"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines and the scale."""
        return frozenset({"logp_infer", "logp_train"}) | self.grid.scale.needs

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence and bin."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, self.grid.key: self.grid.sql()}
        return (Request("sums", keys, ("n", "sum_delta2", self.grid.scale.total)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return the mean of delta^2 in each bin."""
        scale, key = self.grid.scale, self.grid.key
        means = {f"mean_{scale.name}": (scale.total, "n"), "mean_sq_delta": ("sum_delta2", "n")}
        return f"select * from ({cluster_means(scans['sums'], [key], means)}) where {key} is not null order by {key}"

    def finish(self, result: Result) -> Result:
        """Make the means monotone."""
        table, grid = result.table, self.grid
        bins = table[grid.key].to_pylist()
        moments = table["mean_sq_delta"].to_numpy().astype(np.float64)
        m2, block = isotonic(moments, table["n"].to_numpy().astype(np.float64))
        bounds = [grid.bounds(b) for b in bins]
        for position, name in ((1, "lo"), (2, "hi")):
            table = table.add_column(position, name, pa.array([b[position - 1] for b in bounds], pa.float64()))
        table = table.append_column("m2", pa.array(m2, pa.float64())).append_column(
            "block", pa.array(block, pa.int32())
        )
        notes = list(grid.notes)
        if pooled := len(m2) - len(set(block.tolist())):
            notes.append(f"the moment falls with {grid.scale.name} in places: {pooled + 1} or more bins were pooled")
        if len(m2) and m2[0] == 0:
            notes.append("m2 is 0 where every delta was 0: nothing can be divided by it there")
        parameters = {"scale": grid.scale.name, "n_bins": grid.n_bins}
        return Result(self.name, table, parameters, result.provenance, tuple(notes))


def isotonic(values: Floats, weights: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the non-decreasing fit to `values`, and the number of the pooled block of each."""
    if not len(values):
        return values, np.empty(0, dtype=np.int64)
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    fit = isotonic_regression(values, weights=weights, increasing=True)
    return np.asarray(fit.x, dtype=np.float64), np.repeat(np.arange(len(fit.blocks) - 1), np.diff(fit.blocks))


def scale_at(result: Result, values: Floats) -> Floats:
    """Return m2 at entropies (or at values of 1 - G), from the table of `EmpiricalScale`.

    Parameters
    ----------
    result
        Of an `EmpiricalScale`.
    values
        Where to look m2 up. A value between or beyond the table's bins takes the bin below it, and the
        lowest bin where there is none below; NaN stays NaN.
    """
    table = result.table
    number = table.column(0).to_numpy()
    lower, m2 = table["lo"].to_numpy(), table["m2"].to_numpy()
    out = np.full(np.shape(values), np.nan)
    if not len(m2):
        return out
    known = np.isfinite(values)
    positive = np.flatnonzero(number > 0)
    at = np.zeros(np.shape(values), dtype=np.int64)
    if len(positive):
        # Bin 0 holds exactly the values <= 0, so what lies below the first edge belongs to bin 1, not to it.
        found = positive[0] + np.maximum(np.searchsorted(lower[positive], values, side="right") - 1, 0)
        at = np.where(known & (values > 0), found, at)
    out[known] = m2[at[known]]
    return out
