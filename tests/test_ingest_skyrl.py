from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, Evil, expected_values, measured, token_columns

Ingest = Callable[..., Store]
Arrays = dict[str, NDArray[Any]]

DATA = Path(__file__).parent / "data"
EXPECTED = expected_values(DATA, "skyrl")
NEW = DATA / "skyrl/dumped_data/global_step_4_training_input.pkl"
OLD = DATA / "skyrl/old_2026_03/dumped_data/global_step_4_training_input.pkl"


class Kept:
    """What a name of the pickle becomes in the independent reader: it keeps its state."""

    def __init__(self, *args: Any) -> None:
        self.state = args[-1] if args else None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class AnyName(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Kept


def independently(path: Path) -> Arrays:
    state = AnyName(io.BytesIO(path.read_bytes())).load().state
    return {
        name: np.frombuffer(v["data"], v["dtype"]).reshape(v["shape"])
        for name, v in state["batch_dict"].items()
        if v is not None
    }


def batch(**changes: Any) -> dict[str, torch.Tensor | None]:
    """Two sequences in today's layout: prompts of 2 and 1, responses of 3 (one tool token) and 2."""
    tensors = {
        "sequences": torch.tensor([[1, 2, 11, 12, 13], [0, 0, 3, 21, 22]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]),
        "rollout_logprobs": torch.tensor([[-1.0, 0.0, -2.0], [0.0, -3.0, -9999.0]]),
        "action_log_probs": torch.tensor([[-1.5, -7.0, -2.5], [0.0, -3.5, -4.0]]),
        "values": None,
        **changes,
    }
    return {name: value for name, value in tensors.items() if value is not ...}


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Pickle as SkyRL's TrainingInputBatch does, under either of its module paths."""

    def write(tensors: dict[str, Any], package: str = "skyrl_train", **metadata: Any) -> Path:
        module = ModuleType(f"{package}.training_batch")

        class TrainingInputBatch:
            def __reduce__(self) -> Any:
                batch_dict = {name: serialised(t) if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}
                state = {"batch_dict": batch_dict, "batch_size": 2, "device": torch.device("cpu"), "metadata": metadata}
                return module._rebuild_tensor_batch, (TrainingInputBatch, state)

        def _rebuild_tensor_batch(cls: Any, state: Any) -> Any: ...

        named: dict[str, Any] = {
            "TrainingInputBatch": TrainingInputBatch,
            "_rebuild_tensor_batch": _rebuild_tensor_batch,
        }
        for name, value in named.items():
            value.__module__, value.__qualname__ = module.__name__, name
            setattr(module, name, value)
        parts = module.__name__.split(".")
        for length in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        path = tmp_path / "global_step_7_training_input.pkl"
        path.write_bytes(pickle.dumps(TrainingInputBatch()))
        return path

    return write


def serialised(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.dtype is torch.bfloat16:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    array = tensor.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


@pytest.mark.parametrize("name", EXPECTED)
def test_right_values(name: str, ingested: Ingest) -> None:
    store = ingested(DATA / name)
    got = measured(store)
    for key, value in EXPECTED[name].items():
        assert got[key] == pytest.approx(value, abs=TOLERANCE), key
    assert {r["step"] for r in store.rows("select distinct step from sequences")} == {4}


@pytest.mark.parametrize(("path", "width"), [(NEW, "right"), (OLD, "left")])
def test_every_column_against_an_independent_reader(path: Path, width: str, ingested: Ingest) -> None:
    raw = independently(path)
    got = token_columns(ingested(path), "token_id", "logp_infer", "logp_train", "advantage")
    want: dict[str, list[Any]] = {name: [] for name in got}
    for i, present in enumerate(raw["response_mask"]):
        n, edge = int(present.sum()), len(present)
        # Prompt tokens are what attention has and the response has not; the response follows them at once.
        real = np.flatnonzero(raw["attention_mask"][i])
        want["token_id"] += raw["sequences"][i, real[len(real) - n :]].tolist()
        cells = slice(edge - n, edge) if width == "right" else slice(0, n)
        sampled = raw["loss_mask"][i, cells] != 0
        logps = raw["rollout_logprobs"][i, cells].tolist()
        want["logp_infer"] += [x if m else None for x, m in zip(logps, sampled, strict=True)]
        want["logp_train"] += raw["action_log_probs"][i, cells].tolist()
        want["advantage"] += raw["advantages"][i, cells].tolist()
    for name, values in want.items():
        assert got[name].tolist() == values, name


@pytest.mark.parametrize(("path", "side"), [(NEW, "left"), (OLD, "right")])
def test_the_layout_is_told_from_the_response_mask(path: Path, side: str) -> None:
    with Store.memory() as store:
        notes = ingest(store, discover([path])).sources[0].notes
    assert any(f"responses are {side} padded" in note for note in notes)


@pytest.mark.parametrize("package", ["skyrl_train", "skyrl.backends.skyrl_train"])
def test_both_module_paths(package: str, save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(batch(), package))
    got = token_columns(store, "token_id", "logp_infer", "logp_train", "loss_mask")
    assert got["token_id"].tolist() == [11, 12, 13, 21, 22]
    assert got["loss_mask"].tolist() == [True, False, True, True, True]
    # 0.0 on a tool token and the engine's floor are no log-probs.
    assert got["logp_infer"].tolist() == [-1, None, -2, -3, None]
    assert got["logp_train"].tolist() == [-1.5, -7, -2.5, -3.5, -4]
    assert [r["prompt_len"] for r in store.rows("select prompt_len from sequences order by seq_id")] == [2, 1]


def test_bfloat16_tensors(save: Callable[..., Path], ingested: Ingest) -> None:
    train = torch.tensor([[-1.5, -7.0, -2.5], [0.0, -3.5, -4.0]], dtype=torch.bfloat16)
    got = token_columns(ingested(save(batch(action_log_probs=train))), "logp_train")
    assert got["logp_train"].tolist() == [-1.5, -7, -2.5, -3.5, -4]


def test_skipped_forward_leaves_the_training_column_out(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(batch(action_log_probs=None)))
    assert store.rows("select count(logp_train) as n, count(*) as all from tokens")[0] == {"n": 0, "all": 5}
    assert store.rows("select train_logp from runs")[0]["train_logp"] is None


def test_rows_that_fill_up_the_batch_are_left_out(save: Callable[..., Path]) -> None:
    padding = batch()
    padding["loss_mask"] = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    with Store.memory() as store:
        report = ingest(store, discover([save(padding, pad_size=1)])).sources[0]
        assert (report.n_sequences, report.n_tokens) == (1, 3)
        assert ("rows that only fill up the batch", 1) in report.counts
    with Store.memory() as store:
        # pad_size on rows that train is something else: nothing may be dropped.
        assert ingest(store, discover([save(batch(), pad_size=1)])).n_sequences == 2


def test_step_of_the_content_wins(save: Callable[..., Path], ingested: Ingest) -> None:
    store = ingested(save(batch(), global_step=9))
    assert store.rows("select distinct step from tokens") == [{"step": 9}]


def test_rows_at_both_edges_are_a_contradiction(save: Callable[..., Path], ingested: Ingest) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    with pytest.raises(InputError, match=r"contradict.*response_mask.*1 of 2 rows at the right edge, 1 at the left"):
        ingested(save(batch(response_mask=mask)))


def test_a_missing_field_is_named(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"global_step_7.*key 'rollout_logprobs'"):
        ingested(save(batch(rollout_logprobs=...)))


def test_unequal_lengths_are_named(save: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"global_step_7.*key 'rollout_logprobs'.*\[2, 2\].*\[2, 3\]"):
        ingested(save(batch(rollout_logprobs=torch.zeros(2, 2))))
    with pytest.raises(InputError, match=r"key 'response_mask'.*\[3, 3\].*\[2, 5\]"):
        ingested(save(batch(response_mask=torch.ones(3, 3))))


def test_bytes_that_do_not_fit_their_shape(save: Callable[..., Path], ingested: Ingest) -> None:
    broken = {"format": "numpy", "data": b"1234", "shape": (2, 3), "dtype": "float32"}
    with pytest.raises(InputError, match=r"key 'loss_mask'.*fit together"):
        ingested(save(batch(loss_mask=broken)))


def test_cut_off_file(tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / NEW.name
    cut.write_bytes(NEW.read_bytes()[:30_000])
    with pytest.raises(InputError, match=r"damaged or cut off"):
        ingested(cut)


def test_a_pickle_that_names_a_function_runs_nothing(
    save: Callable[..., Path], ingested: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"allow-list.*mkdir"):
        ingested(save(batch(), note=Evil()))
    assert not (tmp_path / "owned").exists()
