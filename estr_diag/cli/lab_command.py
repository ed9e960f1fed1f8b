"""The command that runs the lab."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import JsonOption, chosen_rules, command
from estr_diag.errors import UsageError, nearest


@command
def lab(
    out: Annotated[Path, typer.Option("-o", "--output", help="Folder for log.parquet.")],
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same bits.")] = 0,
    steps: Annotated[int, typer.Option("--steps", help="Trainer steps.")] = 60,
    rule: Annotated[str, typer.Option("--rule", help="Mask rule of the loss, as in estr:tau=0.5.")] = "none",
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Wait for every response: all tokens of lag 0.")
    ] = False,
    delay: Annotated[int, typer.Option("--delay", help="Steps that a finished group waits at least.")] = 0,
    engine: Annotated[
        str, typer.Option("--engine", help="Grid of the engine's weights: int8, bf16 or exact.")
    ] = "int8",
    fault: Annotated[
        str, typer.Option("--fault", help="Plant a fault: temperature, frozen_engine, wrong_version, shift, top_p ...")
    ] = "none",
    json: JsonOption = False,
) -> None:
    """Run a small, real asynchronous GRPO on the CPU and write its log with the truth beside it. Needs torch."""
    if find_spec("torch") is None:
        raise UsageError("the lab needs torch; install it with pip install 'estr-diag[torch]'")
    from estr_diag.lab.run import run
    from estr_diag.lab.settings import Fault, LabSettings

    if fault not in list(Fault):
        raise UsageError(f"--fault {fault}: {nearest(fault, list(Fault))}")
    if engine not in ("int8", "bf16", "exact"):
        raise UsageError(f"--engine {engine}: expected int8, bf16 or exact")
    (chosen,) = chosen_rules(rule) or (None,)
    settings = LabSettings(
        seed=seed, steps=steps, synchronous=synchronous, delay=delay, engine=engine, fault=Fault(fault)  # type: ignore[arg-type]
    )  # fmt: skip
    with output.steps("lab") as progress:
        done = run(settings, out, chosen, progress)
    if json:
        output.data(done.to_json())
        return
    output.text(f"{'step':>4}  {'reward':>6}  {'masked':>7}  {'KL':>9}  {'entropy':>7}  {'lag':>5}")
    shown = range(0, len(done.curve), max(1, len(done.curve) // 12))
    for p in (done.curve[i] for i in shown):
        output.text(
            f"{p.step:>4}  {p.reward:>6.3f}  {p.masked_share:>7.2%}  {p.kl:>9.2g}  {p.entropy:>7.3f}  {p.mean_lag:>5.2f}"
        )
    output.note(f"wrote {done.path}; look at it with: estr-diag report {out}")
