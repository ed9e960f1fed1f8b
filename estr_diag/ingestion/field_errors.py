"""Errors about the fields of a file, worded the same by every adapter."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Layout

_SHOWN = 8


def require(
    path: Path, layout: Layout, present: Collection[str], *, record: int | None = None, hint: str | None = None
) -> None:
    """Raise when a required field of `layout` is not among the fields `present`.

    Parameters
    ----------
    path
        The file, for the message.
    layout
        Declares which fields are required.
    present
        Names of the fields that were found.
    record
        1-based number of the record, where a file has several.
    hint
        What to do next.

    Raises
    ------
    InputError
        Names the file, the first missing field, and the found fields whose names come nearest.
    """
    for name in layout.missing(frozenset(present)):
        near = difflib.get_close_matches(name, sorted(present), n=3, cutoff=0.5)
        shown = ", ".join(near or sorted(present)[:_SHOWN]) or "no field at all"
        raise InputError(
            "a field is missing",
            path=path,
            line=record,
            key=name,
            found=f"{'nearest names: ' if near else ''}{shown}",
            expected=f"what {layout.describes} holds",
            hint=hint,
        )


def unequal(path: Path, record: int, key: str, found: int, expected: int, hint: str) -> InputError:
    """Return the error for a list of tokens that is not as long as the response of its sequence.

    Parameters
    ----------
    path, record, key
        File, 1-based number of the sequence, and field.
    found, expected
        Both lengths.
    hint
        What to do next.
    """
    return InputError(
        f"lists of unequal length in sequence {record - 1}",
        path=path,
        line=record,
        key=key,
        found=f"{found} values",
        expected=f"{expected}, one a token",
        hint=hint,
    )
