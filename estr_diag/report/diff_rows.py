"""One row of a difference: two values, what is between them, and whether chance explains it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from estr_diag.ingestion.registry import adapters
from estr_diag.stats.two_samples import LEVEL, Estimate, difference, holm
from estr_diag.store.database import Store
from estr_diag.store.engine import how_to_get

Row = dict[str, Any]

LACKING: Mapping[str, str] = {"entropy_of": "log the entropy of the same engine in both runs"}
"""What cannot be compared though the columns are there -> what to do."""

_NOTHING = dict.fromkeys(
    ("difference", "se", "se_alike", "se_steps", "low", "high", "z", "df", "p", "p_adjusted", "relative")
)


class Lacks:
    """Which columns the two sides hold, and how one gets those that they lack.

    Parameters
    ----------
    a, b
        Store, and the columns that it holds.
    """

    def __init__(self, a: tuple[Store, frozenset[str]], b: tuple[Store, frozenset[str]]) -> None:
        self._sides = {"A": a, "B": b}

    def of(self, needs: Collection[str]) -> tuple[str, str]:
        """Say which side lacks what, and how to get it; two empty texts where neither lacks anything."""
        lacks = {letter: frozenset(needs) - present for letter, (_, present) in self._sides.items()}
        a, b = lacks["A"], lacks["B"]
        if not a and not b:
            return "", ""
        said = [f"neither side has {', '.join(sorted(a & b))}"] if a & b else []
        said += [f"{letter} has no {', '.join(sorted(rest))}" for letter, rest in (("A", a - b), ("B", b - a)) if rest]
        how = [self._how(letter, columns) for letter, columns in lacks.items() if columns]
        return "; ".join(said), "; ".join(dict.fromkeys(how))

    def _how(self, letter: str, columns: frozenset[str]) -> str:
        # The adapter knows the flag of its own trainer.
        runs = self._sides[letter][0].rows("select adapter from runs")
        reader = adapters().get(runs[0]["adapter"]) if runs else None
        hints = [reader.hints[c] for c in sorted(columns) if reader and c in reader.hints]
        return "; ".join(dict.fromkeys(hints)) or how_to_get(columns)


def as_row(
    what: Mapping[str, Any],
    found: Sequence[Mapping[str, Any] | None],
    columns: tuple[str, str],
    why: tuple[str, str] = ("", ""),
) -> Row:
    """Return a row; its verdict is `judge`'s.

    Parameters
    ----------
    what
        Name, unit, direction, and what else the row carries.
    found
        The row of each side's table, with ``n``, ``n_sequences``, and where they are known ``se_steps`` and ``n_steps``.
    columns
        Names of value and standard error in them.
    why
        Why it is not compared and how that is mended; empty texts where it is.
    """
    value, error = columns
    sides = [
        {"value": f[value], "se": f[error], "n": f["n"]} if f else {"value": None, "se": None, "n": None} for f in found
    ]
    row: Row = {**what, "a": sides[0], "b": sides[1], **_NOTHING, "verdict": "not_compared"}
    reason = why if why[0] else _unusable(found, columns)
    if reason[0]:
        return {**row, "why": reason[0], "how_to_get_it": reason[1]}
    a, b = (
        Estimate(f[value], f[error], f["n_sequences"], f["n"], f.get("se_steps"), f.get("n_steps", 0))
        for f in found
        if f
    )
    d = difference(a, b)
    return {
        **row, "difference": d.value, "se": d.se, "se_alike": d.se_alike, "se_steps": d.se_steps, "low": d.low, "high": d.high, "z": d.z, "df": d.df, "p": d.p,
        "relative": d.value / abs(a.value) if a.value else None, "why": "", "how_to_get_it": "",
    }  # fmt: skip


def _unusable(found: Sequence[Mapping[str, Any] | None], columns: tuple[str, str]) -> tuple[str, str]:
    """Say which side has no value or no error though the columns are there."""
    value, error = columns
    for letter, f in zip("AB", found, strict=True):
        if f is None or f[value] is None:
            return f"{letter} has no counted token for it", "choose steps that hold some"
        if f[error] is None:
            return f"{letter} has no standard error: it is from {f['n_sequences']} sequences", "two or more are needed"
    return "", ""


def judge(rows: Sequence[Row]) -> None:
    """Give every row that was compared its adjusted probability and its verdict: all rows together."""
    compared = [row for row in rows if row["p"] is not None]
    for row, p in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["p_adjusted"] = p
        row["verdict"] = "changed" if p < LEVEL else "not_told_apart"


def ranked(listed: Sequence[tuple[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """Return what changed, by |z|; a difference without any spread stands first."""
    changed = [(kind, row) for kind, rows in listed for row in rows if row["verdict"] == "changed"]
    changed.sort(key=lambda c: -abs(c[1]["z"]) if c[1]["z"] is not None else -math.inf)
    return [
        {
            "kind": kind,
            "name": label(kind, row),
            "a": row["a"]["value"],
            "b": row["b"]["value"],
            "relative": row["relative"],
            "z": row["z"],
        }
        for kind, row in changed
    ]


def label(kind: str, row: Mapping[str, Any]) -> str:
    """Return what a row is called among rows of other kinds."""
    if kind == "entropy_bin":
        low, high = row["lo"], row["hi"]
        return f"E[δ²] at H {low:.3g} to {high:.3g}" if high is not None else f"E[δ²] at H above {low:.3g}"
    return f"masked by {row['name']}" if kind == "rule" else str(row["name"])
