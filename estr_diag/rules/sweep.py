"""Sweep: what a rule does at every value of one parameter, in one scan where the rule has a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from estr_diag.errors import UsageError, nearest
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import KEPT, MAX_RULES, UNDECIDED, Decisions, needs
from estr_diag.rules.error_table import ASSUMPTIONS, EXACT_SUMS, NUMBERS, Bools, ErrorTable, pooled
from estr_diag.rules.language.plan import Plan, plan
from estr_diag.rules.language.sql import literal
from estr_diag.rules.language.tree import Compare, Logic, Number
from estr_diag.rules.score import Score, score_of
from estr_diag.stats.bootstrap import REPLICATES, SEED
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.engine import Request

CELL = "sweep_cell"
_SUMS = ("n", "sum_delta2", "sum_k3")
MAX_VALUES = 200


@dataclass(frozen=True, slots=True)
class Sweep:
    """The trade-off curve of one rule along one parameter: one row a value and method.

    How to read it: along the curve noise admitted falls and exploration masked rises. The better of two families is
    the one whose curve lies lower at equal kept share, whatever the defaults. A knee, where noise stops falling and
    exploration goes on rising, is where to stop tightening.

    Parameters
    ----------
    rule
        What to sweep.
    parameter
        Which parameter moves.
    values
        Its values, ascending.
    grid
        Entropy bins of the lag contrast; None for a log without entropy.
    by_score
        Read all decisions off the rule's score in one scan where it has one; otherwise each value has a bit of its
        own. Both give the same numbers.
    """

    rule: Rule
    parameter: str
    values: tuple[float, ...]
    grid: EntropyGrid | None = None
    by_score: bool = True
    replicates: int = REPLICATES // 4
    seed: int = SEED
    name: ClassVar[str] = "sweep"

    def __post_init__(self) -> None:
        if not self.values or len(self.values) > MAX_VALUES:
            raise UsageError(f"a sweep over {len(self.values)} values; expected 1 to {MAX_VALUES}")
        if list(self.values) != sorted(set(self.values)) or not all(map(math.isfinite, self.values)):
            raise UsageError(f"values of {self.parameter}: expected finite numbers in ascending order")

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rule."""
        return needs((self.rule,)) | (frozenset({"entropy"}) if self.grid is not None else frozenset())

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule at each value."""
        return tuple(self.rule.with_parameters({self.parameter: value}) for value in self.values)

    def _score(self, present: frozenset[str]) -> Score | None:
        score = score_of(self.rule, self.parameter, present)
        return score if self.by_score else None

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, bin, lag, and how many of the values keep the token."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY}
        if self.grid is not None:
            keys["entropy_bin"] = self.grid.sql()
        if present >= {"policy_version", "trainer_version"}:
            keys["lag"] = "lag"
        measures = [*_SUMS, *(EXACT_SUMS if "logp_replay" in present else ())]
        if "advantage" in present:
            measures.append("sum_abs_advantage")
        score = self._score(present)
        if score is not None:
            view, cell = scored(score, self.rule, self.values)
            return (Request("sweep_0", {**keys, CELL: cell}, tuple(measures), view),)
        out = []
        for i, chunk in enumerate(_chunks(self.rules)):
            decisions = Decisions.of(chunk, present)
            out.append(Request(f"sweep_{i}", {**keys, **decisions.keys()}, tuple(measures), decisions.plan.view))
        return tuple(out)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return sums by pool of sequences, bin, moved or not, and decision, of every scan."""
        sums = (*_SUMS, *(("sum_abs_advantage",) if "advantage" in present else ()))
        binned = self.grid is not None
        if (score := self._score(present)) is not None:
            one = pooled(scans["sweep_0"], (CELL,), sums, present, binned=binned)
            return f"select *, {str(score.keeps_small).lower()} as keeps_small from ({one})"
        parts = []
        for i, _ in enumerate(_chunks(self.rules)):
            one = pooled(scans[f"sweep_{i}"], (KEPT, UNDECIDED), sums, present, binned=binned)
            parts.append(f"select {i} as chunk, * from ({one})")
        return " union all ".join(parts)

    def finish(self, result: Result) -> Result:
        """Form the numbers of each value."""
        rows: list[dict[str, Any]] = []
        notes: list[str] = []
        for i, rule in enumerate(self.rules):
            part, kept, decided = self._decided(result.table, i)
            table = ErrorTable.of(part)
            shared = {"rule": rule.label, "value": self.values[i], **_shares(part, kept, decided)}
            methods = table.methods
            rows += [
                {**shared, "method": m} | table.errors(kept, decided, m, replicates=self.replicates, seed=self.seed)
                for m in methods
            ] or [{**shared, "method": "none"}]
            if i == 0:
                notes += [f"method {m}; assumed: {ASSUMPTIONS[m]}" for m in methods] + table.not_told()
        parameters = {"rule": self.rule.label, "parameter": self.parameter, "values": list(self.values)}
        return Result(
            self.name, pa.Table.from_pylist(rows, schema=_SCHEMA), parameters, result.provenance, tuple(notes)
        )

    def _decided(self, table: pa.Table, i: int) -> tuple[pa.Table, Bools, Bools]:
        if CELL in table.column_names:
            cells = table[CELL].to_pylist()
            decided = np.array([c is not None for c in cells], dtype=bool)
            first = np.array([len(self.values) if c is None else c for c in cells], dtype=np.int64)
            # Cells count from the tightest value; the values ascend.
            place = i if not len(table) or table["keeps_small"][0].as_py() else len(self.values) - 1 - i
            return table, first <= place, decided
        chunk, bit = divmod(i, MAX_RULES)
        part = table.filter(pa.array(np.asarray(table["chunk"]) == chunk)) if len(table) else table
        kept, undecided = (part[name].to_numpy() >> bit & 1 for name in (KEPT, UNDECIDED))
        return part, kept == 1, undecided == 0


def scored(score: Score, rule: Rule, values: Sequence[float]) -> tuple[str, str]:
    """Return a view with the rule's score beside each token, and a cell number over it.

    The cell of a token is the index of the first of the values, from the tightest, that keeps it; their number where
    none does; null where the rule is undecided.
    """
    found: Plan = plan([score.value, score.rest])
    both = Logic("and", (score.rest, Compare("<=", score.value, Number(0.0))))
    known = f"({found.decision(both, rule.dtype)}) is not null"
    value = found.decision(score.value, rule.dtype)
    view = f"""select *, {known} as sweep_known, {found.decision(score.rest, rule.dtype)} as sweep_rest,
    ({value})::double as sweep_score from ({found.view or "select * from tok"})"""
    if score.logarithm and values[0] <= 0:
        raise UsageError(f"rule '{rule.key}' takes the logarithm of this parameter; expected values above 0")
    tightest_first = values if score.keeps_small else tuple(reversed(values))
    bounds = [f"ln({literal(v)})" if score.logarithm else literal(v) for v in tightest_first]
    # NaN stands above everything in SQL, and no value keeps it.
    guard = "" if score.keeps_small else f"when isnan(sweep_score) then {len(values)} "
    arms = " ".join(f"when sweep_score {score.operator} {b} then {i}" for i, b in enumerate(bounds))
    cell = f"case when not sweep_known then null when not sweep_rest then {len(values)} {guard}{arms} else {len(values)} end"
    return view, f"{cell}::integer"


def _chunks(rules: Sequence[Rule]) -> list[tuple[Rule, ...]]:
    return [tuple(rules[i : i + MAX_RULES]) for i in range(0, len(rules), MAX_RULES)]


def _shares(part: pa.Table, kept: Bools, decided: Bools) -> dict[str, Any]:
    n, square, k3 = (part[name].to_numpy().astype(np.float64) for name in _SUMS)
    kept = kept & decided
    pools, pool = np.unique(part["pool"].to_numpy(), return_inverse=True)
    per_kept = np.bincount(pool[kept], weights=n[kept], minlength=len(pools))
    per_decided = np.bincount(pool[decided], weights=n[decided], minlength=len(pools))
    whole, total = per_decided.sum(), per_kept.sum()
    share = total / whole if whole else None
    clusters = int(np.count_nonzero(per_decided))
    se = None
    if share is not None and clusters > 1:
        spread = ((per_kept - share * per_decided) ** 2).sum() * clusters / (clusters - 1)
        se = float(np.sqrt(spread) / whole)
    advantage = None
    if "sum_abs_advantage" in part.column_names:
        mass = np.nan_to_num(part["sum_abs_advantage"].to_numpy().astype(np.float64))
        advantage = float(mass[kept].sum() / mass[decided].sum()) if mass[decided].sum() else None
    return {
        "n": int(n.sum()), "kept_tokens": int(total), "masked_tokens": int(whole - total),
        "undecided_tokens": int(n.sum() - whole), "kept_share": share, "kept_share_se": se,
        "kept_mean_sq_delta": float(square[kept].sum() / total) if total else None,
        "kept_kl_k3": float(k3[kept].sum() / total) if total else None, "kept_advantage_share": advantage,
    }  # fmt: skip


_SCHEMA = pa.schema(
    [("rule", pa.string()), ("value", pa.float64()), ("method", pa.string())]
    + [(k, pa.int64()) for k in ("n", "kept_tokens", "masked_tokens", "undecided_tokens")]
    + [
        (k, pa.float64())
        for k in ("kept_share", "kept_share_se", "kept_mean_sq_delta", "kept_kl_k3", "kept_advantage_share")
    ]
    + [(f"{name}{end}", pa.float64()) for name in NUMBERS for end in ("", "_low", "_high")]
    + [("coverage", pa.float64())]
)


def parse_grid(text: str) -> tuple[float, ...]:
    """Read ``0.25:16:log``, ``0:1:lin:11`` or ``0.1,0.2,0.5``.

    Raises
    ------
    UsageError
        Another form, or values that do not ascend.
    """
    how = "write it as 0.25:16:log, 0:1:lin:11 or 0.1,0.2,0.5"
    try:
        if ":" not in text:
            values = tuple(float(v) for v in text.split(","))
        else:
            low, high, kind, *number = text.split(":")
            n = int(number[0]) if number else 25
            if kind not in ("log", "lin") or len(number) > 1 or n < 2:
                raise ValueError
            spaced = np.geomspace if kind == "log" else np.linspace
            if kind == "log" and not float(low) > 0:
                raise UsageError(f"grid {text!r}: a logarithmic grid begins above 0")
            values = tuple(float(f"{v:.12g}") for v in spaced(float(low), float(high), n))
    except ValueError:
        raise UsageError(f"grid {text!r}: {how}") from None
    if not all(map(math.isfinite, values)) or any(b <= a for a, b in pairwise(values)):
        raise UsageError(f"grid {text!r}: expected ascending, finite numbers; {how}")
    if len(values) > MAX_VALUES:
        raise UsageError(f"grid {text!r} has {len(values)} values; at most {MAX_VALUES}")
    return values


def default_grid(rule: Rule, parameter: str) -> tuple[float, ...]:
    """Return 25 values from a sixteenth to sixteen times a parameter's own value.

    Raises
    ------
    UsageError
        The rule has no such parameter, or it is not above 0 and so has no scale of its own.
    """
    if parameter not in rule.parameters:
        known = nearest(parameter, rule.parameters) if rule.parameters else "it has none"
        raise UsageError(f"rule '{rule.key}' has no parameter '{parameter}'; {known}")
    value = float(rule.parameters[parameter])
    if value <= 0:
        raise UsageError(f"{parameter} of rule '{rule.key}' is {value:g}: name the values with --grid")
    # Some parameters make sense beyond 1 only: the widest band, say.
    low = value / 16 if value <= 1 or rule.name not in ("band",) else 1 + (value - 1) / 16
    return tuple(float(f"{v:.12g}") for v in np.geomspace(low, value * 16, 25))
