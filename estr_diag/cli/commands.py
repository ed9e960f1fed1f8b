"""What all commands share: the application, how errors become exit codes, and the options that several take."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from estr_diag.cli import output
from estr_diag.errors import EstrDiagError, ExitCode, UsageError

if TYPE_CHECKING:
    from estr_diag.ingestion.adapter import ReadOptions
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
    Path | None,
    typer.Option("-o", "--output", help="Write the report to a .html, .md or .json file.", show_default=False),
]
FailOption = Annotated[
    list[str] | None,
    typer.Option("--fail-on", help="Exit 1 when true, as in 'kl_k3>0.01'; may be repeated.", show_default=False),
]


def chosen_rules(text: str | None) -> tuple[Rule, ...] | None:
    """Return the rules of a --rules option; None where it was not given."""
    if text is None:
        return None
    from estr_diag.rules.argument import parse_rule_argument

    chosen = parse_rule_argument(text, output.note)
    if not chosen:
        raise UsageError("--rules names no rule; write it as estr:tau=4,icepop")
    return chosen


def read_options(mapping: Path | None, step: int | None, guess_mask: bool, all_sampled: bool) -> ReadOptions:
    """Return the options of reading a log."""
    from estr_diag.ingestion.adapter import ReadOptions

    loaded = None
    if mapping is not None:
        from estr_diag.ingestion.mapping import load_mapping

        loaded = load_mapping(mapping)
    return ReadOptions(mapping=loaded, guess_mask=guess_mask, all_sampled=all_sampled, step=step)
