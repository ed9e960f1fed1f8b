"""JSON Schemas of trainers' files: valid schemas that real records satisfy and broken ones do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from estr_diag.ingestion.adapter import Field, Layout
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.layout_schema import trainer_json_schema
from estr_diag.ingestion.registry import adapter, adapters
from tests.conftest import DATA
from tests.generic_logs import a_log, as_lists, write

Validator = jsonschema.Draft202012Validator


def claimed_json_lines() -> dict[str, tuple[str, str]]:
    """Return every sample of JSON lines that an adapter recognises: file -> adapter and layout."""
    found = {}
    for path in sorted(DATA.rglob("*.jsonl")):
        head = FileHead(path)
        for name, one in adapters().items():
            if probe := one.probe(head):
                found[str(path.relative_to(DATA))] = (name, probe.layout)
    return found


SAMPLES = claimed_json_lines()


def layout_of(schema: dict[str, Any], layout: str) -> dict[str, Any]:
    return {**schema, "anyOf": [{"$ref": f"#/$defs/{layout}"}]}


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; PipelineRL's actor writes a list of them on a line."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [record for line in lines for record in (line if isinstance(line, list) else [line])]


def test_there_are_samples_of_many_trainers() -> None:
    assert {"nemo-rl", "prime-rl", "roll", "ms-swift", "tinker-cookbook"} <= {name for name, _ in SAMPLES.values()}


@pytest.mark.parametrize("name", adapters())
def test_every_adapter_has_a_valid_schema(name: str) -> None:
    one = adapter(name)
    schema = trainer_json_schema(one)
    Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert len(schema["$defs"]) == len(one.layouts) == len(schema["anyOf"])
    for layout, found in zip(one.layouts, schema["$defs"].values(), strict=True):
        assert list(found["properties"]) == [field.name for field in layout.fields]
        assert found["required"] == [field.name for field in layout.fields if field.required]
        for field in layout.fields:
            entry = found["properties"][field.name]
            assert (entry["x-type"], entry["description"]) == (field.type, field.meaning)
            assert entry.get("x-canonical") == field.canonical
    # The file in data_schemas is this, so it must be plain JSON.
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("file", SAMPLES)
def test_records_of_the_samples_are_instances(data: Path, file: str) -> None:
    name, layout = SAMPLES[file]
    schema = layout_of(trainer_json_schema(adapter(name)), layout)
    found = records(data / file)
    assert found
    for record in found:
        Validator(schema).validate(record)


@pytest.mark.parametrize("file", SAMPLES)
def test_a_record_without_a_required_field_is_none(data: Path, file: str) -> None:
    name, layout = SAMPLES[file]
    schema = layout_of(trainer_json_schema(adapter(name)), layout)
    record = records(data / file)[0]
    for field in schema["$defs"][layout]["required"]:
        assert not Validator(schema).is_valid({key: value for key, value in record.items() if key != field})


def test_generic_records_of_both_layouts(tmp_path: Path) -> None:
    schema = trainer_json_schema(adapter("generic"))
    log = a_log((3, 2))
    for layout, columns in (("token_rows", log), ("sequence_rows", as_lists(log))):
        for record in records(write(tmp_path / f"{layout}.jsonl", columns)):
            Validator(layout_of(schema, layout)).validate(record)
            assert not Validator(layout_of(schema, layout)).is_valid(record | {"loss_mask": "yes"})


class Declared:
    """An adapter of which only what it declares is used."""

    name, title = "x", "X"

    def __init__(self, *fields: Field) -> None:
        self.layouts = (Layout("one of/two", "a layout", fields),)


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        ("FLOAT", [1, -0.5], ["a", True, [1.0], None]),
        ("BIGINT", [1, -3], [1.5, "1", None]),
        ("BOOLEAN", [True], [1, "true"]),
        ("VARCHAR", ["a"], [1, None]),
        ("FLOAT[]", [[], [1.0, None, 2]], [1.0, ["a"], [[1.0]], None]),
        ("INTEGER[][]", [[[1, None]], [None, []]], [[1], [["a"]]]),
        ("VARCHAR[]", [["a", None]], ["a", [1]]),
        ("JSON", [1, "a", None, {"a": [1]}], []),
        ("JSON[]", [[1, {"a": None}]], [{"a": 1}, None]),
        ("STRUCT(a FLOAT)", [{"a": 1}], [1, None]),
        ("STRUCT(a FLOAT)[]", [[{"a": 1}, None]], [{"a": 1}, [1]]),
        ("int64 [B,R]", [1, None, "anything", [[1]]], []),
        ("list of B strings", ["anything", None], []),
    ],
)
def test_types(declared: str, good: list[Any], bad: list[Any]) -> None:
    required = trainer_json_schema(Declared(Field("f", declared, "m")))  # type: ignore[arg-type]
    optional = trainer_json_schema(Declared(Field("f", declared, "m", required=False)))  # type: ignore[arg-type]
    for schema in (required, optional):
        Validator.check_schema(schema)
        assert [Validator(schema).is_valid({"f": value}) for value in good] == [True] * len(good)
        assert [Validator(schema).is_valid({"f": value}) for value in bad if value is not None] == [False] * len(
            [value for value in bad if value is not None]
        )
    assert [Validator(required).is_valid({"f": None})] == [None in good]
    assert Validator(optional).is_valid({"f": None})
    assert Validator(optional).is_valid({})
    assert not Validator(required).is_valid({})
    assert not Validator(required).is_valid([1])
