"""Detectors that read sums by step, all from one scan of the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from estr_diag.checks.base import Finding
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, relation

PAIR = frozenset({"logp_infer", "logp_train"})
VERSIONS = frozenset({"policy_version", "trainer_version"})

Rows = Sequence[Mapping[str, Any]]
"""One row a step, in order: ``step`` and the sums that detectors asked for."""


class SharedCheck(Protocol):
    """A detector over sums by step."""

    id: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    explained_by: ClassVar[tuple[str, ...]]
    """Other checks whose cause leaves this signature too."""

    def sums(self, present: frozenset[str]) -> Mapping[str, str]:
        """Return what it needs: name -> SQL over one row of ``tok``, to be summed."""
        ...

    def judge(self, rows: Rows) -> Finding:
        """Return what the sums say."""
        ...


def run_shared(checks: Sequence[SharedCheck], store: Store, present: frozenset[str]) -> list[Finding]:
    """Scan the tokens once, and let every detector judge."""
    possible = [check for check in checks if check.needs <= present]
    sums = {f"{check.id}_{name}": sql for check in possible for name, sql in check.sums(present).items()}
    rows: list[dict[str, Any]] = []
    if sums:
        listed = ", ".join(f"coalesce(sum({sql}), 0)::double as {name}" for name, sql in sums.items())
        rows = store.rows(
            f"{relation(present)} select step, {listed} from viewed group by step order by step nulls last"
        )
    findings = [_judged(check, rows, present) for check in checks]
    found = {finding.id for finding in findings if finding.verdict == "found"}
    return [_told_apart(f, found & set(check.explained_by)) for f, check in zip(findings, checks, strict=True)]


def _told_apart(finding: Finding, others: set[str]) -> Finding:
    """Say that another finding explains this one as well: a cause is named once."""
    if finding.verdict != "found" or not others:
        return finding
    other = ", ".join(sorted(others))
    return replace(
        finding, verdict="cannot_tell", spoils=(),
        cause=f"{finding.cause}; but {other} leaves the same trace", next_action=f"resolve {other} first, and look again",
    )  # fmt: skip


def _judged(check: SharedCheck, rows: Rows, present: frozenset[str]) -> Finding:
    if lacking := check.needs - present:
        why = f"this log has no {', '.join(sorted(lacking))}"
        return Finding(check.id, "cannot_tell", "info", "", why, how_to_get(lacking))
    own = f"{check.id}_"
    mine = [{"step": r["step"]} | {k.removeprefix(own): v for k, v in r.items() if k.startswith(own)} for r in rows]
    return check.judge(mine)


def total(rows: Rows, name: str) -> float:
    """Return a sum over all steps."""
    return float(sum(row[name] for row in rows))


def same_weights(present: frozenset[str]) -> str:
    """Return the condition that both engines had the same weights; every token where the log has no versions."""
    return "lag = 0" if present >= VERSIONS else "true"
