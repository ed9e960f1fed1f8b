"""The tokens behind a number: the right ones, in order, with their surroundings, and inert on a terminal."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from estr_diag.cli.tokens import around, known_colour, render, visible
from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.rules import get
from estr_diag.rules.token_list import token_list
from tests import oracles
from tests.logs import make_log, prime_log, store_of


def test_selects_and_orders_as_numpy() -> None:
    log = make_log(4, sequences=20, scale=5.0)
    tokens = oracles.counted(log)
    score = tokens["delta"] ** 2 / (tokens["entropy"] + 0.01)
    difference = oracles.keep("icepop", tokens) & ~oracles.keep("estr", tokens, tau=0.5, eps=0.01)
    with store_of(log) as store:
        found = token_list(store, "icepop and not estr(tau=0.5)", top=10_000)
        rows = found.rows()
        few = token_list(store, "icepop and not estr(tau=0.5)", top=3).rows()
    assert len(rows) == difference.sum() > 3
    np.testing.assert_allclose([r["value"] for r in rows], np.sort(score[difference])[::-1], rtol=1e-9)
    assert few == rows[:3]
    assert all(r["icepop"] is True and r["estr:tau=0.5:eps=0.01"] is False for r in rows)
    assert f"{difference.sum():,} of {len(score):,} counted tokens match" in found.notes[0]


def test_ties_are_in_order_of_sequence_and_position() -> None:
    with store_of(make_log(4)) as store:
        rows = token_list(store, by="1 + 0 * pos", top=40).rows()
    places = [(r["seq_id"], r["pos"]) for r in rows]
    assert places == sorted(places)


def test_context_is_of_the_same_sequence_and_has_uncounted_tokens() -> None:
    log = make_log(2, sequences=3)
    log["token_text"] = np.array([f"[{i}]" for i in range(len(log["seq_id"]))], dtype=object)
    with store_of(log) as store:
        rows = token_list(store, top=10_000, context=2).rows()
    first = {s: np.flatnonzero(log["seq_id"] == s)[0] for s in np.unique(log["seq_id"])}
    last = {s: np.flatnonzero(log["seq_id"] == s)[-1] for s in first}
    for row in rows:
        at = first[row["seq_id"]] + row["pos"]
        assert row["token"] == f"[{at}]"
        assert row["before"] == "".join(f"[{i}]" for i in range(max(at - 2, first[row["seq_id"]]), at))
        assert row["after"] == "".join(f"[{i}]" for i in range(at + 1, min(at + 2, last[row["seq_id"]]) + 1))


def test_undecided_tokens_are_counted_and_not_shown() -> None:
    log = make_log(3, holes=False)
    log["entropy"][::4] = np.nan
    with store_of(log) as store:
        found = token_list(store, "entropy >= 0", by="abs(delta)", top=10_000)
    missing = np.count_nonzero(log["loss_mask"] & np.isnan(log["entropy"]))
    assert f"{missing:,} tokens are undecided" in found.notes[1]
    assert all(r["entropy"] is not None for r in found.rows())


def test_presets_and_rules_of_a_file() -> None:
    with store_of(make_log(3, scale=20.0)) as store:
        mine = get("band").with_parameters({"c": 1.1})
        rows = token_list(store, '"icepop@verl" and not mine', by="abs(delta)", rules={"mine": mine}, top=5).rows()
    assert rows
    assert all(abs(r["delta"]) > np.log(1.1) and r["icepop@verl"] and r["mine"] is False for r in rows)


@pytest.mark.parametrize(
    ("where", "by"),
    [
        ("read_text('/etc/passwd') is null", "s"), ("true", "(select 1)"), ("delta", "s"), ("true", "estr"), ("dela < 1", "s"),
        ("true; drop table tokens", "s"), ('"x\'); drop table tokens; --" and true', "s"), ("", "s"),
    ],
)  # fmt: skip
def test_other_text_is_refused(where: str, by: str) -> None:
    with store_of(make_log(1)) as store:
        with pytest.raises(UsageError):
            token_list(store, where, by)
        assert store.rows("select count(*) as n from tokens")[0]["n"]


def test_missing_columns_are_named() -> None:
    log = make_log(1)
    del log["entropy"]
    with store_of(log) as store:
        with pytest.raises(MissingColumnError, match="entropy"):
            token_list(store, "estr")
        assert len(token_list(store, top=3)), "without entropy the squared gap orders"
        with pytest.raises(UsageError, match="top 0"):
            token_list(store, top=0)


def test_text_of_a_log_is_inert_on_a_terminal() -> None:
    log = make_log(1, sequences=2, mean_length=4, holes=False)
    hostile = ["\x1b[31mred", "[bold]x[/bold]", "‮evil", "a\nb", "\ud800", "😀" * 3, "x" * 100_000, "\x07\r"]
    log["token_text"] = np.array(
        [hostile[i % len(hostile)].encode("utf-8", "replace").decode() for i in range(len(log["seq_id"]))], dtype=object
    )
    with store_of(log) as store:
        found = token_list(store, top=20)
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(render(found, 80))
    said = out.getvalue()
    assert not set("\x1b\x07\r‮") & set(said)
    assert "\\x1b[31mred" in said.replace("\n", "")
    assert len(said) < 20_000
    assert visible("\ud800") == "\\ud800"
    assert visible("a‮b") == "a\\u202eb"
    assert visible("x" * 500, 10) == "x" * 10 + "…"


def test_the_terminal_colours_tokens_and_crosses_out_what_a_rule_masks() -> None:
    with prime_log() as log:
        found = log.tokens("not trainer", top=3, context=4)
        near = around(log, found, sequences=3, width=4)
    console = Console(width=120, force_terminal=True, color_system="truecolor", file=io.StringIO())
    for colour in ("delta", "trainer"):
        console.print(render(found, 120, near, colour))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;4;37;48;2;" in printed, "the listed token: bold, underlined, on a colour"
    assert ";9m" in printed, "masked by the trainer: crossed out"
    known_colour("trainer", near)
    with pytest.raises(UsageError, match="did you mean 'trainer'"):
        known_colour("trainr", near)
