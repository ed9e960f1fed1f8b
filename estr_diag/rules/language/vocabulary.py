"""What a rule may name: columns, functions, aggregates, and nothing else.

A rule file is untrusted input. Its text can read the token log through these names and reach nothing beside it.
"""

from __future__ import annotations

from estr_diag.expressions import DERIVED, EDGES, Edge, renamed

BOUND: tuple[str, ...] = ("delta", "ratio", "logp_new", "logp_old", "p_new", "p_old")
"""Names whose meaning is the rule's edge: ratio = p_new / p_old, delta = logp_new - logp_old."""

_ON_B = {"logp_new": "logp_train", "logp_old": "logp_infer", "p_new": "p_train", "p_old": "p_infer"}

STORED: tuple[str, ...] = (
    "logp_infer", "logp_train", "logp_replay", "logp_update", "entropy", "collision", "policy_version",
    "trainer_version", "advantage", "pos", "step", "turn", "trainer_keep",
)  # fmt: skip
"""Token columns, by their own names whatever the edge."""

OF_SEQUENCE: dict[str, tuple[frozenset[str], str]] = {
    # name: (columns of the table of sequences that it needs, SQL over one row of it)
    "reward": (frozenset({"reward"}), "reward::double"),
    "version_first": (frozenset({"version_first"}), "version_first"),
    "version_last": (frozenset({"version_last"}), "version_last"),
    "intra": (frozenset({"version_first", "version_last"}), "version_last - version_first"),
    "inter": (frozenset({"version_last", "trainer_version"}), "trainer_version - version_last"),
    "prompt_len": (frozenset({"prompt_len"}), "prompt_len"),
    "finished": (
        frozenset({"finish"}),
        "lower(finish) not in ('length', 'max_tokens', 'max_length', 'truncated', 'abort', 'aborted')",
    ),
}
"""What is known of a whole sequence; `finished` is false where the length limit or an abort ended it."""

EXPLICIT: dict[str, str] = {
    "delta_b": "delta", "ratio_b": "ratio", "delta_u": "delta_u", "ratio_u": "ratio_u", "delta_e": "delta_e",
    "ratio_e": "ratio_e", "drift": "d",
}  # fmt: skip
"""Names with an edge of their own, for rules that look at two."""

DEFINED: dict[str, str] = {
    # the paper's scaled deviations, on the rule's edge
    "z": "delta / sqrt(entropy + 0.01)",
    "s": "delta * delta / (entropy + 0.01)",
}
"""Names that stand for a text of the language."""

MACROS: dict[str, tuple[tuple[str, ...], str]] = {
    "binary_kl": (
        ("p", "q", "eps"),
        "clip(p, eps, 1 - eps) * ln(clip(p, eps, 1 - eps) / clip(q, eps, 1 - eps)) + "
        "(1 - clip(p, eps, 1 - eps)) * ln((1 - clip(p, eps, 1 - eps)) / (1 - clip(q, eps, 1 - eps)))",
    ),
}
"""Functions that are written in the language: name -> (arguments, text)."""

FUNCTIONS: dict[str, int] = {"abs": 1, "exp": 1, "ln": 1, "sqrt": 1, "sign": 1, "clip": 3, "least": 2, "greatest": 2}
"""Functions of numbers -> how many arguments (at least, for least and greatest)."""

AGGREGATES: dict[str, tuple[int, str]] = {
    # function: (arguments, what it is over)
    "sum": (1, "number"), "mean": (1, "number"), "max": (1, "number"), "min": (1, "number"), "count": (0, "none"),
    "any": (1, "boolean"), "all": (1, "boolean"), "quantile": (2, "number"),
}  # fmt: skip
SCOPES: tuple[str, ...] = ("seq", "turn", "run", "group", "step")
ORDERED_AGGREGATES: dict[str, tuple[int, str]] = {
    "seq_any_before": (1, "boolean"), "seq_discounted": (2, "number"), "step_budget": (2, "number"),
}  # fmt: skip

FLAGS = frozenset({"trainer_keep", "finished"})
"""Columns that are true or false."""

_DERIVED_NAMES = ("lag", "gini", "xi", "p_infer", "p_train", "p_update", *EXPLICIT.values())


def bound_name(name: str, edge: Edge) -> str:
    """Return the column of ``tok`` that a name of a rule means on an edge."""
    if name in BOUND:
        return renamed(_ON_B.get(name, name), edge)
    return EXPLICIT.get(name, name)


def names() -> tuple[str, ...]:
    """Return every name that a rule may use."""
    return tuple(dict.fromkeys([*BOUND, *EXPLICIT, *DEFINED, *STORED, *_DERIVED_NAMES, *OF_SEQUENCE, "scale"]))


def functions() -> tuple[str, ...]:
    """Return every function that a rule may call."""
    aggregates = [f"{scope}_{function}" for scope in SCOPES for function in AGGREGATES]
    return (*FUNCTIONS, *MACROS, *aggregates, *ORDERED_AGGREGATES)


def columns_of(name: str) -> frozenset[str]:
    """Return the log columns behind a name of ``tok``."""
    if name in OF_SEQUENCE:
        return OF_SEQUENCE[name][0]
    if name == "scale":
        # m2(H) is fitted to a log before a rule that names it is replayed (see `rules.fitted`).
        return frozenset({"entropy", "logp_infer", "logp_train"})
    for edge in EDGES:
        if name == renamed("ratio", edge):
            name = renamed("delta", edge)
    return DERIVED[name][0] if name in DERIVED else frozenset({name})


FINITE_NAMES = frozenset({*STORED, *OF_SEQUENCE, *DERIVED, *(renamed("ratio", edge) for edge in EDGES)} - FLAGS)
"""The store holds finite numbers or nulls, and a ratio is clamped before exp."""
