"""Columns of the futures: the right value beside each bar, never one that was not known yet."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.archive_server import make_rows, milliseconds, packed, serving, zipped
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance
from cpbkit.data.cache import Store
from cpbkit.data.derivatives import add_columns
from cpbkit.data.load import load_klines
from cpbkit.errors import SourceError
from cpbkit.windows.series import from_klines

ROOT = "/data/futures/um/monthly"


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
    (short,) = add_columns({"PEPEUSDT_4h": bars}, ["funding_rate"], store=Store(also=[])).values()
    assert short.frame["funding_rate"].isna().sum() == 20 * 6
    assert "120 bars have no funding_rate: the archive's files end at 2025-02-01T00:00." in short.passport.notes
    server.files = {}
    with pytest.raises(SourceError, match="PEPEUSDT_4h: the archive has no premiumIndexKlines for these dates"):
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
