"""Memory and load over a run's time as strips of text, with what happened written at the moment it happened."""

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
import pandas as pd

from cpbkit.views.page import Html, page

GB = 1e9  # bytes, as sellers of memory count
POINTS = 600  # drawn at most; a long run's samples are drawn by their highest in each stretch
UNITS = ((2 * 3600, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
ACROSS, HIGH = 1000, 1000  # units of a strip's SVG, which is stretched to its place
CHARACTER = 0.011  # of a strip's width, about, that a character of an event's words takes


def strips(monitor: pd.DataFrame | None, seconds_left: float | None = None) -> Iterator[str]:
    """Draw memory and load from a monitor's frame, as far as there is one, with room for the time left."""
    if monitor is None or monitor.empty:
        return
    marked = monitor[monitor["text"] != ""]
    events = list(zip(marked["time"], marked["text"], strict=True))
    gpus = sorted(device for device in monitor["device"].unique() if device.startswith("cuda"))
    frame = monitor[monitor["device"] == (gpus[0] if gpus else "cpu")]
    if len(frame) < 2:  # a finished run that is opened again has no course of time to draw
        return
    of = f" of {gpus[0]}" if len(gpus) > 1 else ""
    time = frame["time"].to_numpy(float)
    end = time.max(initial=0) + (seconds_left or 0)
    if gpus:
        lower, upper = (frame[name].to_numpy(float) / GB for name in ("allocated", "reserved"))
        title = f"GPU memory{of}, GB: allocated {lower[-1]:.2f}, reserved {upper[-1]:.2f}"
        yield _strip(title, "memory", time, [lower, upper], end, events=events)
    else:
        host = frame["host"].to_numpy(float) / GB
        yield _strip(f"host memory, GB: {host[-1]:.2f}", "memory", time, [host], end, events=events)
    busy = frame["utilisation"].to_numpy(float)
    title = f"device busy{of}, %" if gpus else "CPU busy, %"
    if np.isfinite(busy).any():
        title += f": {busy[np.isfinite(busy)][-1]:.0f}"
    else:
        title += ", not measured here"
    yield _strip(title, "load", time, [busy], end, top=100.0)


def memory_html(monitor: pd.DataFrame, title: str = "Memory and load") -> Html:
    """Draw memory, of the device where there is a GPU, else of the host, and how busy the device was."""
    head = f'<div class="cpb-head"><b>{escape(title)}</b></div>'
    return page(f'{head}<div class="cpb-strips">{"".join(strips(monitor))}</div>', title)


def _strip(title, kind, time, curves, end, top=None, events=()) -> str:
    """Draw the first curve filled and a second as a line over `time`; `end` is the least extent in seconds."""
    _, unit, name = next(u for u in UNITS if end >= u[0])
    end = max(end, 1.0)
    most = max(np.nanmax(curve, initial=0) for curve in curves)
    top = max(top or 0, most * (1 if top else 1.2)) or 1.0
    time, curves = thinned(time, curves)
    x = (ACROSS * time / end).round().astype(int)
    heights = [(HIGH * (1 - np.nan_to_num(curve) / top)).round().astype(int) for curve in curves]
    lines = [" ".join(map(str, np.column_stack([x, y]).ravel().tolist())) for y in heights]
    drawn = f'<path class="cpb-{kind}-fill" d="M{x[0]} {HIGH}L{lines[0]} {x[-1]} {HIGH}"/>'
    for line, name_of_line in zip(lines, (kind, "upper"), strict=False):
        drawn += f'<path class="cpb-{name_of_line}" d="M{line}"/>'
    words, free = "", -1.0
    for moment, text in events:
        share = moment / end
        drawn += f'<path class="cpb-event" d="M{ACROSS * share:.0f} 0V{HIGH}"/>'
        if share >= free:  # else the event keeps its line only: its words would run into those before
            words += f'<span class="cpb-said" style="left:{100 * share:.1f}%">{escape(text)}</span>'
            free = share + CHARACTER * (len(text) + 2)
    for k, tick in enumerate(ticks(end / unit, 5)):
        text = f"{tick:g}{f' {name}' * (k == 1)}"
        words += f'<span class="cpb-x" style="left:{100 * tick * unit / end:.1f}%">{text}</span>'
    for tick in ticks(top, 4):
        words += f'<span class="cpb-y" style="bottom:{100 * tick / top:.1f}%">{tick:g}</span>'
    return framed(title, drawn, words, f"{title}, over {end / unit:.3g} {name}")


def framed(title: str, drawn: str, words: str, spoken: str, legend: str = "") -> str:
    """Put what is drawn in units of ACROSS and HIGH under its title; `words` stand at its axes, placed in percent."""
    return (
        f'<div><div>{escape(title)}</div>{legend}<div class="cpb-plot"><svg viewBox="0 0 {ACROSS} {HIGH}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(spoken)}">{drawn}</svg>{words}</div></div>'
    )


def ticks(end: float, most: int) -> Sequence[float]:
    """Return round numbers from 0 to at most `end`, `most` steps of 1, 2 or 5 times a power of ten at the most."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * most >= end)
    return [round(step * k, 10) for k in range(int(end / step + 1e-9) + 1)]


def thinned(time: np.ndarray, curves: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Keep at most POINTS samples: of each stretch of time its highest value, so that no peak is lost."""
    step = math.ceil(len(time) / POINTS) if len(time) else 1
    if step == 1:
        return time, curves
    starts = np.arange(0, len(time), step)
    return time[starts], [np.fmax.reduceat(c, starts) for c in curves]
