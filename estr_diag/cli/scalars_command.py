"""The command that exports scalars to experiment trackers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import FormatOption, JsonOption, LogArgument, MapOption, command, read_options

_LOOK = {
    "jsonl": "",
    "mlflow": "; look at it with: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}",
    "tensorboard": "; look at it with: tensorboard --logdir {folder}",
    "wandb": "; upload it with: wandb sync {path}",
}


@command
def scalars(
    log: LogArgument,
    to: Annotated[str, typer.Option("--to", help="tensorboard, wandb, mlflow or jsonl.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--output", help="Folder; several runs may share it.", show_default=False)],
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name of the run in the tracker.", show_default="after the log's file"),
    ] = None,
    json: JsonOption = False,
    format: FormatOption = "auto",  # noqa: A002
    map: MapOption = None,  # noqa: A002
) -> None:
    """Export the main metrics of each training step to an experiment tracker. Needs the tracker's library."""
    from estr_diag.exporters import export_scalars
    from estr_diag.exporters.scalars import left_out
    from estr_diag.opening import open_log

    with output.progress("reading") as progress:
        opened = open_log(log, format=format, options=read_options(map, None, False, False), progress=progress)
    with opened:
        path = export_scalars(opened, out, to, run)
        for said in left_out(opened):
            output.note(said)
    if json:
        output.data({"kind": to, "path": str(path)})
        return
    output.note(f"wrote {path}" + _LOOK[to].format(folder=shlex.quote(str(out)), path=shlex.quote(str(path))))
