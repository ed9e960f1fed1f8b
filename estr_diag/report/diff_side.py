"""One side of a difference: everything that is computed of it, with errors by sequence and by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.replay import Replay
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.coverage import coverage
from estr_diag.stats.entropy_bins import EntropyBins
from estr_diag.stats.grid import ValueGrid
from estr_diag.stats.mean_bases import MeanBases, averaged, base
from estr_diag.stats.metrics import METRICS
from estr_diag.stats.split_errors import SplitErrors, same_split
from estr_diag.stats.two_samples import MIN_STEPS, cluster_error
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, run
from estr_diag.store.window import StepClusters

Rows = dict[Any, dict[str, Any]]
PAIR = frozenset({"logp_infer", "logp_train"})


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: an open store, what the user calls it, and the steps that it is a window of."""

    store: Store
    source: str
    window: str | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """A side with its results.

    Attributes
    ----------
    facts
        As `coverage` gives them.
    run
        Facts of the run.
    n_steps
        Distinct steps.
    results, by_step
        Results, and those with a step in place of a sequence.
    """

    side: Side
    present: frozenset[str]
    facts: dict[str, Any]
    run: dict[str, Any]
    n_steps: int
    results: dict[str, Result] = field(default_factory=dict)
    by_step: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, side: Side) -> Computed:
        """Read what is known of a side before anything is computed."""
        rows = side.store.rows("select * from runs")
        facts = {k: v for k, v in rows[0].items() if k != "run"} if rows else {}
        steps = side.store.rows("select count(distinct step) as n from sequences")[0]["n"]
        return cls(side, side.store.present(), coverage(side.store), facts, int(steps))

    def metrics(self) -> Rows:
        """Return the consistency metrics, each mean with what it rests on and its error by step."""
        found = _table(self.results, "overall", "metric")
        bases, step_bases = (_table(r, "bases", "base") for r in (self.results, self.by_step))
        token_means = _table(self.by_step, "overall", "metric")
        grouped: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.results["each_step"].rows() if "each_step" in self.results else ():
            if row["step"] is not None and row["value"] is not None:
                grouped[row["metric"]].append(row)
        for metric in METRICS:
            if metric.name not in found or not averaged(metric):
                continue
            row, behind = found[metric.name], bases[base(metric)]
            row |= {"n": behind["n_sequences"] if metric.per_sequence else behind["n"]}
            row |= {"n_sequences": behind["n_sequences"]}
            if metric.per_sequence:
                row |= _over_steps([(r["value"], r["n_sequences"]) for r in grouped[metric.name]])
            elif metric.name in token_means:
                steps = step_bases[base(metric)]["n_sequences"]
                row |= {"se_steps": token_means[metric.name]["se"], "n_steps": steps}
        return found

    def bins(self) -> Rows:
        """Return E[delta^2] by entropy bin."""
        found = _table(self.results, "bins", "entropy_bin")
        for number, row in _table(self.by_step, "bins", "entropy_bin").items():
            found[number] |= {"se_steps": row["mean_sq_delta_se"], "n_steps": row["n_sequences"]}
        return found

    def split(self) -> Rows:
        """Return noise and exploration."""
        found = _table(self.results, "split", "quantity")
        for name, row in _table(self.by_step, "split", "quantity").items():
            found[name] |= {"se_steps": row["se"], "n_steps": row["n_sequences"]}
        return found

    def rules(self) -> Rows:
        """Return the masked share of each rule, over the tokens that it decides."""
        found = _table(self.results, "rules", "rule")
        grouped: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in self.results["rules_by_step"].rows() if "rules_by_step" in self.results else ():
            if row["step"] is not None and row["masked_share"] is not None:
                grouped[row["rule"]].append((row["masked_share"], row["n"] - row["undecided_tokens"]))
        for name, row in found.items():
            row |= {"n": row["n"] - row["undecided_tokens"], **_over_steps(grouped[name])}
        return found


def compute(sides: tuple[Computed, Computed], rules: tuple[Rule, ...], grid: ValueGrid | None) -> str:
    """Fill in the results of both sides; return what had to be given up to split them alike."""
    steps = min(c.n_steps for c in sides) >= MIN_STEPS
    for c in sides:
        c.results.update(run(c.side.store, _statistics(rules, grid, c.present, steps)).results)
    note = ""
    a, b = sides
    if grid is not None and "split" in a.results and "split" in b.results:
        found = (a.results["split"], b.results["split"])
        a.results["split"], b.results["split"], note = same_split(a.side.store, b.side.store, SplitErrors(grid), found)
    if steps:
        for c in sides:
            with StepClusters(c.side.store) as clusters:
                c.by_step.update(run(clusters, _by_step(grid, c)).results)
    return note


def _statistics(
    rules: tuple[Rule, ...], grid: ValueGrid | None, present: frozenset[str], steps: bool
) -> dict[str, Statistic]:
    wanted: dict[str, Statistic] = {"overall": Consistency(), "bases": MeanBases()}
    if grid is not None and present >= PAIR:
        wanted |= {"bins": EntropyBins(grid), "split": SplitErrors(grid)}
    if rules:
        wanted["rules"] = Replay(rules)
    if steps:
        wanted["each_step"] = Consistency("step")
        if rules:
            wanted["rules_by_step"] = Replay(rules, by="step")
    return wanted


def _by_step(grid: ValueGrid | None, computed: Computed) -> dict[str, Statistic]:
    wanted: dict[str, Statistic] = {"overall": Consistency(), "bases": MeanBases()}
    if grid is not None and computed.present >= PAIR:
        wanted["bins"] = EntropyBins(grid)
        # By the method that was taken, and not by one that fewer clusters would choose.
        taken: Mapping[str, Any] = computed.results["split"].parameters
        wanted["split"] = SplitErrors(grid, taken["method"], taken["by_position"])
    return wanted


def _over_steps(found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {"se_steps": cluster_error([v for v, _ in found], [n for _, n in found]), "n_steps": len(found)}


def _table(results: Mapping[str, Result], name: str, key: str) -> Rows:
    """Return the rows of a result by one of their columns; none where it could not be computed."""
    return {row[key]: row for row in results[name].rows()} if name in results else {}
