"""Tokens on a terminal. Text from a log is hostile: no escape sequence, markup or direction mark of it takes effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.errors import UsageError, nearest
from estr_diag.log import Log
from estr_diag.report.inert import inert
from estr_diag.report.verdict import number
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.token_windows import Token, Window

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
    return inert(text, "⏎")


COLOURS: dict[str, Callable[[Mapping[str, float]], float | None]] = {
    "delta": lambda v: v.get("delta"),
    "z": lambda v: None if not {"delta", "entropy"} <= v.keys() else v["delta"] / math.sqrt(v["entropy"] + 0.01),
    "s": lambda v: None if not {"delta", "entropy"} <= v.keys() else v["delta"] ** 2 / (v["entropy"] + 0.01),
    "entropy": lambda v: v.get("entropy"),
    "p_infer": lambda v: v.get("p_infer"),
    "p_train": lambda v: v.get("p_train"),
}
"""What tokens are coloured by, beside rules: values of a token -> number."""


def around(
    log: Log, found: Result, rules: Sequence[Rule] = (), *, sequences: int = 24, width: int = 150
) -> list[Window]:
    """Return windows around listed tokens, with the decisions of the default rules and some others that the log allows."""
    from estr_diag.rules import DEFAULT_RULES
    from estr_diag.rules.comparison import allowed, with_trainer
    from estr_diag.rules.fitted import fitted
    from estr_diag.rules.token_windows import windows

    present = log.store.present()
    possible, _ = allowed(with_trainer([r for r in (*DEFAULT_RULES, *rules) if r.name != "none"], present), present)
    return windows(log.store, found, fitted(possible, log.store), sequences=sequences, width=width)


def known_colour(colour: str, windows: Sequence[Window]) -> None:
    """Refuse a colour that is neither a number of a token nor a rule of these windows."""
    rules = {name.split(":")[0] for window in windows for token in window.tokens for name in token.decisions}
    if windows and colour not in COLOURS and colour not in rules:
        raise UsageError(f"--colour {colour}: {nearest(colour, [*COLOURS, *sorted(rules)])}")


def write(log: Log, found: Result, target: Path, rules: Sequence[Rule] = ()) -> None:
    """Write the page with coloured text; its rules are the default ones and some others."""
    from estr_diag.report.html.token_view import tokens_page

    if target.suffix != ".html":
        raise UsageError(f"{target}: the token view is written as .html, found {target.suffix or 'no ending'!r}")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder; make it first")
    target.write_text(tokens_page(found, around(log, found, rules), log.source), "utf-8", "backslashreplace")


def render(found: Result, width: int, windows: Sequence[Window] = (), colour: str = "delta") -> RenderableType:
    """Return the list, two lines a token.

    Parameters
    ----------
    windows
        Of `around`: text is coloured where a listed token lies in one.
    colour
        One of `COLOURS`, or the name of a rule: what it masks is dimmed and crossed out.
    """
    return Group(*_parts(found, width, {window.seq_id: window for window in windows}, colour))


def _parts(found: Result, width: int, windows: Mapping[int, Window], colour: str) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("estr-diag tokens", "bold"), f"  where {found.parameters['where']}  by {found.parameters['by']}"
    )
    yield from (Text(note, style="dim") for note in found.notes)
    full = _full(windows, colour)
    side = max(10, (width - 24) // 2)
    for row in found.rows():
        place = f"step {row['step']}" if row["step"] is not None else ""
        head = Text.assemble(
            (f"{found.parameters['by']} {number(row['value'])}", "bold"), f"  {place}  {visible(row['seq_key'], 40)}[{row['pos']}]  ",
            *_facts(row),
        )  # fmt: skip
        yield Padding(head, (1, 0, 0, 0))
        window = windows.get(row["seq_id"])
        near = [t for t in window.tokens if abs(t.pos - row["pos"]) <= found.parameters["context"]] if window else []
        if any(t.pos == row["pos"] for t in near):
            yield Padding(_coloured(near, row["pos"], colour, full), (0, 0, 0, 2))
            continue
        context = Text(no_wrap=False)
        context.append(visible(row["before"], side, keep_end=True), style="dim")
        context.append(visible(row["token"], 40), style="reverse bold")
        context.append(visible(row["after"], side), style="dim")
        yield Padding(context, (0, 0, 0, 2))


def _full(windows: Mapping[int, Window], colour: str) -> float:
    """Return the number that is full colour: the 99th percentile, so that one extreme token leaves the others theirs."""
    if colour not in COLOURS:
        return 1.0
    sizes = sorted(abs(x) for w in windows.values() for t in w.tokens if (x := COLOURS[colour](t.values)) is not None)
    return sizes[int(0.99 * (len(sizes) - 1))] or sizes[-1] or 1.0 if sizes else 1.0


def _coloured(tokens: Sequence[Token], at: int, colour: str, full: float) -> Text:
    text = Text(no_wrap=False)
    for token in tokens:
        if token.switched:
            text.append("│", style="bold #d55e00")
        text.append(
            visible(token.text, 40), style=_style(token, colour, full) + (" underline bold" if token.pos == at else "")
        )
    return text


def _style(token: Token, colour: str, full: float) -> str:
    if not token.counted:
        return "dim italic"
    if colour not in COLOURS:
        decision = next((kept for name, kept in token.decisions.items() if name.split(":")[0] == colour), True)
        return "dim strike" if decision is False else "italic" if decision is None else ""
    value = COLOURS[colour](token.values)
    if value is None:
        return ""
    share = min(1.0, abs(value) / full)
    # Orange where the trainer finds the token likelier, blue where less: told apart by the colour-blind.
    red, green, blue = (222, 143, 5) if value >= 0 else (1, 115, 178)
    # White on it, so that it reads on light and dark terminals; what is faint stays plain.
    return f"white on rgb({int(red * share)},{int(green * share)},{int(blue * share)})" if share > 0.25 else ""


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
