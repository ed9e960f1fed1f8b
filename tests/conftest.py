"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from estr_diag.ingestion.adapter import ReadOptions
from estr_diag.ingestion.discovery import discover
from estr_diag.ingestion.pipeline import ingest
from estr_diag.store.database import Store

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of sample logs."""
    return DATA


@pytest.fixture
def ingested() -> Iterator[Callable[..., Store]]:
    """Ingest paths into a store in memory; every store is closed at the end of the test."""
    opened: list[Store] = []

    def read(*paths: Path, options: ReadOptions | None = None, format_name: str = "auto") -> Store:
        store = Store.memory()
        opened.append(store)
        options = options or ReadOptions()
        ingest(store, discover(paths, format_name, options), options)
        return store

    yield read
    for store in opened:
        store.close()
