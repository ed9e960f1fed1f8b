"""The file of an offline W&B run: the library writes it, and has no reader of it in Python."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from estr_diag.errors import UsageError
from estr_diag.exporters.library import library

_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4
_PATIENCE_SECONDS = 60.0


def records(data: bytes) -> Iterator[bytes]:
    """Return the complete records of a ``.wandb`` file, each a serialised ``wandb_internal_pb2.Record``.

    After 7 bytes that name the format it is a LevelDB log: records are cut into chunks so that none crosses a
    block, and a chunk is its checksum (4 bytes), length (2), kind (1) and data.
    """
    at, record = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        end = at + _HEADER + int.from_bytes(data[at + 4 : at + 6], "little")
        if end > len(data):
            return
        record += data[at + _HEADER : end]
        if data[at + 6] in (_WHOLE, _LAST):
            yield record
            record = b""
        at = end


def wait_until_complete(run: Path) -> None:
    """Wait for the record that ends a run.

    ``finish`` of wandb 0.31 returns while the process that it writes with still holds the end of the file: one time
    in five a small file was empty then.

    Raises
    ------
    UsageError
        The record does not come.
    """
    record = library("wandb.proto.wandb_internal_pb2", "wandb").Record
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        for file in run.glob("run-*.wandb"):
            if any(record.FromString(data).HasField("exit") for data in records(file.read_bytes())):
                return
        if time.monotonic() > until:
            raise UsageError(
                f"wandb has not ended the run in {run} after {_PATIENCE_SECONDS:.0f} s; look into its logs/debug-core.log"
            )
        time.sleep(0.02)
