"""One small chart as text: lines over times or epochs, which follow the page's width and theme."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd

from cpbkit.views.strip import ACROSS, HIGH, framed, ticks

POINTS = 240  # drawn of one line at most


def chart(
    title: str,
    x: np.ndarray,
    lines: Mapping[str, np.ndarray],
    band: tuple[np.ndarray, np.ndarray] | None = None,
    spoken: str = "",
) -> str:
    """Draw lines (N,) over x (N,), which are times (datetime64) or counts; NaN is left out.

    lines: by the name that stands in the legend and is the class of the line, as `cpb-NAME`. band: drawn under them.
    spoken: what a screen reader says besides the title.
    """
    rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
    lines = {name: np.asarray(y, float)[rows] for name, y in lines.items()}
    edges = [np.asarray(y, float)[rows] for y in band or ()]
    seen = np.concatenate([*lines.values(), *edges])
    low, high = np.nanmin(seen), np.nanmax(seen)
    pad = 0.06 * (high - low) or abs(high) * 1e-3 or 1.0
    low, high = low - pad, high + pad
    at = x[rows].astype("int64" if np.issubdtype(x.dtype, np.datetime64) else float)
    span = (at[-1] - at[0]) or 1

    def path(y: np.ndarray, backwards: bool = False) -> str:
        good = np.flatnonzero(np.isfinite(y))[:: -1 if backwards else 1]
        points = np.column_stack([ACROSS * (at[good] - at[0]) / span, HIGH * (high - y[good]) / (high - low)])
        return " ".join(map(str, points.round().astype(int).ravel().tolist()))

    drawn = f'<path class="cpb-memory-fill" d="M{path(edges[0])}L{path(edges[1], True)}Z"/>' if edges else ""
    drawn += "".join(f'<path class="cpb-{name}" d="M{path(y)}"/>' for name, y in lines.items())
    words = "".join(
        f'<span class="cpb-y" style="bottom:{100 * (tick - low) / (high - low):.1f}%">{tick:,.6g}</span>'
        for tick in _between(low, high)
    )
    words += "".join(
        # The first word begins at its place and the last one ends there, so that none leaves a narrow screen.
        f'<span class="cpb-x" style="left:{100 * share:.0f}%;transform:translateX(-{100 * share:.0f}%)">{text}</span>'
        for share, text in _calendar(x)
    )
    legend = "".join(f'<span class="cpb-{name}">{escape(name)}</span>' for name in lines)
    return framed(title, drawn, words, f"{title}. {spoken}".strip(), f'<div class="cpb-legend">{legend}</div>')


def _between(low: float, high: float) -> Sequence[float]:
    """Return three to five round numbers between two, which need not begin at 0."""
    steps = ticks(high - low, 4)
    step = steps[1] - steps[0]
    first = np.ceil(low / step)
    return [float(f"{step * k:.10g}") + 0.0 for k in np.arange(first, np.floor(high / step) + 1)]


def _calendar(x: np.ndarray) -> list[tuple[float, str]]:
    """Return where along an axis what is to be written: its ends and its middle."""
    places = (0.0, 0.5, 1.0) if len(x) > 2 else (0.0,)
    values = [x[round(share * (len(x) - 1))] for share in places]
    if not np.issubdtype(x.dtype, np.datetime64):
        return [(share, f"{value:g}") for share, value in zip(places, values, strict=True)]
    form = "%d %b %Y" if x[-1] - x[0] > np.timedelta64(5, "D") else "%d %b %H:%M"
    return [(share, pd.Timestamp(value).strftime(form)) for share, value in zip(places, values, strict=True)]
