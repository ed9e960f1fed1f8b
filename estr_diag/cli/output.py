"""The only writer of stdout and stderr: pages and data to one, notes, progress and errors to the other."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from estr_diag.ingestion.pipeline import Progress

_PLAIN_PROGRESS_SECONDS = 5.0
"""Without a terminal, progress is a line at most this often, so that logs of batch jobs stay short."""


def stdout_console() -> Console:
    """Return the console for pages; colour only on a terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def page(render: Callable[[int], RenderableType]) -> None:
    """Print a page drawn for the width of the terminal (80 columns where there is none)."""
    console = stdout_console()
    if console.is_terminal:
        console.print(render(console.width))
        return
    with console.capture() as drawn:
        console.print(render(console.width))
    # Tables pad every line to their width, which is noise in a file or a paste.
    text("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def data(value: Any) -> None:
    """Print JSON to stdout."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def text(value: str) -> None:
    """Print text to stdout as it is."""
    sys.stdout.write(value if value.endswith("\n") else value + "\n")


def note(message: str) -> None:
    """Print a remark to stderr."""
    sys.stderr.write(f"{message}\n")


def error(message: str) -> None:
    """Print an error to stderr."""
    sys.stderr.write(f"estr-diag: error: {message}\n")


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show progress of a long ingest on stderr: a bar on a terminal, a line now and then otherwise."""
    if sys.stderr.isatty() and not os.environ.get("NO_PROGRESS"):
        with _bar(what) as report:
            yield report
        return
    last = time.monotonic()

    def plain(done: int, total: int, path: Path, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_PROGRESS_SECONDS:
            note(f"{what}: {done} of {total} files, {tokens:,} tokens, now {path}")
            last = now

    yield plain


@contextmanager
def steps(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show progress of something that goes in steps on stderr; told (done, of, what is new)."""
    if sys.stderr.isatty() and not os.environ.get("NO_PROGRESS"):
        with _bar(what) as report:
            yield lambda done, total, said: report(done, total, Path(said), -1)
        return
    last = time.monotonic()

    def plain(done: int, total: int, said: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_PROGRESS_SECONDS:
            note(f"{what}: {done} of {total}, {said}")
            last = time.monotonic()

    yield plain


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, detail="")

        def report(done: int, total: int, path: Path, tokens: int) -> None:
            bar.update(
                task,
                completed=done,
                total=total,
                detail=f"{tokens:,} tokens  {path.name}" if tokens >= 0 else str(path),
            )

        yield report
