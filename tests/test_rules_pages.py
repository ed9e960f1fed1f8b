"""The pages of mask rules: what they say is so, and they fit into 80 columns."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from estr_diag.cli import rules as pages
from estr_diag.rules import LIBRARY, Rule, get
from estr_diag.rules.describe import Bound, describe, differences, look_up
from estr_diag.rules.library import NOT_REPLAYABLE


def drawn(page: RenderableType, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    with console.capture() as found:
        console.print(page)
    lines = [line.rstrip() for line in found.get().splitlines()]
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def joined(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("key", LIBRARY)
def test_every_rule_has_a_page(key: str) -> None:
    rule = LIBRARY[key]
    facts = describe(rule)
    text = drawn(pages.page(facts))
    assert text.startswith(f"{key}: ")
    told = json.loads(json.dumps(pages.page_json(facts), allow_nan=False))
    assert (told["key"], told["formula"], told["parameters"]) == (key, rule.keep, dict(rule.parameters))
    assert set(facts.needs) == rule.needs
    assert all(facts.needs.values())
    for shown in (rule.keep, rule.weight, rule.config, rule.reference, *facts.needs):
        assert joined(shown) in joined(text)
    assert (facts.checked is None) == (rule.framework == "")
    assert {r.key for r in facts.relatives} == {k for k, other in LIBRARY.items() if other.name == rule.name} - {key}
    assert bool(facts.scope) == (rule.keep != "true")
    for bound in facts.bounds:
        assert bound.inclusive == (" <= " in bound.text or " >= " in bound.text)


@pytest.mark.parametrize("key", LIBRARY)
def test_every_difference_is_one(key: str) -> None:
    rule = LIBRARY[key]
    for relative in describe(rule).relatives:
        other = LIBRARY[relative.key]
        same = (
            (rule.tree(), rule.weight_tree(), rule.dtype, rule.denominator)
            == (other.tree(), other.weight_tree(), other.dtype, other.denominator)
        )  # fmt: skip
        assert bool(relative.differs) >= (not same), relative
        assert {d.what for d in relative.differs} == {d.what for d in differences(other, rule)}


@pytest.mark.parametrize(
    ("rule", "bounds"),
    [
        (Rule("a", "ratio >= low and ratio < high", {"low": 0.5, "high": 2}), [("ratio >= 0.5", True), ("ratio < 2", False)]),
        (Rule("a", "not (ratio > 2 or ratio <= 0.5)"), [("ratio <= 2", True), ("ratio > 0.5", False)]),
        (Rule("a", "not seq_any(not delta > 1)"), [("delta > 1", False)]),
        (Rule("a", "ratio between 0.5 and 2", on_missing="drop"), [("ratio >= 0.5", True), ("ratio <= 2", True)]),
        (Rule("a", "case when advantage > 0 then ratio < 2 else ratio > 0.5 end"), [("ratio < 2", False), ("ratio > 0.5", False)]),
        (Rule("a", "seq_mean(abs(delta)) filter (where entropy > 1) <= 0.1"), [("seq_mean(abs(delta)) <= 0.1", True)]),
        (Rule("a", "delta <= 1", edge="U"), [("delta_u <= 1", True)]),
        (Rule("a", "(delta - (entropy - 1)) * 2 <= 1"), [("(delta - (entropy - 1)) * 2 <= 1", True)]),
        (Rule("a", "greatest(binary_kl(p_new, p_old, 0.1), 0) <= 1"), [("greatest(...) <= 1", True)]),
        (Rule("a", "step_budget(delta, 2)"), [("mean of what is left of delta < 2", False)]),
        (~Rule("a", "delta <= 1"), [("delta > 1", False)]),
        (Rule("a", "finished and advantage <> 0"), []),
    ],
)  # fmt: skip
def test_bounds(rule: Rule, bounds: list[tuple[str, bool]]) -> None:
    assert describe(rule).bounds == tuple(Bound(*bound) for bound in bounds)


@pytest.mark.parametrize(
    ("keep", "scope", "whole"),
    [
        ("true", (), False),
        ("delta < 1", ("token",), False),
        ("seq_mean(delta) < 1", ("sequence",), True),
        ("delta < seq_mean(delta)", ("token", "sequence"), False),
        ("finished", ("sequence",), True),
        ("run_max(delta) < 1 and group_any(advantage > 0)", ("run of the mask", "group"), True),
        ("step_budget(delta, 1)", ("token", "step"), False),
        ("turn_mean(delta) < step_quantile(delta, 0.5)", ("turn", "step"), True),
        ("not seq_any_before(delta > 1)", ("token", "sequence"), False),
    ],
)
def test_scope(keep: str, scope: tuple[str, ...], whole: bool) -> None:
    for on_missing in ("undecided", "drop"):
        facts = describe(Rule("a", keep, on_missing=on_missing))
        assert (facts.scope, facts.whole) == (scope, whole)


@pytest.mark.parametrize(
    ("rule", "edges"),
    [
        (Rule("a", "entropy > 1"), []),
        (Rule("a", "delta < 1"), ["B"]),
        (Rule("a", "p_new < 0.5", edge="E"), ["E"]),
        (Rule("a", "delta_b < 1", weight="ratio_u"), ["B", "U"]),
        (Rule("a", "delta < 1", edge="U") & Rule("b", "delta < 1", edge="E"), ["E", "U"]),
    ],
)
def test_edges(rule: Rule, edges: list[str]) -> None:
    assert [text[0] for text in describe(rule).edges] == edges


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("case when advantage > 0 then delta < 1 else true end", "advantage = 0 goes with negative"),
        ("advantage >= 0 or delta < 1", "advantage = 0 goes with positive"),
        ("not (advantage > 0 and delta > 1 or advantage < 0 and delta < 1)", "advantage = 0 is on neither side"),
        ("reward = 0 or advantage < 0", "reward = 0 is a case of its own; advantage = 0 goes with positive"),
        ("delta < 1", ""),
    ],
)
def test_where_zero_falls(keep: str, told: str) -> None:
    assert describe(Rule("a", keep)).at_zero == told


def test_a_rule_found_by_its_alias() -> None:
    facts = look_up("tis@slime")
    assert facts is not None
    assert (facts.asked, facts.key) == ("tis@slime", "tis_token@slime")
    assert drawn(pages.page(facts)).startswith("tis@slime is tis_token@slime: ")
    plain = look_up("icepop")
    assert plain is not None
    assert plain.asked == ""
    assert look_up("nothing") is None


def test_a_rule_of_a_file_comes_first_and_is_told_from_the_built_in_one() -> None:
    own = Rule("icepop", "ratio < 2", edge="E", says="mine")
    facts = look_up("icepop", {"icepop": own})
    assert facts is not None
    assert facts.formula == "ratio < 2"
    assert "icepop" in {relative.key for relative in facts.relatives}
    assert any("another condition: ratio >= low and ratio <= high" in warning for warning in facts.warnings)


def test_the_trap_of_verl_is_told() -> None:
    facts = describe(get("token_k1@verl"))
    assert facts.warnings == ("@verl:2025: another condition: ratio >= low and ratio <= high",)
    warnings = describe(get("icepop")).warnings
    assert "@prime-rl: edge E in place of B" in warnings
    assert any(text.startswith("low is 0.5 here; 0 in @slime") for text in warnings)


def test_a_combination() -> None:
    facts = describe(get("icepop").then(get("geo")))
    assert facts.formula == "icepop:low=0.5:high=5 then geo:low=0.99:high=1.01"
    assert facts.weight == "product of the weights of its parts"
    assert facts.scope == ("token", "sequence")
    assert "judged by    the token, its sequence" in drawn(pages.page(facts))
    assert describe(~get("estr")).formula == "not estr:tau=4:eps=0.01"


@pytest.mark.parametrize("width", [80, 120])
def test_the_listing_names_every_rule(width: int) -> None:
    own = (Rule("mine", "entropy > h", {"h": 1.0}, aliases=("ours",)),)
    text = drawn(pages.listing(LIBRARY.values(), own), width)
    heads = [line.partition(" ")[0] for line in text.splitlines()]
    for rule in LIBRARY.values():
        assert rule.key in heads or f"@{rule.key.partition('@')[2]}" not in heads
        for column in rule.needs if not rule.framework else ():
            assert column in text
    assert {rule.key for rule in LIBRARY.values() if not rule.framework} <= set(heads)
    assert {entry.name for entry in NOT_REPLAYABLE} <= set(heads)
    titles = [
        line
        for line in text.splitlines()
        if line in ("rules of your own", "token rules", "weights", "clips and shapers")
    ]
    assert titles == ["rules of your own", "token rules", "weights", "clips and shapers"]
    assert "also called: mine = ours" in text


def test_the_listing_as_json() -> None:
    told = json.loads(json.dumps(pages.listing_json(LIBRARY.values()), allow_nan=False))
    sections = {rule["name"]: rule["section"] for rule in told["rules"]}
    assert sections["icepop"] == "token rules"
    assert sections["geo"] == sections["overlong"] == "sequence, turn, group and step rules"
    assert (sections["tis_token"], sections["ppo"], sections["cispo"]) == (
        "weights",
        "clips and shapers",
        "clips and shapers",
    )
    named = [rule["name"] for rule in told["rules"]] + [key for rule in told["rules"] for key in rule["presets"]]
    assert sorted(named) == sorted(LIBRARY)
    assert [entry["name"] for entry in told["not_replayable"]] == [entry.name for entry in NOT_REPLAYABLE]


def test_a_preset_alone_is_listed_as_itself() -> None:
    told = pages.listing_json([get("icepop@verl")])
    assert [rule["name"] for rule in told["rules"]] == ["icepop@verl"]


def test_a_rule_that_cannot_be_replayed() -> None:
    page = pages.absent_page("clip_cov")
    assert page is not None
    assert "random generator" in drawn(page)
    assert pages.absent_page("icepop") is None
