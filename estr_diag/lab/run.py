"""The run: one decode tick for all slots, a training step when enough groups are ready, weights pushed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from estr_diag.errors import UsageError
from estr_diag.lab.engine import Engine, Response
from estr_diag.lab.record import StepLog, table_of, write
from estr_diag.lab.settings import LabSettings
from estr_diag.lab.trainer import Scored, Trainer
from estr_diag.lab.warmup import WarmWeights, warm_up
from estr_diag.rules.base import Rule
from estr_diag.rules.library import get

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """What a step shows on a learning curve; `kl_k3` is the rollout-target KL in nats a token."""

    step: int
    reward: float
    masked_share: float
    kl_k3: float
    entropy: float
    mean_lag: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LabResult:
    """A finished run: its curve, and the log that it wrote."""

    settings: LabSettings
    rule: str
    curve: tuple[Point, ...]
    path: Path | None
    warmup_loss: float

    def to_json(self) -> dict[str, object]:
        """Return JSON values."""
        return {"settings": asdict(self.settings), "rule": self.rule, "curve": [asdict(p) for p in self.curve]}


def run(
    settings: LabSettings,
    out: Path | None = None,
    rule: Rule | None = None,
    progress: Progress | None = None,
    warm: WarmWeights | None = None,
) -> LabResult:
    """Run the lab; the same settings give the same bits.

    Parameters
    ----------
    out
        Folder for ``log.parquet``; None records nothing. It must not hold one yet.
    rule
        Mask rule of the loss; by default none.
    progress
        Told (steps done, of, what).
    warm
        What to start from, of `warm_up_of` with settings that differ in what comes after; by default it is made.
    """
    if out is not None and (out / "log.parquet").exists():
        raise UsageError(f"{out / 'log.parquet'} exists already; choose another folder")
    with _reproducible(settings.threads):
        trainer = Trainer(settings, rule or get("none"))
        if warm is None:
            if progress:
                progress(0, settings.steps, "warming up")
            warm = warm_up(settings)
        trainer.start(warm)
        points: list[Point] = []
        logs: list[StepLog] = []
        for scored in _steps(settings, trainer):
            log = StepLog.of(len(points), scored, settings.fault)
            logs.append(log)
            points.append(_point(len(points), log))
            if progress:
                progress(len(points), settings.steps, f"reward {points[-1].reward:.2f}")
    path = None if out is None else write(table_of(logs), out, settings)
    return LabResult(settings, (rule or get("none")).label, tuple(points), path, warm.loss)


def warm_up_of(settings: LabSettings) -> WarmWeights:
    """Return the warm-up of some settings, the same bits that `run` would make."""
    with _reproducible(settings.threads):
        return warm_up(settings)


def _steps(settings: LabSettings, trainer: Trainer) -> Iterator[Scored]:
    engine = Engine(settings, trainer.model)
    open_groups: dict[int, list[Response]] = {}
    ready: list[list[Response]] = []
    for _ in range(settings.steps):
        while True:
            # A backlog of `delay` batches: the oldest is always that many steps behind.
            if len(ready) >= settings.groups * (1 + settings.delay) and not (settings.synchronous and engine.busy):
                break
            if not settings.synchronous:
                while len(engine.waiting) < settings.group_size:
                    engine.add_group()
            elif not engine.busy:
                for _ in range(settings.groups):
                    engine.add_group()
            for response in engine.tick():
                group = open_groups.setdefault(response.group, [])
                group.append(response)
                if len(group) == settings.group_size:
                    ready.append(open_groups.pop(response.group))
        batch = [r for group in ready[: settings.groups] for r in group]
        del ready[: settings.groups]
        scored = trainer.score(batch)
        yield scored
        trainer.step(scored)
        engine.push(trainer.model, trainer.version)


def _point(step: int, log: StepLog) -> Point:
    delta = log.columns["logp_train"] - log.columns["logp_infer"]
    return Point(
        step, float(log.rewards.mean()), 1 - float(log.columns["kept"].mean()), float((np.exp(delta) - 1 - delta).mean()),
        float(log.columns["entropy"].mean()), float((log.columns["trainer_version"] - log.columns["policy_version"]).mean()),
        len(delta),
    )  # fmt: skip


@contextmanager
def _reproducible(threads: int) -> Iterator[None]:
    """Fix what PyTorch's results depend on, and put it back: the caller's random state too."""
    before, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(strict, warn_only=only_warns)
