"""Notebooks: each runs from a fresh kernel, and what is committed is what it gives.

``python -m tests.test_notebooks`` writes their outputs anew, after a change to a number or to what a result looks like.
"""

from __future__ import annotations

import html
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = (
    "01_quickstart", "02_entropy_ratio_scaling", "03_noise_vs_exploration", "04_mask_what_if", "05_your_own_trainer",
)  # fmt: skip
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
RELATIVE = 1e-6
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
_PATH = re.compile(r"(?<![\w<.:/])/(?:[\w.+-]+/)+[\w.+-]*|/tmp\b|[A-Z]:\\\\|\bat 0x[0-9a-f]+")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def executed(name: str, folder: Path) -> Any:
    """Run a notebook in an empty folder, without what an earlier run left in it."""
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False, resources=where).execute()
    notebook.metadata = METADATA
    return notebook


def outputs(notebook: Any) -> list[tuple[int, list[Any]]]:
    """Return the outputs of each code cell, with its number."""
    return [(i, cell.outputs) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def kinds(output: Any) -> tuple[str, ...]:
    return (output.output_type, *sorted(output.get("data", {})))


def said(output: Any) -> str:
    """Return what a reader sees of an output; of a picture nothing, since its pixels follow the version of Matplotlib."""
    data = output.get("data", {})
    if "image/png" in data:
        return ""
    if "text/html" in data:
        # Whole rows of a table stay apart: a number must not run into its neighbour.
        text = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
        return html.unescape(re.sub(r"<[^>]+>", " ", text))
    return str(data.get("text/markdown") or data.get("text/plain") or output.get("text", ""))


def assert_same(committed: str, fresh: str, where: str) -> None:
    """Hold two texts equal, numbers in them to `RELATIVE`."""
    assert _NUMBER.sub("#", committed).split() == _NUMBER.sub("#", fresh).split(), where
    for a, b in zip(_NUMBER.findall(committed), _NUMBER.findall(fresh), strict=True):
        x, y = (float(n.replace(",", "")) for n in (a, b))
        assert math.isclose(x, y, rel_tol=RELATIVE, abs_tol=1e-12), f"{where}: {a} is committed, {b} is found"


def assert_clean(notebook: Any) -> None:
    """No errors, warnings, paths or addresses in the outputs."""
    for i, found in outputs(notebook):
        for output in found:
            assert output.output_type in ("execute_result", "display_data"), f"cell {i}: {output.output_type}"
            texts = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
            place = _PATH.search(json.dumps(texts, ensure_ascii=False))
            assert place is None, f"cell {i}: {place}"


@pytest.fixture
def kernel_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep kernels away from the user's own settings and history; return an empty folder to run in."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_all_notebooks_are_here() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_as_it_should_be(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert all(cell.metadata == {} for cell in notebook.cells), "no times, no editor's state"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run once, from top to bottom"
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000
    assert_clean(notebook)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_gives_what_is_committed(name: str, kernel_home: Path) -> None:
    committed, fresh = read(name), executed(name, kernel_home)
    assert_clean(fresh)
    assert list(kernel_home.iterdir()) == [], "leaves nothing behind"
    for (i, old), (_, new) in zip(outputs(committed), outputs(fresh), strict=True):
        assert [kinds(output) for output in old] == [kinds(output) for output in new], f"{name}, cell {i}"
        for a, b in zip(old, new, strict=True):
            assert_same(said(a), said(b), f"{name}, cell {i}")


def test_numbers_are_compared_and_words_too() -> None:
    assert_same("1,265 tokens, 4.19e-10", "1265 tokens,  4.1900000001e-10", "")
    for other in ("1,266 tokens, 4.19e-10", "1,265 tokens, -4.19e-10", "1,265 token, 4.19e-10", "1,265 tokens"):
        with pytest.raises(AssertionError):
            assert_same("1,265 tokens, 4.19e-10", other, "")


@pytest.mark.parametrize("text", ["/tmp/x", "read /home/me/run.duckdb", "'/work/dumps/'", "<Figure at 0x7f3a>"])
def test_paths_and_addresses_are_found(text: str) -> None:
    assert _PATH.search(text)


@pytest.mark.parametrize("text", ["rollout_corr/kl", "<td>a</td></tr>", "E[delta^2]/H", "verl: 1/c to c"])
def test_other_slashes_are_no_paths(text: str) -> None:
    assert not _PATH.search(text)


if __name__ == "__main__":
    for chosen in NAMES:
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(executed(chosen, Path(empty)), FOLDER / f"{chosen}.ipynb")  # type: ignore[no-untyped-call]
