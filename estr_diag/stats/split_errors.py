"""Noise and exploration of a whole log as numbers with standard errors, to be compared between logs."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from estr_diag.result import Result
from estr_diag.stats.contrast import METHODS, Method, Split, divide
from estr_diag.stats.decomposition import Decomposition
from estr_diag.stats.split_log import SplitLog, spread
from estr_diag.store.database import Store
from estr_diag.store.engine import run

UNITS = {"noise_share": "share", "noise": "nat^2", "exploration": "nat^2"}
"""What is compared -> its unit."""


class SplitErrors(Decomposition):
    """Noise share, noise and exploration over the whole log, each with a standard error by sequence.

    How to read it: the three numbers of the first row of `NoiseShare`, whose interval is of the share alone. The error is
    the spread over the same bootstrap replicates. `n` and `n_sequences` are what the noise is estimated from: by a
    contrast, the tokens of lag 0 alone. Empty where the log cannot be split; the notes say why.

    Parameters are those of `Decomposition`; with the same ones it shows the same split.
    """

    name: ClassVar[str] = "split_errors"

    def finish(self, result: Result) -> Result:
        """Add up bins and lags, in the log and in each replicate."""
        sums = SplitLog.of(result.table, self.method, self.by_position, self.replicates, self.seed)
        rows: list[dict[str, object]] = []
        if sums.method != "none" and sums.replicates is not None:
            lags = list(range(len(sums.lags)))
            point, drawn = _numbers(sums.point.pooled(lags)), _numbers(sums.replicates.pooled(lags))
            for name, values in point.items():
                se, low, high = (float(x[0, 0]) for x in spread(drawn[name]))
                rows.append(
                    {"quantity": name, "value": float(values[0, 0, 0]), "se": se, "ci_low": low, "ci_high": high}
                )
                rows[-1] |= {"n": int(sums.point.pooled(lags).n_noise[0, 0, 0]), "n_sequences": _behind(result, sums)}
        table = pa.Table.from_pylist(rows, schema=_SCHEMA)
        parameters = {"method": sums.method, "by_position": sums.by_position}
        return Result(self.name, table, parameters, result.provenance, sums.notes)


def same_split(a: Store, b: Store, first: SplitErrors, found: tuple[Result, Result]) -> tuple[Result, Result, str]:
    """Return the split of two logs by one method, and what had to be given up for it.

    Two methods measure different things: what the contrast calls noise holds whatever else differs at lag 0.

    Parameters
    ----------
    first
        What was computed.
    found
        Its results on `a` and `b`, each by the best method that the log allows.
    """
    methods: list[Method] = [r.parameters["method"] for r in found]
    inside = [bool(r.parameters["by_position"]) for r in found]
    if "none" in methods or (methods[0] == methods[1] and inside[0] == inside[1]):
        return (*found, "")
    weaker = max(methods, key=METHODS.index)
    statistic = SplitErrors(first.grid, weaker, all(inside), first.replicates, first.seed)
    again = [run(store, {"it": statistic}).results["it"] for store in (a, b)]
    where = "at equal position" if all(inside) else "without regard to position"
    said = f"noise and exploration are split by {weaker.replace('_', ' ')} {where}, which both sides allow"
    return again[0], again[1], said


def _numbers(split: Split) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    return {
        "noise_share": divide(split.noise, split.total),
        "noise": split.noise,
        "exploration": split.exploration,
    }


def _behind(result: Result, sums: SplitLog) -> int:
    """Count the sequences that the noise is estimated from (pools of them, in a log of more than 4096)."""
    clusters, lags = result.table["cluster"], result.table["lag"]
    used = pc.equal(lags, 0) if sums.method == "lag_contrast" else pc.is_valid(clusters)
    return int(pc.count_distinct(clusters.filter(used)).as_py())


_NUMBERS = ("value", "se", "ci_low", "ci_high")
_SCHEMA = pa.schema(
    [
        ("quantity", pa.string()),
        *((name, pa.float64()) for name in _NUMBERS),
        ("n", pa.int64()),
        ("n_sequences", pa.int64()),
    ]
)
