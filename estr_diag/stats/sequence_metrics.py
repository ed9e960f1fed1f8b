"""Metrics made of one value a sequence, as data. Sequences without counted tokens are left out.

d, p, q and lag as in `token_metrics`; "mean d" and "sum d" are over the counted tokens of one sequence.
"""

from __future__ import annotations

import math

from estr_diag.expressions import RATIO_CLAMP, clamp
from estr_diag.stats.metric import Metric, sequence

VETO = 1e-4
"""A token with r below it vetoes its sequence (slime ``rs_veto_threshold``, verl 2025)."""

_WEIGHT = f"exp({clamp('{sum_delta}', -RATIO_CLAMP, RATIO_CLAMP)})"
_STD = "stddev_samp({x})"

# One entry a line or two: a table reads better than the formatter's one argument a line.
# fmt: off
SEQUENCE_METRICS: tuple[Metric, ...] = (
    sequence("prob_diff_signed", "{sum_prob_diff} / {n}", "mean over sequences of mean (q - p)", "probability",
             "near 0", "signed probability gap"),
    # perplexity
    sequence("infer_ppl", "exp(-{sum_logp_infer} / {n})", "mean over sequences of exp(-mean ln p)", "1", "none",
             "perplexity of the inference engine"),
    sequence("train_ppl", "exp(-{sum_logp_train} / {n})", "mean over sequences of exp(-mean ln q)", "1", "none",
             "perplexity of the training engine"),
    sequence("infer_log_ppl", "-{sum_logp_infer} / {n}", "mean over sequences of -mean ln p", "nat", "none",
             "log perplexity of the inference engine"),
    sequence("train_log_ppl", "-{sum_logp_train} / {n}", "mean over sequences of -mean ln q", "nat", "none",
             "log perplexity of the training engine"),
    sequence("log_ppl_diff", "-{sum_delta} / {n}", "mean over sequences of -mean d", "nat", "near 0",
             "log perplexity of the trainer minus that of the engine"),
    sequence("log_ppl_abs_diff", "abs({sum_delta} / {n})", "mean over sequences of |mean d|", "nat", "lower",
             "size of the log perplexity gap"),
    sequence("log_ppl_diff_max", "-{sum_delta} / {n}", "max over sequences of -mean d", "nat", "near 0",
             "the sequence that the trainer finds most unlikely", "max({x})"),
    sequence("log_ppl_diff_min", "-{sum_delta} / {n}", "min over sequences of -mean d", "nat", "near 0",
             "the other end", "min({x})"),
    sequence("ppl_ratio", "exp(-{sum_delta} / {n})", "mean over sequences of exp(-mean d)", "1", "near 1",
             "inverse geometric ratio"),
    # weights of whole sequences
    sequence("chi2_seq", f"power({_WEIGHT}, 2) - 1", "mean over sequences of exp(2 sum d) - 1, sum d clamped to +-20",
             "1", "lower", "chi-squared of whole sequences; explodes with length"),
    sequence("ess_sequence", _WEIGHT, "(sum w)^2 / (C sum w^2), w = exp(sum d) clamped to +-20", "share", "higher",
             "effective sample size of sequence weights as a share of sequences",
             "power(sum({x}), 2) / (count({x}) * sum(power({x}, 2)))"),
    # the log-ratio of a sequence: sum, mean, most extreme token
    sequence("seq_delta_sum_mean", "{sum_delta}", "mean over sequences of sum d", "nat", "near 0",
             "log-ratio of a whole sequence"),
    sequence("seq_delta_sum_std", "{sum_delta}", "sample std over sequences of sum d (ddof 1)", "nat", "lower",
             "spread of the product ratio; grows with length even for healthy engines", _STD),
    sequence("seq_delta_sum_max_abs", "abs({sum_delta})", "max over sequences of |sum d|", "nat", "lower",
             "the sequence with the most extreme product ratio", "max({x})"),
    sequence("seq_delta_mean", "{sum_delta} / {n}", "mean over sequences of mean d", "nat", "near 0",
             "log of the geometric ratio; minus log_ppl_diff"),
    sequence("seq_delta_mean_std", "{sum_delta} / {n}", "sample std over sequences of mean d (ddof 1)", "nat", "lower",
             "spread of the geometric ratio: what a geometric band must be wider than", _STD),
    sequence("seq_delta_mean_max_abs", "abs({sum_delta} / {n})", "max over sequences of |mean d|", "nat", "lower",
             "the sequence with the most extreme geometric ratio", "max({x})"),
    sequence("seq_delta_max_abs", "{max_abs_delta}", "mean over sequences of max |d|", "nat", "lower",
             "the worst token of a typical sequence; grows with length"),
    sequence("veto_share", f"({{min_delta}} < {math.log(VETO)!r})::integer::double",
             "share of sequences with any d < ln 1e-4", "share", "lower",
             "sequences with a token that the trainer would hardly ever sample"),
    # weight versions inside a sequence
    sequence("intra_mean", "{max_version} - {min_version}", "mean over sequences of v_last - v_first",
             "runs.version_unit", "lower", "weight updates during the generation of a sequence", count="n_version"),
    sequence("intra_max", "{max_version} - {min_version}", "max over sequences of v_last - v_first",
             "runs.version_unit", "lower", "the sequence that spans the most versions", "max({x})", count="n_version"),
    sequence("inter_mean", "{min_lag}", "mean over sequences of v_trainer - v_last", "runs.version_unit", "lower",
             "updates between the end of a sequence and its use", count="n_lag"),
    sequence("inter_max", "{min_lag}", "max over sequences of v_trainer - v_last", "runs.version_unit", "lower",
             "the sequence that waited longest", "max({x})", count="n_lag"),
    sequence("switch_share", "({max_version} > {min_version})::integer::double",
             "share of sequences with more than one version", "share", "none",
             "partial rollouts: sequences whose weights changed while they were generated", count="n_version"),
)
"""In display order."""
# fmt: on
