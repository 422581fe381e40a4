"""Context series: Yahoo's limits before any request, frames as yfinance returns them, and a join without look-ahead."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance, yahoo
from cpbkit.data.klines import Incomplete, validate
from cpbkit.data.synthetic import make_market
from cpbkit.data.yahoo import add_context, fetch_bars, fetch_klines, join_context
from cpbkit.errors import DataError, SourceError, UnknownName
from cpbkit.runs.trained import newest_bars, reachable_bars

NOW = pd.Timestamp("2025-06-10 14:40", tz="UTC")


def yahoo_frame(tickers, index):
    """Return a frame of the shape of yfinance.download: columns (Price, Ticker), sorted; a row where any has one."""
    rng = np.random.default_rng(1)
    fields = ["Adj Close", "Close", "High", "Low", "Open", "Volume"]
    columns = pd.MultiIndex.from_product([fields, sorted(tickers)], names=["Price", "Ticker"])
    values = np.exp(rng.normal(4, 0.01, (len(index), len(columns))))
    return pd.DataFrame(values, index.rename("Datetime"), columns)


class Yahoo:
    """Stand in for yfinance: remember the questions, answer with a frame."""

    def __init__(self):
        self.answer, self.asked = None, []

    def download(self, tickers, **arguments):
        self.asked.append((tickers, arguments))
        return self.answer


@pytest.fixture(autouse=True)
def yfinance(monkeypatch):
    monkeypatch.setattr(yahoo, "_now", lambda: NOW)
    yfinance = Yahoo()
    monkeypatch.setitem(sys.modules, "yfinance", yfinance)
    return yfinance


@pytest.fixture
def fetch(yfinance):
    """Fetch bars where Yahoo gives a certain answer."""

    def call(answer, *wanted):
        yfinance.answer = answer
        return fetch_bars(*wanted)

    return call


def hours(start, count, zone="America/New_York"):
    return pd.date_range(start, periods=count, freq="h", tz=zone)


def bars(start, count, interval="15m"):
    index = pd.date_range(start, periods=count, freq={"15m": "15min", "1h": "h"}[interval], tz="UTC")
    frame = pd.DataFrame(1.0, index, ["open", "high", "low", "close", "volume"])
    return validate(frame, f"BTCUSDT_{interval}")


def test_what_yfinance_is_asked_and_what_comes_back(fetch, yfinance):
    raw = yahoo_frame(["SPY", "GC=F"], hours("2025-06-09 09:30", 7))
    raw.loc[raw.index[2], (slice(None), "SPY")] = np.nan  # the other market traded, this one did not
    got = fetch(raw, ["spy", "GC=F"], "1h", "2025-06-09", "2025-06-09")
    tickers, arguments = yfinance.asked[0]
    assert tickers == ["SPY", "GC=F"] and arguments["interval"] == "1h"
    assert (arguments["start"], arguments["end"]) == ("2025-06-09", "2025-06-10")  # theirs is exclusive
    assert arguments["auto_adjust"] is False and arguments["ignore_tz"] is False
    assert len(got["GC=F"]) == 7 and len(got["SPY"]) == 6
    assert list(got["SPY"].columns) == ["open", "high", "low", "close"]
    assert got["GC=F"].index[0] == pd.Timestamp("2025-06-09 14:30", tz="UTC")  # 09:30 in New York, an hour long
    assert got["GC=F"]["close"].iloc[0] == raw[("Close", "GC=F")].iloc[0]


def test_the_running_bar_is_left_out(fetch):
    raw = yahoo_frame(["SPY"], hours("2025-06-10 09:30", 2))  # 09:30 closes at 14:30 UTC, 10:30 is still running
    got = fetch(raw, ["SPY"], "1h", "2025-06-10", "2025-06-10")
    assert list(got["SPY"].index) == [pd.Timestamp("2025-06-10 14:30", tz="UTC")]


@pytest.mark.parametrize(
    "interval, start, message",
    [
        ("15m", "2025-04-01", r"15m bars of the last 60 days, from 2025-04-11 on; got start 2025-04-01.*1h, 1d, 1w"),
        ("1h", "2023-01-01", r"1h bars of the last 730 days, from 2023-06-11 on.*ask for 1d, 1w"),
        ("1m", "2025-06-01", "the last 7 days"),
        ("1d", "2025-07-01", "start not after end"),
    ],
)
def test_limits_are_told_before_any_request(fetch, yfinance, interval, start, message):
    with pytest.raises(DataError, match=message):
        fetch(None, ["SPY"], interval, start, "2025-06-09")
    assert yfinance.asked == []


def test_days_reach_back_without_limit_and_close_at_the_end_of_their_own_day(fetch):
    days = pd.DatetimeIndex(["1990-01-02", "1990-01-03"], tz="America/New_York")
    got = fetch(yahoo_frame(["SPY"], days), ["SPY"], "1d", "1990-01-01", "1990-01-04")
    assert got["SPY"].index[0] == pd.Timestamp("1990-01-03 05:00", tz="UTC")


@pytest.mark.parametrize("answer", [None, pd.DataFrame(), "nan"])
def test_tickers_without_bars_are_named(yfinance, answer):
    if isinstance(answer, str):
        answer = yahoo_frame(["SPY", "SPYY"], hours("2025-06-09 09:30", 3))
        answer.loc[:, (slice(None), "SPYY")] = np.nan  # how yfinance returns a ticker that failed
    yfinance.answer = answer
    with pytest.raises(SourceError, match=r"no closed bar of .*SPYY: check the ticker"):
        add_context({"BTCUSDT_1h": bars("2025-06-09", 24, "1h")}, ["SPY", "SPYY"])


def test_times_without_a_zone_are_refused(fetch):
    raw = yahoo_frame(["SPY"], hours("2025-06-09 09:30", 3, zone=None))
    with pytest.raises(SourceError, match="times with a zone"):
        fetch(raw, ["SPY"], "1h", "2025-06-09", "2025-06-09")


def test_without_yfinance_the_extra_is_named(fetch, monkeypatch):
    monkeypatch.setitem(sys.modules, "yfinance", None)
    with pytest.raises(SourceError, match=r'pip install "cpbkit\[yahoo\]"'):
        fetch(None, ["SPY"], "1d", "2025-06-09", "2025-06-09")


def test_an_interval_that_yahoo_lacks_is_named(fetch):
    with pytest.raises(UnknownName, match="interval must be a known name; got '4h'"):
        fetch(None, ["SPY"], "4h", "2025-06-09", "2025-06-09")


def test_the_join_takes_the_last_closed_bar(fetch):
    raw = yahoo_frame(["SPY"], hours("2025-06-09 09:30", 3))  # close at 14:30, 15:30, 16:30 UTC
    context = fetch(raw, ["SPY"], "1h", "2025-06-09", "2025-06-09")
    klines = bars("2025-06-09 14:00", 8)  # close at 14:15, 14:30, ..., 16:00
    got = join_context(klines, context)
    assert got.index.equals(klines.frame.index) and list(got.columns) == ["SPY_close", "SPY_return"]
    close = raw[("Close", "SPY")].to_numpy()
    expected = [np.nan, *[close[0]] * 4, *[close[1]] * 3]
    assert np.array_equal(got["SPY_close"], expected, equal_nan=True)
    assert got["SPY_return"].iloc[:5].isna().all()
    assert np.allclose(got["SPY_return"].iloc[5:], np.log(close[1] / close[0]))


@pytest.mark.parametrize("interval", ["15m", "1h"])
@pytest.mark.parametrize("t", [0, 7, 23, 40])
def test_the_join_does_not_look_ahead(fetch, interval, t):
    klines = bars("2025-05-01 00:00", 48, interval)
    closes = klines.frame.index[t] + pd.Timedelta(interval.replace("m", "min"))
    raw = yahoo_frame(["SPY", "^VIX"], hours("2025-04-30 12:30", 80))

    def join(frame):
        context = fetch(frame, ["SPY", "^VIX"], "1h", "2025-04-30", "2025-05-03")
        return join_context(klines, context).iloc[: t + 1]

    unknown = raw.index + pd.Timedelta(hours=1) > closes
    assert unknown.any() and not unknown.all()
    changed = raw.copy()
    changed.loc[unknown] *= 7.0
    pd.testing.assert_frame_equal(join(raw), join(changed), check_exact=True)
    pd.testing.assert_frame_equal(join(raw), join(raw[~unknown]), check_exact=True)
    last = raw[("Close", "^VIX")][~unknown].iloc[-1]
    assert join(raw)["^VIX_close"].iloc[-1] == last  # and nothing that is known is held back


def test_weekends_keep_the_last_close(fetch):
    days = pd.DatetimeIndex(["2025-06-05", "2025-06-06", "2025-06-09"], tz="America/New_York")
    context = fetch(yahoo_frame(["SPY"], days), ["SPY"], "1d", "2025-06-05", "2025-06-09")
    got = join_context(bars("2025-06-07 12:00", 24, "1h"), context)["SPY_close"]
    assert got.nunique() == 1 and got.notna().all()


def test_context_stands_beside_the_bars_of_every_series(yfinance):
    days = pd.date_range("2025-05-20", periods=20, freq="D", tz="America/New_York")
    yfinance.answer = yahoo_frame(["SPY"], days)
    klines = {"BTCUSDT_15m": bars("2025-06-02", 50), "BTCUSDT_1h": bars("2025-06-03", 30, "1h")}
    beside = add_context(klines, ["SPY"])
    assert yfinance.asked[0][1]["interval"] == "1d"
    for name, each in beside.items():
        assert each.passport is klines[name].passport and each.frame.index.equals(klines[name].frame.index)
        assert list(each.frame.columns[-2:]) == ["SPY_close", "SPY_return"]
        assert each.frame["SPY_return"].notna().all()


def test_bars_of_yahoo_are_klines_without_volume(yfinance):
    raw = yahoo_frame(["BTC-USD", "ETH-USD"], hours("2025-06-08", 63, "UTC"))  # the last is still running
    for ticker in ("BTC-USD", "ETH-USD"):
        prices = raw.loc[:, [(price, ticker) for price in ("Open", "High", "Low", "Close")]]
        raw[("High", ticker)], raw[("Low", ticker)] = prices.max(axis=1), prices.min(axis=1)
    raw.loc[raw.index[5], (slice(None), "ETH-USD")] = np.nan
    yfinance.answer = raw
    got = fetch_klines(["BTCUSDT", "ETHUSD"], ["1h"], "2025-06-08", "2025-06-10")
    assert yfinance.asked[0][0] == ["BTC-USD", "ETH-USD"] and set(got) == {"BTCUSDT_1h", "ETHUSD_1h"}
    bars, passport = got["BTCUSDT_1h"].frame, got["BTCUSDT_1h"].passport
    assert list(bars.columns) == ["open", "high", "low", "close"]
    assert bars.index[0] == raw.index[0] and bars.index[-1] == pd.Timestamp("2025-06-10 13:00", tz="UTC")
    assert (bars["close"].to_numpy() == raw[("Close", "BTC-USD")].to_numpy()[:-1]).all()
    assert (passport.source, passport.expected, passport.got) == ("yahoo", 62, 62)
    assert got["ETHUSD_1h"].passport.missing == 1 and "no volume" in passport.notes[0]


def test_series_that_yahoo_lacks_stop_no_other(yfinance):
    yfinance.answer = coin_frame(hours("2025-06-08", 24, "UTC"))
    with pytest.raises(Incomplete, match="NOPEUSDT_1h: Yahoo gave no closed bar of NOPE-USD") as caught:
        fetch_klines(["BTCUSDT", "NOPEUSDT"], ["1h"], "2025-06-08", "2025-06-08")
    assert set(caught.value.klines) == {"BTCUSDT_1h"} and set(caught.value.reasons) == {"NOPEUSDT_1h"}


def coin_frame(index):
    """Return what Yahoo gives of Bitcoin, its highs and lows right."""
    raw = yahoo_frame(["BTC-USD"], index)
    prices = raw.loc[:, [(price, "BTC-USD") for price in ("Open", "High", "Low", "Close")]]
    raw[("High", "BTC-USD")], raw[("Low", "BTC-USD")] = prices.max(axis=1), prices.min(axis=1)
    return raw


def model_of(series="BTCUSDT_1h", **settings):
    """Return as much of a trained model as says where its bars come from."""
    return SimpleNamespace(series=series, experiment=vary(PRESETS["quick"], **settings))


def test_a_model_of_yahoos_bars_forecasts_from_yahoos(yfinance):
    yfinance.answer = coin_frame(hours("2025-06-08", 24, "UTC"))
    found = newest_bars([model_of(source="yahoo")], NOW)
    assert yfinance.asked[0][0] == ["BTC-USD"] and found["BTCUSDT_1h"].passport.source == "yahoo"
    assert (found["BTCUSDT_1h"].frame["close"] == yfinance.answer[("Close", "BTC-USD")].to_numpy()).all()


def test_the_newest_bars_have_the_context_that_the_training_had(yfinance):
    yfinance.answer = yahoo_frame(["SPY"], pd.date_range("2025-05-01", periods=40, freq="D", tz="America/New_York"))
    found = newest_bars([model_of(source="synthetic", tickers=("SPY",))], NOW)
    assert found["BTCUSDT_1h"].frame["SPY_close"].notna().all()


def test_a_series_that_is_gone_stops_no_other_interval(monkeypatch):
    def fetch(symbols, intervals, start, end, **_):
        if intervals == ("1h",):
            raise Incomplete("gone", {}, {"BTCUSDT_1h": "BTCUSDT_1h: it trades no more"})
        return make_market(symbols, intervals, start, end)

    monkeypatch.setattr(binance, "fetch_klines", fetch)
    models = [model_of(name, intervals=("1h", "15m")) for name in ("BTCUSDT_1h", "BTCUSDT_15m")]
    found, trouble = reachable_bars(models, pd.Timestamp("2025-06-10 00:00", tz="UTC"))
    assert list(found) == ["BTCUSDT_15m"] and trouble == {"BTCUSDT_1h": "BTCUSDT_1h: it trades no more"}
