"""The metric names of the frameworks, as data: what each dashboard shows, and how it differs from our metric.

Read in source at the commits that ``tests/data/oracle`` names; entries that say ``executed=False`` were
read and not run. Names that only exist under a mask rule are not here.
"""

from __future__ import annotations

from estr_diag.stats.alias import Alias
from estr_diag.stats.metric import extreme, mean, moments, sequence
from estr_diag.stats.metrics import BY_NAME as OURS

_EPS = "divides by n + 1e-8"
_ROWS = "rows without counted tokens stay in the mean as {}"
_SIGN = "the opposite sign of mean_delta"
_FLOAT = "computed in float32"
_RANKS = "ranks are averaged, however many tokens each holds"

_PAIR = frozenset({"logp_infer", "logp_train"})

TURN_RATIO = "turn_ratio"
"""Column of the roll-up: sum over a sequence's turns of n exp(mean d)."""


def _clamped(total: str) -> str:
    return f"case when {total} < -700 then -700 when {total} > 700 then 700 else {total} end"


# fmt: off
_CLAMPED_K1 = moments("clamped_k1", "-{sum_clamped_delta} / {n}", "mean -d, d clamped to +-20", "nat", "near 0", "k1")
_CAPPED_K3 = mean("capped_k3", "sum_capped_k3", "mean min(exp(d) - 1 - d, 10), d clamped to +-20", "nat", "lower",
                  "k3 that no single token can rule")
_K3_MAX = extreme("k3_max", "{max_k3}", "max (exp(d) - 1 - d)", "nat", "lower", "k3 of the worst token")
_K3_MIN = extreme("k3_min", "{min_k3}", "min (exp(d) - 1 - d)", "nat", "lower", "k3 of the best token")
_RAW_RATIO = mean("raw_ratio_mean", "sum_raw_ratio", "mean exp(d), d not clamped", "1", "near 1", "mean weight")
_RAW_ESS = moments("raw_ess", "{sum_raw_ratio} * {sum_raw_ratio} / ({n} * {sum_raw_ratio2})",
                   "(sum exp(d))^2 / (n sum exp(2d)), d not clamped", "share", "higher", "effective sample size")
_GEO_CHI2 = sequence("geometric_chi2", "exp(2 * {sum_delta} / {n}) - 1", "mean over sequences of exp(2 mean d) - 1",
                     "1", "lower", "chi-squared of geometric ratios; does not grow with length")
_SEQ_RATIO = sequence("seq_ratio_mean", f"exp({_clamped('{sum_delta}')})", "mean over sequences of exp(sum d)", "1",
                      "near 1", "mean product weight")
_GEO_RATIO = sequence("geo_ratio_mean", "exp({sum_delta} / {n})", "mean over sequences of exp(mean d)", "1", "near 1",
                      "mean geometric weight; 1 / ppl_ratio of each sequence")
_TURN_RATIO = sequence("turn_ratio_mean", f"{TURN_RATIO} / {{n}}",
                       "mean over sequences of the token mean of exp(mean d over the token's turn)", "1", "near 1",
                       "mean geometric weight by turn")
_SEQ_PROB_DIFF = sequence("seq_prob_diff_sum", "{sum_prob_diff}", "mean over sequences of sum (q - p)", "probability",
                          "near 0", "signed probability gap of whole sequences")
_SEQ_MPE = "{sum_mult_prob_error} / {n}"
_SEQ_MPE_MEAN, _SEQ_MPE_MAX, _SEQ_MPE_MIN = (
    sequence(f"seq_mult_prob_error_{word}", _SEQ_MPE, f"{word} over sequences of mean exp |d|", "1", "near 1",
             "multiplicative probability error of sequences", f"{sql}({{x}})")
    for word, sql in (("mean", "avg"), ("max", "max"), ("min", "min"))
)
_ENTROPY_K1 = moments("sampled_entropy", "-{sum_logp_infer} / {n}", "mean -ln p", "nat", "none",
                      "sampled estimate of the entropy of the inference engine")
_ENTROPY_IS = mean("sampled_entropy_weighted", "sum_sampled_entropy", "mean -exp(d) logp_update, d not clamped", "nat",
                   "none", "sampled, importance-weighted estimate of the current policy's entropy", count="n_e")
_LOGLINEAR = mean("proximal_loglinear_error", "sum_loglinear_error",
                  "mean |mu + alpha (pi - mu) - q|, alpha = (v_prox - v) / (v_theta - v)", "nat", "lower",
                  "error of the proximal log-prob interpolated in log space", count="n_proximal")
_LINEAR = mean("proximal_linear_error", "sum_linear_error",
               "mean |ln((1 - alpha) p + alpha exp(pi) + 1e-10) - q|", "nat", "lower",
               "error of the proximal log-prob interpolated in probability", count="n_proximal")
_STALE_THETA_MEAN = moments("staleness_theta_mean", "{sum_lag} / nullif({n_lag}, 0) + 1", "mean lag + 1",
                            "runs.version_unit", "lower", "age against the weights after the update")
_STALE_THETA_MAX = extreme("staleness_theta_max", "{max_lag} + 1", "max lag + 1", "runs.version_unit", "lower",
                           "the oldest token")
_STALE_THETA_MIN = extreme("staleness_theta_min", "{min_lag} + 1", "min lag + 1", "runs.version_unit", "none",
                           "the freshest token")
_SEQUENCES = sequence("counted_sequences", "1", "count of sequences with counted tokens", "sequences", "none",
                      "size of the batch", "count({x})")
_SWITCHED = sequence("switched_sequences", "({max_version} > {min_version})::integer::double",
                     "count of sequences with more than one version", "sequences", "none", "partial rollouts",
                     "sum({x})", count="n_version")
_VALID = moments("any_counted", "({n} > 0)::integer::double", "1 when any token is counted", "1", "none",
                 "whether the others mean anything")
_FRAMEWORK_ONLY_NOTE = "NaN and infinite weights count as 0"


def _verl() -> list[Alias]:
    at, corr = "rollout_corr/", "tensors of the decoupled mode; in bypass mode the same name holds edge E"
    token = [("kl", "kl_k1"), ("k3_kl", "kl_k3"), ("chi2_token", "chi2_token")]
    rows = [Alias("verl", at + name, OURS[ours], differs=f"{_EPS}; {corr}") for name, ours in token]
    sequences = [("training_ppl", "train_ppl", 1.0), ("rollout_ppl", "infer_ppl", 1.0),
                 ("training_log_ppl", "train_log_ppl", 0.0), ("rollout_log_ppl", "infer_log_ppl", 0.0),
                 ("log_ppl_diff", "log_ppl_diff", 0.0), ("log_ppl_abs_diff", "log_ppl_abs_diff", 0.0),
                 ("log_ppl_diff_max", "log_ppl_diff_max", 0.0), ("log_ppl_diff_min", "log_ppl_diff_min", 0.0),
                 ("ppl_ratio", "ppl_ratio", 1.0), ("chi2_seq", "chi2_seq", 0.0)]
    rows += [Alias("verl", at + name, OURS[ours], "B", "S0", f"{_ROWS.format(f'{empty:g}')}; {corr}", empty)
             for name, ours, empty in sequences]
    probs = [("mean", OURS["prob_diff_mean"]), ("max", OURS["prob_diff_max"]), ("std", OURS["prob_diff_std"]),
             ("valid", _VALID)]
    rows += [Alias("verl", f"training/rollout_probs_diff_{name}", metric, also_needs=_PAIR,
                   differs="NaN when nothing is counted")
             for name, metric in probs]
    return [
        *rows,
        Alias("verl", "training/rollout_actor_probs_pearson_corr", OURS["prob_pearson"]),
        Alias("verl", at + "rollout_is_veto_fraction", OURS["veto_share"], "B", "S0",
              f"until 2025; threshold 1e-4; {_ROWS.format(0)}"),
        Alias("verl", at + "rollout_is_catastrophic_token_fraction", OURS["share_below_0_0001"],
              differs=f"until 2025; threshold 1e-4; {_EPS}"),
        Alias("verl", "mismatch/mismatch_kl", OURS["kl_k1"], differs=f"the name of 2025-10; {_EPS}", executed=False),
        Alias("verl", "mismatch/mismatch_k3_kl", OURS["kl_k3"], differs=f"the name of 2025-10; {_EPS}", executed=False),
        Alias("verl", "actor/ppo_kl", _CLAMPED_K1, "U", differs="d clamped to +-20", executed=False),
        Alias("verl", "actor/entropy", OURS["entropy_mean"], executed=False,
              differs="the training engine's entropy: the same number where runs.entropy_of is train"),
        Alias("verl", "fully_async/partial/total_partial_num", _SWITCHED, executed=False,
              differs="counts sequences, as switch_share does shares"),
        Alias("verl", "fully_async/partial/partial_ratio", OURS["switch_share"], executed=False),
        Alias("verl", "fully_async/partial/max_partial_span", OURS["intra_max"], executed=False),
    ]


def _swift() -> list[Alias]:
    at = "rollout_correction/"
    sequences = [("training_ppl", "train_ppl", 1.0), ("rollout_ppl", "infer_ppl", 1.0),
                 ("training_log_ppl", "train_log_ppl", 0.0), ("rollout_log_ppl", "infer_log_ppl", 0.0),
                 ("log_ppl_diff", "log_ppl_diff", 0.0), ("log_ppl_abs_diff", "log_ppl_abs_diff", 0.0),
                 ("log_ppl_diff_max", "log_ppl_diff_max", 0.0), ("log_ppl_diff_min", "log_ppl_diff_min", 0.0),
                 ("ppl_ratio", "ppl_ratio", 1.0)]
    return [
        Alias("ms-swift", at + "kl", OURS["kl_k1"], "B", "SS", _RANKS),
        Alias("ms-swift", at + "k3_kl", _CAPPED_K3, "B", "SS", f"d clamped to +-20, the value capped at 10; {_RANKS}"),
        Alias("ms-swift", at + "chi2_token", OURS["chi2_token"], "B", "SS", _RANKS),
        Alias("ms-swift", at + "chi2_seq", _GEO_CHI2, "B", "S0",
              f"mean d where verl and slime have sum d: another quantity than chi2_seq; {_ROWS.format(0)}"),
        *(Alias("ms-swift", at + name, OURS[ours], "B", "S0", f"{_ROWS.format(f'{empty:g}')}; {_RANKS}", empty)
          for name, ours, empty in sequences),
    ]


def _slime() -> list[Alias]:
    zero = _ROWS.format(0)
    sequences = [("kl", "kl_k1"), ("k3_kl", "kl_k3"), ("chi2_token", "chi2_token"), ("chi2_seq", "chi2_seq"),
                 ("training_ppl", "train_ppl"), ("rollout_ppl", "infer_ppl"), ("training_log_ppl", "train_log_ppl"),
                 ("rollout_log_ppl", "infer_log_ppl"), ("log_ppl_diff", "log_ppl_diff"),
                 ("log_ppl_abs_diff", "log_ppl_abs_diff"), ("ppl_ratio", "ppl_ratio")]
    bands = [("mis_tis_truncate_fraction", "share_above_2", "tis_clip 2"),
             ("mis_rs_mask_fraction_high", "share_above_2", "an upper bound of 2"),
             ("mis_rs_mask_fraction_low", "share_below_0_5", "a lower bound of 0.5")]
    return [
        Alias("slime", "train_rollout_logprob_abs_diff", OURS["mean_abs_delta"], "B", "S0",
              f"{zero}; rejected tokens leave the sum and stay in the count; edge E with --use-rollout-logprobs"),
        *(Alias("slime", f"mis_{name}", OURS[ours], "B", "S0", zero) for name, ours in sequences),
        Alias("slime", "mis_tis_weight_before_bound", OURS["ratio_mean"], "B", "S0", zero),
        Alias("slime", "tis", _RAW_RATIO, "B", "S0", f"the weight before its bounds, d not clamped; {zero}"),
        Alias("slime", "tis_abs", mean("raw_ratio_abs_gap", "sum_raw_ratio_gap", "mean |exp(d) - 1|, d not clamped",
                                       "1", "lower", "twice tv_estimate"), "B", "S0",
              f"twice tv_estimate, d not clamped; {zero}"),
        Alias("slime", "ois", _RAW_RATIO, "U", "S0", f"edge U, d not clamped; {zero}", executed=False),
        *(Alias("slime", name, OURS[ours], "B", "S0", f"at {limit}; {zero}", executed=False)
          for name, ours, limit in bands),
        Alias("slime", "mis_rs_catastrophic_token_fraction", OURS["share_below_0_0001"], "B", "S0",
              f"at rs_veto_threshold 1e-4; {zero}"),
        Alias("slime", "mis_rs_catastrophic_seq_fraction", OURS["veto_share"], "B", "S0",
              f"at rs_veto_threshold 1e-4; {zero}"),
    ]


def _nemo() -> list[Alias]:
    eps = "sum over the global number of valid tokens"
    rows = [("gen_kl_error", "kl_k3"), ("policy_kl_error", "reverse_kl_k3"), ("js_divergence_error", "js_divergence"),
            ("token_mult_prob_error", "mult_prob_error")]
    note = f"{eps}; with force_on_policy_ratio these errors hold edge E"
    per_sequence = [("mean", _SEQ_MPE_MEAN), ("max", _SEQ_MPE_MAX), ("min", _SEQ_MPE_MIN)]
    return [
        *(Alias("nemo-rl", name, OURS[ours], "B", "N", note) for name, ours in rows),
        Alias("nemo-rl", "sampling_importance_ratio", _RAW_RATIO, "B", "N", f"d not clamped; {_FRAMEWORK_ONLY_NOTE}"),
        Alias("nemo-rl", "approx_entropy", _ENTROPY_IS, "E", "N", "a sampled proxy, not the entropy; d not clamped"),
        Alias("nemo-rl", "probs_ratio", _RAW_RATIO, "U", "N", "edge U, d not clamped"),
        Alias("nemo-rl", "probs_ratio_min", OURS["ratio_min"], "U", "T", "edge U"),
        Alias("nemo-rl", "probs_ratio_max", OURS["ratio_max"], "U", "T", "edge U"),
        Alias("nemo-rl", "num_valid_samples", _SEQUENCES, "B", "T", also_needs=_PAIR),
        *(Alias("nemo-rl", f"{word}_seq_mult_prob_error", metric, "B", "S", "by sequence, before any mask")
          for word, metric in per_sequence),
    ]


def _areal() -> list[Alias]:
    at, note = "compute_logp/", f"edge E, {_FLOAT}"
    own = "v_prox is trainer_version, v_theta the version after the update"
    versions = [("proximal_avg", OURS["staleness_mean"]), ("proximal_max", OURS["staleness_max"]),
                ("proximal_min", OURS["staleness_min"]), ("theta_avg", _STALE_THETA_MEAN),
                ("theta_max", _STALE_THETA_MAX), ("theta_min", _STALE_THETA_MIN)]
    return [
        Alias("areal", at + "kl_div_direct", OURS["kl_k1"], "E", "T", note),
        Alias("areal", at + "kl_div_taylor", OURS["kl_k2"], "E", "T", note),
        Alias("areal", at + "kl_div_dual", OURS["kl_k3"], "E", "T", note),
        Alias("areal", "approx_kl", OURS["mean_delta"], "U", "T", f"edge U; {_SIGN} of kl_k1", executed=False),
        Alias("areal", at + "rollout/abs_error", OURS["mean_abs_delta"], "B", "T", _FLOAT),
        Alias("areal", at + "loglinear/abs_error", _LOGLINEAR, "B", "T", f"{own}; {_FLOAT}"),
        Alias("areal", at + "linear/abs_error", _LINEAR, "B", "T", f"{own}; {_FLOAT}"),
        *(Alias("areal", f"version_stats/sample_staleness_{name}", metric, "B", "T", executed="proximal" in name,
                differs=f"{own}; tokens with a version that every mask rule keeps") for name, metric in versions),
    ]


def _roll() -> list[Alias]:
    at = "actor/train_infer_"
    rows = [("ratio_token_mean", _RAW_RATIO, "d not clamped", frozenset[str]()),
            ("ratio_geometric_mean", _GEO_RATIO, "", frozenset[str]()),
            ("ratio_sequence_mean", _SEQ_RATIO, "", frozenset[str]()),
            ("ratio_segment_mean", _TURN_RATIO, "a segment is a run of loss_mask: turn", frozenset({"turn"})),
            ("diff_token_mean", OURS["prob_diff_signed"], "", frozenset[str]()),
            ("diff_geometric_mean", OURS["prob_diff_signed"], "", frozenset[str]()),
            ("diff_segment_mean", OURS["prob_diff_signed"], "segment means weighted by their tokens", frozenset[str]()),
            ("diff_sequence_mean", _SEQ_PROB_DIFF, "the sum over a sequence, not its mean", frozenset[str]())]
    return [Alias("roll", at + name, metric, "B", "S", differs, also_needs=needs)
            for name, metric, differs, needs in rows]


def _others() -> list[Alias]:
    trl, prime, skyrl = "sampling/sampling_logp_difference/", "mismatch_kl/all/", "minibatch_rollout_logprobs_abs_diff_"
    nan = "NaN tokens left out"
    debug, entropy = "debug/vllm_vs_local_logprob_diff_", "whose entropy it is: runs.entropy_of"
    return [
        Alias("trl", trl + "mean", OURS["mean_abs_delta"], "B", "SS", _RANKS),
        Alias("trl", trl + "max", OURS["max_abs_delta"], "B", "SS", "max over ranks"),
        Alias("trl", "entropy", OURS["entropy_mean"], "B", "SS", f"{entropy}; {_RANKS}", executed=False),
        Alias("trl", "kl", OURS["kl_k3"], "E", "T", "asynchronous trainer, edge E", executed=False),
        Alias("trl", "ratio", _RAW_RATIO, "E", "T", "asynchronous trainer, edge E", executed=False),
        Alias("open-instruct", debug + "mean", OURS["mean_abs_delta"], differs=nan),
        Alias("open-instruct", debug + "max", OURS["max_abs_delta"], differs=nan),
        Alias("open-instruct", debug + "std", OURS["std_abs_delta"], differs=nan),
        Alias("open-instruct", "debug/vllm_local_reverse_kl", OURS["reverse_kl_weighted"], differs=nan),
        Alias("open-instruct", "val/ratio", _RAW_RATIO, "U", "S", "edge U, mean of sequence means", executed=False),
        Alias("openrlhf", "vllm_kl", OURS["kl_k1"]),
        Alias("openrlhf", "ppo_kl", OURS["kl_k1"], "U", "T", "edge U"),
        Alias("tinker-cookbook", "optim/kl_sample_train_v1", OURS["kl_k1"]),
        Alias("tinker-cookbook", "optim/kl_sample_train_v2", OURS["kl_k2"]),
        Alias("tinker-cookbook", "optim/entropy", _ENTROPY_K1, differs="a sampled proxy: minus logp_infer_mean"),
        Alias("prime-rl", prime + "mean", OURS["kl_k3"], "E", "T", "edge E; with frozen samplers live tokens only"),
        Alias("prime-rl", prime + "max", _K3_MAX, "E", "T", "edge E, the worst token"),
        Alias("prime-rl", prime + "min", _K3_MIN, "E", "T", "edge E, the best token", executed=False),
        Alias("prime-rl", "kl_ent_ratio/mean", OURS["kl_over_entropy"], "E", "T", "edge E"),
        Alias("prime-rl", "entropy/all/mean", OURS["entropy_mean"], differs=entropy),
        Alias("prime-rl", "off_policy/in_flight/mean", OURS["intra_mean"], executed=False),
        Alias("prime-rl", "off_policy/in_flight/max", OURS["intra_max"], executed=False),
        Alias("prime-rl", "off_policy/in_queue/mean", OURS["inter_mean"], executed=False),
        Alias("prime-rl", "off_policy/in_queue/max", OURS["inter_max"], executed=False),
        Alias("skyrl", "policy/rollout_train_logprobs_abs_diff_mean", OURS["mean_abs_delta"], executed=False),
        Alias("skyrl", skyrl + "mean", OURS["mean_abs_delta"], "E", "T", "edge E"),
        Alias("skyrl", skyrl + "max", OURS["max_abs_delta"], "E", "T", "edge E"),
        Alias("skyrl", skyrl + "sq_mean", OURS["mean_sq_delta"], "E", "T", "edge E"),
        Alias("pipelinerl", "rl/ess", _RAW_ESS, "E", "T", "edge E, d not clamped"),
        Alias("pipelinerl", "rl/mean_abs_log_ratio_new_old", OURS["mean_abs_delta"], "E", "S",
              "edge E, mean of sequence means", executed=False),
        Alias("pipelinerl", "rl/kl_new_old", OURS["kl_k3"], "E", "S", "edge E, mean of sequence means", executed=False),
        Alias("miles", "train_rollout_logprob_abs_diff", OURS["mean_abs_delta"], "B", "S0",
              f"non-finite gaps count as 0; {_ROWS.format(0)}", executed=False),
        Alias("miles", "train_rollout_kl", _CAPPED_K3, "B", "S0",
              f"d clamped to +-20, the value capped to [-10, 10]; {_ROWS.format(0)}", executed=False),
    ]
# fmt: on


ALIASES: tuple[Alias, ...] = (
    *_verl(), *_swift(), *_slime(), *_nemo(), *_areal(), *_roll(), *_others()
)  # fmt: skip
