"""What ``estr-diag sweep`` was asked for, done in order."""

from __future__ import annotations

from dataclasses import dataclass

from estr_diag.errors import UsageError
from estr_diag.log import Log
from estr_diag.report.sweep_page import SweepDocument, document
from estr_diag.rules.base import Rule
from estr_diag.rules.thresholds import Threshold, equal_share
from estr_diag.stats.grid import fitting_grid


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command."""

    rule: Rule
    parameter: str | None
    grid: str | None
    keep: float | None
    match: tuple[Rule, ...] | None
    drop_lag0: float | None
    families: tuple[Rule, ...] | None
    bins: str | None


def run(log: Log, asked: Asked) -> SweepDocument:
    """Sweep, find the thresholds that were asked for, and bring families to one share."""
    curve = log.sweep(asked.rule, asked.parameter, asked.grid, asked.bins)
    thresholds: list[tuple[str, Threshold]] = []
    share = asked.keep
    if asked.match is not None:
        if share is not None or len(asked.match) != 1:
            raise UsageError("--match takes one rule, and not --keep beside it")
        share = log.compare(asked.match).kept.rows()[0]["kept_share"]
        if share is None or not share > 0:
            raise UsageError(f"--match: {asked.match[0].label} keeps nothing on this log")
    if share is not None:
        why = f"as many tokens as {asked.match[0].label}" if asked.match else f"keep {share:.4g} of the tokens"
        thresholds.append((why, log.threshold(asked.rule, keep=share, parameter=asked.parameter)))
    if asked.drop_lag0 is not None:
        why = f"drop {asked.drop_lag0:.4g} of the lag-0 tokens"
        thresholds.append((why, log.threshold(asked.rule, drop_lag0=asked.drop_lag0, parameter=asked.parameter)))
    families = None
    if asked.families is not None:
        if share is None:
            raise UsageError("--families needs the share to compare at: --keep 0.99, or --match RULE")
        grid = fitting_grid(log.store, log.store.present(), asked.bins)
        families = equal_share(log.store, asked.families, share, grid)
    return document(curve, thresholds, families, log.source)
