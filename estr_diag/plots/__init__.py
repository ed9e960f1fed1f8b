"""Pictures: a `Result` in, Matplotlib axes out. Nothing here touches pyplot or any other global state."""

from __future__ import annotations

from estr_diag.plots.consistency import plot_consistency
from estr_diag.plots.decomposition import plot_decomposition, plot_noise_share
from estr_diag.plots.learning import plot_learning
from estr_diag.plots.prob_scatter import plot_prob_scatter
from estr_diag.plots.ratio_scale import plot_ratio_scale
from estr_diag.plots.rules import plot_agreement, plot_mask_by_entropy, plot_rules, plot_tradeoff
from estr_diag.plots.scaling import plot_scaling
from estr_diag.plots.sequence import plot_sequence
from estr_diag.plots.switches import plot_staleness, plot_switches

__all__ = [
    "plot_agreement",
    "plot_consistency",
    "plot_decomposition",
    "plot_learning",
    "plot_mask_by_entropy",
    "plot_noise_share",
    "plot_prob_scatter",
    "plot_ratio_scale",
    "plot_rules",
    "plot_scaling",
    "plot_sequence",
    "plot_staleness",
    "plot_switches",
    "plot_tradeoff",
]
