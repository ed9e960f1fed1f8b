from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr_diag.errors import InputError, RefusedError
from estr_diag.ingestion.adapter import ReadOptions
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store
from tests.ingest_values import TOLERANCE, measured, token_columns

Ingest = Callable[..., Store]

DATA = Path(__file__).parent / "data"
ROLLOUTS = DATA / "open-instruct/rollouts/grpo_demo_rollouts_000000.jsonl"
EXPECTED = json.loads((DATA / "expected.json").read_text())["open-instruct/rollouts/grpo_demo_rollouts_000000.jsonl"]
GUESS = ReadOptions(guess_mask=True)


def rollout(**changes: Any) -> dict[str, Any]:
    """Return one line; the third response token is a tool's."""
    fields = {
        "step": 3,
        "sample_idx": 0,
        "prompt_idx": 1,
        "prompt_tokens": [1, 2],
        "response_tokens": [11, 12, 13, 14],
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "stop",
        "dataset": "gsm8k",
        "logprobs": [-1.0, -2.0, 0.0, -3.0],
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: dict[str, Any]) -> Path:
        path = tmp_path / "run_rollouts_000000.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def test_refused_with_the_hook_and_the_flag() -> None:
    with pytest.raises(RefusedError, match=r"no loss mask.*mask=result\.masks\[i\].*model_step.*--guess-mask"):
        discover([ROLLOUTS])


def test_right_values_of_the_guess(ingested: Ingest) -> None:
    store = ingested(ROLLOUTS, options=GUESS)
    got = measured(store)
    tokens = token_columns(store, "logp_infer", "loss_mask", "logp_train", "step")
    mask = tokens["loss_mask"].filled(False).astype(bool)
    for key in ("n_seq", "n_response_tokens", "n_groups"):
        assert got[key] == EXPECTED[key], key
    assert int((~mask).sum()) == EXPECTED["n_zero_logprobs_tool"]
    assert int(np.ma.getmaskarray(tokens["logp_infer"])[mask].sum()) == EXPECTED["n_nan_logprobs"]
    total = float(tokens["logp_infer"].astype(np.float64).sum())
    assert total == pytest.approx(EXPECTED["sum_finite_logprob"], abs=TOLERANCE)
    assert set(tokens["step"].tolist()) == {EXPECTED["step"]}
    assert tokens["logp_train"].count() == 0


def test_every_value_against_json(ingested: Ingest) -> None:
    records = [json.loads(line) for line in ROLLOUTS.read_text().splitlines()]
    store = ingested(ROLLOUTS, options=GUESS)
    rows = store.rows("select * from sequences order by seq_id")
    assert [r["n_tokens"] for r in rows] == [len(r["response_tokens"]) for r in records]
    assert [r["prompt_len"] for r in rows] == [len(r["prompt_tokens"]) for r in records]
    assert [(r["seq_key"], r["group_id"], r["finish"], r["env"], r["reward"]) for r in rows] == [
        (str(r["sample_idx"]), f"12:{r['prompt_idx']}", r["finish_reason"], r["dataset"], r["reward"]) for r in records
    ]
    want = np.array([x for r in records for x in r["logprobs"]], dtype=np.float32)
    got = token_columns(store, "logp_infer")["logp_infer"]
    keep = np.isfinite(want) & (want != 0)
    assert np.array_equal(~np.ma.getmaskarray(got), keep)
    assert np.array_equal(got.data[keep], want[keep])


def test_the_guess_is_noted() -> None:
    with Store.memory() as store:
        report = ingest(store, discover([ROLLOUTS], options=ReadOptions(guess_mask=True)), GUESS).sources[0]
    assert any("guess" in note and "--guess-mask" in note for note in report.notes)
    assert ("logp_infer: null, NaN or infinite", 1) in report.counts


def test_metadata_is_no_log() -> None:
    found = discover([ROLLOUTS.parent], options=ReadOptions(guess_mask=True))
    assert [unit.path.name for unit in found.units] == [ROLLOUTS.name]
    assert [path.name for path in found.ignored] == ["grpo_demo_metadata.jsonl"]


def test_what_the_hook_adds_is_read(lines: Callable[..., Path], ingested: Ingest) -> None:
    # A log-prob of 0.0 that was sampled (probability 1) is kept, which the guess would lose.
    hooked = rollout(mask=[1, 1, 0, 1], logprobs=[0.0, -2.0, 0.0, -3.0], model_step=2)
    store = ingested(lines(hooked, {**hooked, "sample_idx": 1, "model_step": 3}))
    got = token_columns(store, "loss_mask", "logp_infer", "policy_version", "trainer_version")
    assert got["loss_mask"].tolist() == [True, True, False, True] * 2
    assert got["logp_infer"].tolist() == [0, -2, None, -3] * 2
    assert got["policy_version"].tolist() == [2] * 4 + [3] * 4
    assert got["trainer_version"].count() == 0
    run = store.rows("select * from runs")[0]
    assert (run["version_unit"], run["version_granularity"]) == ("step", "sequence")


def test_lists_of_unequal_length(lines: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=r"_000000\.jsonl:2: .*key 'logprobs'.*3 values.*4 of 'response_tokens'"):
        ingested(lines(rollout(), rollout(sample_idx=1, logprobs=[-1.0, -2.0, -3.0])), options=GUESS)


@pytest.mark.parametrize("name", ["logprobs", "step"])
def test_a_missing_field_is_named(name: str, lines: Callable[..., Path], ingested: Ingest) -> None:
    with pytest.raises(InputError, match=rf"_000000\.jsonl:2: .*key '{name}'"):
        ingested(lines(rollout(), rollout(sample_idx=1, **{name: ...})), options=GUESS)


def test_cut_off_file(tmp_path: Path, ingested: Ingest) -> None:
    cut = tmp_path / ROLLOUTS.name
    cut.write_bytes(ROLLOUTS.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"_000000\.jsonl:16: not valid JSON"):
        ingested(cut, options=GUESS)
