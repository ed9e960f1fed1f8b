"""What recording costs a trainer: how long `write` blocks, and what the thread makes of it.

    python -m tests.benchmarks.recorder --sequences 512 --tokens 2048 --vocabulary 32000

Prints, for padded and packed tensors, the milliseconds a step that `write` blocks and those until the shard is on
disk, MB a second and bytes a token; and the memory that `logprobs_and_entropy` needs beside the logits. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from estr_diag.recorder import TokenRecorder, logprobs_and_entropy


def made_up(sequences: int, tokens: int) -> dict[str, Any]:
    """Return a padded batch with nine columns, as a trainer on the CPU would hold it."""
    shape = (sequences, tokens)
    entropy = torch.empty(shape).exponential_() ** 2
    logp = -torch.empty(shape).exponential_() * (entropy + 1e-3)
    return {
        "logp_infer": logp,
        "logp_train": logp + 0.02 * torch.randn(shape),
        "entropy": entropy.bfloat16(),
        "collision": torch.exp(-entropy),
        "token_id": torch.randint(0, 150_000, shape),
        "policy_version": torch.randint(3, 6, shape).sort(dim=1).values,
        "loss_mask": torch.rand(shape) < 0.95,
        "advantage": torch.randn(sequences),
        "trainer_version": 6,
    }


def measured(columns: dict[str, Any], lengths: torch.Tensor, steps: int) -> dict[str, float]:
    """Write `steps` steps with pauses long enough for the thread; return medians in ms, and sizes."""
    blocked, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        with TokenRecorder(folder, trainer="benchmark") as recorder:
            for step in range(steps):
                start = time.perf_counter()
                recorder.write(step=step, seq_lens=lengths, **columns)
                blocked.append(time.perf_counter() - start)
                recorder.flush()
                whole.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.parquet"))
    n = int(lengths.sum()) * steps
    return {
        "ms blocked": 1e3 * statistics.median(blocked),
        "ms to disk": 1e3 * statistics.median(whole),
        "MB/s": size / steps / statistics.median(whole) / 1e6,
        "bytes/token": size / n,
    }


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rows", type=int, default=8192, help="rows of logits")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    chosen = parser.parse_args()

    # First, because the peak of a process only goes up.
    logits = torch.empty(chosen.rows, chosen.vocabulary, dtype=torch.bfloat16).normal_()
    ids = torch.randint(0, chosen.vocabulary, (chosen.rows,))
    logprobs_and_entropy(logits[:2], ids[:2])
    before, start = peak_mib(), time.perf_counter()
    logprobs_and_entropy(logits, ids)
    seconds, extra = time.perf_counter() - start, peak_mib() - before
    held = logits.numel() * logits.element_size() / 2**20
    print(f"logits {held:.0f} MiB bf16; logprobs_and_entropy: {extra:.0f} MiB more at its peak, {seconds:.2f} s")  # noqa: T201
    del logits

    full = torch.full((chosen.sequences,), chosen.tokens)
    ragged = torch.randint(chosen.tokens // 8, chosen.tokens + 1, (chosen.sequences,))
    columns = made_up(chosen.sequences, chosen.tokens)
    present = torch.arange(chosen.tokens) < ragged[:, None]
    packed = {n: v[present] if getattr(v, "ndim", 0) == 2 else v for n, v in columns.items()}
    for name, given, lengths in (
        ("padded, full", columns, full),
        ("padded, ragged", columns, ragged),
        ("packed, ragged", packed, ragged),
    ):
        found = measured(given, lengths, chosen.steps)
        numbers = ", ".join(f"{value:.1f} {unit}" for unit, value in found.items())
        print(f"{name:15} {int(lengths.sum()):9,} tokens: {numbers}")  # noqa: T201


if __name__ == "__main__":
    main()
