"""Text of a log that acts on nothing: what would move a cursor, turn the direction or hide is shown as an escape."""

from __future__ import annotations

import unicodedata

_ACTS = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
"""Categories of characters that act rather than show: control, direction marks, zero width, lone surrogates, unassigned."""


def inert(text: str, newline: str = "\\n") -> str:
    """Return the text with what acts replaced by its escape; it is not yet escaped for HTML or Markdown.

    Parameters
    ----------
    newline
        What stands for a line break.
    """
    return "".join(newline if c == "\n" else _shown(c) for c in text)


def _shown(character: str) -> str:
    acts = unicodedata.category(character) in _ACTS
    return character.encode("unicode_escape").decode("ascii") if acts else character
