"""Rules that keep every token and weigh it."""

from __future__ import annotations

from estr_diag.rules.base import Rule

_BOUNDS = {"low": 0.0, "high": 2.0}
_PRODUCT = "exp(clip(seq_sum(delta), -20, 20))"

TIS_TOKEN = Rule(
    "tis_token", parameters=_BOUNDS, weight="clip(ratio, low, high)", score="high",
    says="weigh each token by its ratio, truncated to [low, high]", reference="truncated importance sampling; 2 is usual",
    aliases=("tis",),
)  # fmt: skip
TIS_SEQUENCE = Rule(
    "tis_sequence", parameters=_BOUNDS, weight=f"clip({_PRODUCT}, low, high)", score="high",
    says="weigh the tokens of a sequence by the product of its ratios, truncated to [low, high]",
    reference="verl rollout_is: sequence; SkyRL 5.0, TRL 3.0",
)  # fmt: skip
TIS_GEO = Rule(
    "tis_geo", parameters=_BOUNDS, weight="clip(exp(seq_mean(delta)), low, high)", score="high",
    says="weigh the tokens of a sequence by the geometric mean of its ratios, truncated to [low, high]",
    reference="slime and ROLL geometric, ms-swift sequence_truncate",
)  # fmt: skip
TIS_SEGMENT = Rule(
    "tis_segment", parameters={"low": 0.0, "high": 1.2}, weight="clip(exp(run_mean(delta)), low, high)", score="high",
    says="weigh the tokens of a run of trainable tokens by the geometric mean of their ratios, truncated",
    reference="ROLL is_weight agg_type: segment",
)  # fmt: skip


def normalised(weight: str) -> str:
    """Return a token weight divided by its mean over the step, as self-normalised importance sampling does."""
    return f"case when step_mean({weight}) > 1e-8 then ({weight}) / step_mean({weight}) else {weight} end"


def normalised_by_sequence(weight: str) -> str:
    """Return a weight of sequences divided by its mean over the sequences of the step."""
    mean = f"(step_sum(({weight}) / seq_count()) / step_sum(1 / seq_count()))"
    return f"case when {mean} > 1e-8 then ({weight}) / {mean} else {weight} end"


TIS_TOKEN_NORM = Rule(
    "tis_token_norm", parameters=_BOUNDS, weight=normalised("clip(ratio, low, high)"), score="high",
    says="as tis_token, divided by the mean weight of the step", reference="verl rollout_is_batch_normalize",
    aliases=("snis",),
)  # fmt: skip
TIS_SEQUENCE_NORM = Rule(
    "tis_sequence_norm", parameters=_BOUNDS, weight=normalised_by_sequence(f"clip({_PRODUCT}, low, high)"), score="high",
    says="as tis_sequence, divided by the mean weight of the step's sequences",
    reference="verl rollout_is_batch_normalize",
)  # fmt: skip
TIS_PG = Rule(
    "tis_pg", parameters={"high": 1.0}, edge="U", weight="clip(exp(delta), 0, high)", score="high",
    says="policy gradient with the ratio truncated to [0, high] and not differentiated", reference="ROLL pg_variant: tis",
)  # fmt: skip
TOPR = Rule(
    "topr", edge="U", weight="case when reward > 0 then 1 else clip(exp(delta), 0, 1) end",
    says="weight 1 for a positive reward, else the ratio truncated to [0, 1]",
    reference="arXiv 2503.14286; ROLL pg_variant: topr goes by the sign of the reward, not of the advantage",
)  # fmt: skip
DECOUPLED = Rule(
    "decoupled",
    "not ((advantage > 0 and ratio_u > 1 + clip_high) or (advantage < 0 and ratio_u < 1 - clip_low))",
    {"clip_low": 0.2, "clip_high": 0.2, "high": 5.0},
    score="high",
    weight="clip(ratio_b, 0, high) * ratio_u",
    says="PPO's clip on the update's own ratio, weighed by the truncated ratio between trainer and sampler",
    reference="arXiv 2110.00641; AReaL use_decoupled_loss",
)
FIPO = Rule(
    "fipo",
    "true",
    {"gamma": 0.5 ** (1 / 32), "high": 1.2},
    edge="U",
    weight="case when advantage < 0 and exp(delta) > 4 then clip(exp(seq_discounted(delta, gamma)), 0.8, 1) "
    "else clip(exp(seq_discounted(delta, gamma)), 1, high) end",
    says="weigh a token by the discounted log-ratio of what follows it in its sequence (half-life of 32 tokens)",
    reference="ms-swift loss_type: fipo",
)

WEIGHT_RULES: tuple[Rule, ...] = (
    TIS_TOKEN, TIS_SEQUENCE, TIS_GEO, TIS_SEGMENT, TIS_TOKEN_NORM, TIS_SEQUENCE_NORM, TIS_PG, TOPR, DECOUPLED, FIPO,
)  # fmt: skip
