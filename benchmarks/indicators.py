"""`python -m benchmarks.indicators`: the indicator table against TA-Lib, the same set on the same bars."""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import pandas as pd

from cpbkit.bench.market import make_bars
from cpbkit.bench.report import about, duration, ratio
from cpbkit.hardware import provenance
from cpbkit.indicators import INDICATORS, compute

BARS = 24_000  # of one series
YEAR = 35_040  # bars of 15 minutes
SERIES = 40
ROUNDS, QUICK_ROUNDS = 25, 7


def bench_indicators(*, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> dict:
    """Time both sides in turns, in CPU seconds of this thread; return the document that `render` shows.

    Where TA-Lib is missing its side is absent and `missing` says so.
    """
    document = {"bench": "indicators", **provenance.describe(), "bars": BARS}
    frame = next(iter(make_bars(1, BARS).values())).frame.iloc[:BARS]
    year = next(iter(make_bars(1, YEAR).values())).frame
    rounds = QUICK_ROUNDS if quick else ROUNDS
    sides: dict[str, Callable[[], object]] = {
        "all": lambda: compute(frame, INDICATORS),
        "year": lambda: compute(year, INDICATORS),
    }
    try:
        theirs = ta_lib_set(frame)
        names = list(theirs())
    except ImportError:
        document["missing"] = "TA-Lib is not installed: pip install TA-Lib"
    else:
        sides |= {"ours": lambda: compute(frame, names), "theirs": theirs}
    say(f"{len(INDICATORS)} indicators, {BARS:,} bars, {rounds} rounds")
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, call in sides.items():
            begun = time.thread_time()
            call()
            if turn:  # the first round warms up
                times[name].append(time.thread_time() - begun)
    middle = {name: statistics.median(values) for name, values in times.items()}
    document |= {
        "all": {"indicators": len(INDICATORS), "seconds": middle["all"]},
        "forty_series": {"bars": len(year), "series": SERIES, "seconds": SERIES * middle["year"], "scaled": True},
    }
    if "theirs" in sides:
        ratios = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)]
        document["ratio"] = {
            "indicators": names,
            "ours": middle["ours"],
            "theirs": middle["theirs"],
            "unit": "s",
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return document


def ta_lib_set(frame: pd.DataFrame) -> Callable[[], dict[str, np.ndarray]]:
    """Return a function that computes with TA-Lib what it has of the table, each shared part once.

    The arrays are laid out as TA-Lib takes them, before the clock starts. Raises ImportError where it is missing.
    """
    import talib

    high, low, close, volume = (np.ascontiguousarray(frame[c], np.float64) for c in ("high", "low", "close", "volume"))

    def compute_all() -> dict[str, np.ndarray]:
        macd, signal, histogram = talib.MACD(close, 12, 26, 9)
        upper, middle, lower = talib.BBANDS(close, 20, 2, 2, 0)
        slow_k, slow_d = talib.STOCH(high, low, close, 14, 3, 0, 3, 0)
        ema, reach = talib.EMA(close, 20), 2 * talib.ATR(high, low, close, 10)
        return {
            "sma": talib.SMA(close, 20),
            "ema": ema,
            "wma": talib.WMA(close, 20),
            "rsi": talib.RSI(close, 14),
            "macd": macd,
            "macd_signal": signal,
            "macd_histogram": histogram,
            "roc": talib.ROC(close, 12),
            "bb_upper": upper,
            "bb_lower": lower,
            "bb_width": (upper - lower) / middle,
            "atr": talib.ATR(high, low, close, 14),
            "adx": talib.ADX(high, low, close, 14),
            "plus_di": talib.PLUS_DI(high, low, close, 14),
            "minus_di": talib.MINUS_DI(high, low, close, 14),
            "stoch_k": slow_k,
            "stoch_d": slow_d,
            "cci": talib.CCI(high, low, close, 20),
            "williams_r": talib.WILLR(high, low, close, 14),
            "obv": talib.OBV(close, volume),
            "mfi": talib.MFI(high, low, close, volume, 14),
            "donchian_upper": talib.MAX(high, 20),
            "donchian_lower": talib.MIN(low, 20),
            "keltner_upper": ema + reach,
            "keltner_lower": ema - reach,
        }

    return compute_all


def render(document: dict) -> list[str]:
    """Show what was measured as lines of text."""
    whole, forty = document["all"], document["forty_series"]
    lines = [
        f"CPU seconds, {document['bars']:,} bars",
        f"all {whole['indicators']} indicators: {1e3 * whole['seconds']:.1f} ms",
        f"{forty['series']} series x {forty['bars']:,} bars: {duration(forty['seconds'])}, scaled from one series",
    ]
    if "missing" in document:
        return [*lines, f"Not compared: {document['missing']}"]
    row = document["ratio"]
    return [
        *lines,
        f"the {len(row['indicators'])} that TA-Lib has too: {1e3 * row['ours']:.2f} ms, "
        f"TA-Lib {1e3 * row['theirs']:.2f} ms: {ratio(row)} its time",
    ]


if __name__ == "__main__":
    measured = bench_indicators(quick="--quick" in sys.argv[1:])
    print(*about(measured), "", *render(measured), sep="\n")
