"""Read pickles and torch files without running what they name.

A pickle may name any function and have it called. The reader here resolves names only through an
allow-list of about thirty, most of them replaced by inert stand-ins, so that a trainer's dump can be
read without the trainer, without torch, and without trust. ``torch.save`` archives go through the same
list: their tensors become NumPy arrays.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError

Allowed = Mapping[tuple[str, str], Any]


class ForbiddenNameError(pickle.UnpicklingError):
    """The pickle names something that is not on the allow-list."""


class Inert:
    """Takes any arguments and state, does nothing with them: for names whose content is not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Record:
    """Keeps what it was built from: ``args`` of the call and ``state`` set afterwards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


@dataclass(frozen=True)
class StorageType:
    """A torch storage class: the NumPy type of its elements."""

    dtype: str
    brain: bool = False
    """bfloat16: stored as the upper half of a float32."""


@dataclass(frozen=True)
class Storage:
    """One torch storage, flat."""

    values: NDArray[Any]
    brain: bool = False


@dataclass(frozen=True)
class Jagged:
    """A torch nested tensor in jagged layout: sequence i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]


def rebuild_tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    """Stand-in for ``torch._utils._rebuild_tensor_v2``; checks that the view lies inside its storage."""
    if not isinstance(storage, Storage):
        return Inert()
    size, stride = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    values = storage.values
    if 0 in size:
        flat = np.empty(size, values.dtype)
    else:
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or min(stride, default=0) < 0 or min(size, default=1) < 0 or last >= len(values):
            raise pickle.UnpicklingError(f"a tensor of shape {size} does not fit its storage of {len(values)} elements")
        bytes_per_step = tuple(step * values.itemsize for step in stride)
        flat = np.lib.stride_tricks.as_strided(values[offset:], size, bytes_per_step, writeable=False)
    if storage.brain:
        return (np.ascontiguousarray(flat).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return flat


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Callable[..., Any], _type: Any, args: tuple[Any, ...], _state: Any) -> Any:
    return function(*args)


def rebuild_jagged(state: Mapping[str, Any]) -> Jagged:
    """Stand-in for the constructor of a jagged nested tensor.

    Raises
    ------
    pickle.UnpicklingError
        Sequences with holes (a ``lengths`` tensor) or ragged in another dimension than the first.
    """
    if state.get("lengths") is not None or state.get("_ragged_idx", 1) != 1:
        raise pickle.UnpicklingError("a nested tensor that is not packed along its first dimension")
    return Jagged(state["values"], np.asarray(state["offsets"], dtype=np.int64))


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ForbiddenNameError(f"_codecs.encode with {encoding!r}")
    return text.encode("latin1")


def _torch_size(*args: Any) -> tuple[int, ...]:
    return tuple(args[0]) if args else ()


def _numpy_allowed() -> dict[tuple[str, str], Any]:
    # These three only build arrays from bytes and lists; none of them can be made to call anything.
    from numpy._core import multiarray  # the public name moved between NumPy 1 and 2, the pickled one as well

    names: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        names[module, "_reconstruct"] = multiarray._reconstruct
        names[module, "scalar"] = multiarray.scalar
    return names


_STORAGES = {
    "DoubleStorage": StorageType("<f8"),
    "FloatStorage": StorageType("<f4"),
    "HalfStorage": StorageType("<f2"),
    "BFloat16Storage": StorageType("<u2", brain=True),
    "LongStorage": StorageType("<i8"),
    "IntStorage": StorageType("<i4"),
    "ShortStorage": StorageType("<i2"),
    "CharStorage": StorageType("i1"),
    "ByteStorage": StorageType("u1"),
    "BoolStorage": StorageType("?"),
}

BASE_ALLOWED: Allowed = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("_codecs", "encode"): _encode_latin1,
    **_numpy_allowed(),
    **{("torch", name): storage for name, storage in _STORAGES.items()},
    ("torch", "Size"): _torch_size,
    ("torch", "device"): Inert,
    ("torch", "Tensor"): Inert,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.nested._internal.nested_tensor", "NestedTensor"): Inert,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): rebuild_jagged,
    ("torch._dynamo.decorators", "_DimRange"): Inert,
    # Old pickled tensors embed a second pickle here, which the original would load without limits.
    ("torch.storage", "_load_from_bytes"): Inert,
}
"""Names every reader may resolve; an adapter adds the few of its trainer."""


class SafeUnpickler(pickle.Unpickler):
    """Resolves names through an allow-list and torch storages from an archive."""

    def __init__(self, stream: IO[bytes], allowed: Allowed, archive: _Archive | None = None) -> None:
        super().__init__(stream)
        self._allowed = allowed
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        """Return what the allow-list holds for a name."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise ForbiddenNameError(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage of the surrounding torch archive."""
        if self._archive is None or not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(f"a persistent id that is no torch storage: {str(pid)[:80]}")
        _, kind, key, _location, count = pid[:5]
        if not isinstance(kind, StorageType):
            raise pickle.UnpicklingError("a storage of unknown type")
        return self._archive.storage(kind, str(key), int(count))


class _Archive:
    """The zip file that ``torch.save`` writes."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._zip = archive
        self._root = next(name for name in archive.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")
        self._cache: dict[str, Storage] = {}
        if f"{self._root}byteorder" in archive.namelist() and archive.read(f"{self._root}byteorder") != b"little":
            raise pickle.UnpicklingError("a file written on a big-endian machine")

    def pickle(self) -> IO[bytes]:
        return io.BytesIO(self._read("data.pkl"))

    def _read(self, member: str) -> bytes:
        # torch.save stores without compression; a compressed member could unfold to any size.
        if self._zip.getinfo(self._root + member).compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"{member} is compressed, which torch.save never does")
        return self._zip.read(self._root + member)

    def storage(self, kind: StorageType, key: str, count: int) -> Storage:
        if key not in self._cache:
            raw = self._read(f"data/{key}")
            values = np.frombuffer(raw, dtype=kind.dtype)
            if len(values) < count:
                raise pickle.UnpicklingError(f"storage {key} holds {len(values)} elements of {count}")
            self._cache[key] = Storage(values, kind.brain)
        return self._cache[key]


def load_pickle(path: Path, allowed: Allowed | None = None) -> Any:
    """Read a plain pickle file through the allow-list.

    Raises
    ------
    InputError
        The file is cut off, damaged, or names something that is not on the list.
    """
    with path.open("rb") as stream:
        return _load(lambda: SafeUnpickler(stream, {**BASE_ALLOWED, **(allowed or {})}).load(), path)


def load_torch(path: Path, allowed: Allowed | None = None) -> Any:
    """Read a ``torch.save`` file through the allow-list; tensors become NumPy arrays.

    Raises
    ------
    InputError
        As `load_pickle`.
    """
    with path.open("rb") as stream:
        return _load(lambda: _load_archive(stream, allowed), path)


def load_torch_bytes(data: bytes, path: Path, allowed: Allowed | None = None) -> Any:
    """Read a ``torch.save`` archive held in memory (verl keeps one inside its pickle); `path` is for messages."""
    return _load(lambda: _load_archive(io.BytesIO(data), allowed), path)


def _load_archive(stream: IO[bytes], allowed: Allowed | None) -> Any:
    with zipfile.ZipFile(stream) as opened:
        archive = _Archive(opened)
        return SafeUnpickler(archive.pickle(), {**BASE_ALLOWED, **(allowed or {})}, archive).load()


def _load(read: Callable[[], Any], path: Path) -> Any:
    try:
        return read()
    except ForbiddenNameError as error:
        raise InputError(
            "this pickle names something that is not on the allow-list; nothing of it was run",
            path=path,
            found=str(error),
            hint="If a trainer you trust writes this, report the name so that the list can be extended",
        ) from None
    except InputError:
        raise
    except Exception as error:
        # A damaged pickle raises almost any type: EOFError, UnpicklingError, BadZipFile, KeyError, ValueError ...
        raise InputError(
            "this file is damaged or cut off",
            path=path,
            found=f"{type(error).__name__}: {error}",
            hint="Copy it again when the trainer has finished writing it",
        ) from None
