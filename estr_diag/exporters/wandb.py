"""Weights & Biases: an offline run, which ``wandb sync`` uploads when its owner wants that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError
from estr_diag.exporters.library import environment, library
from estr_diag.exporters.place import new_run_folder
from estr_diag.exporters.scalars import Scalar, by_step
from estr_diag.exporters.wandb_file import wait_until_complete


def write(scalars: Sequence[Scalar], target: Path, run: str) -> Path:
    """Write ``TARGET/RUN/wandb/offline-run-...``, with the training step as W&B's own step.

    Nothing leaves the machine unless the user has set ``WANDB_MODE``. The project is ``WANDB_PROJECT``, or
    ``estr_diag``. Code, git state, console and machine statistics are not recorded: they are those of the export,
    not of the training.

    Raises
    ------
    UsageError
        W&B refuses, ``WANDB_MODE`` is such that nothing is written, or a step is below 0.
    """
    if (first := min((step for step, _, _ in scalars), default=0)) < 0:
        raise UsageError(f"found step {first}, and W&B drops steps below 0; export to another tracker")
    with environment(WANDB_ERROR_REPORTING="false"):
        wandb = library("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or "offline"
        with new_run_folder(target, run) as folder:
            try:
                written = _log(wandb, scalars, folder, run, mode)
            except wandb.errors.Error as error:
                raise UsageError(f"wandb with WANDB_MODE={mode} refuses run '{run}': {error}") from None
            if not written.is_relative_to(folder) or not written.is_dir():
                raise UsageError(
                    f"found WANDB_MODE={mode}, with which wandb writes nothing; expected offline or online. Unset it"
                )
            wait_until_complete(written)
    return written


def _log(wandb: Any, scalars: Sequence[Scalar], folder: Path, run: str, mode: str) -> Path:
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
        x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    # A trainer's run in this process goes on: create_new neither ends nor returns it.
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "estr_diag", name=run, dir=str(folder), mode=mode,
        reinit="create_new", settings=settings,
    )  # fmt: skip
    failed = 1
    try:
        written = Path(opened.dir).parent
        for step, values in by_step(scalars):
            opened.log(values, step=step)
        failed = 0
    finally:
        opened.finish(exit_code=failed)
    return written
