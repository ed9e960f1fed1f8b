"""The frameworks' own masks and weights, token by token: 199 rules that 15 code bases computed on one log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from estr_diag.rules import LIBRARY, Rule
from estr_diag.rules.decisions import Decisions
from estr_diag.store.database import Store
from estr_diag.store.engine import relation
from tests.framework_rules import OWN, SPECS, TOLERANCE, is_loss, rule_of
from tests.logs import store_of
from tests.test_consistency import oracle_arrays

MASKS = Path(__file__).parent / "data" / "oracle" / "synthetic.masks.float64.parquet"
RECORDED = [name.removeprefix("keep/") for name in pq.read_schema(MASKS).names if name.startswith("keep/")]
ORDER = [("seq_id", "ascending"), ("pos", "ascending")]


@dataclass
class Recorded:
    store: Store
    present: frozenset[str]
    masks: pa.Table
    log: pa.Table
    counted: NDArray[np.bool_]

    def of(self, column: str) -> NDArray[np.float64]:
        values = np.array([np.nan if v is None else float(v) for v in self.masks[column].to_pylist()])
        return values[self.counted]

    def ours(self, rule: Rule) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return our decision (NaN where undecided) and weight of every counted token."""
        decisions = Decisions.of((rule,), self.present)
        weight = decisions.weights[0]
        value = "1e0" if weight is None else decisions.plan.decision(weight, rule.dtype)
        rows = self.store.rows(
            f"{relation(self.present, decisions.plan.view, 'given')} select ({decisions.keep(0)})::double as keep, "
            f"({value})::double as weight from viewed order by seq_id, pos"
        )
        keep = np.array([np.nan if row["keep"] is None else row["keep"] for row in rows])
        return keep, np.array([np.nan if row["weight"] is None else row["weight"] for row in rows])


@pytest.fixture(scope="module")
def recorded(data: Path) -> Iterator[Recorded]:
    log = pq.read_table(data / "oracle" / "synthetic.parquet").sort_by(ORDER)
    arrays = oracle_arrays(data)
    with store_of(arrays) as store:
        # Boundary cases are planted in double precision (a ratio of exactly 0.5), and a log stores
        # float32 as trainers do: the rules are held against the values that the frameworks were given.
        frame = pa.table(
            {
                **arrays,
                "logp_update": log["logp_train"],
                "pos": log["pos"],
                "turn": log["turn"],
                "step": pa.array(np.zeros(len(log))),
            }
        )
        store.connection.register("frame", frame)
        store.connection.execute("create temp table given as select * from frame")
        present = store.present() | {"logp_update", "turn", "step"}
        counted = np.array(log["loss_mask"].to_pylist())
        assert counted.sum() == 1521
        yield Recorded(store, present, pq.read_table(MASKS).sort_by(ORDER), log, counted)


def test_every_recorded_rule_is_named() -> None:
    assert len(RECORDED) == 199
    assert set(RECORDED) == set(SPECS) | set(OWN)


@pytest.mark.parametrize("name", RECORDED)
def test_keeps_and_weighs_exactly_as_the_frameworks_code(recorded: Recorded, name: str) -> None:
    keep, weight = recorded.ours(rule_of(name))
    expected = recorded.of(f"keep/{name}")
    assert not np.isnan(keep).any()
    advantage = np.array(recorded.log["advantage"].to_pylist())[recorded.counted]
    told = advantage != 0 if is_loss(name) else np.ones(len(keep), dtype=bool)
    if "top_entropy" in name:
        # Recorded with a float32 quantile held against float64 entropies: the token at the quantile falls out.
        entropy = np.array(recorded.log["entropy"].to_pylist())[recorded.counted]
        level = 1 - float(name.partition("[")[2].rstrip("]"))
        told &= entropy != np.quantile(entropy, level)
    if "m2po" in name:
        # The frameworks' sort is not stable: of equal values at the cut any may go.
        delta = np.array(recorded.log["logp_prox"].to_pylist()) - np.array(recorded.log["logp_infer"].to_pylist())
        square = delta[recorded.counted] ** 2
        np.testing.assert_array_equal(np.sort(square[keep == 0]), np.sort(square[expected == 0]))
    else:
        np.testing.assert_array_equal(keep[told], expected[told])
    if f"weight/{name}" in recorded.masks.column_names:
        theirs = recorded.of(f"weight/{name}")
        at = told & (keep == 1) & np.isfinite(theirs)
        tolerance = next((t for start, (t, _) in TOLERANCE.items() if name.startswith(start)), 1e-9)
        np.testing.assert_allclose(weight[at], theirs[at], rtol=tolerance, atol=1e-12)


def test_presets_that_say_they_were_checked_are_in_this_file() -> None:
    named = {rule_of(name).key for name in RECORDED} | {part.key for name in RECORDED for part in rule_of(name).parts}
    claimed = {key for key, rule in LIBRARY.items() if rule.checked}
    assert claimed <= named, f"not held against any recording: {sorted(claimed - named)}"


def test_the_same_string_means_mirrored_bands(recorded: Recorded) -> None:
    """``0.99_1.02`` keeps 908 tokens in today's verl and 654 in seven other code bases."""
    today, _ = recorded.ours(rule_of("verl.rs.seq_mean_k1[0.99_1.02]"))
    natural, _ = recorded.ours(rule_of("verl2025.rs.geometric[0.99,1.02]"))
    assert (today.sum(), natural.sum()) == (908, 654)
