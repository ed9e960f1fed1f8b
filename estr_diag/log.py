"""A log in Python: what the commands do, as methods.

>>> import estr_diag as ed
>>> log = ed.demo()
>>> log.entropy_bins(by="lag").to_polars()  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.ingestion.pipeline import IngestSummary
from estr_diag.result import Result
from estr_diag.rules.base import Rule
from estr_diag.stats.consistency import Consistency
from estr_diag.stats.contrast import Method
from estr_diag.stats.corrections import Level, Mode
from estr_diag.stats.decomposition import Decomposition, NoiseShare
from estr_diag.stats.empirical_scale import EmpiricalScale
from estr_diag.stats.entropy_bins import EntropyBins
from estr_diag.stats.framework_metrics import FrameworkMetrics
from estr_diag.stats.grid import DEFAULT_BINS, ENTROPY, GINI, Bins, Scale, ValueGrid, choose_grid
from estr_diag.stats.probability_pairs import ProbabilityPairs
from estr_diag.stats.scaling import Scaling
from estr_diag.stats.sequence_weights import WeightsByLength
from estr_diag.stats.staleness import Staleness, Versions
from estr_diag.stats.switches import EventStudy
from estr_diag.stats.threshold_metrics import ThresholdMetrics
from estr_diag.stats.weights import Weights, token_tail
from estr_diag.store.database import Store
from estr_diag.store.engine import Statistic, how_to_get, run

if TYPE_CHECKING:
    from estr_diag.checks import Finding
    from estr_diag.report import Report
    from estr_diag.rules.comparison import Comparison
    from estr_diag.rules.thresholds import Threshold


_SCALES = {scale.name: scale for scale in (ENTROPY, GINI)}


class Log:
    """An open log; close it or use it in ``with``.

    Attributes
    ----------
    store : Store
        The DuckDB store behind it.
    source : str
        What it was opened from.
    ingested : IngestSummary or None
        File by file, when it was read from a trainer's files.
    """

    def __init__(self, store: Store, source: str, ingested: IngestSummary | None = None) -> None:
        self.store = store
        self.source = source
        self.ingested = ingested

    def consistency(self, by: Literal["overall", "step", "lag"] = "overall") -> Result:
        """Return every consistency metric with its standard error by sequence."""
        return self._one(Consistency(by))

    def entropy_bins(
        self,
        by: Literal["overall", "lag"] = "overall",
        bins: Bins = DEFAULT_BINS,
        scale: Literal["entropy", "gini"] = "entropy",
    ) -> Result:
        """Return the moments and quantiles of delta in bins of the entropy.

        Parameters
        ----------
        by
            ``lag`` also splits by policy lag.
        bins
            A number of quantile bins, ``log`` or ``log:12`` for equal widths, or edges in nats.
        scale
            ``gini`` bins 1 - sum p^2 in place of the entropy, where ``collision`` is logged.
        """
        return self._one(EntropyBins(self._grid(bins, _SCALES[scale]), by_lag=by == "lag"))

    def scaling(self, bins: Bins = DEFAULT_BINS) -> Result:
        """Return the scaling law of E[delta^2] against H, and against 1 - G where ``collision`` is logged."""
        present = frozenset(self.store.column_counts())
        grids = [self._grid(bins)]
        if "collision" in present:
            grids.append(self._grid(bins, GINI))
        return self._one(Scaling(tuple(grids)))

    def decomposition(
        self, method: Method | None = None, bins: Bins = DEFAULT_BINS, *, by_position: bool | None = None
    ) -> Result:
        """Return noise and exploration by entropy bin and lag, by the best method that the log allows.

        Parameters
        ----------
        by_position
            Contrast inside buckets of the position as well. Where noise grows along a response while lag falls, as it did
            on lab runs with a known truth, only this is unbiased. By default where the log has lag-0 tokens at most
            positions.
        """
        return self._one(Decomposition(self._grid(bins), method, by_position))

    def noise_share(
        self, method: Method | None = None, bins: Bins = DEFAULT_BINS, *, by_position: bool | None = None
    ) -> Result:
        """Return the share of the squared deviation that is noise: over the whole log (first row) and by lag."""
        return self._one(NoiseShare(self._grid(bins), method, by_position))

    def probability_pairs(self) -> Result:
        """Return how many tokens have each pair of probabilities under the two engines."""
        return self._one(ProbabilityPairs())

    def sequence(self, seq_id: int) -> Result:
        """Return one sequence, a row a token in order; `plots.plot_sequence` draws it.

        Raises
        ------
        UsageError
            No sequence has this number.
        """
        table = self.store.table(
            f"select *, logp_train - logp_infer as delta from tokens where seq_id = {int(seq_id)} order by pos"
        )
        if not table.num_rows:
            raise UsageError(f"no sequence has seq_id {seq_id}; see log.sql('select seq_id, seq_key from sequences')")
        return Result("sequence", table, {"seq_id": int(seq_id)}, {"source": self.source})

    def empirical_scale(self, bins: Bins = DEFAULT_BINS) -> Result:
        """Return the isotonic scale m2(H) of delta^2."""
        return self._one(EmpiricalScale(self._grid(bins)))

    def event_study(self, window: int = 32) -> Result:
        """Return means by offset from the nearest version switch, against matched controls."""
        return self._one(EventStudy(window))

    def staleness(self) -> Result:
        """Return the distributions of lag, intra and inter."""
        return self._one(Staleness())

    def versions(self) -> Result:
        """Return the share of tokens and the gap by policy version."""
        return self._one(Versions())

    def weights(self) -> Result:
        """Return effective sample sizes and Pareto k-hat of token and sequence ratios, with their reading."""
        return self._one(Weights(token_tail(self.store, frozenset(self.store.column_counts()))))

    def weights_by_length(self) -> Result:
        """Return how sequence ratios degrade with the length of the sequence."""
        return self._one(WeightsByLength())

    def framework_metrics(self, framework: str | None = None, by: Literal["overall", "step"] = "overall") -> Result:
        """Return the numbers that trainers' dashboards show, under their own names."""
        return self._one(FrameworkMetrics(by, framework))

    def threshold_metrics(
        self,
        framework: str,
        level: Level = "token",
        mode: Mode = "truncate",
        low: float | None = None,
        high: float | None = None,
    ) -> Result:
        """Return what a trainer logs about its bounded importance weights, under one of its configurations.

        Bounds default to the framework's own; see ``estr-diag explain rollout_corr/rollout_is_mean``.
        """
        return self._one(ThresholdMetrics(framework, level, mode, low, high))

    def compare(self, rules: Sequence[Rule | Iterable[Rule]] | None = None, bins: Bins | None = None) -> Comparison:
        """Return what each mask rule would keep: overall, by breakdown, its two errors, and how rules agree.

        Parameters
        ----------
        rules
            Rules, and groups of rules as ``rules.from_toml`` returns them.
        """
        from estr_diag.rules import DEFAULT_RULES
        from estr_diag.rules.comparison import compare

        chosen = [r for group in rules or DEFAULT_RULES for r in ((group,) if isinstance(group, Rule) else group)]
        return compare(self.store, chosen, self._rule_grid(bins), {"source": self.source})

    def sweep(
        self,
        rule: Rule,
        parameter: str | None = None,
        values: Sequence[float] | str | None = None,
        bins: Bins | None = None,
    ) -> Result:
        """Return the trade-off curve of a rule along one parameter.

        Parameters
        ----------
        parameter
            By default the one that the rule is swept by.
        values
            Ascending values, or a text as ``0.25:16:log``; by default those that keep from half to 99.99 % of the tokens, and
            the rule's own (from a sixteenth to sixteen times it where they cannot be read off a score).
        """
        from estr_diag.rules.sweep import sweep
        from estr_diag.rules.sweep_values import over_shares, parse_grid

        name = parameter or rule.score
        if not name:
            raise UsageError(f"rule '{rule.key}' has no parameter that it is swept by; name one")
        grid = parse_grid(values) if isinstance(values, str) else values or over_shares(self.store, rule, name)
        points = tuple(float(v) for v in grid)
        return sweep(self.store, rule, name, points, self._rule_grid(bins), {"source": self.source})

    def fitted(self, rule: Rule) -> Rule:
        """Return a rule with ``scale`` in its text fitted to this log: then it also runs inside a trainer."""
        from estr_diag.rules.fitted import fitted

        return fitted((rule,), self.store)[0]

    def threshold(
        self, rule: Rule, *, keep: float | None = None, drop_lag0: float | None = None, parameter: str | None = None
    ) -> Threshold:
        """Return a threshold by what it should do: keep a share of the tokens, or drop a share of those of lag 0."""
        from estr_diag.rules.thresholds import at_drop_rate, at_kept_share

        if (keep is None) == (drop_lag0 is None):
            raise UsageError("give either the share to keep or the share of lag-0 tokens to drop")
        if keep is not None:
            return at_kept_share(self.store, rule, keep, parameter)
        assert drop_lag0 is not None
        return at_drop_rate(self.store, rule, drop_lag0, parameter)

    def tokens(
        self,
        where: str = "true",
        by: str = "s",
        *,
        top: int = 50,
        context: int = 8,
        rules: Mapping[str, Rule] | None = None,
    ) -> Result:
        """Return the tokens behind a number; see `rules.token_list.token_list`.

        >>> with demo() as log:
        ...     rows = log.tokens("estr(tau=0.1) and not kpop", by="abs(delta)", top=3).rows()
        """
        from estr_diag.rules.token_list import token_list

        return token_list(self.store, where, by, top=top, context=context, rules=rules)

    def decode(self, tokenizer: str | Path) -> None:
        """Give tokens a text from their ids, for this session; those that have one keep it.

        Parameters
        ----------
        tokenizer
            A ``tokenizer.json``; needs the extra ``text``.
        """
        from estr_diag.store.decoding import decode

        decode(self.store, Path(tokenizer))

    def check(self) -> list[Finding]:
        """Run the detectors of broken columns."""
        from estr_diag.checks import run_checks

        return run_checks(self.store)

    def report(self, rules: Sequence[Rule] | None = None, bins: Bins | None = None) -> Report:
        """Return the whole report: checks, statistics, mask rules."""
        from estr_diag.report import Report
        from estr_diag.rules import DEFAULT_RULES

        return Report.of(self.store, tuple(rules or DEFAULT_RULES), source=self.source, bins=bins)

    def sql(self, query: str) -> Result:
        """Run a read-only query over the tables ``tokens``, ``sequences``, ``runs`` and ``sources``.

        Raises
        ------
        UsageError
            The query is wrong, or reaches for anything outside the log.
        """
        import duckdb

        # A query may have been copied from anywhere: it can read neither files nor the network, and change nothing.
        self.store.connection.execute("set enable_external_access = false")
        try:
            statements = self.store.connection.extract_statements(query)
            kinds = [statement.type.name for statement in statements]
            if kinds not in (["SELECT"], ["EXPLAIN"]):
                raise UsageError(f"this query is {' and '.join(kinds) or 'empty'}; expected one select")
            table = self.store.table(query)
        except duckdb.Error as error:
            raise UsageError(f"this query cannot be run: {error}") from None
        return Result("sql", table, {"query": query}, {"source": self.source})

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        n = self.store.rows("select coalesce(sum(n_tokens), 0) as tokens, count(*) as sequences from sequences")[0]
        return f"<Log {self.source}: {n['sequences']:,} sequences, {n['tokens']:,} response tokens>"

    def _repr_html_(self) -> str:
        from html import escape

        counts = self.store.column_counts()
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{n:,}</td></tr>" for name, n in counts.items())
        return f"<p>{escape(repr(self)[5:-1])}</p><table><tr><th>column</th><th>values</th></tr>{rows}</table>"

    def _grid(self, bins: Bins, scale: Scale = ENTROPY) -> ValueGrid:
        present = frozenset(self.store.column_counts())
        if lacking := scale.needs - present:
            raise MissingColumnError(f"bins of {scale.name}", sorted(lacking), how_to_get(lacking))
        return choose_grid(self.store, present, bins, scale)

    def _rule_grid(self, bins: Bins | None = None) -> ValueGrid | None:
        """Return entropy bins that suit the size of the log; None without entropy."""
        from estr_diag.stats.grid import fitting_grid

        return fitting_grid(self.store, self.store.present(), bins)

    def _one(self, statistic: Statistic) -> Result:
        outcome = run(self.store, {"it": statistic}, {"source": self.source})
        if outcome.missing:
            raise outcome.missing["it"]
        return outcome.results["it"]
