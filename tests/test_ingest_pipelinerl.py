from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, expected_values, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
EXPECTED = expected_values(DATA, "pipelinerl")
ACTOR = DATA / "pipelinerl/streams/actor/0/0/0.jsonl"
PACKED = DATA / "pipelinerl/streams/training_data/0/0/0.jsonl"


def text(**changes: Any) -> dict[str, Any]:
    """One TrainingText: prompt of 2, response of 4 with a masked token."""
    fields = {
        "text": "x",
        "n_predicted": 3,
        "reward": 1.0,
        "logprobs": [-1.0, -2.0, -3.0],
        "ref_logprobs": [],
        "input_ids": [1, 2, 11, 12, 13, 14],
        "labels": [-100, -100, 11, -100, 13, 14],
        "group_id": "train_0",
        "finished": True,
        "metadata": {"model_version": 64, "rollout_index": 0, "step_index": 0},
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def packed(**changes: Any) -> dict[str, Any]:
    """One packed row: sequences of 4 and 3 tokens with responses of 2 and 2."""
    fields = {
        "input_ids": [[1, 2, 11, 12, 3, 21, 22]],
        "attention_mask": [[1] * 7],
        "labels": [[-100, -100, 11, 12, -100, 21, 22]],
        "old_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0]],
        "advantages": [[0.5] * 4 + [-0.5] * 3],
        "rewards": [[1.0] * 4 + [0.0] * 3],
        "model_version": 64,
        "sentinel": False,
        "padding": 0,
        "is_packed": True,
        "seq_boundaries": [0, 4, 7],
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, name: str = "actor") -> Path:
        path = tmp_path / f"streams/{name}/0/0/0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


@pytest.mark.parametrize("name", EXPECTED)
def test_right_values(name: str, ingested: Ingest) -> None:
    store = ingested(DATA / name)
    got = measured(store)
    want = dict(EXPECTED[name])
    assert got["sum_rollout_logprob_counted"] == pytest.approx(want.pop("sum_logprob_counted"), abs=TOLERANCE)
    want.pop("n_lines", None)
    assert want
    for key, value in want.items():
        assert got[key] == value, key
    assert store.rows("select count(logp_train) as n from tokens")[0]["n"] == 0
    run = store.rows("select * from runs")[0]
    assert (run["version_unit"], run["version_granularity"], run["train_logp"]) == ("sample", "sequence", None)


def test_every_actor_value_against_json(ingested: Ingest) -> None:
    records = [record for line in ACTOR.read_text().splitlines() for record in json.loads(line)]
    store = ingested(ACTOR)
    got = token_columns(store, "token_id", "logp_infer", "policy_version")
    assert got["token_id"].tolist() == [t for r in records for t in r["labels"] if t != -100]
    # Shortest decimals of a float32: the same number only after the cast.
    assert got["logp_infer"].tolist() == np.array([x for r in records for x in r["logprobs"]], np.float32).tolist()
    assert got["policy_version"].tolist() == [r["metadata"]["model_version"] for r in records for _ in r["logprobs"]]
    rows = store.rows("select * from sequences order by seq_id")
    assert [(r["group_id"], r["prompt_len"], r["reward"]) for r in rows] == [
        (r["group_id"], r["prompt_tokens"], r["reward"]) for r in records
    ]
    assert [r["finish"] == "finished" for r in rows] == [r["finished"] for r in records]
    assert {r["trainer_version"] for r in rows} == {None}


def test_compact_log_probs_go_to_their_labels(stream: Callable[..., Path], ingested: Ingest) -> None:
    got = token_columns(ingested(stream([text()])), "token_id", "logp_infer", "loss_mask")
    assert got["token_id"].tolist() == [11, 12, 13, 14]
    assert got["logp_infer"].tolist() == [-1, None, -2, -3]
    assert got["loss_mask"].tolist() == [True, False, True, True]


def test_both_streams_are_one_log_and_the_actor_is_kept() -> None:
    with Store.memory() as store:
        summary = ingest(store, discover([DATA / "pipelinerl"]))
        assert [(s.status, s.layout) for s in summary.sources] == [("ingested", "actor"), ("copy", "training_data")]


def test_packed_rows_are_split_at_their_boundaries(stream: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(stream(packed(), name="training_data"))
    rows = store.rows("select * from sequences order by seq_id")
    assert [(r["seq_key"], r["n_tokens"], r["prompt_len"], r["reward"]) for r in rows] == [
        ("training_data/0/0/0:1.0", 2, 2, 1),
        ("training_data/0/0/0:1.1", 2, 1, 0),
    ]
    got = token_columns(store, "token_id", "logp_infer", "advantage", "policy_version")
    assert got["token_id"].tolist() == [11, 12, 21, 22]
    assert got["logp_infer"].tolist() == [-1, -2, -3, -4]
    assert got["advantage"].tolist() == [0.5, 0.5, -0.5, -0.5]


def test_the_minimum_of_a_line_is_no_version_of_a_token(ingested: Ingest) -> None:
    store = ingested(PACKED)
    assert store.rows("select count(policy_version) as n from tokens")[0]["n"] == 0
    notes = store.rows("select notes from sources")[0]["notes"]
    assert "minimum" in notes
    # In the actor stream, four of these sequences are seen to be younger than the minimum says.
    assert max(r["version_last"] for r in store.rows("select version_last from sequences")) == 640


def test_sentinels_and_padding_are_left_out(stream: Callable[..., Path]) -> None:
    filled = packed(
        input_ids=[[1, 2, 11, 12, 3, 21, 22, 0, 0]],
        attention_mask=[[1] * 9],
        labels=[[-100, -100, 11, 12, -100, 21, 22, -100, -100]],
        old_logprobs=[[0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0, 0.0, 0.0]],
        advantages=...,
        rewards=...,
        padding=2,
        seq_boundaries=[0, 4, 7, 9],
    )
    path = stream(packed(sentinel=True), filled, name="training_data")
    with Store.memory() as store:
        report = ingest(store, discover([path])).sources[0]
        assert (report.n_sequences, report.n_tokens) == (2, 4)
        assert dict(report.counts) == {"sentinel lines": 1, "packed sequences without a label": 1}
        assert [r["prompt_len"] for r in store.rows("select prompt_len from sequences order by seq_id")] == [2, 1]


def test_padding_without_a_boundary_of_its_own(stream: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(stream(packed(padding=1), name="training_data"))
    assert token_columns(store, "token_id")["token_id"].tolist() == [11, 12, 21]


def test_rows_that_are_not_packed(stream: Callable[..., Path], ingested: Ingest) -> None:
    plain = packed(
        input_ids=[[1, 2, 11, 12], [3, 21, 22, 0]],
        attention_mask=[[1] * 4, [1, 1, 1, 0]],
        labels=[[-100, -100, 11, 12], [-100, 21, 22, -100]],
        old_logprobs=[[0.0, 0.0, -1.0, -2.0], [0.0, -3.0, -4.0, 0.0]],
        advantages=...,
        rewards=...,
        is_packed=False,
        seq_boundaries=None,
    )
    store = ingested(stream(plain, name="training_data"))
    got = token_columns(store, "token_id", "logp_infer")
    assert got["token_id"].tolist() == [11, 12, 21, 22]
    assert got["logp_infer"].tolist() == [-1, -2, -3, -4]


def test_log_probs_packed_to_the_end_are_moved_back(stream: Callable[..., Path], ingested: Ingest) -> None:
    # prepare_rl_fields fills zeros in front of all labels, so a masked token inside shifts what is before it.
    late = packed(labels=[[-100, 2, -100, 12, -100, 21, 22]])
    got = token_columns(ingested(stream(late, name="training_data")), "token_id", "logp_infer")
    assert got["token_id"].tolist() == [2, 11, 12, 21, 22]
    assert got["logp_infer"].tolist() == [-1, None, -2, -3, -4]


def test_evaluation_stream_is_refused(stream: Callable[..., Path]) -> None:
    with pytest.raises(RefusedError, match=r"actor_test.*streams=files"):
        discover([stream([text()], name="actor_test")])


def test_fewer_log_probs_than_labels(stream: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"0\.jsonl:2: .*key 'logprobs'.*\[2\].*\[3\]"):
        ingested(stream([text()], [text(), text(logprobs=[-1.0, -2.0])]))


def test_lists_of_a_packed_line_of_unequal_length(stream: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"0\.jsonl:2: .*key 'old_logprobs'.*\[1, 6\].*\[1, 7\]"):
        ingested(stream(packed(), packed(old_logprobs=[[0.0] * 6]), name="training_data"))


def test_boundaries_of_another_row(stream: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"0\.jsonl:1: .*key 'seq_boundaries'.*\[0, 4, 14\].*seq_parallel"):
        ingested(stream(packed(seq_boundaries=[0, 4, 14]), name="training_data"))


@pytest.mark.parametrize(
    ("line", "name", "key"),
    [([text(logprobs=...)], "actor", "logprobs"), (packed(old_logprobs=...), "training_data", "old_logprobs")],
)
def test_a_missing_field_is_named(
    line: Any, name: str, key: str, stream: Callable[..., Path], ingested: Ingest
) -> None:
    first: Any = [text()] if name == "actor" else packed()
    with pytest.raises(InputError, match=rf"0\.jsonl:2: .*key '{key}'"):
        ingested(stream(first, line, name=name))


def test_wrong_type(stream: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"0\.jsonl:1: wrong type.*key 'logprobs'"):
        ingested(stream([text(logprobs=["a", "b", "c"])]))


@pytest.mark.parametrize("path", [ACTOR, PACKED])
def test_cut_off_file(path: Path, tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / "0.jsonl"
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"0\.jsonl:4: not valid JSON"):
        ingested(cut)
