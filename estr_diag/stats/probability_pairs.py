"""Pairs of probabilities of the sampled token, counted in cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from estr_diag.result import Result
from estr_diag.schema import quote_ident
from estr_diag.store.engine import Request


@dataclass(frozen=True, slots=True)
class ProbabilityPairs:
    """How many tokens have which probability under either engine, on a square grid.

    How to read it: tokens on the diagonal agree. Off it, the shape names the cause: an S is a temperature on one side,
    all on one side is renormalisation, arms along the axes are single wrong entries.

    Parameters
    ----------
    cells
        Cells a side; cell i holds probabilities from i / cells to (i + 1) / cells.
    """

    cells: int = 60
    name: ClassVar[str] = "probability_pairs"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines."""
        return frozenset({"logp_infer", "logp_train"})

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for counts by pair of cells, in a scan of its own: few groups, and no other sums."""
        keys = {
            f"{side}_cell": f"greatest(least(floor(p_{side} * {self.cells}), {self.cells - 1}), 0)::integer"
            for side in ("infer", "train")
        }
        return (Request("probability_pairs", keys, ("n",)),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row a cell that holds tokens."""
        return f"""
select infer_cell, train_cell, sum(n)::bigint as n
from {quote_ident(scans["probability_pairs"])}
group by 1, 2
order by 1, 2"""

    def finish(self, result: Result) -> Result:
        """Return the counts as they are."""
        return Result(self.name, result.table, {"cells": self.cells}, result.provenance)
