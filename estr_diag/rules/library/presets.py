"""Rules as single frameworks have them: name@framework, with the options that set them.

The same name means different rules in different frameworks, and in different versions of one; a preset says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from estr_diag.rules.base import Number, Rule
from estr_diag.rules.library import clips, scopes, token, weights

_SHRINKS: dict[str, Any] = {"denominator": "shrinks"}
_MASK_ONLY: dict[str, Any] = {"weight": ""}
_PRODUCT = "exp(clip(seq_sum(delta), -20, 20))"
_NO_C20 = "exp(seq_sum(delta))"
_GEO = "exp(seq_mean(delta))"
_CLIPPED = "clip(exp(delta), low, high)"
"""The truncated ratio without the clamp of delta to +-20."""


def preset(
    rule: Rule,
    framework: str,
    config: str,
    parameters: Mapping[str, Number] | None = None,
    *,
    version: str = "",
    checked: bool = True,
    **changes: Any,
) -> Rule:
    """Return a rule as one framework has it.

    Parameters
    ----------
    config
        The framework's options that set it.
    parameters
        Defaults that differ; all of them where the text differs too (``keep`` among `changes`).
    version
        The name is that of an older version.
    checked
        Equal to the framework's own code on the recorded log.
    changes
        Fields that differ.
    """
    given = parameters or {}
    merged = dict(given) if "keep" in changes and given else {**rule.parameters, **given}
    return replace(
        rule,
        framework=framework,
        version=version,
        config=config,
        parameters=merged,
        checked=checked,
        aliases=(),
        **changes,
    )


def _verl() -> tuple[Rule, ...]:
    rs = "algorithm.rollout_correction.rollout_rs: {}, rollout_rs_threshold"
    old = "rollout_rs: {}, bounds on the ratio itself"
    return (
        preset(token.ICEPOP, "verl", 'rollout_is: token, rollout_is_threshold: "0.5_5.0"'),
        preset(
            scopes.PRODUCT, "verl", 'rollout_is: sequence, rollout_is_threshold: "0.5_5.0"', {"high": 5.0},
            weight=_PRODUCT,
        ),
        preset(token.TOKEN_K1, "verl", rs.format("token_k1") + ': "0.5_2.0"; one number c means 1/c to c'),
        preset(
            token.TOKEN_K1, "verl", old.format("token"), {"low": 0.5, "high": 2.0}, version="2025",
            keep="ratio >= low and ratio <= high",
            says="keep iff low <= exp(delta) <= high: the band on the ratio itself, not mirrored as in 2026",
        ),
        preset(token.TOKEN_K2, "verl", rs.format("token_k2")),
        preset(token.TOKEN_K3, "verl", rs.format("token_k3")),
        *(preset(rule, "verl", rs.format(rule.name)) for rule in scopes.VERL_SEQUENCE),
        preset(scopes.GEO, "verl", old.format("geometric"), {"low": 0.99, "high": 1.02}, version="2025", **_SHRINKS),
        preset(scopes.PRODUCT, "verl", old.format("sequence"), version="2025", **_SHRINKS),
        preset(scopes.VETO, "verl", "rollout_token_veto_threshold: 1e-4", version="2025", **_SHRINKS),
        preset(
            token.KPOP, "verl", "rollout_rs: binary_kl (PR 6800, open)", {"phi": 0.1}, checked=False, **_SHRINKS
        ),
        preset(weights.TIS_TOKEN, "verl", "rollout_is: token, rollout_is_threshold: 2.0"),
        preset(weights.TIS_SEQUENCE, "verl", "rollout_is: sequence, rollout_is_threshold: 2.0"),
        preset(weights.TIS_TOKEN_NORM, "verl", "rollout_is: token, rollout_is_batch_normalize: true"),
        preset(weights.TIS_SEQUENCE_NORM, "verl", "rollout_is: sequence, rollout_is_batch_normalize: true"),
        preset(
            token.DPPO_TV, "verl", "policy_loss.loss_mode: dppo_tv, clip_ratio_c: 3.0; edge U (E in bypass mode)", {"c": 3.0},
            edge="U", weight="least(ratio, c)",
        ),
        preset(
            token.DPPO_KL, "verl", "policy_loss.loss_mode: dppo_kl, clip_ratio_c: 3.0; edge U (E in bypass mode)", {"c": 3.0},
            edge="U", weight="least(ratio, c)",
        ),
        preset(
            clips.PPO, "verl", "clip_ratio_low, clip_ratio_high, clip_ratio_c: 3.0 (dual clip is on by default)",
            {"low": 0.2, "high": 0.28, "c": 3.0}, keep=f"{clips.PPO_DUAL.keep} and abs(delta) <= 20",
        ),
        preset(clips.GSPO, "verl", "policy_loss.loss_mode: gspo"),
        preset(clips.GEO_MEAN, "verl", "policy_loss.loss_mode: geo_mean"),
        preset(clips.CISPO, "verl", "policy_loss.loss_mode: cispo"),
        preset(clips.SAPO, "verl", "policy_loss.loss_mode: sapo"),
    )  # fmt: skip


_C20_PPO = f"{clips.clipped('ratio')} and abs(delta) <= 20"


def _slime() -> tuple[Rule, ...]:
    mis = "examples/train_infer_mismatch_helper, {}"
    return (
        preset(
            token.ICEPOP, "slime", "--custom-tis-function-path ...icepop_function --tis-clip-low 0 --tis-clip 2.0",
            {"low": 0.0, "high": 2.0}, weight="exp(delta)",
        ),
        preset(weights.TIS_TOKEN, "slime", "--use-tis --tis-clip-low 0 --tis-clip 2.0", weight=_CLIPPED),
        preset(token.ICEPOP, "slime", mis.format("tis_mode: mask"), {"low": 0.5, "high": 2.0}, version="mis"),
        preset(scopes.GEO, "slime", mis.format("rs_level: geometric"), {"low": 0.99, "high": 1.02}, version="mis", weight="clip(ratio, 0, 2)"),
        preset(scopes.PRODUCT, "slime", mis.format("rs_level: sequence"), version="mis", weight="clip(ratio, 0, 2)"),
        preset(scopes.VETO, "slime", mis.format("use_rs, rs_veto_threshold: 1e-4"), version="mis", weight="clip(ratio, 0, 2)"),
        preset(weights.TIS_TOKEN, "slime", mis.format("tis_mode: truncate"), version="mis"),
        preset(weights.TIS_SEQUENCE, "slime", mis.format("tis_level: sequence"), version="mis"),
        preset(weights.TIS_GEO, "slime", mis.format("tis_level: geometric"), version="mis"),
        preset(scopes.OPSM, "slime", "--use-opsm --opsm-delta 1e-4; edge E with --use-rollout-logprobs"),
        preset(clips.PPO, "slime", "--eps-clip 0.2 --eps-clip-high 0.28", {"low": 0.2, "high": 0.28}),
        preset(clips.CISPO, "slime", "--advantage-estimator cispo"),
        preset(token.PARTIAL_OFFPOLICY, "slime", "--mask-offpolicy-in-partial-rollout", checked=False),
    )  # fmt: skip


def _areal() -> tuple[Rule, ...]:
    rs = "rejection_sampling: {{level: token, action: mask, metric: {}, upper: {}}}"
    ratio = "exp(delta) >= low and exp(delta) <= high"
    return (
        preset(
            token.ICEPOP, "areal", rs.format("ratio", 5.0), {"low": 0.0, "high": 5.0}, keep=ratio, weight="exp(delta)",
        ),
        preset(
            token.KPOP, "areal", rs.format("binary_kl", 2.0), {"phi": 2.0, "eps": 1e-8}, dtype="float32",
            weight="exp(delta)",
            says="as kpop with eps 1e-8 in float32, where 1 - 1e-8 is 1: a token with p = 1 gives NaN and is dropped",
            checked=False,
        ),
        preset(token.KL_K1, "areal", rs.format("kl_k1", 0.2) + ", lower: -0.2"),
        preset(token.KL_K2, "areal", rs.format("kl_k2", 0.1)),
        preset(token.KL_K3, "areal", rs.format("kl_k3", 0.1)),
        *(preset(rule, "areal", rule.reference, checked=rule.name in _AREAL_RUN) for rule in scopes.AREAL_SEQUENCE),
        preset(scopes.GEO, "areal", "level: sequence, metric: ratio, agg: mean", {"low": 0.99, "high": 1.02}, weight=_GEO),
        preset(weights.TIS_TOKEN, "areal", "action: clamp, metric: ratio, lower: 0, upper: 2", weight=_CLIPPED),
        preset(
            weights.TIS_GEO, "areal", "level: sequence, action: clamp, metric: ratio, agg: mean",
            {"low": 0.99, "high": 1.02},
        ),
        preset(scopes.M2PO, "areal", "m2_threshold: 0.04; acts on the micro-batch, a log is replayed by step"),
        preset(clips.PPO, "areal", "eps_clip: 0.2", weight="exp(delta)"),
        preset(clips.PPO_DUAL, "areal", "eps_clip: 0.2, c_clip: 3", weight="exp(delta)"),
        preset(
            clips.GSPO, "areal", "importance_sampling_level: sequence, eps_clip: 0.2", {"low": 0.2, "high": 0.2},
        ),
        preset(clips.SAPO, "areal", "use_sapo_loss: true; edge E", edge="E"),
        preset(weights.DECOUPLED, "areal", "use_decoupled_loss: true, behav_imp_weight_cap: 5", checked=False),
    )  # fmt: skip


_AREAL_RUN = frozenset(
    {
        "seq_binary_kl_max", "seq_kl_k1_mean", "seq_kl_k2_mean", "seq_kl_k3_max", "seq_kl_k3_sum", "seq_ratio_max",
        "seq_ratio_mean", "seq_ratio_sum",
    }
)  # fmt: skip
"""Combinations of metric and aggregate that AReaL's own code was run with."""


def _trl() -> tuple[Rule, ...]:
    mode = "vllm_importance_sampling_mode: {}, vllm_importance_sampling_clip_max: 3.0"
    high = {"low": 0.0, "high": 3.0}
    return (
        preset(token.ICEPOP, "trl", mode.format("token_mask"), high, weight="exp(delta)"),
        preset(
            scopes.PRODUCT, "trl", mode.format("sequence_mask") + " (on by default)", high,
            keep=f"{_NO_C20} >= low and {_NO_C20} <= high", weight=_NO_C20,
        ),
        preset(weights.TIS_TOKEN, "trl", mode.format("token_truncate"), high, weight=_CLIPPED),
        preset(weights.TIS_SEQUENCE, "trl", mode.format("sequence_truncate"), high, weight=f"clip({_NO_C20}, low, high)"),
        preset(scopes.OPSM, "trl", "off_policy_mask_threshold: 0.5", {"threshold": 0.5}, edge="E"),
        preset(scopes.TOP_ENTROPY, "trl", "top_entropy_quantile: 0.2 (1.0, off, by default)"),
        preset(clips.PPO, "trl", "epsilon: 0.2, epsilon_high: 0.28", {"low": 0.2, "high": 0.28}, weight="exp(delta)"),
        preset(
            clips.PPO_DUAL, "trl", "loss_type: dapo, delta: 4.0", {"low": 0.2, "high": 0.28, "c": 4.0}, weight="exp(delta)"
        ),
        preset(clips.GSPO, "trl", "importance_sampling_level: sequence"),
        preset(clips.LUSPO, "trl", "loss_type: luspo", checked=False),
        preset(
            clips.CISPO, "trl", "loss_type: cispo, epsilon_high: 5.0: the bound itself, not 1 + it; no lower end",
            {"low": 1.0, "high": 5.0}, weight="least(exp(delta), high)",
        ),
        preset(clips.SAPO, "trl", "loss_type: sapo"),
        preset(clips.VESPO, "trl", "loss_type: vespo", edge="U"),
    )  # fmt: skip


def _prime() -> tuple[Rule, ...]:
    return (
        preset(token.DPPO_TV, "prime-rl", "loss: default, dppo_mask_low: 0.2, dppo_mask_high: 0.2 (the default)"),
        preset(token.IPO, "prime-rl", "loss: ipo"),
        preset(token.REF_KL_REGION, "prime-rl", "loss: ref_kl", checked=False),
        preset(scopes.PRIME_2026_02, "prime-rl", "the default loss", version="2026-02"),
        preset(
            token.ICEPOP, "prime-rl", "INTELLECT-3 form, PR 2401; edge E, no PPO clip", {"low": 0.2, "high": 5.0}, edge="E",
            checked=False,
        ),
        preset(token.KPOP, "prime-rl", "type: kpop, edge E (PR 3283, open)", edge="E", checked=False),
        preset(
            scopes.STALENESS_FIRST, "prime-rl", "max_off_policy_steps: 8", keep="version_first >= step - 1 - k",
            checked=False,
        ),
    )  # fmt: skip


def _nemo() -> tuple[Rule, ...]:
    kind = "loss_fn.truncated_importance_sampling_type: {}"
    return (
        preset(token.ICEPOP, "nemo-rl", kind.format("icepop"), weight="exp(delta)"),
        preset(weights.TIS_TOKEN, "nemo-rl", kind.format("tis") + ", ratio: 2", weight=_CLIPPED),
        preset(
            scopes.GEO, "nemo-rl", kind.format("seq-mask-tis"), {"low": 0.999, "high": 1.002}, weight="exp(delta)",
        ),
        preset(scopes.MULT_PROB_ERROR, "nemo-rl", "grpo.seq_logprob_error_threshold: 2"),
        preset(clips.PPO, "nemo-rl", "ratio_clip_min, ratio_clip_max", {"low": 0.2, "high": 0.28}, weight="exp(delta)"),
        preset(clips.PPO_DUAL, "nemo-rl", "ratio_clip_c: 3", {"low": 0.2, "high": 0.28}, weight="exp(delta)"),
        preset(clips.CISPO, "nemo-rl", "loss_fn: cispo", {"low": 1.0, "high": 5.0}),
    )  # fmt: skip


def _skyrl() -> tuple[Rule, ...]:
    off = "trainer.algorithm.off_policy_correction.{}"
    return (
        preset(
            token.ICEPOP, "skyrl", off.format("token_mask_is_threshold_low/high"), {"low": 0.5, "high": 2.0}, **_MASK_ONLY
        ),
        preset(scopes.GEO, "skyrl", off.format("sequence_mask_metric: geometric")),
        preset(scopes.PRODUCT, "skyrl", off.format("sequence_mask_metric: product")),
        preset(scopes.OUTLIER_SEQ, "skyrl", off.format("outlier_token_is_threshold_low/high")),
        preset(weights.TIS_TOKEN, "skyrl", off.format("tis_ratio_type: token")),
        preset(weights.TIS_SEQUENCE, "skyrl", off.format("tis_ratio_type: sequence"), {"high": 5.0}),
        preset(clips.PPO, "skyrl", "policy_loss_type: regular", {"low": 0.2, "high": 0.28}, keep=_C20_PPO),
        preset(
            clips.PPO_DUAL, "skyrl", "policy_loss_type: dual_clip", {"low": 0.2, "high": 0.28, "c": 3.0},
            keep=f"{clips.PPO_DUAL.keep} and abs(delta) <= 20",
        ),
        preset(clips.GSPO, "skyrl", "policy_loss_type: gspo"),
        preset(clips.SAPO, "skyrl", "policy_loss_type: sapo"),
        preset(clips.CISPO, "skyrl", "policy_loss_type: cispo; edge E with cispo_anchor: rollout"),
        preset(token.ROLLOUT_IS, "skyrl", "policy_loss_type: rollout_is", {"low": 0.2, "high": 0.28}),
        preset(
            token.DPPO_TV, "skyrl", "policy_loss_type: dppo_tv; never masks A = 0",
            keep=f"(advantage = 0 or {_as_part(token.DPPO_TV.keep)}) and abs(delta) <= 20", weight="ratio",
        ),
        preset(
            token.DPPO_KL, "skyrl", "policy_loss_type: dppo_kl; never masks A = 0",
            keep=f"(advantage = 0 or {_as_part(token.DPPO_KL.keep)}) and abs(delta) <= 20", weight="ratio",
        ),
    )  # fmt: skip


def _as_part(text: str) -> str:
    return f"({text})"


def _others() -> tuple[Rule, ...]:
    vllm = "vllm_is_correction: {}"
    swift = "rollout_importance_sampling_mode: {}, rollout_importance_sampling_threshold: 2.0"
    roll = "train_infer_corrections, {}"
    geo_token: dict[str, Any] = {"weight": "exp(delta)"}
    return (
        preset(weights.TIS_TOKEN, "openrlhf", vllm.format("tis"), {"low": 0.5, "high": 5.0}),
        preset(token.ICEPOP, "openrlhf", vllm.format("icepop"), weight="exp(delta)"),
        preset(scopes.GEO, "openrlhf", vllm.format("seq-mask-tis"), {"low": 0.999, "high": 1.002}, **geo_token),
        preset(
            weights.TIS_TOKEN, "open-instruct", "rho clamp, on by default",
            weight="clip(exp(clip(delta, -10, 10)), low, high)",
        ),
        preset(
            token.ICEPOP, "open-instruct", "rho_mask_lower_bound, rho_mask_upper_bound", {"low": 0.5, "high": 2.0},
            keep="exp(clip(delta, -10, 10)) >= low and exp(clip(delta, -10, 10)) <= high",
            weight="exp(clip(delta, -10, 10))",
        ),
        preset(
            scopes.GEO, "open-instruct", "rho_mask_sequence_level", {"low": 0.99, "high": 1.02},
            weight="exp(clip(seq_mean(delta), -10, 10))",
        ),
        preset(scopes.TV_SEQ_SIGN, "open-instruct", "rho_mask_tv_divergence, rho_mask_upper_bound", {"high": 0.05}),
        preset(token.ICEPOP, "roll", roll.format("token ratio"), {"low": 0.8, "high": 1.2}, **_SHRINKS, **_MASK_ONLY),
        preset(scopes.SEGMENT, "roll", roll.format("segment ratio")),
        preset(scopes.GEO, "roll", roll.format("geometric ratio"), {"low": 0.99, "high": 1.02}, **_SHRINKS),
        preset(scopes.PRODUCT, "roll", roll.format("sequence ratio"), **_SHRINKS),
        preset(token.PROB_DIFF, "roll", roll.format("token diff")),
        preset(scopes.SEGMENT_DIFF, "roll", roll.format("segment diff"), {"low": -0.01, "high": 0.01}),
        preset(scopes.SEQUENCE_DIFF, "roll", roll.format("sequence diff")),
        preset(weights.TIS_TOKEN, "roll", roll.format("is_weight token"), {"high": 1.2}, weight=_CLIPPED),
        preset(weights.TIS_SEGMENT, "roll", roll.format("is_weight segment")),
        preset(weights.TIS_GEO, "roll", roll.format("is_weight geometric"), {"high": 1.2}),
        preset(weights.TIS_SEQUENCE, "roll", roll.format("is_weight sequence"), {"high": 1.2}),
        preset(weights.TOPR, "roll", "pg_variant: topr", checked=False),
        preset(weights.TIS_PG, "roll", "pg_variant: tis", checked=False),
        preset(weights.TIS_TOKEN, "ms-swift", swift.format("token_truncate")),
        preset(token.ICEPOP, "ms-swift", swift.format("token_mask"), {"low": 0.0, "high": 2.0}),
        preset(weights.TIS_GEO, "ms-swift", swift.format("sequence_truncate")),
        preset(
            scopes.GEO, "ms-swift", swift.format("sequence_mask") + "; no lower bound", {"low": 0.0, "high": 2.0},
            weight="ratio",
        ),
        preset(
            scopes.OPSM, "ms-swift", "off_policy_sequence_mask_delta: 0.02", {"threshold": 0.02}, edge="E", **_SHRINKS
        ),
        preset(weights.FIPO, "ms-swift", "loss_type: fipo", checked=False),
        preset(token.DPPO_TV, "stable-rl", "dppo_binary_tv"),
        preset(token.DPPO_TV, "stable-rl", "dppo_binary_tv_recompute: edge U", version="recompute", edge="U"),
        preset(token.DPPO_KL, "stable-rl", "dppo_binary_kl"),
        preset(token.DPPO_KL, "stable-rl", "dppo_binary_kl_recompute: edge U", version="recompute", edge="U"),
        preset(clips.PPO, "stable-rl", "ppo: edge E", {"low": 0.2, "high": 0.28}, edge="E"),
        preset(clips.PPO, "stable-rl", "ppo_recompute", {"low": 0.2, "high": 0.28}, version="recompute"),
        preset(clips.PPO, "pipelinerl", "policy_loss: ppo, epsilon 0.2; edge E", edge="E"),
        preset(
            clips.CISPO, "pipelinerl", "policy_loss: reinforce; edge E, lower end 0", {"low": 1.0, "high": 0.2}, edge="E",
        ),
        preset(
            weights.TIS_TOKEN, "torchforge", "importance weights clamped to [0.1, 10]; edge E", {"low": 0.1, "high": 10.0},
            edge="E", checked=False,
        ),
        preset(
            scopes.STALENESS_LAST, "trl", "AsyncGRPO max_staleness: 4, one version a sample", checked=False,
        ),
    )  # fmt: skip


PRESETS: tuple[Rule, ...] = (
    *_verl(), *_slime(), *_areal(), *_trl(), *_prime(), *_nemo(), *_skyrl(), *_others(),
)  # fmt: skip
