"""What is known of Binance: its halts, the first bars of its coins, the names of its futures contracts."""

from typing import NamedTuple

import numpy as np
import pandas as pd


class Halt(NamedTuple):
    """A time without spot trading on the whole venue; it explains the bars missing in [start, end)."""

    start: int  # ns
    end: int  # ns
    name: str


def _halt(first: str, resumed: str, name: str = "") -> Halt:
    # The first minute without a bar, and the first that has one again.
    start, end = pd.Timestamp(first, tz="UTC"), pd.Timestamp(resumed, tz="UTC")
    return Halt(start.value, end.value, name or f"spot halt of {start:%Y-%m-%d}")


# To the minute, from the minutes and seconds that BTCUSDT lacks (binance-public-data #365 and #368, and lists of
# others); the hours and quarters that were measured here fit into them.
HALTS: tuple[Halt, ...] = (
    _halt("2017-09-06 16:01", "2017-09-06 23:00"),
    _halt("2017-12-04 06:01", "2017-12-04 06:49"),
    _halt("2017-12-18 10:01", "2017-12-18 10:14"),
    _halt("2017-12-18 12:30", "2017-12-18 13:34"),
    _halt("2018-01-04 03:01", "2018-01-04 05:06"),
    _halt("2018-02-08 00:29", "2018-02-09 10:00"),
    _halt("2018-02-10 06:00", "2018-02-10 06:15"),
    _halt("2018-02-11 04:01", "2018-02-11 04:35"),
    _halt("2018-06-26 02:00", "2018-06-26 12:00"),
    _halt("2018-06-27 13:00", "2018-06-27 14:45"),
    _halt("2018-07-04 00:23", "2018-07-04 08:00"),
    _halt("2018-10-19 06:00", "2018-10-19 09:30"),
    _halt("2018-11-14 02:00", "2018-11-14 09:00"),
    _halt("2019-03-12 02:00", "2019-03-12 08:00"),
    _halt("2019-05-15 03:00", "2019-05-15 13:00"),
    _halt("2019-06-07 21:14", "2019-06-07 22:15"),
    _halt("2019-08-15 02:00", "2019-08-15 10:00"),
    _halt("2019-11-13 02:00", "2019-11-13 04:20"),
    _halt("2019-11-25 02:00", "2019-11-25 04:00"),
    _halt("2020-02-09 02:00", "2020-02-09 03:00"),
    _halt("2020-02-19 11:36", "2020-02-19 17:30"),
    _halt("2020-03-04 09:22", "2020-03-04 11:30"),
    _halt("2020-04-25 02:00", "2020-04-25 04:30"),
    _halt("2020-06-28 02:00", "2020-06-28 05:30"),
    _halt("2020-11-30 06:00", "2020-11-30 07:00"),
    _halt("2020-12-21 13:48", "2020-12-21 18:00"),
    _halt("2020-12-25 02:00", "2020-12-25 03:00"),
    _halt("2021-02-11 03:41", "2021-02-11 05:00"),
    _halt("2021-03-06 02:00", "2021-03-06 03:30"),
    _halt("2021-04-20 02:00", "2021-04-20 04:30"),
    _halt("2021-04-25 04:01", "2021-04-25 08:45"),
    _halt("2021-08-13 02:00", "2021-08-13 06:30"),
    _halt("2021-09-29 07:00", "2021-09-29 09:00"),
    _halt("2023-03-24 12:40", "2023-03-24 14:00", "spot matching-engine outage of 2023-03-24"),
)
_HALTED, _RESUMED = (np.array(times) for times in list(zip(*HALTS, strict=True))[:2])


def halts_of(starts: np.ndarray, ends: np.ndarray, market: str) -> np.ndarray:
    """Return the numbers in HALTS of those that explain why [start, end) (N,) ns had no trade, else -1: (N,)."""
    last = np.searchsorted(_HALTED, starts, side="right") - 1  # halts are in order and apart
    explained = (last >= 0) & (ends <= _RESUMED[last]) & (market == "spot")
    return np.where(explained, last, -1)


# First spot bar of an asset, UTC; for a symbol that a second asset took over (LUNAUSDT), of the second one.
LISTINGS: dict[str, str] = {
    "BTCUSDT": "2017-08-17 04:00",
    "ETHUSDT": "2017-08-17 04:00",
    "BNBUSDT": "2017-11-06 03:00",
    "LTCUSDT": "2017-12-13 03:00",
    "ADAUSDT": "2018-04-17 04:00",
    "XRPUSDT": "2018-05-04 08:00",
    "LINKUSDT": "2019-01-16 10:00",
    "ATOMUSDT": "2019-04-29 04:00",
    "DOGEUSDT": "2019-07-05 12:00",
    "SOLUSDT": "2020-08-11 06:00",
    "UNIUSDT": "2020-09-17 03:00",
    "AVAXUSDT": "2020-09-22 06:30",
    "NEARUSDT": "2020-10-14 05:00",
    "INJUSDT": "2020-10-21 04:00",  # as announced; the others are measured
    "SHIBUSDT": "2021-05-10 11:00",
    "DYDXUSDT": "2021-09-09 02:00",
    "LUNAUSDT": "2022-05-31 06:00",
    "OPUSDT": "2022-06-01 08:00",
    "ARBUSDT": "2023-03-23 15:00",
    "PEPEUSDT": "2023-05-05 18:00",
}

# A symbol whose earlier bars belong to another asset: its last bar, and what it was.
PREDECESSORS: dict[str, tuple[str, str]] = {
    "LUNAUSDT": ("2022-05-13 00:00", "the old Terra chain, which trades as LUNC today")
}


class Contract(NamedTuple):
    """A USD-M perpetual: its name, and how many coins one of its units holds."""

    name: str
    coins: int


# Perpetuals that are not named like the spot symbol.
CONTRACTS: dict[str, Contract] = {
    "PEPEUSDT": Contract("1000PEPEUSDT", 1000),
    "SHIBUSDT": Contract("1000SHIBUSDT", 1000),
    "LUNAUSDT": Contract("LUNA2USDT", 1),
    "LUNCUSDT": Contract("1000LUNCUSDT", 1000),
    "FLOKIUSDT": Contract("1000FLOKIUSDT", 1000),
    "BONKUSDT": Contract("1000BONKUSDT", 1000),
    "XECUSDT": Contract("1000XECUSDT", 1000),
    "SATSUSDT": Contract("1000SATSUSDT", 1000),
    "RATSUSDT": Contract("1000RATSUSDT", 1000),
}
