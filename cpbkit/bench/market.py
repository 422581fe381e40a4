"""The same seeded series for every side of every ratio."""

import datetime as dt
import math

from cpbkit.config.experiment import SYMBOLS, Task
from cpbkit.config.presets import NETWORK
from cpbkit.data.klines import INTERVAL_SECONDS, Klines
from cpbkit.data.synthetic import make_market, make_network_trace
from cpbkit.windows.series import Series, from_klines, from_table

INTERVAL = "15m"
BARS = 5000  # as many as the loop in circulation takes
START = dt.date(2025, 1, 1)


def make_bars(count: int, bars: int = 0) -> dict[str, Klines]:
    """Draw so many series of the seeded market, whole days, at least so many bars each; 0 takes BARS.

    They are of the kit's twenty coins, then of made-up ones.
    """
    symbols = (*SYMBOLS, *(f"COIN{i:03d}USDT" for i in range(len(SYMBOLS), count)))[:count]
    days = math.ceil((bars or BARS) * INTERVAL_SECONDS[INTERVAL] / 86_400)
    end = START + dt.timedelta(days=days - 1)
    return make_market(symbols, [INTERVAL], START.isoformat(), end.isoformat())


def make_series(task: Task, count: int, bars: int = 0) -> tuple[Series, ...]:
    """Make so many series of a task: from the seeded market, or from network traces where it asks for their columns."""
    if set(task.features) <= set(NETWORK):
        traces = [make_network_trace(seed, bars or BARS) for seed in range(count)]
        return tuple(from_table(f"trace{i:03d}", t, task.features, task.targets) for i, t in enumerate(traces))
    return tuple(from_klines(klines, task) for klines in make_bars(count, bars).values())
