import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpbkit.data.klines import (
    INTERVAL_SECONDS,
    JUMP_LIMIT,
    Disagreement,
    Gap,
    Passport,
    SourceFile,
    find_interval,
    passport_table,
    say_doubts,
    series_name,
    split_name,
    validate,
)
from cpbkit.data.venue import HALTS, halts_of
from cpbkit.errors import DataError, UnknownName
from cpbkit.indicators import compute
from cpbkit.views.market import candle_figure


def bars(start, count, step="1h", **columns):
    index = pd.date_range(start, periods=count, freq=step)
    frame = pd.DataFrame({"open": 10.0, "high": 12.0, "low": 9.0, "close": 11.0, "volume": 5.0}, index=index)
    return frame.assign(**columns)


def test_sound_bars_come_through_unchanged():
    frame = bars("2025-03-01", 48).assign(quote_volume=1.5, trades=7, other="x")
    klines = validate(frame, "BTCUSDT_1h")
    assert klines.frame.index.name == "open_time" and str(klines.frame.index.dtype) == "datetime64[ns, UTC]"
    assert list(klines.frame.columns) == ["open", "high", "low", "close", "volume", "quote_volume", "trades"]
    assert (klines.frame.dtypes == np.float64).all()
    assert (klines.frame["close"].to_numpy() == 11.0).all()
    p = klines.passport
    assert (p.first, p.last, p.expected, p.got) == ("2025-03-01T00:00", "2025-03-02T23:00", 48, 48)
    assert p.gaps == () and p.complete and p.missing == 0


@given(st.permutations(range(30)), st.sets(st.integers(1, 28)), st.lists(st.integers(0, 29), max_size=5))
def test_any_order_gaps_and_doubles_give_the_same_table(order, absent, doubles):
    frame = bars("2025-03-01", 30)
    frame["close"] = 10 + np.arange(30) / 20
    kept = [i for i in order if i not in absent]
    stale = frame.iloc[[i for i in doubles if i not in absent]].assign(close=9.5)  # earlier rows lose
    klines = validate(pd.concat([stale, frame.iloc[kept]]), "BTCUSDT_1h")
    expected = frame.iloc[sorted(kept)]
    assert (klines.frame["close"].to_numpy() == expected["close"].to_numpy()).all()
    assert klines.frame.index.is_monotonic_increasing and klines.frame.index.is_unique
    p = klines.passport
    assert p.duplicates == len(stale)
    assert p.expected == 30 and p.got == 30 - len(absent) == p.expected - sum(g.bars for g in p.gaps)


def test_gaps_at_the_edges_of_the_dates_asked_for_count():
    frame = bars("2025-03-01 04:00", 3)
    p = validate(frame, "BTCUSDT_1h", start="2025-03-01 02:30", end="2025-03-01 08:59").passport
    assert p.expected == 6
    assert p.gaps == (
        Gap("2025-03-01T03:00", "2025-03-01T03:00", 1),
        Gap("2025-03-01T07:00", "2025-03-01T08:00", 2),
    )
    assert p.unexplained == 3 and not p.complete


def test_a_known_halt_is_named_on_spot_only():
    index = pd.date_range("2023-03-24 10:00", "2023-03-24 18:00", freq="15min")
    index = index[(index < "2023-03-24 12:45") | (index >= "2023-03-24 14:00")]
    frame = bars("2023-03-24", len(index)).set_axis(index)
    spot = validate(frame, "BTCUSDT_15m", market="spot").passport
    assert [(g.bars, "2023-03-24" in g.name) for g in spot.gaps] == [(5, True)]
    assert spot.missing == 5 and spot.unexplained == 0 and spot.complete
    assert validate(frame, "BTCUSDT_15m", market="um").passport.unexplained == 5
    longer = validate(frame[frame.index != "2023-03-24 15:00"], "BTCUSDT_15m", market="spot").passport
    assert longer.unexplained == 1


@given(st.integers(0, len(HALTS) - 1), st.integers(-30, 30), st.integers(1, 30))
def test_the_halt_of_a_gap_is_the_one_that_covers_it(number, offset, quarters):
    quarter = 900 * 10**9
    start = HALTS[number].start + offset * quarter
    end = start + quarters * quarter
    covering = [i for i, halt in enumerate(HALTS) if halt.start <= start and end <= halt.end]
    assert halts_of(np.array([start]), np.array([end]), "spot").tolist() == (covering or [-1])
    assert halts_of(np.array([start]), np.array([end]), "um").tolist() == [-1]


def test_a_gap_that_outlasts_the_halt_is_not_explained_by_it():
    index = pd.date_range("2023-03-24 08:00", "2023-03-24 20:00", freq="1h")
    frame = bars("2023-03-24", len(index)).set_axis(index)
    frame = frame[(frame.index < "2023-03-24 12:00") | (frame.index >= "2023-03-24 17:00")]
    assert validate(frame, "BTCUSDT_1h", market="spot").passport.unexplained == 5


def test_what_is_dropped_is_counted():
    frame = bars("2025-03-01", 10)
    odd = bars("2025-03-01 03:28:14.800", 2)
    klines = validate(pd.concat([frame, odd]), "BTCUSDT_1h", now="2025-03-01 09:30", end="2025-03-01 23:59")
    p = klines.passport
    assert (p.off_grid, p.unfinished, p.got) == (2, 1, 9)
    assert p.last == "2025-03-01T08:00"
    assert p.expected == 9, "bars that are not closed yet are not expected"


def test_flat_silent_and_jumping_bars_are_counted_and_kept():
    frame = bars("2025-03-01", 4)
    frame.loc[frame.index[1], ["open", "high", "low", "close", "volume"]] = [11, 11, 11, 11, 0]
    frame.loc[frame.index[3], ["open", "high", "low", "close"]] = [11, 25, 11, 22]
    p = validate(frame, "BTCUSDT_1h").passport
    assert (p.zero_volume, p.flat, p.got) == (1, 1, 4)
    assert [j.time for j in p.jumps] == ["2025-03-01T03:00"]
    assert p.jumps[0].log_return == pytest.approx(np.log(2), abs=1e-6) and np.log(2) > JUMP_LIMIT


@pytest.mark.parametrize(
    "column, value, rule",
    [
        ("close", np.nan, "not a number"),
        ("open", np.inf, "not a number"),
        ("low", 0.0, "not above zero"),
        ("volume", -1.0, "volume"),
        ("volume", np.nan, "volume"),
        ("high", 10.5, "high below"),
        ("low", 11.5, "low above"),
    ],
)
def test_an_impossible_bar_is_refused_with_its_time(column, value, rule):
    frame = bars("2025-03-01", 5)
    frame.loc[frame.index[3], column] = value
    with pytest.raises(DataError, match=rf"BTCUSDT_1h: 1 bars with .*{rule}.*2025-03-01T03:00"):
        validate(frame, "BTCUSDT_1h")


def test_what_is_no_table_of_bars_is_refused():
    frame = bars("2025-03-01", 3)
    with pytest.raises(DataError, match=r"need the columns .* \(close missing\)"):
        validate(frame.drop(columns="close"), "BTCUSDT_1h")
    with pytest.raises(DataError, match="index of times"):
        validate(frame.reset_index(drop=True), "BTCUSDT_1h")
    with pytest.raises(DataError, match="must be numbers"):
        validate(frame.assign(close="dear"), "BTCUSDT_1h")
    with pytest.raises(DataError, match="no bar left of 3 rows"):
        validate(frame, "BTCUSDT_1h", start="2026-01-01")
    with pytest.raises(DataError, match="no bar left of 0 rows"):
        validate(frame.iloc[:0], "BTCUSDT_1h")
    with pytest.raises(DataError, match="1 rows have no time"):
        validate(frame.set_axis(pd.DatetimeIndex([*frame.index[:2], pd.NaT])), "BTCUSDT_1h")


def test_a_slipped_decimal_point_is_listed_and_a_hard_fall_is_not():
    frame = bars("2025-03-01", 10)
    frame.iloc[3, :4] *= 10  # a bar of its own
    frame.iloc[6:8, :4] /= 10  # two bars together
    frame.iloc[9, 2] /= 10  # a low alone
    p = validate(frame, "BTCUSDT_1h").passport
    hours = [3, 4, 6, 8, 9]  # where it begins and where it ends
    assert p.tenfold == tuple(f"2025-03-01T{hour:02d}:00" for hour in hours) and p.doubts == 5
    sound = validate(bars("2025-03-01", 10), "ETHUSDT_1h").passport
    said = say_doubts([p, sound])
    assert said.startswith("Bars that are not sound, in 1 of 2 series: 5 in doubt; most of BTCUSDT_1h.")
    holes = validate(bars("2025-03-01", 10).drop(frame.index[4:6]), "ETHUSDT_1h").passport
    assert "2 missing without a reason" in say_doubts([holes]) and say_doubts([sound]) == ""
    fall = bars("2025-03-01", 4)
    for i in range(1, 4):  # each opens where the last closed
        fall.iloc[i, :4] = [11 / 5 ** (i - 1), 11 / 5 ** (i - 1), 11 / 5**i, 11 / 5**i]
    assert validate(fall, "LUNAUSDT_1h").passport.tenfold == ()


def test_a_price_that_changes_hands_across_a_gap_is_told():
    old, new = bars("2025-03-01", 3), bars("2025-03-02", 3)
    new.iloc[:, :4] *= 30
    (note,) = validate(pd.concat([old, new]), "LUNAUSDT_1h").passport.notes
    assert "from 2025-03-01T02:00 to 2025-03-02T00:00 the price changes by a factor of 30" in note


def test_bars_without_volume_are_bars():
    klines = validate(bars("2025-03-01", 3).drop(columns="volume"), "DXY_1h")
    assert list(klines.frame.columns) == ["open", "high", "low", "close"]
    assert klines.passport.zero_volume == 0 and "There is no volume" in klines.passport.notes[0]
    with pytest.raises(DataError, match="obv needs the column 'volume'"):
        compute(klines.frame, ["obv"])
    assert candle_figure(klines)


@pytest.mark.parametrize(
    "text, interval",
    [
        *(("60m", "1h"), ("1H", "1h"), ("1-min", "1m"), ("3600s", "1h"), ("240", "4h"), ("D", "1d"), ("15M", "15m")),
        *(("1M", ""), ("M", ""), ("90m", ""), ("h1", ""), ("", ""), ("month", "")),
    ],
)
def test_intervals_are_read_in_other_spellings(text, interval):
    assert find_interval(text) == interval


def test_weeks_start_on_monday_and_three_days_where_the_venue_says():
    weeks = bars("2025-03-03", 4, "7D")  # a Monday
    assert validate(weeks, "BTCUSDT_1w").passport.off_grid == 0
    with pytest.raises(DataError, match="4 off the 1w grid"):
        validate(bars("2025-03-01", 4, "7D"), "BTCUSDT_1w")
    for first in ("2025-03-01", "2025-03-02", "2025-03-03"):
        assert validate(bars(first, 4, "3D"), "BTCUSDT_3d").passport.off_grid == 0


def test_zones_are_turned_into_utc():
    frame = bars("2025-03-01", 3).tz_localize("Asia/Tokyo")
    assert validate(frame, "BTCUSDT_1h").passport.first == "2025-02-28T15:00"


def test_a_passport_survives_json():
    frame = bars("2025-03-01", 9).drop(index=pd.Timestamp("2025-03-01 04:00"))
    frame.loc[frame.index[-1], ["high", "close"]] = 30.0
    p = validate(
        frame,
        "BTCUSDT_1h",
        files=[SourceFile("a.zip", "0" * 64)],
        disagreements=[Disagreement("monthly and daily", "2025-03-01T01:00", 2, 24, 0.01)],
        notes=["a sentence"],
    ).passport
    assert p.gaps and p.jumps
    assert Passport.from_dict(json.loads(json.dumps(p.to_dict()))) == p


def test_the_table_has_a_row_a_series():
    passports = [validate(bars("2025-03-01", 5), name).passport for name in ("BTCUSDT_1h", "ETHUSDT_1h")]
    table = passport_table(passports)
    assert list(table.index) == ["BTCUSDT_1h", "ETHUSDT_1h"]
    assert (table["got"] == 5).all() and (table["missing"] == 0).all()
    assert len(passport_table([])) == 0


def test_series_names():
    assert series_name("BTCUSDT", "15m") == "BTCUSDT_15m"
    assert split_name("BTCUSDT_250627_1h") == ("BTCUSDT_250627", "1h")
    with pytest.raises(DataError, match="named like BTCUSDT_15m"):
        split_name("BTCUSDT")
    with pytest.raises(UnknownName, match=r"nearest: .*15m"):
        split_name("BTCUSDT_14m")
    assert INTERVAL_SECONDS["1w"] == 7 * INTERVAL_SECONDS["1d"]
