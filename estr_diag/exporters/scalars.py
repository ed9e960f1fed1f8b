"""Scalars a training step: what a dashboard shows of a log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from estr_diag.errors import UsageError
from estr_diag.log import Log
from estr_diag.rules import DEFAULT_RULES

Scalar = tuple[int, str, float]
"""Step, name, value."""

PREFIX = "estr_diag/"

METRICS = (
    "mean_abs_delta", "rms_delta", "kl_k3", "mult_prob_error", "prob_pearson", "logp_pearson", "ess_token",
    "ess_sequence",
)  # fmt: skip
"""Consistency metrics that are exported, under their own names; all need both engines' log-probs, and only those."""


def collect(log: Log) -> list[Scalar]:
    """Return the main metrics and the masked share of the default rules, by step.

    A metric's standard error has its name and ``_se``. What has no value at a step has no entry there, since a
    tracker draws any number that stands in for one.

    Raises
    ------
    UsageError
        No sequence of the log has a step.
    MissingColumnError
        The log holds one engine only.
    """
    found: list[tuple[int | None, str, float | None]] = []
    # First, because it names the columns that are missing.
    masked = log.compare()
    names = {rule.label: f"masked_share_{rule.name}" for rule in masked.rules if rule.name != "none"}
    for row in log.consistency(by="step").rows():
        if row["metric"] in METRICS:
            found += [(row["step"], row["metric"], row["value"]), (row["step"], f"{row['metric']}_se", row["se"])]
    for row in masked.by["step"].rows():
        if name := names.get(row["rule"]):
            # Shares are of the decided tokens, so that what is masked has the error of what is kept.
            found += [(row["step"], name, row["masked_share"]), (row["step"], f"{name}_se", row["kept_share_se"])]
    scalars = [
        (step, PREFIX + name, value)
        for step, name, value in found
        if step is not None and value is not None and math.isfinite(value)
    ]
    if not scalars:
        raise UsageError(
            f"no scalars by step in {log.source}: found {stepless(log)} sequences without a step, and expected counted "
            "tokens in sequences with one. Name the file or folder after the step, or ingest with --step N"
        )
    return sorted(scalars)


def by_step(scalars: Sequence[Scalar]) -> Iterator[tuple[int, dict[str, float]]]:
    """Return each step with its values, in order."""
    for step, group in groupby(sorted(scalars), key=lambda scalar: scalar[0]):
        yield step, {name: value for _, name, value in group}


def stepless(log: Log) -> int:
    """Return how many sequences have no step."""
    return int(log.store.rows("select count(*) as n from sequences where step is null")[0]["n"])


def left_out(log: Log) -> list[str]:
    """Say what a reader of the curves will not find in them, and why."""
    said = []
    if n := stepless(log):
        said.append(f"{n} sequences without a step are left out")
    present = log.store.present()
    for rule in DEFAULT_RULES:
        if lacking := rule.lacking(present):
            said.append(f"masked_share_{rule.name} is left out: this log has no {', '.join(sorted(lacking))}")
    return said
