"""What a number is: formula, unit, mean, which way is good, who calls it what, and what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from estr_diag.errors import UsageError, nearest
from estr_diag.schema import TOKENS
from estr_diag.stats.alias import EDGE, OVER, Alias
from estr_diag.stats.aliases import BY_KEY, aliases_of, candidates
from estr_diag.stats.metric import Metric
from estr_diag.stats.metrics import BY_NAME, YARDSTICKS
from estr_diag.stats.quantiles import QUANTILES
from estr_diag.stats.threshold_names import THRESHOLD_NAMES, ThresholdName, threshold_candidates

Kind = Literal["metric", "alias", "rule"]


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A clean value or a limit in circulation, and whose it is."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class OtherName:
    """Another name of the same quantity, and the exact difference."""

    name: str
    edge: str
    over: str
    differs: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one name.

    Parameters
    ----------
    needs
        Column -> how to make a trainer log it (empty where nothing needs doing).
    same_as
        For an alias: our metric of the same quantity, where there is one.
    """

    name: str
    kind: Kind
    formula: str
    unit: str
    aggregation: str
    direction: str
    meaning: str
    yardsticks: tuple[Yardstick, ...] = ()
    aliases: tuple[OtherName, ...] = ()
    needs: Mapping[str, str] | None = None
    same_as: str | None = None
    edge: str | None = None
    differs: str = ""
    executed: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def explain(name: str, more: Iterable[Explanation] = ()) -> Explanation:
    """Explain a metric or a framework's name for one.

    Parameters
    ----------
    name
        ``kl_k3``, ``verl:rollout_corr/kl``, ``rollout_corr/kl``, or the end of a dashboard name where it is
        unique. Our own names come first.
    more
        Explanations of other things that have names, such as mask rules.

    Raises
    ------
    UsageError
        Nothing is called that, or more than one thing is.
    """
    others = {explanation.name: explanation for explanation in more}
    if name in BY_NAME:
        return _metric(BY_NAME[name])
    if name in QUANTILES:
        return _quantile(name)
    if name in others:
        return others[name]
    plain, bounded = {alias.key: alias for alias in candidates(name)}, threshold_candidates(name)
    keys = list(dict.fromkeys([*plain, *bounded]))
    if len(keys) == 1:
        told = _alias(plain[keys[0]]) if plain else _bounded(bounded[keys[0]])
        return _also_bounded(told, bounded[keys[0]]) if plain and bounded else told
    if keys:
        raise UsageError(f"'{name}' is ambiguous: {', '.join(keys)}")
    raise UsageError(f"nothing is called '{name}'; {nearest(name, _names(others))}")


def names() -> tuple[str, ...]:
    """Return every name that can be explained, our own first."""
    return (*BY_NAME, *QUANTILES, *BY_KEY)


def _names(others: Iterable[str]) -> list[str]:
    # A misspelt dashboard name is compared without its framework too.
    bounded = dict.fromkeys(name for entry in THRESHOLD_NAMES for name in (entry.key, entry.name))
    return [*names(), *others, *(alias.name for alias in BY_KEY.values()), *bounded]


def _metric(metric: Metric) -> Explanation:
    return Explanation(
        name=metric.name,
        kind="metric",
        formula=metric.formula,
        unit=metric.unit,
        aggregation=metric.aggregation,
        direction=metric.direction,
        meaning=metric.meaning,
        yardsticks=_yardsticks(metric.name),
        aliases=tuple(OtherName(a.key, a.edge, a.over, a.differs) for a in aliases_of(metric.name)),
        needs=_needs(metric.needs),
    )


def _quantile(name: str) -> Explanation:
    level = f"{100 * QUANTILES[name]:g}"
    return Explanation(
        name=name,
        kind="metric",
        formula=f"{level} % quantile of |d|, interpolated linearly",
        unit="nat",
        aggregation="token quantile; exact, so read from the tokens and not from partials",
        direction="lower",
        meaning=f"{level} % of tokens disagree by less",
        yardsticks=_yardsticks(name),
        needs=_needs({"logp_infer", "logp_train"}),
    )


def _alias(alias: Alias) -> Explanation:
    metric = alias.metric
    ours = metric.name if metric.name in BY_NAME else None
    others = tuple(OtherName(a.key, a.edge, a.over, a.differs) for a in aliases_of(metric.name) if a.key != alias.key)
    return Explanation(
        name=alias.key,
        kind="alias",
        formula=metric.formula,
        unit=metric.unit,
        aggregation=f"{alias.over}: {OVER[alias.over]}",
        direction=metric.direction,
        meaning=metric.meaning,
        yardsticks=_yardsticks(metric.name),
        aliases=others,
        needs=_needs(alias.needs),
        same_as=ours,
        edge=f"{alias.edge}: d = {EDGE[alias.edge]}",
        differs=alias.differs,
        executed=alias.executed,
    )


def _bounded(entries: tuple[ThresholdName, ...]) -> Explanation:
    first = entries[0]
    one = len({entry.formula for entry in entries}) == 1
    differs = "; ".join(dict.fromkeys(entry.differs for entry in entries if entry.differs))
    return Explanation(
        name=first.key,
        kind="alias",
        formula=first.formula if one else "; ".join(f"{_under(entry)}: {entry.formula}" for entry in entries),
        unit=first.unit,
        aggregation="; ".join(dict.fromkeys(entry.aggregation for entry in entries)),
        direction=first.direction,
        meaning=first.meaning,
        needs=_needs({"logp_infer", "logp_train"}),
        edge=f"B: d = {EDGE['B']}",
        differs="; ".join(text for text in (_bounds_of(entries), differs) if text),
        executed=True,
    )


def _also_bounded(plain: Explanation, entries: tuple[ThresholdName, ...]) -> Explanation:
    return replace(plain, differs=f"{plain.differs}; under a correction: {_bounds_of(entries)}")


def _bounds_of(entries: tuple[ThresholdName, ...]) -> str:
    listed = " | ".join(correction.parameters for entry in entries for correction in entry.corrections())
    return f"depends on the trainer's bounds, r is the ratio after them: {listed}"


def _under(entry: ThresholdName) -> str:
    return ", ".join(f"{level} {mode}" for level, mode in entry.under)


def _yardsticks(name: str) -> tuple[Yardstick, ...]:
    return (Yardstick(*YARDSTICKS[name]),) if name in YARDSTICKS else ()


def _needs(columns: Iterable[str]) -> dict[str, str]:
    return {name: TOKENS[name].get_it or "" for name in sorted(columns)}
