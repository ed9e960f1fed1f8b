"""How trainers correct importance ratios: which ratio, truncated or masked, between which bounds.

Each entry is one configuration of a trainer, with the option that sets it and its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from estr_diag.expressions import RATIO_CLAMP
from estr_diag.measures import Ratio, side_name, weight_name

Level = Literal["token", "sequence", "geometric"]
"""As the framework's configuration calls it."""
Mode = Literal["truncate", "mask", "reject"]
"""A weight outside the bounds is moved to the bound, set to 0, or its sequence leaves the batch."""

PARTS: Mapping[str, str] = {
    "w": "sum of the bounded weights of a sequence's tokens",
    "w2": "sum of their squares",
    "w_min": "the smallest of them",
    "w_max": "the largest of them",
    "f": "as w, every weight raised to 1 / high",
    "f2": "as w2, every weight raised to 1 / high",
    "raw": "sum of the weights before any bound",
    "over": "tokens with a ratio above high; for sequences 0 or 1",
    "under": "tokens with a ratio below low, or below 1 / high where there is no low; for sequences 0 or 1",
    "outside": "tokens outside [low, high]; for sequences 0 or 1",
    "log": "log-ratio of the sequence, not clamped",
    "low": "the lower bound in use",
    "high": "the upper bound",
}
"""What a formula may name."""


@dataclass(frozen=True, slots=True)
class Correction:
    """One way in which a framework bounds its weights.

    Parameters
    ----------
    config
        The framework's own options.
    low, high
        Bounds where the configuration gives none: the framework's default, or where it has none (see
        `config`) the value in its recipes.
    bounds
        The bounds that can be set.
    ratio
        What is held against the bounds: the ratio of each token, of any one token of a sequence, or the
        sequence's own: product over its tokens, their geometric mean, or its multiplicative probability error.
    clamp
        Whether d (or the sum of d) is clamped to +-20 before exp.
    token_inside
        Tokens of a kept sequence keep their own ratios as weights; otherwise all get the sequence's.
    """

    framework: str
    level: Level
    mode: Mode
    config: str
    low: float | None
    high: float
    bounds: frozenset[str]
    ratio: Literal["token", "any_token", "product", "geometric", "mult_prob_error"]
    clamp: Ratio
    token_inside: bool = False

    @property
    def key(self) -> tuple[str, Level, Mode]:
        """What it is looked up by."""
        return self.framework, self.level, self.mode

    @property
    def parameters(self) -> str:
        """The bounds that its numbers depend on, with their defaults, in words."""
        values = {"low": "none" if self.low is None else f"{self.low:g}", "high": f"{self.high:g}"}
        listed = ", ".join(f"{name} (default {values[name]})" for name in ("low", "high") if name in self.bounds)
        return f"level {self.level}, mode {self.mode}: {listed}; {self.config}"

    def parts(self, low: float | None, high: float) -> dict[str, str]:
        """Return `PARTS` as SQL over the measures of one sequence's row.

        Parameters
        ----------
        low, high
            The bounds; a weight has no lower bound where `low` is None.
        """
        least, lower = low or 0.0, 1 / high if low is None else low
        common = {"low": repr(lower), "high": repr(high), "log": self._log()}
        return common | (
            self._token(least, lower, high)
            if self.ratio in ("token", "any_token")
            else self._sequence(least, lower, high)
        )

    def _token(self, least: float, lower: float, high: float) -> dict[str, str]:
        over, below = side_name("above", self.clamp, high), side_name("below", self.clamp, least)
        if self.mode == "reject":
            any_of = {"over": over, "under": below, "outside": f"({over} + {below})"}
            return {name: f"(coalesce({count}, 0) > 0)::integer::double" for name, count in any_of.items()}
        bounds = (self.clamp, self.mode, least, high)
        floor = min(1 / high, high)
        return {
            "w": weight_name("sum", *bounds),
            "w2": weight_name("sum2", *bounds),
            "w_min": weight_name("min", *bounds),
            "w_max": weight_name("max", *bounds),
            "f": weight_name("sum", *bounds, floor),
            "f2": weight_name("sum2", *bounds, floor),
            "raw": "sum_ratio" if self.clamp == "c20" else "sum_raw_ratio",
            "over": over,
            "under": side_name("below", self.clamp, lower),
            "outside": f"({over} + {below})",
        }

    def _sequence(self, least: float, lower: float, high: float) -> dict[str, str]:
        x = self.sequence_ratio()
        kept, floor = f"({x} between {least!r} and {high!r})", min(1 / high, high)
        one = (
            f"least(greatest({x}, {least!r}), {high!r})"
            if self.mode == "truncate"
            else f"case when {kept} then {x} else 0 end"
        )
        raised = f"greatest({one}, {floor!r})"
        parts = {
            "w": f"n * ({one})", "w2": f"n * power({one}, 2)", "w_min": f"({one})", "w_max": f"({one})",
            "f": f"n * {raised}", "f2": f"n * power({raised}, 2)", "raw": f"n * {x}",
            "over": f"({x} > {high!r})::integer::double", "under": f"({x} < {lower!r})::integer::double",
            "outside": f"(not {kept})::integer::double",
        }  # fmt: skip
        if self.token_inside:
            raw = "sum_ratio" if self.clamp == "c20" else "sum_raw_ratio"
            first, second = (weight_name(what, self.clamp, "truncate", floor, high) for what in _SUMS)
            parts |= {
                "raw": raw,
                "w": f"case when {kept} then coalesce({raw}, 0) else 0 end",
                "f": f"case when {kept} then coalesce({first}, 0) else n * {floor!r} end",
                "f2": f"case when {kept} then coalesce({second}, 0) else n * {floor!r} * {floor!r} end",
            }
            del parts["w2"], parts["w_min"], parts["w_max"]
        return parts

    def _log(self) -> str:
        if self.ratio == "geometric":
            return "coalesce(sum_delta / nullif(n, 0), 0)"
        return "coalesce(sum_delta, 0)"

    def sequence_ratio(self) -> str:
        """Return the ratio of a whole sequence; 1 where nothing is counted."""
        if self.ratio == "mult_prob_error":
            return "coalesce(sum_mult_prob_error / nullif(n, 0), 1)"
        limit = RATIO_CLAMP if self.clamp == "c20" else 700.0
        return f"exp(least(greatest({self._log()}, {-limit!r}), {limit!r}))"


_HIGH, _BOTH = frozenset({"high"}), frozenset({"low", "high"})
_SUMS: tuple[Literal["sum", "sum2"], ...] = ("sum", "sum2")

# fmt: off
CORRECTIONS: tuple[Correction, ...] = (
    Correction("verl", "token", "truncate", "rollout_is: token, rollout_is_threshold: high", None, 2.0, _HIGH, "token", "c20"),
    Correction("verl", "sequence", "truncate", "rollout_is: sequence, rollout_is_threshold: high", None, 2.0, _HIGH, "product", "c20"),
    Correction("verl", "token", "mask", 'rollout_is: token, rollout_is_threshold: "low_high" (IcePop; preset 0.5_5.0)', 0.5, 5.0, _BOTH, "token", "c20"),
    Correction("verl", "sequence", "mask", 'rollout_is: sequence, rollout_is_threshold: "low_high"', 0.5, 5.0, _BOTH, "product", "c20"),
    *(Correction("trl", level, mode, f"vllm_importance_sampling_mode: {level}_{mode}, vllm_importance_sampling_clip_min: low, vllm_importance_sampling_clip_max: high", None, 3.0, _BOTH, "token" if level == "token" else "product", "raw")
      for level in ("token", "sequence") for mode in ("truncate", "mask")),
    Correction("nemo-rl", "token", "truncate", "truncated_importance_sampling_type: tis; high has no default, recipes have 2", 0.0, 2.0, _BOTH, "token", "raw"),
    Correction("nemo-rl", "token", "mask", "truncated_importance_sampling_type: icepop; bounds have no default", 0.5, 5.0, _BOTH, "token", "raw"),
    Correction("nemo-rl", "sequence", "mask", "truncated_importance_sampling_type: seq-mask-tis; bounds have no default", 0.999, 1.002, _BOTH, "geometric", "raw", token_inside=True),
    Correction("nemo-rl", "sequence", "reject", "grpo.seq_logprob_error_threshold: high; off by default, recipes have 2", None, 2.0, _HIGH, "mult_prob_error", "raw"),
    Correction("ms-swift", "token", "truncate", "rollout_importance_sampling_mode: token_truncate, rollout_importance_sampling_threshold: high", None, 2.0, _HIGH, "token", "c20"),
    Correction("ms-swift", "token", "mask", "rollout_importance_sampling_mode: token_mask, rollout_importance_sampling_threshold: high", None, 2.0, _HIGH, "token", "c20"),
    Correction("ms-swift", "sequence", "truncate", "rollout_importance_sampling_mode: sequence_truncate, rollout_importance_sampling_threshold: high", None, 2.0, _HIGH, "geometric", "c20"),
    Correction("ms-swift", "sequence", "mask", "rollout_importance_sampling_mode: sequence_mask, rollout_importance_sampling_threshold: high", None, 2.0, _HIGH, "geometric", "c20", token_inside=True),
    Correction("skyrl", "token", "truncate", "tis_ratio_type: token, token_tis_ratio_clip_high: high", None, 2.0, _HIGH, "token", "c20"),
    Correction("skyrl", "sequence", "truncate", "tis_ratio_type: sequence, sequence_tis_ratio_clip_high: high", None, 5.0, _HIGH, "product", "c20"),
    Correction("skyrl", "token", "mask", "token_mask_is_threshold_low, token_mask_is_threshold_high", 0.5, 2.0, _BOTH, "token", "c20"),
    Correction("skyrl", "sequence", "mask", "sequence_mask_metric: product; product_mask_low, product_mask_high", 0.5, 2.0, _BOTH, "product", "c20"),
    Correction("skyrl", "geometric", "mask", "sequence_mask_metric: geometric; geo_mask_low, geo_mask_high", 0.99, 1.01, _BOTH, "geometric", "c20"),
    Correction("skyrl", "token", "reject", "outlier_token_is_threshold_low, outlier_token_is_threshold_high; off by default, suggested values", 1e-4, 100.0, _BOTH, "any_token", "c20"),
    Correction("open-instruct", "token", "truncate", "rho clamp, on by default", 0.0, 2.0, _BOTH, "token", "raw"),
    Correction("open-instruct", "token", "mask", "rho_mask_lower_bound, rho_mask_upper_bound; off by default", 0.5, 2.0, _BOTH, "token", "raw"),
    Correction("slime", "token", "truncate", "--use-tis, --tis-clip-low low, --tis-clip high", 0.0, 2.0, _BOTH, "token", "raw"),
    Correction("slime", "token", "mask", "--custom-tis-function-path ...icepop_function, --tis-clip-low low, --tis-clip high", 0.0, 2.0, _BOTH, "token", "raw"),
)
# fmt: on
