"""What training looks like: forty loss panels with the machine's timeline, and one model's curve."""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from cpbkit.quantities import time_left
from cpbkit.views.style import (
    BLUE,
    DPI,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE_BLUE,
    PAPER,
    RED,
    RULE,
    WIDTH,
    Picture,
    label,
    look,
    name_ends,
    stamped,
)
from cpbkit.views.timeline import Machine

SIDE = 24  # pixels left free at each side
COLUMNS, STEP_X, STEP_Y = 8, 155.5, 114  # panels a row; pixels from one panel to the next
PANEL_X, PANEL_Y = 142, 80  # pixels of a panel
TOP, BOTTOM = 82, 212  # pixels of the header and of the timelines
DASHES = (0, (4, 2.5))


def relative(entry: Mapping, split: str) -> np.ndarray:
    """Return each epoch's loss as a share of persistence's on the same split: below 1 is better."""
    losses = np.asarray(entry.get("curve", {}).get(split, ()), dtype=float)  # null in the ledger is NaN here
    return losses / entry.get("persistence", {}).get(split, math.nan)


def lowest(curve: np.ndarray) -> int | None:
    """Return the index of the lowest finite loss; None where there is none."""
    finite = np.flatnonzero(np.isfinite(curve))
    return int(finite[np.argmin(curve[finite])]) if len(finite) else None


def is_synthetic(results: Sequence[Mapping]) -> bool:
    """Say whether any of the results came from made-up bars."""
    return any(r.get("synthetic") or r.get("passport", {}).get("synthetic") for r in results)


class SweepFigure:
    """The sweep on one page, built once; `show` then moves what has changed.

    The panels are no axes: one collection holds all curves of a kind, each shifted to its place, because forty
    axes with their artists take several times as long to draw.
    """

    @look()
    def __init__(self, series: Sequence[str], title: str, epochs: int, synthetic: bool = False):
        self.series, self.epochs = tuple(series), epochs
        rows = max(1, math.ceil(len(self.series) / COLUMNS))
        self.height = TOP + rows * STEP_Y + BOTTOM
        self.figure = Picture(WIDTH, self.height)
        self.figure.write(SIDE, 30, stamped(title, synthetic), size=14, weight="bold")
        self._header()
        self._panels()
        self.machine = Machine(self.figure, top=self.height - BOTTOM + 46, height=136)
        self._moving = [self.counts, self.bar, self.note, self.stage, self.floor, self.train, self.validation]
        self._moving += [self.gains, self.misses, self.crosses, *self.figure.axes]
        self._still = None  # the picture without what moves; None when it has to be drawn anew
        self.show([])

    def _header(self) -> None:
        figure, y = self.figure, self.height - 66
        self.counts = figure.write(WIDTH - SIDE, 30, "", size=11, ha="right")
        for colour in (RULE, BLUE):
            place = {"xy": (SIDE, self.height - 48), "width": WIDTH - 2 * SIDE, "height": 8}
            self.bar = Rectangle(**place, fc=colour, lw=0, transform=figure.paper)
            figure.add_artist(self.bar)
        x = SIDE
        kinds = (("train", PALE_BLUE, "-"), ("validation", BLUE, "-"), ("persistence", ORANGE, "--"))
        for text, colour, style in kinds:
            line = Line2D([x, x + 18], [y, y], color=colour, ls=style, lw=1.6, transform=figure.paper)
            figure.add_artist(line)
            figure.write(x + 24, 70, text, size=9, color=colour)
            x += 38 + 7.3 * len(text)
        self.note = figure.write(x, 70, "", size=9, color=MUTED)
        self.stage = figure.write(WIDTH - SIDE, 70, "", size=9, color=MUTED, ha="right")

    def _panels(self) -> None:
        figure, paper, pixels = self.figure, self.figure.paper, Affine2D().scale(1 / DPI)
        pixels += figure.dpi_scale_trans
        self.zoom = Affine2D()  # (epoch, relative loss) -> pixels within a panel
        places = [(SIDE + i % COLUMNS * STEP_X, TOP + i // COLUMNS * STEP_Y) for i in range(len(self.series))]
        self.corners = np.array([(x, self.height - y - 24 - PANEL_Y) for x, y in places]).reshape(-1, 2)
        shifts = {"offsets": self.corners, "offset_transform": paper}
        frame = Path([(0, 0), (0, PANEL_Y), (PANEL_X, PANEL_Y)])
        figure.add_artist(PathCollection([frame], fc="none", ec=RULE, lw=0.8, transform=pixels, **shifts))
        unit = np.array([(0, 0), (0, PANEL_Y), (PANEL_X, PANEL_Y), (PANEL_X, 0), (0, 0)])
        inside = Path.make_compound_path(*(Path(unit + corner, closed=True) for corner in self.corners))
        lines = []
        for colour, width, style in ((ORANGE, 1.0, DASHES), (PALE_BLUE, 1.4, "-"), (BLUE, 1.6, "-")):
            curves = LineCollection([], colors=colour, lw=width, ls=style, transform=self.zoom + pixels, **shifts)
            lines.append(figure.add_artist(curves))
            curves.set_clip_path(inside, paper)  # a curve that leaves its panel is cut there
        self.floor, self.train, self.validation = lines
        marks = []
        for marker, size, edge, colour in (("o", 6, 0, GREEN), ("o", 6, 0, FAINT), ("x", 7, 2, RED)):
            dots = Line2D([], [], ls="none", marker=marker, ms=size, mew=edge, color=colour, transform=paper)
            marks.append(figure.add_artist(dots))
            dots.set_zorder(4)  # above the words of a sick panel
        self.gains, self.misses, self.crosses = marks
        self.names, self.states, self.reasons = [], [], []
        box = {"fc": PAPER, "lw": 0, "pad": 1.5}
        for name, (x, y) in zip(self.series, places, strict=True):
            self.names.append(figure.write(x, y + 19, label(name), size=9))
            self.states.append(figure.write(x + PANEL_X, y + 19, "", size=9, ha="right"))
            self.reasons.append(figure.write(x + PANEL_X, 0, "", size=7.5, color=RED, ha="right", bbox=box))

    def show(
        self,
        results: Sequence[Mapping],
        running: Mapping[str, Mapping] | None = None,
        monitor: pd.DataFrame | None = None,
        stage: str = "",
        seconds_left: float | None = None,
        at_most: bool = False,
        samples_per_second: float = 0,
    ) -> None:
        """Move everything to the present: `results` are lines of the ledger, `running` what trains now."""
        finished = {result["series"]: result for result in results}
        training = {name: entry for name, entry in (running or {}).items() if name not in finished}
        entries = [finished.get(name) or training.get(name) or {} for name in self.series]
        train, validation = ([relative(entry, split) for entry in entries] for split in ("train", "validation"))
        low, high = self._zoom(train, validation)
        for lines, curves in ((self.train, train), (self.validation, validation)):
            beyond = 0.3 * (high - low)  # less than the space between two panels
            lines.set_segments([points(curve, low - beyond, high + beyond) for curve in curves])
        self.floor.set_segments([[(1, 1), (self.last, 1)]] * len(entries))
        places: dict[Line2D, list] = {self.gains: [], self.misses: [], self.crosses: []}
        for i, (entry, curve) in enumerate(zip(entries, validation, strict=True)):
            text, colour, mark, epoch = self._verdict(entry, curve)
            self.states[i].set(text=text, color=colour)
            ink = INK if entry else MUTED
            if self.names[i].get_color() != ink:
                self.names[i].set_color(ink)
                self._still = None
            reason = entry["reason"] if colour == RED else ""
            self.reasons[i].set_text(textwrap.fill(reason, 26, max_lines=4, placeholder=" …"))
            if mark and epoch is not None:
                y = np.clip(curve[epoch], low, high)
                places[mark].append(self.corners[i] + self.zoom.transform((epoch + 1, y)))
            if reason:  # in the half of the panel that the cross is not in
                lower = mark is None or epoch is None or places[mark][-1][1] > self.corners[i][1] + PANEL_Y / 2
                at = self.corners[i][1] + (3 if lower else PANEL_Y - 3)
                self.reasons[i].set(y=at, va="bottom" if lower else "top")
        for mark, at in places.items():
            mark.set_data(np.reshape(at, (-1, 2)).T)
        self._count(Counter(entry["status"] for entry in finished.values()), len(training), seconds_left, at_most)
        shares = [entry.get("share", len(relative(entry, "train")) / self.epochs) for entry in training.values()]
        done = (len(finished) + sum(shares)) / max(1, len(self.series))
        self.bar.set_width((WIDTH - 2 * SIDE) * min(1.0, done))
        self.stage.set_text(textwrap.shorten(stage, 44, placeholder=" …"))
        self.machine.show(monitor, seconds_left, samples_per_second)

    @look()
    def png(self) -> bytes:
        """Return the present state as PNG; what never moves is drawn once and kept."""
        canvas, moving = self.figure.canvas, [*self._moving, *self.states, *self.reasons]
        if self._still is None:
            for visible in (False, True):
                for artist in moving:
                    artist.set_visible(visible)
                if not visible:
                    canvas.draw()
            self._still = canvas.copy_from_bbox(self.figure.bbox)
        canvas.restore_region(self._still)
        for artist in moving:
            if artist not in self.reasons or artist.get_text():
                self.figure.draw_artist(artist)
        buffer = io.BytesIO()
        imsave(buffer, canvas.buffer_rgba(), format="png", pil_kwargs={"compress_level": 1})
        return buffer.getvalue()

    def _verdict(self, entry: Mapping, curve: np.ndarray) -> tuple[str, str, Line2D | None, int | None]:
        """Return a panel's word, its colour, and which mark to put at which epoch."""
        status, best = entry.get("status", "training" if entry else "waiting"), lowest(curve)
        if status in ("sick", "failed"):
            seen = np.flatnonzero(np.isfinite(curve))
            text = f"{status} at {len(curve)}" if len(curve) else status
            return text, RED, self.crosses, int(seen[-1]) if len(seen) else None
        if status == "training":
            return str(len(curve)), BLUE, None, None
        if best is None:
            return status, MUTED, None, None
        skill = round(100 - 100 * math.sqrt(curve[best]), 1) + 0.0  # of the RMSE; no minus before a zero
        mark, colour = (self.gains, GREEN) if curve[best] < 1 else (self.misses, MUTED)
        return f"{skill:+.1f} %".replace("-", "−"), colour, mark, best

    def _zoom(self, train: Sequence[np.ndarray], validation: Sequence[np.ndarray]) -> tuple[float, float]:
        longest = max((len(curve) for curve in [*train, *validation]), default=0)
        self.last = max(2, longest, min(self.epochs, 10 * math.ceil(longest / 10)))
        best = [curve[epoch] for curve in validation if (epoch := lowest(curve)) is not None]
        seen = np.concatenate([*validation, *train, best, [0.995, 1.005]])
        # What overfits or explodes leaves its panel, so that the others can be told from persistence.
        low, high = np.percentile(seen[np.isfinite(seen)], [4, 94])
        low, high = min(low, 0.995, *best), min(max(high, 1.005), 3.0)
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
        self.zoom.clear().translate(-1, -low).scale(PANEL_X / (self.last - 1), PANEL_Y / (high - low))
        self.note.set_text(
            f"loss relative to persistence, {low:.3g} to {high:.3g}, over {self.last} epochs  ·  "
            "at right: skill on validation, or the epoch"
        )
        return low, high

    def _count(self, statuses: Counter, training: int, seconds_left: float | None, at_most: bool) -> None:
        waiting = len(self.series) - sum(statuses.values()) - training
        counts = {"done": statuses["done"], "training": training, "sick": statuses["sick"]}
        counts |= {"failed": statuses["failed"], "waiting": waiting}
        text = "  ·  ".join(f"{n} {word}" for word, n in counts.items() if n or word == "done")
        if seconds_left is not None and (training or waiting):
            text += f"      {time_left(seconds_left, at_most)}"
        self.counts.set_text(text)


def points(curve: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return a curve as points (epoch from 1, value), values far beyond the panel brought near its edge."""
    return np.column_stack([np.arange(1, len(curve) + 1), np.clip(curve, low, high)])


def sweep_figure(
    results: Sequence[Mapping], monitor: pd.DataFrame | None = None, series: Sequence[str] = ()
) -> Picture:
    """Draw a sweep from its ledger; `series` also names those without a result yet."""
    names = list(dict.fromkeys([*series, *(result["series"] for result in results)]))
    longest = max((len(relative(result, "validation")) for result in results), default=1)
    preset = next((result["preset"] for result in results if "preset" in result), "sweep")
    picture = SweepFigure(names, f"{preset}  ·  {len(names)} series", longest, is_synthetic(results))
    picture.show(results, monitor=monitor)
    return picture.figure


@look()
def loss_figure(result: Mapping) -> Picture:
    """Draw one model's loss against persistence; the title says whether it fell below on validation."""
    curve, train, width = relative(result, "validation"), relative(result, "train"), 0.75 * WIDTH
    best, last = lowest(curve), max(len(curve), len(train))
    figure = Picture(width, 400)
    axes = figure.add_axes(figure.box(60, 84, width - 170, 262))
    axes.axhline(1, color=ORANGE, ls=DASHES, lw=1.4)
    for values, colour, thick in ((train, PALE_BLUE, 1.6), (curve, BLUE, 2.0)):
        axes.plot(np.arange(1, len(values) + 1), values, color=colour, lw=thick)
    if result["status"] in ("sick", "failed"):
        axes.plot(max(1, last), 1 if best is None else curve[best], "x", color=RED, ms=9, mew=2.4, clip_on=False)
    elif best is not None:
        colour = GREEN if curve[best] < 1 else FAINT
        axes.plot(best + 1, curve[best], "o", color=colour, ms=8, clip_on=False)
    ends = [(1.0, "persistence", ORANGE)]
    for values, text, colour in ((train, "train", PALE_BLUE), (curve, "validation", BLUE)):
        ends += [(values[np.isfinite(values)][-1], text, colour)] if np.isfinite(values).any() else []
    name_ends(axes, ends)
    axes.set_xlim(1, max(2, last))
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("epoch")
    drawn = "loss of each epoch relative to the loss of persistence on the same split"
    figure.head(_sentence(result, curve, best), drawn, is_synthetic([result]))
    return figure


def _sentence(result: Mapping, curve: np.ndarray, best: int | None) -> str:
    name = label(result["series"])
    if result["status"] in ("sick", "failed"):
        return textwrap.shorten(f"{name} is {result['status']}: {result['reason']}", 84, placeholder=" …")
    if best is None:
        return f"{name} has no validation loss"
    share = 100 * abs(curve[best] - 1)
    if curve[best] < 1:
        return f"{name} falls below persistence: its loss is {share:.2g} % lower at epoch {best + 1}"
    return f"{name} never falls below persistence: its loss is {share:.2g} % higher at best"
