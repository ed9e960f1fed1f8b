from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.slime import SlimeAdapter
from estr_diag.ingestion.trainers.slime_samples import versions
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, expected_values, measured, token_columns

Ingest = Callable[..., Store]
Write = Callable[..., Path]

DATA = Path(__file__).parent / "data"
EXPECTED = expected_values(DATA, "slime")
TRAIN = DATA / "slime/dump_details/train_data/11.pt"
ROLLOUT = DATA / "slime/dump_details/rollout_data/11.pt"
OLD = DATA / "slime/old_format/train_data/3_0.pt"


def train_sample(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Two prompt and four response tokens, of which the third is a tool's."""
    sample = {
        "rollout_position": number,
        "sample_index": number,
        "tokens": torch.tensor([1, 2, 11, 12, 13, 14 + number]),
        "total_lengths": 6,
        "response_lengths": 4,
        "loss_masks": torch.tensor([1, 1, 0, 1], dtype=torch.int32),
        "rollout_log_probs": torch.tensor([-0.5, -1.0, 0.0, -2.0]),
        "log_probs": torch.tensor([-0.75, -1.25, -3.0, -2.5]),
        **changes,
    }
    return {name: value for name, value in sample.items() if value is not ...}


def rollout_sample(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the same sequence as `train_sample`, as the rollout dump holds it."""
    sample = {
        "group_index": 3,
        "index": number,
        "tokens": [1, 2, 11, 12, 13, 14 + number],
        "response_length": 4,
        "reward": 1.0,
        "loss_mask": [1, 1, 0, 1],
        "weight_versions": ["4", "5"],
        "rollout_log_probs": [-0.5, -1.0, 0.0, -2.0],
        "status": "completed",
        "remove_sample": False,
        **changes,
    }
    return {name: value for name, value in sample.items() if value is not ...}


@pytest.fixture
def save(tmp_path: Path) -> Write:
    def write(name: str, payload: dict[str, Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(payload, path)
        return path

    return write


@pytest.fixture
def train(save: Write) -> Write:
    def write(*samples: dict[str, Any], name: str = "train_data/8.pt", rollout_id: int = 8, **top: Any) -> Path:
        return save(name, {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": list(samples), **top})

    return write


@pytest.fixture
def rollout(save: Write) -> Write:
    def write(*samples: dict[str, Any], name: str = "rollout_data/8.pt", rollout_id: int = 8) -> Path:
        return save(name, {"rollout_id": rollout_id, "samples": list(samples)})

    return write


def one(store: Store, query: str) -> dict[str, Any]:
    (row,) = store.rows(query)
    return row


@pytest.mark.parametrize("name", EXPECTED)
def test_values_are_those_of_the_manifest(name: str, ingested: Ingest) -> None:
    found = measured(ingested(DATA / name))
    wanted = {key: value for key, value in EXPECTED[name].items() if key != "n_weight_version_entries"}
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=0, abs=TOLERANCE)


def test_manifest_is_not_empty() -> None:
    assert len(EXPECTED) == 4


def test_train_dump_equals_torch(ingested: Ingest) -> None:
    payload = torch.load(TRAIN, weights_only=True)
    samples = payload["samples"]
    store = ingested(TRAIN)
    names = ("loss_masks", "rollout_log_probs", "log_probs", "entropy", "advantages")
    flat = {name: torch.cat([s[name] for s in samples]).numpy() for name in names}
    found = token_columns(store, "token_id", "loss_mask", "logp_infer", "logp_train", "entropy", "advantage")
    mask = flat["loss_masks"] == 1
    assert np.array_equal(found["loss_mask"], mask)
    assert np.array_equal(found["token_id"], torch.cat([s["tokens"][-s["response_lengths"] :] for s in samples]))
    assert np.array_equal(found["logp_infer"][mask].filled(), flat["rollout_log_probs"][mask])
    for column, name in (("logp_train", "log_probs"), ("entropy", "entropy"), ("advantage", "advantages")):
        assert np.array_equal(found[column].filled(), flat[name]), column
    sequences = store.rows("select * from sequences order by seq_id")
    assert [s["seq_key"] for s in sequences] == [f"sample{s['sample_index']}" for s in samples]
    assert [s["n_tokens"] for s in sequences] == [s["response_lengths"] for s in samples]
    assert [s["reward"] for s in sequences] == payload["raw_reward"]
    assert {(s["step"], s["trainer_version"], s["env"]) for s in sequences} == {(11, 12, "math")}


def test_joined_sequences_equal_torch(ingested: Ingest) -> None:
    samples = torch.load(ROLLOUT, weights_only=True)["samples"]
    finish = {"completed": "stop", "truncated": "length"}
    for path in (TRAIN, ROLLOUT):
        sequences = ingested(path).rows("select * from sequences order by seq_id")
        assert [s["group_id"] for s in sequences] == [str(s["group_index"]) for s in samples]
        assert [s["version_first"] for s in sequences] == [int(s["weight_versions"][0]) for s in samples]
        assert [s["version_last"] for s in sequences] == [int(s["weight_versions"][-1]) for s in samples]
        assert [s["finish"] for s in sequences] == [finish[s["status"]] for s in samples]
        assert [s["reward"] for s in sequences] == [s["reward"] for s in samples]


def test_old_train_dump_equals_torch(ingested: Ingest) -> None:
    data = torch.load(OLD, weights_only=True)["rollout_data"]
    store = ingested(OLD)
    found = token_columns(store, "loss_mask", "logp_infer", "logp_train", "advantage")
    mask = torch.cat(data["loss_masks"]).numpy() == 1
    assert np.array_equal(found["loss_mask"], mask)
    assert np.array_equal(found["logp_infer"][mask].filled(), torch.cat(data["rollout_log_probs"]).numpy()[mask])
    assert np.array_equal(found["logp_train"].filled(), torch.cat(data["log_probs"]))
    assert np.array_equal(found["advantage"].filled(), torch.cat(data["advantages"]))
    keys = [row["seq_key"] for row in store.rows("select seq_key from sequences order by seq_id")]
    assert keys == [f"rank0:sample{i}" for i in data["sample_indices"]]


def test_folder_is_joined_and_the_rollout_dump_is_a_companion(ingested: Ingest) -> None:
    store = ingested(DATA / "slime/dump_details")
    rows = store.rows("select layout, status, notes from sources order by status")
    assert [(r["layout"], r["status"]) for r in rows] == [(None, "companion"), ("train_data", "ingested")]
    assert rows[1]["notes"] == "[]"
    run = one(store, "select * from runs")
    assert (run["trainer"], run["version_unit"], run["version_granularity"]) == ("slime", "update", "segment")
    assert (run["entropy_of"], run["train_logp"]) == ("train", "proximal")


def test_train_dump_alone_says_what_it_lacks(tmp_path: Path, ingested: Ingest) -> None:
    alone = Path(shutil.copy(TRAIN, tmp_path / "any name.pt"))
    store = ingested(alone)
    assert "rollout_data/11.pt" in one(store, "select notes from sources")["notes"]
    query = "select count(version_first) as v, count(group_id) as g, count(reward) as r from sequences"
    assert one(store, query) == {"v": 0, "g": 0, "r": 16}


def test_rollout_dump_is_found_among_the_named_files(tmp_path: Path, ingested: Ingest) -> None:
    paths = [Path(shutil.copy(TRAIN, tmp_path / "a.pt")), Path(shutil.copy(ROLLOUT, tmp_path / "b.pt"))]
    assert measured(ingested(*paths))["n_groups"] == 4


def test_rollout_dump_of_another_step_stands_alone(train: Write, rollout: Write, ingested: Ingest) -> None:
    store = ingested(train(train_sample()), rollout(rollout_sample(), name="other/9.pt", rollout_id=9))
    assert store.rows("select step, layout from sequences join sources using (source_id) order by step") == [
        {"step": 8, "layout": "train_data"},
        {"step": 9, "layout": "rollout_data"},
    ]


def test_rollout_dump_of_another_run_is_not_joined(train: Write, rollout: Write, ingested: Ingest) -> None:
    rollout(rollout_sample(0), rollout_sample(1, tokens=[9, 9, 9, 9, 9, 9]))
    store = ingested(train(train_sample(0), train_sample(1)))
    assert store.rows("select group_id from sequences order by seq_id") == [{"group_id": "3"}, {"group_id": None}]
    assert "1 of 2 samples not found in" in one(store, "select notes from sources where status = 'ingested'")["notes"]


def test_join_is_by_position_and_not_by_order(train: Write, rollout: Write, ingested: Ingest) -> None:
    rollout(rollout_sample(0, group_index=10), rollout_sample(1, group_index=11), rollout_sample(2, group_index=12))
    store = ingested(train(train_sample(2), train_sample(0), raw_reward=[0.5, 1.5, 2.5]))
    assert store.rows("select seq_key, group_id, reward from sequences order by seq_id") == [
        {"seq_key": "sample2", "group_id": "12", "reward": 2.5},
        {"seq_key": "sample0", "group_id": "10", "reward": 0.5},
    ]


def old_dump(*samples: dict[str, Any], rank: int = 0, **changes: Any) -> dict[str, Any]:
    names = ("tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "log_probs")
    data: dict[str, Any] = {name: [s[name] for s in samples] for name in names}
    data["sample_indices"] = [s["sample_index"] for s in samples]
    data["raw_reward"] = [0.0] * 99  # of the whole batch
    data = {name: value for name, value in (data | changes).items() if value is not ...}
    return {"rollout_id": 8, "rank": rank, "rollout_data": data}


def test_old_ranks_are_joined_by_sample_number(save: Write, rollout: Write, ingested: Ingest) -> None:
    companion = rollout(*(rollout_sample(i, group_index=20 + i) for i in range(3)))
    first = save("train_data/8_0.pt", old_dump(train_sample(2), train_sample(0), rank=0))
    second = save("train_data/8_1.pt", old_dump(train_sample(1), rank=1))
    store = ingested(first, second, companion)
    assert store.rows("select seq_key, group_id, version_last from sequences order by seq_id") == [
        {"seq_key": "rank0:sample2", "group_id": "22", "version_last": 5},
        {"seq_key": "rank0:sample0", "group_id": "20", "version_last": 5},
        {"seq_key": "rank1:sample1", "group_id": "21", "version_last": 5},
    ]


@pytest.mark.parametrize("name", ["log_probs", "rollout_log_probs", "loss_masks"])
def test_context_parallel_shards_are_refused(name: str, save: Write, ingested: Ingest) -> None:
    shard = train_sample(1)
    shard[name] = shard[name][:2]
    path = save("train_data/8_0.pt", old_dump(train_sample(0), shard))
    with pytest.raises(InputError, match=rf"8_0\.pt:2: .*sequence 1 \(key '{name}'\); found 2 values.*context par"):
        ingested(path)


def test_old_list_with_too_few_samples(save: Write, ingested: Ingest) -> None:
    path = save("8_0.pt", old_dump(train_sample(0), train_sample(1), log_probs=[torch.zeros(4)]))
    with pytest.raises(InputError, match=r"8_0\.pt.*'log_probs'\); found 1 values; expected 2"):
        ingested(path)


@pytest.mark.parametrize(
    ("mask", "entries", "tokens", "ends"),
    [
        ([1, 1, 0, 1], ["4", "4"], [4, 4, 4, 4], (4, 4)),
        ([1, 1, 0, 1], ["7"], [7, 7, 7, 7], (7, 7)),
        ([1, 1, 0, 1], ["4", "5"], [4, 4, None, 5], (4, 5)),
        ([0, 1, 0, 1], ["4", "5"], [None, 4, None, 5], (4, 5)),
        ([1, 1, 1, 1], ["4", "5"], [None] * 4, (4, 5)),
        ([1, 1, 0, 1], ["4", "5", "6"], [None] * 4, (4, 6)),
        ([1, 1, 0, 1], [], [None] * 4, (None, None)),
        ([1, 1, 0, 1], ["default", "5"], [None, None, None, 5], (None, 5)),
        (None, ["4", "5"], [None] * 4, (4, 5)),
    ],
)
def test_weight_versions(
    mask: list[int] | None, entries: list[str], tokens: list[int | None], ends: tuple[int | None, int | None],
    rollout: Write, ingested: Ingest,
) -> None:  # fmt: skip
    # The neighbours show that no sequence takes a version of another one.
    path = rollout(
        rollout_sample(0, weight_versions=["1", "2"]),
        rollout_sample(1, loss_mask=mask, weight_versions=entries),
        rollout_sample(2, weight_versions=["8", "9"]),
    )
    store = ingested(path)
    found = [row["policy_version"] for row in store.rows("select policy_version from tokens order by seq_id, pos")]
    assert found == [1, 1, None, 2, *tokens, 8, 8, None, 9]
    row = store.rows("select version_first, version_last from sequences order by seq_id")[1]
    assert tuple(row.values()) == ends


def test_versions_of_sequences_without_tokens() -> None:
    ragged = Ragged(np.array([0, 2, 0]), {})
    found = versions(ragged, np.array([True, True]), [[], [3], [4]])
    assert found.tolist() == [3, 3]


def test_missing_mask_is_all_ones(rollout: Write, ingested: Ingest) -> None:
    store = ingested(rollout(rollout_sample(loss_mask=None)))
    assert one(store, "select count(*) filter (where loss_mask) as n from tokens") == {"n": 4}


def test_removed_sample_is_switched_off_and_counted(rollout: Write, ingested: Ingest) -> None:
    store = ingested(rollout(rollout_sample(0), rollout_sample(1, remove_sample=True)))
    query = "select count(*) filter (where loss_mask) as n, count(*) as all from tokens group by seq_id order by seq_id"
    assert store.rows(query) == [{"n": 3, "all": 4}, {"n": 0, "all": 4}]
    assert '"sequences switched off by remove_sample": 1' in one(store, "select counts from sources")["counts"]


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [(2, 2.0), (0.5, 0.5), (None, None), ({"a": 1.5}, 1.5), ({"a": 1, "b": 2}, None), ({"a": "x", "b": 2}, 2.0)],
)
def test_reward(reward: Any, wanted: float | None, rollout: Write, ingested: Ingest) -> None:
    assert one(ingested(rollout(rollout_sample(reward=reward))), "select reward from sequences") == {"reward": wanted}


def test_sequences_are_named_once(rollout: Write, ingested: Ingest) -> None:
    samples = [rollout_sample(i, index=index) for i, index in enumerate((5, 5, None))]
    store = ingested(rollout(*samples))
    keys = [row["seq_key"] for row in store.rows("select seq_key from sequences order by seq_id")]
    assert keys == ["sample5", "sample5.1", "row2"]


def test_train_dump_without_scores_of_the_trainer(train: Write, ingested: Ingest) -> None:
    store = ingested(train(train_sample(log_probs=...)))
    assert "no log_probs" in one(store, "select notes from sources")["notes"]
    assert one(store, "select count(logp_train) as q, count(logp_infer) as mu from tokens") == {"q": 0, "mu": 3}


def test_a_sample_without_engine_log_probs_is_null(rollout: Write, ingested: Ingest) -> None:
    store = ingested(rollout(rollout_sample(0), rollout_sample(1, rollout_log_probs=None)))
    query = "select count(logp_infer) as n from tokens group by seq_id order by seq_id"
    assert store.rows(query) == [{"n": 3}, {"n": 0}]
    assert "logp_infer: null" in one(store, "select counts from sources")["counts"]


@pytest.mark.parametrize("name", ["tokens", "response_lengths", "loss_masks", "rollout_log_probs"])
def test_missing_field(name: str, train: Write, ingested: Ingest) -> None:
    path = train(train_sample(0), train_sample(1, **{name: ..., f"{name}_": 1}))
    with pytest.raises(InputError, match=rf"8\.pt:2: .*'{name}'\); found nearest names: .*{name}_"):
        ingested(path)


def test_engine_log_probs_that_are_none_everywhere(rollout: Write, ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"8\.pt:1: a field is missing \(key 'rollout_log_probs'\)"):
        ingested(rollout(rollout_sample(0, rollout_log_probs=None)))


def test_missing_list_of_an_old_dump(save: Write, ingested: Ingest) -> None:
    path = save("8_0.pt", old_dump(train_sample(0), rollout_log_probs=..., rollout_logprobs=[0]))
    with pytest.raises(InputError, match=r"8_0\.pt.*'rollout_log_probs'\); found nearest names: rollout_logprobs"):
        ingested(path)


@pytest.mark.parametrize("name", ["tokens", "rollout_log_probs", "loss_mask"])
def test_lists_of_unequal_length(name: str, rollout: Write, ingested: Ingest) -> None:
    short = rollout_sample(1)
    short[name] = short[name][:3]
    with pytest.raises(InputError, match=rf"8\.pt:2: .*'{name}'\); found 3 values; expected 4"):
        ingested(rollout(rollout_sample(0), short))


def test_total_length_that_contradicts_the_tokens(train: Write, ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"8\.pt:1: .*'tokens'\); found 6 values; expected 7"):
        ingested(train(train_sample(total_lengths=7)))


def test_field_of_another_type(rollout: Write, ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"8\.pt:1: not a list of numbers \(key 'rollout_log_probs'\); found str"):
        ingested(rollout(rollout_sample(rollout_log_probs="-0.5")))


def test_later_format_is_not_guessed_at(train: Write, ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"'format_version'\); found 3; expected 2"):
        ingested(train(train_sample(), format_version=3))


@pytest.mark.parametrize("samples", [[], None])
def test_dump_without_samples(samples: Any, save: Write, ingested: Ingest) -> None:
    path = save("8.pt", {"format_version": 2, "rollout_id": 8, "samples": samples, "note": "response_lengths"})
    with pytest.raises(InputError, match=r"no samples|no list of samples"):
        ingested(path)


def test_bfloat16(train: Write, ingested: Ingest) -> None:
    values = torch.tensor([-0.3, -1.7, -3.0, -2.1]).to(torch.bfloat16)
    found = token_columns(ingested(train(train_sample(log_probs=values))), "logp_train")["logp_train"]
    assert np.array_equal(found.filled(), values.float())


def test_evaluation_dump_is_refused(rollout: Write) -> None:
    with pytest.raises(RefusedError, match=r"eval_8\.pt: evaluation samples"):
        discover([rollout(rollout_sample(), name="rollout_data/eval_8.pt")])


@pytest.mark.parametrize("path", [TRAIN, ROLLOUT, OLD], ids=lambda p: f"{p.parent.name}-{p.stem}")
@pytest.mark.parametrize("part", [0.3, 0.99])
def test_truncated_file(path: Path, part: float, tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(InputError, match="not a readable torch file") as error:
        ingested(cut)
    assert str(cut) in str(error.value)


def test_damaged_tensor(tmp_path: Path, ingested: Ingest) -> None:
    broken = bytearray(OLD.read_bytes())
    start = broken.index(b"/data/20")
    broken[start : start + 200] = b"\xff" * 200
    path = tmp_path / "3_0.pt"
    path.write_bytes(broken)
    with pytest.raises(InputError, match=r"3_0\.pt: this file is damaged"):
        ingested(path)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_nothing_of_a_malicious_file_is_run(train: Write, rollout: Write, tmp_path: Path, ingested: Ingest) -> None:
    mark = tmp_path / "mark"
    for path in (train(train_sample(evil=Malicious(mark))), rollout(rollout_sample(evil=Malicious(mark)))):
        with pytest.raises(InputError, match=r"not on the allow-list.*system"):
            ingested(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize(
    ("path", "layout", "step"), [(TRAIN, "train_data", 11), (ROLLOUT, "rollout_data", 11), (OLD, "train_data_v1", 3)]
)
def test_probe(path: Path, layout: str, step: int, tmp_path: Path) -> None:
    renamed = Path(shutil.copy(path, tmp_path / "renamed.bin"))
    probe = SlimeAdapter().probe(FileHead(renamed))
    assert probe is not None
    assert (probe.layout, probe.step, probe.companion) == (layout, step, layout == "rollout_data")
    assert ("logp_train" in probe.columns) == (layout != "rollout_data")
    assert ("entropy" in probe.columns) == (path is TRAIN)


@pytest.mark.parametrize("number", [0, 255, 256, 70000])
def test_probe_reads_the_number_of_the_rollout(number: int, train: Write) -> None:
    probe = SlimeAdapter().probe(FileHead(train(train_sample(), rollout_id=number)))
    assert probe is not None
    assert probe.step == number


def test_long_responses_are_still_recognised(rollout: Write, ingested: Ingest) -> None:
    n = 30_000  # more numbers than probing looks at
    sample = rollout_sample(tokens=[5] * n, response_length=n, loss_mask=None, rollout_log_probs=[-0.5] * n)
    path = rollout(sample)
    probe = SlimeAdapter().probe(FileHead(path))
    assert probe is not None
    assert "logp_infer" in probe.columns
    assert one(ingested(path), "select count(logp_infer) as n from tokens") == {"n": n}


def test_no_other_trainers_file_is_claimed() -> None:
    files = [p for p in DATA.glob("*/**/*") if p.is_file() and not {"slime", "oracle"} & {*p.parts}]
    assert len(files) > 20
    assert [p for p in files if SlimeAdapter().probe(FileHead(p))] == []


def test_plan_joins_nothing_when_two_rollout_dumps_have_the_id(train: Write, rollout: Write) -> None:
    rollouts = [rollout(rollout_sample(), name=f"{run}/8.pt") for run in "ab"]
    units = discover([train(train_sample(), name="t.pt"), *rollouts]).units
    assert [unit.companions for unit in units] == [(), (), ()]
