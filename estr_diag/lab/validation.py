"""Estimators held against the truth of a log that has ``logp_replay``: what each says, and what is so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from estr_diag.errors import MissingColumnError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.stats.contrast import Method
from estr_diag.stats.decomposition import Decomposition, NoiseShare
from estr_diag.stats.grid import ValueGrid
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, run

NEEDS = frozenset({"logp_infer", "logp_train", "logp_replay", "entropy", "policy_version", "trainer_version"})

VARIANTS: Mapping[str, tuple[Method, bool]] = {
    "lag contrast": ("lag_contrast", False),
    "lag contrast, by position": ("lag_contrast", True),
    "extrapolated": ("extrapolated", False),
    "extrapolated, by position": ("extrapolated", True),
}
"""What is held against the exact split: method, and whether inside position buckets."""


def split_cells(store: Store, grid: ValueGrid) -> Result:
    """Return the exploration of each cell of entropy bin and lag > 0 by every estimator, beside the exact one.

    Returns
    -------
    Result
        One row an estimator and cell with enough tokens to read (not ``small``): estimate, its 95 % interval, `exact`
        (E[d^2] of the same cell), `inside`.

    Raises
    ------
    MissingColumnError
        The log has no truth.
    """
    _require(store)
    wanted = {name: Decomposition(grid, *variant) for name, variant in VARIANTS.items()}
    found = run(store, {"exact": Decomposition(grid, "exact"), **wanted}).results
    exact = {(r["entropy_bin"], r["lag"]): r["exploration"] for r in found["exact"].table.to_pylist()}
    rows = [
        {
            "estimator": name,
            **{k: r[k] for k in ("entropy_bin", "mean_entropy", "lag", "n", "exploration", "ci_low", "ci_high")},
            "exact": exact[r["entropy_bin"], r["lag"]],
            "inside": r["ci_low"] <= exact[r["entropy_bin"], r["lag"]] <= r["ci_high"],
        }
        for name in wanted
        for r in found[name].table.to_pylist()
        if r["lag"] and r["lag"] > 0 and not r["small"] and r["ci_low"] is not None
    ]
    return Result("split_cells", pa.Table.from_pylist(rows), {"cells": len(rows)}, {})


def noise_shares(store: Store, grid: ValueGrid) -> Result:
    """Return the share of the squared deviation that is noise, by every estimator and exactly."""
    _require(store)
    wanted = {name: NoiseShare(grid, *variant) for name, variant in VARIANTS.items()}
    found = run(store, {"exact": NoiseShare(grid, "exact"), **wanted}).results
    rows = [
        {
            "estimator": name,
            **{k: result.table.to_pylist()[0][k] for k in ("noise_share", "ci_low", "ci_high", "n", "n_used")},
        }
        for name, result in found.items()
    ]
    return Result("noise_shares", pa.Table.from_pylist(rows), {}, {})


def rule_errors(store: Store, rules: Sequence[Rule], grid: ValueGrid) -> Result:
    """Return noise admitted and exploration masked of each rule, by the lag contrast and exactly."""
    _require(store)
    rows: dict[str, dict[str, Any]] = {}
    for row in run(store, {"it": MaskErrors(tuple(rules), grid)}).results["it"].table.to_pylist():
        at = rows.setdefault(row["rule"], {"rule": row["rule"]})
        for name in ("noise_admitted", "exploration_masked"):
            at[name if row["method"] == "lag_contrast" else f"{name}_exact"] = row[name]
    return Result("rule_errors", pa.Table.from_pylist(list(rows.values())), {}, {})


def _require(store: Store) -> None:
    if lacking := NEEDS - store.present():
        raise MissingColumnError("a comparison with the truth", sorted(lacking), how_to_get(lacking))
