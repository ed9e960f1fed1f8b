"""The page of ``estr-diag sweep``: the trade-off curve, and thresholds by meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.report.rule_document import MaskErrorEstimate
from estr_diag.report.rule_tables import METHODS, estimate, share
from estr_diag.report.sentences import Cells
from estr_diag.report.terminal import cells, lines, title
from estr_diag.report.verdict import number
from estr_diag.result import Result
from estr_diag.rules.thresholds import EqualShare, Threshold


class SweepPoint(BaseModel):
    """What the rule does at one value of the parameter."""

    rule: str
    value: float
    n: int
    kept_tokens: int
    masked_tokens: int
    undecided_tokens: int
    kept_share: float | None
    kept_share_se: Annotated[float | None, Field(description="standard error by sequence")]
    kept_mean_sq_delta: float | None
    kept_kl_k3: float | None
    kept_advantage_share: float | None
    weight_mean: float | None
    ess: Annotated[float | None, Field(description="effective share of the decided tokens, by the rule's weights")]
    errors: list[MaskErrorEstimate]


class ThresholdFound(BaseModel):
    """A threshold chosen by meaning."""

    why: str
    rule: str
    parameter: str
    value: Annotated[float | None, Field(description="null where no value reaches the aim")]
    aim: float
    kept_share: float | None
    n: int
    note: str


class FamilyRow(BaseModel):
    """A rule brought to the common kept share."""

    rule: str
    parameter: str
    value: Annotated[float | None, Field(description="null where no value reaches the share")]
    kept_share: float | None
    note: Annotated[str, Field(description="why the share is missed, or by how much")]
    errors: list[MaskErrorEstimate]


class SweepDocument(BaseModel):
    """What ``estr-diag sweep --json`` prints."""

    schema_: Annotated[Literal["estr-diag/sweep/v1"], Field(alias="schema")] = "estr-diag/sweep/v1"
    source: str | None
    rule: str
    parameter: str
    points: list[SweepPoint]
    thresholds: list[ThresholdFound]
    families: Annotated[list[FamilyRow], Field(description="rules at one kept share")]
    notes: list[str]


def sweep_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of ``estr-diag sweep --json``."""
    schema = SweepDocument.model_json_schema(by_alias=True)
    schema["required"] = sorted({*schema.get("required", []), "schema"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/sweep/v1",
        **schema,
        "title": "estr-diag sweep",
        "description": "Numbers are JSON numbers or null, never NaN. Keys may be added.",
    }


def document(
    curve: Result,
    thresholds: list[tuple[str, Threshold]],
    families: EqualShare | None,
    source: str | None,
) -> SweepDocument:
    """Gather the curve, thresholds and families.

    Parameters
    ----------
    curve
        Of `rules.sweep.sweep`.
    thresholds
        Why each was asked for, and what was found.
    families
        Several rules at one kept share.
    """
    points: dict[float, dict[str, Any]] = {}
    for row in curve.rows():
        point = points.setdefault(row["value"], {**row, "errors": []})
        if row["method"] != "none":
            point["errors"].append(row)
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for row in families.errors.rows() if families is not None else ():
        by_rule.setdefault(row["rule"], []).append(row)
    return SweepDocument.model_validate(
        {
            "schema": "estr-diag/sweep/v1",
            "source": source,
            "rule": curve.parameters["rule"],
            "parameter": curve.parameters["parameter"],
            "points": list(points.values()),
            "thresholds": [{"why": why, **found.to_json()} for why, found in thresholds],
            "families": [
                {**found.to_json(), "errors": by_rule.get(found.rule, [])}
                for found in (families.thresholds if families is not None else ())
            ],
            "notes": list(curve.notes),
        }
    )


def render(d: SweepDocument) -> RenderableType:
    """Return the page for a terminal."""
    return Group(*_parts(d))


def _parts(d: SweepDocument) -> Iterator[RenderableType]:
    yield Text.assemble(("estr-diag sweep", "bold"), "  ", d.source or "")
    methods: list[str | None] = list(dict.fromkeys(e.method for p in d.points for e in p.errors))
    for method in methods or [None]:
        said = "the errors cannot be told from this log" if method is None else f"{METHODS[method]}; 95 % intervals"
        yield title(f"{d.rule.split(':')[0]} along {d.parameter}", said)
        yield cells(_curve(d, method))
    if d.thresholds:
        yield title("Thresholds by meaning")
        yield from lines([_threshold(t) for t in d.thresholds])
    known: list[str | None] = list(dict.fromkeys(e.method for f in d.families for e in f.errors))
    for method in known or [None] * bool(d.families):
        yield title("Rules at one kept share", "the errors cannot be told" if method is None else METHODS[method])
        yield cells((("rule", "kept", "noise admitted", "exploration masked"), _families(d, method)), left=1)
    yield from lines([f"{_short(f.rule)}: {f.note}" for f in d.families if f.note])
    if d.notes:
        yield title("Notes")
        yield from (Padding(Text(f"· {note}"), (0, 0, 0, 2)) for note in d.notes)


def _curve(d: SweepDocument, method: str | None) -> Cells:
    weighs = any(p.ess is not None and p.ess != p.kept_share for p in d.points)
    rows: list[tuple[str, ...]] = []
    for point in d.points:
        found = next((e for e in point.errors if e.method == method), None)
        told = (
            ("–", "–") if found is None else (estimate(found, "noise_admitted"), estimate(found, "exploration_masked"))
        )
        row = (number(point.value), share(point.kept_share), *told, number(point.kept_mean_sq_delta))
        rows.append((*row, share(point.ess)) if weighs else row)
    head = (d.parameter, "kept", "noise admitted", "exploration masked", "E[δ²] kept")
    return (*head, "ESS") if weighs else head, rows


def _families(d: SweepDocument, method: str | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for family in d.families:
        found = next((e for e in family.errors if e.method == method), None)
        told = ["–" if found is None else estimate(found, name) for name in ("noise_admitted", "exploration_masked")]
        rows.append((_short(family.rule), share(family.kept_share), *told))
    return rows


def _short(label: str) -> str:
    """Return a label with its numbers to six digits: thresholds that were found have sixteen."""
    return re.sub(r"(?<==)[\d.e+-]+", lambda found: f"{float(found[0]):.6g}", label)


def _threshold(found: ThresholdFound) -> str:
    if found.value is None:
        return f"{found.why}: {found.note}"
    reached = "" if found.kept_share is None else f" (keeps {found.kept_share:.2%} of {found.n:,} tokens)"
    note = f"; {found.note}" if found.note else ""
    return f"{found.why}: {found.parameter} = {found.value!r}{reached}{note}"
