from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.adapter import ReadOptions
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, Evil, expected_values, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
EXPECTED = expected_values(DATA, "areal")
BEFORE = DATA / "areal/hook/rollout_batch_step_12.pt"
AFTER = DATA / "areal/hook/after_advantages_step_12.pt"


def trajectory(**changes: Any) -> dict[str, torch.Tensor]:
    """Two sequences of one stage: before compute_advantages. The second is shorter and ends in a tool token."""
    tensors = {
        "input_ids": torch.tensor([[1, 2, 11, 12, 13], [3, 21, 22, 23, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.int32),
        "versions": torch.tensor([[-1, -1, 4, 4, 5], [-1, 5, 5, -1, 0]], dtype=torch.int32),
        "logprobs": torch.tensor([[0, 0, -1.0, -2.0, -3.0], [0, -4.0, -5.0, 0, 0]]),
        "prox_logp": torch.tensor([[-9, -1.5, -2.5, -3.5, -9], [-4.5, -5.5, -9, -9, -9]]),
        "rewards": torch.tensor([1.0, 0.0]),
        **changes,
    }
    return {name: value for name, value in tensors.items() if value is not ...}


def rolled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What compute_advantages makes of a trajectory."""
    moved = {name: torch.roll(tensors[name], -1, dims=1) for name in ("logprobs", "loss_mask")}
    return {**tensors, **moved, "advantages": torch.ones_like(tensors["logprobs"])}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(content: Any, name: str = "rollout_batch_step_3.pt") -> Path:
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", EXPECTED)
def test_right_values(name: str, ingested: Ingest) -> None:
    got = measured(ingested(DATA / name))
    for key, value in EXPECTED[name].items():
        assert got[key] == pytest.approx(value, abs=TOLERANCE), key


def test_every_column_against_torch(ingested: Ingest) -> None:
    raw = {name: value.numpy() for name, value in torch.load(BEFORE, weights_only=True).items()}
    names = ("token_id", "logp_infer", "logp_train", "policy_version", "loss_mask", "trainer_version", "step")
    got = token_columns(ingested(BEFORE), *names)
    row: dict[str, list[Any]] = {name: [] for name in names[:5]}
    for i in range(len(raw["input_ids"])):
        places = range(int(np.argmax(raw["loss_mask"][i])), int(raw["attention_mask"][i].sum()))
        row["token_id"] += [raw["input_ids"][i, t] for t in places]
        row["logp_infer"] += [raw["logprobs"][i, t] if raw["loss_mask"][i, t] else None for t in places]
        row["logp_train"] += [raw["prox_logp"][i, t - 1] for t in places]
        row["policy_version"] += [raw["versions"][i, t] if raw["versions"][i, t] >= 0 else None for t in places]
        row["loss_mask"] += [bool(raw["loss_mask"][i, t]) for t in places]
    for name, values in row.items():
        assert got[name].tolist() == values, name
    assert set(got["step"].tolist()) == set(got["trainer_version"].tolist()) == {12}


def test_prox_logp_read_in_place_is_the_trap(ingested: Ingest) -> None:
    raw = torch.load(BEFORE, weights_only=True)
    mask = raw["loss_mask"].bool()
    wrong = (raw["prox_logp"].double() - raw["logprobs"].double())[mask]
    assert float(wrong.sum()) == pytest.approx(-16.207915, abs=TOLERANCE)
    assert float(wrong.abs().sum()) > 20 * measured(ingested(BEFORE))["sum_abs_delta"]


def test_both_stages_are_the_same_log() -> None:
    with Store.memory() as store:
        summary = ingest(store, discover([BEFORE, AFTER]))
        assert [s.status for s in summary.sources] == ["ingested", "copy"]
        # The late stage has advantages as well, so it is the one that is kept.
        assert summary.sources[0].path == AFTER
        assert dict(summary.sources[0].columns)["advantage"] == 914


@pytest.mark.parametrize("late", [False, True])
def test_a_row_that_ends_in_a_tool_token_does_not_mislead(
    late: bool, save: Callable[..., Path], ingested: Ingest
) -> None:
    tensors = rolled(trajectory()) if late else trajectory()
    got = token_columns(ingested(save(tensors)), "token_id", "logp_infer", "logp_train", "policy_version", "loss_mask")
    assert got["token_id"].tolist() == [11, 12, 13, 21, 22, 23]
    assert got["loss_mask"].tolist() == [True] * 5 + [False]
    assert got["logp_infer"].tolist() == [-1, -2, -3, -4, -5, None]
    assert got["logp_train"].tolist()[:5] == [-1.5, -2.5, -3.5, -4.5, -5.5]
    assert got["policy_version"].tolist() == [4, 4, 5, 5, 5, None]


def test_a_list_of_trajectories(save: Callable[..., Path], ingested: Ingest) -> None:
    wide = {name: torch.nn.functional.pad(t, (0, 3)) if t.ndim == 2 else t for name, t in trajectory().items()}
    wide["prox_logp"] = torch.roll(wide["prox_logp"], 1, dims=1)  # read one late on purpose: other values
    idle = trajectory(loss_mask=torch.zeros(2, 5, dtype=torch.int32), prox_logp=...)
    store = ingested(save([trajectory(), wide, idle]))
    rows = store.rows("select * from sequences order by seq_id")
    assert [r["seq_key"] for r in rows] == [f"rollout_batch_step_3:{n}:{i}" for n in range(3) for i in range(2)]
    assert [r["n_tokens"] for r in rows] == [3, 3] * 3
    assert [(r["prompt_len"], r["reward"]) for r in rows] == [(2, 1), (1, 0)] * 3
    assert [(r["version_first"], r["version_last"]) for r in rows[:4]] == [(4, 5), (5, 5)] * 2
    trained = store.rows("select count(logp_train) as n from tokens where seq_id in (5, 6)")[0]["n"]
    assert trained == 0


def test_step_of_the_command_line_is_the_trainer_version(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(trajectory(), "dump.pt"), options=ReadOptions(step=8))
    assert store.rows("select distinct step, trainer_version from tokens") == [{"step": 8, "trainer_version": 8}]
    unknown = ingested(save(trajectory(), "dump.pt"))
    nothing = {"step": None, "trainer_version": None}
    assert unknown.rows("select distinct step, trainer_version from tokens") == [nothing]


def test_without_prox_logp_there_is_no_training_column(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(trajectory(prox_logp=...)))
    assert store.rows("select count(logp_train) as n, count(logp_infer) as mu from tokens")[0] == {"n": 0, "mu": 5}
    run = store.rows("select * from runs")[0]
    assert (run["train_logp"], run["version_unit"], run["version_granularity"]) == (None, "update", "token")


def test_rows_that_contradict_each_other(save: Callable[..., Path], ingested: Ingest) -> None:
    early = rolled(trajectory())["loss_mask"]
    mixed = torch.stack([trajectory()["loss_mask"][0], early[1]])
    with pytest.raises(InputError, match=r"contradict.*loss_mask.*at the token in 1 row.*row 0.*early in 1.*row 1"):
        ingested(save(trajectory(loss_mask=mixed)))


def test_a_mask_that_shows_no_stage(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"before or after compute_advantages"):
        ingested(save(trajectory(loss_mask=torch.zeros(2, 5))))


@pytest.mark.parametrize("name", ["logprobs", "attention_mask"])
def test_a_missing_field_is_named(name: str, save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=rf"step_3\.pt:2: .*key '{name}'"):
        ingested(save([trajectory(), trajectory(**{name: ...})]))


def test_unequal_lengths_are_named(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"step_3\.pt:1: .*key 'logprobs'.*\[2, 4\].*\[2, 5\]"):
        ingested(save(trajectory(logprobs=torch.zeros(2, 4))))
    with pytest.raises(InputError, match=r"key 'rewards'.*\[3\].*\[2\]"):
        ingested(save(trajectory(rewards=torch.zeros(3))))


def test_text_dump_is_refused_with_the_hook() -> None:
    with pytest.raises(RefusedError, match=r"head_version is -1 by fault.*torch\.save.*3 more"):
        discover([DATA / "areal/rollout"])


def test_cut_off_file(tmp_path: Path) -> None:
    cut = tmp_path / "rollout_batch_step_12.pt"
    cut.write_bytes(BEFORE.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"cut off"):
        discover([cut])


def test_a_pickle_that_names_a_function_runs_nothing(
    save: Callable[..., Path], ingested: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"allow-list.*mkdir"):
        ingested(save(trajectory(rewards=Evil())))
    assert not (tmp_path / "owned").exists()
