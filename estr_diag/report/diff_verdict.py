"""A difference in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estr_diag.report.diff_rows import label
from estr_diag.report.verdict import number

_NAMED = 3


def verdict(document: Mapping[str, Any]) -> str:
    """Say how much changed, what most, and by how much; or how far chance reaches."""
    n, changed = document["correction"]["comparisons"], document["changed"]
    if not n:
        return "Nothing can be compared; see why at each number."
    if not changed:
        return f"Nothing is told apart: none of {n} comparisons stands out from chance.{_largest(document)}"
    first = "; ".join(change(c) for c in changed[:_NAMED])
    return f"{len(changed)} of {n} compared numbers changed. Most: {first}."


def change(found: Mapping[str, Any]) -> str:
    """Say one change: both values, the effect, and how sure it is."""
    return f"{found['name']} from {number(found['a'])} to {number(found['b'])} ({effect(found['relative'])}, {sure(found['z'])})"


def effect(relative: float | None) -> str:
    """Return the relative change in percent, or as a factor where it is large."""
    if relative is None:
        return "from 0"
    return f"{1 + relative:.3g} times" if relative >= 10 else f"{relative:+.1%}"


def sure(z: float | None) -> str:
    """Return z; a difference without spread has none."""
    return "no spread on either side" if z is None else f"z {z:+.1f}"


def _largest(document: Mapping[str, Any]) -> str:
    kinds = (("metric", "metrics"), ("split", "split"), ("entropy_bin", "entropy_bins"), ("rule", "rules"))
    rows = [(kind, row) for kind, name in kinds for row in document[name] if row["z"] is not None]
    if not rows:
        return ""
    kind, row = max(rows, key=lambda r: abs(r[1]["z"]))
    return f" The largest: {label(kind, row)}, z {row['z']:+.1f}."
