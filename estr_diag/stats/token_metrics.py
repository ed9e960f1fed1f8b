"""Metrics over tokens, as data.

d = logp_train - logp_infer, r = exp(d) with d clamped to +-20, p and q the probabilities of the sampled
token under inference and training engine, H the logged entropy, lag = trainer_version - policy_version.
"""

from __future__ import annotations

from estr_diag.expressions import RATIO_CLAMP, clamp
from estr_diag.measures import RATIO_ABOVE, RATIO_BELOW, band_name
from estr_diag.stats.metric import Metric, extreme, mean, moments, pearson, sample_std

_PROB_SUMS = ("sum_p_infer", "sum_p_train", "sum_p_infer2", "sum_p_train2", "sum_p_cross")
_LOGP_SUMS = ("sum_logp_infer", "sum_logp_train", "sum_logp_infer2", "sum_logp_train2", "sum_logp_cross")


def _share(side: str, bound: float) -> Metric:
    band = band_name(side, bound)
    sign = ">" if side == "above" else "<"
    whose = "trainer" if side == "above" else "sampler"
    meaning = f"tokens whose weight a bound of {bound:g} would cut: the {whose} finds them more likely than the other"
    return mean(f"share_{band}", f"n_{band}", f"share of tokens with r {sign} {bound:g}", "share", "lower", meaning)


# One entry a line or two: a table reads better than the formatter's one argument a line.
# fmt: off
TOKEN_METRICS: tuple[Metric, ...] = (
    # the gap itself
    mean("mean_abs_delta", "sum_abs_delta", "mean |d|", "nat", "lower",
         "typical disagreement of the two engines on a sampled token"),
    mean("mean_delta", "sum_delta", "mean d", "nat", "near 0",
         "signed gap; minus the k1 estimate of KL(infer || train)"),
    mean("mean_sq_delta", "sum_delta2", "mean d^2", "nat^2", "lower",
         "second moment about zero: the scale of the log-ratio"),
    moments("rms_delta", "sqrt({sum_delta2} / {n})", "sqrt(mean d^2)", "nat", "lower", "root of mean_sq_delta"),
    moments("std_abs_delta", sample_std("sum_abs_delta", "sum_delta2"), "sample std of |d| (ddof 1)", "nat", "lower",
            "spread of the disagreement"),
    extreme("max_abs_delta", "{max_abs_delta}", "max |d|", "nat", "lower", "the single worst token"),
    # divergences
    moments("kl_k1", "-{sum_delta} / {n}", "mean -d", "nat", "near 0",
            "k1 estimate of KL(infer || train); unbiased, noisy, may be negative"),
    moments("kl_k2", "{sum_delta2} / {n} / 2", "mean d^2 / 2", "nat", "lower", "k2 estimate of KL(infer || train)"),
    mean("kl_k3", "sum_k3", "mean (exp(d) - 1 - d)", "nat", "lower",
         "k3 estimate of KL(infer || train); never negative, ruled by large positive d"),
    mean("reverse_kl_k3", "sum_reverse_k3", "mean (exp(-d) - 1 + d)", "nat", "lower",
         "heavy-tailed alarm for tokens that the trainer finds unlikely; no estimate of KL(train || infer)"),
    mean("reverse_kl_weighted", "sum_reverse_kl_weighted", "mean p (ln p - ln q)", "nat", "near 0",
         "k1 weighted by its own probability; not a KL estimate from samples"),
    mean("js_divergence", "sum_js", "mean ln cosh(d / 2), which is (k3(ln q; m) + k3(ln p; m)) / 2, m = ln((p + q) / 2)",
         "nat", "lower", "symmetric divergence of the two probabilities of the sampled token; grows only as |d| / 2"),
    moments("chi2_token", "{sum_ratio2} / {n} - 1", "mean r^2 - 1", "1", "lower",
            "chi-squared divergence of tokens; the variance of the weights"),
    mean("mult_prob_error", "sum_mult_prob_error", "mean exp |d|", "1", "near 1",
         "multiplicative probability error; 1 is none"),
    moments("tv_estimate", "{sum_abs_ratio_gap} / {n} / 2", "mean |r - 1| / 2", "1", "lower",
            "estimate of the total variation distance"),
    # probabilities
    mean("prob_diff_mean", "sum_abs_prob_diff", "mean |q - p|", "probability", "lower", "absolute probability gap"),
    extreme("prob_diff_max", "{max_prob_diff}", "max |q - p|", "probability", "lower", "largest probability gap"),
    moments("prob_diff_std", sample_std("sum_abs_prob_diff", "sum_prob_diff2"), "sample std of |q - p| (ddof 1)",
            "probability", "lower", "spread of the probability gap"),
    moments("prob_pearson", pearson(*_PROB_SUMS), "Pearson(p, q)", "1", "near 1",
            "high for almost any data: never a headline"),
    moments("logp_pearson", pearson(*_LOGP_SUMS), "Pearson(ln p, ln q)", "1", "near 1",
            "correlation of the log-probs; near 0 means that the columns are not aligned"),
    # importance ratio
    mean("ratio_mean", "sum_ratio", "mean r", "1", "near 1",
         "1 in expectation when the engines differ only by sampling weights"),
    moments("ratio_std", sample_std("sum_ratio", "sum_ratio2"), "sample std of r (ddof 1)", "1", "lower",
            "spread of the weights"),
    extreme("ratio_min", f"exp({clamp('{min_delta}', -RATIO_CLAMP, RATIO_CLAMP)})", "min r", "1", "near 1",
            "smallest weight"),
    extreme("ratio_max", f"exp({clamp('{max_delta}', -RATIO_CLAMP, RATIO_CLAMP)})", "max r", "1", "near 1",
            "largest weight"),
    moments("ess_token", "{sum_ratio} * {sum_ratio} / ({n} * {sum_ratio2})", "(sum r)^2 / (n sum r^2)", "share",
            "higher", "effective sample size of token weights as a share of tokens"),
    moments("n_clamped", "{n_clamped}", "count |d| > 20", "tokens", "lower",
            "tokens whose ratio is clamped before exp"),
    *(_share("above", bound) for bound in RATIO_ABOVE),
    *(_share("below", bound) for bound in RATIO_BELOW),
    # tokens that the sampler was sure of
    moments("confident_disagreement_count", "{n_confident_disagreement}", "count of p > 0.5 and d < -2", "tokens",
            "lower", "the sampler was sure and the trainer is not: at lag 0 no healthy pair of engines does this"),
    mean("confident_disagreement", "n_confident_disagreement", "share of tokens with p > 0.5 and d < -2", "share",
         "lower", "the same as a share; with lag, moved weights count too"),
    mean("confident_disagreement_lag0", "n_confident_lag0", "share of tokens of lag 0 with p > 0.5 and d < -2",
         "share", "lower", "the same where both engines hold the same weights: engine noise alone", count="n_lag0"),
    # staleness
    mean("staleness_mean", "sum_lag", "mean lag", "runs.version_unit", "lower",
         "how old the weights are that generated a token", count="n_lag"),
    extreme("staleness_max", "{max_lag}", "max lag", "runs.version_unit", "lower", "the oldest token"),
    extreme("staleness_min", "{min_lag}", "min lag", "runs.version_unit", "none", "the freshest token"),
    # the engines alone
    mean("logp_infer_mean", "sum_logp_infer", "mean ln p", "nat", "none", "mean log-prob of the inference engine"),
    mean("logp_train_mean", "sum_logp_train", "mean ln q", "nat", "none", "mean log-prob of the training engine"),
    mean("entropy_mean", "sum_entropy", "mean H", "nat", "none",
         "mean entropy of the logged distribution (runs.entropy_of)", count="n_entropy"),
    moments("kl_over_entropy", "{sum_k3} / {n} / nullif({sum_entropy} / nullif({n_entropy}, 0), 0)",
            "kl_k3 / entropy_mean", "1", "lower", "ratio of means, not the mean of a ratio"),
    mean("scaled_sq_delta", "sum_scaled2", "mean d^2 / (H + 0.01)", "nat", "lower", "ESTR's score, on average",
         count="n_entropy"),
)
"""In display order."""
# fmt: on
