"""The report as one page: verdict first, then checks, then every picture with the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estr_diag.report.document import Document, Number
from estr_diag.report.html import page
from estr_diag.report.html.sections import Section, sections
from estr_diag.report.html.tables import Table, of_cells
from estr_diag.report.html.token_view import view
from estr_diag.report.verdict import number, with_error
from estr_diag.result import Result
from estr_diag.rules.token_windows import Window
from estr_diag.stats.metrics import BY_NAME, YARDSTICKS

_MARKS = {"found": "✗ found", "clear": "✓ clear", "cannot_tell": "? cannot tell"}
_STEP_METRICS = (
    "kl_k3",
    "mean_abs_delta",
    "mean_sq_delta",
    "mean_delta",
    "ess_token",
    "prob_diff_mean",
    "entropy_mean",
)
MAX_STEPS = 3000


def render(d: Document, results: dict[str, Result], windows: Sequence[Window], why_no_tokens: str = "") -> str:
    """Return the page.

    Parameters
    ----------
    results
        The tables behind the document, that pictures are drawn from.
    windows
        Around the worst tokens; without any, `why_no_tokens` says why.
    """
    found: list[Section] = sections(d, results, bool(windows), why_no_tokens)
    steps = [g for g in d.consistency.by_step if g.step is not None][:MAX_STEPS]
    return page.render(
        "report.html", version=d.estr_diag, title=f"estr-diag: {page.text(d.log.source, 80)}", source=d.log.source,
        facts=_facts(d), found=bool(d.stamped), verdict=d.verdict, numbers=_numbers(d), sections=found,
        checks=[_check(c) for c in d.checks], view=view(windows) if windows else None,
        steps_data=_steps(d, steps) if len(steps) > 1 else "", step_metrics=[m for m in _STEP_METRICS if m in d.consistency.overall],
        step_range=(steps[0].step, steps[-1].step) if steps else (0, 0),
        rules_data=_rules(d) if any(r.name != "none" for r in d.rules) else "", rule_names=[r.label for r in d.rules if r.name != "none"],
    )  # fmt: skip


def cell(d: Document) -> str:
    """Return what a notebook shows of a report: verdict, three numbers, checks."""
    return page.render(
        "cell.html",
        source=d.log.source,
        facts=_facts(d),
        verdict=d.verdict,
        numbers=_numbers(d),
        checks=[_check(c) for c in d.checks],
    )


def _facts(d: Document) -> str:
    log = d.log
    ranges = [
        f"{what} {found[0]}–{found[1]}" for what, found in (("steps", log.steps), ("versions", log.versions)) if found
    ]
    lags = ", ".join(f"{lag}: {n:,}" for lag, n in log.lags.items())
    parts = [
        f"estr-diag {d.estr_diag}", log.trainer or "unknown trainer", f"{log.n_sequences:,} sequences",
        f"{log.n_tokens:,} response tokens, {log.n_counted:,} counted", *ranges, f"lag {lags}" if lags else "lag not known",
    ]  # fmt: skip
    return " · ".join(page.text(part, 400) for part in parts)


def _numbers(d: Document) -> list[dict[str, str]]:
    """Return the three numbers that matter: how far apart, how much of it is noise, what is left of the sample."""

    def metric(name: str) -> Number | None:
        return d.consistency.overall.get(name)

    def told(found: Number | None, unit: str) -> str:
        return "not computed" if found is None or found.value is None else f"{with_error(found.model_dump())} {unit}"

    share = d.decomposition.noise_share if d.decomposition else None
    noise = "not computed" if share is None else f"{share:.1%}"
    how = "log policy_version, trainer_version and entropy"
    if d.decomposition and share is not None:
        low, high = d.decomposition.ci
        between = "" if low is None or high is None else f"95 %: {low:.1%} to {high:.1%}; "
        how = between + d.decomposition.method.replace("_", " ")
    ess = metric("ess_token")
    return [
        {"label": "gap of the engines, KL (k3)", "value": told(metric("kl_k3"), "nat"), "yardstick": YARDSTICKS["kl_k3"][0]},
        {"label": "engine noise, share of E[δ²]", "value": noise, "yardstick": how},
        {"label": "effective share of the tokens (ESS)", "value": "not computed" if ess is None else f"{number(ess.value)}", "yardstick": YARDSTICKS["ess_token"][0]},
    ]  # fmt: skip


def _check(c: Any) -> dict[str, Any]:
    sizes = [
        f"size {number(c.size)}" if c.size is not None else "",
        f"a sound log: {number(c.control)}" if c.control is not None else "",
    ]
    return {
        "id": c.id, "verdict": c.verdict, "mark": _MARKS[c.verdict], "cause": c.cause, "where": c.where,
        "sizes": "; ".join(s for s in sizes if s) if c.verdict != "clear" else "",
        "next": c.next_action if c.verdict != "clear" else "", "evidence": _evidence(c.evidence) if c.verdict == "found" else None,
    }  # fmt: skip


def _evidence(rows: Sequence[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return of_cells((names, [tuple("–" if row.get(n) is None else str(row[n]) for n in names) for row in rows[:20]]))


def _steps(d: Document, steps: Sequence[Any]) -> Any:
    names = [m for m in _STEP_METRICS if m in d.consistency.overall]
    rows = [
        {"step": g.step, "tokens": g.n_tokens}
        | {m: [g.metrics[m].value, g.metrics[m].se] for m in names if m in g.metrics}
        for g in steps
    ]
    return page.data({"rows": rows, "units": {m: BY_NAME[m].unit for m in names}})


def _rules(d: Document) -> Any:
    """Return label, tokens, undecided tokens and masked share of each group, by rule and breakdown."""
    bins = [f"{number(b.lo)} to {number(b.hi) if b.hi is not None else '∞'}" for b in d.entropy_bins]

    def rows(groups: Sequence[Any], label: Any) -> list[list[Any]]:
        return [
            [label(g), g.n, g.undecided_tokens, None if g.kept_share is None else 1 - g.kept_share]
            for g in groups[:MAX_STEPS]
        ]

    def position(k: int) -> str:
        return f"{2**k - 1} to {2 ** (k + 1) - 2}"

    return page.data(
        [
            {
                "entropy_bin": rows(
                    r.by_entropy_bin, lambda g: "?" if g.bin is None or g.bin >= len(bins) else bins[g.bin]
                ),
                "lag": rows(r.by_lag, lambda g: "?" if g.lag is None else str(g.lag)),
                "step": rows(r.by_step, lambda g: "?" if g.step is None else str(g.step)),
                "position": rows(r.by_position, lambda g: position(g.position)),
            }
            for r in d.rules
            if r.name != "none"
        ]
    )
