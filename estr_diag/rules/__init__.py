"""Mask rules: ``estr_diag.rules.estr(tau=4.0)`` and the like return a `Rule`."""

from __future__ import annotations

from estr_diag.rules.base import Number, Rule, parse_rules
from estr_diag.rules.library import DEFAULT_RULES, ESTR, ICEPOP, KPOP, LIBRARY, NONE


def estr(**parameters: Number) -> Rule:
    """Return ESTR: keep iff delta^2 / (H + eps) <= tau."""
    return ESTR.with_parameters(parameters)


def icepop(**parameters: Number) -> Rule:
    """Return IcePop: keep iff low <= exp(delta) <= high."""
    return ICEPOP.with_parameters(parameters)


def kpop(**parameters: Number) -> Rule:
    """Return KPop: keep iff the binary KL in both directions is at most phi."""
    return KPOP.with_parameters(parameters)


def none() -> Rule:
    """Return the rule that keeps every counted token."""
    return NONE


__all__ = ["DEFAULT_RULES", "LIBRARY", "Rule", "estr", "icepop", "kpop", "none", "parse_rules"]
