"""Pages: in a real browser where there is one; self-contained, inert towards what a log holds, and the same for the same log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import estr_diag as ed
from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.report.html import page, tables
from estr_diag.report.html.figures import svg
from estr_diag.report.verdict import with_error
from estr_diag.rules.token_windows import windows
from estr_diag.store.decoding import decode
from tests.browser import CHROMIUM, visit
from tests.logs import make_log, prime_log, store_of
from tests.test_cli import cli

browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

HOSTILE = (
    "<script>window.hit=1</script>", "</script><script>window.hit=2</script>", "<img src=x onerror=window.hit=3>", "' onmouseover='window.hit=4",
    "\u202egnp.exe", "\u200bzero\u2066", "👩‍👩‍👧‍👦", "עברית", "\x1b[31mred\x07", "a\nb\tc", "{{ 7*7 }}", "=cmd|' /C calc'!A0", "&lt;b&gt;", "x" * 100_000,
)  # fmt: skip


def hostile_frame() -> pl.DataFrame:
    rng = np.random.default_rng(1)
    n = 40 * len(HOSTILE)
    seq = np.arange(n) // 40
    infer = -rng.exponential(0.5, n)
    return pl.DataFrame(
        {
            "seq_id": seq, "pos": np.arange(n) % 40, "step": np.repeat([1, 2], n // 2), "loss_mask": np.arange(n) % 7 != 0,
            "logp_infer": infer, "logp_train": infer + rng.normal(0, 0.1, n), "entropy": rng.exponential(0.5, n),
            "policy_version": 3 - (np.arange(n) % 40 < 20), "trainer_version": np.full(n, 3),
            "token_text": [HOSTILE[i % len(HOSTILE)] for i in range(n)], "seq_key": [HOSTILE[s % len(HOSTILE)][:200] for s in seq],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with ed.demo() as log:
        return log.report().save(tmp_path_factory.mktemp("html") / "report.html")


@pytest.fixture(scope="module")
def hostile_pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("hostile")
    with ed.from_frame(hostile_frame()) as log:
        log.source = HOSTILE[0]
        report = log.report().save(folder / "report.html")
        from estr_diag.cli.tokens import write

        write(log, log.tokens(top=30), folder / "tokens.html")
    return [report, folder / "tokens.html"]


def test_a_page_stands_alone(demo_page: Path) -> None:
    text = demo_page.read_text("utf-8")
    assert len(text.encode()) < 3_000_000
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text), "nothing is fetched"
    assert "@import" not in text
    for section in (
        "checks",
        "consistency",
        "steps",
        "lags",
        "scale",
        "law",
        "noise",
        "switches",
        "weights",
        "rules",
        "worst",
    ):
        assert f'<section id="{section}">' in text, section
    assert len(re.findall(r"<figure", text)) == text.count("the numbers</summary>")
    assert text.count("<svg") >= 12
    assert "The same along tau of estr" in text
    assert "126,533 counted" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "every id once"


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    with prime_log() as log:
        first, second = log.report().to_html(), log.report().to_html()
    assert first == second
    with prime_log() as log:
        bins = log.entropy_bins()
    assert svg("a", ed.plots.plot_ratio_scale, bins) == svg("a", ed.plots.plot_ratio_scale, bins)
    assert 'id="b-' in svg("b", ed.plots.plot_ratio_scale, bins)


def test_the_csv_holds_the_numbers(demo_page: Path) -> None:
    import base64

    found = re.search(r'download="noise_share.csv" href="data:text/csv;base64,([^"]+)"', demo_page.read_text("utf-8"))
    assert found
    frame = pl.read_csv(base64.b64decode(found[1]))
    with ed.demo() as log:
        rows = log.noise_share().rows()
    assert frame["noise_share"].to_list() == pytest.approx([r["noise_share"] for r in rows], rel=1e-9)


@browser
@pytest.mark.parametrize("width", [390, 900, 1600])
def test_a_report_in_a_browser(demo_page: Path, width: int) -> None:
    script = """(() => {
        const rows = () => [...document.querySelectorAll('#metrics tbody tr')].map((r) => Number(r.cells[1].dataset.v));
        const head = document.querySelectorAll('#metrics th button')[1];
        head.click(); const down = rows(); head.click(); const up = rows();
        const say = () => document.querySelector('#ui-window').textContent;
        const all = say(), from = document.querySelector('#ui-from');
        from.value = 100; from.dispatchEvent(new Event('input'));
        const some = say(), shown = [...document.querySelectorAll('#by-step tbody tr')].filter((r) => !r.hidden).length;
        const cells = () => document.querySelectorAll('#ui-breakdown tbody tr').length;
        const by = document.querySelector('#ui-by'), bins = cells();
        by.value = 'lag'; by.dispatchEvent(new Event('input'));
        const spans = [...document.querySelectorAll('.t')];
        const coloured = spans.filter((s) => s.style.backgroundColor).length;
        const colour = document.querySelector('#ui-colour');
        colour.value = 'rule:1'; colour.dispatchEvent(new Event('input'));
        const masked = document.querySelectorAll('.t.masked').length;
        const spot = document.querySelector('.t.spot').getBoundingClientRect();
        document.querySelector('.t.spot').dispatchEvent(new PointerEvent('pointerover', { bubbles: true, clientX: 5, clientY: 5 }));
        const wide = document.documentElement.scrollWidth <= innerWidth;
        return { down, up, all, some, shown, bins, lags: cells(), coloured, masked, tip: document.querySelector('#tip').textContent, wide };
    })()"""
    seen = visit(demo_page, script, width=width)
    assert seen.console == []
    assert seen.requests == []
    found = seen.answer
    assert found["down"] == sorted(found["down"], reverse=True)
    assert found["up"] == sorted(found["up"])
    assert found["all"].startswith("steps 0 to 119: 120 steps, 126,533 tokens")
    assert found["some"].startswith("steps 100 to 119: 20 steps")
    assert found["shown"] == 20
    assert (found["bins"], found["lags"]) == (24, 5)
    assert found["coloured"] > 10
    assert found["masked"] > 0
    assert "delta " in found["tip"]
    assert "entropy " in found["tip"]
    assert found["wide"], "tables scroll, the page does not"


@browser
def test_what_a_log_holds_is_inert(hostile_pages: list[Path]) -> None:
    script = "({ hit: window.hit || 0, texts: [...document.querySelectorAll('.t')].slice(0, 400).map((s) => s.textContent), images: document.images.length, scripts: document.scripts.length })"
    for path in hostile_pages:
        assert path.stat().st_size < 3_000_000
        seen = visit(path, script)
        assert seen.console == []
        assert seen.requests == []
        assert seen.answer["hit"] == 0
        assert seen.answer["images"] == 0
        assert seen.answer["scripts"] <= 5, "ours"
        shown = set(seen.answer["texts"])
        assert "<script>window.hit=1</script>" in shown, "as text"
        assert "{{ 7*7 }}" in shown
        assert "\\u202egnp.exe" in shown, "a direction mark shows as what it is"
        assert "\\x1b[31mred\\x07" in shown
        assert any("100,000 characters" in t for t in shown)


def test_text_of_a_log() -> None:
    assert page.text("a\u202eb") == "a\\u202eb"
    assert page.text("\ud800") == "\\ud800", "a lone surrogate cannot be written as UTF-8"
    assert page.text("x" * 10, 4) == "xxxx… (10 characters)"
    assert "</script" not in page.data({"a": "</script><script>"})
    with pytest.raises(ValueError, match="JSON"):
        page.data(float("nan"))
    formula = tables.of_result(ed.from_frame(hostile_frame()).sql("select '=1+1' as a, 2.5 as b, [1] as nested"))
    assert formula.headers == ("a", "b")
    import base64

    assert base64.b64decode(formula.csv.split(",")[1]).decode() == "a,b\n'=1+1,2.5\n"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    log = make_log(2)
    for name in ("entropy", "policy_version", "trainer_version"):
        del log[name]
    frame = {k: list(np.ma.filled(v, None)) if isinstance(v, np.ma.MaskedArray) else list(v) for k, v in log.items()}
    with ed.from_frame(pl.DataFrame(frame, strict=False)) as opened:
        text = opened.report().save(tmp_path / "r.html").read_text("utf-8")
    assert "Not computed" in text
    assert "this log has no entropy" in text
    assert "not computed" in text
    assert '<section id="scale">' not in text


def test_a_page_after_the_log_is_closed_says_so() -> None:
    with prime_log() as log:
        report = log.report()
    assert "the log was closed before the page was written" in report.to_html()


def test_windows_hold_the_tokens_numbers() -> None:
    with prime_log() as log:
        listed = log.tokens(top=6)
        rules = [ed.rules.kpop(), ed.rules.estr(tau=0.01)]
        found = windows(log.store, listed, rules, sequences=3, width=5)
        rows: list[dict[str, Any]] = log.sql(
            "select seq_id, pos, logp_train - logp_infer as delta, loss_mask from tokens"
        ).rows()
        kept = {(r["seq_id"], r["pos"]) for r in log.tokens("kpop", top=10_000, context=0).rows()}
    assert 0 < len(found) <= 3
    delta = {(r["seq_id"], r["pos"]): r for r in rows}
    for window in found:
        assert len(window.tokens) <= 11
        assert sum(t.listed for t in window.tokens) >= 1
        for token in window.tokens:
            row = delta[window.seq_id, token.pos]
            if token.counted:
                assert token.values["delta"] == pytest.approx(row["delta"], rel=1e-6, abs=1e-9)
                assert token.decisions[rules[0].label] == ((window.seq_id, token.pos) in kept)
            else:
                assert token.decisions == {}


def test_the_commands_write_pages(tmp_path: Path) -> None:
    folder = str(Path(__file__).parent / "data" / "prime-rl-run")
    done = cli("tokens", folder, "--top", "5", "-o", tmp_path / "t.html")
    assert done.returncode == 0, done.stderr
    assert "t.html" in done.stderr
    assert 'class="t' in (tmp_path / "t.html").read_text("utf-8")
    refused = cli("tokens", folder, "-o", tmp_path / "t.pdf")
    assert refused.returncode == 2
    assert ".html" in refused.stderr
    assert cli("report", folder, "-o", tmp_path / "r.html").returncode == 0
    assert "<!doctype html>" in (tmp_path / "r.html").read_text("utf-8")


def test_texts_from_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(200_000)} | {"?": 200_000}, unk_token="?")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    with prime_log() as log:
        before = log.tokens(top=1).rows()[0]
        log.decode(path)
        after = log.tokens(top=1).rows()[0]
        assert before["token"] == f"<{before['token_id']}>"
        assert after["token"] == f"w{after['token_id']}"
        with pytest.raises(UsageError, match="no such file"):
            log.decode(tmp_path / "none.json")
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(UsageError, match="not a tokenizer"):
            log.decode(tmp_path / "bad.json")
    log_without = make_log(1)
    log_without.pop("token_id", None)
    with store_of(log_without) as store, pytest.raises(MissingColumnError, match="token_id"):
        decode(store, path)


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (0.0454, 0.0054, "0.0454 ± 0.0054"), (4.19e-10, 1.2e-11, "(4.19 ± 0.12)e-10"), (0.00009, 0.000051, "(9.0 ± 5.1)e-5"),
        (1.000706, 0.000054, "1.000706 ± 0.000054"), (2.5e7, 1e5, "(2.500 ± 0.010)e7"), (None, None, "–"), (3.0, None, "3"),
    ],
)  # fmt: skip
def test_values_with_errors(value: float | None, se: float | None, text: str) -> None:
    assert with_error({"value": value, "se": se}) == text


def test_a_notebook_shows_logs_comparisons_and_reports_safely() -> None:
    with ed.from_frame(hostile_frame()) as log:
        log.source = HOSTILE[1]
        shown = [
            log._repr_html_(),
            log.compare()._repr_html_(),
            log.report()._repr_html_(),
            log.consistency()._repr_html_(),
        ]
    for text in shown:
        assert "<script" not in text
        assert "<table" in text
    assert "logp_infer" in shown[0]
    assert "kept_share" in shown[1]
    assert "effective share" in shown[2]
