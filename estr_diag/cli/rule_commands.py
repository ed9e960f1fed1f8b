"""Commands about mask rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import (
    BinsOption,
    FormatOption,
    JsonOption,
    LogArgument,
    MapOption,
    RulesOption,
    chosen_rules,
    command,
    read_options,
)
from estr_diag.errors import UsageError


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
    from estr_diag.opening import open_log
    from estr_diag.report import CompareDocument

    chosen = chosen_rules(rules)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=read_options(map, None, False, False), progress=progress)
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
        typer.Option(
            "--grid", help="Values: 0.25:16:log, 0:1:lin:11, or 0.1,0.2.", show_default="keeping 50 to 99.99 %"
        ),
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
    from estr_diag.opening import open_log

    chosen, *others = chosen_rules(rule) or ()
    if others:
        raise UsageError("--rule takes one rule; compare several with --families")
    asked = sweeps.Asked(chosen, param, grid, keep, chosen_rules(match), drop_lag0, chosen_rules(families), bins)
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=read_options(map, None, False, False), progress=progress)
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
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write a page with coloured text: tokens.html.", show_default=False),
    ] = None,
    colour: Annotated[
        str,
        typer.Option(
            "--colour", help="On a terminal: delta, z, s, entropy, p_infer, p_train, or a rule of the report."
        ),
    ] = "delta",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="A tokenizer.json that turns ids into text, where the log has none.", show_default=False
        ),
    ] = None,
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
    from estr_diag.opening import open_log

    own = {rule.name: rule for rule in chosen_rules(rules) or ()}
    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=read_options(map, None, False, False), progress=progress)
    with opened:
        if tokenizer is not None:
            opened.decode(tokenizer)
        found = opened.tokens(where, by, top=top, context=context, rules=own)
        if out is not None:
            page.write(opened, found, out, tuple(own.values()))
            output.note(f"wrote {out}")
            return
        near = [] if json else page.around(opened, found, tuple(own.values()), sequences=top, width=context)
        page.known_colour(colour, near)
    if json:
        output.data({"notes": list(found.notes), "tokens": found.rows()})
    else:
        output.page(lambda width: page.render(found, width, near, colour))


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
