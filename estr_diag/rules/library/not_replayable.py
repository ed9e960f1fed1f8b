"""Rules in circulation that a per-token log cannot replay, and what each one lacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotReplayable:
    """A rule that is listed rather than faked."""

    name: str
    says: str
    needs: str


NOT_REPLAYABLE: tuple[NotReplayable, ...] = (
    NotReplayable("trm_exact", "sequence mask on the exact token KL (arXiv 2512.23075)",
                  "the sampler's and the trainer's full distributions, or the top-k of both; seq_max_k2 and seq_max_k3 "
                  "are what is deployed"),
    NotReplayable("dppo_topk", "DPPO with top-k TV or KL (arXiv 2602.04879, eq. 15-16)",
                  "top-k ids and log-probs of the sampler and the trainer's log-probs of the same ids"),
    NotReplayable("clip_cov", "drops a random sample of tokens of high covariance (arXiv 2505.22617)",
                  "the state of the trainer's random generator"),
    NotReplayable("kl_cov", "adds a KL penalty on the tokens of highest covariance; masks nothing", "the loss"),
    NotReplayable("mu_veto", "drops what follows a trigger token in sequences of negative advantage (arXiv 2605.17570)",
                  "the trigger's threshold, which is not published; write it with seq_any_before in a rule file"),
    NotReplayable("ppo_ablation", "the DPPO authors' ablations of PPO's clip (Stable-RL)",
                  "conditions that were not stated in full in what we could read"),
    NotReplayable("a3po", "takes q = mu + alpha (pi - mu) in place of the recomputed log-prob (arXiv 2512.06547)",
                  "logp_update and versions; it replaces a column and masks nothing"),
    NotReplayable("dro", "penalty on the squared log-ratio (kimi, prime-rl kl_tau); masks nothing", "the loss"),
    NotReplayable("r2vpo", "penalty on the variance of the ratio with a dual variable (arXiv 2605.26784)",
                  "the trainer's dual variable"),
    NotReplayable("vcpo", "scales the learning rate by the effective sample size (arXiv 2602.17616)",
                  "nothing of a token: it is no mask; the report gives the effective sample size"),
    NotReplayable("capacity", "max_head_offpolicyness, max_staleness_steps, staleness_threshold, max_lag, async_steps",
                  "the scheduler's queue: these admit requests and do not test a sample"),
    NotReplayable("routing_replay", "routing or sampling-mask replay, deterministic kernels",
                  "nothing: they change the log-probs themselves and are no masks"),
)  # fmt: skip
"""What ``estr-diag rules`` lists at its end."""
