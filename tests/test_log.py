"""The Python API: the same numbers as the command, from files, stores and frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import estr_diag as ed
from estr_diag.errors import InputError, MissingColumnError, UsageError
from tests import oracles
from tests.logs import make_log, prime_log


def test_the_public_names_resolve() -> None:
    for name in ed.__all__:
        assert getattr(ed, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        ed.opne  # noqa: B018


def test_every_way_in_gives_the_same_numbers(data: Path, tmp_path: Path) -> None:
    sample = data / "prime-rl" / "token_exports"
    with ed.open(sample) as direct, ed.ingest(sample, into=tmp_path / "run.duckdb") as stored, prime_log() as demo:
        results = [log.entropy_bins(by="lag", bins=4).rows() for log in (direct, stored, demo)]
        assert results[0] == results[1] == results[2]
        assert "16 sequences, 845 response tokens" in repr(direct)


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table], ids=["pandas", "polars", "arrow"])
def test_frames_go_in(make: type) -> None:
    log = make_log(3)
    tokens = oracles.counted(log)
    frame = make({name: list(values) for name, values in log.items()})
    with ed.from_frame(frame) as opened:
        found = {row["metric"]: row for row in opened.consistency().rows()}
    assert found["mean_abs_delta"]["n"] == len(tokens["delta"])
    assert found["mean_abs_delta"]["value"] == pytest.approx(float(np.abs(tokens["delta"]).mean()), rel=1e-6)


def test_a_frame_with_other_names_and_without_a_mask() -> None:
    frame = pd.DataFrame({"sample": [1, 1, 2], "vllm": [-1.0, -0.5, -2.0], "hf": [-1.1, -0.5, -2.2]})
    names = {"seq_id": "sample", "logp_infer": "vllm", "logp_train": "hf"}
    with pytest.raises(InputError, match="no loss_mask"):
        ed.from_frame(frame, names)
    with ed.from_frame(frame, names, all_sampled=True) as log:
        found = {row["metric"]: row["value"] for row in log.consistency().rows()}
    assert found["mean_abs_delta"] == pytest.approx(0.1, rel=1e-6)


def test_results_go_out_as_any_frame() -> None:
    with prime_log() as log:
        result = log.consistency(by="lag")
    assert isinstance(result.to_pandas(), pd.DataFrame)
    assert isinstance(result.to_polars(), pl.DataFrame)
    assert pl.DataFrame(result).shape == pa.table(result).shape == (len(result), 7)
    html = result._repr_html_()
    assert "<td>mean_abs_delta</td>" in html
    assert "nan" not in html.lower()


def test_a_hostile_value_is_escaped_in_a_notebook() -> None:
    with prime_log() as log:
        html = log.sql("select '<script>alert(1)</script>' as x")._repr_html_()
    assert "<script>" not in html


def test_rules_from_python() -> None:
    with prime_log() as log:
        rows = log.compare([ed.rules.estr(tau=0.01), ed.rules.icepop()]).kept.rows()
    assert [r["rule"] for r in rows] == ["estr:tau=0.01:eps=0.01", "icepop:low=0.5:high=5", "trainer"]
    assert rows[0]["masked_tokens"] > 100
    with pytest.raises(UsageError, match="no parameter"):
        ed.rules.estr(threshold=1)


def test_what_is_missing_is_raised_with_the_way_to_get_it(data: Path) -> None:
    with ed.open(data / "nemo-rl" / "exp_001" / "train_data_step5.jsonl") as log:
        with pytest.raises(MissingColumnError, match="no entropy"):
            log.entropy_bins()
        with pytest.raises(MissingColumnError, match="policy_version"):
            log.consistency(by="lag")
        with pytest.raises(MissingColumnError, match="entropy"):
            log.compare([ed.rules.estr()])


def test_several_paths_and_a_store_cannot_be_mixed(data: Path, tmp_path: Path) -> None:
    with ed.ingest(data / "nemo-rl" / "exp_001", into=tmp_path / "a.duckdb"):
        pass
    with pytest.raises(UsageError, match="cannot be ingested into another"):
        ed.open([tmp_path / "a.duckdb", data / "nemo-rl" / "exp_001"])


def test_the_numbers_of_a_dashboard() -> None:
    with prime_log() as log:
        verl = {r["name"]: r["value"] for r in log.framework_metrics("verl").rows()}
        own = {r["metric"]: r["value"] for r in log.consistency().rows()}
        bounded = {r["name"]: r["value"] for r in log.threshold_metrics("verl").rows()}
    assert verl["rollout_corr/kl"] == own["kl_k1"]
    assert verl["training/rollout_probs_diff_mean"] == own["prob_diff_mean"]
    assert bounded["rollout_corr/rollout_is_mean"] == pytest.approx(own["ratio_mean"]), "no ratio reaches verl's 2.0"


def test_every_statistic_is_a_method_that_returns_a_result() -> None:
    with prime_log() as log:
        results = [
            log.consistency("step"), log.entropy_bins("lag"), log.entropy_bins(bins="log:5"), log.scaling(),
            log.decomposition(), log.noise_share(), log.empirical_scale(), log.event_study(), log.staleness(),
            log.versions(), log.weights(), log.weights_by_length(), log.framework_metrics(), log.compare().by["lag"],
        ]  # fmt: skip
    for result in results:
        assert isinstance(result, ed.Result)
        assert result.to_json()["name"] == result.name
        assert result.to_polars().height == len(result)


@pytest.mark.parametrize(
    "query",
    [
        "drop table tokens",
        "delete from tokens",
        "create table x as select 1",
        "select 1; select 2",
        "",
        "set threads = 1",
    ],
)
def test_sql_changes_nothing_even_in_memory(query: str) -> None:
    with prime_log() as log:
        with pytest.raises(UsageError, match="expected one select"):
            log.sql(query)
        assert log.sql("select count(*) as n from tokens").rows()[0]["n"] == 845


def test_one_sequence_and_probability_pairs() -> None:
    with prime_log() as log:
        rows = log.sequence(3).rows()
        assert [r["pos"] for r in rows] == sorted(r["pos"] for r in rows)
        assert {r["seq_id"] for r in rows} == {3}
        assert sum(r["n"] for r in log.probability_pairs().rows()) == 816
        with pytest.raises(UsageError, match="no sequence has seq_id 99"):
            log.sequence(99)


def test_a_mapping_of_a_frame_that_is_wrong_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'logp_infer'"):
        ed.from_frame(pl.DataFrame({"a": [1.0]}), {"logp_inf": "a"})
    with pytest.raises(UsageError, match="their difference would be 0"):
        ed.from_frame(pl.DataFrame({"a": [1.0]}), {"logp_infer": "a", "logp_train": "a"})


def test_reprs_are_short() -> None:
    with prime_log() as log:
        assert len(repr(log.report())) < 2000
        assert len(repr(log.compare())) < 500
