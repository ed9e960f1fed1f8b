"""Two logs, or two windows of one, number by number: what changed, and what cannot be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from estr_diag import __version__
from estr_diag.report import diff_notes
from estr_diag.report.diff_document import DiffDocument, diff_json_schema
from estr_diag.report.diff_rows import LACKING, Lacks, as_row, judge, ranked
from estr_diag.report.diff_side import PAIR, Computed, Side, compute
from estr_diag.report.diff_verdict import verdict
from estr_diag.result import json_number
from estr_diag.rules import comparison
from estr_diag.rules.base import Rule
from estr_diag.rules.fitted import fitted
from estr_diag.stats.common_grid import common_grid
from estr_diag.stats.decomposition import SMALL
from estr_diag.stats.entropy_bins import SMALL_SEQUENCES, SMALL_TOKENS
from estr_diag.stats.grid import Bins, ValueGrid
from estr_diag.stats.mean_bases import averaged
from estr_diag.stats.metrics import METRICS
from estr_diag.stats.split_errors import UNITS
from estr_diag.stats.two_samples import LEVEL

_SPLIT = PAIR | {"entropy"}


def difference(a: Side, b: Side, rules: Sequence[Rule], bins: Bins | None = None) -> DiffDocument:
    """Compare two logs.

    Parameters
    ----------
    a, b
        The difference is b - a. A window is given as its `store.window.StepWindow`.
    rules
        Whose masked shares are compared; a rule that names ``scale`` is fitted to `a` and used on both.
    bins
        Entropy bins, one set for both; see `common_grid`.
    """
    grid = common_grid(a.store, b.store, bins)
    sides = Computed.of(a), Computed.of(b)
    rules = comparison.with_trainer(rules, sides[0].present | sides[1].present)
    asked = tuple(rule for rule in rules if rule.key != "none")
    possible, missing = comparison.allowed(asked, sides[0].present & sides[1].present)
    possible = fitted(possible, a.store)
    split_note = compute(sides, possible, grid)
    lacks = Lacks(*((c.side.store, c.present) for c in sides))
    other = diff_notes.other_entropy(*(c.run for c in sides))
    metrics, split = _metrics(lacks, sides, other), _split(lacks, sides)
    by_bin = [] if grid is None or other or lacks.of(_SPLIT)[0] else _bins(sides, grid)
    masked = _rules(lacks, sides, asked, missing)
    judge([*metrics, *split, *by_bin, *masked])
    listed = (("metric", metrics), ("split", split), ("entropy_bin", by_bin), ("rule", masked))
    document: dict[str, Any] = {
        "schema": "estr-diag/diff/v1",
        "estr_diag": __version__,
        "verdict": "",
        "a": _facts(sides[0]),
        "b": _facts(sides[1]),
        "shared_sequences": diff_notes.shared_sequences(a.store, b.store),
        "correction": {
            "method": "holm",
            "level": LEVEL,
            "comparisons": sum(row["p"] is not None for _, rows in listed for row in rows),
        },
        "changed": ranked(listed),
        "metrics": metrics,
        "split": split,
        "split_method": _method(sides),
        "entropy_bins": by_bin,
        "rules": masked,
        "facts": diff_notes.facts(*(c.run for c in sides)),
        "only_a": sorted(sides[0].present - sides[1].present),
        "only_b": sorted(sides[1].present - sides[0].present),
        "without_error": _without_error(sides),
        "notes": [],
    }
    notes = diff_notes.notes(document, sides, grid if by_bin else None, bins)
    fits = [f"scale is m2(H) of A on both sides: {rule.label}" for rule in possible if rule.knots]
    document["notes"] = [*notes, *([split_note] if split_note else []), *fits]
    document["verdict"] = verdict(document)
    return DiffDocument.model_validate(json_number(document))


def _facts(computed: Computed) -> dict[str, Any]:
    kept = ("n_tokens", "n_counted", "n_sequences", "steps", "versions", "lags", "columns")
    side = computed.side
    return {
        "source": side.source, "window": side.window, **{k: computed.facts[k] for k in kept}, "run": computed.run
    }  # fmt: skip


def _metrics(lacks: Lacks, sides: Sequence[Computed], other_entropy: str) -> list[dict[str, Any]]:
    tables = [c.metrics() for c in sides]
    rows = []
    for metric in METRICS:
        if averaged(metric):
            what = {"name": metric.name, "unit": metric.unit, "direction": metric.direction}
            why = lacks.of(metric.needs | {"logp_infer"})
            if "entropy" in metric.needs and other_entropy and not why[0]:
                why = (other_entropy, LACKING["entropy_of"])
            rows.append(as_row(what, [t.get(metric.name) for t in tables], ("value", "se"), why))
    return rows


def _without_error(sides: Sequence[Computed]) -> list[dict[str, Any]]:
    a, b = (c.metrics() for c in sides)
    return [
        {"name": m.name, "unit": m.unit, "a": a[m.name]["value"], "b": b[m.name]["value"]}
        for m in METRICS
        if not averaged(m) and m.name in a and m.name in b
    ]


def _split(lacks: Lacks, sides: Sequence[Computed]) -> list[dict[str, Any]]:
    tables = [c.split() for c in sides]
    why = lacks.of(_SPLIT)
    for letter, computed, table in zip("AB", sides, tables, strict=True):
        if not why[0] and not table:
            notes = computed.results["split"].notes
            why = (f"{letter} cannot be split: {notes[0] if notes else 'one sequence'}", notes[-1] if notes else "")
        elif not why[0] and (n := next(iter(table.values()))["n"]) < SMALL:
            why = (f"the noise of {letter} is from {n:,} tokens", f"{SMALL} are needed: take more steps")
    out = []
    for name, unit in UNITS.items():
        what = {"name": name, "unit": unit, "direction": "none" if name == "exploration" else "lower"}
        out.append(as_row(what, [t.get(name) for t in tables], ("value", "se"), why))
    return out


def _method(sides: Sequence[Computed]) -> str:
    taken = {str(c.results["split"].parameters["method"]) if "split" in c.results else "none" for c in sides}
    return taken.pop() if len(taken) == 1 else "none"


def _bins(sides: Sequence[Computed], grid: ValueGrid) -> list[dict[str, Any]]:
    tables = [c.bins() for c in sides]
    out = []
    for number in sorted(set(tables[0]) | set(tables[1])):
        lo, hi = grid.bounds(number)
        found = [t.get(number) for t in tables]
        why = ("", "")
        for letter, row in zip("AB", found, strict=True):
            if not why[0] and (row is None or row["small"]):
                n, sequences = (row["n"], row["n_sequences"]) if row else (0, 0)
                why = (
                    f"{letter} has {n:,} tokens of {sequences:,} sequences there",
                    f"{SMALL_TOKENS} and {SMALL_SEQUENCES} are needed: ask for fewer --bins",
                )
        what = {"name": "mean_sq_delta", "unit": "nat^2", "direction": "lower", "lo": lo, "hi": hi}
        out.append(as_row(what, found, ("mean_sq_delta", "mean_sq_delta_se"), why))
    return out


def _rules(
    lacks: Lacks, sides: Sequence[Computed], asked: Sequence[Rule], missing: Mapping[str, frozenset[str]]
) -> list[dict[str, Any]]:
    tables = [c.rules() for c in sides]
    out = []
    for rule in asked:
        what = {"name": rule.label, "unit": "share", "direction": "none"}
        why = lacks.of(missing.get(rule.label, frozenset()))
        out.append(as_row(what, [t.get(rule.label) for t in tables], ("masked_share", "kept_share_se"), why))
    return out


__all__ = ["DiffDocument", "Side", "diff_json_schema", "difference"]
