"""``rules.toml``: what it accepts, what it refuses and where, and that a hostile one reaches nothing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from estr_diag.errors import InputError, UsageError
from estr_diag.rules import LIBRARY, Rule, get
from estr_diag.rules.argument import parse_rule_argument, shadowed
from estr_diag.rules.file import MAX_BYTES, MAX_LEVELS, MAX_RULES, load_rules, rules_json_schema
from estr_diag.rules.replay import Replay
from estr_diag.store.engine import run
from tests.logs import make_log, store_of

FULL = """
[rules.mine]
keep = "delta * delta / (entropy + eps) <= tau"
weight = "clip(ratio, 0, 2)"
parameters = { tau = 2.0, eps = 0.01 }
edge = "E"
dtype = "float32"
on_missing = "drop"
denominator = "shrinks"
score = "tau"
says = "mine"
reference = "ours"
[rules.both]
keep = "plain(tau = 3) and not icepop(low=0.5, high=2)"
[rules.plain]
keep = "delta * delta <= tau"
parameters = { tau = 1 }
[rules.chain]
then = ["icepop:low=0.5:high=2", "geo:low=0.99:high=1.01"]
[rules.all_of]
and = ["plain", "estr:tau=8"]
[rules.any_of]
or = ["plain:tau=2", "kpop@verl+veto"]
denominator = "unchanged"
[rules.negated]
not = "plain"
"""


def load(tmp_path: Path, text: str | bytes) -> dict[str, Rule]:
    path = tmp_path / "rules.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_rules(path)


def keep(text: str, more: str = "") -> str:
    return f"[rules.mine]\nkeep = {json.dumps(text)}\n{more}"


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    path = str(tmp_path / "rules.toml")
    assert message.startswith(path)
    assert message.isprintable()
    return message.removeprefix(path).removeprefix(":").strip()


def test_a_whole_file(tmp_path: Path) -> None:
    rules = load(tmp_path, FULL)
    assert list(rules) == ["mine", "both", "plain", "chain", "all_of", "any_of", "negated"]
    mine = rules["mine"]
    assert mine == Rule(
        "mine", "delta * delta / (entropy + eps) <= tau", {"tau": 2.0, "eps": 0.01}, "clip(ratio, 0, 2)", edge="E",
        dtype="float32", on_missing="drop", denominator="shrinks", score="tau", says="mine", reference="ours",
    )  # fmt: skip
    assert (
        rules["both"].tree()
        == (rules["plain"].with_parameters({"tau": 3}) & ~get("icepop").with_parameters({"high": 2})).tree()
    )
    assert rules["chain"].tree() == get("icepop").with_parameters({"high": 2}).then(get("geo")).tree()
    assert rules["all_of"].tree() == (rules["plain"] & get("estr").with_parameters({"tau": 8})).tree()
    assert (rules["any_of"].combine, [part.label for part in rules["any_of"].parts]) == (
        "or", ["plain:tau=2", "kpop@verl:phi=0.1:eps=1e-06+veto:c=0.0001"],
    )  # fmt: skip
    assert (rules["any_of"].denominator, (get("kpop@verl") & get("veto")).denominator) == ("unchanged", "shrinks")
    assert rules["negated"].tree() == (~rules["plain"]).tree()
    assert [rule.label for rule in rules.values()][3:] == ["chain", "all_of", "any_of", "negated"]


def test_its_rules_are_replayed(tmp_path: Path) -> None:
    rules = tuple(load(tmp_path, FULL).values())
    log = make_log(3, holes=False)
    with store_of(log) as store:
        rows = run(store, {"it": Replay(rules)}).results["it"].table.to_pylist()
    kept = {row["rule"].partition(":")[0]: row["kept_tokens"] for row in rows}
    assert kept["plain"] + kept["negated"] == rows[0]["n"]
    assert kept["chain"] <= rows[0]["n"]


@pytest.mark.parametrize("rule", [r for r in LIBRARY.values() if not r.framework], ids=lambda r: r.key)
def test_every_built_in_rule_can_be_written_in_a_file(tmp_path: Path, rule: Rule) -> None:
    values = ", ".join(f"{name} = {float(value)!r}" for name, value in rule.parameters.items())
    fields = {"keep": rule.keep, "weight": rule.weight, "edge": rule.edge, "dtype": rule.dtype, "score": rule.score}
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in fields.items() if value)
    found = load(tmp_path, f"[rules.mine]\n{text}\nparameters = {{ {values} }}\n")["mine"]
    assert (found.tree(), found.weight_tree()) == (rule.tree(), rule.weight_tree())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (keep("delta <= ta", "parameters = { tau = 1 }"), "1: rules.mine: parameters: neither keep nor weight names 'tau'"),
        (keep("tau > 0 and delta <= ta", "parameters = { tau = 1 }"),
         "2: rules.mine.keep: rule 'tau > 0 and delta <= ta', at character 22: no column or parameter 'ta'; did you mean 'tau'?"),
        ("\n" + keep("true and icepo"), "3: rules.mine.keep: at character 10: no column, parameter or rule 'icepo'; did you mean 'icepop'?"),
        (keep("icepop(lo = 1)"), "2: rules.mine.keep: rule 'icepop' has no parameter 'lo'; did you mean 'low'?"),
        (keep("delta"), "2: rules.mine.keep: rule 'delta' is a number; expected true or false"),
        (keep(""), "2: rules.mine.keep: rule '': expected one expression, found 0"),
        (keep("true", "weight = 'rati'"), "3: rules.mine.weight: rule 'rati', at character 1: no column or parameter 'rati'; did you mean 'ratio'?"),
        (keep("true", "kep = 'true'"), "3: rules.mine.kep: unknown key; did you mean 'keep'?"),
        ("[rule.a]\nkeep = 'true'", "rule: unknown key; did you mean 'rules'?"),
        ("", "rules: the file has no rule; write one as [rules.NAME]"),
        ("[rules]", "rules: the file has no rule; write one as [rules.NAME]"),
        ("rules = [1]", "rules: Input should be a valid dictionary"),
        (keep("true", "not = 'estr'"), "1: rules.mine: expected exactly one of keep, then, and, or, not; found keep and not"),
        ("[rules.a]\nweight = 'ratio'", "1: rules.a: expected exactly one of keep, then, and, or, not; found none"),
        ("[rules.a]\nand = ['estr', 'icepo']", "2: rules.a.and: no rule 'icepo'; did you mean 'icepop'?"),
        ("[rules.a]\nand = ['estr', 'bb']\n[rules.b]\nnot = 'estr'", "2: rules.a.and: no rule 'bb'; did you mean 'b'?"),
        ("[rules.a]\nor = ['estr', 'icepop:lo=1']", "2: rules.a.or: rule 'icepop' has no parameter 'lo'; did you mean 'low'?"),
        ("[rules.a]\nor = ['estr', 'icepop@verk']", "2: rules.a.or: no rule 'icepop@verk'; of that name there are icepop@verl"),
        ("[rules.a]\nor = ['estr', 'icepop,kpop']", "2: rules.a.or: 'icepop,kpop' names 2 rules; expected one"),
        ("[rules.a]\nor = ['estr', '']", "2: rules.a.or: '' names 0 rules; expected one"),
        ("[rules.a]\nthen = ['estr']", "2: rules.a.then: Tuple should have at least 2 items"),
        ("[rules.a]\nand = ['kpop@areal', 'estr']", "2: rules.a.and: it names rules of float32 and of float64; say dtype"),
        (keep("true", "edge = 'X'"), "3: rules.mine.edge: Input should be 'B', 'U' or 'E'"),
        (keep("true", "on_missing = 'one'"), "3: rules.mine.on_missing: Input should be 'undecided', 'drop' or 'keep'"),
        (keep("delta < x", "score = 'y'\nparameters = { x = 1 }"), "1: rules.mine: score: no parameter 'y'; known: x"),
        (keep("delta < x", "parameters = { x = inf }"), "3: rules.mine.parameters.x: Input should be a finite number"),
        (keep("delta < x", "parameters = { x = true }"), "3: rules.mine.parameters.x: Input should be a valid number"),
        (keep("delta < x", f"parameters = {{ x = {'9' * 400} }}"), "3: rules.mine.parameters.x: Input should be a valid number"),
        (keep("delta < 1", "parameters = { delta = 1 }"), "1: rules.mine: parameters: 'delta' is a column of the language"),
        (keep("case < 1", "parameters = { case = 1 }"), "1: rules.mine: parameters: 'case' is a word of SQL"),
        ("[rules.delta]\nkeep = 'true'", "1: rules.delta: 'delta' is a column of the language"),
        ("[rules.seq_mean]\nkeep = 'true'", "1: rules.seq_mean: 'seq_mean' is a function of the language"),
        ("[rules.case]\nkeep = 'true'", "1: rules.case: 'case' is a word of SQL"),
        ("[rules.median]\nkeep = 'true'", "1: rules.median: 'median' is a word of SQL"),
        ("[rules.Mine]\nkeep = 'true'", "1: rules.Mine: 'Mine' is not a name"),
        ("[rules.\"a b\"]\nkeep = 'true'", "1: rules.a b: 'a b' is not a name"),
        ("[rules.a]\nkeep = 'true'\nkeep =", "not valid TOML: Invalid value (at end of document)"),
        ("[rules.a]\n\nkeep = tru", "not valid TOML: Invalid value (at line 3, column 8)"),
        ("[rules.a]\nnot = 'a'", "1: rules.a: rules name each other in a circle: a -> a"),
        ("[rules.icepop]\nkeep = 'icepop and true'", "circle: icepop -> icepop; a rule that builds on a built-in one needs another name"),
        ("[rules.a]\nnot = 'b'\n[rules.b]\nand = ['c', 'estr']\n[rules.c]\nkeep = 'a(x = 1)'", "circle: a -> b -> c -> a"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (keep("read_text('/etc/passwd') = 1"), "function 'read_text' is not allowed"),
        (keep("exists (select 1 from read_csv('/etc/passwd'))"), "not allowed in a rule"),
        (keep("(select count(*) from tokens) > 1"), "subquery"),
        (keep("true; drop table tokens"), "expected one expression, found 2"),
        (keep("attach 'x'"), "attach"),
        (keep("getenv('HOME') > 1"), "function 'getenv' is not allowed"),
        (keep("'a' = 'a'"), "a text is not allowed"),
        (keep("tokens.delta < 1"), "names another table"),
        (keep('"delta; drop table x" < 1'), "no column or parameter"),
        (keep('"a\x1b[2J" < 1'), "control character"),
        (keep("true\0"), "control character"),
        (keep("true", 'says = "\\u001b[2J"'), "control character"),
        (keep("true", 'reference = "\\u202etxt"'), "control character"),
        (keep("true", '"\\u001b[2J" = 1'), "unknown key"),
        ("[rules.a]\nkeep = 'tr\0ue'", "not valid TOML: "),
        (b"[rules.a]\nkeep = '\xff'", "2: not valid TOML: byte 0xff is not UTF-8"),
        (keep("(" * 9000), "nested too deeply"),
        (keep("(" * 4000 + "true" + ")" * 4000), "nested too deeply"),
        (keep("true or " * 2000 + "true"), "2: rules.mine.keep: String should have at most 10000 characters"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "{a = " * 100_000, "nested too deeply"),
        ("[rules.a]\nkeep = " + "1" * 5000, "not valid TOML"),
        (".".join("a" * 400_000) + " = 1", "1: a dotted key of more than 16 parts"),
        ("[" + " . ".join(["'a'"] * 100_000) + "]", "1: a dotted key of more than 16 parts"),
        ("[rules]\na = {" + '"a".' * 100_000 + "a = 1}", "2: a dotted key of more than 16 parts"),
        ("#" * (MAX_BYTES + 1), "more than 1,000,000 bytes"),
        ("".join(f"[rules.a{i}]\nnot = 'b'\n" for i in range(MAX_RULES + 1)), "at most 500 items"),
        (keep("true", "parameters = { " + ", ".join(f"p{i} = 1" for i in range(60_000)) + " }"), "at most 50 items"),
        ("[rules.a]\nand = [" + "'estr'," * 100_000 + "]", "at most 60 items"),
        ("[rules.a]\nand = ['" + ">".join(["geo"] * 1500) + "', 'geo']", "terms"),
        ("[rules.a]\nthen = [" + "'geo'," * 60 + "]", "terms"),
        ("[rules.a]\nthen = ['geo', '" + ">".join(["geo"] * 40) + "']", "terms"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused(tmp_path: Path, text: str | bytes, why: str) -> None:
    message = refusal(tmp_path, text)
    assert why in message
    assert len(message) < 2_000


def test_a_quoted_column_is_the_column(tmp_path: Path) -> None:
    assert load(tmp_path, keep('"delta" < 1'))["mine"].tree() == Rule("x", "delta < 1").tree()


def _chain(first: str, each: str, n: int) -> str:
    later = "".join(f"[rules.a{i}]\nkeep = '{each.format(f'a{i - 1}')}'\n" for i in range(1, n))
    return f"[rules.a0]\nkeep = '{first}'\n{later}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_chain("true", " and ".join(["{0}"] * 10), 15), "terms"),
        (_chain("delta < 1", "not " * 10 + "{0}", 15), "deep"),
        (_chain("true", "{0}", MAX_LEVELS + 1), f"at most {MAX_LEVELS}"),
        (_chain("true", "{0}", MAX_RULES), f"at most {MAX_LEVELS}"),
        ("".join(f"[rules.a{i}]\nnot = 'a{(i + 1) % MAX_RULES}'\n" for i in range(MAX_RULES)), " -> ... -> "),
        (keep("".join(["binary_kl("] * 9) + "delta" + ", 0.5, 0.1)" * 9 + " < 1"), "terms"),
        (_chain("true", "case when {0} then 1 else 0 end between 0 and 1 and {0}", 18), "terms"),
    ],
    ids=["product", "deep", "levels", "long", "circle", "macro", "twice"],
)
def test_rules_that_multiply_are_refused_before_they_are_built(tmp_path: Path, text: str, why: str) -> None:
    message = refusal(tmp_path, text)
    assert why in message
    assert len(message) < 500


def test_a_long_file_within_the_limits(tmp_path: Path) -> None:
    assert len(load(tmp_path, "".join(f"[rules.a{i}]\nkeep = 'delta < {i}'\n" for i in range(MAX_RULES)))) == MAX_RULES
    assert len(load(tmp_path, _chain("delta < 1", "{0} and ratio < 2", MAX_LEVELS))) == MAX_LEVELS


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    assert list(load(tmp_path, b"\xef\xbb\xbf[rules.a]\r\nkeep = 'true'\r\n")) == ["a"]


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_rules(tmp_path / "none.toml")
    with pytest.raises(InputError, match="Is a directory"):
        load_rules(tmp_path)
    with pytest.raises(UsageError, match="more than"):
        load_rules("/dev/zero")


def test_the_arithmetic_of_parts_that_agree(tmp_path: Path) -> None:
    rules = load(tmp_path, "[rules.a]\nnot = 'kpop@areal'\n[rules.b]\nand = ['a', 'estr']\ndtype = 'float64'")
    assert (rules["a"].dtype, rules["b"].dtype) == ("float32", "float64")


def test_the_argument(tmp_path: Path) -> None:
    load(tmp_path, keep("delta < x", "parameters = { x = 1 }\n[rules.kpop]\nkeep = 'ratio < 2'"))
    path, said = tmp_path / "rules.toml", list[str]()
    found = parse_rule_argument(f"estr:tau=4, {path},mine,mine:x=2,mine>veto,icepop", said.append)
    labels = [rule.label for rule in found]
    assert labels == [
        "estr:tau=4:eps=0.01",
        "mine:x=1",
        "kpop",
        "mine:x=2",
        "mine:x=1>veto:c=0.0001",
        "icepop:low=0.5:high=5",
    ]
    assert found[2].keep == "ratio < 2"
    assert said == [f"{path}: rule 'kpop' is the file's own and stands in place of the built-in kpop"]
    assert parse_rule_argument(f"{path}", None)[0].name == "mine"
    assert parse_rule_argument("") == ()
    with pytest.raises(UsageError, match="no rule 'mine'"):
        parse_rule_argument(f"mine,{path}")


def test_two_rules_under_one_label(tmp_path: Path) -> None:
    load(tmp_path, "[rules.none]\nkeep = 'ratio < 2'")
    with pytest.raises(UsageError, match="two different rules are called 'none'"):
        parse_rule_argument(f"none,{tmp_path / 'rules.toml'}")


def test_an_alias_of_a_built_in_rule_is_shadowed_too() -> None:
    assert shadowed({"tis": Rule("tis"), "mine": Rule("mine")}) == (
        "rule 'tis' is the file's own and stands in place of the built-in tis_token",
    )


def test_the_json_schema() -> None:
    schema = rules_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert (schema["$id"], schema["$schema"]) == ("estr-diag/rules/v1", "https://json-schema.org/draft/2020-12/schema")
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(tomllib.loads(FULL))
    refused: list[dict[str, Any]] = [
        {}, {"rules": {}}, {"rules": {"a": {}}}, {"rules": {"a": {"keep": "true", "not": "estr"}}},
        {"rules": {"a": {"kep": "true"}}}, {"rules": {"delta": {"keep": "true"}}}, {"rules": {"A": {"keep": "true"}}},
        {"rules": {"a": {"then": ["estr"]}}}, {"rules": {"a": {"keep": "true", "edge": "X"}}}, {"rule": {}},
        {"rules": {"a": {"keep": "delta < 1", "parameters": {"delta": 1}}}}, {"rules": {"a": {"keep": None}}},
    ]  # fmt: skip
    for value in refused:
        assert not validator.is_valid(value), value
    assert all(entry.get("description") for entry in schema["$defs"]["RuleEntry"]["properties"].values())
