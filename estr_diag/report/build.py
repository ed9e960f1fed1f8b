"""Build a report: checks first, then every statistic and rule in one run of the engine."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estr_diag import __version__
from estr_diag.checks import run_checks
from estr_diag.ingestion.registry import adapters
from estr_diag.report import sections
from estr_diag.report.document import Document
from estr_diag.report.verdict import verdict
from estr_diag.result import Result, json_number
from estr_diag.rules import comparison
from estr_diag.rules.base import Rule
from estr_diag.rules.fitted import fitted
from estr_diag.rules.reproduction import reproductions
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.coverage import coverage
from estr_diag.stats.decomposition import Decomposition, NoiseShare
from estr_diag.stats.entropy_bins import QUANTILES, RATIO_BOUNDS, EntropyBins
from estr_diag.stats.grid import GINI, Bins, ValueGrid, fitting_grid, quantile_grid
from estr_diag.stats.probability_pairs import ProbabilityPairs
from estr_diag.stats.quantiles import AbsDeltaQuantiles
from estr_diag.stats.scaling import Scaling
from estr_diag.stats.sequence_weights import WeightsByLength
from estr_diag.stats.staleness import Staleness, Versions
from estr_diag.stats.switches import EventStudy
from estr_diag.stats.weights import Weights, token_tail
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, how_to_get, run

_PAIR = frozenset({"logp_infer", "logp_train"})
_VERSIONS = frozenset({"policy_version", "trainer_version"})
_WHAT: tuple[tuple[str, frozenset[str]], ...] = (
    ("the gap between the engines", _PAIR),
    ("ratio scale against entropy, scaling law, noise against exploration", frozenset({"entropy"})),
    ("statistics by lag, noise against exploration, version switches", _VERSIONS),
    ("share of the advantage that a rule keeps", frozenset({"advantage"})),
)
"""What a report cannot say without some columns."""


@dataclass(frozen=True, slots=True)
class Built:
    """A document, and the results that pictures are drawn from.

    Attributes
    ----------
    results
        By what they are called in `_statistics`: ``bins``, ``scaling``, ``decomposition``, ``rules`` ...
    rules
        Those that were replayed, fitted to the log.
    """

    document: Document
    results: Mapping[str, Result]
    rules: tuple[Rule, ...]


def build(store: Store, rules: Sequence[Rule], *, source: str, bins: Bins | None = None) -> Built:
    """Compute everything a report shows.

    Parameters
    ----------
    store
        An open store.
    rules
        Mask rules to compare.
    source
        What the user called the log.
    bins
        Entropy bins, as `grid.choose_grid` takes them; by default 24 quantile bins, fewer when that would leave less than 200 tokens a bin.
    """
    facts = coverage(store)
    present = store.present()
    findings = run_checks(store)
    grid = fitting_grid(store, present, bins)
    rules = comparison.with_trainer(rules, present)
    possible, missing = comparison.allowed(rules, present)
    possible = fitted(possible, store)
    outcome = run(store, _statistics(store, possible, grid, present), {"source": source})
    results = outcome.results
    table = _entropy_bins(results.get("bins"), results.get("bins_by_lag"))
    numbers = [row["_bin"] for row in table]
    document: dict[str, Any] = {
        "schema": "estr-diag/report/v1",
        "estr_diag": __version__,
        "verdict": "",
        "log": _log(store, source, facts, table),
        "checks": [f.to_json() for f in findings],
        "stamped": sorted({column for f in findings if f.verdict == "found" for column in f.spoils}),
        "consistency": {
            "overall": {**_metrics(results.get("overall")), **_quantiles(results.get("quantiles"))},
            "by_step": _grouped_metrics(results.get("by_step"), "step"),
            "by_lag": _grouped_metrics(results.get("by_lag"), "lag"),
        },
        "entropy_bins": table,
        "scaling": sections.scaling(results.get("scaling")),
        "decomposition": sections.decomposition(results.get("decomposition"), results.get("noise_share"), numbers),
        "switches": sections.switches(results, facts["n_sequences_with_switch"]),
        "weights": sections.weights(results),
        "rules": _rules(possible, results, numbers),
        "reproduces_trainer": _reproduced(store, present),
        "agreement": results["agreement"].rows() if "agreement" in results else [],
        "not_computed": _not_computed(store, rules, missing, present) + _unsplit(results, facts),
    }
    document["verdict"] = verdict(document)
    return Built(Document.model_validate(json_number(document)), results, possible)


def _statistics(
    store: Store, rules: tuple[Rule, ...], grid: ValueGrid | None, present: frozenset[str]
) -> dict[str, Statistic]:
    wanted: dict[str, Statistic] = {"overall": Consistency(), "by_step": Consistency("step")}
    versions = present >= _VERSIONS
    if versions:
        wanted["by_lag"] = Consistency("lag")
    if present >= _PAIR:
        wanted["quantiles"], wanted["probability_pairs"] = AbsDeltaQuantiles(), ProbabilityPairs()
        wanted["weights"] = Weights(token_tail(store, present))
        wanted["weights_by_length"] = WeightsByLength()
        wanted["event_study"], wanted["staleness"] = EventStudy(), Staleness()
        if "policy_version" in present:
            wanted["versions"] = Versions()
    if grid is not None and present >= _PAIR:
        grids = (grid, quantile_grid(store, present, grid.n_bins - 1, GINI)) if "collision" in present else (grid,)
        wanted["scaling"] = Scaling(grids)
        wanted["decomposition"], wanted["noise_share"] = Decomposition(grid), NoiseShare(grid)
        wanted["bins"] = EntropyBins(grid)
        if versions:
            wanted["bins_by_lag"] = EntropyBins(grid, by_lag=True)
    if rules:
        wanted |= comparison.statistics(rules, grid, present)
    return wanted


def _log(store: Store, source: str, facts: Mapping[str, Any], bins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    runs = store.rows("select * from runs")
    sources = store.rows("select path, status, notes, counts from sources order by source_id")
    repaired: dict[str, int] = defaultdict(int)
    notes: dict[str, list[str]] = defaultdict(list)
    for row in sources:
        for reason, n in json.loads(row["counts"] or "{}").items():
            repaired[reason] += n
        if row["status"] == "ingested":
            for note in json.loads(row["notes"] or "[]"):
                notes[note].append(row["path"])
    run_facts = dict(runs[0]) if runs else {}
    return {
        "source": source,
        "trainer": run_facts.get("trainer"),
        "adapter": run_facts.get("adapter"),
        "run": {k: v for k, v in run_facts.items() if k not in ("run", "trainer", "adapter")},
        **{
            k: facts[k]
            for k in ("n_tokens", "n_counted", "n_sequences", "steps", "versions", "lags", "columns", "skipped")
        },
        "repaired": dict(repaired),
        "files_left_out": [
            {"path": r["path"], "status": r["status"], "reason": "; ".join(json.loads(r["notes"] or "[]"))}
            for r in sources
            if r["status"] in ("refused", "copy")
        ],
        "notes": [note if len(paths) == 1 else f"{note} ({len(paths)} files)" for note, paths in notes.items()]
        + _gaps(facts, bins),
    }


def _gaps(facts: Mapping[str, Any], bins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which counted tokens stand outside a breakdown, and why."""
    notes = []
    unknown = facts["lags"].get("unknown", 0)
    if unknown and len(facts["lags"]) > 1:
        notes.append(
            f"{unknown:,} counted tokens have no known lag: their sequence spans weight versions and the log does not "
            "say at which token they changed, so they stand in a group of their own"
        )
    if bins and (without := facts["n_counted"] - sum(b["n"] for b in bins)):
        notes.append(f"{without:,} counted tokens have no entropy and are in no entropy bin")
    return notes


def _metrics(result: Result | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {row["metric"]: {"value": row["value"], "se": row["se"], "n": row["n"]} for row in result.rows()}


def _quantiles(result: Result | None) -> dict[str, Any]:
    # Exact quantiles have no error by sequences: they are read off, not averaged.
    return (
        {} if result is None else {r["metric"]: {"value": r["value"], "se": None, "n": r["n"]} for r in result.rows()}
    )


def _grouped_metrics(result: Result | None, key: str) -> list[dict[str, Any]]:
    if result is None:
        return []
    groups: dict[Any, dict[str, Any]] = {}
    for row in result.rows():
        group = groups.setdefault(
            row[key], {key: row[key], "n_tokens": row["n_tokens"], "n_sequences": row["n_sequences"], "metrics": {}}
        )
        group["metrics"][row["metric"]] = {"value": row["value"], "se": row["se"], "n": row["n"]}
    return list(groups.values())


def _entropy_bins(bins: Result | None, by_lag: Result | None) -> list[dict[str, Any]]:
    if bins is None:
        return []
    cells: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in by_lag.rows() if by_lag is not None else ():
        cell = {k: row[k] for k in ("lag", "n", "n_sequences", "mean_sq_delta")}
        cells[row["entropy_bin"]].append({**cell, "se_mean_sq_delta": row["mean_sq_delta_se"]})
    same = (
        "lo", "hi", "n", "n_sequences", "mean_entropy", "mean_abs_delta", "mean_sq_delta",
        "sq_delta_over_entropy", "mean_scaled_sq",
    )  # fmt: skip
    return [
        {
            "_bin": row["entropy_bin"],
            **{k: row[k] for k in same},
            "se_mean_sq_delta": row["mean_sq_delta_se"],
            "quantiles": {name: row[name] for name in QUANTILES},
            "exceedances": {f"{r:g}": row[f"p_ratio_beyond_{r:.12g}"] for r in RATIO_BOUNDS},
            "small": row["small"],
            "by_lag": cells[row["entropy_bin"]],
            "mode": {"n": row["n"] - row["n_off_mode"], "mean_sq_delta": row["mode_mean_sq_delta"]},
            "off_mode": {"n": row["n_off_mode"], "mean_sq_delta": row["off_mode_mean_sq_delta"]},
        }
        for row in bins.rows()
    ]


def _rules(rules: Sequence[Rule], results: Mapping[str, Result], bin_order: Sequence[int]) -> list[dict[str, Any]]:
    if "rules" not in results:
        return []
    by = {by: results[f"rules_by_{by}"] for by in comparison.BREAKDOWNS if f"rules_by_{by}" in results}
    return comparison.rule_rows(rules, results["rules"], by, results.get("rule_errors"), bin_order)


def _reproduced(store: Store, present: frozenset[str]) -> list[dict[str, Any]]:
    if not present >= _PAIR | {"trainer_keep"}:
        return []
    framework = next((row["trainer"] for row in store.rows("select trainer from runs")), None)
    return [found.to_json() for found in reproductions(store, present, framework)]


def _unsplit(results: Mapping[str, Result], facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what a statistic found that it cannot compute, though its columns are there."""
    entries = []
    study = results.get("event_study")
    if study is not None and not len(study) and facts["n_sequences_with_switch"] is not None:
        entries.append(_reason("event study around version switches", study.notes[0]))
    split = results.get("decomposition")
    if split is not None and split.parameters["method"] == "none":
        entries.append(_reason("noise against exploration", split.notes[-1]))
    return entries


def _reason(what: str, note: str) -> dict[str, str]:
    why, _, how = note.removeprefix("not computed: ").partition("; ")
    return {"what": what, "why": why, "how_to_get_it": how or why}


def _not_computed(
    store: Store, rules: Sequence[Rule], missing: Mapping[str, frozenset[str]], present: frozenset[str]
) -> list[dict[str, str]]:
    runs = store.rows("select adapter from runs")
    reader = adapters().get(runs[0]["adapter"]) if runs else None
    hints = reader.hints if reader else {}
    wanted = [*_WHAT, *((f"mask rule {r.key}", missing[r.label]) for r in rules if r.label in missing)]
    by_lack: dict[frozenset[str], list[str]] = defaultdict(list)
    for what, needs in wanted:
        if lacking := needs - present:
            by_lack[lacking].append(what)
    entries = []
    for lacking, whats in by_lack.items():
        how = [hints[c] for c in sorted(lacking) if c in hints] or [how_to_get(lacking)]
        entries.append(
            {
                "what": ", ".join(whats),
                "why": f"this log has no {', '.join(sorted(lacking))}",
                "how_to_get_it": "; ".join(dict.fromkeys(how)),
            }
        )
    return entries
