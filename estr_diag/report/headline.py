"""Which numbers a page shows, in which order; one list for the terminal and for Markdown."""

from __future__ import annotations

from estr_diag.stats.metrics import BY_NAME

OVERALL: tuple[str, ...] = (
    "mean_abs_delta", "rms_delta", "p99_abs_delta", "max_abs_delta", "mean_delta", "kl_k3", "chi2_token", "ratio_mean", "ratio_std",
    "ess_token", "prob_diff_mean", "entropy_mean", "kl_over_entropy", "infer_ppl", "train_ppl", "log_ppl_abs_diff", "ess_sequence",
)  # fmt: skip
"""Of some forty metrics, those that a page has room for; all are in ``--json``."""

GROUPED: dict[str, str] = {"mean_abs_delta": "mean |δ|", "mean_sq_delta": "E[δ²]", "kl_k3": "KL k3", "ess_token": "ESS"}
"""By step and by lag: metric -> heading."""

MAX_STEPS = 12
"""A page shows the first and last of more steps than this."""

OFFSETS: frozenset[int] = frozenset((-32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32))
"""Of the event study around a switch."""


def unit_of(name: str) -> str:
    """Return the unit of a metric; the quantiles of |delta| are no metrics of sums, and in nats."""
    return BY_NAME[name].unit if name in BY_NAME else "nat"
