"""The paper's statistics in sentences and short tables: the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from estr_diag.report import headline
from estr_diag.report.document import Decomposition, Scaling, ScalingFit, Switches, Weights
from estr_diag.report.verdict import number, with_error

Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings and rows of a table."""

_NAMES = {"entropy": "H", "gini": "1 - G"}


def interval(ends: Sequence[float | None], *, percent: bool = False) -> str:
    """Return ``[low, high]``, or nothing when it is not known."""
    low, high = ends
    if low is None or high is None:
        return ""
    return f"[{low:.1%}, {high:.1%}]" if percent else f"[{number(low)}, {number(high)}]"


def scaling(fit: Scaling) -> list[str]:
    """Say exponent, amplitude and whether the law is contradicted, for each scale."""
    return [_fit(one) for one in (fit, *fit.others)]


def _fit(fit: ScalingFit) -> str:
    name = _NAMES[fit.scale]
    if fit.exponent is None:
        return f"against {name}: cannot tell: {fit.reason}"
    verdict = {
        True: "the law's 1 lies inside",
        False: "the law's 1 lies outside",
        None: f"cannot tell whether the law holds: {fit.reason}",
    }[fit.law_holds]
    better = {True: "; this scale fits better", False: "; the other scale fits better", None: ""}[fit.better]
    local = sorted(x.exponent for x in fit.local_exponents if x.exponent is not None)
    between = f"; slopes from bin to bin between {number(local[0])} and {number(local[-1])}" if local else ""
    r2 = f", R² {fit.r2:.3f}" if fit.r2 is not None else ""
    return (
        f"against {name}: b = {number(fit.exponent)} {interval(fit.ci)}, a = {number(fit.amplitude)}{r2} over "
        f"{fit.n_bins} bins: {verdict}{better}{between}"
    )


def decomposition(split: Decomposition) -> list[str]:
    """Say the noise share, where exploration overtakes it, and what was assumed."""
    share = "–" if split.noise_share is None else f"{split.noise_share:.1%}"
    lines = [f"{share} {interval(split.ci, percent=True)} of the squared deviation is engine noise", split.crossover]
    return [*(line for line in lines if line), f"assumed: {split.assumption}"]


def switches(found: Switches) -> list[str]:
    """Say how many sequences switch, and how stale they are."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{k}: {n:,}" for k, n in counts.items()) or "not known"

    return [
        f"{found.n_sequences_with_switch:,} sequences span a switch of weights",
        f"intra (last minus first version of a sequence): {listed(found.intra)}",
        f"inter (trainer's version minus last): {listed(found.inter)}",
    ]


def weights(found: Weights) -> list[str]:
    """Say effective sample sizes and tail shapes with their readings."""
    names = {
        "ess_token": "ESS of token weights",
        "ess_sequence": "ESS of sequence weights",
        "khat_token": "Pareto k-hat, tokens",
        "khat_sequence": "Pareto k-hat, sequences",
    }
    values = found.model_dump()
    return [f"{text}: {number(values[name])} ({found.readings[name]})" for name, text in names.items()] + [
        found.length_limit
    ]


def noise_by_lag(split: Decomposition) -> Cells:
    """Return the noise share at each lag."""
    rows: list[tuple[str, ...]] = [
        (str(r.lag), f"{r.n:,}", "–" if r.noise_share is None else f"{r.noise_share:.1%}", interval(r.ci, percent=True))
        for r in split.by_lag
    ]
    return ("lag", "tokens", "noise share of δ²", "95 %"), rows


def event_study(found: Switches) -> Cells:
    """Return the mean gap around a switch, at some offsets, beside its matched control."""

    def cell(row: dict[str, float | int | None], name: str) -> str:
        return with_error({"value": row[name], "se": row[f"{name}_se"]})

    rows: list[tuple[str, ...]] = [
        (
            f"{row['offset']:+d}",
            f"{row['n']:,}",
            cell(row, "mean_abs_delta"),
            cell(row, "mean_abs_delta_control"),
            cell(row, "mean_abs_delta_diff"),
        )
        for row in found.event_study
        if row["offset"] in headline.OFFSETS
    ]
    return ("offset", "tokens", "mean |δ|", "control", "difference"), rows
