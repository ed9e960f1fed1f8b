"""Commands: parse, call one library function, print.

Nothing heavier than typer is imported before a command runs, so that ``--help`` and completion are
instant; every import of the library is inside the command that needs it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from estr_diag import __version__
from estr_diag.cli import output
from estr_diag.errors import EstrDiagError, ExitCode, UsageError

if TYPE_CHECKING:
    from estr_diag.ingestion.adapter import ReadOptions
    from estr_diag.log import Log
    from estr_diag.rules import Rule

app = typer.Typer(
    name="estr-diag",
    help="Say why an LLM-RL sampler and its trainer disagree, at which tokens, and what a mask rule would do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

F = TypeVar("F", bound=Callable[..., Any])


def command(function: F) -> F:
    """Register a command whose errors become one line on stderr and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except EstrDiagError as error:
            if os.environ.get("ESTR_DIAG_TRACEBACK"):
                raise
            output.error(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            output.error("interrupted; a store that was being written is as it was before")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:
            # The reader (head, less) has gone: that is no error of ours, and Python must not report it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.OK) from None

    app.command(name=function.__name__.removesuffix("_"))(run)
    return function


LogArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="LOG...", help="A store (*.duckdb), a trainer's file, or its run folder.", show_default=False
    ),
]
FormatOption = Annotated[str, typer.Option("--format", help="Adapter name, or auto to recognise by content.")]
MapOption = Annotated[
    Path | None,
    typer.Option(
        "--map", help="mapping.toml: names, units, shift and mask of any table's columns.", show_default=False
    ),
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Trainer step, where the files do not say.", show_default=False)
]
GuessOption = Annotated[bool, typer.Option("--guess-mask", help="Accept a layout without a loss mask, with a guess.")]
SampledOption = Annotated[
    bool, typer.Option("--all-sampled", help="A table without a loss mask: the model sampled every token of it.")
]
SkipOption = Annotated[bool, typer.Option("--skip-unreadable", help="Report files that cannot be read, and go on.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules", help="Mask rules and rule files, as in estr:tau=4,icepop@verl,rules.toml.", show_default=False
    ),
]
BinsOption = Annotated[
    str | None,
    typer.Option(
        "--bins",
        help="Entropy bins: a number of quantile bins, log or log:12, or edges as in 0.01,0.1,1.",
        show_default="24, fewer for a small log",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the report to a .md or .json file.", show_default=False)
]
FailOption = Annotated[
    list[str] | None,
    typer.Option("--fail-on", help="Exit 1 when true, as in 'kl_k3>0.01'; may be repeated.", show_default=False),
]


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
    from estr_diag.log import open_log

    chosen, gates = _rules(rules), _gates(fail_on)
    options = _options(map, step, guess_mask, all_sampled)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=options, skip_unreadable=skip_unreadable, progress=progress)
    with opened:
        _print_report(opened, chosen, bins, out, json, gates)


@command
def compare(
    log: LogArgument,
    rules: RulesOption = None,
    bins: BinsOption = None,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """What several mask rules would do to a log: kept shares, errors, agreement."""
    from estr_diag.log import open_log
    from estr_diag.report import CompareDocument

    chosen = _rules(rules)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=_options(map, None, False, False), progress=progress)
    with opened:
        document = CompareDocument.model_validate(opened.compare(chosen, bins).to_json())
    if json:
        output.data(document.model_dump(mode="json", by_alias=True))
        return
    from estr_diag.report import comparison_page

    output.page(lambda _: comparison_page.render(document))


@command
def sweep(
    log: LogArgument,
    rule: Annotated[str, typer.Option("--rule", help="The rule to sweep, as in estr or icepop:low=0.5.")] = "estr",
    param: Annotated[
        str | None, typer.Option("--param", help="Which of its parameters moves.", show_default="the rule's threshold")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option("--grid", help="Values: 0.25:16:log, 0:1:lin:11, or 0.1,0.2.", show_default="1/16 to 16 times"),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option("--keep", help="Find the threshold that keeps this share of the tokens.", show_default=False),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option("--match", help="Find the threshold that keeps as much as this rule.", show_default=False),
    ] = None,
    drop_lag0: Annotated[
        float | None,
        typer.Option(
            "--drop-lag0", help="Find the threshold that drops this share of the tokens of lag 0.", show_default=False
        ),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            "--families", help="Bring these rules to one kept share (of --keep or --match).", show_default=False
        ),
    ] = None,
    bins: BinsOption = None,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """One parameter of a rule: the trade-off curve, and thresholds chosen by what they should do."""
    from estr_diag.cli import sweeps
    from estr_diag.log import open_log

    chosen, *others = _rules(rule) or ()
    if others:
        raise UsageError("--rule takes one rule; compare several with --families")
    asked = sweeps.Asked(chosen, param, grid, keep, _rules(match), drop_lag0, _rules(families), bins)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=_options(map, None, False, False), progress=progress)
    with opened:
        document = sweeps.run(opened, asked)
    if json:
        output.data(document.model_dump(mode="json", by_alias=True))
        return
    from estr_diag.report import sweep_page

    output.page(lambda _: sweep_page.render(document))


@command
def tokens(
    log: LogArgument,
    where: Annotated[
        str, typer.Option("--where", help="Condition over columns and rules, as in 'estr and not icepop'.")
    ] = "true",
    by: Annotated[str, typer.Option("--by", help="Value to order by, largest first, as in s or abs(delta).")] = "s",
    top: Annotated[int, typer.Option("--top", help="How many.")] = 20,
    context: Annotated[int, typer.Option("--context", help="Tokens before and after.")] = 8,
    rules: Annotated[
        str | None,
        typer.Option("--rules", help="Rules that --where may name, as in mine.toml or estr:tau=1.", show_default=False),
    ] = None,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """List the tokens behind a number, with what stands around them."""
    from estr_diag.cli import tokens as page
    from estr_diag.log import open_log

    own = {rule.name: rule for rule in _rules(rules) or ()}
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=_options(map, None, False, False), progress=progress)
    with opened:
        found = opened.tokens(where, by, top=top, context=context, rules=own)
    if json:
        output.data({"notes": list(found.notes), "tokens": found.rows()})
    else:
        output.page(lambda width: page.render(found, width))


@command
def demo(json: JsonOption = False, out: OutOption = None, rules: RulesOption = None, bins: BinsOption = None) -> None:
    """Print the report of the log that comes with the package: prime-rl's own files, written by its own code."""
    from estr_diag.log import demo as open_demo

    with open_demo() as opened:
        _print_report(opened, _rules(rules), bins, out, json, [])


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

    options = _options(map, step, guess_mask, all_sampled)
    if dry_run:
        from estr_diag.log import find

        found = find(paths, format=format, options=options, skip_unreadable=skip_unreadable)
        output.data(listings.discovery_json(found)) if json else output.page(lambda _: listings.discovery(found))
        return
    if out is None:
        raise UsageError("no store named; give one with -o run.duckdb, or look first with --dry-run")
    from estr_diag.log import ingest as run_ingest

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
def rules(
    file: Annotated[
        Path | None, typer.Argument(metavar="[RULES.TOML]", help="A rule file to list as well.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the mask rules: what each needs, whose presets there are, and which rules a log cannot replay."""
    from estr_diag.cli import rules as page
    from estr_diag.rules.file import load_rules
    from estr_diag.rules.library import LIBRARY

    known, own = tuple(LIBRARY.values()), tuple(load_rules(file).values()) if file is not None else ()
    output.data(page.listing_json(known, own)) if json else output.page(lambda _: page.listing(known, own))


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
    known = (Explanation(key, "rule", r.keep, "", "", "", r.says) for key, r in LIBRARY.items())
    found = look_up_metric(name, known)
    output.data(page.to_json(found)) if json else output.page(lambda _: page.render(found))


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
    from estr_diag.log import open_log

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
    from estr_diag.log import open_log
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


def _rules(text: str | None) -> tuple[Rule, ...] | None:
    if text is None:
        return None
    from estr_diag.rules.argument import parse_rule_argument

    chosen = parse_rule_argument(text, output.note)
    if not chosen:
        raise UsageError("--rules names no rule; write it as estr:tau=4,icepop")
    return chosen


def _gates(texts: list[str] | None) -> list[Any]:
    if not texts:
        return []
    from estr_diag.report.gates import parse

    return [parse(text) for text in texts]


def _options(mapping: Path | None, step: int | None, guess_mask: bool, all_sampled: bool) -> ReadOptions:
    from estr_diag.ingestion.adapter import ReadOptions

    loaded = None
    if mapping is not None:
        from estr_diag.ingestion.mapping import load_mapping

        loaded = load_mapping(mapping)
    return ReadOptions(mapping=loaded, guess_mask=guess_mask, all_sampled=all_sampled, step=step)


def main() -> None:
    """Run the command line."""
    app(prog_name="estr-diag")
