"""Pure, causal functions over kline columns, and the one table of them.

The value at row t uses rows <= t as they are given: nothing is filled in, the row before a gap counts as the
previous bar. Warm-up rows are NaN. A NaN in the input stays in a windowed indicator while its window holds it, in an
exponential average until its weight is gone (500 rows or so), in OBV to the end. An oscillator over bars that
did not move stands at its middle; a constant has no deviation; a share of no volume at all is 0.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from cpbkit.config import own
from cpbkit.config.experiment import OHLC
from cpbkit.errors import CpbkitError, DataError, check_name

NAN = np.nan
DAY, WEEK = 86_400, 604_800  # s
STILL = 1e-4  # log return: what a bar that did not move counts as, so that its logarithm exists


@dataclass(frozen=True)
class Indicator:
    """One column that can be computed from bars."""

    function: Callable[..., np.ndarray]  # of Bars; `n` is the length in bars of those that have one
    inputs: tuple[str, ...]  # kline columns it needs; none: the index alone
    description: str  # what it says, with the source of the formula
    unit: str  # of its values


class Bars:
    """The columns of one frame, and what was computed from them: each result once."""

    def __init__(self, frame: pd.DataFrame, columns: list[str]):
        self.index = frame.index
        # A table of floats is taken whole: to pick columns from it takes longer than to compute two indicators.
        table = frame if set(frame.dtypes) == {np.dtype(float)} else frame[columns]
        self.columns = dict(zip(table.columns, table.to_numpy(float).T, strict=True))
        self.results: dict[tuple, np.ndarray] = {}

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def get(self, function: Callable[..., Any], **arguments) -> np.ndarray:
        """Return `function(bars, **arguments)`, computed at the first call."""
        if isinstance(function, partial):
            arguments = function.keywords
            function = function.func
        key = function, *arguments.items()
        if key not in self.results:
            self.results[key] = function(self, **arguments)
        return self.results[key]


def feature(function: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], pd.Series]:
    """Mark a function as a feature: it takes a kline table and returns one number for each row.

    The number at a row may use rows up to it and none after; `cpbkit audit` runs the function again on bars whose
    future is garbage to see that. Give it among `features`, itself or as `mine.py:name`.
    """
    setattr(function, "is_feature", True)  # noqa: B010  # no type of a function has it
    return function


def features_in(place: str) -> tuple[str, ...]:
    """Name the features of a file, `mine.py:name`. Errors: CpbkitError for a file without any."""
    return own.members(place, lambda value: getattr(value, "is_feature", False), "features")


def _compute_own(frame: pd.DataFrame, name: str) -> np.ndarray:
    function, wanted = own.find(name, "a feature"), f"A feature gets a table with the columns {', '.join(frame)}"
    with own.running(name, f"{wanted}, and returns a number for each of its rows"):
        values = function(frame.copy())
        numbers = np.asarray(values, float)
    if isinstance(values, pd.Series) and not values.index.equals(frame.index):
        raise DataError(f"{name} must return a number for each bar, on their index; got another index. Reindex to it")
    if numbers.shape != (len(frame),):
        raise DataError(f"{name} must return a number for each of the {len(frame)} bars; got shape {numbers.shape}")
    return numbers


def find_indicator(name: str) -> "Indicator":
    """Return an indicator by name: `rsi`, or `rsi(21)` with its own length in bars.

    Errors: UnknownName; CpbkitError for a length of one that has none, or several.
    """
    if name in INDICATORS:
        return INDICATORS[name]
    plain, length = found.groups() if (found := re.fullmatch(r"(\w+)\((\d{1,6})\)", name)) else (name, "")
    known = INDICATORS[check_name("indicator", plain, INDICATORS)]
    if "n" not in inspect.signature(known.function).parameters:
        able = [each for each, one in INDICATORS.items() if "n" in inspect.signature(one.function).parameters]
        raise CpbkitError(f"{plain} has no single length to choose; got {name!r}. These have one: {', '.join(able)}")
    if int(length) < 2:
        raise CpbkitError(f"the length of {plain} must be at least 2 bars; got {name!r}")
    return replace(known, function=partial(known.function, n=int(length)), description=f"{plain}, {length} bars")


def is_indicator(name: str) -> bool:
    """Say whether a feature is an indicator, with or without its own length."""
    return name.partition("(")[0] in INDICATORS


def compute(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Compute indicators by name, or own features as `mine.py:name`, in the order of `names`, on the index of `frame`.

    `rsi(21)` is an indicator with an own length in bars. Raises UnknownName for a name that is not in INDICATORS,
    DataError for columns or times that are missing and for what an own feature returned, CpbkitError for one that
    cannot be found.
    """
    names = list(names)
    needed: dict[str, str] = {}  # column -> the first indicator that needs it
    for name in names:
        if own.is_own(name):
            continue
        needed |= dict.fromkeys(find_indicator(name).inputs, name)
    for column, name in needed.items():
        if column not in frame.columns:
            raise DataError(f"{name} needs the column {column!r}; got {', '.join(map(str, frame.columns))}")
    bars, values = Bars(frame, list(needed)), np.empty((len(names), len(frame)))
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, row in zip(names, values, strict=True):
            row[:] = _compute_own(frame, name) if own.is_own(name) else bars.get(find_indicator(name).function)
    return pd.DataFrame(values.T, index=frame.index, columns=names, copy=False)


def _seconds(b: Bars) -> np.ndarray:
    """Bar starts in seconds since 1970, UTC."""
    index = b.index
    if not isinstance(index, pd.DatetimeIndex):
        raise DataError(f"calendar and session indicators need an index of times; got {index.dtype}")
    return index.as_unit("ns").asi8 // 1_000_000_000


# Windows and recursions. x is (N,), and so is every result.


def lag(x: np.ndarray, bars: int = 1) -> np.ndarray:
    """Return x of `bars` rows ago."""
    return _after(bars, x[:-bars])[: len(x)]


def step(x: np.ndarray) -> np.ndarray:
    """Return x less x of the row before."""
    return np.diff(x, prepend=NAN)


def _windows(join: Callable, rows: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    """Reduce each window of n rows by joining windows of 1, 2, 4, ... rows: log n passes.

    Unlike in a running sum nothing that has left the window (a huge price, a NaN) leaves a trace.
    rows: what stands for a window of one row. join(older, newer, a, b): of windows of a and b rows, of a + b rows.
    """
    if len(rows[0]) < n:
        return np.full(len(rows[0]), NAN)
    part, size, block, width = rows, 0, rows, 1

    def joined(older, a, newer, b):
        return join([x[: len(x) - b] for x in older], [x[a:] for x in newer], a, b)

    while True:
        if n & width:
            part = joined(part, size, block, width) if size else block
            size += width
        if size == n:
            return _after(n - 1, part[-1])
        block = joined(block, width, block, width)
        width *= 2


def rolling(operation: np.ufunc, x: np.ndarray, n: int) -> np.ndarray:
    """Reduce each window of n rows by np.add, np.maximum or np.minimum."""
    return _windows(lambda older, newer, a, b: (operation(older[0], newer[0]),), (x,), n)


def rolling_square(x: np.ndarray, n: int) -> np.ndarray:
    """Sum the squared distances from the mean of each window of n rows.

    Windows are joined by the update of Chan, Golub and LeVeque (1979): no difference of large squares, and exactly
    0 for a constant where n is a sum of at most two powers of two.
    """

    def join(older, newer, a, b):
        square = older[0] / a
        square -= newer[0] / b
        square *= square
        square *= a * b / (a + b)
        square += older[1]
        square += newer[1]
        return older[0] + newer[0], square

    return _windows(join, (x, np.zeros(len(x))), n)


def average(x: np.ndarray, alpha: float, n: int, start: int = 0) -> np.ndarray:
    """Smooth by `y[t] = alpha x[t] + (1 - alpha) y[t-1]`, from the mean of rows start .. start + n - 1 on.

    The weighted sum of the last 1, 2, 4, ... rows, until what is older weighs nothing in float64.
    """
    first = start + n - 1
    if len(x) <= first:
        return np.full(len(x), NAN)
    y = alpha * x[first:]
    y[0] = x[start : first + 1].mean()
    weight, width, older = 1.0 - alpha, 1, np.empty_like(y)
    while weight > 1e-16:
        np.multiply(y[:-width], weight, out=older[width:])
        y[width:] += older[width:]
        weight, width = weight * weight, 2 * width
    return _after(first, y)


def ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    """Divide; `otherwise` where the divisor is 0."""
    return np.where(below == 0, otherwise, above / below)


def noise(price: np.ndarray) -> np.ndarray:
    """Bound the rounding error of a difference of two prices: decimals are not exact in binary."""
    return 4 * np.finfo(float).eps * np.abs(price)


def _after(rows: int, x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(rows, NAN), x])


# What indicators are made of, each reached through Bars.get.


def log(b: Bars, column: str) -> np.ndarray:
    return np.log(b[column])


def log_return(b: Bars, column: str) -> np.ndarray:
    return b.get(log, column=column) - lag(b.get(log, column="close"))


def change(b: Bars) -> np.ndarray:
    return step(b["close"])


def typical(b: Bars) -> np.ndarray:
    return (b["high"] + b["low"] + b["close"]) / 3.0


def money(b: Bars) -> np.ndarray:
    return b.get(typical) * b["volume"]


def mean(b: Bars, of: Callable, n: int) -> np.ndarray:
    return rolling(np.add, b.get(of), n) / n


def sma(b: Bars, n: int, column: str = "close") -> np.ndarray:
    return rolling(np.add, b[column], n) / n


def ema(b: Bars, n: int, start: int = 0) -> np.ndarray:
    return average(b["close"], 2 / (n + 1), n, start)


def wma(b: Bars, n: int) -> np.ndarray:
    def join(older, newer, width, _):  # sums, and sums with the weights 1, 2, ...
        return older[0] + newer[0], older[1] + newer[1] + width * newer[0]

    return _windows(join, (b["close"], b["close"]), n) / (n * (n + 1) / 2)


def highest(b: Bars, n: int) -> np.ndarray:
    return rolling(np.maximum, b["high"], n)


def lowest(b: Bars, n: int) -> np.ndarray:
    return rolling(np.minimum, b["low"], n)


def deviation(b: Bars, column: str) -> np.ndarray:
    return np.sqrt(rolling_square(b[column], 20) / 20)


def band(b: Bars, side: float) -> np.ndarray:
    return b.get(sma, n=20) + side * 2.0 * b.get(deviation, column="close")


def bb_width(b: Bars) -> np.ndarray:
    return 4.0 * b.get(deviation, column="close") / b.get(sma, n=20)


def bb_position(b: Bars) -> np.ndarray:
    return 0.5 + ratio(b["close"] - b.get(sma, n=20), 4.0 * b.get(deviation, column="close"), 0.0)


def macd(b: Bars) -> np.ndarray:
    return b.get(ema, n=12, start=14) - b.get(ema, n=26)  # the fast one starts late, so that both begin at row 25


def macd_signal(b: Bars) -> np.ndarray:
    return average(b.get(macd), 2 / 10, 9, start=25)


def macd_histogram(b: Bars) -> np.ndarray:
    return b.get(macd) - b.get(macd_signal)


def roc(b: Bars, n: int = 12) -> np.ndarray:
    return 100.0 * (b["close"] / lag(b["close"], n) - 1.0)


def rsi(b: Bars, n: int = 14) -> np.ndarray:
    gain = np.maximum(b.get(change), 0.0)
    gain, loss = (average(x, 1 / n, n, start=1) for x in (gain, gain - b.get(change)))
    return 100.0 * ratio(gain, gain + loss, 0.5)


def true_range(b: Bars) -> np.ndarray:
    previous = lag(b["close"])
    return np.maximum(b["high"], previous) - np.minimum(b["low"], previous)


def atr(b: Bars, n: int) -> np.ndarray:
    return average(b.get(true_range), 1 / n, n, start=1)


def keltner(b: Bars, side: float) -> np.ndarray:
    return b.get(ema, n=20) + side * 2.0 * b.get(atr, n=10)


def rise(b: Bars, side: int) -> np.ndarray:
    return step(b["high"]) if side > 0 else -step(b["low"])


def excess(b: Bars) -> np.ndarray:
    """Return how much further the high rose than the low fell, 0 for a tie.

    Ties are common on coarse ticks, and floating point breaks each at random (TA-Lib: ADX of PEPE off by up
    to 8 points). A margin above the rounding error gives what integer ticks give, whatever the tick is.
    """
    out = b.get(rise, side=1) - b.get(rise, side=-1)
    out *= np.abs(out) > noise(b["high"])
    return out


def di(b: Bars, side: int) -> np.ndarray:
    larger = b.get(excess) > 0 if side > 0 else b.get(excess) < 0
    movement = np.maximum(b.get(rise, side=side), 0.0) * larger
    return 100.0 * ratio(average(movement, 1 / 14, 14, start=1), b.get(atr, n=14), 0.0)


def adx(b: Bars) -> np.ndarray:
    plus, minus = b.get(di, side=1), b.get(di, side=-1)
    return average(100.0 * ratio(np.abs(plus - minus), plus + minus, 0.0), 1 / 14, 14, start=14)


def stoch_fast(b: Bars) -> np.ndarray:
    low = b.get(lowest, n=14)
    return 100.0 * ratio(b["close"] - low, b.get(highest, n=14) - low, 0.5)


def stoch_k(b: Bars) -> np.ndarray:
    return b.get(mean, of=stoch_fast, n=3)


def williams_r(b: Bars, n: int = 14) -> np.ndarray:
    high = b.get(highest, n=n)
    return -100.0 * ratio(high - b["close"], high - b.get(lowest, n=n), 0.5)


def cci(b: Bars) -> np.ndarray:
    x, middle = b.get(typical), b.get(mean, of=typical, n=20)[19:]
    rows = len(x)
    if rows < 20:
        return np.full(rows, NAN)
    total, larger = np.zeros(rows - 19), np.empty(rows - 19)
    for bar in range(20):
        np.maximum(x[bar : bar + rows - 19], middle, out=larger)
        total += larger
    spread = total / 10 - 2 * middle  # half of the distances from a mean lie above it
    spread *= spread > 4 * noise(middle)
    return _after(19, ratio(x[19:] - middle, 0.015 * spread, 0.0))


def obv(b: Bars) -> np.ndarray:
    signed = np.sign(b.get(change)) * b["volume"]
    signed[:1] = b["volume"][:1]
    return np.cumsum(signed)


def obv_rel(b: Bars) -> np.ndarray:
    return ratio(b.get(obv) - lag(b.get(obv), 20), rolling(np.add, b["volume"], 20), 0.0)


def mfi(b: Bars, n: int = 14) -> np.ndarray:
    move = step(b.get(typical))
    move *= np.abs(move) > noise(b.get(typical))  # ties, as in `excess`
    flow = np.sign(move) * b.get(money)
    gain = np.maximum(flow, 0.0)
    gain, loss = (rolling(np.add, x, n) for x in (gain, gain - flow))
    return 100.0 * ratio(gain, gain + loss, 0.5)


def vwap(b: Bars) -> np.ndarray:
    volume = rolling(np.add, b["volume"], 20)
    return np.where(volume == 0, b.get(typical), rolling(np.add, b.get(money), 20) / volume)


def vwap_session(b: Bars) -> np.ndarray:
    day = _seconds(b) // DAY
    if not len(day):
        return np.empty(0)
    opens = np.append(True, day[1:] != day[:-1])
    session = np.cumsum(opens) - 1
    slot = np.arange(len(day)) - np.flatnonzero(opens)[session]
    sums = []
    for x in (b.get(money), b["volume"]):
        table = np.zeros((session[-1] + 1, slot.max() + 1))  # a row per day: each starts at 0, nothing cancels
        table[session, slot] = x
        sums.append(np.cumsum(table, axis=1)[session, slot])
    return np.where(sums[1] == 0, b.get(typical), sums[0] / sums[1])


def volatility(b: Bars) -> np.ndarray:
    return np.sqrt(rolling_square(b.get(log_return, column="close"), 20) / 19)


def height(b: Bars) -> np.ndarray:
    return b.get(log, column="high") - b.get(log, column="low")


def body(b: Bars) -> np.ndarray:
    return b.get(log, column="close") - b.get(log, column="open")


def variance(b: Bars) -> np.ndarray:
    """Return the variance of a bar alone, as Garman and Klass estimate it."""
    return 0.5 * b.get(height) ** 2 - (2 * np.log(2) - 1) * b.get(body) ** 2


def parkinson(b: Bars) -> np.ndarray:
    return np.sqrt(rolling(np.add, b.get(height) ** 2, 20) / (20 * 4 * np.log(2)))


def garman_klass(b: Bars) -> np.ndarray:
    return np.sqrt(b.get(mean, of=variance, n=20))


def bar_range(b: Bars) -> np.ndarray:
    return np.hypot(b.get(height), STILL)


def bar_volatility(b: Bars) -> np.ndarray:
    return np.sqrt(b.get(variance) + STILL**2)


def rogers_satchell(b: Bars) -> np.ndarray:
    open_, high, low, close = (b.get(log, column=column) for column in OHLC)
    return np.sqrt(rolling(np.add, (high - close) * (high - open_) + (low - close) * (low - open_), 20) / 20)


def yang_zhang(b: Bars) -> np.ndarray:
    jump = rolling_square(b.get(log_return, column="open"), 20) / 19
    drift = rolling_square(b.get(body), 20) / 19
    k = 0.34 / (1.34 + 21 / 19)
    return np.sqrt(jump + k * drift + (1 - k) * b.get(rogers_satchell) ** 2)


def volume_norm(b: Bars) -> np.ndarray:
    return ratio(b["volume"], b.get(sma, n=20, column="volume"), 0.0)


def volume_zscore(b: Bars) -> np.ndarray:
    return ratio(b["volume"] - b.get(sma, n=20, column="volume"), b.get(deviation, column="volume"), 0.0)


def turn(b: Bars, wave: np.ufunc, period: int) -> np.ndarray:
    """Return where in a period the bar starts, as sine or cosine of one turn; weeks start on Monday."""
    return wave(2 * np.pi * ((_seconds(b) - 4 * DAY) % period) / period)


def relative(b: Bars, level: Callable, less: float) -> np.ndarray:
    return b.get(level) / b["close"] - less  # not its logarithm: a lower band may lie below zero


HL, HLC, C, V = ("high", "low"), ("high", "low", "close"), ("close",), ("volume",)
PRICE, DIFFERENCE, SHARE = "price", "price difference", "share of price"
RETURN, PER_BAR, PERCENT, SIGNED, CLOCK = "log return", "log return a bar", "0..100", "-1..1", "-1..1"

# Function, inputs, description, unit.
_TABLE: dict[str, tuple[Callable[..., np.ndarray], tuple[str, ...], str, str]] = {
    **{
        f"{c}_return": (
            partial(log_return, column=c),
            tuple(dict.fromkeys((c, "close"))),
            f"Log {c} less last log close",
            RETURN,
        )
        for c in OHLC
    },
    **{f"log_{c}": (partial(log, column=c), (c,), f"Natural logarithm of the {c}", "log price") for c in OHLC},
    "sma": (partial(sma, n=20), C, "Simple moving average, 20 bars", PRICE),
    "ema": (partial(ema, n=20), C, "Exponential moving average, 20 bars (weight 2/21)", PRICE),
    "wma": (partial(wma, n=20), C, "Linearly weighted moving average, 20 bars", PRICE),
    "rsi": (rsi, C, "Relative strength index, 14 bars (Wilder 1978); no change: 50", PERCENT),
    "macd": (macd, C, "EMA 12 - EMA 26 (Appel 1979)", DIFFERENCE),
    "macd_signal": (macd_signal, C, "EMA 9 of macd (Appel 1979)", DIFFERENCE),
    "macd_histogram": (macd_histogram, C, "macd - macd_signal (Aspray 1986)", DIFFERENCE),
    "roc": (roc, C, "Rate of change, 12 bars", "percent"),
    "bb_upper": (partial(band, side=1), C, "SMA 20 + 2 population deviations (Bollinger 2001)", PRICE),
    "bb_lower": (partial(band, side=-1), C, "SMA 20 - 2 population deviations (Bollinger 2001)", PRICE),
    "bb_width": (bb_width, C, "BandWidth: bb_upper - bb_lower over their middle (Bollinger 2001)", SHARE),
    "bb_position": (bb_position, C, "%b: 0 at bb_lower, 1 at bb_upper (Bollinger 2001); flat: 0.5", "share of band"),
    "atr": (partial(atr, n=14), HLC, "Average true range, 14 bars (Wilder 1978)", DIFFERENCE),
    "true_range_mean": (partial(mean, of=true_range, n=14), HLC, "Plain mean of the true range, 14 bars", DIFFERENCE),
    "adx": (adx, HLC, "Average directional index, 14 bars (Wilder 1978); no movement: 0", PERCENT),
    "plus_di": (partial(di, side=1), HLC, "+DI, 14 bars, ties as on integer ticks (Wilder 1978)", PERCENT),
    "minus_di": (partial(di, side=-1), HLC, "-DI, 14 bars, ties as on integer ticks (Wilder 1978)", PERCENT),
    "stoch_k": (stoch_k, HLC, "Slow stochastic %K, 14 and 3 bars (Lane 1984); no range: 50", PERCENT),
    "stoch_d": (partial(mean, of=stoch_k, n=3), HLC, "Slow stochastic %D: SMA 3 of stoch_k (Lane 1984)", PERCENT),
    "cci": (cci, HLC, "Commodity channel index, 20 bars (Lambert 1980); no deviation: 0", "index"),
    "williams_r": (williams_r, HLC, "Williams %R, 14 bars (Williams 1973); no range: -50", "-100..0"),
    "obv": (obv, C + V, "On-balance volume since the first row (Granville 1963)", "volume"),
    "obv_rel": (obv_rel, C + V, "Change of obv over 20 bars as a share of their volume; no volume: 0", SIGNED),
    "mfi": (mfi, HLC + V, "Money flow index, 14 bars (Quong and Soudack 1989); no flow: 50", PERCENT),
    "vwap": (vwap, HLC + V, "Mean price by volume, 20 bars (Berkowitz et al. 1988); no volume: the bar's own", PRICE),
    "vwap_session": (vwap_session, HLC + V, "The same since 00:00 UTC; no volume: the bar's own", PRICE),
    "donchian_upper": (partial(highest, n=20), ("high",), "Highest of 20 bars, with this (Donchian 1960)", PRICE),
    "donchian_lower": (partial(lowest, n=20), ("low",), "Lowest of 20 bars, with this (Donchian 1960)", PRICE),
    "keltner_upper": (partial(keltner, side=1), HLC, "EMA 20 + 2 ATR 10 (Keltner 1960, Raschke's form)", PRICE),
    "keltner_lower": (partial(keltner, side=-1), HLC, "EMA 20 - 2 ATR 10 (Keltner 1960, Raschke's form)", PRICE),
    "volatility": (volatility, C, "Close-to-close volatility: sample deviation of 20 log returns", PER_BAR),
    "volatility_parkinson": (parkinson, HL, "The same from the ranges of 20 bars (Parkinson 1980)", PER_BAR),
    "volatility_garman_klass": (
        garman_klass,
        OHLC,
        "The same from ranges and bodies, 20 bars (Garman, Klass 1980)",
        PER_BAR,
    ),
    "bar_range": (bar_range, HL, "Log high less log low of the bar alone, at least 1 bp", PER_BAR),
    "bar_volatility": (
        bar_volatility,
        OHLC,
        "Volatility of the bar alone from its range and body, at least 1 bp (Garman, Klass 1980)",
        PER_BAR,
    ),
    "volatility_rogers_satchell": (
        rogers_satchell,
        OHLC,
        "Drift-free volatility, 20 bars (Rogers, Satchell 1991)",
        PER_BAR,
    ),
    "volatility_yang_zhang": (yang_zhang, OHLC, "Drift-free, with opening jumps, 20 bars (Yang, Zhang 2000)", PER_BAR),
    "volume_norm": (volume_norm, V, "Volume over its mean of 20 bars; nothing traded: 0", "ratio"),
    "volume_zscore": (volume_zscore, V, "Z-score of the volume, 20 bars, population deviation; constant: 0", "ratio"),
    "hour_sin": (partial(turn, wave=np.sin, period=DAY), (), "Time of day of the bar's start, UTC", CLOCK),
    "hour_cos": (partial(turn, wave=np.cos, period=DAY), (), "Time of day of the bar's start, UTC", CLOCK),
    "week_sin": (partial(turn, wave=np.sin, period=WEEK), (), "Time of week of the bar's start, UTC", CLOCK),
    "week_cos": (partial(turn, wave=np.cos, period=WEEK), (), "Time of week of the bar's start, UTC", CLOCK),
}


def _relative(name: str, level: Indicator) -> Indicator:
    less, text = (1.0, ", less 1") if level.unit == PRICE else (0.0, "")
    inputs = tuple(dict.fromkeys((*level.inputs, "close")))
    return Indicator(partial(relative, level=level.function, less=less), inputs, f"{name} over the close{text}", SHARE)


INDICATORS: dict[str, Indicator] = {name: Indicator(*row) for name, row in _TABLE.items()}
# Prices and differences of prices come also as a share of the close.
INDICATORS |= {f"{name}_rel": _relative(name, i) for name, i in INDICATORS.items() if i.unit in (PRICE, DIFFERENCE)}
