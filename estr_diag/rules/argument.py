"""The argument of ``--rules``: rules by name, and files of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from estr_diag.errors import UsageError
from estr_diag.rules.base import Rule
from estr_diag.rules.file import load_rules
from estr_diag.rules.library import find
from estr_diag.rules.names import parse_rules


def parse_rule_argument(text: str, note: Callable[[str], None] | None = None) -> tuple[Rule, ...]:
    """Read ``estr,rules.toml,mine:tau=3``: rules as `parse_rules` reads them, and files of rules.

    All rules of a file take part. What stands after a file may name its rules; a rule that is there already is
    not repeated.

    Parameters
    ----------
    note
        Told which rules of a file have the name of a built-in one.

    Raises
    ------
    UsageError
        An unknown rule or parameter, a file that cannot be followed, or two rules under one label.
    """
    own: dict[str, Rule] = {}
    chosen: dict[str, Rule] = {}
    for part in (piece.strip() for piece in text.split(",")):
        if part.endswith(".toml"):
            loaded = load_rules(part)
            if note is not None:
                for remark in shadowed(loaded):
                    note(f"{part}: {remark}")
            own |= loaded
            found = tuple(loaded.values())
        else:
            found = parse_rules(part, own)
        for rule in found:
            if chosen.setdefault(rule.label, rule) != rule:
                raise UsageError(f"{part}: two different rules are called '{rule.label}'; give one another name")
    return tuple(chosen.values())


def shadowed(own: Mapping[str, Rule]) -> tuple[str, ...]:
    """Return a remark for each rule of a file that bears the name of a built-in one."""
    return tuple(
        f"rule '{name}' is the file's own and stands in place of the built-in {rule.key}"
        for name in own
        if (rule := find(name)) is not None
    )
