"""The command that looks for causes."""

from __future__ import annotations

from typing import Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import FormatOption, JsonOption, LogArgument, MapOption, command, read_options
from estr_diag.errors import UsageError, nearest


@command
def check(
    log: LogArgument,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", help="All of one check: what it measures, evidence, next action.", show_default=False
        ),
    ] = None,
    fail_level: Annotated[
        str | None,
        typer.Option(
            "--fail-level",
            help="Exit with 1 at a finding of this level or above: info, warning, error, fatal.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """Look for broken columns and engines: what is wrong, where, and what to do next; worst first."""
    from estr_diag.checks import by_id, ranked
    from estr_diag.checks.base import LEVELS
    from estr_diag.cli import checks as page
    from estr_diag.opening import open_log

    if fail_level is not None and fail_level not in LEVELS:
        raise UsageError(f"--fail-level {fail_level}: {nearest(fail_level, LEVELS)}")
    if explain is not None and explain not in by_id():
        raise UsageError(f"--explain {explain}: {nearest(explain, by_id())}")
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=read_options(map, None, False, False), progress=progress)
    with opened:
        findings = ranked(opened.check())
    if explain is not None:
        findings = [f for f in findings if f.id == explain]
    if json:
        output.data({"source": opened.source, "findings": [f.to_json() for f in findings]})
    else:
        output.page(lambda _: page.render(findings, opened.source, whole=explain is not None))
    reached = [
        f for f in findings if f.verdict == "found" and fail_level and LEVELS.index(f.level) >= LEVELS.index(fail_level)
    ]
    if reached:
        raise typer.Exit(1)
