"""prime-rl's ``rollouts/step_{N}/rank_{R}.bin``: micro batches on their way to the trainer, as msgpack.

A file is a list of MicroBatch structs, each an array whose slots have a meaning by position. Fields were
only ever appended after the first slots, but slot 5 changed: temperatures (floats) in January 2026,
lengths of the packed sequences (integers) since. Sequences start where ``position_ids`` is 0; so does
the padding at the end of a row, which the declared lengths count into the last sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Field, Layout
from estr_diag.ingestion.align import Ragged
from estr_diag.ingestion.head import FileHead

_COMMON = (
    Field("input_ids", "int64", "slot 0: packed prompts and responses", "token_id"),
    Field("loss_mask", "bool", "slot 1: true where the model sampled", "loss_mask"),
    Field("advantages", "float32", "slot 2: per token", "advantage"),
    Field("inference_logprobs", "float32", "slot 3: inference engine; 0.0 outside the mask", "logp_infer"),
    Field("position_ids", "int64", "slot 4: 0 at the first token of each sequence"),
)
BIN = Layout(
    "micro_batch",
    "rollouts/step_{N}/rank_{R}.bin with 16 slots",
    (
        *_COMMON,
        Field("sequence_lengths", "int64", "slot 5: lengths of the packed sequences"),
        Field("temperatures", "float32", "slot 6: per token", required=False),
        Field("env_names", "string", "slot 7: environment of each token, empty on padding", "env", required=False),
    ),
)
BIN_OLD = Layout(
    "micro_batch_2026_01",
    "rollouts/step_{N}/rank_{R}.bin of January 2026 with 10 slots: no lengths",
    (*_COMMON, Field("temperatures", "float32", "slot 5: per token")),
)

_ARITIES = {16: BIN, 10: BIN_OLD}
_KINDS = {"int64": "iu", "bool": "b", "float32": "fiuO"}
"""NumPy kinds that a list of a declared type may have; a null makes a list of floats one of objects."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One decoded micro batch.

    Parameters
    ----------
    number
        1-based number in the file.
    tokens
        Its sequences that train on something, prompt included: token_id, loss_mask, advantage, logp_infer.
    index
        Index of each of them in the micro batch, shape (S,).
    env
        Environment of each, None where not known.
    dropped
        Segments without a loss token: padding, and copies that only fill up the ranks.
    slots
        Fields of the struct.
    """

    number: int
    tokens: Ragged
    index: NDArray[np.int64]
    env: list[str | None]
    dropped: int
    slots: int


def recognise(head: FileHead) -> tuple[Layout, int] | None:
    """Return the layout and the number of slots, from the first bytes; None when this is no such file."""
    if head.kind != "msgpack":
        return None
    unpacker = msgpack.Unpacker(max_ext_len=0)
    unpacker.feed(head.prefix)
    try:
        unpacker.read_array_header()
        slots = unpacker.read_array_header()
        length, first = unpacker.read_array_header(), unpacker.unpack()
    except Exception:
        # Any file may begin with these bytes, and msgpack raises many types.
        return None
    if slots < min(_ARITIES) or not length or not isinstance(first, int) or isinstance(first, bool):
        return None
    return (BIN_OLD if slots == min(_ARITIES) else BIN), slots


def read_micro_batches(path: Path, layout: Layout) -> Iterator[MicroBatch]:
    """Decode one micro batch after the other.

    Raises
    ------
    InputError
        The file is cut off or damaged, or a micro batch contradicts itself or `layout`.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        # The limits keep a forged length from allocating more than the file could fill; no extension
        # type is accepted, so nothing but plain values is ever built.
        unpacker = msgpack.Unpacker(
            stream,
            max_buffer_size=size,
            max_array_len=size,
            max_map_len=size,
            max_str_len=size,
            max_bin_len=size,
            max_ext_len=0,
        )
        try:
            count = unpacker.read_array_header()
        except Exception as error:
            raise _damaged(path, 1, error) from None
        for number in range(1, count + 1):
            try:
                struct = unpacker.unpack()
            except Exception as error:
                raise _damaged(path, number, error) from None
            yield _decode(struct, layout, path, number)


def _damaged(path: Path, number: int, error: Exception) -> InputError:
    return InputError(
        "this file is damaged or cut off",
        path=path,
        line=number,
        found=f"{type(error).__name__}: {error}",
        expected="a msgpack list of micro batches",
        hint="Copy it again when the step is done",
    )


def _decode(struct: Any, layout: Layout, path: Path, number: int) -> MicroBatch:
    changed = len(_COMMON)
    if not isinstance(struct, list) or len(struct) <= changed or not isinstance(struct[changed], list):
        found = f"{type(struct).__name__} of {len(struct)} slots" if isinstance(struct, list) else type(struct).__name__
        raise InputError("not a micro batch", path=path, line=number, found=found, expected=layout.describes)
    known = BIN if struct[changed] and isinstance(struct[changed][0], int) else BIN_OLD
    if known is not layout:
        raise InputError(
            "slot 5 contradicts the number of slots",
            path=path,
            line=number,
            key=layout.fields[changed].name,
            found=f"{known.fields[changed].name} in a struct of {len(struct)} slots",
            expected=layout.describes,
        )
    arrays = {
        field.name: _array(struct[slot], field, path, number)
        for slot, field in enumerate(layout.fields)
        if field.required
    }
    tokens = len(arrays["input_ids"])
    for name, values in arrays.items():
        if name != "sequence_lengths" and len(values) != tokens:
            raise InputError(
                "lists of unequal length",
                path=path,
                line=number,
                key=name,
                found=f"{len(values)} values of '{name}' and {tokens} of 'input_ids'",
                expected="one value a token",
            )
    starts = np.flatnonzero(arrays["position_ids"] == 0)
    _check_starts(starts, arrays.get("sequence_lengths"), tokens, path, number)
    columns = {field.canonical: arrays[field.name] for field in _COMMON if field.canonical is not None}
    full = Ragged(np.diff(starts, append=tokens), columns)
    trained = np.zeros(len(full), dtype=bool)
    trained[full.row[full["loss_mask"]]] = True
    kept = np.flatnonzero(trained)
    tokens_kept = full.select(trained[full.row])
    return MicroBatch(
        number,
        Ragged(tokens_kept.lengths[kept], tokens_kept.columns),
        kept,
        _environments(struct, layout, starts[kept]),
        len(full) - len(kept),
        len(struct),
    )


def _environments(struct: list[Any], layout: Layout, starts: NDArray[np.int64]) -> list[str | None]:
    slots = [field.name for field in layout.fields]
    slot = slots.index("env_names") if "env_names" in slots else len(struct)
    names = struct[slot] if slot < len(struct) else None
    if not isinstance(names, list) or len(names) != len(struct[0]):
        return [None] * len(starts)
    return [str(names[start]) for start in starts.tolist()]


def _array(values: Any, field: Field, path: Path, number: int) -> NDArray[Any]:
    try:
        array = np.array(values, ndmin=1)
        if array.ndim != 1 or array.dtype.kind not in _KINDS[field.type]:
            raise ValueError(f"an array of {array.dtype}")
        return array.astype(field.type)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            "wrong type", path=path, line=number, key=field.name, found=str(error), expected=f"a list of {field.type}"
        ) from None


def _check_starts(
    starts: NDArray[np.int64], lengths: NDArray[Any] | None, tokens: int, path: Path, number: int
) -> None:
    """Raise when positions do not begin at 0, or the declared sequences do not begin where positions do."""
    declared = np.zeros(1, dtype=np.int64) if lengths is None else np.concatenate([[0], np.cumsum(lengths)[:-1]])
    total = tokens if lengths is None else int(lengths.sum())
    if total != tokens or not np.isin(declared, starts).all():
        raise InputError(
            "position_ids and sequence_lengths contradict each other",
            path=path,
            line=number,
            key="position_ids",
            found=f"position 0 at {starts.tolist()[:8]}, sequences at {declared.tolist()[:8]}, "
            f"{total} of {tokens} tokens",
            expected="position 0 at the first token of every sequence",
        )
