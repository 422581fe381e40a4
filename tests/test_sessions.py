"""Sessions: nights, weekends and holidays are no missing bars; a bar that is missing between two others is."""

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from cpbkit.cli.main import cpbkit
from cpbkit.data.files import read_files
from cpbkit.data.klines import INTERVAL_SECONDS, validate
from cpbkit.errors import DataError

HOLIDAYS = ["2024-01-01", "2024-01-15", "2024-02-19", "2024-03-29", "2024-05-27", "2024-06-19", "2024-07-04"]


def frame_of(index):
    price = 100 + np.cumsum(np.sin(np.arange(len(index))))
    frame = pd.DataFrame({"open": price, "high": price + 1, "low": price - 1, "close": price, "volume": 5.0})
    return frame.set_axis(index.tz_convert("UTC"))


def bars_of(index, interval, **more):
    frame = frame_of(index)
    phase = int(frame.index.as_unit("ns").asi8[0] % (INTERVAL_SECONDS[interval] * 10**9))
    return validate(frame, f"AAPL_{interval}", phase=phase, **more)


def stocks(freq, first="2024-01-02", last="2024-08-30"):
    """Sessions of New York, 09:30 to 16:00, through both changes of the clock, without its holidays."""
    hours = pd.date_range(f"{first} 09:30", f"{last} 15:59", freq=freq, tz="America/New_York")
    days = hours.normalize().tz_localize(None)
    clock = hours.hour * 60 + hours.minute
    inside = (clock >= 570) & (clock < 960) & (hours.day_of_week < 5) & ~days.isin(pd.to_datetime(HOLIDAYS))
    return hours[inside & ~((days == "2024-07-03") & (clock >= 780))]  # an early close


def futures(freq):
    """Sunday 18:00 to Friday 17:00, an hour's break each day, closed at Christmas."""
    hours = pd.date_range("2024-10-06 18:00", "2025-01-10 16:59", freq=freq, tz="America/Chicago")
    clock = hours.day_of_week * 24 + hours.hour
    return hours[~((clock >= 113) & (clock < 162)) & (hours.hour != 17) & (hours.normalize() != "2024-12-25")]


def tokyo(freq):
    hours = pd.date_range("2025-02-03 09:00", "2025-04-25 15:29", freq=freq, tz="Asia/Tokyo")
    clock = hours.hour * 60 + hours.minute
    lunch = (clock >= 690) & (clock < 750)
    return hours[(clock >= 540) & (clock < 930) & ~lunch & (hours.day_of_week < 5)]


MARKETS = {
    "15m of New York": (stocks("15min"), "15m"),
    "1h of New York": (stocks("1h"), "1h"),
    "two weeks of it": (stocks("30min", "2024-01-02", "2024-01-12"), "30m"),
    "its days": (stocks("15min").normalize().unique().tz_localize(None).tz_localize("UTC"), "1d"),
    "futures": (futures("1h"), "1h"),
    "Tokyo, with lunch": (tokyo("15min"), "15m"),
}


@pytest.mark.parametrize("market", MARKETS)
def test_what_is_closed_is_not_missing_and_what_is_missing_within_a_session_is(market):
    index, interval = MARKETS[market]
    whole = bars_of(index, interval).passport
    assert whole.complete and whole.missing == 0 and whole.expected == len(index) and not whole.gaps
    assert "It trades in sessions: " in " ".join(whole.notes)
    if interval == "1d":
        return  # a day alone may be a holiday
    inner = [i for i in range(60, len(index) - 2) if index[i + 1] - index[i - 1] == 2 * (index[1] - index[0])][::37]
    holed = bars_of(index.delete(inner), interval).passport
    said = [gap.start for gap in holed.gaps]
    assert holed.missing == holed.unexplained == len(said) >= len(inner) - 1  # one lies where the clock is changed
    assert set(said) <= {f"{time:%Y-%m-%dT%H:%M}" for time in index[inner].tz_convert("UTC")}


@pytest.mark.parametrize("freq, interval", [("30min", "30m"), ("1h", "1h"), ("15min", "15m")])
@pytest.mark.parametrize(
    "first, last", [("2024-03-07", "2024-05-24"), ("2024-11-01", "2024-11-27"), ("2024-01-02", "2024-03-12")]
)
def test_a_day_before_the_clock_is_changed_lacks_no_bars(freq, interval, first, last):
    index = stocks(freq, first, last)
    whole = bars_of(index, interval).passport
    assert whole.missing == 0 and whole.expected == len(index)
    holed = bars_of(index.delete(20), interval).passport
    assert [gap.start for gap in holed.gaps] == [f"{index[20].tz_convert('UTC'):%Y-%m-%dT%H:%M}"]


def test_the_last_bar_of_a_day_and_two_weeks_are_missing():
    index = stocks("15min")
    last = np.flatnonzero((index.hour == 15) & (index.minute == 45))[20]
    p = bars_of(index.delete(last), "15m").passport
    assert [gap.start for gap in p.gaps] == [f"{index[last].tz_convert('UTC'):%Y-%m-%dT%H:%M}"]
    hole = (index >= "2024-04-08") & (index < "2024-04-20")
    assert bars_of(index[~hole], "15m").passport.missing == hole.sum() == 260


@pytest.mark.parametrize("seed", range(3))
def test_a_market_that_never_closes_has_no_sessions(seed):
    rng = np.random.default_rng(seed)
    hours = pd.date_range("2025-01-01", periods=24 * 60, freq="1h", tz="UTC")
    for lost in (rng.integers(2, 1400, 30), np.arange(500, 560), rng.permutation(1440)[:700]):
        lost = np.unique(lost[(lost > 0) & (lost < 1439)])
        assert validate(frame_of(hours.delete(lost)), "BTCUSDT_1h").passport.unexplained == len(lost)
    known = bars_of(stocks("1h"), "1h", market="spot").passport
    assert known.unexplained > 1000, "a known venue never closes"


def test_own_stocks_end_with_exit_0(tmp_path):
    index = stocks("30min", "2024-01-02", "2024-02-09")
    frame_of(index).rename_axis("time").to_csv(tmp_path / "AAPL_30m.csv")
    shown = CliRunner().invoke(cpbkit, ["passport", str(tmp_path)])
    assert shown.exit_code == 0 and "It trades in sessions" in shown.output
    frame_of(index.delete(70)).rename_axis("time").to_csv(tmp_path / "AAPL_30m.csv")
    assert read_files(tmp_path).klines["AAPL_30m"].passport.unexplained == 1
    assert CliRunner().invoke(cpbkit, ["passport", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("every, of", [("4h", slice(720, None)), ("4h", slice(0, 360)), ("1D", slice(960, None))])
def test_bars_of_a_longer_interval_are_named_and_no_sessions(every, of):
    hours = pd.date_range("2025-01-01", periods=1440, freq="1h", tz="UTC")
    longer = hours[of]
    kept = hours.drop(longer[longer != longer.floor(every)])
    found = bars_of(kept, "1h").passport
    assert f"From {longer[0]:%Y-%m-%dT%H:%M} to " in " ".join(found.notes)
    assert "of a longer interval" in " ".join(found.notes)
    assert found.unexplained == (kept[-1] - kept[0]) // pd.Timedelta("1h") + 1 - len(kept)


def test_a_pair_of_coins_has_no_nights():
    hours = pd.date_range("2025-01-01", periods=1440, freq="1h", tz="UTC")
    days = hours[hours.hour >= 6]
    assert "It trades in sessions" in " ".join(bars_of(days, "1h").passport.notes)
    for series in ("BTCUSDT_1h", "ETHEUR_1h", "WIFUSDC_1h"):
        assert validate(frame_of(days), series).passport.unexplained == 59 * 6, series


def walk(overnight, seed=0, n=500):
    """Daily bars that open at a distance from where the day before closed."""
    rng = np.random.default_rng(seed)
    gaps, moves = rng.normal(0, overnight, n), rng.normal(0, 0.01, n)
    path = 100 * np.exp(np.cumsum(np.stack([gaps, moves], axis=1).ravel())).reshape(n, 2)
    frame = pd.DataFrame(path, columns=["open", "close"]).assign(high=path.max(1), low=path.min(1), volume=1.0)
    return frame.set_index(pd.date_range("2023-01-01", periods=n, freq="1D", tz="UTC"))


@pytest.mark.parametrize("overnight", [0.0, 1e-5, 0.01])
def test_open_and_close_the_wrong_way_round_are_refused_where_that_can_be_seen(overnight):
    right = walk(overnight)
    assert len(validate(right, "SPX_1d").frame) == len(right)
    wrong = right.rename(columns={"open": "close", "close": "open"})
    if overnight < 0.01:
        with pytest.raises(DataError, match="Are open and close swapped"):
            validate(wrong, "SPX_1d")
        with pytest.raises(DataError, match="or do times run backwards"):
            validate(right.set_axis(right.index[::-1]), "SPX_1d")
    else:  # opens are as far from the close before as closes from the open before
        validate(wrong, "SPX_1d")


@pytest.mark.parametrize("price", [1e308, 5e-324])
def test_a_price_that_no_market_has_is_refused(price):
    with pytest.raises(DataError, match="500 bars with a price that no market has"):
        validate(walk(0.0) * 0 + price, "BTCUSDT_1d")
