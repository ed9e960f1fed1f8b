"""Detectors of broken columns: run before any statistic, since a mask cures none of them."""

from __future__ import annotations

from collections.abc import Sequence

from estr_diag.checks.alignment import ShiftedColumn
from estr_diag.checks.base import LEVELS, Check, Finding
from estr_diag.checks.columns import CopiedColumn, ImpossibleVersions, PositiveLogProbs
from estr_diag.checks.engine import ForcedTokens, UndeliveredWeights
from estr_diag.checks.semantics import Renormalised, Temperature
from estr_diag.checks.shared import SharedCheck, run_shared
from estr_diag.store.database import Store

CHECKS: tuple[Check, ...] = (CopiedColumn(), ShiftedColumn(), PositiveLogProbs(), ImpossibleVersions())
SHARED: tuple[SharedCheck, ...] = (ForcedTokens(), Temperature(), Renormalised(), UndeliveredWeights())
"""In the order in which they are run and shown; the second kind reads one scan."""


def run_checks(store: Store) -> list[Finding]:
    """Run every check on a store."""
    present = store.present()
    return [check.run(store, present) for check in CHECKS] + run_shared(SHARED, store, present)


def by_id() -> dict[str, type[Check] | type[SharedCheck]]:
    """Return the class of each check by its id."""
    return {**{check.id: type(check) for check in CHECKS}, **{check.id: type(check) for check in SHARED}}


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings worst first; those of one kind stay in the order in which causes are looked for."""
    order = ("found", "cannot_tell", "clear")
    return sorted(
        findings, key=lambda f: (order.index(f.verdict), -LEVELS.index(f.level) if f.verdict == "found" else 0)
    )


__all__ = ["CHECKS", "SHARED", "Finding", "by_id", "ranked", "run_checks"]
