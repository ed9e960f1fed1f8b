"""What is said about mask rules, as data: a part of the report, and all of ``estr-diag compare --json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """A part of a document."""

    model_config = ConfigDict(populate_by_name=True)


class RuleGroup(Part):
    """One group of a rule's breakdown."""

    n: int
    kept_tokens: int
    masked_tokens: int
    undecided_tokens: int
    kept_share: float | None
    n_sequences: int
    kept_sequences: Annotated[int, Field(description="with at least one kept token in the group")]
    kept_advantage_share: Annotated[float | None, Field(description="share of the group's sum |A| that is kept")]


class RuleBinGroup(RuleGroup):
    """One entropy bin."""

    bin: Annotated[int, Field(description="index into entropy_bins")]


class RuleLagGroup(RuleGroup):
    """One lag."""

    lag: int | None


class RuleStepGroup(RuleGroup):
    """One step."""

    step: int | None


class RulePositionGroup(RuleGroup):
    """One log2 bucket of the position in the response."""

    position: Annotated[int | None, Field(description="k: positions 2^k - 1 to 2^(k+1) - 2")]


class Kept(Part):
    """What is left after the mask."""

    mean_abs_delta: float | None
    mean_sq_delta: float | None
    kl_k3: float | None
    sq_delta_share: Annotated[float | None, Field(description="share of sum delta^2 that is kept")]
    advantage_share: Annotated[float | None, Field(description="share of sum |A| that is kept")]
    ratio_ess: Annotated[float | None, Field(description="effective share of the kept tokens' importance ratios")]


class RuleWeights(Part):
    """The rule's own weights; 1 on kept tokens where it has none."""

    mean: Annotated[float | None, Field(description="over kept tokens")]
    max: float | None
    ess: Annotated[float | None, Field(description="effective share of the decided tokens; a masked one weighs 0")]


class MaskErrorEstimate(Part):
    """The two errors of a mask by one method, with 95 % intervals from whole sequences."""

    method: Literal["exact", "lag_contrast"]
    noise_admitted: Annotated[float | None, Field(description="share of the noise's second moment on kept tokens")]
    noise_admitted_low: float | None
    noise_admitted_high: float | None
    exploration_masked: Annotated[
        float | None,
        Field(description="share of the exploration's second moment on masked tokens; null where it is not above 0"),
    ]
    exploration_masked_low: float | None
    exploration_masked_high: float | None
    exploration_masked_tokens: Annotated[
        float | None, Field(description="tokens of lag > 0 masked beyond the mask rate at lag 0, as a share")
    ]
    exploration_masked_tokens_low: float | None
    exploration_masked_tokens_high: float | None
    coverage: Annotated[float | None, Field(description="share of the decided tokens that the estimate rests on")]


class RuleResult(Part):
    """What a rule would do to this log."""

    name: str
    label: Annotated[str, Field(description="name and parameters as --rules takes them")]
    params: dict[str, float]
    keep: Annotated[str, Field(description="the condition, as text")]
    weight: Annotated[str | None, Field(description="weight of a kept token, as text; null where it is 1")]
    edge: Annotated[str, Field(description="B: train against infer, U: update against train, E: update against infer")]
    denominator: Annotated[str, Field(description="of the loss: unchanged, or shrinks to the kept tokens")]
    n: int
    kept_tokens: int
    masked_tokens: int
    undecided_tokens: Annotated[int, Field(description="a column that the rule needs is missing on the token")]
    kept_share: float | None
    kept_share_se: Annotated[float | None, Field(description="standard error by sequence")]
    masked_share: Annotated[float | None, Field(description="rho_mask")]
    n_sequences: int
    kept_sequences: Annotated[int, Field(description="sequences with at least one kept token")]
    whole_sequences: Annotated[int, Field(description="sequences of which every token is kept")]
    noise_admitted: Annotated[float | None, Field(description="by the best method")]
    exploration_masked: Annotated[float | None, Field(description="by the best method")]
    method: Literal["exact", "lag_contrast", "none"]
    errors: list[MaskErrorEstimate]
    kept: Kept
    weights: RuleWeights
    by_entropy_bin: list[RuleBinGroup]
    by_lag: list[RuleLagGroup]
    by_step: list[RuleStepGroup]
    by_position: list[RulePositionGroup]


class TrainerMatch(Part):
    """A built-in rule against the trainer's own decision."""

    rules: Annotated[list[str], Field(description="labels; several where they are one rule on this log")]
    exact: Annotated[bool, Field(description="every token is decided the same")]
    n: int
    masked: Annotated[int, Field(description="by the trainer")]
    disagree: int
    kappa: float | None


class Pair(Part):
    """Agreement of two rules."""

    a: str
    b: str
    both: int
    only_a: int
    only_b: int
    neither: int
    jaccard: float | None
    kappa: float | None


class NotComputed(Part):
    """Something that this log does not allow."""

    what: str
    why: str
    how_to_get_it: str


class Edges(Part):
    """Entropy bin of a comparison."""

    lo: float
    hi: float | None


class CompareDocument(Part):
    """What ``estr-diag compare --json`` prints."""

    schema_: Annotated[Literal["estr-diag/compare/v1"], Field(alias="schema")] = "estr-diag/compare/v1"
    source: str | None
    entropy_bins: list[Edges]
    rules: list[RuleResult]
    agreement: list[Pair]
    reproduces_trainer: list[TrainerMatch]
    not_computed: list[NotComputed]
    notes: list[str]


def compare_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of ``estr-diag compare --json``."""
    schema = CompareDocument.model_json_schema(by_alias=True)
    schema["required"] = sorted({*schema.get("required", []), "schema"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/compare/v1",
        **schema,
        "title": "estr-diag compare",
        "description": "Numbers are JSON numbers or null, never NaN. Keys may be added.",
    }
