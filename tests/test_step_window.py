"""Windows of steps: views that are what a filtered log is, and what is said of two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estr_diag.errors import UsageError
from estr_diag.report.difference import Side, difference
from estr_diag.rules import DEFAULT_RULES
from estr_diag.store.database import Store
from estr_diag.store.window import StepClusters, Steps, StepWindow
from tests.logs import make_log, store_of
from tests.oracles import Arrays
from tests.test_diff import diff, row


def between_steps(log: Arrays, low: int, high: int) -> Arrays:
    inside = (log["step"] >= low) & (log["step"] <= high)
    return {name: values[inside] for name, values in log.items()}


def test_windows_equal_filtered_logs() -> None:
    log = make_log(20, sequences=300, steps=20, mean_length=20)
    with store_of(log) as store:
        with StepWindow(store, Steps(5, 12)) as a, StepWindow(store, Steps(14)) as b:
            windows = difference(Side(a, "log", "5:12"), Side(b, "log", "14:"), DEFAULT_RULES)
            counts = a.column_counts()
        assert store.rows("select count(*) as n from tokens")[0]["n"] == len(log["step"])
    early, late = between_steps(log, 5, 12), between_steps(log, 14, 99)
    filtered = diff(early, late)
    with store_of(early) as store:
        assert counts == store.column_counts()
    assert (windows.a.steps, windows.b.steps) == ([5, 12], [14, 24])
    assert (windows.a.n_counted, windows.a.lags) == (filtered.a.n_counted, filtered.a.lags)
    one, other = windows.model_dump(), filtered.model_dump()
    for part in ("metrics", "entropy_bins", "rules", "without_error", "facts", "only_a", "only_b"):
        assert alike(one[part], other[part]), part
    # Pools of sequences for the bootstrap go by number, and those of a window start elsewhere.
    for x, y in zip(one["split"], other["split"], strict=True):
        assert x["a"]["value"] == pytest.approx(y["a"]["value"], rel=1e-9)
        assert x["se"] == pytest.approx(y["se"], rel=0.15)


def alike(x: Any, y: Any) -> bool:
    """Equal but for the order of additions, and for what hangs on all rows together."""
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(alike(x[k], y[k]) for k in x if k not in ("p_adjusted", "verdict"))
    if isinstance(x, list):
        return len(x) == len(y) and all(alike(i, j) for i, j in zip(x, y, strict=True))
    return bool(x == pytest.approx(y, rel=1e-6, abs=1e-9)) if isinstance(x, float) and y is not None else bool(x == y)


def test_windows_that_overlap_share_sequences() -> None:
    with store_of(make_log(21, sequences=200, steps=10, mean_length=10)) as store:
        with StepWindow(store, Steps(5, 10)) as a, StepWindow(store, Steps(8, 14)) as b:
            document = difference(Side(a, "log", "5:10"), Side(b, "log", "8:14"), DEFAULT_RULES)
        both = store.rows("select count(*) as n from sequences where step between 8 and 10")[0]["n"]
        with StepWindow(store, Steps(5, 9)) as a, StepWindow(store, Steps(10, 14)) as b:
            apart = difference(Side(a, "log", "5:9"), Side(b, "log", "10:14"), DEFAULT_RULES)
    assert document.shared_sequences == both
    assert any("are in B as well" in note for note in document.notes)
    assert apart.shared_sequences == 0
    assert not any("are in B as well" in note for note in apart.notes)


def test_few_steps_are_said() -> None:
    document = diff(make_log(22, sequences=60), make_log(23, sequences=60))
    assert any("2 steps: with fewer than 5" in note for note in document.notes)
    assert row(document, "mean_abs_delta").se_steps is None


def test_a_window_of_a_window_and_of_a_store_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "run.duckdb"
    with store_of(make_log(24, sequences=80, steps=10), store=Store.create(path)) as made:
        made.publish()
    with (
        Store.open(path) as store,
        StepWindow(store, Steps(5, 12)) as outer,
        StepWindow(outer, Steps(10, 14)) as inner,
        StepClusters(inner) as clusters,
    ):
        assert {r["step"] for r in inner.rows("select distinct step from tokens")} == {10, 11, 12}
        assert {r["seq_id"] for r in clusters.rows("select distinct seq_id from tokens")} == {10, 11, 12}
        assert inner.base is store


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0:20", Steps(0, 20)),
        ("100:", Steps(100)),
        (":20", Steps(None, 20)),
        ("7", Steps(7, 7)),
        (" -1 : 3 ", Steps(-1, 3)),
    ],
)
def test_windows_are_written_with_a_colon(text: str, steps: Steps) -> None:
    assert Steps.parse(text) == steps


@pytest.mark.parametrize("text", ["", ":", "a:b", "1-2", "1:2:3", "20:0", "1.5:2"])
def test_other_windows_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="steps"):
        Steps.parse(text)


def test_an_empty_window_says_which_steps_there_are() -> None:
    with store_of(make_log(25)) as store:
        with pytest.raises(UsageError, match=r"steps 500:600 of run.duckdb hold no sequence; it has steps 5 to 6"):
            StepWindow(store, Steps(500, 600), "run.duckdb")
        # What came of it is closed, and the store is as it was.
        assert store.rows("select count(*) as n from sequences")[0]["n"] == 12
    log = make_log(25)
    log.pop("step")
    with store_of(log) as store, pytest.raises(UsageError, match="no step: name the trainer's files after the step"):
        StepWindow(store, Steps(0, 9))
