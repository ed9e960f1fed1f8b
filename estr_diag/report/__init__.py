"""Reports: one document, drawn for the terminal, as Markdown, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError
from estr_diag.report.build import build
from estr_diag.report.document import Document
from estr_diag.report.rule_document import CompareDocument
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.stats.grid import Bins
from estr_diag.store.database import Store


@dataclass(frozen=True, slots=True)
class Report:
    """A finished report.

    Attributes
    ----------
    document
        Everything that it says, as data.
    results
        The tables behind it, for pictures: ``report.results["bins"]``.
    """

    document: Document
    results: Mapping[str, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, rules: Sequence[Rule], *, source: str, bins: Bins | None = None) -> Report:
        """Compute the report of a log."""
        built = build(store, rules, source=source, bins=bins)
        return cls(built.document, built.results)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; obeys ``report.v1.schema.json``."""
        return self.document.model_dump(mode="json", by_alias=True)

    def to_markdown(self) -> str:
        """Return it as Markdown."""
        from estr_diag.report import markdown

        return markdown.render(self.document)

    def save(self, path: str | Path) -> Path:
        """Write it to a file; the ending chooses the form (.md or .json)."""
        target = Path(path)
        if target.suffix == ".md":
            text = self.to_markdown()
        elif target.suffix == ".json":
            text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        else:
            raise UsageError(f"{target}: a report is written as .md or .json, found {target.suffix or 'no ending'!r}")
        if not target.parent.is_dir():
            raise UsageError(f"{target.parent}: no such folder; make it first")
        target.write_text(text, "utf-8")
        return target

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


__all__ = ["CompareDocument", "Document", "Report", "build"]
