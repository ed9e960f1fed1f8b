"""Sweep: what a rule does at every value of one parameter, in one scan where the rule has a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from estr_diag.errors import UsageError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import MAX_RULES, require
from estr_diag.rules.error_table import NUMBERS
from estr_diag.rules.fitted import fitted
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.rules.replay import Replay
from estr_diag.rules.sweep_values import MAX_VALUES
from estr_diag.stats.bootstrap import REPLICATES
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, run


def sweep(
    store: Store,
    rule: Rule,
    parameter: str,
    values: Sequence[float],
    grid: EntropyGrid | None = None,
    provenance: Mapping[str, Any] | None = None,
    *,
    replicates: int = REPLICATES // 4,
) -> Result:
    """Return the trade-off curve of one rule along one parameter: one row a value and method.

    How to read it: along the curve noise admitted falls and exploration masked rises. The better of two families is
    the one whose curve lies lower at equal kept share, whatever the defaults. A knee, where noise stops falling and
    exploration goes on rising, is where to stop tightening. A rule that only weighs moves `ess` and `weight_mean`.

    Parameters
    ----------
    parameter
        Which parameter moves.
    values
        Its values, ascending.
    grid
        Entropy bins of the lag contrast; None for a log without entropy.
    replicates
        Of the cluster bootstrap, at each value.

    Raises
    ------
    UsageError
        No such parameter, or values that do not ascend.
    MissingColumnError
        The log does not allow the rule.
    """
    if not 0 < len(values) <= MAX_VALUES:
        raise UsageError(f"a sweep over {len(values)} values; expected 1 to {MAX_VALUES}")
    if list(values) != sorted(set(values)) or not all(map(math.isfinite, values)):
        raise UsageError(f"values of {parameter}: expected finite numbers in ascending order")
    require(rule, store.present())
    (rule,) = fitted((rule,), store)
    rows: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}
    for start in range(0, len(values), MAX_RULES):
        part = values[start : start + MAX_RULES]
        rules = tuple(rule.with_parameters({parameter: value}) for value in part)
        wanted: dict[str, Statistic] = {"kept": Replay(rules), "errors": MaskErrors(rules, grid, replicates)}
        found = run(store, wanted, provenance).results
        rows += _joined(part, found["kept"].table.to_pylist(), found["errors"].table.to_pylist())
        notes, facts = found["errors"].notes, found["kept"].provenance
    parameters = {"rule": rule.label, "parameter": parameter, "values": list(values)}
    return Result("sweep", pa.Table.from_pylist(rows, schema=_SCHEMA), parameters, facts, notes)


def _joined(
    values: Sequence[float], kept: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row a value and method; both statistics have their rows in the order of the values."""
    methods = [errors[i : i + len(values)] for i in range(0, len(errors), len(values))]
    rows = []
    for i, (value, row) in enumerate(zip(values, kept, strict=True)):
        shared = {name: row[name] for name in ("rule", *_COUNTS, *_KEPT)} | {"value": value}
        rows += [{**shared, **method[i]} for method in methods] or [{**shared, "method": "none"}]
    return rows


_COUNTS = ("n", "kept_tokens", "masked_tokens", "undecided_tokens")
_KEPT = (
    "kept_share", "kept_share_se", "kept_mean_sq_delta", "kept_kl_k3", "kept_advantage_share", "weight_mean", "ess",
)  # fmt: skip
_SCHEMA = pa.schema(
    [("rule", pa.string()), ("value", pa.float64()), ("method", pa.string())]
    + [(name, pa.int64()) for name in _COUNTS]
    + [(name, pa.float64()) for name in _KEPT]
    + [(f"{name}{end}", pa.float64()) for name in NUMBERS for end in ("", "_low", "_high")]
    + [("coverage", pa.float64())]
)
