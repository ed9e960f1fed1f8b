"""The generic adapter: any table of tokens, in every format and both layouts, gives exactly the columns it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_diag.errors import UsageError
from estr_diag.ingestion.adapter import ReadOptions, TokenBatch
from estr_diag.ingestion.canonical import to_tables
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.generic import adapter as generic
from estr_diag.ingestion.generic.adapter import batches_from_table
from estr_diag.ingestion.generic.rows import from_rows
from estr_diag.ingestion.generic.source import Source
from estr_diag.ingestion.mapping import Mapping as ColumnMapping
from estr_diag.store.database import Store
from estr_diag.store.export import export
from tests.generic_logs import FORMATS, Log, a_log, as_lists, permuted, without, write

Ingested = Callable[..., Store]
LENGTHS = (3, 1, 12, 4, 7, 2)
TOKEN_COLUMNS = ("step", "pos", "token_id", "token_text", "logp_infer", "logp_train", "entropy", "policy_version",
                 "advantage", "loss_mask")  # fmt: skip


def stored(store: Store, *names: str) -> dict[str, list[Any]]:
    columns = ", ".join(f"t.{name}" if name != "seq_key" else "s.seq_key" for name in names)
    table = store.table(f"select {columns} from tokens t join sequences s using (seq_id) order by t.seq_id, t.pos")
    found: dict[str, list[Any]] = table.to_pydict()
    return found


def sources(store: Store) -> dict[str, Any]:
    import json

    row = store.rows("select * from sources")[0]
    return {**row, "notes": json.loads(row["notes"]), "counts": json.loads(row["counts"])}


def options(mapping: Mapping[str, Any] | None = None, **said: Any) -> ReadOptions:
    return ReadOptions(mapping=None if mapping is None else ColumnMapping.model_validate(mapping), **said)


def expect(log: Log, *names: str) -> dict[str, list[Any]]:
    return {name: log["seq_id" if name == "seq_key" else name] for name in names}


# -- formats and layouts -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("layout", ["token_rows", "sequence_rows"])
def test_every_column_is_stored_exactly(tmp_path: Path, ingested: Ingested, ending: str, layout: str) -> None:
    log = a_log(LENGTHS)
    path = write(tmp_path / f"log{ending}", log if layout == "token_rows" else as_lists(log))
    store = ingested(path)
    assert store.rows("select layout from sources") == [{"layout": layout}]
    assert stored(store, "seq_key", *TOKEN_COLUMNS) == expect(log, "seq_key", *TOKEN_COLUMNS)
    per_sequence = as_lists(log)
    sequences = store.table(
        "select seq_key, step, group_id, reward, prompt_len, n_tokens from sequences order by seq_id"
    )
    assert sequences.to_pydict() == {
        "seq_key": per_sequence["seq_id"],
        "n_tokens": list(LENGTHS),
        **{name: per_sequence[name] for name in ("step", "group_id", "reward", "prompt_len")},
    }
    assert stored(store, "abs_pos")["abs_pos"] == [p + n for p, n in zip(log["pos"], log["prompt_len"], strict=True)]
    assert sources(store)["counts"] == {}


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl", ".arrow"])
def test_rows_in_any_order_are_sorted_by_position(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    log = a_log(LENGTHS)
    store = ingested(write(tmp_path / f"log{ending}", permuted(log)))
    assert stored(store, "seq_key", *TOKEN_COLUMNS) == expect(log, "seq_key", *TOKEN_COLUMNS)


@pytest.mark.parametrize("rows", [1, 2, 5, 1000])
@pytest.mark.parametrize("order", ["sorted", "shuffled", "no pos"])
def test_sequences_that_span_batches_are_joined(
    tmp_path: Path, ingested: Ingested, monkeypatch: pytest.MonkeyPatch, rows: int, order: str
) -> None:
    monkeypatch.setattr(generic, "TOKENS_PER_BATCH", rows)
    log = a_log(LENGTHS)
    shown = {"sorted": log, "shuffled": permuted(log), "no pos": without(log, "pos")}[order]
    store = ingested(write(tmp_path / "log.parquet", shown))
    assert stored(store, "seq_key", *TOKEN_COLUMNS) == expect(log, "seq_key", *TOKEN_COLUMNS)


def test_one_name_in_two_steps_is_two_sequences(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((2, 3, 2))
    log["seq_id"] = [7] * 7
    log["step"] = [1] * 2 + [2] * 3 + [3] * 2
    log["policy_version"] = [0] * 7
    store = ingested(write(tmp_path / "log.parquet", permuted(log)))
    assert store.table("select seq_key, step, n_tokens from sequences order by seq_id").to_pydict() == {
        "seq_key": ["7", "7", "7"],
        "step": [1, 2, 3],
        "n_tokens": [2, 3, 2],
    }
    assert stored(store, "logp_infer")["logp_infer"] == log["logp_infer"]


def test_a_sorted_table_is_streamed() -> None:
    log = a_log([4] * 50)
    given_out: list[int] = []
    asked_for: list[set[str]] = []

    class Counting:
        path, place, run_facts = None, "counted", None
        columns: Mapping[str, bool] = dict.fromkeys(log, False)

        def batches(self, types: Mapping[str, str], rows: int) -> Iterator[pa.RecordBatch]:
            asked_for.append(set(types))
            for start in range(0, 200, rows):
                given_out.append(start)
                yield pa.record_batch({name: log[name][start : start + rows] for name in types})

        def line(self, row: int) -> int:
            return row

    source = Source(Counting(), {name: name for name in log if name != "pos"}, ColumnMapping())
    parts = from_rows(source, 10)
    first = next(parts)
    assert len(first.ragged) == 2, "10 rows hold two whole sequences of 4"
    assert given_out == [0], "the rest of the table was read before the first sequences were handed on"
    assert sum(len(part.ragged) for part in parts) == 48
    # With positions, a first pass over the names alone tells whether the table has to be sorted.
    asked_for.clear()
    list(from_rows(Source(Counting(), {name: name for name in log}, ColumnMapping()), 10))
    assert asked_for == [{"step", "seq_id"}, set(log)]


def test_tables_in_memory(tmp_path: Path) -> None:
    log = a_log(LENGTHS)
    table = pa.table(log)
    frames: dict[str, Any] = {
        "pyarrow": table,
        "reader": None,
        "pandas": pd.DataFrame(log),
        "polars": pl.DataFrame(log),
        "categorical": pl.DataFrame(log).with_columns(pl.col("seq_id", "group_id").cast(pl.Categorical)),
        "lists in polars": pl.DataFrame(as_lists(log)),
        "lists in pandas": pd.DataFrame(as_lists(log)),
        "large lists": pa.table(as_lists(log)).cast(
            pa.schema([pa.field(f.name, pa.large_list(f.type.value_type) if pa.types.is_list(f.type) else f.type)
                       for f in pa.table(as_lists(log)).schema])
        ),
    }  # fmt: skip
    for name, frame in frames.items():
        for rows in (2, None):
            # A reader can be read once, so each reading takes one of its own.
            given = table.to_reader(max_chunksize=4) if name == "reader" else frame
            found = _joined(batches_from_table(given, None, ReadOptions(), rows_per_batch=rows))
            assert found["logp_infer"] == log["logp_infer"], name
            assert found["token_text"] == log["token_text"], name
            assert found["seq_key"] == as_lists(log)["seq_id"], name


def _joined(batches: Iterator[TokenBatch]) -> dict[str, list[Any]]:
    """Return stored tokens and keys of batches, without a store."""
    found: dict[str, list[Any]] = {}
    first = 0
    for batch in batches:
        rows = to_tables(batch, first_seq=first, source_id=0, step=None)
        first += len(batch.lengths)
        for name, values in {**rows.tokens.to_pydict(), "seq_key": rows.sequences["seq_key"].to_pylist()}.items():
            found.setdefault(name, []).extend(values)
    return found


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["rows", "shuffled", "no pos", "lists"]),
)
def test_any_layout_gives_the_same_tokens(lengths: list[int], rows: int, seed: int, form: str) -> None:
    log = a_log(lengths, seed)
    shown = {"rows": log, "shuffled": permuted(log, seed), "no pos": without(log, "pos"), "lists": as_lists(log)}[form]
    found = _joined(batches_from_table(pa.table(shown), None, ReadOptions(), rows_per_batch=rows))
    # Sequences that happen to stand together keep the order of the file; the tokens of each are the same.
    names = [key for key, n in zip(found["seq_key"], np.bincount(found["seq_id"]), strict=True) for _ in range(n)]
    order = sorted(range(len(names)), key=lambda i: (int(names[i][1:]), i))
    assert [names[i] for i in order] == log["seq_id"]
    assert {name: [found[name][i] for i in order] for name in TOKEN_COLUMNS} == expect(log, *TOKEN_COLUMNS)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_an_exported_log_reads_back(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    log = a_log(LENGTHS)
    log["logp_infer"][4] = math.nan
    first = ingested(write(tmp_path / "log.parquet", log))
    export(first, tmp_path / f"out{ending}")
    second = ingested(tmp_path / f"out{ending}")
    for table in ("tokens", "sequences"):
        query = f"select * exclude (seq_id) from {table} order by seq_id" + (", pos" if table == "tokens" else "")
        assert second.table(query).to_pydict() == first.table(query).to_pydict()


# -- values --------------------------------------------------------------------------------------


def test_float64_becomes_float32(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((4,)) | {"logp_infer": [-0.1, -1 / 3, -1e-12, -700.125]}
    store = ingested(write(tmp_path / "log.parquet", log))
    assert stored(store, "logp_infer")["logp_infer"] == [float(np.float32(x)) for x in log["logp_infer"]]


@pytest.mark.parametrize("missing", ["logp_infer", "logp_train"])
def test_one_engine_is_enough(tmp_path: Path, ingested: Ingested, missing: str) -> None:
    store = ingested(write(tmp_path / "log.parquet", without(a_log(LENGTHS), missing)))
    assert missing not in store.column_counts()
    assert stored(store, missing)[missing] == [None] * sum(LENGTHS)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize(("unit", "nats"), [("bits", math.log(2)), ("log10", math.log(10))])
def test_units_become_nats(tmp_path: Path, ingested: Ingested, ending: str, unit: str, nats: float) -> None:
    log = a_log(LENGTHS)
    # -0.1 has no exact float32: converted after rounding it would come out one unit off.
    log["logp_infer"][:5] = [-9999.0, 1.0, -0.1, -0.7, -2.3]
    store = ingested(write(tmp_path / f"log{ending}", log), options=options({"units": {"logp": unit, "entropy": unit}}))
    found = stored(store, "logp_infer", "entropy", "advantage")
    assert found["logp_infer"] == [None, None, *(float(np.float32(x * nats)) for x in log["logp_infer"][2:])]
    assert found["entropy"] == [float(np.float32(x * nats)) for x in log["entropy"]]
    assert found["advantage"] == log["advantage"]


@pytest.mark.parametrize("layout", ["rows", "lists"])
@pytest.mark.parametrize("by", [1, -1, 2])
def test_a_column_that_sits_early_is_moved(tmp_path: Path, ingested: Ingested, by: int, layout: str) -> None:
    log = a_log((3, 1, 2))
    log["loss_mask"] = [True] * 6
    store = ingested(
        write(tmp_path / "log.parquet", log if layout == "rows" else as_lists(log)),
        options=options({"shift": {"logp_train": by, "policy_version": by}}),
    )
    p = [0, 1, 2, 0, 0, 1]
    n = [3, 3, 3, 1, 2, 2]
    for name in ("logp_train", "policy_version"):
        moved = [log[name][i - by] if 0 <= p[i] - by < n[i] else None for i in range(6)]
        assert stored(store, name)[name] == moved
    assert stored(store, "logp_infer")["logp_infer"] == log["logp_infer"]
    where = f"{abs(by)} position(s) {'later' if by > 0 else 'earlier'}"
    assert f"logp_train moved {where} in each sequence: shift of the mapping" in sources(store)["notes"]


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize(
    ("values", "counted", "expected"),
    [
        ([1, 0, 1, 1], True, [True, False, True, True]),
        ([1.0, 0.0, None, 1.0], True, [True, False, None, True]),
        (["true", "False", "1", "0"], True, [True, False, True, False]),
        ([True, False, None, False], False, [False, True, None, True]),
        ([2, 1, 0, 2], 2, [True, False, False, True]),
        (["model", "tool", "user", "model"], "model", [True, False, False, True]),
    ],
)
def test_mask_values(
    tmp_path: Path, ingested: Ingested, ending: str, values: list[Any], counted: Any, expected: list[Any]
) -> None:
    log = without(a_log((4,)), "loss_mask") | {"role": values}
    mapping = {"columns": {"loss_mask": "role"}, "mask": {"counted": counted}}
    store = ingested(write(tmp_path / f"log{ending}", log), options=options(mapping))
    assert stored(store, "loss_mask")["loss_mask"] == expected
    nulls = expected.count(None)
    assert sources(store)["counts"].get("loss_mask: null, taken as not sampled", 0) == nulls


def test_all_sampled_by_flag_or_mapping(tmp_path: Path, ingested: Ingested) -> None:
    path = write(tmp_path / "log.parquet", without(a_log((3, 2)), "loss_mask"))
    for said in (options(all_sampled=True), options({"mask": {"all_sampled": True}})):
        store = ingested(path, options=said)
        assert stored(store, "loss_mask")["loss_mask"] == [True] * 5
        assert "no loss_mask: every token is taken as sampled, as the user said" in sources(store)["notes"]


def test_all_sampled_does_not_overrule_a_mask(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log(LENGTHS)
    store = ingested(write(tmp_path / "log.parquet", log), options=options(all_sampled=True))
    assert stored(store, "loss_mask")["loss_mask"] == log["loss_mask"]
    assert any("all_sampled has no effect" in note for note in sources(store)["notes"])


def test_positions_from_one_and_gaps(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((3, 2))
    log["pos"] = [1, 2, 3, 1, 2]
    store = ingested(write(tmp_path / "one.parquet", log), options=options({"pos_base": 1}))
    assert stored(store, "pos")["pos"] == [0, 1, 2, 0, 1]
    assert sources(store)["counts"] == {}
    log["pos"] = [0, 1, 5, 2, 3]
    store = ingested(write(tmp_path / "gaps.parquet", log))
    assert stored(store, "pos", "logp_infer") == {"pos": [0, 1, 2, 0, 1], "logp_infer": log["logp_infer"]}
    assert sources(store)["counts"] == {"pos: positions without a token, numbered through": 5}


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("layout", ["rows", "lists"])
def test_sentinels_become_null_and_are_counted(tmp_path: Path, ingested: Ingested, ending: str, layout: str) -> None:
    log = a_log((4, 4))
    log["logp_infer"] = [math.nan, math.inf, -math.inf, None, -9999.0, 1.0, 0.0625, -0.5]
    log["loss_mask"] = [True] * 8
    store = ingested(write(tmp_path / f"log{ending}", log if layout == "rows" else as_lists(log)))
    assert stored(store, "logp_infer")["logp_infer"] == [None] * 6 + [0.0625, -0.5]
    assert sources(store)["counts"] == {
        "logp_infer: null, NaN or infinite": 4,
        "logp_infer: engine floor (-9999)": 1,
        "logp_infer: placeholder 1.0": 1,
        "logp_infer: positive, kept (bf16 rounding gives up to +0.1)": 1,
    }


def test_version_minus_one_is_missing(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((4,))
    log["policy_version"], log["loss_mask"] = [-1, 3, -1, 4], [False, True, True, True]
    store = ingested(write(tmp_path / "log.parquet", log))
    assert stored(store, "policy_version")["policy_version"] == [None, 3, None, 4]
    assert store.rows("select version_first, version_last from sequences") == [{"version_first": 3, "version_last": 4}]
    # The one on a tool token is what it should be.
    assert sources(store)["counts"] == {"policy_version: -1, taken as missing": 1}


def test_whole_numbers_that_pandas_made_floats(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((3,))
    log["token_id"], log["group_id"], log["seq_id"] = [5.0, math.nan, 7.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]
    store = ingested(write(tmp_path / "log.parquet", log))
    assert stored(store, "token_id")["token_id"] == [5, None, 7]
    assert store.rows("select seq_key, group_id from sequences") == [{"seq_key": "1", "group_id": "3"}]


def test_per_sequence_values_of_a_list_layout(tmp_path: Path, ingested: Ingested) -> None:
    lists = as_lists(a_log((3, 2)))
    lists |= {"policy_version": [4, -1], "trainer_version": [6, 7], "advantage": [0.5, -0.5]}
    store = ingested(write(tmp_path / "log.jsonl", without(lists, "seq_id")))
    found = stored(store, "seq_key", "policy_version", "trainer_version", "advantage")
    assert found == {
        "seq_key": ["log:1"] * 3 + ["log:2"] * 2,
        "policy_version": [4, 4, 4, None, None],
        "trainer_version": [6, 6, 6, 7, 7],
        "advantage": [0.5] * 3 + [-0.5] * 2,
    }
    assert store.rows("select version_granularity from runs") == [{"version_granularity": "sequence"}]


def test_a_value_that_differs_within_a_sequence_is_left_out(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((3, 2))
    log["reward"] = [0.0, 0.0, 1.0, None, 1.0]
    store = ingested(write(tmp_path / "log.parquet", log))
    assert store.table("select reward from sequences order by seq_id").to_pydict() == {"reward": [None, 1.0]}
    assert sources(store)["counts"] == {"reward: differs within a sequence, left out there": 1}


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_a_record_without_a_list_has_no_values_there(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    lists = as_lists(a_log((3, 2)))
    kept = lists["logp_train"][1]
    # Text formats look at the first record for which columns are lists, and it does not say.
    lists["logp_train"] = [None, kept]
    store = ingested(write(tmp_path / f"log{ending}", lists))
    assert stored(store, "logp_train")["logp_train"] == [None] * 3 + kept
    lists["logp_train"] = [[*kept, -1.0], None]
    store = ingested(write(tmp_path / f"other{ending}", lists))
    assert stored(store, "logp_train")["logp_train"] == [*kept, -1.0, None, None]
    # Each record takes its length from a list that it has.
    lists = {"logp_infer": [[-1.0, -2.0], None], "logp_train": [None, [-3.0]], "loss_mask": [[True, True], None]}
    store = ingested(write(tmp_path / f"third{ending}", lists))
    assert stored(store, "logp_infer", "logp_train", "loss_mask") == {
        "logp_infer": [-1.0, -2.0, None],
        "logp_train": [None, None, -3.0],
        "loss_mask": [True, True, None],
    }


def test_an_empty_sequence_keeps_its_row(tmp_path: Path, ingested: Ingested) -> None:
    lists = as_lists(a_log((3, 2)))
    lists = {name: [*values, [] if isinstance(values[0], list) else values[-1]] for name, values in lists.items()}
    lists["seq_id"][-1] = "empty"
    store = ingested(write(tmp_path / "log.parquet", lists))
    assert store.table("select seq_key, n_tokens from sequences order by seq_id").to_pydict() == {
        "seq_key": ["s0", "s1", "empty"],
        "n_tokens": [3, 2, 0],
    }


# -- mapping, notes, discovery -------------------------------------------------------------------


def test_a_mapping_gives_names_facts_and_notes(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log(LENGTHS)
    shown = {
        "sid": log["seq_id"],
        "t": log["pos"],
        "mu": log["logp_infer"],
        "q": log["logp_train"],
        "m": log["loss_mask"],
        "h": log["entropy"],
        "extra": log["token_id"],
        "more": log["reward"],
    }
    mapping = {
        "columns": {
            "seq_id": "sid",
            "pos": "t",
            "logp_infer": "mu",
            "logp_train": "q",
            "loss_mask": "m",
            "entropy": "h",
        },
        "run": {"trainer": "mine", "temperature": 0.7, "entropy_of": "train", "version_unit": "step"},
    }
    store = ingested(write(tmp_path / "log.parquet", shown), options=options(mapping))
    assert stored(store, "seq_key", "logp_infer", "logp_train", "entropy", "loss_mask") == expect(
        log, "seq_key", "logp_infer", "logp_train", "entropy", "loss_mask"
    )
    run = store.rows("select * from runs")[0]
    expected = {"trainer": "mine", "temperature": 0.7, "entropy_of": "train", "version_unit": "step", "top_p": None}
    assert {name: run[name] for name in expected} == expected
    assert sources(store)["notes"] == ["columns not used: extra, more"]


def test_facts_are_unknown_without_a_mapping(tmp_path: Path, ingested: Ingested) -> None:
    run = ingested(write(tmp_path / "log.parquet", a_log((3,)))).rows("select * from runs")[0]
    assert run["trainer"] == "generic"
    assert run["entropy_of"] is None
    assert run["temperature"] is None
    assert run["version_granularity"] == "token"


def test_the_step_of_a_file_without_one(tmp_path: Path, ingested: Ingested) -> None:
    path = write(tmp_path / "tokens_step_42.parquet", without(a_log((2, 2)), "step"))
    store = ingested(path)
    assert stored(store, "step")["step"] == [42] * 4
    assert "step 42 is taken from the file's name" in sources(store)["notes"]
    store = ingested(path, options=options(step=7))
    assert stored(store, "step")["step"] == [7] * 4
    assert store.rows("select distinct step from sequences") == [{"step": 7}]


def test_probe_says_why_and_what_comes_from_where(tmp_path: Path) -> None:
    log = a_log((2, 2))
    probe = discover([write(tmp_path / "log.csv", log)]).units[0].probe
    assert (probe.adapter, probe.layout) == ("generic", "token_rows")
    assert probe.why == "one row a token, columns logp_infer and logp_train"
    assert probe.columns == {name: name for name in log}
    lists = {"lp": as_lists(log)["logp_infer"], "loss_mask": as_lists(log)["loss_mask"]}
    mapping = ColumnMapping(columns={"logp_infer": "lp"})
    probe = discover([write(tmp_path / "lists.jsonl", lists)], options=ReadOptions(mapping=mapping)).units[0].probe
    assert probe.why == "one row a sequence, columns lp"
    assert probe.columns == {"logp_infer": "lp", "loss_mask": "loss_mask"}


def test_other_tables_and_documents_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "tokens.parquet", a_log((2, 2)))
    write(tmp_path / "metrics.csv", {"step": [1, 2], "mask": [0.1, 0.2]})
    (tmp_path / "config.json").write_text('{\n  "lr": 1\n}\n')
    (tmp_path / "notes.txt").write_text("logp_infer,logp_train\n")
    found = discover([tmp_path])
    assert [unit.path.name for unit in found.units] == ["tokens.parquet"]
    assert {path.name for path in found.ignored} == {"metrics.csv", "config.json", "notes.txt"}
    # A column of a mapping makes no log of a table: a log-prob does.
    found = discover([tmp_path], options=ReadOptions(mapping=ColumnMapping(columns={"loss_mask": "mask"})))
    assert [unit.path.name for unit in found.units] == ["tokens.parquet"]


def test_trainers_come_before_the_generic_adapter(data: Path) -> None:
    path = data / "prime-rl" / "token_exports" / "step_7" / "rank_0.jsonl"
    assert discover([path]).adapter == "prime-rl"
    # A mapping says what the columns of a table mean, whoever wrote it.
    mapping = ColumnMapping(columns={"logp_infer": "inference_logprobs", "logp_train": "trainer_logprobs"})
    probe = discover([path], options=ReadOptions(mapping=mapping)).units[0].probe
    assert (probe.adapter, probe.layout) == ("generic", "sequence_rows")


def test_a_mapping_goes_with_the_generic_format_only(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", a_log((2,)))
    assert discover([path], "generic", options=ReadOptions(mapping=ColumnMapping())).adapter == "generic"
    with pytest.raises(UsageError, match="not for --format verl"):
        discover([path], "verl", options=ReadOptions(mapping=ColumnMapping()))
