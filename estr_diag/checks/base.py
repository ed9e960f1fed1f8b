"""What a check says: found, clear, or cannot tell, with the numbers that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from estr_diag.result import json_number
from estr_diag.store.database import Store

Verdict = Literal["found", "clear", "cannot_tell"]
Level = Literal["fatal", "error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error", "fatal")
"""In rising order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Parameters
    ----------
    id
        Stable name of the check.
    level
        How much it matters when found. After a fatal finding the statistics of `spoils` mean nothing.
    size, control
        The measured effect, and the value that a sound log would show.
    where
        Columns, steps, sequences.
    cause, next_action
        In an engineer's words.
    evidence
        Rows to look at.
    spoils
        Columns whose statistics must not be read.
    """

    id: str
    verdict: Verdict
    level: Level
    where: str
    cause: str
    next_action: str
    size: float | None = None
    control: float | None = None
    evidence: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    spoils: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = json_number(asdict(self))
        return found


class Check(Protocol):
    """A detector: looks at the store, set-wise, and reports."""

    id: ClassVar[str]

    def run(self, store: Store, present: frozenset[str]) -> Finding:
        """Return what it found; "cannot tell" when a column or enough tokens are missing."""
        ...
