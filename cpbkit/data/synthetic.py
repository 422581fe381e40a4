"""Seeded bars and a seeded network trace that say what they are: for demos, tests and baselines with a known answer."""

import zlib
from collections.abc import Iterable

import numpy as np
import pandas as pd
import scipy

from cpbkit.config.experiment import SYMBOLS
from cpbkit.data.klines import INTERVAL_SECONDS, SECOND_NS, Klines, first_bar, grid_phase, series_name, validate
from cpbkit.errors import DataError, check_name

# In a predictable series this share of the variance of a bar's log return is set by the bar before it.
PLANTED_SHARE = 0.38
MARKET_SHARE = 0.55  # of the variance that is left, from the move that all coins share
TAIL = 5  # degrees of freedom of Student's t, of the market's and of each coin's shocks
START_PRICES = dict(
    zip(
        SYMBOLS,
        (60_000, 3_000, 550, 0.6, 85, 0.45, 150, 0.12, 35, 14, 8, 9, 5, 2, 1.1, 2.2, 1e-5, 24, 2.2e-5, 0.8),
        strict=True,
    )
)
DAY_SECONDS = 86_400


def predictable_series(symbols: Iterable[str], intervals: Iterable[str], seed: int = 0) -> frozenset[str]:
    """Name the series of `make_market` whose next bar can be forecast from high and low; in the others nothing can.

    Every second coin, by its place in SYMBOLS (an unknown one by its name); the seed decides which half.
    """

    def place(symbol):
        return SYMBOLS.index(symbol) if symbol in SYMBOLS else zlib.crc32(symbol.encode())

    intervals = list(intervals)
    return frozenset(
        series_name(symbol, interval) for symbol in symbols for interval in intervals if (place(symbol) + seed) % 2 == 0
    )


def planted_skill(horizon: int) -> float:
    """Return the RMSE skill over persistence that no forecast of the next 1..horizon closes can pass.

    Closed form: the planted part moves one bar, so of the summed variance 1 + 2 + ... + H of the log returns from
    the last close, in variances of one bar, H * PLANTED_SHARE is known: 1 - sqrt(1 - 2 PLANTED_SHARE / (H + 1)).
    """
    return 1.0 - np.sqrt(1.0 - 2.0 * PLANTED_SHARE / (horizon + 1))


def make_market(
    symbols: Iterable[str], intervals: Iterable[str], start: str, end: str, seed: int = 0
) -> dict[str, Klines]:
    """Draw a market: coins that move together, in volatile and calm spells, with fat tails, halts and idle bars.

    start, end: UTC days, both inclusive. Each interval is a market of its own: 1h bars are not sums of 15m bars.
    A bar is the same whatever else is asked for, and however late the range ends.
    In the series that `predictable_series` names, where high and low lie around the body moves the next close; close
    returns alone are white noise in all. Raises DataError for dates in the wrong order.
    """
    symbols, intervals = list(symbols), list(intervals)
    planted = predictable_series(symbols, intervals, seed)
    first, after = (pd.Timestamp(day, tz="UTC") for day in (start, end))
    after += pd.Timedelta(days=1)
    if first >= after:
        raise DataError(f"start must not be after end; got {start} .. {end}")
    market = {}
    for interval in intervals:
        step = INTERVAL_SECONDS[check_name("interval", interval, INTERVAL_SECONDS)]
        phase = grid_phase(interval, np.empty(0)) // SECOND_NS
        low, high = (first_bar(int(t.timestamp()), step, phase) for t in (first, after))
        seconds = np.arange(low, high, step)
        if not len(seconds):
            raise DataError(f"no {interval} bar starts within {start} .. {end}; ask for more days")
        shared = _shared(interval, seconds, step, seed)
        for symbol in symbols:
            name = series_name(symbol, interval)
            market[name] = _series(symbol, name, seconds, step, shared, name in planted, seed)
    return {series_name(s, i): market[series_name(s, i)] for s in symbols for i in intervals}


def make_network_trace(seed: int, rows: int) -> pd.DataFrame:
    """Draw what a sender of video sees of its link, a row every 200 ms, with the link's bandwidth as the target.

    Columns: delay (ms, with rare glitches far out), loss_ratio, receiving_rate, prev_bandwidth (of the row before),
    delay_gradient (ms from the row before), throughput (received and not lost) and bandwidth, all rates in bit/s.
    About one row in twenty is congested. The target is of order 1e6, so it must be scaled.
    """
    step = 0.2  # seconds

    def draw(what):
        return _draw(seed, f"network/{what}")

    slow = _autoregression(draw("bandwidth").normal(size=rows), 0.98**step)
    begins = draw("congestion").random(rows) < step / 400
    left = scipy.signal.lfilter([1.0], [1.0, -(0.92**step)], begins.astype(float))  # each fades over some 20 seconds
    capacity = 3e6 * np.exp(0.45 * slow - 1.6 * np.minimum(left, 1.0))
    bandwidth = capacity * np.exp(0.2 * draw("flicker").normal(size=rows))

    late, keep = round(1 / step), 0.6**step  # the sender learns a second late, and smooths
    known = np.append(np.repeat(bandwidth[:1], late), bandwidth)[:rows]
    known = scipy.signal.lfilter([1 - keep], [1.0, -keep], known, zi=keep * known[:1])[0] if rows else known
    send = 0.9 * known * np.exp(0.08 * draw("send").normal(size=rows))
    backlog = np.cumsum(send - bandwidth) * step
    queue = backlog - np.minimum.accumulate(np.minimum(backlog, 0.0))  # bits that wait (Lindley 1952)
    lost = np.clip((queue / capacity - 4.0) / 4.0, 0.0, 0.6)
    delay = 40.0 + 1e3 * np.minimum(queue / capacity, 4.0) + draw("delay").gamma(2.0, 3.0, rows)
    glitch = draw("glitch").random(rows) < 1 / 5000
    delay = np.where(glitch, 1e3 * draw("size").uniform(10, 455, rows), delay)
    received, lost = np.minimum(send * (1.0 - lost), bandwidth), lost + 0.002 * draw("loss").random(rows)
    return pd.DataFrame(
        {
            "delay": delay,
            "loss_ratio": lost,
            "receiving_rate": received,
            "prev_bandwidth": np.append(bandwidth[:1], bandwidth)[:rows],
            "delay_gradient": np.diff(delay, prepend=delay[:1]),
            "throughput": received * (1.0 - lost),
            "bandwidth": bandwidth,
        },
        index=pd.date_range("2025-01-01", periods=rows, freq="200ms", tz="UTC", name="time", unit="ns"),
    )


def _draw(seed: int, what: str) -> np.random.Generator:
    # A stream for each use: a longer range goes on where the shorter one ended.
    return np.random.default_rng([seed, zlib.crc32(what.encode())])


def _autoregression(shocks: np.ndarray, rho: float) -> np.ndarray:
    """Run an AR(1) of variance 1 over standard shocks, from its stationary state."""
    scaled = np.sqrt(1.0 - rho * rho) * shocks
    scaled[:1] = shocks[:1]
    return scipy.signal.lfilter([1.0], [1.0, -rho], scaled)


def _student(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.standard_t(TAIL, rows) * np.sqrt((TAIL - 2) / TAIL)


def _shared(interval: str, seconds: np.ndarray, step: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return what all coins share: shocks, log volatility, and which bars the venue did not make."""
    rows = len(seconds)
    rho = np.exp(-step / (0.5 * DAY_SECONDS))  # spells of half a day
    spell = 0.25 * _autoregression(_draw(seed, f"{interval}/spell").normal(size=rows), rho)
    day = 2 * np.pi * (seconds % DAY_SECONDS) / DAY_SECONDS
    weekend = ((seconds // DAY_SECONDS + 3) % 7) >= 5
    rhythm = 0.25 * np.cos(day - 2 * np.pi * 15 / 24) - 0.2 * weekend  # busiest at 15:00 UTC
    missing = np.zeros(rows, bool)
    halts = _draw(seed, f"{interval}/halts").integers(200, 2000, (rows // 2000 + 1, 2))
    for begin, length in halts + [2000, 0] * np.arange(len(halts))[:, None]:
        missing[begin : begin + 1 + length % 7] = True  # one in each 2000 bars
    return _student(_draw(seed, f"{interval}/market"), rows), spell + rhythm, missing


def _series(symbol: str, name: str, seconds: np.ndarray, step: int, shared: tuple, planted: bool, seed: int) -> Klines:
    rows = len(seconds)
    together, log_volatility, missing = shared
    own = 0.2 * _autoregression(_draw(seed, f"{name}/spell").normal(size=rows), np.exp(-step / DAY_SECONDS))
    character = _draw(seed, symbol)
    daily = character.uniform(0.02, 0.045)
    sigma = daily * np.sqrt(step / DAY_SECONDS) * np.exp(log_volatility + own)  # of a bar's log return
    idle = _draw(seed, f"{name}/idle").random(rows) < 1 / 1500

    lean = _draw(seed, f"{name}/lean").uniform(-0.95, 0.95, rows)  # -1: all wick below the body, 1: above
    lean[idle] = 0.0
    pull = np.append(0.0, lean[:-1]) / (0.95 / np.sqrt(3))  # variance 1
    shock = np.sqrt(MARKET_SHARE) * together
    shock += np.sqrt(1 - MARKET_SHARE) * _student(_draw(seed, f"{name}/shock"), rows)
    share = PLANTED_SHARE if planted else 0.0
    returns = sigma * (np.sqrt(share) * pull + np.sqrt(1 - share) * shock)
    returns[idle] = 0.0
    price = START_PRICES.get(symbol) or float(np.exp(character.uniform(np.log(1e-4), np.log(1e3))))
    close = np.log(price) + np.cumsum(returns)
    open_ = np.append(np.log(price), close[:-1])
    open_ += np.where(idle, 0.0, 0.02 * sigma * _draw(seed, f"{name}/open").normal(size=rows))
    wick = sigma * (0.7 + 0.3 * _draw(seed, f"{name}/wick").gamma(2.0, 0.5, rows)) * ~idle
    high = np.maximum(open_, close) + wick * (1 + lean) / 2
    low = np.minimum(open_, close) - wick * (1 - lean) / 2

    surprise = np.abs(returns) / sigma
    noise = _autoregression(_draw(seed, f"{name}/volume").normal(size=rows), 0.8)
    turnover = 1e5 * step / 900 * np.exp(log_volatility + 0.4 * surprise + 0.35 * noise)  # quote currency
    frame = pd.DataFrame(
        {
            "open": np.exp(open_),
            "high": np.exp(high),
            "low": np.exp(low),
            "close": np.exp(close),
            "volume": np.where(idle, 0.0, turnover / np.exp(close)),
        },
        index=pd.DatetimeIndex(seconds * SECOND_NS, tz="UTC", name="open_time"),
    )
    note = f"Synthetic: drawn from seed {seed}, with halts and idle bars; no market made these bars."
    start, end = frame.index[[0, -1]]
    return validate(frame[~missing], name, source="synthetic", start=start, end=end, notes=[note], synthetic=True)
