"""The trackers' libraries: optional, imported when they are used, and kept offline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from estr_diag.errors import UsageError


def library(module: str, kind: str) -> Any:
    """Import a module of a tracker's library.

    Parameters
    ----------
    module
        What to import.
    kind
        The extra that installs it.

    Raises
    ------
    UsageError
        It cannot be imported; says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the exporter '{kind}' needs the library {kind}, which cannot be imported ({error}); "
            f"install it with pip install 'estr_diag[{kind}]'"
        ) from None


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Set environment variables for a while, except those that the user has set.

    The libraries have switches that can be reached in no other way, and a trainer in the same process must not
    find them changed afterwards.
    """
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
