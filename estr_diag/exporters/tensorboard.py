"""TensorBoard: an event file, written with the package ``tensorboard`` alone (neither torch nor TensorFlow)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from estr_diag.exporters.library import library
from estr_diag.exporters.place import new_run_folder
from estr_diag.exporters.scalars import Scalar, by_step


def write(scalars: Sequence[Scalar], target: Path, run: str) -> Path:
    """Write an event file into ``TARGET/RUN``; look at it with ``tensorboard --logdir TARGET``.

    TensorBoard's scalars are float32: about seven digits of a value survive. Its wall time is that of the export,
    since logs do not hold the time of a step.
    """
    writer = library("tensorboard.summary.writer.event_file_writer", "tensorboard")
    event = library("tensorboard.compat.proto.event_pb2", "tensorboard")
    summary = library("tensorboard.compat.proto.summary_pb2", "tensorboard")
    now = time.time()
    with new_run_folder(target, run) as folder:
        events = writer.EventFileWriter(str(folder))
        try:
            for step, values in by_step(scalars):
                points = [summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
                events.add_event(event.Event(wall_time=now, step=step, summary=summary.Summary(value=points)))
        finally:
            events.close()
    return folder
