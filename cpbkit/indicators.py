"""Pure, causal functions over kline columns, and the one table of them.

The value at row t uses rows <= t as they are given: a missing bar is not filled in, the row before a gap counts as the previous one.
Warm-up rows are NaN. A NaN in the input stays in windowed indicators as long as the window holds it, and in recursive ones
(EMA, Wilder, running totals) to the end. An oscillator over bars that did not move stands at its middle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from cpbkit.errors import DataError, check_name

NAN = np.nan
EPS = np.finfo(float).eps


@dataclass(frozen=True)
class Indicator:
    """One column that can be computed from bars."""

    function: Callable[["Bars"], np.ndarray]
    inputs: tuple[str, ...]  # kline columns it needs; none: the index alone
    description: str  # what it says, with the source of the formula
    unit: str  # of its values


class Bars:
    """The columns of one frame, and what was computed from them: each result once."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self.done: dict = {}

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.get(_column, column)

    def get(self, function: Callable, *arguments) -> np.ndarray:
        """Return `function(bars, *arguments)`, computed at the first call."""
        key = (function, *arguments)
        if key not in self.done:
            self.done[key] = function(self, *arguments)
        return self.done[key]


def compute(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Compute indicators by name: float64 columns in the order of `names`, on the index of `frame`.

    Raises UnknownName for a name that is not in INDICATORS, DataError for a column that the frame lacks.
    """
    names = list(names)
    for name in names:
        for column in INDICATORS[check_name("indicator", name, INDICATORS)].inputs:
            if column not in frame.columns:
                raise DataError(
                    f"{name} needs the column {column!r}; got {', '.join(map(str, frame.columns))}"
                )
    bars = Bars(frame)
    values = np.empty((len(names), len(frame)))
    with np.errstate(divide="ignore", invalid="ignore"):
        for row, name in zip(values, names, strict=True):
            row[:] = bars.get(INDICATORS[name].function)
    return pd.DataFrame(values.T, index=frame.index, columns=names, copy=False)


# Windows and recursions. x is (N,); so is every result.


def _column(b: Bars, name: str) -> np.ndarray:
    return b.frame[name].to_numpy(float)


def shift(x: np.ndarray, bars: int = 1) -> np.ndarray:
    """Return x of `bars` rows ago."""
    out = np.full(len(x), NAN)
    out[bars:] = x[: max(len(x) - bars, 0)]
    return out


def rolling(operation: np.ufunc, x: np.ndarray, n: int) -> np.ndarray:
    """Reduce each window of n rows by np.add, np.maximum or np.minimum.

    Windows of 1, 2, 4, ... rows are joined, so it takes log n passes, and unlike a running sum nothing that has left the window
    (a huge price, a NaN) leaves a trace.
    """
    rows = len(x)
    out = np.full(rows, NAN)
    if rows < n:
        return out
    part, size, block, width = (
        x,
        0,
        x,
        1,
    )  # part[i] reduces x[i : i + size], block[i] reduces x[i : i + width]
    while True:
        if n & width:
            part = operation(part[: rows - size - width + 1], block[size:]) if size else block
            size += width
        if size == n:
            break
        block = operation(block[:-width], block[width:])
        width *= 2
    out[n - 1 :] = part
    return out


def rolling_mean(x: np.ndarray, n: int) -> np.ndarray:
    """Average each window of n rows."""
    return rolling(np.add, x, n) / n


def rolling_square(x: np.ndarray, n: int) -> np.ndarray:
    """Sum the squared distances from the mean of each window of n rows.

    Two windows join by Chan, Golub and LeVeque (1979): no difference of large squares, exactly 0 for a constant where n has one or
    two bits.
    """
    rows = len(x)
    out = np.full(rows, NAN)
    if rows < n:
        return out
    zero = np.zeros(rows)
    (total, square), size, (block, block_square), width = (x, zero), 0, (x, zero), 1
    while True:
        if n & width:
            if size:
                end = rows - size - width + 1
                gap = total[:end] / size - block[size:] / width
                square = square[:end] + block_square[size:] + gap * gap * (size * width / (size + width))
                total = total[:end] + block[size:]
            else:
                total, square = block, block_square
            size += width
        if size == n:
            break
        gap = block[:-width] - block[width:]
        block_square = block_square[:-width] + block_square[width:] + gap * gap * (0.5 / width)
        block = block[:-width] + block[width:]
        width *= 2
    out[n - 1 :] = square
    return out


def recursive(x: np.ndarray, alpha: float, first: int, seed: float) -> np.ndarray:
    """Smooth exponentially: `y[t] = alpha x[t] + (1 - alpha) y[t-1]`, with y[first] = seed and NaN before it."""
    out = np.full(len(x), NAN)
    if first < len(x):
        out[first] = seed
        out[first + 1 :] = lfilter([alpha], [1.0, alpha - 1.0], x[first + 1 :], zi=[(1.0 - alpha) * seed])[0]
    return out


def average(x: np.ndarray, alpha: float, n: int, start: int = 0) -> np.ndarray:
    """Smooth exponentially from the simple mean of rows start .. start + n - 1 on, the start that TA-Lib takes."""
    if len(x) < start + n:
        return np.full(len(x), NAN)
    return recursive(x, alpha, start + n - 1, x[start : start + n].mean())


def ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    """Divide; `otherwise` where the divisor is 0."""
    return np.where(below == 0, otherwise, above / below)


# Intermediate results, shared through Bars.get.


def log(b: Bars, column: str) -> np.ndarray:
    return np.log(b[column])


def log_return(b: Bars, column: str) -> np.ndarray:
    return b.get(log, column) - shift(b.get(log, "close"))


def change(b: Bars) -> np.ndarray:
    return b["close"] - shift(b["close"])


def sma(b: Bars, n: int, column: str = "close") -> np.ndarray:
    return rolling_mean(b[column], n)


def ema(b: Bars, n: int, start: int = 0) -> np.ndarray:
    return average(b["close"], 2 / (n + 1), n, start)


def highest(b: Bars, n: int) -> np.ndarray:
    return rolling(np.maximum, b["high"], n)


def lowest(b: Bars, n: int) -> np.ndarray:
    return rolling(np.minimum, b["low"], n)


def deviation(b: Bars, column: str, n: int) -> np.ndarray:
    return np.sqrt(rolling_square(b[column], n) / n)


def true_range(b: Bars) -> np.ndarray:
    previous = shift(b["close"])
    return np.maximum(b["high"], previous) - np.minimum(b["low"], previous)


def atr(b: Bars, n: int) -> np.ndarray:
    return average(b.get(true_range), 1 / n, n, start=1)


def macd(b: Bars) -> np.ndarray:
    return b.get(ema, 12, 14) - b.get(
        ema, 26
    )  # the fast one starts late, so that both have their first value at row 25


def macd_signal(b: Bars) -> np.ndarray:
    return average(b.get(macd), 2 / 10, 9, start=25)


def rsi(b: Bars) -> np.ndarray:
    step = b.get(change)
    gain = average(np.maximum(step, 0.0), 1 / 14, 14, start=1)
    loss = average(np.maximum(-step, 0.0), 1 / 14, 14, start=1)
    return 100.0 * ratio(gain, gain + loss, 0.5)


def band(b: Bars, side: int) -> np.ndarray:
    return b.get(sma, 20) + side * 2.0 * b.get(deviation, "close", 20)


def volatility(b: Bars) -> np.ndarray:
    return np.sqrt(rolling_square(b.get(log_return, "close"), 20) / 19)


def over(level: Callable, *arguments) -> Callable[[Bars], np.ndarray]:
    """Turn a price level into its distance from the close, as a share of it; a band below zero stays finite."""
    return lambda b: b.get(level, *arguments) / b["close"] - 1.0


def share(size: Callable, *arguments) -> Callable[[Bars], np.ndarray]:
    """Turn a price difference into a share of the close."""
    return lambda b: b.get(size, *arguments) / b["close"]


C, HLC = ("close",), ("high", "low", "close")

INDICATORS: dict[str, Indicator] = {
    **{
        f"{column}_return": Indicator(
            lambda b, column=column: b.get(log_return, column),
            tuple(dict.fromkeys((column, "close"))),
            f"Log return of the bar's {column} from the close before it",
            "log return",
        )
        for column in ("open", "high", "low", "close")
    },
    **{
        f"log_{column}": Indicator(
            lambda b, column=column: b.get(log, column),
            (column,),
            f"Natural logarithm of the bar's {column}",
            "log price",
        )
        for column in ("open", "high", "low", "close")
    },
    "rsi": Indicator(rsi, C, "Relative strength index, 14 bars (Wilder 1978); no change: 50", "0..100"),
    "macd": Indicator(macd, C, "EMA 12 - EMA 26 of the close (Appel 1979)", "price"),
    "macd_signal": Indicator(macd_signal, C, "EMA 9 of macd (Appel 1979)", "price"),
    "macd_rel": Indicator(share(macd), C, "macd over the close", "share of price"),
    "macd_signal_rel": Indicator(share(macd_signal), C, "macd_signal over the close", "share of price"),
    "roc": Indicator(
        lambda b: 100.0 * (b["close"] / shift(b["close"], 12) - 1.0),
        C,
        "Rate of change over 12 bars",
        "percent",
    ),
    "bb_upper": Indicator(
        lambda b: b.get(band, 1), C, "SMA 20 + 2 population standard deviations (Bollinger 2001)", "price"
    ),
    "bb_lower": Indicator(
        lambda b: b.get(band, -1), C, "SMA 20 - 2 population standard deviations (Bollinger 2001)", "price"
    ),
    "bb_upper_rel": Indicator(over(band, 1), C, "bb_upper over the close, minus 1", "share of price"),
    "bb_lower_rel": Indicator(over(band, -1), C, "bb_lower over the close, minus 1", "share of price"),
    "bb_width": Indicator(
        lambda b: 4.0 * b.get(deviation, "close", 20) / b.get(sma, 20),
        C,
        "BandWidth: distance of the Bollinger bands over their middle (Bollinger 2001)",
        "share of price",
    ),
    "bb_position": Indicator(
        lambda b: ratio(b["close"] - b.get(band, -1), b.get(band, 1) - b.get(band, -1), 0.5),
        C,
        "%b: 0 at the lower Bollinger band, 1 at the upper (Bollinger 2001); no band: 0.5",
        "share of band",
    ),
    "volatility": Indicator(
        volatility, C, "Close-to-close: sample standard deviation of 20 log returns", "log return a bar"
    ),
    "atr": Indicator(lambda b: b.get(atr, 14), HLC, "Average true range, 14 bars (Wilder 1978)", "price"),
    "atr_rel": Indicator(share(atr, 14), HLC, "atr over the close", "share of price"),
    "volume_norm": Indicator(
        lambda b: ratio(b["volume"], b.get(sma, 20, "volume"), 0.0),
        ("volume",),
        "Volume over its mean of 20 bars; nothing traded: 0",
        "ratio",
    ),
}
