"""The sections of the report's page: what each shows, how it is read, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from estr_diag import plots
from estr_diag.report import headline, rule_tables, sentences
from estr_diag.report.document import Document
from estr_diag.report.html.figures import svg
from estr_diag.report.html.tables import Table, of_cells, of_result
from estr_diag.report.verdict import with_error
from estr_diag.result import Result
from estr_diag.stats.metrics import BY_NAME, YARDSTICKS


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, what to read off it, and the numbers that it is drawn from."""

    name: str
    svg: Markup
    caption: str
    table: Table
    drawn_by_script: bool = False


@dataclass(frozen=True, slots=True)
class Titled:
    """A table with a heading; `folded` behind those words where it has some."""

    title: str
    table: Table
    id: str = ""
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; `lead` says what it is and how it is read."""

    id: str
    title: str
    lead: str
    sentences: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Titled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sections(d: Document, results: Mapping[str, Result], has_tokens: bool, why_no_tokens: str = "") -> list[Section]:
    """Return the sections that this log allows, in the order in which they are read."""
    stamp = " It rests on a broken column: do not read it before the check is resolved." if d.stamped else ""
    found = [
        Section("checks", "Checks", "Is a column broken? Every number below rests on the columns; what is found here comes first."),
        *_consistency(d, results, stamp), *_entropy(d, results, stamp), *_split(d, results, stamp),
        *_switches(d, results, stamp), *_weights(d, results, stamp), *_rules(d, results, stamp),
    ]  # fmt: skip
    lead = "The counted tokens with the largest S = δ²/(H + 0.01), which a threshold on it masks first, and what stands around them. One token id, one position or one sequence: look there. Spread out: it is the engines."
    found.append(
        Section("worst", "Worst tokens", lead, notes=[] if has_tokens else [why_no_tokens or "no token counts"])
    )
    missing = [f"{n.what}: {n.why}. {n.how_to_get_it}" for n in d.not_computed]
    if missing:
        found.append(Section("missing", "Not computed", "What this log cannot say, and how to log it.", missing))
    notes = [*d.log.notes, *(f"{n:,} {reason}" for reason, n in {**d.log.skipped, **d.log.repaired}.items())]
    notes += [f"{f.path}: {f.status}, {f.reason}" for f in d.log.files_left_out]
    if notes:
        found.append(Section("notes", "Notes on the log", "What did not count, was repaired, or was left out.", notes))
    return found


def _consistency(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    values = d.consistency.overall
    if not values:
        return
    rows: list[tuple[str, ...]] = [
        (name, with_error(values[name].model_dump()), headline.unit_of(name), " — ".join(YARDSTICKS.get(name, ())))
        for name in (*headline.OVERALL, *(n for n in values if n not in headline.OVERALL))
        if name in values and values[name].value is not None
    ]
    heads: tuple[str, ...] = ("metric", "value ± se", "unit", "yardstick")
    first = sum(row[0] in headline.OVERALL for row in rows)
    tables = [
        Titled("", of_cells((heads, rows[:first])), "metrics"),
        Titled("", of_cells((heads, rows[first:])), "more-metrics", f"{len(rows) - first} more metrics"),
    ]
    lead = "How far the training engine's log-probs of the sampled tokens are from the inference engine's, δ = log π_train − log μ_infer. Standard errors are by sequence: the tokens of one sequence are not independent."
    figures = []
    if "probability_pairs" in results and len(results["probability_pairs"]):
        pairs = results["probability_pairs"]
        figures.append(
            Figure("prob_scatter", svg("prob_scatter", plots.plot_prob_scatter, pairs, size=(5.6, 5.0)),
                   "Probability of each sampled token under both engines. A cloud that bends off the diagonal is a temperature; one on one side of it only is a renormalisation (top-p); an arm along an axis is single tokens on which one engine was sure.",
                   of_result(pairs))
        )  # fmt: skip
    yield Section("consistency", "Consistency of the two engines", lead + stamp, figures=figures, tables=tables)
    if len(d.consistency.by_step) > 1:
        names = [n for n in headline.GROUPED if n in values]
        groups = [
            (
                str(g.step),
                f"{g.n_tokens:,}",
                f"{g.n_sequences:,}",
                *(with_error(g.metrics[n].model_dump()) for n in names),
            )
            for g in d.consistency.by_step
        ]
        heads = ("step", "tokens", "sequences", *(headline.GROUPED[n] for n in names))
        shown = "kl_k3" if "kl_k3" in values else next(iter(names), "")
        figures = [
            Figure("by_step_kl", svg("by_step_kl", plots.plot_consistency, results["by_step"], metric=shown),
                   "A trend is drift; a step outside the band of its neighbours is where to look first. Bands are 95 %, by sequence.",
                   of_result(results["by_step"]), drawn_by_script=True)
        ] if shown in BY_NAME else []  # fmt: skip
        yield Section("steps", "Over the steps", "Does it grow? Choose a metric and a window of steps." + stamp, figures=figures,
                      tables=[Titled("", of_cells((heads, groups)), "by-step", "every step")])  # fmt: skip
    if d.consistency.by_lag:
        names = [n for n in headline.GROUPED if n in values]
        groups = [
            ("unknown" if g.lag is None else str(g.lag), f"{g.n_tokens:,}", f"{g.n_sequences:,}", *(with_error(g.metrics[n].model_dump()) for n in names))
            for g in d.consistency.by_lag
        ]  # fmt: skip
        heads = ("lag", "tokens", "sequences", *(headline.GROUPED[n] for n in names))
        yield Section("lags", "By lag", "Lag is the trainer's version minus the version that generated the token. At lag 0 the weights are the same: what is left is engine noise." + stamp,
                      tables=[Titled("", of_cells((heads, groups)))])  # fmt: skip


def _entropy(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    if "bins" not in results or not len(results["bins"]):
        return
    bins = results["bins"]
    whose = {"train": "the training engine's", "infer": "the inference engine's"}.get(
        str(d.log.run.get("entropy_of")), "the logged"
    )
    taus = tuple(r.params["tau"] for r in d.rules if r.name == "estr" and "tau" in r.params) or (4.0,)
    bands = tuple(
        (r.params["low"], r.params["high"])
        for r in d.rules
        if r.name == "icepop" and {"low", "high"} <= r.params.keys()
    )
    figures = [
        Figure("ratio_scale", svg("ratio_scale", plots.plot_ratio_scale, bins, taus=taus, bands=bands or ((0.5, 5.0),), size=(7.2, 4.6)),
               "The paper's Figure 1. A fixed band is a horizontal line: it cuts the high entropies, where |δ| is large by nature, and lets the noise at low entropy pass. ESTR's boundary √(τ(H + 0.01)) rises with the points.",
               of_result(bins))
    ]  # fmt: skip
    yield Section(
        "scale",
        "Ratio scale against entropy",
        f"How large |δ| is by nature at each entropy. H is {whose} entropy, nat." + stamp,
        figures=figures,
    )
    if "scaling" in results and d.scaling:
        figures = [
            Figure("scaling", svg("scaling", plots.plot_scaling, results["scaling"], bins),
                   "E[δ²] = a Hᵇ. The paper's law is b = 1, the grey line. Points that leave it at low entropy are engine noise on tokens that the sampler was sure of.",
                   of_result(bins, ("entropy_bin", "lo", "hi", "n", "n_sequences", "mean_entropy", "mean_sq_delta", "mean_sq_delta_se", "sq_delta_over_entropy")))
        ]  # fmt: skip
        yield Section(
            "law",
            "Scaling law",
            "Does the scale of the ratio follow the entropy as the paper says?" + stamp,
            sentences.scaling(d.scaling),
            figures,
        )


def _split(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    split = d.decomposition
    if split is None or split.method == "none":
        return
    lead = "δ = ξ + d: noise ξ is what two engines with the same weights disagree by; exploration d is how far the weights have moved since the token was sampled. A mask should drop the first and keep the second."
    figures = [
        Figure("decomposition", svg("decomposition", plots.plot_decomposition, results["decomposition"], size=(7.2, 4.6)),
               "Where the exploration of a lag runs above the noise, a mask on δ removes more signal than engine error. Estimates below 0 are sampling error of the contrast and are drawn as they are.",
               of_result(results["decomposition"])),
        Figure("noise_share", svg("noise_share", plots.plot_noise_share, results["noise_share"], size=(7.2, 3.2)),
               "Near 1 the ratios are engine error: mending the engines matters more than any mask. Near 0 they are moved weights.",
               of_result(results["noise_share"])),
    ]  # fmt: skip
    notes = list(results["decomposition"].notes)
    yield Section("noise", "Noise and exploration", lead + stamp, sentences.decomposition(split), figures, notes=notes)


def _switches(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    if d.switches is None:
        return
    figures = []
    if "event_study" in results and len(results["event_study"]):
        figures.append(
            Figure("switches", svg("switches", plots.plot_switches, results["event_study"]),
                   "The paper's Figure 3. A step at 0 that the matched control does not have is what the new weights changed.",
                   of_result(results["event_study"]))
        )  # fmt: skip
    if "staleness" in results and len(results["staleness"]):
        figures.append(
            Figure("staleness", svg("staleness", plots.plot_staleness, results["staleness"], size=(7.2, 3.2)),
                   "Intra: last minus first version inside a sequence; inter: the trainer's version minus the last one.",
                   of_result(results["staleness"]))
        )  # fmt: skip
    lead = "Weights that are pushed into running generations: where versions change inside a sequence, and how stale the tokens are."
    yield Section("switches", "Version switches", lead + stamp, sentences.switches(d.switches), figures)


def _weights(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    if d.weights is None:
        return
    tables = (
        [Titled("By length of the sequence", of_result(results["weights_by_length"]))]
        if "weights_by_length" in results
        else []
    )
    lead = "What importance weights leave of the sample. ESS is the effective share; a Pareto k-hat above 0.7 says that the weights have no usable mean."
    yield Section("weights", "Importance weights", lead + stamp, sentences.weights(d.weights), tables=tables)


def _rules(d: Document, results: Mapping[str, Result], stamp: str) -> Iterator[Section]:
    if not d.rules:
        return
    figures = [
        Figure("rules", svg("rules", plots.plot_rules, results["rules"], size=(7.2, 0.9 + 0.42 * len(d.rules))),
               "The share of the decided tokens that each rule masks (ρ_mask). Compare rules at equal share before preferring one.",
               of_result(results["rules"]))
    ]  # fmt: skip
    if "rule_errors" in results and len(results["rule_errors"]):
        figures.append(
            Figure("tradeoff", svg("tradeoff", plots.plot_tradeoff, results["rule_errors"], results["rules"], size=(9.0, 4.2)),
                   "The two errors of a mask: the lower left corner is better; the dashed line masks at random.",
                   of_result(results["rule_errors"]))
        )  # fmt: skip
    if "tradeoff_curve" in results:
        curve = results["tradeoff_curve"]
        swept = f"{curve.parameters['parameter']} of {curve.parameters['rule']}"
        figures.append(
            Figure("tradeoff_curve", svg("tradeoff_curve", plots.plot_tradeoff, curve, curve=True),
                   f"The same along {swept}, from loose (upper left) to tight. A knee, where noise stops falling and exploration goes on, is where to stop tightening.",
                   of_result(curve))
        )  # fmt: skip
    if "rules_by_entropy_bin" in results and d.entropy_bins:
        figures.append(_by_entropy(d, results))
    if "agreement" in results and len(results["agreement"]):
        figures.append(
            Figure("agreement", svg("agreement", plots.plot_agreement, results["agreement"], size=(6.4, 4.6)),
                   "Cohen's κ of the keep decisions of two rules: 1 agree, 0 as by chance.",
                   of_result(results["agreement"]))
        )  # fmt: skip
    tables = [
        Titled("What is kept", of_cells(rule_tables.kept(d.rules))),
        Titled("", of_cells(rule_tables.details(d.rules))),
    ]
    tables += [
        Titled(f"Noise admitted and exploration masked, {method}; 95 % intervals", of_cells(cells))
        for method, cells in rule_tables.errors(d.rules)
    ]
    notes = list(results["rule_errors"].notes) if "rule_errors" in results else []
    lead = "What each rule would do to this log, replayed token by token."
    yield Section(
        "rules", "Mask rules", lead + stamp, rule_tables.trainer(d.reproduces_trainer), figures, tables, notes
    )


def _by_entropy(d: Document, results: Mapping[str, Result]) -> Figure:
    kept = results["rules_by_entropy_bin"]
    bounds = dict(
        zip(
            sorted({row["entropy_bin"] for row in kept.rows() if row["entropy_bin"] is not None}),
            ((b.lo, b.hi) for b in d.entropy_bins),
            strict=False,
        )
    )
    edges = [bounds.get(i, (0.0, None)) for i in range(max(bounds, default=0) + 1)]
    return Figure("mask_by_entropy", svg("mask_by_entropy", plots.plot_mask_by_entropy, kept, edges),
                  "A rule that masks the high entropies only removes exploration; one that masks the low ones removes engine noise.",
                  of_result(kept))  # fmt: skip
