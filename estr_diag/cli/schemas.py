"""The JSON Schemas: generated from the code, written to ``data_schemas/``, and held equal by a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError, nearest

FIX = "estr-diag schema --write data_schemas"
"""The command that brings the committed files up to date."""


def _token_log() -> dict[str, Any]:
    from estr_diag.schema import token_log_json_schema

    return token_log_json_schema()


def _report() -> dict[str, Any]:
    from estr_diag.report.document import report_json_schema

    return report_json_schema()


def _compare() -> dict[str, Any]:
    from estr_diag.report.rule_document import compare_json_schema

    return compare_json_schema()


def _sweep() -> dict[str, Any]:
    from estr_diag.report.sweep_page import sweep_json_schema

    return sweep_json_schema()


def _diff() -> dict[str, Any]:
    from estr_diag.report.diff_document import diff_json_schema

    return diff_json_schema()


def _rules() -> dict[str, Any]:
    from estr_diag.rules.file import rules_json_schema

    return rules_json_schema()


def _mapping() -> dict[str, Any]:
    from estr_diag.ingestion.mapping import mapping_json_schema

    return mapping_json_schema()


def _trainer(name: str) -> dict[str, Any]:
    from estr_diag.ingestion.layout_schema import trainer_json_schema
    from estr_diag.ingestion.registry import adapter

    return trainer_json_schema(adapter(name))


def _generators() -> dict[str, Callable[[], dict[str, Any]]]:
    from estr_diag.ingestion.registry import GENERIC, adapters

    trainers = {f"trainers/{name}": partial(_trainer, name) for name in adapters() if name != GENERIC}
    own = {"token_log.v1": _token_log, "report.v1": _report, "compare.v1": _compare}
    own |= {"sweep.v1": _sweep, "diff.v1": _diff, "rules.v1": _rules, "mapping.v1": _mapping}
    return {**own, **trainers}


def names() -> list[str]:
    """Return the names that `get` takes."""
    return list(_generators())


def get(name: str) -> dict[str, Any]:
    """Return one schema by name; ``verl`` means ``trainers/verl``, and ``report`` means ``report.v1``."""
    known = _generators()
    for candidate in (name, f"trainers/{name}", f"{name}.v1"):
        if candidate in known:
            return known[candidate]()
    raise UsageError(f"no schema '{name}'; {nearest(name, known)}")


def write_all(folder: Path) -> list[Path]:
    """Write every schema as ``FOLDER/NAME.schema.json``."""
    written = []
    for name, generate in _generators().items():
        path = folder / f"{name}.schema.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(generate(), indent=2, ensure_ascii=False) + "\n", "utf-8")
        written.append(path)
    return written
