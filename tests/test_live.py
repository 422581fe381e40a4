"""The views of a running sweep: what they show, how often, and where."""

import io
import re
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import IPython
import pytest
from test_views import EXPERIMENT, made_up_monitor, made_up_results, pixels

from cpbkit.errors import UnknownName
from cpbkit.views.live import Notebook, Terminal, browse, in_notebook, live, sentence
from cpbkit.views.loss import SweepFigure, loss_figure


@dataclass
class State:
    results: list = field(default_factory=list)
    running: dict = field(default_factory=dict)
    stage: str = "training, epoch 3"
    total: int = 40
    seconds_left: float | None = 112.0
    at_most: bool = False
    samples_per_second: float = 11_800.0
    share: float = 0.3
    monitor: object = None
    experiment = EXPERIMENT

    @property
    def done(self):
        return len(self.results)


class Clock:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_the_sentence_says_what_a_person_wants_to_know():
    said = sentence(State(results=made_up_results()[20:28]))
    assert said == "[###.......]  8 of 40 done  30 %  1 m 52 s left  11.8 k samples/s  1 sick  1 failed"
    over = sentence(State(results=made_up_results(), share=1.0))
    assert over == f"[{'#' * 10}]  40 of 40 done  100 %  1 sick  1 failed"
    assert sentence(State(seconds_left=None, samples_per_second=0.0)) == "[###.......]  0 of 40 done  30 %"
    assert "  at most 1 m 52 s left  " in sentence(State(at_most=True))


def test_a_terminal_has_one_line_that_changes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "75")
    screen, clock = Screen(), Clock()
    view = Terminal(screen, clock)
    for _ in range(100):
        view(State())
        clock.now += 0.01
    shown = screen.getvalue().split("\r")[1:]
    assert len(shown) == 5 and "\n" not in screen.getvalue()  # a second of calls, one in 0.2 s
    assert all(len(line) == 74 for line in shown)
    assert shown[0].endswith("11.8 k samples/s  traini…")
    view(State(results=made_up_results()))
    view(State(results=made_up_results()))
    assert screen.getvalue().count("40 of 40 done") == 1 and screen.getvalue().endswith("\n")


def test_a_new_stage_is_shown_at_once_since_it_may_last(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    screen, clock = Screen(), Clock()
    view = Terminal(screen, clock)
    for stage in ("getting bars: 1 of 9 files", "getting bars: 2 of 9 files", "timing a few steps"):
        view(State(stage=stage))
    shown = screen.getvalue()
    assert "1 of 9" in shown and "2 of 9" not in shown and "timing a few steps" in shown


def test_where_it_stood_when_it_was_stopped_is_written():
    kept, clock = io.StringIO(), Clock()
    with pytest.raises(KeyboardInterrupt), Terminal(kept, clock) as view:
        view(State(share=0.1))
        clock.now += 1
        view(State(share=0.2))  # too early for a line of its own
        raise KeyboardInterrupt
    assert [line.split("  ")[2] for line in kept.getvalue().splitlines()] == ["10 %", "20 %"]


def test_a_terminal_does_not_word_what_nobody_will_read(monkeypatch):
    worded = []
    monkeypatch.setattr("cpbkit.views.live.sentence", lambda state: worded.append(state) or "a sentence")
    clock = Clock()
    view = Terminal(io.StringIO(), clock)
    for _ in range(1000):
        view(State())
        clock.now += 0.01
    assert 40 <= len(worded) <= 51  # ten seconds, one in 0.2 s


def test_where_lines_are_kept_there_is_one_in_ten_seconds():
    kept, clock = io.StringIO(), Clock()
    view = Terminal(kept, clock)
    for _ in range(250):
        view(State())
        clock.now += 0.1
    view(State(results=made_up_results()))
    lines = kept.getvalue().splitlines()
    assert len(lines) == 4 and "\r" not in kept.getvalue()
    assert "0 of 40 done" in lines[2] and "40 of 40 done" in lines[3]


def test_a_terminal_speaks_up_when_the_sweep_is_silent(monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.SILENCE", 0.0)
    monkeypatch.setattr("cpbkit.views.live.LOG_PERIOD", 0.0)
    kept = io.StringIO()
    with Terminal(kept) as view:
        view(State())
        deadline = time.monotonic() + 30
        while "at it for" not in kept.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert re.search(r"0 of 40 done  30 %.*  at it for \d+ s  training, epoch 3\n", kept.getvalue())


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_a_terminal_leaves_a_line_to_what_follows(said, done):
    screen = Screen()
    with pytest.raises(ZeroDivisionError), Terminal(screen) as view:
        if said:
            view(State(results=made_up_results() if done else []))
        raise ZeroDivisionError
    assert screen.getvalue().count("\n") == said and screen.getvalue().endswith("\n" if said else "")
    kept = io.StringIO()
    with Terminal(kept) as view:
        view(State())
    assert kept.getvalue().count("\n") == 1


def test_two_threads_never_write_at_once(monkeypatch):
    """The stream takes its time, so a second writer would come while the first is in it."""

    class Slow(io.StringIO):
        inside, worst = 0, 0

        def write(self, text):
            self.inside += 1
            self.worst = max(self.worst, self.inside)
            time.sleep(0.3)
            self.inside -= 1

    monkeypatch.setattr("cpbkit.views.live.SILENCE", 0.0)
    monkeypatch.setattr("cpbkit.views.live.LOG_PERIOD", 0.0)
    stream = Slow()
    with Terminal(stream) as view:
        begun = time.monotonic()
        while time.monotonic() < begun + 2.5:
            view(State())
    assert stream.worst == 1


@pytest.fixture
def shown(monkeypatch):
    """What a notebook's page would show: the pictures of each display, in order."""
    pages = []

    def display(image, display_id):
        pages.append([image.data])
        return SimpleNamespace(update=lambda image: pages[-1].append(image.data))

    monkeypatch.setattr("IPython.display.display", display)
    return pages


def test_a_notebook_shows_the_state_in_one_picture(shown, tmp_path):
    clock, results, monitor = Clock(), made_up_results(), made_up_monitor(gpu=False)
    view = Notebook(EXPERIMENT, "first", clock)
    clock.now += 1000
    state = State(results=results[:30], monitor=monitor)
    view(state)
    same = SweepFigure(EXPERIMENT.series, "quick  ·  40 series  ·  first", EXPERIMENT.training.epochs, synthetic=True)
    (pictures,) = shown
    assert len(pictures) == 2
    assert (pixels(pictures[0], tmp_path) == pixels(same.png(), tmp_path)).all()
    same.show(state.results, {}, monitor, state.stage, state.seconds_left, False, state.samples_per_second)
    assert (pixels(pictures[1], tmp_path) == pixels(same.png(), tmp_path)).all()


def test_the_live_view_takes_a_hundredth_of_the_time_at_most(shown, monkeypatch):
    clock = Clock()
    view = Notebook(EXPERIMENT, clock=clock)
    cost, times = 0.08, []

    def draw():
        clock.now += cost
        times.append(clock.now)
        return b""

    monkeypatch.setattr(view.picture, "show", lambda *state: None)
    monkeypatch.setattr(view.picture, "png", draw)
    begun = clock.now
    while clock.now < begun + 300:
        view(State())
        clock.now += 0.01
    for n, moment in enumerate(times, start=1):
        assert n * cost <= 0.01 * (moment - begun) + cost
    assert 0.009 * 300 <= len(times) * cost <= 0.01 * 300 + cost  # and what may be spent is spent
    cost = 1e-6
    clock.now, before = clock.now + 1000, len(times)
    begun = clock.now
    while clock.now < begun + 30:
        view(State())
        clock.now += 0.01
    assert 19 <= len(times) - before <= 21  # a fast machine: one in 1.5 s, not more


def test_the_last_state_is_drawn_once_whatever_it_costs(shown):
    clock = Clock()
    view = Notebook(EXPERIMENT, clock=clock)
    for _ in range(3):
        view(State(results=made_up_results()))
    assert len(shown[0]) == 2 and view.picture.counts.get_text() == "38 done  ·  1 sick  ·  1 failed"


def test_the_view_fits_the_place(monkeypatch, shown):
    assert not in_notebook() and isinstance(live(EXPERIMENT), Terminal)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert in_notebook() and isinstance(live(EXPERIMENT, "first"), Notebook)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())  # the terminal's shell has no page
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_browsing_shows_the_model_that_is_chosen():
    results = made_up_results()[:3]
    menu, image = browse(results, series=results[1]["series"]).children
    assert [name for _, name in menu.options] == [line["series"] for line in results]
    assert image.value == loss_figure(results[1]).png()
    menu.value = results[2]["series"]
    assert image.value == loss_figure(results[2]).png()
    assert browse(results).children[0].value == results[0]["series"]
    with pytest.raises(UnknownName, match="series must be a known name; got 'BTC'"):
        browse(results, "BTC")
