"""The report as Markdown, to paste into an issue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from estr_diag.report import headline, rule_tables, sentences
from estr_diag.report.document import Document
from estr_diag.report.inert import inert
from estr_diag.report.verdict import number, with_error
from estr_diag.stats.metrics import YARDSTICKS

_MARKS = {"found": "**found**", "clear": "clear", "cannot_tell": "cannot tell"}


def render(document: Document) -> str:
    """Return the page."""
    return "\n".join(_lines(document)) + "\n"


def _lines(d: Document) -> Iterator[str]:
    log = d.log
    yield f"# estr-diag {d.estr_diag}: {_foreign(log.source)}"
    yield ""
    yield d.verdict.replace("<", "&lt;")
    yield ""
    yield from _table(
        ("log", ""),
        [
            ("trainer", _foreign(log.trainer or "unknown")),
            ("sequences", f"{log.n_sequences:,}"),
            ("response tokens", f"{log.n_tokens:,} ({log.n_counted:,} counted)"),
            ("steps", _range(log.steps)),
            ("versions", _range(log.versions)),
            ("lags", ", ".join(f"{lag}: {n:,}" for lag, n in log.lags.items()) or "not known"),
            ("not counted", "; ".join(f"{n:,} {r}" for r, n in log.skipped.items()) or "none"),
        ],
    )
    yield "## Checks"
    yield ""
    yield from _table(
        ("check", "verdict", "what", "next"),
        [(c.id, _MARKS[c.verdict], c.cause, c.next_action if c.verdict == "found" else "") for c in d.checks],
    )
    if d.consistency.overall:
        yield "## Consistency"
        yield ""
        shown = [n for n in headline.OVERALL if n in d.consistency.overall]
        values = d.consistency.overall
        yield from _table(
            ("metric", "value ± se", "unit", "yardstick"),
            [
                (f"`{n}`", with_error(values[n].model_dump()), headline.unit_of(n), " — ".join(YARDSTICKS.get(n, ())))
                for n in shown
            ],
        )
    for title, key, groups in (
        ("By step", "step", [(g.step, g) for g in d.consistency.by_step] if len(d.consistency.by_step) > 1 else []),
        ("By lag", "lag", [("unknown" if g.lag is None else g.lag, g) for g in d.consistency.by_lag]),
    ):
        if groups:
            yield f"## {title}"
            yield ""
            names = [n for n in headline.GROUPED if n in groups[0][1].metrics]
            yield from _table(
                (key, "tokens", "sequences", *(f"`{n}`" for n in names)),
                [
                    (
                        str(k),
                        f"{g.n_tokens:,}",
                        f"{g.n_sequences:,}",
                        *(with_error(g.metrics[n].model_dump()) for n in names),
                    )
                    for k, g in groups
                ],
            )
    if d.entropy_bins:
        yield "## Ratio scale against entropy"
        yield ""
        yield from _table(
            ("H from", "to", "tokens", "E[δ²] ± se", "E[δ²]/H", "p50 abs δ", "p99 abs δ", "E[δ²] off-mode"),
            [
                (
                    number(b.lo), number(b.hi) if b.hi is not None else "∞", f"{b.n:,}",
                    with_error({"value": b.mean_sq_delta, "se": b.se_mean_sq_delta}), number(b.sq_delta_over_entropy),
                    number(b.quantiles["p50"]), number(b.quantiles["p99"]), number(b.off_mode.mean_sq_delta),
                )
                for b in d.entropy_bins
            ],
        )  # fmt: skip
    nothing: sentences.Cells = ((), [])
    for title, lines, cells in (
        ("Scaling law", sentences.scaling(d.scaling) if d.scaling else [], nothing),
        (
            "Noise against exploration",
            sentences.decomposition(d.decomposition) if d.decomposition else [],
            sentences.noise_by_lag(d.decomposition) if d.decomposition else nothing,
        ),
        (
            "Version switches",
            sentences.switches(d.switches) if d.switches else [],
            sentences.event_study(d.switches) if d.switches else nothing,
        ),
        ("Importance weights", sentences.weights(d.weights) if d.weights else [], nothing),
    ):
        if lines:
            yield f"## {title}"
            yield ""
            yield from (f"- {_escape(line)}" for line in lines)
            yield ""
        if cells[1]:
            yield from _table(*cells)
    if d.rules:
        yield "## What a mask would keep"
        yield ""
        yield from _table(*_quoted(rule_tables.kept(d.rules)))
        for method, table in rule_tables.errors(d.rules):
            yield f"Noise admitted and exploration masked, {method}, 95 % intervals:"
            yield ""
            yield from _table(*_quoted(table))
        for line in rule_tables.trainer(d.reproduces_trainer):
            yield _escape(line)
            yield ""
    if d.not_computed:
        yield "## Not computed"
        yield ""
        yield from (
            f"- {_escape(n.what)}: {_escape(n.why)}. To get it: {_escape(n.how_to_get_it)}" for n in d.not_computed
        )
        yield ""
    if d.log.notes or d.log.files_left_out:
        yield "## Notes"
        yield ""
        yield from (f"- {_foreign(note)}" for note in d.log.notes)
        yield from (f"- not read ({f.status}): {_foreign(f.path)}: {_foreign(f.reason)}" for f in d.log.files_left_out)
        yield ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(_escape(cell) for cell in header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(_escape(cell) for cell in row) + " |"
    yield ""


def _quoted(cells: sentences.Cells) -> sentences.Cells:
    # A rule's name may hold what Markdown reads as formatting.
    headers, rows = cells
    return headers, [(f"`{row[0]}`", *row[1:]) for row in rows]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").replace("\r", " ")


def _foreign(text: str) -> str:
    # File names and messages are the log's, not ours: they may neither format, link, fetch nor turn anything around.
    return re.sub(r"([\\`*_\[\]!~@#])", r"\\\1", inert(text.replace("\r", " "), " ").replace("<", "&lt;"))


def _range(ends: Sequence[int] | None) -> str:
    return "not known" if ends is None else (str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}")
