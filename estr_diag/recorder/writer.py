"""One thread that works off a queue whose size in bytes is bounded."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from estr_diag.errors import EstrDiagError, UsageError

_LOG = logging.getLogger("estr_diag.recorder")
Job = TypeVar("Job")


class RecordingError(EstrDiagError):
    """A shard, or the manifest, could not be written."""


class BackgroundWriter(Generic[Job]):
    """Runs `work` on jobs in the order of `submit`, in one thread, started by the first job.

    An error of `work` is raised by the next `submit`, `flush` or `close`; later jobs are worked off all the
    same.

    Parameters
    ----------
    work
        Writes one job.
    max_bytes
        Bound on the jobs that wait or are being written. A single larger job is taken when nothing else waits.
    """

    def __init__(self, work: Callable[[Job], None], max_bytes: int) -> None:
        self._work, self._max_bytes = work, max_bytes
        self._jobs: deque[tuple[Job, int]] = deque()
        self._pending = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._closed = self._has_waited = False
        self._pid = os.getpid()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the jobs that wait or are being written."""
        return self._pending

    def check(self) -> None:
        """Raise what a job before has failed with, and refuse to go on where that is not possible.

        Raises
        ------
        RecordingError
            A job failed; once for each failure.
        UsageError
            Closed, or made in another process.
        """
        if os.getpid() != self._pid:
            raise UsageError("this recorder was made in another process, and its thread is there; make one a process")
        self._raise_errors()
        self._refuse_if_closed()

    def submit(self, job: Job, size: int) -> None:
        """Queue a job of `size` bytes; waits while the bound would be passed."""
        self.check()
        with self._changed:
            self._refuse_if_closed()
            if self._pending and self._pending + size > self._max_bytes and not self._has_waited:
                self._has_waited = True
                _LOG.warning(
                    "the trainer waits for the disk: %d MiB of the token log are not written yet (max_pending_bytes). "
                    "Nothing is dropped; this is said once",
                    self._pending >> 20,
                )
            while self._pending and self._pending + size > self._max_bytes:
                self._changed.wait()
            self._jobs.append((job, size))
            self._pending += size
            if self._thread is None:
                # A daemon, so that an interpreter that ends on an error is not kept alive by an idle thread;
                # whoever made the writer closes it at exit.
                self._thread = threading.Thread(target=self._run, name="estr-diag-recorder", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every job is done, and raise what failed."""
        if os.getpid() == self._pid:
            with self._changed:
                while self._pending:
                    self._changed.wait()
            self._raise_errors()

    def close(self) -> None:
        """Work off the queue, end the thread, and raise what failed; a second call does nothing."""
        # In a forked child there is no thread to wait for, and the lock may be held for ever.
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_errors()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, size = self._jobs.popleft()
            try:
                self._work(job)
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
            # Its memory counts as pending until here, and must not outlive that.
            del job
            with self._changed:
                self._pending -= size
                self._changed.notify_all()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError("write() after close()")

    def _raise_errors(self) -> None:
        with self._changed:
            errors, self._errors = self._errors, []
        if not errors:
            return
        more = f" (and {len(errors) - 1} more shards)" if len(errors) > 1 else ""
        raise RecordingError(f"{errors[0]}{more}") from errors[0]
