"""What a rule is, in words: its scope, which ends of its bounds it keeps, what it needs, who else has the name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from estr_diag.expressions import Edge
from estr_diag.rules.base import Number, Rule
from estr_diag.rules.language.tree import (
    BOOLEAN_AGGREGATES,
    ORDERED,
    Aggregate,
    Call,
    Choose,
    Compare,
    Logic,
    Name,
    Node,
    Settled,
    children,
    mapped,
    strict,
    walk,
)
from estr_diag.rules.language.tree import Number as Constant
from estr_diag.rules.language.vocabulary import OF_SEQUENCE
from estr_diag.rules.library import LIBRARY, find
from estr_diag.schema import LOGP_COLUMNS, SEQUENCES, TOKENS

EDGE_WORDS: dict[Edge, str] = {
    "B": "B: logp_train - logp_infer",
    "U": "U: logp_update - logp_train; a log with one training column shows the first minibatch, where it is 0",
    "E": "E: logp_update - logp_infer; with one training column it is B",
}
ON_MISSING = {
    "undecided": "counted as undecided, neither kept nor masked",
    "drop": "masked, as the trainer does",
    "keep": "kept, as the trainer does",
}
DENOMINATOR = {
    "unchanged": "unchanged: a masked token still counts where the loss is averaged",
    "shrinks": "shrinks: the loss is averaged over the kept tokens",
}
_SCOPES = {"seq": "sequence", "turn": "turn", "run": "run of the mask", "group": "group", "step": "step"}
_OF_SEQUENCE = frozenset({*OF_SEQUENCE, "trainer_version", "step"})
_SIGNED = ("advantage", "reward")
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_WIDTH = 36
"""A longer side of a bound is shortened to its outermost function."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One comparison that a kept token passes, and whether a token exactly on it does."""

    text: str
    inclusive: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """What another rule of the same name has otherwise: a parameter, the text, edge, dtype, weight, denominator."""

    what: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Relative:
    """A rule of the library with the same name."""

    key: str
    config: str
    checked: bool
    differs: tuple[Difference, ...]

    @property
    def short(self) -> str:
        """Key without the name that it shares: ``@verl``; the name itself for the rule without a framework."""
        name, at, framework = self.key.partition("@")
        return at + framework or name

    @property
    def another(self) -> tuple[Difference, ...]:
        """Differences that make it another rule even with the same parameters."""
        return tuple(d for d in self.differs if d.what in ("keep", "edge", "dtype", "on_missing"))


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """Everything about one rule.

    Parameters
    ----------
    asked
        The alias by which it was asked for, where it was one.
    formula
        Text of the keep condition, or the parts of a combination.
    edges
        Which pairs of policies it compares, in words; none where it looks at no log-prob.
    scope
        On what a token's decision depends, the token itself first.
    whole
        Whether all tokens of a scope are kept or masked together.
    bounds
        The comparisons that decide, with parameters as numbers.
    at_zero
        Where an advantage (or reward) of 0 falls, for rules that go by its sign.
    needs
        Column -> how to make a trainer log it, or what it is.
    checked
        For a preset: equal to the framework's own code on the recorded log.
    relatives
        Rules of the library with the same name.
    warnings
        Same name, other rule.
    """

    key: str
    label: str
    says: str
    formula: str
    parameters: Mapping[str, Number]
    weight: str
    edges: tuple[str, ...]
    scope: tuple[str, ...]
    whole: bool
    bounds: tuple[Bound, ...]
    at_zero: str
    needs: Mapping[str, str]
    denominator: str
    on_missing: str
    dtype: str
    score: str
    reference: str
    config: str
    checked: bool | None
    aliases: tuple[str, ...]
    relatives: tuple[Relative, ...]
    warnings: tuple[str, ...]
    asked: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def look_up(name: str, own: Mapping[str, Rule] | None = None) -> RuleFacts | None:
    """Describe the rule of a key or alias, those of a file first; None where there is none."""
    rule = (own or {}).get(name) or find(name)
    return None if rule is None else describe(rule, asked=name if name != rule.key else "")


def describe(rule: Rule, *, asked: str = "") -> RuleFacts:
    """Say what a rule is."""
    tree, weight = rule.tree(), rule.weight_tree()
    relatives = _relatives(rule)
    family = LIBRARY.get(rule.name)
    scope, whole = _scope(tree)
    return RuleFacts(
        key=rule.key,
        label=rule.label,
        says=rule.says,
        formula=_formula(rule),
        parameters=dict(rule.parameters),
        weight=_weight(rule, weight),
        edges=tuple(EDGE_WORDS[edge] for edge in edges(rule)),
        scope=scope,
        whole=whole,
        bounds=tuple(dict.fromkeys(_bounds(tree, True))),
        at_zero=_at_zero(tree),
        needs={name: _how(name) for name in sorted(rule.needs)},
        denominator=DENOMINATOR[rule.denominator],
        on_missing=ON_MISSING[rule.on_missing],
        dtype=rule.dtype,
        score=rule.score,
        reference=rule.reference,
        config=rule.config,
        checked=rule.checked if rule.framework else None,
        aliases=rule.aliases or (family.aliases if family is not None and rule.framework else ()),
        relatives=relatives,
        warnings=_warnings(rule, relatives),
        asked=asked,
    )


def edges(rule: Rule) -> tuple[Edge, ...]:
    """Return the pairs of policies that a rule compares."""
    if rule.parts and not rule.weight:
        return tuple(sorted({edge for part in rule.parts for edge in edges(part)}))
    weight = rule.weight_tree()
    found: set[Edge] = set()
    for node in (*walk(rule.tree()), *(walk(weight) if weight is not None else ())):
        if isinstance(node, Name):
            if node.name in ("delta", "ratio"):
                found.add("B")
            elif node.name in ("delta_u", "ratio_u"):
                found.add("U")
            elif node.name in ("delta_e", "ratio_e"):
                found.add("E")
            elif node.name.startswith("p_") or node.name in LOGP_COLUMNS:
                found.add(rule.edge)
    return tuple(sorted(found))


def differences(here: Rule, there: Rule) -> tuple[Difference, ...]:
    """Return what `there` has otherwise than `here`."""
    found = []
    if _plain(_formula(here)) != _plain(_formula(there)):
        found.append(Difference("keep", _formula(here), _formula(there)))
    for name in dict.fromkeys([*here.parameters, *there.parameters]):
        mine, theirs = (_number(rule.parameters.get(name)) for rule in (here, there))
        if mine != theirs:
            found.append(Difference(name, mine, theirs))
    for what in ("edge", "dtype", "on_missing", "denominator"):
        if getattr(here, what) != getattr(there, what):
            found.append(Difference(what, getattr(here, what), getattr(there, what)))
    if _plain(here.weight) != _plain(there.weight):
        found.append(Difference("weight", here.weight or "1", there.weight or "1"))
    return tuple(found)


def _relatives(rule: Rule) -> tuple[Relative, ...]:
    return tuple(
        Relative(other.key, other.config, other.checked, differences(rule, other))
        for other in LIBRARY.values()
        if other.name == rule.name and other != rule
    )


def _warnings(rule: Rule, relatives: Iterable[Relative]) -> tuple[str, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for relative in relatives:
        for difference in relative.another:
            groups.setdefault((difference.what, difference.there), []).append(relative.short)
    found = [
        f"{', '.join(keys)}: another condition: {there}"
        if what == "keep"
        else f"{', '.join(keys)}: {what} {there} in place of {getattr(rule, what)}"
        for (what, there), keys in groups.items()
    ]
    for name in rule.parameters:
        other: dict[str, list[str]] = {}
        for relative in relatives:
            for difference in relative.differs:
                if difference.what == name:
                    other.setdefault(difference.there, []).append(relative.short)
        if other:
            listed = "; ".join(f"{value} in {', '.join(keys)}" for value, keys in other.items() if value != "none")
            found += [f"{name} is {_number(rule.parameters[name])} here; {listed}"] if listed else []
    return tuple(found)


def _formula(rule: Rule) -> str:
    if not rule.parts:
        return rule.keep
    labels = [part.label for part in rule.parts]
    return f"not {labels[0]}" if rule.combine == "not" else f" {rule.combine} ".join(labels)


def _weight(rule: Rule, tree: Node | None) -> str:
    if rule.weight or tree is None:
        return rule.weight
    return "product of the weights of its parts"


def _scope(tree: Node) -> tuple[tuple[str, ...], bool]:
    """Return on what a decision depends, and whether the tokens of a scope share it."""
    bare = mapped(tree, lambda node: node.part if isinstance(node, Settled) else node)
    aggregates = [node for node in walk(bare) if isinstance(node, Aggregate)]
    outside = {node.name for node in strict(bare) if isinstance(node, Name)}
    scopes = [_SCOPES[node.scope] for node in aggregates] + ["sequence"] * bool(outside & _OF_SEQUENCE)
    by_token = bool(outside - _OF_SEQUENCE) or any(node.function in ORDERED for node in aggregates)
    return (*["token"] * by_token, *dict.fromkeys(scopes)), bool(scopes) and not by_token


def _bounds(node: Node, kept_if_true: bool) -> Iterable[Bound]:
    match node:
        case Settled():
            yield from _bounds(node.part, kept_if_true)
        case Logic():
            for part in node.parts:
                yield from _bounds(part, kept_if_true != (node.operator == "not"))
        case Choose():
            for part in (node.then, node.otherwise):
                yield from _bounds(part, kept_if_true)
        case Aggregate() if node.function == "budget":
            text = f"mean of what is left of {_short(node.argument)} < {_number(node.parameter)}"
            yield Bound(text, False)
        case Aggregate() if node.function in BOOLEAN_AGGREGATES and node.argument is not None:
            yield from _bounds(node.argument, kept_if_true)
        case Compare() if node.operator not in ("=", "<>") and not _is_sign_test(node):
            operator = node.operator if kept_if_true else _OPPOSITE[node.operator]
            yield Bound(f"{_short(node.left)} {operator} {_short(node.right)}", operator in ("<=", ">="))
        case _:
            pass


def _is_sign_test(node: Node) -> bool:
    return (
        isinstance(node, Compare)
        and isinstance(node.left, Name)
        and node.left.name in _SIGNED
        and node.right == Constant(0.0)
    )


def _at_zero(tree: Node) -> str:
    found: dict[str, set[str]] = {}
    for node in walk(tree):
        if isinstance(node, Compare) and _is_sign_test(node) and isinstance(node.left, Name):
            found.setdefault(node.left.name, set()).add(node.operator)
    told = []
    for name, operators in found.items():
        if operators & {"=", "<>"}:
            told.append(f"{name} = 0 is a case of its own")
        elif operators >= {">", "<"}:
            told.append(f"{name} = 0 is on neither side")
        else:
            with_positive = bool(operators & {">=", "<"})
            told.append(f"{name} = 0 goes with {'positive' if with_positive else 'negative'}")
    return "; ".join(told)


def _short(node: Node | None) -> str:
    text = _text(node)
    if len(text) <= _WIDTH:
        return text
    match node:
        case Call(function, _) if function.isalpha() and function != "neg":
            return f"{function}(...)"
        case Aggregate():
            return f"{node.scope}_{node.function}(...)"
        case _:
            return "(...)"


def _text(node: Node | None) -> str:
    """Write a tree as text of the language, names with their edge and parameters as numbers."""
    match node:
        case Constant(value):
            return _number(value)
        case Name(name):
            return name
        case Call("neg", (argument,)):
            return f"-{_text(argument)}"
        case Call(function, arguments) if not function.isalpha():
            return f" {function} ".join(
                f"({_text(a)})" if isinstance(a, Call) and not a.function.isalpha() and function != "+" else _text(a)
                for a in arguments
            )
        case Call(function, arguments):
            return f"{function}({', '.join(_text(a) for a in arguments)})"
        case Aggregate():
            inner = [] if node.argument is None else [_text(node.argument)]
            inner += [] if node.parameter is None else [_number(node.parameter)]
            return f"{node.scope}_{node.function}({', '.join(inner)})"
        case Compare():
            return f"{_text(node.left)} {node.operator} {_text(node.right)}"
        case None:
            return ""
        case _:
            return f"({', '.join(_text(child) for child in children(node))})"


def _number(value: Number | None) -> str:
    return "none" if value is None else f"{float(value):g}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _how(name: str) -> str:
    column = TOKENS[name] if name in TOKENS else SEQUENCES[name]
    return column.get_it or column.meaning
