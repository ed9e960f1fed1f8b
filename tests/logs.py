"""Made-up logs for tests, and the shortest way to put one into a store."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from estr_diag.ingestion.adapter import RunFacts, TokenBatch
from estr_diag.ingestion.canonical import to_tables
from estr_diag.ingestion.reconcile import Added, column_counts
from estr_diag.log import Log
from estr_diag.opening import open_log
from estr_diag.schema import RUNS, SEQUENCES, SOURCES, TOKENS
from estr_diag.store.database import Store
from tests.oracles import Arrays

PRIME_RL = Path(__file__).parent / "data" / "prime-rl-run"
"""A run folder that prime-rl's own code wrote: one step, 16 sequences, 816 counted tokens."""


def prime_log() -> Log:
    """Open that run."""
    return open_log(PRIME_RL)


def make_log(
    seed: int,
    *,
    sequences: int = 12,
    mean_length: int = 40,
    steps: int = 2,
    lags: int = 3,
    holes: bool = True,
    scale: float = 1.0,
) -> Arrays:
    """A healthy log with noise and exploration, tool spans, missing values and a few extreme tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 * mean_length, sequences)
    n = int(lengths.sum())
    seq = np.repeat(np.arange(sequences), lengths)
    entropy = np.where(rng.random(n) < 0.6, rng.exponential(0.05, n), rng.gamma(2, 0.6, n))
    entropy[rng.random(n) < 0.03] = 0.0
    infer = -entropy * rng.exponential(1.0, n)
    lag = np.repeat(rng.integers(0, lags, sequences), lengths)
    p = np.exp(infer)
    delta = scale * rng.normal(0, np.sqrt(0.003 * entropy + np.minimum(2e-4 / p, 1) ** 2 + 0.012 * lag * entropy))
    train = np.minimum(infer + delta, 0.0)
    extreme = rng.random(n) < 0.01
    train[extreme] -= rng.exponential(3.0, int(extreme.sum()))
    if holes:
        train[rng.random(n) < 0.02] = np.nan
        infer[rng.random(n) < 0.02] = np.nan
    step = np.repeat(rng.integers(5, 5 + steps, sequences), lengths)
    return {
        "seq_id": seq,
        "step": step,
        "logp_infer": infer.astype(np.float32),
        "logp_train": train.astype(np.float32),
        "entropy": entropy.astype(np.float32),
        "policy_version": (step - lag).astype(np.int32),
        "trainer_version": step.astype(np.int32),
        "advantage": np.repeat(rng.normal(0, 1, sequences), lengths).astype(np.float32),
        "loss_mask": rng.random(n) < 0.9,
    }


def store_of(*logs: Arrays, store: Store | None = None) -> Store:
    """A store in memory that holds the logs, each as one source; columns that a log lacks stay absent."""
    store = store or Store.memory()
    for log in logs:
        _, starts, lengths = np.unique(log["seq_id"], return_index=True, return_counts=True)
        per_sequence = {"step", "trainer_version"}
        tokens: dict[str, Any] = {k: v for k, v in log.items() if k != "seq_id" and k not in per_sequence}
        sequences: dict[str, Any] = {k: log[k][starts].tolist() for k in per_sequence if k in log}
        source, first = store.next_id(SOURCES, "source_id"), store.next_id(SEQUENCES, "seq_id")
        sequences["seq_key"] = [f"{source}/{i}" for i in range(len(lengths))]
        batch = TokenBatch(lengths.astype(np.int64), tokens, sequences, RunFacts(trainer="made up"))
        rows = to_tables(batch, first_seq=first, source_id=source, step=None)
        store.append(SEQUENCES, rows.sequences)
        store.append(TOKENS, rows.tokens)
        columns = column_counts(store, Added(source, first, Path("made-up")))
        row = {
            "source_id": source, "path": "made-up", "status": "ingested", "adapter": "generic",
            "columns": json.dumps(columns), "counts": "{}", "notes": "[]", "ingested_at": datetime(2026, 12, 1),
        }  # fmt: skip
        store.append(SOURCES, pa.Table.from_pylist([row], schema=SOURCES.arrow()))
    if not store.rows("select 1 from runs"):
        run = {"run": "run", "adapter": "generic", "trainer": "made up", "entropy_of": "infer"}
        store.append(RUNS, pa.Table.from_pylist([run], schema=RUNS.arrow()))
    return store
