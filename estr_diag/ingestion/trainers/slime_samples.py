"""slime's samples, from a train dump or a rollout dump, as one batch of flat columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError
from estr_diag.ingestion.adapter import Layout, RunFacts, TokenBatch
from estr_diag.ingestion.align import Bools, Ragged, turns
from estr_diag.ingestion.field_errors import require, unequal

Sample = Mapping[str, Any]

_FACTS = RunFacts(
    trainer="slime", entropy_of="train", train_logp="proximal", version_unit="update", version_granularity="segment"
)
HOW = "dump both with --dump-details DIR --use-rollout-entropy, and keep train_data and rollout_data side by side"
"""How a slime user gets everything."""

_RESPONSE_COLUMNS = ("loss_mask", "logp_infer", "logp_train", "entropy", "advantage")
_LENGTHS = ("response_lengths", "response_length")  # of the train dump, of the rollout dump
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_HINT = f"Log-probs are None when a custom generate function does not keep them; {HOW}"
_SHARD_HINT = (
    "With context parallelism, slime of before 2026-08-12 dumps only the share of each rank; dump with a later one "
    "(THUDM/slime#2266), or without --context-parallel-size"
)


def response_tokens(path: Path, layout: Layout, samples: Sequence[Sample]) -> Ragged:
    """Return the response columns that `samples` hold, by canonical name.

    A value of None is NaN, or a mask of all ones. Nothing is shortened or padded to fit.

    Raises
    ------
    InputError
        A required field is missing, or a list is not as long as its response.
    """
    present = {name for sample in samples for name, value in sample.items() if value is not None}
    source = layout.columns()
    # The mask may be None everywhere; other columns that no sample has are left out.
    wanted = [c for c in _RESPONSE_COLUMNS if c in source and (source[c] in present or c == "loss_mask")]
    nullable = {source[column] for column in wanted}
    pieces: list[dict[str, NDArray[Any]]] = []
    for number, sample in enumerate(samples, start=1):
        held = {name for name, value in sample.items() if value is not None or name in nullable}
        require(path, layout, held, record=number, hint=_HINT)
        length = response_length(sample)
        ids = _numbers(path, number, "tokens", sample["tokens"])
        total = int(sample.get("total_lengths", len(ids)))
        if len(ids) != total or length > total:
            raise unequal(path, number, "tokens", len(ids), max(total, length), _SHARD_HINT)
        piece: dict[str, NDArray[Any]] = {"token_id": ids[total - length :]}
        for column in wanted:
            values = sample.get(source[column])
            if values is None:
                piece[column] = np.full(length, 1.0 if column == "loss_mask" else np.nan)
                continue
            piece[column] = _numbers(path, number, source[column], values)
            if len(piece[column]) != length:
                raise unequal(path, number, source[column], len(piece[column]), length, _SHARD_HINT)
        pieces.append(piece)
    flat = Ragged.from_sequences(pieces, ("token_id", *wanted))
    return flat.with_columns(loss_mask=flat["loss_mask"] != 0)


def _numbers(path: Path, number: int, name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values) if isinstance(values, list | np.ndarray) else np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
        raise InputError(
            "not a list of numbers",
            path=path,
            line=number,
            key=name,
            found=type(values).__name__,
            expected="one number a token",
        )
    # Lists come as Python's numbers; the trainer's own are float32 and int64.
    return array.astype(np.int64 if name == "tokens" else np.float32)


def response_length(sample: Sample) -> int:
    """Return the number of response tokens, tool tokens included."""
    return int(next(sample[name] for name in _LENGTHS if name in sample))


def to_batch(
    path: Path, layout: Layout, samples: Sequence[Sample], records: Sequence[Sample | None], step: int, prefix: str = ""
) -> TokenBatch:
    """Return the batch of `samples`.

    Parameters
    ----------
    path, layout
        The file, and how it is laid out.
    samples
        The sequences, with the fields of `layout`.
    records
        For each, its sample in the rollout dump, where that is there: versions, group, reward and state.
    step
        ``rollout_id``.
    prefix
        Put before each name, where samples are named within a rank only.
    """
    if not samples:
        raise InputError("no samples in this file", path=path, hint="Is the trainer still writing it?")
    ragged = response_tokens(path, layout, samples)
    tokens: dict[str, Any] = dict(ragged.columns)
    known: list[Sample] = [record or {} for record in records]
    removed = np.array([bool(record.get("remove_sample")) for record in known])
    # The versions follow the runs of what was generated, so they are worked out before a sample is switched off.
    entries = [[_integer(v) for v in record.get("weight_versions") or ()] for record in known]
    generated = tokens["loss_mask"]
    tokens["loss_mask"] = generated & ~ragged.spread(removed)
    sequences: dict[str, Sequence[Any]] = {
        "seq_key": _unique([prefix + name for name in _names(samples)]),
        "step": [step] * len(samples),
        "prompt_len": [len(s["tokens"]) - response_length(s) for s in samples],
        # Weight pushes count from 1, before the first rollout, which has number 0.
        "trainer_version": [step + 1] * len(samples),
        "env": [s.get("source_names") for s in samples],
        "reward": [_reward(s, record) for s, record in zip(samples, known, strict=True)],
        "group_id": [None if (g := record.get("group_index")) is None else str(g) for record in known],
        "finish": [_finish(s, record) for s, record in zip(samples, known, strict=True)],
    }
    if any(entries):
        tokens["policy_version"] = versions(ragged, generated, entries)
        sequences["version_first"] = [e[0] if e else None for e in entries]
        sequences["version_last"] = [e[-1] if e else None for e in entries]
    counts = Counter({"sequences switched off by remove_sample": int(np.count_nonzero(removed))})
    return TokenBatch(ragged.lengths, tokens, sequences, _FACTS, +counts)


def versions(ragged: Ragged, generated: Bools, entries: Sequence[Sequence[int | None]]) -> Any:
    """Assign weight versions to tokens; return a masked array, masked where the version is not known.

    Parameters
    ----------
    ragged
        Only its layout is used.
    generated
        True where the model sampled, shape (N,).
    entries
        Version of each generate call, for each sequence. slime does not record where in the response a
        call began. One version throughout is that of every token; as many calls as runs of `generated`
        are one call a run; anything else would be a guess.
    """
    # The extra entry keeps the array from being empty; no token points at it.
    flat = np.array([-1 if v is None else v for e in entries for v in e] + [-1], dtype=np.int64)
    count = np.array([len(e) for e in entries], dtype=np.int64)
    start = np.cumsum(count) - count
    same = np.array([len(set(e)) == 1 for e in entries], dtype=bool)
    turn = turns(ragged, generated).astype(np.int64)
    runs = np.zeros(len(ragged), dtype=np.int64)
    np.maximum.at(runs, ragged.row[generated], turn[generated] + 1)
    by_run = ~same & (count == runs)
    inside = same[ragged.row] | (by_run[ragged.row] & generated)
    value = flat[np.where(inside, start[ragged.row] + np.where(same[ragged.row], 0, turn), len(flat) - 1)]
    return np.ma.masked_array(value, value < 0)


def _names(samples: Sequence[Sample]) -> list[str]:
    numbers = [s.get("sample_index", s.get("index")) for s in samples]
    return [f"row{i}" if number is None else f"sample{int(number)}" for i, number in enumerate(numbers)]


def _unique(names: Sequence[str]) -> list[str]:
    # The samples of one agent run may share an index; their order in the file tells them apart.
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return unique


def _integer(version: Any) -> int | None:
    try:
        return int(version)
    except (TypeError, ValueError):
        return None  # an engine that got no weights yet answers "default"


def _reward(sample: Sample, record: Sample) -> float | None:
    reward = record.get("reward") if sample.get("raw_reward") is None else sample["raw_reward"]
    if isinstance(reward, Mapping):  # which entry trains is a flag of the run (--reward-key)
        numbers = [v for v in reward.values() if isinstance(v, int | float)]
        reward = numbers[0] if len(numbers) == 1 else None
    return float(reward) if isinstance(reward, int | float | np.number) else None


def _finish(sample: Sample, record: Sample) -> str | None:
    status = record.get("status") or ("truncated" if sample.get("truncated") else None)
    return None if status is None else _FINISH.get(str(status), str(status))
