"""The hooks for trainers, run on batches laid out as theirs, give a log with the right values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import estr_diag as ed
from estr_diag.recorder import TokenRecorder
from estr_diag.recorder.manifest import checked_facts
from tests.recipes import areal, openrlhf, trl, verl

STEP = 7


def sampled(length: int, tools: tuple[int, ...] = ()) -> list[bool]:
    return [i not in tools for i in range(length)]


# Two responses behind prompts of 3 and 1 tokens; the second has a tool token in its middle and one at its end.
PROMPTS = ((11, 12, 13), (21,))
ANSWERS = ((101, 102), (201, 202, 203, 204))
MASKS = (sampled(2), sampled(4, tools=(1, 3)))
INFER = ((-0.5, -1.5), (-0.25, 0.0, -2.5, 0.0))
TRAIN = ((-0.75, -1.25), (-0.375, -9.0, -2.0, -9.0))


def left(rows: Any, width: int, fill: float = 0) -> torch.Tensor:
    return torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])


def right(rows: Any, width: int, fill: float = 0) -> torch.Tensor:
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])


def with_prompt(answers: Any, fill: float) -> torch.Tensor:
    """Prompt and response in one row, padded on the right; `fill` on prompt and padding."""
    return right([[fill] * len(p) + list(a) for p, a in zip(PROMPTS, answers, strict=True)], 6, fill)


FULL_IDS = right([p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)], 6)
FULL_REAL = torch.tensor([[1] * 5 + [0], [1] * 5 + [0]])


@pytest.fixture
def recorder(tmp_path: Path) -> TokenRecorder:
    return TokenRecorder(tmp_path / "dumps", trainer="any")


def read(recorder: TokenRecorder, query: str) -> dict[str, list[Any]]:
    recorder.close()
    with ed.open(recorder.directory) as log:
        return dict(log.sql(query).to_arrow().to_pydict())


TOKENS = "select seq_id, pos, step, token_id, loss_mask, logp_infer, logp_train, abs_pos from tokens order by all"


def check_tokens(recorder: TokenRecorder) -> None:
    found = read(recorder, TOKENS)
    assert found["seq_id"] == [0, 0, 1, 1, 1, 1]
    assert found["step"] == [STEP] * 6
    assert found["token_id"] == [101, 102, 201, 202, 203, 204]
    assert found["loss_mask"] == [*MASKS[0], *MASKS[1]]
    assert found["abs_pos"] == [3, 4, 1, 2, 3, 4]
    at = np.flatnonzero(found["loss_mask"])
    for name, rows in (("logp_infer", INFER), ("logp_train", TRAIN)):
        expected = np.concatenate([np.array(row) for row in rows])
        np.testing.assert_array_equal(np.array(found[name], dtype=float)[at], expected[at])


def dataproto() -> Any:
    real = torch.cat([left([[1] * 3, [1]], 4), right([[1] * 2, [1] * 4], 5)], dim=1)
    batch = {
        "prompts": left(PROMPTS, 4),
        "responses": right(ANSWERS, 5),
        "attention_mask": real,
        "response_mask": right(MASKS, 5, False).long(),
        "rollout_log_probs": right(INFER, 5, 0.0),
        "old_log_probs": right(TRAIN, 5, -3.0),
        "entropys": right([[0.5] * 2, [0.25] * 4], 5, 9.0).bfloat16(),
        "advantages": right([[1.0] * 2, [-1.0] * 4], 5, 0.0),
    }
    extra = {
        "uid": np.array(["a", "b"], dtype=object),
        "min_global_steps": np.array([4, None], dtype=object),
        "max_global_steps": np.array([6, None], dtype=object),
    }
    return SimpleNamespace(batch=batch, non_tensor_batch=extra, meta_info={"global_steps": STEP})


def test_verl(recorder: TokenRecorder) -> None:
    verl.record_verl(recorder, dataproto(), STEP)
    check_tokens(recorder)
    found = read(recorder, "select group_id, version_first, version_last, trainer_version, advantage from sequences")
    assert found == {
        "group_id": ["a", "b"],
        "version_first": [4, None],
        "version_last": [6, None],
        "trainer_version": [6, 6],
        "advantage": [1.0, -1.0],
    }
    assert read(recorder, "select entropy from tokens order by seq_id, pos")["entropy"] == [0.5] * 2 + [0.25] * 4


def test_areal(recorder: TokenRecorder) -> None:
    at_token = with_prompt(TRAIN, -7.0)
    trajectory = {
        "input_ids": FULL_IDS.int(),
        "attention_mask": FULL_REAL.bool(),
        "loss_mask": with_prompt(MASKS, False).int(),
        "logprobs": with_prompt(INFER, 0.0),
        "versions": torch.tensor([[-1, -1, -1, 5, 6, 0], [-1, 6, -1, 7, -1, 0]], dtype=torch.int32),
        "prox_logp": torch.roll(at_token, -1, dims=-1),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    areal.record_areal(recorder, trajectory, STEP)
    check_tokens(recorder)
    found = read(recorder, "select policy_version, trainer_version from tokens order by seq_id, pos")
    assert found["policy_version"] == [5, 6, 6, None, 7, None]
    assert found["trainer_version"] == [STEP] * 6
    found = read(recorder, "select version_first, version_last, reward, prompt_len from sequences order by seq_id")
    assert found == {"version_first": [5, 6], "version_last": [6, 7], "reward": [1.0, 0.0], "prompt_len": [3, 1]}


@pytest.mark.parametrize("scored", [True, False])
def test_trl(recorder: TokenRecorder, scored: bool) -> None:
    output = {
        "prompt_ids": left(PROMPTS, 4),
        "prompt_mask": left([[1] * 3, [1]], 4),
        "completion_ids": right(ANSWERS, 5),
        "completion_mask": right([[1] * 2, [1] * 4], 5),
        "tool_mask": right(MASKS, 5, True).long(),
        "sampling_per_token_logps": right(INFER, 5, 0.0),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(6),
    }
    if scored:
        output["old_per_token_logps"] = right(TRAIN, 5, -3.0)
    trl.record_trl(recorder, output, STEP)
    if scored:
        check_tokens(recorder)
    found = read(
        recorder, "select trainer_version - policy_version as lag, advantage, logp_train from tokens order by all"
    )
    assert found["lag"] == [0] * 6
    assert found["advantage"] == [-0.5] * 4 + [0.5] * 2
    assert scored or found["logp_train"] == [None] * 6


def test_openrlhf(recorder: TokenRecorder) -> None:
    experience = SimpleNamespace(
        sequences=FULL_IDS,
        attention_mask=FULL_REAL,
        action_mask=with_prompt(MASKS, False)[:, 1:].bool(),
        rollout_log_probs=with_prompt(INFER, 0.0)[:, 1:],
        action_log_probs=with_prompt(TRAIN, -7.0)[:, 1:].requires_grad_(),
        advantages=with_prompt([[1.5] * 2, [-1.5] * 4], 0.0)[:, 1:],
        rewards=torch.tensor([1.0, 0.0]),
        index=[3, 4],
    )
    openrlhf.record_openrlhf(recorder, experience, STEP)
    check_tokens(recorder)
    found = read(recorder, "select group_id, reward, advantage, prompt_len from sequences order by seq_id")
    assert found == {
        "group_id": ["7:3", "7:4"],
        "reward": [1.0, 0.0],
        "advantage": [1.5, -1.5],
        "prompt_len": [3, 1],
    }


@pytest.mark.parametrize("module", [verl, areal, trl, openrlhf])
def test_a_recipe_is_short_and_says_where_it_goes(module: Any) -> None:
    assert "Where the call goes" in (module.__doc__ or "")
    assert checked_facts("any", module.FACTS)
