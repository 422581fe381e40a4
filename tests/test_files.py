"""A person's own files: every usual spelling gives the same bars, everything else a sentence."""

import gzip
import json
import time
import zipfile

import numpy as np
import pandas as pd
import pytest

from cpbkit.config.experiment import OHLC
from cpbkit.data.files import read_folder, read_klines, read_table
from cpbkit.data.synthetic import make_market
from cpbkit.errors import DataError, UnknownName

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
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 9
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
    assert passport.files[0].name == "BTCUSDT.csv" and len(passport.files[0].sha256) == 64


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
    with pytest.raises(DataError, match="no symbol in the file's name; name the series, such as BTCUSDT_15m"):
        read_klines(path)
    with pytest.raises(DataError, match="WIFUSDT_1h was asked for, but the bars start 15m apart"):
        read_klines(path, "WIFUSDT_1h")


@pytest.mark.parametrize(
    "name, symbol",
    [
        ("BTCUSDT-15m-2025-01.csv", "BTCUSDT"),
        ("Binance_1INCHUSDT_1h.csv", "1INCHUSDT"),
        ("btcusd_1-min_data.csv", "BTCUSD"),
        ("ETH_BTC-5m.csv", "ETHBTC"),
        ("BTC_USDT_USDT-1h-futures.csv", "BTCUSDT"),
        ("1000PEPEUSDT.csv", "1000PEPEUSDT"),
        ("solusdc 15m.csv", "SOLUSDC"),
    ],
)
def test_the_symbol_is_read_from_the_name(tmp_path, name, symbol):
    path = tmp_path / name
    path.write_text(SPELLINGS["plain"])
    assert read_klines(path).passport.series == f"{symbol}_15m"


PLAIN = SPELLINGS["plain"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("BTCUSDT.pkl", "x", r"read as .csv, .parquet, .feather or .json .*; got .pkl. Pickles are never read"),
        ("BTCUSDT.csv", "", "cannot be read as what its name says: No columns to parse"),
        ("BTCUSDT.csv", "time,open,high,low,close,volume\n", "holds no rows"),
        ("BTCUSDT.parquet", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.csv.gz", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.zip", PLAIN, "cannot be read as what its name says"),
        ("BTCUSDT.json", "{", "cannot be read as what its name says"),
        ("BTCUSDT.csv", PLAIN.replace("close", "price"), r"got .*price.* \(nothing read as close\). Rename"),
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
        ("BTCUSDT.csv", text(["date", *COLUMNS], rows_with(["soon"] * 60)), "'soon' cannot be read. Write them as"),
        ("BTCUSDT.csv", text(["t", *COLUMNS], rows_with(MS[0] + np.arange(60) * 420_000)), "most often 420 s apart"),
        ("BTCUSDT.csv", text(["t", *COLUMNS], rows_with(MS)[:1]), "from two bars or more; got 1"),
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
    assert "columns that are not numbers were left out: site" in caplog.text


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
    with pytest.raises(DataError, match=r"load must hold numbers; row 1 has '1,000\.5'"):
        table(tmp_path, 'time,load\n2025-01-01,"1,000.5"\n2025-01-02,"1,001.5"\n', columns=["load"])


def test_seconds_since_1970_are_times_by_name_only(tmp_path):
    content = "{},x\n1600000000,1\n1600000060,2\n"
    assert table(tmp_path, content.format("timestamp")).index[1] == pd.Timestamp("2020-09-13 12:27:40", tz="UTC")
    assert isinstance(table(tmp_path, content.format("packets")).index, pd.RangeIndex)


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


def test_a_folder_gives_a_file_a_series(tmp_path):
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-01-05")
    market["BTCUSDT_1h"].frame.to_csv(tmp_path / "BTCUSDT_1h.csv")
    market["ETHUSDT_1h"].frame.to_parquet(tmp_path / "ETHUSDT_1h.parquet")
    found = read_folder(tmp_path, market)
    for name, each in market.items():
        pd.testing.assert_frame_equal(found[name].frame, each.frame, check_freq=False)
    with pytest.raises(DataError, match=r"one file a series; got BTCUSDT_15m: 0\. There is BTCUSDT_1h\.csv"):
        read_folder(tmp_path, ["BTCUSDT_15m"])
    (tmp_path / "BTCUSDT_1h.json").write_text("[]")
    with pytest.raises(DataError, match=r"no folder .*; it must hold one file a series"):
        read_folder(tmp_path / "nowhere", ["BTCUSDT_15m"])
    with pytest.raises(DataError, match="BTCUSDT_1h: 2"):
        read_folder(tmp_path, ["BTCUSDT_1h"])
