"""The page that ``estr-diag explain NAME`` prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from estr_diag.stats.explain import Explanation


def render(explanation: Explanation) -> RenderableType:
    """Draw an explanation."""
    e = explanation
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for label, value in (
        ("formula", e.formula),
        ("with", e.edge),
        ("unit", e.unit),
        ("mean", e.aggregation),
        ("good", e.direction),
        ("same as", e.same_as),
        ("differs", e.differs),
        ("checked", _checked(e.executed)),
    ):
        if value:
            facts.add_row(Text(label), Text(value))
    for yardstick in e.yardsticks:
        facts.add_row(Text("yardstick"), Text(f"{yardstick.value} ({yardstick.source})"))
    for column, how in (e.needs or {}).items():
        facts.add_row(Text("needs"), Text(f"{column}: {how}" if how else column))
    parts: list[RenderableType] = [Text.assemble((e.name, "bold"), f": {e.meaning}"), Padding(facts, (1, 0, 0, 0))]
    if e.aliases:
        parts.append(Padding(_aliases(e), (1, 0, 0, 0)))
    return Group(*parts)


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Return the same as JSON values."""
    return explanation.to_json()


def _checked(executed: bool | None) -> str | None:
    if executed is None:
        return None
    return "equal to the framework's own code on a test log" if executed else "read in the framework's source, not run"


def _aliases(explanation: Explanation) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("elsewhere", "edge", "over", "difference"):
        table.add_column(header, overflow="fold")
    for alias in explanation.aliases:
        table.add_row(Text(alias.name), alias.edge, alias.over, Text(alias.differs))
    return table
