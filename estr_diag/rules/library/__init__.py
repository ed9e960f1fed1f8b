"""The built-in rules, under the names the field uses, and the presets of single frameworks."""

from __future__ import annotations

from estr_diag.errors import UsageError, nearest
from estr_diag.rules.base import Rule
from estr_diag.rules.library.clips import CLIP_RULES
from estr_diag.rules.library.not_replayable import NOT_REPLAYABLE
from estr_diag.rules.library.presets import PRESETS
from estr_diag.rules.library.scopes import SCOPE_RULES
from estr_diag.rules.library.token import TOKEN_RULES, TRAINER
from estr_diag.rules.library.weights import WEIGHT_RULES

FAMILIES: tuple[Rule, ...] = (*TOKEN_RULES, *SCOPE_RULES, *WEIGHT_RULES, *CLIP_RULES)
"""Every rule without a framework: the name alone means this."""

LIBRARY: dict[str, Rule] = {rule.key: rule for rule in (*FAMILIES, *PRESETS)}
"""Every built-in rule by key; ``name@framework`` and ``name@framework:version`` are as that framework has it."""

_ALIASES = {alias: rule.name for rule in FAMILIES for alias in rule.aliases}

TODAY: dict[str, str] = {"verl": "2026-01", "areal": "2026-08"}
"""Since when a framework's unversioned presets are what they are: ``token_k1@verl:2026-01`` is ``token_k1@verl``."""

DEFAULT_RULES: tuple[Rule, ...] = tuple(LIBRARY[name] for name in ("none", "estr", "icepop", "kpop"))
"""What a report compares when nothing is asked for."""


def find(key: str) -> Rule | None:
    """Return the rule of a key or alias (``tis@slime`` is ``tis_token@slime``), or None."""
    name, at, framework = key.partition("@")
    trainer, _, version = framework.partition(":")
    if version and version == TODAY.get(trainer):
        framework = trainer
    return LIBRARY.get(key) or LIBRARY.get(_ALIASES.get(name, name) + at + framework)


def get(key: str) -> Rule:
    """Return the rule of a key or alias.

    Raises
    ------
    UsageError
        There is none; says which is nearest.
    """
    if (rule := find(key)) is None:
        name = key.partition("@")[0]
        same = [k for k in LIBRARY if k.partition("@")[0] == _ALIASES.get(name, name) and "@" in k]
        if "@" in key and same:
            raise UsageError(f"no rule '{key}'; of that name there are {', '.join(same)}")
        raise UsageError(f"no rule '{key}'; {nearest(key, [*LIBRARY, *_ALIASES])}")
    return rule


__all__ = ["DEFAULT_RULES", "FAMILIES", "LIBRARY", "NOT_REPLAYABLE", "PRESETS", "TRAINER", "find", "get"]
