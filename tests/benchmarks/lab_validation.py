"""Estimators against the truth on lab runs, as Markdown: ``python -m tests.benchmarks.lab_validation RUN [RUN ...]``.

A run is a folder of ``estr-diag lab -o RUN``. The README's tables come from six: ``--seed 0``, 1 and 2, with ``--engine int8`` (the
default) and ``--engine fp8``.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np

import estr_diag as ed
from estr_diag.lab.validation import VARIANTS, noise_shares, rule_errors, split_cells
from estr_diag.log import Log
from estr_diag.rules import parse_rules
from estr_diag.stats.grid import fitting_grid
from estr_diag.stats.switches import EventStudy
from estr_diag.store.engine import run

RULES = "estr:tau=0.05,estr:tau=0.2,icepop:low=0.8:high=1.25,kpop:phi=0.01,m2po:c=0.001"


def main(folders: list[str]) -> None:
    """Print the tables."""
    inside: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    shares, rules, laws, switches = [], [], [], []
    for folder in folders:
        with ed.open(folder) as log:
            engine = _engine(log)
            grid = fitting_grid(log.store, log.store.present())
            assert grid is not None
            for row in split_cells(log.store, grid).rows():
                inside[engine, row["estimator"]].append(row["inside"])
            found = {r["estimator"]: r for r in noise_shares(log.store, grid).rows()}
            shares.append([engine, *(_share(found[name]) for name in ("exact", *VARIANTS))])
            for row in rule_errors(log.store, parse_rules(RULES), grid).rows():
                rules.append((engine, row))
            fit = log.scaling().rows()[0]
            laws.append(
                [engine, f"{fit['exponent']:.2f} [{fit['ci_low']:.2f}, {fit['ci_high']:.2f}]", f"{fit['r2']:.2f}"]
            )
            switches.append([engine, *_jump(log)])
    engines = list(dict.fromkeys(engine for engine, _ in inside))
    _table("Cells whose 95 % interval holds the exact exploration", ["estimator", *engines],
           [[name, *(_held(inside[engine, name]) for engine in engines)] for name in VARIANTS])  # fmt: skip
    _table("Share of E[delta^2] that is noise", ["engine", "exact", *VARIANTS], shares)
    labels = list(dict.fromkeys(row["rule"] for _, row in rules))
    names = ("noise_admitted", "noise_admitted_exact", "exploration_masked", "exploration_masked_exact")
    _table("Errors of masks, mean over runs: contrast and exact", ["engine", "rule", *names],
           [[engine, label, *(f"{np.mean([r[n] for e, r in rules if e == engine and r['rule'] == label]):.2f}" for n in names)]
            for engine in engines for label in labels])  # fmt: skip
    _table("Exponent of E[delta^2] on H (the law's is 1)", ["engine", "exponent", "R^2"], laws)
    _table(
        "Fall of the second moment at a switch (offsets 0 to 4 against -5 to -1)",
        ["engine", "E[delta^2]", "E[d^2], exact"],
        switches,
    )


def _engine(log: Log) -> str:
    return str(log.store.rows("select * from runs")[0].get("engine") or "unknown")


def _share(row: dict[str, float | None]) -> str:
    return f"{row['noise_share']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"


def _held(cells: list[bool]) -> str:
    return f"{sum(cells)} of {len(cells)} ({np.mean(cells):.0%})" if cells else "none"


def _jump(log: Log) -> list[str]:
    """Return the fall of E[delta^2], and of E[d^2] from a log whose sampler is the replay."""
    frame = log.sql("select * from tokens").to_arrow()
    names = ["seq_id", "pos", "step", "policy_version", "trainer_version", "loss_mask", "logp_train", "entropy"]
    truth = frame.select([*names, "logp_replay"]).rename_columns([*names, "logp_infer"])
    out = []
    for one in (log, ed.from_frame(truth)):
        rows = {r["offset"]: r for r in run(one.store, {"it": EventStudy(8)}).results["it"].rows()}
        before, after = (np.average([rows[k]["mean_sq_delta"] for k in at], weights=[rows[k]["n"] for k in at])
                         for at in (range(-5, 0), range(5)))  # fmt: skip
        out.append(f"{before:.2e} to {after:.2e}: {1 - after / before:.0%}")
    return out


def _table(title: str, headers: list[str], rows: list[list[str]]) -> None:
    lines = ["", title, "", f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
