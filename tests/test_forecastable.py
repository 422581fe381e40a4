"""The map of what can be forecast: it finds what is planted, and nothing where nothing is."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

import cpbkit as cpb
from cpbkit.errors import CpbkitError, DataError
from cpbkit.evaluation.forecastable import ALL, TARGETS, forecastable
from cpbkit.views.forecastable import map_figure


def make_bars(name: str, bars: int, phi: float = 0.0, rhythm: float = 0.0, seed: int = 0, gap: int = 0):
    """Make hourly bars, 30 of them missing after `gap`: returns follow AR(1), their size may have a daily rhythm."""
    rng = np.random.default_rng([seed, *name.encode()])
    steps = rng.normal(size=bars)
    scale = np.exp(rhythm * np.sin(np.arange(bars) * 2 * np.pi / 24))
    for i in range(1, bars):
        steps[i] += phi * steps[i - 1]
    close = 100 * np.exp(np.cumsum(0.004 * scale * steps))
    open_ = np.concatenate([[100.0], close[:-1]])
    wicks = np.exp(np.abs(rng.normal(size=(2, bars))) * 0.002 * scale)
    hours = np.arange(bars) + 30 * (np.arange(bars) >= gap) * (gap > 0)
    index = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(hours, unit="h")
    high, low = np.maximum(open_, close) * wicks[0], np.minimum(open_, close) / wicks[1]
    columns = {"open": open_, "high": high, "low": low, "close": close, "volume": np.exp(rng.normal(3, 1, bars))}
    return pd.DataFrame(columns, index=index.rename("open_time"))


def map_of(frames, horizons=(1, 4)):
    return cpb.map(data=frames, horizons=horizons).table


def test_it_finds_nothing_in_structureless_bars():
    table = map_of({f"C{i}USDT_1h": make_bars(f"C{i}", 900) for i in range(4)})
    assert set(table["target"]) == set(TARGETS)
    assert len(table) == 5 * 5 * 2
    assert not (table["verdict"] == "BEATS").any(), table[table["verdict"] == "BEATS"]


def test_it_finds_planted_returns_and_rhythms_and_only_these():
    planted = map_of({"AUSDT_1h": make_bars("A", 1500, phi=0.4, gap=400)}, (1,)).set_index(["series", "target"])
    assert planted.loc["AUSDT_1h", "verdict"].to_dict() | {"range": "", "volume": ""} == {
        "return": "BEATS",
        "direction": "BEATS",
        "volatility": "TIES",
        "range": "",
        "volume": "",
    }
    rhythmic = map_of({f"{c}USDT_1h": make_bars(c, 1100, rhythm=0.8) for c in "BC"}, (1, 4))
    words = rhythmic[rhythmic["series"] == ALL].set_index(["target", "bars"])["verdict"]
    assert words["volatility", 1] == words["range", 1] == words["volatility", 4] == "BEATS"
    assert "BEATS" not in {words["return", 1], words["volume", 1], words["volume", 4]}


def test_few_windows_have_no_word_and_few_bars_no_map():
    frames = {"AUSDT_1h": make_bars("A", 700)}
    table = map_of(frames, (24,))
    assert set(table["verdict"]) == {"TOO FEW TO TELL"}
    assert table["p"].isna().all()
    with pytest.raises(DataError, match="at least 500 bars; got 300"):
        map_of({"AUSDT_1h": make_bars("A", 300)})
    with pytest.raises(CpbkitError, match="1 to 50 bars"):
        map_of(frames, (0,))
    with pytest.raises(DataError, match="a map takes bars"):
        map_of({"load": pd.DataFrame({"x": np.arange(600.0)})})


def test_the_picture_says_what_was_found_and_what_was_made_up(tmp_path):
    found = cpb.map(source="synthetic", symbols=("BTCUSDT",), intervals=("1h",), start="2025-01-01", end="2025-02-28")
    picture = map_figure(found.table, found.synthetic)
    texts = [text.get_text() for text in picture.texts]
    assert "1 series at once, better than naive: " in texts[0]
    assert "synthetic" in texts[0].lower()
    assert {"return", "volume", "BTC 1h"} <= {
        *(text.get_text() for text in picture.axes[0].texts),
        *(tick.get_text() for tick in picture.axes[0].get_yticklabels()),
    }
    lines = str(found).splitlines()
    assert any(line.startswith("volatility: better than naive on so many of 1") for line in lines)


def test_shuffled_bars_of_real_coins_have_nothing(market):
    from cpbkit.data.files import read_files

    coins = ("BTCUSDT", "ETHUSDT", "SOLUSDT", "LTCUSDT")
    real = read_files(market / "1h", coins, ("1h",), start="2023-04-01", end="2023-09-30").klines
    rng, shuffled = np.random.default_rng(0), {}
    for name, klines in real.items():
        frame, order = klines.frame, rng.permutation(len(klines.frame))
        before = frame["close"].shift(1, fill_value=frame["open"].iloc[0])
        shapes = np.log(frame[["open", "high", "low", "close"]].div(before, axis=0)).to_numpy()[order]
        begins = np.concatenate([[0.0], np.cumsum(shapes[:, 3])[:-1]])[:, None]
        prices = dict(zip(("open", "high", "low", "close"), np.exp(shapes + begins).T, strict=True))
        shuffled[name] = dataclasses.replace(
            klines, frame=frame.assign(**prices, volume=frame["volume"].to_numpy()[order])
        )
    table = forecastable(shuffled)
    assert not (table["verdict"] == "BEATS").any()
    words = forecastable(real).set_index(["series", "target", "bars"])["verdict"]
    assert words[ALL, "volatility", 1] == words[ALL, "volume", 1] == "BEATS"
    assert words[ALL, "return", 24] != "BEATS"
