"""Find adapters through the entry-point group that third parties use as well."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import cast

from estr_diag.errors import UsageError, nearest
from estr_diag.ingestion.adapter import Adapter

GROUP = "estr_diag.adapters"
GENERIC = "generic"
"""The adapter of last resort: it takes any table, so every other one is asked first."""


@cache
def adapters() -> dict[str, Adapter]:
    """Return every installed adapter by name, the generic one last.

    Raises
    ------
    UsageError
        An installed adapter cannot be imported; says which package it is from.
    """
    found: dict[str, Adapter] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name == GENERIC, p.name)):
        try:
            found[point.name] = cast("Adapter", point.load()())
        except Exception as error:
            owner = point.dist.name if point.dist else "an unknown package"
            raise UsageError(f"adapter '{point.name}' of {owner} cannot be loaded: {error}") from error
    return found


def adapter(name: str) -> Adapter:
    """Return one adapter by name."""
    known = adapters()
    if name not in known:
        raise UsageError(f"no adapter '{name}'; {nearest(name, known)}")
    return known[name]
