"""Seeded bars and a seeded network trace that say what they are: for demos, tests and baselines with a known answer."""

import zlib
from collections.abc import Iterable

import numpy as np
import pandas as pd
import scipy

from cpbkit.config.experiment import SYMBOLS
from cpbkit.data.klines import (
    DAY_SECONDS,
    INTERVAL_SECONDS,
    OHLCV,
    SECOND_NS,
    Klines,
    first_bar,
    grid_phase,
    join_bars,
    series_name,
    validate,
)
from cpbkit.errors import DataError, check_name

# In a predictable series this share of the variance of an hour's log return is set by the bar before it, all of it in
# the hour's first quarter: so it is this share of 15m bars too, and one bar ahead in both.
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
LONGEST = 20_000  # days: twenty coins of them take some gigabytes
QUARTER = 900  # s; what all bars are made of: longer ones are put together, shorter ones are cut out
BLOCK = 2016  # quarters that are drawn at a time, three weeks: a day is the same whatever range is asked for
PRICED = 1_735_689_600 // (QUARTER * BLOCK)  # the block that begins at START_PRICES: that of 2025-01-01
WICK, LAST_WICK = 0.5, 3.5  # of a quarter, in standard deviations of its return; of the last quarter of an hour


def predictable_series(symbols: Iterable[str], intervals: Iterable[str], seed: int = 0) -> frozenset[str]:
    """Name the series of `make_market` whose next bar can be forecast from high and low; in the others nothing can.

    Every second coin, by its place in SYMBOLS (an unknown one by its name); the seed decides which half. As much as
    `planted_skill` says can be forecast of 15m and 1h bars; of longer ones little.
    """
    intervals = list(intervals)
    return frozenset(
        series_name(symbol, interval) for symbol in symbols if _is_planted(symbol, seed) for interval in intervals
    )


def _is_planted(symbol: str, seed: int) -> bool:
    place = SYMBOLS.index(symbol) if symbol in SYMBOLS else zlib.crc32(symbol.encode())
    return (place + seed) % 2 == 0


def planted_skill(horizon: int) -> float:
    """Return the RMSE skill over persistence that no forecast of the next 1..horizon closes can pass, of 15m or 1h.

    Closed form: the planted part moves one bar, so of the summed variance 1 + 2 + ... + H of the log returns from
    the last close, in variances of one bar, H * PLANTED_SHARE is known: 1 - sqrt(1 - 2 PLANTED_SHARE / (H + 1)).
    """
    return 1.0 - np.sqrt(1.0 - 2.0 * PLANTED_SHARE / (horizon + 1))


def make_market(
    symbols: Iterable[str], intervals: Iterable[str], start: str, end: str, seed: int = 0
) -> dict[str, Klines]:
    """Draw a market: coins that move together, in volatile and calm spells, with fat tails, halts and idle bars.

    start, end: UTC days, both inclusive. A coin has one path, the same to the bit whatever range, intervals and other
    coins are asked for: 1h bars are four of 15m put together.
    In the series that `predictable_series` names, how far the last quarter of an hour reaches above and below its body
    moves the first quarter of the next hour; close returns alone are white noise in all. Raises DataError for dates in
    the wrong order.
    """
    symbols, intervals = list(symbols), list(intervals)
    first, after = (pd.Timestamp(day, tz="UTC") for day in (start, end))
    after += pd.Timedelta(days=1)
    if first >= after:
        raise DataError(f"start must not be after end; got {start} .. {end}")
    if (after - first).days > LONGEST:
        raise DataError(f"made-up bars may span {LONGEST:,} days; got {start} .. {end}")
    grids: dict[str, tuple[int, int, int, int]] = {}
    for interval in intervals:
        step = INTERVAL_SECONDS[check_name("interval", interval, INTERVAL_SECONDS)]
        phase = grid_phase(interval, np.empty(0)) // SECOND_NS
        low, high = (first_bar(int(t.timestamp()), step, phase) for t in (first, after))
        if low >= high:
            raise DataError(f"no {interval} bar starts within {start} .. {end}; ask for more days")
        grids[interval] = low, high, step, phase
    size = BLOCK * QUARTER
    blocks = range(min(grid[0] for grid in grids.values()) // size, -(-max(grid[1] for grid in grids.values()) // size))
    *together, missing = _draw_market(blocks, seed)
    market = {}
    for symbol in symbols:
        quarters = _draw_coin(symbol, blocks, together, seed)
        fine = any(grid[2] < QUARTER for grid in grids.values())
        minutes = _cut(quarters, symbol, blocks, seed) if fine else quarters
        for interval, (low, high, step, phase) in grids.items():
            bars = minutes if step < QUARTER else quarters
            length = size * len(blocks) // len(bars)
            starts = blocks[0] * size + length * np.arange(len(bars))
            there = (starts >= low) & (starts < high) & ~np.repeat(missing.ravel(), QUARTER // length)
            starts, values = starts[there], bars[there]
            if step > length:
                starts, values, _ = join_bars(starts, values, step, phase)
            index = pd.DatetimeIndex(starts * SECOND_NS, tz="UTC", name="open_time")
            market[series_name(symbol, interval)] = validate(
                pd.DataFrame(values, index, OHLCV),
                series_name(symbol, interval),
                source="synthetic",
                start=low * SECOND_NS,
                end=(high - step) * SECOND_NS,
                notes=[f"Synthetic: drawn from seed {seed}, with halts and idle bars; no market made these bars."],
                synthetic=True,
            )
    return market


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


def _draw(seed: int, *what: str | int) -> np.random.Generator:
    # A stream for each use: a longer range goes on where the shorter one ended.
    return np.random.default_rng([seed, *(zlib.crc32(w.encode()) if isinstance(w, str) else w for w in what)])


def _autoregression(shocks: np.ndarray, rho: float) -> np.ndarray:
    """Run an AR(1) of variance 1 over standard shocks (..., N), from its stationary state."""
    scaled = np.sqrt(1.0 - rho * rho) * shocks
    scaled[..., :1] = shocks[..., :1]
    return scipy.signal.lfilter([1.0], [1.0, -rho], scaled)


def _student(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_t(TAIL, BLOCK) * np.sqrt((TAIL - 2) / TAIL)


def _walk(blocks: range, seed: int, what: str) -> np.ndarray:
    """Return a random walk of steps of variance 1 at the start of each block and at the end of the last: (B + 1,)."""
    at = np.arange(blocks.start, blocks.stop + 1) - PRICED
    steps = [_draw(seed, f"{what}/{way}").normal(size=np.abs(at).max()) for way in ("before", "after")]
    before, after = (np.append(0.0, np.cumsum(each)) for each in steps)
    return np.where(at < 0, before[np.maximum(-at, 0)], after[np.maximum(at, 0)])


def _draw_market(blocks: range, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw what all coins share: shocks and log volatility (B, BLOCK), a walk from block to block (B + 1,).

    Then which quarters the venue did not make (B, BLOCK). B blocks.
    """
    rngs = [_draw(seed, "market", block) for block in blocks]
    # Each block begins anew, whatever was before it: the state of three weeks ago would be forgotten anyway.
    spell = _autoregression(np.stack([rng.normal(size=BLOCK) for rng in rngs]), np.exp(-QUARTER / (0.5 * DAY_SECONDS)))
    seconds = QUARTER * np.arange(blocks.start * BLOCK, blocks.stop * BLOCK).reshape(spell.shape)
    day = 2 * np.pi * (seconds % DAY_SECONDS) / DAY_SECONDS
    weekend = ((seconds // DAY_SECONDS + 3) % 7) >= 5
    rhythm = 0.25 * np.cos(day - 2 * np.pi * 15 / 24) - 0.2 * weekend  # busiest at 15:00 UTC
    missing = np.zeros(spell.shape, bool)
    for row, rng in zip(missing, rngs, strict=True):
        begin, length = rng.integers(200, BLOCK - 8), rng.integers(1, 8)
        row[begin : begin + length * (4 if begin % 2 else 1)] = True  # up to seven quarters, or hours
    shocks = np.stack([_student(rng) for rng in rngs])
    return shocks, 0.25 * spell + rhythm, _walk(blocks, seed, "market"), missing  # spells of half a day


def _draw_coin(symbol: str, blocks: range, together: Iterable[np.ndarray], seed: int) -> np.ndarray:
    """Return the quarters of a coin, halts too: prices and volume (B * BLOCK, 5)."""
    shared_shocks, log_volatility, shared_walk = together
    rngs = [_draw(seed, symbol, block) for block in blocks]
    own, noise, jitter = np.stack([rng.normal(size=(3, BLOCK)) for rng in rngs], axis=1)
    own, noise = 0.2 * _autoregression(own, np.exp(-QUARTER / DAY_SECONDS)), _autoregression(noise, 0.8)
    shock = np.stack([_student(rng) for rng in rngs])
    size = np.stack([rng.gamma(2.0, 0.5, BLOCK) for rng in rngs])
    lean = np.stack([rng.uniform(-1, 1, BLOCK) for rng in rngs])
    idle = np.stack([rng.random(BLOCK) for rng in rngs]) < 1 / 1500

    character = _draw(seed, symbol)
    daily = character.uniform(0.02, 0.045)
    sigma = daily * np.sqrt(QUARTER / DAY_SECONDS) * np.exp(log_volatility + own)  # of a bar's log return
    # What moves the next hour is seen in the last quarter alone: its wicks are long and lopsided.
    lean *= np.where(np.arange(BLOCK) % 4 == 3, 0.95, 0.3)  # -1: all wick below the body, 1: above
    lean[idle] = 0.0
    pull = np.zeros_like(lean)
    pull[:, 4::4] = lean[:, 3:-1:4] * 2 / (0.95 / np.sqrt(3))  # variance 4, that of an hour
    shock = np.sqrt(MARKET_SHARE) * shared_shocks + np.sqrt(1 - MARKET_SHARE) * shock
    share = PLANTED_SHARE if _is_planted(symbol, seed) else 0.0
    returns = sigma * (np.sqrt(share) * pull + np.sqrt(1 - share) * shock)
    returns[idle] = 0.0

    # Where a block begins and ends is drawn from block to block; what its returns lack is spread over them.
    price = START_PRICES.get(symbol) or float(np.exp(character.uniform(np.log(1e-4), np.log(1e3))))
    walk = np.sqrt(MARKET_SHARE) * shared_walk + np.sqrt(1 - MARKET_SHARE) * _walk(blocks, seed, symbol)
    level = np.log(price) + daily * np.sqrt(BLOCK * QUARTER / DAY_SECONDS) * walk
    weight = sigma**2 * ~idle
    lacking = np.diff(level) - returns.sum(axis=1)
    returns += weight * (lacking / weight.sum(axis=1))[:, None]
    close = level[:-1, None] + np.cumsum(returns, axis=1)
    open_ = np.column_stack((level[:-1], close[:, :-1]))
    open_ += np.where(idle, 0.0, 0.02 * sigma * jitter)
    wick = sigma * (0.7 + 0.3 * size) * np.where(np.arange(BLOCK) % 4 == 3, LAST_WICK, WICK) * ~idle
    high = np.maximum(open_, close) + wick * (1 + lean) / 2
    low = np.minimum(open_, close) - wick * (1 - lean) / 2
    surprise = np.abs(returns) / sigma
    turnover = 1e5 * np.exp(log_volatility + 0.4 * surprise + 0.35 * noise)  # quote currency
    volume = np.where(idle, 0.0, turnover / np.exp(close))
    return np.column_stack([*(np.exp(each).ravel() for each in (open_, high, low, close)), volume.ravel()])


def _cut(quarters: np.ndarray, symbol: str, blocks: range, seed: int) -> np.ndarray:
    """Cut quarters (N, 5) into minutes (15 N, 5), which put together are those quarters again."""
    o, h, lo, c, volume = (column[:, None] for column in quarters.T)
    rngs = [_draw(seed, f"{symbol}/minutes", block) for block in blocks]
    walk = np.cumsum(np.concatenate([rng.normal(size=(BLOCK, 15)) for rng in rngs]), axis=1)
    parts = 0.5 + np.concatenate([rng.random((BLOCK, 15)) for rng in rngs])
    place = np.concatenate([rng.integers(15, size=(2, BLOCK, 1)) for rng in rngs], axis=1)
    share = np.arange(1, 16) / 15
    close = np.clip(o + (c - o) * share + (walk - walk[:, -1:] * share) * (h - lo) / 10, lo, h)
    close[:, -1:] = c
    open_ = np.column_stack((o, close[:, :-1]))
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    np.put_along_axis(high, place[0], h, axis=1)
    np.put_along_axis(low, place[1], lo, axis=1)
    volume = volume * parts / parts.sum(axis=1, keepdims=True)
    return np.column_stack([each.ravel() for each in (open_, high, low, close, volume)])
