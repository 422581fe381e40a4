"""The views of a running sweep: what they show, how often, and where."""

import base64
import io
import re
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import IPython
import pytest
from test_views import EXPERIMENT, made_up_monitor, made_up_results

from cpbkit.api import Retraining
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.load import load_klines
from cpbkit.errors import UnknownName, stoppable
from cpbkit.evaluation.results import Running
from cpbkit.quantities import Standing
from cpbkit.views.controls import Controls
from cpbkit.views.live import Countdown, Notebook, Terminal, browse, in_notebook, live, sentence
from cpbkit.views.loss import loss_figure
from cpbkit.views.panels import SweepPicture


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

    def standing(self):
        return Standing(**{name: getattr(self, name) for name in vars(Standing())})


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


def test_a_line_that_stays_covers_the_one_that_changes_and_no_more(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    view = Terminal(screen, Clock())
    view(State(stage="training, " + "a long reason " * 9))
    view.keep("[1/40] BTCUSDT_1h done")
    first, kept, again = re.split("[\r\n]+", screen.getvalue().lstrip("\r"))
    assert len(first) == len(kept) == 79 and kept.rstrip() == "[1/40] BTCUSDT_1h done" and again == first


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
    assert len(worded) == 1  # a line in ten seconds


def test_the_last_line_of_a_sweep_that_ends_early_counts_what_came_right_before():
    screen, state = Screen(), State(results=made_up_results()[20:21])
    view = Terminal(screen, Clock())
    view(state)
    state.results.append(made_up_results()[21])
    view(state)  # too early for another line
    view.__exit__()
    assert "2 of 40 done" in screen.getvalue().split("\r")[-1]


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


@dataclass
class Kernel:
    """What a kernel offers to a view, and the displays that its page would have: (time, bundle) of each state."""

    displays: list = field(default_factory=list)
    after_cell: list = field(default_factory=list)
    kernel = "a kernel"

    @property
    def events(self):
        return SimpleNamespace(
            register=lambda event, function: self.after_cell.append((event, function)),
            unregister=lambda event, function: self.after_cell.remove((event, function)),
        )

    def display(self, bundle, raw, display_id):
        assert raw and display_id
        states = [(time.monotonic(), bundle)]
        self.displays.append(states)
        return SimpleNamespace(update=lambda bundle, raw: states.append((time.monotonic(), bundle)))

    def end_cell(self):
        for event, function in list(self.after_cell):
            assert event == "post_run_cell"
            function(None)

    def said(self):
        return [bundle["text/plain"] for _, bundle in self.displays[0]]

    def drawn(self):
        return [bundle["text/html"] for _, bundle in self.displays[1]]


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr("IPython.display.display", kernel.display)
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    yield kernel
    kernel.end_cell()  # which ends the thread of a view that is still open


def test_a_notebook_shows_a_line_and_a_picture(kernel):
    clock, results, monitor = Clock(), made_up_results(), made_up_monitor(gpu=False)
    view = Notebook(EXPERIMENT, "first", clock)
    assert not kernel.displays  # a run that goes on must not begin with "0 done"
    view(State(results=results[:30], monitor=monitor))
    same = SweepPicture(EXPERIMENT.series, "quick  ·  40 series  ·  first", EXPERIMENT.training.epochs, synthetic=True)
    assert kernel.drawn() == [same.html(results[:30], {}, monitor, 112.0)]
    assert kernel.said() == [
        "30 of 40 done  ·  30 %  ·  1 m 52 s left  ·  11.8 k samples/s  ·  0 s elapsed  ·  training, epoch 3"
    ]
    assert 'style="width:30.0%"' in kernel.displays[0][0][1]["text/html"]
    clock.now += 61
    for _ in range(3):
        view(State(results=results, share=1.0))
    assert kernel.said()[1:] == ["40 of 40 done  ·  100 %  ·  1 m 01 s elapsed"]  # once, however often it is told
    assert kernel.drawn()[1:] == [same.html(results)] and not kernel.after_cell


def test_a_notebook_goes_on_while_nothing_is_heard(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    clock = Clock()
    view = Notebook(EXPERIMENT, clock=clock)
    view(State())
    clock.now += 75
    wait_until(lambda: "nothing new for 1 m 15 s" in kernel.said()[-1])
    assert kernel.said()[-1].startswith("0 of 40 done  ·  30 %  ·  37 s left  ·  11.8 k samples/s  ·  1 m 15 s elapsed")


def test_a_notebook_whose_cell_ends_early_says_so(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    view = Notebook(EXPERIMENT)
    view(State(results=made_up_results()[:3]))
    view(State(results=made_up_results()[:4]))
    kernel.end_cell()
    assert "4 of 40 done" in kernel.said()[-1]
    assert kernel.said()[-1].endswith("stopped here; the same cell goes on from what is done")
    count = len(kernel.said())
    assert kernel.drawn()[-1].count("cpb-waiting") - kernel.drawn()[-1].count("cpb-waiting b") == 36
    time.sleep(0.2)
    view(State(results=made_up_results()[:5]))
    assert len(kernel.said()) == count  # the thread is gone


def test_a_notebook_whose_cell_ends_before_any_training_shows_nothing(kernel):
    """As after a name that is not known: a view of epochs that never were reads as a run that stopped."""
    view = Notebook(EXPERIMENT)
    view(State(share=0.0, seconds_left=None))
    assert "stopped here" not in kernel.said()[-1] and "waiting" in kernel.drawn()[0]
    kernel.end_cell()
    assert [states[-1][1] for states in kernel.displays] == [{"text/plain": ""}, {"text/plain": ""}]


def test_line_and_picture_of_a_notebook_count_the_same(kernel, monkeypatch):
    """Five models that end at once, between two pictures and within a fifth of a second of the word before."""
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    view = Notebook(EXPERIMENT, clock=Clock())
    view(State(results=made_up_results()[:3], share=0.1))
    view(State(results=made_up_results()[:8], share=0.25))
    wait_until(lambda: kernel.said()[-1].startswith("8 of 40 done  ·  25 %"))
    wait_until(lambda: "  ·  32 waiting" in kernel.drawn()[-1])
    time.sleep(0.2)
    assert len(kernel.drawn()) == 2  # and no more than that: nothing else has changed


def test_the_time_left_of_a_notebook_counts_from_when_it_was_estimated(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    monkeypatch.setattr("cpbkit.views.live.LINE_PERIOD", 60.0)
    clock = Clock()
    view = Notebook(EXPERIMENT, clock=clock)
    view(State())
    clock.now += 50
    view(State(seconds_left=30.0))  # too early for another estimate
    wait_until(lambda: "  ·  1 m 02 s left" in kernel.said()[-1])


def test_a_state_is_not_read_while_the_sweep_changes_it(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    monkeypatch.setattr("cpbkit.views.live.PERIOD", 0.0)
    monkeypatch.setattr("cpbkit.views.live.SHARE", 10.0)
    state, view = State(results=made_up_results()[:3]), Notebook(EXPERIMENT)
    view(state)
    state.results.append("no line of a ledger")
    wait_until(lambda: len(kernel.drawn()) > 3)
    assert all("3 done" in html for html in kernel.drawn())


@pytest.mark.parametrize(("cost", "least", "most"), [(0.02, 1, 2), (0.0, 10, 75)])
def test_the_picture_takes_its_share_of_the_time_at_most(kernel, monkeypatch, cost, least, most):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.01)
    monkeypatch.setattr("cpbkit.views.live.PERIOD", 0.02)
    view = Notebook(EXPERIMENT)

    def burn(*state):
        begun = time.thread_time()
        while time.thread_time() < begun + cost:
            pass
        return ""

    monkeypatch.setattr(view.picture, "html", burn)
    view(State())
    time.sleep(1.5)
    kernel.end_cell()
    assert least <= len(kernel.drawn()) - 2 <= most  # but the first and the last: 0.02 s may be spent in 2 s


def test_a_notebook_has_buttons_while_it_runs(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    monkeypatch.setattr("cpbkit.views.live.PERIOD", 0.0)
    monkeypatch.setattr("cpbkit.views.live.SHARE", 10.0)
    asked, running = [], made_up_results()[:2]
    view = Notebook(EXPERIMENT, stop=lambda *series, after_epoch=False: asked.append((series, after_epoch)))
    view(State(running={line.series: Running(line.curve, line.persistence) for line in running}))
    every, menu, one, pause = view._controls._box.children
    assert list(menu.options) == [line.series for line in running]
    every.click()
    menu.value = running[1].series
    one.click()
    assert asked == [((), True), ((running[1].series,), False)]
    controls, line, picture = kernel.displays
    wait_until(lambda: f"{running[1].series} ends with this epoch" in line[-1][1]["text/plain"])
    pause.value = True
    wait_until(lambda: len(line) % 10 == 0)  # a beat that had begun to draw is over
    drawn, said = len(picture), len(line)
    wait_until(lambda: len(line) > said + 5)
    assert len(picture) == drawn
    kernel.end_cell()
    assert len(picture) == drawn + 1 and controls[-1][1] == {"text/plain": ""}


def test_the_menu_has_a_name_and_chooses_nothing_by_itself(kernel):
    asked = []
    controls = Controls(lambda *series, after_epoch=False: asked.append(series), ())
    _, menu, one, _ = controls._box.children
    assert menu.description == "model" and menu.disabled and one.disabled
    controls.offer(["BTCUSDT_1h", "ETHUSDT_1h"])
    assert not (menu.disabled or one.disabled) and menu.value is None
    one.click()
    assert controls.asked == "no model is chosen: the menu names those that train" and not asked
    menu.value = "ETHUSDT_1h"
    controls.offer(["ETHUSDT_1h", "BNBUSDT_1h"])
    assert menu.value == "ETHUSDT_1h"
    controls.offer(["BNBUSDT_1h"])
    assert menu.value is None, "a press would end another one than was meant"
    controls.offer([])
    assert menu.disabled and one.disabled


def run_three(clock, **given):
    with Countdown("auditing BTC: training", 3, clock=clock, **given) as begin:
        for name in ("", "", "one batch"):
            begin(name)
            clock.now += 4


def test_a_countdown_says_what_is_at_work_and_the_time_left():
    said = []
    run_three(Clock(), tell=said.append)
    assert said == [
        "auditing BTC: training 1 of 3, 0 s elapsed",
        "auditing BTC: training 2 of 3, 8 s left, 4 s elapsed",
        "auditing BTC: training 3 of 3: one batch, 4 s left, 8 s elapsed",
        "auditing BTC: training 3 of 3, done, 12 s elapsed",
    ]


def test_a_countdown_goes_on_while_one_lasts(monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.BEAT", 0.02)
    said, clock = [], Clock()
    with pytest.raises(ZeroDivisionError), Countdown("loop", 3, said.append, clock) as begin:
        for _ in range(2):
            begin()
            clock.now += 4
        wait_until(lambda: said[-1] == "loop 2 of 3, 4 s left, 8 s elapsed")
        clock.now += 5  # more than was expected: then there is no time left to tell
        wait_until(lambda: said[-1] == "loop 2 of 3, 13 s elapsed")
        raise ZeroDivisionError
    assert said[-1] == "loop 2 of 3, stopped, 13 s elapsed"
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count  # the thread is gone


def test_a_countdown_fits_the_place(kernel, monkeypatch, capsys):
    monkeypatch.setattr("cpbkit.views.live.in_notebook", lambda: False)
    run_three(Clock())
    assert capsys.readouterr() == ("", "") and not kernel.displays  # a file keeps none of it
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    run_three(Clock())
    *before, last = screen.getvalue().split("\r")
    assert len(before) == 4 and last == "auditing BTC: training 3 of 3, done, 12 s elapsed".ljust(59) + "\n"
    monkeypatch.setattr("cpbkit.views.live.in_notebook", lambda: True)
    run_three(Clock())
    assert kernel.said()[2] == "auditing BTC: training 2 of 3  ·  8 s left  ·  4 s elapsed"
    assert 'style="width:100.0%"' in kernel.displays[0][-1][1]["text/html"]


def test_each_question_of_a_retraining_says_how_far_it_is(kernel, monkeypatch):
    monkeypatch.setattr("cpbkit.views.live.in_notebook", lambda: True)
    days = {"source": "synthetic", "start": "2025-01-01", "end": "2025-03-31"}
    one = vary(PRESETS["ridge_ar"], **days, symbols=("BTCUSDT",), intervals=("1h",), context=8, horizon=2)
    again = Retraining("BTCUSDT_1h", one, load_klines(one)["BTCUSDT_1h"])
    again.audit(placebos=2)
    again.plot()
    again.seeds(count=2, refits=2)
    for states, what, total in zip(kernel.displays, ("auditing ", "", ""), (9, 1, 4), strict=True):
        said = [bundle["text/plain"] for _, bundle in states]
        assert said[0] == f"{what}BTCUSDT_1h: training"
        assert said[-1].startswith(f"{what}BTCUSDT_1h: training {total} of {total}  ·  done  ·  ")
        assert all(any(f"training {n} of {total}" in line for line in said) for n in range(1, total + 1))


def test_an_interrupt_is_one_line_in_a_notebook_and_an_interrupt_elsewhere():
    with pytest.raises(KeyboardInterrupt, match=r"^stopped; go on$") as told, stoppable("go on"):
        raise KeyboardInterrupt
    assert type(told.value) is KeyboardInterrupt  # by which Python ends a program as the shell expects
    assert told.value._render_traceback_() == ["stopped; go on"]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_view_fits_the_place(monkeypatch):
    assert not in_notebook() and isinstance(live(EXPERIMENT), Terminal)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert in_notebook() and isinstance(live(EXPERIMENT, "first"), Notebook)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())  # the terminal's shell has no page
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_browsing_shows_the_model_that_is_chosen():
    results = made_up_results()[:3]
    shown = browse(results, series=results[1].series)
    menu, image = shown.box.children
    assert [name for _, name in menu.options] == [line.series for line in results]
    assert image.value == loss_figure(results[1]).png()
    menu.value = results[2].series
    assert image.value == loss_figure(results[2]).png()
    assert browse(results).box.children[0].value == results[0].series
    bundle, about = shown._repr_mimebundle_()  # where widgets do not live, the picture stands
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG") and "persistence" in about["image/png"]["alt"]
    with pytest.raises(UnknownName, match="series must be a known name; got 'BTC'"):
        browse(results, "BTC")
