"""What is said about mask rules, in sentences and short tables: the same for every page."""

from __future__ import annotations

from collections.abc import Sequence

from estr_diag.report.rule_document import MaskErrorEstimate, Pair, RuleGroup, RuleResult, TrainerMatch
from estr_diag.report.sentences import Cells
from estr_diag.report.verdict import number

METHODS = {"exact": "exact (logp_replay)", "lag_contrast": "lag contrast"}
"""How a method is called."""

MAX_COLUMNS = 6
"""Rules beside each other in one table."""


def kept(rules: Sequence[RuleResult]) -> Cells:
    """Return what each rule keeps, and what the kept tokens look like."""
    undecided = any(r.undecided_tokens for r in rules)
    headers = ("rule", "kept", "masked", *(("undecided",) if undecided else ()), "E[δ²] kept", "Σδ² kept", "Σ|A| kept")
    rows: list[tuple[str, ...]] = [
        (
            r.label, share(r.kept_share), f"{r.masked_tokens:,}", *((f"{r.undecided_tokens:,}",) if undecided else ()),
            number(r.kept.mean_sq_delta), share(r.kept.sq_delta_share), share(r.kept.advantage_share),
        )
        for r in rules
    ]  # fmt: skip
    return headers, rows


def details(rules: Sequence[RuleResult]) -> Cells:
    """Return the kept share with its error, what is left of sequences, and of the sample."""
    headers = ("rule", "kept ± se", "seqs", "whole", "mean |δ|", "KL k3", "weight", "ESS")
    rows: list[tuple[str, ...]] = [
        (
            r.label,
            share(r.kept_share) if not r.kept_share_se else f"{share(r.kept_share)} ± {r.kept_share_se:.2%}",
            f"{r.kept_sequences:,}", f"{r.whole_sequences:,}", number(r.kept.mean_abs_delta), number(r.kept.kl_k3),
            number(r.weights.mean) if r.weight else "1", number(r.weights.ess),
        )
        for r in rules
    ]  # fmt: skip
    return headers, rows


def errors(rules: Sequence[RuleResult]) -> list[tuple[str, Cells]]:
    """Return noise admitted and exploration masked, a table for each method with its name."""
    tables = []
    for method in dict.fromkeys(e.method for r in rules for e in r.errors):
        rows: list[tuple[str, ...]] = []
        for r in rules:
            for e in r.errors:
                if e.method == method:
                    rows.append(
                        (
                            r.label, estimate(e, "noise_admitted"), estimate(e, "exploration_masked"),
                            *((estimate(e, "exploration_masked_tokens"),) if method == "lag_contrast" else ()),
                        )
                    )  # fmt: skip
        tokens = ("of its tokens",) if method == "lag_contrast" else ()
        tables.append((METHODS[method], (("rule", "noise admitted", "exploration masked", *tokens), rows)))
    return tables


def agreement(pairs: Sequence[Pair], rules: Sequence[RuleResult], limit: int = 12) -> Cells:
    """Return the pairs that differ most."""
    ordered = sorted(pairs, key=lambda p: -(p.only_a + p.only_b))[:limit]
    rows: list[tuple[str, ...]] = [
        (p.a, p.b, f"{p.only_a:,}", f"{p.only_b:,}", f"{p.neither:,}", number(p.jaccard), number(p.kappa))
        for p in ordered
    ]
    return ("a", "b", "only a keeps", "only b", "neither", "Jaccard", "κ"), rows


def masked_by(groups: Sequence[tuple[str, Sequence[RuleGroup]]], rules: Sequence[RuleResult], what: str) -> Cells:
    """Return the masked share of each rule in each group.

    Parameters
    ----------
    groups
        Label of a group, and its entry of each rule.
    what
        Heading of the groups.
    """
    headers = (what, "tokens", *headings(rules))
    rows: list[tuple[str, ...]] = [
        (label, f"{entries[0].n:,}", *(share(None if e.kept_share is None else 1 - e.kept_share) for e in entries))
        for label, entries in groups
    ]
    return headers, rows


def headings(rules: Sequence[RuleResult]) -> list[str]:
    """Return a short name for each rule: its key, with the parameters in which rules of one key differ."""
    out = []
    for rule in rules:
        alike = [other for other in rules if other.name == rule.name]
        differ = [k for k in rule.params if len({other.params.get(k) for other in alike}) > 1]
        out.append(":".join([rule.name, *(f"{k}={rule.params[k]:g}" for k in differ)]))
    return out


def trainer(matches: Sequence[TrainerMatch]) -> list[str]:
    """Say which built-in rule decides as the trainer did."""
    if not matches:
        return []
    masked = f"{matches[0].masked:,} of {matches[0].n:,} tokens"
    exact = [m for m in matches if m.exact]
    if exact:
        return [f"the trainer's own mask ({masked}) is reproduced by {' = '.join(m.rules)}" for m in exact]
    nearest = "; ".join(f"{m.rules[0]} (differs on {m.disagree:,}, kappa {number(m.kappa)})" for m in matches)
    return [f"no built-in rule at its defaults reproduces the trainer's own mask ({masked}); nearest: {nearest}"]


def share(value: float | None) -> str:
    """Return a share in percent; a dash for nothing."""
    return "–" if value is None else f"{value:.2%}"


def estimate(found: MaskErrorEstimate, name: str) -> str:
    """Return an estimate with its interval, in percent."""
    value = getattr(found, name)
    if value is None:
        return "cannot tell"
    ends = [getattr(found, f"{name}_{end}") for end in ("low", "high")]
    between = "" if None in ends else f" [{ends[0]:.0%}, {ends[1]:.0%}]"
    return f"{value:.1%}{between}"
