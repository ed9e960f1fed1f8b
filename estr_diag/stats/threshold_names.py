"""Metric names that depend on a bound of the trainer's configuration, as data.

A framework that corrects for the gap bounds its importance weights, and logs what the bounds did. The
same name is another number under another bound, so `CORRECTIONS` says which ways of bounding a framework
has and what bounds it defaults to, and `THRESHOLD_NAMES` what each name is under them. Read in source at
the commits that ``tests/data/oracle`` names.

Formulas are SQL over one row a sequence. A sequence without counted tokens is a row too: n is 0, its
ratio 1. ``{words}`` stand for parts that the correction decides (see `PARTS`), so one formula serves
weights of tokens and of whole sequences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from estr_diag.stats.corrections import CORRECTIONS, Correction, Level, Mode
from estr_diag.stats.metric import Direction


@dataclass(frozen=True, slots=True)
class ThresholdName:
    """A number as a framework's dashboard names it, under some of its corrections.

    Parameters
    ----------
    formula
        In words; r is the bounded weight of a token.
    sql
        Aggregate over the sequences of a group, with ``{parts}``.
    under
        (level, mode) of the corrections that log it in this form.
    aggregation
        What it is taken over.
    differs
        What a reader who expects our metric must know.
    """

    framework: str
    name: str
    formula: str
    sql: str
    under: tuple[tuple[Level, Mode], ...]
    aggregation: str
    unit: str
    direction: Direction
    meaning: str
    differs: str = ""

    @property
    def key(self) -> str:
        """The name that is unique over frameworks; one number under each correction."""
        return f"{self.framework}:{self.name}"

    def corrections(self) -> tuple[Correction, ...]:
        """Return the corrections that log it in this form."""
        return tuple(c for c in CORRECTIONS if c.framework == self.framework and (c.level, c.mode) in self.under)

    def over_group(self, parts: Mapping[str, str]) -> str:
        """Return the value as an aggregate over sequences."""
        return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], self.sql)


_T, _R, _B = "over counted tokens", "over all sequences, those without counted tokens too", "over ranks, here one"
_TOKEN: tuple[tuple[Level, Mode], ...] = (("token", "truncate"), ("token", "mask"))
_SEQUENCE: tuple[tuple[Level, Mode], ...] = (("sequence", "truncate"), ("sequence", "mask"))
_BAND: tuple[tuple[Level, Mode], ...] = (("token", "mask"), ("sequence", "mask"))
_MEAN_W, _ALL = "sum({w}) / nullif(sum(n), 0)", (*_TOKEN, *_SEQUENCE)
_SHARE, _ROWS = "sum({{{0}}}) / nullif(sum(n), 0)", "sum({{{0}}}) / count(*)"
_OF_TOKENS = "sum(n * {{{0}}}) / nullif(sum(n), 0)"
_EPS = "divides by n + 1e-8"
_BEFORE = "before batch normalisation"
_EMPTY_1 = "a sequence without counted tokens counts as a ratio of 1"
_EMPTY_0 = "a sequence without counted tokens counts as 0"


# fmt: off
def _verl() -> list[ThresholdName]:
    at, name = "rollout_corr/rollout_is_", "verl"
    own = "coalesce({w} / nullif(n, 0), 0)"
    before = "coalesce({raw} / nullif(n, 0), 0)"
    of_sequences: list[tuple[str, str, str, Direction]] = [
        ("mean", "mean", "avg({0})", "near 1"), ("std", "sample std", "coalesce(stddev_samp({0}), 0)", "lower"),
        ("max", "max", "max({0})", "near 1"), ("min", "min", "min({0})", "near 1"),
        ("max_deviation", "max distance from 1", "max(abs({0} - 1))", "lower"),
    ]
    corr = f"{_EPS}; {_BEFORE}; in bypass mode the same name holds edge E"
    return [
        ThresholdName(name, at + "mean", "mean r", _MEAN_W, _ALL, _T, "1", "near 1", "mean bounded weight", corr),
        ThresholdName(name, at + "max", "max r", "max({w_max})", _TOKEN, _T, "1", "near 1", "largest bounded weight", _BEFORE),
        ThresholdName(name, at + "min", "min r", "min({w_min})", _TOKEN, _T, "1", "near 1", "smallest bounded weight", _BEFORE),
        ThresholdName(name, at + "max", "max exp(sum d), sum d clamped to 20 above", "exp(least(max({log}), 20))", _SEQUENCE,
                      _R, "1", "near 1", "largest product ratio, not bounded", f"raw at sequence level; {_EMPTY_1}"),
        ThresholdName(name, at + "min", "min exp(sum d), not clamped", "exp(min({log}))", _SEQUENCE,
                      _R, "1", "near 1", "smallest product ratio, not bounded", f"raw at sequence level; {_EMPTY_1}"),
        ThresholdName(name, at + "std", "sqrt(mean r^2 - (mean r)^2)",
                      f"sqrt(greatest(sum({{w2}}) / nullif(sum(n), 0) - power({_MEAN_W}, 2), 0))", _ALL, _T, "1", "lower",
                      "spread of the bounded weights", f"population std; {corr}"),
        ThresholdName(name, at + "eff_sample_size", "1 / mean (r / mean r)^2",
                      f"power({_MEAN_W}, 2) / nullif(sum({{w2}}) / nullif(sum(n), 0), 0)", _ALL, _T, "share", "higher",
                      "effective sample size of the bounded weights", f"weights clamped to [0, high], mean + 1e-8; {corr}"),
        ThresholdName(name, at + "ratio_fraction_high", "share of tokens with ratio > high", _SHARE.format("over"), _TOKEN, _T,
                      "share", "lower", "weights that the upper bound cuts", corr),
        ThresholdName(name, at + "ratio_fraction_low", "share of tokens with ratio < low (1 / high when truncated)",
                      _SHARE.format("under"), _TOKEN, _T, "share", "lower", "weights below the mirrored bound", corr),
        ThresholdName(name, at + "ratio_fraction_high", "share of sequences with sum d > ln high",
                      "avg(({log} > ln({high}))::integer)", _SEQUENCE, _R, "share", "lower",
                      "sequences that the upper bound cuts", _EMPTY_1),
        ThresholdName(name, at + "ratio_fraction_low", "share of sequences with sum d < ln low (1 / high when truncated)",
                      "avg(({log} < ln({low}))::integer)", _SEQUENCE, _R, "share", "lower",
                      "sequences below the mirrored bound", _EMPTY_1),
        ThresholdName(name, at + "oob_ratio", "share of tokens with a ratio outside [low, high]", _SHARE.format("outside"),
                      (("token", "mask"),), _T, "share", "lower", "tokens that lose their weight", corr),
        ThresholdName(name, at + "oob_ratio", "share of tokens in sequences with a ratio outside [low, high]",
                      _OF_TOKENS.format("outside"), (("sequence", "mask"),), _T, "share", "lower",
                      "tokens that lose their weight", corr),
        *(ThresholdName(name, at + f"seq_{word}", f"{words} of a sequence's mean r", sql.format(own), _ALL, _R, "1", direction,
                        "mean bounded weights of sequences", _EMPTY_0)
          for word, words, sql, direction in of_sequences),
        *(ThresholdName(name, at + f"seq_fraction_{word}", f"share of sequences whose mean ratio before bounds is {sign} {bound}",
                        f"avg(({before} {sign} {{{bound}}})::integer)", _ALL, _R, "share", "lower",
                        "sequences with an extreme mean ratio",
                        f"before 2026-06 the bounded mean; low is 1 / high when truncated; {_EMPTY_0}")
          for word, sign, bound in (("high", ">", "high"), ("low", "<", "low"))),
    ]


def _trl() -> list[ThresholdName]:
    at = "sampling/importance_sampling_ratio/"
    ranks = "ranks are averaged (min over ranks for min, max for max)"
    return [
        *(ThresholdName("trl", at + word, f"{word} r over tokens", sql, _TOKEN, _T, "1", "near 1", "bounded weights", ranks)
          for word, sql in (("min", "min({w_min})"), ("mean", _MEAN_W), ("max", "max({w_max})"))),
        *(ThresholdName("trl", at + word, f"{word} r over sequences", sql, _SEQUENCE, _R, "1", "near 1",
                        "bounded weights", f"one value a sequence, whatever its length; {_EMPTY_1}; {ranks}")
          for word, sql in (("min", "min({w_min})"), ("mean", "avg({w_min})"), ("max", "max({w_max})"))),
    ]


def _nemo() -> list[ThresholdName]:
    reject: tuple[tuple[Level, Mode], ...] = (("sequence", "reject"),)
    error = "sum_mult_prob_error / nullif(n, 0)"
    nan = "weights that overflow count as 0"
    return [
        ThresholdName("nemo-rl", "sampling_importance_ratio", "mean r", _MEAN_W, (*_TOKEN, ("sequence", "mask")), _T, "1",
                      "near 1", "mean bounded weight", f"token weights inside kept sequences for seq-mask-tis; {nan}"),
        ThresholdName("nemo-rl", "is_oob_ratio", "share of tokens with a ratio > high", _SHARE.format("over"),
                      (("token", "truncate"),), _T, "share", "lower", "weights that the upper bound cuts",
                      "tokens below low do not count"),
        ThresholdName("nemo-rl", "is_oob_ratio", "share of tokens outside [low, high]", _SHARE.format("outside"),
                      (("token", "mask"),), _T, "share", "lower", "tokens that lose their weight"),
        ThresholdName("nemo-rl", "is_oob_ratio", "share of sequences with exp(mean d) outside [low, high]",
                      "sum({outside}) filter (n > 0) / nullif(count(*) filter (n > 0), 0)", (("sequence", "mask"),),
                      "over sequences with counted tokens", "share", "lower", "sequences that lose their weight"),
        ThresholdName("nemo-rl", "num_masked_seqs", "count of sequences with mean exp |d| > high",
                      f"count(*) filter (n > 0 and {error} > {{high}})", reject, "over sequences with counted tokens",
                      "sequences", "lower", "sequences that the threshold removes",
                      "logged as num_masked_seqs_by_logprob_error"),
        *(ThresholdName("nemo-rl", f"{word}_seq_mult_prob_error_after_mask", f"{word} over kept sequences of mean exp |d|",
                        f"{sql}({error}) filter (n > 0 and {error} <= {{high}})", reject, "over kept sequences", "1",
                        "near 1", "multiplicative probability error of what is left",
                        "0 when nothing is kept; here no value")
          for word, sql in (("max", "max"), ("mean", "avg"), ("min", "min"))),
    ]


def _swift() -> list[ThresholdName]:
    at, ranks = "rollout_correction/", "ranks are averaged, however many tokens each holds"
    return [
        ThresholdName("ms-swift", at + "is_weight_mean", "mean r", _MEAN_W, _ALL, _T, "1", "near 1", "mean bounded weight",
                      f"a sequence ratio is exp(mean d); sequence_mask keeps token ratios inside kept sequences; {ranks}"),
        ThresholdName("ms-swift", at + "ess", "1 / mean (r / mean r)^2, r clamped to [1 / high, high]",
                      "power(sum({f}) / nullif(sum(n), 0), 2) / nullif(sum({f2}) / nullif(sum(n), 0), 0)", _ALL, _T,
                      "share", "higher", "effective sample size",
                      f"masked tokens count as 1 / high, so masking more can raise it; mean + 1e-8; {ranks}"),
        ThresholdName("ms-swift", at + "clipped_frac", "share of tokens with ratio > high", _SHARE.format("over"), _TOKEN, _T,
                      "share", "lower", "weights that the bound cuts", ranks),
        ThresholdName("ms-swift", at + "clipped_frac", "share of sequences with exp(mean d) > high", _ROWS.format("over"),
                      _SEQUENCE, _R, "share", "lower", "sequences that the bound cuts", f"{_EMPTY_1}; {ranks}"),
    ]


def _skyrl() -> list[ThresholdName]:
    rows = [("masked_ratio", "outside", "outside [low, high]"), ("over_high_ratio", "over", "above high"),
            ("under_low_ratio", "under", "below low")]
    kinds: list[tuple[str, str, Level]] = [("geo", "mean", "geometric"), ("product", "sum", "sequence")]
    every: tuple[tuple[Level, Mode], ...] = (*_ALL, ("geometric", "mask"), ("token", "reject"))
    free = "the bounds do not change it, but it is logged only with a correction; d clamped to +-20"
    return [
        ThresholdName("skyrl", "is_ratio_mean", "mean ratio", "sum(sum_ratio) / nullif(sum(n), 0)", every, _T, "1", "near 1",
                      "mean ratio before any bound", free),
        ThresholdName("skyrl", "is_ratio_max", "max ratio", "exp(least(max(max_delta), 20))", every, _T, "1", "near 1",
                      "largest ratio before any bound", free),
        ThresholdName("skyrl", "tis_token_clip_high_ratio", "share of tokens with ratio > high", _SHARE.format("over"),
                      (("token", "truncate"),), _T, "share", "lower", "weights that the bound cuts"),
        ThresholdName("skyrl", "tis_seq_clip_high_ratio", "share of sequences with exp(sum d) > high", _ROWS.format("over"),
                      (("sequence", "truncate"),), _R, "share", "lower", "sequences that the bound cuts", _EMPTY_1),
        ThresholdName("skyrl", "token_mask_ratio", "share of tokens outside [low, high]", _SHARE.format("outside"),
                      (("token", "mask"),), _T, "share", "lower", "tokens that the mask drops"),
        *(ThresholdName("skyrl", f"{prefix}_sequence_mask_{name}", f"share of sequences with exp({total} d) {words}",
                        _ROWS.format(part), ((level, "mask"),), _R, "share", "lower", "sequences that the mask drops", _EMPTY_1)
          for prefix, total, level in kinds for name, part, words in rows),
        *(ThresholdName("skyrl", f"outlier_seq_{name}", f"share of sequences with any token {words}",
                        _ROWS.format(part), (("token", "reject"),), _R, "share", "lower",
                        "sequences that one token rejects", _EMPTY_1)
          for name, part, words in rows),
    ]


def _open_instruct() -> list[ThresholdName]:
    note = "d clamped to +-10, which no bound below exp(10) sees"
    cut: tuple[tuple[Level, Mode], ...] = (("token", "truncate"),)
    drop: tuple[tuple[Level, Mode], ...] = (("token", "mask"),)
    return [
        ThresholdName("open-instruct", "val/rho_weight", "mean r", _MEAN_W, _TOKEN, _T, "1", "near 1", "mean bounded weight",
                      note),
        ThresholdName("open-instruct", "val/rho_clipfrac", "share of tokens outside [low, high]", _SHARE.format("outside"),
                      cut, _T, "share", "lower", "weights that the bounds cut", f"0 under a mask; {note}"),
        *(ThresholdName("open-instruct", f"val/rho_drop_{name}frac", f"share of tokens {words}", _SHARE.format(part), drop,
                        _T, "share", "lower", "tokens that the mask drops", f"0 under a clamp; {note}")
          for name, words, part in (("", "outside [low, high]", "outside"), ("high_", "above high", "over"),
                                    ("low_", "below low", "under"))),
    ]


THRESHOLD_NAMES: tuple[ThresholdName, ...] = (
    *_verl(), *_trl(), *_nemo(), *_swift(), *_skyrl(), *_open_instruct(),
    ThresholdName("slime", "tis_clipfrac", "mean over sequences of the share of tokens outside [low, high]",
                  "avg(coalesce({outside} / nullif(n, 0), 0))", _TOKEN, _R, "share", "lower",
                  "weights that the bounds cut", _EMPTY_0),
)
# fmt: on


def threshold_candidates(name: str) -> dict[str, tuple[ThresholdName, ...]]:
    """Return the entries that `name` may mean, by key: a full key, a whole dashboard name, or the end of one."""
    whole = [entry for entry in THRESHOLD_NAMES if name in (entry.key, entry.name)]
    found = whole or [entry for entry in THRESHOLD_NAMES if entry.key.endswith(("/" + name, ":" + name))]
    return {key: tuple(e for e in found if e.key == key) for key in dict.fromkeys(e.key for e in found)}
