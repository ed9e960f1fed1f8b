"""Which built-in rule decides as the trainer did, where a log carries the trainer's own decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from estr_diag.rules.agreement import Agreement, kappa
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import MAX_RULES
from estr_diag.rules.language.bind import bind
from estr_diag.rules.library import LIBRARY, TRAINER
from estr_diag.store.database import Store
from estr_diag.store.engine import run

SHOWN = 3
"""Nearest rules that are named when none decides the same."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """How a built-in rule compares with the trainer's own decision.

    Attributes
    ----------
    rules
        Labels; more than one where built-in rules are the same rule on this log.
    exact
        Every token that both decide is decided the same, and some are masked.
    disagree
        Tokens that one keeps and the other masks.
    """

    rules: tuple[str, ...]
    exact: bool
    n: int
    masked: int
    disagree: int
    kappa: float | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "rules": list(self.rules)}


def reproductions(store: Store, present: frozenset[str], framework: str | None = None) -> tuple[Reproduction, ...]:
    """Hold every built-in rule, at its defaults, against ``trainer_keep``.

    Parameters
    ----------
    framework
        The trainer that wrote the log: its own presets are named first.

    Returns
    -------
    tuple of Reproduction
        Those that decide every token the same; where there is none, the nearest few. Empty where the
        trainer masked nothing, which every loose rule would reproduce.
    """
    groups: dict[Any, list[Rule]] = {}
    for rule in sorted(LIBRARY.values(), key=lambda r: (r.framework != framework, bool(r.framework), r.key)):
        if rule.name not in ("none", TRAINER.name) and not rule.lacking(present):
            groups.setdefault((bind(rule.tree(), present), rule.dtype), []).append(rule)
    found = []
    first = [rules[0] for rules in groups.values()]
    for start in range(0, len(first), MAX_RULES - 1):
        found += _against_trainer(store, first[start : start + MAX_RULES - 1], list(groups.values())[start:])
    found = [f for f in found if f.masked]
    exact = [f for f in found if f.exact]
    return tuple(exact or sorted(found, key=lambda f: -(f.kappa if f.kappa is not None else -1.0))[:SHOWN])


def _against_trainer(store: Store, rules: Sequence[Rule], names: Sequence[Sequence[Rule]]) -> list[Reproduction]:
    # The first pairs are those of the trainer with each rule.
    pairs = run(store, {"it": Agreement((TRAINER, *rules))}).results["it"].rows()
    out = []
    for same, pair in zip(names, pairs[: len(rules)], strict=False):
        both, only_a, only_b, neither = (pair[k] for k in ("both", "only_a", "only_b", "neither"))
        disagree, masked = only_a + only_b, only_b + neither
        out.append(
            Reproduction(
                tuple(rule.label for rule in same), not disagree and masked > 0, both + disagree + neither, masked,
                disagree, kappa(both, only_a, only_b, neither),
            )
        )  # fmt: skip
    return out
