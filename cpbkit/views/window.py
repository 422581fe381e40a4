"""One window as a model sees it: the scaled columns that go in, and what is to come out."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from cpbkit.quantities import counted, signed
from cpbkit.texts import cut
from cpbkit.views.loss import DASHES
from cpbkit.views.palette import BLUE, FAINT, INK, MUTED, ORANGE
from cpbkit.views.style import SMALL, WIDTH, Picture, beside, label, look, name_ends
from cpbkit.windows.scaling import Scaler
from cpbkit.windows.splits import split

if TYPE_CHECKING:
    from cpbkit.config.experiment import Task
    from cpbkit.windows.series import Series

ROW, LEAST = 34, 170  # pixels of a column's strip, and of all of them


@look()
def window_figure(series: "Series", task: "Task") -> Picture:
    """Draw the last train window of a series, its inputs as the network gets them, its targets in their own unit."""
    splits = split(series, task)
    origin, scaler = splits.train[-1], Scaler.fit(series, splits, task)
    x = scaler.inputs(series.inputs[origin - task.context + 1 : origin + 1])  # (L, C)
    scale, unit = (1e4, "basis points") if series.unit == "bp" else (1.0, "its own unit")
    y = scale * series.truth(np.array([origin]), task.horizon)[0]  # (H, K)

    height = max(LEAST, ROW * len(task.features))
    figure = Picture(WIDTH, 96 + height + 50)
    left = figure.panel(24, 96, 580, height)
    back = np.arange(1 - task.context, 1)
    for c, name in enumerate(task.features):
        middle = -c - 0.5
        spread = np.abs(x[:, c] - x[:, c].mean()).max() or 1.0
        left.axhline(middle, color=FAINT, lw=0.6)
        left.plot(back, middle + 0.45 * (x[:, c] - x[:, c].mean()) / spread, color=BLUE, lw=1.4)
        low, high = (signed(end, ".2f") for end in (x[:, c].min(), x[:, c].max()))
        beside(left, middle, f"{cut(name, 24)}  {low} to {high}", MUTED)
    left.set(xlim=(back[0], 0), ylim=(-len(task.features), 0), yticks=[])
    right = figure.panel(970, 96, WIDTH - 970 - 120, height)
    ahead = np.arange(task.horizon + 1)
    right.axhline(0, color=ORANGE, lw=1.2, ls=DASHES)
    newest = scale * (series.levels[origin] - series.anchors[origin])
    right.plot(ahead, np.vstack([newest, y]), color=INK, lw=1.6, marker="o", ms=3)
    right.set(xlim=(0, task.horizon), xticks=ahead if task.horizon < 12 else ahead[:: task.horizon // 6])
    ends = [(float(y[-1, k]), name, INK) for k, name in enumerate(series.targets)]
    name_ends(right, [*ends, (0.0, "no change", ORANGE)], share=0.08)
    rows = "bar" if series.unit == "bp" else "row"
    for axes, title in (
        (left, f"in: {counted(task.context, rows)} up to the newest, scaled by train {rows}s alone"),
        (right, f"to come: change, {unit}"),
    ):
        axes.set_title(title, size=SMALL, color=MUTED, pad=6)
        axes.spines["bottom"].set_visible(False)
    right.grid(axis="y")
    right.yaxis.set_major_formatter("{x:,.10g}")
    right.yaxis.set_major_locator(MaxNLocator(5))
    what = f"{counted(len(task.features), 'column')} of {counted(task.context, rows)} in"
    out = f"{', '.join(series.targets)} of {counted(task.horizon, rows)} out"
    time = np.datetime_as_string(series.times[origin], "m").replace("T", " ")
    drawn = f"the train window whose newest {rows} is {time} UTC; dashed: no change, which an untrained model forecasts"
    figure.head(f"{label(series.name)} as a model sees it: {what}, {out}", drawn, series.synthetic)
    return figure
