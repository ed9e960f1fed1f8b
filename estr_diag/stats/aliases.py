"""The registry of framework metric names: look one up by its full or its short name."""

from __future__ import annotations

from estr_diag.stats.alias import Alias
from estr_diag.stats.framework_names import ALIASES

BY_KEY: dict[str, Alias] = {alias.key: alias for alias in ALIASES}
"""``framework:name`` -> alias."""

FRAMEWORKS: tuple[str, ...] = tuple(sorted({alias.framework for alias in ALIASES}))


def aliases_of(metric: str) -> tuple[Alias, ...]:
    """Return the names that frameworks have for one of our metrics."""
    return tuple(alias for alias in ALIASES if alias.metric.name == metric)


def candidates(name: str) -> tuple[Alias, ...]:
    """Return the aliases that `name` may mean: a full key, a whole dashboard name, or the end of one."""
    if name in BY_KEY:
        return (BY_KEY[name],)
    whole = tuple(alias for alias in ALIASES if alias.name == name)
    return whole or tuple(alias for alias in ALIASES if alias.key.endswith(("/" + name, ":" + name)))
