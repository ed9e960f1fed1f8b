"""The report on a terminal: a page that a tired engineer takes in at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule as Line
from rich.table import Table
from rich.text import Text

from estr_diag.report import headline, rule_tables, sentences
from estr_diag.report.document import Document, EntropyBin, LagMetrics, Number, StepMetrics
from estr_diag.report.rule_document import NotComputed
from estr_diag.report.verdict import number, with_error
from estr_diag.stats.metrics import YARDSTICKS

_MARKS = {"found": ("✗", "bold red"), "clear": ("✓", "green"), "cannot_tell": ("?", "yellow")}
_BAR = "▏▎▍▌▋▊▉█"
_BAR_CELLS = 10
_MIDDLE, _WIDE = 90, 120


def render(document: Document, width: int) -> RenderableType:
    """Return the page, for a terminal of `width` columns."""
    return Group(*_parts(document, width))


def _parts(d: Document, width: int) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("estr-diag ", "bold"), d.estr_diag, "  ", (d.log.trainer or "unknown trainer", "bold cyan"), "  ", d.log.source
    )
    yield from _facts(d)
    yield Padding(Text(d.verdict, style="bold" if d.stamped else ""), (1, 0))
    yield from _checks(d)
    stamp = " (rests on a broken column)" if d.stamped else ""
    if d.consistency.overall:
        yield title("Consistency of the two engines" + stamp, "value ± standard error by sequence")
        yield _overall(d, width)
    if len(d.consistency.by_step) > 1:
        yield title("By step" + stamp)
        yield _grouped("step", [(str(g.step), g) for g in _ends(d.consistency.by_step)], width)
    if d.consistency.by_lag:
        yield title("By lag" + stamp, "trainer version minus the version that generated the token")
        yield _grouped("lag", [("?" if g.lag is None else str(g.lag), g) for g in d.consistency.by_lag], width)
    if d.entropy_bins:
        whose = {"train": "training engine's", "infer": "inference engine's"}.get(
            str(d.log.run.get("entropy_of")), "logged"
        )
        yield title("Ratio scale against entropy" + stamp, f"H is the {whose} entropy, nat")
        yield _bins(d.entropy_bins, width)
    if d.scaling:
        yield title("Scaling law" + stamp, "E[δ²] = a H^b; the paper's b is 1; 95 % intervals")
        yield from lines(sentences.scaling(d.scaling))
    if d.decomposition and d.decomposition.method != "none":
        yield title("Noise against exploration" + stamp, d.decomposition.method.replace("_", " "))
        yield from lines(sentences.decomposition(d.decomposition))
        if d.decomposition.by_lag:
            yield cells(sentences.noise_by_lag(d.decomposition))
    if d.switches:
        yield title("Version switches" + stamp, "difference to matched positions without a switch")
        yield from lines(sentences.switches(d.switches))
        if d.switches.event_study:
            yield cells(sentences.event_study(d.switches))
    if d.weights:
        yield title("Importance weights" + stamp)
        yield from lines(sentences.weights(d.weights))
    if d.rules:
        yield title("What a mask would keep" + stamp)
        yield cells(rule_tables.kept(d.rules), left=1)
        for method, table in rule_tables.errors(d.rules):
            yield Padding(
                Text(f"noise admitted and exploration masked, {method}, 95 % intervals", style="dim"), (1, 0, 0, 0)
            )
            yield cells(table, left=1)
        yield from lines(rule_tables.trainer(d.reproduces_trainer))
    yield from not_computed(d.not_computed)
    if d.log.notes or d.log.files_left_out:
        yield title("Notes")
        for note in d.log.notes:
            yield Padding(Text(f"· {note}"), (0, 0, 0, 2))
        for file in d.log.files_left_out:
            yield Padding(Text(f"· not read ({file.status}): {file.path}: {file.reason}"), (0, 0, 0, 2))


def _facts(d: Document) -> Iterator[RenderableType]:
    log = d.log
    parts = [f"{log.n_sequences:,} sequences", f"{log.n_tokens:,} response tokens, {log.n_counted:,} counted"]
    if log.steps:
        parts.append(_span("step", log.steps))
    if log.versions:
        parts.append(_span("version", log.versions))
    if log.lags:
        parts.append("lag " + ", ".join(f"{lag}: {n:,}" for lag, n in log.lags.items()))
    yield Text(" · ".join(parts), style="dim")
    left_out = [f"{n:,} {reason}" for reason, n in (log.skipped | log.repaired).items() if n]
    if left_out:
        yield Text("not counted or repaired: " + "; ".join(left_out), style="dim")


def _span(word: str, ends: Sequence[int]) -> str:
    return f"{word} {ends[0]}" if ends[0] == ends[1] else f"{word}s {ends[0]}–{ends[1]}"


def title(text: str, detail: str = "") -> RenderableType:
    """Draw the heading of a section."""
    line = Text.assemble((text, "bold"), (f"  {detail}" if detail else "", "dim"))
    return Padding(Line(line, align="left", style="dim"), (1, 0, 0, 0))


def _checks(d: Document) -> Iterator[RenderableType]:
    yield title("Checks")
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column()
    for check in d.checks:
        mark, style = _MARKS[check.verdict]
        text = Text(check.cause)
        if check.verdict == "found":
            text.append(f"\n→ {check.next_action}", style="bold")
        elif check.verdict == "cannot_tell":
            text = Text("cannot tell: ", style="yellow").append(check.cause, style="")
        table.add_row(Text(f"  {mark}", style), Text(check.id, style=style if check.verdict == "found" else ""), text)
    yield table


def _plain_table(*headers: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header, justify in headers:
        table.add_column(header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _overall(d: Document, width: int) -> RenderableType:
    shown = [n for n in headline.OVERALL if n in d.consistency.overall]
    table = _plain_table(("metric", "left"), ("value", "right"), ("unit", "left"))
    table.add_column("what others call good or bad" if width >= _WIDE else "yardstick", overflow="fold", style="dim")
    for name in shown:
        short, source = YARDSTICKS.get(name, ("", ""))
        yardstick = f"{short} ({source})" if source and width >= _WIDE else short
        table.add_row(name, _value(d.consistency.overall[name]), headline.unit_of(name), yardstick)
    return table


def _grouped(key: str, groups: Sequence[tuple[str, StepMetrics | LagMetrics]], width: int) -> RenderableType:
    names = [n for n in headline.GROUPED if any(n in g.metrics for _, g in groups)]
    headers = [(headline.GROUPED[n], "right") for n in names]
    counts = ("tokens", "seqs") if width >= _MIDDLE else ("tokens",)
    table = _plain_table((key, "right"), *((name, "right") for name in counts), *headers)
    for label, group in groups:
        values = [_value(group.metrics[name]) if name in group.metrics else "–" for name in names]
        numbers = (group.n_tokens, group.n_sequences)[: len(counts)]
        table.add_row(label, *(f"{n:,}" for n in numbers), *values)
    return table


def _ends(groups: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    half = headline.MAX_STEPS // 2
    return groups if len(groups) <= headline.MAX_STEPS else [*groups[:half], *groups[-half:]]


def _bins(bins: Sequence[EntropyBin], width: int) -> RenderableType:
    wide = width >= _WIDE
    headers = [("H from", "right"), ("to", "right"), ("tokens", "right"), ("E[δ²]/H", "right"), ("E[δ²] ± se", "right")]
    if wide:
        headers += [("p50 |δ|", "right"), ("p99 |δ|", "right"), ("E[δ²] off-mode", "right")]
    table = _plain_table(*headers, ("", "left"))
    top = max((b.sq_delta_over_entropy or 0.0 for b in bins), default=0.0)
    for b in bins:
        row = [
            number(b.lo), number(b.hi) if b.hi is not None else "∞", f"{b.n:,}", number(b.sq_delta_over_entropy),
            with_error({"value": b.mean_sq_delta, "se": b.se_mean_sq_delta}),
        ]  # fmt: skip
        if wide:
            row += [number(b.quantiles["p50"]), number(b.quantiles["p99"]), number(b.off_mode.mean_sq_delta)]
        table.add_row(*row, Text(_bar(b.sq_delta_over_entropy, top), style="cyan"))
    return table


def _bar(value: float | None, top: float) -> str:
    if not value or not top:
        return ""
    eighths = max(1, round(8 * _BAR_CELLS * value / top))
    return "█" * (eighths // 8) + (_BAR[eighths % 8 - 1] if eighths % 8 else "")


def lines(texts: Sequence[str]) -> Iterator[RenderableType]:
    """Draw sentences."""
    for text in texts:
        yield Padding(Text(text), (0, 0, 0, 2))


def cells(drawn: sentences.Cells, left: int = 0) -> RenderableType:
    """Draw a table whose first `left` columns are texts."""
    headers, rows = drawn
    table = _plain_table(*((h, "left" if i < left else "right") for i, h in enumerate(headers)))
    for i, column in enumerate(table.columns):
        # A text may go over two lines; a number that is cut short would be another number.
        column.overflow, column.no_wrap = ("fold", False) if i < left else ("ellipsis", True)
    for row in rows:
        # As it is: a bracket in the text of a log is no markup.
        table.add_row(*(Text(cell) for cell in row))
    return Padding(table, (1, 0, 0, 0))


def not_computed(items: Sequence[NotComputed]) -> Iterator[RenderableType]:
    """Say what the log does not allow, and how to get it."""
    if items:
        yield title("Not computed")
    for item in items:
        said = ((f"{item.what}: ", "yellow"), f"{item.why}. ", ("To get it: ", "dim"), item.how_to_get_it)
        yield Padding(Text.assemble(*said), (0, 0, 0, 2))


def _value(metric: Number) -> str:
    return with_error({"value": metric.value, "se": metric.se})
