"""What TokenRecorder writes is what comes out of the log."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import estr_diag as ed
from estr_diag.errors import UsageError
from estr_diag.ingestion.mapping import Run
from estr_diag.recorder import TokenColumns, TokenRecorder
from estr_diag.recorder.manifest import CHOICES, FACTS
from estr_diag.schema import RUN_FACTS_KEY, SEQUENCE_COLUMNS_IN_LOG, TOKENS
from estr_diag.store.export import export

LENS = np.array([9, 3, 0, 1, 7])
WIDTH = 9
PRESENT = np.arange(WIDTH) < LENS[:, None]


def batch(seed: int = 0) -> dict[str, Any]:
    """A padded batch of five sequences; padding holds what would be noticed."""
    rng = np.random.default_rng(seed)
    shape = PRESENT.shape
    logp = -rng.exponential(1.0, shape).astype(np.float32)
    columns: dict[str, Any] = {
        "logp_infer": logp,
        "logp_train": logp + rng.normal(0, 0.1, shape).astype(np.float32),
        "entropy": rng.exponential(1.0, shape).astype(np.float32),
        "collision": rng.random(shape, dtype=np.float32),
        "token_id": rng.integers(0, 150_000, shape),
        "policy_version": rng.integers(3, 6, shape),
        "advantage": rng.normal(size=shape).astype(np.float32),
        "loss_mask": rng.random(shape) < 0.8,
    }
    for values in columns.values():
        values[~PRESENT] = 1 if values.dtype == bool else 77
    return columns


def per_sequence() -> dict[str, Any]:
    return {
        "trainer_version": 6,
        "group_id": np.array(["a", "a", "b", "b", None], dtype=object),
        "reward": [1.0, 0.0, 0.5, -1.0, None],
        "prompt_len": [4, 4, 9, 9, 2],
        "finish": ["stop", "length", "abort", "stop", "stop"],
    }


def packed(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: values[PRESENT] for name, values in columns.items()}


def read(
    folder: Path,
    query: str = "select * exclude (source_id) from sequences join tokens using (seq_id) order by seq_id, pos",
) -> dict[str, Any]:
    with ed.open(folder) as log:
        return {name: np.asarray(c.to_numpy()) for name, c in zip(*_columns(log.sql(query)), strict=True)}


def _columns(result: Any) -> tuple[list[str], list[Any]]:
    table = result.to_arrow()
    return table.column_names, table.columns


def write(folder: Path, *writes: dict[str, Any], **options: Any) -> Path:
    with TokenRecorder(folder, trainer="mine", **options) as recorder:
        for arguments in writes:
            recorder.write(**{"step": 3, **arguments})
    return folder


def shards(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.parquet"))


def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    columns = batch()
    found = read(write(tmp_path, columns | per_sequence() | {"seq_lens": LENS}))
    for name, values in columns.items():
        expected = values[PRESENT]
        if expected.dtype == np.float32:
            np.testing.assert_array_equal(found[name].view(np.int32), expected.view(np.int32), err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], expected, err_msg=name)
    np.testing.assert_array_equal(found["pos"], np.concatenate([np.arange(n) for n in LENS]))
    assert set(found["step"]) == {3}
    assert set(found["trainer_version"]) == {6}
    sequences = read(tmp_path, "select * from sequences order by seq_id")
    assert list(sequences["n_tokens"]) == LENS.tolist()
    assert list(sequences["group_id"]) == ["a", "a", "b", "b", None]
    assert list(sequences["finish"]) == per_sequence()["finish"]
    np.testing.assert_array_equal(sequences["reward"], [1.0, 0.0, 0.5, -1.0, np.nan])
    assert list(sequences["prompt_len"]) == [4, 4, 9, 9, 2]


def test_every_layout_gives_the_same_shard(tmp_path: Path) -> None:
    columns, rest = batch(), per_sequence()
    flat = packed(columns)
    ends = np.concatenate([[0], np.cumsum(LENS)])
    shifted = {name: np.concatenate([values[:, -2:], values], axis=1) for name, values in columns.items()}
    rows = {name: [v[a:b] for a, b in itertools.pairwise(ends)] for name, v in flat.items()}
    layouts = {
        "padded": columns | {"seq_lens": LENS},
        "mask": columns | {"response_mask": PRESENT.astype(np.float32)},
        "starts": shifted | {"seq_lens": LENS, "starts": np.full(5, 2)},
        "cu_seqlens": flat | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)},
        "leading axis": {name: v[None] for name, v in flat.items()} | {"cu_seqlens": ends},
        "seq_lens": flat | {"seq_lens": LENS},
        "arrays": rows,
        "lists": {name: [row.tolist() for row in values] for name, values in rows.items()},
        "nested": {
            name: torch.nested.as_nested_tensor([torch.as_tensor(r) for r in values], layout=torch.jagged)
            for name, values in rows.items()
        },
        "torch": {name: torch.as_tensor(v).requires_grad_(v.dtype == np.float32) for name, v in columns.items()}
        | {"seq_lens": torch.as_tensor(LENS)},
    }
    for name, arguments in layouts.items():
        write(tmp_path / name, arguments | rest)
    first = pq.read_table(tmp_path / "padded" / shards(tmp_path / "padded")[0])
    for name in layouts:
        assert pq.read_table(tmp_path / name / shards(tmp_path / name)[0]).equals(first), name


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_become_float32(tmp_path: Path, kind: torch.dtype) -> None:
    columns = batch()
    given = {n: torch.as_tensor(v).to(kind) if v.dtype == np.float32 else v for n, v in columns.items()}
    found = read(write(tmp_path, given | {"seq_lens": LENS}))
    for name in ("logp_infer", "logp_train", "entropy", "advantage"):
        np.testing.assert_array_equal(found[name], given[name].float().numpy()[PRESENT])


def test_values_are_written_as_they_are(tmp_path: Path) -> None:
    odd = [np.nan, np.inf, -np.inf, 0.25, -9999.0, 1.0]
    write(tmp_path, {"logp_infer": [odd], "logp_train": [[-1.0, None, -1.0, -1.0, -1.0, -1.0]], "loss_mask": True})
    [shard] = shards(tmp_path)
    table = pq.read_table(tmp_path / shard)
    np.testing.assert_array_equal(table["logp_infer"].to_pylist()[0], odd)
    assert table["logp_train"].to_pylist()[0][1] is None
    # A positive log-prob is for the checks to judge; what is missing is for the reader.
    np.testing.assert_array_equal(read(tmp_path)["logp_infer"], [np.nan, np.nan, np.nan, 0.25, np.nan, np.nan])


def test_missing_whole_numbers_are_null(tmp_path: Path) -> None:
    given = {
        "logp_infer": [[-1.0, -2.0]],
        "loss_mask": [[1, 0]],
        "policy_version": [[5.0, np.nan]],
        "token_id": [[7, 8]],
    }
    write(tmp_path, given | {"version_first": np.array([None], dtype=object), "token_text": [["a", None]]})
    table = pq.read_table(tmp_path / shards(tmp_path)[0])
    assert table["policy_version"].to_pylist() == [[5, None]]
    assert table["version_first"].to_pylist() == [None]
    assert table["token_text"].to_pylist() == [["a", None]]


def test_the_arrays_may_be_reused_at_once(tmp_path: Path) -> None:
    columns = batch() | {"seq_lens": LENS}
    expected = batch()
    with TokenRecorder(tmp_path, trainer="mine") as recorder:
        recorder.write(step=3, **columns)
        for values in columns.values():
            values[...] = 0
    np.testing.assert_array_equal(read(tmp_path)["token_id"], expected["token_id"][PRESENT])


def test_what_a_sequence_has_once_is_stored_once(tmp_path: Path) -> None:
    columns = batch() | {"policy_version": np.arange(5), "advantage": np.arange(5)[:, None] / 2, "seq_lens": LENS}
    write(tmp_path, columns)
    table = pq.read_table(tmp_path / shards(tmp_path)[0])
    assert table["policy_version"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["advantage"].to_pylist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    np.testing.assert_array_equal(read(tmp_path)["policy_version"], np.repeat(np.arange(5), LENS))


def test_a_mask_of_sequences_is_spread_over_their_tokens(tmp_path: Path) -> None:
    keep = np.array([True, False, True, True, False])
    write(tmp_path, batch() | {"trainer_keep": keep, "seq_lens": LENS})
    np.testing.assert_array_equal(read(tmp_path)["trainer_keep"], np.repeat(keep, LENS))


def test_lengths_come_from_the_loss_mask_and_holes_stay_inside(tmp_path: Path) -> None:
    mask = np.array([[1, 0, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    logp = np.full(mask.shape, -1.0)
    write(tmp_path, {"logp_infer": logp, "logp_train": logp, "loss_mask": mask})
    table = pq.read_table(tmp_path / shards(tmp_path)[0])
    assert table["loss_mask"].to_pylist() == [[True, False, True], [False, True, True, True, True], []]


def test_an_empty_batch_writes_nothing(tmp_path: Path) -> None:
    empty = torch.zeros(0, 4)
    write(
        tmp_path,
        {"logp_infer": [], "logp_train": [], "loss_mask": [], "reward": []},
        {"logp_infer": empty, "logp_train": empty, "loss_mask": empty, "reward": empty[:, 0]},
    )
    assert shards(tmp_path) == []


def test_the_facts_are_in_the_manifest_and_in_every_shard(tmp_path: Path) -> None:
    facts = {"temperature": 1, "top_k": np.int64(-1), "dtype": torch.bfloat16, "entropy_of": "train", "engine": None}
    write(tmp_path, batch() | {"seq_lens": LENS}, facts=facts)
    expected = {"trainer": "mine", "temperature": 1.0, "top_k": -1, "dtype": "bfloat16", "entropy_of": "train"}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {k: v for k, v in manifest["run"].items() if v is not None} == expected
    assert (manifest["estr_diag"], manifest["ranks"]) == (ed.__version__, [0])
    stored = pq.read_schema(tmp_path / shards(tmp_path)[0]).metadata[RUN_FACTS_KEY.encode()]
    assert json.loads(stored) == expected
    # What the reader of files accepts as facts.
    assert Run.model_validate_json(stored).dtype == "bfloat16"


def test_names_and_choices_are_those_of_the_reader() -> None:
    tokens = [name for name in TOKENS.names if name not in ("seq_id", "pos", "abs_pos", "step")]
    assert set(TokenColumns.__annotations__) == {*tokens, *SEQUENCE_COLUMNS_IN_LOG}
    assert {"trainer", *FACTS} == set(Run.model_fields)
    hints = get_type_hints(Run)
    for name, choices in CHOICES.items():
        literal, _none = get_args(hints[name])
        assert get_args(literal) == choices


class Sharded:
    """What a tensor of several ranks looks like."""

    detach = cpu = full_tensor = None


B, T = 2, 4
GOOD: dict[str, Any] = {
    "logp_infer": np.full((B, T), -1.0),
    "logp_train": np.full((B, T), -1.0),
    "loss_mask": np.ones((B, T)),
}
FLAT: dict[str, Any] = {name: values.reshape(-1) for name, values in GOOD.items()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (GOOD | {"logp_trian": 1}, "'logp_trian' is no column of the token log; did you mean 'logp_train'"),
        (GOOD | {"seq_id": [1, 2]}, "'seq_id' is no column"),
        (
            GOOD | {"logp_train": np.zeros((B, T + 1))},
            r"logp_train is float64 \[2, 5\]; expected shape \[2, 4\], as logp_infer",
        ),
        (GOOD | {"entropy": np.zeros(B)}, r"entropy is float64 \[2\]; expected shape \[2, 4\]"),
        (
            GOOD | {"advantage": np.zeros(3)},
            r"expected one value, or shape \[2\], or one value a token as logp_infer has",
        ),
        (GOOD | {"reward": np.zeros((B, T))}, r"reward is float64 \[2, 4\]; expected one value, or shape \[2\]$"),
        (GOOD | {"loss_mask": None}, "no loss_mask"),
        ({"loss_mask": True, "entropy": [[1.0]]}, "neither logp_infer nor logp_train"),
        (GOOD | {"loss_mask": np.full((B, T), 0.5), "seq_lens": [4, 4]}, "loss_mask holds 0.5; expected 0 or 1"),
        (GOOD | {"loss_mask": True}, r"pass seq_lens \[2\]"),
        (GOOD | {"seq_lens": [4, 5]}, "row 1 would have tokens 0 to 5; logp_infer has 4 columns"),
        (GOOD | {"seq_lens": [4.0, 4.0]}, "seq_lens is float64"),
        (GOOD | {"cu_seqlens": [0, 4, 8]}, "cu_seqlens has no meaning here: logp_infer is padded"),
        (GOOD | {"token_id": np.full((B, T), 2**40)}, "token_id holds 1099511627776; expected whole numbers from"),
        (GOOD | {"token_id": np.full((B, T), 1.5)}, "token_id holds 1.5"),
        (GOOD | {"reward": ["good", "bad"]}, "reward holds str"),
        (GOOD | {"reward": np.array([None, "bad"], dtype=object)}, r"reward holds 'bad' \(str\); expected numbers"),
        (GOOD | {"seq_key": ["a", "a"]}, "seq_key names 2 sequences 'a'.*group_id"),
        (GOOD | {"step": 1.5}, "step is 1.5; expected a whole number"),
        (GOOD | {"step": -1}, "step is -1; expected 0 or more"),
        (FLAT, r"logp_infer is packed \(shape \[8\]\); pass cu_seqlens or seq_lens"),
        (FLAT | {"seq_lens": [4, 5]}, "seq_lens ends at token 9, and logp_infer has 8"),
        (FLAT | {"cu_seqlens": [4, 8]}, "begin with 0"),
        (FLAT | {"cu_seqlens": [0, 8], "seq_lens": [8]}, "pass one of them"),
        (FLAT | {"seq_lens": [8], "response_mask": [1]}, "response_mask has no meaning here"),
        (
            {"logp_infer": [[-1.0], [-1.0]], "loss_mask": [[1], [1, 1]]},
            "loss_mask has 2 values in sequence 1; expected 1",
        ),
        ({"logp_infer": [[-1.0]], "entropy": np.ones((1, 1)), "loss_mask": True}, "expected a list of 1 sequences"),
        ({"logp_infer": np.zeros((1, 2, 3)), "loss_mask": True}, r"expected \[B, T\] \(padded\), \[N\] \(packed\)"),
        (GOOD | {"logp_infer": Sharded()}, "logp_infer is a DTensor.*pass logp_infer.full_tensor()"),
        (GOOD | {"logp_infer": object()}, "logp_infer is object"),
        (GOOD | {"logp_infer": torch.zeros(B, T).to_sparse()}, "logp_infer cannot be copied to the host"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with TokenRecorder(tmp_path, trainer="mine") as recorder:
        with pytest.raises(UsageError, match=says):
            recorder.write(**{"step": 1, **arguments})
        recorder.write(step=1, **GOOD)
    assert len(shards(tmp_path)) == 1, "the next call is recorded, and nothing of the refused one"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"temprature": 1.0}, "'temprature' is no fact of a run; did you mean 'temperature'"),
        ({"entropy_of": "mu"}, "entropy_of is 'mu'; expected infer or train"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5; expected int32"),
        ({"temperature": "1"}, "temperature is '1'; expected float64"),
    ],
)
def test_a_wrong_fact_is_named(tmp_path: Path, facts: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TokenRecorder(tmp_path, trainer="mine", facts=facts)


def test_it_needs_neither_duckdb_nor_torch(tmp_path: Path) -> None:
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"duckdb", "torch", "pandas", "polars", "pydantic", "scipy", "sqlglot", "matplotlib"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import numpy as np
from estr_diag.recorder import TokenRecorder, logprobs_and_entropy
out = logprobs_and_entropy(np.zeros((2, 4)), np.array([0, 3]))
with TokenRecorder(sys.argv[1], trainer="mine") as rec:
    rec.write(step=1, logp_infer=[out.logp], logp_train=[[-1.0, -1.0]], entropy=[out.entropy], loss_mask=True)
ours = sorted(m for m in sys.modules if m.startswith("estr_diag.") and not m.startswith("estr_diag.recorder"))
print(ours)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['estr_diag.errors', 'estr_diag.schema']"
    np.testing.assert_allclose(read(tmp_path)["entropy"], np.log(4), rtol=1e-6)


def test_run_facts_reach_the_store_and_an_export_of_it(tmp_path: Path) -> None:
    facts = {"temperature": 0.7, "top_p": 0.95, "engine": "vllm", "entropy_of": "infer", "vocab_size": 50_000}
    with TokenRecorder(tmp_path / "log", trainer="mine", facts=facts) as recorder:
        recorder.write(step=1, logp_infer=[[-1.0, -2.0]], logp_train=[[-1.5, -2.0]], loss_mask=True)
    with ed.open(tmp_path / "log") as log:
        assert log.sql("select trainer, temperature, top_p, engine, entropy_of, vocab_size from runs").rows() == [
            {"trainer": "mine", **{name: facts[name] for name in ("temperature", "top_p", "engine", "entropy_of")}}
            | {"vocab_size": 50_000}
        ]
    with ed.open(tmp_path / "log") as log:
        export(log.store, tmp_path / "again.parquet")
    with ed.open(tmp_path / "again.parquet") as log:
        assert log.sql("select trainer, temperature from runs").rows() == [{"trainer": "mine", "temperature": 0.7}]
