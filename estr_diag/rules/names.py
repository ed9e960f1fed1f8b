"""Rules as one writes them on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from estr_diag.errors import UsageError
from estr_diag.rules.base import Number, Rule, combined
from estr_diag.rules.library import get

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def parse_rules(text: str, own: Mapping[str, Rule] | None = None) -> tuple[Rule, ...]:
    """Read ``estr:tau=4,icepop@verl:low=0.5,estr+veto``.

    Commas stand between rules, colons before a version or a parameter, ``@`` before a framework, ``+``
    between parts that must all keep (each judged on the original mask) and ``>`` between parts of
    which each is judged on what those before it left.

    Parameters
    ----------
    own
        Rules of a file; they come before the library's.

    Raises
    ------
    UsageError
        An unknown rule or parameter, or a value that is no number.
    """
    return tuple(_combination(part.strip(), own or {}) for part in text.split(",") if part.strip())


def _combination(text: str, own: Mapping[str, Rule]) -> Rule:
    # "1e+5" is a number, so a plus between two digits' signs is none of ours.
    alternatives = re.split(r">", text)
    steps = [_conjunction(part, own) for part in alternatives]
    return steps[0] if len(steps) == 1 else combined("then", tuple(steps))


def _conjunction(text: str, own: Mapping[str, Rule]) -> Rule:
    parts = [_one(part, own) for part in re.split(r"(?<![0-9.]e)\+", text)]
    return parts[0] if len(parts) == 1 else combined("and", tuple(parts))


def _one(text: str, own: Mapping[str, Rule]) -> Rule:
    name, *settings = text.strip().split(":")
    if settings and "=" not in settings[0] and "@" in name:
        name = f"{name}:{settings.pop(0)}"
    rule = own[name] if name in own else get(name)
    given: dict[str, Number] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            raise UsageError(f"rule '{text}': {setting!r} is not of the form parameter=number") from None
        if not equals or not _NAME.fullmatch(key):
            raise UsageError(f"rule '{text}': {setting!r} is not of the form parameter=number")
    return rule.with_parameters(given)
