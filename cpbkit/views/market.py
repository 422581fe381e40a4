"""What the bars look like: candles with their gaps, and a strip for each series of what is there."""

from collections.abc import Iterable, Sequence

import matplotlib.dates as dates
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from cpbkit.data.klines import INTERVAL_SECONDS, Gap, Klines, Passport, split_name
from cpbkit.data.traces import STEP_NS
from cpbkit.errors import DataError
from cpbkit.quantities import amount, counted
from cpbkit.views.palette import GREEN, MUTED, ORANGE, ORANGE_FILL, PALE_BLUE, RED, RULE
from cpbkit.views.style import SMALL, WIDTH, Picture, above, beside, label, look

CANDLES = 240  # drawn at most; more bars are put together
TOGETHER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96, 192, 384, 672, 1344, 2688)  # bars a candle
FIRST_TO_LAST = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
ACROSS = WIDTH - 122  # pixels of the candles' axes
ROW, LEFT, RIGHT = 15, 96, 250  # pixels of a passport's strip and beside it


@look()
def candle_figure(klines: Klines, start: str | None = None, end: str | None = None) -> Picture:
    """Draw candles and volume from `start` to `end` (UTC; default all), with the gaps shaded and named.

    Errors: DataError where the series has no bar in that time.
    """
    passport, frame = klines.passport, klines.frame.loc[start:end]
    if frame.empty:
        raise DataError(
            f"candles need at least one bar; {passport.series} has none from {start or 'its start'} to "
            f"{end or 'its end'}: it holds {passport.first} to {passport.last}"
        )
    step, interval = _step(passport), split_name(passport.series)[1]
    low, high = frame.index[0], frame.index[-1] + step
    if "volume" not in frame:
        frame = frame.assign(volume=0.0)
    bars = next((n for n in TOGETHER if len(frame) <= n * CANDLES), TOGETHER[-1])
    if bars > 1:
        frame = frame.groupby(frame.index.floor(bars * step)).agg(FIRST_TO_LAST)
    gaps = [gap for gap in passport.gaps if _utc(gap.start) < high and _utc(gap.end) >= low]

    figure = Picture(WIDTH, 520)
    price = figure.panel(36, 84, ACROSS, 290)
    volume = figure.panel(36, 388, ACROSS, 84, sharex=price)
    _candles(price, volume, frame, bars * step)
    price.set_xlim(min(price.get_xlim()[0], dates.date2num(low)), max(price.get_xlim()[1], dates.date2num(high)))
    _gaps(price, volume, gaps, step)
    for axes, ticks in ((price, 6), (volume, 2)):
        axes.yaxis.tick_right()
        axes.yaxis.set_major_locator(MaxNLocator(ticks, prune="lower"))  # which would stand beside the last day
        axes.grid(axis="y")
    price.yaxis.set_major_formatter("{x:,.10g}")
    volume.yaxis.set_major_formatter(lambda y, _: amount(y))
    price.tick_params(labelbottom=False)
    calendar(volume)
    missing = f"{counted(sum(g.bars for g in gaps), 'bar')} missing in {counted(len(gaps), 'gap')}"
    dated = f"{label(passport.series)}, {low:%Y-%m-%d} to {high - step:%Y-%m-%d}"
    drawn = f"a candle is {counted(bars, 'bar')} of {interval}  ·  volume below  ·  UTC"
    figure.head(
        f"{dated}: {missing if gaps else 'no gap'}",
        f"{passport.source}  ·  {drawn}" if passport.source else drawn,
        passport.synthetic,
    )
    return figure


def _candles(price: Axes, volume: Axes, frame: pd.DataFrame, step: pd.Timedelta) -> None:
    x, width = dates.date2num(frame.index), step / pd.Timedelta(days=1)
    o, h, lo, c, v = (frame[name].to_numpy() for name in FIRST_TO_LAST)
    for side, colour in ((c >= o, GREEN), (c < o, RED)):
        left, middle, right = (x[side] + share * width for share in (0.15, 0.5, 0.85))
        price.vlines(middle, lo[side], h[side], colors=colour, lw=0.9)
        for axes, bottom, top, edge, alpha in (
            (price, np.minimum(o, c)[side], np.maximum(o, c)[side], colour, 1.0),
            (volume, 0 * v[side], v[side], "none", 0.4),
        ):
            corners = np.array([(left, bottom), (left, top), (right, top), (right, bottom)]).transpose(2, 0, 1)
            axes.add_collection(PolyCollection(list(corners), fc=colour, ec=edge, alpha=alpha, lw=0.9))
    pad = 0.05 * (h.max() - lo.min()) or 0.01 * h.max()
    price.set(xlim=(x[0], x[-1] + width), ylim=(lo.min() - pad, h.max() + 1.6 * pad))
    volume.set_ylim(0, v.max() * 1.05 or 1)


def _gaps(price: Axes, volume: Axes, gaps: Sequence[Gap], step: pd.Timedelta) -> None:
    low, high = price.get_xlim()
    pixel, free = (high - low) / ACROSS, low
    for gap in gaps:
        begin, end = _span(gap, step, 2.5 * pixel)
        for axes in (price, volume):
            axes.axvspan(begin, end, color=ORANGE_FILL, lw=0)
        text = f"{gap.name or 'gap'}, {counted(gap.bars, 'bar')}"
        room = len(text) * 6.6 * pixel
        at = min(end + 5 * pixel, high - room)
        if at > free:  # a name that would run into the one before it is left to the passport
            above(price, at, text, -2, size=SMALL, color=ORANGE, va="top")
            free = at + room


@look()
def passport_figure(passports: Iterable[Passport]) -> Picture:
    """Draw a strip per series over the dates: what is there, what a halt explains, and what is missing."""
    passports = list(passports)
    height = ROW * max(1, len(passports))
    figure = Picture(WIDTH, 92 + height + 56)
    axes = figure.panel(LEFT, 92, WIDTH - LEFT - RIGHT, height)
    wholes = {p.series: _span(Gap(p.first, p.last, p.got), _step(p), 0) for p in passports if p.got}
    low = min((begin for begin, _ in wholes.values()), default=0.0)
    high = max((end for _, end in wholes.values()), default=1.0)
    two_pixels = 2 * (high - low) / (WIDTH - LEFT - RIGHT)  # a lost hour in three years must still be seen
    for y, passport in enumerate(passports):
        spans = [(*wholes[passport.series], PALE_BLUE, 0.64)] if passport.got else []
        for gap in passport.gaps:
            spans.append((*_span(gap, _step(passport), two_pixels), MUTED if gap.name else ORANGE, 0.8))
        for begin, end, colour, thick in spans:
            axes.broken_barh([(begin, end - begin)], (y - thick / 2, thick), color=colour, lw=0)
        text = f"{passport.got:,} of {passport.expected:,}"
        text += f"  ·  {counted(len(passport.gaps), 'gap')}" if passport.gaps else ""
        beside(axes, y, text, ORANGE if passport.unexplained else MUTED)
    axes.set(xlim=(low, high), ylim=(max(1, len(passports)) - 0.4, -0.6))
    axes.set_yticks(range(len(passports)), [label(p.series) for p in passports])
    axes.spines["bottom"].set_visible(False)
    axes.grid(axis="x")
    calendar(axes)
    whole = sum(p.complete for p in passports)
    title = f"{whole} of {len(passports)} series hold every bar that was traded"
    if whole < len(passports):
        title += f"; {counted(sum(p.unexplained for p in passports), 'bar')} missing without a known reason"
    figure.head(title, "", any(p.synthetic for p in passports))
    place = 24
    for text, colour in (("bars", PALE_BLUE), ("halt of the venue", MUTED), ("missing", ORANGE)):
        figure.write(place, 58, "■", size=SMALL, color=colour)
        figure.write(place + 15, 57, text, size=SMALL, color=MUTED)
        place += 36 + 7 * len(text)
    return figure


def _step(passport: Passport) -> pd.Timedelta:
    if passport.market == "network":
        return pd.Timedelta(STEP_NS, "ns")
    return pd.Timedelta(seconds=INTERVAL_SECONDS[split_name(passport.series)[1]])


def _utc(time: str) -> pd.Timestamp:
    return pd.Timestamp(time, tz="UTC")


def _span(gap: Gap, step: pd.Timedelta, least: float) -> tuple[float, float]:
    """Return begin and end of a stretch of bars in days, widened about its middle to `least` days."""
    begin, end = dates.date2num(_utc(gap.start)), dates.date2num(_utc(gap.end) + step)
    wider = max(0.0, least - (end - begin)) / 2
    return begin - wider, end + wider


def calendar(axes: Axes) -> None:
    """Mark the axis of dates in the fewest words."""
    locator = dates.AutoDateLocator(minticks=4, maxticks=10)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        dates.ConciseDateFormatter(
            locator,
            formats=["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S.%f"],
            zero_formats=["", "%Y", "%b", "%d %b", "%H:%M", "%H:%M"],
            offset_formats=["", "%Y", "%Y", "%Y", "%d %b %Y", "%d %b %Y"],
        )
    )
    axes.xaxis.get_offset_text().set(size=SMALL, color=MUTED)
    axes.spines["bottom"].set_color(RULE)
