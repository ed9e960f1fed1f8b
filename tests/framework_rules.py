"""Which of our rules is which recorded rule: names of the masks file -> a rule as one writes it, or a `Rule`."""

from __future__ import annotations

from dataclasses import replace

from estr_diag.expressions import Edge
from estr_diag.rules import Rule, parse_rules
from estr_diag.rules.library.weights import normalised, normalised_by_sequence

SPECS: dict[str, str] = {
    "verl.rs.token_k1[0.5_2.0]": "token_k1@verl",
    "verl.rs.token_k1[0.6_1.4]": "token_k1@verl:low=0.6:high=1.4",
    "verl.rs.token_k1[2.0]": "token_k1@verl:low=0.5:high=2",
    "verl.rs.token_k2[0.1]": "token_k2@verl:c=0.1",
    "verl.rs.token_k3[0.1]": "token_k3@verl:c=0.1",
    "verl.rs.seq_sum_k1[0.5_2.0]": "seq_sum_k1@verl:low=0.5:high=2",
    "verl.rs.seq_sum_k2[0.5]": "seq_sum_k2@verl:c=0.5",
    "verl.rs.seq_sum_k3[0.5]": "seq_sum_k3@verl:c=0.5",
    "verl.rs.seq_mean_k1[0.999_1.001]": "seq_mean_k1@verl",
    "verl.rs.seq_mean_k1[0.99_1.02]": "seq_mean_k1@verl:low=0.99:high=1.02",
    "verl.rs.seq_mean_k2[0.01]": "seq_mean_k2@verl:c=0.01",
    "verl.rs.seq_mean_k3[0.01]": "seq_mean_k3@verl:c=0.01",
    "verl.rs.seq_max_k2[0.1]": "seq_max_k2@verl:c=0.1",
    "verl.rs.seq_max_k3[0.1]": "seq_max_k3@verl:c=0.1",
    "verl.rs.token_k1,seq_mean_k3[0.5_2.0,0.01]": "token_k1@verl:low=0.5:high=2+seq_mean_k3@verl:c=0.01",
    "verl.is.tis_token[2.0]": "tis_token@verl",
    "verl.is.tis_token[2.0,norm]": "tis_token_norm@verl",
    "verl.is.icepop_token[0.5_5.0]": "icepop@verl",
    "verl.is.tis_sequence[2.0]": "tis_sequence@verl",
    "verl.is.tis_sequence[2.0,norm]": "tis_sequence_norm@verl",
    "verl.is.icepop_sequence[0.5_5.0]": "product@verl",
    "verl.loss.vanilla[0.2,0.28]@U": "ppo@verl",
    "verl.loss.dppo_tv[0.2,0.2]@U": "dppo_tv@verl:c=20",
    "verl.loss.dppo_kl[0.05,0.05]@U": "dppo_kl@verl:c=20",
    "verl.loss.gspo[0.0003,0.0004]@U": "gspo@verl",
    "verl.loss.sapo[1.0,1.05]@U": "sapo@verl",
    "verl.loss.geo_mean[0.4,0.4]@U": "geo_mean@verl",
    "verl.loss.cispo[1.0,4.0]@U": "cispo@verl",
    "verl.loss.vanilla[0.2,0.28]@E": "ppo@verl",
    "verl.loss.dppo_tv[0.2,0.2]@E": "dppo_tv@verl:c=20",
    "verl.loss.dppo_kl[0.05,0.05]@E": "dppo_kl@verl:c=20",
    "verl.loss.gspo[0.0003,0.0004]@E": "gspo@verl",
    "verl.loss.sapo[1.0,1.05]@E": "sapo@verl",
    "verl.loss.geo_mean[0.4,0.4]@E": "geo_mean@verl",
    "verl.loss.cispo[1.0,4.0]@E": "cispo@verl",
    "verl2025.rs.token[None,2.0]": "token_k1@verl:2025",
    "verl2025.rs.sequence[None,2.0]": "product@verl:2025",
    "verl2025.rs.geometric[0.99,1.02]": "geo@verl:2025",
    "verl2025.veto[0.0001]": "veto@verl:2025",
    "slime.mis.tis_token_truncate": "tis_token@slime:mis",
    "slime.mis.mis_token_mask": "icepop@slime:mis",
    "slime.mis.rs_token": "icepop@slime:mis",
    "slime.mis.rs_sequence": "product@slime:mis",
    "slime.mis.rs_geometric": "geo@slime:mis",
    "slime.mis.veto_only": "veto@slime:mis",
    "slime.mis.tis_sequence_truncate": "tis_sequence@slime:mis",
    "slime.mis.tis_geometric_truncate": "tis_geo@slime:mis",
    "slime.tis[0.0,2.0]": "tis_token@slime",
    "slime.icepop[0.5,2.0]": "icepop@slime:low=0.5:high=2",
    "slime.icepop[0.5,5.0]": "icepop@slime:low=0.5:high=5",
    "slime.opsm[0.0001]@U": "opsm@slime",
    "slime.opsm[0.02]@U": "opsm@slime:threshold=0.02",
    "slime.ppo[0.2,0.28,c=None]@U": "ppo@slime",
    "slime.cispo[1.0,4.0]@U": "cispo@slime",
    "slime.opsm[0.0001]@E": "opsm@slime",
    "slime.opsm[0.02]@E": "opsm@slime:threshold=0.02",
    "slime.ppo[0.2,0.28,c=None]@E": "ppo@slime",
    "slime.cispo[1.0,4.0]@E": "cispo@slime",
    "areal.rs.token_mask_binary_kl[None,2.0]": "kpop@areal",
    "areal.rs.token_mask_binary_kl[None,0.1]": "kpop@areal:phi=0.1",
    "areal.rs.token_mask_binary_kl[None,0.005]": "kpop@areal:phi=0.005",
    "areal.rs.sequence_mask_binary_kl_max[None,0.1]": "seq_binary_kl_max@areal",
    "trl.vllm_is.token_truncate[None,3.0]": "tis_token@trl",
    "trl.vllm_is.token_truncate[0.5,2.0]": "tis_token@trl:low=0.5:high=2",
    "trl.vllm_is.token_mask[None,3.0]": "icepop@trl",
    "trl.vllm_is.token_mask[0.5,2.0]": "icepop@trl:low=0.5:high=2",
    "trl.vllm_is.sequence_truncate[None,3.0]": "tis_sequence@trl",
    "trl.vllm_is.sequence_truncate[0.5,2.0]": "tis_sequence@trl:low=0.5:high=2",
    "trl.vllm_is.sequence_mask[None,3.0]": "product@trl",
    "trl.vllm_is.sequence_mask[0.5,2.0]": "product@trl:low=0.5:high=2",
    "trl.off_policy_mask[0.02]@E": "opsm@trl:threshold=0.02",
    "trl.off_policy_mask[0.5]@E": "opsm@trl",
    "trl.top_entropy[0.2]": "top_entropy@trl",
    "trl.top_entropy[0.8]": "top_entropy@trl:rho=0.8",
    "trl.loss.dapo[0.2,0.28]@U": "ppo@trl",
    "trl.loss.dapo_two_sided[0.2,0.28,delta=4]@U": "ppo_dual@trl",
    "trl.loss.gspo[0.0003,0.0004]@U": "gspo@trl",
    "trl.loss.cispo[5.0]@U": "cispo@trl",
    "trl.loss.sapo[1.0,1.05]@U": "sapo@trl",
    "trl.loss.vespo[2,3,3,2]@U": "vespo@trl",
    "prime.dppo[0.2,0.2]@E": "dppo_tv@prime-rl",
    "prime.ipo[0.1]@E": "ipo@prime-rl",
    "prime.token_export.not_is_masked[0.2,0.2]@E": "dppo_tv@prime-rl",
    "prime2026-02.token_seq_geo[0.125,8;0,100;0.1,10]@E": "prime_2026_02@prime-rl:2026-02",
    "nemo.tis[0,2]": "tis_token@nemo-rl",
    "nemo.icepop[0.5,5]": "icepop@nemo-rl",
    "nemo.icepop[0.5,2]": "icepop@nemo-rl:high=2",
    "nemo.seq-mask-tis[0.99,1.02]": "geo@nemo-rl:low=0.99:high=1.02",
    "nemo.loss.ppo[0.2,0.28]@U": "ppo@nemo-rl",
    "nemo.loss.ppo_dual[0.2,0.28,c=3]@U": "ppo_dual@nemo-rl",
    "nemo.loss.cispo[1.0,5.0]@U": "cispo@nemo-rl",
    "nemo.seq_logprob_error[1.05]": "mult_prob_error@nemo-rl:c=1.05",
    "nemo.seq_logprob_error[2.0]": "mult_prob_error@nemo-rl",
    "skyrl.tis_token[2]": "tis_token@skyrl",
    "skyrl.tis_sequence[5]": "tis_sequence@skyrl",
    "skyrl.geo_mask[0.99,1.01]": "geo@skyrl",
    "skyrl.geo_mask[0.99,1.02]": "geo@skyrl:high=1.02",
    "skyrl.product_mask[0.5,2]": "product@skyrl",
    "skyrl.outlier_token[1e-4,100]": "outlier_seq@skyrl",
    "skyrl.token_mask[0.5,2]": "icepop@skyrl",
    "skyrl.loss.ppo[0.2,0.28]@U": "ppo@skyrl",
    "skyrl.loss.dual_clip[0.2,0.28,c=3]@U": "ppo_dual@skyrl",
    "skyrl.loss.gspo[0.0003,0.0004]@U": "gspo@skyrl",
    "skyrl.loss.sapo[1.0,1.05]@U": "sapo@skyrl",
    "skyrl.loss.cispo[1.0,4.0]@U": "cispo@skyrl",
    "skyrl.loss.cispo_rollout[1.0,4.0]@E": "cispo@skyrl",
    "skyrl.loss.rollout_is[0.2,0.28]@E": "rollout_is@skyrl",
    "skyrl.loss.dppo_tv[0.2,0.2]@E": "dppo_tv@skyrl",
    "skyrl.loss.dppo_kl[0.05,0.05]@E": "dppo_kl@skyrl",
    "openrlhf.tis[0.5,5.0]": "tis_token@openrlhf",
    "openrlhf.icepop[0.5,5.0]": "icepop@openrlhf",
    "openrlhf.icepop[0.5,2.0]": "icepop@openrlhf:high=2",
    "openrlhf.seq-mask-tis[0.99,1.02]": "geo@openrlhf:low=0.99:high=1.02",
    "oi.default_tis[0,2]": "tis_token@open-instruct",
    "oi.icepop[0.5,2]": "icepop@open-instruct",
    "oi.seq_mask[0.99,1.02]": "geo@open-instruct",
    "oi.tv_divergence[upper=0.05]": "tv_seq_sign@open-instruct",
    "roll.token_ratio[0.8,1.2]": "icepop@roll",
    "roll.segment_ratio[0.99,1.02]": "segment@roll:low=0.99:high=1.02",
    "roll.geometric_ratio[0.99,1.02]": "geo@roll",
    "roll.sequence_ratio[0.5,2]": "product@roll",
    "roll.token_diff[-0.2,0.2]": "prob_diff@roll",
    "roll.segment_diff[-0.01,0.01]": "segment_diff@roll",
    "roll.sequence_diff[-0.2,0.2]": "sequence_diff@roll",
    "roll.is_token[1.2]": "tis_token@roll",
    "roll.is_segment[1.2]": "tis_segment@roll",
    "roll.is_geometric[1.2]": "tis_geo@roll",
    "roll.is_sequence[1.2]": "tis_sequence@roll",
    "swift.token_truncate[2.0]": "tis_token@ms-swift",
    "swift.token_mask[2.0]": "icepop@ms-swift",
    "swift.sequence_truncate[1.02]": "tis_geo@ms-swift:high=1.02",
    "swift.sequence_mask[1.02]": "geo@ms-swift:high=1.02",
    "swift.off_policy_sequence_mask[0.02]@E": "opsm@ms-swift",
    "stable_rl.dppo_binary_tv[0.2,0.2]": "dppo_tv@stable-rl",
    "stable_rl.dppo_binary_kl[0.05,0.05]": "dppo_kl@stable-rl",
    "stable_rl.dppo_binary_tv_recompute[0.2,0.2]": "dppo_tv@stable-rl:recompute",
    "stable_rl.dppo_binary_kl_recompute[0.05,0.05]": "dppo_kl@stable-rl:recompute",
    "stable_rl.ppo[0.2,0.28]": "ppo@stable-rl",
    "stable_rl.ppo_recompute[0.2,0.28]": "ppo@stable-rl:recompute",
    "pipelinerl.ppo[0.2,0.2]@E": "ppo@pipelinerl",
    "pipelinerl.reinforce[0.2,0.2]@E": "cispo@pipelinerl",
    **{f"estr[eps=0.01,tau={t}]@{e}": f"estr:tau={t}" for t in ("0.25", "1.0", "4.0") for e in "BE"},
    **{f"kpop[eps=1e-6,phi={p}]@B": f"kpop:phi={p}" for p in ("0.005", "0.1", "2.0")},
}  # fmt: skip

_AREAL = {
    "rs.token_mask_ratio[None,5.0]": "icepop@areal",
    "rs.token_mask_ratio[0.5,5.0]": "icepop@areal:low=0.5",
    "rs.token_mask_ratio[0.5,2.0]": "icepop@areal:low=0.5:high=2",
    "rs.token_clamp_ratio[0.0,2.0]": "tis_token@areal",
    "rs.token_mask_kl_k1[-0.2,0.2]": "kl_k1@areal",
    "rs.token_mask_kl_k2[None,0.1]": "kl_k2@areal",
    "rs.token_mask_kl_k3[None,0.1]": "kl_k3@areal",
    "rs.sequence_mask_ratio_mean[0.99,1.02]": "seq_ratio_mean@areal:low=0.99:high=1.02",
    "rs.sequence_mask_ratio_sum[0.5,2.0]": "seq_ratio_sum@areal:low=0.5:high=2",
    "rs.sequence_mask_ratio_max[None,1.5]": "seq_ratio_max@areal:high=1.5",
    "rs.sequence_clamp_ratio_mean[0.99,1.02]": "tis_geo@areal",
    "rs.sequence_mask_kl_k2_mean[None,0.01]": "seq_kl_k2_mean@areal",
    "rs.sequence_mask_kl_k3_sum[None,0.5]": "seq_kl_k3_sum@areal:high=0.5",
    "rs.sequence_mask_kl_k3_max[None,0.1]": "seq_kl_k3_max@areal",
    "rs.sequence_mask_kl_k1_mean[-0.02,0.02]": "seq_kl_k1_mean@areal",
    "m2po[0.04]": "m2po@areal",
    "m2po[0.001]": "m2po@areal:c=0.001",
    "ppo_token[0.2,0.2]@U": "ppo@areal",
    "ppo_sequence[0.2,0.2]@U": "gspo@areal",
    "ppo_dual[0.2,0.2,c=3]@U": "ppo_dual@areal",
    "sapo[1.0,1.05]@E": "sapo@areal",
}
SPECS |= {f"{version}.{name}": spec for version in ("areal", "areal2026-05") for name, spec in _AREAL.items()}
SPECS["areal2026-05.rs.sequence_mask_ratio_mean[0.99,1.02]"] = "geo@areal"


TOLERANCE: dict[str, tuple[float, str]] = {
    "areal": (2e-6, "weights recorded in float32"),
    "skyrl": (2e-6, "weights recorded in float32"),
    "nemo": (1e-8, "a guard of 1e-8 in a denominator"),
    "verl.loss.geo_mean": (5e-8, "a guard of 1e-8 in a denominator"),
    "trl.loss.sapo": (1e-8, "temperatures in float32"),
}
"""Beginning of a name -> relative tolerance of its weights, and why it is not 1e-9."""


def is_loss(recorded: str) -> bool:
    """Say whether a recording was read off a loss, which has no gradient to look at where A = 0."""
    return any(part in recorded for part in (".loss.", "prime.dppo", "prime.ipo", ".ppo", ".sapo", "reinforce"))


def rule_of(recorded: str) -> Rule:
    """Return our rule of a recorded one, on the edge that the recording was fed."""
    rule = OWN[recorded] if recorded in OWN else parse_rules(SPECS[recorded])[0]
    edges: tuple[Edge, ...] = ("B", "U", "E")
    for edge in edges:
        if recorded.endswith(f"@{edge}"):
            rule = replace(rule, edge=edge)
    # The masks were recorded in float64, where no clamp vanishes.
    return replace(rule, dtype="float64") if rule.name == "kpop" else rule


_ICEPOP = "case when ratio >= 0.5 and ratio <= 5 then ratio else 0 end"
_PRODUCT = "exp(clip(seq_sum(delta), -20, 20))"
_PRODUCT_IN_BAND = f"case when {_PRODUCT} >= 0.5 and {_PRODUCT} <= 5 then {_PRODUCT} else 0 end"

OWN: dict[str, Rule] = {
    # one half of a rule, or a configuration that has no preset of its own
    "prime.token_export.not_is_masked_high[0.2,0.2]@E": Rule("high", "not (advantage > 0 and p_new - p_old > 0.2)"),
    "prime.token_export.not_is_masked_low[0.2,0.2]@E": Rule("low", "not (advantage < 0 and p_new - p_old < -0.2)"),
    "nemo.none": Rule("none", weight="exp(delta)"),
    "verl.is.icepop_token[0.5_5.0,norm]": Rule("icepop", "ratio >= 0.5 and ratio <= 5", weight=normalised(_ICEPOP)),
    "verl.is.icepop_sequence[0.5_5.0,norm]": Rule(
        "product", f"{_PRODUCT} >= 0.5 and {_PRODUCT} <= 5", weight=normalised_by_sequence(_PRODUCT_IN_BAND)
    ),
    "slime.mis.cis_token_clip": parse_rules("tis_token@slime:mis:low=0.5")[0],
    "slime.mis.yaml_default": Rule(
        "yaml_default",
        "ratio >= 0.5 and ratio <= 2 and not seq_any(delta < ln(1e-4))",
        weight=normalised("clip(ratio, 0, 2)"),
    ),
}
