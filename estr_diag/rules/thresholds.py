"""Thresholds chosen by meaning: drop a share of the lag-0 tokens, or keep as much as another rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import Decisions, require
from estr_diag.rules.fitted import fitted
from estr_diag.rules.ladder import Ladder
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.rules.replay import Replay
from estr_diag.rules.score import Score, score_of
from estr_diag.rules.sweep_values import around, scores
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, relation, run

PRECISION = 1e-6
"""Of a threshold found by bisection, relative."""

FURTHER = 4
"""How often a bisection goes on beyond the tight end of `around`, by as much again, while too much is kept."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value of a rule's parameter, and what it really reaches.

    Attributes
    ----------
    value
        None where no value reaches it.
    kept_share
        Of the decided tokens asked about; equal scores are kept or dropped together, so it may exceed the aim.
    n
        Decided tokens asked about.
    """

    rule: str
    parameter: str
    value: float | None
    aim: float
    kept_share: float | None
    n: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def at_kept_share(store: Store, rule: Rule, share: float, parameter: str | None = None) -> Threshold:
    """Return the tightest threshold that keeps at least a share of the decided tokens.

    It is read off the rule's score in one pass where it has one, else bisected between the ends of `sweep_values.around`
    (the rule is then assumed to keep more the looser it is), to a relative `PRECISION`.
    """
    return _reach(store, rule, parameter or rule.score, share, "true")


def at_drop_rate(store: Store, rule: Rule, rate: float, parameter: str | None = None) -> Threshold:
    """Return the tightest threshold that drops at most a share of the tokens of lag 0, whose gap is engine noise alone.

    Raises
    ------
    MissingColumnError
        The log has no versions, so no token is known to have lag 0.
    """
    present = store.present()
    lacking = {"policy_version", "trainer_version"} - present
    if lacking:
        raise MissingColumnError("a threshold by the drop rate at lag 0", sorted(lacking), how_to_get(lacking))
    return _reach(store, rule, parameter or rule.score, 1 - rate, "lag = 0")


@dataclass(frozen=True, slots=True)
class EqualShare:
    """Rules of several families brought to one kept share.

    Attributes
    ----------
    thresholds
        One a family that was asked for, in order; those without a value could not be brought there and say why.
    rules
        The rules at their thresholds, without those.
    kept, errors
        What they keep, as `Replay` has it, and their errors, as `MaskErrors` has them.
    """

    thresholds: tuple[Threshold, ...]
    rules: tuple[Rule, ...]
    kept: Result
    errors: Result


def equal_share(
    store: Store, rules: Sequence[Rule], share: float, grid: EntropyGrid | None, parameters: Sequence[str] | None = None
) -> EqualShare:
    """Bring several rules to one kept share, by the parameter that each is swept by.

    Raises
    ------
    UsageError
        Not one of them reaches the share.
    """
    names = parameters or [rule.score for rule in rules]
    found: list[Threshold] = []
    reached: list[Rule] = []
    for rule, name in zip(fitted(rules, store), names, strict=True):
        try:
            found.append(at_kept_share(store, rule, share, name))
        except MissingColumnError as error:
            found.append(Threshold(rule.label, name, None, share, None, 0, str(error)))
        if (value := found[-1].value) is not None:
            reached.append(rule.with_parameters({name: value}))
    if not reached:
        why = "; ".join(f"{t.rule}: {t.note}" for t in found)
        raise UsageError(f"no rule can be brought to a kept share of {share:g} ({why})")
    at = tuple(reached)
    results = run(store, {"kept": Replay(at), "errors": MaskErrors(at, grid)}).results
    return EqualShare(tuple(found), at, results["kept"], results["errors"])


def _reach(store: Store, rule: Rule, parameter: str, share: float, among: str) -> Threshold:
    if not 0 < share <= 1:
        raise UsageError(f"a share of {share:g}; expected more than 0 and at most 1")
    if not parameter:
        raise UsageError(f"rule '{rule.key}' has no parameter that it is swept by; name one")
    present = store.present()
    require(rule, present)
    (rule,) = fitted((rule,), store)
    aim = _Aim(store, present, rule, parameter, share, among)
    score = score_of(rule, parameter, present)
    return aim.by_bisection() if score is None else aim.by_score(score)


@dataclass(frozen=True, slots=True)
class _Aim:
    """A share of some tokens that a rule is to keep."""

    store: Store
    present: frozenset[str]
    rule: Rule
    parameter: str
    share: float
    among: str

    def by_score(self, score: Score) -> Threshold:
        """Read the threshold off the k-th tightest score."""
        ladder = Ladder(score, self.rule)
        with scores(self.store, ladder, self.among) as table:
            n = int(self.store.rows(f"select count(*) as n from {table}")[0]["n"])
            if not n:
                return self._nothing()
            # In the middle between two ranks, so that rounding cannot reach the next token.
            level = (self._needed(n) - 0.5) / n
            cut = self.store.rows(f"select quantile_disc(x, {level!r}) as cut from {table}")[0]["cut"]
        if not math.isfinite(cut):
            return self._missed(n, "not reached: the rest of the rule drops more")
        return self._found(ladder.keeping(cut if score.keeps_small else -cut))

    def by_bisection(self) -> Threshold:
        """Halve the ratio of a value that keeps too little and one that keeps enough."""
        values = around(self.rule, self.parameter)
        ends = [(*self._counts(value), value) for value in (values[0], values[-1])]
        n = ends[0][0]
        if not n:
            return self._nothing()
        needed = self._needed(n)
        (_, least, tight), (_, most, loose) = sorted(ends)
        if most < needed:
            return self._missed(
                n, f"not reached between {values[0]:g} and {values[-1]:g}: at most {most / n:.4%} is kept"
            )
        further = values[0] / values[-1] if tight < loose else values[-1] / values[0]
        for _ in range(FURTHER):
            if least < needed:
                break
            tight, loose = tight * further, tight
            least = self._counts(tight)[1]
        if least >= needed:
            return self._found(tight, f"tighter values than {tight:g} were not tried")
        while abs(math.log(loose / tight)) > PRECISION:
            middle = math.sqrt(tight * loose)
            kept = self._counts(middle)[1]
            tight, loose = (tight, middle) if kept >= needed else (middle, loose)
            if kept == needed:
                break
        return self._found(loose)

    def _counts(self, value: float) -> tuple[int, int]:
        """Return how many of the tokens are decided, and how many are kept."""
        decisions = Decisions.of((self.rule.with_parameters({self.parameter: value}),), self.present)
        row = self.store.rows(
            f"{relation(self.present, decisions.view)} select count(keep) as n, count(*) filter (keep) as kept "
            f"from (select {decisions.keep(0)} as keep from viewed where {self.among})"
        )[0]
        return int(row["n"]), int(row["kept"])

    def _needed(self, n: int) -> int:
        """Return the smallest number of tokens whose share of n is at least the aim."""
        needed = max(1, math.ceil(self.share * n))
        # The aim may itself be such a share, k / n in floating point.
        return needed - 1 if needed > 1 and (needed - 1) / n >= self.share else needed

    def _found(self, value: float, note: str = "") -> Threshold:
        chosen = self.rule.with_parameters({self.parameter: value})
        n, kept = self._counts(value)
        beyond = kept - self._needed(n)
        if beyond and not note:
            note = f"{beyond:,} tokens more than the aim: no value of {self.parameter} tells them apart"
        return Threshold(chosen.label, self.parameter, value, self.share, kept / n, n, note)

    def _nothing(self) -> Threshold:
        return self._missed(0, "cannot tell: no token " + ("is decided" if self.among == "true" else "has lag 0"))

    def _missed(self, n: int, why: str) -> Threshold:
        return Threshold(self.rule.label, self.parameter, None, self.share, None, n, why)
