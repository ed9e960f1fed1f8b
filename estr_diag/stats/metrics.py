"""Every consistency metric, in display order, and the yardsticks in circulation.

The entries are in `token_metrics` and `sequence_metrics`, what an entry holds in `metric`. Names and
formulas follow the field; other frameworks' names for the same numbers are in `aliases`.
"""

from __future__ import annotations

from estr_diag.stats.metric import Metric
from estr_diag.stats.sequence_metrics import SEQUENCE_METRICS
from estr_diag.stats.token_metrics import TOKEN_METRICS

METRICS: tuple[Metric, ...] = (*TOKEN_METRICS, *SEQUENCE_METRICS)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}

YARDSTICKS: dict[str, tuple[str, str]] = {
    "mean_abs_delta": ("clean bf16: 0.014", "vLLM bf16 against HF bf16, Qwen3-1.7B; 0.018 for MoE (gpt-oss)"),
    "rms_delta": ("clean bf16: 0.045", "vLLM bf16 against HF bf16, Qwen3-1.7B"),
    "kl_k3": ("clean bf16: 0.001", "vLLM bf16 against HF bf16, Qwen3-1.7B; tinker calls above 0.01 bad"),
    "kl_k1": ("verl: |kl| > 0.1 bad", "verl docs, rollout_corr health check"),
    "chi2_token": ("verl: > 1 bad", "verl docs, rollout_corr health check"),
    "mult_prob_error": ("NeMo-RL: > 1.05 suspect", "NeMo-RL plots the sample above it"),
    "prob_diff_mean": ("verl: > 0.01 bad", "verl FAQ: below 0.005 good, above 0.01 bad"),
    "ratio_mean": ("verl: outside 0.5..2 bad", "verl docs, rollout_corr health check"),
    "ratio_std": ("verl: > 1 bad", "verl docs, rollout_corr health check"),
    "ess_token": ("verl: < 0.3 bad", "verl docs, rollout_corr health check"),
    "reverse_kl_k3": ("one token gave 22,015 against kl_k3 9", "NeMo-RL docs/guides/grpo.md"),
    "prob_pearson": ("near 1 for any data", "verl issue 3894: read upside down"),
    "seq_delta_mean_max_abs": ("SkyRL: geometric 0.99..1.01", "SkyRL suggested sequence_mask band; MoE wider"),
    "share_above_2": ("verl, slime: the truncation in use is 2", "verl rollout_is_threshold, slime tis_clip"),
    "veto_share": ("slime, verl 2025: a token below 1e-4 drops its sequence", "rs_veto_threshold"),
    "confident_disagreement_lag0": ("martingale: any is an alarm", "2 nats, at lag 0"),
}
"""Clean values and limits in circulation: short form, and source. They disagree by orders of magnitude, so
the source is always part of them."""
