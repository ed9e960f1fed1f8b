"""Reports: one document, drawn for the terminal, as Markdown, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.report.build import build
from estr_diag.report.document import Document
from estr_diag.report.rule_document import CompareDocument
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.score import score_of
from estr_diag.rules.sweep import sweep
from estr_diag.rules.sweep_values import over_shares
from estr_diag.rules.token_list import token_list
from estr_diag.rules.token_windows import Window, windows
from estr_diag.stats.grid import Bins, fitting_grid
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
    windows
        Looks up what stands around the worst tokens, for the page; the log must still be open.
    curve
        Sweeps the threshold of the first rule that has one, for the page; likewise.
    """

    document: Document
    results: Mapping[str, Result] = field(default_factory=dict)
    windows: Callable[[], Sequence[Window]] = field(default=tuple, repr=False, compare=False)
    curve: Callable[[], Result | None] = field(default=lambda: None, repr=False, compare=False)

    @classmethod
    def of(cls, store: Store, rules: Sequence[Rule], *, source: str, bins: Bins | None = None) -> Report:
        """Compute the report of a log."""
        built = build(store, rules, source=source, bins=bins)
        return cls(
            built.document,
            built.results,
            lambda: worst_tokens(store, built.rules),
            lambda: tradeoff(store, built.rules),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; obeys ``report.v1.schema.json``."""
        return self.document.model_dump(mode="json", by_alias=True)

    def to_markdown(self) -> str:
        """Return it as Markdown."""
        from estr_diag.report import markdown

        return markdown.render(self.document)

    def to_html(self) -> str:
        """Return it as one page that needs no other file and no network."""
        import duckdb

        from estr_diag.report.html import report_page

        windows: Sequence[Window] = ()
        results, why = dict(self.results), ""
        try:
            windows = self.windows()
            if (curve := self.curve()) is not None:
                results["tradeoff_curve"] = curve
        except duckdb.ConnectionException:
            why = "not shown: the log was closed before the page was written"
        except MissingColumnError as error:
            why = str(error)
        return report_page.render(self.document, results, windows, why)

    def save(self, path: str | Path) -> Path:
        """Write it to a file; the ending chooses the form (.html, .md or .json)."""
        target = Path(path)
        if target.suffix == ".html":
            text = self.to_html()
        elif target.suffix == ".md":
            text = self.to_markdown()
        elif target.suffix == ".json":
            text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        else:
            raise UsageError(
                f"{target}: a report is written as .html, .md or .json, found {target.suffix or 'no ending'!r}"
            )
        if not target.parent.is_dir():
            raise UsageError(f"{target.parent}: no such folder; make it first")
        target.write_text(text, "utf-8", "backslashreplace")
        return target

    def __repr__(self) -> str:
        return f"<Report of {self.document.log.source}: {self.document.verdict}>"

    def _repr_html_(self) -> str:
        from estr_diag.report.html import report_page

        return report_page.cell(self.document)


def worst_tokens(store: Store, rules: Sequence[Rule], top: int = 40) -> Sequence[Window]:
    """Return windows around the counted tokens with the largest S, with the decisions of some rules."""
    listed = token_list(store, top=top)
    return windows(store, listed, [rule for rule in rules if rule.name != "none"])


def tradeoff(store: Store, rules: Sequence[Rule]) -> Result | None:
    """Return the sweep of the first rule whose thresholds can be read off a score, or None."""
    present = store.present()
    swept = next((r for r in rules if r.score and score_of(r, r.score, present) is not None), None)
    if swept is None:
        return None
    return sweep(store, swept, swept.score, over_shares(store, swept, swept.score), fitting_grid(store, present))


__all__ = ["CompareDocument", "Document", "Report", "build"]
