"""Independent NumPy twins of every statistic: written from the definitions, sharing no code with the package."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


def counted(log: Arrays) -> Arrays:
    """Tokens inside the mask with both log-probs, in double."""
    infer, train = log["logp_infer"].astype(np.float64), log["logp_train"].astype(np.float64)
    keep = log["loss_mask"] & np.isfinite(infer) & np.isfinite(train)
    out = {name: values[keep] for name, values in log.items()}
    out["logp_infer"], out["logp_train"] = infer[keep], train[keep]
    out["delta"] = out["logp_train"] - out["logp_infer"]
    if "entropy" in out:
        out["entropy"] = out["entropy"].astype(np.float64)
    return out


def cluster_mean(values: Floats, sequence: NDArray[Any]) -> tuple[float, float | None]:
    """Mean over tokens and its standard error with sequences as clusters."""
    names = np.unique(sequence)
    sums = np.array([math.fsum(values[sequence == s]) for s in names])
    counts = np.array([np.count_nonzero(sequence == s) for s in names])
    mean = math.fsum(sums) / counts.sum()
    if len(names) < 2:
        return mean, None
    spread = math.fsum((sums - mean * counts) ** 2) * len(names) / (len(names) - 1)
    return mean, math.sqrt(spread) / counts.sum()


def ratio(delta: Floats) -> Floats:
    """exp of delta clamped to +-20."""
    return np.exp(np.clip(delta, -20, 20))


def token_metrics(log: Arrays) -> dict[str, float | None]:
    """Every token metric of one group of counted tokens."""
    d, li, lt = log["delta"], log["logp_infer"], log["logp_train"]
    p, q, r = np.exp(li), np.exp(lt), ratio(d)
    gap = np.abs(q - p)
    raw = np.exp(np.clip(d, -700, 700))

    def std(x: Floats) -> float | None:
        return float(np.std(x, ddof=1)) if len(x) > 1 else None

    out: dict[str, float | None] = {
        "mean_abs_delta": float(np.mean(np.abs(d))),
        "mean_delta": float(np.mean(d)),
        "mean_sq_delta": float(np.mean(d**2)),
        "rms_delta": float(np.sqrt(np.mean(d**2))),
        "std_abs_delta": std(np.abs(d)),
        "max_abs_delta": float(np.max(np.abs(d))),
        "kl_k1": float(-np.mean(d)),
        "kl_k2": float(np.mean(d**2) / 2),
        "kl_k3": float(np.mean(raw - 1 - d)),
        "reverse_kl_k3": float(np.mean(1 / raw - 1 + d)),
        "reverse_kl_weighted": float(np.mean(p * (li - lt))),
        "chi2_token": float(np.mean(r**2) - 1),
        "mult_prob_error": float(np.mean(np.exp(np.minimum(np.abs(d), 700)))),
        "tv_estimate": float(np.mean(np.abs(r - 1)) / 2),
        "prob_diff_mean": float(np.mean(gap)),
        "prob_diff_max": float(np.max(gap)),
        "prob_diff_std": std(gap),
        "ratio_mean": float(np.mean(r)),
        "ratio_std": std(r),
        "ratio_min": float(np.min(r)),
        "ratio_max": float(np.max(r)),
        "ess_token": float(np.sum(r) ** 2 / (len(r) * np.sum(r**2))),
        "n_clamped": float(np.count_nonzero(np.abs(d) > 20)),
        "logp_infer_mean": float(np.mean(li)),
        "logp_train_mean": float(np.mean(lt)),
    }
    mid = np.logaddexp(lt, li) - np.log(2)
    k3s = [np.exp(x - mid) - (x - mid) - 1 for x in (lt, li)]
    out["js_divergence"] = float(np.mean(0.5 * k3s[0] + 0.5 * k3s[1]))
    for bound, name in ((1.2, "1_2"), (2, "2"), (5, "5"), (100, "100")):
        out[f"share_above_{name}"] = float(np.mean(r > bound))
    for bound, name in ((0.8, "0_8"), (0.5, "0_5"), (0.2, "0_2"), (1e-4, "0_0001")):
        out[f"share_below_{name}"] = float(np.mean(r < bound))
    sure = (p > 0.5) & (d < -2)
    out["confident_disagreement_count"] = float(np.count_nonzero(sure))
    out["confident_disagreement"] = float(np.mean(sure))
    if "policy_version" in log and "trainer_version" in log:
        lag = log["trainer_version"] - log["policy_version"]
        fresh = lag == 0
        out["confident_disagreement_lag0"] = float(np.mean(sure[fresh])) if fresh.any() else None
        out["staleness_mean"] = float(np.mean(lag))
        out["staleness_max"], out["staleness_min"] = float(np.max(lag)), float(np.min(lag))
    if "entropy" in log:
        h = log["entropy"]
        known = np.isfinite(h)
        if known.any():
            out["entropy_mean"] = float(np.mean(h[known]))
            out["scaled_sq_delta"] = float(np.mean(d[known] ** 2 / (h[known] + 0.01)))
            if out["entropy_mean"]:
                kl = out["kl_k3"]
                assert kl is not None
                out["kl_over_entropy"] = kl / out["entropy_mean"]
    return out


def pearson(x: Floats, y: Floats) -> float | None:
    """Correlation, None for a column that does not vary."""
    if len(x) < 2 or np.ptp(x) < 1e-4 or np.ptp(y) < 1e-4:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def sequence_metrics(log: Arrays) -> dict[str, float | None]:
    """Every sequence metric; sequences without a counted token are left out."""
    names = np.unique(log["seq_id"])
    at = [log["seq_id"] == s for s in names]
    li = np.array([log["logp_infer"][a].mean() for a in at])
    lt = np.array([log["logp_train"][a].mean() for a in at])
    total = np.array([log["delta"][a].sum() for a in at])
    mean = np.array([log["delta"][a].mean() for a in at])
    worst = np.array([np.abs(log["delta"][a]).max() for a in at])
    weight = ratio(total)
    several = len(names) > 1
    out: dict[str, float | None] = {
        "infer_ppl": float(np.mean(np.exp(-li))),
        "train_ppl": float(np.mean(np.exp(-lt))),
        "log_ppl_diff": float(np.mean(li - lt)),
        "log_ppl_abs_diff": float(np.mean(np.abs(li - lt))),
        "log_ppl_diff_max": float(np.max(li - lt)),
        "log_ppl_diff_min": float(np.min(li - lt)),
        "ppl_ratio": float(np.mean(np.exp(li - lt))),
        "chi2_seq": float(np.mean(weight**2) - 1),
        "ess_sequence": float(weight.sum() ** 2 / (len(weight) * np.sum(weight**2))),
        "seq_delta_sum_mean": float(np.mean(total)),
        "seq_delta_sum_max_abs": float(np.max(np.abs(total))),
        "infer_log_ppl": float(np.mean(-li)),
        "train_log_ppl": float(np.mean(-lt)),
        "prob_diff_signed": float(
            np.mean([(np.exp(log["logp_train"][a]) - np.exp(log["logp_infer"][a])).mean() for a in at])
        ),
        "seq_delta_sum_std": float(np.std(total, ddof=1)) if several else None,
        "seq_delta_mean": float(np.mean(mean)),
        "seq_delta_mean_std": float(np.std(mean, ddof=1)) if several else None,
        "seq_delta_mean_max_abs": float(np.max(np.abs(mean))),
        "seq_delta_max_abs": float(np.mean(worst)),
        "veto_share": float(np.mean([(log["delta"][a] < np.log(1e-4)).any() for a in at])),
    }
    if "policy_version" in log:
        versions = [log["policy_version"][a] for a in at]
        span = [float(v.max() - v.min()) for v in versions]
        out["intra_mean"], out["intra_max"] = float(np.mean(span)), float(np.max(span))
        out["switch_share"] = float(np.mean([len(np.unique(v)) > 1 for v in versions]))
        if "trainer_version" in log:
            wait = [float((log["trainer_version"][a] - log["policy_version"][a]).min()) for a in at]
            out["inter_mean"], out["inter_max"] = float(np.mean(wait)), float(np.max(wait))
    return out


def binary_kl(p: Floats, q: Floats, eps: float) -> Floats:
    """KL of two Bernoulli distributions with probabilities clamped to [eps, 1 - eps]."""
    p, q = np.clip(p, eps, 1 - eps), np.clip(q, eps, 1 - eps)
    return np.asarray(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def keep(rule: str, log: Arrays, **params: float) -> NDArray[np.bool_]:
    """The keep decision of each counted token."""
    d = log["delta"]
    if rule == "none":
        return np.ones(len(d), dtype=bool)
    if rule == "estr":
        return np.asarray(d**2 / (log["entropy"] + params.get("eps", 0.01)) <= params.get("tau", 4.0))
    if rule == "icepop":
        r = np.exp(d)
        return (r >= params.get("low", 0.5)) & (r <= params.get("high", 5.0))
    if rule == "kpop":
        a, b = np.exp(log["logp_train"]), np.exp(log["logp_infer"])
        eps = params.get("eps", 1e-6)
        return np.maximum(binary_kl(a, b, eps), binary_kl(b, a, eps)) <= params.get("phi", 0.1)
    raise KeyError(rule)
