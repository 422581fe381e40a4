import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pandas as pd
import pytest
from conftest import NOWHERE, ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import archive_server
from benchmarks.archive_server import BOMB, FAULTS, Fault, make_rows, milliseconds, serving
from cpbkit.config.experiment import SYMBOLS
from cpbkit.data import archive, binance
from cpbkit.data.binance import Hosts, fetch_klines
from cpbkit.data.cache import Store
from cpbkit.data.download import Retries
from cpbkit.data.klines import Incomplete
from cpbkit.errors import CpbkitError, DataError, UnknownName

NOW = "2025-03-12T10:30"
QUICK = Retries(connect=2, read=0.8, whole=2.5, tries=3, backoff=0.002, longest_wait=0.02)
PATIENT = Retries(connect=2, read=30, whole=60, tries=3, backoff=0.002, longest_wait=0.02)  # where requests are counted
FIELDS = (1, 2, 3, 4, 5, 7, 8, 9)
BTC = "spot", "BTCUSDT", "4h"
FIRST, LAST = "2024-12-20", "2025-03-12"  # of what is fetched where a test says nothing else


@pytest.fixture
def clock(monkeypatch):
    """Set the time that the product sees."""

    def at(text):
        monkeypatch.setattr(binance, "_now", lambda: milliseconds(text) * 10**6)

    at(NOW)
    return at


@pytest.fixture
def server(clock, monkeypatch):
    monkeypatch.setattr(archive, "CSV_LIMIT", BOMB - 1)
    with serving(today=NOW[:10]) as server:
        for i, symbol in enumerate(("BTCUSDT", "ETHUSDT")):
            server.rows["spot", symbol, "4h"] = make_rows("4h", "2024-11-01", "2025-03-12T12:00", seed=i)
        yield server


@pytest.fixture
def fetch(server, tmp_path, monkeypatch):
    """Fetch from the server into a cache of the test, quickly."""

    def call(symbols="BTCUSDT", intervals="4h", start=FIRST, end=LAST, threads=12, **settings):
        monkeypatch.setattr(binance, "THREADS", threads)
        settings = {"store": Store(tmp_path / "cache", also=[]), "retries": QUICK, **settings}
        settings.setdefault("hosts", Hosts(server.url, server.rest_url))
        return fetch_klines(symbols.split(), intervals.split(), start, end, **settings)

    return call


def within(rows, start, end):
    """Rows of the days from start to end, both inclusive."""
    low, high = milliseconds(start), milliseconds(end) + 86_400_000
    return [r for r in rows if low <= int(r[0]) < high]


def truth(rows, start=FIRST, end=LAST, now=NOW, interval="4h"):
    """The bars that a perfect fetch gives: starts (ms) and values."""
    step = int(pd.Timedelta(interval).value / 10**6)
    kept = [r for r in within(rows, start, end) if int(r[0]) + step <= milliseconds(now)]
    return np.array([int(r[0]) for r in kept]), np.array([[float(r[i]) for i in FIELDS] for r in kept])


def is_right(klines, rows, *days, **settings):
    times, values = truth(rows, *days, **settings)
    return (klines.frame.index.as_unit("ms").asi8 == times).all() and (klines.frame.to_numpy() == values).all()


def test_months_then_days_then_rest(fetch, server):
    klines = fetch("BTCUSDT ETHUSDT")
    assert list(klines) == ["BTCUSDT_4h", "ETHUSDT_4h"]
    for name, bars in klines.items():
        assert is_right(bars, server.rows["spot", name[:7], "4h"])
        assert list(bars.frame.columns) == [
            *("open", "high", "low", "close", "volume", "quote_volume", "trades", "taker_buy_volume")
        ]
        p = bars.passport
        assert (p.source, p.market, p.series, p.synthetic) == ("binance", "spot", name, False)
        assert p.first == "2024-12-20T00:00" and p.last == "2025-03-12T04:00", "08:00 closes at 12:00"
        assert p.expected == p.got == len(bars.frame) and p.complete and p.notes == ()
        files = [f.name for f in p.files]
        assert files[:3] == [f"{name[:7]}-4h-{m}.zip" for m in ("2024-12", "2025-01", "2025-02")]
        assert files[3:14] == [f"{name[:7]}-4h-2025-03-{day:02}.zip" for day in range(1, 12)]
        assert len(files) == 15 and files[14].startswith("rest ")
        assert all(len(f.sha256) == 64 for f in p.files)
    urls = [path for path in server.asked if "BTC" in path]
    assert len(urls) == len(set(urls)) == 2 * 14 + 1


def test_a_second_fetch_asks_only_for_what_may_have_changed(fetch, server, clock):
    server.rows[BTC] = make_rows("4h", "2024-11-01", "2025-03-13T12:00")
    first = fetch()["BTCUSDT_4h"]
    server.asked.clear()
    again = fetch()["BTCUSDT_4h"]
    assert server.asked == [] and again.passport == first.passport
    pd.testing.assert_frame_equal(again.frame, first.frame, check_exact=True)
    assert fetch(start="2025-01-07", end="2025-02-03")["BTCUSDT_4h"].passport.got == 28 * 6
    assert server.asked == []
    clock("2025-03-12T12:00")
    assert fetch()["BTCUSDT_4h"].passport.last == "2025-03-12T08:00"
    assert [path.split("?")[0] for path in server.asked] == ["/api/v3/klines"]
    server.asked.clear()
    server.today = "2025-03-13"
    clock("2025-03-13T09:00")
    bars = fetch()["BTCUSDT_4h"]
    files = [path.rpartition("/")[2].removeprefix("BTCUSDT-4h-") for path in server.asked]
    assert sorted(files) == [f"2025-0{x}.zip.CHECKSUM" for x in (1, 2)] + ["2025-03-12.zip", "2025-03-12.zip.CHECKSUM"]
    assert bars.passport.files[-1].name == "BTCUSDT-4h-2025-03-12.zip" and bars.passport.complete
    server.asked.clear()
    assert is_right(fetch()["BTCUSDT_4h"], server.rows[BTC], now="2026-01-01")
    assert server.asked == []


def test_bars_that_the_rest_host_has_not_got_yet_are_asked_for_again(fetch, server, clock):
    rows = server.rows[BTC]
    server.rows[BTC] = [r for r in rows if int(r[0]) < milliseconds("2025-03-12T04:00")]
    clock("2025-03-12T08:00:05")
    late = fetch()["BTCUSDT_4h"].passport
    assert (late.last, late.unexplained) == ("2025-03-12T00:00", 1)
    server.rows[BTC] = rows
    assert fetch()["BTCUSDT_4h"].passport.last == "2025-03-12T04:00"


def test_a_host_with_a_slow_clock_gives_no_unfinished_bar(fetch, server, clock):
    server.clock = "Wed, 12 Mar 2025 11:59:50 GMT"
    clock("2025-03-12T12:30")  # this machine is ahead
    bars = fetch()["BTCUSDT_4h"].passport
    assert bars.last == "2025-03-12T04:00" and bars.unfinished == 1
    server.clock = "Wed, 12 Mar 2025 12:30:00 GMT"
    assert fetch()["BTCUSDT_4h"].passport.last == "2025-03-12T08:00"


def test_units_are_told_row_by_row(fetch, server):
    rows = server.rows[BTC]
    mixed = [r if i % 2 else [r[0] + "000", *r[1:6], r[6] + "999", *r[7:]] for i, r in enumerate(rows)]
    december = [m for m, r in zip(mixed, rows, strict=True) if r[0] < str(milliseconds("2025-01-01"))]
    server.edited["BTCUSDT-4h-2024-12.zip"] = [m for m in december if m[0][:10] >= "1733011200"]
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, rows)
    assert bars.passport.off_grid == 0 and bars.passport.notes == (), "none had to come from elsewhere"


def test_futures_come_in_coins_under_the_coins_symbol(fetch, server):
    for name, price in (("1000PEPEUSDT", 0.008), ("LUNA2USDT", 0.5), ("BTCUSDT", 90000.0)):
        server.rows["um", name, "4h"] = make_rows("4h", "2024-10-01", "2025-03-12T12:00", price=price)
    klines = fetch("PEPEUSDT LUNAUSDT BTCUSDT", market="um")
    assert is_right(klines["LUNAUSDT_4h"], server.rows["um", "LUNA2USDT", "4h"])
    assert is_right(klines["BTCUSDT_4h"], server.rows["um", "BTCUSDT", "4h"])
    pepe = klines["PEPEUSDT_4h"]
    _, values = truth(server.rows["um", "1000PEPEUSDT", "4h"])
    scale = np.array([1 / 1000] * 4 + [1000, 1, 1, 1000])
    np.testing.assert_allclose(pepe.frame.to_numpy(), values * scale, rtol=1e-15)
    np.testing.assert_array_equal(pepe.frame["close"].to_numpy(), values[:, 3] / 1000)
    assert pepe.passport.notes == ("From the contract 1000PEPEUSDT, rescaled: prices / 1000, volumes * 1000.",)
    assert klines["LUNAUSDT_4h"].passport.notes == ("From the contract LUNA2USDT.",)
    assert klines["BTCUSDT_4h"].passport.notes == ()
    assert {p.split("/")[1] for p in server.asked} == {"data", "fapi"}
    assert pepe.passport.files[0].name == "1000PEPEUSDT-4h-2024-12.zip"
    spot = fetch()["BTCUSDT_4h"]
    assert spot.passport.market == "spot" and spot.frame["close"].iloc[0] < 1000, "markets do not share a file"


def test_a_wrong_checksum_is_asked_for_once_more(fetch, server):
    server.faults = [Fault("wrong_sha", "2025-01.zip.CHECKSUM", times=1)]
    assert is_right(fetch()["BTCUSDT_4h"], server.rows[BTC])
    assert sum(path.endswith("2025-01.zip") for path in server.asked) == 2


@pytest.mark.parametrize(
    "kind, words",
    [
        ("wrong_sha", "does not match its checksum"),
        ("garbage", "not a zip that can be read"),
        ("bomb", "unpacks to more than"),
        ("escape", "must hold .* alone: it holds '../../"),
        ("two_members", "a zip must hold one file; got 2"),
        ("encrypted", "not a zip that can be read"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused_and_the_others_kept(fetch, server, kind, words):
    where = "BTCUSDT-4h-2025-01.zip" + (".CHECKSUM" if kind == "wrong_sha" else "")
    server.faults = [Fault(kind, where)]
    for _ in range(2):  # a refusal does not wear off
        with pytest.raises(Incomplete, match=rf"(?s)1 of 2 series.*BTCUSDT_4h: .*2025-01.*{words}.*twice.*go on") as e:
            fetch("BTCUSDT ETHUSDT")
        assert list(e.value.klines) == ["ETHUSDT_4h"] and list(e.value.reasons) == ["BTCUSDT_4h"]
    assert sum(path.endswith("BTCUSDT-4h-2025-01.zip") for path in server.asked) == 4
    server.faults = []
    assert is_right(fetch()["BTCUSDT_4h"], server.rows[BTC])


def test_a_page_in_place_of_the_checksum_is_refused(fetch, server):
    server.faults = [Fault("html", "2025-01.zip.CHECKSUM")]
    with pytest.raises(Incomplete, match="does not hold a sha256 of BTCUSDT-4h-2025-01"):
        fetch()


def test_a_file_without_a_checksum_is_taken_only_by_consent(fetch, server):
    server.faults = [Fault("404", "2025-01.zip.CHECKSUM")]
    with pytest.raises(Incomplete, match=r"2025-01\.zip has no checksum in the archive, .* with --allow-unsigned"):
        fetch()
    bars = fetch(hosts=Hosts(server.url, server.rest_url, unsigned=True))["BTCUSDT_4h"]
    assert is_right(bars, server.rows[BTC])
    assert bars.passport.notes == ("BTCUSDT-4h-2025-01.zip has no checksum in the archive.",)


@pytest.mark.parametrize(
    "rows, words",
    [
        ([["1735689600000", "1", "2"]], "12 columns"),
        ([["when"] * 12, ["x"] * 12], "must name its columns open_time, .* got b'when"),
        ([["1735689600000", "5", "4", "3", "5", "1", "0", "1", "1", "1", "1", "0"]], "impossible bars: .*high below"),
        ([["1835689600000", "5", "5", "5", "5", "1", "0", "1", "1", "1", "1", "0"]], "holds no bar of 2025-01"),
        ([["9" * 18, "5", "5", "5", "5", "1", "0", "1", "1", "1", "1", "0"]], "holds no bar of 2025-01"),
    ],
)
def test_a_file_with_other_things_than_bars_is_refused(fetch, server, rows, words):
    server.edited["BTCUSDT-4h-2025-01.zip"] = rows
    with pytest.raises(Incomplete, match=words):
        fetch()


def test_doubles_and_crooked_times_in_a_file_are_dropped_and_counted(fetch, server):
    rows = server.rows[BTC]
    november = [r for r in rows if r[0] < str(milliseconds("2024-12-01"))]
    crooked = [str(int(november[9][0]) + 28_148), *november[9][1:]]
    stale = [november[4][0], *november[3][1:]]
    server.edited["BTCUSDT-4h-2024-11.zip"] = [*november[:4], stale, *november[4:], november[7], crooked]
    bars = fetch(start="2024-11-01", end="2024-11-30")["BTCUSDT_4h"]
    assert is_right(bars, rows, "2024-11-01", "2024-11-30")
    assert (bars.passport.duplicates, bars.passport.off_grid, bars.passport.conflicts) == (2, 1, 1)
    assert fetch(start="2024-11-01", end="2024-11-30")["BTCUSDT_4h"].passport == bars.passport


def test_a_month_that_is_not_rolled_up_comes_by_days(fetch, server, clock):
    server.hidden = {"BTCUSDT-4h-2025-02.zip", "BTCUSDT-4h-2025-02-11.zip"}
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, server.rows[BTC])
    files = [f.name for f in bars.passport.files]
    assert "BTCUSDT-4h-2025-02-10.zip" in files and "rest BTCUSDT-4h 2025-02-11T00:00 2025-02-12T00:00" in files
    server.asked.clear()
    fetch()
    assert server.asked == [], "what was not there is remembered"
    server.hidden = set()
    clock("2025-03-12T11:30")
    fetch()
    assert server.asked == []
    clock("2025-03-12T17:00")
    settled = fetch()["BTCUSDT_4h"]
    assert "/data/spot/monthly/klines/BTCUSDT/4h/BTCUSDT-4h-2025-02.zip" in server.asked
    assert not any("2025-02-11" in path for path in server.asked), "the month has it"
    assert [f.name for f in settled.passport.files][2] == "BTCUSDT-4h-2025-02.zip"
    assert not any("2025-02-1" in f.name for f in settled.passport.files)


def test_a_month_that_lacks_days_is_filled_from_daily_files(fetch, server):
    rows = server.rows[BTC]
    january = within(rows, "2025-01-01", "2025-01-31")
    server.edited["BTCUSDT-4h-2025-01.zip"] = [[r[0] + "000", *r[1:]] for r in january[: 7 * 6 + 2]]
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, rows)
    assert bars.passport.notes == (
        f"BTCUSDT-4h-2025-01.zip lacks {24 * 6 - 2} bars; they come from daily files or REST.",
    )
    assert not any("2025-01-07" in path for path in server.asked)
    server.asked.clear()
    assert fetch()["BTCUSDT_4h"].passport == bars.passport and server.asked == []


def test_sources_that_disagree_are_told_of(fetch, server):
    rows = server.rows[BTC]
    january = within(rows, "2025-01-01", "2025-01-31")
    wrong = [[r[0] + "000", *r[1:5], "1.5", *r[6:]] for r in january]
    server.edited["BTCUSDT-4h-2025-01.zip"] = [w for i, w in enumerate(wrong) if i != 8]
    bars = fetch(start="2025-01-01", end="2025-01-31")["BTCUSDT_4h"]
    (found,) = bars.passport.disagreements
    assert (found.between, found.first) == ("monthly and daily", "2025-01-02T00:00")
    assert (found.bars, found.compared, found.largest) == (5, 5, 0.0)
    assert bars.frame["volume"].iloc[6] == 1.5, "the settled source stays"


def without(rows, *hours):
    gap = [str(milliseconds(hour)) for hour in hours]
    return [r for r in rows if r[0] not in gap]


def test_a_gap_of_the_venue_is_believed_when_two_answers_tell_it(fetch, server, clock):
    rows = server.rows[BTC]
    server.rows[BTC] = without(rows, "2025-01-05T04:00", "2025-01-05T08:00")
    p = fetch()["BTCUSDT_4h"].passport
    assert [(g.start, g.end, g.bars, g.name) for g in p.gaps] == [("2025-01-05T04:00", "2025-01-05T08:00", 2, "")]
    assert (p.unexplained, p.complete) == (2, False)
    assert sum("2025-01-05" in path for path in server.asked) == 2 and p.files[-1].name.startswith("rest")
    server.asked.clear()
    clock("2025-03-12T10:45")
    assert fetch()["BTCUSDT_4h"].passport.gaps == p.gaps
    assert [path.rpartition("/")[2][:14] for path in server.asked] == ["BTCUSDT-4h-202", "klines?symbol="]
    server.asked.clear()
    assert fetch()["BTCUSDT_4h"].passport.gaps == p.gaps and server.asked == []
    clock("2025-03-20T10:30")
    fetch(end="2025-01-31")
    assert any("/api/" in path for path in server.asked), "after a week it is asked again"


def test_what_was_short_is_whole_after_the_same_again(fetch, server):
    rows = server.rows[BTC]
    january = within(rows, "2025-01-01", "2025-01-31")
    server.edited["BTCUSDT-4h-2025-01.zip"] = january[:60]
    server.hidden = {f"BTCUSDT-4h-2025-01-{day:02d}.zip" for day in range(1, 32)}
    server.rows[BTC] = [r for r in rows if r not in january[60:]]
    assert fetch()["BTCUSDT_4h"].passport.unexplained == 186 - 60
    server.rows[BTC] = rows
    server.edited.clear()
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, rows) and bars.passport.complete
    assert "BTCUSDT-4h-2025-01.zip was rewritten by the venue after 2025-03-12" in " ".join(bars.passport.notes)


def test_a_month_that_the_venue_corrected_is_noticed(fetch, server, clock):
    fetch(end="2025-02-28")
    rows = server.rows[BTC]
    server.rows[BTC] = [[*r[:5], "77.5", *r[6:]] if r[0] == str(milliseconds("2025-02-07T08:00")) else r for r in rows]
    assert fetch(end="2025-02-28")["BTCUSDT_4h"].frame["volume"].max() < 77, "not asked twice in six hours"
    clock("2025-03-12T20:30")
    bars = fetch(end="2025-02-28")["BTCUSDT_4h"]
    assert bars.frame["volume"].loc["2025-02-07T08:00"] == 77.5
    assert "2025-02.zip was rewritten by the venue" in " ".join(bars.passport.notes)


def test_a_checksum_that_cannot_be_compared_again_costs_no_bar(fetch, server, clock):
    before = fetch(end="2025-02-28")["BTCUSDT_4h"]
    clock("2025-03-12T20:30")
    server.faults = [Fault("500", "CHECKSUM")]
    after = fetch(end="2025-02-28")["BTCUSDT_4h"]
    pd.testing.assert_frame_equal(after.frame, before.frame)
    assert "could not be compared again" in " ".join(after.passport.notes)


def test_a_rest_host_that_gives_short_pages_is_read_to_the_end(fetch, server):
    server.rows["spot", "BTCUSDT", "15m"] = rows = make_rows("15m", "2025-03-10", "2025-03-12T10:30")
    server.most = 50
    server.faults = [Fault("404", "/data/")]
    bars = fetch(intervals="15m", start="2025-03-10")["BTCUSDT_15m"]
    assert is_right(bars, rows, "2025-03-10", "2025-03-12", interval="15m") and bars.passport.complete


def test_an_empty_answer_is_asked_again(fetch, server):
    rows = server.rows[BTC]
    server.rows[BTC] = [r for r in rows if int(r[0]) < milliseconds("2025-03-12")]
    assert fetch()["BTCUSDT_4h"].passport.last == "2025-03-11T20:00"
    server.rows[BTC] = rows
    assert fetch()["BTCUSDT_4h"].passport.last == "2025-03-12T04:00"


def test_refresh_fetches_anew_what_it_names(fetch, server):
    fetch()
    server.asked.clear()
    server.rows[BTC] = rows = make_rows("4h", "2024-11-01", "2025-03-12T12:00", seed=9)
    bars = fetch(start="2025-02-03", end="2025-02-05", refresh=True)["BTCUSDT_4h"]
    assert is_right(bars, rows, "2025-02-03", "2025-02-05")
    files = [path.rpartition("/")[2] for path in server.asked]
    assert files == ["BTCUSDT-4h-2025-02.zip", "BTCUSDT-4h-2025-02.zip.CHECKSUM"]


def test_a_second_opinion_is_a_finer_month_or_a_day(fetch, server):
    days = fetch(start="2024-11-01", end="2025-02-28", verify=True)["BTCUSDT_4h"].passport
    assert days.checked == 2 * 6 and days.doubts == 0 and "all agree" in days.notes[-1]
    hours = make_rows("1h", "2024-11-01", "2025-03-01")
    server.rows["spot", "BTCUSDT", "1h"] = hours
    summed = [summed_up(hours[i : i + 4]) for i in range(0, len(hours), 4)]
    at = next(i for i, r in enumerate(summed) if r[0] == str(milliseconds("2024-12-20T08:00")))
    summed[at] = [*summed[at][:5], "999", *summed[at][6:]]
    server.rows[BTC] = summed
    wish = {"start": "2024-11-01", "end": "2025-02-28", "store": Store(also=[])}
    p = fetch(verify=True, **wish)["BTCUSDT_4h"].passport
    assert p.checked == 31 * 6 + 28 * 6 and p.doubts == 1
    assert p.disagreements[0].first == "2024-12-20T08:00"
    assert fetch(**wish)["BTCUSDT_4h"].passport.checked == p.checked, "the cache keeps it"


def summed_up(rows):
    prices = [[float(value) for value in row[1:6]] for row in rows]
    o, h, lo, c, v = zip(*prices, strict=True)
    whole = [o[0], max(h), min(lo), c[-1], sum(v)]
    return [rows[0][0], *(f"{x:.8f}" for x in whole), rows[-1][6], *rows[0][7:]]


def test_a_coin_that_is_not_traded_any_more_is_complete_up_to_its_end(fetch, server):
    server.rows["spot", "ETHUSDT", "4h"] = make_rows("4h", "2024-11-01", "2025-02-10T08:00", seed=1)
    server.traded = {"BTCUSDT"}
    p = fetch("ETHUSDT")["ETHUSDT_4h"].passport
    assert p.complete and p.last == "2025-02-10T04:00"
    assert "ETHUSDT is not traded on spot any more; its last bar is of 2025-02-10T04:00." in p.notes
    server.traded = None
    assert not fetch("ETHUSDT")["ETHUSDT_4h"].passport.complete, "a hole of a coin that is traded stays one"


def test_close_times_tell_bars_of_another_interval(fetch, server):
    quarters = make_rows("15m", "2025-01-01", "2025-02-01")
    server.edited["BTCUSDT-4h-2025-01.zip"] = [[r[0] + "000", *r[1:6], r[6] + "999", *r[7:]] for r in quarters]
    with pytest.raises(
        Incomplete, match="2976 of 2976 bars last 900 s by their close time, not 4h; the first starts at"
    ):
        fetch()


def test_a_header_orders_the_columns(fetch, server):
    rows = server.rows["um", "BTCUSDT", "4h"] = make_rows("4h", "2025-01-01", "2025-03-01")
    january = [r for r in rows if int(r[0]) < milliseconds("2025-02-01")]
    order = [6, 5, 4, 3, 2, 1, 0, 11, 10, 9, 8, 7]
    names = archive_server.HEADER.split(",")
    server.edited["BTCUSDT-4h-2025-01.zip"] = [[r[i] for i in order] for r in [names, *january]]
    bars = fetch(start="2025-01-01", end="2025-02-28", market="um")["BTCUSDT_4h"]
    assert is_right(bars, rows, "2025-01-02", "2025-02-28")  # a day after its first bar


@pytest.mark.parametrize(
    "kind, words",
    [
        ("401", r"wants a login \(HTTP 401\)"),
        ("204", "answered HTTP 204, which is no whole file"),
        ("206", "answered HTTP 206, which is no whole file"),
        ("circle", "sends on in a circle"),
        ("elsewhere", "sends on to http://127.0.0.1:9, and other hosts are not followed"),
        ("drip", "took more than 2 s, which is too slow"),
    ],
)
def test_the_reason_that_is_told_is_the_reason_that_was(fetch, server, kind, words):
    server.faults = [Fault(kind, "/")]
    began = time.monotonic()
    with pytest.raises(Incomplete, match=words):
        fetch(end="2025-01-31")
    assert time.monotonic() - began < 20


def test_an_interrupt_ends_a_hanging_download_at_once(fetch, server):
    server.faults = [Fault("drip", "/")]
    quick = Retries(connect=2, read=30, whole=60, tries=1)

    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch(retries=quick)
    assert time.monotonic() - began < 2.5


def test_a_known_halt_needs_no_asking(fetch, server):
    rows = make_rows("15m", "2023-03-01", "2023-04-01")
    halt = [milliseconds("2023-03-24T12:45"), milliseconds("2023-03-24T14:00")]
    server.rows["spot", "BTCUSDT", "15m"] = [r for r in rows if not halt[0] <= int(r[0]) < halt[1]]
    p = fetch(intervals="15m", start="2023-03-20", end="2023-03-26")["BTCUSDT_15m"].passport
    assert p.complete and p.missing == 5 and "outage of 2023-03-24" in p.gaps[0].name
    assert len(server.asked) == 2


@pytest.mark.parametrize("kind", ["451", "403", "418"])
def test_a_rest_host_that_refuses_is_left_alone_and_the_archive_serves(fetch, server, kind):
    server.faults = [Fault(kind, "/api/v3/")]
    klines = fetch("BTCUSDT ETHUSDT", threads=1)
    assert sum("/api/" in path for path in server.asked) == 1
    for name, bars in klines.items():
        assert is_right(bars, server.rows["spot", name[:7], "4h"], "2024-12-20", "2025-03-11")
        p = bars.passport
        assert p.unexplained == 2 and not p.complete
        assert f"HTTP {kind}" in p.notes[0] and "2 bars from 2025-03-12T00:00 on" in p.notes[0]


@pytest.mark.parametrize("kind", ["451", "403", "418", "500", "short", "reset", "silent"])
def test_an_archive_that_is_lost_is_stood_in_for(fetch, server, kind):
    server.faults = [Fault(kind, "^/data")]
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, server.rows[BTC])
    assert all(f.name.startswith("rest ") for f in bars.passport.files)
    assert "stood in" in bars.passport.notes[0] and "127.0.0.1" in bars.passport.notes[0]
    assert sum("/data" in path for path in server.asked) <= (12 if kind.startswith("4") else 14 * 3)


@pytest.mark.parametrize("kind", ["429", "500", "503", "short", "reset", "silent"])
def test_what_fails_twice_is_had_at_the_third_try(fetch, server, kind):
    server.faults = [Fault(kind, "2025-01.zip$", 2), Fault(kind, "api/v3", 2)]
    bars = fetch()["BTCUSDT_4h"]
    assert is_right(bars, server.rows[BTC])
    assert bars.passport.notes == () and bars.passport.complete
    assert sum(path.endswith("2025-01.zip") for path in server.asked) == 3


def test_a_long_retry_after_is_capped(fetch, server, monkeypatch):
    monkeypatch.setattr("benchmarks.archive_server.RETRY_AFTER", "86400")
    server.faults = [Fault("429", "2025-01.zip$", 1)]
    began = time.monotonic()
    assert fetch()["BTCUSDT_4h"].passport.complete
    assert time.monotonic() - began < 5


def test_a_drip_of_bytes_ends_in_time(fetch, server):
    server.faults = [Fault("slow", "2025-01.zip$")]
    began = time.monotonic()
    bars = fetch()["BTCUSDT_4h"]
    assert time.monotonic() - began < 5
    assert is_right(bars, server.rows[BTC])
    assert "too slow" in bars.passport.notes[0]


def test_hosts_that_are_down_say_what_was_tried_and_what_is_there(fetch, server):
    fetch(end="2025-01-31")
    began = time.monotonic()
    hosts = Hosts(NOWHERE, NOWHERE)
    with pytest.raises(Incomplete) as error:
        fetch("BTCUSDT ETHUSDT", hosts=hosts)
    assert time.monotonic() - began < 10
    text = str(error.value)
    assert "2 of 2 series are not available" in text and "127.0.0.1:9" in text and "refused" in text.lower()
    assert "The cache has 258 bars in these dates, 2024-12-20T00:00 .. 2025-01-31T20:00." in text
    assert "was not available in" not in text, "the host is named, not each of its files"
    assert text.count("The cache has") == 1 and "Run the same again to go on" in text
    assert text.index("--archive-url") < text.index("--source synthetic") < text.index("--files PATH")
    assert error.value.klines == {}
    assert fetch(end="2025-01-31", hosts=hosts)["BTCUSDT_4h"].passport.complete, "what is cached needs no host"


def test_an_unknown_symbol_gets_the_nearest(fetch, server):
    with pytest.raises(UnknownName, match=r"symbol of the spot market .* got 'BTCUSD' \(nearest: BTCUSDT"):
        fetch("ETHUSDT BTCUSD")
    assert not any("ETHUSDT-" in path for path in server.asked), "said before anything is downloaded"
    with pytest.raises(UnknownName, match="did you mean BTCUSDT"):
        fetch("btc/usdt")
    with pytest.raises(UnknownName, match="BTCUSDT"):
        fetch("BTCUSD", hosts=Hosts(server.url, server.rest_url), market="spot", end="2025-03-11")
    with pytest.raises(UnknownName, match=r"interval must be .*nearest: .*15m"):
        fetch(intervals="16m")
    with pytest.raises(UnknownName, match="market must be"):
        fetch(market="cm")


def test_a_coin_delisted_long_ago_still_comes_from_the_archive(fetch, server):
    server.rows["gone", "FTTUSDT", "4h"] = rows = make_rows("4h", "2022-09-01", "2022-11-15T04:00")
    serve = server.archive
    server.archive = lambda market, *rest: serve("gone" if rest[0] == "FTTUSDT" else market, *rest)
    bars = fetch("FTTUSDT", start="2022-09-10", end="2022-11-14")["FTTUSDT_4h"]
    assert is_right(bars, rows, "2022-09-10", "2022-11-14")


def test_dates_that_cannot_be_are_refused(fetch, server):
    with pytest.raises(DataError, match=r"start must not be after end; got 2025-02-01 .. 2025-01-01"):
        fetch(start="2025-02-01", end="2025-01-01")
    with pytest.raises(DataError, match=r"end lies in the future: 2025-03-13; .* up to today, 2025-03-12 \(UTC\)"):
        fetch(end="2025-03-13")
    with pytest.raises(DataError, match="start lies in the future"):
        fetch(start="2027-01-01", end="2027-02-01")
    for day in ("", "01.03.2025", "2025-02-30", "20250101", "2025-W01-1"):
        with pytest.raises(DataError, match="start must be a day like 2025-03-01; got"):
            fetch(start=day)
    with pytest.raises(
        DataError, match=r"PEPEUSDT_4h: no bars in .* first traded on 2023-05-05T18:00 .*from 2023-05-06"
    ):
        fetch("BTCUSDT PEPEUSDT", start="2023-01-01", end="2023-05-05")
    assert server.asked == []


def test_a_listing_is_told_and_its_first_day_left_out(fetch, server):
    server.rows["spot", "PEPEUSDT", "4h"] = make_rows("4h", "2023-05-05T20:00", "2023-07-01")
    server.rows["spot", "NEWUSDT", "4h"] = make_rows("4h", "2025-01-05T08:00", "2025-03-12T12:00")
    pepe = fetch("PEPEUSDT", start="2023-04-01", end="2023-06-30")["PEPEUSDT_4h"].passport
    assert pepe.first == "2023-05-06T20:00" and pepe.complete
    assert "first traded on 2023-05-05T18:00" in pepe.notes[0] and "from 2023-05-06T18:00" in pepe.notes[0]
    new = fetch("NEWUSDT")["NEWUSDT_4h"].passport  # not in the table: the REST host knows
    assert new.first == "2025-01-06T08:00" and new.complete and "2025-01-05T08:00" in new.notes[0]
    assert any("startTime=0" in path for path in server.asked)
    server.asked.clear()
    assert fetch("NEWUSDT")["NEWUSDT_4h"].passport == new and server.asked == []


def test_without_a_rest_host_the_archive_shows_where_bars_begin(fetch, server):
    server.rows["spot", "NEWUSDT", "4h"] = make_rows("4h", "2025-01-05T08:00", "2025-03-12T12:00")
    server.faults = [Fault("451", "/api/")]
    new = fetch("NEWUSDT", end="2025-03-11")["NEWUSDT_4h"].passport
    assert new.first == "2025-01-06T08:00"
    assert any("2025-01-05T08:00; taken as the listing" in note for note in new.notes)


def test_the_two_coins_called_luna_never_meet(fetch, server):
    old = make_rows("1h", "2022-04-01", "2022-05-13T01:00", price=80.0)
    new = make_rows("1h", "2022-05-31T06:00", "2022-07-01", price=8.0)
    server.rows["spot", "LUNAUSDT", "1h"] = old + new
    store = Store(also=[])
    bars = fetch("LUNAUSDT", "1h", "2022-04-01", "2022-06-30", store=store)["LUNAUSDT_1h"]
    assert is_right(bars, new, "2022-06-01T06:00", "2022-06-30", interval="1h")
    (note,) = bars.passport.notes
    assert "2022-05-31T06:00" in note and "another asset" in note and "LUNC" in note
    assert bars.passport.jumps == () and bars.passport.complete
    assert store.read("spot", "LUNAUSDT_1h").starts[0] == milliseconds("2022-06-01") * 10**6
    with pytest.raises(DataError, match="another asset"):
        fetch("LUNAUSDT", "1h", "2022-04-01", "2022-05-12")


def test_an_old_month_that_never_was_costs_three_days_and_a_question(fetch, server, clock):
    server.rows[BTC] = make_rows("4h", "2024-08-01", "2024-10-01")
    p = fetch(start="2024-06-01", end="2024-08-31")["BTCUSDT_4h"].passport
    assert (p.first, p.got, p.missing) == ("2024-08-01T00:00", 31 * 6, 61 * 6)
    assert len([path for path in server.asked if "/daily/" in path]) == 6
    assert len([path for path in server.asked if "/api/" in path]) == 2
    clock("2025-03-12T10:45")
    fetch(start="2024-06-01", end="2024-08-31")
    server.asked.clear()
    fetch(start="2024-06-01", end="2024-08-31")
    assert server.asked == [], "two answers have told it"


def test_rest_pages_follow_each_other(fetch, server):
    server.rows["spot", "BTCUSDT", "15m"] = rows = make_rows("15m", "2025-01-01", "2025-03-01")
    server.faults = [Fault("451", "^/data")]
    bars = fetch(intervals="15m", start="2025-01-01", end="2025-02-28", retries=PATIENT)["BTCUSDT_15m"]
    assert is_right(bars, rows, "2025-01-01", "2025-02-28", interval="15m") and len(bars.frame) == 59 * 96
    assert sum("/api/" in path for path in server.asked) == 6


def test_a_rest_allowance_that_runs_out_is_waited_for(fetch, server, monkeypatch):
    pauses = []
    monkeypatch.setattr(binance.Client, "pause", lambda self, url, seconds: pauses.append(seconds))
    server.weight = "4700"  # of 6000 a minute
    fetch(end="2025-03-12")
    assert pauses == []
    server.weight = "4900"
    fetch("ETHUSDT")
    assert len(pauses) == 1 and 0 < pauses[0] <= 60


def test_a_paused_host_is_not_asked(server):
    client = binance.Client(2, QUICK)
    client.pause(server.url, 0.3)
    began = time.monotonic()
    assert client.get(server.rest_url + "/x", limit=100).status == 404 and time.monotonic() - began < 0.25
    assert client.get(server.url + "/x", limit=100).status == 404 and time.monotonic() - began > 0.29
    client.close()


@pytest.mark.parametrize(
    "answer", [b"<html>", b"{}", b"[1]", b"[[]]", b'[["x",1,1,1,1,1,1,1,1,1,1,1]]', b"[[1e99,1,1,1,1,1,1,1,1,1,1,1]]"]
)
def test_a_rest_answer_that_holds_no_bars_is_refused(fetch, server, monkeypatch, answer):
    monkeypatch.setattr("benchmarks.archive_server.Handler.rest", lambda self, query: (200, answer))
    with pytest.raises(Incomplete, match=r"rest BTCUSDT-4h 2025-03-12T00:00 .*: an answer that"):
        fetch()


def test_weeks_come_from_months_alone(fetch, server):
    server.rows["spot", "BTCUSDT", "1w"] = rows = make_rows("1w", "2024-09-02", "2025-03-10")
    bars = fetch(intervals="1w", start="2024-10-01", end="2025-03-11")["BTCUSDT_1w"]
    assert is_right(bars, rows, "2024-10-01", "2025-03-09", interval="7D") and bars.passport.complete
    assert not any("/daily/" in path for path in server.asked)


def test_a_source_without_trade_counts_has_no_such_columns(fetch, server):
    rows = [[*r[:7], "0", "0", "0", "0", "0"] for r in server.rows[BTC]]
    server.rows[BTC] = rows
    assert list(fetch()["BTCUSDT_4h"].frame.columns) == ["open", "high", "low", "close", "volume"]


def test_a_damaged_cache_is_said_and_fetched_anew(fetch, server, tmp_path):
    good = fetch()["BTCUSDT_4h"]
    (path,) = (tmp_path / "cache").rglob("*.parquet")
    blob = path.read_bytes()
    path.write_bytes(blob[:1000] + bytes(100) + blob[1100:])
    bars = fetch()["BTCUSDT_4h"]
    pd.testing.assert_frame_equal(bars.frame, good.frame, check_exact=True)
    assert "damaged" in bars.passport.notes[0] and str(path) in bars.passport.notes[0]
    assert path.read_bytes() == blob
    assert fetch()["BTCUSDT_4h"].passport.notes == ()


def test_progress_counts_files_and_bytes_in_the_callers_thread(fetch, server):
    seen = []
    fetch("BTCUSDT ETHUSDT", progress=lambda *report: seen.append((*report, threading.current_thread())))
    done, total, size, text, thread = zip(*seen, strict=True)
    assert list(done) == list(range(1, 31)) and total[-1] == 30 and sorted(total) == list(total)
    assert sorted(size) == list(size) and size[-1] > 30_000
    assert "BTCUSDT_4h 2025-01" in text and set(thread) == {threading.main_thread()}


def test_an_interrupt_keeps_what_is_whole(fetch, server, tmp_path):
    def stop(done, *_):
        if done == 9:
            raise KeyboardInterrupt

    server.delay = 0.02
    with pytest.raises(KeyboardInterrupt):
        fetch(progress=stop, threads=2)
    time.sleep(0.2)
    assert not list((tmp_path / "cache").rglob("*.parquet"))
    server.asked.clear()
    assert is_right(fetch()["BTCUSDT_4h"], server.rows[BTC])
    assert len(server.asked) <= 2 * 14 + 1 - 2 * 9 + 2
    assert not list((tmp_path / "cache").rglob("*.zip.*"))


def test_a_disk_that_is_full_is_one_clear_line(fetch, server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cache in .* cannot be written .*set CPBKIT_CACHE") as error:
        fetch("BTCUSDT ETHUSDT", store=Store(tmp_path / "file", also=[]))
    assert "\n" not in str(error.value)


def test_hosts_are_addresses(monkeypatch):
    assert Hosts.from_environment() == Hosts(NOWHERE, NOWHERE)
    monkeypatch.delenv("CPBKIT_ARCHIVE_URL")
    monkeypatch.delenv("CPBKIT_REST_URL")
    public = Hosts.from_environment()
    assert public.archive_url == "https://data.binance.vision"
    assert public.rest("spot", "klines") == "https://data-api.binance.vision/api/v3/klines"
    assert public.rest("um", "klines") == "https://fapi.binance.com/fapi/v1/klines"
    for wrong in ("data.binance.vision", "ftp://x", ""):
        with pytest.raises(CpbkitError, match="archive_url must be an address"):
            Hosts(wrong)


FAULT = st.builds(
    Fault,
    st.sampled_from(FAULTS),
    st.sampled_from(
        [
            "2025-02.zip$",
            "2025-02.zip.CHECKSUM$",
            "2025-03-0.*zip$",
            "2025-03-05.zip",
            "ETH.*zip",
            "/data",
            "/api/",
            ".",
        ]
    ),
    st.sampled_from([1, 2, 10**9]),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(FAULT, min_size=1, max_size=3))
def test_any_fault_ends_in_right_bars_or_a_clear_error(server, faults):
    server.faults, server.rows = [], dict(server.rows)
    start, end = "2025-02-01", "2025-03-12"
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder, also=[])

        def fetch():
            hosts = Hosts(server.url, server.rest_url)
            return fetch_klines(["BTCUSDT", "ETHUSDT"], ["4h"], start, end, store=store, hosts=hosts, retries=QUICK)

        server.faults, began = [Fault(f.kind, f.where, f.times) for f in faults], time.monotonic()
        try:
            klines, reasons = fetch(), {}
        except Incomplete as error:
            klines, reasons = error.klines, error.reasons
        assert time.monotonic() - began < 20
        assert set(klines) | set(reasons) == {"BTCUSDT_4h", "ETHUSDT_4h"}
        assert all(reason and "\n" not in reason for reason in reasons.values())
        for name, bars in klines.items():
            times, values = truth(server.rows["spot", name[:7], "4h"], start, end)
            at = np.searchsorted(times, bars.frame.index.as_unit("ms").asi8)
            assert (bars.frame.to_numpy() == values[at]).all()
            assert bars.passport.got == len(at) and bars.passport.missing == len(times) - len(at)
            assert bars.passport.complete or bars.passport.notes
        assert not [entry for entry in store.verify() if entry.problem]
        server.faults = []
        for name, bars in fetch().items():
            assert is_right(bars, server.rows["spot", name[:7], "4h"], start, end)


class Parent:
    """A process that has imported the product and forks a fetch on demand."""

    def __init__(self, server, folder):
        self.server, self.folder = server, folder
        self.process = subprocess.Popen(
            [sys.executable, archive_server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, cache):
        return self.ask(
            {
                "symbols": ["BTCUSDT", "ETHUSDT"],
                "intervals": ["4h"],
                "start": FIRST,
                "end": LAST,
                "now": NOW,
                "cache": str(self.folder / cache),
                "urls": [self.server.url, self.server.rest_url],
            }
        )

    def content(self, cache):
        """All files of a cache but its locks."""
        paths = sorted(p for p in (self.folder / cache).rglob("*") if p.is_file() and p.parent.name != "locks")
        return {str(p.relative_to(self.folder / cache)): p.read_bytes() for p in paths}


@pytest.fixture
def parent(server, tmp_path):
    parent = Parent(server, tmp_path)
    yield parent
    parent.process.stdin.close()
    parent.process.wait(10)
    parent.process.stdout.close()


@pytest.mark.long
def test_a_kill_at_any_moment_costs_nothing_but_time(parent, server):
    assert parent.ask(parent.start("calm")) == 0
    calm, requests = parent.content("calm"), len(server.asked)
    assert sorted(calm) == ["klines/spot/BTCUSDT_4h.parquet", "klines/spot/ETHUSDT_4h.parquet"]
    draw, killed = random.Random(0), 0
    for i in range(50):
        server.asked.clear()
        pid = parent.start(f"killed {i}")
        moment, deadline = draw.uniform(0, 1.2) * requests, time.monotonic() + 10
        while len(server.asked) < min(moment, requests) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.004) + max(0, moment - requests) * 0.003)  # also while it merges and writes
        os.kill(pid, 9)
        killed += parent.ask(pid) == 9
        left = Store(parent.folder / f"killed {i}", also=[])
        assert not [entry for entry in left.verify() if entry.problem]
        assert parent.ask(parent.start(f"killed {i}")) == 0
        assert parent.content(f"killed {i}") == calm
    assert killed > 25


@pytest.mark.slow
def test_two_processes_fetch_the_same_series_at_once(parent, server):
    server.delay = 0.003
    assert parent.ask(parent.start("alone")) == 0
    for i in range(5):
        pids = [parent.start(f"shared {i}") for _ in range(3)]
        assert [parent.ask(pid) for pid in pids] == [0, 0, 0]
        assert parent.content(f"shared {i}") == parent.content("alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    "interval, start, end", [("15m", "2025-05-16", "2025-06-30"), ("1h", "2023-04-01", "2023-09-30")]
)
def test_real_bars_come_through_to_the_last_bit(market, tmp_path, monkeypatch, interval, start, end):
    def real(symbol):
        low, high = str(milliseconds(start)), str(milliseconds(end) + 86_400_000)
        with gzip.open(market / interval / f"{symbol}.csv.gz", "rt") as file:
            return [line.split(",")[:6] for line in file.read().splitlines()[1:] if low <= line < high]

    with serving(today="2025-10-01") as server:
        for symbol in SYMBOLS:
            server.rows["spot", symbol, interval] = [[*row, "0", *"11110"] for row in real(symbol)]
        hosts = Hosts(server.url, server.rest_url)
        klines = fetch_klines(SYMBOLS, [interval], start, end, store=Store(tmp_path, also=[]), hosts=hosts)
    assert len(klines) == 20
    for symbol in SYMBOLS:
        bars = klines[f"{symbol}_{interval}"]
        low = milliseconds("2023-05-06T18:00") if (symbol, interval) == ("PEPEUSDT", "1h") else milliseconds(start)
        kept = [r for r in within(server.rows["spot", symbol, interval], start, end) if int(r[0]) >= low]
        assert bars.frame.index.as_unit("ms").asi8.tolist() == [int(r[0]) for r in kept]
        assert bars.frame.to_numpy()[:, :5].tolist() == [[float(v) for v in r[1:6]] for r in kept]
        assert bars.passport.complete and bars.passport.missing == 0
