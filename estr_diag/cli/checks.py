"""Findings on a terminal: what was found first, then what could not be told, then what is clear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import getdoc

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.checks import by_id
from estr_diag.checks.base import Finding
from estr_diag.cli.tokens import visible
from estr_diag.report.verdict import number

_MARKS = {"found": ("✗", "bold red"), "cannot_tell": ("?", "yellow"), "clear": ("✓", "green")}


def render(findings: Sequence[Finding], source: str, *, whole: bool = False) -> RenderableType:
    """Return the list; `whole` adds what each check measures, and its evidence."""
    return Group(*_parts(findings, source, whole))


def _parts(findings: Sequence[Finding], source: str, whole: bool) -> Iterator[RenderableType]:
    yield Text.assemble(("estr-diag check", "bold"), f"  {visible(source, 200)}")
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _MARKS}
    yield Text(f"{counts['found']} found, {counts['cannot_tell']} cannot tell, {counts['clear']} clear", style="dim")
    for f in findings:
        mark, style = _MARKS[f.verdict]
        level = f"  {f.level}" if f.verdict == "found" else ""
        yield Padding(
            Text.assemble((f"{mark} {f.id}", style), level, (f"  {visible(f.where, 80)}", "dim")), (1, 0, 0, 0)
        )
        sizes = [f"size {number(f.size)}"] * (f.size is not None) + [f"a sound log: {number(f.control)}"] * (
            f.control is not None
        )
        yield Padding(Text(visible(f.cause, 600)), (0, 0, 0, 2))
        if f.verdict == "found" or whole:
            if sizes:
                yield Padding(Text("; ".join(sizes), style="dim"), (0, 0, 0, 2))
            if f.next_action:
                yield Padding(Text.assemble(("next: ", "bold"), visible(f.next_action, 600)), (0, 0, 0, 2))
        if whole:
            yield Padding(Text(getdoc(by_id()[f.id]) or ""), (1, 0, 0, 2))
            for row in f.evidence:
                said = ", ".join(f"{k} {number(v) if isinstance(v, float) else v}" for k, v in row.items())
                yield Padding(Text(visible(said, 300), style="dim"), (0, 0, 0, 2))
