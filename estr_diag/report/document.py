"""The report as data: what ``--json`` prints, and what the pages are drawn from.

These models are the contract. ``data_schemas/report.v1.schema.json`` is generated from them, and every
report is validated by being built from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from estr_diag.report.rule_document import NotComputed, Pair, Part, RuleResult, TrainerMatch

SCHEMA_ID = "estr-diag/report/v1"


class Skipped(Part):
    """A file that took no part."""

    path: str
    status: Annotated[str, Field(description="refused | copy | known")]
    reason: str


class LogFacts(Part):
    """What the log holds."""

    source: str
    trainer: str | None
    adapter: str | None
    run: Annotated[dict[str, Any], Field(description="run facts; unknown is null")]
    n_tokens: Annotated[int, Field(description="response tokens, tool tokens included")]
    n_counted: Annotated[int, Field(description="inside the loss mask, with every logged log-prob present")]
    n_sequences: int
    steps: Annotated[list[int] | None, Field(description="[lowest, highest]")]
    versions: list[int] | None
    lags: Annotated[dict[str, int], Field(description="trainer_version - policy_version -> counted tokens")]
    columns: Annotated[dict[str, int], Field(description="canonical column -> values it holds")]
    skipped: Annotated[dict[str, int], Field(description="why tokens do not count -> tokens")]
    repaired: Annotated[dict[str, int], Field(description="values set to null or rows left out at ingest, by reason")]
    files_left_out: list[Skipped]
    notes: list[str]


class CheckResult(Part):
    """One detector's verdict."""

    id: str
    verdict: Literal["found", "clear", "cannot_tell"]
    level: Literal["fatal", "error", "warning", "info"]
    size: float | None
    control: Annotated[float | None, Field(description="what a sound log would show")]
    where: str
    cause: str
    next_action: str
    evidence: list[dict[str, Any]]
    spoils: Annotated[list[str], Field(description="columns whose statistics must not be read")]


class Number(Part):
    """A metric with its cluster-robust standard error by sequence."""

    value: float | None
    se: float | None
    n: Annotated[int, Field(description="tokens, or sequences for a sequence metric")]


class StepMetrics(Part):
    """Consistency metrics of one step."""

    step: int | None
    n_tokens: int
    n_sequences: Annotated[int, Field(description="standard errors rest on this many; none with one")]
    metrics: dict[str, Number]


class LagMetrics(Part):
    """Consistency metrics at one lag; null for tokens whose lag is not known."""

    lag: int | None
    n_tokens: int
    n_sequences: Annotated[int, Field(description="standard errors rest on this many; none with one")]
    metrics: dict[str, Number]


class Consistency(Part):
    """Consistency metrics."""

    overall: dict[str, Number]
    by_step: list[StepMetrics]
    by_lag: list[LagMetrics]


class Half(Part):
    """Mode (p_infer >= 0.5) or off-mode tokens of a bin."""

    n: int
    mean_sq_delta: float | None


class LagCell(Part):
    """One lag inside an entropy bin."""

    lag: int | None
    n: int
    n_sequences: int
    mean_sq_delta: float | None
    se_mean_sq_delta: float | None


class EntropyBin(Part):
    """Moments of delta in one bin of H."""

    lo: float
    hi: Annotated[float | None, Field(description="null for the open bin above explicit edges")]
    n: int
    n_sequences: int
    mean_entropy: float | None
    mean_abs_delta: float | None
    mean_sq_delta: float | None
    se_mean_sq_delta: float | None
    sq_delta_over_entropy: float | None
    mean_scaled_sq: Annotated[float | None, Field(description="mean delta^2 / (H + 0.01)")]
    quantiles: Annotated[dict[str, float | None], Field(description="of |delta|")]
    exceedances: Annotated[
        dict[str, float | None], Field(description="r -> share of tokens whose ratio lies outside [1/r, r]")
    ]
    small: Annotated[bool, Field(description="too few tokens or sequences to read")]
    by_lag: list[LagCell]
    mode: Half
    off_mode: Half


Interval = Annotated[list[float | None], Field(min_length=2, max_length=2, description="95 % interval, [low, high]")]


class LocalExponent(Part):
    """Slope from one bin to the next."""

    lo: float
    hi: float | None
    exponent: float | None
    ci: Interval


class ScalingFit(Part):
    """E[delta^2] = amplitude * scale ^ exponent, by weighted least squares over bins."""

    scale: Annotated[str, Field(description="entropy, or gini (1 - sum p^2)")]
    exponent: float | None
    ci: Interval
    amplitude: float | None
    r2: float | None
    law_holds: Annotated[bool | None, Field(description="whether the paper's exponent 1 lies inside the interval")]
    reason: Annotated[str | None, Field(description="why it cannot be told")]
    better: Annotated[bool | None, Field(description="whether this scale fits better, where two are logged")]
    n_bins: int
    local_exponents: list[LocalExponent]


class Scaling(ScalingFit):
    """The fit against entropy, and the others that the log allows."""

    others: list[ScalingFit]


class NoiseCell(Part):
    """Noise and exploration in one entropy bin at one lag."""

    bin: Annotated[int, Field(description="index into entropy_bins")]
    lag: int | None
    n: int
    n_sequences: int
    noise: float | None
    exploration: float | None
    se: Annotated[float | None, Field(description="of exploration")]
    ci: Interval
    total: float | None
    small: Annotated[bool, Field(description="too few tokens to read")]


class LagShare(Part):
    """Share of the squared deviation that is noise, at one lag."""

    lag: int | None
    n: int
    noise_share: float | None
    ci: Interval


class Decomposition(Part):
    """Noise against exploration."""

    method: Literal["exact", "lag_contrast", "extrapolated", "none"]
    assumption: str
    noise_share: float | None
    ci: Interval
    by_lag: list[LagShare]
    crossover_entropy: Annotated[float | None, Field(description="H above which exploration exceeds noise, nat")]
    crossover: Annotated[str, Field(description="the same in words, or why there is none")]
    cells: list[NoiseCell]
    notes: list[str]


class Switches(Part):
    """Weight versions that change inside a trajectory, and staleness."""

    n_sequences_with_switch: int | None
    event_study: Annotated[
        list[dict[str, float | int | None]],
        Field(description="by offset from the nearest switch: means, matched controls and differences, each with se"),
    ]
    intra: Annotated[dict[str, int], Field(description="v_last - v_first -> sequences")]
    inter: Annotated[dict[str, int], Field(description="v_target - v_last -> sequences")]
    by_version: list[dict[str, float | int | None]]
    notes: list[str]


class LengthBucket(Part):
    """Sequences of about one length."""

    length_lo: int
    length_hi: int
    n_sequences: int
    mean_length: float | None
    kl_k3: float | None
    t_times_kl: float | None
    ess_sequence: float | None


class Weights(Part):
    """What importance weights leave of the sample."""

    ess_token: float | None
    ess_sequence: float | None
    khat_token: float | None
    khat_sequence: float | None
    readings: dict[str, str]
    by_length: list[LengthBucket]
    length_limit: Annotated[str, Field(description="the length at which sequence ratios become useless")]


class Document(Part):
    """A whole report."""

    schema_: Annotated[Literal["estr-diag/report/v1"], Field(alias="schema")] = "estr-diag/report/v1"
    estr_diag: str
    verdict: Annotated[str, Field(description="the report in a few sentences")]
    log: LogFacts
    checks: list[CheckResult]
    stamped: Annotated[list[str], Field(description="columns that a check found broken; what rests on them is stamped")]
    consistency: Consistency
    entropy_bins: list[EntropyBin]
    scaling: Scaling | None
    decomposition: Decomposition | None
    switches: Switches | None
    weights: Weights | None
    rules: list[RuleResult]
    agreement: list[Pair]
    reproduces_trainer: Annotated[
        list[TrainerMatch],
        Field(description="built-in rules that decide as the trainer's log says it did, or else the nearest"),
    ]
    not_computed: list[NotComputed]


def report_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of ``estr-diag report --json``."""
    schema = Document.model_json_schema(by_alias=True)
    schema["required"] = sorted({*schema.get("required", []), "schema"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **schema,
        "title": "estr-diag report",
        "description": "Numbers are JSON numbers or null, never NaN. Natural logarithms. Keys may be added.",
    }
