"""The same seeded series for every side of every ratio."""

import datetime as dt
import math

from cpbkit.data.klines import INTERVAL_SECONDS
from cpbkit.data.synthetic import make_market
from cpbkit.experiment import SYMBOLS, Task
from cpbkit.windows import Series, from_klines

BARS = 5000  # of 15 minutes, as many as the loop in circulation takes
START = dt.date(2025, 1, 1)


def symbols(count: int) -> tuple[str, ...]:
    """Return so many symbols: the kit's twenty coins, then made-up ones."""
    return (SYMBOLS + tuple(f"COIN{i:03d}USDT" for i in range(len(SYMBOLS), count)))[:count]


def make_series(task: Task, count: int, bars: int = BARS, interval: str = "15m") -> tuple[Series, ...]:
    """Make so many series of a task from the seeded market."""
    days = math.ceil(bars * INTERVAL_SECONDS[interval] / 86_400)
    end = START + dt.timedelta(days=days - 1)
    market = make_market(symbols(count), [interval], START.isoformat(), end.isoformat())
    return tuple(from_klines(klines, task) for klines in market.values())
