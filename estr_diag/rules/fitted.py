"""``scale`` in a rule: the empirical m2(H) of the log that the rule is replayed on, put into its tree as steps over H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from estr_diag.errors import MissingColumnError
from estr_diag.rules.base import Rule, stepped
from estr_diag.rules.language.tree import Name, Node, walk
from estr_diag.stats.empirical_scale import EmpiricalScale
from estr_diag.stats.grid import fitting_grid
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get, run

Knots = tuple[tuple[float, float], ...]
"""Lower edge of a bin of H, and the m2 inside it; ascending."""


def knots(store: Store) -> Knots:
    """Fit m2(H) to a log: isotonic means of delta^2 in bins of H.

    Raises
    ------
    MissingColumnError
        The log has no entropy, or only one engine's log-probs.
    """
    present = store.present()
    if lacking := frozenset({"entropy", "logp_infer", "logp_train"}) - present:
        raise MissingColumnError("scale (m2 of H)", sorted(lacking), how_to_get(lacking))
    grid = fitting_grid(store, present)
    assert grid is not None
    rows = run(store, {"it": EmpiricalScale(grid)}).results["it"].rows()
    return tuple((row["lo"], row["m2"]) for row in rows)


def uses_scale(node: Node | None) -> bool:
    """Say whether a tree names ``scale``."""
    return node is not None and any(part == Name("scale") for part in walk(node))


def fitted(rules: Sequence[Rule], store: Store) -> tuple[Rule, ...]:
    """Return the rules with ``scale`` fitted to a log, where they name it."""
    if not any(uses_scale(rule.tree()) or uses_scale(rule.weight_tree()) for rule in rules):
        return tuple(rules)
    steps = knots(store)
    return tuple(_with(rule, steps) for rule in rules)


def on_log(node: Node, store: Store) -> Node:
    """Return a tree with ``scale`` fitted to a log, where it names it."""
    return stepped(node, knots(store)) if uses_scale(node) else node


def _with(rule: Rule, steps: Knots) -> Rule:
    return replace(rule, knots=steps)
