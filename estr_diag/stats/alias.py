"""What a framework's metric name is: our formula or its own, on which pair of log-probs, averaged how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estr_diag.expressions import Edge
from estr_diag.stats.metric import Metric

Over = Literal["T", "S", "S0", "SS", "N"]

OVER: dict[Over, str] = {
    "T": "over counted tokens of the batch",
    "S": "mean over sequences with counted tokens of the sequence's own value",
    "S0": "as S, but a sequence without counted tokens stays in the mean with a fixed value",
    "SS": "per rank or micro-batch, then averaged; computed here as one rank, where it equals T",
    "N": "sum over counted tokens, divided by their global number",
}
"""Aggregations: the same formula with another mean is another number."""

EDGE: dict[Edge, str] = {
    "B": "logp_train - logp_infer",
    "U": "logp_update - logp_train",
    "E": "logp_update - logp_infer",
}


@dataclass(frozen=True, slots=True)
class Alias:
    """A number as a framework's dashboard names it.

    Parameters
    ----------
    framework
        As its reader is called (``--format``).
    name
        As the dashboard shows it.
    metric
        Formula: an entry of `metrics`, or one that only this framework has.
    edge
        The pair that d stands for in it.
    over
        How it is averaged, see `OVER`.
    differs
        The exact difference from our metric, in words; empty when there is none.
    empty
        Value of a sequence without counted tokens (S0 only).
    executed
        Whether a test holds it equal to the value of the framework's own code.
    """

    framework: str
    name: str
    metric: Metric
    edge: Edge = "B"
    over: Over = "T"
    differs: str = ""
    empty: float = 0.0
    executed: bool = True
    also_needs: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """The name that is unique over frameworks."""
        return f"{self.framework}:{self.name}"

    @property
    def on_edge(self) -> Metric:
        """The formula over this alias's pair."""
        return self.metric.on(self.edge)

    @property
    def needs(self) -> frozenset[str]:
        """Columns without which it cannot be computed."""
        return self.on_edge.needs | self.also_needs

    def over_group(self) -> str:
        """Return the value as an aggregate over rows of sequences, of which `n_logged` says how many there are."""
        metric = self.on_edge
        if self.over not in ("S", "S0"):
            return metric.over_group()
        x = metric.over_sequence()
        missing = f"(any_value(n_logged) - count({x}))"
        if metric.aggregation == "sequence extreme":
            pick = "greatest" if metric.over_sequences == "max({x})" else "least"
            rest = f", case when {missing} > 0 then {self.empty!r} end" if self.over == "S0" else ""
            return f"{pick}({metric.over_group()}{rest})"
        if self.over == "S":
            return f"avg({x})"
        return f"(coalesce(sum({x}), 0) + {self.empty!r} * {missing}) / any_value(n_logged)"
