"""The committed schemas are what the code generates, and they accept what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from estr_diag.cli import schemas
from estr_diag.ingestion.registry import adapters
from estr_diag.opening import open_log
from estr_diag.schema import SEQUENCE_COLUMNS_IN_LOG, TOKENS
from estr_diag.store.export import export

FOLDER = Path(__file__).parent.parent / "data_schemas"


def test_committed_files_are_up_to_date(tmp_path: Path) -> None:
    fresh = {p.relative_to(tmp_path): p.read_text() for p in schemas.write_all(tmp_path)}
    committed = {p.relative_to(FOLDER): p.read_text() for p in FOLDER.rglob("*.schema.json")}
    assert committed.keys() == fresh.keys(), f"run: {schemas.FIX}"
    stale = [str(name) for name, text in fresh.items() if committed[name] != text]
    assert not stale, f"out of date: {stale}; run: {schemas.FIX}"


@pytest.mark.parametrize("name", schemas.names())
def test_every_schema_is_valid_2020_12(name: str) -> None:
    schema = schemas.get(name)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_there_is_one_for_each_trainer() -> None:
    assert {n.removeprefix("trainers/") for n in schemas.names() if "/" in n} == set(adapters()) - {"generic"}


def test_an_exported_log_obeys_the_token_log_schema(data: Path, tmp_path: Path) -> None:
    with open_log(data / "prime-rl" / "token_exports") as log:
        export(log.store, tmp_path / "log.jsonl")
    validator = jsonschema.Draft202012Validator(schemas.get("token_log"))
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 845
    for row in rows[::20]:
        validator.validate(row)
    with pytest.raises(jsonschema.ValidationError, match="logp_infer"):
        validator.validate({k: v for k, v in rows[0].items() if k != "logp_infer"})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**rows[0], "logp_infer": "-1.0"})


def test_every_column_says_what_it_means() -> None:
    properties = schemas.get("token_log")["properties"]
    assert set(properties) == {*TOKENS.names, *SEQUENCE_COLUMNS_IN_LOG}
    assert all(p["description"] for p in properties.values())
    assert properties["logp_infer"]["x-unit"] == "nat"
