"""The sections of a report that one statistic (or two) fills: rows of results in, JSON values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from estr_diag.result import Result


def scaling(result: Result | None) -> dict[str, Any] | None:
    """Return the fit against entropy, with the one against 1 - G beside it where there is one."""
    if result is None:
        return None
    fits = [_fit(row) for row in result.rows()]
    first = next((f for f in fits if f["scale"] == "entropy"), None)
    return None if first is None else {**first, "others": [f for f in fits if f is not first]}


def _fit(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("scale", "exponent", "amplitude", "r2", "law_holds", "reason", "better", "n_bins")
    local = [
        {"lo": x["lo"], "hi": x["hi"], "exponent": x["exponent"], "ci": _ci(x)} for x in row["local_exponents"] or ()
    ]
    return {**{k: row[k] for k in kept}, "ci": _ci(row), "local_exponents": local}


def decomposition(cells: Result | None, shares: Result | None, bins: Sequence[int]) -> dict[str, Any] | None:
    """Return noise against exploration; `bins` are the bin numbers of the report, in order."""
    if cells is None or shares is None:
        return None
    whole, *by_lag = shares.rows()
    kept = ("lag", "n", "n_sequences", "noise", "exploration", "se", "total", "small")
    return {
        "method": cells.parameters["method"],
        "assumption": cells.parameters["assumption"],
        "noise_share": whole["noise_share"],
        "ci": _ci(whole),
        "by_lag": [{"lag": r["lag"], "n": r["n"], "noise_share": r["noise_share"], "ci": _ci(r)} for r in by_lag],
        "crossover_entropy": whole["crossover_entropy"],
        "crossover": whole["crossover"] or "",
        "cells": [
            {"bin": bins.index(r["entropy_bin"]), "ci": _ci(r), **{k: r[k] for k in kept}}
            for r in cells.rows()
            if r["entropy_bin"] in bins
        ],
        "notes": list(dict.fromkeys((*cells.notes, *shares.notes))),
    }


def switches(results: Mapping[str, Result], n_with_switch: int | None) -> dict[str, Any] | None:
    """Return the event study and the distributions of staleness."""
    study, staleness = results.get("event_study"), results.get("staleness")
    if n_with_switch is None or study is None or staleness is None:
        return None
    counts = {
        quantity: {str(r["value"]): r["n"] for r in staleness.rows() if r["quantity"] == quantity}
        for quantity in ("intra", "inter")
    }
    versions = results.get("versions")
    return {
        "n_sequences_with_switch": n_with_switch,
        "event_study": [row for row in study.rows() if row["n"]],
        **counts,
        "by_version": versions.rows() if versions is not None else [],
        "notes": [*study.notes, *staleness.notes],
    }


def weights(results: Mapping[str, Result]) -> dict[str, Any] | None:
    """Return effective sample sizes, k-hat, and where sequence ratios become useless."""
    tail, by_length = results.get("weights"), results.get("weights_by_length")
    if tail is None or by_length is None:
        return None
    rows = {row["quantity"]: row for row in tail.rows()}
    kept = ("length_lo", "length_hi", "n_sequences", "mean_length", "kl_k3", "ess_sequence")
    return {
        **{name: rows[name]["value"] for name in ("ess_token", "ess_sequence", "khat_token", "khat_sequence")},
        "readings": {name: row["reading"] for name, row in rows.items()},
        "by_length": [{**{k: r[k] for k in kept}, "t_times_kl": r["length_times_k3"]} for r in by_length.rows()],
        "length_limit": by_length.notes[0],
    }


def _ci(row: Mapping[str, Any]) -> list[float | None]:
    return [row["ci_low"], row["ci_high"]]
