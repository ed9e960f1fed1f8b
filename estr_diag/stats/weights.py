"""What importance weighting would leave of the log: effective sample sizes and Pareto k-hat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from estr_diag.expressions import tok
from estr_diag.result import Result
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.stats.metrics import BY_NAME
from estr_diag.stats.psis import GOOD, USABLE, Tail, khat
from estr_diag.store.database import Store
from estr_diag.store.engine import Request

LOW_ESS = 0.3
"""Share of the sample below which verl's documentation calls an effective sample size bad."""

_PAIR = frozenset({"logp_infer", "logp_train"})
_ESS = ("ess_token", "ess_sequence")


def token_tail(store: Store, present: frozenset[str]) -> Tail:
    """Return the largest log ratios of counted tokens, as many as Pareto k-hat needs: about 3 sqrt(n).

    One count and one scan of two columns that keeps a heap; no ratio but these leaves the database.
    """
    if not present >= _PAIR:
        return Tail(0, ())
    n = int(store.rows(f"with {tok(present)} select count(delta) as n from tok")[0]["n"])
    query = f"with {tok(present)} select delta from tok order by delta desc limit {Tail.needed(n)}"
    return Tail(n, tuple(sorted(row["delta"] for row in store.rows(query))))


@dataclass(frozen=True, slots=True)
class Weights:
    """Effective sample size and Pareto k-hat, of token ratios and of sequence ratios.

    How to read it: `ess_*` is the share of the sample that importance weights leave; below 0.3 most of the batch is
    wasted. `khat_*` is the shape of the ratios' tail: below 0.5 good, below 0.7 usable, at or above 0.7 a few
    ratios rule every weighted mean and the ESS itself cannot be trusted. Ratios are clamped at exp(+-20) in
    the ESS, as trainers do, and never in k-hat. Sequence ratios are products over all tokens, so they
    degrade with length even for healthy engines (see `WeightsByLength`).

    Parameters
    ----------
    tail
        Of the token log ratios, from `token_tail`.
    """

    tail: Tail
    name: ClassVar[str] = "weights"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines."""
        return _PAIR

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for the sums of the ratios, by sequence."""
        measures = dict.fromkeys(m for name in _ESS for m in BY_NAME[name].measures)
        return (Request("sums", {SEQUENCE_KEY: SEQUENCE_KEY}, ("n", *(m for m in measures if m != "n"))),)

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row, with the log ratio of every sequence as a list: one number a sequence."""
        extra = {name: BY_NAME[name].over_group() for name in _ESS}
        extra["log_ratios"] = "list(sum_delta order by sum_delta) filter (where n > 0)"
        return cluster_means(scans["sums"], [], {}, extra)

    def finish(self, result: Result) -> Result:
        """Fit the tails, and say what each number means."""
        row = result.table.to_pylist()[0]
        tokens, sequences = int(row["n"]), int(row["n_sequences"])
        rows = [_ess("ess_token", row, tokens), _ess("ess_sequence", row, sequences)]
        for name, tail in (("khat_token", self.tail), ("khat_sequence", Tail.of(row["log_ratios"] or []))):
            value, reading = khat(tail)
            rows.append({"quantity": name, "value": value, "n": tail.n, "reading": reading})
        schema = [("quantity", pa.string()), ("value", pa.float64()), ("n", pa.int64()), ("reading", pa.string())]
        notes = (
            "k-hat is fitted by arviz-stats to the 3 sqrt(n) largest ratios, unclamped "
            f"(below {GOOD} good, below {USABLE} usable); tokens of one sequence are treated as independent draws",
        )
        table = pa.Table.from_pylist(rows, schema=pa.schema(schema))
        return Result(self.name, table, {}, result.provenance, notes)


def _ess(name: str, row: Mapping[str, Any], n: int) -> dict[str, Any]:
    value = row[name] if n else None
    if value is None:
        reading = "cannot tell: no counted tokens"
    elif n == 1:
        reading = "cannot tell: a sample of one has an ESS of 1"
    else:
        reading = f"below {LOW_ESS}: most of the sample is wasted" if value < LOW_ESS else "fine"
    return {"quantity": name, "value": value, "n": n, "reading": reading}
