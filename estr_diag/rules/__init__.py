"""Mask rules: ``estr_diag.rules.estr(tau=4.0)`` and the like return a `Rule`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from estr_diag.rules.base import Number, Rule
from estr_diag.rules.library import DEFAULT_RULES, LIBRARY, find, get
from estr_diag.rules.names import parse_rules

__all__ = ["DEFAULT_RULES", "LIBRARY", "Rule", "from_toml", "get", "parse_rules"]


def from_toml(path: str | Path) -> tuple[Rule, ...]:
    """Return the rules of a file, in its order; see ``rules.v1.schema.json``."""
    from estr_diag.rules.file import load_rules

    return tuple(load_rules(path).values())


def __getattr__(name: str) -> Callable[..., Rule]:
    """Return a function that makes the built-in rule of that name: ``rules.estr(tau=2.0)``."""
    rule = find(name)
    if rule is None:
        raise AttributeError(f"module 'estr_diag.rules' has no attribute {name!r}")

    def make(**parameters: Number) -> Rule:
        return rule.with_parameters(parameters)

    make.__name__, make.__doc__ = name, f"Return the rule {name}: {rule.says}."
    return make


def __dir__() -> list[str]:
    return sorted([*__all__, *(key for key in LIBRARY if key.isidentifier())])
