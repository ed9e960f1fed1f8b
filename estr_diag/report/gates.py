"""Gates for CI: ``--fail-on 'kl_k3>0.01'``."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from estr_diag.errors import GateError, UsageError, nearest
from estr_diag.report.document import Document
from estr_diag.stats.metrics import BY_NAME
from estr_diag.stats.quantiles import QUANTILES

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit on an overall consistency metric; breached when the comparison is true."""

    metric: str
    comparison: str
    limit: float


def parse(text: str) -> Gate:
    """Read ``metric>number``.

    Raises
    ------
    UsageError
        Another form, or an unknown metric.
    """
    found = _FORM.fullmatch(text)
    try:
        gate = Gate(found[1], found[2], float(found[3])) if found else None
    except ValueError:
        gate = None
    if gate is None:
        raise UsageError(f"--fail-on {text!r}: expected METRIC>NUMBER (or <, >=, <=), as in kl_k3>0.01")
    known = {*BY_NAME, *QUANTILES}
    if gate.metric not in known:
        raise UsageError(f"--fail-on {text!r}: no metric '{gate.metric}'; {nearest(gate.metric, known)}")
    return gate


def check(gates: Sequence[Gate], document: Document) -> None:
    """Raise when a gate is breached, or when its metric was not computed: a gate that cannot be read is not passed.

    Raises
    ------
    GateError
        Names every breached gate with its value.
    """
    breached = []
    for gate in gates:
        number = document.consistency.overall.get(gate.metric)
        if number is None or number.value is None:
            breached.append(f"{gate.metric} was not computed (see not_computed)")
        elif _OPERATORS[gate.comparison](number.value, gate.limit):
            breached.append(f"{gate.metric} is {number.value:.6g}, and {gate.comparison} {gate.limit:g} fails")
    if breached:
        raise GateError("; ".join(breached))
