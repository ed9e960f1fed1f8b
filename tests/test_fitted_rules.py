"""``scale`` in a rule: m2(H) of the log, the same in DuckDB, in torch and by look-up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.log import Log
from estr_diag.rules import Rule
from estr_diag.rules.decisions import Decisions
from estr_diag.stats.empirical_scale import scale_at
from tests import oracles
from tests.logs import make_log, store_of

RULE = Rule("by_scale", "delta * delta <= tau * scale", {"tau": 4.0}, score="tau")


def test_is_the_isotonic_scale_of_the_log() -> None:
    log = make_log(5, sequences=60, scale=3.0)
    tokens = oracles.counted(log)
    with Log(store_of(log), "made up") as opened:
        bins = opened.compare([RULE]).grid
        assert bins is not None
        m2 = scale_at(opened.empirical_scale(bins.n_bins - 1), tokens["entropy"])
        kept = opened.compare([RULE, ~RULE]).kept.rows()
        rule = opened.fitted(RULE)
        listed = opened.tokens("delta * delta > 4 * scale", by="delta * delta", top=10_000).rows()
        curve = opened.sweep(RULE, values=[1.0, 4.0, 100.0]).rows()
    expected = tokens["delta"] ** 2 <= 4 * m2
    assert kept[0]["kept_tokens"] == expected.sum()
    assert kept[1]["kept_tokens"] == (~expected).sum() == len(listed) > 0
    assert [r["kept_tokens"] for r in curve if r["method"] == "lag_contrast"][1] == expected.sum()
    found = rule.torch(
        logp_train=torch.tensor(tokens["logp_train"]), logp_infer=torch.tensor(tokens["logp_infer"]),
        entropy=torch.tensor(tokens["entropy"]), loss_mask=torch.ones(len(m2)), seq_ids=torch.tensor(tokens["seq_id"]),
    )  # fmt: skip
    np.testing.assert_array_equal(found.numpy(), expected)


def test_without_a_log_it_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(UsageError, match="fit it first"):
        RULE.torch(logp_train=one, logp_infer=one, entropy=one, loss_mask=one)
    with pytest.raises(UsageError, match="fit it first"):
        Decisions.of((RULE,), frozenset({"entropy", "logp_infer", "logp_train"}))
    log = make_log(1)
    del log["entropy"]
    with Log(store_of(log), "made up") as opened, pytest.raises(MissingColumnError, match="entropy"):
        opened.fitted(RULE)
