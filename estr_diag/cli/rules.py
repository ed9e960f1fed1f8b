"""The pages of mask rules: what ``estr-diag rules`` lists, and ``estr-diag explain RULE`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from estr_diag.rules import library
from estr_diag.rules.base import Rule
from estr_diag.rules.describe import Difference, RuleFacts, describe
from estr_diag.rules.library.clips import CLIP_RULES
from estr_diag.rules.library.weights import WEIGHT_RULES

_PAIR = frozenset({"logp_infer", "logp_train"})
_OWN, _TOKEN, _SCOPE, _WEIGHT, _CLIP = (
    "rules of your own", "token rules", "sequence, turn, group and step rules", "weights", "clips and shapers",
)  # fmt: skip
_CLIPS = frozenset(rule.name for rule in CLIP_RULES)
_WEIGHTS = frozenset(rule.name for rule in WEIGHT_RULES)
_WIDTHS = (18, 20, 15, 21)
"""Columns of the listing, for a page of 80: rule, parameters, needs, presets."""


def listing(rules: Iterable[Rule], own: Iterable[Rule] = ()) -> RenderableType:
    """List rules by what they judge a token by; the presets of a rule stand beside it.

    Parameters
    ----------
    own
        Rules of a file.
    """
    parts: list[RenderableType] = []
    for title, families in _sections(rules, own).items():
        table = _table("rule", "parameters", "also needs", "presets, as in @verl", widths=_WIDTHS)
        for rule, presets in families:
            table.add_row(
                Text(rule.key),
                Text(" ".join(f"{k}={float(v):g}" for k, v in rule.parameters.items()) or "–"),
                Text(" ".join(_also_needs(rule)) or "–"),
                Text(f"{len(presets)}: {' '.join(_suffix(preset) for preset in presets)}" if presets else "–"),
            )
        called = [f"{rule.key} = {', '.join(rule.aliases)}" for rule, _ in families if rule.aliases]
        also = [Text(f"also called: {'; '.join(called)}", style="dim")] if called else []
        parts.append(Padding(Group(Text(title, style="bold"), table, *also), (0, 0, 1, 0)))
    if absent := _not_replayable():
        table = _table("rule", "what it is", "what a log lacks", widths=(14, 31, 31))
        for entry in absent:
            table.add_row(Text(entry["name"]), Text(entry["says"]), Text(entry["needs"]))
        heading = Text("not replayable from a log of tokens", style="bold")
        parts.append(Padding(Group(heading, table), (0, 0, 1, 0)))
    parts.append(
        Text(
            "Every rule needs logp_infer and logp_train unless it looks at neither. Without logp_update a rule on "
            "edge E is one on B, and one on U sees a ratio of 1. More of one: estr-diag explain icepop@verl",
            style="dim",
        )
    )
    return Group(*parts)


def listing_json(rules: Iterable[Rule], own: Iterable[Rule] = ()) -> dict[str, Any]:
    """Return the same as JSON values."""
    found = [
        {
            "name": rule.key, "section": title, "says": rule.says, "parameters": dict(rule.parameters),
            "aliases": list(rule.aliases), "needs": sorted(rule.needs), "presets": [preset.key for preset in presets],
        }
        for title, families in _sections(rules, own).items()
        for rule, presets in families
    ]  # fmt: skip
    return {"rules": found, "not_replayable": _not_replayable()}


def page(facts: RuleFacts) -> RenderableType:
    """Draw what a rule is."""
    head = Text.assemble((f"{facts.asked} is " if facts.asked else ""), (facts.key, "bold"))
    head.append(f": {facts.says}" if facts.says else "")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, values in _rows(facts):
        for i, value in enumerate(values):
            grid.add_row(Text(label if i == 0 else ""), Text(value))
    parts: list[RenderableType] = [head, Padding(grid, (1, 0, 0, 0))]
    if facts.warnings:
        warned = Table.grid(padding=(0, 1))
        for warning in facts.warnings:
            warned.add_row(Text("!", style="yellow"), Text(warning))
        title = Text("same name, other rule", style="bold yellow")
        parts.append(Padding(Group(title, warned), (1, 0, 0, 0)))
    if facts.relatives:
        parts.append(Padding(_relatives(facts), (1, 0, 0, 0)))
    return Group(*parts)


def absent_page(name: str) -> RenderableType | None:
    """Draw what is known of a rule that cannot be replayed; None where none is called that."""
    for entry in _not_replayable():
        if entry["name"] == name:
            lacking = f"not replayable from a log of tokens; it would need: {entry['needs']}"
            return Group(Text.assemble((name, "bold"), f": {entry['says']}"), Text(lacking))
    return None


def page_json(facts: RuleFacts) -> dict[str, Any]:
    """Return the same as JSON values."""
    return facts.to_json()


def _rows(facts: RuleFacts) -> Iterable[tuple[str, list[str]]]:
    values = (f"{name} = {float(value):g}" for name, value in facts.parameters.items())
    sweep = f" (a sweep moves {facts.score})" if facts.score and len(facts.parameters) > 1 else ""
    rows: dict[str, list[str]] = {
        "keep": [facts.formula],
        "weight": [facts.weight or "1"],
        "parameters": [", ".join(values) + sweep] if facts.parameters else [],
        "compares": list(facts.edges),
        "judged by": [_scope(facts)],
        "bounds": [f"{bound.text}: the bound itself is {_kept(bound.inclusive)}" for bound in facts.bounds],
        "at zero": [facts.at_zero],
        "needs": [f"{column}: {how}" for column, how in facts.needs.items()],
        "missing": [f"a token without one of these is {facts.on_missing}"] if facts.needs else [],
        "denominator": [facts.denominator],
        "arithmetic": [facts.dtype] if facts.dtype != "float64" else [],
        "from": [facts.reference],
        "config": [facts.config],
        "checked": [_checked(facts.checked)],
        "also called": [", ".join(facts.aliases)],
    }
    for label, found in rows.items():
        if kept := [value for value in found if value]:
            yield label, kept


def _scope(facts: RuleFacts) -> str:
    if not facts.scope:
        return "nothing: it keeps every token"
    if facts.scope == ("token",):
        return "the token alone"
    scope = ", ".join(f"its {part}" if part != "token" else "the token" for part in facts.scope)
    return scope + (", whose tokens are kept or masked together" if facts.whole and len(facts.scope) == 1 else "")


def _kept(inclusive: bool) -> str:
    return "kept" if inclusive else "masked"


def _checked(checked: bool | None) -> str:
    if checked is None:
        return ""
    return "equal to the framework's own code, token by token" if checked else "read in the framework's source, not run"


def _relatives(facts: RuleFacts) -> RenderableType:
    table = _table("of that name", "what differs", "set by", widths=(20, 24, 32))
    for relative in facts.relatives:
        differs = "\n".join(_difference(difference) for difference in relative.differs)
        unseen = " (read, not run)" if relative.config and not relative.checked else ""
        table.add_row(Text(relative.short), Text(differs or "nothing"), Text(f"{relative.config or '–'}{unseen}"))
    return table


def _difference(difference: Difference) -> str:
    if difference.what == "keep":
        return "the condition (above)"
    return f"{difference.what} {difference.there}"


def _table(*headers: str, widths: tuple[int | None, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header, width in zip(headers, widths, strict=True):
        table.add_column(header, overflow="fold", width=width)
    return table


def _sections(rules: Iterable[Rule], own: Iterable[Rule]) -> dict[str, list[tuple[Rule, list[Rule]]]]:
    """Return section -> rules without a framework, each with the presets of its name."""
    given = list(rules)
    presets: Mapping[str, list[Rule]] = {
        rule.name: [other for other in given if other.name == rule.name and other.framework] for rule in given
    }
    found: dict[str, list[tuple[Rule, list[Rule]]]] = {
        _OWN: [(rule, []) for rule in own], _TOKEN: [], _SCOPE: [], _WEIGHT: [], _CLIP: [],
    }  # fmt: skip
    families = {rule.name for rule in given if not rule.framework}
    for rule in given:
        if not rule.framework or rule.name not in families:
            found[_section(rule)].append((rule, presets[rule.name] if not rule.framework else []))
    return {title: listed for title, listed in found.items() if listed}


def _section(rule: Rule) -> str:
    if rule.name in _CLIPS:
        return _CLIP
    if rule.name in _WEIGHTS or (rule.weight and rule.keep == "true" and not rule.parts):
        return _WEIGHT
    return _TOKEN if set(describe(rule).scope) <= {"token"} else _SCOPE


def _suffix(preset: Rule) -> str:
    return preset.key.partition("@")[2]


def _also_needs(rule: Rule) -> list[str]:
    return sorted(rule.needs - _PAIR)


def _not_replayable() -> list[dict[str, str]]:
    return [
        {"name": entry.name, "says": entry.says, "needs": entry.needs}
        for entry in getattr(library, "NOT_REPLAYABLE", ())
    ]
