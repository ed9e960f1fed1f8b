"""``rules.toml``: mask rules of one's own, in the language that the built-in ones are written in.

A rule file is untrusted. Its texts read the token log through `language.vocabulary` and nothing beside it, every
one of them is read when the file is, and what they become together is reckoned before it is built.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator

from estr_diag.errors import InputError, UsageError, nearest
from estr_diag.expressions import Edge
from estr_diag.rules.base import Combine, Denominator, OnMissing, Rule, combined
from estr_diag.rules.language.parse import MAX_CHARACTERS, MAX_TERMS, parse
from estr_diag.rules.language.sql import Dtype
from estr_diag.rules.language.tree import Flag, Kind, Node, extent
from estr_diag.rules.language.vocabulary import functions, names
from estr_diag.rules.library import LIBRARY, find
from estr_diag.rules.names import parse_rules

MAX_BYTES = 1_000_000
MAX_RULES = 500
MAX_PARTS = 60
MAX_PARAMETERS = 50
MAX_DEPTH = 120
MAX_LEVELS = 20
_BUILT_IN_TERMS = 100

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_IN_PART = re.compile(r"(?:^|[+>])\s*([a-z]\w*)(?![\w@])")
_COMBINES: tuple[Combine, ...] = ("then", "and", "or", "not")
# tomllib needs time in the square of the parts of a dotted key: half a million of them, in a file of a megabyte,
# would take it the better part of an hour.
_LONG_KEY = re.compile(r"""(?:(?<![\w-])(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')\s*+\.\s*+){16}""")


def _printable(text: str) -> str:
    if any(_hidden(c) and c not in "\n\t" for c in text):
        raise ValueError(f"holds a control character: {_visible(text)[:60]!r}")
    return text


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf")


def _visible(text: str) -> str:
    """Return a text without characters that act on a terminal."""
    return "".join(ascii(c)[1:-1] if _hidden(c) else c for c in text)


Text = Annotated[str, Field(max_length=MAX_CHARACTERS), AfterValidator(_printable)]
Parts = Annotated[tuple[Text, ...] | None, Field(min_length=2, max_length=MAX_PARTS)]
Value = Annotated[float, Field(strict=True, allow_inf_nan=False)]


_FIELDS = frozenset(
    {"weight", "parameters", "edge", "dtype", "on_missing", "denominator", "score", "says", "reference"}
)
"""Keys that are fields of a rule as they are."""


def _about(says: str, **more: Any) -> Any:
    return Field(description=says, **more)


class RuleEntry(BaseModel):
    """One table ``[rules.NAME]``: exactly one of keep, then, and, or, not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[Text | None, _about("when a token is kept; it may name columns, parameters and other rules")] = None
    then: Annotated[Parts, _about("rules, each judged on what those before it left")] = None
    all_of: Annotated[Parts, _about("rules that must all keep, each on the original mask", alias="and")] = None
    any_of: Annotated[Parts, _about("rules of which one must keep, each on the original mask", alias="or")] = None
    negated: Annotated[Text | None, _about("the rule whose masked tokens are kept", alias="not")] = None
    weight: Annotated[Text, _about("weight of a kept token; 1 where it is not given")] = ""
    parameters: Annotated[
        dict[str, Value], _about("name -> value, for keep and weight", max_length=MAX_PARAMETERS)
    ] = {}
    edge: Annotated[
        Edge, _about("what delta and ratio compare: B train with infer, U update with train, E update with infer")
    ] = "B"
    dtype: Annotated[Dtype, _about("the arithmetic; a combination has that of its parts")] = "float64"
    on_missing: Annotated[OnMissing, _about("what becomes of a token without a column that the rule names")] = (
        "undecided"
    )
    denominator: Annotated[
        Denominator,
        _about("whether the loss is averaged over all tokens or the kept ones; shrinks where a part's does"),
    ] = "unchanged"
    score: Annotated[str, _about("the parameter that a sweep moves when none is named")] = ""
    says: Annotated[Text, _about("one line for people")] = ""
    reference: Annotated[Text, _about("where it comes from")] = ""

    @model_validator(mode="after")
    def _sound(self) -> RuleEntry:
        given = [key for key in ("keep", *_COMBINES) if self.what(key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or 'none; keep = "true" keeps every token'
            raise ValueError(f"expected exactly one of keep, then, and, or, not; found {found}")
        for name in self.parameters:
            if problem := _problem(name, of_rule=False):
                raise ValueError(f"parameters: {problem}")
            if not re.search(rf"\b{name}\b", f"{self.keep or ''} {self.weight}"):
                raise ValueError(f"parameters: neither keep nor weight names '{name}'")
        if self.score and self.score not in self.parameters:
            known = nearest(self.score, self.parameters) if self.parameters else "the rule has none"
            raise ValueError(f"score: no parameter '{self.score}'; {known}")
        return self

    def what(self, key: str) -> Any:
        """Return what stands under keep, then, and, or, not."""
        return getattr(self, {"and": "all_of", "or": "any_of", "not": "negated"}.get(key, key))

    @property
    def combination(self) -> tuple[Combine, tuple[str, ...]] | None:
        """How it combines which parts; None where it has a text of its own."""
        for key in _COMBINES:
            if (parts := self.what(key)) is not None:
                return key, ((parts,) if isinstance(parts, str) else parts)
        return None


class RuleFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: Annotated[dict[str, RuleEntry], _about("name -> rule", min_length=1, max_length=MAX_RULES)]


def rules_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a rule file, for editors that check TOML against one."""
    schema = RuleFile.model_json_schema()
    name = {"pattern": f"^{_NAME.pattern}$", "not": {"enum": sorted({*names(), *functions()})}}
    schema["properties"]["rules"]["propertyNames"] = name
    entry = schema["$defs"]["RuleEntry"]
    entry["properties"]["parameters"]["propertyNames"] = name
    entry["oneOf"] = [{"required": [key]} for key in ("keep", *_COMBINES)]
    for key in ("keep", *_COMBINES):
        # TOML has no null: what is not given is not there.
        found = entry["properties"][key]
        found |= next(kind for kind in found.pop("anyOf") if kind.get("type") != "null")
        del found["default"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/rules/v1",
        **schema,
        "title": "rules.toml: mask rules of one's own",
    }


def load_rules(path: Path | str) -> dict[str, Rule]:
    """Read and check a rule file.

    Returns
    -------
    dict of str to Rule
        In the order of the file.

    Raises
    ------
    UsageError
        Not TOML, an unknown key, a value that is not allowed, a text that is not one of the language, or rules
        that name each other in a circle; says where, and the nearest valid name.
    InputError
        The file cannot be read.
    """
    source = _Source.read(Path(path))
    return _Builder(source, source.entries()).build()


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> _Source:
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", path=path) from None
        if len(raw) > MAX_BYTES:
            raise UsageError(f"{path}: more than {MAX_BYTES:,} bytes; a rule file has at most that many")
        try:
            return cls(path, raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise UsageError(f"{path}:{line}: not valid TOML: byte 0x{raw[error.start]:02x} is not UTF-8") from None

    def entries(self) -> dict[str, RuleEntry]:
        if found := _LONG_KEY.search(self.text):
            line = self.text.count("\n", 0, found.start()) + 1
            raise UsageError(f"{self.path}:{line}: a dotted key of more than 16 parts; write [rules.NAME]")
        try:
            data = tomllib.loads(self.text)
        except RecursionError:
            raise UsageError(f"{self.path}: not valid TOML: it is nested too deeply") from None
        except ValueError as error:  # tomllib lets Python's own error through for a number of too many digits
            raise UsageError(_visible(f"{self.path}: not valid TOML: {error}")) from None
        if not data.get("rules", True):
            data = {key: value for key, value in data.items() if key != "rules"}
        try:
            entries = RuleFile.model_validate(data).rules
        except ValidationError as error:
            first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
            problem = first["msg"].removeprefix("Value error, ")
            location = tuple(str(part) for part in first["loc"] if part != "[key]")
            if first["type"] == "extra_forbidden":
                model = RuleEntry if len(location) > 1 else RuleFile
                known = [found.alias or name for name, found in model.model_fields.items()]
                problem = f"unknown key; {nearest(location[-1], known)}"
            elif first["type"] == "missing":
                problem = "the file has no rule; write one as [rules.NAME]"
            elif first["type"] != "value_error":
                problem = f"{problem}; found {str(first['input'])[:80]!r}"
            self.refuse(location, problem)
        for name in entries:
            if problem := _problem(name, of_rule=True):
                self.refuse(("rules", name), problem)
        return entries

    def refuse(self, location: tuple[str, ...], problem: str) -> NoReturn:
        line = self._line(location)
        place = f"{self.path}:{line}" if line else str(self.path)
        raise UsageError(_visible(f"{place}: {'.'.join(location)}: {problem}")) from None

    def _line(self, location: tuple[str, ...]) -> int | None:
        """Return the line of a key; of the rule's head where the key is not found, None where neither is."""
        rule, key = (*location[1:3], "", "")[:2]
        head = re.compile(rf"^\s*\[\s*rules\s*\.\s*[\"']?{re.escape(rule)}[\"']?\s*\]")
        entry = re.compile(rf"^\s*[\"']?{re.escape(key)}[\"']?\s*[.=]")
        found = None
        for number, line in enumerate(self.text.split("\n"), 1):
            if found is None:
                found = number if head.match(line) else None
            elif re.match(r"^\s*\[\s*rules", line):
                break
            elif key and entry.match(line):
                return number
        return found


def _problem(name: str, *, of_rule: bool) -> str:
    """Say why nothing can have this name, or return an empty text."""
    if not _NAME.fullmatch(name):
        return f"'{name}' is not a name; expected a lower-case letter, then letters, digits and _, at most 64"
    for what, known in (("column", names()), ("function", functions())):
        if name in known:
            return f"'{name}' is a {what} of the language; choose another name"
    asked: list[str] = []

    def noted(found: str, _: Mapping[str, float]) -> Node:
        asked.append(found)
        return Flag(True)

    try:
        # A parameter is found before a rule is looked up, so that both are looked for as rules.
        for text in (name, f"{name}(x = 1)") if of_rule else (name,):
            parse(text, {}, want=Kind.BOOLEAN, rule_of=noted)
    except UsageError:
        asked.clear()
    return "" if set(asked) == {name} else f"'{name}' is a word of SQL; choose another name"


class _Builder:
    """Builds rules in the order in which they name each other, and none whose texts become too large."""

    def __init__(self, source: _Source, entries: Mapping[str, RuleEntry]) -> None:
        self.source, self.entries = source, entries
        self.rules: dict[str, Rule] = {}
        self.terms: dict[str, int] = {}
        self.levels: dict[str, int] = {}

    def build(self) -> dict[str, Rule]:
        calls = {name: self._calls(name, entry) for name, entry in self.entries.items()}
        graph = {name: [other for other in found if other in calls] for name, found in calls.items()}
        try:
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = error.args[1][::-1]
            path = " -> ".join(circle if len(circle) <= 12 else [*circle[:6], "...", *circle[-5:]])
            hint = "; a rule that builds on a built-in one needs another name" if find(circle[0]) else ""
            self.source.refuse(("rules", circle[0]), f"rules name each other in a circle: {path}{hint}")
        for name in order:
            with self._at(name):
                self._bound(name, calls[name])
            self.rules[name] = self._rule(name, self.entries[name], calls[name])
        return {name: self.rules[name] for name in self.entries}

    def _calls(self, name: str, entry: RuleEntry) -> list[str]:
        """Return the rules that an entry names, as often as they are looked up."""
        calls: list[str] = []
        rules = [*self.entries, *(key for key in LIBRARY if "@" not in key)]

        def noted(text: str, other: str, _: Mapping[str, float]) -> Node | None:
            if other in self.entries or find(other) is not None:
                calls.append(other)
                return Flag(True)
            close = difflib.get_close_matches(other, [*rules, *names(), *functions(), *entry.parameters], n=1)
            if close and close[0] in rules:
                place = f"at character {text.lower().index(other.lower()) + 1}"
                raise UsageError(f"{place}: no column, parameter or rule '{other}'; did you mean '{close[0]}'?")
            return None

        for key, text, want in (("keep", entry.keep, Kind.BOOLEAN), ("weight", entry.weight or None, Kind.NUMBER)):
            if text is not None:
                with self._at(name, key):
                    parse(text, entry.parameters, want=want, edge=entry.edge, rule_of=partial(noted, text))
        key, parts = entry.combination or ("", ())
        with self._at(name, key):
            for other in (found for part in parts for found in _IN_PART.findall(part)):
                if other not in self.entries and find(other) is None:
                    raise UsageError(f"no rule '{other}'; {nearest(other, rules)}")
                calls.append(other)
        return calls

    def _bound(self, name: str, calls: list[str]) -> None:
        """Refuse a rule that would become too large, before it is built."""
        self.levels[name] = 1 + max((self.levels.get(other, 0) for other in calls), default=0)
        self.terms[name] = 1 + sum(self.terms.get(other, _BUILT_IN_TERMS) for other in calls)
        if self.levels[name] > MAX_LEVELS:
            raise UsageError(f"rules that name rules, {self.levels[name]} deep; at most {MAX_LEVELS}")
        self._sized(name, self.terms[name])

    def _sized(self, name: str, terms: int, depth: int = 0) -> None:
        self.terms[name] = max(self.terms[name], terms)
        if terms > MAX_TERMS:
            raise UsageError(f"{terms:,} terms with the rules that it names written out; at most {MAX_TERMS:,}")
        if depth > MAX_DEPTH:
            raise UsageError(f"nested {depth} deep with the rules that it names written out; at most {MAX_DEPTH}")

    def _rule(self, name: str, entry: RuleEntry, calls: list[str]) -> Rule:
        given = entry.model_dump(include=set(_FIELDS & entry.model_fields_set))
        uses = {other: self.rules[other] for other in calls if other in self.rules}
        key = "keep"
        if entry.combination is None:
            rule = Rule(name, uses=uses, keep=entry.keep or "", **given)
        else:
            key, texts = entry.combination
            with self._at(name, key):
                parts = tuple(self._part(name, text) for text in texts)
                rule = replace(
                    combined(key, parts, "float64"), **{"name": name, "uses": uses, "reference": "", **given}
                )
        with self._at(name, key):
            kinds = {part.dtype for part in (*uses.values(), *rule.parts)}
            if len(kinds) > 1 and "dtype" not in given:
                raise UsageError("it names rules of float32 and of float64; say dtype")
            rule = replace(rule, dtype=given.get("dtype", min(kinds, default="float64")))
            self._sized(name, *extent(rule.tree()))
        with self._at(name, "weight" if entry.weight else key):
            if (weight := rule.weight_tree()) is not None:
                self._sized(name, *extent(weight))
        return rule

    def _part(self, name: str, text: str) -> Rule:
        if len(found := parse_rules(text, self.rules)) != 1:
            raise UsageError(f"{text!r} names {len(found)} rules; expected one")
        self._sized(name, *extent(found[0].tree()))
        return found[0]

    @contextmanager
    def _at(self, name: str, *key: str) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            self.source.refuse(("rules", name, *key), str(error))
        except RecursionError:
            self.source.refuse(("rules", name, *key), "nested too deeply")
