"""Sequences with coloured tokens: what the template needs, from windows of a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from estr_diag.report.html import page
from estr_diag.report.html.tables import of_result
from estr_diag.report.verdict import number
from estr_diag.result import Result
from estr_diag.rules.token_windows import VALUES, Token, Window

COLOURS = (
    "|δ|", "δ", "|z| = |δ|/√(H + 0.01)", "S = δ²/(H + 0.01)", "entropy H", "p infer", "p train",
)  # fmt: skip
"""As the script knows them."""

MAX_TOKEN = 120


@dataclass(frozen=True, slots=True)
class View:
    """What `templates/macros.html` draws."""

    colours: tuple[str, ...]
    rules: tuple[str, ...]
    sequences: list[dict[str, Any]]
    data: Markup


def view(windows: Sequence[Window]) -> View:
    """Return the view of some windows; every token carries its numbers, so the page needs nothing else."""
    columns = [name for name in VALUES if any(name in t.values for w in windows for t in w.tokens)]
    rules = tuple(dict.fromkeys(name for w in windows for t in w.tokens for name in t.decisions))
    sequences = [_sequence(window, columns, rules) for window in windows]
    return View(COLOURS, rules, sequences, page.data({"columns": columns, "rules": list(rules)}))


def tokens_page(listed: Result, windows: Sequence[Window], source: str) -> str:
    """Return the page of ``estr-diag tokens -o tokens.html``."""
    from estr_diag import __version__

    return page.render(
        "tokens.html", version=__version__, title=f"estr-diag tokens: {page.text(source, 80)}", source=source,
        where=listed.parameters["where"], by=listed.parameters["by"], notes=listed.notes, view=view(windows),
        # What stands around a token is above, in its sequence.
        listed=of_result(listed, [n for n in listed.table.column_names if n not in ("before", "after")]),
    )  # fmt: skip


def _sequence(window: Window, columns: Sequence[str], rules: Sequence[str]) -> dict[str, Any]:
    shown = [_token(token, columns, rules) for token in window.tokens]
    first, last = (window.tokens[i].pos for i in (0, -1))
    facts = [
        f"step {window.step}" if window.step is not None else "",
        f"positions {first} to {last} of {window.length:,} tokens",
        f"reward {number(window.reward)}" if window.reward is not None else "",
    ]
    return {"title": page.text(window.seq_key, 120), "facts": " · ".join(f for f in facts if f), "tokens": shown}


def _token(token: Token, columns: Sequence[str], rules: Sequence[str]) -> dict[str, Any]:
    marks = ("t", "" if token.counted else "out", "new" if token.switched else "", "spot" if token.listed else "")
    decided = {True: "1", False: "0", None: "?"}
    return {
        "css": " ".join(m for m in marks if m),
        "pos": token.pos,
        "values": ",".join("" if name not in token.values else f"{token.values[name]:.5g}" for name in columns),
        "decisions": "".join(decided[token.decisions[name]] for name in rules) if token.decisions else "",
        "text": page.text(token.text, MAX_TOKEN).replace("\n", "⏎\n"),
    }
