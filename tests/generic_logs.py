"""Logs for the tests of the generic adapter: made with NumPy, written in every format and both layouts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

Log = dict[str, list[Any]]

FORMATS = (".parquet", ".csv", ".csv.gz", ".tsv", ".jsonl", ".jsonl.gz", ".arrow", ".arrows")
PER_SEQUENCE = ("seq_id", "step", "group_id", "reward", "prompt_len", "seq_key", "version_first", "finish")
AWKWARD_TEXTS = ("null", "", "None", 'say "hi"', "a,b", "two\nlines", "é中", "\ttab", " ")


def a_log(lengths: Sequence[int], seed: int = 0) -> Log:
    """Return a log with one row a token; float32 columns hold exact float32 values, and no sentinel."""
    rng = np.random.default_rng(seed)
    n = int(sum(lengths))
    row = np.repeat(np.arange(len(lengths)), lengths)

    def logp() -> list[float]:
        return [float(x) for x in -rng.gamma(0.5, 1.0, n).astype(np.float32) - np.float32(1e-3)]

    return {
        "step": [int(r) // 3 + 10 for r in row],
        "seq_id": [f"s{r}" for r in row],
        "pos": [i for k in lengths for i in range(k)],
        "token_id": [int(x) for x in rng.integers(0, 150_000, n)],
        "token_text": [AWKWARD_TEXTS[i % len(AWKWARD_TEXTS)] for i in range(n)],
        "logp_infer": logp(),
        "logp_train": logp(),
        "entropy": [float(x) for x in rng.gamma(0.5, 1.0, n).astype(np.float32)],
        "policy_version": [int(x) for x in np.sort(rng.integers(3, 9, n))],
        "advantage": [float(np.float32((r % 3) - 1) / 3) for r in row],
        "loss_mask": [bool(x) for x in rng.random(n) < 0.8],
        "group_id": [f"g{r // 2}" for r in row],
        "reward": [float(r % 2) for r in row],
        "prompt_len": [int(r) + 5 for r in row],
    }


def permuted(log: Log, seed: int = 1) -> Log:
    """Return the same rows in another order."""
    order = np.random.default_rng(seed).permutation(len(next(iter(log.values()))))
    return {name: [values[i] for i in order] for name, values in log.items()}


def without(log: Log, *names: str) -> Log:
    """Return the log without some columns."""
    return {name: values for name, values in log.items() if name not in names}


def as_lists(log: Log) -> Log:
    """Return the log with one row a sequence: lists for token columns, one value for the others."""
    ids = log["seq_id"]
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    ends = [*starts[1:], len(ids)]
    found: Log = {}
    for name, values in log.items():
        if name in PER_SEQUENCE:
            found[name] = [values[i] for i in starts]
        elif name != "pos":
            found[name] = [values[i:j] for i, j in zip(starts, ends, strict=True)]
    return found


def write(path: Path, log: Mapping[str, Sequence[Any]], schema: Mapping[str, pa.DataType] | None = None) -> Path:
    """Write columns in the format that the file's name says."""
    name = path.name
    if name.endswith((".parquet", ".arrow", ".arrows")):
        table = pa.table({key: pa.array(values, (schema or {}).get(key)) for key, values in log.items()})
        if name.endswith(".parquet"):
            pq.write_table(table, path, row_group_size=11)
        else:
            opener = pa.ipc.new_file if name.endswith(".arrow") else pa.ipc.new_stream
            with opener(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=13)
        return path
    rows = [dict(zip(log, values, strict=True)) for values in zip(*log.values(), strict=True)]
    if ".jsonl" in name:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = _csv(list(log), rows, "\t" if ".tsv" in name else ",")
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def _csv(names: list[str], rows: list[dict[str, Any]], delimiter: str) -> str:
    lines = [delimiter.join(names)]
    lines += [delimiter.join(_csv_value(row[name]) for name in names) for row in rows]
    return "\n".join(lines) + "\n"


def _csv_value(value: Any) -> str:
    # An empty field is a missing value and "" an empty text: Python's csv before 3.12 cannot write both.
    if value is None:
        return ""
    if isinstance(value, list):
        value = "[" + ", ".join(_csv_item(item) for item in value) + "]"
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else repr(value)


def _csv_item(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "NULL" if value is None else repr(value)
