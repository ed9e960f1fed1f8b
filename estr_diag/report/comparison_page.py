"""The page of ``estr-diag compare``, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.report import rule_tables
from estr_diag.report.rule_document import CompareDocument, RuleGroup, RuleResult
from estr_diag.report.terminal import cells, lines, not_computed, title
from estr_diag.report.verdict import number

_MAX_STEPS = 12


def render(d: CompareDocument) -> RenderableType:
    """Return the page."""
    return Group(*_parts(d))


def _parts(d: CompareDocument) -> Iterator[RenderableType]:
    yield Text.assemble(("estr-diag compare", "bold"), "  ", d.source or "")
    if d.rules:
        n = d.rules[0].n
        yield Text(f"{n:,} counted tokens of {d.rules[0].n_sequences:,} sequences")
        yield title("What each rule keeps")
        yield cells(rule_tables.kept(d.rules), left=1)
        yield cells(rule_tables.details(d.rules), left=1)
        yield from lines(rule_tables.trainer(d.reproduces_trainer))
    for method, table in rule_tables.errors(d.rules):
        yield title("The two errors of a mask", f"{method}; 95 % intervals from whole sequences")
        yield cells(table, left=1)
    for what, groups in _breakdowns(d):
        yield title(f"Masked share by {what}")
        for start in range(0, len(d.rules), rule_tables.MAX_COLUMNS):
            some = slice(start, start + rule_tables.MAX_COLUMNS)
            part = [(label, entries[some]) for label, entries in groups]
            yield cells(rule_tables.masked_by(part, d.rules[some], what), left=1)
    if d.agreement:
        yield title("Agreement of the rules", "pairs that differ most first")
        yield cells(rule_tables.agreement(d.agreement, d.rules), left=2)
    yield from not_computed(d.not_computed)
    if d.notes:
        yield title("Notes")
        yield from (Padding(Text(f"· {note}"), (0, 0, 0, 2)) for note in d.notes)


def _breakdowns(d: CompareDocument) -> Iterator[tuple[str, list[tuple[str, list[RuleGroup]]]]]:
    """Yield each breakdown that the log allows: heading, and label and one entry a rule of each group."""
    if not d.rules:
        return
    first = d.rules[0]
    bins = [f"H {number(b.lo)} to {number(b.hi)}" for b in d.entropy_bins]
    named: Sequence[tuple[str, str, list[str]]] = (
        ("entropy", "by_entropy_bin", [bins[g.bin] for g in first.by_entropy_bin]),
        ("lag", "by_lag", ["?" if g.lag is None else str(g.lag) for g in first.by_lag]),
        ("step", "by_step", ["?" if g.step is None else str(g.step) for g in first.by_step]),
        ("position", "by_position", [_positions(g.position) for g in first.by_position]),
    )
    for what, field, labels in named:
        if len(labels) < 2:
            continue
        groups = [(label, [_group(rule, field, i) for rule in d.rules]) for i, label in enumerate(labels)]
        yield what, groups if what != "step" or len(groups) <= _MAX_STEPS else groups[:3] + groups[-3:]


def _group(rule: RuleResult, field: str, i: int) -> RuleGroup:
    found: RuleGroup = getattr(rule, field)[i]
    return found


def _positions(bucket: int | None) -> str:
    return "?" if bucket is None else f"{2**bucket - 1:,} to {2 ** (bucket + 1) - 2:,}"
