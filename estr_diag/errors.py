"""One error tree and the exit codes that go with it.

The library raises; only ``estr_diag.cli`` catches. A message says what was wrong (file, line, key),
what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit status of the command; scripts may rely on these numbers."""

    OK = 0
    GATE = 1
    USAGE = 2
    INPUT = 3
    STORE = 4
    INTERRUPTED = 130


class EstrDiagError(Exception):
    """Root of every error that this package raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.INPUT


class UsageError(EstrDiagError):
    """A command line, argument or configuration file that cannot be followed."""

    exit_code: ClassVar[ExitCode] = ExitCode.USAGE


class GateError(EstrDiagError):
    """A limit that the caller set (``--fail-on``) was breached."""

    exit_code: ClassVar[ExitCode] = ExitCode.GATE


class InputError(EstrDiagError):
    """A file that cannot be read, or that holds something that cannot be true.

    Parameters
    ----------
    problem
        What is wrong, in a few words.
    path, line, key
        Where: file, 1-based line (or record) number, field name.
    found, expected
        What was there, and what should have been.
    hint
        What to do next.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: Path | str | None = None,
        line: int | None = None,
        key: str | None = None,
        found: object | None = None,
        expected: object | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem, self.path, self.line, self.key = problem, path, line, key
        self.found, self.expected, self.hint = found, expected, hint
        super().__init__(self._message())

    def _message(self) -> str:
        place = ""
        if self.path is not None:
            place = f"{self.path}:{self.line}: " if self.line is not None else f"{self.path}: "
        elif self.line is not None:
            place = f"line {self.line}: "
        text = f"{place}{self.problem}"
        if self.key is not None:
            text += f" (key '{self.key}')"
        if self.found is not None:
            text += f"; found {self.found}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        return text + (f". {self.hint}" if self.hint else "")


class UnrecognisedError(InputError):
    """No adapter knows this file."""


class RefusedError(InputError):
    """The file is recognised, and it does not hold what token statistics need."""


class StoreError(EstrDiagError):
    """The store cannot be opened, or was written by something incompatible."""

    exit_code: ClassVar[ExitCode] = ExitCode.STORE


class StoreLockedError(StoreError):
    """Another process holds the store open for writing."""


class StoreIncompatibleError(StoreError):
    """The store's schema or file format is not the one this version reads."""


class MissingColumnError(EstrDiagError):
    """A statistic needs a column that the log does not hold.

    Attributes
    ----------
    what : str
        The statistic that was asked for.
    columns : tuple of str
        The missing columns.
    """

    def __init__(self, what: str, columns: Iterable[str], how: str) -> None:
        self.what, self.columns, self.how = what, tuple(columns), how
        names = ", ".join(self.columns)
        super().__init__(f"{what} not computed: this log has no {names}. {how}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the closest known name, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(known)
