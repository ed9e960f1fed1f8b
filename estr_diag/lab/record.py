"""What a run records: the canonical token log, with the truth (``logp_replay``) beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from estr_diag.lab.settings import Fault, LabSettings
from estr_diag.lab.task import VOCABULARY, decode
from estr_diag.schema import RUN_FACTS_KEY

if TYPE_CHECKING:
    from estr_diag.lab.trainer import Scored

_FLOATS = ("logp_infer", "logp_train", "logp_replay", "entropy", "collision", "advantage")


@dataclass(frozen=True, slots=True)
class StepLog:
    """One step as flat columns, one row a token."""

    columns: dict[str, NDArray[Any]]
    texts: list[str]
    sequences: dict[str, list[Any]]
    lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]

    @classmethod
    def of(cls, step: int, scored: Scored, fault: Fault) -> StepLog:
        """Flatten a scored batch, and plant the faults of labels and columns."""
        responses = scored.responses
        lengths = np.array([len(r.tokens) for r in responses])

        def flat(rows: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
            return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])

        columns: dict[str, NDArray[Any]] = {
            name: getattr(scored, name)[scored.mask].numpy().astype(np.float32)
            for name in ("logp_infer", "logp_train", "logp_replay")
        }
        columns["entropy"] = flat([r.entropy for r in responses], np.float32)
        columns["collision"] = flat([r.collision for r in responses], np.float32)
        columns["advantage"] = np.repeat(scored.advantage.numpy(), lengths).astype(np.float32)
        columns["token_id"] = flat([r.tokens for r in responses], np.int32)
        columns["policy_version"] = flat([r.version for r in responses], np.int32)
        columns["trainer_version"] = np.full(lengths.sum(), scored.version, dtype=np.int32)
        columns["pos"] = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        columns["step"] = np.full(lengths.sum(), step, dtype=np.int32)
        columns["kept"] = scored.keep[scored.mask].numpy()
        if fault is Fault.WRONG_VERSION:
            columns["policy_version"] = columns["trainer_version"].copy()
        if fault is Fault.SHIFT:
            ends = np.cumsum(lengths) - 1
            shifted = np.roll(columns["logp_train"], -1)
            shifted[ends] = 0.0
            columns["logp_train"] = shifted
        sequences: dict[str, list[Any]] = {
            "seq_key": [f"{step}/{i}" for i in range(len(responses))],
            "group_id": [str(r.group) for r in responses],
            "prompt_key": [r.prompt.text for r in responses],
            "reward": [r.reward for r in responses],
            "finish": [r.finish for r in responses],
        }
        texts = [decode([int(t)]) for t in columns["token_id"]]
        return cls(columns, texts, sequences, lengths, np.array([r.reward for r in responses]))


def table_of(logs: Sequence[StepLog]) -> pa.Table:
    """Return the whole run as one canonical table."""
    lengths = np.concatenate([log.lengths for log in logs])
    columns = {name: np.concatenate([log.columns[name] for log in logs]) for name in logs[0].columns}
    seq = np.repeat(np.arange(len(lengths)), lengths)
    arrays: dict[str, Any] = {"step": columns["step"], "seq_id": seq, "pos": columns["pos"]}
    arrays |= {"token_id": columns["token_id"], "token_text": [t for log in logs for t in log.texts]}
    arrays |= {name: columns[name] for name in (*_FLOATS, "policy_version", "trainer_version")}
    arrays["loss_mask"] = np.ones(len(seq), dtype=bool)
    if not columns["kept"].all():
        arrays["trainer_keep"] = columns["kept"]
    for name in logs[0].sequences:
        per_sequence = [value for log in logs for value in log.sequences[name]]
        arrays[name] = [per_sequence[i] for i in seq]
    arrays["prompt_len"] = np.full(len(seq), 4, dtype=np.int32)
    return pa.table(arrays)


def write(table: pa.Table, out: Path, settings: LabSettings) -> Path:
    """Write the log as Parquet, with the facts of the run in its metadata."""
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "trainer": "estr_diag lab", "temperature": settings.temperature, "dtype": "float32", "engine": settings.engine,
        "vocab_size": VOCABULARY, "entropy_of": "infer", "train_logp": "proximal", "version_unit": "update",
        "logprobs": "processed",
    }  # fmt: skip
    path, building = out / "log.parquet", out / ".log.parquet.building"
    pq.write_table(
        table.replace_schema_metadata({RUN_FACTS_KEY: json.dumps(facts)}),
        building,
        compression="zstd",
        row_group_size=122_880,
    )
    building.replace(path)
    return path
