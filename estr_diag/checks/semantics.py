"""Do both columns mean the same distribution? Temperature on one side, and truncated sampling that was renormalised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from estr_diag.checks.base import Finding
from estr_diag.checks.shared import PAIR, Rows, same_weights, total

_ENOUGH = 300
_TIED = 0.8
_SCALE, _SCALE_MOVED = 0.12, 0.3
_APART = 0.02
_FEW_SIDED = 50
_ONE_SIDED = 0.1


class Temperature:
    """Is one column a scaled version of the other?

    A temperature multiplies the logits: on tokens of middling probability the logit of one engine against that of the other then has
    another slope than 1. The slope is the ratio of their spreads, which noise on either side moves little (1.00 to 1.04 on
    sound logs). Where versions are known it is taken at lag 0, since a policy that sharpens has the same sign; and over the first steps,
    where an engine that does not get new weights still holds the trainer's.
    """

    id: ClassVar[str] = "temperature"
    needs: ClassVar[frozenset[str]] = PAIR
    explained_by: ClassVar[tuple[str, ...]] = ("undelivered_weights",)

    def sums(self, present: frozenset[str]) -> Mapping[str, str]:
        """Ask for the moments of the two logits."""
        middling = "p_infer between 0.02 and 0.98 and p_train between 1e-4 and 0.9999"
        use = f"{same_weights(present)} and {middling}"
        x, y = "ln(p_infer / (1 - p_infer))", "ln(p_train / (1 - p_train))"
        found = {"n": "1.0", "x": x, "y": y, "xx": f"power({x}, 2)", "yy": f"power({y}, 2)", "xy": f"{x} * {y}"}
        moved = "0.0" if same_weights(present) == "lag = 0" else "1.0"
        return {name: f"case when {use} then {sql} end" for name, sql in found.items()} | {"unversioned": moved}

    def judge(self, rows: Rows) -> Finding:
        """Compare the spreads."""
        rows = _first(rows)
        n = total(rows, "n")
        if n < _ENOUGH:
            why = f"{n:.0f} tokens of middling probability with the same weights; a slope needs {_ENOUGH}"
            return Finding(self.id, "cannot_tell", "error", "logp_infer, logp_train", why, "log more tokens")
        sums = {k: total(rows, k) / n for k in ("x", "y", "xx", "yy", "xy")}
        var_x, var_y = sums["xx"] - sums["x"] ** 2, sums["yy"] - sums["y"] ** 2
        if min(var_x, var_y) <= 0:
            return Finding(self.id, "cannot_tell", "error", "logp_infer, logp_train", "a column hardly varies", "")
        slope = math.sqrt(var_y / var_x)
        tied = (sums["xy"] - sums["x"] * sums["y"]) / math.sqrt(var_x * var_y)
        limit = _SCALE_MOVED if total(rows, "unversioned") else _SCALE
        if tied < _TIED:
            why = f"the two logits correlate to {tied:.2f} only: another fault hides a scale"
            return Finding(
                self.id, "cannot_tell", "error", "logp_infer, logp_train", why, "resolve the other findings first"
            )
        if abs(math.log(slope)) <= limit:
            said = f"the logits of the two engines have a slope of {slope:.3f}"
            return Finding(self.id, "clear", "error", "logp_infer, logp_train", said, "", size=slope, control=1.0)
        sharper = "engine samples" if slope < 1 else "trainer scores"
        return Finding(
            self.id, "found", "error", "logp_infer, logp_train",
            f"a temperature on one side: the {sharper} more sharply, as if the engine's temperature were about {slope:.2f} times the trainer's",
            "give sampler and trainer one temperature, and let the engine return log-probs after it (vLLM logprobs_mode=processed_logprobs); then "
            "score one step again",
            size=slope, control=1.0, evidence=({"slope": slope, "correlation": tied, "n": n},), spoils=("logp_infer", "logp_train"),
        )  # fmt: skip


def _first(rows: Rows) -> Rows:
    """Return the first steps that have enough tokens together."""
    counts = np.cumsum([row["n"] for row in rows])
    return rows[: int(np.searchsorted(counts, 2 * _ENOUGH)) + 1]


class Renormalised:
    """Does the sampler renormalise over a nucleus (top-p, top-k, min-p) that the trainer does not know?

    Then every sampled token is likelier under the sampler by one over the kept mass: delta is never above 0, and has a sharp
    lower edge at the logarithm of the mass. Sound logs have as many tokens on either side.
    """

    id: ClassVar[str] = "renormalised"
    needs: ClassVar[frozenset[str]] = PAIR
    explained_by: ClassVar[tuple[str, ...]] = ()

    def sums(self, present: frozenset[str]) -> Mapping[str, str]:
        """Ask for tokens on either side, and the mean ratio of those below."""
        use = same_weights(present)
        below, above = f"{use} and delta < -{_APART}", f"{use} and delta > {_APART}"
        return {
            "below": f"case when {below} then 1.0 end", "above": f"case when {above} then 1.0 end",
            "ratio": f"case when {below} then ratio end", "far": f"case when {use} and delta < -1.0 then 1.0 end",
        }  # fmt: skip

    def judge(self, rows: Rows) -> Finding:
        """Compare the two sides."""
        below, above, far = total(rows, "below"), total(rows, "above"), total(rows, "far")
        sides = below + above
        if sides < _FEW_SIDED:
            why = f"{sides:.0f} tokens with the same weights differ by more than {_APART} nat; it takes {_FEW_SIDED}"
            return Finding(self.id, "clear" if sides == 0 else "cannot_tell", "error", "logp_infer", why, "")
        share = above / sides
        # A mass of less than 1/e is no nucleus that anybody samples from.
        if share > _ONE_SIDED or far > 0.2 * below:
            said = f"{share:.0%} of the differing tokens are likelier under the trainer"
            return Finding(self.id, "clear", "error", "logp_infer", said, "", size=share, control=0.5)
        mass = total(rows, "ratio") / below
        return Finding(
            self.id, "found", "error", "logp_infer",
            f"only {share:.1%} of the differing tokens are likelier under the trainer: the engine's log-probs are renormalised over what sampling "
            f"kept (top-p, top-k or min-p; a mean mass of {mass:.2f} where it cuts)",
            "sample with top_p=1, top_k=-1 and min_p=0, or let the engine return log-probs before truncation (vLLM logprobs_mode=raw_logprobs)",
            size=share, control=0.5, evidence=({"below": below, "above": above, "mean_ratio_below": mass},), spoils=("logp_infer",),
        )  # fmt: skip
