"""Bring what a trainer holds (tensors on any device, arrays, lists) to NumPy on the host, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import UsageError

Array = NDArray[Any]
HostValues = Array | list[Array]
"""An array, or (for a list of sequences or a nested tensor) one array a sequence."""

_NUMPY_LACKS = ("bfloat16", "float8")


def to_host(name: str, value: Any) -> HostValues:
    """Return the values of one argument; a view where they are on the host already.

    Parameters
    ----------
    name
        The argument, for messages.
    value
        A tensor (strided or nested, on any device, of any real type, with or without gradient), an array,
        a number, or a list of these.

    Raises
    ------
    UsageError
        Nothing that can become an array.
    """
    try:
        if _is_tensor(value):
            return _from_tensor(name, value)
        if _is_list_of_sequences(value):
            return [_one(name, item) for item in value]
        if isinstance(value, list | tuple) and any(_is_tensor(item) for item in value):
            value = [item.item() if _is_tensor(item) else item for item in value]
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"write(): {name} cannot be copied to the host: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def describe(value: HostValues) -> str:
    """Say what an argument is, for messages: ``int64 [4, 7]``."""
    if isinstance(value, list):
        return f"a list of {len(value)} sequences"
    kind = "object" if value.dtype == object else value.dtype.name
    return f"{kind} {list(value.shape)}"


def _is_tensor(value: Any) -> bool:
    # By its methods: the module of a torch that is not installed cannot be asked.
    return hasattr(value, "detach") and hasattr(value, "cpu")


def _from_tensor(name: str, value: Any) -> HostValues:
    if hasattr(value, "full_tensor"):
        # Gathering is a collective operation: whether all ranks are here is known to the trainer alone.
        raise UsageError(f"write(): {name} is a DTensor, a shard of a tensor; pass {name}.full_tensor()")
    tensor = value.detach()
    if getattr(tensor, "is_nested", False):
        return [_one(name, part) for part in tensor.unbind()]
    # To the host first: a bfloat16 tensor is half the transfer that its float32 would be.
    tensor = tensor.cpu()
    if any(kind in str(tensor.dtype) for kind in _NUMPY_LACKS):
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


def _is_list_of_sequences(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == object and value.ndim == 1 and bool(len(value)) and _is_sequence(value[0])
    # An empty list is a batch without a sequence.
    return isinstance(value, list | tuple) and (not value or _is_sequence(value[0]))


def _is_sequence(item: Any) -> bool:
    if isinstance(item, str | bytes):
        return False
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) > 0


def _one(name: str, item: Any) -> Array:
    if isinstance(item, list | tuple) and not item:
        return np.empty(0)
    found = to_host(name, item)
    if isinstance(found, list) or found.ndim != 1:
        raise UsageError(f"write(): {name} is a list whose items are {describe(found)}; expected one list a sequence")
    return found
