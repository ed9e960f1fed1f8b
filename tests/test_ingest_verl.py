from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.verl import VerlAdapter
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, expected_values, measured, token_columns

Ingest = Callable[..., Store]
Write = Callable[..., Path]

DATA = Path(__file__).parent / "data"
EXPECTED = expected_values(DATA, "verl")
HOOK = DATA / "verl/hook/global_step_12.dp"
CACHE = DATA / "verl/rollout_skip/exp_proj/GBS4_N4_in32_out128/12/gen_batch.dp"
QUEUE = DATA / "verl/rollout_tq/exp_proj/GBS2_N4_in32_out128/12/0/tq_batch.pt"

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*")


# Stand-ins for verl and tensordict that use real torch: they write files as the trainer does, and read
# them independently of the adapter.


class DataProto:
    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Consolidated:
    """A TensorDict in one flat buffer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        leaves, pieces, start = {}, [], 0
        for name, tensor in tensors.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            pad = -len(raw) % 8
            stop = start + len(raw) + pad
            leaves[name] = (str(tensor.dtype), list(tensor.shape), start, stop, pad)
            pieces += [raw, torch.zeros(pad, dtype=torch.uint8)]
            start = stop
        self.args = ({"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {}}, torch.cat(pieces))

    def __reduce__(self) -> Any:
        return sys.modules["tensordict._reductions"].__dict__["_rebuild_tensordict_files_consolidated"], self.args


def _rebuild_tensordict_files_consolidated(metadata: Any, storage: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        count = int(np.prod(shape))
        tensors[name] = storage[start:stop].view(getattr(torch, dtype.removeprefix("torch.")))[:count].view(shape)
    return tensors


class TensorDict:
    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        return sys.modules["tensordict._reductions"].__dict__["_make_td"], (TensorDict, {"_tensordict": self.tensors})


def _make_td(_cls: Any, state: dict[str, Any]) -> Any:
    return state["_tensordict"]


class NonTensorData:
    pass


class NonTensorStack:
    pass


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-ins importable under the trainer's names."""
    homes: dict[Any, str] = {
        DataProto: "verl.protocol",
        TensorDict: "tensordict._td",
        NonTensorData: "tensordict.tensorclass",
        NonTensorStack: "tensordict.tensorclass",
        _make_td: "tensordict._reductions",
        _rebuild_tensordict_files_consolidated: "tensordict._reductions",
    }
    for thing, home in homes.items():
        for name in (home.split(".")[0], home):
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(thing, "__module__", home)
        setattr(sys.modules[home], thing.__name__, thing)


@pytest.fixture
def write_dp(trainer: None, tmp_path: Path) -> Write:
    def write(
        name: str, tensors: dict[str, torch.Tensor], *, as_numpy: bool = False, others: Any = None, meta: Any = None
    ) -> Path:
        batch: Any
        if as_numpy:
            raw = {}
            for key, tensor in tensors.items():
                data = tensor.flatten().view(torch.uint8).numpy()
                raw[key] = (str(tensor.dtype).removeprefix("torch."), tensor.shape, data)
            batch = ((len(tensors["responses"]),), None, raw)
        else:
            stream = io.BytesIO()
            torch.save(Consolidated(tensors), stream)
            batch = stream.getvalue()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(DataProto((batch, others or {}, meta or {}))))
        return path

    return write


@pytest.fixture
def write_tq(trainer: None, tmp_path: Path) -> Write:
    def write(fields: dict[str, Any], tags: list[Any] | None = None) -> Path:
        keys = [f"prompt_a_{i}_0" for i in range(len(fields["responses"]))]
        path = tmp_path / "tq_batch.pt"
        tags = tags or [{} for _ in keys]
        torch.save({"keys": keys, "tensordict": TensorDict(fields), "tags": tags, "global_steps": 7}, path)
        return path

    return write


def small_batch() -> dict[str, torch.Tensor]:
    """Two sequences: 2 prompt and 3 response tokens (one of a tool), 1 prompt and 2 response tokens."""
    return {
        "prompts": torch.tensor([[5, 6], [0, 7]]),
        "responses": torch.tensor([[11, 12, 13, 0], [21, 22, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0, -1.5, 0.0], [-2.0, -0.25, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-0.625, -3.0, -1.25, -9.0], [-2.5, -0.125, -9.0, -9.0]]),
    }


def jagged(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def small_queue() -> dict[str, Any]:
    return {
        "prompts": jagged([5, 6], [7], dtype=torch.int64),
        "responses": jagged([11, 12, 13], [21, 22], dtype=torch.int64),
        "response_mask": jagged([1, 0, 1], [1, 1], dtype=torch.int64),
        "rollout_log_probs": jagged([-0.5, 0.0, -1.5], [-2.0, -0.25]),
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_values_are_those_of_the_manifest(name: str, ingested: Ingest) -> None:
    found = measured(ingested(DATA / name))
    wanted = EXPECTED[name]
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=0, abs=TOLERANCE)


def test_manifest_is_not_empty() -> None:
    assert len(EXPECTED) == 5


def test_the_two_serialisations_hold_the_same(ingested: Ingest) -> None:
    query = "select * exclude (source_id) from sequences order by seq_id"
    stores = [ingested(DATA / "verl" / folder) for folder in ("hook", "hook_numpy")]
    assert stores[0].rows(query) == stores[1].rows(query)
    assert stores[0].rows("select * from tokens order by all") == stores[1].rows("select * from tokens order by all")


@pytest.mark.parametrize("path", [HOOK, CACHE], ids=lambda p: p.stem)
def test_dataproto_equals_torch(path: Path, trainer: None, ingested: Ingest) -> None:
    batch, others, _ = pickle.loads(path.read_bytes()).state
    tensors = torch.load(io.BytesIO(batch), weights_only=False)
    response = tensors["attention_mask"][:, tensors["prompts"].shape[1] :].bool()
    mask = tensors["response_mask"][response].bool().numpy()
    store = ingested(path)
    pairs = {
        "token_id": "responses", "logp_infer": "rollout_log_probs", "logp_train": "old_log_probs",
        "entropy": "entropys", "advantage": "advantages",
    }  # fmt: skip
    found = token_columns(store, *pairs, "loss_mask")
    assert np.array_equal(found["loss_mask"], mask)
    for column, name in pairs.items():
        if name in tensors:
            assert np.array_equal(found[column][mask].filled(), tensors[name][response].numpy()[mask]), column
        else:
            assert found[column].count() == 0
    sequences = store.rows("select * from sequences order by seq_id")
    rewards = tensors["token_level_scores" if "token_level_scores" in tensors else "rm_scores"].sum(1)
    assert [s["reward"] for s in sequences] == rewards.tolist()
    assert [s["group_id"] for s in sequences] == others["uid"].tolist()
    assert [s["version_first"] for s in sequences] == others["min_global_steps"].tolist()
    assert [s["version_last"] for s in sequences] == others["max_global_steps"].tolist()


def test_transfer_queue_equals_torch(trainer: None, ingested: Ingest) -> None:
    payload = torch.load(QUEUE, weights_only=False)
    fields, tags = payload["tensordict"], payload["tags"]
    store = ingested(QUEUE)
    found = token_columns(store, "token_id", "loss_mask", "logp_infer")
    mask = fields["response_mask"].values().bool().numpy()
    assert np.array_equal(found["token_id"], fields["responses"].values())
    assert np.array_equal(found["loss_mask"], mask)
    assert np.array_equal(found["logp_infer"][mask].filled(), fields["rollout_log_probs"].values().numpy()[mask])
    sequences = store.rows("select * from sequences order by seq_id")
    assert [s["seq_key"] for s in sequences] == payload["keys"]
    assert [s["group_id"] for s in sequences] == [f"0b9d2c1e-0000-4000-8000-00000000000{i // 4}" for i in range(8)]
    assert [s["n_tokens"] for s in sequences] == [t["response_len"] for t in tags]
    assert [s["prompt_len"] for s in sequences] == [t["prompt_len"] for t in tags]
    assert [s["reward"] for s in sequences] == [float(row.sum()) for row in fields["rm_scores"].unbind()]
    assert {(s["step"], s["trainer_version"]) for s in sequences} == {(12, 11)}


def test_facts_and_names(ingested: Ingest) -> None:
    store = ingested(HOOK)
    run = store.rows("select * from runs")[0]
    wanted = {
        "trainer": "verl", "temperature": 1.0, "entropy_of": "train", "train_logp": "proximal",
        "version_unit": "step", "version_granularity": "sequence", "logprobs": None,
    }  # fmt: skip
    assert {name: run[name] for name in wanted} == wanted
    sequences = store.rows("select * from sequences order by seq_id")
    assert [s["seq_key"] for s in sequences] == [f"row{i}" for i in range(16)]
    assert {(s["step"], s["trainer_version"], s["finish"]) for s in sequences} == {(12, 11, None)}


def test_one_version_is_that_of_every_token_and_two_are_of_none(ingested: Ingest) -> None:
    query = """
        select version_first = version_last as one, count(policy_version) as known, count(*) as n
        from tokens join sequences using (seq_id) group by one
    """
    counts = {row["one"]: row for row in ingested(HOOK).rows(query)}
    assert counts[True]["known"] == counts[True]["n"] > 0
    assert counts[False]["known"] == 0


def test_text_dump_is_refused_with_the_hook() -> None:
    with pytest.raises(RefusedError, match=r"no log-probs.*union\(old_log_prob\): batch\.save_to_disk.*'entropys'"):
        discover([DATA / "verl/rollout_data"])


def test_bypass_mode_is_remarked_on(ingested: Ingest) -> None:
    notes = "select notes from sources where status = 'ingested'"
    assert "bypass_mode" in ingested(DATA / "verl/hook_bypass").rows(notes)[0]["notes"]
    assert "bypass_mode" not in ingested(HOOK).rows(notes)[0]["notes"]


@pytest.mark.parametrize("path", [CACHE, QUEUE], ids=lambda p: p.stem)
def test_cache_says_how_to_get_the_other_log_prob(path: Path, ingested: Ingest) -> None:
    store = ingested(path)
    assert "batch.save_to_disk" in store.rows("select notes from sources")[0]["notes"]
    assert store.rows("select count(logp_train) as n from tokens")[0]["n"] == 0


def test_probe_states_the_columns_that_are_there() -> None:
    adapter = VerlAdapter()
    columns = {p: adapter.probe(FileHead(p)) for p in (HOOK, CACHE, QUEUE, DATA / "verl/hook_numpy/global_step_12.dp")}
    found = {path: probe.columns for path, probe in columns.items() if probe}
    assert len(found) == 4
    assert found[HOOK]["entropy"] == "entropys"
    assert found[HOOK]["logp_train"] == "old_log_probs"
    assert found[HOOK] == found[DATA / "verl/hook_numpy/global_step_12.dp"]
    assert "logp_train" not in found[CACHE]
    assert found[CACHE]["logp_infer"] == "rollout_log_probs"
    assert "logp_train" not in found[QUEUE]
    assert (found[QUEUE]["group_id"], found[QUEUE]["version_last"]) == ("keys", "max_global_steps")


def test_no_other_trainers_file_is_claimed() -> None:
    files = [p for p in DATA.glob("*/**/*") if p.is_file() and not {"verl", "oracle"} & {*p.parts}]
    assert len(files) > 20
    assert [p for p in files if VerlAdapter().probe(FileHead(p))] == []


@pytest.mark.parametrize(
    ("name", "meta_json", "step"),
    [
        ("global_step_31.dp", None, 31),
        ("32.dp", None, 32),
        ("33/gen_batch.dp", None, 33),
        ("step_34/batch.dp", None, 34),
        ("group/gen_batch.dp", '{"global_steps": 35}', 35),
        ("group/batch.dp", "not json", 36),
    ],
)
def test_step(name: str, meta_json: str | None, step: int, write_dp: Write, ingested: Ingest) -> None:
    path = write_dp(name, small_batch(), meta={"global_steps": 36})
    if meta_json:
        (path.parent / "meta.json").write_text(meta_json)
    found = ingested(path).rows("select distinct step, trainer_version as v from sequences")
    assert found == [{"step": step, "v": step - 1}]


@pytest.mark.parametrize("as_numpy", [False, True])
def test_small_batch_token_by_token(as_numpy: bool, write_dp: Write, ingested: Ingest) -> None:
    first, last = np.array([[3, None], [4, None]], dtype=object)
    others = {"min_global_steps": first, "max_global_steps": last}
    store = ingested(write_dp("5.dp", small_batch(), as_numpy=as_numpy, others=others))
    found = store.rows("select token_id, loss_mask, logp_infer, logp_train, abs_pos from tokens order by seq_id, pos")
    assert [tuple(row.values()) for row in found] == [
        (11, True, -0.5, -0.625, 2), (12, False, None, -3.0, 3), (13, True, -1.5, -1.25, 4),
        (21, True, -2.0, -2.5, 1), (22, True, -0.25, -0.125, 2),
    ]  # fmt: skip
    found = store.rows("select version_first, version_last, prompt_len, group_id from sequences order by seq_id")
    assert [tuple(row.values()) for row in found] == [(3, 4, 2, None), (None, None, 1, None)]


@pytest.mark.parametrize("as_numpy", [False, True])
def test_bfloat16(as_numpy: bool, write_dp: Write, ingested: Ingest) -> None:
    batch = small_batch()
    batch["old_log_probs"] = (batch["old_log_probs"] / 3).to(torch.bfloat16)
    found = token_columns(ingested(write_dp("5.dp", batch, as_numpy=as_numpy)), "logp_train")["logp_train"]
    response = batch["attention_mask"][:, 2:].bool()
    assert np.array_equal(found.filled(), batch["old_log_probs"].float()[response].numpy())


def test_bfloat16_in_a_transfer_queue(write_tq: Write, ingested: Ingest) -> None:
    fields = small_queue()
    fields["rollout_log_probs"] = jagged([-0.3, 0.0, -1.7], [-2.1, -0.7], dtype=torch.bfloat16)
    found = token_columns(ingested(write_tq(fields)), "logp_infer")["logp_infer"]
    wanted = fields["rollout_log_probs"].values().float()[[0, 2, 3, 4]]
    assert np.array_equal(found.compressed(), wanted.numpy())


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"rm_scores": 1.0}, [3.0, 2.0]),
        ({"rm_scores": 1.0, "token_level_scores": 2.0, "token_level_rewards": 5.0}, [6.0, 4.0]),
        ({"token_level_rewards": 5.0}, [None, None]),
    ],
)
def test_reward_is_the_score_before_any_penalty(
    scores: dict[str, float], wanted: list[float | None], write_dp: Write, ingested: Ingest
) -> None:
    batch = small_batch()
    response = batch["attention_mask"][:, 2:].float()
    store = ingested(write_dp("5.dp", batch | {name: value * response for name, value in scores.items()}))
    assert [row["reward"] for row in store.rows("select reward from sequences order by seq_id")] == wanted


def test_sequence_without_response(write_dp: Write, ingested: Ingest) -> None:
    batch = small_batch()
    batch["attention_mask"][1, 2:] = 0
    batch["response_mask"][1] = 0
    lengths = ingested(write_dp("5.dp", batch)).rows("select n_tokens from sequences order by seq_id")
    assert [row["n_tokens"] for row in lengths] == [3, 0]


def test_padding_rows_are_left_out_and_counted(write_tq: Write, ingested: Ingest) -> None:
    store = ingested(write_tq(small_queue(), [{"is_padding": True}, {"is_padding": False, "prompt_len": 1}]))
    assert store.rows("select token_id from tokens order by pos") == [{"token_id": 21}, {"token_id": 22}]
    assert store.rows("select seq_key, group_id, prompt_len, n_tokens from sequences") == [
        {"seq_key": "prompt_a_1_0", "group_id": "prompt_a", "prompt_len": 1, "n_tokens": 2}
    ]
    assert "is_padding" in store.rows("select counts from sources")[0]["counts"]


def test_batch_that_is_not_consolidated(trainer: None, tmp_path: Path, ingested: Ingest) -> None:
    stream = io.BytesIO()
    torch.save(TensorDict(small_batch() | {"routed_experts": jagged([1.0], [2.0, 3.0])}), stream)
    path = tmp_path / "5.dp"
    path.write_bytes(pickle.dumps(DataProto((stream.getvalue(), {}, {}))))
    found = token_columns(ingested(path), "logp_train")["logp_train"]
    assert found.tolist() == [-0.625, -3.0, -1.25, -2.5, -0.125]


@pytest.mark.parametrize("state", [None, (1, 2), (None, {}, {}), (5, {}, {}), ((1, None, {"responses": 3}), {}, {})])
def test_pickle_of_something_else(state: Any, trainer: None, tmp_path: Path, ingested: Ingest) -> None:
    path = tmp_path / "5.dp"
    path.write_bytes(pickle.dumps(DataProto(state)))
    with pytest.raises(InputError, match=r"5\.dp: (no verl batch|a field is missing|this file is damaged)"):
        ingested(path)


def test_hook_of_the_new_trainer(write_tq: Write, ingested: Ingest) -> None:
    # Rows of equal length are stacked densely by the queue.
    fields = {
        "responses": torch.tensor([[11, 12], [21, 22]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, -0.25], [-1.0, 0.0]]),
        "old_log_probs": torch.tensor([[-0.75, -0.5], [-1.5, -4.0]]),
        "entropy": torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
    }
    store = ingested(write_tq(fields))
    query = "select logp_train - logp_infer as delta, entropy from tokens where loss_mask order by seq_id, pos"
    assert [tuple(row.values()) for row in store.rows(query)] == [(-0.25, 0.5), (-0.25, 0.25), (-0.5, 1.0)]


@pytest.mark.parametrize("path", [HOOK, QUEUE], ids=lambda p: p.stem)
@pytest.mark.parametrize("part", [0.5, 0.99])
def test_truncated_file(path: Path, part: float, tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(InputError, match=r"cut off|not a readable torch file") as error:
        ingested(cut)
    assert str(cut) in str(error.value)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_missing_field(as_numpy: bool, write_dp: Write, ingested: Ingest) -> None:
    batch = small_batch()
    batch["response_masks"] = batch.pop("response_mask")
    path = write_dp("5.dp", batch, as_numpy=as_numpy)
    with pytest.raises(InputError, match=r"'response_mask'.*nearest names: response_masks") as error:
        ingested(path)
    assert str(path) in str(error.value)


def test_missing_field_in_a_transfer_queue(write_tq: Write, ingested: Ingest) -> None:
    fields = small_queue()
    del fields["rollout_log_probs"]
    with pytest.raises(InputError, match=r"tq_batch\.pt.*'rollout_log_probs'.*calculate_log_probs"):
        ingested(write_tq(fields))


@pytest.mark.parametrize("name", ["old_log_probs", "response_mask", "attention_mask"])
def test_tensors_that_do_not_fit(name: str, write_dp: Write, ingested: Ingest) -> None:
    batch = small_batch()
    batch[name] = batch[name][:, :3]
    with pytest.raises(InputError, match=rf"5\.dp.*'{name}'.*shape \[2, 3\]"):
        ingested(write_dp("5.dp", batch))


def test_lists_of_unequal_length(write_tq: Write, ingested: Ingest) -> None:
    fields = small_queue()
    fields["rollout_log_probs"] = jagged([-0.5, 0.0, -1.5], [-2.0])
    with pytest.raises(InputError, match=r"tq_batch\.pt:2: .*sequence 1 \(key 'rollout_log_probs'\); found 1 values"):
        ingested(write_tq(fields))


def test_values_a_row_that_are_too_few(write_dp: Write, ingested: Ingest) -> None:
    path = write_dp("5.dp", small_batch(), others={"uid": np.array(["a"], dtype=object)})
    with pytest.raises(InputError, match=r"'uid'\); found 1 values; expected 2"):
        ingested(path)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("where", ["values", "tensors", "queue"])
def test_nothing_of_a_malicious_file_is_run(
    where: str, write_dp: Write, write_tq: Write, tmp_path: Path, ingested: Ingest
) -> None:
    mark = tmp_path / "mark"
    evil: Any = Malicious(mark)
    if where == "values":
        path = write_dp("5.dp", small_batch(), others={"uid": evil})
    elif where == "tensors":
        stream = io.BytesIO()
        torch.save({"responses": evil}, stream)
        path = tmp_path / "5.dp"
        path.write_bytes(pickle.dumps(DataProto((stream.getvalue(), {}, {}))))
    else:
        path = write_tq(small_queue() | {"uid": evil})
    with pytest.raises(InputError, match=r"not on the allow-list.*system"):
        ingested(path)
    assert not mark.exists()


def test_the_malicious_file_would_have_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Malicious(mark)))
    assert mark.exists()
