"""Rules that judge each token by itself."""

from __future__ import annotations

from estr_diag.expressions import EPS
from estr_diag.rules.base import Rule

NONE = Rule("none", "true", says="keep every counted token", reference="no mask")
TRAINER = Rule("trainer", "trainer_keep", says="keep what the trainer's own log says that it kept", reference="the log")
ESTR = Rule(
    "estr",
    "delta * delta / (entropy + eps) <= tau",
    {"tau": 4.0, "eps": EPS},
    score="tau",
    says="keep iff delta^2 / (H + eps) <= tau: a threshold on the ratio that grows with entropy",
    reference="Zhao et al., arXiv 2607.22186; tau is not published, 4 bounds |delta| by 2 sqrt(H + 0.01)",
)
SCALED = Rule(
    "gini_scaled",
    "delta * delta / (gini + eps) <= tau",
    {"tau": 4.0, "eps": EPS},
    score="tau",
    says="as estr with 1 - sum p^2 in place of H: the exact scale of independent noise on the logits",
    reference="E[delta^2] = s^2 (1 - G) for logits with independent noise; ours",
)
ICEPOP = Rule(
    "icepop",
    "ratio >= low and ratio <= high",
    {"low": 0.5, "high": 5.0},
    score="high",
    weight="ratio",
    says="keep iff low <= exp(delta) <= high, both ends included; a kept token weighs its ratio",
    reference="arXiv 2510.18855; [0.5, 5] is the paper's band and OpenRLHF's default",
    aliases=("token_mis", "token_mask"),
)
BAND = Rule(
    "band",
    "abs(delta) <= ln(c)",
    {"c": 2.0},
    score="c",
    says="keep iff 1/c <= exp(delta) <= c: icepop with one parameter, to sweep it",
    reference="ours",
)
KPOP = Rule(
    "kpop",
    "greatest(binary_kl(p_new, p_old, eps), binary_kl(p_old, p_new, eps)) <= phi",
    {"phi": 0.1, "eps": 1e-6},
    score="phi",
    says="keep iff the binary KL of the sampled token, in both directions, is at most phi; p clamped to [eps, 1 - eps]",
    reference="phi 0.1 and eps 1e-6 as in prime-rl PR 3283; AReaL's example has phi 2.0 and eps 1e-8",
    aliases=("binary_kl_mask",),
)
TOKEN_K1 = Rule(
    "token_k1",
    "-clip(delta, -20, 20) >= ln(low) and -clip(delta, -20, 20) <= ln(high)",
    {"low": 0.5, "high": 2.0},
    score="high",
    denominator="shrinks",
    says="keep iff ln(low) <= -delta <= ln(high), that is 1/high <= exp(delta) <= 1/low: the mirror of icepop's band",
    reference="verl since 97eac9048 (2026-01)",
)
TOKEN_K2 = Rule(
    "token_k2",
    "clip(delta, -20, 20) * clip(delta, -20, 20) / 2 <= c",
    {"c": 2.0},
    score="c",
    denominator="shrinks",
    says="keep iff delta^2 / 2 <= c",
    reference="verl; its documentation suggests 1.5 to 3",
)
TOKEN_K3 = Rule(
    "token_k3",
    "exp(clip(delta, -20, 20)) - 1 - clip(delta, -20, 20) <= c",
    {"c": 0.1},
    score="c",
    denominator="shrinks",
    says="keep iff exp(delta) - 1 - delta <= c",
    reference="verl",
)
KL_K1 = Rule(
    "kl_k1",
    "delta >= low and delta <= high",
    {"low": -0.2, "high": 0.2},
    score="high",
    weight="exp(delta)",
    says="keep iff low <= delta <= high, in nats",
    reference="AReaL metric kl_k1, whose sign is +delta",
)
KL_K2 = Rule(
    "kl_k2", "delta * delta / 2 <= high", {"high": 0.1}, score="high", weight="exp(delta)",
    says="keep iff delta^2 / 2 <= high", reference="AReaL metric kl_k2",
)  # fmt: skip
KL_K3 = Rule(
    "kl_k3",
    "exp(-delta) - 1 + delta <= high",
    {"high": 0.1},
    score="high",
    weight="exp(delta)",
    says="keep iff exp(-delta) - 1 + delta <= high: the k3 of the opposite direction to verl's",
    reference="AReaL metric kl_k3, which calls the estimator with the trainer as the new policy",
)
PROB_DIFF = Rule(
    "prob_diff",
    "p_new - p_old >= low and p_new - p_old <= high",
    {"low": -0.2, "high": 0.2},
    score="high",
    denominator="shrinks",
    says="keep iff low <= p_train - p_infer <= high",
    reference="ROLL's diff filter; the mask is removed in the pipeline, zeroed in the worker",
)
DPPO_TV = Rule(
    "dppo_tv",
    "case when advantage > 0 then p_new - p_old <= high else p_new - p_old >= -low end",
    {"low": 0.2, "high": 0.2},
    edge="E",
    score="high",
    weight="exp(delta)",
    says="A > 0: keep iff p_new - p_old <= high; else keep iff p_new - p_old >= -low (A = 0 counts as negative)",
    reference="arXiv 2602.04879, eq. 13",
    aliases=("dppo",),
)
_KL = "p_old * (logp_old - logp_new) + (1 - p_old) * ln((1 - p_old + 1e-8) / (1 - p_new + 1e-8))"
DPPO_KL = Rule(
    "dppo_kl",
    f"case when advantage > 0 then {_KL} <= high or p_new <= p_old else {_KL} <= low or p_new >= p_old end",
    {"low": 0.05, "high": 0.05},
    edge="E",
    score="high",
    weight="exp(delta)",
    says="as dppo_tv with the binary KL of the sampled token in place of the difference of probabilities",
    reference="arXiv 2602.04879, eq. 14",
)
IPO = Rule(
    "ipo", "abs(p_new - p_old) <= c", {"c": 0.1}, edge="E", score="c", weight="exp(delta)",
    says="keep iff |p_new - p_old| <= c", reference="prime-rl; the default loss of 2026-03 was two-sided with 0.2",
)  # fmt: skip
REF_KL_REGION = Rule(
    "ref_kl_region", "p_new - p_old >= -low", {"low": 0.2}, edge="E", score="low",
    says="keep iff p_new - p_old >= -low", reference="prime-rl's reference-KL loss; 0.2 is fixed there",
)  # fmt: skip
ROLLOUT_IS = Rule(
    "rollout_is",
    "ratio > 1 - low and ratio < 1 + high",
    {"low": 0.2, "high": 0.2},
    edge="E",
    score="high",
    weight="ratio",
    says="keep iff 1 - low < exp(delta) < 1 + high: an open interval",
    reference="double-sided importance sampling of GLM-5; SkyRL policy_loss_type: rollout_is",
    aliases=("double_sided_is",),
)
PARTIAL_OFFPOLICY = Rule(
    "partial_offpolicy",
    "policy_version >= seq_max(policy_version)",
    denominator="shrinks",
    says="keep tokens of the newest weights of their sequence",
    reference="slime --mask-offpolicy-in-partial-rollout: tokens of the newest generate call",
)
STALENESS = Rule(
    "staleness", "lag <= k", {"k": 4.0}, score="k", says="keep tokens at most k versions old",
    reference="by token; see staleness_first and staleness_last for whole sequences",
)  # fmt: skip

TOKEN_RULES: tuple[Rule, ...] = (
    NONE, TRAINER, ESTR, SCALED, ICEPOP, BAND, KPOP, TOKEN_K1, TOKEN_K2, TOKEN_K3, KL_K1, KL_K2, KL_K3, PROB_DIFF,
    DPPO_TV, DPPO_KL, IPO, REF_KL_REGION, ROLLOUT_IS, PARTIAL_OFFPOLICY, STALENESS,
)  # fmt: skip
