"""Event study of weight switches inside a sequence (Zhao et al., arXiv 2607.22186, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from estr_diag.expressions import grid_cell
from estr_diag.measures import MEASURES
from estr_diag.result import Result
from estr_diag.stats.clusters import SEQUENCE_KEY, cluster_means
from estr_diag.store.engine import LOG_SEQUENCES, LOG_TOKENS, Request, how_to_get

WINDOW = 32
"""Offsets that are reported on either side of a switch."""

MEANS: dict[str, tuple[str, str]] = {
    "mean_entropy": ("sum_entropy", "n_entropy"),
    "mean_abs_delta": ("sum_abs_delta", "n"),
    "mean_sq_delta": ("sum_delta2", "n"),
    "mean_scaled_sq": ("sum_scaled2", "n_entropy"),
}
"""Mean -> (measure of the sum, measure of the count)."""

_LEAST_CONTROLS = 2  # the spread among the sequences of one cell is not known from fewer
_KINDS = ("switch", "lost", "control", "unknown")

SEQUENCE_KINDS = f"""
kinds as (
    select
        s.{SEQUENCE_KEY},
        case
            when k.lowest <> k.highest then 'switch'
            when s.version_first <> s.version_last then 'lost'
            when k.known_at_both_ends then 'control'
            else 'unknown'
        end as kind
    from {LOG_SEQUENCES} s
    left join (
        select
            {SEQUENCE_KEY},
            min(policy_version) as lowest,
            max(policy_version) as highest,
            min(pos) = min(pos) filter (policy_version is not null)
                and max(pos) = max(pos) filter (policy_version is not null) as known_at_both_ends
        from {LOG_TOKENS}
        where loss_mask
        group by {SEQUENCE_KEY}
    ) k using ({SEQUENCE_KEY})
)"""
"""CTE: what the versions of each sequence say.

``switch``: its sampled tokens have several. ``lost``: its first and last version differ, but no token says
where. ``control``: one version, known at the first and at the last sampled token. ``unknown``: all others.
"""


@dataclass(frozen=True, slots=True)
class EventStudy:
    """Means of H, abs(delta), delta^2 and z^2 by distance to the nearest switch, against matched positions.

    How to read it: offset 0 is the first token that the new weights sampled. A healthy log has differences
    (`..._diff`) within two or three of their standard errors of 0 at every offset. `mean_sq_delta_diff` above
    0 from offset 0 on, falling off with distance, is the mark of new weights over a KV cache or a text of
    the old ones. A difference over a whole side of the switch, which does not fall off, is only the lag of
    that side's version, since controls have lags of their own. A rise of `mean_scaled_sq_diff` with none in
    `mean_entropy_diff` is not explained by entropy.

    Parameters
    ----------
    window
        Offsets run from -window to window.
    exact_positions
        Match controls on the same position, rather than on the cell that holds it. The number of partials
        is then that of the tokens of control sequences: 5 times the time, 3 times the memory at 5 M tokens.

    Notes
    -----
    A *switch* is a sampled token (loss mask true) whose version differs from that of the last sampled token
    before it that has one. Tool and observation tokens have no version of their own: they are looked
    through, and so are sampled tokens of unknown version, but both take up positions. A token belongs to the
    nearest switch of its sequence, of two at the same distance to the earlier. Only counted tokens enter
    a mean; tokens that do not count can still be the switch.

    *Controls* are the sequences that have one version, known at the first and last sampled token. They are
    matched on position p in the response, in 16 cells an octave of p + 1: the same position below 23, within
    4.4 % of it above. With N(o, c) tokens at offset o in cell c and m(c) the mean over the control tokens
    of c, ``..._control`` = sum_c N m / sum_c N and ``..._diff`` is the mean over tokens at the offset of
    x - m(c). Cells with fewer than two control sequences are left out of both; `n_matched` tokens remain, and
    the difference equals mean - control where `n_matched` = `n`.

    Standard errors are by sequence (`clusters.cluster_means`): of the plain mean; of the control, from
    residuals about m(c); of the difference, from residuals x - m(c) on both sides, independent since no
    sequence is on both. What positions explain is not in the last: it can be below the other two combined.

    A token's neighbours are not in its row of ``tok``, so these partials cannot be fused into the shared scan:
    they have a view. They stay additive, since a sequence never straddles shards: sums by (sequence, offset,
    cell) around switches, and by (sequence, cell) for controls (offset null). Window functions run over
    sequences with a switch only. The weights N need all shards, so controls are weighted in `merge`.
    """

    window: int = WINDOW
    exact_positions: bool = False
    name: ClassVar[str] = "event_study"

    @property
    def needs(self) -> frozenset[str]:
        """Columns: both engines. Entropy adds its own means; that versions are lacking is said in the notes."""
        return frozenset({"logp_infer", "logp_train"})

    @property
    def _scan(self) -> str:
        return f"switches_{self.window}{'_exact' if self.exact_positions else ''}"

    @staticmethod
    def means(present: frozenset[str]) -> dict[str, tuple[str, str]]:
        """Return those of `MEANS` that the log's columns allow."""
        return {name: pair for name, pair in MEANS.items() if all(MEASURES[m].needs <= present for m in pair)}

    def requests(self, present: frozenset[str]) -> tuple[Request, ...]:
        """Ask for sums near switches and in controls, and for the number of sequences of each kind."""
        measures = dict.fromkeys(("n", *(m for pair in self.means(present).values() for m in pair)))
        cell = "pos" if self.exact_positions else grid_cell("pos + 1")
        keys = {SEQUENCE_KEY: SEQUENCE_KEY, "offset": '"offset"', "cell": cell}
        return (
            Request(self._scan, keys, tuple(measures), windows(self.window)),
            Request("sequence_kinds", {"kind": "kind"}, ("n",), f"with {SEQUENCE_KINDS} select kind from kinds"),
        )

    def merge(self, scans: Mapping[str, str], present: frozenset[str]) -> str:
        """Return one row an offset; the counts of sequences are repeated on each."""
        means = self.means(present)
        sums = dict(means.values())
        counts = sorted({"n", *sums.values()})
        shown = ",\n    ".join(
            f"""e.{name}, e.{name}_se,
    c.{name} as {name}_control, r.{name}_se as {name}_control_se,
    t.{name} as {name}_diff, sqrt(power(t.{name}_se, 2) + power(r.{name}_se, 2)) as {name}_diff_se"""
            for name in means
        )
        kinds = ", ".join(f"coalesce(sum(n) filter (kind = '{k}'), 0)::bigint as sequences_{k}" for k in _KINDS)
        return f"""
with around as (select * from {scans[self._scan]} where "offset" is not null),
controls as (select * exclude ("offset") from {scans[self._scan]} where "offset" is null),
profile as (
    select cell, {", ".join(f"{usable(n)} as cell_{n}" for n in counts)},
        {", ".join(f"sum({s}) / {usable(n)} as mean_{s}" for s, n in sums.items())}
    from controls
    group by cell
),
weights as (
    select "offset", cell, {", ".join(f"sum({n}) as weight_{n}" for n in counts)}
    from around
    group by "offset", cell
),
around_residuals as (
    select {SEQUENCE_KEY}, "offset",
        {", ".join(f"case when cell_{n} is not null then {n} else 0 end as {n}" for n in counts)},
        {", ".join(f"coalesce({s} - mean_{s} * {n}, 0) as {s}" for s, n in sums.items())}
    from around left join profile using (cell)
),
control_residuals as (
    select {SEQUENCE_KEY}, "offset",
        {", ".join(f"coalesce(weight_{n} / cell_{n} * {n}, 0) as {n}" for n in counts)},
        {", ".join(f"coalesce(weight_{n} / cell_{n} * ({s} - mean_{s} * {n}), 0) as {s}" for s, n in sums.items())}
    from controls join profile using (cell) join weights using (cell)
),
control as (
    select "offset", sum(cell_n)::bigint as n_control,
        {
            ", ".join(
                f"sum(weight_{n} * mean_{s}) / nullif(sum(weight_{n}) filter (mean_{s} is not null), 0) as {name}"
                for name, (s, n) in means.items()
            )
        }
    from weights join profile using (cell)
    group by "offset"
)
select o."offset", coalesce(e.n, 0) as n, coalesce(e.n_sequences, 0) as n_sequences,
    coalesce(t.n, 0) as n_matched, coalesce(c.n_control, 0) as n_control,
    coalesce(r.n_sequences, 0) as n_sequences_control,
    {shown}, k.*
from (select unnest(range(-{self.window}, {self.window} + 1))::integer as "offset") o
cross join (select {kinds} from {scans["sequence_kinds"]}) k
left join ({cluster_means("around", ["offset"], means)}) e using ("offset")
left join ({cluster_means("around_residuals", ["offset"], means)}) t using ("offset")
left join ({cluster_means("control_residuals", ["offset"], means)}) r using ("offset")
left join control c using ("offset")
order by o."offset\""""

    def finish(self, result: Result) -> Result:
        """Say why there is nothing, or take the counts of sequences into the notes."""
        counted = {kind: result.table[f"sequences_{kind}"][0].as_py() for kind in _KINDS}
        table = result.table.drop_columns([f"sequences_{kind}" for kind in _KINDS])
        if not counted["switch"]:
            return Result(self.name, table.slice(0, 0), result.parameters, result.provenance, (why_none(counted),))
        notes = [
            f"{counted['switch']:,} sequences have a switch; {counted['control']:,} have none and are the controls",
            "controls are matched on the position in the response"
            + ("" if self.exact_positions else ", in 16 cells an octave (the same position below 23)"),
        ]
        if counted["control"] < _LEAST_CONTROLS:
            notes[1] = "no control and no difference: fewer than two sequences are known to have no switch"
        if left := counted["lost"] + counted["unknown"]:
            notes.append(
                f"{left:,} sequences are on neither side: their tokens do not say whether or where they switch"
            )
        if "mean_entropy" not in table.column_names:
            notes.append("mean_entropy and mean_scaled_sq not computed: this log has no entropy")
        return Result(self.name, table, result.parameters, result.provenance, tuple(notes))


def windows(window: int) -> str:
    """Return the view: counted tokens near a switch, with their offset, and those of controls, with none."""
    return f"""
with {SEQUENCE_KINDS},
versions as (
    select {SEQUENCE_KEY}, pos,
        policy_version <> lag(policy_version) over (partition by {SEQUENCE_KEY} order by pos) as switched
    from {LOG_TOKENS}
    where loss_mask and policy_version is not null
        and {SEQUENCE_KEY} in (select {SEQUENCE_KEY} from kinds where kind = 'switch')
),
near as (
    -- of two at the same distance, the earlier switch is the one with the positive offset
    select {SEQUENCE_KEY}, pos + d as pos, arg_min(d, 2 * abs(d) - (d > 0)::integer) as "offset"
    from versions, (select unnest(range(-{window}, {window} + 1))::integer as d)
    where switched
    group by {SEQUENCE_KEY}, pos + d
)
select tok.*, near."offset"
from tok join kinds using ({SEQUENCE_KEY}) left join near using ({SEQUENCE_KEY}, pos)
where kind = 'control' or near."offset" is not null"""


def usable(count: str) -> str:
    """Return the control tokens of a cell, or null where too few sequences have any."""
    return f"case when count(distinct {SEQUENCE_KEY}) filter ({count} > 0) >= {_LEAST_CONTROLS} then sum({count}) end"


def why_none(counted: Mapping[str, int]) -> str:
    """Say why there is no event study."""
    if counted["lost"]:
        return (
            "not computed: the log has versions by sequence only (runs.version_granularity), switch positions are "
            f"lost; {counted['lost']:,} sequences have a switch somewhere. Log per-token versions (AReaL) or spans"
        )
    if counted["control"]:
        return f"not computed: none of the {counted['control']:,} sequences with known versions has a switch inside it"
    how = how_to_get({"policy_version"})
    return f"not computed: no sequence has a policy_version at its first and last sampled token; {how}"
