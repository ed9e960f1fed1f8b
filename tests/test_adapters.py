"""The contract of every adapter, over every sample: recognised by its own, read right, and never a traceback on damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from estr_diag.errors import EstrDiagError, InputError, RefusedError, UnrecognisedError, UsageError
from estr_diag.ingestion.adapter import Probe, ReadOptions
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.pipeline import ingest
from estr_diag.ingestion.registry import adapter, adapters
from estr_diag.opening import find, open_log
from estr_diag.schema import SEQUENCES, TOKENS
from estr_diag.store.database import Store

DATA = Path(__file__).parent / "data"
FILES = sorted(
    p for p in DATA.rglob("*") if p.is_file() and p.relative_to(DATA).parts[0] in set(adapters()) and p.stat().st_size
)
NO_LOG = {"meta.json", "grpo_demo_metadata.jsonl"}
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text())
TEXT_ONLY = [
    name
    for name, values in EXPECTED.items()
    if str(values.get("token_level", "")).startswith("none") or "text only" in values.get("trap", "")
]
GUESSED = ("open-instruct/rollouts/grpo_demo_rollouts_000000.jsonl", "nemo-rl/old_2025_09/train_data_step5.jsonl")


def name_of(path: Path) -> str:
    return str(path.relative_to(DATA))


def claims(path: Path) -> dict[str, Probe]:
    head = FileHead(path)
    return {
        name: probe for name, it in adapters().items() if name != "generic" and (probe := it.probe(head)) is not None
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_sample_is_recognised_by_its_own_adapter_and_no_other(path: Path) -> None:
    found = claims(path)
    if path.name in NO_LOG:
        assert found == {}
        return
    assert list(found) == [path.relative_to(DATA).parts[0]]
    probe = next(iter(found.values()))
    assert probe.why
    assert probe.layout in {layout.name for layout in adapters()[probe.adapter].layouts}
    assert set(probe.columns) <= {*TOKENS.names, *SEQUENCES.names}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_recognition_is_by_content(path: Path, tmp_path: Path) -> None:
    """Under another name in another folder it is still the same adapter."""
    renamed = tmp_path / f"renamed{path.suffix}"
    shutil.copy(path, renamed)
    assert list(claims(renamed)) == list(claims(path))


def sums(store: Store) -> dict[str, Any]:
    """What expected.json states, from the store."""
    tokens = store.rows(
        """
        select count(*) as n_response_tokens,
               count(*) filter (loss_mask and logp_train is not null and logp_infer is not null) as both,
               count(*) filter (loss_mask) as inside,
               sum(logp_train::double - logp_infer) filter (loss_mask) as sum_delta,
               sum(abs(logp_train::double - logp_infer)) filter (loss_mask) as sum_abs_delta,
               sum(power(logp_train::double - logp_infer, 2)) filter (loss_mask) as sum_delta_sq,
               sum(entropy::double) filter (loss_mask and logp_train is not null) as sum_entropy,
               sum(logp_infer::double) filter (loss_mask) as sum_logp_infer,
               count(logp_train) as n_train
        from tokens
        """
    )[0]
    sequences = store.rows(
        """
        select count(*) as n_seq, sum(prompt_len)::bigint as n_prompt_tokens, count(distinct group_id) as n_groups,
               min(version_first) as version_min, max(version_last) as version_max,
               count(*) filter (version_first <> version_last) as n_seq_with_version_switch
        from sequences
        """
    )[0]
    counted = tokens["both"] if tokens["n_train"] else tokens["inside"]
    infer = dict.fromkeys(
        (
            "sum_rollout_logprob_counted",
            "sum_logprob_counted",
            "sum_inference_logprob_counted",
            "sum_sampled_logprob",
            "sum_mu_logprob_non_null",
            "sum_finite_logprob",
        ),
        tokens["sum_logp_infer"],
    )
    return {**tokens, **sequences, **infer, "n_counted_tokens": counted, "n_loss_mask_true": tokens["inside"]}


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in TEXT_ONLY])
def test_every_sample_gives_the_right_values(name: str) -> None:
    options = ReadOptions(guess_mask=name in GUESSED)
    with open_log(DATA / name, options=options) as log:
        found = sums(log.store)
    compared = 0
    for key, expected in EXPECTED[name].items():
        if key == "n_counted_tokens" and name.startswith("trl/hook/async"):
            # One of its 279 mask tokens has a null log-prob, and no training engine is logged.
            expected = 279
        if key in found:
            compared += 1
            if isinstance(expected, int):
                assert found[key] == expected, key
            else:
                assert found[key] == pytest.approx(expected, abs=2e-6 if "logprob" not in key else 2e-5), key
    assert compared >= 2


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_only_dumps_are_refused_with_the_way_out(name: str) -> None:
    path = DATA / name.split("*")[0]
    with pytest.raises(RefusedError) as error:
        discover([path])
    text = str(error.value)
    assert str(path).rstrip("/") in text
    assert len(text) > 80, "a refusal says why, and which flag or hook gives token data"


DAMAGED = [p for p in FILES if p.name not in NO_LOG]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("path", DAMAGED, ids=name_of)
def test_a_truncated_file_gives_one_clear_error(path: Path, share: float, tmp_path: Path) -> None:
    cut = tmp_path / path.name
    data = path.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    try:
        with open_log(cut, options=ReadOptions(guess_mask=True)) as log:
            # A cut between two lines of JSON leaves a shorter but whole file.
            assert path.suffix == ".jsonl"
            assert log.ingested is not None
    except EstrDiagError as error:
        assert str(cut) in str(error)
        assert len(str(error).splitlines()) <= 3


@pytest.mark.parametrize("path", [p for p in DAMAGED if p.suffix in (".pt", ".dp", ".pkl", ".bin")], ids=name_of)
def test_flipped_bytes_never_escape_as_another_error(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for at in range(1, 40):
        broken = bytearray(data)
        broken[len(data) * at // 41] ^= 0xFF
        target = tmp_path / f"{at}{path.suffix}"
        target.write_bytes(bytes(broken))
        try:
            open_log(target).close()
        except EstrDiagError as error:
            assert str(target) in str(error)


def test_two_trainers_in_one_folder(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "nemo-rl" / "exp_001", tmp_path / "a")
    shutil.copytree(data / "slime" / "dump_details", tmp_path / "b")
    with pytest.raises(InputError, match="more than one trainer") as error:
        discover([tmp_path])
    assert "nemo-rl:" in str(error.value)
    assert "slime:" in str(error.value)
    assert discover([tmp_path], "slime").adapter == "slime"


def test_an_empty_folder_and_a_folder_of_other_things(tmp_path: Path) -> None:
    with pytest.raises(UnrecognisedError, match="an empty folder"):
        discover([tmp_path])
    (tmp_path / "config.json").write_text('{\n  "lr": 1e-6\n}\n')
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnrecognisedError, match=r"3 file\(s\)"):
        discover([tmp_path])


def test_other_files_beside_a_log_are_listed_and_ignored(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "nemo-rl" / "exp_001" / "train_data_step5.jsonl", tmp_path)
    (tmp_path / "config.json").write_text('{\n  "lr": 1e-6\n}\n')
    (tmp_path / "hparams.yaml").write_text("a: 1\n")
    found = find(tmp_path)
    assert [u.path.name for u in found.units] == ["train_data_step5.jsonl"]
    assert {p.name for p in found.ignored} == {"config.json", "hparams.yaml"}


def test_the_same_batch_in_two_serialisations_counts_once(data: Path) -> None:
    with open_log([data / "verl" / "hook", data / "verl" / "hook_numpy"]) as log:
        assert log.ingested is not None
        assert [s.status for s in log.ingested.sources] == ["ingested", "copy"]
        assert log.ingested.n_sequences == 16


@pytest.mark.parametrize("folder", ["verl", "slime", "nemo-rl", "prime-rl"])
def test_a_whole_sample_folder_can_be_reported(data: Path, folder: str) -> None:
    with open_log(data / folder) as log:
        document = log.report().to_json()
    assert document["log"]["n_counted"] > 500
    left_out = {f["path"]: f["reason"] for f in document["log"]["files_left_out"]}
    assert all(left_out.values())
    if folder == "verl":
        assert any("rollout_data" in path for path in left_out), "the text dump is named with its reason"


def test_permission_denied_is_an_input_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match="permission denied"):
        discover([path])


def test_an_unknown_adapter_comes_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'prime-rl'"):
        adapter("prime_rl")


def test_a_sequence_given_twice_is_an_error_that_names_it(data: Path, tmp_path: Path) -> None:
    lines = (data / "nemo-rl" / "exp_001" / "train_data_step5.jsonl").read_text().splitlines()
    path = tmp_path / "train_data_step5.jsonl"
    path.write_text("\n".join([*lines, lines[0]]) + "\n")
    with (
        pytest.raises(InputError, match=r"sequence 'train_data_step5:0' of step 5 is there twice"),
        Store.memory() as store,
    ):
        ingest(store, discover([path]))


def test_a_file_that_a_plan_leaves_out_is_named(data: Path) -> None:
    found = find(data / "prime-rl")
    used = {path for unit in found.units for path in (unit.path, *unit.companions)}
    named = {s.path: s.reason for s in found.refused}
    binary = data / "prime-rl" / "rollouts" / "step_7" / "rank_0.bin"
    assert binary not in used
    assert "left out" in named[binary]
    recognised = {p for p in (data / "prime-rl").rglob("*") if p.is_file() and p.stat().st_size}
    assert recognised <= used | set(named) | set(found.ignored), (
        "every file is read, joined, refused or ignored by name"
    )
