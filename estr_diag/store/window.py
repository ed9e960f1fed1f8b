"""A window of steps: a store whose tables are views of another's, so that nothing is copied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from estr_diag.errors import UsageError
from estr_diag.schema import quote_ident
from estr_diag.store.database import Store, quiet

_FORM = re.compile(r"\s*(-?\d+)?\s*(?:(:)\s*(-?\d+)?)?\s*")


@dataclass(frozen=True, slots=True)
class Steps:
    """Trainer steps from `first` to `last`, both included; None where there is no end."""

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise UsageError(f"steps {self}: the first is above the last; write {self.last}:{self.first}")

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read ``0:20`` (both ends belong to it), ``100:``, ``:20`` or one step, ``7``.

        Raises
        ------
        UsageError
            Another form, or an empty range.
        """
        found = _FORM.fullmatch(text)
        if found is None or (found[1] is None and found[3] is None):
            raise UsageError(f"steps {text!r}: expected FIRST:LAST, as in 0:20 (both ends belong to it), 100: or 7")
        first, colon, last = found.groups()
        low = None if first is None else int(first)
        return cls(low, (None if last is None else int(last)) if colon else low)

    def __str__(self) -> str:
        return f"{'' if self.first is None else self.first}:{'' if self.last is None else self.last}"

    def sql(self) -> str:
        """Return the condition on the column ``step``; a row without a step is in no window."""
        ends = ((">=", self.first), ("<=", self.last))
        return " and ".join(["step is not null", *(f"step {sign} {end:d}" for sign, end in ends if end is not None)])


class View(Store):
    """A store whose tables are views of another's; that one must stay open.

    Views of a cursor stand before the tables of the same name, so every statistic runs on it as it is. `sources`
    and `runs` stay whole: files and facts are those of the log.

    Parameters
    ----------
    store
        What it is a view of; may be one itself.
    condition
        SQL that a row of ``tokens`` and of ``sequences`` must meet.
    tokens
        What is selected of ``tokens``.
    """

    def __init__(self, store: Store, condition: str, tokens: str = "*") -> None:
        # Not by Store's own: the spill folder belongs to the whole database, and may not be set again once it is used.
        self.connection = store.connection.cursor()
        quiet(self.connection)
        self.path, self.writable = store.path, False
        self._final, self._temporary, self._pending = None, False, 0
        self.base: Store = store.base if isinstance(store, View) else store
        """The store of the whole log."""
        self.condition: str = f"{store.condition} and {condition}" if isinstance(store, View) else condition
        self._counts: dict[str, int] | None = None
        database = quote_ident(str(self.rows("select current_database() as name")[0]["name"]))
        for table, selected in (("tokens", tokens), ("sequences", "*")):
            self.connection.execute(
                f"create temp view {table} as select {selected} from {database}.main.{table} where {self.condition}"
            )

    def __enter__(self) -> Self:
        return self

    def column_counts(self) -> dict[str, int]:
        """Return how many values each column holds in the view: one scan, since ingest counted whole files."""
        if self._counts is None:
            names = list(super().column_counts())
            listed = ", ".join(f"count({quote_ident(n)}) as {quote_ident(n)}" for n in names)
            found = self.rows(f"select {listed} from tokens")[0] if names else {}
            self._counts = {name: n for name, n in found.items() if n}
        return dict(self._counts)


class StepWindow(View):
    """The sequences of some steps, as a store of its own.

    Parameters
    ----------
    store
        What it is a window of.
    steps
        Which steps.
    source
        What the user calls the log, for messages.

    Raises
    ------
    UsageError
        No sequence lies in the window; says which steps the log has.
    """

    def __init__(self, store: Store, steps: Steps, source: str = "the log") -> None:
        super().__init__(store, steps.sql())
        if not self.rows("select 1 from sequences limit 1"):
            self.close()
            raise UsageError(f"steps {steps} of {source} hold no sequence; {_steps_of(store)}")


class StepClusters(View):
    """The log with a step in place of a sequence: what is by sequence elsewhere is by step here.

    For means over tokens alone: what is made of one value a sequence, or looks along one, means nothing here.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, "step is not null", "* replace (step::bigint as seq_id)")


def _steps_of(store: Store) -> str:
    """Say which steps a log has."""
    found = store.rows("select min(step) as lo, max(step) as hi from sequences")[0]
    if found["lo"] is None:
        return "its sequences have no step: name the trainer's files after the step, or read them with --step"
    return f"it has steps {found['lo']} to {found['hi']}: choose among these"
