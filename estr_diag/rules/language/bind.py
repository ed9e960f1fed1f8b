"""A tree on the columns of one log: what a log with one training-engine column leaves of the edges."""

from __future__ import annotations

from collections.abc import Collection

from estr_diag.rules.language.tree import Name, Node, Number, mapped, needs

ONE_TRAINING_COLUMN: dict[str, Node] = {
    # in the first minibatch the policy being optimised is the one before the update
    "logp_update": Name("logp_train"), "p_update": Name("p_train"), "delta_e": Name("delta"), "ratio_e": Name("ratio"),
    "delta_u": Number(0.0), "ratio_u": Number(1.0),
}  # fmt: skip


def bind(node: Node, present: Collection[str]) -> Node:
    """Return the tree for a log: without ``logp_update`` edge E is edge B, and edge U has a ratio of 1."""
    if "logp_update" in present or "logp_update" not in needs(node):
        return node

    def replaced(part: Node) -> Node:
        return ONE_TRAINING_COLUMN.get(part.name, part) if isinstance(part, Name) else part

    return mapped(node, replaced)
