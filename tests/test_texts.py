"""What somebody else wrote does not command a terminal, and a password goes no further."""

import io

import pytest
from conftest import terminal
from hypothesis import given
from hypothesis import strategies as st

import cpbkit as cpb
from cpbkit.errors import CpbkitError, RunError
from cpbkit.texts import printable, redact, rewrite


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07name", "name"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H", ""),
        ("\x9b31mred", "31mred"),
        ("a\rb\x08c\x00", "abc"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\u202egnp.exe", "gnp.exe"),
        ("BTCUSDT_1h ±2 % – ok", "BTCUSDT_1h ±2 % – ok"),
        ("\x1b]unended", ""),
    ],
)
def test_a_terminal_is_shown_text_and_no_commands(text, shown):
    assert printable(text) == shown


@given(st.text(st.characters(max_codepoint=0x2070), max_size=60))
def test_nothing_that_is_left_can_command(text):
    left = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in left)
    assert printable(left) == left


def test_a_line_that_is_written_over_leaves_nothing_behind_and_stays_in_its_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    rewrite(screen := io.StringIO(), "longer than it")
    rewrite(screen, "short")
    rewrite(screen, "", "\r")
    assert screen.getvalue().split("\r") == ["", "longer t…", "short    ", " " * 9, ""]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://bob:secret@mirror/data/x.zip answered 404", "https://***@mirror/data/x.zip answered 404"),
        ("http://token@h and ftp://a:b@c:21/d", "http://***@h and ftp://***@c:21/d"),
        ("https://mirror/a@b", "https://mirror/a@b"),
        ("me@example.org", "me@example.org"),
    ],
)
def test_a_url_is_kept_without_its_password(text, kept):
    assert redact(text) == kept


def test_every_error_of_the_kit_is_redacted():
    assert str(RunError("no answer from https://bob:secret@mirror")) == "no answer from https://***@mirror"
    assert CpbkitError().args == ()


def test_a_hostile_ledger_commands_no_terminal_and_runs_no_script_in_a_notebook(tmp_path):
    settings = {"context": 8, "horizon": 2, "width": 4, "epochs": 1, "steps": 2, "executor": "local", "quiet": True}
    where = {"source": "synthetic", "symbols": ["BTCUSDT"], "intervals": ["1h"]}
    run = cpb.sweep("quick", folder=tmp_path, start="2025-01-01", end="2025-01-15", **where, **settings)
    line = run.results[0]
    evil, judged = "<script>alert(1)</script>\x1b]0;mine\x07", line.test["price"]
    judged["baselines"][evil] = judged["baselines"][judged["best_baseline"]]
    judged["best_baseline"] = evil
    (tmp_path / "results.jsonl").write_text(line.to_json() + "\n")
    page = cpb.open_run(tmp_path).verdicts()._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page
    shown = terminal("verdict", tmp_path)
    assert shown.exit_code == 0 and "\x1b" not in shown.output
