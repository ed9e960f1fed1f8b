"""The lab: a small, real asynchronous GRPO run on the CPU, recorded with the truth that no trainer logs. Needs torch."""

from __future__ import annotations

from estr_diag.lab.settings import Fault, LabSettings

__all__ = ["Fault", "LabSettings"]
