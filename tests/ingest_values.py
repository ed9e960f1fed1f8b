"""The numbers of expected.json, computed from a store with NumPy alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from estr_diag.store.database import Store

TOLERANCE = 2e-6


def expected_values(data: Path, trainer: str) -> dict[str, dict[str, float]]:
    """Return the numbers of one trainer's files, for the files that hold tokens."""
    everything = json.loads((data / "expected.json").read_text())
    return {
        path: {name: value for name, value in values.items() if isinstance(value, int | float)}
        for path, values in everything.items()
        if path.startswith(f"{trainer}/") and "n_response_tokens" in values
    }


def token_columns(store: Store, *names: str) -> dict[str, np.ma.MaskedArray[Any, Any]]:
    """Return token columns in file order, masked where null."""
    quoted = ", ".join(f'"{name}"' for name in names)
    found = store.connection.execute(f"select {quoted} from tokens order by seq_id, pos").fetchnumpy()
    return {name: np.ma.asarray(values) for name, values in found.items()}


def measured(store: Store) -> dict[str, float]:
    """Return every number that expected.json may state about the log in `store`."""
    tokens = token_columns(store, "seq_id", "logp_infer", "logp_train", "entropy", "loss_mask")
    sequences = store.rows("select * from sequences order by seq_id")
    mask = tokens["loss_mask"].filled(False).astype(bool)
    infer, train = (tokens[name].astype(np.float64) for name in ("logp_infer", "logp_train"))
    counted = mask & ~np.ma.getmaskarray(infer)
    if np.ma.count(train):  # a file of the inference engine alone has no training-engine log-prob at all
        counted &= ~np.ma.getmaskarray(train)
    delta = (train - infer)[counted].filled(np.nan)
    first = [s["version_first"] for s in sequences]
    last = [s["version_last"] for s in sequences]
    return {
        "n_seq": len(sequences),
        "n_response_tokens": len(mask),
        "n_counted_tokens": int(counted.sum()),
        "sum_delta": float(delta.sum()),
        "sum_abs_delta": float(np.abs(delta).sum()),
        "sum_delta_sq": float((delta**2).sum()),
        "n_prompt_tokens": sum(s["prompt_len"] for s in sequences),
        "n_groups": len({s["group_id"] for s in sequences if s["group_id"] is not None}),
        "sum_entropy": float(tokens["entropy"].astype(np.float64)[counted].filled(np.nan).sum()),
        "version_min": min((v for v in first if v is not None), default=-1),
        "version_max": max((v for v in last if v is not None), default=-1),
        "n_seq_with_version_switch": sum(a != b for a, b in zip(first, last, strict=True)),
        "sum_rollout_logprob_counted": float(infer[counted].sum()),
    }


class Evil:
    """Unpickled by a careless reader, it makes the folder ``owned`` in the working folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)
