"""Commands: parse, call one library function, print.

Nothing heavier than typer is imported before a command runs, so that ``--help`` and completion are
instant; every import of the library is inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from estr_diag import __version__
from estr_diag.cli import output
from estr_diag.cli.commands import (
    BinsOption,
    FailOption,
    FormatOption,
    GuessOption,
    JsonOption,
    LogArgument,
    MapOption,
    OutOption,
    RulesOption,
    SampledOption,
    SkipOption,
    StepOption,
    app,
    chosen_rules,
    command,
    read_options,
)
from estr_diag.errors import UsageError

if TYPE_CHECKING:
    from estr_diag.log import Log
    from estr_diag.rules import Rule


def _print_version(wanted: bool) -> None:
    if wanted:
        output.text(f"estr-diag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options that stand before a command."""


@command
def report(
    log: LogArgument,
    out: OutOption = None,
    json: JsonOption = False,
    rules: RulesOption = None,
    bins: BinsOption = None,
    fail_on: FailOption = None,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
    step: StepOption = None,
    guess_mask: GuessOption = False,
    all_sampled: SampledOption = False,
    skip_unreadable: SkipOption = False,
) -> None:
    """Checks, statistics and mask rules on one page."""
    from estr_diag.opening import open_log

    chosen, gates = chosen_rules(rules), _gates(fail_on)
    options = read_options(map, step, guess_mask, all_sampled)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=options, skip_unreadable=skip_unreadable, progress=progress)
    with opened:
        _print_report(opened, chosen, bins, out, json, gates)


@command
def demo(json: JsonOption = False, out: OutOption = None, rules: RulesOption = None, bins: BinsOption = None) -> None:
    """Print the report of the log that comes with the package: a small asynchronous GRPO run whose truth is known."""
    from estr_diag.opening import demo as open_demo

    with open_demo() as opened:
        _print_report(opened, chosen_rules(rules), bins, out, json, [])


@command
def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Trainer's files and folders.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option("-o", "--output", help="The store to write.", show_default=False)] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add to an existing store; known files are left out.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is recognised and where each column comes from.")
    ] = False,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
    step: StepOption = None,
    guess_mask: GuessOption = False,
    all_sampled: SampledOption = False,
    skip_unreadable: SkipOption = False,
) -> None:
    """Read trainers' files into one DuckDB store, all of them or none."""
    from estr_diag.cli import listings

    options = read_options(map, step, guess_mask, all_sampled)
    if dry_run:
        from estr_diag.opening import find

        found = find(paths, format=format, options=options, skip_unreadable=skip_unreadable)
        output.data(listings.discovery_json(found)) if json else output.page(lambda _: listings.discovery(found))
        return
    if out is None:
        raise UsageError("no store named; give one with -o run.duckdb, or look first with --dry-run")
    from estr_diag.opening import ingest as run_ingest

    with (
        output.progress("reading") as progress,
        run_ingest(
            paths,
            into=out,
            format=format,
            options=options,
            append=append,
            skip_unreadable=skip_unreadable,
            progress=progress,
        ) as opened,
    ):
        summary = opened.ingested
    assert summary is not None
    output.data(listings.summary_json(summary, out)) if json else output.page(lambda _: listings.summary(summary, out))


@command
def formats(json: JsonOption = False) -> None:
    """List the trainers whose files are read, their layouts, and where each column comes from."""
    from estr_diag.cli import listings

    output.data(listings.formats_json()) if json else output.page(lambda _: listings.formats())


@command
def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A metric of ours, the name on a trainer's dashboard, or a mask rule (icepop@verl).",
            show_default=False,
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Say what a number or a mask rule is: formula, unit or edge, which way is good, who calls it what."""
    from estr_diag.cli import explain as page
    from estr_diag.cli import rules as rule_page
    from estr_diag.rules.describe import look_up
    from estr_diag.rules.library import LIBRARY
    from estr_diag.stats.explain import Explanation
    from estr_diag.stats.explain import explain as look_up_metric
    from estr_diag.stats.metrics import BY_NAME

    # Some estimators are a metric and a rule; the rule is reached as kl_k3@areal.
    rule = None if name in BY_NAME else look_up(name)
    if rule is not None:
        output.data(rule_page.page_json(rule)) if json else output.page(lambda _: rule_page.page(rule))
        return
    absent = rule_page.absent_page(name)
    if absent is not None and not json:
        output.page(lambda _: absent)
        return
    known = (Explanation(key, "rule", r.keep, "", "", "", r.says) for key, r in LIBRARY.items())
    found = look_up_metric(name, known)
    output.data(page.to_json(found)) if json else output.page(lambda _: page.render(found))
    if not json and name in BY_NAME and look_up(name) is not None:
        preset = next(key for key in LIBRARY if key.startswith(f"{name}@"))
        output.note(f"{name} is a mask rule as well: estr-diag explain {preset}")


@command
def schema(
    name: Annotated[str | None, typer.Argument(help="Which schema; none lists them.", show_default=False)] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write all schemas into a folder.", show_default=False)
    ] = None,
) -> None:
    """Print a JSON Schema: the canonical log, the report, or a trainer's layout."""
    from estr_diag.cli import schemas

    if write is not None:
        for path in schemas.write_all(write):
            output.note(f"wrote {path}")
    elif name is None:
        output.text("\n".join(schemas.names()))
    else:
        output.data(schemas.get(name))


@command
def sql(
    log: Annotated[Path, typer.Argument(help="A store or log.", show_default=False)],
    query: str,
    json: JsonOption = False,
) -> None:
    """Run a read-only query over the tables tokens, sequences, runs and sources."""
    from estr_diag.cli import listings
    from estr_diag.opening import open_log

    with output.progress("reading") as progress:
        opened = open_log(log, progress=progress)
    with opened:
        result = opened.sql(query)
    output.data(result.rows()) if json else output.page(lambda _: listings.table(result))


@command
def export(
    log: LogArgument,
    out: Annotated[Path, typer.Option("-o", "--output", help="A .parquet, .csv or .jsonl file.")],
    format: FormatOption = "auto",  # noqa: A002
) -> None:
    """Write the log as one flat canonical file, one row a token."""
    from estr_diag.opening import open_log
    from estr_diag.store.export import export as write

    with output.progress("reading") as progress:
        opened = open_log(log, format=format, progress=progress)
    with opened:
        rows = write(opened.store, out)
    output.note(f"wrote {rows:,} tokens to {out}")


def _print_report(
    log: Log, rules: tuple[Rule, ...] | None, bins: str | None, out: Path | None, json: bool, gates: list[Any]
) -> None:
    made = log.report(rules, bins=bins)
    if out is not None:
        output.note(f"wrote {made.save(out)}")
    if json:
        output.data(made.to_json())
    elif out is None:
        from estr_diag.report import terminal

        output.page(lambda width: terminal.render(made.document, width))
    if gates:
        from estr_diag.report.gates import check

        check(gates, made.document)


def _gates(texts: list[str] | None) -> list[Any]:
    if not texts:
        return []
    from estr_diag.report.gates import parse

    return [parse(text) for text in texts]


# Imported here, and not above, so that ``--help`` lists the report first: importing registers their commands.
from estr_diag.cli import check_command, diff_command, lab_command, rule_commands, scalars_command  # noqa: E402

__all__ = ["app", "check_command", "diff_command", "lab_command", "main", "rule_commands", "scalars_command"]


def main() -> None:
    """Run the command line."""
    app(prog_name="estr-diag")
