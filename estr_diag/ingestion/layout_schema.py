"""JSON Schema of a trainer's files, generated from the layouts that its adapter declares."""

from __future__ import annotations

import re
from typing import Any

from estr_diag.ingestion.adapter import Adapter, Field, Layout

_SCALARS: dict[str, str] = {
    "BOOLEAN": "boolean",
    "TINYINT": "integer",
    "SMALLINT": "integer",
    "INTEGER": "integer",
    "BIGINT": "integer",
    "HUGEINT": "integer",
    "UTINYINT": "integer",
    "USMALLINT": "integer",
    "UINTEGER": "integer",
    "UBIGINT": "integer",
    "FLOAT": "number",
    "DOUBLE": "number",
    "VARCHAR": "string",
}
_ID = re.compile(r"[^A-Za-z0-9_.-]+")


def trainer_json_schema(adapter: Adapter) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one record of any layout of `adapter`.

    A layout of JSON lines, whose fields have DuckDB types, is described in full: a record of the file
    is an instance. Tensors have no JSON form, so their fields carry ``x-type`` (dtype and shape in
    words) and any value passes.

    Notes
    -----
    ``x-type`` is the declared type and ``x-canonical`` the canonical column that a field becomes. A
    missing value inside a list is ``null`` or ``NaN``, which Python writes and JSON lacks.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"estr-diag/trainers/{adapter.name}/v1",
        "title": f"{adapter.title}: what its adapter reads",
        "anyOf": [{"$ref": f"#/$defs/{_key(layout)}"} for layout in adapter.layouts],
        "$defs": {_key(layout): _layout(layout) for layout in adapter.layouts},
    }


def _key(layout: Layout) -> str:
    # A name with a slash or a tilde would have to be escaped in the reference to it.
    return _ID.sub("_", layout.name)


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "title": layout.name,
        "description": layout.describes,
        "type": "object",
        "properties": {field.name: _field(field) for field in layout.fields},
        "required": [field.name for field in layout.fields if field.required],
        "additionalProperties": True,
    }


def _field(field: Field) -> dict[str, Any]:
    entry: dict[str, Any] = {"description": field.meaning, "x-type": field.type}
    if field.canonical:
        entry["x-canonical"] = field.canonical
    return _json_type(field.type, nullable=not field.required) | entry


def _json_type(declared: str, *, nullable: bool) -> dict[str, Any]:
    """Return what JSON values of a DuckDB type look like; no constraint for any other type."""
    element = declared
    while element.endswith("[]"):
        element = element.removesuffix("[]")
    if element in _SCALARS:
        kind = _SCALARS[element]
    elif element.startswith("STRUCT("):
        kind = "object"
    elif element == "JSON" and declared != element:
        kind = "any"
    else:
        return {}
    found: dict[str, Any] = {} if kind == "any" else {"type": [kind, "null"]}
    for _ in range(declared.count("[]", len(element))):
        found = {"type": ["array", "null"], "items": found}
    return found if nullable else found | {"type": found["type"][0]}
