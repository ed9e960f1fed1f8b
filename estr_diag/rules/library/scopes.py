"""Rules that judge a token by its sequence, turn, run of the mask, prompt group or step."""

from __future__ import annotations

from estr_diag.rules.base import Rule

GEO = Rule(
    "geo",
    "exp(seq_mean(delta)) >= low and exp(seq_mean(delta)) <= high",
    {"low": 0.99, "high": 1.01},
    score="high",
    says="keep a sequence iff low <= exp(mean of delta) <= high: the geometric mean of its ratios",
    reference="SkyRL's suggested band; NeMo-RL and OpenRLHF have 0.999 to 1.002",
    aliases=("geometric",),
)
PRODUCT = Rule(
    "product",
    "exp(clip(seq_sum(delta), -20, 20)) >= low and exp(clip(seq_sum(delta), -20, 20)) <= high",
    {"low": 0.5, "high": 2.0},
    score="high",
    says="keep a sequence iff low <= exp(sum of delta) <= high: the product of its ratios, so long sequences go first",
    reference="SkyRL product_mask; verl, slime, TRL and ROLL call this ratio 'sequence'",
    aliases=("seq_mis", "sequence_mask"),
)


def _clamped(kind: str) -> str:
    d = "clip(delta, -20, 20)"
    return {"k1": f"-{d}", "k2": f"{d} * {d} / 2", "k3": f"exp({d}) - 1 - {d}"}[kind]


def _verl_sequence(function: str, kind: str) -> Rule:
    value = f"seq_{function}({_clamped(kind)})"
    if kind == "k1":
        keep, parameters = f"{value} >= ln(low) and {value} <= ln(high)", {"low": 0.999, "high": 1.001}
        says = f"keep a sequence iff ln(low) <= {function} of -delta <= ln(high): the mirror of the band on the ratio"
    else:
        keep, parameters = f"{value} <= c", {"c": 0.01 if kind == "k3" else 2.0}
        says = f"keep a sequence iff the {function} of {kind} over its tokens is at most c"
    return Rule(
        f"seq_{function}_{kind}", keep, parameters, score="high" if kind == "k1" else "c", denominator="shrinks",
        says=says, reference=f"verl rollout_rs: seq_{function}_{kind}; delta is clamped to +-20 before the {function}",
    )  # fmt: skip


VERL_SEQUENCE = tuple(
    _verl_sequence(function, kind)
    for function, kinds in (("sum", ("k1", "k2", "k3")), ("mean", ("k1", "k2", "k3")), ("max", ("k2", "k3")))
    for kind in kinds
)

_AREAL = {
    "ratio": ("exp(seq_{0}(delta))", {"low": 0.0, "high": 5.0}),
    "kl_k1": ("seq_{0}(delta)", {"low": -0.02, "high": 0.02}),
    "kl_k2": ("seq_{0}(delta * delta / 2)", {"high": 0.01}),
    "kl_k3": ("seq_{0}(exp(-delta) - 1 + delta)", {"high": 0.1}),
    "binary_kl": ("seq_{0}(greatest(binary_kl(p_new, p_old, eps), binary_kl(p_old, p_new, eps)))", {"high": 0.1}),
}


def _areal_sequence(metric: str, function: str) -> Rule:
    text, bounds = _AREAL[metric]
    value = text.format(function)
    lower = f"{value} >= low and " if "low" in bounds else ""
    return Rule(
        f"seq_{metric}_{function}",
        f"{lower}{value} <= high",
        {**bounds, **({"eps": 1e-8} if metric == "binary_kl" else {})},
        score="high",
        weight="exp(seq_mean(delta))" if metric == "ratio" else "exp(delta)",
        says=f"keep a sequence iff the {function} of {metric} over its tokens lies in the bounds"
        + ("; the weight is the geometric mean of its ratios whatever decides" if metric == "ratio" else ""),
        reference=f"AReaL level: sequence, metric: {metric}, agg: {function}",
    )


AREAL_SEQUENCE = tuple(_areal_sequence(metric, function) for metric in _AREAL for function in ("sum", "mean", "max"))

OUTLIER_SEQ = Rule(
    "outlier_seq",
    "not seq_any(ratio > high or ratio < low)",
    {"low": 1e-4, "high": 100.0},
    score="high",
    says="drop a sequence in which any token's ratio lies outside [low, high]",
    reference="SkyRL outlier_token_is_threshold_*, off by default",
)
VETO = Rule(
    "veto",
    "not seq_any(delta < ln(c))",
    {"c": 1e-4},
    score="c",
    says="drop a sequence in which any token's ratio is below c",
    reference="slime rs_veto_threshold; verl 2025 rollout_token_veto_threshold",
)
OPSM = Rule(
    "opsm",
    "advantage >= 0 or seq_mean(-delta) <= threshold",
    {"threshold": 1e-4},
    edge="U",
    score="threshold",
    says="drop a token of negative advantage whose sequence has mean(-delta) above the threshold",
    reference="DeepSeek-V3.2, eq. 9; slime --use-opsm --opsm-delta",
    aliases=("off_policy_sequence_mask", "off_policy_mask"),
)
MULT_PROB_ERROR = Rule(
    "mult_prob_error",
    "seq_mean(exp(abs(delta))) <= c",
    {"c": 2.0},
    score="c",
    denominator="shrinks",
    says="keep a sequence iff the mean of exp(|delta|) over its tokens is at most c",
    reference="NeMo-RL grpo.seq_logprob_error_threshold; off by default, 2 in Nemotron recipes",
    aliases=("seq_logprob_error",),
)
SEGMENT = Rule(
    "segment",
    "exp(run_mean(delta)) >= low and exp(run_mean(delta)) <= high",
    {"low": 0.8, "high": 1.2},
    score="high",
    denominator="shrinks",
    says="as geo for each run of consecutive trainable tokens (a turn)",
    reference="ROLL agg_type: segment",
)
SEGMENT_DIFF = Rule(
    "segment_diff",
    "run_mean(p_new - p_old) >= low and run_mean(p_new - p_old) <= high",
    {"low": -0.2, "high": 0.2},
    score="high",
    denominator="shrinks",
    says="keep a run of trainable tokens iff the mean of p_train - p_infer over it lies in the band",
    reference="ROLL agg_type: segment, diff filter",
)
SEQUENCE_DIFF = Rule(
    "sequence_diff",
    "seq_sum(p_new - p_old) >= low and seq_sum(p_new - p_old) <= high",
    {"low": -0.2, "high": 0.2},
    score="high",
    denominator="shrinks",
    says="keep a sequence iff the sum of p_train - p_infer over it lies in the band",
    reference="ROLL agg_type: sequence, diff filter",
)
TURN_PPO = Rule(
    "turn_ppo",
    "not ((advantage > 0 and exp(turn_mean(delta)) > 1 + high) or (advantage < 0 and exp(turn_mean(delta)) < 1 - low))",
    {"low": 0.2, "high": 0.2},
    edge="U",
    score="high",
    weight="exp(turn_mean(delta))",
    says="PPO's clip on the geometric mean of the ratios of a turn",
    reference="arXiv 2511.20718, 2512.17008",
)
PRIME_2026_02 = Rule(
    "prime_2026_02",
    "exp(delta) >= low and exp(delta) <= high and exp(seq_mean(delta)) >= geo_low and exp(seq_mean(delta)) <= geo_high"
    " and seq_min(exp(delta)) >= min_low and seq_max(exp(delta)) <= max_high",
    {"low": 0.125, "high": 8.0, "geo_low": 0.1, "geo_high": 10.0, "min_low": 0.0, "max_high": 100.0},
    edge="E",
    score="high",
    weight="exp(delta)",
    says="keep a token iff its ratio, the geometric mean and the extremes of its sequence's ratios lie in their bands",
    reference="prime-rl's default from 2025-12 to 2026-03",
)
TV_SEQ_SIGN = Rule(
    "tv_seq_sign",
    "not (seq_mean(abs(exp(clip(delta, -10, 10)) - 1)) > high and sign(delta) * advantage > 0)",
    {"high": 0.2},
    score="high",
    weight="exp(clip(delta, -10, 10))",
    says="in a sequence whose mean |ratio - 1| is above high, drop the tokens that the update would push further away",
    reference="VACO, arXiv 2603.01365; open-instruct rho_mask_tv_divergence",
)
STALENESS_FIRST = Rule(
    "staleness_first", "trainer_version - version_first <= k", {"k": 8.0}, score="k", denominator="shrinks",
    says="keep sequences whose first token is at most k versions old", reference="by the first version of a sequence",
)  # fmt: skip
STALENESS_LAST = Rule(
    "staleness_last", "inter <= k", {"k": 4.0}, score="k", denominator="shrinks",
    says="keep sequences whose last token is at most k versions old", reference="by the last version of a sequence",
)  # fmt: skip
ZERO_ADV_GROUP = Rule(
    "zero_adv_group", "group_any(advantage <> 0)", denominator="shrinks",
    says="drop prompt groups whose advantages are all 0", reference="dynamic sampling, DAPO",
)  # fmt: skip
OVERLONG = Rule(
    "overlong", "finished", denominator="shrinks", says="drop sequences that the length limit or an abort ended",
    reference="overlong filtering, DAPO",
)  # fmt: skip
TOP_ENTROPY = Rule(
    "top_entropy",
    "entropy >= step_quantile(entropy, 1 - rho)",
    {"rho": 0.2},
    score="rho",
    says="keep the share rho of a step's tokens with the highest entropy",
    reference="arXiv 2506.01939; TRL top_entropy_quantile. Trainers take the training engine's entropy at update time "
    "and the micro-batch; a log gives its own entropy and the step",
)
M2PO = Rule(
    "m2po",
    "step_budget(delta * delta, c)",
    {"c": 0.04},
    score="c",
    says="drop a step's largest delta^2 until the mean of the rest is below c",
    reference="arXiv 2510.01161; AReaL m2_threshold acts on edge B and a micro-batch, the paper on edge E",
)

SCOPE_RULES: tuple[Rule, ...] = (
    GEO, PRODUCT, *VERL_SEQUENCE, *AREAL_SEQUENCE, OUTLIER_SEQ, VETO, OPSM, MULT_PROB_ERROR, SEGMENT, SEGMENT_DIFF,
    SEQUENCE_DIFF, TURN_PPO, PRIME_2026_02, TV_SEQ_SIGN, STALENESS_FIRST, STALENESS_LAST, ZERO_ADV_GROUP, OVERLONG,
    TOP_ENTROPY, M2PO,
)  # fmt: skip
