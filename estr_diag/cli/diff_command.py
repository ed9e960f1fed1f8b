"""The command that compares two logs, or two windows of one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import (
    BinsOption,
    FormatOption,
    JsonOption,
    MapOption,
    RulesOption,
    chosen_rules,
    command,
    read_options,
)
from estr_diag.errors import GateError, UsageError

if TYPE_CHECKING:
    from estr_diag.report.difference import DiffDocument, Side


@command
def diff(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="A [B]", help="Two logs, or one and two windows of its steps.", show_default=False),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            help="Steps of A, both ends included, as in 0:20; of both logs where --against is not given.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Steps of B; of A where it stands alone.", show_default=False)
    ] = None,
    rules: RulesOption = None,
    bins: BinsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the page to a .html, .md or .json file.", show_default=False),
    ] = None,
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="Exit 1 when anything changed beyond chance.")
    ] = False,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """Two logs, or two step windows of one, number by number: what changed, by how much, and what chance explains."""
    from estr_diag.report.difference import difference
    from estr_diag.rules import DEFAULT_RULES

    _check(logs, steps, against, out)
    chosen = chosen_rules(rules) or DEFAULT_RULES
    with ExitStack() as stack:
        a, b = _sides(stack, logs, (steps, against), format, map)
        document = difference(a, b, chosen, bins)
    if out is not None:
        _write(document, out)
    if json:
        output.data(document.model_dump(mode="json", by_alias=True))
    elif out is None:
        from estr_diag.report import diff_page

        output.page(lambda width: diff_page.render(document, width))
    if fail_on_change and document.changed:
        raise GateError(f"--fail-on-change: {document.verdict}")


def _check(logs: list[Path], steps: str | None, against: str | None, out: Path | None) -> None:
    """Refuse what cannot be compared before anything is read."""
    if len(logs) > 2:
        raise UsageError(f"{len(logs)} logs; diff takes two, or one with --steps and --against")
    if len(logs) == 1 and (steps is None or against is None):
        raise UsageError(
            f"{logs[0]} alone: nothing to compare it with. Give a second log, or two windows of it, as in "
            f"--steps 0:20 --against 100:120"
        )
    if out is not None and out.suffix not in (".html", ".md", ".json"):
        raise UsageError(f"{out}: a difference is written as .html, .md or .json, found {out.suffix or 'no ending'!r}")


def _sides(
    stack: ExitStack, logs: list[Path], asked: tuple[str | None, str | None], form: str, mapping: Path | None
) -> list[Side]:
    """Open the logs and cut the windows; all are closed with the stack."""
    from estr_diag.opening import open_log
    from estr_diag.report.difference import Side
    from estr_diag.store.window import Steps, StepWindow

    texts = (asked[0], asked[0] if asked[1] is None else asked[1])
    windows = [None if text is None else Steps.parse(text) for text in texts]
    options = read_options(mapping, None, False, False)
    opened = []
    with output.progress("reading") as progress:
        for path in logs:
            opened.append(stack.enter_context(open_log(path, format=form, options=options, progress=progress)))
    sides = []
    for log, steps in zip(opened if len(opened) == 2 else opened * 2, windows, strict=True):
        if steps is None:
            sides.append(Side(log.store, log.source))
        else:
            window = stack.enter_context(StepWindow(log.store, steps, log.source))
            sides.append(Side(window, log.source, str(steps)))
    return sides


def _write(document: DiffDocument, out: Path) -> None:
    from estr_diag.report import diff_page

    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder; make it first")
    if out.suffix == ".html":
        from estr_diag.report.html import diff_html

        text = diff_html.render(document)
    elif out.suffix == ".md":
        text = diff_page.markdown(document)
    else:
        text = document.model_dump_json(by_alias=True, indent=1)
    out.write_text(text if text.endswith("\n") else text + "\n", "utf-8", "backslashreplace")
    output.note(f"wrote {out}")
