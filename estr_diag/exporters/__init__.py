"""Exporters: scalars a training step, from a log to the experiment trackers, through their own libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from estr_diag.errors import UsageError, nearest
from estr_diag.exporters import jsonl, mlflow, tensorboard, wandb
from estr_diag.exporters.library import library
from estr_diag.exporters.place import usable_folder
from estr_diag.exporters.scalars import Scalar, collect
from estr_diag.log import Log

WRITERS: dict[str, Callable[[Sequence[Scalar], Path, str], Path]] = {
    "jsonl": jsonl.write,
    "mlflow": mlflow.write,
    "tensorboard": tensorboard.write,
    "wandb": wandb.write,
}
"""Kind -> what writes it. A kind other than jsonl is also the name of its library and of its extra."""

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def export_scalars(log: Log, target: str | Path, kind: str, run: str | None = None) -> Path:
    """Write the main metrics of each training step where an experiment tracker finds them.

    Parameters
    ----------
    log
        An open log whose sequences have steps.
    target
        A folder; made where there is none. Several runs may share it.
    kind
        ``jsonl``, ``mlflow``, ``tensorboard`` or ``wandb``.
    run
        Name of the run in the tracker; by default after the file or folder that the log was opened from.

    Returns
    -------
    Path
        The file or folder that holds the run.

    Raises
    ------
    UsageError
        No such kind, its library is not installed, the run is there already, or the log has no steps.
    """
    if kind not in WRITERS:
        raise UsageError(f"no exporter '{kind}'; {nearest(kind, WRITERS)}")
    run = default_run(log) if run is None else run
    if not _RUN_NAME.fullmatch(run):
        raise UsageError(
            f"run name {run!r}: expected letters, digits, '_', '-' and '.', not beginning with '-' or '.'. "
            "It becomes the name of a file or folder"
        )
    # What can be said at once is said before a large log is scanned.
    folder = usable_folder(Path(target))
    if kind != "jsonl":
        library(kind, kind)
    return WRITERS[kind](collect(log), folder, run)


def default_run(log: Log) -> str:
    """Return a name for the run, after the first file that the log was opened from."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(log.source.split(", ")[0]).stem).strip("-.")
    return name or "estr_diag"


__all__ = ["export_scalars"]
