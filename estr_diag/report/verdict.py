"""The report in a few sentences, for someone who has time for no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def verdict(document: Mapping[str, Any]) -> str:
    """Say what matters most: broken columns first, then the size of the gap and what it follows."""
    found = [c for c in document["checks"] if c["verdict"] == "found"]
    fatal = [c for c in found if c["level"] == "fatal"]
    if fatal:
        first = fatal[0]
        return f"Do not read the numbers below: {first['cause']}. Next: {first['next_action']}."
    parts = [_checks(document["checks"], found)]
    overall = document["consistency"]["overall"]
    if "mean_abs_delta" not in overall:
        parts.append("The log holds one engine's log-probs only, so their gap cannot be computed; see 'not computed'.")
        return " ".join(parts)
    parts.append(_gap(overall))
    parts += [
        text
        for text in (
            _scale(document["entropy_bins"]),
            _lag(document["consistency"]["by_lag"]),
            _noise(document["decomposition"]),
            _rules(document["rules"]),
        )
        if text
    ]
    return " ".join(parts)


def _checks(checks: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    unsure = sum(c["verdict"] == "cannot_tell" for c in checks)
    rest = f", {unsure} cannot tell" if unsure else ""
    if not found:
        return f"No broken column found ({len(checks) - unsure} checks clear{rest})."
    named = "; ".join(f"{c['id']} ({c['level']}): {c['cause']}" for c in found)
    return f"{len(found)} of {len(checks)} checks found something: {named}."


def _gap(overall: Mapping[str, Any]) -> str:
    gap, kl, ess = overall["mean_abs_delta"], overall["kl_k3"], overall["ess_token"]
    if gap["value"] is None:
        return "No token counts: nothing can be said about the gap."
    text = f"The engines differ by {with_error(gap)} nat a token (mean |delta|), KL {number(kl['value'])} nat (k3)"
    if ess["value"] is not None:
        text += f"; importance weights leave {ess['value']:.1%} of the tokens effective"
    return text + "."


def _scale(bins: list[dict[str, Any]]) -> str:
    # One number for each end of the entropy range: the paper's law says that they are alike.
    used = [b for b in bins if b["hi"] != 0 and b["sq_delta_over_entropy"] is not None]
    if len(used) < 2:
        return ""
    low, high = used[0], used[-1]
    return (
        f"E[delta^2]/H is {number(low['sq_delta_over_entropy'])} at H below {number(low['hi'])} and "
        f"{number(high['sq_delta_over_entropy'])} at H above {number(high['lo'])}."
    )


def _lag(groups: list[dict[str, Any]]) -> str:
    known = [g for g in groups if g["lag"] is not None]
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    return (
        f"E[delta^2] is {with_error(first['metrics']['mean_sq_delta'])} at lag {first['lag']} and "
        f"{with_error(last['metrics']['mean_sq_delta'])} at lag {last['lag']}."
    )


def _noise(split: Mapping[str, Any] | None) -> str:
    if split is None or split["noise_share"] is None:
        return ""
    return f"Engine noise is {split['noise_share']:.0%} of the squared deviation ({split['method'].replace('_', ' ')})."


def _rules(rules: list[dict[str, Any]]) -> str:
    masking = [r for r in rules if r["name"] != "none" and r["masked_share"] is not None]
    if not masking:
        return ""
    listed = ", ".join(f"{r['name']} {r['masked_share']:.2%}" for r in masking)
    return f"Share of tokens masked: {listed}."


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    return "–" if value is None else f"{value:.3g}"


def with_error(metric: Mapping[str, Any]) -> str:
    """Value ± standard error, the error with two digits and the value as precise as that; tiny ones with an exponent."""
    value, se = metric["value"], metric["se"]
    if value is None:
        return "–"
    if not se:
        return number(value)
    digits = max(0, 1 - math.floor(math.log10(se)))
    if (digits > 5 and max(abs(value), se) < 0.01) or abs(value) >= 1e6:
        exponent = math.floor(math.log10(max(abs(value), se)))
        value, se = value / 10**exponent, se / 10**exponent
        digits = max(0, 1 - math.floor(math.log10(se)))
        return f"({value:.{digits}f} ± {se:.{digits}f})e{exponent}"
    return f"{value:.{digits}f} ± {se:.{digits}f}"
