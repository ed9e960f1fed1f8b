"""Did the engine sample what it says, with the weights that it says? Forced tokens, and weights that were not delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from estr_diag.checks.base import Finding
from estr_diag.checks.shared import PAIR, VERSIONS, Rows, total

_FORCED, _ZERO_FILLED = 3, 1e-3
_STEPS, _TOKENS = 9, 50
_GROWTH, _RANK = 4.0, 0.8


class ForcedTokens:
    """Are there tokens that the engine claims to be certain of and the trainer is not?

    An exact 0.0 beside a trainer's log-prob that is clearly below 0 is a token that nobody sampled (an end token that was appended, a
    forced tool call), or a value that was never filled in. Exact zeros on both sides are honest: p = 1 in float32.
    """

    id: ClassVar[str] = "forced_tokens"
    needs: ClassVar[frozenset[str]] = PAIR
    explained_by: ClassVar[tuple[str, ...]] = ()

    def sums(self, present: frozenset[str]) -> Mapping[str, str]:
        """Ask for such tokens, on either side."""
        return {
            "n": "1.0", "infer": "case when logp_infer = 0 and logp_train < -0.5 then 1.0 end",
            "train": "case when logp_train = 0 and logp_infer < -0.5 then 1.0 end",
        }  # fmt: skip

    def judge(self, rows: Rows) -> Finding:
        """Count them."""
        n, infer, train = (total(rows, name) for name in ("n", "infer", "train"))
        # A trainer's zero is rarer in kind: noise that is cut at 0 leaves single ones.
        train = train if train > _ZERO_FILLED * n else 0.0
        column, count = ("logp_infer", infer) if infer >= train else ("logp_train", train)
        if count < _FORCED:
            said = f"{infer + train:.0f} tokens with an exact 0.0 that the other engine does not share"
            return Finding(
                self.id, "clear", "error", column, said, "", size=0.0 if not n else (infer + train) / n, control=0.0
            )
        steps = [{"step": r["step"], "tokens": max(r["infer"], r["train"])} for r in rows if r["infer"] or r["train"]]
        return Finding(
            self.id, "found", "error", column,
            f"{count:,.0f} tokens have exactly 0.0 in {column} where the other engine gives less than 61 %: tokens that nobody sampled (an appended end "
            "token, a forced prefix or tool call) or values that were never filled in",
            f"look at them: estr-diag tokens LOG --where '{column} = 0' --by 'abs(delta)'; then mask what was not sampled",
            size=count / n, control=0.0, evidence=tuple(steps[:8]), spoils=(),
        )  # fmt: skip


class UndeliveredWeights:
    """Does the gap of tokens with lag 0 grow step by step?

    At lag 0 both engines hold the same weights, so the gap is the engines' own and stays as it is. One that grows with the step says
    that the engine did not get the weights (an update that failed, an adapter that was not loaded), or that the labels lie.
    """

    id: ClassVar[str] = "undelivered_weights"
    needs: ClassVar[frozenset[str]] = PAIR | VERSIONS
    explained_by: ClassVar[tuple[str, ...]] = ()

    def sums(self, present: frozenset[str]) -> Mapping[str, str]:
        """Ask for the second moment at lag 0."""
        return {"n": "case when lag = 0 then 1.0 end", "squares": "case when lag = 0 then delta * delta end"}

    def judge(self, rows: Rows) -> Finding:
        """Compare the last third of the steps with the first."""
        used = [r for r in rows if r["step"] is not None and r["n"] >= _TOKENS]
        where = "policy_version"
        if len(used) < _STEPS:
            why = f"{len(used)} steps with {_TOKENS} tokens of lag 0; a trend needs {_STEPS}"
            return Finding(self.id, "cannot_tell", "error", where, why, "log more steps")
        moments = np.array([r["squares"] / r["n"] for r in used])
        third = len(used) // 3
        # The first steps after a start are quiet; medians, since one extreme token rules a mean.
        first, last = (float(np.median(part)) for part in (moments[:third], moments[-third:]))
        growth = last / first if first > 0 else float("inf") if last > 0 else 1.0
        rank = float(spearmanr([r["step"] for r in used], moments).statistic) if np.ptp(moments) > 0 else 0.0
        if growth < _GROWTH or rank < _RANK:
            said = f"E[delta^2] at lag 0 goes from {first:.2g} to {last:.2g} nat^2 over the steps"
            return Finding(self.id, "clear", "error", where, said, "", size=growth, control=1.0)
        return Finding(
            self.id, "found", "error", where,
            f"E[delta^2] at lag 0 grows from {first:.2g} to {last:.2g} nat^2 over {len(used)} steps: the engine does not hold the weights that the labels "
            "claim (an update that failed, an adapter that is not loaded), or the versions are labelled wrongly",
            "compare a checksum of one weight in engine and trainer after a push; for one step, set the learning rate to 0: a gap that stays is "
            "the labels' or the engine's",
            size=growth, control=1.0,
            evidence=tuple({"step": r["step"], "mean_sq_delta_lag0": r["squares"] / r["n"], "n": r["n"]} for r in (used[0], used[len(used) // 2], used[-1])),
            spoils=("policy_version",),
        )  # fmt: skip
