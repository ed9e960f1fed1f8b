"""Facts of the run: checked, written beside the shards for people, and into each shard for readers."""

from __future__ import annotations

import json
import logging
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError, nearest
from estr_diag.recorder.shard import publish
from estr_diag.recorder.writer import RecordingError
from estr_diag.schema import RUN_FACTS_KEY, RUNS, SCHEMA_VERSION

RECORDER_KEY = "estr_diag.recorder"
"""Key of the Parquet metadata that says what wrote the file, as a JSON object."""

MANIFEST = "manifest.json"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "logprobs": ("raw", "processed"),
    "entropy_of": ("infer", "train"),
    "train_logp": ("proximal", "current"),
    "version_unit": ("update", "step", "sample"),
}
"""Facts that have a value out of a few."""

# `run` and the adapter are the reader's; how finely versions are known follows from their shape.
_NOT_STATED = ("run", "trainer", "adapter", "adapter_version", "version_granularity")
FACTS: tuple[str, ...] = tuple(name for name in RUNS.names if name not in _NOT_STATED)

_SCHEMA = "estr-diag/recording/v1"
_LOG = logging.getLogger("estr_diag.recorder")


def checked_facts(trainer: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return trainer and facts under the names of ``runs``; what is not known is left out.

    Raises
    ------
    UsageError
        An unknown fact, or a value that it cannot have.
    """
    if not isinstance(trainer, str) or not trainer:
        raise UsageError(f"TokenRecorder: trainer is {trainer!r}; expected its name")
    found: dict[str, Any] = {"trainer": trainer}
    for name, value in facts.items():
        if name not in FACTS:
            raise UsageError(f"TokenRecorder: '{name}' is no fact of a run; {nearest(name, FACTS)}")
        if value is not None:
            found[name] = _fact(name, value)
    return found


def _fact(name: str, value: Any) -> Any:
    kind = RUNS[name].dtype
    is_flag = type(value) is bool
    if kind == "float64" and isinstance(value, numbers.Real) and not is_flag:
        return float(value)
    if kind == "int32" and isinstance(value, numbers.Integral) and not is_flag:
        return int(value)
    if kind == "string" and name == "dtype":
        return str(value).removeprefix("torch.")
    if kind == "string" and isinstance(value, str) and value in CHOICES.get(name, (value,)):
        return value
    wanted = " or ".join(CHOICES[name]) if name in CHOICES else kind
    raise UsageError(f"TokenRecorder: {name} is {value!r}; expected {wanted} ({RUNS[name].meaning})")


def metadata_of(facts: Mapping[str, Any], rank: int, version: str) -> dict[str, str]:
    """Return the Parquet metadata of a shard."""
    made_by = {"version": version, "token_log": SCHEMA_VERSION, "rank": rank}
    return {RUN_FACTS_KEY: json.dumps(facts), RECORDER_KEY: json.dumps(made_by)}


def write_manifest(folder: Path, facts: Mapping[str, Any], rank: int, version: str) -> None:
    """Write or bring up to date the manifest of a folder, which the ranks of a run share.

    Raises
    ------
    UsageError
        The folder holds the recording of another trainer, or a file of this name that is none of ours.
    RecordingError
        It cannot be written.
    """
    path = folder / MANIFEST
    try:
        with _alone(folder):
            before = _read(path)
            run = {**before.get("run", {}), **facts}
            _compare(path, before.get("run", {}), facts)
            manifest = {
                "schema": _SCHEMA,
                "estr_diag": version,
                "token_log": SCHEMA_VERSION,
                "run": {name: run.get(name) for name in ("trainer", *FACTS)},
                "ranks": sorted({*before.get("ranks", []), rank}),
            }
            # Over several lines: readers of a folder take a file of JSON lines for a log.
            text = json.dumps(manifest, indent=2) + "\n"
            publish(path, lambda temporary: _write_text(temporary, text), replace=True)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise UsageError(f"{path}: not written by a TokenRecorder ({_SCHEMA}); choose another folder")
    return found


def _compare(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if before and before["trainer"] != now["trainer"]:
        raise UsageError(
            f"{path}: this folder holds a recording of trainer '{before['trainer']}'; "
            f"found '{now['trainer']}'. Choose another folder: a log has one trainer"
        )
    for name, value in now.items():
        if before.get(name) not in (None, value):
            _LOG.warning("%s: %s was %s and is %s from now on", path, name, before[name], value)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other ranks from the manifest while one reads and rewrites it.

    A lock of the operating system, which a killed process gives up. Where there is none (Windows, some
    network file systems) a rank may be missing in the list; the shards do not need it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / f".{MANIFEST}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            _LOG.debug("%s: no file locks here", folder)
        yield
