"""Clips and shapers: which tokens a loss leaves without gradient, and the coefficient of A grad(log pi) on the others."""

from __future__ import annotations

from estr_diag.rules.base import Rule


def clipped(ratio: str) -> str:
    """Return PPO's condition on a ratio: no gradient beyond the band on the side to which the update pushes."""
    return f"not ((advantage > 0 and {ratio} > 1 + high) or (advantage < 0 and {ratio} < 1 - low))"


_GEO = "exp(seq_mean(delta))"
PPO = Rule(
    "ppo",
    clipped("ratio"),
    {"low": 0.2, "high": 0.2},
    edge="U",
    score="high",
    weight="ratio",
    says="no gradient where A > 0 and the ratio is above 1 + high, or A < 0 and it is below 1 - low",
    reference="PPO, GRPO; DAPO has 0.2 and 0.28",
    aliases=("grpo", "dapo"),
)
PPO_DUAL = Rule(
    "ppo_dual",
    f"{clipped('ratio')} and not (advantage < 0 and ratio > c)",
    {"low": 0.2, "high": 0.2, "c": 3.0},
    edge="U",
    score="high",
    weight="ratio",
    says="as ppo, and no gradient where A < 0 and the ratio is above c",
    reference="dual-clip PPO; verl 3.0, ROLL 1 + 2 clip",
)
GSPO = Rule(
    "gspo",
    clipped(_GEO),
    {"low": 3e-4, "high": 4e-4},
    edge="U",
    score="high",
    weight=_GEO,
    says="PPO's clip on the geometric mean of a sequence's ratios",
    reference="arXiv 2507.18071",
)
LUSPO = Rule(
    "luspo", clipped(_GEO), {"low": 3e-4, "high": 4e-4}, edge="U", score="high", weight=f"{_GEO} * seq_count()",
    says="as gspo, weighed by the length of the sequence", reference="TRL",
)  # fmt: skip
GEO_MEAN = Rule(
    "geo_mean",
    "not ((advantage > 0 and delta > high) or (advantage < 0 and delta < -low))",
    {"low": 0.4, "high": 0.4},
    edge="U",
    score="high",
    weight="exp(seq_mean(case when advantage >= 0 then least(delta, high) else greatest(delta, -low) end)) / seq_count()",
    says="PPO's clip with the band on the log-ratio; the weight is the geometric mean of the clipped ratios over length",
    reference="GMPO, arXiv 2507.20673",
    aliases=("gmpo",),
)
CISPO = Rule(
    "cispo",
    "true",
    {"low": 1.0, "high": 4.0},
    edge="U",
    score="high",
    weight="clip(ratio, 1 - low, 1 + high)",
    says="keep all, weighed by the ratio clipped to [1 - low, 1 + high] and not differentiated",
    reference="arXiv 2506.13585",
)
SAPO = Rule(
    "sapo",
    "true",
    {"t_pos": 1.0, "t_neg": 1.05},
    edge="U",
    weight="case when advantage > 0 "
    "then 4 / (1 + exp(-t_pos * (ratio - 1))) * (1 - 1 / (1 + exp(-t_pos * (ratio - 1)))) * ratio "
    "else 4 / (1 + exp(-t_neg * (ratio - 1))) * (1 - 1 / (1 + exp(-t_neg * (ratio - 1)))) * ratio end",
    says="keep all; the gradient fades with the distance of the ratio from 1 as the slope of a sigmoid",
    reference="arXiv 2511.20347",
)
VESPO = Rule(
    "vespo",
    "true",
    {"k_pos": 2.0, "l_pos": 3.0, "k_neg": 3.0, "l_neg": 2.0},
    edge="U",
    weight="case when advantage >= 0 "
    "then exp(l_pos + k_pos * clip(seq_sum(clip(delta, -20, 20)), ln(1e-8), 20) "
    "- l_pos * exp(clip(seq_sum(clip(delta, -20, 20)), ln(1e-8), 20))) "
    "else exp(l_neg + k_neg * clip(seq_sum(clip(delta, -20, 20)), ln(1e-8), 20) "
    "- l_neg * exp(clip(seq_sum(clip(delta, -20, 20)), ln(1e-8), 20))) end",
    says="keep all; the weight of a sequence is exp(l + k ln w - l w) of its product ratio w",
    reference="arXiv 2602.10693",
)

CLIP_RULES: tuple[Rule, ...] = (PPO, PPO_DUAL, GSPO, LUSPO, GEO_MEAN, CISPO, SAPO, VESPO)
