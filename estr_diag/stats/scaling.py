"""Scaling law: E[delta^2] as a power of the entropy (Zhao et al., arXiv 2607.22186), and of 1 - G.

Weighted least squares of log E[delta^2] on the log of the bin's mean scale, over bins. The weights are
token counts. A bin's log-moment has variance (kurtosis - 1) / n when delta^2 has about the same relative
spread in every bin, as it does under a scale law; so n is the inverse variance up to a constant, and it
makes the fit the one of a typical token rather than of a typical bin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr_diag.errors import UsageError
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.bootstrap import REPLICATES, SEED, Floats, percentile_interval
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.entropy_bins import SMALL_TOKENS
from estr_diag.stats.grid import ValueGrid
from estr_diag.stats.power_law import MIN_BINS, slopes, usable_bins, weighted_fit
from estr_diag.store.engine import Request

MIN_SEQUENCES = 2

_SUMS = ("n", "sq_delta", "total")
"""What a fit is a function of, by bin: tokens, sum of delta^2, sum of the scale."""

_LOCAL = pa.struct(
    [
        ("bin", pa.int32()),
        ("next_bin", pa.int32()),
        ("lo", pa.float64()),
        ("hi", pa.float64()),
        ("exponent", pa.float64()),
        ("ci_low", pa.float64()),
        ("ci_high", pa.float64()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("scale", pa.string()),
        ("exponent", pa.float64()),
        ("ci_low", pa.float64()),
        ("ci_high", pa.float64()),
        ("amplitude", pa.float64()),
        ("amplitude_ci_low", pa.float64()),
        ("amplitude_ci_high", pa.float64()),
        ("r2", pa.float64()),
        ("rms_residual", pa.float64()),
        ("law_holds", pa.bool_()),
        ("reason", pa.string()),
        ("common_rms_residual", pa.float64()),
        ("better", pa.bool_()),
        ("n_tokens", pa.int64()),
        ("n_sequences", pa.int64()),
        ("n_bins", pa.int64()),
        ("n_bins_small", pa.int64()),
        ("n_bins_zero_moment", pa.int64()),
        ("n_tokens_at_zero", pa.int64()),
        ("local_exponents", pa.list_(_LOCAL)),
    ]
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Exponent b and amplitude a of E[delta^2] = a x^b, where x is the entropy H or 1 - G.

    How to read it: the paper's law is b = 1, and `law_holds` says whether 1 lies inside the 95 % interval
    of b: true means "not contradicted", so look at the width too. Null means that it cannot be told, and
    `reason` says why. b above 1 with a high `r2` means that confident tokens are closer than the law says;
    b below 1 that they are further apart than ESTR's scale allows for, which is engine noise. One number
    hides curvature: `local_exponents` gives the slope from each bin to the next, and drifts where there is
    any. `amplitude` is E[delta^2] at x = 1, in nats^2; against 1 - G it is the variance s^2 of
    independent noise on the logits, for which b = 1 holds exactly. With both scales, `better` marks the one
    whose fit leaves the smaller `common_rms_residual`.

    Parameters
    ----------
    grids
        The bins of each scale: H, or H and 1 - G.
    min_tokens
        Bins with fewer tokens are left out, and counted in `n_bins_small`.
    replicates, seed
        Of the bootstrap over sequences.

    Notes
    -----
    Left out, and counted: tokens at x = 0 and bins with E[delta^2] = 0, which have no logarithm.
    Intervals are percentiles of a bootstrap over whole sequences; the bins stay fixed. On 100 simulated
    logs each they held the true exponent in 88-95 % (8, 20 and 60 sequences, exponents 1 and 1.5), the
    local ones in 88-94 %: read an end that just misses 1 as "close". `rms_residual` is
    sqrt(sum w r^2 / sum w * B / (B - 2)) of the residuals r of log E[delta^2] over B bins, so it reads
    as a relative error of the moment. The two scales are compared on the tokens where both are positive,
    each in its own bins; neither is better where the interval of the difference of the two
    `common_rms_residual` contains 0.
    """

    grids: tuple[ValueGrid, ...]
    min_tokens: int = SMALL_TOKENS
    replicates: int = REPLICATES
    seed: int = SEED
    name: ClassVar[str] = "scaling"

    def __post_init__(self) -> None:
        names = [grid.scale.name for grid in self.grids]
        if not 1 <= len(names) <= 2 or len(set(names)) != len(names):
            raise UsageError(f"the scaling law is fitted against {names}; expected one or two different scales")

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines and the scales."""
        return frozenset({"logp_infer", "logp_train"}).union(*(grid.scale.needs for grid in self.grids))

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence and bin; by both bins at once where two scales are compared."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, **{grid.key: grid.sql() for grid in self.grids}}
        return (Request("sums", keys, ("n", "sum_delta2", *(grid.scale.total for grid in self.grids))),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return the sums of each scale, sequence and bin; those of tokens where both scales are positive, too."""
        return "\nunion all\n".join(self._sums_of(i, scans["sums"]) for i in range(len(self.grids)))

    def _sums_of(self, index: int, partials: str) -> str:
        grid = self.grids[index]
        common = " and ".join(f"{g.key} > 0" for g in self.grids)
        totals = dict(zip(_SUMS, ("n", "sum_delta2", grid.scale.total), strict=True))
        columns = [f"sum({sql}) as {name}" for name, sql in totals.items()]
        columns += [f"coalesce(sum({sql}) filter ({common}), 0) as common_{name}" for name, sql in totals.items()]
        return f"""
select {index} as scale, {SEQUENCE_KEY}, {grid.key} as bin, {", ".join(columns)}
from {quote_ident(partials)}
where {grid.key} is not null
group by {SEQUENCE_KEY}, {grid.key}"""

    def finish(self, result: Result) -> Result:
        """Fit, resample sequences, and compare the scales."""
        cubes = self._cubes(result.table)
        blocks = [_Block.of(cube, self.min_tokens) for cube in cubes]
        low, high = self._intervals(blocks)
        rows = [self._row(g, cubes[i], blocks[i], low[i], high[i]) for i, g in enumerate(self.grids)]
        notes = [f"{row['scale']}: {row['reason']}" for row in rows if row["reason"]]
        if len(self.grids) == 2:
            notes.append(self._compare(rows, blocks[2:], low[-1], high[-1]))
        for grid in self.grids:
            notes += [note for note in grid.notes[1:] if note not in notes]
        parameters = {
            "scales": [grid.scale.name for grid in self.grids],
            "n_bins": [grid.n_bins for grid in self.grids],
            "min_tokens": self.min_tokens,
            "replicates": self.replicates,
            "seed": self.seed,
        }
        table = pa.Table.from_pylist(rows, schema=_SCHEMA)
        return Result(self.name, table, parameters, result.provenance, tuple(notes))

    def _cubes(self, table: pa.Table) -> list[Floats]:
        """Return arrays of shape (sequences, bins, 3): one a scale, then those of the common tokens of two."""
        scale, bins = table["scale"].to_numpy(), table["bin"].to_numpy()
        names, sequence = np.unique(table[SEQUENCE_KEY].to_numpy(), return_inverse=True)
        cubes = []
        for prefix in ("", "common_")[: len(self.grids)]:
            for i, grid in enumerate(self.grids):
                at, cube = scale == i, np.zeros((len(names), grid.n_bins, len(_SUMS)))
                for k, column in enumerate(_SUMS):
                    cube[sequence[at], bins[at], k] = table[prefix + column].to_numpy()[at]
                cubes.append(cube)
        # Replicates draw rows by position: an order by content gives one interval however sequences are numbered.
        totals = [cube.sum(axis=1) for cube in cubes] + [cube[:, :, :1].sum(axis=1) for cube in cubes]
        order = np.lexsort(np.concatenate(totals, axis=1).T[::-1])
        return [cube[order] for cube in cubes]

    def _intervals(self, blocks: Sequence[_Block]) -> tuple[list[Floats], list[Floats]]:
        """Return both ends of (exponent, log amplitude, local exponents) a scale, then of the residuals' difference."""
        sums = np.concatenate([block.sums for block in blocks], axis=1)
        sums = sums[sums[:, :, 0].sum(axis=1) > 0]
        n, widths = len(self.grids), [len(block.bins) for block in blocks]
        sizes = [2 + max(width - 1, 0) for width in widths[:n]] + [1]
        ends = np.cumsum(sizes)[:-1]

        def statistic(flat: Floats) -> Floats:
            parts = np.split(flat.reshape(len(flat), -1, len(_SUMS)), np.cumsum(widths)[:-1], axis=1)
            fits = [weighted_fit(part) for part in parts]
            values = [
                np.column_stack([fit.exponent, fit.log_amplitude, slopes(part)])
                for fit, part in zip(fits[:n], parts, strict=False)
            ]
            gap = fits[2].rms_residual - fits[3].rms_residual if n == 2 else np.full(len(flat), np.nan)
            return np.column_stack([*values, gap])

        if len(sums) < MIN_SEQUENCES:
            nothing = np.split(np.full(sum(sizes), np.nan), ends)
            return nothing, nothing
        low, high = percentile_interval(
            sums.reshape(len(sums), -1), statistic, replicates=self.replicates, seed=self.seed
        )
        return np.split(low, ends), np.split(high, ends)

    def _row(self, grid: ValueGrid, cube: Floats, block: _Block, low: Floats, high: Floats) -> dict[str, Any]:
        whole, bins, sums = cube.sum(axis=0), block.bins, block.whole
        enough = whole[1:, 0] >= self.min_tokens
        fit, local = weighted_fit(sums), slopes(sums)[0]
        if block.n_sequences < MIN_SEQUENCES:
            low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
        judged = len(bins) >= MIN_BINS
        row: dict[str, Any] = {
            "scale": grid.scale.name,
            "exponent": _number(fit.exponent[0]),
            "ci_low": _number(low[0]) if judged else None,
            "ci_high": _number(high[0]) if judged else None,
            "amplitude": _exp(fit.log_amplitude[0]),
            "amplitude_ci_low": _exp(low[1]) if judged else None,
            "amplitude_ci_high": _exp(high[1]) if judged else None,
            "r2": _number(fit.r2[0]),
            "rms_residual": _number(fit.rms_residual[0]),
            "n_tokens": int(sums[0, :, 0].sum()),
            "n_sequences": block.n_sequences,
            "n_bins": len(bins),
            "n_bins_small": int(np.count_nonzero((whole[1:, 0] > 0) & ~enough)),
            "n_bins_zero_moment": int(np.count_nonzero(enough & (whole[1:, 0] > 0) & (whole[1:, 1] <= 0))),
            "n_tokens_at_zero": int(whole[0, 0]),
            "local_exponents": [
                {
                    "bin": int(first),
                    "next_bin": int(second),
                    "lo": grid.bounds(int(first))[0],
                    "hi": grid.bounds(int(second))[1],
                    "exponent": _number(exponent),
                    "ci_low": _number(below),
                    "ci_high": _number(above),
                }
                for first, second, exponent, below, above in zip(bins, bins[1:], local, low[2:], high[2:], strict=False)
            ],
        }
        row["reason"] = self._reason(row)
        row["law_holds"] = None if row["reason"] else bool(row["ci_low"] <= 1 <= row["ci_high"])
        return row

    def _reason(self, row: Mapping[str, Any]) -> str | None:
        """Say why there is no verdict, or None when there is one."""
        if row["n_bins"] < MIN_BINS:
            return (
                f"{row['n_bins']} bins with at least {self.min_tokens} tokens and a moment above 0 "
                f"({row['n_bins_small']} smaller, {row['n_bins_zero_moment']} with every delta 0, "
                f"{row['n_tokens_at_zero']} tokens at 0); a law needs {MIN_BINS}"
            )
        if row["n_sequences"] < MIN_SEQUENCES:
            return f"{row['n_sequences']} sequence; an interval needs {MIN_SEQUENCES}"
        if row["ci_low"] is None:
            return "too many bootstrap replicates cannot be fitted: the moments rest on too few sequences"
        return None

    def _compare(self, rows: list[dict[str, Any]], blocks: Sequence[_Block], low: Floats, high: Floats) -> str:
        """Mark the better scale, and say how it was found."""
        names = [row["scale"] for row in rows]
        for row, block in zip(rows, blocks, strict=True):
            row["common_rms_residual"] = _number(weighted_fit(block.whole).rms_residual[0])
        if min(len(block.bins) for block in blocks) < MIN_BINS:
            return f"{' and '.join(names)} are not compared: fewer than {MIN_BINS} bins where both are positive"
        if not np.isfinite([low[0], high[0]]).all():
            return f"{' and '.join(names)} are not compared: no interval for the difference of their residuals"
        apart = (bool(high[0] < 0), bool(low[0] > 0))
        for row, better in zip(rows, apart, strict=True):
            row["better"] = better if any(apart) else None
        best = next((name for name, better in zip(names, apart, strict=True) if better), "neither")
        residuals = " against ".join(f"{row['common_rms_residual']:.3g} ({row['scale']})" for row in rows)
        return (
            f"{best} is the better scale: weighted rms residual of log E[delta^2] {residuals} on the tokens where "
            f"both are positive; 95 % interval of the difference [{low[0]:.3g}, {high[0]:.3g}]"
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """The bins that one fit uses."""

    bins: NDArray[np.int64]
    sums: Floats
    """Shape (sequences, used bins, 3)."""

    @classmethod
    def of(cls, cube: Floats, min_tokens: int) -> _Block:
        bins = usable_bins(cube.sum(axis=0), min_tokens)
        return cls(bins, cube[:, bins])

    @property
    def whole(self) -> Floats:
        """Sums over sequences, shape (1, used bins, 3)."""
        return np.asarray(self.sums.sum(axis=0)[None])

    @property
    def n_sequences(self) -> int:
        """Sequences that have a token in a used bin."""
        return int(np.count_nonzero(self.sums[:, :, 0].sum(axis=1)))


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _exp(value: Any) -> float | None:
    # Beyond that a double overflows: the fit was carried far outside the data.
    return float(np.exp(value)) if np.isfinite(value) and value < 700 else None
