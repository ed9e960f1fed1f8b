"""``mapping.toml``: how the columns of any table become canonical ones."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from estr_diag.errors import InputError, UsageError, nearest
from estr_diag.schema import SEQUENCE_COLUMNS_IN_LOG, TOKENS

KNOWN_COLUMNS: frozenset[str] = frozenset(TOKENS.names) | frozenset(SEQUENCE_COLUMNS_IN_LOG) | {"prompt_len"}

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


class Mapping(_Strict):
    """The whole file.

    Attributes
    ----------
    columns
        Canonical name -> name in the file. Columns that already have a canonical name need no entry.
    shift
        Canonical name -> how many positions early the column sits: 1 when entry t - 1 holds token t.
    pos_base
        Number of the first position in the file's ``pos`` column.
    """

    columns: dict[str, str] = {}
    units: Units = Units()
    shift: dict[str, int] = {}
    mask: Mask = Mask()
    pos_base: int = 0
    run: Run = Run()

    @model_validator(mode="after")
    def _known_names(self) -> Mapping:
        for name in (*self.columns, *self.shift):
            if name not in KNOWN_COLUMNS:
                raise ValueError(f"'{name}' is no canonical column; {nearest(name, KNOWN_COLUMNS)}")
        return self


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
        key = ".".join(str(part) for part in first["loc"])
        known = sorted(Mapping.model_fields) if first["type"] == "extra_forbidden" and len(first["loc"]) == 1 else None
        hint = f"; {nearest(str(first['loc'][0]), known)}" if known else ""
        raise UsageError(f"{path}: {key or 'mapping'}: {first['msg']}{hint}") from None
