"""verl: batches saved by a one-line hook or by the rollout caches; text dumps are refused with the way out.

verl writes no file with both engines' log-probs by itself. See `verl_facts.HOOK` for the line that does.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from estr_diag.ingestion.adapter import Field, Layout, Probe, ReadOptions, TokenBatch, Unit, one_unit_per_file
from estr_diag.ingestion.head import FileHead
from estr_diag.ingestion.trainers.verl_dataproto import DATAPROTO, read_dataproto
from estr_diag.ingestion.trainers.verl_facts import HOOK
from estr_diag.ingestion.trainers.verl_transfer_queue import TRANSFER_QUEUE, read_transfer_queue

TEXT = Layout(
    "rollout_data",
    "{step}.jsonl of trainer.rollout_data_dir: text and scores only, refused",
    (
        Field("input", "VARCHAR", "decoded prompt"),
        Field("output", "VARCHAR", "decoded response, special tokens removed"),
        Field("score", "FLOAT", "sum of the token scores"),
        Field("step", "BIGINT", "trainer step"),
        Field("gts", "JSON", "ground truth", required=False),
    ),
)
_REFUSAL = f"trainer.rollout_data_dir writes decoded text and scores, no tokens and no log-probs. For those, {HOOK}"
_NAMED_STEP = re.compile(r"step_?(\d+)")


class VerlAdapter:
    """Reads DataProto pickles and TransferQueue batches."""

    name: ClassVar[str] = "verl"
    title: ClassVar[str] = "verl"
    layouts: ClassVar[tuple[Layout, ...]] = (DATAPROTO, TRANSFER_QUEUE, TEXT)
    hints: ClassVar[Mapping[str, str]] = {
        "logp_train": HOOK,
        "entropy": "keep the batch's entropys: delete the line of RayPPOTrainer.fit that pops them before the dump",
        "policy_version": "the server must return min_global_steps and max_global_steps (V1 trainer, or fully async)",
    }

    def probe(self, head: FileHead) -> Probe | None:
        """Recognise a batch by the classes its pickle names, a text dump by its keys."""
        if head.kind == "pickle" and "verl.protocol.DataProto" in head.pickle.globals:
            return Probe(
                self.name,
                head.path,
                DATAPROTO.name,
                why="pickle of verl.protocol.DataProto",
                columns=DATAPROTO.columns(_names(head, DATAPROTO)),
                step=_step(head.path),
            )
        if (
            head.kind == "torch"
            and "tensordict._reductions._make_td" in head.pickle.globals
            and {*head.pickle.strings[:1]} <= {"tensordict", "tags", "keys", "global_steps"}
        ):
            # Tags come last in the file, beyond what probing reads; the batch always has them.
            seen = _names(head, TRANSFER_QUEUE) | {"keys", "min_global_steps", "max_global_steps"}
            return Probe(
                self.name,
                head.path,
                TRANSFER_QUEUE.name,
                why="torch file with a tensordict, tags and keys",
                columns={**TRANSFER_QUEUE.columns(seen), "group_id": "keys"},
                step=_step(head.path),
            )
        if not TEXT.missing(head.json_keys) and isinstance(head.json_record["output"], str):
            step = head.json_record["step"]
            return Probe(
                self.name,
                head.path,
                TEXT.name,
                why="keys input, output, score, step, with text in output",
                step=step if isinstance(step, int) else None,
                refusal=_REFUSAL,
            )
        return None

    def plan(self, probes: Sequence[Probe]) -> list[Unit]:
        """Read each file alone."""
        return one_unit_per_file(probes)

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[TokenBatch]:
        """Read one file; a batch is one pickle, so it comes in one piece."""
        yield read_transfer_queue(unit) if unit.probe.layout == TRANSFER_QUEUE.name else read_dataproto(unit)


def _names(head: FileHead, layout: Layout) -> frozenset[str]:
    """Return the fields of `layout` that the file mentions."""
    # By default the tensors are an archive inside the pickle, and its own pickle, with their names, comes first.
    embedded = (f.name for f in layout.fields if b"X" + struct.pack("<I", len(f.name)) + f.name.encode() in head.prefix)
    return frozenset((*head.pickle.strings, *embedded))


def _step(path: Path) -> int | None:
    """Return the step that the name of the file or of its folder states, or the meta.json beside it."""
    if named := _NAMED_STEP.search(path.name):
        return int(named[1])
    if path.stem.isdigit():
        return int(path.stem)
    try:
        step = json.loads((path.parent / "meta.json").read_text())["global_steps"]
        if isinstance(step, int):
            return step
    except (OSError, ValueError, KeyError, TypeError):
        pass  # hooks write no meta.json; the folder may still say
    named = _NAMED_STEP.search(path.parent.name) or re.fullmatch(r"(\d+)", path.parent.name)
    return int(named[1]) if named else None
