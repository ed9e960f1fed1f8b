"""The two errors of a mask: noise admitted and exploration masked, by every method that the log allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from estr_diag.expressions import POSITION, POSITION_BUCKET
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.decisions import KEPT, UNDECIDED, Decisions, needs
from estr_diag.rules.error_table import EXACT_SUMS, NUMBERS, ErrorTable, pooled
from estr_diag.stats.bootstrap import REPLICATES, SEED
from estr_diag.stats.clusters import SEQUENCE_KEY
from estr_diag.stats.grid import EntropyGrid
from estr_diag.store.engine import Request

_VERSIONS = frozenset({"policy_version", "trainer_version"})


@dataclass(frozen=True, slots=True)
class MaskErrors:
    """Which share of the engine noise a rule lets through, and which share of the exploration it removes.

    How to read it: a good mask has both small. `noise_admitted` is the share of the noise's second moment on
    kept tokens; keeping everything has 1 and 0. `exploration_masked` is the share of the exploration's second
    moment on masked tokens, `exploration_masked_tokens` the share of tokens of lag > 0 that is masked beyond
    what the mask rate of lag-0 tokens predicts. A rule that ignores what it masks has noise admitted = kept
    share = 1 - exploration masked. Where the exploration is not above 0 beyond sampling error, the share
    of it that is masked cannot be told and is null.

    Parameters
    ----------
    rules
        What to judge.
    grid
        Entropy bins, inside which the contrast is formed; None for a log without entropy, which has no contrast.
    replicates, seed
        Of the cluster bootstrap.

    Notes
    -----
    Exact: sum over kept of xi^2 / sum of xi^2, and sum over masked of d^2 / sum of d^2. Lag contrast: per bin
    (and position bucket, where lag-0 tokens stand at most positions), from lag-0 tokens, whose delta is pure noise, weighted to the whole log's bin counts; and for tokens of lag > 0,
    what is masked beyond the lag-0 rate. A rule acts on delta, so noise at lag k is masked more often than at lag 0, and a
    masked token of lag k loses its noise too: on simulated logs with as much exploration as noise the contrast gave
    0.96 to 1.00 where 0.88 of the noise was admitted, and 0.48 to 0.94 where 0.40 to 0.82 of the exploration was
    masked. Read it as an upper estimate, and compare rules by it. Undecided tokens take no part. `coverage` is the share of the decided tokens
    on which the estimate rests (logp_replay present; in a bin that has lag-0 tokens).
    """

    rules: tuple[Rule, ...]
    grid: EntropyGrid | None
    replicates: int = REPLICATES // 2
    seed: int = SEED
    name: ClassVar[str] = "mask_errors"

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the rules, and the entropy that the bins are of."""
        return needs(self.rules) | (frozenset({"entropy"}) if self.grid is not None else frozenset())

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums by sequence, bin, lag and decision."""
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, POSITION: POSITION_BUCKET}
        if self.grid is not None:
            keys["entropy_bin"] = self.grid.sql()
        if present >= _VERSIONS:
            keys["lag"] = "lag"
        measures = ("n", "sum_delta2", *(EXACT_SUMS if "logp_replay" in present else ()))
        return (Decisions.of(self.rules, present).request(keys, measures, apart=POSITION),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return sums by pool of sequences, bin, moved or not, and decision."""
        decisions = Decisions.of(self.rules, present)
        table = scans[decisions.scan(POSITION)]
        return pooled(table, decisions.packed, ("n", "sum_delta2"), present, binned=self.grid is not None)

    def finish(self, result: Result) -> Result:
        """Form each rule's errors by each method, with intervals from whole sequences."""
        table = ErrorTable.of(result.table)
        kept, undecided = (result.table[name].to_numpy() for name in (KEPT, UNDECIDED))
        rows = []
        for method in table.methods:
            for i, rule in enumerate(self.rules):
                found = table.errors(
                    (kept >> i & 1) == 1, (undecided >> i & 1) == 0, method, replicates=self.replicates, seed=self.seed
                )
                rows.append({"rule": rule.label, "method": method, **found})
        parameters = {"rules": [r.label for r in self.rules], "replicates": self.replicates, "seed": self.seed}
        return Result(
            self.name, pa.Table.from_pylist(rows, schema=_SCHEMA), parameters, result.provenance, tuple(table.notes)
        )


_SCHEMA = pa.schema(
    [("rule", pa.string()), ("method", pa.string())]
    + [(f"{name}{end}", pa.float64()) for name in NUMBERS for end in ("", "_low", "_high")]
    + [("coverage", pa.float64())]
)
