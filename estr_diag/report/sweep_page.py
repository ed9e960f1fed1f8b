"""The page of ``estr-diag sweep``: the trade-off curve, and thresholds by meaning."""

from __future__ import annotations

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
from estr_diag.rules.thresholds import Threshold


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
    kept_share: float | None
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
    families: tuple[Result, Result | None] | None,
    source: str | None,
) -> SweepDocument:
    """Gather the curve, thresholds and families.

    Parameters
    ----------
    curve
        Of `Sweep`.
    thresholds
        Why each was asked for, and what was found.
    families
        What several rules keep at one share, and their errors.
    """
    points: dict[float, dict[str, Any]] = {}
    for row in curve.rows():
        point = points.setdefault(row["value"], {**row, "errors": []})
        if row["method"] != "none":
            point["errors"].append(row)
    kept, errors = families or (None, None)
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for row in errors.rows() if errors is not None else ():
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
                {"rule": r["rule"], "kept_share": r["kept_share"], "errors": by_rule.get(r["rule"], [])}
                for r in (kept.rows() if kept is not None else ())
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
    for method in dict.fromkeys(e.method for f in d.families for e in f.errors):
        yield title("Rules at one kept share", METHODS[method])
        rows: list[tuple[str, ...]] = [
            (f.rule, share(f.kept_share), estimate(e, "noise_admitted"), estimate(e, "exploration_masked"))
            for f in d.families
            for e in f.errors
            if e.method == method
        ]
        yield cells((("rule", "kept", "noise admitted", "exploration masked"), rows), left=1)
    if d.notes:
        yield title("Notes")
        yield from (Padding(Text(f"· {note}"), (0, 0, 0, 2)) for note in d.notes)


def _curve(d: SweepDocument, method: str | None) -> Cells:
    rows: list[tuple[str, ...]] = []
    for point in d.points:
        found = next((e for e in point.errors if e.method == method), None)
        told = (
            ("–", "–") if found is None else (estimate(found, "noise_admitted"), estimate(found, "exploration_masked"))
        )
        rows.append((number(point.value), share(point.kept_share), *told, number(point.kept_mean_sq_delta)))
    return (d.parameter, "kept", "noise admitted", "exploration masked", "E[δ²] kept"), rows


def _threshold(found: ThresholdFound) -> str:
    if found.value is None:
        return f"{found.why}: {found.note}"
    reached = "" if found.kept_share is None else f" (keeps {found.kept_share:.2%} of {found.n:,} tokens)"
    note = f"; {found.note}" if found.note else ""
    return f"{found.why}: {found.parameter} = {found.value:.6g}{reached}{note}"
