"""What a rule costs inside a training step, beside the step's own log-softmax: ``python -m tests.benchmarks.rules_torch``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from estr_diag.rules import parse_rules

RULES = "estr,icepop,kpop,geo,veto,opsm@trl,m2po,top_entropy"


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of a few runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


def main() -> None:
    """Print a line a rule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    shape = (asked.sequences, asked.length)
    generator = torch.Generator().manual_seed(1)
    infer = -torch.rand(shape, generator=generator) * 3
    batch = {
        "logp_infer": infer,
        "logp_train": infer + 0.1 * torch.randn(shape, generator=generator),
        "entropy": torch.rand(shape, generator=generator),
        "advantage": torch.randn(shape[:1], generator=generator),
        "loss_mask": torch.rand(shape, generator=generator) < 0.9,
    }
    logits = torch.randn((2048, asked.vocabulary), generator=generator)
    softmax = median_ms(lambda: torch.log_softmax(logits, -1), asked.repeats)
    whole = softmax * shape[0] * shape[1] / 2048
    sys.stdout.write(
        f"{shape[0]} x {shape[1]} tokens; log-softmax over {asked.vocabulary} of all of them: {whole / 1000:.1f} s\n"
    )
    for rule in parse_rules(RULES):
        taken = median_ms(partial(rule.torch, **batch), asked.repeats)
        sys.stdout.write(f"{rule.label:40} {taken:8.1f} ms   {taken / whole:8.2%} of that log-softmax\n")


if __name__ == "__main__":
    main()
