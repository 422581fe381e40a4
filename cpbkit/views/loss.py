"""One model's training: its loss against persistence's, epoch by epoch."""

import textwrap

import numpy as np
from matplotlib.ticker import MaxNLocator

from cpbkit.evaluation.results import ResultLine, is_synthetic, relative
from cpbkit.views.palette import BLUE, FAINT, GREEN, ORANGE, PALE_BLUE, RED
from cpbkit.views.style import WIDTH, Picture, label, look, name_ends

DASHES = (0, (4, 2.5))


def lowest(curve: np.ndarray) -> int | None:
    """Return the index of the lowest finite loss; None where there is none."""
    finite = np.flatnonzero(np.isfinite(curve))
    return int(finite[np.argmin(curve[finite])]) if len(finite) else None


@look()
def loss_figure(result: ResultLine) -> Picture:
    """Draw one model's loss against persistence; the title says whether it fell below on validation."""
    curve, train, width = relative(result, "validation"), relative(result, "train"), 0.75 * WIDTH
    best, last = lowest(curve), max(len(curve), len(train))
    figure = Picture(width, 400)
    axes = figure.panel(60, 84, width - 170, 262)
    axes.axhline(1, color=ORANGE, ls=DASHES, lw=1.4)
    for values, colour, thick in ((train, PALE_BLUE, 1.6), (curve, BLUE, 2.0)):
        axes.plot(np.arange(1, len(values) + 1), values, color=colour, lw=thick)
    if result.status in ("sick", "failed"):
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
    axes.set_xlabel("epoch")
    drawn = "loss of each epoch relative to the loss of persistence on the same split"
    figure.head(_sentence(result, curve, best), drawn, is_synthetic([result]))
    return figure


def _sentence(result: ResultLine, curve: np.ndarray, best: int | None) -> str:
    name = label(result.series)
    if result.status in ("sick", "failed"):
        return textwrap.shorten(f"{name} is {result.status}: {result.reason}", 84, placeholder=" …")
    if best is None:
        return f"{name} has no validation loss"
    apart = abs(curve[best] - 1)
    share = f"{100 * apart:.2g} %" if result.persistence["validation"] > 0 else f"{apart:.2g}"
    if curve[best] < 1:
        return f"{name} falls below persistence: its loss is {share} lower at epoch {best + 1}"
    return f"{name} never falls below persistence: its loss is {share} higher at best"
