"""Dumps of text: recognised by content, refused with what gives token data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from estr_diag.errors import RefusedError
from estr_diag.ingestion.adapter import Probe, ReadOptions, Unit
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.registry import adapter, adapters

DUMPS = {
    "roll": ("roll/rollout_dump_data.step_12.jsonl", 12, ("rollout_dump_dir", "infer_logprobs", "old_log_probs")),
    "ms-swift": (
        "ms-swift/completions.jsonl",
        10,
        ("log_completions", "rollout_per_token_logps", "old_per_token_logps"),
    ),
    "tinker-cookbook": (
        "tinker-cookbook/iteration_000012/train_rollout_summaries.jsonl",
        12,
        ("rollout_json_export", "loss_fn_inputs", "loss_fn_outputs"),
    ),
}


def probed(name: str, path: Path) -> Probe:
    probe = adapter(name).probe(FileHead(path))
    assert probe is not None
    return probe


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_is_recognised_and_refused_with_the_way_out(data: Path, name: str) -> None:
    file, step, words = DUMPS[name]
    probe = probed(name, data / file)
    assert probe.refusal is not None
    assert not probe.guessable
    assert (probe.adapter, probe.step) == (name, step)
    assert not probe.columns
    for word in (*words, "TokenRecorder", "--map"):
        assert word in probe.refusal
    for given in (data / file, data / name):
        with pytest.raises(RefusedError) as caught:
            discover([given], options=ReadOptions(guess_mask=True))
        assert probe.refusal in str(caught.value)
        assert str(data / file) in str(caught.value)


@pytest.mark.parametrize("name", DUMPS)
def test_nobody_else_claims_it(data: Path, name: str) -> None:
    head = FileHead(data / DUMPS[name][0])
    assert [who for who, one in adapters().items() if one.probe(head)] == [name]


@pytest.mark.parametrize("name", DUMPS)
def test_reading_one_all_the_same_is_refused(data: Path, name: str) -> None:
    probe = probed(name, data / DUMPS[name][0])
    assert adapter(name).plan([probe]) == [Unit(probe)]
    with pytest.raises(RefusedError, match="no tokens and no log-probs"):
        list(adapter(name).read(Unit(probe), ReadOptions()))


@pytest.mark.parametrize("name", DUMPS)
def test_samples_have_the_declared_fields(data: Path, name: str) -> None:
    path = data / DUMPS[name][0]
    probe = probed(name, path)
    layout = next(one for one in adapter(name).layouts if one.name == probe.layout)
    keys = frozenset(json.loads(path.read_text().splitlines()[0]))
    assert layout.missing(keys) == []
    for field in layout.fields:
        if field.required:
            assert field.name in probe.why


@pytest.mark.parametrize("name", DUMPS)
def test_the_keys_alone_are_not_enough(data: Path, tmp_path: Path, name: str) -> None:
    record = json.loads((data / DUMPS[name][0]).read_text().splitlines()[0])
    other = tmp_path / "log.jsonl"
    # One sample a line where the dump has a dict of lists, or the other way round.
    turned = {key: value[0] if isinstance(value, list) else [value] for key, value in record.items()}
    other.write_text(json.dumps(turned) + "\n")
    assert adapter(name).probe(FileHead(other)) is None
    layout = adapter(name).layouts[0]
    for field in layout.fields:
        if field.required:
            other.write_text(json.dumps({k: v for k, v in record.items() if k != field.name}) + "\n")
            assert adapter(name).probe(FileHead(other)) is None


def test_the_agentic_dump_of_roll(tmp_path: Path) -> None:
    path = tmp_path / "rollout_dump_data.step_3.jsonl"
    path.write_text(json.dumps({"global_step": [3, 3], "trajectory_data": ["{}", "{}"], "messages": ["", ""]}) + "\n")
    probe = probed("roll", path)
    assert (probe.layout, probe.step) == ("agentic_rollout_dump", 3)
    assert probe.refusal == adapter("roll").refusal  # type: ignore[attr-defined]
