"""How old the weights were that sampled the log: lag, intra, inter, and statistics by version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow.compute as pc

from estr_diag.result import Result
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.store.engine import LOG_SEQUENCES, Request, how_to_get

_VERSIONS = frozenset({"policy_version", "trainer_version"})

SEQUENCE_QUANTITIES: dict[str, str] = {
    "intra": "version_last - version_first",
    "inter": "trainer_version - version_last",
}
"""Staleness of a sequence (Zhao et al., arXiv 2607.22186): within it, and between its end and its use."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Distributions of lag over tokens, and of intra and inter over sequences.

    How to read it: `lag` = v_target - v_token is what makes a token off-policy; it is the sum of what passed
    while its sequence was sampled (at most `intra` = v_last - v_first) and until it was used (`inter` =
    v_target - v_last). `intra` above 0 means that weights changed inside sequences: see the event study.
    Negative values mean that two clocks were mixed up. Numbers count what `runs.version_unit` says.

    Notes
    -----
    Long table: quantity, value (null where a version is not known), n, share of all. `lag` counts counted
    tokens; `intra` and `inter` count all sequences and need versions by sequence only. A quantity without a
    single known value is left out, and the notes say why. E[delta^2] by lag is in ``consistency`` by lag.
    """

    name: ClassVar[str] = "staleness"

    @property
    def needs(self) -> frozenset[str]:
        """Nothing: what a log lacks is left out with a note."""
        return frozenset()

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for tokens by lag, and for sequences by intra and inter."""
        keys = {name: name for name in SEQUENCE_QUANTITIES}
        listed = ", ".join(f"{sql} as {name}" for name, sql in SEQUENCE_QUANTITIES.items())
        sequences = Request("staleness", keys, ("n",), f"select {listed} from {LOG_SEQUENCES}")
        if not present >= _VERSIONS:
            return (sequences,)
        return (sequences, Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY, "lag": "lag"}, ("n",)))

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up to one row a value."""
        parts = dict.fromkeys(SEQUENCE_QUANTITIES, scans["staleness"])
        if present >= _VERSIONS:
            parts = {"lag": scans["sums"], **parts}
        union = "\n    union all\n    ".join(
            f"select {i} as place, '{name}' as quantity, {name}::integer as value, sum(n)::bigint as n"
            f" from {table} group by all"
            for i, (name, table) in enumerate(parts.items())
        )
        return f"""
with counted as (
    {union}
)
select quantity, value, n, n / sum(n) over (partition by quantity) as share
from counted
qualify count(value) over (partition by quantity) > 0
order by place, value nulls last"""

    def finish(self, result: Result) -> Result:
        """Say which quantities are not there."""
        there = set(pc.unique(result.table["quantity"]).to_pylist())
        notes = tuple(
            f"{name} not computed: no {of} of this log has both versions; {how_to_get(_VERSIONS)}"
            for name, of in (("lag", "counted token"), ("intra", "sequence"), ("inter", "sequence"))
            if name not in there
        )
        return Result(self.name, result.table, result.parameters, result.provenance, notes)


@dataclass(frozen=True, slots=True)
class Versions:
    """Share of the tokens by the version that sampled them, and the gap of the engines by version.

    How to read it: shares say how the log is spread over weights; a version whose `mean_abs_delta` stands out
    from its neighbours by many standard errors was loaded wrongly into the inference engine, or is stale
    (compare with ``consistency`` by lag first, since older versions have larger gaps by right).

    Notes
    -----
    One row a version, null for counted tokens whose version is not known. Errors are by sequence.
    """

    name: ClassVar[str] = "versions"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: the version and both engines."""
        return frozenset({"policy_version", "logp_infer", "logp_train"})

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence and version."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, "policy_version": "policy_version"}
        return (Request("sums", keys, ("n", "sum_abs_delta", "sum_delta2")),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Roll up by version."""
        means = {"mean_abs_delta": ("sum_abs_delta", "n"), "mean_sq_delta": ("sum_delta2", "n")}
        return f"""
select policy_version, n, n_sequences, n / sum(n) over () as share, * exclude (policy_version, n, n_sequences)
from ({cluster_means(scans["sums"], ["policy_version"], means)})
order by policy_version nulls last"""

    def finish(self, result: Result) -> Result:
        """Leave the table as it is."""
        return result
