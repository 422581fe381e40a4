"""A person's own files: every usual spelling gives the same bars, everything else a sentence."""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from cpbkit.cli.main import cpbkit
from cpbkit.config.experiment import OHLC
from cpbkit.data.files import from_frames, read_files, read_klines
from cpbkit.data.klines import INTERVAL_SECONDS
from cpbkit.data.tables import arrange, read_table
from cpbkit.errors import DataError, UnknownName
from cpbkit.texts import printable

COLUMNS = [*OHLC, "volume"]


def bars(rows=60, freq="15min"):
    rng = np.random.default_rng(5)
    close = np.round(100 + np.cumsum(rng.normal(size=rows)), 2)
    open_ = np.append(100.0, close[:-1])
    frame = pd.DataFrame(
        {
            "open": open_,
            "high": np.round(np.maximum(open_, close) + rng.random(rows), 2),
            "low": np.round(np.minimum(open_, close) - rng.random(rows), 2),
            "close": close,
            "volume": np.round(rng.random(rows) * 50, 3),
        }
    )
    return frame.set_axis(pd.date_range("2024-12-31 18:00", periods=rows, freq=freq, tz="UTC", unit="ns"))


FRAME = bars()
MS = FRAME.index.asi8 // 1_000_000
ISO = FRAME.index.strftime("%Y-%m-%d %H:%M:%S")


def text(header, rows, separator=",", banner="", newest_first=False):
    lines = [separator.join(map(str, row)) for row in rows]
    lines = lines[::-1] if newest_first else lines
    return banner + "\n".join(([separator.join(header)] if header else []) + lines) + "\n"


def rows_with(times):
    return [(t, *values) for t, values in zip(times, FRAME.to_numpy().tolist(), strict=True)]


def archive_rows(unit):  # the venue's twelve columns, none named
    step = 900 * unit
    starts = MS * (unit // 1000)
    return [
        (t, *v, t + step - 1, 12.5, 7, 1.5, 3.25, 0) for t, v in zip(starts, FRAME.to_numpy().tolist(), strict=True)
    ]


mixed = np.where(FRAME.index.year == 2024, MS, MS * 1000)  # the venue's change of unit inside one file
dutch = FRAME.index.strftime("%d-%m-%Y %H:%M")  # 31-12-2024 leaves no doubt
american = FRAME.index.strftime("%m/%d/%Y %I:%M %p")
TITLE = ["Open time", "Open", "High", "Low", "Close", "Volume"]
SPELLINGS = {
    "plain": text(["timestamp", *COLUMNS], rows_with(MS)),
    "title case": text(TITLE, rows_with(ISO)),
    "newest first": text(TITLE, rows_with(ISO), newest_first=True),
    "seconds": text(["unix", *COLUMNS], rows_with(MS // 1000)),
    "seconds with a point": text(["Timestamp", *COLUMNS], rows_with(MS / 1000)),
    "microseconds": text(["ts", *COLUMNS], rows_with(MS * 1000)),
    "nanoseconds": text(["time", *COLUMNS], rows_with(MS * 1_000_000)),
    "mixed units": text(["open_time", *COLUMNS], rows_with(mixed)),
    "zone": text(["datetime", *COLUMNS], rows_with(FRAME.index.tz_convert("Asia/Taipei").map(lambda t: t.isoformat()))),
    "zulu": text(["Date", *COLUMNS], rows_with(FRAME.index.strftime("%Y-%m-%dT%H:%M:%SZ"))),
    "no header": text(None, rows_with(MS)),
    "no header, dates": text(None, rows_with(ISO), ";"),
    "archive ms": text(None, archive_rows(1000)),
    "archive us": text(None, archive_rows(1_000_000)),
    "day first": text(["date", *COLUMNS], rows_with(dutch)),
    "month first": text(["date", *COLUMNS], rows_with(american)),
    "quotes and fractions": text(
        ["Gmt time", *COLUMNS], [(f'"{t}.000"', *v) for t, *v in rows_with(FRAME.index.strftime("%d.%m.%Y %H:%M:%S"))]
    ),
    "packed": text(["date", *COLUMNS], rows_with(FRAME.index.strftime("%Y%m%d%H%M%S"))),
    "banner": text(
        ["unix", "date", "symbol", *COLUMNS[:4], "Volume BTC", "Volume USDT", "tradecount"],
        [(t, d, "BTCUSDT", *v, v[4] * 100, 9) for (t, *v), d in zip(rows_with(MS), ISO, strict=True)],
        banner="https://www.example.com\n",
        newest_first=True,
    ),
    "terminal": text(
        ["<DATE>", "<TIME>", "<OPEN>", "<HIGH>", "<LOW>", "<CLOSE>", "<TICKVOL>", "<SPREAD>"],
        [(d[:10].replace("-", "."), d[11:], *v, 3) for d, *v in rows_with(ISO)],
        "\t",
    ),
    "terminal without header": text(None, [(d[:10].replace("-", "."), d[11:16], *v) for d, *v in rows_with(ISO)]),
    "currency volume": text(
        ["Timestamp", "Open", "High", "Low", "Close", "Volume_(BTC)", "Volume_(Currency)", "Weighted_Price"],
        [(*row, 1.0, 2.0) for row in rows_with(MS // 1000)],
    ),
    "decimal comma": text(TITLE, rows_with(ISO), ";").replace(".", ","),
    "quoted": text(TITLE, [[f'"{x}"' for x in row] for row in rows_with(MS)]),
    "column order": text(
        ["close", "volume", "time", "low", "high", "open"],
        [(c, v, t, lo, h, o) for t, o, h, lo, c, v in rows_with(MS)],
    ),
    "doubled and shuffled": text(["time", *COLUMNS], [*rows_with(MS)[30:], *rows_with(MS)[:40]]),
}


def assert_same(klines):
    got = klines.frame[COLUMNS]
    assert np.array_equal(got.index.asi8, FRAME.index.asi8)
    assert np.allclose(got.to_numpy(), FRAME.to_numpy(), rtol=1e-15)
    assert klines.passport.series == "BTCUSDT_15m" and klines.passport.source == "file"
    assert not klines.passport.synthetic and klines.passport.missing == 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_bars(tmp_path, spelling):
    path = tmp_path / "BTCUSDT.csv"
    path.write_text(SPELLINGS[spelling], encoding="utf-8")
    assert_same(read_klines(path))


def test_more_columns_are_kept_under_their_names(tmp_path):
    path = tmp_path / "BTCUSDT-15m-2025-01.csv"
    path.write_text(SPELLINGS["archive us"])
    frame = read_klines(path).frame
    assert (frame[["quote_volume", "trades", "taker_buy_volume"]] == [12.5, 7, 1.5]).all(axis=None)
    path.write_text(SPELLINGS["banner"])
    frame = read_klines(path).frame
    assert np.allclose(frame["quote_volume"], 100 * frame["volume"]) and (frame["trades"] == 9).all()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks(tmp_path, encoding):
    path = tmp_path / "btc-usdt.txt"
    path.write_text(SPELLINGS["terminal"], encoding=encoding)
    assert_same(read_klines(path))


def test_every_container_gives_the_same_bars(tmp_path):
    plain = SPELLINGS["plain"].encode()
    (tmp_path / "BTC_USDT.csv.gz").write_bytes(gzip.compress(plain))
    with zipfile.ZipFile(tmp_path / "BTC_USDT.zip", "w") as archive:
        archive.writestr("BTCUSDT-15m.csv", plain)
    dated = FRAME.rename_axis("date").reset_index()
    dated.to_feather(tmp_path / "BTC_USDT-15m.feather")  # as freqtrade writes it
    dated.to_parquet(tmp_path / "BTC_USDT-15m.parquet")
    FRAME.rename_axis("open_time").to_parquet(tmp_path / "binance_BTCUSDT_15m.parquet")
    lists = [[int(t), *v] for t, *v in rows_with(MS)]
    (tmp_path / "BTC_USDT-15m.json").write_text(json.dumps(lists))
    (tmp_path / "BTC_USDT-15m-futures.json.gz").write_bytes(gzip.compress(json.dumps(lists).encode()))
    words = [[t, *map(str, v)] for t, *v in lists]  # as the venue's REST answers
    (tmp_path / "BTCUSDT.json").write_text(json.dumps(words))
    records = [dict(zip(["t", "o", "h", "l", "c", "v"], row, strict=True)) for row in lists]
    (tmp_path / "BTCUSDT_records.json").write_text(json.dumps({"symbol": "BTCUSDT", "data": records}))
    (tmp_path / "BTC_USDT-15m.csv.xz").write_bytes(lzma.compress(plain))
    (tmp_path / "BTC_USDT-15m.csv.bz2").write_bytes(bz2.compress(plain[:99]) + bz2.compress(plain[99:]))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 11
    for path in paths:
        assert_same(read_klines(path))


def test_gaps_and_rows_without_a_price_are_told(tmp_path):
    rows = rows_with(MS)
    rows[7] = (rows[7][0], "", "", "", "", "")
    del rows[20:23]
    path = tmp_path / "BTCUSDT.csv"
    path.write_text(text(["time", *COLUMNS], rows))
    passport = read_klines(path).passport
    assert (passport.expected, passport.got) == (60, 56)
    assert passport.notes == ("1 rows without a price were dropped.",)
    assert passport.files[0].name == "BTCUSDT.csv"
    assert passport.files[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_bar_that_is_not_closed_is_dropped(tmp_path):
    now = pd.Timestamp.now("UTC").floor("15min")
    shifted = FRAME.set_axis(FRAME.index + (now - FRAME.index[-1]))
    path = tmp_path / "ETHUSDT.parquet"
    shifted.rename_axis("time").to_parquet(path)
    klines = read_klines(path)
    assert klines.passport.unfinished == 1 and len(klines.frame) == 59


def test_the_series_can_be_named_and_is_checked(tmp_path):
    path = tmp_path / "my bars.csv"
    path.write_text(SPELLINGS["plain"])
    assert read_klines(path, "WIFUSDT_15m").passport.series == "WIFUSDT_15m"
    with pytest.raises(
        DataError, match="no symbol in the file's name or in a column; name the series, such as BTCUSDT_15m"
    ):
        read_klines(path)
    with pytest.raises(DataError, match="WIFUSDT_1h was asked for, but the bars start 15m apart"):
        read_klines(path, "WIFUSDT_1h")


@pytest.mark.parametrize(
    "name, series",
    [
        ("BTCUSDT-15m-2025-01.csv", "BTCUSDT_15m"),
        ("Binance_1INCHUSDT_1h.csv", "1INCHUSDT_1h"),
        ("btcusd_1-min_data.csv", "BTCUSD_1m"),
        ("ETH_BTC-5m.csv", "ETHBTC_5m"),
        ("BTC_USDT_USDT-1h-futures.csv", "BTCUSDT_1h"),
        ("1000PEPEUSDT.csv", "1000PEPEUSDT_15m"),
        ("solusdc 15m.csv", "SOLUSDC_15m"),
        ("btcusdt_1h_data.csv", "BTCUSDT_1h"),
        ("BINANCE_BTCUSDT, 60.csv", "BTCUSDT_1h"),
        ("Binance_ETHUSDT_d.csv", "ETHUSDT_1d"),
        ("gemini_BTCUSD_2020_1min.csv", "BTCUSD_1m"),
        ("EURUSD_M15.csv", "EURUSD_15m"),
        ("XBTUSD_60.csv", "BTCUSD_1h"),
        ("BTC-USD.csv", "BTCUSD_1d"),
        ("BTC_1h.csv", "BTCUSDT_1h"),
        ("doge.csv", "DOGEUSDT_4h"),
        ("AAPL.csv", "AAPL_1d"),
        ("BTC_price_usd_ohlc_1h.csv", "BTCUSD_1h"),
        ("PERP_USDT-1h.csv", "PERPUSDT_1h"),
        ("data_ETH_USDT_futures_1h.csv", "ETHUSDT_1h"),
        ("tETHUSD_1h.csv", "ETHUSD_1h"),
        ("SPY_1d.csv", "SPY_1d"),
        ("Bitcoin Historical Data - Investing.com.csv", "BTCUSDT_1d"),
    ],
)
def test_symbol_and_interval_are_read_from_name_and_times(tmp_path, name, series):
    path = tmp_path / name
    content = bars(freq=f"{INTERVAL_SECONDS[series.rpartition('_')[2]]}s")
    path.write_text(text(["time", *COLUMNS], zip(content.index.asi8 // 10**6, *content.T.to_numpy(), strict=True)))
    assert read_klines(path).passport.series == series


def test_a_name_that_the_times_contradict_is_refused(tmp_path):
    path = tmp_path / "BTCUSDT_1h.csv"
    path.write_text(SPELLINGS["plain"])
    with pytest.raises(DataError, match=r"its name says 1h, but the bars start 15m apart\. Rename the file"):
        read_klines(path)


PLAIN = SPELLINGS["plain"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("BTCUSDT.pkl", "x", r"read as .csv, .parquet, .feather, .json or .xlsx .*; got .pkl. Pickles are never read"),
        ("BTCUSDT.csv", "", "cannot be read as what its name says: No columns to parse"),
        ("BTCUSDT.csv", "time,open,high,low,close,volume\n", "holds no rows"),
        ("BTCUSDT.parquet", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.csv.gz", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.zip", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.json", "{", "cannot be read as what its name says"),
        ("BTCUSDT.csv", PLAIN.replace("close", "end"), r"got .*end.* \(nothing read as close\). Rename"),
        ("BTCUSDT.csv", PLAIN.replace("timestamp", "row"), r"nothing read as time"),
        ("BTCUSDT.csv", PLAIN.replace("100.0", "n/a?", 1), "open must hold numbers; row 1 has 'n/a"),
        ("BTCUSDT.csv", PLAIN.replace("100.0", "-1.0", 1), "a price that is not above zero"),
        ("BTCUSDT.csv", PLAIN.replace(str(MS[5]), "", 1), "row 6 has none that can be read"),
        ("BTCUSDT.csv", text(["id", *COLUMNS], rows_with(MS)), "nothing read as time"),
        ("BTCUSDT.csv", text(["t", *COLUMNS], rows_with(range(60))), "1970-01-01"),
        (
            "BTCUSDT.csv",
            text(["date", *COLUMNS], rows_with(["01/02/2025 10:00", "02/02/2025 10:00"] * 30)),
            r"can be read as %d/%m/%Y %H:%M and as %m/%d/%Y %H:%M. Write them as",
        ),
        ("BTCUSDT.csv", PLAIN[: PLAIN.rindex("\n", 0, -1) + 6], r"row 60 has '1735.', the last row: was the file cut"),
        ("BTCUSDT.csv", PLAIN.replace(str(MS[5]), "17356", 1), r"row 6 has '17356', which would be 1970"),
        (
            "BTCUSDT.csv",
            SPELLINGS["title case"].replace(ISO[-1], ISO[-1][:9]),
            r"row 60 has .*cut there\?; it is no time like",
        ),
        ("BTCUSDT.csv", text(["date", *COLUMNS], rows_with(["soon"] * 60)), "'soon' cannot be read. Write them as"),
        ("BTCUSDT.csv", text(["t", *COLUMNS], rows_with(MS[0] + np.arange(60) * 420_000)), "most often 420 s apart"),
        ("BTCUSDT.csv", text(["t", *COLUMNS], rows_with(MS)[:1]), "from two bars or more, or from the name; got one"),
    ],
)
def test_errors_say_what_came_and_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_klines(path)


def test_a_missing_file_shows_its_neighbours(tmp_path):
    (tmp_path / "BTCUSDT.csv").write_text("x")
    with pytest.raises(DataError, match=r"no file .*BTCUSD\.csv; that folder has BTCUSDT\.csv"):
        read_klines(tmp_path / "BTCUSD.csv")
    with pytest.raises(DataError, match="no file"):
        read_table(tmp_path / "nowhere" / "x.csv")


def test_a_zip_of_many_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "BTCUSDT.zip", "w") as archive:
        archive.writestr("a.csv", "1")
        archive.writestr("b.csv", "1")
    with pytest.raises(DataError, match="a zip must hold one file; got 2"):
        read_klines(tmp_path / "BTCUSDT.zip")


def test_real_files_of_the_market_are_read(market):
    klines = read_klines(market / "1h" / "PEPEUSDT.csv.gz")
    assert klines.passport.series == "PEPEUSDT_1h" and klines.frame["close"].max() < 1e-4


def table(tmp_path, content, **arguments):
    path = tmp_path / "table.csv"
    path.write_text(content)
    return read_table(path, **arguments)


LOAD = "date,HUFL,OT,site\n2016-07-01 01:00:00,5.6,27,a\n2016-07-01 00:00:00,5.8,30.5,a\n"


def test_a_table_has_its_times_sorted_and_its_columns_chosen(tmp_path):
    got = table(tmp_path, LOAD)
    assert list(got.columns) == ["HUFL", "OT"] and got["OT"].tolist() == [30.5, 27.0]
    assert got.index.name == "date" and got.index[0] == pd.Timestamp("2016-07-01", tz="UTC")
    got = table(tmp_path, LOAD, time="date", columns=["OT", "HUFL", "OT"])
    assert list(got.columns) == ["OT", "HUFL"] and set(got.dtypes) == {np.dtype(float)}


def test_columns_that_are_not_numbers_are_named_when_left_out(tmp_path, caplog):
    table(tmp_path, LOAD)
    assert "columns that are not numbers were left out: site ('a')" in caplog.text


HOURS = pd.date_range("2024-01-01", periods=600, freq="h", name="time")
HOURLY = pd.DataFrame({"time": HOURS.astype(str), "load": np.arange(600.0)})


@pytest.mark.parametrize(
    "frame",
    [
        HOURLY.iloc[::-1],
        HOURLY.sample(frac=1, random_state=0),
        HOURLY.set_index(HOURS)[["load"]],
        HOURLY.assign(time=HOURS.tz_localize("UTC").tz_convert("Asia/Tokyo")),
        HOURLY.assign(time=HOURS.strftime("%d/%m/%Y %H:%M")),  # which the first hundred rows leave open
        HOURLY.assign(load=HOURLY["load"].astype(object)),
        HOURLY.set_index("time"),
        HOURLY.set_index(HOURS.to_period("h"))[["load"]],
    ],
    ids=["backwards", "shuffled", "by index", "in another zone", "day first", "of objects", "by text", "by periods"],
)
def test_a_frame_is_arranged_as_a_file_is(frame):
    got = arrange(frame, "load")
    assert list(got) == ["load"] and got["load"].tolist() == HOURLY["load"].tolist()
    assert (got.index == HOURS.tz_localize("UTC")).all()


@pytest.mark.parametrize(
    "frame, message",
    [
        (pd.concat([HOURLY.assign(shop=0), HOURLY.assign(shop=1)]), "one row a time; got 600 more"),
        (HOURLY.assign(time=HOURS.strftime("%d/%m/%Y %H:%M"))[:200], "can be read as %d/%m/%Y %H:%M and as %m/%d/%Y"),
        (
            HOURLY.astype(object).replace({"load": {3.0: "n/a?"}}),
            "load must hold numbers; 1 of 600 cells are none, row 4 ",
        ),
        (HOURLY.replace({"load": {3.0: np.inf}}), "load must hold numbers; row 4 has 'inf'; leave such cells blank"),
        (HOURLY.rename(columns={"load": "a:b"}), "a column's name may have no ':'"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "each column needs a name of its own; got twice a"),
    ],
)
def test_what_a_frame_must_not_be_is_said(frame, message):
    with pytest.raises(DataError, match=message):
        arrange(frame, "load")


@pytest.mark.parametrize(
    "column",
    [
        pd.Categorical([1, 2] * 300),
        pd.to_timedelta(np.arange(600), unit="s"),
        HOURS.to_period("h"),
        [None] * 600,
        ["60614"] * 600,  # as a day since 1900 it would be one of 2065
    ],
    ids=["categories", "lengths", "periods", "nothing", "text of digits"],
)
def test_a_column_of_another_kind_does_not_stop_the_others(column):
    got = arrange(HOURLY.assign(other=column), "load", columns=["load"])
    assert list(got) == ["load"] and got.index[0] == HOURS[0].tz_localize("UTC")
    assert "load" in arrange(HOURLY.assign(other=column), "load")


def test_a_column_that_counts_the_rows_is_left_out_with_a_word(tmp_path, caplog):
    assert list(table(tmp_path, ",load\n0,5\n1,7\n2,6\n")) == ["load"]
    assert "a column that counts the rows was left out: Unnamed: 0" in caplog.text


def test_a_table_without_times_is_counted(tmp_path):
    got = table(tmp_path, "a,t\n1,0\n2,1\n,2\n")
    assert isinstance(got.index, pd.RangeIndex) and got["t"].tolist() == [0, 1, 2]
    assert np.isnan(got["a"].iloc[2])  # left for the person to see


def test_a_day_and_a_time_of_day_are_one_time(tmp_path):
    got = table(tmp_path, "Date,Time,load\n2020/01/01,00:15,2\n2020/01/01,00:00,1\n")
    assert got.index[1] == pd.Timestamp("2020-01-01 00:15", tz="UTC") and got["load"].tolist() == [1, 2]
    assert list(got.columns) == ["load"]


@pytest.mark.parametrize("column", ["Timestamp", "measured at"])
def test_times_are_found_by_name_or_by_look(tmp_path, column):
    got = table(tmp_path, f"load,{column}\n1,2020-01-01\n2,2020-01-02\n")
    assert got.index.name == column and list(got.columns) == ["load"]


def test_commas_inside_quotes_are_no_columns(tmp_path):
    written = 'time,load\n2025-01-01,"1,000.5"\n2025-01-02,"{}"\n'
    assert table(tmp_path, written.format("1,001.5"), columns=["load"])["load"].tolist() == [1000.5, 1001.5]
    with pytest.raises(DataError, match=r"load must hold numbers; row 2 has '1,00,5'"):
        table(tmp_path, written.format("1,00,5"), columns=["load"])


def test_numbers_are_read_as_people_write_them_and_told(tmp_path, caplog):
    for first, second, *want in (
        ("$1,017.25", "$ 822.50", 1017.25, 822.5),
        ("40.188,60", "7,75", 40188.6, 7.75),
        ("12.5%", "7 %", 12.5, 7),
    ):
        assert table(tmp_path, f"day\tx\n2025-01-01\t{first}\n2025-01-02\t{second}\n")["x"].tolist() == want
        assert f"numbers were read as they are written: x ({first!r} as {want[0]:,})" in caplog.text
    days = pd.date_range("2025-01-01", periods=2)
    assert arrange(pd.DataFrame({"x": ["1,017.25", "3"]}, index=days), "load")["x"].tolist() == [1017.25, 3]
    words = 'day,x,place,code\n2025-01-01,1,"Berlin, Mitte",12K1\n2025-01-02,2,"Bonn, Nord",12K2\n'
    assert list(table(tmp_path, words)) == ["x"]


def test_points_end_thousands_only_where_a_cell_of_the_file_has_both(tmp_path, caplog):
    def read(*rows, columns="load;price"):
        told = [f"2025-01-01 {i:02d}:00;{row}\n" for i, row in enumerate(rows)]
        return table(tmp_path, f"time;{columns}\n" + "".join(told)).to_dict("list")

    both = read("1.819;42.489,00", "890;42.512,50", "12.345.678;900,25")
    assert both == {"load": [1819, 890, 12345678], "price": [42489, 42512.5, 900.25]}
    assert read("1.125;0,5", "2.250;0,7") == {"load": [1.125, 2.25], "price": [0.5, 0.7]}
    assert read("1.125;Berlin, Mitte", "2.250;Bonn, Nord") == {"load": [1.125, 2.25]}
    for plain in (["230.501", "230.626"], ["99.500", "100.250", "100.000"], ["1.25", "822", "3.75"], ["0.017", "822"]):
        caplog.clear()
        assert read(*plain, columns="load")["load"] == list(map(float, plain))
        assert "thousands" not in caplog.text
    assert read("1.017", "822", "1.165", "635", columns="load")["load"] == [1.017, 822, 1.165, 635]
    assert "load has whole numbers such as 822, and 1.017: if that point ends thousands, write 1017" in caplog.text


@pytest.mark.parametrize(
    "cells",
    [
        *("5B 6B", "1.5 2,5", "1,234.56 1.234,56", "52.5,13.4 52.6,13.5", "192.168.100.101 192.168.100.102"),
        *("1.200.300 1.2.3", "030_123456 040_123456", "2024_01_01 2024_01_02", "12'30 5'00", "00_12 00_13"),
    ],
)
def test_labels_and_cells_written_in_two_ways_are_no_numbers(cells):
    column = [cell.replace("_", " ") for cell in cells.split()]
    assert list(arrange(pd.DataFrame({"x": [1.0, 2.0], "code": column}), "load")) == ["x"]


def test_seconds_since_1970_are_times_by_name_only(tmp_path):
    content = "{},x\n1600000000,1\n1600000060,2\n"
    assert table(tmp_path, content.format("timestamp")).index[1] == pd.Timestamp("2020-09-13 12:27:40", tz="UTC")
    assert isinstance(table(tmp_path, content.format("packets")).index, pd.RangeIndex)


def test_commas_before_three_digits_are_decimals_where_each_number_has_one(tmp_path):
    told = "day;load;flats\n01.01.2025 00:00;50,586;1,200\n01.01.2025 01:00;0,240;900\n01.01.2025 02:00;56,407;1,100\n"
    found = table(tmp_path, told.replace(";900", ";0,900"))
    assert found["load"].tolist() == [50.586, 0.24, 56.407] and found["flats"].tolist() == [1.2, 0.9, 1.1]
    pointed = "day;close;volume\n2024-01-01 00:00;0.5001;13,346\n2024-01-01 01:00;0.5002;14,100\n"
    assert table(tmp_path, pointed)["volume"].tolist() == [13346, 14100], "a point before decimals ends the doubt"
    named = table(tmp_path, "timestamp,x\n1600000000,1\n1600000060,2\n", time="timestamp", columns=["timestamp", "x"])
    assert list(named) == ["timestamp", "x"]
    thousands = "day;load\n01.01.2025 00:00;1,586\n01.01.2025 01:00;900\n"
    assert table(tmp_path, thousands)["load"].tolist() == [1586, 900]


def test_rows_that_repeat_another_are_left_out_with_a_word(tmp_path, caplog):
    first, *rest = LOAD.splitlines(keepends=True)
    assert len(table(tmp_path, "".join([first, *rest, rest[0]]))) == len(rest)
    assert "rows left out that repeat another: 1" in caplog.text


@pytest.mark.parametrize(
    "content, arguments, error, message",
    [
        (LOAD, {"time": "day"}, UnknownName, "time column must be a known name; got 'day'"),
        (LOAD, {"columns": ["HUFI"]}, UnknownName, r"'HUFI' \(nearest: HUFL"),
        (LOAD, {"columns": ["site"]}, DataError, "site must hold numbers; row 1 has 'a'"),
        (LOAD.replace("27", "inf"), {}, DataError, "OT must hold numbers; row 1 has 'inf'"),
        (LOAD.replace("01:00", "00:00"), {}, DataError, "one row a time; got 1 more, the first at 2016-07-01"),
        ("name,site\na,b\nc,d\n", {}, DataError, "needs at least one column of numbers; got name, site"),
    ],
)
def test_table_errors_say_the_rule(tmp_path, content, arguments, error, message):
    with pytest.raises(error, match=message):
        table(tmp_path, content, **arguments)


@pytest.mark.slow
def test_two_million_rows_load_in_seconds(tmp_path):
    rows = 2_000_000
    rng = np.random.default_rng(0)
    close = 100 + np.cumsum(rng.choice([-0.01, 0.01], rows)) * 0.01
    frame = pd.DataFrame({"time": 1_500_000_000 // 60 * 60 + 60 * np.arange(rows), "open": close, "high": close})
    frame = frame.assign(low=close, close=close, volume=1.0)
    frame.to_parquet(tmp_path / "BTCUSDT.parquet")
    start = time.perf_counter()
    assert len(read_klines(tmp_path / "BTCUSDT.parquet").frame) == rows
    assert len(read_table(tmp_path / "BTCUSDT.parquet")) == rows
    assert time.perf_counter() - start < 30  # about 3 on a quiet core


def save(path, frame, name="time"):
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.rename_axis(name).to_csv(path)


def test_a_folder_is_read_whole_and_pieces_are_joined(tmp_path):
    btc, eth = bars(96, "1h"), bars(40, "15min") / 20
    for day, piece in btc.groupby(btc.index.date):
        save(tmp_path / "days" / f"BTCUSDT-1h-{day}.csv", piece)
    save(tmp_path / "ETH_USDT-15m.csv", eth)
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / ".hidden.csv").write_text("x")
    save(tmp_path / "run" / "models" / "SOLUSDT_1h.csv", btc)
    (tmp_path / "run" / "experiment.json").write_text("{}")
    found = read_files(tmp_path)
    assert list(found.klines) == ["BTCUSDT_1h", "ETHUSDT_15m"]
    assert np.array_equal(found.klines["BTCUSDT_1h"].frame[COLUMNS], btc)
    assert len(found.klines["BTCUSDT_1h"].passport.files) == 5
    assert not found.refused and list(found.left_out) == ["README.md"]
    told = found.text()
    assert "BTCUSDT_1h       2024-12-31T18:00 to 2025-01-04T17:00         96 bars  5 files" in told
    assert "not taken: README.md: a file of bars is" in told
    assert list(read_files(f"{tmp_path}/*15m*").klines) == ["ETHUSDT_15m"]
    assert list(read_files(tmp_path, ["BTCUSDT"], ["60m"]).klines) == ["BTCUSDT_1h"]
    assert list(read_files(tmp_path / "ETH_USDT-15m.csv").klines) == ["ETHUSDT_15m"]


def test_one_bad_file_stops_no_other(tmp_path):
    save(tmp_path / "BTCUSDT_15m.csv", FRAME)
    (tmp_path / "ETHUSDT_15m.csv").write_text(PLAIN.replace("100.0", "n/a?", 1))
    (tmp_path / "SOLUSDT_15m.parquet").write_bytes(b"PAR1 no")
    found = read_files(tmp_path)
    assert list(found.klines) == ["BTCUSDT_15m"] and len(found.refused) == 2
    assert found.refused["ETHUSDT_15m.csv"] == "open must hold numbers; row 1 has 'n/a?'"


def test_dates_cut_own_files_too(tmp_path):
    save(tmp_path / "BTCUSDT_1h.csv", bars(96, "1h"))
    bars_of = read_files(tmp_path, start="2025-01-01", end="2025-01-02").klines["BTCUSDT_1h"].passport
    assert (bars_of.first, bars_of.last, bars_of.got) == ("2025-01-01T00:00", "2025-01-02T23:00", 48)
    with pytest.raises(DataError, match=r"no bar in 2026-01-01 .. its end; the files have 2024-12-31 .. 2025-01-04"):
        read_files(tmp_path, start="2026-01-01")


def test_conflicting_rows_are_refused_with_the_first(tmp_path):
    save(tmp_path / "BTCUSDT_15m.csv", FRAME)
    other = FRAME.copy()
    other.iloc[7:10] *= 1.01
    save(tmp_path / "more" / "BTCUSDT_15m.csv", other)
    with pytest.raises(DataError, match="3 bars have two rows that disagree; the first at 2024-12-31T19:45: BTCUSDT"):
        read_files(tmp_path)


def test_a_bar_that_was_saved_before_it_closed_gives_way(tmp_path):
    early = FRAME.iloc[:30].copy()
    early.iloc[-1, 3] = early.iloc[-1, :4].mean()  # its close was another then
    early.iloc[-1, 4] /= 2
    save(tmp_path / "a" / "BTCUSDT_15m.csv", early)
    save(tmp_path / "b" / "BTCUSDT_15m.csv", FRAME)
    bars_of = read_files(tmp_path).klines["BTCUSDT_15m"]
    assert np.array_equal(bars_of.frame[COLUMNS], FRAME)
    assert "1 bars that were saved before they closed gave way to the whole ones." in bars_of.passport.notes


def luna(tmp_path, name):
    old = bars(48, "1h").set_axis(pd.date_range("2022-05-11 01:00", periods=48, freq="1h", tz="UTC"))
    new = bars(72, "1h").set_axis(pd.date_range("2022-05-31 06:00", periods=72, freq="1h", tz="UTC")) * 500
    save(tmp_path / name, pd.concat([old / 100, new]))


@pytest.mark.parametrize("name, venue", [("Binance_LUNAUSDT_1h.csv", ""), ("LUNAUSDT_1h.csv", "binance")])
def test_own_bars_of_a_known_venue_get_what_is_known_of_it(tmp_path, name, venue):
    luna(tmp_path, name)
    passport = read_files(tmp_path, venue=venue).klines["LUNAUSDT_1h"].passport
    assert passport.first == "2022-06-01T06:00" and passport.market == "spot"
    assert "of another asset, the old Terra chain" in " ".join(passport.notes)


def test_halts_are_named_where_the_venue_is_known(tmp_path):
    frame = bars(96, "1h").set_axis(pd.date_range("2021-08-12", periods=96, freq="1h", tz="UTC"))
    save(tmp_path / "BTCUSDT_1h.csv", frame.drop(frame.index[26:30]))
    assert read_files(tmp_path, venue="other").klines["BTCUSDT_1h"].passport.unexplained == 4
    assert read_files(tmp_path, venue="binance").klines["BTCUSDT_1h"].passport.unexplained == 0


def test_a_change_of_asset_is_told_without_a_venue(tmp_path):
    luna(tmp_path, "LUNAUSDT_1h.csv")
    passport = read_files(tmp_path, venue="other").klines["LUNAUSDT_1h"].passport
    assert "as if another asset had taken the name: use the bars of one side" in passport.notes[-1]


def test_a_file_that_does_not_say_takes_the_one_symbol_asked_for(tmp_path):
    save(tmp_path / "my bars.csv", FRAME)
    with pytest.raises(DataError, match="no symbol in the file's name or in a column"):
        read_files(tmp_path)
    assert list(read_files(tmp_path, ["WIFUSDT"]).klines) == ["WIFUSDT_15m"]


@pytest.mark.parametrize("where", ["nowhere", "nowhere/*.csv"])
def test_a_place_without_files_is_told(tmp_path, where):
    with pytest.raises(DataError, match="no file"):
        read_files(tmp_path / where)


def test_frames_are_taken_as_files_are():
    hours = bars(60, "1h")
    found = from_frames({"BTCUSDT_15m": FRAME, "eth/usdt": hours.reset_index(names="date")}, start="2025-01-01")
    assert list(found) == ["BTCUSDT_15m", "ETHUSDT_1h"]
    assert np.array_equal(found["BTCUSDT_15m"].frame, FRAME["2025-01-01":])
    assert found["ETHUSDT_1h"].passport.source == "frame"
    assert from_frames(found) == found
    with pytest.raises(DataError, match="SOLUSDT_1h was asked for, but the bars start 15m apart"):
        from_frames({"SOLUSDT_1h": FRAME})
    with pytest.raises(DataError, match="as a pandas DataFrame; got dict"):
        from_frames({"SOLUSDT_1h": {}})


@pytest.mark.parametrize("spelling", ["Bid {}", "{}Bid"])
def test_prices_of_the_bid_are_told(spelling):
    frame = FRAME[[*OHLC]].rename(columns=spelling.format).assign(Ticks=7)
    notes = from_frames({"BTCUSDT": frame})["BTCUSDT_15m"].passport.notes
    assert notes == (
        *(f"{name} is the bid's price (column {spelling.format(name)})." for name in OHLC),
        "volume counts price changes (column Ticks), not what was traded.",
    )


def test_summer_time_leaves_days_at_their_dates(tmp_path):
    days = bars(60, "1D").set_axis(pd.date_range("2024-02-15", periods=60, freq="1D", tz="America/New_York"))
    days.rename_axis("Date").to_csv(tmp_path / "SPY.csv")
    frame = read_files(tmp_path).klines["SPY_1d"].frame
    assert frame.index[0] == pd.Timestamp("2024-02-15", tz="UTC") and len(frame) == 60


def test_rows_off_the_grid_are_refused(tmp_path):
    frame = bars(60, "1h")
    save(
        tmp_path / "BTCUSDT_1h.csv", frame.set_axis(frame.index + pd.to_timedelta(np.arange(60) // 50 * 17, unit="min"))
    )
    with pytest.raises(DataError, match="10 of 60 rows stand off the 1h grid; the first at 2025-01-02T20:17"):
        read_files(tmp_path)


def zip_bomb(method):
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w", method) as box:
        box.writestr("BTCUSDT_15m.csv", b"0\n" * (20 << 20))
    return blob.getvalue()


@pytest.mark.parametrize(
    "name, blob, message",
    [
        ("BTCUSDT_15m.csv.gz", lambda: gzip.compress(b"0\n" * (20 << 20)), "it unpacks to more than 33,554,432 bytes"),
        ("BTCUSDT_15m.zip", lambda: zip_bomb(zipfile.ZIP_DEFLATED), "it unpacks to more than 33,554,432 bytes"),
        ("BTCUSDT_15m.zip", lambda: zip_bomb(zipfile.ZIP_BZIP2), "a zip must be stored or deflated"),
        ("BTCUSDT_15m.json", lambda: b"[" * 100_000, "cannot be read as what its name says"),
        ("BTCUSDT_15m.json", lambda: b"[[" + b"9" * 400 + b",1,2,3,4]]", "BTCUSDT_15m.json"),
        ("BTCUSDT_15m.csv.gz", lambda: gzip.compress(PLAIN.encode())[:-30], "its end is missing"),
    ],
)
def test_what_unpacks_to_too_much_is_refused_in_little_memory(tmp_path, name, blob, message):
    path = tmp_path / name
    path.write_bytes(blob())
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        read_klines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


def in_a(kind):
    """The same bars in each container."""
    blob = io.BytesIO()
    if kind == "csv":
        return SPELLINGS["banner"].encode()
    if kind == "json":
        return json.dumps({"symbol": "BTCUSDT", "data": [[int(t), *map(str, v)] for t, *v in rows_with(MS)]}).encode()
    if kind == "zip":
        with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as box:
            box.writestr("BTCUSDT_15m.csv", PLAIN)
    elif kind == "csv.gz":
        return gzip.compress(PLAIN.encode())
    else:
        getattr(FRAME.reset_index(names="date"), f"to_{kind}")(blob)
    return blob.getvalue()


BLOBS = {kind: in_a(kind) for kind in ("csv", "json", "zip", "csv.gz", "parquet", "feather")}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(BLOBS)), draw=st.randoms(use_true_random=False), cut=st.booleans())
def test_any_damage_ends_in_bars_or_a_clear_error(tmp_path, kind, draw, cut):
    blob = bytearray(BLOBS[kind])
    for _ in range(draw.randint(1, 12)):
        at = draw.randrange(len(blob))
        blob[at : at + draw.randint(0, 3)] = bytes(draw.choices(b'0159,.;"{}[]\n-eEnNxX\x00\xff', k=draw.randint(0, 3)))
    path = tmp_path / f"BTCUSDT_15m.{kind}"
    path.write_bytes(blob[: len(blob) // 2] if cut else blob)
    with contextlib.suppress(DataError):
        assert read_klines(path).passport.series == "BTCUSDT_15m"


def packed(first, chunk, times):
    """Deflate `first` and many times `chunk`, without the work of packing each."""
    packer = zlib.compressobj(wbits=-15)
    head = packer.compress(first) + packer.flush(zlib.Z_FULL_FLUSH)
    middle = packer.compress(chunk) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + middle * times + packer.flush()


def gzip_of(chunk, times):
    return b"\x1f\x8b\x08" + bytes(7) + packed(b"timestamp,open,high,low,close\n", chunk, times) + bytes(8)


def wants_memory(xz):
    """The same stream, whose header asks for a dictionary of 4 GiB."""
    size = 4 * (xz[12] + 1)
    head = bytearray(xz[12 : 12 + size])
    head[4] = 40
    head[-4:] = zlib.crc32(head[:-4]).to_bytes(4, "little")
    return xz[:12] + bytes(head) + xz[12 + size :]


def parquet_of(noted=b"", **columns):
    blob = io.BytesIO()
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata({"pandas": noted}) if noted else table, blob, compression="zstd")
    return blob.getvalue()


def feather_of(**columns):
    blob = io.BytesIO()
    feather.write_feather(pa.table(columns), blob, compression="zstd", chunksize=1 << 30)
    return blob.getvalue()


def excel_of(sheet):
    blob, plain = io.BytesIO(), io.BytesIO()
    pd.DataFrame({name: [1.0] for name in ["time", *OHLC]}).to_excel(plain, index=False)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as box:
        for name in old.namelist():
            box.writestr(name, sheet if "/worksheets/" in name else old.read(name))
    return blob.getvalue()


def stored(content):
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as box:
        box.writestr("line.csv", content)
    return blob.getvalue()


SHEET = (
    '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>%s</sheetData></worksheet>'
)
LAUGHS = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefghi", "bcdefghij", strict=True))
LONG = "A" * 1_000_000
TIMES = pd.date_range("2025-01-01", periods=300, freq="1h")
HOSTILE = {
    "zeros_1h.csv.gz": lambda: gzip_of(b"0" * (1 << 20), 3000),
    "rows_1h.csv.gz": lambda: gzip_of(b"1673308800000,1,2,1,1.5\n" * 40_000, 2000),
    "members_1h.csv.gz": lambda: gzip.compress(bytes(1 << 20)) * 3000,
    "zeros_1h.csv.xz": lambda: lzma.compress(bytes(64 << 20), preset=0),
    "zeros_1h.csv.bz2": lambda: bz2.compress(bytes(4 << 20)) * 200,
    "memory_1h.csv.xz": lambda: wants_memory(lzma.compress(b"time,open\n" * 9, check=lzma.CHECK_NONE)),
    "noted.parquet": lambda: parquet_of(noted=b"[" + b"[]," * (7 << 20) + b"1]", open=np.ones(3)),
    "line_1h.csv": lambda: b"1" * (4 << 20),
    "columns_1h.csv": lambda: ",".join(f"c{i}" for i in range(200_000)).encode() + b"\n",
    "blank_1h.csv": lambda: b"time,open,high,low,close\n" + b"\n" * 1_000_000,
    "cell_1h.csv": lambda: PLAIN.replace("100", "9" * 100_000, 1).encode(),
    "symbols_1h.csv": lambda: (
        "symbol,time,open,high,low,close\n" + "".join(f"S{i}USDT,1673308800000,1,1,1,1\n" for i in range(20_000))
    ).encode(),
    "lists.json": lambda: b"[" + b"[]," * 1_000_000 + b"1]",
    "ragged.json": lambda: json.dumps([[1] * 100_000, *[[1] * 5] * 50_000]).encode(),
    "keys.json": lambda: json.dumps([{f"{i}_{j}": 1 for j in range(5)} for i in range(20_000)]).encode(),
    "columns.json": lambda: json.dumps({f"k{i}": [1] for i in range(50_000)}).encode(),
    "margin.json": lambda: json.dumps({"columns": ["a"], "data": [[1] * 100_000, *[[1]] * 50_000]}).encode(),
    "word.parquet": lambda: parquet_of(time=pa.array([LONG]).take(pa.array([0] * 1500)), open=np.ones(1500)),
    "beside.parquet": lambda: parquet_of(
        **dict.fromkeys(OHLC, np.ones(300)), time=TIMES, note=pa.array([LONG * 5]).take(pa.array([0] * 300))
    ),
    "wide.parquet": lambda: parquet_of(**{f"c{i}": pa.nulls(1) for i in range(12_000)}),
    "bytes_1h.parquet": lambda: parquet_of(**dict.fromkeys(OHLC, pa.array([b"\xff"] * 300)), time=TIMES),
    "far_1h.parquet": lambda: parquet_of(
        **dict.fromkeys(OHLC, np.ones(3)), time=pa.array([2**62] * 3, pa.timestamp("us"))
    ),
    "rows.feather": lambda: feather_of(open=np.zeros(20_000_000)),
    "laughs.xlsx": lambda: excel_of(
        f'<!DOCTYPE x [<!ENTITY a "ha">{LAUGHS}]>' + SHEET % '<row r="1"><c r="A1"><v>&j;</v></c></row>'
    ),
    "far.xlsx": lambda: excel_of(
        SHEET % '<row r="1"><c r="A1"><v>1</v></c></row><row r="1048576"><c r="XFD1048576"/></row>'
    ),
    "row.xlsx": lambda: excel_of(SHEET % f'<row r="{10**9}"><c r="A{10**9}"><v>1</v></c></row>'),
    "deep.xlsx": lambda: excel_of("<a>" * 1_000_000),
    "torn.xlsx": lambda: excel_of((SHEET % "")[:-9]),
    "text.xlsx": lambda: b"no zip",
    "zeros.json": lambda: b"[" + b"0," * (25 << 20) + b"0]",
    "numbers.json": lambda: b"[" + b"12345," * (10 << 20) + b"0]",
    "names.json": lambda: ("[{" + ",".join(f'"k{i}":1' for i in range(1_000_000)) + "},[],[],[],[],[]]").encode(),
    "names_1h.json": lambda: json.dumps([{f"k{i}": 1 for i in range(20_000)}]).encode(),
    "line_1h.csv.zip": lambda: stored(b"1" * (300 << 20)),
    # What cannot be packed lets the rest unpack to fifty times as much.
    "line.csv.gz": lambda: gzip.compress(random.Random(0).randbytes(8 << 20) + b"1" * (300 << 20), 1),
}
SPARSE = {  # how it begins; the rest of 400 MB, or of 3 GB, takes no room on the disk
    "sparse.csv": b"",
    "sparse_1h.csv": b"time,open,high,low,close\n",
    "sparse.json": b"[",
    "sparse.csv.gz": b"",
    "sparse.zip": b"PK",
    "sparse.xlsx": b"PK",
    "sparse.feather": b"ARROW1",
    "sparse.parquet": b"PAR1",
    "large.parquet": b"PAR1",
    "large.csv": b"time,open,high,low,close\n",
}
READ = """
import pathlib, resource, sys
from cpbkit.data.files import read_klines
from cpbkit.errors import CpbkitError
import openpyxl
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = used()
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        print("TAKEN", path.name, read_klines(path))
    except CpbkitError as error:
        assert "\\n" not in str(error) and len(str(error)) < 2000, path
    print(path.name, (used() - before) >> 10)
"""


@pytest.mark.parametrize(
    "defused", [pytest.param("True", marks=pytest.mark.long), "False"]
)  # openpyxl's XML is guarded only where defusedxml is there
def test_what_a_stranger_packed_takes_little_memory_and_ends_in_one_line(tmp_path, defused):
    """In a process of its own, whose peak is that of all; beyond what reading needs in any case."""
    for name, blob in HOSTILE.items():
        (tmp_path / name).write_bytes(blob())
    for name, head in SPARSE.items():
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            file.truncate(400 << 20 if "sparse" in name else 3 << 30)
    command = [sys.executable, "-c", READ, str(tmp_path)]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OPENPYXL_DEFUSEDXML": defused}
    )
    assert told.returncode == 0, told.stdout[-500:] + told.stderr[-2000:]
    assert "TAKEN" not in told.stdout
    grown = {line.split()[0]: int(line.split()[1]) for line in told.stdout.splitlines()}
    assert len(grown) == len(HOSTILE) + len(SPARSE) and max(grown.values()) < 300, grown


LAYOUTS = {
    "coins_1h.json": lambda a, b: {"BTC/USDT": a, "ETH/USDT": b},
    "BTC_1h.json": lambda a, b: {
        "data": {
            "symbol": "BTC",
            "quotes": [{"timeOpen": r[0], "quote": {"USD": dict(zip(OHLC, r[1:], strict=False))}} for r in a],
        }
    },
    "IBM.json": lambda a, b: {
        "Meta Data": {"6. Time Zone": "US/Eastern"},
        "Time Series (60min)": {
            f"{pd.Timestamp(r[0], unit='ms', tz='UTC').tz_convert('US/Eastern'):%Y-%m-%d %H:%M:%S}": {
                f"{i + 1}. {name}": str(r[i + 1]) for i, name in enumerate(OHLC)
            }
            for r in a
        },
    },
    "okx_BTC-USDT_1h.json": lambda a, b: {"data": [[*r, 1, 1, 1] for r in a]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_of_venues_keep_their_prices_and_hours(tmp_path, name):
    frame = bars(60, "1h")
    rows = [
        [int(t.timestamp() * 1000), *values] for t, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    ]
    other = [[t, *(10 * value for value in values)] for t, *values in rows]
    (tmp_path / name).write_text(json.dumps(LAYOUTS[name](rows, other)))
    found = read_files(tmp_path).klines
    assert len(found) == (2 if name.startswith("coins") else 1)
    read = next(iter(found.values())).frame
    assert (read.index == frame.index).all() and np.allclose(read[list(OHLC)], frame[list(OHLC)])


def test_folders_and_sheets_name_symbols_and_what_describes_bars_is_left_out(tmp_path):
    save(tmp_path / "a" / "BTCUSDT" / "1h" / "2025-01-01.csv", bars(24, "1h"))
    save(tmp_path / "b" / "symbol=ETHUSDT" / "part-0.csv", bars(24, "1h"))
    (tmp_path / "a" / "meta.json").write_text('{"made": "today"}')
    with pd.ExcelWriter(tmp_path / "b" / "book.xlsx") as book:
        for symbol in ("SOLUSDT", "ADAUSDT"):
            bars(24, "1h").tz_localize(None).rename_axis("time").to_excel(book, sheet_name=symbol)
    found = read_files(tmp_path)
    assert set(found.klines) == {"BTCUSDT_1h", "ETHUSDT_1h", "SOLUSDT_1h", "ADAUSDT_1h"}
    assert list(found.left_out) == ["meta.json"] and not found.refused


def test_a_line_break_of_a_stranger_begins_no_line(tmp_path):
    save(tmp_path / "BTC\nError: all fine\nUSDT_1h.csv", bars(24, "1h"))
    (tmp_path / "ETH\nError: all fine\nUSDT_1h.csv").write_text("no bars")
    (tmp_path / "SOLUSDT_1h.csv").write_text('"a\nError: all fine",b,c,d,e\n1,2,3,4,5\n')
    for where in (tmp_path, tmp_path / "SOLUSDT_1h.csv", tmp_path / "ETH\nError: all fine\nUSDT_1h.csv"):
        shown = CliRunner().invoke(cpbkit, ["passport", str(where)])
        assert "Error: all fine" in shown.output and shown.exit_code == 1
        assert not any(line.startswith("Error: all fine") for line in shown.output.splitlines())


def test_notes_beside_bars_are_left_out_and_what_is_called_bars_is_refused_once(tmp_path):
    save(tmp_path / "BTCUSDT_1h.csv", bars(24, "1h"))
    for name in ("notes.txt", "README.TXT", "README.md", ".gitkeep", "empty.dat"):
        (tmp_path / name).write_text("" if "empty" in name else "my notes, of 2025\nand more\n")
    assert CliRunner().invoke(cpbkit, ["passport", str(tmp_path)]).exit_code == 0
    assert set(read_files(tmp_path).left_out) == {"notes.txt", "README.TXT", "README.md", "empty.dat"}
    (tmp_path / "ETHUSDT_1h.txt").write_text("my notes")
    (tmp_path / "mine.txt").write_text(PLAIN)
    assert set(read_files(tmp_path).refused) == {"ETHUSDT_1h.txt", "mine.txt"}
    shown = CliRunner().invoke(cpbkit, ["passport", str(tmp_path)])
    assert shown.exit_code == 1 and shown.output.count("ETHUSDT_1h.txt") == 1
    assert "2 of the files or series cannot be used; they are listed above" in shown.output


def test_a_folder_of_junk_is_given_up_and_progress_is_told(tmp_path):
    for i in range(502):
        (tmp_path / f"S{i:03d}USDT_1h.csv").write_text("")
    told = []
    with pytest.raises(DataError, match="the first 500 files hold no bars; name a folder nearer to them"):
        read_files(tmp_path, tell=told.append)
    assert told[:2] == ["reading files: 100 of 502", "reading files: 200 of 502"]
    save(tmp_path / "BTCUSDT_1h.csv", bars(24, "1h"))
    found = read_files(tmp_path)
    assert list(found.klines) == ["BTCUSDT_1h"] and len(found.refused) == 502
    assert len(found.text().splitlines()) == 32 and "not taken: 472 more" in found.text()


def test_series_that_are_there_are_named_where_others_are_asked_for(tmp_path):
    for symbol in ("BTC", "ETH"):
        save(tmp_path / f"{symbol}USDT_1h.csv", bars(24, "1h"))
    with pytest.raises(DataError, match=r"no bars that were asked for\. It has BTCUSDT_1h, ETHUSDT_1h$"):
        read_files(tmp_path, ["DOGEUSDT"])


def test_a_name_of_a_file_commands_no_terminal(tmp_path):
    save(tmp_path / "\x1b]0;x\x07BTCUSDT_1h.csv", bars(24, "1h"))
    told = read_files(tmp_path).text()
    assert "BTCUSDT_1h.csv" in told and "\x1b" not in told
    assert printable(os.fsdecode(b"\xff.csv")) == ".csv"
