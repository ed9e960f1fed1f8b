"""What a file looks like from its first bytes, worked out once and shown to every adapter."""

from __future__ import annotations

import gzip
import json
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, cast

from estr_diag.errors import InputError

Kind = Literal["empty", "json", "pickle", "torch", "msgpack", "parquet", "arrow", "duckdb", "text", "binary"]

_PREFIX_BYTES = 1 << 16
_LINE_BYTES = 1 << 28
_MAX_OPCODES = 20_000
_BLOB_BYTES = 1 << 20
_PICKLE_PROTO = b"\x80"


@dataclass(frozen=True, slots=True)
class PickleFacts:
    """Names that a pickle mentions, read from its opcodes; nothing is executed."""

    globals: frozenset[str]
    strings: tuple[str, ...]


class FileHead:
    """The start of a file, parsed lazily. Adapters look here and open nothing themselves to probe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            with path.open("rb") as stream:
                self.prefix = stream.read(_PREFIX_BYTES)
        except PermissionError:
            raise InputError("permission denied", path=path, hint="Make it readable, or leave it out") from None
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", path=path) from None

    @cached_property
    def kind(self) -> Kind:
        """The container format, by magic bytes."""
        prefix = self.prefix
        if not prefix:
            return "empty"
        if prefix[:4] == b"PAR1":
            return "parquet"
        if prefix[:6] == b"ARROW1" or prefix[:4] == b"\xff\xff\xff\xff":
            return "arrow"
        if prefix[8:12] == b"DUCK":
            return "duckdb"
        if prefix[:4] == b"PK\x03\x04":
            return "torch" if any(name.endswith("data.pkl") for name in self._zip_names) else "binary"
        if prefix[:1] == _PICKLE_PROTO and 2 <= prefix[1] <= 5:
            return "pickle"
        if 0x90 <= prefix[0] <= 0x9F or prefix[0] in (0xDC, 0xDD):
            return "msgpack"
        if self.text_prefix.lstrip()[:1] in ("{", "["):
            return "json"
        return "text" if "\x00" not in self.text_prefix else "binary"

    @cached_property
    def text_prefix(self) -> str:
        """The first bytes as text (decompressed when the file is gzip)."""
        if self.prefix[:2] == b"\x1f\x8b":
            try:
                with gzip.open(self.path, "rb") as stream:
                    return stream.read(_PREFIX_BYTES).decode("utf-8", "replace")
            except (OSError, EOFError):
                return ""
        return self.prefix.decode("utf-8", "replace")

    @cached_property
    def _first_line(self) -> tuple[int, str]:
        opener: Any = gzip.open if self.prefix[:2] == b"\x1f\x8b" else open
        try:
            with opener(self.path, "rb") as stream:
                for number, line in enumerate(iter(lambda: stream.readline(_LINE_BYTES), b""), start=1):
                    if line.strip():
                        return number, line.decode("utf-8", "replace")
        except (OSError, EOFError, zlib.error) as error:
            raise InputError("not a readable gzip file", path=self.path, found=str(error)) from None
        return 1, ""

    @cached_property
    def json_record(self) -> Any:
        """The first line of a JSON-lines file, parsed.

        None when the first line is no JSON value, as in a pretty-printed configuration beside the logs.

        Raises
        ------
        InputError
            The file is named .jsonl, and its first line cannot be parsed.
        """
        if self.kind != "json":
            return None
        number, line = self._first_line
        if line.strip() in ("{", "["):
            # A document over several lines, such as a run's config.json: no log, and nothing wrong with it.
            return None
        try:
            return json.loads(line)
        except ValueError as error:
            if not self.path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
                return None
            raise InputError(
                "not valid JSON lines",
                path=self.path,
                line=number,
                found=f"{error}",
                expected="one JSON value on each line",
                hint="A file that is cut off was probably being written; copy it again when the step is done",
            ) from None

    @property
    def json_keys(self) -> frozenset[str]:
        """Keys of the first JSON record; empty when it is not an object."""
        record = self.json_record
        return frozenset(record) if isinstance(record, dict) else frozenset()

    @cached_property
    def pickle(self) -> PickleFacts:
        """Names mentioned by a pickle, or by the pickle inside a torch archive."""
        if self.kind == "torch":
            with zipfile.ZipFile(self.path) as archive:
                member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(member) as stream:
                    return _pickle_facts(stream)
        if self.kind == "pickle":
            with self.path.open("rb") as stream:
                return _pickle_facts(stream)
        return PickleFacts(frozenset(), ())

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Column names of a Parquet, Arrow or CSV file."""
        if self.kind == "parquet":
            import pyarrow.parquet as pq

            try:
                return tuple(pq.read_schema(self.path).names)
            except Exception as error:
                raise InputError(
                    "not a readable Parquet file",
                    path=self.path,
                    found=str(error).splitlines()[0],
                    hint="A Parquet file has its index at the end: a file that is cut off cannot be read at all",
                ) from None
        if self.kind == "arrow":
            import pyarrow as pa

            try:
                with pa.OSFile(str(self.path)) as source:
                    opener = pa.ipc.open_file if self.prefix[:6] == b"ARROW1" else pa.ipc.open_stream
                    return tuple(opener(source).schema.names)
            except pa.ArrowInvalid as error:
                raise InputError(
                    "not a readable Arrow file", path=self.path, found=str(error).splitlines()[0]
                ) from None
        if self.kind == "text" and self.path.name.removesuffix(".gz").endswith((".csv", ".tsv")):
            import csv

            line = self._first_line[1].rstrip("\r\n").lstrip("\ufeff")
            delimiter = "\t" if line.count("\t") > line.count(",") else ","
            return tuple(next(csv.reader([line], delimiter=delimiter), ()))
        return ()

    @cached_property
    def _zip_names(self) -> tuple[str, ...]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return tuple(archive.namelist())
        except zipfile.BadZipFile:
            raise InputError(
                "not a readable torch file",
                path=self.path,
                found="a zip archive without its index",
                hint="The file is cut off; copy it again when the trainer has finished writing it",
            ) from None


def _pickle_facts(stream: IO[bytes]) -> PickleFacts:
    names: set[str] = set()
    strings: list[str] = []
    # A cut-off or foreign pickle simply ends the listing: probing must not fail on what it does not know.
    for opcode, argument in _opcodes(stream):
        if opcode == "GLOBAL" and isinstance(argument, str):
            names.add(argument.replace(" ", "."))
        elif opcode == "STACK_GLOBAL" and len(strings) >= 2:
            names.add(".".join(strings[-2:]))
        elif isinstance(argument, str) and "UNICODE" in opcode:
            strings.append(argument)
    return PickleFacts(frozenset(names), tuple(strings))


class _SkippingBlobs:
    """A file that hands out zeros for anything long, so that probing a pickle of many GB reads little of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.readline, self.tell = stream.readline, stream.tell

    def read(self, n: int) -> bytes:
        if n <= _BLOB_BYTES:
            return self._stream.read(n)
        self._stream.seek(n, 1)
        return bytes(n)  # zeroed pages that are never touched


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[str, Any]]:
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast("IO[bytes]", _SkippingBlobs(stream)))):
            if count > _MAX_OPCODES:
                return
            yield opcode.name, argument
    except Exception:
        return
