"""The paper's comparison, run: synchronous, asynchronous, and asynchronous with each mask rule, from the same start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pyarrow as pa

from estr_diag.errors import UsageError
from estr_diag.lab.run import LabResult, Progress, run, warm_up_of
from estr_diag.lab.settings import LabSettings
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.rules.library import get

TAIL = 10
"""Steps at the end of a run that its final numbers are means over."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train: what is compared."""

    name: str
    rule: Rule
    synchronous: bool = False


def arms(rules: Sequence[Rule]) -> tuple[Arm, ...]:
    """Return synchronous and asynchronous training without a mask, and asynchronous with each of some rules."""
    plain = get("none")
    return (
        Arm("synchronous", plain, synchronous=True),
        Arm("asynchronous", plain),
        *(Arm(rule.label, rule) for rule in rules if rule != plain),
    )


def compare(
    settings: LabSettings,
    rules: Sequence[Rule],
    seeds: Sequence[int],
    progress: Progress | None = None,
    processes: int | None = None,
) -> Result:
    """Train every arm with every seed, on the same number of steps and responses.

    All arms of a seed start from the same weights and see prompts in the same order. Curves of single runs scatter: read
    `final`, with its standard error over seeds, before preferring one.

    Parameters
    ----------
    settings
        Of every run, but for the seed and whether it is synchronous.
    rules
        Mask rules of the loss.
    seeds
        One run of each arm a seed.
    processes
        Runs at once, one core each; by default as many as there are cores.

    Returns
    -------
    Result
        One row an arm, seed and step: reward, masked_share, kl_k3, entropy, mean_lag, tokens.

    Raises
    ------
    UsageError
        No seed, or one twice.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"lab: seeds {list(seeds)}; expected at least one, each once")
    todo, asynchronous = arms(rules), replace(settings, synchronous=False, threads=1)
    workers = min(processes or os.cpu_count() or 1, len(seeds) * len(todo))
    rows: list[dict[str, Any]] = []
    # Forking a process that has used torch's threads can hang; a fresh one cannot.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        warm = dict(zip(seeds, pool.map(warm_up_of, [replace(asynchronous, seed=s) for s in seeds]), strict=True))
        runs = {
            pool.submit(
                run,
                replace(
                    asynchronous, seed=seed, synchronous=arm.synchronous, delay=0 if arm.synchronous else settings.delay
                ),
                rule=arm.rule,
                warm=warm[seed],
            ): (arm.name, seed)
            for seed in seeds
            for arm in todo
        }
        for i, done in enumerate(as_completed(runs), start=1):
            name, seed = runs[done]
            result: LabResult = done.result()
            rows += [{"arm": name, "seed": seed, **asdict(point)} for point in result.curve]
            if progress:
                progress(i, len(runs), f"{name}, seed {seed}: reward {result.curve[-1].reward:.2f}")
    order = [arm.name for arm in todo]
    rows.sort(key=lambda row: (order.index(row["arm"]), row["seed"], row["step"]))
    parameters = {"arms": order, "seeds": list(seeds), "settings": asdict(asynchronous)}
    return Result("lab_comparison", pa.Table.from_pylist(rows, schema=_SCHEMA), parameters, {})


def final(curves: Result) -> list[dict[str, Any]]:
    """Return the mean of the last `TAIL` steps of each arm, with standard errors over seeds (None with one seed).

    Parameters
    ----------
    curves
        Of `compare`.
    """
    frame = curves.to_pandas()
    last = frame[frame["step"] >= frame["step"].max() + 1 - TAIL]
    by_run = last.groupby(["arm", "seed"], sort=False)[list(_NUMBERS)].mean().reset_index()
    rows = []
    for arm in curves.parameters["arms"]:
        values = by_run[by_run["arm"] == arm]
        row: dict[str, Any] = {"arm": arm, "seeds": len(values)}
        for name in _NUMBERS:
            x = values[name].to_numpy()
            row[name] = float(x.mean())
            row[f"{name}_se"] = float(np.std(x, ddof=1) / np.sqrt(len(x))) if len(x) > 1 else None
        rows.append(row)
    return rows


_NUMBERS = ("reward", "masked_share", "kl_k3", "entropy", "mean_lag")
_SCHEMA = pa.schema(
    [("arm", pa.string()), ("seed", pa.int64()), ("step", pa.int64())]
    + [(name, pa.float64()) for name in _NUMBERS]
    + [("tokens", pa.int64())]
)
