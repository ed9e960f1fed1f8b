from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from estr_diag.errors import InputError
from estr_diag.ingestion.discovery import discover
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, Evil, expected_values, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
HOOK = DATA / "openrlhf/hook/experiences_step_12.pt"


def experience(**changes: Any) -> dict[str, Any]:
    """Two sequences, the second one token shorter; the first has a tool token in its response."""
    fields = {
        "sequences": torch.tensor([[1, 2, 11, 12, 13, 14], [3, 4, 5, 21, 22, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
        "action_mask": torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], dtype=torch.bool),
        "rollout_log_probs": torch.tensor([[0.0, -1.0, -2.0, 0.0, -3.0], [0.0, 0.0, -4.0, -5.0, 0.0]]),
        "action_log_probs": torch.tensor([[-8.0, -1.5, -2.5, -8.0, -3.5], [-8.0, -8.0, -4.5, -5.5, -8.0]]),
        "base_action_log_probs": None,
        "rewards": torch.tensor([1.0, 0.0]),
        "truncated": torch.tensor([False, True]),
        "index": [4, 4],
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(*experiences: Any, name: str = "experiences_step_3.pt", **top: Any) -> Path:
        torch.save({"global_step": 5, "experiences": list(experiences), **top}, tmp_path / name)
        return tmp_path / name

    return write


def test_right_values(ingested: Ingest) -> None:
    got = measured(ingested(HOOK))
    for key, value in expected_values(DATA, "openrlhf")["openrlhf/hook/experiences_step_12.pt"].items():
        assert got[key] == pytest.approx(value, abs=TOLERANCE), key


def test_every_column_against_torch(ingested: Ingest) -> None:
    got = token_columns(ingested(HOOK), "token_id", "logp_infer", "logp_train", "loss_mask", "advantage", "step")
    want: dict[str, list[Any]] = {name: [] for name in got}
    for e in torch.load(HOOK, weights_only=True)["experiences"]:
        total = int(e["attention_mask"].sum())
        first = int(e["action_mask"][0].int().argmax()) + 1  # the first token that an action entry speaks of
        for token in range(first, total):
            sampled = bool(e["action_mask"][0, token - 1])
            want["token_id"].append(int(e["sequences"][0, token]))
            want["logp_infer"].append(float(e["rollout_log_probs"][0, token - 1]) if sampled else None)
            want["logp_train"].append(float(e["action_log_probs"][0, token - 1]))
            want["loss_mask"].append(sampled)
            want["advantage"].append(float(e["advantages"][0, token - 1]))
            want["step"].append(12)
    for name, values in want.items():
        assert got[name].tolist() == values, name


def test_mask_one_position_late_is_the_trap(ingested: Ingest) -> None:
    wrong = 0.0
    for e in torch.load(HOOK, weights_only=True)["experiences"]:
        late = torch.roll(e["action_mask"], 1, dims=1)
        late[:, 0] = False
        wrong += float((e["action_log_probs"].double() - e["rollout_log_probs"].double())[late].sum())
    assert wrong == pytest.approx(0.119568, abs=TOLERANCE)
    assert measured(ingested(HOOK))["sum_delta"] == pytest.approx(1.871661, abs=TOLERANCE)


def test_sequences(ingested: Ingest, save: Callable[..., Path]) -> None:
    store = ingested(save(experience(), experience(index=[7, 7])))
    rows = store.rows("select * from sequences order by seq_id")
    assert [r["seq_key"] for r in rows] == [f"experiences_step_3:{n}:{i}" for n in range(2) for i in range(2)]
    assert [(r["n_tokens"], r["prompt_len"], r["reward"], r["finish"]) for r in rows] == [
        (4, 2, 1, "stop"),
        (2, 3, 0, "length"),
    ] * 2
    assert [r["group_id"] for r in rows] == ["5:4", "5:4", "5:7", "5:7"]
    assert {r["step"] for r in rows} == {5}  # of the content, not of the file name
    assert store.rows("select train_logp, entropy_of from runs")[0] == {"train_logp": "proximal", "entropy_of": None}


def test_single_samples_have_no_batch_dimension(ingested: Ingest, save: Callable[..., Path]) -> None:
    whole = experience()
    singles = [{n: v[i] if v is not None else None for n, v in whole.items()} for i in range(2)]
    split, together = ingested(save(*singles)), ingested(save(whole))
    names = ("token_id", "logp_infer", "logp_train", "loss_mask")
    got, want = token_columns(split, *names), token_columns(together, *names)
    for name in names:
        assert got[name].tolist() == want[name].tolist()
    assert [r["prompt_len"] for r in split.rows("select prompt_len from sequences order by seq_id")] == [2, 3]


def test_left_padding(ingested: Ingest, save: Callable[..., Path]) -> None:
    left = experience(
        sequences=torch.tensor([[0, 3, 4, 5, 21, 22]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]),
        action_mask=torch.tensor([[0, 0, 0, 1, 1]]),
        rollout_log_probs=torch.tensor([[0.0, 0, 0, -4, -5]]),
        action_log_probs=torch.tensor([[-8.0, -8, -8, -4.5, -5.5]]),
        rewards=...,
        truncated=...,
        index=...,
    )
    store = ingested(save(left))
    assert token_columns(store, "token_id")["token_id"].tolist() == [21, 22]
    assert store.rows("select prompt_len, group_id, reward from sequences")[0] == {
        "prompt_len": 3,
        "group_id": None,
        "reward": None,
    }


@pytest.mark.parametrize("name", ["rollout_log_probs", "action_log_probs"])
def test_a_missing_field_is_named(name: str, ingested: Ingest, save: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=rf"step_3\.pt:2: .*key '{name}'"):
        ingested(save(experience(), experience(**{name: None})))


def test_action_tensors_as_long_as_the_tokens(ingested: Ingest, save: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"step_3\.pt:1: .*key 'rollout_log_probs'.*\[2, 6\].*\[2, 5\], one fewer"):
        ingested(save(experience(rollout_log_probs=torch.zeros(2, 6))))


def test_experiences_that_are_no_list(ingested: Ingest, save: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"key 'experiences'"):
        ingested(save(experience(), experiences={"a": experience()}))


def test_cut_off_file(tmp_path: Path) -> None:
    cut = tmp_path / HOOK.name
    cut.write_bytes(HOOK.read_bytes()[:-400])
    with pytest.raises(InputError, match=r"cut off"):
        discover([cut])


def test_a_pickle_that_names_a_function_runs_nothing(
    save: Callable[..., Path], ingested: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"allow-list.*mkdir"):
        ingested(save(experience(info=Evil())))
    assert not (tmp_path / "owned").exists()
