"""What a reader must know before believing a difference: facts that are not the same, sequences that are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from estr_diag.report.diff_side import Computed
from estr_diag.stats.common_grid import HOW
from estr_diag.stats.grid import Bins, ValueGrid
from estr_diag.stats.two_samples import MIN_STEPS
from estr_diag.store.database import Store
from estr_diag.store.window import View

_MEANING = {
    "logprobs": "whether temperature and truncation are inside logp_infer",
    "train_logp": "which forward pass logp_train is",
    "temperature": "the distribution that tokens are sampled from",
    "entropy_of": "whose entropy H is",
    "version_unit": "what a version, and so a lag, counts",
}
"""Facts that decide what the numbers mean -> what they decide."""

_SHARED = 0.01
"""Share of a side's sequences above which it is said that they are on both: a few short ones coincide by chance."""


def facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of the runs that differ; one that only one side knows is among them."""
    names = [n for n in dict.fromkeys([*a, *b]) if n != "adapter_version"]
    return [{"fact": n, "a": a.get(n), "b": b.get(n)} for n in names if a.get(n) != b.get(n)]


def other_entropy(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Say that H is another engine's on each side, where both are known."""
    whose = a.get("entropy_of"), b.get("entropy_of")
    if None in whose or whose[0] == whose[1]:
        return ""
    return f"H is the {whose[0]} engine's entropy in A and the {whose[1]} engine's in B"


def shared_sequences(a: Store, b: Store) -> int:
    """Count the sequences of a that are in b: the same row of one store, or the same step and content in two."""
    keys = ("seq_id",) if _base(a) is _base(b) else ("step", "content_hash")
    theirs = b.table(f"select distinct {', '.join(keys)} from sequences")
    a.connection.register("their_sequences", theirs)
    try:
        same = " and ".join(f"s.{k} is not distinct from t.{k}" for k in keys)
        found = a.rows(f"select count(*) as n from sequences s semi join their_sequences t on {same}")
    finally:
        a.connection.unregister("their_sequences")
    return int(found[0]["n"])


def notes(
    document: Mapping[str, Any], sides: Sequence[Computed], grid: ValueGrid | None, bins: Bins | None
) -> list[str]:
    """Return what must be said beside the numbers."""
    n, level = document["correction"]["comparisons"], document["correction"]["level"]
    said = [
        "the difference is B minus A; its error is sqrt(se_A² + se_B²) by sequence, or by step, or that of both sides "
        "scattering alike (a short side without a rare event scatters by nothing), whichever is widest; intervals are of "
        f"95 %, each for itself, by Student's t. Changed: Holm's correction over all {n} comparisons of this page keeps the "
        f"chance of any false one at {level:.0%}"
    ]
    said += _shared(document)
    steps = min(c.n_steps for c in sides)
    if steps < MIN_STEPS:
        said.append(
            f"a side has {steps} steps: with fewer than {MIN_STEPS} a side, what moves from step to step alone (weights, "
            "prompts) is in no error, so a change may be no more than that; take more steps"
        )
    for differs in document["facts"]:
        if differs["fact"] in _MEANING:
            a_is, b_is = ("not known" if x is None else x for x in (differs["a"], differs["b"]))
            said.append(
                f"{differs['fact']} is {a_is} in A and {b_is} in B: {_MEANING[differs['fact']]}, and the differences include that"
            )
    if grid is not None:
        said += [HOW] if bins is None or str(bins).isdecimal() else []
        said += grid.notes
    if document["split_method"] == "extrapolated":
        said.append("noise is extrapolated to lag 0, not observed: a guess on both sides")
    return said


def _shared(document: Mapping[str, Any]) -> list[str]:
    shared, of = document["shared_sequences"], document["a"]["n_sequences"]
    smaller = min(of, document["b"]["n_sequences"])
    if not smaller or shared <= _SHARED * smaller:
        return []
    return [
        f"{shared:,} of A's {of:,} sequences are in B as well: the two are not independent, and the error of a difference is "
        "overstated, so a change may be missed"
    ]


def _base(store: Store) -> Store:
    return store.base if isinstance(store, View) else store
