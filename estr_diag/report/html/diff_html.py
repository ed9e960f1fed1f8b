"""The page of ``estr-diag diff``: what changed first, then every number on both sides."""

from __future__ import annotations

from typing import Any

from estr_diag.report import diff_page as words
from estr_diag.report.diff_document import DiffDocument
from estr_diag.report.html import page
from estr_diag.report.html.tables import of_cells


def render(d: DiffDocument) -> str:
    """Return the page; it stands alone, as the report does."""
    sections: list[dict[str, Any]] = []
    if d.changed:
        sections.append({"title": "What changed most", "detail": "by |z|", "table": of_cells(words.changes(d.changed))})
    sections += [
        {"title": heading, "detail": detail, "table": of_cells(table)}
        for heading, detail, table in words.sections(d, True)
    ]
    differ = [(name, a, b) for name, a, b in words.facts(d)]
    return page.render(
        "diff.html", version=d.estr_diag, title="estr-diag diff", verdict=d.verdict, changed=bool(d.changed),
        sides=[{"letter": letter, "source": side.source, "facts": words.about(side)} for letter, side in (("A", d.a), ("B", d.b))],
        sections=sections, facts=of_cells((("fact", "A", "B"), list(differ))) if differ else None,
        missing=[f"{names}: {why}. To get it: {how}" for names, why, how in words.not_compared(d)], notes=d.notes,
    )  # fmt: skip
