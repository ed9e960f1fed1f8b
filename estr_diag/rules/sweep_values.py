"""Which values of a parameter a sweep visits: named by the user, or spread over what a log tells apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from estr_diag.errors import UsageError
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import require
from estr_diag.rules.fitted import fitted
from estr_diag.rules.ladder import SCORE, Ladder
from estr_diag.rules.language.plan import plan
from estr_diag.rules.score import score_of
from estr_diag.store.database import Store
from estr_diag.store.engine import relation

MAX_VALUES = 200
SHARES = (0.5, *(1 - 10 ** (-i / 6) for i in range(3, 25)))
"""Kept shares at which a sweep looks by default: half of the tokens, then 68 % to 99.99 %, evenly in log masked share."""


def parse_grid(text: str) -> tuple[float, ...]:
    """Read ``0.25:16:log``, ``0:1:lin:11`` or ``0.1,0.2,0.5``.

    Raises
    ------
    UsageError
        Another form, or values that do not ascend.
    """
    how = "write it as 0.25:16:log, 0:1:lin:11 or 0.1,0.2,0.5"
    try:
        if ":" not in text:
            values = tuple(float(v) for v in text.split(","))
        else:
            low, high, kind, *number = text.split(":")
            n = int(number[0]) if number else 25
            if kind not in ("log", "lin") or len(number) > 1 or n < 2:
                raise ValueError
            spaced = np.geomspace if kind == "log" else np.linspace
            if kind == "log" and not float(low) > 0:
                raise UsageError(f"grid {text!r}: a logarithmic grid begins above 0")
            values = tuple(float(f"{v:.12g}") for v in spaced(float(low), float(high), n))
    except ValueError:
        raise UsageError(f"grid {text!r}: {how}") from None
    if not all(map(math.isfinite, values)) or any(b <= a for a, b in pairwise(values)):
        raise UsageError(f"grid {text!r}: expected ascending, finite numbers; {how}")
    if len(values) > MAX_VALUES:
        raise UsageError(f"grid {text!r} has {len(values)} values; at most {MAX_VALUES}")
    return values


def around(rule: Rule, parameter: str) -> tuple[float, ...]:
    """Return 25 values from a sixteenth to sixteen times a parameter's own value.

    A parameter that is compared by its logarithm (a bound on the ratio, held against delta) is spaced in that.

    Raises
    ------
    UsageError
        The rule has no such parameter, or it has no scale of its own: it is not above 0, or its logarithm is 0.
    """
    score = score_of(rule, parameter, rule.needs)
    value = float(rule.parameters[parameter])
    if value <= 0 or (score is not None and score.logarithm and value == 1):
        raise UsageError(f"{parameter} of rule '{rule.key}' is {value:g}: name the values with --grid")
    spaced = np.geomspace(1 / 16, 16, 25)
    found = value**spaced if score is not None and score.logarithm else value * spaced
    return tuple(sorted(float(f"{v:.12g}") for v in found))


def over_shares(store: Store, rule: Rule, parameter: str) -> tuple[float, ...]:
    """Return the values that keep `SHARES` of a log's tokens, and the rule's own; those of `around` without a score.

    Raises
    ------
    UsageError
        As `around`.
    MissingColumnError
        The log does not allow the rule.
    """
    require(rule, store.present())
    (rule,) = fitted((rule,), store)
    score = score_of(rule, parameter, store.present())
    if score is None:
        return around(rule, parameter)
    ladder = Ladder(score, rule)
    with scores(store, ladder) as table:
        cuts = store.rows(f"select quantile_disc(x, {list(SHARES)}) as cuts from {table}")[0]["cuts"] or []
    reached = (ladder.keeping(cut if score.keeps_small else -cut) for cut in cuts if math.isfinite(cut))
    values = {float(rule.parameters[parameter]), *(float(f"{value:.6g}") for value in reached)}
    return tuple(sorted(v for v in values if math.isfinite(v) and (v > 0 or not score.logarithm)))


@contextmanager
def scores(store: Store, ladder: Ladder, among: str = "true") -> Iterator[str]:
    """Hold the scores of the decided tokens in a table, in a column ``x`` that the tightest value keeps the smallest of.

    Parameters
    ----------
    among
        Condition on a token.
    """
    sign = "" if ladder.score.keeps_small else "-"
    viewed = relation(store.present(), ladder.view(plan(ladder.trees)))
    store.connection.execute(
        f"create or replace temp table rule_scores as {viewed} select {sign}{SCORE} as x from viewed "
        f"where {SCORE} is not null and {among}"
    )
    try:
        yield "rule_scores"
    finally:
        store.connection.execute("drop table if exists rule_scores")
