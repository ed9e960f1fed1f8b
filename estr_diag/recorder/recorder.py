"""`TokenRecorder`: what a trainer calls once a step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from estr_diag import __version__
from estr_diag.errors import UsageError
from estr_diag.recorder.batch import Batch, copied
from estr_diag.recorder.columns import TokenColumns
from estr_diag.recorder.manifest import checked_facts, metadata_of, write_manifest
from estr_diag.recorder.shard import parts_there, shard_path, table_of, warm_up, write_shard
from estr_diag.recorder.writer import BackgroundWriter, RecordingError

_LOG = logging.getLogger("estr_diag.recorder")


class TokenRecorder:
    """Writes the tokens of a run as canonical Parquet shards, one file a call of `write`.

    A shard is whole or not there: a process may be killed at any time. Writing is done by a thread; `write`
    itself copies the response tokens to the host and returns. A run that is resumed into the same folder
    adds shards, and replaces none.

    Parameters
    ----------
    directory
        Folder for the shards, made where it is missing. All ranks of a run share it.
    trainer
        Name of the trainer.
    rank
        Number of this process among those that record; part of the file names. Two recorders of one rank
        do not overwrite each other's shards.
    facts
        What the numbers depend on, where it is known: ``temperature``, ``top_p``, ``top_k``, ``logprobs``
        (raw | processed), ``dtype``, ``engine``, ``vocab_size``, ``entropy_of`` (infer | train),
        ``train_logp`` (proximal | current), ``version_unit`` (update | step | sample). They are written into
        ``manifest.json`` and into every shard.
    max_pending_bytes
        How much may wait for the disk, in bytes. Beyond it `write` waits; nothing is dropped.

    Raises
    ------
    UsageError
        An unknown fact, or a folder that holds the recording of another trainer.
    RecordingError
        The folder cannot be written to.

    Examples
    --------
    >>> with TokenRecorder("dumps/", trainer="mine", facts={"temperature": 1.0}) as rec:  # doctest: +SKIP
    ...     rec.write(step=3, logp_infer=mu, logp_train=pi, loss_mask=mask, policy_version=2, trainer_version=3)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        trainer: str,
        rank: int = 0,
        facts: Mapping[str, Any] | None = None,
        max_pending_bytes: int = 256 << 20,
    ) -> None:
        if rank < 0 or max_pending_bytes <= 0:
            raise UsageError(f"TokenRecorder: rank is {rank} and max_pending_bytes {max_pending_bytes}; both count up")
        self.directory = Path(directory)
        self.facts = checked_facts(trainer, facts or {})
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shards = _Shards(self.directory, rank, metadata_of(self.facts, rank, __version__))
        except OSError as error:
            raise RecordingError(f"{directory}: cannot be a folder for shards: {error.strerror}") from error
        write_manifest(self.directory, self.facts, rank, __version__)
        warm_up()
        self._writer: BackgroundWriter[Batch] = BackgroundWriter(shards.write, max_pending_bytes)
        # Runs when the recorder is dropped, and at exit while threads still live; holds no reference to it.
        self._finalizer = weakref.finalize(self, _close_unattended, self._writer)

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the disk or are being written."""
        return self._writer.pending_bytes

    def write(
        self,
        *,
        step: int,
        seq_lens: Any = None,
        cu_seqlens: Any = None,
        response_mask: Any = None,
        starts: Any = None,
        **columns: Unpack[TokenColumns],
    ) -> None:
        """Record some whole sequences that `step` consumes; a column that is None is left out.

        Token columns are torch tensors of any device and type, NumPy arrays, or lists, all in one of three
        layouts, B sequences in each:

        - padded, [B, T]: responses from column 0 on, padding behind them;
        - packed, [N] (or [1, N]): one response after another, with `cu_seqlens` or `seq_lens`;
        - a list of B sequences, or a nested tensor.

        ``policy_version``, ``trainer_version``, ``advantage``, ``loss_mask``, ``trainer_keep`` and ``turn``
        may be one value for the call, or [B]; columns of the sequence (``group_id``, ``reward`` ...) are
        one value or [B], of numbers or texts. Log-probs and entropies are in nats. Values are written as they
        are, NaN and infinities too; ``logp_train`` and ``logp_infer`` of a token must be at the same
        position.

        Parameters
        ----------
        step
            Trainer step that consumes the sequences.
        seq_lens
            Response tokens of each sequence, [B].
        cu_seqlens
            Packed: 0 and the end of each sequence, [B + 1].
        response_mask
            Padded, in place of `seq_lens`: a response goes on to the last token of its row that is not 0,
            [B, T]. Without either, ``loss_mask`` says so.
        starts
            Padded: column of the first response token of each row, [B], for tensors that hold the prompt
            too, or are padded on the left.
        **columns
            See `TokenColumns`. ``loss_mask`` and one of ``logp_infer`` and ``logp_train`` are required.

        Raises
        ------
        UsageError
            An unknown column, shapes that contradict each other, a value that its column cannot hold, or a
            recorder that is closed. Nothing of this call is recorded.
        RecordingError
            A shard of an *earlier* call could not be written. Nothing of this call is recorded; it may be
            repeated.
        """
        self._writer.check()
        cuts = {"seq_lens": seq_lens, "cu_seqlens": cu_seqlens, "response_mask": response_mask, "starts": starts}
        batch = copied(step, columns, cuts)
        if len(batch.lengths):
            self._writer.submit(batch, batch.nbytes)

    def flush(self) -> None:
        """Wait until everything is on disk.

        Raises
        ------
        RecordingError
            A shard could not be written.
        """
        self._writer.flush()

    def close(self) -> None:
        """Wait until everything is on disk, and end the thread; a second call does nothing.

        Raises
        ------
        RecordingError
            A shard could not be written.
        """
        self._writer.close()

    def __enter__(self) -> TokenRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RecordingError as lost:
            if error is None:
                raise
            # The trainer's own error is the one to see.
            _LOG.error("%s", lost)


class _Shards:
    """Names and writes the shards of one rank; used by the writer thread alone."""

    def __init__(self, folder: Path, rank: int, metadata: Mapping[str, str]) -> None:
        self._folder, self._rank, self._metadata = folder, rank, metadata
        self._free = parts_there(folder, rank)
        self._from_before = frozenset(self._free)

    def write(self, batch: Batch) -> None:
        if batch.step in self._from_before:
            _LOG.warning(
                "%s: step %d was recorded before this session; its shards are kept, and those of this session are "
                "added. Remove one of the two before reading, if the run went back to a checkpoint",
                self._folder,
                batch.step,
            )
            self._from_before -= {batch.step}
        table = table_of(batch, self._metadata)
        while True:
            part = self._free.get(batch.step, 0)
            self._free[batch.step] = part + 1
            path = shard_path(self._folder, batch.step, self._rank, part)
            try:
                return write_shard(path, table)
            except FileExistsError:
                # Another recorder of the same rank has taken the number.
                continue
            except Exception as error:
                raise RecordingError(
                    f"{path}: cannot be written, its {len(batch.lengths)} sequences of step {batch.step} are lost: "
                    f"{getattr(error, 'strerror', None) or error}"
                ) from error


def _close_unattended(writer: BackgroundWriter[Batch]) -> None:
    try:
        writer.close()
    except RecordingError as error:
        _LOG.error("%s", error)
