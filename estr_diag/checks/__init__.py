"""Detectors of broken columns: run before any statistic, since a mask cures none of them."""

from __future__ import annotations

from estr_diag.checks.alignment import ShiftedColumn
from estr_diag.checks.base import Check, Finding
from estr_diag.checks.columns import CopiedColumn, ImpossibleVersions, PositiveLogProbs
from estr_diag.store.database import Store

CHECKS: tuple[Check, ...] = (CopiedColumn(), ShiftedColumn(), PositiveLogProbs(), ImpossibleVersions())
"""In the order in which they are run and shown."""


def run_checks(store: Store) -> list[Finding]:
    """Run every check on a store."""
    present = frozenset(store.column_counts())
    return [check.run(store, present) for check in CHECKS]


__all__ = ["CHECKS", "Finding", "run_checks"]
