"""``mapping.toml``: how the columns of any table become canonical ones."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from estr_diag.errors import InputError, UsageError, nearest
from estr_diag.ingestion.adapter import RunFacts
from estr_diag.schema import LOGP_COLUMNS, SEQUENCE_COLUMNS_IN_LOG, TOKENS

KNOWN_COLUMNS: frozenset[str] = frozenset(TOKENS.names) | frozenset(SEQUENCE_COLUMNS_IN_LOG)
"""Canonical names that a table may hold."""

_NOT_SHIFTED = frozenset({"seq_id", "pos", "abs_pos", "step", *SEQUENCE_COLUMNS_IN_LOG})
"""Columns that name a token or belong to the whole sequence: they have no position to be early at."""

Unit = Literal["nats", "bits", "log10"]
NATS_PER: dict[str, float] = {"nats": 1.0, "bits": math.log(2.0), "log10": math.log(10.0)}
"""Multiply by this to get nats."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Units(_Strict):
    """Units of the logarithmic columns."""

    logp: Unit = "nats"
    entropy: Unit = "nats"


class Mask(_Strict):
    """What the mask column means."""

    counted: Annotated[bool | int | float | str, Field(description="value of a token that counts")] = True
    all_sampled: Annotated[
        bool, Field(description="there is no mask column, and the model sampled every token of the table")
    ] = False


class Run(_Strict):
    """Facts of the run that the table cannot hold."""

    trainer: str = "generic"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: Literal["raw", "processed"] | None = None
    dtype: str | None = None
    engine: str | None = None
    vocab_size: int | None = None
    entropy_of: Literal["infer", "train"] | None = None
    train_logp: Literal["proximal", "current"] | None = None
    version_unit: Literal["update", "step", "sample"] | None = None

    def facts(self, version_granularity: str | None, stored: bytes | None = None) -> RunFacts:
        """Return the facts in the form that an adapter hands over.

        Parameters
        ----------
        stored
            Facts that the file carries, as JSON; what the mapping states comes before them. Unreadable ones
            are left out: they are remarks of whatever wrote the file.
        """
        held: dict[str, Any] = {}
        if stored is not None:
            with suppress(ValidationError):
                held = Run.model_validate_json(stored).model_dump(exclude_unset=True)
        run = Run.model_validate({**held, **self.model_dump(exclude_unset=True)})
        return RunFacts(**run.model_dump(), version_granularity=version_granularity)


class Mapping(_Strict):
    """How the columns of a table become canonical ones."""

    columns: Annotated[
        dict[str, str],
        Field(description="canonical name -> name in the file; a column with a canonical name needs no entry"),
    ] = {}
    units: Units = Units()
    shift: Annotated[
        dict[str, int],
        Field(description="canonical name -> positions that the column sits early: 1 when entry t - 1 holds token t"),
    ] = {}
    mask: Mask = Mask()
    pos_base: Annotated[int, Field(description="number of the first position in the file's pos column")] = 0
    run: Run = Run()

    @model_validator(mode="after")
    def _sound(self) -> Mapping:
        for name in (*self.columns, *self.shift):
            if name not in KNOWN_COLUMNS:
                raise ValueError(f"'{name}' is no canonical column; {nearest(name, KNOWN_COLUMNS)}")
        if fixed := sorted(_NOT_SHIFTED & set(self.shift)):
            raise ValueError(f"'{fixed[0]}' cannot be shifted: it is not a value that an engine gives for each token")
        taken: dict[str, str] = {}
        for name in LOGP_COLUMNS:
            source = self.columns.get(name)
            if source is not None and (other := taken.setdefault(source, name)) != name:
                raise ValueError(f"'{other}' and '{name}' are both the column '{source}': their difference would be 0")
        if self.mask.all_sampled and "loss_mask" in self.columns:
            raise ValueError("mask.all_sampled says that there is no mask, and columns.loss_mask names one")
        return self

    def match(self, present: Collection[str]) -> dict[str, str]:
        """Return canonical name -> column, for what is `present` in a table.

        A column that an entry names is not taken a second time under its own name: with
        ``logp_infer = "logp_train"`` the table has no ``logp_train``.
        """
        named = {name: column for name, column in self.columns.items() if column in present}
        spoken_for = set(self.columns.values())
        own = {name: name for name in KNOWN_COLUMNS if name in present and name not in spoken_for}
        found = {**own, **named}
        order = (*TOKENS.names, *SEQUENCE_COLUMNS_IN_LOG)
        return {name: found[name] for name in order if name in found}

    def bind(self, present: Collection[str], path: Path | str | None = None) -> dict[str, str]:
        """Return canonical name -> column, and insist on every column that the mapping names.

        Raises
        ------
        InputError
            The table lacks a column that the mapping names; gives the nearest name.
        """
        for name, column in self.columns.items():
            if column not in present:
                raise InputError(
                    f"no column '{column}', which the mapping names for {name}",
                    path=path,
                    key=column,
                    hint=nearest(column, present).capitalize(),
                )
        return self.match(present)


def mapping_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a mapping file, for editors that check TOML against one."""
    schema = Mapping.model_json_schema()
    schema["properties"]["columns"]["propertyNames"] = {"enum": sorted(KNOWN_COLUMNS)}
    schema["properties"]["shift"]["propertyNames"] = {"enum": sorted(KNOWN_COLUMNS - _NOT_SHIFTED)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "estr-diag/mapping/v1",
        **schema,
        "title": "mapping.toml: what the columns of a table mean",
    }


def load_mapping(path: Path) -> Mapping:
    """Read and check a mapping file.

    Raises
    ------
    UsageError
        Not TOML, an unknown key, or a value that is not allowed; names the key.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    try:
        return Mapping.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "mapping"
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            problem = f"unknown key; {nearest(str(first['loc'][-1]), _keys_beside(first['loc']))}"
        raise UsageError(f"{path}: {key}: {problem}") from None


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are allowed where an unknown one was found."""
    model: type[BaseModel] = Mapping
    for part in location[:-1]:
        inner = model.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return sorted(model.model_fields)
