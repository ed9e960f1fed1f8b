"""``mapping.toml``: what it accepts, what it refuses and how, and which columns it takes."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from estr_diag.errors import InputError, UsageError
from estr_diag.ingestion.mapping import KNOWN_COLUMNS, NATS_PER, Mapping, load_mapping, mapping_json_schema

FULL = """
pos_base = 1
[columns]
seq_id = "sequence"
logp_infer = "mu"
[units]
logp = "bits"
entropy = "log10"
[shift]
logp_train = 1
[mask]
counted = "assistant"
[run]
trainer = "mine"
temperature = 0.7
top_k = 20
logprobs = "processed"
entropy_of = "train"
train_logp = "current"
version_unit = "sample"
"""


def load(tmp_path: Path, text: str) -> Mapping:
    path = tmp_path / "mapping.toml"
    path.write_text(text)
    return load_mapping(path)


def test_a_whole_file(tmp_path: Path) -> None:
    mapping = load(tmp_path, FULL)
    assert mapping.columns == {"seq_id": "sequence", "logp_infer": "mu"}
    assert (mapping.units.logp, mapping.units.entropy) == ("bits", "log10")
    assert (mapping.shift, mapping.pos_base, mapping.mask.counted) == ({"logp_train": 1}, 1, "assistant")
    facts = mapping.run.facts("token")
    assert (facts.trainer, facts.temperature, facts.top_k, facts.top_p) == ("mine", 0.7, 20, None)
    assert (facts.logprobs, facts.entropy_of, facts.train_logp) == ("processed", "train", "current")
    assert (facts.version_unit, facts.version_granularity) == ("sample", "token")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Mapping()
    assert Mapping().run.facts(None).entropy_of is None


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1.0", 1.0), ("true", True), ('"1"', "1"), ("false", False)])
def test_the_type_of_a_mask_value_is_kept(tmp_path: Path, text: str, value: object) -> None:
    counted = load(tmp_path, f"[mask]\ncounted = {text}").mask.counted
    assert (counted, type(counted)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[colums]", "colums: unknown key; did you mean 'columns'?"),
        ('[units]\nlgp = "bits"', "units.lgp: unknown key; did you mean 'logp'?"),
        ("[run]\ntemprature = 1", "run.temprature: unknown key; did you mean 'temperature'?"),
        ('[units]\nlogp = "bit"', "units.logp: Input should be 'nats', 'bits' or 'log10'"),
        ('[run]\nentropy_of = "both"', "run.entropy_of: Input should be 'infer' or 'train'"),
        ('[columns]\nlogp_inf = "x"', "'logp_inf' is no canonical column; did you mean 'logp_infer'?"),
        ("[shift]\nlogp_trian = 1", "'logp_trian' is no canonical column; did you mean 'logp_train'?"),
        ("[shift]\nreward = 1", "'reward' cannot be shifted"),
        ("[shift]\npos = 1", "'pos' cannot be shifted"),
        ("[shift]\nlogp_train = 1.5", "shift.logp_train: Input should be a valid integer"),
        ('[columns]\nlogp_infer = "x"\nlogp_train = "x"', "'logp_infer' and 'logp_train' are both the column 'x'"),
        ('[columns]\nloss_mask = "m"\n[mask]\nall_sampled = true', "mask.all_sampled says that there is no mask"),
        ("columns = ", "not valid TOML"),
    ],
)
def test_what_cannot_be_followed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "mapping.toml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_mapping(tmp_path / "none.toml")


def test_canonical_names_are_taken_as_they_are() -> None:
    present = ["logp_infer", "other", "seq_id", "reward"]
    assert Mapping().bind(present) == {"seq_id": "seq_id", "logp_infer": "logp_infer", "reward": "reward"}


def test_an_entry_comes_before_a_canonical_name() -> None:
    mapping = Mapping(columns={"logp_infer": "mu"})
    assert mapping.bind(["mu", "logp_infer"]) == {"logp_infer": "mu"}


def test_a_column_that_an_entry_names_is_not_taken_twice() -> None:
    # A trainer whose `logp_train` is the engine's: the log has no logp_train, and delta is not 0 everywhere.
    assert Mapping(columns={"logp_infer": "logp_train"}).bind(["logp_train"]) == {"logp_infer": "logp_train"}
    swapped = Mapping(columns={"logp_infer": "logp_train", "logp_train": "logp_infer"})
    assert swapped.bind(["logp_train", "logp_infer"]) == {"logp_infer": "logp_train", "logp_train": "logp_infer"}


def test_a_column_that_is_not_there() -> None:
    mapping = Mapping(columns={"logp_infer": "rollout_logp"})
    assert mapping.match(["rollout_logps"]) == {}
    with pytest.raises(InputError) as caught:
        mapping.bind(["rollout_logps", "x"], "log.parquet")
    assert str(caught.value) == (
        "log.parquet: no column 'rollout_logp', which the mapping names for logp_infer (key 'rollout_logp'). "
        "Did you mean 'rollout_logps'?"
    )


def test_the_schema_accepts_what_the_model_accepts() -> None:
    schema = mapping_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(tomllib.loads(FULL))
    validator.validate({})
    refused: list[dict[str, Any]] = [
        {"colums": {}},
        {"columns": {"logp_inf": "x"}},
        {"shift": {"reward": 1}},
        {"units": {"logp": "bit"}},
        {"run": {"temprature": 1}},
        {"pos_base": "1"},
    ]
    for wrong in refused:
        assert not validator.is_valid(wrong), wrong


def test_units_are_factors_to_nats() -> None:
    assert {"nats": 1.0, "bits": math.log(2), "log10": math.log(10)} == NATS_PER
    # log2(8) = 3 bits, log10(1000) = 3
    assert 3 * NATS_PER["bits"] == pytest.approx(math.log(8))
    assert 3 * NATS_PER["log10"] == pytest.approx(math.log(1000))


def test_known_columns_are_those_of_the_schema() -> None:
    assert {"seq_id", "pos", "logp_infer", "loss_mask", "reward", "seq_key", "prompt_len"} <= KNOWN_COLUMNS
    assert not {"content_hash", "n_tokens", "source_id"} & KNOWN_COLUMNS
