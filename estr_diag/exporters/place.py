"""Places that exporters write to: a folder, and in it one folder a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estr_diag.errors import UsageError


def usable_folder(target: Path) -> Path:
    """Make the folder where there is none.

    Raises
    ------
    UsageError
        A file is in the way, or the folder cannot be made.
    """
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: found a file, expected a folder; name a folder with -o")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {target} cannot be made: {error.strerror}; name another one with -o") from None
    return target


def taken(run: str, where: Path) -> UsageError:
    """Return the error for a run that is there already: a second export would double every point of its curves."""
    return UsageError(
        f"run '{run}' is in {where} already, expected a new one; name it with --run, choose another folder, or remove it"
    )


@contextmanager
def new_run_folder(target: Path, run: str) -> Iterator[Path]:
    """Make the folder of a run; it goes again when the export fails, so that a second attempt finds its place free.

    Raises
    ------
    UsageError
        It exists.
    """
    folder = usable_folder(target) / run
    try:
        folder.mkdir()
    except FileExistsError:
        raise taken(run, target) from None
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error.strerror}; name another one with -o") from None
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
