"""Replay: what each rule would have kept, for many rules in the one scan that the statistics share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from estr_diag.errors import UsageError
from estr_diag.expressions import POSITION, POSITION_BUCKET
from estr_diag.result import Result
from estr_diag.rules.agreement import share
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import KEPT, UNDECIDED, Decisions, needs, weight_columns
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.engine import Request

_BY: dict[str, frozenset[str]] = {
    "overall": frozenset(), "entropy_bin": frozenset({"entropy"}), "step": frozenset(), "position": frozenset(),
    "lag": frozenset({"policy_version", "trainer_version"}),
}  # fmt: skip
"""Breakdown -> columns that it needs."""

_SUMS = ("sum_delta2", "sum_abs_delta", "sum_k3", "sum_ratio", "sum_ratio2")


@dataclass(frozen=True, slots=True)
class Replay:
    """Kept, masked and undecided tokens of each rule, overall or by one breakdown.

    How to read it: `masked_share` is rho_mask. `kept_mean_sq_delta` far below the log's own while little
    is masked means that few tokens rule the gap. `ess` is the share of the decided tokens that the rule's
    weights leave effective (a masked token has weight 0), `kept_ratio_ess` that of the importance ratios of the
    kept tokens. Compare rules at equal masked share before preferring one.

    Parameters
    ----------
    rules
        What to replay; each must find its columns in the log.
    grid
        Entropy bins, for the breakdown by bin.
    by
        ``overall``, ``entropy_bin``, ``lag``, ``step`` or ``position`` (log2 buckets of the position in the
        response: bucket k holds 2^k - 1 to 2^(k+1) - 2).
    """

    rules: tuple[Rule, ...]
    grid: EntropyGrid | None = None
    by: str = "overall"
    name: ClassVar[str] = "replay"

    def __post_init__(self) -> None:
        if self.by not in _BY:
            raise UsageError(f"a comparison by '{self.by}'; expected one of {', '.join(_BY)}")
        if self.by == "entropy_bin" and self.grid is None:
            raise UsageError("a breakdown by entropy bin needs a grid")

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rules and of the breakdown."""
        return needs(self.rules) | _BY[self.by]

    @property
    def _keys(self) -> dict[str, str]:
        if self.grid is not None and self.by == "entropy_bin":
            return {"entropy_bin": self.grid.sql()}
        return {"lag": {"lag": "lag"}, "step": {"step": "step"}, "position": {POSITION: POSITION_BUCKET}}.get(
            self.by, {}
        )

    @property
    def _apart(self) -> str:
        return "position" if self.by == "position" else ""

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by packed decision."""
        decisions = Decisions.of(self.rules, present)
        measures = ["n", *_SUMS, *(["sum_abs_advantage"] if "advantage" in present else [])]
        weights = decisions.weight_measures() if self.by == "overall" else ()
        return (
            decisions.request({SEQUENCE_KEY: SEQUENCE_KEY, **self._keys}, (*measures, *weights), apart=self._apart),
        )

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row a rule and group, with the standard error by sequence of the kept share."""
        decisions = Decisions.of(self.rules, present)
        by = "".join(f"{quote_ident(k)}, " for k in self._keys)
        groups = f"rule{', ' + by.rstrip(', ') if by else ''}"
        sums = {name: f"sum({name})" for name in _SUMS}
        sums["sum_abs_advantage"] = "sum(sum_abs_advantage)" if "advantage" in present else "null::double"
        per_sequence = ", ".join(
            f"{_among(sql, 'not undecided')} as {name}, {_among(sql, 'kept')} as kept_{name}"
            for name, sql in sums.items()
        )
        totals = ", ".join(f"sum({p}{name}) as {p}{name}" for name in sums for p in ("", "kept_"))
        rules = ", ".join(f"({i}, 1::bigint << {i})" for i in range(len(self.rules)))
        weights = "".join(f", {m.how}({m.name}) as {m.name}" for m in decisions.weight_measures()) if not by else ""
        order = ", ".join(["rule", *(f"{quote_ident(k)} nulls last" for k in self._keys)])
        source = quote_ident(scans[decisions.scan(self._apart)])
        weighted = f"cross join (select true{weights} from {source})" if weights else ""
        picked = "".join(f", any_value({m.name}) as {m.name}" for m in decisions.weight_measures()) if weights else ""
        finest = ["n", *(name for name, sql in sums.items() if not sql.startswith("null"))]
        rolled = ", ".join(f"sum({name}) as {name}" for name in finest)
        return f"""
with rolled as (
    -- Other statistics of the scan have cut the partials finer; once for each rule that would be many rows.
    select {SEQUENCE_KEY}, {by}{", ".join(decisions.packed)}, {rolled}
    from {source}
    group by all
),
partials as (
    select p.*, r.rule, p.{KEPT} & r.bit > 0 as kept, p.{UNDECIDED} & r.bit > 0 as undecided
    from rolled p, (values {rules}) as r(rule, bit)
),
per_sequence as (
    select {SEQUENCE_KEY}, {groups}, sum(n) as tokens, coalesce(sum(n) filter (kept), 0) as kept_n,
        coalesce(sum(n) filter (undecided), 0) as undecided_n, {per_sequence}
    from partials
    group by {SEQUENCE_KEY}, {groups}
),
centred as (
    select *, tokens - undecided_n as decided_n,
        sum(kept_n) over w / nullif(sum(tokens - undecided_n) over w, 0) as overall_share
    from per_sequence
    window w as (partition by {groups})
)
select {groups},
    sum(tokens)::bigint as n,
    sum(kept_n)::bigint as kept_tokens,
    sum(undecided_n)::bigint as undecided_tokens,
    count(*) filter (tokens > 0) as n_sequences,
    count(*) filter (kept_n > 0) as kept_sequences,
    count(*) filter (tokens > 0 and kept_n = tokens) as whole_sequences,
    sqrt(sum(power(kept_n - overall_share * decided_n, 2))
         * count(*) filter (decided_n > 0) / nullif(count(*) filter (decided_n > 0) - 1, 0))
        / nullif(sum(decided_n), 0) as kept_share_se,
    {totals}{picked}
from centred {weighted}
group by {groups}
order by {order}"""

    def finish(self, result: Result) -> Result:
        """Turn sums into shares and means, rule numbers into names."""
        found = result.table.to_pylist()
        if not found and not self._keys:
            # Without counted tokens there is no group to report, and still a row for each rule.
            found = [dict.fromkeys(result.table.column_names) | _NOTHING | {"rule": i} for i in range(len(self.rules))]
        rows = [self._row(row) for row in found]
        keys = [(k, pa.int32()) for k in self._keys]
        schema = pa.schema(
            [("rule", pa.string()), *keys, *((k, pa.int64()) for k in _COUNTS), *((k, pa.float64()) for k in _VALUES)]
        )
        parameters = {"rules": [rule.label for rule in self.rules], "by": self.by}
        return Result(self.name, pa.Table.from_pylist(rows, schema=schema), parameters, result.provenance)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        n, kept, undecided, i = row["n"], row["kept_tokens"], row["undecided_tokens"], row["rule"]
        decided = n - undecided
        columns = weight_columns(self.rules, i)
        w, w2, w_max = (row.get(name) for name in columns)
        if columns[0] not in row:
            w = w2 = float(kept)
            w_max = 1.0 if kept else None
        return {
            "rule": self.rules[i].label,
            **{k: row[k] for k in (*self._keys, "n", "kept_tokens", "undecided_tokens", "n_sequences")},
            "masked_tokens": decided - kept,
            "kept_sequences": row["kept_sequences"],
            "whole_sequences": row["whole_sequences"],
            "kept_share": share(kept, decided),
            "kept_share_se": row["kept_share_se"],
            "masked_share": share(decided - kept, decided),
            "kept_advantage_share": share(row["kept_sum_abs_advantage"] or 0.0, row["sum_abs_advantage"]),
            "kept_sq_delta_share": share(row["kept_sum_delta2"] or 0.0, row["sum_delta2"]),
            "kept_mean_abs_delta": share(row["kept_sum_abs_delta"], kept),
            "kept_mean_sq_delta": share(row["kept_sum_delta2"], kept),
            "kept_kl_k3": share(row["kept_sum_k3"], kept),
            "kept_ratio_ess": _ess(row["kept_sum_ratio"], row["kept_sum_ratio2"], kept),
            "weight_mean": share(w, kept),
            "weight_max": w_max,
            "ess": _ess(w, w2, decided),
        }


_COUNTS = (
    "n", "kept_tokens", "masked_tokens", "undecided_tokens", "n_sequences", "kept_sequences", "whole_sequences",
)  # fmt: skip
_VALUES = (
    "kept_share", "kept_share_se", "masked_share", "kept_advantage_share", "kept_sq_delta_share", "kept_mean_abs_delta",
    "kept_mean_sq_delta", "kept_kl_k3", "kept_ratio_ess", "weight_mean", "weight_max", "ess",
)  # fmt: skip
_NOTHING = dict.fromkeys(
    ("n", "kept_tokens", "undecided_tokens", "n_sequences", "kept_sequences", "whole_sequences"), 0
)


def _among(sql: str, which: str) -> str:
    return "null::double" if sql.startswith("null") else f"{sql} filter ({which})"


def _ess(total: float | None, squares: float | None, n: int) -> float | None:
    return None if total is None or not squares or not n else total * total / (n * squares)
