"""Tables that commands print: what was recognised, what was read, which formats exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from estr_diag.ingestion.discovery import Discovery
from estr_diag.ingestion.pipeline import IngestSummary
from estr_diag.ingestion.registry import adapters
from estr_diag.result import Result
from estr_diag.schema import SEQUENCES, TOKENS

_WANTED = ("loss_mask", "logp_infer", "logp_train", "entropy", "policy_version")
"""What a report can say most with; steps and trainer versions mostly follow from where a file lies."""


def discovery(found: Discovery) -> RenderableType:
    """Say which file each adapter took, why, and where every canonical column comes from."""
    parts: list[RenderableType] = []
    for unit in found.units:
        probe = unit.probe
        step = "" if probe.step is None else f", step {probe.step}"
        parts.append(
            Text.assemble((str(unit.path), "bold"), f"\n  {probe.adapter}, layout {probe.layout}{step}: {probe.why}")
        )
        for companion in unit.companions:
            parts.append(Text(f"  joined with {companion}"))
        parts.append(Padding(_columns(dict(probe.columns)), (0, 0, 0, 2)))
        missing = [name for name in _WANTED if name not in probe.columns]
        if missing:
            parts.append(Text(f"  not in this file: {', '.join(missing)}", style="yellow"))
    for skipped in found.refused:
        parts.append(Text.assemble((str(skipped.path), "bold"), ("\n  not usable: ", "yellow"), skipped.reason))
    for path in found.ignored:
        parts.append(Text(f"{path}\n  no token log; left out", style="dim"))
    return Group(*parts)


def discovery_json(found: Discovery) -> dict[str, Any]:
    """Return the same as JSON values."""
    return {
        "units": [
            {
                "path": str(u.path), "adapter": u.probe.adapter, "layout": u.probe.layout, "why": u.probe.why,
                "step": u.probe.step, "columns": dict(u.probe.columns), "companions": [str(c) for c in u.companions],
            }
            for u in found.units
        ],
        "refused": [{"path": str(s.path), "adapter": s.adapter, "reason": s.reason} for s in found.refused],
        "ignored": [str(p) for p in found.ignored],
    }  # fmt: skip


def summary(done: IngestSummary, store: Path) -> RenderableType:
    """Say what came of each file."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header, justify in (("file", "left"), ("status", "left"), ("sequences", "right"), ("tokens", "right")):
        table.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
    remarks: list[RenderableType] = []
    for source in done.sources:
        table.add_row(str(source.path), source.status, f"{source.n_sequences:,}", f"{source.n_tokens:,}")
        said = [*source.notes, *(f"{n:,} {reason}" for reason, n in source.counts)]
        remarks += [Text(f"{source.path.name}: {remark}", style="yellow") for remark in said]
    total = f"{store}: {done.n_sequences:,} sequences and {done.n_tokens:,} response tokens added"
    return Group(table, *remarks, Text(total, style="bold"))


def summary_json(done: IngestSummary, store: Path) -> dict[str, Any]:
    """Return the same as JSON values."""
    return {
        "store": str(store),
        "n_sequences": done.n_sequences,
        "n_tokens": done.n_tokens,
        "sources": [
            {
                "path": str(s.path), "status": s.status, "adapter": s.adapter, "layout": s.layout,
                "n_sequences": s.n_sequences, "n_tokens": s.n_tokens, "columns": dict(s.columns),
                "counts": dict(s.counts), "notes": list(s.notes),
            }
            for s in done.sources
        ],
    }  # fmt: skip


def formats() -> RenderableType:
    """List adapters and layouts."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("--format", "layout", "what it is", "gives"):
        table.add_column(header, overflow="fold")
    for name, adapter in adapters().items():
        for i, layout in enumerate(adapter.layouts):
            gives = (
                ", ".join(c for c in layout.columns() if c in TOKENS or c in SEQUENCES)
                or "no token data: refused, with the reason"
            )
            table.add_row(name if i == 0 else "", layout.name, layout.describes, gives)
    return table


def formats_json() -> list[dict[str, Any]]:
    """Return the same as JSON values."""
    return [
        {
            "adapter": name,
            "trainer": adapter.title,
            "layouts": [{"name": x.name, "describes": x.describes, "columns": x.columns()} for x in adapter.layouts],
        }
        for name, adapter in adapters().items()
    ]


def table(result: Result) -> RenderableType:
    """Draw a result."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in result.table.column_names:
        drawn.add_column(Text(name), overflow="fold")
    for row in result.rows():
        drawn.add_row(
            *(Text("–" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v)) for v in row.values())
        )
    return drawn


def _columns(columns: dict[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for name in columns:
        grid.add_row(Text(name), Text("←", style="dim"), Text(columns[name]))
    return grid
