"""What is noticed across files at ingest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import estr_diag as ed


def notes(folder: Path, logp: float) -> list[str]:
    columns: dict[str, list[Any]] = {
        "step": [],
        "seq_id": [],
        "pos": [],
        "token_id": [],
        "logp_infer": [],
        "logp_train": [],
    }
    for seq in range(6):
        for pos in range(8):
            same = seq % 3  # sequences 3, 4, 5 repeat 0, 1, 2
            row = (1, seq, pos, 10 * same + pos, logp - 0.01 * same, logp - 0.01 * same - 0.001 * pos)
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
    columns["loss_mask"] = [True] * len(columns["step"])
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns), path)
    with ed.open(path) as log:
        assert log.ingested is not None
        return [note for source in log.ingested.sources for note in source.notes]


def test_a_response_that_nobody_draws_twice_is_a_copy(tmp_path: Path) -> None:
    assert any("3 sequence(s) have exactly the tokens" in note for note in notes(tmp_path, -2.0))


def test_a_response_that_is_likely_is_drawn_twice_by_chance(tmp_path: Path) -> None:
    """A sharp policy writes the same short answer to a prompt again and again: no alarm."""
    assert not notes(tmp_path, -0.05)


@pytest.mark.parametrize("logp", [-1.7, -1.8])
def test_the_limit_is_one_in_a_million_for_the_whole_response(tmp_path: Path, logp: float) -> None:
    assert bool(notes(tmp_path, logp)) == (8 * logp < -14)
