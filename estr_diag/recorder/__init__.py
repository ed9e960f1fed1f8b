"""Write the canonical token log from inside a trainer: tensors in, Parquet shards out.

This package needs NumPy and PyArrow and nothing else of what the rest of ``estr_diag`` needs. It never
imports torch; it works with the tensors of whichever torch the trainer has loaded.
"""

from __future__ import annotations

from estr_diag.recorder.columns import TokenColumns
from estr_diag.recorder.distribution import TokenDistribution, logprobs_and_entropy
from estr_diag.recorder.recorder import TokenRecorder
from estr_diag.recorder.writer import RecordingError

__all__ = ["RecordingError", "TokenColumns", "TokenDistribution", "TokenRecorder", "logprobs_and_entropy"]
