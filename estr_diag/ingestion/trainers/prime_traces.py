"""prime-rl's ``traces.jsonl``: one verifiers episode a line, each a tree of messages.

A training sequence is the concatenation of the nodes from a root to a leaf. A sampled node that several
branches share trains only in the first of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr_diag.errors import InputError


@dataclass(frozen=True, slots=True)
class Branch:
    """One root-to-leaf sequence of an episode.

    `token_ids`, `sampled` and `logp_infer` have one entry a token, prompt included; `logp_infer` is
    NaN where the model did not sample, and in nodes that an earlier branch has trained already.
    """

    key: str
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logp_infer: NDArray[np.float32]
    version_first: int | None
    version_last: int | None
    group_id: str | None
    env: str | None
    reward: float | None
    finish: str | None
    step: int | None

    @property
    def identity(self) -> bytes:
        """The exact token ids: what a token export is joined by."""
        return self.token_ids.tobytes()


def read_branches(path: Path) -> Iterator[Branch]:
    """Yield every branch of every episode, in file order.

    Raises
    ------
    InputError
        A line is not an episode, or a node's lists contradict each other.
    """
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                episode = json.loads(raw)
                for trace in episode["traces"]:
                    yield from _branches(episode, trace, path, number)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    "not a prime-rl episode",
                    path=path,
                    line=number,
                    found=f"{type(error).__name__}: {error}",
                    expected="id, group, run.work and traces[].nodes[] with token_ids, mask and logprobs",
                ) from None


def _branches(episode: Mapping[str, Any], trace: Mapping[str, Any], path: Path, line: int) -> Iterator[Branch]:
    nodes: Sequence[Mapping[str, Any]] = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    leaves = [i for i in range(len(nodes)) if i not in parents]
    work = (episode.get("run") or {}).get("work") or {}
    policy = work.get("policy") or {}
    trained: set[int] = set()
    for leaf in leaves:
        chain = [leaf]
        while (parent := nodes[chain[-1]].get("parent")) is not None:
            if len(chain) > len(nodes):
                raise InputError("a cycle of parents", path=path, line=line, key="parent")
            chain.append(parent)
        parts = [_node(nodes[i], fresh=i not in trained, path=path, line=line) for i in reversed(chain)]
        trained.update(chain)
        ids, sampled, logps = (np.concatenate(column) for column in zip(*parts, strict=True))
        name = (
            episode["id"]
            if len(leaves) == 1 and len(episode["traces"]) == 1
            else f"{episode['id']}/{trace['id']}/{leaf}"
        )
        yield Branch(
            str(name),
            ids,
            sampled,
            logps,
            policy.get("start"),
            policy.get("end"),
            (episode.get("group") or {}).get("id"),
            (episode.get("env") or {}).get("name"),
            _reward(trace),
            trace.get("stop_condition"),
            work.get("step"),
        )


def _node(
    node: Mapping[str, Any], *, fresh: bool, path: Path, line: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    ids = np.array(node["token_ids"], dtype=np.int32)
    mask = np.array(node["mask"], dtype=bool)
    given = np.array(node.get("logprobs") or [], dtype=np.float32)
    if len(mask) != len(ids) or (len(given) and len(given) != int(mask.sum())):
        raise InputError(
            "lists of unequal length",
            path=path,
            line=line,
            key="logprobs",
            found=f"{len(ids)} token_ids, {len(mask)} mask values ({int(mask.sum())} true), {len(given)} logprobs",
            expected="one mask value a token and one log-prob for each true one",
        )
    logps = np.full(len(ids), np.nan, dtype=np.float32)
    if len(given):
        logps[mask] = given
    if not fresh:
        mask = np.zeros(len(ids), dtype=bool)
        logps[:] = np.nan
    return ids, mask, logps


def _reward(trace: Mapping[str, Any]) -> float | None:
    values = [r.get("value") for r in (trace.get("rewards") or {}).values() if isinstance(r, dict)]
    known = [float(v) for v in values if v is not None]
    return sum(known) if known else None
