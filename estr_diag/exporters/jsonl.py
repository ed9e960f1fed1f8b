"""JSON lines: one object a step, for any tool that reads tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from estr_diag.exporters.place import taken, usable_folder
from estr_diag.exporters.scalars import Scalar, by_step


def write(scalars: Sequence[Scalar], target: Path, run: str) -> Path:
    """Write ``TARGET/RUN.jsonl``: ``{"step": 5, "estr_diag/kl_k3": 0.001, ...}`` a line. Needs no library.

    Raises
    ------
    UsageError
        The file exists.
    """
    path = usable_folder(target) / f"{run}.jsonl"
    if path.exists():
        raise taken(run, path)
    building = path.with_name(f".{path.name}.building")
    try:
        with building.open("w", encoding="utf-8", newline="\n") as file:
            for step, values in by_step(scalars):
                file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)
    return path
