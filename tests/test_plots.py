"""Pictures: the axes that are given are used and returned, axes say their units, nothing global is touched."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from estr_diag import plots
from estr_diag.errors import UsageError
from estr_diag.log import Log
from estr_diag.plots.style import PALETTE
from estr_diag.result import Result
from estr_diag.rules import parse_rules
from estr_diag.stats.grid import choose_grid
from estr_diag.stats.probability_pairs import ProbabilityPairs
from estr_diag.store.engine import run
from tests.logs import make_log, prime_log, store_of

RULES = parse_rules("estr:tau=0.5,icepop:low=0.8:high=1.2,kpop")


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with Log(store_of(make_log(5, sequences=60, mean_length=120, steps=3)), "made up") as opened:
        yield opened


def pairs(log: Log, cells: int = 20) -> Result:
    return run(log.store, {"it": ProbabilityPairs(cells)}).results["it"]


def masks(log: Log) -> tuple[Result, list[tuple[float, float | None]]]:
    found = log.compare(RULES, bins=6)
    assert found.grid is not None
    return found.by["entropy_bin"], [found.grid.bounds(b) for b in range(found.grid.n_bins)]


DRAW: dict[str, Callable[[Log, Axes | None], Axes]] = {
    "ratio_scale": lambda log, ax: plots.plot_ratio_scale(log.entropy_bins(), ax=ax),
    "ratio_scale_by_lag": lambda log, ax: plots.plot_ratio_scale(log.entropy_bins("lag"), taus=(1, 4), ax=ax),
    "scaling": lambda log, ax: plots.plot_scaling(log.scaling(8), log.entropy_bins(bins=8), ax=ax),
    "decomposition": lambda log, ax: plots.plot_decomposition(log.decomposition(bins=6), ax=ax),
    "noise_share": lambda log, ax: plots.plot_noise_share(log.noise_share(), ax=ax),
    "staleness": lambda log, ax: plots.plot_staleness(log.staleness(), ax=ax),
    "switches": lambda log, ax: plots.plot_switches(log.event_study(), ax=ax),
    "consistency": lambda log, ax: plots.plot_consistency(log.consistency("step"), "mean_abs_delta", ax=ax),
    "prob_scatter": lambda log, ax: plots.plot_prob_scatter(pairs(log), ax=ax),
    "rules": lambda log, ax: plots.plot_rules(log.compare(RULES).kept, ax=ax),
    "mask_by_entropy": lambda log, ax: plots.plot_mask_by_entropy(*masks(log), ax=ax),
    "tradeoff": lambda log, ax: plots.plot_tradeoff(_errors(log), log.compare(RULES).kept, ax=ax),
    "agreement": lambda log, ax: plots.plot_agreement(_agreement(log), ax=ax),
}


def _errors(log: Log) -> Result:
    found = log.compare(RULES).errors
    assert found is not None
    return found


def _agreement(log: Log) -> Result:
    found = log.compare(RULES).agreement
    assert found is not None
    return found


@pytest.mark.parametrize("name", DRAW)
def test_draws_on_the_axes_that_it_is_given(log: Log, name: str) -> None:
    before = dict(mpl.rcParams)
    figure, ax = plt.subplots()
    assert DRAW[name](log, ax) is ax
    assert ax.has_data() or ax.texts
    plt.close(figure)
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", DRAW)
def test_makes_its_own_figure_without_pyplot(log: Log, name: str) -> None:
    ax = DRAW[name](log, None)
    assert isinstance(ax.figure, Figure)
    assert plt.get_fignums() == []
    assert ax.get_title(loc="left") or ax.texts
    if name not in ("agreement", "rules") and ax.get_xscale() and ax.has_data():
        assert ax.get_xlabel()
        assert ax.get_ylabel()


@pytest.mark.parametrize("name", DRAW)
def test_the_same_input_gives_the_same_bytes(log: Log, name: str) -> None:
    def svg() -> bytes:
        with mpl.rc_context({"svg.hashsalt": "x"}):
            out = io.BytesIO()
            figure = DRAW[name](log, None).figure
            assert isinstance(figure, Figure)
            figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()

    assert svg() == svg()


def test_units_stand_on_the_axes(log: Log) -> None:
    assert "nat" in DRAW["ratio_scale"](log, None).get_xlabel()
    assert "nat²" in DRAW["decomposition"](log, None).get_ylabel()
    assert "%" in DRAW["rules"](log, None).get_xlabel()
    assert "versions" in DRAW["noise_share"](log, None).get_xlabel()


def test_the_boundary_of_estr_is_where_the_rule_cuts(log: Log) -> None:
    ax = plots.plot_ratio_scale(log.entropy_bins(), taus=(4.0,), bands=((0.5, 5.0),))
    line = next(x for x in ax.lines if "ESTR" in str(x.get_label()))
    h, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    np.testing.assert_allclose(y**2 / (h + 0.01), 4.0)
    levels = sorted(float(np.asarray(x.get_ydata(), float)[0]) for x in ax.lines if "band" in str(x.get_label()))
    np.testing.assert_allclose(levels, [np.log(2), np.log(5)])


def test_points_are_the_numbers_of_the_result(log: Log) -> None:
    bins = log.entropy_bins(bins=8)
    ax = plots.plot_ratio_scale(bins)
    drawn = np.asarray(ax.lines[1].get_ydata(), float)
    rms = np.array([r["rms_delta"] for r in bins.rows() if r["rms_delta"] and r["mean_entropy"]])
    np.testing.assert_allclose(drawn, rms)
    counts = pairs(log)
    total = sum(r["n"] for r in counts.rows())
    mesh = plots.plot_prob_scatter(counts).collections[0].get_array()
    assert mesh is not None
    assert np.nansum(np.asarray(mesh)) == total == log.consistency().rows()[0]["n"]


def test_a_log_without_the_columns_says_why_in_the_picture() -> None:
    log = make_log(3)
    for name in ("policy_version", "trainer_version"):
        del log[name]
    with Log(store_of(log), "made up") as opened:
        texts: list[Any] = [
            *plots.plot_decomposition(opened.decomposition()).texts,
            *plots.plot_noise_share(opened.noise_share()).texts,
        ]
    assert len(texts) == 2
    assert all("log" in t.get_text() for t in texts)


def test_an_unknown_metric_comes_with_the_nearest(log: Log) -> None:
    with pytest.raises(UsageError, match="kl_k3"):
        plots.plot_consistency(log.consistency("step"), "kl_k4")


def test_the_palette_is_seaborns_colorblind() -> None:
    import seaborn as sns

    assert set(PALETTE) == set(sns.color_palette("colorblind").as_hex())


def test_pair_counts_equal_numpy(log: Log) -> None:
    with prime_log() as demo:
        rows = pairs(demo, 10).rows()
        tokens = demo.sql(
            "select logp_infer, logp_train from tokens where loss_mask and logp_infer is not null and logp_train is not null"
        ).to_polars()
    p, q = (np.exp(tokens[c].to_numpy().astype(float)) for c in ("logp_infer", "logp_train"))
    counts, _, _ = np.histogram2d(p, q, bins=10, range=[[0, 1], [0, 1]])
    found = np.zeros((10, 10))
    for row in rows:
        found[row["infer_cell"], row["train_cell"]] = row["n"]
    np.testing.assert_array_equal(found, counts)


def test_bins_of_the_mask_picture_are_those_of_the_grid(log: Log) -> None:
    grid = choose_grid(log.store, log.store.present(), 6)
    assert masks(log)[1] == [grid.bounds(b) for b in range(grid.n_bins)]


def test_a_split_of_too_few_tokens_says_so() -> None:
    with prime_log() as log:
        ax = plots.plot_decomposition(log.decomposition(bins=24))
    assert [text.get_text() for text in ax.texts] == ["no entropy bin has enough tokens to read"]
