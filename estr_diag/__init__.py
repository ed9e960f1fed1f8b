"""Diagnose the gap between the engine that samples and the policy that is trained, offline, from a run's logs.

The names below are imported on first use (PEP 562), so that ``import estr_diag`` costs nothing and
the in-trainer parts never load DuckDB.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY: dict[str, tuple[str, str | None]] = {
    "Log": ("estr_diag.log", "Log"),
    "open": ("estr_diag.opening", "open_log"),
    "ingest": ("estr_diag.opening", "ingest"),
    "from_frame": ("estr_diag.opening", "from_frame"),
    "demo": ("estr_diag.opening", "demo"),
    "TokenRecorder": ("estr_diag.recorder", "TokenRecorder"),
    "Result": ("estr_diag.result", "Result"),
    "rules": ("estr_diag.rules", None),
    "plots": ("estr_diag.plots", None),
    "errors": ("estr_diag.errors", None),
}

if TYPE_CHECKING:
    from estr_diag import errors, plots, rules
    from estr_diag.log import Log
    from estr_diag.opening import demo, from_frame, ingest
    from estr_diag.opening import open_log as open  # noqa: A004
    from estr_diag.recorder import TokenRecorder
    from estr_diag.result import Result

__all__ = [
    "Log",
    "Result",
    "TokenRecorder",
    "__version__",
    "demo",
    "errors",
    "from_frame",
    "ingest",
    "open",
    "plots",
    "rules",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'estr_diag' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
