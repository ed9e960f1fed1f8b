"""Columns that are copies, that hold impossible values, or whose labels cannot be true."""

from __future__ import annotations

from typing import ClassVar

from estr_diag.checks.base import Finding
from estr_diag.expressions import counted
from estr_diag.store.database import Store

_COPY_SHARE = 0.99
_ENOUGH_TOKENS = 20
_BF16_EXCESS = 0.1
_CERTAIN = -1e-3


class CopiedColumn:
    """Are the two log-prob columns the same numbers?

    Two engines never agree to the last bit on uncertain tokens. Tokens of probability 1 are left out:
    there both columns are honestly 0.0.
    """

    id: ClassVar[str] = "copied_column"

    def run(self, store: Store, present: frozenset[str]) -> Finding:
        """Compare the columns for exact equality."""
        cause = (
            "logp_train is a copy of logp_infer: the trainer was told to skip its own forward pass "
            "(verl bypass_mode, open-instruct use_vllm_logprobs, AReaL without decoupled loss), so delta is 0 by construction"
        )
        action = "switch the copy off for one step and dump again; nothing about the gap can be read from this log"
        if not {"logp_infer", "logp_train"} <= present:
            return Finding(
                self.id, "cannot_tell", "fatal", "logp_train", "one of the two engines' columns is missing", action
            )
        by_step = store.rows(
            f"""
            select step, count(*) as n, count(*) filter (logp_train = logp_infer) as equal
            from tokens where {counted(present)} and logp_infer < {_CERTAIN}
            group by step order by step nulls last
            """
        )
        n, equal = sum(r["n"] for r in by_step), sum(r["equal"] for r in by_step)
        if n < _ENOUGH_TOKENS:
            return Finding(
                self.id, "cannot_tell", "fatal", "logp_train", f"only {n} uncertain tokens", "log more tokens"
            )
        steps = [r for r in by_step if r["n"] >= _ENOUGH_TOKENS and r["equal"] >= _COPY_SHARE * r["n"]]
        whole = equal >= _COPY_SHARE * n
        found = whole or bool(steps)
        listed = ", ".join(str(r["step"]) for r in steps[:8])
        return Finding(
            self.id, "found" if found else "clear", "fatal" if whole or not found else "error",
            "logp_train" + (f", step {listed}" if steps and not whole else ""), cause if found else "the columns differ",
            action if found else "", size=equal / n, control=0.0, evidence=tuple(steps[:8]),
            spoils=("logp_train",) if found else (),
        )  # fmt: skip


class PositiveLogProbs:
    """Are there log-probs above 0?

    No probability is above 1. bfloat16 rounding gives values up to about 0.1; more is a placeholder, or another quantity.
    """

    id: ClassVar[str] = "positive_logp"

    def run(self, store: Store, present: frozenset[str]) -> Finding:
        """Count them and take their maximum; bfloat16 rounding explains up to about 0.1."""
        names = [name for name in ("logp_infer", "logp_train") if name in present]
        if not names:
            return Finding(self.id, "cannot_tell", "warning", "", "no log-prob column", "")
        listed = ", ".join(
            f"count(*) filter ({name} > 0) as n_{name}, coalesce(max({name}), 0) as max_{name}" for name in names
        )
        found = store.rows(f"select count(*) as n, {listed} from tokens where {counted(present)}")[0]
        hit = [name for name in names if found[f"n_{name}"]]
        worst = max((found[f"max_{name}"] for name in names), default=0.0)
        if not hit:
            return Finding(self.id, "clear", "warning", "", "no log-prob is above 0", "", size=0.0, control=0.0)
        rounding = worst <= _BF16_EXCESS
        return Finding(
            self.id, "found", "warning" if rounding else "error", ", ".join(hit),
            "log-probs above 0 by rounding: the column was computed in bfloat16" if rounding
            else f"a log-prob of {worst:.3g} is a probability above 1: a placeholder, or another quantity in this column",
            "compute log-probs in float32" if rounding else "look at the tokens below and at what the trainer writes there",
            size=sum(found[f"n_{name}"] for name in hit) / max(found["n"], 1), control=0.0,
            evidence=[{"column": name, "n": found[f"n_{name}"], "max": found[f"max_{name}"]} for name in hit],
        )  # fmt: skip


class ImpossibleVersions:
    """Do the version labels obey their meaning: never newer than the trainer, never falling in a sequence?"""

    id: ClassVar[str] = "impossible_versions"

    def run(self, store: Store, present: frozenset[str]) -> Finding:
        """Count negative lags and sequences whose version falls."""
        action = "check when the label is taken (admission, return) and what the trainer's own counter counts"
        known = store.rows(
            """
            select count(*) as n, count(*) filter (version_last < version_first) as falling,
                   count(*) filter (version_last > trainer_version) as newer,
                   max(version_last - trainer_version) as most
            from sequences where version_first is not null
            """
        )[0]
        if not known["n"]:
            return Finding(self.id, "cannot_tell", "error", "policy_version", "no versions in this log", action)
        bad = known["falling"] + known["newer"]
        if not bad:
            return Finding(
                self.id,
                "clear",
                "error",
                "policy_version",
                "no negative lag, no falling version",
                "",
                size=0.0,
                control=0.0,
            )
        parts = []
        if known["newer"]:
            parts.append(
                f"{known['newer']} sequence(s) carry a version newer than the trainer's, by up to {known['most']}"
            )
        if known["falling"]:
            parts.append(f"{known['falling']} sequence(s) end on an older version than they began with")
        return Finding(
            self.id, "found", "error", "policy_version", "; ".join(parts), action, size=bad / known["n"], control=0.0,
            spoils=("policy_version",),
        )  # fmt: skip
