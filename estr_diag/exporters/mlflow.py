"""MLflow: a run in a folder of files, MLflow's local file store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estr_diag.errors import UsageError
from estr_diag.exporters.library import environment, library
from estr_diag.exporters.place import taken, usable_folder
from estr_diag.exporters.scalars import Scalar

EXPERIMENT = "estr_diag"

_BATCH = 1000
"""Metrics that MLflow takes in one call."""


def write(scalars: Sequence[Scalar], target: Path, run: str) -> Path:
    """Write a run of the experiment ``estr_diag`` into the file store TARGET; return the run's folder.

    MLflow 3 keeps its file store for old users only and asks for ``MLFLOW_ALLOW_FILE_STORE=true``, which is set here
    for the export; ``mlflow ui`` asks for it too. It is used because it is the only local store that the small
    package mlflow-skinny has, and ``mlflow migrate-filestore`` turns it into a database.

    Raises
    ------
    UsageError
        The run exists, or MLflow refuses.
    """
    folder = usable_folder(target).resolve()
    with environment(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true"):
        mlflow = library("mlflow", "mlflow")
        metric = library("mlflow.entities", "mlflow").Metric
        now = round(time.time() * 1000)
        metrics = [metric(name, value, now, step) for step, name, value in scalars]
        try:
            experiment, run_id = _log(mlflow.MlflowClient(tracking_uri=folder.as_uri()), metrics, target, run)
        except mlflow.exceptions.MlflowException as error:
            raise UsageError(f"mlflow refuses run '{run}' in {target}: {error}") from None
    return target / experiment / run_id


def _log(client: Any, metrics: Sequence[Any], target: Path, run: str) -> tuple[str, str]:
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment: str = found.experiment_id if found else client.create_experiment(EXPERIMENT)
    # Names of runs hold no quotes: `export_scalars` has looked at them.
    if client.search_runs([experiment], f"attributes.run_name = '{run}'", max_results=1):
        raise taken(run, target)
    run_id: str = client.create_run(experiment, run_name=run).info.run_id
    try:
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(run_id, metrics[start : start + _BATCH])
        client.set_terminated(run_id)
    except BaseException:
        client.delete_run(run_id)
        raise
    return experiment, run_id
