"""Turn whatever damaged bytes make a reader raise into one clear error that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estr_diag.errors import EstrDiagError, InputError


@contextmanager
def reading(path: Path, adapter: str) -> Iterator[None]:
    """Run a reader's code on a file that may hold anything.

    Readers check what they know to go wrong and say it well. A flipped byte can still surface as almost
    any exception, in a pickle, a zip index or an array shape; it is an input error all the same, and the
    original is kept as its cause.
    """
    try:
        yield
    except (EstrDiagError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"cannot be read as {adapter}",
            path=path,
            found=f"{type(error).__name__}: {error}".splitlines()[0],
            hint="It is damaged, or a layout that this version does not know; ESTR_DIAG_TRACEBACK=1 shows where",
        ) from error
