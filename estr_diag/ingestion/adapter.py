"""What an adapter is: it recognises a trainer's file and turns it into canonical columns.

An adapter never computes a statistic and never imports a trainer. It is found by the content of a
file, says why it was chosen, and declares the fields it reads as data: the same declaration gives the
``--dry-run`` table, the reading of JSON lines, the missing-field errors and the trainer's JSON Schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from estr_diag.ingestion.head import FileHead
    from estr_diag.ingestion.mapping import Mapping as ColumnMapping


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a trainer's file.

    Parameters
    ----------
    name
        Field name in the file.
    type
        What it holds. For JSON lines a DuckDB type (``FLOAT[]``); for tensors dtype and shape in words.
    meaning
        One line, with alignment and fill values where they matter.
    canonical
        The canonical column it becomes, if any.
    required
        Whether reading fails without it.
    """

    name: str
    type: str
    meaning: str
    canonical: str | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """One file layout of a trainer: its fields and the words that describe it."""

    name: str
    describes: str
    fields: tuple[Field, ...]

    def columns(self, present: frozenset[str] | None = None) -> dict[str, str]:
        """Return canonical column -> field name, for the fields in `present` (all when None)."""
        return {f.canonical: f.name for f in self.fields if f.canonical and (present is None or f.name in present)}

    def missing(self, present: frozenset[str]) -> list[str]:
        """Return the required fields that are not in `present`."""
        return [f.name for f in self.fields if f.required and f.name not in present]


@dataclass(frozen=True, slots=True)
class Probe:
    """What an adapter says about a file it recognises.

    `refusal` is set when the file is recognised and cannot be used; it holds the reason and the flag or
    hook that gives usable data; `guessable` says that ``--guess-mask`` overrules it. A `companion` adds
    facts to other files and is read alone only when none of those is there.
    """

    adapter: str
    path: Path
    layout: str
    why: str
    columns: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    refusal: str | None = None
    guessable: bool = False
    companion: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing to read: a file and the files joined to it."""

    probe: Probe
    companions: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """The file that holds the tokens."""
        return self.probe.path


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user said on the command line about how to read."""

    mapping: ColumnMapping | None = None
    guess_mask: bool = False
    all_sampled: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the run that an adapter learned; the names are the columns of `runs`."""

    trainer: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: str | None = None
    dtype: str | None = None
    engine: str | None = None
    vocab_size: int | None = None
    entropy_of: str | None = None
    train_logp: str | None = None
    version_unit: str | None = None
    version_granularity: str | None = None


@dataclass(slots=True)
class TokenBatch:
    """Some whole sequences in flat form.

    Parameters
    ----------
    lengths
        Response tokens of each sequence, shape (S,). May be 0.
    tokens
        Canonical token column -> values, shape (sum of lengths,). A missing value is NaN in a float
        column and masked in a `numpy.ma` integer column.
    sequences
        Column of `sequences` -> S values; ``seq_key`` is required.
    facts
        Run facts read with this batch.
    counts
        Things left out or repaired, by reason.
    notes
        Remarks for the reader of the report.
    """

    lengths: NDArray[np.int64]
    tokens: dict[str, Any]
    sequences: dict[str, Sequence[Any]]
    facts: RunFacts
    counts: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()


class Adapter(Protocol):
    """A trainer's reader. Third parties register theirs in the entry-point group ``estr_diag.adapters``.

    Attributes
    ----------
    name, title
        For the command line, and for people.
    layouts
        Every file layout it reads or refuses.
    hints
        Canonical column -> how a user of this trainer gets it logged; printed where the column is missing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]]
    hints: ClassVar[Mapping[str, str]]

    def probe(self, head: FileHead) -> Probe | None:
        """Say whether the file is this trainer's, from its first bytes and keys; None when it is not."""
        ...

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Group recognised files into units: which is read, and which are joined to it."""
        ...

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read a unit; whole sequences only, in file order."""
        ...


def one_unit_per_file(probes: Sequence[Probe]) -> list[Unit]:
    """Return the plan of an adapter that joins nothing."""
    return [Unit(probe) for probe in probes]
