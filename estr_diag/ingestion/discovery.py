"""Find the log files under what the user named, and decide which adapter reads which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from estr_diag.errors import InputError, RefusedError, UnrecognisedError, UsageError
from estr_diag.ingestion.adapter import Adapter, Probe, ReadOptions, Unit
from estr_diag.ingestion.generic.adapter import GenericAdapter, unrecognised
from estr_diag.ingestion.generic.tables import open_table
from estr_diag.ingestion.guard import reading
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.mapping import Mapping as ColumnMapping
from estr_diag.ingestion.registry import GENERIC, adapter, adapters

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that takes no part, and why."""

    path: Path
    reason: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found: units in reading order, refused files, and files that are no log at all."""

    units: tuple[Unit, ...]
    refused: tuple[Skipped, ...] = ()
    ignored: tuple[Path, ...] = ()

    @property
    def adapter(self) -> str:
        """The one adapter of this log."""
        return self.units[0].probe.adapter


def discover(
    paths: Sequence[Path],
    format_name: str = "auto",
    options: ReadOptions | None = None,
    *,
    skip_unreadable: bool = False,
) -> Discovery:
    """Recognise the files under `paths` and group them into units.

    Parameters
    ----------
    paths
        Files and folders; folders are searched at any depth.
    format_name
        ``auto``, or the one adapter to use.
    options
        How to read: a mapping implies the generic adapter and looks only for tables that it fits;
        ``guess_mask`` accepts a layout without a loss mask where its adapter knows a guess.
    skip_unreadable
        Leave out files that cannot be probed, and report them, in place of failing.

    Raises
    ------
    UnrecognisedError
        Nothing that an adapter knows.
    RefusedError
        Only files that hold no token-level data; says what gives it.
    InputError
        Files of two trainers, or an unreadable file.
    UsageError
        No such adapter, or a mapping for another one than the generic one.
    """
    options = options or ReadOptions()
    known = _candidates(format_name, options.mapping)
    files = _expand(paths)
    probes: list[Probe] = []
    refused: list[Skipped] = []
    ignored: list[Path] = []
    for file in files:
        try:
            probe = _probe(file, known)
        except InputError as error:
            if not skip_unreadable:
                raise
            refused.append(Skipped(file, str(error)))
            continue
        if probe is None:
            ignored.append(file)
        elif probe.refusal is not None and not (options.guess_mask and probe.guessable):
            refused.append(Skipped(file, probe.refusal, probe.adapter))
        else:
            probes.append(probe)
    if not probes:
        raise _nothing(paths, files, refused, ignored, format_name, options.mapping)
    _one_trainer(probes)
    units = known[probes[0].adapter].plan(probes)
    if not units:
        raise RefusedError(
            "only companion files, no log among them", path=paths[0], found=_some([p.path for p in probes])
        )
    used = {path for unit in units for path in (unit.path, *unit.companions)}
    # A plan may leave a file out; it may not do so in silence.
    refused += [
        Skipped(p.path, f"left out: {p.layout} beside another layout of the same sequences that holds more", p.adapter)
        for p in probes
        if p.path not in used
    ]
    return Discovery(tuple(sorted(units, key=_order)), tuple(refused), tuple(ignored))


def _candidates(format_name: str, mapping: ColumnMapping | None) -> Mapping[str, Adapter]:
    if mapping is not None:
        if format_name not in ("auto", GENERIC):
            raise UsageError(f"--map describes a table for --format {GENERIC}, not for --format {format_name}")
        return {GENERIC: GenericAdapter(mapping)}
    return adapters() if format_name == "auto" else {format_name: adapter(format_name)}


def _expand(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            try:
                found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            except PermissionError as error:
                raise InputError("permission denied", path=error.filename, hint="Make the folder readable") from None
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise InputError("no such file or folder", path=path)
    # The same file named twice, or named and found in a folder, is one file.
    return list(dict.fromkeys(files))


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _probe(file: Path, known: Mapping[str, Adapter]) -> Probe | None:
    head = FileHead(file)
    claims = []
    for name, one in known.items():
        with reading(file, name):
            if name != GENERIC and (probe := one.probe(head)):
                claims.append(probe)
    if len(claims) > 1:
        who = " and ".join(f"{c.adapter} ({c.why})" for c in claims)
        raise InputError(
            "recognised by more than one adapter", path=file, found=who, hint="Choose one with --format NAME"
        )
    if claims:
        return claims[0]
    return known[GENERIC].probe(head) if GENERIC in known else None


def _one_trainer(probes: Sequence[Probe]) -> None:
    by_adapter: dict[str, list[Path]] = {}
    for probe in probes:
        by_adapter.setdefault(probe.adapter, []).append(probe.path)
    if len(by_adapter) > 1:
        listed = "; ".join(f"{name}: {_some(files)}" for name, files in by_adapter.items())
        first = next(iter(by_adapter))
        raise InputError(
            "files of more than one trainer",
            found=listed,
            expected="one trainer a log",
            hint=f"Name the folder of one of them, or choose with --format {first}",
        )


def _order(unit: Unit) -> tuple[int, int, str]:
    # By step, so that the store is sorted; then the richer file first, so that a poorer copy of the
    # same sequences is the one left out.
    step = unit.probe.step
    return (step if step is not None else 1 << 31, -len(unit.probe.columns), str(unit.path))


def _nothing(
    paths: Sequence[Path],
    files: Sequence[Path],
    refused: Sequence[Skipped],
    ignored: Sequence[Path],
    format_name: str,
    mapping: ColumnMapping | None,
) -> InputError | UsageError:
    where = paths[0] if len(paths) == 1 else None
    if not files:
        return UnrecognisedError(
            "an empty folder",
            path=where,
            expected="a trainer's dump, or a Parquet, CSV, JSONL or Arrow log",
            hint="estr-diag formats lists what each trainer can write",
        )
    if refused:
        first = refused[0]
        others = f" ({len(refused) - 1} more file(s) like it)" if len(refused) > 1 else ""
        return RefusedError(f"{first.reason}{others}", path=first.path)
    if len(ignored) == 1 and FileHead(ignored[0]).kind == "empty":
        return UnrecognisedError("an empty file", path=ignored[0], hint="Is the trainer still writing it?")
    if format_name in ("auto", GENERIC) and (len(ignored) == 1 or mapping is not None):
        for table in filter(None, (open_table(FileHead(path)) for path in ignored)):
            return unrecognised(table, mapping)
    head = FileHead(ignored[0])
    seen = f"{head.kind} file" + (f" with keys {', '.join(sorted(head.json_keys)[:8])}" if head.json_keys else "")
    return UnrecognisedError(
        f"not recognised as a token log (--format {format_name})",
        path=ignored[0] if len(ignored) == 1 else where,
        found=seen if len(ignored) == 1 else f"{len(ignored)} file(s): {_some(ignored)}",
        hint="estr-diag formats lists the known layouts; any table of tokens can be read with --map mapping.toml",
    )


def _some(files: Sequence[Path]) -> str:
    shown = ", ".join(str(f) for f in files[:_SHOWN])
    return shown + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")
