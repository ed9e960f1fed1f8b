"""A mask rule is data: when a token is kept, with which weight, on which pair of policies, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from estr_diag.errors import UsageError, nearest
from estr_diag.expressions import Edge
from estr_diag.rules.language.bind import bind
from estr_diag.rules.language.parse import parse
from estr_diag.rules.language.sql import Dtype
from estr_diag.rules.language.tree import (
    Aggregate,
    Call,
    Choose,
    Compare,
    Flag,
    Kind,
    Logic,
    Name,
    Node,
    Settled,
    mapped,
    needs,
)
from estr_diag.rules.language.tree import Number as Value

if TYPE_CHECKING:
    from torch import Tensor

Number = float | int
OnMissing = Literal["undecided", "drop", "keep"]
Denominator = Literal["unchanged", "shrinks"]
Combine = Literal["and", "or", "not", "then"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One mask rule, or a combination of some.

    Parameters
    ----------
    name
        Field name.
    keep
        Boolean text over token columns, parameters and aggregates; see `language.vocabulary`. A token on
        which a column that the text names is missing is neither kept nor masked: it is undecided.
    weight
        Text of the weight of a kept token; 1 where there is none.
    parameters
        Name -> value; the library's hold the defaults.
    edge
        Which pair of policies ``delta``, ``ratio``, ``p_new`` and ``p_old`` are made of: B (train against
        infer), U (update against train), E (update against infer). With one training-engine column E is B,
        and a rule on U sees no change.
    dtype
        The arithmetic. float32 reproduces trainers whose clamps vanish in it.
    on_missing
        What becomes of an undecided token; ``drop`` and ``keep`` reproduce a trainer that does so.
    denominator
        Whether the loss is still averaged over all tokens (``unchanged``) or over the kept ones (``shrinks``).
    parts, combine
        A combination: ``and`` and ``or`` evaluate every part on the original mask, ``then`` evaluates each on
        what those before it left, so that its aggregates are over the remaining tokens.
    uses
        Rules that the text names, beside those of the library.
    score
        Parameter that a sweep moves when none is named.
    knots
        Steps of ``scale``, the m2(H) of a log: lower edge of H and value; see `rules.fitted`.
    says
        One line for people: when it keeps a token and what the parameters mean.
    reference
        Where it comes from.
    aliases
        Other names in circulation.
    framework, version, config
        For a preset: whose rule it is, from which version on, and the options that set it.
    checked
        Equal to that framework's own code, token by token, on the recorded log.
    """

    name: str
    keep: str = "true"
    parameters: Mapping[str, Number] = field(default_factory=dict)
    weight: str = ""
    edge: Edge = "B"
    dtype: Dtype = "float64"
    on_missing: OnMissing = "undecided"
    denominator: Denominator = "unchanged"
    parts: tuple[Rule, ...] = ()
    combine: Combine = "and"
    uses: Mapping[str, Rule] = field(default_factory=dict)
    score: str = ""
    knots: tuple[tuple[float, float], ...] = ()
    says: str = ""
    reference: str = ""
    aliases: tuple[str, ...] = ()
    framework: str = ""
    version: str = ""
    config: str = ""
    checked: bool = False

    def with_parameters(self, given: Mapping[str, Number]) -> Rule:
        """Return the rule with some parameters set."""
        for name, value in given.items():
            if name not in self.parameters:
                known = nearest(name, self.parameters) if self.parameters else "it has none"
                raise UsageError(f"rule '{self.key}' has no parameter '{name}'; {known}")
            if not math.isfinite(float(value)):
                raise UsageError(f"rule '{self.key}': {name} is {value}; expected a finite number")
        return replace(self, parameters={**self.parameters, **given})

    @property
    def key(self) -> str:
        """Name as the library has it: ``icepop``, ``icepop@verl``, ``token_k1@verl:2025``."""
        preset = f"@{self.framework}" + (f":{self.version}" if self.version else "") if self.framework else ""
        return self.name + preset

    @property
    def label(self) -> str:
        """Key and parameters as one writes them on the command line."""
        return ":".join([self.key, *(f"{k}={_written(float(v))}" for k, v in self.parameters.items())])

    def tree(self) -> Node:
        """Return the keep decision as a tree.

        Raises
        ------
        UsageError
            A text that is not a condition over known names.
        """
        node = (
            self._combined()
            if self.parts
            else parse(self.keep, self.parameters, want=Kind.BOOLEAN, edge=self.edge, rule_of=self.rule_of)
        )
        node = stepped(node, self.knots)
        return node if self.on_missing == "undecided" else Settled(node, self.on_missing == "keep")

    def weight_tree(self) -> Node | None:
        """Return the weight of a kept token as a tree; None where it is 1."""
        if self.weight:
            tree = parse(self.weight, self.parameters, want=Kind.NUMBER, edge=self.edge, rule_of=self.rule_of)
            return stepped(tree, self.knots)
        weights: list[Node] = []
        before: list[Node] = []
        for part in self.parts if self.combine in ("and", "then") else ():
            found = part.weight_tree()
            if found is not None:
                weights.append(among(found, _all(before)) if before else found)
            if self.combine == "then":
                before.append(among(part.tree(), _all(before)) if before else part.tree())
        product: Node | None = None
        for weight in weights:
            product = weight if product is None else Call("*", (product, weight))
        return None if product is None else stepped(product, self.knots)

    @property
    def needs(self) -> frozenset[str]:
        """Log columns that it names, in the full form (a log without ``logp_update`` still answers, see `bind`)."""
        weight = self.weight_tree()
        return needs(self.tree()) | (needs(weight) if weight is not None else frozenset())

    def lacking(self, present: Collection[str]) -> frozenset[str]:
        """Return the columns without which it cannot be replayed on a log that holds `present`."""
        weight = self.weight_tree()
        trees = [bind(self.tree(), present), *([] if weight is None else [bind(weight, present)])]
        return frozenset().union(*(needs(tree) for tree in trees)) - frozenset(present)

    def __and__(self, other: Rule) -> Rule:
        """Return the rule that keeps what both keep, each judged on the original mask."""
        return combined("and", (self, other))

    def __or__(self, other: Rule) -> Rule:
        """Return the rule that keeps what either keeps, each judged on the original mask."""
        return combined("or", (self, other))

    def __invert__(self) -> Rule:
        """Return the rule that keeps what this one masks."""
        return combined("not", (self,))

    def then(self, other: Rule) -> Rule:
        """Return the rule that applies `other` to what this one leaves."""
        return combined("then", (self, other))

    def torch(self, **tensors: Any) -> Tensor:
        """Return the keep decision inside a trainer; see `rules.tensors.decide`."""
        from estr_diag.rules.tensors import decide

        return decide(self, **tensors).keep

    def torch_weight(self, **tensors: Any) -> Tensor:
        """Return the weight of every token, 0 where it is masked; differentiable. See `rules.tensors.decide`."""
        from estr_diag.rules.tensors import decide

        return decide(self, **tensors).weight

    def _combined(self) -> Node:
        trees: list[Node] = []
        for part in self.parts:
            tree = part.tree()
            trees.append(among(tree, _all(trees)) if self.combine == "then" and trees else tree)
        if self.combine == "not":
            return Logic("not", (trees[0],))
        return Logic("or", tuple(trees)) if self.combine == "or" else _all(trees)

    def rule_of(self, name: str, parameters: Mapping[str, float]) -> Node | None:
        """Return the decision of another rule that the text names, or None where nothing is called that."""
        from estr_diag.rules.library import find

        rule = self.uses.get(name) or find(name)
        if rule is None:
            return None
        if name not in self.uses and self.name == name:
            raise UsageError(f"rule '{name}' names itself")
        return rule.with_parameters(parameters).tree()


def combined(combine: Combine, parts: tuple[Rule, ...], dtype: Dtype | None = None) -> Rule:
    """Return a combination of rules under a name that says what it is.

    Raises
    ------
    UsageError
        The parts are evaluated in different arithmetics, and `dtype` does not say in which the whole is.
    """
    dtypes = {part.dtype for part in parts} if dtype is None else {dtype}
    if len(dtypes) > 1:
        raise UsageError(
            f"{', '.join(part.label for part in parts)}: one is evaluated in float32 and one in float64; give both one "
            "dtype, or compare them side by side"
        )
    joined = {"and": "+", "or": "|", "then": ">"}.get(combine, "")
    name = f"not {parts[0].label}" if combine == "not" else joined.join(part.label for part in parts)
    shrinks = any(part.denominator == "shrinks" for part in parts)
    says = {
        "and": "keep what every part keeps, each judged on the original mask",
        "or": "keep what any part keeps, each judged on the original mask",
        "not": "keep what the part masks",
        "then": "each part judged on what those before it left",
    }[combine]
    return Rule(
        name, parts=parts, combine=combine, dtype=dtypes.pop(), denominator="shrinks" if shrinks else "unchanged",
        says=f"{says}: {', '.join(part.label for part in parts)}", reference="combination",
    )  # fmt: skip


def stepped(node: Node, knots: Sequence[tuple[float, float]]) -> Node:
    """Return a tree with ``scale`` replaced by steps over the entropy; as it is where there are none."""
    if not knots:
        return node

    def lookup(low: int, high: int) -> Node:
        if low == high:
            return Value(knots[low][1])
        middle = (low + high + 1) // 2
        below = Compare("<", Name("entropy"), Value(knots[middle][0]))
        return Choose(below, lookup(low, middle - 1), lookup(middle, high))

    # Bins of H = 0 and of H > 0 may begin at the same place: what is positive belongs to the second.
    steps = lookup(0, len(knots) - 1)
    if knots[0][0] == 0 and len(knots) > 1:
        steps = Choose(Compare("<=", Name("entropy"), Value(0.0)), Value(knots[0][1]), lookup(1, len(knots) - 1))
    return mapped(node, lambda part: steps if part == Name("scale") else part)


def among(node: Node, kept: Node) -> Node:
    """Return a tree whose aggregates are over the tokens that `kept` keeps."""

    def narrowed(part: Node) -> Node:
        if not isinstance(part, Aggregate):
            return part
        return replace(part, where=kept if part.where is None else _all([part.where, kept]))

    return mapped(node, narrowed)


def _written(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _all(trees: list[Node]) -> Node:
    if not trees:
        return Flag(True)
    return trees[0] if len(trees) == 1 else Logic("and", tuple(trees))
