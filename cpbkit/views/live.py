"""Watch a sweep: a picture that changes in place in a notebook, one line in a terminal.

Interrupting the kernel (or Ctrl-C) stops a sweep anywhere, and the same command goes on from there; a page that has
widgets shows buttons too.
"""

import base64
import contextvars
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from cpbkit.config.experiment import Experiment
from cpbkit.errors import check_name
from cpbkit.evaluation.results import ResultLine, Running
from cpbkit.hardware.environment import in_notebook
from cpbkit.quantities import Standing, duration
from cpbkit.texts import rewrite, width_of
from cpbkit.views.controls import WIDGET, Controls, Stop, hear
from cpbkit.views.loss import loss_figure
from cpbkit.views.page import status_line
from cpbkit.views.panels import SweepPicture, tally
from cpbkit.views.style import Picture, label

if TYPE_CHECKING:  # it loads torch, which a view does not need
    from cpbkit.runs.progress import State

SHARE = 0.01  # of one core's time that the live picture may take
BEAT = 1.0  # s between two states of a notebook's line
PERIOD = 2.0  # s between two pictures at the least
LINE_PERIOD = 0.2  # s between two states of a terminal's line
BAR = 10  # marks of the bar: with all that matters behind it, it fits 80 columns
LOG_PERIOD = 10.0  # s between two lines where they are kept, as in a file
SILENCE = 3.0  # s without a word after which a terminal is told that the work goes on
View = Callable[["State"], None]


def live(experiment: Experiment, name: str = "", stop: Stop | None = None) -> View:
    """Return the view for where this runs, to be given to a sweep as `on_progress`; `name` is the run's.

    stop: what buttons call, as `Run.stop`; without it there are none.
    """
    return Notebook(experiment, name, stop=stop) if in_notebook() else Terminal()


class Notebook:
    """The sweep as a line that changes every second and a picture that follows it, both replaced in place.

    A thread draws them, so that they go on while the sweep has nothing to say. It ends with the cell: what an
    interrupt or an error leaves behind says that it stopped.
    """

    def __init__(
        self,
        experiment: Experiment,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        stop: Stop | None = None,
    ):
        title = "  ·  ".join(filter(None, (experiment.preset, f"{len(experiment.series)} series", name)))
        made_up = experiment.data.source == "synthetic"
        self.picture = SweepPicture(experiment.series, title, experiment.training.epochs, made_up)
        self._clock, self._lock, self._over = clock, threading.Lock(), threading.Event()
        # What was last heard of the sweep, which goes on while this is drawn.
        self._results: list[ResultLine] = []
        self._running: dict[str, Running] = {}
        self._stage, self._standing, self._opened = "", Standing(), False
        self._begun = self._heard = self._worded = self._drawn = clock()
        self._cost, self._drawn_results = 0.0, 0  # of the last picture: s of a core, models that were through
        self._take_monitor: Callable[[], Any] = lambda: None
        self._stop = stop
        self._controls: Controls | None = None

    def __call__(self, state: "State") -> None:
        """Take up the state; the first and the last one are shown at once."""
        if self._controls:
            hear(self._shell.kernel)
        with self._lock:
            if self._over.is_set():
                return
            first, over = not self._opened, state.done >= state.total
            self._take_up(state, over)
            if first:
                self._open()
            if over:
                self._close()

    def _take_up(self, state: "State", over: bool) -> None:
        """Keep a copy: the thread must not read what the sweep is changing."""
        self._heard, self._take_monitor = self._clock(), lambda: state.monitor
        self._results, self._running, self._stage = list(state.results), dict(state.running), state.stage
        # A large sweep has many words a second: the estimate of the time left takes time, the counts do not.
        if over or not self._opened or self._heard - self._worded >= LINE_PERIOD:
            self._worded, self._standing = self._heard, state.standing()
        else:
            self._standing = replace(self._standing, done=state.done, share=state.share)

    def _open(self) -> None:
        from IPython import get_ipython  # only kernels have it
        from IPython.display import display

        self._opened, self._begun, self._thread = True, self._clock(), threading.get_ident()
        if self._stop and len(self._results) < self._standing.total:
            self._controls = Controls(self._stop, self._running)
        self._line = display(self._status(), raw=True, display_id=True)
        self._image = display(self._drawing(), raw=True, display_id=True)
        self._shell = get_ipython()
        self._shell.events.register("post_run_cell", self._leave)
        # Outputs belong to the cell that a context variable names, and a new thread has a context of its own.
        threading.Thread(target=contextvars.copy_context().run, args=(self._beat,), daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with self._lock:
                if not self._over.is_set():
                    self._follow()

    def _follow(self) -> None:
        """Show the present in the line, and in the picture where it is time for it."""
        self._line.update(self._status(), raw=True)
        if self._controls:
            self._controls.offer(self._running)
            if self._controls.paused:
                return
        # A model that ended is drawn at once, so that line and picture count the same; unless a picture takes long.
        period = PERIOD if len(self._results) == self._drawn_results else 0.0
        if self._clock() - self._drawn >= max(period, self._cost / SHARE):
            begun = time.thread_time()  # the clock on the wall would count what the training takes meanwhile
            self._image.update(self._drawing(), raw=True)
            self._cost = time.thread_time() - begun

    def _close(self, stopped: bool = False) -> None:
        self._over.set()
        self._shell.events.unregister("post_run_cell", self._leave)
        if self._controls:
            self._controls.close()
        # Nothing was begun, as after a name that is not known: the error alone stands there.
        gone = stopped and not (self._results or self._running or self._standing.share)
        self._line.update({"text/plain": ""} if gone else self._status(stopped), raw=True)
        self._image.update({"text/plain": ""} if gone else self._drawing(), raw=True)

    def _leave(self, result: Any = None) -> None:
        """Say that the sweep stopped: its cell is over, and not all is done.

        A cell of a subshell, which runs beside it in another thread, may end at any time.
        """
        with self._lock:
            if not self._over.is_set() and threading.get_ident() == self._thread:
                self._close(stopped=True)

    def _drawing(self) -> dict[str, str]:
        self._drawn, self._drawn_results = self._clock(), len(self._results)
        html = self.picture.html(self._results, self._running, self._take_monitor(), self._standing.seconds_left)
        return {"text/html": html, "text/plain": tally(self._results, len(self._running), self._standing.total)}

    def _status(self, stopped: bool = False) -> dict[str, str]:
        at, now = self._standing, self._clock()
        silent = now - self._heard
        if stopped:
            at = replace(at, seconds_left=None, samples_per_second=0.0)
        elif at.seconds_left is not None:
            at = replace(at, seconds_left=max(0.0, at.seconds_left - (now - self._worded)))
        parts = [*at.words(), f"{duration(now - self._begun)} elapsed"]
        stage = self._stage if at.done < at.total else ""
        if stopped:
            stage = "stopped here; the same cell goes on from what is done"
        elif self._controls and self._controls.asked and stage:
            stage = f"{self._controls.asked}  ·  {stage}"
        elif stage and silent >= SILENCE:
            stage += f"  ·  nothing new for {duration(silent)}"
        return status_line(at.share, parts, stage)


class Terminal:
    """The sweep as one line that changes in place, or as a line now and then where lines are kept.

    As a context it also speaks up when the sweep itself has nothing to say for long, as in a slow validation.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream = stream or sys.stderr
        self._clock, self._over = clock, False
        self._last: float | None = None  # when a line was written
        self._state: State | None = None  # the last word of the sweep
        self._heard, self._stage = clock(), ""  # when, and what it was doing
        self._shown = ""
        self._in_place = self.stream.isatty()
        self._period = LINE_PERIOD if self._in_place else LOG_PERIOD
        self._left, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> "Terminal":
        threading.Thread(target=self._speak_up, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._left.set()
        with self._lock:
            if self._last is None or self._over:
                return
            if self._line() != self._shown:
                self._write(self._line())  # where it stood when it was stopped
            self._over = True
            if self._in_place:
                self.stream.write("\n")  # what follows, such as an error, gets a line of its own
                self.stream.flush()

    def __call__(self, state: "State") -> None:
        """Write the state if it is time for it; the last one is always written."""
        now, over = self._clock(), state.done >= state.total
        with self._lock:
            if self._over:
                return
            fresh = state.stage.partition(":")[0] != self._stage.partition(":")[0]  # which may last
            self._heard, self._state, self._stage = now, state, "" if over else state.stage
            if self._last is None or over or now - self._last >= self._period or (fresh and self._in_place):
                self._over = over
                self._write(self._line())

    def keep(self, *lines: str) -> None:
        """Write lines that stay."""
        with self._lock:
            width = min(len(self._shown), width_of(self.stream) - 1)  # of what stands there, which may have been cut
            for line in lines:
                if self._in_place:  # over the line that changes, which comes again below
                    line = "\r" + line.ljust(width)
                self.stream.write(line + "\n")
            if self._in_place and self._shown and not self._over:
                self._write(self._shown)  # a large sweep has many, and another sentence would take its time
            self.stream.flush()

    def _line(self, waited: str = "") -> str:
        """Return what is known, what matters first: a narrow terminal cuts the sentence about the stage."""
        return "  ".join(filter(None, (sentence(self._state) if self._state else "", waited, self._stage)))

    def _write(self, text: str) -> None:
        self._last, self._shown = self._clock(), text
        if self._in_place:
            rewrite(self.stream, text, "\n" if self._over else "")
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def _speak_up(self) -> None:
        while not self._left.wait(1.0):
            with self._lock:
                silent = self._clock() - self._heard
                if self._last is None or self._over or silent < SILENCE:
                    continue
                if self._in_place or self._clock() - self._last >= self._period:
                    self._write(self._line(f"at it for {duration(silent)}"))


class Countdown:
    """Work of one kind, so many times: a line that changes in place, with the time left, while the block runs.

    Called, it begins the next one. tell: hears the line; by default a notebook or a terminal shows it, and a file
    gets nothing.
    """

    def __init__(
        self,
        what: str,
        total: int,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._what, self._total, self._tell, self._clock = what, total, tell, clock
        self._at, self._name = 0, ""  # which one is at work, counted from 1, and its name
        self._over, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> "Countdown":
        self._begun = self._since = self._clock()  # when the first one began, and this one
        self._show = self._find_place()
        threading.Thread(target=contextvars.copy_context().run, args=(self._beat,), daemon=True).start()
        return self

    def __call__(self, name: str = "") -> None:
        """Begin the next one."""
        with self._lock:
            self._at, self._name, self._since = self._at + 1, name, self._clock()
            self._show(self._words())

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        with self._lock:
            self._over.set()
            elapsed = f"{duration(self._clock() - self._begun)} elapsed"
            self._show([f"{self._what} {self._at} of {self._total}", "stopped" if error else "done", elapsed])

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with self._lock:
                if self._at and not self._over.is_set():
                    self._show(self._words())

    def _words(self) -> list[str]:
        """Say which one is at work; each is taken to last as long as those before it."""
        now, done = self._clock(), self._at - 1
        parts = [f"{self._what} {self._at} of {self._total}" + (f": {self._name}" if self._name else "")]
        left = (self._since - self._begun) / done * (self._total - done) - (now - self._since) if done else 0.0
        if left >= 0.5:
            parts.append(f"{duration(left)} left")
        return [*parts, f"{duration(now - self._begun)} elapsed"]

    def _find_place(self) -> Callable[[list[str]], None]:
        """Return what shows the parts of the line."""
        if tell := self._tell:
            return lambda parts: tell(", ".join(parts))
        if in_notebook():
            from IPython.display import display

            line = display(status_line(0.0, [self._what], ""), raw=True, display_id=True)
            return lambda parts: line.update(status_line(self._at / max(1, self._total), parts, ""), raw=True)
        if sys.stderr.isatty():
            return lambda parts: rewrite(sys.stderr, ", ".join(parts), "\n" if self._over.is_set() else "")
        return lambda parts: None


def sentence(state: "State") -> str:
    """Say where a sweep stands in one line, what matters first, without its stage."""
    counts, at = Counter(result.status for result in state.results), state.standing()
    filled = int(BAR * at.share + 1e-9)
    parts = [f"[{'#' * filled}{'.' * (BAR - filled)}]", *at.words()]
    parts += [f"{counts[word]} {word}" for word in ("sick", "failed") if counts[word]]
    return "  ".join(parts)


@dataclass(frozen=True)
class Menu:
    """A widget, and the picture that stands in its place where widgets do not live."""

    box: Any
    figure: Picture

    def _repr_mimebundle_(self, **_) -> tuple[dict[str, Any], dict[str, Any]]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        png, about = self.figure._repr_png_()
        shown = {WIDGET: view, "image/png": base64.b64encode(png).decode(), "text/plain": self.figure.spoken}
        return shown, {"image/png": about}


def browse(results: Sequence[ResultLine], series: str = "") -> Menu:
    """Return a menu that shows the loss of one model of a run after another, starting with `series` or the first.

    Where widgets do not live, as in a saved notebook, `series` alone chooses: its picture stands there.
    Errors: UnknownName for a series without a result.
    """
    import ipywidgets

    by_name = {result.series: result for result in results}
    first = check_name("series", series or next(iter(by_name)), by_name)
    figure = loss_figure(by_name[first])
    image = ipywidgets.Image(value=figure.png(), format="png")
    options = [(label(name), name) for name in by_name]
    menu = ipywidgets.Dropdown(options=options, value=first, description="series")

    def show(change) -> None:
        image.value = loss_figure(by_name[change["new"]]).png()

    menu.observe(show, names="value")
    return Menu(ipywidgets.VBox([menu, image]), figure)
