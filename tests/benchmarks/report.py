"""How long a report takes, as ratios measured in one process on one made-up log.

    python -m tests.benchmarks.report --tokens 2_000_000

Prints CPU seconds (the steadier measure on a shared machine) and wall seconds of: a bare scan of the columns a
report reads, the report, and the same main numbers by a pandas notebook; and their ratios. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from estr_diag.log import Log
from estr_diag.opening import ingest, open_log
from tests.logs import make_log

COLUMNS = ("step", "seq_id", "policy_version", "trainer_version", "logp_infer", "logp_train", "entropy", "advantage")


def write_log(path: Path, tokens: int) -> int:
    """Write a log of about `tokens` tokens as canonical Parquet; return how many."""
    length = 4000
    log = make_log(1, sequences=max(2, tokens // length), mean_length=length, steps=10)
    pd.DataFrame(log).sort_values(["step", "seq_id"], kind="stable").to_parquet(path, index=False)
    return len(log["seq_id"])


def timed(work: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Return the median CPU and wall seconds of `work`."""
    cpu, wall = [], []
    for _ in range(repeats):
        c, w = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
    return sorted(cpu)[repeats // 2], sorted(wall)[repeats // 2]


def scan(log: Log) -> object:
    """Read every column that a report reads, once."""
    sums = ", ".join(f"sum({name})" for name in COLUMNS)
    return log.store.connection.execute(f"select {sums}, count(*) filter (loss_mask) from tokens").fetchall()


def notebook(path: Path) -> object:
    """The main numbers as one would compute them in a notebook."""
    frame = pd.read_parquet(path)
    frame = frame[frame.loss_mask & np.isfinite(frame.logp_train) & np.isfinite(frame.logp_infer)]
    frame["delta"] = frame.logp_train.astype("float64") - frame.logp_infer
    frame["ratio"] = np.exp(frame.delta.clip(-20, 20))
    frame["lag"] = frame.trainer_version - frame.policy_version
    frame["bin"] = pd.qcut(frame.entropy, 24, duplicates="drop")
    frame["sq"] = frame.delta**2
    frame["estr"] = frame.sq / (frame.entropy + 0.01) <= 4
    frame["icepop"] = frame.ratio.between(0.5, 5)
    out = [frame[["delta", "sq", "ratio"]].describe()]
    for key in ("step", "lag", "bin"):
        groups = frame.groupby(key, observed=True)
        out += [groups[["sq", "ratio", "estr", "icepop"]].mean(), groups.delta.quantile([0.5, 0.9, 0.99, 0.999])]
    out.append(pd.crosstab(frame.estr, frame.icepop))
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: int(text.replace("_", "")), default=2_000_000)
    wanted = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as folder:
        parquet, store = Path(folder) / "log.parquet", Path(folder) / "run.duckdb"
        tokens = write_log(parquet, wanted)
        rows = {"ingest": timed(lambda: _ingest(parquet, store))}
        with open_log(store) as log:
            rows |= {"scan": timed(lambda: scan(log)), "report": timed(log.report)}
        rows["pandas"] = timed(lambda: notebook(parquet))
        print(f"{tokens:,} tokens, {store.stat().st_size / tokens:.1f} bytes a token in the store")  # noqa: T201
    for name, (cpu, wall) in rows.items():
        print(f"{name:8} {cpu:8.2f} CPU s {wall:8.2f} s wall")  # noqa: T201
    for name, other in (("report", "scan"), ("pandas", "report"), ("ingest", "scan")):
        cpu, wall = (a / b for a, b in zip(rows[name], rows[other], strict=True))
        print(f"{name} / {other}: {cpu:.1f} in CPU s, {wall:.1f} wall")  # noqa: T201


def _ingest(parquet: Path, store: Path) -> None:
    store.unlink(missing_ok=True)
    ingest(parquet, into=store).close()


if __name__ == "__main__":
    main()
