"""The two errors of a mask: noise admitted and exploration masked, by every method that the log allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import KEPT, UNDECIDED, Decisions, needs
from estr_diag.schema import quote_ident
from estr_diag.stats.bootstrap import REPLICATES, SEED, Floats, resampled_sums
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.contrast import divide
from estr_diag.stats.grid import EntropyGrid
from estr_diag.stats.split_log import spread
from estr_diag.store.engine import Request

ErrorMethod = Literal["exact", "lag_contrast"]

ASSUMPTIONS: Mapping[ErrorMethod, str] = {
    "exact": "none: logp_replay gives noise and exploration of each token",
    "lag_contrast": (
        "given the entropy bin, engine noise does not depend on lag. Noise is judged where it stands alone, at lag 0; "
        "where exploration adds to it a mask drops more of both, so both shares are above the exact ones"
    ),
}

POOLS = 512
"""Sequences are pooled by number into at most so many clusters, so that the bootstrap costs the same for any log."""

_VERSIONS = frozenset({"policy_version", "trainer_version"})
_EXACT = ("n_replay", "sum_xi2", "sum_d2")
_NUMBERS = ("noise_admitted", "exploration_masked", "exploration_masked_tokens")


@dataclass(frozen=True, slots=True)
class MaskErrors:
    """Which share of the engine noise a rule lets through, and which share of the exploration it removes.

    How to read it: a good mask has both small. `noise_admitted` is the share of the noise's second moment on
    kept tokens; keeping everything has 1 and 0. `exploration_masked` is the share of the exploration's second
    moment on masked tokens, `exploration_masked_tokens` the share of tokens of lag > 0 that is masked beyond
    what the mask rate of lag-0 tokens predicts. A rule that ignores what it masks has noise admitted = kept
    share = 1 - exploration masked. Where the exploration is not above 0 beyond sampling error, the share
    of it that is masked cannot be told and is null.

    Parameters
    ----------
    rules
        What to judge.
    grid
        Entropy bins, inside which the contrast is formed.
    replicates, seed
        Of the cluster bootstrap.

    Notes
    -----
    Exact: sum over kept of xi^2 / sum of xi^2, and sum over masked of d^2 / sum of d^2. Lag contrast: per bin, from
    lag-0 tokens, whose delta is pure noise, weighted to the whole log's bin counts; and for tokens of lag > 0,
    what is masked beyond the lag-0 rate. A rule acts on delta, so noise at lag k is masked more often than at lag 0, and a
    masked token of lag k loses its noise too: on simulated logs with as much exploration as noise the contrast gave
    0.96 to 1.00 where 0.88 of the noise was admitted, and 0.48 to 0.94 where 0.40 to 0.82 of the exploration was
    masked. Read it as an upper estimate, and compare rules by it. Undecided tokens take no part. `coverage` is the share of the decided tokens
    on which the estimate rests (logp_replay present; in a bin that has lag-0 tokens).
    """

    rules: tuple[Rule, ...]
    grid: EntropyGrid
    replicates: int = REPLICATES // 2
    seed: int = SEED
    name: ClassVar[str] = "mask_errors"

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rules, and the entropy."""
        return needs(self.rules) | {"entropy"}

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, bin, lag and decision."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, "entropy_bin": self.grid.sql()}
        if present >= _VERSIONS:
            keys["lag"] = "lag"
        measures = ("n", "sum_delta2", *(_EXACT if "logp_replay" in present else ()))
        return (Decisions.of(self.rules, present).request(keys, measures),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return sums by pool of sequences, bin, moved or not, and decision."""
        moved = "case when lag is null then null else lag > 0 end" if present >= _VERSIONS else "null::boolean"
        # A negative lag is a wrong label: it is neither the reference nor moved.
        known = "and (lag is null or lag >= 0)" if present >= _VERSIONS else ""
        exact = [f"coalesce(sum({m}), 0) as {m}" if "logp_replay" in present else f"0e0 as {m}" for m in _EXACT]
        return f"""
select {SEQUENCE_KEY} % {POOLS} as pool, entropy_bin, {moved} as moved, {KEPT}, {UNDECIDED},
    sum(n) as n, sum(sum_delta2) as sum_delta2, {", ".join(exact)},
    count(distinct {SEQUENCE_KEY}) as n_sequences
from {quote_ident(scans[Decisions.of(self.rules, present).scan()])}
where n > 0 {known}
group by 1, 2, 3, 4, 5
order by 1, 2, 3, 4, 5"""

    def finish(self, result: Result) -> Result:
        """Form each rule's errors by each method, with intervals from whole sequences."""
        table = _Table.of(result.table)
        rows, notes = [], []
        for method in table.methods:
            notes.append(f"method {method}; assumed: {ASSUMPTIONS[method]}")
            for i, rule in enumerate(self.rules):
                rows.append({"rule": rule.label, "method": method, **table.errors(i, method, self)})
        if "lag_contrast" not in table.methods:
            notes.append("no lag contrast: " + table.why_no_contrast)
        if "exact" not in table.methods:
            notes.append(
                "not exact: the log has no logp_replay; re-score the batch with the weights of each token's version"
            )
        parameters = {"rules": [r.label for r in self.rules], "replicates": self.replicates, "seed": self.seed}
        return Result(
            self.name, pa.Table.from_pylist(rows, schema=_SCHEMA), parameters, result.provenance, tuple(notes)
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """The partials as arrays, one entry a row."""

    pool: Any
    n_pools: int
    bin: Any
    n_bins: int
    moved: Floats
    kept: Any
    undecided: Any
    sums: Mapping[str, Floats]

    @classmethod
    def of(cls, table: pa.Table) -> _Table:
        names = ("n", "sum_delta2", *_EXACT)
        sums = {name: table[name].to_numpy().astype(np.float64) for name in names}
        moved = np.array([np.nan if v is None else float(v) for v in table["moved"].to_pylist()], dtype=np.float64)
        bins = np.array([-1 if v is None else v for v in table["entropy_bin"].to_pylist()], dtype=np.int64)
        pools, pool = np.unique(table["pool"].to_numpy(), return_inverse=True)
        _, bin_at = np.unique(bins, return_inverse=True)
        # A token without an entropy is in no bin: it can be exact, and takes no part in a contrast.
        moved[bins < 0] = np.nan
        return cls(
            pool, len(pools), bin_at, int(bin_at.max(initial=-1)) + 1, moved,
            table[KEPT].to_numpy(), table[UNDECIDED].to_numpy(), sums,
        )  # fmt: skip

    @property
    def methods(self) -> tuple[ErrorMethod, ...]:
        found: list[ErrorMethod] = ["exact"] if self.sums["n_replay"].sum() else []
        return (*found, "lag_contrast") if (self.moved == 0).any() else tuple(found)

    @property
    def why_no_contrast(self) -> str:
        if np.isnan(self.moved).all():
            return "no token has a known lag; log policy_version and trainer_version"
        return "no token has lag 0, on which the noise alone is seen"

    def errors(self, i: int, method: ErrorMethod, asked: MaskErrors) -> dict[str, Any]:
        """Return the numbers of rule i with their intervals."""
        decided = (self.undecided >> i & 1) == 0
        kept = (self.kept >> i & 1) == 1
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
            drawn = estimate(resampled_sums(per_pool, asked.replicates, asked.seed))
            _, low, high = spread(drawn)
        # The share of something that may be nothing: told only where the whole is above 0 beyond sampling error.
        if not (self.n_pools > 1 and low[3] > 0):
            value[1] = value[1] if value[3] > 0 and method == "exact" else np.nan
            low[1] = high[1] = np.nan
        total = self.sums["n"][decided].sum()
        row: dict[str, Any] = {"coverage": _number(used / total) if total else None}
        for at, name in enumerate(_NUMBERS):
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


_SCHEMA = pa.schema(
    [("rule", pa.string()), ("method", pa.string())]
    + [(f"{name}{end}", pa.float64()) for name in _NUMBERS for end in ("", "_low", "_high")]
    + [("coverage", pa.float64())]
)
