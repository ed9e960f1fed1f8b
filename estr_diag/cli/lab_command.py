"""The command that runs the lab."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from estr_diag.cli import output
from estr_diag.cli.commands import JsonOption, chosen_rules, command
from estr_diag.errors import UsageError, nearest

if TYPE_CHECKING:
    from estr_diag.lab.settings import LabSettings
    from estr_diag.rules.base import Rule


@command
def lab(
    out: Annotated[Path, typer.Option("-o", "--output", help="Folder for log.parquet.")],
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same bits.")] = 0,
    steps: Annotated[int, typer.Option("--steps", help="Trainer steps.")] = 120,
    rule: Annotated[str, typer.Option("--rule", help="Mask rule of the loss, as in estr:tau=0.5.")] = "none",
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Wait for every response: all tokens of lag 0.")
    ] = False,
    delay: Annotated[int, typer.Option("--delay", help="Steps that a finished group waits at least.")] = 0,
    engine: Annotated[
        str, typer.Option("--engine", help="Grid of the engine's weights: fp8, int8, bf16 or exact.")
    ] = "int8",
    fault: Annotated[
        str, typer.Option("--fault", help="Plant a fault: temperature, frozen_engine, wrong_version, shift, top_p ...")
    ] = "none",
    against: Annotated[
        str | None,
        typer.Option(
            "--compare",
            help="Train synchronously, asynchronously, and asynchronously with each of these rules; writes the curves.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each arm of --compare, from --seed on.")] = 3,
    json: JsonOption = False,
) -> None:
    """Run a small, real asynchronous GRPO on the CPU and write its log with the truth beside it. Needs torch."""
    if find_spec("torch") is None:
        raise UsageError("the lab needs torch; install it with pip install 'estr-diag[torch]'")
    from estr_diag.lab.run import run
    from estr_diag.lab.settings import Fault, LabSettings

    if fault not in list(Fault):
        raise UsageError(f"--fault {fault}: {nearest(fault, list(Fault))}")
    if engine not in ("fp8", "int8", "bf16", "exact"):
        raise UsageError(f"--engine {engine}: expected fp8, int8, bf16 or exact")
    (chosen,) = chosen_rules(rule) or (None,)
    settings = LabSettings(
        seed=seed, steps=steps, synchronous=synchronous, delay=delay, engine=engine, fault=Fault(fault)  # type: ignore[arg-type]
    )  # fmt: skip
    if against is not None:
        _compare(out, settings, chosen, chosen_rules(against) or (), seeds, json)
        return
    with output.steps("lab") as progress:
        done = run(settings, out, chosen, progress)
    if json:
        output.data(done.to_json())
        return
    output.text(f"{'step':>4}  {'reward':>6}  {'masked':>7}  {'KL':>9}  {'entropy':>7}  {'lag':>5}")
    shown = range(0, len(done.curve), max(1, len(done.curve) // 12))
    for p in (done.curve[i] for i in shown):
        output.text(
            f"{p.step:>4}  {p.reward:>6.3f}  {p.masked_share:>7.2%}  {p.kl_k3:>9.2g}  {p.entropy:>7.3f}  {p.mean_lag:>5.2f}"
        )
    output.note(f"wrote {done.path}; look at it with: estr-diag report {out}")


def _compare(
    out: Path, settings: LabSettings, rule: Rule | None, rules: Sequence[Rule], seeds: int, json: bool
) -> None:
    import pyarrow.parquet as pq

    from estr_diag.lab.comparison import TAIL, compare, final
    from estr_diag.report.terminal import cells
    from estr_diag.report.verdict import with_error

    if rule is not None and rule.name != "none":
        raise UsageError("--rule is for one run; name it in --compare")
    if settings.synchronous:
        raise UsageError("--compare trains synchronously as well: leave --synchronous out")
    if seeds < 1:
        raise UsageError(f"--seeds {seeds}: expected 1 or more")
    path = out / "curves.parquet"
    if path.exists():
        raise UsageError(f"{path} exists already; choose another folder")
    with output.steps("lab") as progress:
        curves = compare(settings, rules, range(settings.seed, settings.seed + seeds), progress)
    out.mkdir(parents=True, exist_ok=True)
    building = path.with_name(".curves.parquet.building")
    pq.write_table(curves.to_arrow(), building, compression="zstd")
    building.replace(path)
    ends = final(curves)
    if json:
        output.data({**curves.parameters, "final": ends, "curves": curves.rows()})
        return
    rows: list[tuple[str, ...]] = []
    for end in ends:
        told = {
            name: with_error({"value": end[name], "se": end[f"{name}_se"]}) for name in ("reward", "kl_k3", "entropy")
        }
        rows.append((end["arm"], told["reward"], f"{end['masked_share']:.2%}", told["kl_k3"], told["entropy"]))
    output.page(lambda _: cells((("arm", "reward", "masked", "KL k3", "entropy"), rows), left=1))
    output.note(f"means of the last {TAIL} steps ± standard error over {seeds} seeds; every step is in {path}")
