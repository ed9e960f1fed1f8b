"""Replay: what each rule would have kept, for many rules in the one scan that the statistics share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from estr_diag.errors import UsageError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.engine import Request

MAX_RULES = 32
"""Decisions are packed into the bits of one integer key."""

KEPT, UNDECIDED = "rule_kept", "rule_undecided"


def decision_keys(rules: tuple[Rule, ...]) -> dict[str, str]:
    """Return two packed keys: bit i is rule i's decision; SQL null means undecided."""
    if len(rules) > MAX_RULES:
        raise UsageError(f"{len(rules)} rules at once; at most {MAX_RULES}")
    kept = " + ".join(f"case when {rule.sql()} then {1 << i} else 0 end" for i, rule in enumerate(rules))
    undecided = " + ".join(f"case when ({rule.sql()}) is null then {1 << i} else 0 end" for i, rule in enumerate(rules))
    return {KEPT: f"({kept})::bigint", UNDECIDED: f"({undecided})::bigint"}


@dataclass(frozen=True, slots=True)
class Replay:
    """Kept, masked and undecided tokens of each rule, overall or by one breakdown.

    How to read it: `masked_share` is rho_mask. `kept_mean_sq_delta` far below the log's own while little
    is masked means that few tokens rule the gap. Compare rules at equal masked share before preferring one.

    Parameters
    ----------
    rules
        What to replay; each must find its columns in the log.
    grid
        Entropy bins, for the breakdown by bin.
    by
        ``overall``, ``entropy_bin``, ``lag`` or ``step``.
    """

    rules: tuple[Rule, ...]
    grid: EntropyGrid | None = None
    by: str = "overall"
    name: ClassVar[str] = "replay"

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rules and of the breakdown."""
        breakdown = {"lag": frozenset({"policy_version", "trainer_version"}), "entropy_bin": frozenset({"entropy"})}
        pair = frozenset({"logp_infer", "logp_train"})
        return pair.union(breakdown.get(self.by, frozenset()), *(rule.needs for rule in self.rules))

    @property
    def _keys(self) -> dict[str, str]:
        if self.by == "entropy_bin":
            if self.grid is None:
                raise UsageError("a breakdown by entropy bin needs a grid")
            return {"entropy_bin": self.grid.sql()}
        return {} if self.by == "overall" else {self.by: self.by}

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by packed decision."""
        measures = ["n", "sum_delta2", "sum_k3"] + (["sum_abs_advantage"] if "advantage" in present else [])
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, **self._keys, **decision_keys(self.rules)}
        return (Request("sums", keys, tuple(measures)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row a rule and group."""
        by = "".join(f"{quote_ident(k)}, " for k in self._keys)
        advantage = "sum(sum_abs_advantage)" if "advantage" in present else "null::double"
        kept_advantage = f"{advantage} filter (kept)" if "advantage" in present else "null::double"
        rules = ", ".join(f"({i}, 1::bigint << {i})" for i in range(len(self.rules)))
        order = ", ".join(["rule", *(f"{quote_ident(k)} nulls last" for k in self._keys)])
        return f"""
with partials as (
    select p.*, r.rule, p.{KEPT} & r.bit > 0 as kept, p.{UNDECIDED} & r.bit > 0 as undecided
    from {quote_ident(scans["sums"])} p, (values {rules}) as r(rule, bit)
)
select rule, {by}
    sum(n)::bigint as n,
    coalesce(sum(n) filter (kept), 0)::bigint as kept_tokens,
    coalesce(sum(n) filter (undecided), 0)::bigint as undecided_tokens,
    sum(sum_delta2) as sq_delta,
    sum(sum_delta2) filter (kept) as kept_sq_delta,
    sum(sum_k3) filter (kept) as kept_k3,
    {advantage} as abs_advantage,
    {kept_advantage} as kept_abs_advantage
from partials
group by rule{("," + by.rstrip(", ")) if by else ""}
order by {order}"""

    def finish(self, result: Result) -> Result:
        """Turn sums into shares and means, rule numbers into names."""
        rows = []
        found = result.table.to_pylist()
        if not found and not self._keys:
            # Without counted tokens there is no group to report, and still a row for each rule.
            found = [dict.fromkeys(result.table.column_names) | _NOTHING | {"rule": i} for i in range(len(self.rules))]
        for row in found:
            n, kept, undecided = row["n"], row["kept_tokens"], row["undecided_tokens"]
            decided = n - undecided
            rows.append(
                {
                    "rule": self.rules[row["rule"]].label,
                    **{k: row[k] for k in self._keys},
                    "n": n,
                    "kept_tokens": kept,
                    "masked_tokens": decided - kept,
                    "undecided_tokens": undecided,
                    "kept_share": _share(kept, decided),
                    "masked_share": _share(decided - kept, decided),
                    "kept_advantage_share": _share(row["kept_abs_advantage"] or 0.0, row["abs_advantage"]),
                    "kept_sq_delta_share": _share(row["kept_sq_delta"] or 0.0, row["sq_delta"]),
                    "kept_mean_sq_delta": _share(row["kept_sq_delta"], kept),
                    "kept_kl_k3": _share(row["kept_k3"], kept),
                }
            )
        keys = [(k, pa.int32()) for k in self._keys]
        counts = [(k, pa.int64()) for k in ("n", "kept_tokens", "masked_tokens", "undecided_tokens")]
        shares = (
            "kept_share",
            "masked_share",
            "kept_advantage_share",
            "kept_sq_delta_share",
            "kept_mean_sq_delta",
            "kept_kl_k3",
        )
        schema = pa.schema([("rule", pa.string()), *keys, *counts, *((k, pa.float64()) for k in shares)])
        parameters = {"rules": [rule.label for rule in self.rules], "by": self.by}
        return Result(self.name, pa.Table.from_pylist(rows, schema=schema), parameters, result.provenance)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How pairs of rules agree, token by token.

    How to read it: `kappa` is Cohen's kappa of the two keep decisions (1 agree, 0 as by chance); it is null
    when a rule keeps all or nothing, since chance then explains everything. Undecided tokens of
    either rule are left out of their pair.
    """

    rules: tuple[Rule, ...]
    name: ClassVar[str] = "agreement"

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rules."""
        return frozenset({"logp_infer", "logp_train"}).union(*(rule.needs for rule in self.rules))

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for counts by packed decision: pairs are formed on a few hundred patterns, never on tokens."""
        return (Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY, **decision_keys(self.rules)}, ("n",)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return the count of each decision pattern."""
        return f"""
select {KEPT}, {UNDECIDED}, sum(n)::bigint as n from {quote_ident(scans["sums"])} group by 1, 2 order by 1, 2"""

    def finish(self, result: Result) -> Result:
        """Form every pair."""
        patterns = [(r[KEPT], r[UNDECIDED], r["n"]) for r in result.table.to_pylist()]
        rows = []
        for i, a in enumerate(self.rules):
            for j, b in enumerate(self.rules[i + 1 :], start=i + 1):
                cells = [0, 0, 0, 0]
                for kept, undecided, n in patterns:
                    if not (undecided >> i & 1 or undecided >> j & 1):
                        cells[(kept >> i & 1) * 2 + (kept >> j & 1)] += n
                neither, only_b, only_a, both = cells
                rows.append(
                    {
                        "a": a.label, "b": b.label, "both": both, "only_a": only_a, "only_b": only_b, "neither": neither,
                        "jaccard": _share(both, both + only_a + only_b), "kappa": _kappa(both, only_a, only_b, neither),
                    }
                )  # fmt: skip
        counts = [(k, pa.int64()) for k in ("both", "only_a", "only_b", "neither")]
        schema = pa.schema(
            [("a", pa.string()), ("b", pa.string()), *counts, ("jaccard", pa.float64()), ("kappa", pa.float64())]
        )
        return Result(
            self.name,
            pa.Table.from_pylist(rows, schema=schema),
            {"rules": [r.label for r in self.rules]},
            result.provenance,
        )


_NOTHING = {"n": 0, "kept_tokens": 0, "undecided_tokens": 0}


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _kappa(both: int, only_a: int, only_b: int, neither: int) -> float | None:
    n = both + only_a + only_b + neither
    if not n:
        return None
    a, b = (both + only_a) / n, (both + only_b) / n
    chance = a * b + (1 - a) * (1 - b)
    return None if chance == 1 else ((both + neither) / n - chance) / (1 - chance)
