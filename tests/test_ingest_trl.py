from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, Evil, expected_values, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
HOOK = DATA / "trl/hook/generate_and_score_00010_rank0.pt"
ASYNC = DATA / "trl/hook/async_rollout_samples.jsonl"
TABLE = DATA / "trl/completions/completions_00010.parquet"
EXPECTED = json.loads((DATA / "expected.json").read_text())


def generated(**changes: Any) -> dict[str, torch.Tensor]:
    """Two sequences: responses of 4 (one tool token) and 2; tool_mask is 1 on padding."""
    tensors = {
        "prompt_ids": torch.tensor([[1, 2], [0, 3]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids": torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
        "old_per_token_logps": torch.tensor([[-1.5, -9.0, -2.5, -3.5], [-4.5, -5.5, -9.0, -9.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -8.0, -2.0, -3.0], [-4.0, -5.0, 0.0, 0.0]]),
        "advantages": torch.tensor([0.5, -0.5]),
        **changes,
    }
    return {name: value for name, value in tensors.items() if value is not ...}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(content: Any, name: str = "generate_and_score_00003_rank1.pt") -> Path:
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: dict[str, Any]) -> Path:
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def sample(**changes: Any) -> dict[str, Any]:
    """One RolloutSample: prompt of 1, response of 4 with a tool token."""
    fields = {
        "input_ids": [1, 11, 12, 13, 14],
        "completion_mask": [0, 1, 1, 0, 1],
        "old_log_probs": [0.0, -1.0, None, 0.0, -9999.0],
        "advantage": 0.5,
        "model_version": 7,
        "group_id": 2,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def test_right_values_of_the_hook(ingested: Ingest) -> None:
    store = ingested(HOOK)
    got = measured(store)
    for key, value in expected_values(DATA, "trl")["trl/hook/generate_and_score_00010_rank0.pt"].items():
        assert got[key] == pytest.approx(value, abs=TOLERANCE), key
    assert store.rows("select distinct step from tokens") == [{"step": 10}]


def test_every_column_against_torch(ingested: Ingest) -> None:
    raw = {name: value.numpy() for name, value in torch.load(HOOK, weights_only=True).items()}
    present = raw["completion_mask"].astype(bool)
    got = token_columns(ingested(HOOK), "token_id", "logp_train", "logp_infer", "loss_mask", "advantage")
    assert got["token_id"].tolist() == raw["completion_ids"][present].tolist()
    assert got["logp_train"].tolist() == raw["old_per_token_logps"][present].tolist()
    sampled = raw["tool_mask"][present].astype(bool)
    assert got["loss_mask"].tolist() == sampled.tolist()
    assert got["logp_infer"][sampled].tolist() == raw["sampling_per_token_logps"][present][sampled].tolist()
    assert got["advantage"].tolist() == np.broadcast_to(raw["advantages"][:, None], present.shape)[present].tolist()


def test_tool_mask_ignored_is_the_trap(ingested: Ingest) -> None:
    raw = torch.load(HOOK, weights_only=True)
    delta = raw["old_per_token_logps"].double() - raw["sampling_per_token_logps"].double()
    assert float(delta[raw["completion_mask"].bool()].sum()) == pytest.approx(-6.962707, abs=TOLERANCE)
    assert measured(ingested(HOOK))["sum_delta"] == pytest.approx(-2.130792, abs=TOLERANCE)


def test_padding_is_out_though_tool_mask_says_one(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(generated()))
    got = token_columns(store, "token_id", "loss_mask", "logp_infer", "logp_train")
    assert got["token_id"].tolist() == [11, 12, 13, 14, 21, 22]
    assert got["loss_mask"].tolist() == [True, False, True, True, True, True]
    rows = store.rows("select seq_key, step, prompt_len, advantage, trainer_version from sequences order by seq_id")
    assert [tuple(r.values()) for r in rows] == [
        ("generate_and_score_00003_rank1:0", 3, 2, 0.5, None),
        ("generate_and_score_00003_rank1:1", 3, 1, -0.5, None),
    ]


def test_without_tools_every_response_token_is_sampled(save: Callable[..., Path], ingested: Ingest) -> None:
    got = token_columns(ingested(save(generated(tool_mask=...))), "loss_mask")
    assert got["loss_mask"].tolist() == [True] * 6


def test_without_old_log_probs_there_is_no_training_column(save: Callable[..., Path]) -> None:
    with Store.memory() as store:
        report = ingest(store, discover([save(generated(old_per_token_logps=...))])).sources[0]
        assert "logp_train" not in dict(report.columns)
        assert any("old_per_token_logps" in note for note in report.notes)
        assert store.rows("select train_logp from runs")[0]["train_logp"] is None


def test_without_sampling_log_probs_the_key_is_named(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"rank1\.pt.*key 'sampling_per_token_logps'"):
        ingested(save(generated(sampling_per_token_logps=...)))


@pytest.mark.parametrize(("name", "shape"), [("tool_mask", (2, 3)), ("prompt_mask", (3, 2)), ("advantages", (3,))])
def test_unequal_lengths_are_named(
    name: str, shape: tuple[int, ...], save: Callable[..., Path], ingested: Ingest
) -> None:
    with pytest.raises(InputError, match=rf"rank1\.pt.*key '{name}'.*found shape \[{shape[0]}.*expected \[2"):
        ingested(save(generated(**{name: torch.ones(shape)})))


def test_right_values_of_the_async_samples(ingested: Ingest) -> None:
    want = EXPECTED["trl/hook/async_rollout_samples.jsonl"]
    store = ingested(ASYNC)
    got = measured(store)
    tokens = token_columns(store, "logp_infer", "logp_train", "loss_mask")
    mask = tokens["loss_mask"].filled(False).astype(bool)
    assert got["n_seq"] == want["n_seq"]
    assert int(mask.sum()) == want["n_counted_tokens"]
    assert int(np.ma.getmaskarray(tokens["logp_infer"])[mask].sum()) == want["n_null_logprobs"]
    assert got["sum_rollout_logprob_counted"] == pytest.approx(want["sum_mu_logprob_non_null"], abs=TOLERANCE)
    assert (got["version_min"], got["version_max"]) == (want["version_min"], want["version_max"])
    # old_log_probs is the inference engine here; as training log-probs they would give delta = 0.
    assert tokens["logp_train"].count() == 0


def test_async_nulls_and_floors_are_missing(lines: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(lines(sample(), sample(input_ids=[1, 11, 12, 13, 15], model_version=8)))
    got = token_columns(store, "token_id", "logp_infer", "loss_mask", "policy_version")
    assert got["token_id"].tolist() == [11, 12, 13, 14, 11, 12, 13, 15]
    assert got["logp_infer"].tolist() == [-1, None, None, None] * 2
    assert got["loss_mask"].tolist() == [True, True, False, True] * 2
    assert got["policy_version"].tolist() == [7] * 4 + [8] * 4
    row = store.rows("select * from sequences order by seq_id")[1]
    assert (row["group_id"], row["prompt_len"], row["advantage"], row["trainer_version"]) == ("2", 1, 0.5, None)
    run = store.rows("select * from runs")[0]
    assert (run["version_unit"], run["version_granularity"], run["train_logp"]) == ("update", "sequence", None)


def test_async_lists_of_unequal_length(lines: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"samples\.jsonl:2: .*key 'old_log_probs'.*4 values.*5 of 'input_ids'"):
        ingested(lines(sample(), sample(old_log_probs=[0.0, -1.0, -2.0, 0.0])))


def test_async_missing_field_is_named(lines: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"samples\.jsonl:2: .*key 'completion_mask'"):
        ingested(lines(sample(), sample(completion_mask=...)))


def test_completions_table_is_refused_with_the_hook() -> None:
    with pytest.raises(RefusedError, match=r"no tokens.*_generate_and_score_completions.*torch\.save.*use_vllm=True"):
        discover([TABLE])


def test_cut_off_files(tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / HOOK.name
    cut.write_bytes(HOOK.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"cut off"):
        discover([cut])
    cut = tmp_path / ASYNC.name
    cut.write_bytes(ASYNC.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"samples\.jsonl:8: not valid JSON"):
        ingested(cut)


def test_a_pickle_that_names_a_function_runs_nothing(
    save: Callable[..., Path], ingested: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"allow-list.*mkdir"):
        ingested(save(generated(advantages=Evil())))
    assert not (tmp_path / "owned").exists()
