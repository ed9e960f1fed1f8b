from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from estr_diag.errors import InputError, UnrecognisedError
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, expected_values, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
EXPECTED = {name: values for name, values in expected_values(DATA, "prime-rl").items() if name.endswith(".bin")}
NEW = DATA / "prime-rl/rollouts/step_7/rank_0.bin"
OLD = DATA / "prime-rl/old_2026_01/rollouts/step_7/rank_0.bin"
EXPORT = DATA / "prime-rl/token_exports/step_7/rank_0.jsonl"
TRACES = DATA / "prime-rl/rollouts/step_7/train/effective/traces.jsonl"


def new(**changes: Any) -> list[Any]:
    """Two packed sequences of 4 and 3 tokens, and 2 of padding that the lengths count into the last."""
    fields = {
        "input_ids": [1, 2, 11, 12, 3, 21, 22, 1, 1],
        "loss_mask": [False, False, True, True, False, True, True, False, False],
        "advantages": [0.5] * 4 + [-0.5] * 3 + [0.0] * 2,
        "inference_logprobs": [0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0, 0.0, 0.0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 1],
        "sequence_lengths": [4, 5],
        "temperatures": [1.0] * 9,
        "env_names": ["math"] * 4 + ["code"] * 3 + [""] * 2,
        "seq_lens": [4, 5],
        **changes,
    }
    return [*fields.values(), *[None] * 7]


def old(**changes: Any) -> list[Any]:
    """The same in the layout of January 2026."""
    slots = new(**changes)
    return [*slots[:5], slots[6], None, None, None, None]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(content: Any, name: str = "rollouts/step_3/rank_1.bin") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else msgpack.packb(content))
        return path

    return write


@pytest.mark.parametrize("name", EXPECTED)
def test_right_values(name: str, ingested: Ingest) -> None:
    store = ingested(DATA / name)
    got = measured(store)
    want = dict(EXPECTED[name])
    assert got["sum_rollout_logprob_counted"] == pytest.approx(want.pop("sum_inference_logprob_counted"), abs=TOLERANCE)
    for key, value in want.items():
        assert got[key] == value, key
    assert store.rows("select distinct step, trainer_version from sequences") == [{"step": 7, "trainer_version": 6}]
    run = store.rows("select * from runs")[0]
    assert (run["entropy_of"], run["train_logp"]) == (None, None)


@pytest.mark.parametrize("path", [NEW, OLD])
def test_every_column_against_the_raw_slots(path: Path, ingested: Ingest) -> None:
    got = token_columns(ingested(path), "token_id", "logp_infer", "loss_mask", "advantage")
    want: dict[str, list[Any]] = {name: [] for name in got}
    for slots in msgpack.unpackb(path.read_bytes()):
        ends = [*[i for i, p in enumerate(slots[4]) if p == 0][1:], len(slots[0])]
        begin = 0
        for end in ends:
            first = slots[1].index(True, begin, end)
            mask = slots[1][first:end]
            want["token_id"] += slots[0][first:end]
            want["loss_mask"] += mask
            logps = np.array(slots[3][first:end], np.float32).tolist()
            want["logp_infer"] += [x if m else None for x, m in zip(logps, mask, strict=True)]
            want["advantage"] += np.array(slots[2][first:end], np.float32).tolist()
            begin = end
    for name, values in want.items():
        assert got[name].tolist() == values, name


@pytest.mark.parametrize(("make", "layout"), [(new, "micro_batch"), (old, "micro_batch_2026_01")])
def test_padding_is_no_sequence_and_no_response(
    make: Callable[..., Any], layout: str, save: Callable[..., Path]
) -> None:
    dummy = make(loss_mask=[False] * 9)
    with Store.memory() as store:
        report = ingest(store, discover([save([make(), dummy])])).sources[0]
        assert (report.layout, report.n_sequences, report.n_tokens) == (layout, 2, 4)
        assert dict(report.counts) == {"segments without a loss token (padding, dummy batches)": 4}
        assert token_columns(store, "token_id")["token_id"].tolist() == [11, 12, 21, 22]
        rows = store.rows("select * from sequences order by seq_id")
    assert [(r["seq_key"], r["prompt_len"], r["step"]) for r in rows] == [("rank_1:1.0", 2, 3), ("rank_1:1.1", 1, 3)]
    assert [r["env"] for r in rows] == (["math", "code"] if make is new else [None, None])


def test_more_slots_are_read_and_said(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save([[*new(), None, ["a"], [0], None]]))
    assert store.rows("select count(*) as n from tokens")[0]["n"] == 4
    assert "20 slots" in store.rows("select notes from sources")[0]["notes"]


def test_an_export_of_the_step_is_read_in_its_place() -> None:
    found = discover([NEW, OLD, EXPORT])
    assert [unit.path for unit in found.units] == [EXPORT]
    assert {unit.path for unit in discover([NEW, OLD]).units} == {NEW, OLD}


def test_an_export_of_another_step_does_not_replace_it(save: Callable[..., Path]) -> None:
    other = save([new()])
    assert {unit.path for unit in discover([other, EXPORT]).units} == {other, EXPORT}


def test_traces_give_versions_and_groups(ingested: Ingest) -> None:
    got = measured(ingested(NEW, TRACES))
    # The same as an export gets by the same join.
    want = measured(ingested(EXPORT, TRACES))
    for key in ("n_seq", "n_groups", "version_min", "version_max", "n_seq_with_version_switch"):
        assert got[key] == want[key] > 0, key


def test_a_null_log_prob_is_missing(save: Callable[..., Path], ingested: Ingest) -> None:
    slots = new(inference_logprobs=[0.0, 0.0, None, -2.0, 0.0, float("nan"), -4.0, 0.0, 0.0])
    got = token_columns(ingested(save([slots])), "logp_infer")
    assert got["logp_infer"].tolist() == [None, -2, None, -4]


def test_slot_5_against_the_number_of_slots(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"rank_1\.bin:2: slot 5.*key 'sequence_lengths'.*16 slots"):
        ingested(save([new(), new(sequence_lengths=[1.0] * 9)]))
    with pytest.raises(InputError, match=r"rank_1\.bin:1: slot 5.*key 'temperatures'"):
        ingested(save([old(temperatures=[4, 5])]))


def test_lengths_that_contradict_positions(save: Callable[..., Path], ingested: Ingest) -> None:
    for lengths in ([5, 4], [4, 4]):
        with pytest.raises(InputError, match=r"rank_1\.bin:1: .*contradict.*position 0 at \[0, 4, 7\]"):
            ingested(save([new(sequence_lengths=lengths)]))


def test_lists_of_unequal_length(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"rank_1\.bin:2: .*key 'inference_logprobs'.*8 values.*9 of 'input_ids'"):
        ingested(save([new(), new(inference_logprobs=[0.0] * 8)]))


@pytest.mark.parametrize(
    ("name", "values"), [("loss_mask", [1.5] * 9), ("inference_logprobs", ["a"] * 9), ("position_ids", None)]
)
def test_wrong_types(name: str, values: Any, save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=rf"rank_1\.bin:1: .*key '{name}'"):
        ingested(save([new(**{name: values})]))


def test_a_missing_slot(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"rank_1\.bin:2: not a micro batch.*4 slots"):
        ingested(save([new(), new()[:4]]))


@pytest.mark.parametrize("size", [10, 3_000, -1])
def test_cut_off_file(size: int, save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"rank_1\.bin:\d: .*damaged or cut off"):
        ingested(save(NEW.read_bytes()[:size]))


def test_a_forged_length_allocates_nothing(save: Callable[..., Path], ingested: Ingest) -> None:
    # An array of 2**32 - 1 elements is announced in the middle of the file.
    forged = b"\x91" + msgpack.packb(new()).replace(msgpack.packb([4, 5]), b"\xdd\xff\xff\xff\xff\x04\x05", 1)
    with pytest.raises(InputError, match=r"damaged or cut off.*4294967295 exceeds max_array_len"):
        ingested(save(forged))


def test_extension_types_are_not_built(save: Callable[..., Path], ingested: Ingest) -> None:
    struct = [*new()[:9], msgpack.ExtType(5, b"payload"), *[None] * 6]
    with pytest.raises(InputError, match=r"damaged or cut off.*max_ext_len"):
        ingested(save([struct]))


@pytest.mark.parametrize("content", [b"\x90", b"\x93abc", msgpack.packb([[1, 2, 3]]), msgpack.packb([[["a"]] * 16])])
def test_other_msgpack_is_not_claimed(content: bytes, save: Callable[..., Path]) -> None:
    with pytest.raises(UnrecognisedError):
        discover([save(content)])
