"""Comparison: what several rules would do to one log, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from estr_diag.errors import MissingColumnError
from estr_diag.result import Result
from estr_diag.rules.agreement import Agreement
from estr_diag.rules.base import Rule
from estr_diag.rules.fitted import fitted
from estr_diag.rules.library import TRAINER
from estr_diag.rules.mask_errors import MaskErrors
from estr_diag.rules.replay import Replay
from estr_diag.rules.reproduction import Reproduction, reproductions
from estr_diag.stats.grid import ValueGrid
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, how_to_get, run

BREAKDOWNS = ("entropy_bin", "lag", "step", "position")
_PAIR = frozenset({"logp_infer", "logp_train"})
_VERSIONS = frozenset({"policy_version", "trainer_version"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each rule would keep, the two errors of each, and how they agree.

    Attributes
    ----------
    rules
        Those that the log allows, in order.
    kept
        One row a rule, as `Replay` gives it.
    by
        The same by entropy bin, lag, step and position, as far as the log allows.
    errors
        Noise admitted and exploration masked by method, as `MaskErrors` gives them; None without an entropy.
    agreement
        One row a pair of rules; None with a single rule.
    reproduced
        Built-in rules against the trainer's own decision, where the log has it.
    missing
        Rules that the log does not allow -> the columns that it lacks.
    notes
        What a reader must know about how rules were bound to this log.
    """

    rules: tuple[Rule, ...]
    kept: Result
    by: Mapping[str, Result] = field(default_factory=dict)
    errors: Result | None = None
    agreement: Result | None = None
    reproduced: tuple[Reproduction, ...] = ()
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    grid: ValueGrid | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values: the document that ``estr-diag compare --json`` prints."""
        bins = _bins(self.by.get("entropy_bin"))
        edges = [self.grid.bounds(b) for b in bins] if self.grid else []
        return {
            "schema": "estr-diag/compare/v1",
            "source": self.kept.provenance.get("source"),
            "entropy_bins": [{"lo": lo, "hi": hi} for lo, hi in edges],
            "rules": rule_rows(self.rules, self.kept, self.by, self.errors, bins),
            "agreement": self.agreement.rows() if self.agreement else [],
            "reproduces_trainer": [found.to_json() for found in self.reproduced],
            "not_computed": not_computed(self.missing) + self._no_errors(),
            "notes": [*self.notes, *(self.errors.notes if self.errors else ())],
        }

    def _no_errors(self) -> list[dict[str, str]]:
        what = "noise admitted and exploration masked"
        if self.errors is None:
            return [{"what": what, "why": "this log has no entropy", "how_to_get_it": how_to_get({"entropy"})}]
        if not len(self.errors):
            columns = _VERSIONS | {"logp_replay"}
            why = "the log has neither logp_replay nor tokens of lag 0"
            return [{"what": what, "why": why, "how_to_get_it": how_to_get(columns)}]
        return []

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(rule.label for rule in self.rules)}>"

    def _repr_html_(self) -> str:
        shown = (self.kept, self.errors, self.agreement)
        return "".join(result._repr_html_() for result in shown if result is not None and len(result))

    def to_pandas(self) -> Any:
        """Return the table of kept shares as a pandas frame."""
        return self.kept.to_pandas()

    def to_polars(self) -> Any:
        """Return the table of kept shares as a Polars frame."""
        return self.kept.to_polars()


def compare(
    store: Store, rules: Sequence[Rule], grid: ValueGrid | None = None, provenance: Mapping[str, Any] | None = None
) -> Comparison:
    """Replay rules on a log, all in one scan of the tokens.

    Parameters
    ----------
    store
        An open store.
    rules
        What to compare. Where the log carries the trainer's own decision it takes part as the rule ``trainer``.
    grid
        Entropy bins; None for a log without entropy.
    """
    present = store.present()
    asked = with_trainer(rules, present)
    possible, missing = allowed(asked, present)
    possible = fitted(possible, store)
    if not possible:
        lacking = frozenset().union(*missing.values())
        raise MissingColumnError("comparison of mask rules", sorted(lacking), how_to_get(lacking))
    outcome = run(store, statistics(possible, grid, present), provenance)
    results = outcome.results
    framework = next((row["trainer"] for row in store.rows("select trainer from runs")), None)
    return Comparison(
        possible, results["rules"],
        {by: results[f"rules_by_{by}"] for by in BREAKDOWNS if f"rules_by_{by}" in results},
        results.get("rule_errors"), results.get("agreement"),
        reproductions(store, present, framework) if "trainer_keep" in present else (),
        missing, grid, edge_notes(possible, store, present),
    )  # fmt: skip


def with_trainer(rules: Sequence[Rule], present: frozenset[str]) -> tuple[Rule, ...]:
    """Return the rules, and the trainer's own decision where the log has it."""
    if "trainer_keep" in present and not any(rule.name == TRAINER.name for rule in rules):
        return (*rules, TRAINER)
    return tuple(rules)


def allowed(rules: Sequence[Rule], present: frozenset[str]) -> tuple[tuple[Rule, ...], dict[str, frozenset[str]]]:
    """Return the rules that the log allows, and what the others lack."""
    lacking = {rule.label: rule.lacking(present) | (_PAIR - present) for rule in rules}
    possible = tuple(rule for rule in rules if not lacking[rule.label])
    return possible, {label: columns for label, columns in lacking.items() if columns}


def statistics(rules: tuple[Rule, ...], grid: ValueGrid | None, present: frozenset[str]) -> dict[str, Statistic]:
    """Return everything that is said about rules, to be run together with other statistics."""
    wanted: dict[str, Statistic] = {"rules": Replay(rules)}
    for by in ("step", "position"):
        wanted[f"rules_by_{by}"] = Replay(rules, by=by)
    if present >= _VERSIONS:
        wanted["rules_by_lag"] = Replay(rules, by="lag")
    if grid is not None:
        wanted["rules_by_entropy_bin"] = Replay(rules, grid, by="entropy_bin")
        wanted["rule_errors"] = MaskErrors(rules, grid)
    if len(rules) > 1:
        wanted["agreement"] = Agreement(rules)
    return wanted


def edge_notes(rules: Sequence[Rule], store: Store, present: frozenset[str]) -> tuple[str, ...]:
    """Say what the edges of the rules mean on this log."""
    notes = []
    if "logp_update" not in present:
        moved = [rule.label for rule in rules if "logp_update" in rule.needs]
        on_u = [rule.label for rule in rules if rule.edge == "U"]
        if moved:
            notes.append(
                "the log has one training-engine log-prob, so edge E (update against infer) is edge B and edge U "
                f"(update against train) shows no change: {', '.join(moved)}"
            )
        if on_u:
            notes.append(
                f"a rule on edge U keeps all that it judges by the ratio, as in the first minibatch: {', '.join(on_u)}; "
                "log logp_update to see the later ones"
            )
    current = store.rows("select 1 from runs where train_logp = 'current'")
    if current and any(rule.edge == "B" for rule in rules):
        notes.append(
            "this trainer logs the policy being optimised only (train_logp: current), so what rules on edge B see here "
            "is edge E"
        )
    return tuple(notes)


def rule_rows(
    rules: Sequence[Rule], kept: Result, by: Mapping[str, Result], errors: Result | None, bins: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one JSON object a rule.

    Parameters
    ----------
    bins
        Number of each entropy bin that is reported, in order: rows by bin carry the index into it.
    """
    groups = {name: _by_rule(by.get(name), name) for name in BREAKDOWNS}
    for rows in groups["entropy_bin"].values():
        rows[:] = [{**row, "bin": bins.index(row["entropy_bin"])} for row in rows if row["entropy_bin"] in bins]
    by_method: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in errors.rows() if errors is not None else ():
        by_method[row["rule"]].append({k: v for k, v in row.items() if k != "rule"})
    out = []
    for rule, row in zip(rules, kept.rows(), strict=True):
        best = next(iter(by_method[rule.label]), {})
        counts = (
            "n", "kept_tokens", "masked_tokens", "undecided_tokens", "kept_share", "kept_share_se", "masked_share",
            "n_sequences", "kept_sequences", "whole_sequences",
        )  # fmt: skip
        out.append(
            {
                "name": rule.key,
                "label": rule.label,
                "params": {k: float(v) for k, v in rule.parameters.items()},
                "keep": rule.keep if not rule.parts else rule.says,
                "weight": rule.weight or None,
                "edge": rule.edge,
                "denominator": rule.denominator,
                **{k: row[k] for k in counts},
                "noise_admitted": best.get("noise_admitted"),
                "exploration_masked": best.get("exploration_masked"),
                "method": best.get("method", "none"),
                "errors": by_method[rule.label],
                "kept": {
                    "mean_abs_delta": row["kept_mean_abs_delta"],
                    "mean_sq_delta": row["kept_mean_sq_delta"],
                    "kl_k3": row["kept_kl_k3"],
                    "sq_delta_share": row["kept_sq_delta_share"],
                    "advantage_share": row["kept_advantage_share"],
                    "ratio_ess": row["kept_ratio_ess"],
                },
                "weights": {"mean": row["weight_mean"], "max": row["weight_max"], "ess": row["ess"]},
                **{f"by_{name}": rows[rule.label] for name, rows in groups.items()},
            }
        )
    return out


def not_computed(missing: Mapping[str, frozenset[str]]) -> list[dict[str, str]]:
    """Return an entry for each set of columns that rules lack."""
    by_lack: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    for label, columns in missing.items():
        by_lack[columns].append(label)
    return [
        {
            "what": f"mask rule {', '.join(labels)}",
            "why": f"this log has no {', '.join(sorted(columns))}",
            "how_to_get_it": how_to_get(columns),
        }
        for columns, labels in by_lack.items()
    ]


def _bins(result: Result | None) -> list[int]:
    return sorted({row["entropy_bin"] for row in result.rows() if row["entropy_bin"] is not None}) if result else []


def _by_rule(result: Result | None, key: str) -> defaultdict[str, list[dict[str, Any]]]:
    rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result.rows() if result is not None else ():
        kept = (
            "n", "kept_tokens", "masked_tokens", "undecided_tokens", "kept_share", "n_sequences", "kept_sequences",
            "kept_advantage_share",
        )  # fmt: skip
        rows[row["rule"]].append({key: row[key], **{k: row[k] for k in kept}})
    return rows
