"""Bars and context series (stock indices, gold, the dollar) from Yahoo, through yfinance: extra `cpbkit[yahoo]`.

Taken where it is asked for by name, never a stand-in for a venue. Yahoo's crypto prices are an average over venues, and
its volumes have holes, so volume is not even kept.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from cpbkit.data.klines import INTERVAL_SECONDS, OHLC, Incomplete, Klines, series_name, validate
from cpbkit.errors import DataError, SourceError, check_name

# How many days back Yahoo serves each interval; 0: all there is.
REACH = {"1m": 7, "5m": 60, "15m": 60, "30m": 60, "1h": 730, "1d": 0, "1w": 0}


def reach(intervals: Iterable[str]) -> int:
    """Return how many days back Yahoo serves all of these intervals. Errors: UnknownName."""
    return min(REACH[check_name("interval", interval, REACH)] or 100_000 for interval in intervals)


def fetch_bars(tickers: Iterable[str], interval: str, start: str, end: str) -> dict[str, pd.DataFrame]:
    """Fetch bars: for each ticker that Yahoo has any of the float64 columns open high low close on `close_time` (UTC).

    start, end: days, both inclusive. close_time is bar start plus interval: at the latest then the bar is known
    (a stock exchange's day ends earlier). Prices are not adjusted for dividends: that would move the past by what
    came later. The bar that runs now is left out.
    Raises DataError for dates beyond Yahoo's reach, before any request; SourceError without yfinance.
    """
    tickers = list(dict.fromkeys(ticker.upper() for ticker in tickers))
    check_name("interval", interval, REACH)
    now, first, after = _now(), pd.Timestamp(start, tz="UTC"), pd.Timestamp(end, tz="UTC") + pd.Timedelta(days=1)
    if not tickers or first >= after:
        raise DataError(f"one ticker or more, and start not after end; got {tickers}, {start} .. {end}")
    oldest = now - pd.Timedelta(days=REACH[interval])
    if REACH[interval] and first < oldest:
        longer = [name for name, days in REACH.items() if not days or first >= now - pd.Timedelta(days=days)]
        raise DataError(
            f"Yahoo serves {interval} bars of the last {REACH[interval]} days, from {oldest:%Y-%m-%d} on; got start "
            f"{start}. Start later, or ask for {', '.join(longer)}"
        )
    try:
        import yfinance
    except ImportError:
        raise SourceError(
            'bars of Yahoo come through yfinance, which is not installed: pip install "cpbkit[yahoo]"'
        ) from None
    raw = yfinance.download(
        tickers,
        interval={"1w": "1wk"}.get(interval, interval),
        start=f"{first:%Y-%m-%d}",
        end=f"{after:%Y-%m-%d}",  # exclusive there
        auto_adjust=False,
        actions=False,
        ignore_tz=False,  # days too keep their zone: without it nobody knows when they ended
        progress=False,
        multi_level_index=True,
    )
    bars: dict[str, pd.DataFrame] = {}
    for ticker in tickers:
        if raw is None or not len(raw) or ("Close", ticker) not in raw.columns:
            continue
        if raw.index.tz is None:
            raise SourceError("bars need times with a zone; yfinance gave none. Update it: pip install -U yfinance")
        frame = pd.DataFrame({price: raw[(price.title(), ticker)].astype(float) for price in OHLC})
        length = pd.Timedelta(seconds=INTERVAL_SECONDS[interval])
        frame.index = (raw.index.tz_convert("UTC") + length).rename("close_time")
        frame = frame[frame.notna().all(axis=1) & (frame > 0).all(axis=1) & (frame.index <= now)].sort_index()
        frame = frame[~frame.index.duplicated(keep="last")]
        if len(frame):
            bars[ticker] = frame
    return bars


def fetch_klines(symbols: Iterable[str], intervals: Iterable[str], start: str, end: str) -> dict[str, Klines]:
    """Fetch the bars of each symbol at each interval, without volume; BTCUSDT is Yahoo's BTC-USD, SPY is SPY.

    Arguments and errors as `fetch_bars`; Incomplete where Yahoo has some of the series and not others.
    """
    tickers = {symbol: re.sub(r"USDT?$", "-USD", symbol.upper()) for symbol in symbols}
    klines, reasons = {}, {}
    for interval in intervals:
        bars = fetch_bars(tickers.values(), interval, start, end)
        step = pd.Timedelta(seconds=INTERVAL_SECONDS[interval])
        for symbol, ticker in tickers.items():
            name = series_name(symbol, interval)
            if ticker not in bars:
                reasons[name] = f"Yahoo gave no closed bar of {ticker}{_WHY_NONE}"
                continue
            frame = bars[ticker].set_axis(bars[ticker].index - step)
            last = pd.Timestamp(end, tz="UTC") + pd.Timedelta(days=1) - step
            klines[name] = validate(frame, name, source="yahoo", start=start, end=last, now=_now())
    if reasons:
        lines = [f"{name}: {why}" for name, why in reasons.items()]
        raise Incomplete("\n".join([f"{len(reasons)} series are not there.", *lines]), klines, reasons)
    return klines


_WHY_NONE = (
    ": check the ticker at finance.yahoo.com, or the dates; Yahoo also turns away whole networks for a while (notebook "
    "services share addresses): try again later"
)


def join_context(klines: Klines, context: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Put the last closed bar of each context series beside each bar: float64 `<ticker>_close`, `<ticker>_return`.

    Same index as the klines. A bar counts as known from its close on, and row t is what is known when bar t closes.
    The return is the log return of that context bar. Rows before the first closed bar are NaN.
    """
    columns: dict[str, np.ndarray] = {}
    for ticker, bars in context.items():
        times, close = bars.index.as_unit("ns").asi8, bars["close"].to_numpy(float)
        columns[f"{ticker}_close"] = klines.last_known(times, close)
        columns[f"{ticker}_return"] = klines.last_known(times, np.diff(np.log(close), prepend=np.nan))
    return pd.DataFrame(columns, index=klines.frame.index)


def add_context(bars: dict[str, Klines], tickers: Iterable[str]) -> dict[str, Klines]:
    """Return the bars with the columns of `join_context` beside them, from daily bars of the tickers.

    Daily, because Yahoo keeps finer ones for some weeks only. Raises SourceError for tickers without bars, and as
    `fetch_bars`.
    """
    tickers = [ticker.upper() for ticker in tickers]
    days = [day for each in bars.values() for day in (each.frame.index[0], each.frame.index[-1])]
    first, last = min(days) - pd.Timedelta(days=7), max(days)  # a week: the first bar needs a closed one, and holidays
    context = fetch_bars(tickers, "1d", f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}")
    if lacking := dict.fromkeys(ticker for ticker in tickers if ticker not in context):
        raise SourceError(f"Yahoo gave no closed bar of {', '.join(lacking)}{_WHY_NONE}")
    return {name: replace(each, frame=each.frame.join(join_context(each, context))) for name, each in bars.items()}


def _now() -> pd.Timestamp:
    return pd.Timestamp.now("UTC")
