"""The built-in rules, under the names the field uses."""

from __future__ import annotations

from estr_diag.expressions import EPS
from estr_diag.rules.base import Rule

ESTR = Rule(
    "estr",
    "delta * delta / (entropy + eps) <= tau",
    {"tau": 4.0, "eps": EPS},
    says="keep iff delta^2 / (H + eps) <= tau: a threshold on the ratio that grows with entropy",
    reference="Zhao et al., arXiv 2607.22186; tau is not published, 4 bounds |delta| by 2 sqrt(H + 0.01)",
)
ICEPOP = Rule(
    "icepop",
    "ratio >= low and ratio <= high",
    {"low": 0.5, "high": 5.0},
    says="keep iff low <= exp(delta) <= high, both ends included",
    reference="arXiv 2510.18855; [0.5, 5] is the paper's band and OpenRLHF's default",
)
KPOP = Rule(
    "kpop",
    "binary_kl(p_train, p_infer, eps) <= phi and binary_kl(p_infer, p_train, eps) <= phi",
    {"phi": 0.1, "eps": 1e-6},
    says="keep iff the binary KL of the sampled token, in both directions, is at most phi; p clamped to [eps, 1 - eps]",
    reference="phi 0.1 and eps 1e-6 as in prime-rl PR 3283; AReaL's example has phi 2.0 and eps 1e-8",
)
NONE = Rule("none", "true", says="keep every counted token", reference="no mask")

LIBRARY: dict[str, Rule] = {rule.name: rule for rule in (NONE, ESTR, ICEPOP, KPOP)}
"""Every built-in rule by name."""

DEFAULT_RULES: tuple[Rule, ...] = tuple(LIBRARY.values())
"""What a report compares when nothing is asked for."""
