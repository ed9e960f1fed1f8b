"""Agreement: how pairs of rules decide, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import KEPT, UNDECIDED, Decisions, needs
from estr_diag.schema import quote_ident
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.store.engine import Request


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
        return needs(self.rules)

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for counts by packed decision: pairs are formed on a few hundred patterns, never on tokens."""
        return (Decisions.of(self.rules, present).request({SEQUENCE_KEY: SEQUENCE_KEY}, ("n",)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return the count of each decision pattern."""
        decisions = Decisions.of(self.rules, present)
        table = quote_ident(scans[decisions.scan()])
        return f"select {', '.join(decisions.packed)}, sum(n)::bigint as n from {table} group by 1, 2 order by 1, 2"

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
                        "jaccard": share(both, both + only_a + only_b), "kappa": kappa(both, only_a, only_b, neither),
                    }
                )  # fmt: skip
        counts = [(k, pa.int64()) for k in ("both", "only_a", "only_b", "neither")]
        schema = pa.schema(
            [("a", pa.string()), ("b", pa.string()), *counts, ("jaccard", pa.float64()), ("kappa", pa.float64())]
        )
        parameters = {"rules": [r.label for r in self.rules]}
        return Result(self.name, pa.Table.from_pylist(rows, schema=schema), parameters, result.provenance)


def share(part: float | None, whole: float | None) -> float | None:
    """Return part / whole, or None where there is no whole."""
    return None if part is None or not whole else part / whole


def kappa(both: int, only_a: int, only_b: int, neither: int) -> float | None:
    """Return Cohen's kappa of two decisions; None where chance alone explains the agreement."""
    n = both + only_a + only_b + neither
    if not n:
        return None
    a, b = (both + only_a) / n, (both + only_b) / n
    chance = a * b + (1 - a) * (1 - b)
    return None if chance == 1 else ((both + neither) / n - chance) / (1 - chance)
