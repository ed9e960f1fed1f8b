"""A mask rule is data: a condition to keep a token, its parameters, and where it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from estr_diag.errors import UsageError, nearest
from estr_diag.rules import expression

Number = float | int


@dataclass(frozen=True, slots=True)
class Rule:
    """One mask rule.

    Parameters
    ----------
    name
        Field name.
    keep
        Boolean text over token columns and parameters; see `expression`. A token whose needed column
        is null is neither kept nor masked: it is counted as undecided.
    parameters
        Name -> value; the library's hold the defaults.
    edge
        Which pair of policies it looks at: B (train against infer), U (update against train), E (update
        against infer). With one training-engine column B equals E.
    says
        One line for people: when it keeps a token and what the parameters mean.
    reference
        Where it comes from.
    """

    name: str
    keep: str
    parameters: Mapping[str, Number] = field(default_factory=dict)
    edge: str = "B"
    says: str = ""
    reference: str = ""

    def with_parameters(self, given: Mapping[str, Number]) -> Rule:
        """Return the rule with some parameters set."""
        for name, value in given.items():
            if name not in self.parameters:
                raise UsageError(
                    f"rule '{self.name}' has no parameter '{name}'; {nearest(name, self.parameters) if self.parameters else 'it has none'}"
                )
            if not math.isfinite(float(value)):
                raise UsageError(f"rule '{self.name}': {name} is {value}; expected a finite number")
        return replace(self, parameters={**self.parameters, **given})

    @property
    def label(self) -> str:
        """Name and parameters as one writes them on the command line."""
        return ":".join([self.name, *(f"{k}={float(v):g}" for k, v in self.parameters.items())])

    @property
    def needs(self) -> frozenset[str]:
        """Log columns that it needs."""
        return expression.needs(self.keep, self.parameters)

    def sql(self) -> str:
        """Return the condition as DuckDB SQL over one row of ``tok``."""
        return expression.to_sql(self.keep, self.parameters)


_NAME = re.compile(r"[a-z][a-z0-9_]*")


def parse_rules(text: str, library: Mapping[str, Rule]) -> tuple[Rule, ...]:
    """Read ``estr:tau=4,icepop:low=0.5:high=2``: commas between rules, colons before parameters.

    Raises
    ------
    UsageError
        An unknown rule or parameter, or a value that is no number.
    """
    return tuple(_parse_rule(part.strip(), library) for part in text.split(",") if part.strip())


def _parse_rule(text: str, library: Mapping[str, Rule]) -> Rule:
    name, *settings = text.split(":")
    if name not in library:
        raise UsageError(f"no rule '{name}'; {nearest(name, library)}")
    given: dict[str, Number] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            raise UsageError(f"rule '{text}': {setting!r} is not of the form parameter=number") from None
        if not equals or not _NAME.fullmatch(key):
            raise UsageError(f"rule '{text}': {setting!r} is not of the form parameter=number")
    return library[name].with_parameters(given)
