"""The two errors of any mask, from sums by pool of sequences, entropy bin, position, and whether the weights have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.expressions import POSITION
from estr_diag.schema import quote_ident
from estr_diag.stats.bootstrap import Floats, resampled_sums
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.contrast import divide
from estr_diag.stats.positions import Strata, judge
from estr_diag.stats.split_log import spread
from estr_diag.store.engine import how_to_get

ErrorMethod = Literal["exact", "lag_contrast"]

ASSUMPTIONS: Mapping[ErrorMethod, str] = {
    "exact": "none: logp_replay gives noise and exploration of each token",
    "lag_contrast": (
        "given the entropy bin, engine noise does not depend on lag, nor on the position that lag goes with. Noise is judged where it stands alone, at lag 0; "
        "where exploration adds to it a mask drops more of both, so both shares are above the exact ones as a rule"
    ),
}

POOLS = 512
"""Sequences are pooled by number into at most so many clusters, so that the bootstrap costs the same for any log."""

EXACT_SUMS = ("n_replay", "sum_xi2", "sum_d2")
NUMBERS = ("noise_admitted", "exploration_masked", "exploration_masked_tokens")
Bools = NDArray[np.bool_]


def pooled(
    table: str, keys: Sequence[str], sums: Sequence[str], present: frozenset[str], *, binned: bool = True
) -> str:
    """Return a query that rolls partials by sequence up for `ErrorTable`.

    Parameters
    ----------
    table
        Partials by sequence, position bucket, decision keys, and as far as the log has them entropy bin and lag.
    keys
        What tells the decisions apart: columns, under the names that they are to have.
    sums
        Measures to add up beside those of the exact method.
    binned
        Whether there is an entropy bin among the keys.
    """
    versions = present >= {"policy_version", "trainer_version"}
    moved = "case when lag is null then null else lag > 0 end" if versions else "null::boolean"
    # A negative lag is a wrong label: it is neither the reference nor moved.
    moved = f"case when lag < 0 then null else {moved} end" if versions else moved
    exact = [f"coalesce(sum({m}), 0) as {m}" if "logp_replay" in present else f"0e0 as {m}" for m in EXACT_SUMS]
    named = ", ".join(keys)
    order = ", ".join(str(i + 1) for i in range(4 + len(keys)))
    return f"""
select {SEQUENCE_KEY} % {POOLS} as pool, {"entropy_bin" if binned else "null::integer as entropy_bin"},
    {moved} as moved, {POSITION}, {named}, {", ".join(f"sum({m}) as {m}" for m in sums)}, {", ".join(exact)}
from {quote_ident(table)}
where n > 0
group by {order}
order by {order}"""


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """The partials as arrays, one entry a row."""

    pool: Any
    n_pools: int
    bin: Any
    n_bins: int
    binned: bool
    moved: Floats
    strata: Strata
    sums: Mapping[str, Floats]

    @classmethod
    def of(cls, table: pa.Table) -> ErrorTable:
        """Read the result of a `pooled` query."""
        names = ("n", "sum_delta2", *EXACT_SUMS)
        sums = {name: table[name].to_numpy().astype(np.float64) for name in names}
        moved = np.array([np.nan if v is None else float(v) for v in table["moved"].to_pylist()], dtype=np.float64)
        bins = np.array([-1 if v is None else v for v in table["entropy_bin"].to_pylist()], dtype=np.int64)
        pools, pool = np.unique(table["pool"].to_numpy(), return_inverse=True)
        # A token without an entropy is in no bin: it can be exact, and takes no part in a contrast.
        moved[bins < 0] = np.nan
        position = table[POSITION].to_numpy().astype(np.int64)
        strata = judge(sums["n"], moved, (bins.astype(np.float64), position.astype(np.float64)))
        _, bin_at = np.unique(bins * 64 + position if strata.by_position else bins, return_inverse=True)
        return cls(
            pool, len(pools), bin_at, int(bin_at.max(initial=-1)) + 1, bool((bins >= 0).any()), moved, strata, sums
        )

    @property
    def methods(self) -> tuple[ErrorMethod, ...]:
        """The methods that the log allows, best first."""
        found: list[ErrorMethod] = ["exact"] if self.sums["n_replay"].sum() else []
        return (*found, "lag_contrast") if (self.moved == 0).any() else tuple(found)

    @property
    def why_no_contrast(self) -> str:
        """Why noise cannot be seen alone."""
        if not self.binned:
            return "no token has an entropy, and noise is compared at equal entropy; " + how_to_get({"entropy"})
        if np.isnan(self.moved).all():
            return "no token has a known lag; log policy_version and trainer_version"
        return "no token has lag 0, on which the noise alone is seen"

    @property
    def notes(self) -> list[str]:
        """What each method assumes, and which method the log does not allow, and why."""
        found = [f"method {method}; assumed: {self._assumed(method)}" for method in self.methods]
        if "lag_contrast" in self.methods and self.strata.note:
            found.append("noise admitted and exploration masked: " + self.strata.note)
        return found + self._not_told()

    def _assumed(self, method: ErrorMethod) -> str:
        text = ASSUMPTIONS[method]
        if not self.strata.by_position:
            return text
        return text.replace("given the entropy bin", "given the entropy bin and the position bucket").replace(
            ", nor on the position that lag goes with", ""
        )

    def _not_told(self) -> list[str]:
        notes = []
        if "lag_contrast" not in self.methods:
            notes.append("no lag contrast: " + self.why_no_contrast)
        if "exact" not in self.methods:
            notes.append(
                "not exact: the log has no logp_replay; re-score the batch with the weights of each token's version"
            )
        return notes

    def errors(self, kept: Bools, decided: Bools, method: ErrorMethod, *, replicates: int, seed: int) -> dict[str, Any]:
        """Return the errors of the mask that keeps these rows, with their intervals.

        Parameters
        ----------
        kept, decided
            One entry a row of the table.
        """
        kept = kept & decided
        if method == "exact":
            named = [
                ("sum_xi2", decided),
                ("sum_xi2", decided & kept),
                ("sum_d2", decided),
                ("sum_d2", decided & ~kept),
            ]
            per_pool = np.stack([self._by_pool(self.sums[s], at) for s, at in named], axis=1)
            estimate = _exact
            used = self.sums["n_replay"][decided].sum()
        else:
            fixed, moved = decided & (self.moved == 0), decided & (self.moved == 1)
            groups = [fixed, fixed & kept, moved, moved & ~kept]
            per_pool = np.stack([self._by_bin(self.sums[s], at) for at in groups for s in ("n", "sum_delta2")], axis=1)
            per_pool = per_pool.reshape(self.n_pools, -1)
            estimate = _contrast(self.n_bins)
            reference = np.bincount(self.bin[fixed], weights=self.sums["n"][fixed], minlength=self.n_bins) > 0
            used = self.sums["n"][decided & ~np.isnan(self.moved) & reference[self.bin]].sum()
        value = estimate(per_pool.sum(axis=0, keepdims=True))[0]
        low = high = np.full(len(value), np.nan)
        if self.n_pools > 1:
            drawn = estimate(resampled_sums(per_pool, replicates, seed))
            _, low, high = spread(drawn)
        # The share of something that may be nothing: told only where the whole is above 0 beyond sampling error.
        if not (self.n_pools > 1 and low[3] > 0):
            value[1] = value[1] if value[3] > 0 and method == "exact" else np.nan
            low[1] = high[1] = np.nan
        total = self.sums["n"][decided].sum()
        row: dict[str, Any] = {"coverage": _number(used / total) if total else None}
        for at, name in enumerate(NUMBERS):
            if method == "exact" and name == "exploration_masked_tokens":
                continue
            row |= {name: _number(value[at]), f"{name}_low": _number(low[at]), f"{name}_high": _number(high[at])}
        return row

    def _by_pool(self, values: Floats, at: Any) -> Floats:
        return np.bincount(self.pool[at], weights=values[at], minlength=self.n_pools).astype(np.float64)

    def _by_bin(self, values: Floats, at: Any) -> Floats:
        flat = self.pool[at] * self.n_bins + self.bin[at]
        sums = np.bincount(flat, weights=values[at], minlength=self.n_pools * self.n_bins).astype(np.float64)
        return sums.reshape(self.n_pools, self.n_bins)


def _exact(sums: Floats) -> Floats:
    """Return noise admitted, exploration masked, nothing, and the exploration itself; shape (R, 4)."""
    noise, noise_kept, moved, moved_masked = sums.T
    return np.stack([divide(noise_kept, noise), divide(moved_masked, moved), np.full(len(sums), np.nan), moved], axis=1)


def _contrast(n_bins: int) -> Any:
    """Return the function from sums by bin to the same four numbers."""

    def estimate(sums: Floats) -> Floats:
        parts = sums.reshape(len(sums), 8, n_bins)
        n0, s0, k0, ks0, n, s, m, ms = np.moveaxis(parts, 1, 0)
        has = n0 > 0
        noise, noise_kept = divide(s0, n0), divide(ks0, n0)
        rate, masked = divide(n0 - k0, n0), divide(s0 - ks0, n0)

        def over_bins(values: Floats) -> Floats:
            total: Floats = np.where(has, values, 0).sum(axis=1)
            return total

        everything = n0 + n
        exploration = over_bins(s - n * noise)
        return np.stack(
            [
                divide(over_bins(everything * noise_kept), over_bins(everything * noise)),
                divide(over_bins(ms - n * masked), exploration),
                divide(over_bins(m - n * rate), over_bins(n)),
                exploration,
            ],
            axis=1,
        )

    return estimate


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
