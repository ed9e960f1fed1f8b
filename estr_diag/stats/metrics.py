"""The consistency metrics as data: one entry a number that a dashboard could show.

A metric is written over rolled-up measures, never over tokens, so that any split of the log gives the
same value. Names and formulas follow the field; d = logp_train - logp_infer, r = exp(d) with d clamped
to +-20, p and q the probabilities under inference and training engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estr_diag.expressions import MEASURES, RATIO_CLAMP, clamp

Aggregation = Literal[
    "token mean", "token extreme", "token moments", "sequence mean", "sequence extreme", "sequence moments"
]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number: its formula, unit, aggregation and meaning.

    Parameters
    ----------
    mean_of
        (sum, count) measures when the metric is a plain mean of tokens; it then has a standard error.
    sql
        Otherwise, SQL over the roll-up: over the measures of a group for a token metric, over one
        sequence's measures for a sequence metric (aggregated by `over_sequences`).
    over_sequences
        avg, max, min or an aggregate text with ``{x}`` for the per-sequence value.
    """

    name: str
    formula: str
    unit: str
    aggregation: Aggregation
    meaning: str
    mean_of: tuple[str, str] | None = None
    sql: str | None = None
    over_sequences: str | None = None

    @property
    def measures(self) -> tuple[str, ...]:
        """Measures that it is made of."""
        if self.mean_of:
            return self.mean_of
        assert self.sql is not None
        return tuple(name for name in MEASURES if f"{{{name}}}" in self.sql)

    @property
    def needs(self) -> frozenset[str]:
        """Columns without which it cannot be computed."""
        return frozenset().union(*(MEASURES[m].needs for m in self.measures))

    @property
    def per_sequence(self) -> bool:
        """Whether it is made of one value a sequence."""
        return self.over_sequences is not None

    def over_sequence(self) -> str:
        """Return the value over one sequence's row of measures; null for a sequence without counted tokens."""
        assert self.sql is not None
        return f"case when n > 0 then {self.sql.format(**{name: name for name in self.measures})} end"

    def over_group(self) -> str:
        """Return the value as an aggregate over the rows of a group."""
        assert self.sql is not None
        if self.over_sequences is not None:
            return self.over_sequences.format(x=self.over_sequence())
        return self.sql.format(**{name: f"{MEASURES[name].how}({name})" for name in self.measures})


def _mean(name: str, total: str, formula: str, unit: str, meaning: str, count: str = "n") -> Metric:
    return Metric(name, formula, unit, "token mean", meaning, mean_of=(total, count))


def _token(name: str, sql: str, formula: str, unit: str, meaning: str, kind: Aggregation = "token moments") -> Metric:
    return Metric(name, formula, unit, kind, meaning, sql=sql)


def _sequence(name: str, sql: str, formula: str, unit: str, meaning: str, over: str = "avg({x})") -> Metric:
    kind: Aggregation = "sequence mean" if over == "avg({x})" else "sequence extreme"
    return Metric(name, formula, unit, kind, meaning, sql=sql, over_sequences=over)


def _variance(total: str, squares: str) -> str:
    return f"case when {{n}} > 1 then greatest(({squares} - {total} * {total} / {{n}}) / ({{n}} - 1), 0) end"


def _pearson(x: str, y: str, xx: str, yy: str, xy: str) -> str:
    # The products cancel when a column hardly varies; below 1e-12 of its size what is left is rounding.
    varies = f"({{n}} * {{{xx}}} - {{{x}}} * {{{x}}} > 1e-12 * {{n}} * {{{xx}}}) and ({{n}} * {{{yy}}} - {{{y}}} * {{{y}}} > 1e-12 * {{n}} * {{{yy}}})"
    return (
        f"case when {varies} then ({{n}} * {{{xy}}} - {{{x}}} * {{{y}}}) / "
        f"(sqrt({{n}} * {{{xx}}} - {{{x}}} * {{{x}}}) * sqrt({{n}} * {{{yy}}} - {{{y}}} * {{{y}}})) end"
    )


_SEQUENCE_SUM = clamp("{sum_delta}", -RATIO_CLAMP, RATIO_CLAMP)

METRICS: tuple[Metric, ...] = (
    # the gap itself
    _mean(
        "mean_abs_delta",
        "sum_abs_delta",
        "mean |d|",
        "nat",
        "typical disagreement of the two engines on a sampled token",
    ),
    _mean("mean_delta", "sum_delta", "mean d", "nat", "signed gap; minus the k1 estimate of KL(infer || train)"),
    _mean("mean_sq_delta", "sum_delta2", "mean d^2", "nat^2", "second moment about zero: the scale of the log-ratio"),
    _token("rms_delta", "sqrt({sum_delta2} / {n})", "sqrt(mean d^2)", "nat", "root of mean_sq_delta"),
    _token(
        "std_abs_delta",
        f"sqrt({_variance('{sum_abs_delta}', '{sum_delta2}')})",
        "sample std of |d| (ddof 1)",
        "nat",
        "spread of the disagreement",
    ),
    _token("max_abs_delta", "{max_abs_delta}", "max |d|", "nat", "the single worst token", "token extreme"),
    # divergences
    Metric(
        "kl_k1",
        "mean -d",
        "nat",
        "token moments",
        "k1 estimate of KL(infer || train); unbiased, noisy, may be negative",
        sql="-{sum_delta} / {n}",
    ),
    Metric(
        "kl_k2",
        "mean d^2 / 2",
        "nat",
        "token moments",
        "k2 estimate of KL(infer || train)",
        sql="{sum_delta2} / {n} / 2",
    ),
    _mean(
        "kl_k3",
        "sum_k3",
        "mean (exp(d) - 1 - d)",
        "nat",
        "k3 estimate of KL(infer || train); never negative, ruled by large positive d",
    ),
    _mean(
        "reverse_kl_k3",
        "sum_reverse_k3",
        "mean (exp(-d) - 1 + d)",
        "nat",
        "heavy-tailed alarm for tokens that the trainer finds unlikely; no estimate of KL(train || infer)",
    ),
    _mean(
        "reverse_kl_weighted",
        "sum_reverse_kl_weighted",
        "mean p (ln p - ln q)",
        "nat",
        "k1 weighted by its own probability; not a KL estimate from samples",
    ),
    _token(
        "chi2_token",
        "{sum_ratio2} / {n} - 1",
        "mean r^2 - 1",
        "1",
        "chi-squared divergence of tokens; the variance of the weights",
    ),
    _mean("mult_prob_error", "sum_mult_prob_error", "mean exp |d|", "1", "multiplicative probability error; 1 is none"),
    Metric(
        "tv_estimate",
        "mean |r - 1| / 2",
        "1",
        "token moments",
        "estimate of the total variation distance",
        sql="{sum_abs_ratio_gap} / {n} / 2",
    ),
    # probabilities
    _mean("prob_diff_mean", "sum_abs_prob_diff", "mean |q - p|", "probability", "absolute probability gap"),
    _mean("prob_diff_signed", "sum_prob_diff", "mean (q - p)", "probability", "signed probability gap"),
    _token(
        "prob_diff_max", "{max_prob_diff}", "max |q - p|", "probability", "largest probability gap", "token extreme"
    ),
    _token(
        "prob_diff_std",
        f"sqrt({_variance('{sum_abs_prob_diff}', '{sum_prob_diff2}')})",
        "sample std of |q - p| (ddof 1)",
        "probability",
        "spread of the probability gap",
    ),
    _token(
        "prob_pearson",
        _pearson("sum_p_infer", "sum_p_train", "sum_p_infer2", "sum_p_train2", "sum_p_cross"),
        "Pearson(p, q)",
        "1",
        "high for almost any data: never a headline",
    ),
    _token(
        "logp_pearson",
        _pearson("sum_logp_infer", "sum_logp_train", "sum_logp_infer2", "sum_logp_train2", "sum_logp_cross"),
        "Pearson(ln p, ln q)",
        "1",
        "correlation of the log-probs; near 0 means that the columns are not aligned",
    ),
    # importance ratio
    _mean(
        "ratio_mean", "sum_ratio", "mean r", "1", "1 in expectation when the engines differ only by sampling weights"
    ),
    _token(
        "ratio_std",
        f"sqrt({_variance('{sum_ratio}', '{sum_ratio2}')})",
        "sample std of r (ddof 1)",
        "1",
        "spread of the weights",
    ),
    _token(
        "ratio_min",
        f"exp({clamp('{min_delta}', -RATIO_CLAMP, RATIO_CLAMP)})",
        "min r",
        "1",
        "smallest weight",
        "token extreme",
    ),
    _token(
        "ratio_max",
        f"exp({clamp('{max_delta}', -RATIO_CLAMP, RATIO_CLAMP)})",
        "max r",
        "1",
        "largest weight",
        "token extreme",
    ),
    _token(
        "ess_token",
        "{sum_ratio} * {sum_ratio} / ({n} * {sum_ratio2})",
        "(sum r)^2 / (n sum r^2)",
        "share",
        "effective sample size of token weights as a share of tokens",
    ),
    _token("n_clamped", "{n_clamped}", "count |d| > 20", "tokens", "tokens whose ratio is clamped before exp"),
    # the engines alone
    _mean("logp_infer_mean", "sum_logp_infer", "mean ln p", "nat", "mean log-prob of the inference engine"),
    _mean("logp_train_mean", "sum_logp_train", "mean ln q", "nat", "mean log-prob of the training engine"),
    _mean(
        "entropy_mean",
        "sum_entropy",
        "mean H",
        "nat",
        "mean entropy of the logged distribution (runs.entropy_of)",
        count="n_entropy",
    ),
    _token(
        "kl_over_entropy",
        "{sum_k3} / {n} / nullif({sum_entropy} / nullif({n_entropy}, 0), 0)",
        "kl_k3 / entropy_mean",
        "1",
        "ratio of means, not the mean of a ratio",
    ),
    _mean(
        "scaled_sq_delta", "sum_scaled2", "mean d^2 / (H + 0.01)", "nat", "ESTR's score, on average", count="n_entropy"
    ),
    # sequences
    _sequence(
        "infer_ppl",
        "exp(-{sum_logp_infer} / {n})",
        "mean over sequences of exp(-mean ln p)",
        "1",
        "perplexity of the inference engine",
    ),
    _sequence(
        "train_ppl",
        "exp(-{sum_logp_train} / {n})",
        "mean over sequences of exp(-mean ln q)",
        "1",
        "perplexity of the training engine",
    ),
    _sequence(
        "log_ppl_diff",
        "-{sum_delta} / {n}",
        "mean over sequences of -mean d",
        "nat",
        "log perplexity of the trainer minus that of the engine",
    ),
    _sequence(
        "log_ppl_abs_diff",
        "abs({sum_delta} / {n})",
        "mean over sequences of |mean d|",
        "nat",
        "size of the log perplexity gap",
    ),
    _sequence(
        "log_ppl_diff_max",
        "-{sum_delta} / {n}",
        "max over sequences of -mean d",
        "nat",
        "the sequence that the trainer finds most unlikely",
        "max({x})",
    ),
    _sequence(
        "log_ppl_diff_min", "-{sum_delta} / {n}", "min over sequences of -mean d", "nat", "the other end", "min({x})"
    ),
    _sequence(
        "ppl_ratio", "exp(-{sum_delta} / {n})", "mean over sequences of exp(-mean d)", "1", "inverse geometric ratio"
    ),
    _sequence(
        "chi2_seq",
        f"power(exp({_SEQUENCE_SUM}), 2) - 1",
        "mean over sequences of exp(2 sum d) - 1, sum d clamped to +-20",
        "1",
        "chi-squared of whole sequences; explodes with length",
    ),
    _sequence(
        "ess_sequence",
        f"exp({_SEQUENCE_SUM})",
        "(sum w)^2 / (C sum w^2), w = exp(sum d) clamped to +-20",
        "share",
        "effective sample size of sequence weights as a share of sequences",
        "power(sum({x}), 2) / (count({x}) * sum(power({x}, 2)))",
    ),
    _sequence(
        "seq_delta_sum_mean", "{sum_delta}", "mean over sequences of sum d", "nat", "log-ratio of a whole sequence"
    ),
    _sequence(
        "seq_delta_sum_max_abs",
        "abs({sum_delta})",
        "max over sequences of |sum d|",
        "nat",
        "the sequence with the most extreme product ratio",
        "max({x})",
    ),
)
"""In display order."""

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
}
"""Clean values and limits in circulation: short form, and source. They disagree by orders of magnitude, so
the source is always part of them."""
