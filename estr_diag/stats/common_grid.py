"""One set of entropy bins for two logs, so that their bins can be compared."""

from __future__ import annotations

from estr_diag.errors import UsageError
from estr_diag.stats.grid import DEFAULT_BINS, MAX_BINS, Bins, ValueGrid, choose_grid, equal_width, histogram, snap
from estr_diag.store.database import Store

_MIN_BINS, _MIN_TOKENS_PER_BIN = 4, 200

HOW = "entropy bins are quantiles of both sides together, each side with weight one half"
"""What is said about default bins."""


def common_grid(a: Store, b: Store, bins: Bins | None = None) -> ValueGrid | None:
    """Return bins over the union of two logs; None where one has no entropy.

    Quantile bins are of the mixture in which each log weighs one half, so that a short window beside a long one still
    has tokens in every bin in which it has any. Edges lie on the log2 grid, as everywhere.

    Parameters
    ----------
    bins
        As `grid.choose_grid` takes them; by default 24 quantile bins, fewer where the smaller log would have less than
        200 tokens a bin.
    """
    sides = [(store, store.present()) for store in (a, b)]
    if any("entropy" not in present for _, present in sides):
        return None
    kind, _, number = str(bins).partition(":")
    if bins is not None and kind != "log" and not kind.strip().isdecimal():
        # Edges need no log, and what is neither is refused there.
        return choose_grid(*sides[0], bins)
    if kind == "log" and number and not number.isdecimal():
        return choose_grid(*sides[0], bins if bins is not None else DEFAULT_BINS)
    first, second = (histogram(store, present) for store, present in sides)
    n, m = sum(first.values()), sum(second.values())
    if kind == "log":
        return equal_width(first | second, _number(number or DEFAULT_BINS))
    if bins is None:
        bins = max(_MIN_BINS, min(DEFAULT_BINS, min(n, m) // _MIN_TOKENS_PER_BIN))
    # Whole numbers, so that the edges do not hang on rounding: n m times the mixture's share of a cell.
    mixed = {c: first.get(c, 0) * max(m, 1) + second.get(c, 0) * max(n, 1) for c in first | second}
    return snap(mixed, _number(bins))


def _number(bins: object) -> int:
    n = int(str(bins))
    if not 1 <= n <= MAX_BINS:
        raise UsageError(f"number of bins is {n}; expected 1 to {MAX_BINS}")
    return n
