"""The canonical token log: every table and column, with its type, unit and meaning.

This is the one place where a column is declared. The DuckDB tables, the Arrow schema that adapters
fill and ``data_schemas/token_log.v1.schema.json`` are all generated from here, and a test holds the
committed files equal to what this module generates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
"""Version of the tables below; a store written with another one is refused, never guessed at."""

DType = Literal["bool", "int16", "int32", "int64", "uint64", "float32", "float64", "string", "timestamp"]

_DUCKDB: dict[str, str] = {
    "bool": "boolean",
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "uint64": "ubigint",
    "float32": "float",
    "float64": "double",
    "string": "varchar",
    "timestamp": "timestamp",
}
_JSON: dict[str, str] = {
    "bool": "boolean",
    "int16": "integer",
    "int32": "integer",
    "int64": "integer",
    "uint64": "integer",
    "float32": "number",
    "float64": "number",
    "string": "string",
    "timestamp": "string",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, stored type, meaning and (where it has one) unit."""

    name: str
    dtype: DType
    meaning: str
    unit: str | None = None
    required: bool = False
    get_it: str | None = None
    """How a user makes the trainer log this column; printed wherever its absence is reported."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the store."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in stored order."""
        return tuple(column.name for column in self.columns)

    def ddl(self) -> str:
        """Return the ``create table`` statement."""
        lines = [f"  {quote_ident(c.name)} {_DUCKDB[c.dtype]}{' not null' if c.required else ''}" for c in self.columns]
        return f"create table {quote_ident(self.name)} (\n" + ",\n".join(lines) + "\n)"

    def arrow(self) -> pa.Schema:
        """Return the Arrow schema with the same names and types."""
        import pyarrow as pa

        types = {
            "bool": pa.bool_(),
            "int16": pa.int16(),
            "int32": pa.int32(),
            "int64": pa.int64(),
            "uint64": pa.uint64(),
            "float32": pa.float32(),
            "float64": pa.float64(),
            "string": pa.string(),
            "timestamp": pa.timestamp("us"),
        }
        return pa.schema([pa.field(c.name, types[c.dtype], nullable=not c.required) for c in self.columns])


def quote_ident(name: str) -> str:
    """Quote a SQL identifier; the only way a name may enter SQL text."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(value: str) -> str:
    """Quote a SQL string, for the few statements that take no bound parameters."""
    return "'" + value.replace("'", "''") + "'"


_NAT = "nat"

TOKENS = Table(
    "tokens",
    "One row per response token, tool and observation tokens included (loss_mask false).",
    (
        Column("seq_id", "int64", "the sequence this token belongs to; dense, assigned by the store", required=True),
        Column("pos", "int32", "position in the response, 0-based", required=True),
        Column("abs_pos", "int32", "prompt length + pos, where the prompt length is known"),
        Column(
            "step", "int32", "trainer step that consumes the token", get_it="name the file or folder after the step"
        ),
        Column("turn", "int16", "turn index in multi-turn logs, 0-based: runs of loss_mask"),
        Column("token_id", "int32", "sampled token"),
        Column("token_text", "string", "text of the sampled token"),
        Column(
            "logp_infer",
            "float32",
            "log-prob of the sampled token under the inference engine, with the weights that generated it",
            _NAT,
            get_it="ask the inference engine for log-probs of the sampled tokens and dump them",
        ),
        Column(
            "logp_train",
            "float32",
            "log-prob of the sampled token under the training engine with the target weights, before the step's update",
            _NAT,
            get_it="dump the batch after the trainer recomputed the log-probs of the sampled tokens",
        ),
        Column(
            "logp_replay",
            "float32",
            "log-prob under the training engine with the generation-time weights",
            _NAT,
            get_it="re-score the batch with the stored weights of its policy version",
        ),
        Column(
            "logp_update",
            "float32",
            "log-prob under the training engine during a later minibatch of the same step",
            _NAT,
            get_it="dump the log-probs of the training forward pass",
        ),
        Column(
            "entropy",
            "float32",
            "entropy of the next-token distribution over the full vocabulary; whose it is: runs.entropy_of",
            _NAT,
            get_it="log the full-vocabulary entropy of each token (slime --use-rollout-entropy, verl keep `entropys`)",
        ),
        Column("collision", "float32", "sum of squared probabilities of that distribution", get_it="log sum p^2"),
        Column(
            "policy_version",
            "int32",
            "version of the weights that generated the token",
            "runs.version_unit",
            get_it="log the weight version with each generated token or sequence",
        ),
        Column(
            "trainer_version",
            "int32",
            "version of the weights being optimised when the token is consumed",
            "runs.version_unit",
            get_it="log the trainer's own version, or the step it derives from",
        ),
        Column(
            "advantage",
            "float32",
            "advantage of the token (constant over a sequence in GRPO)",
            get_it="dump the batch after the advantages were computed",
        ),
        Column(
            "loss_mask",
            "bool",
            "true for model-sampled tokens that may be trained on; the trainer's raw mask",
            get_it="dump the response mask; without it tool tokens cannot be told from sampled ones",
        ),
        Column("trainer_keep", "bool", "the trainer's own final keep decision, if it logs one"),
    ),
)

SEQUENCES = Table(
    "sequences",
    "One row per sampled response.",
    (
        Column("seq_id", "int64", "dense number, assigned by the store", required=True),
        Column("source_id", "int32", "the row of `sources` it was read from", required=True),
        Column("seq_key", "string", "the trainer's own name for the sequence, unique within its step", required=True),
        Column("step", "int32", "trainer step that consumes the sequence"),
        Column("group_id", "string", "prompt group (GRPO)"),
        Column("prompt_key", "string", "name of the prompt, where the trainer has one"),
        Column("n_tokens", "int32", "response tokens, tool and observation tokens included", required=True),
        Column("prompt_len", "int32", "prompt tokens"),
        Column("reward", "float32", "reward of the sequence"),
        Column("advantage", "float32", "advantage of the sequence, where it is one number"),
        Column("version_first", "int32", "weight version of the first sampled token", "runs.version_unit"),
        Column("version_last", "int32", "weight version of the last sampled token", "runs.version_unit"),
        Column("trainer_version", "int32", "weights being optimised when it is consumed", "runs.version_unit"),
        Column("finish", "string", "why generation ended (stop, length, abort ...)"),
        Column("env", "string", "environment or data set"),
        Column("content_hash", "uint64", "hash of token ids and logp_infer: the same sampled sequence has the same"),
    ),
)

RUNS = Table(
    "runs",
    "Facts of the run that the numbers depend on; unknown stays null.",
    (
        Column("run", "string", "name of the run", required=True),
        Column("trainer", "string", "trainer that wrote the log"),
        Column("adapter", "string", "adapter that read it", required=True),
        Column("adapter_version", "string", "version of the package that held the adapter"),
        Column("temperature", "float64", "sampling temperature"),
        Column("top_p", "float64", "nucleus threshold"),
        Column("top_k", "int32", "top-k"),
        Column("logprobs", "string", "raw | processed: whether temperature and truncation are inside logp_infer"),
        Column("dtype", "string", "numeric type of the training engine"),
        Column("engine", "string", "inference engine"),
        Column("vocab_size", "int32", "vocabulary size"),
        Column("entropy_of", "string", "infer | train: whose distribution `entropy` and `collision` describe"),
        Column("train_logp", "string", "proximal | current: which training-engine forward pass logp_train is"),
        Column("version_unit", "string", "what a version counts: update | step | sample"),
        Column("version_granularity", "string", "token | segment | sequence: how finely versions are known"),
    ),
)

SOURCES = Table(
    "sources",
    "One row per file that took part; the same content is never ingested twice.",
    (
        Column("source_id", "int32", "dense number", required=True),
        Column("path", "string", "file as given", required=True),
        Column("bytes", "int64", "size"),
        Column("sha256", "string", "content hash; null for a refused file"),
        Column("adapter", "string", "adapter that recognised it"),
        Column("layout", "string", "which of the trainer's layouts it is"),
        Column("status", "string", "ingested | companion | copy | refused", required=True),
        Column("n_sequences", "int64", "sequences read from it"),
        Column("n_tokens", "int64", "response tokens read from it"),
        Column("columns", "string", "JSON object: canonical column -> number of values it holds"),
        Column("notes", "string", "JSON list of remarks made while reading"),
        Column("counts", "string", "JSON object: values set to null or rows left out, by reason"),
        Column("ingested_at", "timestamp", "UTC", required=True),
    ),
)

META = Table(
    "meta",
    "Versions of what wrote the store.",
    (Column("key", "string", "name", required=True), Column("value", "string", "value", required=True)),
)

TABLES: tuple[Table, ...] = (META, RUNS, SOURCES, SEQUENCES, TOKENS)

RUN_FACTS_KEY = "estr_diag.run"
"""Key of the Parquet metadata in which a canonical file carries the facts of its run, as a JSON object."""

RUN_FACTS: tuple[str, ...] = tuple(
    n for n in RUNS.names if n not in ("run", "adapter", "adapter_version", "version_granularity")
)
"""Facts that a file can carry; the others are the reader's."""

LOGP_COLUMNS: tuple[str, ...] = ("logp_infer", "logp_train", "logp_replay", "logp_update")
"""Columns that hold log-probabilities: the ones in which sentinels and non-finite values are looked for."""

SEQUENCE_COLUMNS_IN_LOG: tuple[str, ...] = (
    "seq_key",
    "group_id",
    "prompt_key",
    "prompt_len",
    "reward",
    "version_first",
    "version_last",
    "finish",
    "env",
)
"""Per-sequence columns that a flat canonical file may repeat on each row of a sequence."""


def token_log_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one row of a canonical token log."""
    properties: dict[str, Any] = {}
    for column in (*TOKENS.columns, *(SEQUENCES[name] for name in SEQUENCE_COLUMNS_IN_LOG)):
        kind: list[str] = [_JSON[column.dtype]]
        if not column.required:
            kind.append("null")
        entry: dict[str, Any] = {"type": kind if len(kind) > 1 else kind[0], "description": column.meaning}
        entry["x-dtype"] = column.dtype
        if column.unit:
            entry["x-unit"] = column.unit
        properties[column.name] = entry
    properties["seq_id"] |= {
        "type": ["integer", "string"],
        "description": "names the sequence; tokens of one are contiguous",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/token_log/v1",
        "title": "Canonical token log, one row per response token",
        "description": (
            "Natural logarithms. Required columns: seq_id, pos, logp_infer, logp_train; "
            "the last two may be null, and a null is counted and reported."
        ),
        "type": "object",
        "properties": properties,
        "required": ["seq_id", "pos", "logp_infer", "logp_train"],
        "additionalProperties": True,
    }
