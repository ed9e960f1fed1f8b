"""Tokens on a terminal. Text from a log is hostile: no escape sequence, markup or direction mark of it takes effect."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.errors import UsageError
from estr_diag.log import Log
from estr_diag.report.verdict import number
from estr_diag.result import Result
from estr_diag.rules.base import Rule

_MAX_TEXT = 120
_KNOWN = frozenset(
    {
        "step", "seq_id", "seq_key", "group_id", "pos", "value", "logp_infer", "logp_train", "logp_update", "logp_replay",
        "delta", "ratio", "entropy", "p_infer", "p_train", "policy_version", "trainer_version", "lag", "advantage", "turn",
        "trainer_keep", "s", "token_id", "before", "token", "after",
    }
)  # fmt: skip


def visible(text: str | None, limit: int = _MAX_TEXT, *, keep_end: bool = False) -> str:
    """Return log text with everything that acts on a terminal shown as an escape, and cut to a length."""
    text = text or ""
    if len(text) > limit:
        text = "…" + text[-limit:] if keep_end else text[:limit] + "…"
    return "".join(_shown(c) for c in text)


def _shown(character: str) -> str:
    if character == "\n":
        return "⏎"
    # Control, format (direction marks, zero width), surrogate and unassigned characters.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character


def write(log: Log, found: Result, target: Path, rules: Sequence[Rule] = ()) -> None:
    """Write the page with coloured text; rules beside the default ones are those that the log allows."""
    from estr_diag.report.html.token_view import tokens_page
    from estr_diag.rules import DEFAULT_RULES
    from estr_diag.rules.comparison import allowed, with_trainer
    from estr_diag.rules.fitted import fitted
    from estr_diag.rules.token_windows import windows

    if target.suffix != ".html":
        raise UsageError(f"{target}: the token view is written as .html, found {target.suffix or 'no ending'!r}")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder; make it first")
    present = log.store.present()
    possible, _ = allowed(with_trainer([r for r in (*DEFAULT_RULES, *rules) if r.name != "none"], present), present)
    around = windows(log.store, found, fitted(possible, log.store), sequences=24, width=150)
    target.write_text(tokens_page(found, around, log.source), "utf-8", "backslashreplace")


def render(found: Result, width: int) -> RenderableType:
    """Return the list, two lines a token."""
    return Group(*_parts(found, width))


def _parts(found: Result, width: int) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("estr-diag tokens", "bold"), f"  where {found.parameters['where']}  by {found.parameters['by']}"
    )
    yield from (Text(note, style="dim") for note in found.notes)
    side = max(10, (width - 24) // 2)
    for row in found.rows():
        place = f"step {row['step']}" if row["step"] is not None else ""
        head = Text.assemble(
            (f"{found.parameters['by']} {number(row['value'])}", "bold"), f"  {place}  {visible(row['seq_key'], 40)}[{row['pos']}]  ",
            *_facts(row),
        )  # fmt: skip
        yield Padding(head, (1, 0, 0, 0))
        context = Text(no_wrap=False)
        context.append(visible(row["before"], side, keep_end=True), style="dim")
        context.append(visible(row["token"], 40), style="reverse bold")
        context.append(visible(row["after"], side), style="dim")
        yield Padding(context, (0, 0, 0, 2))


def _facts(row: dict[str, Any]) -> Iterator[tuple[str, str] | str]:
    for name, label in (
        ("delta", "δ"),
        ("entropy", "H"),
        ("p_infer", "p infer"),
        ("p_train", "p train"),
        ("lag", "lag"),
    ):
        if row.get(name) is not None:
            yield f"{label} {number(row[name])}  "
    for name, value in row.items():
        if name not in _KNOWN:
            said, style = {True: ("keeps", "green"), False: ("masks", "red"), None: ("undecided", "yellow")}[value]
            yield (f"{name} {said}  ", style)
