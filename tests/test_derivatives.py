"""Columns of the futures: the right value beside each bar, never one that was not known yet."""

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks.archive_server import make_rows, milliseconds, packed, serving, zipped
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance
from cpbkit.data.derivatives import add_columns
from cpbkit.data.load import load_klines
from cpbkit.errors import SourceError
from cpbkit.windows.series import from_klines

ROOT = "/data/futures/um/monthly"


def test_an_allowance_that_runs_out_is_waited_for(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(binance.Client, "pause", lambda self, url, seconds: pauses.append(url))
    server.weight = "2000"  # of 2400 a minute
    bars = load_klines(vary(experiment(), features=("close_return",)))
    pauses.clear()
    with pytest.raises(SourceError):  # this host has no rates
        add_columns(bars, ["premium"])
    assert len(pauses) == 1 and pauses[0].endswith("premiumIndexKlines")


@pytest.fixture
def server(monkeypatch):
    with serving(today="2025-03-12") as server:
        monkeypatch.setattr(binance, "_now", lambda: milliseconds("2025-03-12T10:30") * 10**6)
        monkeypatch.setenv("CPBKIT_ARCHIVE_URL", server.url)
        monkeypatch.setenv("CPBKIT_REST_URL", server.rest_url)
        server.rows["spot", "PEPEUSDT", "4h"] = make_rows("4h", "2025-01-01", "2025-03-01")
        for month, header in (("2025-01", "calc_time,funding_interval_hours,last_funding_rate\n"), ("2025-02", "")):
            first = milliseconds(f"{month}-01")
            rows = [f"{first + 8 * 3_600_000 * i + 3},8,{0.0001 * i + 0.01 * int(month[-1]):.6f}" for i in range(84)]
            name = f"1000PEPEUSDT-fundingRate-{month}"
            server.files[f"{ROOT}/fundingRate/1000PEPEUSDT/{name}.zip"] = zipped(
                {f"{name}.csv": header + "\n".join(rows)}
            )
            name = f"1000PEPEUSDT-4h-{month}"
            marks = [r for r in make_rows("4h", "2025-01-01", "2025-03-01", seed=4, price=1000.0) if r[0] >= str(first)]
            marks = [r for r in marks if month == "2025-02" or r[0] < str(milliseconds("2025-02-01"))]
            server.files[f"{ROOT}/markPriceKlines/1000PEPEUSDT/4h/{name}.zip"] = packed(name, marks)
        yield server


def experiment(**settings):
    bars = {"symbols": ("PEPEUSDT",), "intervals": ("4h",), "start": "2025-01-20", "end": "2025-02-20"}
    return vary(PRESETS["quick"], features=("close_return", "funding_rate", "mark_price"), **bars, **settings)


def test_each_bar_has_what_was_known_when_it_closed(server):
    (bars,) = load_klines(experiment()).values()
    at = pd.Timestamp("2025-02-01T00:00", tz="UTC")  # closes at 04:00: the payment of 00:00:00.003 is known
    frame = bars.frame
    assert frame["funding_rate"].loc[at] == 0.02 and frame["funding_rate"].loc[at - pd.Timedelta("4h")] == 0.0183
    assert frame["funding_rate"].loc[at + pd.Timedelta("4h")] == 0.02, "closes at 08:00, 3 ms before the next payment"
    marks = make_rows("4h", "2025-01-01", "2025-03-01", seed=4, price=1000.0)
    own = {int(r[0]): float(r[4]) / 1000 for r in marks}
    assert np.allclose(frame["mark_price"], [own[ms] for ms in frame.index.asi8 // 10**6], rtol=1e-12)
    assert {f.name.split()[0] for f in bars.passport.files if " " in f.name} == {"fundingRate", "markPriceKlines"}
    assert from_klines(bars, experiment().task).features == ("close_return", "funding_rate", "mark_price")
    server.asked.clear()
    load_klines(experiment())
    assert server.asked == [], "what was read is kept"


def test_what_the_archive_lacks_is_told(server):
    (bars,) = binance.fetch_klines(["PEPEUSDT"], ["4h"], "2025-01-20", "2025-02-20").values()
    server.files = {path: blob for path, blob in server.files.items() if "2025-02" not in path}
    (short,) = add_columns({"PEPEUSDT_4h": bars}, ["funding_rate"]).values()
    assert short.frame["funding_rate"].isna().sum() == 20 * 6
    (note,) = [note for note in short.passport.notes if "no funding_rate" in note]
    assert note.startswith(
        "120 bars have no funding_rate: the archive's files end at 2025-02-01T00:00, and the REST host"
    )
    assert "fundingRate answered HTTP 404" in note
    server.files = {}
    with pytest.raises(SourceError, match="the archive has no premiumIndexKlines for these dates, and the"):
        add_columns({"PEPEUSDT_4h": bars}, ["premium"])


def test_a_file_that_does_not_match_its_checksum_is_refused(server):
    path = next(path for path in server.files if "fundingRate" in path)
    server.files[f"{path}.CHECKSUM"] = b"0" * 64
    with pytest.raises(SourceError, match="does not match its checksum"):
        load_klines(experiment())


def test_open_interest_comes_day_by_day_in_coins(server):
    (bars,) = binance.fetch_klines(["PEPEUSDT"], ["4h"], "2025-01-20", "2025-01-21").values()
    for day in ("2025-01-19", "2025-01-20", "2025-01-21"):
        name = f"1000PEPEUSDT-metrics-{day}"
        samples = [(f"{day} {i // 12:02d}:{i % 12 * 5:02d}:00", 1000 * int(day[-2:]) + i) for i in range(288)]
        rows = [f"{time},1000PEPEUSDT,{value},1,1,1,1,1" for time, value in samples]
        text = "\n".join(["create_time,symbol,sum_open_interest,a,b,c,d,e", *rows])
        server.files[f"/data/futures/um/daily/metrics/1000PEPEUSDT/{name}.zip"] = zipped({f"{name}.csv": text})
    (joined,) = add_columns({"PEPEUSDT_4h": bars}, ["open_interest"]).values()
    # The bar of 00:00 closes at 04:00: the sample of 03:55 is known by then, that of 04:00 is not yet.
    assert joined.frame["open_interest"].loc["2025-01-20T00:00"] == 1000 * (20_000 + 47)
    assert joined.frame["open_interest"].loc["2025-01-20T20:00"] == 1000 * (20_000 + 287)


def without_february(server):
    server.files = {path: blob for path, blob in server.files.items() if "2025-02" not in path}


def test_days_that_the_archive_does_not_have_yet_come_from_the_rest_host(server, tmp_path, monkeypatch):
    (whole,) = load_klines(experiment()).values()
    monkeypatch.setenv("CPBKIT_CACHE", str(tmp_path))
    without_february(server)
    first, hour = milliseconds("2025-02-01"), 3_600_000
    paid = [{"fundingTime": first + 8 * hour * i + 3, "fundingRate": f"{0.0001 * i + 0.02:.6f}"} for i in range(84)]
    server.files["/fapi/v1/fundingRate"] = json.dumps(paid).encode()
    marks = make_rows("4h", "2025-01-01", "2025-03-01", seed=4, price=1000.0)
    marks = [[int(r[0]), *r[1:]] for r in marks if int(r[0]) >= first]
    server.files["/fapi/v1/markPriceKlines"] = json.dumps(marks).encode()
    (bars,) = binance.fetch_klines(["PEPEUSDT"], ["4h"], "2025-01-20", "2025-02-20").values()
    (tail,) = add_columns({"PEPEUSDT_4h": bars}, ["funding_rate", "mark_price"]).values()
    pd.testing.assert_frame_equal(tail.frame, whole.frame[tail.frame.columns], rtol=1e-12)
    asked = [path for path in server.asked if path.startswith("/fapi")]
    assert all("symbol=1000PEPEUSDT" in path for path in asked) and not tail.passport.notes[1:]
    assert sum(file.name.startswith("rest ") for file in tail.passport.files) == 2


@pytest.mark.parametrize(
    "answer", [b"[]", b"{}", b"[[1]]", b'[{"fundingTime": 1e400, "fundingRate": "x"}]', b"[" * 99_999]
)
def test_a_rest_host_without_sense_is_told_and_stops_nothing(server, answer):
    (bars,) = binance.fetch_klines(["PEPEUSDT"], ["4h"], "2025-01-20", "2025-02-20").values()
    without_february(server)
    server.files["/fapi/v1/fundingRate"] = answer
    (short,) = add_columns({"PEPEUSDT_4h": bars}, ["funding_rate"]).values()
    assert short.frame["funding_rate"].isna().sum() == 120
    assert "files end at 2025-02-01T00:00, and the REST host" in " ".join(short.passport.notes)


def test_open_interest_of_the_last_thirty_days_comes_from_the_rest_host(server):
    (bars,) = binance.fetch_klines(["PEPEUSDT"], ["4h"], "2025-02-01", "2025-02-20").values()
    first = milliseconds("2025-02-10T10:30")  # thirty days ago
    samples = [{"timestamp": first + 300_000 * i, "sumOpenInterest": str(i)} for i in range(5000)]
    server.files["/futures/data/openInterestHist"] = json.dumps(samples).encode()
    (joined,) = add_columns({"PEPEUSDT_4h": bars}, ["open_interest"]).values()
    column = joined.frame["open_interest"]
    assert column[:"2025-02-10T04:00"].isna().all() and column["2025-02-10T08:00":].notna().all()
    # The bar of 08:00 closes at 12:00: 11:55 is the last sample that is known by then.
    assert column["2025-02-10T08:00"] == 1000 * 17
    assert "the REST host has it of the last 30 days alone" in " ".join(joined.passport.notes)
