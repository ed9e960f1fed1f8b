"""Put a batch into one Parquet file that is either whole or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from estr_diag.recorder.batch import Batch
from estr_diag.recorder.columns import Typed, column_of

_NAME = re.compile(r"step_(\d+)-rank_(\d+)-part_(\d+)\.parquet")
_REPEATING = frozenset({"token_id", "policy_version", "trainer_version", "turn", "token_text"})


def shard_path(folder: Path, step: int, rank: int, part: int) -> Path:
    """Return the file of one write; the names of a folder sort by step."""
    return folder / f"step_{step:08d}-rank_{rank:03d}-part_{part:04d}.parquet"


def warm_up() -> None:
    """Write an empty shard to memory, so that everything PyArrow loads on first use is loaded.

    It imports pandas, where there is one, when it first converts an array. Left to the writer thread, that
    would take the interpreter from the trainer in its first step, and fail in a process that is ending.
    """
    empty: dict[str, Typed] = {"logp_infer": np.zeros(0, dtype=np.float32), "token_text": []}
    table = table_of(Batch(0, np.zeros(1, dtype=np.int64), empty, {"env": ["none"]}), {})
    pq.write_table(table, pa.BufferOutputStream(), **_encodings(table))


def parts_there(folder: Path, rank: int) -> dict[int, int]:
    """Return, for every step that `rank` has shards of, the first free part number."""
    free: dict[int, int] = {}
    for path in folder.iterdir():
        if (found := _NAME.fullmatch(path.name)) and int(found[2]) == rank:
            step, part = int(found[1]), int(found[3])
            free[step] = max(free.get(step, 0), part + 1)
    return free


def table_of(batch: Batch, metadata: Mapping[str, str]) -> pa.Table:
    """Return the canonical table of a batch: one row a sequence, a list for every token column.

    Lists in place of one row a token: 12 % smaller and faster to write, what belongs to a sequence is
    stored once, and a sequence without a token is still there.
    """
    offsets = pa.array(np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int32))
    columns = {"step": pa.array(np.full(len(batch.lengths), batch.step, dtype=np.int32))}
    columns |= {name: _array(name, values) for name, values in batch.sequences.items()}
    columns |= {name: pa.ListArray.from_arrays(offsets, _array(name, v)) for name, v in batch.tokens.items()}
    return pa.table(columns, metadata=dict(metadata))


def write_shard(path: Path, table: pa.Table) -> None:
    """Write a shard.

    Raises
    ------
    FileExistsError
        There is one of this name, which is left as it is.
    OSError, pyarrow.ArrowException
        It cannot be written; no file is left behind.
    """

    def write(temporary: Path) -> None:
        pq.write_table(table, str(temporary), **_encodings(table))

    publish(path, write, replace=False)


def publish(path: Path, write: Callable[[Path], None], *, replace: bool) -> None:
    """Write a file under a temporary name beside `path`, force it to disk, and give it its name.

    The temporary name begins with a dot, which readers of a folder skip: a process that is killed leaves
    at most one such file.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")
    try:
        write(temporary)
        _to_disk(temporary)
        if replace:
            temporary.replace(path)
        else:
            _name_it(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _to_disk(path.parent)


def _name_it(temporary: Path, path: Path) -> None:
    # A link fails where the name is taken; a rename would silently replace another recorder's shard.
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # Some network and FUSE file systems have no links. There a name belongs to whoever makes the hidden
        # file; one that a killed process leaves behind only means that the number stays unused.
        claim = path.with_name(f".{path.name}.claim")
        claim.touch(exist_ok=False)
        try:
            if path.exists():
                raise FileExistsError(path) from None
            temporary.rename(path)
        finally:
            claim.unlink()


def _to_disk(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return  # Windows opens no folders, and needs no such call to keep a name.
        raise
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _array(name: str, values: Typed) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values, type=pa.string())
    kind = pa.from_numpy_dtype(np.dtype(column_of(name).dtype))
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, type=kind, mask=np.ma.getmaskarray(values))
    # NaN stays NaN: a trainer that computed one and a trainer that computed nothing are not the same.
    return pa.array(values, type=kind, from_pandas=False)


def _encodings(table: pa.Table) -> dict[str, object]:
    """Return the options of the Parquet writer.

    Measured on 0.6 million tokens with 7 columns: byte streams of floats with zstd 1 take 14.7 bytes a
    token and 60 ms; PyArrow's defaults 22 bytes and 260 ms, most of it for dictionaries of floats.
    """
    leaves = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in table.schema}
    floats = [leaves[f.name] for f in table.schema if pa.types.is_floating(_leaf_type(f.type))]
    texts = [f.name for f in table.schema if pa.types.is_string(_leaf_type(f.type))]
    repeating = [leaf for name, leaf in leaves.items() if name in _REPEATING or name in texts or name == "step"]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": repeating or False,
        "use_byte_stream_split": floats or False,
    }


def _leaf_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind
