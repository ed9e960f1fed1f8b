"""The page of ``estr-diag diff``: for a terminal, and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from estr_diag.report import headline
from estr_diag.report.diff_document import Change, DiffBin, DiffDocument, DiffRow, DiffSide, Fact, NoError, SideValue
from estr_diag.report.diff_rows import label
from estr_diag.report.diff_verdict import effect
from estr_diag.report.inert import inert
from estr_diag.report.markdown import _escape, _foreign, _table
from estr_diag.report.sentences import Cells
from estr_diag.report.terminal import cells, lines, title
from estr_diag.report.verdict import number, with_error

_WIDE = 110
_MAX_CHANGES = 10
_VERDICTS = {"changed": "changed", "not_told_apart": "", "not_compared": "not compared"}
_METHODS = {"lag_contrast": "lag contrast", "none": "not split"}
_SPLIT = {"noise_share": "noise share", "noise": "noise, nat²", "exploration": "exploration, nat²"}


def render(d: DiffDocument, width: int) -> RenderableType:
    """Return the page for a terminal of `width` columns."""
    return Group(*_parts(d, width >= _WIDE))


def _parts(d: DiffDocument, wide: bool) -> Iterator[RenderableType]:
    yield Text("estr-diag diff", style="bold")
    for letter, side in (("A", d.a), ("B", d.b)):
        yield Text.assemble((f"{letter}  ", "bold cyan"), inert(side.source), (f"  {about(side)}", "dim"))
    yield Padding(Text(d.verdict, style="bold" if d.changed else ""), (1, 0, 0, 0))
    if d.changed:
        yield title("What changed most", "by |z|")
        yield cells(changes(d.changed), left=1)
    for heading, detail, table in sections(d, wide):
        yield title(heading, detail)
        yield cells(table, left=1)
    if differ := facts(d):
        yield title("Facts of the runs that differ")
        yield from lines([f"{name}: {inert(a)} in A, {inert(b)} in B" for name, a, b in differ])
    if missing := not_compared(d):
        yield title("Not compared")
        for names, why, how in missing:
            said = ((f"{names}: ", "yellow"), f"{inert(why)}. ", ("To get it: ", "dim"), inert(how))
            yield Padding(Text.assemble(*said), (0, 0, 0, 2))
    yield title("Notes")
    yield from (Padding(Text(f"· {inert(note)}"), (0, 0, 0, 2)) for note in d.notes)


def markdown(d: DiffDocument) -> str:
    """Return the page as Markdown; what the log says can neither format nor link anything in it."""
    return "\n".join(_markdown(d)) + "\n"


def _markdown(d: DiffDocument) -> Iterator[str]:
    yield f"# estr-diag {d.estr_diag} diff"
    yield ""
    sides = [(letter, _inert(side.source), about(side)) for letter, side in (("A", d.a), ("B", d.b))]
    yield from _table(("", "log", ""), sides)
    yield _escape(d.verdict)
    yield ""
    if d.changed:
        yield "## What changed most"
        yield ""
        yield from _table(*changes(d.changed))
    for heading, detail, table in sections(d, True):
        yield f"## {heading}"
        yield ""
        if detail:
            yield _escape(detail)
            yield ""
        yield from _table(*table)
    if differ := facts(d):
        yield "## Facts of the runs that differ"
        yield ""
        yield from _table(("fact", "A", "B"), [(name, _inert(a), _inert(b)) for name, a, b in differ])
    if missing := not_compared(d):
        yield "## Not compared"
        yield ""
        yield from (f"- {_inert(names)}: {_inert(why)}. To get it: {_inert(how)}" for names, why, how in missing)
        yield ""
    yield "## Notes"
    yield ""
    yield from (f"- {_inert(note)}" for note in d.notes)
    yield ""


def about(side: DiffSide) -> str:
    """Say how large a side is, and which steps and lags it has."""
    parts = [f"{side.n_sequences:,} sequences", f"{side.n_counted:,} of {side.n_tokens:,} tokens counted"]
    if side.steps:
        first, last = side.steps
        parts.append(f"step {first}" if first == last else f"steps {first}–{last}")
    if side.lags:
        parts.append("lags " + ", ".join(side.lags))
    return " · ".join(parts)


def changes(found: Sequence[Change]) -> Cells:
    """Return what changed, largest |z| first."""
    rows: list[tuple[str, ...]] = [
        (inert(c.name), number(c.a), number(c.b), effect(c.relative), _z(c.z)) for c in found[:_MAX_CHANGES]
    ]
    if len(found) > _MAX_CHANGES:
        rows.append((f"and {len(found) - _MAX_CHANGES} more (all with --json)", "", "", "", ""))
    return ("what", "A", "B", "relative", "z"), rows


def sections(d: DiffDocument, wide: bool) -> Iterator[tuple[str, str, Cells]]:
    """Return heading, detail and table of each part."""
    shown = [r for r in d.metrics if r.verdict != "not_compared" and (r.name in headline.OVERALL or _noted(r))]
    rest = sum(r.verdict == "not_told_apart" for r in d.metrics) - sum(r.verdict == "not_told_apart" for r in shown)
    if shown:
        more = f"{rest} more are not told apart (--json)" if rest else ""
        yield "Consistency of the two engines", more, _rows([(r.name, r) for r in shown], wide)
    split = [r for r in d.split if r.verdict != "not_compared"]
    if split:
        method = _METHODS.get(d.split_method, d.split_method)
        yield "Noise against exploration", method, _rows([(_SPLIT.get(r.name, r.name), r) for r in split], wide)
    if any(b.verdict != "not_compared" for b in d.entropy_bins):
        named = [(_between(b), b) for b in d.entropy_bins]
        yield "E[δ²] by entropy", "the same bins on both sides", _rows(named, wide, "H")
    masked = [r for r in d.rules if r.verdict != "not_compared"]
    if masked:
        yield "Share of tokens that a rule masks", "", _rows([(inert(r.name), r) for r in masked], wide)
    if d.without_error:
        named_rows = [r for r in d.without_error if r.name in headline.OVERALL]
        yield "Without a standard error", "shown, and not judged", _unjudged(named_rows)


def _noted(row: DiffRow) -> bool:
    return row.verdict == "changed"


def _rows(named: Sequence[tuple[str, DiffRow]], wide: bool, what: str = "") -> Cells:
    value = _with_error if wide else _number
    rows: list[tuple[str, ...]] = []
    for name, r in named:
        said = r.why if r.verdict == "not_compared" else _VERDICTS[r.verdict]
        between = "" if r.low is None else f"[{_signed(r.low)}, {_signed(r.high)}]"
        if wide and between:
            between = f"{_signed(r.difference)} {between}"
        relative = ("" if r.difference is None else effect(r.relative) if r.difference else "0",) if wide else ()
        rows.append((name, value(r.a), value(r.b), between, *relative, _z(r.z, r), _short(said)))
    heads = ("B − A [95 %]", "relative", "z", "") if wide else ("B − A, 95 %", "z", "")
    return (what, "A ± se" if wide else "A", "B ± se" if wide else "B", *heads), rows


def _between(b: DiffBin) -> str:
    if b.hi == 0:
        return "0"
    return f"{number(b.lo)} – {number(b.hi) if b.hi is not None else '∞'}"


def _short(said: str) -> str:
    return "too few" if said.startswith(("A has ", "B has ")) else said


def _unjudged(rows: Sequence[NoError]) -> Cells:
    return ("", "A", "B"), [(r.name, number(r.a), number(r.b)) for r in rows]


def _with_error(value: SideValue) -> str:
    return with_error({"value": value.value, "se": value.se})


def _number(value: SideValue) -> str:
    return number(value.value)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2g}" if value else "0"


def _z(z: float | None, row: DiffRow | None = None) -> str:
    if z is not None:
        return f"{z:+.1f}"
    return "–" if row is not None and row.verdict != "changed" else "no spread"


def facts(d: DiffDocument) -> list[tuple[str, str, str]]:
    """Return facts of the runs that differ, on both sides."""
    found = [(f.fact, _fact(f.a), _fact(f.b)) for f in d.facts]
    if d.only_a or d.only_b:
        found.append(("columns", ", ".join(d.only_a) or "none of its own", ", ".join(d.only_b) or "none of its own"))
    return found


def _fact(value: Fact) -> str:
    return "not known" if value is None else str(value)


def not_compared(d: DiffDocument) -> list[tuple[str, str, str]]:
    """Return names, reason and remedy: those with the same reason together; small bins are in their table."""
    by_reason: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, row in d.rows():
        if row.verdict == "not_compared" and not isinstance(row, DiffBin):
            by_reason[row.why, row.how_to_get_it].append(label(kind, row.model_dump()))
    return [(_listed(names), why, how) for (why, how), names in by_reason.items()]


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return inert(", ".join(names[:limit]) + more)


def _inert(text: str) -> str:
    return _foreign(inert(text))


__all__ = ["markdown", "render"]
