"""What differs between two logs, as data: all of ``estr-diag diff --json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from estr_diag.report.rule_document import Part

Fact = str | float | int | None


class DiffSide(Part):
    """One of the two: a log, or a window of its steps."""

    source: str
    window: Annotated[str | None, Field(description="steps that were asked for, both ends included; null: all")]
    n_tokens: int
    n_counted: int
    n_sequences: int
    steps: list[int] | None
    versions: list[int] | None
    lags: dict[str, int]
    columns: Annotated[dict[str, int], Field(description="column -> values it holds")]
    run: Annotated[dict[str, Fact], Field(description="facts of the run")]


class SideValue(Part):
    """A number on one side."""

    value: float | None
    se: Annotated[float | None, Field(description="standard error by sequence")]
    n: Annotated[int | None, Field(description="tokens, or sequences of a metric that is one value a sequence")]


class DiffRow(Part):
    """One number on both sides."""

    name: str
    unit: str
    direction: Annotated[str, Field(description="which way is good: lower, higher, near 0, near 1, none")]
    a: SideValue
    b: SideValue
    difference: Annotated[float | None, Field(description="b - a")]
    se: Annotated[float | None, Field(description="sqrt(se_a^2 + se_b^2)")]
    se_alike: Annotated[
        float | None,
        Field(description="its error if the sequences of both sides scattered alike; larger beside rare events"),
    ]
    se_steps: Annotated[
        float | None, Field(description="the same with a step as the unit; null with fewer than 5 steps a side")
    ]
    low: Annotated[
        float | None, Field(description="of the 95 % interval of this row alone: Student's t, the widest of the three")
    ]
    high: float | None
    z: Annotated[float | None, Field(description="difference / that error; null where neither side varies")]
    df: Annotated[float | None, Field(description="Welch's degrees of freedom")]
    p: float | None
    p_adjusted: Annotated[float | None, Field(description="by the correction, over all rows that were compared")]
    relative: Annotated[float | None, Field(description="difference / |a|: the size of the effect; null from 0")]
    verdict: Literal["changed", "not_told_apart", "not_compared"]
    why: Annotated[str, Field(description="why it was not compared")] = ""
    how_to_get_it: str = ""


class DiffBin(DiffRow):
    """E[delta^2] in one entropy bin; the edges are those of both sides."""

    lo: float
    hi: float | None


class Change(Part):
    """Something that changed."""

    kind: Literal["metric", "split", "entropy_bin", "rule"]
    name: str
    a: float | None
    b: float | None
    relative: float | None
    z: float | None


class Differs(Part):
    """A fact of the runs that is not the same; null: not known."""

    fact: str
    a: Fact
    b: Fact


class NoError(Part):
    """A metric without a standard error: an extreme, or a function of several sums. Shown, and not judged."""

    name: str
    unit: str
    a: float | None
    b: float | None


class Correction(Part):
    """How many rows were judged together, and how."""

    method: Literal["holm"] = "holm"
    level: float
    comparisons: int


class DiffDocument(Part):
    """What ``estr-diag diff --json`` prints."""

    schema_: Annotated[Literal["estr-diag/diff/v1"], Field(alias="schema")] = "estr-diag/diff/v1"
    estr_diag: str
    verdict: str
    a: DiffSide
    b: DiffSide
    shared_sequences: Annotated[int, Field(description="sequences of a that are in b as well")]
    correction: Correction
    changed: Annotated[list[Change], Field(description="by |z|, largest first")]
    metrics: list[DiffRow]
    split: Annotated[list[DiffRow], Field(description="engine noise and exploration over the whole side")]
    split_method: Literal["exact", "lag_contrast", "extrapolated", "none"]
    entropy_bins: list[DiffBin]
    rules: Annotated[list[DiffRow], Field(description="share of the decided tokens that a rule masks")]
    facts: list[Differs]
    only_a: Annotated[list[str], Field(description="columns that b lacks")]
    only_b: Annotated[list[str], Field(description="columns that a lacks")]
    without_error: list[NoError]
    notes: list[str]

    def rows(self) -> list[tuple[str, DiffRow]]:
        """Return every row with its kind, in the order of the page."""
        kinds = (("metric", self.metrics), ("split", self.split), ("entropy_bin", self.entropy_bins))
        listed: list[tuple[str, DiffRow]] = [(kind, row) for kind, rows in kinds for row in rows]
        return listed + [("rule", row) for row in self.rules]


def diff_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of ``estr-diag diff --json``."""
    schema = DiffDocument.model_json_schema(by_alias=True)
    schema["required"] = sorted({*schema.get("required", []), "schema"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/diff/v1",
        **schema,
        "title": "estr-diag diff",
        "description": "Numbers are JSON numbers or null, never NaN. Keys may be added.",
    }
