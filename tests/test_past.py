"""The last forecasts of a test split: what is kept is what was forecast, and what is said of a day is no bar."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from conftest import walk

from cpbkit.evaluation import past, pooled
from cpbkit.evaluation.verdicts import evidence


@pytest.fixture
def kept():
    series, origins = walk("BTCUSDT_15m", 900, horizon_targets=4), np.arange(200, 890)
    forecast = np.random.default_rng(0).normal(0, 0.01, (len(origins), 3, 4))
    part = evidence(series, origins, forecast, 150)["price"]
    found = past.past_of(series, origins, "price", part, np.full_like(forecast, 0.02))
    return series, origins, forecast, found["close"]


def test_the_last_forecasts_of_the_close_are_kept_one_bar_and_the_whole_horizon_ahead(kept):
    series, origins, forecast, one = kept
    rows = origins[-past.LAST :]
    assert one.target == "close" and one.ahead.tolist() == [1, 3] and one.forecast.shape == (past.LAST, 2)
    assert np.allclose(one.forecast, forecast[-past.LAST :, [0, 2], 3], atol=1e-8)
    assert np.allclose(one.last, np.exp(series.levels[rows, 3]))
    later = np.exp(series.levels[rows[:, None] + [1, 3], 3])
    assert np.allclose(one.levels(one.truth), later, rtol=1e-6)
    assert one.times[0] == series.times[rows[0]].astype("datetime64[ms]").astype(int)


def test_they_lie_with_the_losses_which_are_read_without_them(kept, caplog):
    _, _, _, one = kept
    content = pooled.to_bytes({}, {"price": {"close": one, "a/b": dataclasses.replace(one, target="a/b")}})
    found = past.from_bytes(content, "BTCUSDT_15m")["price"]
    back = found["close"]
    assert list(found) == ["close", "a/b"]
    assert back.target == "close" and back.step_seconds == 900 and np.array_equal(back.half, one.half)
    assert pooled.from_bytes(content) == {} and past.from_bytes(pooled.to_bytes({}), "x") == {}
    assert not caplog.text
    assert past.from_bytes(content[:-30], "BTCUSDT_15m") == {} and "BTCUSDT_15m cannot be shown" in caplog.text


def test_a_day_is_told_by_its_errors_alone(kept):
    _, _, _, one = kept
    table = one.by_day()
    day = one.times // 86_400_000 == one.times[100] // 86_400_000
    row = table[(table["ahead"] == 3) & (table["day"] == str(one.times[100].astype("datetime64[ms]"))[:10])].iloc[0]
    error = (one.truth - one.forecast)[day, 1].astype(float)
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-5)
    assert row["persistence"] == pytest.approx(np.sqrt(np.mean(one.truth[day, 1].astype(float) ** 2)), rel=1e-5)
    assert row["inside"] == pytest.approx(np.mean(np.abs(error) <= 0.02))


def test_of_long_bars_several_days_are_told_as_one_and_never_a_single_bar(kept):
    _, _, _, one = kept
    times = (one.times[0] // 86_400_000 + np.arange(len(one.times))) * 86_400_000
    table = dataclasses.replace(one, times=times, step_seconds=86_400.0).by_day()
    days = pd.to_datetime(table[table["ahead"] == 1]["day"]).diff().dropna().dt.days
    assert (days == past.TOGETHER).all() and len(table) >= 2 * (past.LAST // past.TOGETHER - 1)
    few = slice(0, past.LEAST - 1)
    cut = {name: getattr(one, name)[few] for name in ("times", "last", "forecast", "truth", "half")}
    assert dataclasses.replace(one, **cut).by_day().empty
