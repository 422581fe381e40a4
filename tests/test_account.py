"""What a sweep tells line by line, as it stands in a terminal or a file."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_live import Clock, Screen
from test_views import made_up_results

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation.results import ResultLine, Running
from cpbkit.runs.plan import Plan
from cpbkit.runs.progress import State
from cpbkit.views.account import Account, ending, opening
from cpbkit.views.live import Terminal

EXPERIMENT = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-03-31")
LINE = ResultLine("ADAUSDT_15m", "done", "all", best_epoch=6, epochs=12, seconds=40.6)


def new_state(**given):
    plan = Plan([["A"]], 24, 12, 5, ["cpu"], 200.0, "stacks of 8 on 2 process(es)")
    windows = {"train": (900, 1476), "validation": (267, 267), "test": (285, 285)}
    return State(EXPERIMENT, 40, plan=plan, parameters=2529, windows=windows, **given)


def told(ends=(), *, verbose=False, screen=None, **given):
    out = screen or io.StringIO()
    account, state = Account(Terminal(out, Clock()), verbose), new_state(**given)
    account(state)
    for line in ends:
        state.add(line)
        account(state)
    return out.getvalue()


def test_the_end_of_a_model_is_one_line():
    assert ending(LINE, 7, 40, "-0.1 % TIES") == ("[7/40] ADAUSDT_15m done: best epoch 6 of 12, -0.1 % TIES, 41 s")
    trials = [{"learning_rate": rate, "validation": loss} for rate, loss in ((0.003, 0.9), (0.01, 0.95))]
    searched = replace(LINE, search=trials)
    assert "best epoch 6 of 12, learning_rate 0.003, -0.1 % TIES" in ending(searched, 7, 40, "-0.1 % TIES")
    lost = replace(LINE, status="failed", reason="no bar is left")
    assert ending(lost, 8, 40, "") == "[8/40] ADAUSDT_15m failed: no bar is left"


def test_before_the_training_a_person_hears_what_is_trained_on_what_and_how_long():
    settings, data, models, plan, time = opening(state := new_state(), state.plan)
    assert "quick, gru of width 16; 32 bars of 4 channels in, 4 of close out; batch 64, adamw 0.003" in settings
    assert "40 series of the seeded market, 2025-01-01 to 2025-03-31" in data
    assert "900 to 1,476 train, 267 validation, 285 test" in data
    assert models == "Models: 2,529 parameters each; at most 12 epochs of 24 steps, or 5 without a better one"
    assert plan == "Plan: stacks of 8 on 2 process(es)" and "about 3 m 20 s" in time


def test_each_model_is_told_once_as_it_ends_with_its_skill_and_word():
    results = made_up_results()[:3]
    lines = [line for line in told(results).splitlines() if line.startswith("[") and "/40]" in line]
    assert [line.split()[0] for line in lines] == ["[1/40]", "[2/40]", "[3/40]"]
    for line, result in zip(lines, results, strict=True):
        skill = next(iter(result.test.values()))["skill"]
        assert result.series in line and f"{100 * skill:+.1f} % " in line
        assert any(word in line for word in ("BEATS", "TIES", "LOSES", "TOO FEW"))


def test_what_an_earlier_start_has_done_is_not_told_again():
    first, second = made_up_results()[:2]
    text = told([second], results=[first], ended={first.series})
    assert "[2/40]" in text and "[1/40]" not in text and first.series not in text


def test_the_lines_stay_above_the_one_that_changes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = told(made_up_results()[:1], screen=Screen())
    *stay, last = [line.split("\r")[-1] for line in shown.split("\n")]
    assert any(line.startswith("[1/40]") for line in stay) and "of 40 done" in last
    assert not any("of 40 done" in line for line in stay)


@pytest.mark.parametrize("verbose", [True, False])
def test_losses_are_told_every_few_epochs_when_asked_for(verbose):
    account = Account(Terminal(out := io.StringIO(), Clock()), verbose)
    for epoch in range(1, 13):
        curve = {"train": [0.5] * epoch, "validation": [0.8] * epoch}
        one = Running(curve, {"train": 1.0, "validation": 1.6}, epoch / 12)
        account(new_state(running={"A": one, "B": one}, watch=SimpleNamespace(frame=lambda: None)))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert len(lines) == (12 if verbose else 0)
    if verbose:
        assert lines[3] == "epoch 4 of 12: train 0.5000, validation 0.5000, median of 2 models; persistence is 1"
