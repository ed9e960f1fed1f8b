"""A log in per-sequence sums, split into noise and exploration once as it is and once a bootstrap replicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from estr_diag.expressions import POSITION
from estr_diag.stats.bootstrap import resampled_sums
from estr_diag.stats.contrast import Floats, Method, Split, choose, divide, split
from estr_diag.stats.positions import Strata, judge
from estr_diag.store.engine import how_to_get

BIN = "entropy_bin"
MEASURES = ("n", "sum_delta2", "sum_entropy")
REPLAY_MEASURES = ("n_replay", "sum_xi2", "sum_d2", "sum_xi_d")

CLUSTERS = 4096
"""Sequences are pooled by number into at most so many clusters: pools of independent sequences are
independent too, and the bootstrap then costs the same for any log."""

_VERSIONS = frozenset({"policy_version", "trainer_version"})
_MAX_CELLS = 1 << 24  # doubles in the matrix of per-cluster sums: 128 MiB
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class SplitLog:
    """The log in sums, split: the point estimate, and the same for each bootstrap replicate."""

    bins: tuple[int, ...]
    lags: tuple[int | None, ...]
    method: Method
    by_position: bool
    tokens: Floats
    """Tokens, sequences and mean entropy of a cell, shape (3, bins, lags)."""
    point: Split
    replicates: Split | None
    """None with fewer than two sequences."""
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, table: pa.Table, asked: Method | None, by_position: bool | None, replicates: int, seed: int
    ) -> SplitLog:
        """Choose a method for the partials of `Decomposition.merge`, and whether by position; split them, and resample."""
        columns = {name: table[name].to_numpy().astype(np.float64) for name in table.column_names if name != "versions"}
        n, no_bin, no_lag = columns["n"], np.isnan(columns[BIN]), np.isnan(columns["lag"])
        versions = bool(len(n)) and table["versions"][0].as_py() and not bool(no_lag.all())
        used = ~no_bin & (~no_lag if versions else True)
        columns = {name: values[used] for name, values in columns.items()}
        if not versions:
            columns["lag"] = np.zeros_like(columns["n"])
        bins, lags = (np.unique(columns[k]) for k in (BIN, "lag"))
        known_lags = tuple(int(k) if versions else None for k in lags)
        replay = columns.get("n_replay", np.zeros(1)).sum()
        method, why = choose(asked, known_lags, float(replay))
        inside = Strata(bool(by_position) and method != "exact", "")
        if by_position is None:
            inside = judge(columns["n"], columns["lag"], (columns[BIN], columns[POSITION]), method)
        if not inside.by_position:
            columns[POSITION] = np.zeros_like(columns["n"])
        strata = np.unique(columns[POSITION])
        names = ("n_sequences", *(m for m in (*MEASURES, *REPLAY_MEASURES) if m in columns))
        shape = (len(names), len(strata), len(bins), len(lags))
        matrix = _dense(columns, names, shape, (strata, bins, lags))

        def parts(flat: Floats) -> Split:
            stacked = flat.reshape(len(flat), *shape)
            return split(method, dict(zip(names, np.moveaxis(stacked, 1, 0), strict=True)), known_lags)

        whole = matrix.sum(axis=0)
        counts = whole.reshape(shape).sum(axis=1)
        at = {name: counts[i] for i, name in enumerate(names)}
        tokens = np.stack([at["n"], at["n_sequences"], divide(at["sum_entropy"], at["n"])])
        drawn = parts(resampled_sums(matrix, replicates, seed)) if len(matrix) > 1 else None
        notes = [note for note in (why, inside.note) if note]
        notes += _left_out(n, no_bin, no_lag & ~no_bin if versions else np.zeros_like(no_bin))
        if method == "exact" and (lacking := at["n"].sum() - replay):
            notes.append(f"{lacking:,.0f} counted tokens have no logp_replay and are left out of the split")
        if known_lags == (0,) and method == "lag_contrast":
            notes.append("every token has lag 0: all of the deviation is noise, by definition")
        if method == "none":
            how = how_to_get({"logp_replay"} if versions else {"logp_replay", *_VERSIONS})
            column = "logp_replay" if versions else "policy_version and trainer_version, or logp_replay"
            notes.append(f"to split it, log {column}: {how}")
        return cls(
            tuple(int(b) for b in bins), known_lags, method, inside.by_position, tokens, parts(whole[None]), drawn,
            tuple(notes),
        )  # fmt: skip


def _left_out(n: Floats, no_bin: Any, no_lag: Any) -> list[str]:
    reasons = (("entropy", no_bin), ("lag (a weight version is missing)", no_lag))
    return [f"{n[at].sum():,.0f} counted tokens have no {what} and are not used" for what, at in reasons if at.any()]


def _dense(
    columns: Mapping[str, Floats], names: Sequence[str], shape: tuple[int, ...], axes: Sequence[Floats]
) -> Floats:
    """Return the sums by cluster, shape (C, product of `shape`)."""
    cells = int(np.prod(shape))
    if not cells:
        return np.zeros((0, 0))
    pools = CLUSTERS
    while pools > 256 and pools * cells > _MAX_CELLS:
        pools //= 2
    clusters, row = np.unique(columns["cluster"] % pools, return_inverse=True)
    place = [np.searchsorted(axis, columns[k]) for axis, k in zip(axes, (POSITION, BIN, "lag"), strict=True)]
    flat = np.ravel_multi_index((row, *place), (len(clusters), *shape[1:]))
    size = len(clusters) * cells // len(names)
    sums = [np.bincount(flat, weights=columns[name], minlength=size).reshape(len(clusters), -1) for name in names]
    dense: Floats = np.stack(sums, axis=1, dtype=np.float64).reshape(len(clusters), cells)
    return dense


def spread(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return standard error and 95 % percentile interval over replicates, NaN where half of them are."""
    known = np.isfinite(values).mean(axis=0) > 0.5
    se, low, high = (np.full(values.shape[1:], np.nan) for _ in range(3))
    if known.any():
        kept = values[:, known]
        se[known] = np.nanstd(kept, axis=0, ddof=1)
        low[known], high[known] = np.nanpercentile(kept, _INTERVAL, axis=0)
    return se, low, high
