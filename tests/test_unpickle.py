"""The allow-listed reader: equal to torch on what torch writes, and deaf to everything else."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr_diag.errors import InputError
from estr_diag.ingestion.unpickle import load_pickle, load_torch

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["whole", "transposed", "strided", "offset", "scalar", "empty"])
def test_tensors_equal_torchs_own(tmp_path: Path, dtype: str, view: str) -> None:
    whole = (torch.arange(24).reshape(4, 6) % 2 if dtype == "bool" else torch.arange(24).reshape(4, 6)).to(
        getattr(torch, dtype)
    )
    tensor = {
        "whole": whole, "transposed": whole.T, "strided": whole[::2, 1::2], "offset": whole[2:], "scalar": whole[1, 1], "empty": whole[:0],
    }[view]  # fmt: skip
    path = tmp_path / "x.pt"
    torch.save({"a": tensor, "b": [1, "two", None]}, path)
    found = load_torch(path)
    expected = torch.load(path, weights_only=True)
    assert found["b"] == expected["b"]
    np.testing.assert_array_equal(
        found["a"], expected["a"].float().numpy() if dtype == "bfloat16" else expected["a"].numpy()
    )


class _Evil:
    def __init__(self, function: Any, argument: str) -> None:
        self.function, self.argument = function, argument

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self.function, (self.argument,)


@pytest.mark.parametrize("function", [os.system, eval, exec, open, __import__], ids=lambda f: f.__name__)
@pytest.mark.parametrize("container", ["pickle", "torch"])
def test_nothing_that_a_pickle_names_is_run(tmp_path: Path, function: Any, container: str) -> None:
    touched = tmp_path / "touched"
    argument = f"touch {touched}" if function is os.system else f"open({str(touched)!r}, 'w')"
    path = tmp_path / "evil.pt"
    if container == "torch":
        torch.save({"x": _Evil(function, argument)}, path)
    else:
        path.write_bytes(pickle.dumps({"x": _Evil(function, argument)}))
    with pytest.raises(InputError, match="not on the allow-list; nothing of it was run"):
        load_torch(path) if container == "torch" else load_pickle(path)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["numpy ndarray.tofile", "builtins getattr", "os system", "numpy f2py", "torch load"])
def test_dotted_and_neighbouring_names_are_not_allowed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pkl"
    module, attribute = name.split(" ")
    path.write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(InputError, match="allow-list"):
        load_pickle(path)


def test_a_tensor_that_reaches_beyond_its_storage_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(4)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    inside = next(name for name in members if name.endswith("data/0"))
    members[inside] = members[inside][:16]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(InputError, match="damaged or cut off"):
        load_torch(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path, bomb = tmp_path / "x.pt", tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(100_000)}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        for info in archive.infolist():
            out.writestr(info.filename, archive.read(info))
    with pytest.raises(InputError, match="compressed"):
        load_torch(bomb)
