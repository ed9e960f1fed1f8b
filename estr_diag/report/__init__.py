"""Reports: one document, drawn for the terminal, as Markdown, or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError
from estr_diag.report.build import build
from estr_diag.report.document import CompareDocument, Document


@dataclass(frozen=True, slots=True)
class Report:
    """A finished report."""

    document: Document

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
