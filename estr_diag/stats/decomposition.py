"""Noise against exploration: delta = xi + d, by entropy bin and lag, and over the whole log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from estr_diag.errors import UsageError, nearest
from estr_diag.expressions import POSITION, POSITION_BUCKET
from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.stats.bootstrap import REPLICATES, SEED
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.contrast import ASSUMPTIONS, METHODS, Method, Split, divide
from estr_diag.stats.crossover import find
from estr_diag.stats.grid import ENTROPY, EntropyGrid
from estr_diag.stats.split_log import BIN, CLUSTERS, MEASURES, REPLAY_MEASURES, SplitLog, spread
from estr_diag.store.engine import Request

SMALL = 200
"""A cell with fewer tokens than this, or with a noise estimate from fewer, is flagged."""

REPRESENTED = 0.5
"""So is one of whose tokens less than this share has a reference at its position: the rest may be others."""

_VERSIONS = frozenset({"policy_version", "trainer_version"})


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Noise and exploration by entropy bin and lag.

    How to read it: `noise` is what two engines with the same weights disagree by, `exploration` what the
    weights have moved by since the token was sampled; both are second moments in nats^2. Healthy is noise that is
    small against exploration at high entropy. Noise above exploration at some lag > 0 means that a mask on
    delta removes engine error there; exploration above noise means that it removes signal. An estimate below
    0 is sampling error of the contrast: read its interval, not its sign. Rows with `small` true are too
    few tokens to read at all, or stand for less than half of their cell.

    Parameters
    ----------
    grid
        The bins.
    method
        ``exact``, ``lag_contrast``, ``extrapolated`` or ``none``; by default the best that the log allows. The
        method taken and its assumption are in the parameters and notes of the result.
    by_position
        Form the contrasts inside log2 buckets of the position in the response, and average them with the tokens of each
        cell: for noise that grows with position, as lag falls along a sequence. By default where the log has lag-0 tokens
        at most positions (see `positions`); the note says which.
    replicates, seed
        Of the cluster bootstrap.
    """

    grid: EntropyGrid
    method: Method | None = None
    by_position: bool | None = None
    replicates: int = REPLICATES
    seed: int = SEED
    name: ClassVar[str] = "decomposition"

    def __post_init__(self) -> None:
        if self.grid.scale != ENTROPY:
            raise UsageError(f"a decomposition is by entropy; this grid is of {self.grid.scale.name}")
        if self.method not in (None, *METHODS, "none"):
            raise UsageError(f"unknown method '{self.method}'; {nearest(str(self.method), (*METHODS, 'none'))}")

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines and the entropy; without versions or logp_replay there is a total only."""
        return frozenset({"logp_infer", "logp_train", "entropy"})

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, bin and lag."""
        scan = "sums" if self.by_position is False else f"sums_by_{POSITION}"
        return (Request(scan, {SEQUENCE_KEY: SEQUENCE_KEY, **self._keys(present)}, _measures(present)),)

    def _keys(self, present: frozenset[str]) -> dict[str, str]:
        keys = {BIN: self.grid.sql()}
        if present >= _VERSIONS:
            keys["lag"] = "lag"
        if self.by_position is not False:
            keys[POSITION] = POSITION_BUCKET
        return keys

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return sums by pool of sequences, stratum, bin and lag; `finish` resamples the pools."""
        keys = list(self._keys(present))
        listed = ", ".join(quote_ident(k) for k in keys)
        optional = {"lag": "null::integer", POSITION: "0"}
        names = ", ".join(f"{k if k in keys else optional[k]} as {k}" for k in (BIN, "lag", POSITION))
        measures = _measures(present)
        return f"""
with per_sequence as (
    select {SEQUENCE_KEY}, {listed}, {", ".join(f"coalesce(sum({m}), 0) as {m}" for m in measures)}
    from {quote_ident(scans[self.requests(present)[0].scan])}
    group by all
),
named as (select {SEQUENCE_KEY}, {names}, {", ".join(measures)} from per_sequence where n > 0),
marked as (
    select *, (row_number() over (partition by {SEQUENCE_KEY}, {BIN}, lag order by {POSITION}) = 1)::double as n_sequences
    from named
)
select {SEQUENCE_KEY} % {CLUSTERS} as cluster, {BIN}, lag, {POSITION},
    sum(n_sequences) as n_sequences, {", ".join(f"sum({m} order by {SEQUENCE_KEY}) as {m}" for m in measures)},
    {"true" if present >= _VERSIONS else "false"} as versions
from marked
group by 1, 2, 3, 4
order by 1, 2, 3, 4"""

    def finish(self, result: Result) -> Result:
        """Split each cell, and resample for its interval."""
        sums = SplitLog.of(result.table, self.method, self.by_position, self.replicates, self.seed)
        table = pa.Table.from_pylist(_cells(sums, self.grid), schema=_CELL_SCHEMA)
        return self._result(table, sums, result)

    def _result(self, table: pa.Table, sums: SplitLog, result: Result) -> Result:
        parameters = {
            "n_bins": self.grid.n_bins,
            "method": sums.method,
            "assumption": _assumption(sums.method, sums.by_position),
            "asked": self.method or "best",
            "by_position": sums.by_position,
            "replicates": self.replicates,
            "seed": self.seed,
        }
        notes = [f"method: {sums.method}; assumption: {parameters['assumption']}", *sums.notes]
        return Result(self.name, table, parameters, result.provenance, tuple(notes))


@dataclass(frozen=True, slots=True)
class NoiseShare(Decomposition):
    """Share of the squared deviation that is noise, over the whole log and by lag.

    How to read it: `noise_share` near 1 means that the ratios are engine error, and that fixing the engines
    matters more than any mask; near 0, that they are moved weights. Above 0.5 on tokens of lag > 0 is trouble. At
    lag 0 it is 1 by definition of the lag contrast. `crossover_entropy` is the entropy above which
    exploration leads, over tokens of lag > 0; where it is null, `crossover` says which of the two leads
    throughout. The row with a null lag is the whole log.

    Parameters are those of `Decomposition`; with the same ones it shows the same split.
    """

    name: ClassVar[str] = "noise_share"

    def finish(self, result: Result) -> Result:
        """Add up the bins, for the whole log and for each lag."""
        sums = SplitLog.of(result.table, self.method, self.by_position, self.replicates, self.seed)
        rows = [_whole(sums, None)]
        if any(lag is not None for lag in sums.lags):
            rows += [_whole(sums, i) for i in range(len(sums.lags))]
        return self._result(pa.Table.from_pylist(rows, schema=_WHOLE_SCHEMA), sums, result)


def _measures(present: frozenset[str]) -> tuple[str, ...]:
    return MEASURES + (REPLAY_MEASURES if "logp_replay" in present else ())


def _assumption(method: Method, by_position: bool) -> str:
    text = ASSUMPTIONS[method]
    stratified = by_position and method in ("lag_contrast", "extrapolated")
    if not stratified:
        return text
    return text.replace("given the bin", "given the bin and the position bucket").replace(
        ", nor on the position that lag goes with", ""
    )


def _cells(log: SplitLog, grid: EntropyGrid) -> list[dict[str, Any]]:
    point, drawn = log.point, log.replicates
    se, low, high = spread(drawn.exploration) if drawn else (np.full(point.n.shape[1:], np.nan),) * 3
    rows = []
    for b, i in zip(*np.nonzero(log.tokens[0]), strict=True):
        lag = log.lags[i]
        # Lag 0 is what the noise is measured on; and one sequence alone has no spread between sequences.
        unknown = (log.method == "lag_contrast" and lag == 0) or log.tokens[1, b, i] < 2
        lo, hi = grid.bounds(log.bins[b])
        rows.append(
            {
                BIN: log.bins[b],
                "lo": lo,
                "hi": hi,
                "mean_entropy": log.tokens[2, b, i],
                "lag": lag,
                "n": int(log.tokens[0, b, i]),
                "n_sequences": int(log.tokens[1, b, i]),
                "n_used": int(point.n[0, b, i]),
                "n_noise": int(point.n_noise[0, b, i]),
                **_moments(point, b, i),
                "se": None if unknown else _value(se[b, i]),
                "ci_low": None if unknown else _value(low[b, i]),
                "ci_high": None if unknown else _value(high[b, i]),
                "small": bool(log.method != "none" and min(point.n[0, b, i], point.n_noise[0, b, i]) < SMALL)
                or bool(log.tokens[0, b, i] < SMALL)
                or bool(log.method != "none" and point.n[0, b, i] < REPRESENTED * log.tokens[0, b, i]),
            }
        )
    return rows


def _whole(log: SplitLog, lag: int | None) -> dict[str, Any]:
    """Return the row over all bins, of one lag (an index) or of the whole log (None)."""
    indices = list(range(len(log.lags))) if lag is None else [lag]
    point = log.point.pooled(indices)
    share, low, high = divide(point.noise, point.total), np.nan, np.nan
    # With one sequence in every bin there is no spread between sequences to take an interval from.
    if log.replicates is not None and log.tokens[1][:, indices].max(initial=0) >= 2:
        drawn = log.replicates.pooled(indices)
        _, low, high = (float(x[0, 0]) for x in spread(divide(drawn.noise, drawn.total)))
    # At lag 0 the weights are the same, so only other tokens say whether exploration leads.
    moved = [i for i in indices if log.lags[i] != 0]
    return {
        "lag": None if lag is None else log.lags[lag],
        "method": log.method,
        "n": int(log.tokens[0][:, indices].sum()),
        "n_used": int(point.n[0, 0, 0]),
        **_moments(point, 0, 0),
        "noise_share": _value(share[0, 0, 0]),
        "ci_low": _value(low),
        "ci_high": _value(high),
        **_crossover(log, moved),
    }


def _crossover(log: SplitLog, lags: list[int]) -> dict[str, Any]:
    nothing = {"crossover_entropy": None, "crossover_low": None, "crossover_high": None}
    if log.method == "none":
        return {**nothing, "crossover": "cannot tell: noise and exploration are not split"}
    if not lags:
        return {**nothing, "crossover": "none: at lag 0 the weights have not moved"}
    point = log.point.pooled(lags, by_bin=True)
    tokens = log.tokens[0][:, lags].sum(axis=1)
    entropy = divide((np.nan_to_num(log.tokens[2]) * log.tokens[0])[:, lags].sum(axis=1), tokens)
    readable = (point.n[0, :, 0] >= SMALL) & (point.n_noise[0, :, 0] >= SMALL) & (entropy > 0)
    readable &= np.isfinite(point.exploration[0, :, 0])
    drawn = log.replicates.pooled(lags, by_bin=True) if log.replicates is not None else None
    found = find(
        entropy[readable],
        (point.exploration - point.noise)[0, readable, 0],
        None if drawn is None else (drawn.exploration - drawn.noise)[:, readable, 0],
    )
    return {
        "crossover_entropy": found.value,
        "crossover_low": found.low,
        "crossover_high": found.high,
        "crossover": found.text,
    }


def _moments(moments: Split, b: int, i: int) -> dict[str, float | None]:
    names = ("noise", "exploration", "cross", "total")
    return {name: _value(getattr(moments, name)[0, b, i]) for name in names}


def _value(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


_COUNT, _NUMBER = pa.int64(), pa.float64()
_MOMENTS = dict.fromkeys(("noise", "exploration", "cross", "total"), _NUMBER)
_ENDS = {"ci_low": _NUMBER, "ci_high": _NUMBER}
_CELL_SCHEMA = _schema(
    entropy_bin=pa.int32(), lo=_NUMBER, hi=_NUMBER, mean_entropy=_NUMBER, lag=pa.int32(), n=_COUNT,
    n_sequences=_COUNT, n_used=_COUNT, n_noise=_COUNT, **_MOMENTS, se=_NUMBER, **_ENDS, small=pa.bool_(),
)  # fmt: skip
_WHOLE_SCHEMA = _schema(
    lag=pa.int32(), method=pa.string(), n=_COUNT, n_used=_COUNT, **_MOMENTS, noise_share=_NUMBER, **_ENDS,
    crossover_entropy=_NUMBER, crossover_low=_NUMBER, crossover_high=_NUMBER, crossover=pa.string(),
)  # fmt: skip
