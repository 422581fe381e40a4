"""Memory and load over a run's time, with what happened written at the moment it happened."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cpbkit.quantities import amount
from cpbkit.views.style import BLUE, BLUE_FILL, FAINT, GREEN, GREEN_FILL, MUTED, RULE, WIDTH, Picture, look

GB = 1e9  # bytes, as sellers of memory count
POINTS = 600  # drawn at most; a long run's samples are drawn by their highest in each stretch
UNITS = ((2 * 3600, 3600, "h"), (120, 60, "min"), (0, 1, "s"))


class Timeline:
    """One axes with up to two curves that are moved, not drawn anew."""

    def __init__(self, figure: Picture, box: tuple[float, float, float, float], colour: str, fill: str):
        self.axes: Axes = figure.add_axes(figure.box(*box))
        self.width = box[2]
        self.area = PolyCollection([], facecolors=fill, linewidths=0)
        self.axes.add_collection(self.area, autolim=False)
        (self.upper,) = self.axes.plot([], [], color=FAINT, lw=1.2)
        (self.lower,) = self.axes.plot([], [], color=colour, lw=1.5)
        self.marks = LineCollection([], colors=RULE, linewidths=1)
        self.axes.add_collection(self.marks, autolim=False)
        self.notes = [self.axes.text(0, 0, "", size=8.5, color=c, va="center") for c in (MUTED, colour)]
        self.events: list = []
        self.title = self.axes.set_title("", pad=8)
        self.axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 2.5, 5, 10]))
        self.axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        self.axes.spines[["left", "bottom"]].set_color(RULE)

    def show(self, title, time, lower, upper=None, *, end=0.0, top=0.0, notes=("", ""), events=()):
        """Draw `lower` filled and `upper` as a line over `time` (s); `end` (s) and `top` are least extents."""
        self.title.set_text(title)
        _, unit, name = next(u for u in UNITS if max(end, time.max(initial=0)) >= u[0])
        curves = [np.asarray(c, dtype=float) for c in (lower, upper) if c is not None]
        time, curves = thinned(time / unit, curves)
        self.lower.set_data(time, curves[0])
        self.upper.set_data((time, curves[1]) if upper is not None else ([], []))
        self.area.set_verts([np.column_stack([np.r_[time, time[::-1]], np.r_[np.nan_to_num(curves[0]), 0 * time]])])
        end = max(end / unit, time.max(initial=0), 1)
        highest = max([top, *(np.nanmax(c, initial=0) for c in curves)]) or 1
        self.axes.set(xlim=(0, end), ylim=(0, highest * (1 if highest == top else 1.25)))
        self.axes.xaxis.set_major_formatter(FuncFormatter(lambda x, i: f"{x:g}{f' {name}' * (i == 1)}"))
        self._notes(time, curves, notes, highest)
        self._events([(t / unit, text) for t, text in events], end, highest * 1.25)

    def _notes(self, time, curves, notes, highest):
        heights = [c[-1] if len(c) else 0.0 for c in curves[::-1]]
        if len(heights) == 2 and abs(heights[0] - heights[1]) < highest * 0.16:  # keep the two words apart
            heights[0] = heights[1] + highest * 0.16
        for note, text, y in zip(self.notes[-len(heights) :], notes[-len(heights) :], heights, strict=True):
            note.set(text=text, x=(time[-1] if len(time) else 0) + self.axes.get_xlim()[1] * 0.008, y=y)

    def _events(self, events, end, height):
        self.marks.set_segments([[(t, 0), (t, height)] for t, _ in events])
        for text in self.events:
            text.remove()
        self.events, free = [], -1.0
        for t, text in events:
            if t >= free:  # else the event keeps its line only: its words would run into those before
                self.events.append(self.axes.text(t + end * 0.005, height * 0.97, text, size=8, color=MUTED, va="top"))
                free = t + end * (len(text) + 3) * 5.2 / self.width


def thinned(time: np.ndarray, curves: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Keep at most POINTS samples: of each stretch of time its highest value, so that no peak is lost."""
    step = math.ceil(len(time) / POINTS) if len(time) else 1
    if step == 1:
        return time, curves
    starts = np.arange(0, len(time), step)
    return time[starts], [np.fmax.reduceat(c, starts) for c in curves]


class Machine:
    """The two timelines of a run side by side: memory, and how busy the device was."""

    def __init__(self, figure: Picture, top: float, height: float):
        half = WIDTH / 2
        self.memory = Timeline(figure, (56, top, half - 146, height), BLUE, BLUE_FILL)
        self.load = Timeline(figure, (half + 46, top, half - 70, height), GREEN, GREEN_FILL)
        self.load.lower.set_linewidth(1)

    def show(self, monitor: pd.DataFrame | None, seconds_left: float | None = None, speed: float = 0) -> None:
        """Draw the frame of a monitor, as far as there is one; `speed` in samples a second."""
        if monitor is None or monitor.empty:
            monitor = pd.DataFrame({name: [] for name in ("time", "device", "host", "utilisation", "text")})
        marked = monitor[monitor["text"] != ""]
        events = list(zip(marked["time"], marked["text"], strict=True))
        gpus = sorted(device for device in monitor["device"].unique() if device.startswith("cuda"))
        frame = monitor[monitor["device"] == (gpus[0] if gpus else "cpu")]
        of = f" of {gpus[0]}" if len(gpus) > 1 else ""
        time = frame["time"].to_numpy(float)
        span = {"end": time.max(initial=0) + (seconds_left or 0)}
        if gpus:
            lower, upper = (frame[name].to_numpy(float) / GB for name in ("allocated", "reserved"))
            notes = [f"{name} {c[-1]:.2f}" for name, c in (("reserved", upper), ("allocated", lower))]
            self.memory.show(f"GPU memory{of}, GB", time, lower, upper, notes=notes, events=events, **span)
        else:
            host = frame["host"].to_numpy(float) / GB
            notes = [f"{host[-1]:.2f}" if len(host) else ""]
            self.memory.show("host memory, GB", time, host, notes=notes, events=events, **span)
        busy = frame["utilisation"].to_numpy(float)
        title = f"device busy{of}, %" if gpus else "CPU busy, %"
        if len(time) and not np.isfinite(busy).any():
            title += ", not measured here"
        title += f"  ·  {amount(speed)} samples/s" if speed else ""
        self.load.show(title, time, busy, top=100.0, **span)


@look()
def memory_figure(monitor: pd.DataFrame, title: str = "Memory and load", synthetic: bool = False) -> Picture:
    """Draw a run's timeline: device memory where there is a GPU, else host memory, and how busy it was."""
    figure = Picture(WIDTH, 250)
    figure.head(title, synthetic=synthetic)
    Machine(figure, top=78, height=136).show(monitor)
    return figure
