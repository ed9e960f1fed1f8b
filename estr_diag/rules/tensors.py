"""A rule inside a trainer: tensors in, keep mask and weight out. Needs torch, and no DuckDB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from estr_diag.errors import UsageError, nearest
from estr_diag.rules.base import Rule
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.tensors import Tokens
from estr_diag.rules.language.tree import Aggregate, Name, Node, needs, walk
from estr_diag.rules.language.vocabulary import OF_SEQUENCE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FLOATS = ("logp_train", "logp_infer", "logp_update", "logp_replay", "entropy", "collision", "advantage", "reward")
_INTEGERS = (
    "policy_version", "trainer_version", "step", "turn", "version_first", "version_last", "prompt_len",
)  # fmt: skip
_FLAGS = ("trainer_keep", "finished")
_OTHERS = ("loss_mask", "seq_ids", "pos", "group_id", "compute_dtype")
ARGUMENTS = (*_FLOATS, *_INTEGERS, *_FLAGS, *_OTHERS)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule says of a batch; every tensor has the shape of the log-probs.

    Attributes
    ----------
    keep
        True on kept tokens; False on masked, undecided and uncounted ones.
    undecided
        True where a value that the rule reads is missing (NaN or infinite).
    weight
        Weight of kept tokens, 0 elsewhere; carries gradients where the rule's weight has any.
    """

    keep: Tensor
    undecided: Tensor
    weight: Tensor


def decide(rule: Rule, *, compute_dtype: torch.dtype | None = None, **tensors: Any) -> Decision:
    """Apply a rule to a batch.

    Parameters
    ----------
    rule
        Any rule, built in or a user's.
    compute_dtype
        Arithmetic; by default the rule's own, float64 for most: float32 inputs are widened first, as the replay
        does. Give ``torch.float32`` on devices without float64.
    tensors
        ``logp_train``, ``logp_infer`` and ``loss_mask`` always; ``entropy``, ``advantage``, ``policy_version``,
        ``trainer_version``, ``logp_update`` ... as the rule needs them. Shape [B, T], one sequence a row; or any
        shape with ``seq_ids`` of the same shape for packed tokens. A tensor of shape [B] is one value a
        sequence. Without ``logp_update`` a rule on edge E sees B, and one on U no change. ``pos`` is the column
        by default; ``step`` one for the whole batch.

    Returns
    -------
    Decision
        Undecided tokens are not kept; ask for them if they should be.

    Raises
    ------
    UsageError
        A tensor that the rule needs is not given, an unknown name, or shapes that do not fit.
    """
    import torch

    for name in tensors:
        if name not in ARGUMENTS:
            raise UsageError(f"rule '{rule.key}': no argument '{name}'; {nearest(name, ARGUMENTS)}")
    given = {name: torch.as_tensor(value) for name, value in tensors.items() if value is not None}
    keep_tree, weight_tree = bind(rule.tree(), given), rule.weight_tree()
    weight_tree = None if weight_tree is None else bind(weight_tree, given)
    for tree in (keep_tree, weight_tree):
        if tree is not None and any(part == Name("scale") for part in walk(tree)):
            raise UsageError(f"rule '{rule.key}' names scale, the m2(H) of a log; fit it first: log.fitted(rule)")
    _require(rule, keep_tree, weight_tree, given)
    dtype = compute_dtype or (torch.float32 if rule.dtype == "float32" else torch.float64)
    batch = _Batch(rule, given, dtype)
    tokens = batch.tokens([keep_tree, *([] if weight_tree is None else [weight_tree])])
    with torch.no_grad():
        value, known = tokens.decision(keep_tree)
        kept = value if known is None else value & known
    undecided = torch.zeros_like(kept) if known is None else ~known
    if weight_tree is None:
        weight = kept.to(dtype)
    else:
        # Values made without gradients for the decision are not the weight's.
        tokens.values.clear()
        raw = tokens.value(weight_tree)
        weight = torch.where(kept, raw, torch.zeros_like(raw))
    return Decision(batch.back(kept), batch.back(undecided), batch.back(weight).to(given["logp_train"].dtype))


def _require(rule: Rule, keep: Node, weight: Node | None, given: dict[str, Tensor]) -> None:
    wanted = {"logp_train", "logp_infer", "loss_mask"}
    trees = [keep, *([] if weight is None else [weight])]
    wanted |= set().union(*(needs(tree) for tree in trees)) - {"pos", "step", "finish"}
    if any(getattr(part, "name", None) == "finished" for tree in trees for part in walk(tree)):
        wanted |= {"finished"}
    for name in sorted(wanted):
        if name not in given:
            raise UsageError(f"rule '{rule.key}' needs {name}; give it as {name}=...")


class _Batch:
    """The counted tokens of a batch, flat, and the way back to its shape."""

    def __init__(self, rule: Rule, given: dict[str, Tensor], dtype: torch.dtype) -> None:
        import torch

        self.rule, self.given, self.dtype = rule, given, dtype
        self.shape = given["logp_train"].shape
        if "seq_ids" not in given and len(self.shape) != 2:
            raise UsageError(
                f"rule '{rule.key}': logp_train has shape {list(self.shape)}; expected [sequences, tokens], "
                "or seq_ids beside it for packed tokens"
            )
        counted = self._spread("loss_mask").bool()
        for name in ("logp_train", "logp_infer"):
            counted = counted & torch.isfinite(self._spread(name))
        self.at = counted.reshape(-1).nonzero().squeeze(1)

    def tokens(self, trees: list[Node]) -> Tokens:
        """Return the counted tokens with everything that some trees read."""
        import torch

        columns, missing = {}, {}
        for name in (*_FLOATS, *_INTEGERS, *_FLAGS):
            if name not in self.given or name == "step":
                continue
            flat = self._flat(name)
            if name in _FLAGS:
                columns[name] = flat.bool()
                continue
            x = flat.to(self.dtype)
            if flat.is_floating_point() and name not in ("logp_train", "logp_infer"):
                hole = ~torch.isfinite(flat)
                missing[name] = hole
                x = torch.where(hole, torch.zeros_like(x), x)
            columns[name] = x
        columns |= self._of_sequence(columns, missing)
        sequence = self._sequence()
        step = self._flat("step") if "step" in self.given else torch.zeros_like(sequence)
        columns["step"] = step.to(self.dtype)
        pos = self._pos(sequence)
        scopes = {part.scope for tree in trees for part in walk(tree) if isinstance(part, Aggregate)}
        return Tokens(columns, missing, self._scopes(scopes, sequence, step, pos), pos, sequence, self.dtype)

    def back(self, flat: Tensor) -> Tensor:
        """Return a flat tensor in the batch's shape; 0 or False where no token counts."""
        out = flat.new_zeros(self.shape.numel())
        return out.index_copy(0, self.at, flat).reshape(self.shape)

    def _of_sequence(self, columns: dict[str, Tensor], missing: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, (first, last) in {
            "intra": ("version_last", "version_first"),
            "inter": ("trainer_version", "version_last"),
        }.items():
            assert name in OF_SEQUENCE
            if first in columns and last in columns:
                found[name] = columns[first] - columns[last]
                holes = [missing[c] for c in (first, last) if c in missing]
                if holes:
                    missing[name] = holes[0] if len(holes) == 1 else holes[0] | holes[1]
        return found

    def _spread(self, name: str) -> Tensor:
        """Return a tensor in the batch's shape; one value a sequence is spread over its tokens."""
        x = self.given[name]
        if x.shape == self.shape:
            return x
        if len(self.shape) == 2 and x.shape == self.shape[:1]:
            return x.unsqueeze(1).expand(self.shape)
        if x.dim() == 0:
            return x.expand(self.shape)
        raise UsageError(
            f"rule '{self.rule.key}': {name} has shape {list(x.shape)}; expected {list(self.shape)}, the shape of "
            "logp_train, or one value a sequence"
        )

    def _flat(self, name: str) -> Tensor:
        return self._spread(name).reshape(-1)[self.at]

    def _sequence(self) -> Tensor:
        import torch

        if "seq_ids" in self.given:
            _, index = torch.unique(self._flat("seq_ids"), return_inverse=True)
            return cast("Tensor", index)
        rows = torch.arange(self.shape[0], device=self.at.device).unsqueeze(1).expand(self.shape)
        return rows.reshape(-1)[self.at]

    def _pos(self, sequence: Tensor) -> Tensor:
        import torch

        if "pos" in self.given:
            return self._flat("pos").long()
        if "seq_ids" not in self.given:
            columns = torch.arange(self.shape[1], device=self.at.device).unsqueeze(0).expand(self.shape)
            return columns.reshape(-1)[self.at]
        # Packed: the place behind the sequence's first token, uncounted ones included.
        ids = self._spread("seq_ids").reshape(-1)
        place = torch.arange(len(ids), device=ids.device)
        _, inverse = torch.unique(ids, return_inverse=True)
        first = place.new_full((int(inverse.max()) + 1,) if len(ids) else (1,), len(ids))
        first = first.scatter_reduce(0, inverse, place, "amin", include_self=True)
        return (place - first[inverse])[self.at]

    def _scopes(self, wanted: set[Any], sequence: Tensor, step: Tensor, pos: Tensor) -> dict[str, tuple[Tensor, int]]:
        import torch

        keys = {
            "seq": lambda: [sequence],
            "turn": lambda: [sequence, self._flat("turn")],
            "run": lambda: [sequence, self._runs(sequence, pos)],
            "group": lambda: [step, self._flat("group_id")],
            "step": lambda: [step],
        }
        scopes = {}
        for scope in wanted:
            parts = keys[scope]()
            missing = None
            index, n = None, 1
            for part in parts:
                if part.is_floating_point():
                    hole = ~torch.isfinite(part)
                    missing = hole if missing is None else missing | hole
                    part = torch.where(hole, torch.zeros_like(part), part)
                number, count = _numbered(part)
                index, n = (number, count) if index is None else _numbered(index * count + number)
            assert index is not None
            scopes[scope] = (index if missing is None else torch.where(missing, -1, index), n)
        return scopes

    def _runs(self, sequence: Tensor, pos: Tensor) -> Tensor:
        """Return the number of the run of counted positions: position minus rank is the same inside one."""
        import torch

        order = torch.argsort(pos, stable=True)
        order = order[torch.argsort(sequence[order], stable=True)]
        rank = torch.empty_like(pos)
        rank[order] = torch.arange(len(pos), device=pos.device)
        return pos - rank


def _numbered(x: Tensor) -> tuple[Tensor, int]:
    """Return whole numbers from 0 for some labels, and their bound; small labels keep theirs."""
    import torch

    if not len(x):
        return x.long(), 0
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        # Rows and steps are numbers from 0 already: finding the distinct ones would be a sort.
        if low >= 0 and high < 4 * len(x):
            return x.long(), high + 1
    distinct, index = torch.unique(x, return_inverse=True)
    return index, len(distinct)
