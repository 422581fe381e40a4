"""Baselines against series whose right forecast is known, direct regressions, and a poisoned future."""

import dataclasses
import logging

import numpy as np
import pytest

from cpbkit.errors import UnknownName
from cpbkit.evaluation import baselines
from cpbkit.windows.series import Series

HOUR = 3600


def make_series(levels, head="price", anchors=None, drop=(), step=HOUR):
    """Build a series of one or more targets from levels (N,) or (N, K); rows in `drop` are a gap."""
    levels = np.asarray(levels, float).reshape(len(levels), -1)
    anchors = levels if anchors is None else np.asarray(anchors, float).reshape(levels.shape)
    times = np.datetime64("2025-03-01", "ns") + np.arange(len(levels)) * np.timedelta64(step, "s")
    keep = ~np.isin(np.arange(len(levels)), list(drop))
    return Series(
        name="TESTUSDT_1h",
        times=times[keep],
        step_seconds=step,
        inputs=levels[keep],
        features=tuple(f"feature{k}" for k in range(levels.shape[1])),
        levels=levels[keep],
        anchors=anchors[keep],
        targets=tuple(f"target{k}" for k in range(levels.shape[1])),
        heads=(head,) * levels.shape[1],
    )


def walk(count=2000, seed=0, targets=1):
    return 0.01 * np.random.default_rng(seed).normal(size=(count, targets)).cumsum(axis=0)


def errors(series, origins, horizon, train_end):
    """Return the test error of each baseline, as a share of persistence's."""
    truth = series.truth(origins, horizon)
    found, _ = baselines.forecasts(series, series.heads[0], origins, horizon, train_end)
    rms = {name: np.sqrt(np.mean((y - truth) ** 2)) for name, y in found.items()}
    return {name: value / rms["persistence"] for name, value in rms.items()}


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_every_baseline_has_the_shape_of_the_truth(name):
    series = make_series(walk(targets=3), "volatility")
    y = baselines.forecast(name, series, np.arange(1500, 1600), 5, 1400)
    assert y.shape == series.truth(np.arange(1500, 1600), 5).shape == (100, 5, 3)
    assert np.isfinite(y).all()
    alone = make_series(series.levels[:, 1], "volatility")
    assert y[:, :, 1] == pytest.approx(baselines.forecast(name, alone, np.arange(1500, 1600), 5, 1400)[..., 0])


@pytest.mark.parametrize("head", ["price", "volatility"])
@pytest.mark.parametrize("name", baselines.BASELINES)
def test_no_baseline_sees_the_future(name, head):
    """Garbage after row 1500 changes no forecast at or before it; garbage in test leaves the fit alone."""
    series = make_series(walk(), head, anchors=walk(seed=1))
    poison = {f: np.where(np.arange(2000)[:, None] > 1500, 1e6, getattr(series, f)) for f in ("levels", "anchors")}
    poisoned = dataclasses.replace(series, **poison)
    origins = np.arange(1300, 1501)
    before, after = (baselines.forecast(name, s, origins, 30, 1400) for s in (series, poisoned))  # longer than a day
    assert np.array_equal(before, after)


@pytest.mark.parametrize("name", ["drift", "ridge_ar", "ewma", "har"])
def test_no_fit_reads_a_row_at_or_after_the_end_of_train(name):
    """What lies between the end of train and the origins does not matter, unless train ends one row later."""
    series = make_series(walk(), "volatility")
    changed = series.levels.copy()
    changed[1400:1700] += 5
    other = dataclasses.replace(series, levels=changed, anchors=changed)
    origins = np.arange(1850, 1990)  # far enough from the change for every lag and mean
    before, after = (baselines.forecast(name, s, origins, 7, 1400) for s in (series, other))
    assert before == pytest.approx(after, rel=1e-6, abs=1e-9)
    late = baselines.forecast(name, other, origins, 7, 1401)
    assert name == "ewma" or not np.allclose(after, late, rtol=1e-6, atol=1e-9)


def test_persistence_is_zero_and_drift_the_mean_move_of_train():
    slope = make_series(0.5 * np.arange(400))
    assert not baselines.forecast("persistence", slope, np.arange(300, 310), 4, 200).any()
    expected = np.tile(0.5 * np.arange(1, 5), (10, 1))[..., None]
    assert baselines.forecast("drift", slope, np.arange(300, 310), 4, 200) == pytest.approx(expected)


def test_drift_of_a_high_is_its_distance_above_the_close():
    close = walk()
    series = make_series(close + 0.02, anchors=close)
    assert baselines.forecast("drift", series, np.array([1500]), 3, 1400)[0, :, 0] == pytest.approx(
        [0.02] * 3, abs=2e-3
    )


def test_drift_does_not_step_over_a_gap():
    levels = np.where(np.arange(400) < 150, 0.0, 100.0)
    series = make_series(levels, drop=range(140, 160))
    assert not baselines.forecast("drift", series, np.array([300]), 4, 250).any()


@pytest.mark.parametrize(("name", "period"), [("seasonal_day", 24), ("seasonal_week", 168)])
@pytest.mark.parametrize("head", ["price", "volatility"])
@pytest.mark.parametrize("horizon", [3, 30])
def test_seasonal_repeats_a_periodic_series_exactly(name, period, head, horizon):
    pattern = np.random.default_rng(0).normal(size=period)
    series = make_series(np.tile(pattern, 1200 // period), head)
    origins = np.arange(700, 900)
    y = baselines.forecast(name, series, origins, horizon, 600)
    assert y == pytest.approx(series.truth(origins, horizon), abs=1e-12)


def test_seasonal_repeats_moves_of_a_price_and_levels_of_a_volatility():
    levels = 0.1 * np.arange(300)
    origins = np.array([200])
    price, volatility = (
        baselines.forecast("seasonal_day", make_series(levels, head), origins, 2, 100)[0, :, 0]
        for head in ("price", "volatility")
    )
    assert price == pytest.approx([0.1, 0.2])
    assert volatility == pytest.approx([0.1 - 2.4, 0.2 - 2.4])


def test_season_length_follows_the_bars():
    pattern = np.random.default_rng(0).normal(size=96)
    series = make_series(np.tile(pattern, 5), step=900)
    y = baselines.forecast("seasonal_day", series, np.arange(200, 300), 4, 200)
    assert y == pytest.approx(series.truth(np.arange(200, 300), 4), abs=1e-12)


def test_a_season_is_found_by_time_where_a_gap_shifts_the_rows():
    pattern = np.random.default_rng(0).normal(size=24)
    series = make_series(np.tile(pattern, 20), drop=range(200, 203))
    origins = np.arange(202, 240)  # rows after the gap: 205 .. 242 before the drop
    y = baselines.forecast("seasonal_day", series, origins, 2, 150)
    truth = series.truth(origins, 2)
    right = np.isclose(y, truth).all(axis=(1, 2))
    source = origins + 3 - 24  # bars that were asked for, by their number before the drop
    hit = np.array([bool(({s, s + 1, s + 2}) & {200, 201, 202}) for s in source])
    assert np.array_equal(right, ~hit)


def test_what_is_not_there_is_persistence_and_is_said(caplog):
    series = make_series(walk(300))
    origins = np.arange(160, 172)
    with caplog.at_level(logging.INFO, "cpbkit"):
        y = baselines.forecast("seasonal_week", series, origins, 2, 150)
    assert not y[:8].any() and y[8:].all()
    assert caplog.messages == ["seasonal_week is persistence at 8 of 12 origins of TESTUSDT_1h: no bar 7 days before"]
    found, notes = baselines.forecasts(series, "price", np.arange(100, 112), 2, 90)
    assert "seasonal_week" not in found and "seasonal_day" in found
    assert notes == ("seasonal_week is persistence at 12 of 12 origins of TESTUSDT_1h: no bar 7 days before",)


def test_bars_that_do_not_divide_a_day_have_no_daily_season():
    series = make_series(walk(500), step=7 * HOUR)
    found, notes = baselines.forecasts(series, "price", np.arange(400, 420), 2, 350)
    assert "seasonal_day" not in found and "seasonal_week" in found
    assert any("no bar 24 h before" in note for note in notes)


def test_heads_get_their_baselines_and_columns():
    levels = walk(600, targets=3)
    series = dataclasses.replace(make_series(levels), heads=("price", "volatility", "price"))
    price, _ = baselines.forecasts(series, "price", np.arange(400, 410), 2, 350)
    volatility, _ = baselines.forecasts(series, "volatility", np.arange(400, 410), 2, 350)
    assert set(volatility) - set(price) == {"mean", "ewma", "har", "garch"}
    assert price["ridge_ar"].shape == (10, 2, 2) and volatility["ridge_ar"].shape == (10, 2, 1)
    with pytest.raises(UnknownName, match=r"got 'volatilty' \(nearest: volatility"):
        baselines.forecasts(series, "volatilty", np.arange(400, 410), 2, 350)
    with pytest.raises(UnknownName, match="baseline must be a known name; got 'ridge'"):
        baselines.forecast("ridge", series, np.arange(400, 410), 2, 350)


def test_ridge_ar_finds_an_autoregression():
    rng = np.random.default_rng(0)
    moves = np.zeros(6000)
    for t in range(1, 6000):
        moves[t] = 0.5 * moves[t - 1] + rng.normal()
    series = make_series(moves.cumsum())
    origins = np.arange(4500, 5990)
    y = baselines.forecast("ridge_ar", series, origins, 3, 4000)[..., 0]
    ideal = moves[origins][:, None] * np.cumsum(0.5 ** np.arange(1, 4))
    assert np.sqrt(np.mean((y - ideal) ** 2)) < 0.2 * ideal.std()


def test_ridge_ar_equals_a_direct_regression_where_the_penalty_is_nothing(monkeypatch):
    monkeypatch.setattr(baselines, "PENALTIES", (0.0,))
    monkeypatch.setattr(baselines, "LAGS", 3)
    series = make_series(walk(500, seed=4), drop=[100, 260])
    level, segment = series.levels[:, 0], series.segment
    rows = [t for t in range(3, 396) if segment[t - 3] == segment[t + 4]]

    def row(t):
        return [1, *(level[t - lag] - level[t - lag - 1] for lag in range(3))]

    truth = np.array([[level[t + h] - level[t] for h in range(1, 5)] for t in rows])
    weights = np.linalg.lstsq(np.array([row(t) for t in rows]), truth, rcond=None)[0]
    at = np.array([410, 440])
    expected = np.array([row(t) for t in at]) @ weights
    assert baselines.forecast("ridge_ar", series, at, 4, 400)[..., 0] == pytest.approx(expected, abs=1e-12)


def test_ridge_ar_under_a_huge_penalty_is_the_mean_move(monkeypatch):
    monkeypatch.setattr(baselines, "PENALTIES", (1e9,))
    series = make_series(np.arange(900.0) + walk(900)[:, 0])
    y = baselines.forecast("ridge_ar", series, np.array([800]), 2, 700)[0, :, 0]
    assert y == pytest.approx([1, 2], abs=0.01)


def test_ridge_ar_does_not_read_a_move_over_a_gap():
    series = make_series(walk(1000), drop=[700])
    y = baselines.forecast("ridge_ar", series, np.arange(690, 800), 2, 600)
    lacking = ~y.any(axis=(1, 2))
    # Row 700 is the first after the gap; 48 moves need the 48 rows after it.
    assert np.array_equal(np.flatnonzero(lacking) + 690, np.arange(700, 748))


def test_ridge_ar_of_a_random_walk_is_persistence_or_near():
    assert errors(make_series(walk(8000)), np.arange(6000, 7990), 5, 5500)["ridge_ar"] == pytest.approx(1, abs=0.01)


def test_ridge_ar_of_a_high_reads_the_close():
    """Above the close by the close's last move and by noise: the moves of the high alone tell much less."""
    close = walk(4000, seed=2)[:, 0]
    high = close + 0.02 + 0.03 * np.random.default_rng(3).normal(size=4000)
    high[1:] += 3 * np.diff(close, prepend=0)[:-1]
    series, origins = make_series(high, anchors=close), np.arange(3200, 3900)
    unknown = series.truth(origins, 1)[:, 0, 0] - 3 * (close[origins] - close[origins - 1])
    y = baselines.forecast("ridge_ar", series, origins, 1, 3000)
    assert np.std(series.truth(origins, 1) - y) == pytest.approx(unknown.std(), rel=0.05)


def reverting(count=6000, seed=0):
    rng = np.random.default_rng(seed)
    slow, level = 0.0, []
    for _ in range(count):
        slow = 0.995 * slow + 0.05 * rng.normal()
        level.append(slow + 0.5 * rng.normal())
    return np.array(level) - 4


def test_ewma_and_har_beat_persistence_where_a_level_reverts():
    found = errors(make_series(reverting(), "volatility"), np.arange(4800, 5900), 12, 4500)
    assert found["ewma"] < 0.78 and found["har"] < 0.78  # sqrt(1 / 2) is what no noise of the mean would give


def test_ewma_equals_its_recursion_and_starts_anew_after_a_gap(monkeypatch):
    monkeypatch.setattr(baselines, "DECAYS", (0.9,))
    series = make_series(reverting(300), "volatility", drop=[200])
    state, smooth = None, []
    for t in range(len(series)):
        fresh = t == 0 or series.segment[t] != series.segment[t - 1]
        state = series.levels[t, 0] if fresh else 0.9 * state + 0.1 * series.levels[t, 0]
        smooth.append(state)
    at = np.array([150, 199, 200, 250])
    expected = np.array(smooth)[at] - series.levels[at, 0]
    y = baselines.forecast("ewma", series, at, 3, 140)[..., 0]
    assert y == pytest.approx(np.tile(expected[:, None], 3), abs=1e-12)


def test_ewma_takes_the_decay_that_is_best_over_the_whole_horizon(monkeypatch):
    level = np.zeros(3000)  # the next bar is near this one, the tenth near the mean
    for t, shock in enumerate(np.random.default_rng(5).normal(size=2999)):
        level[t + 1] = 0.7 * level[t] + shock
    series, train = make_series(level, "volatility"), np.arange(1990)
    truth = series.truth(train, 10)
    chosen = baselines.forecast("ewma", series, train, 10, 2000)
    each = {}
    for decay in baselines.DECAYS:
        monkeypatch.setattr(baselines, "DECAYS", (decay,))
        each[decay] = baselines.forecast("ewma", series, train, 10, 2000)
    whole = min(each, key=lambda d: np.mean((each[d] - truth) ** 2))
    first = min(each, key=lambda d: np.mean((each[d] - truth)[:, 0] ** 2))
    assert whole != first  # else this would show nothing
    assert np.array_equal(chosen, each[whole])


def test_har_equals_a_direct_regression():
    series = make_series(reverting(900), "volatility", drop=[300])
    level, segment = series.levels[:, 0], series.segment

    def row(t):
        return [1, *(level[t - span + 1 : t + 1].mean() for span in (1, 5, 22, 24))]

    rows = [t for t in range(23, 600 - 3) if segment[t - 23] == segment[t + 3]]
    truth = np.array([[level[t + h] - level[t] for h in range(1, 4)] for t in rows])
    weights = np.linalg.lstsq(np.array([row(t) for t in rows]), truth, rcond=None)[0]
    at = np.array([650, 700])
    expected = np.array([row(t) for t in at]) @ weights
    assert baselines.forecast("har", series, at, 3, 600)[..., 0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_a_train_split_too_short_to_fit_is_persistence(name):
    series = make_series(walk(60), "volatility")
    y = baselines.forecast(name, series, np.arange(40, 50), 4, 1)
    assert y.shape == (10, 4, 1) and np.isfinite(y).all()
    if name.startswith("seasonal_day"):
        assert y.any()
    else:
        assert not y.any()


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_a_series_that_never_moves_is_forecast_as_such(name):
    series = make_series(np.full(800, 3.0), "volatility")
    assert baselines.forecast(name, series, np.arange(600, 620), 4, 500) == pytest.approx(0, abs=1e-9)


def garch_walk(rows, alpha=0.3, beta=0.65, seed=0):
    """Log sizes of returns whose variance follows a GARCH(1,1) with a mean of 1."""
    draws, variance = np.random.default_rng(seed).normal(size=rows), np.ones(rows)
    for t in range(1, rows):
        variance[t] = 1 - alpha - beta + variance[t - 1] * (alpha * draws[t - 1] ** 2 + beta)
    return np.log(np.hypot(draws * np.sqrt(variance), 0.01))


def test_garch_is_that_of_arch_and_knows_a_variance_that_clusters():
    arch = pytest.importorskip("arch")
    levels = garch_walk(6000)
    series, origins = make_series(levels, "volatility"), np.arange(4000, 5990)
    y = baselines.forecast("garch", series, origins, 3, 4000)[..., 0]
    size = np.exp(levels - levels[:4000].mean())
    model = arch.arch_model(size, mean="Zero", rescale=False)
    fitted = model.fit(disp="off", last_obs=4000)
    theirs = fitted.forecast(horizon=3, start=4000, reindex=False).variance.to_numpy()[: len(origins)]
    offsets = y + levels[origins, None] - np.log(theirs) / 2  # a constant for each step
    np.testing.assert_allclose(offsets, np.broadcast_to(offsets.mean(axis=0), offsets.shape), atol=2e-3)
    found = errors(series, origins, 3, 4000)
    assert found["garch"] < 0.99 * found["mean"] and found["garch"] < found["ewma"]


def test_without_a_fit_garch_is_left_out_and_said(monkeypatch):
    series = make_series(garch_walk(1000), "volatility")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, notes = baselines.forecasts(series, "volatility", np.arange(800, 900), 2, 800)
    assert "garch" not in found
    (note,) = (note for note in notes if note.startswith("garch is persistence at 100 of 100 origins"))
    assert note.endswith('no stationary fit by arch (pip install "cpbkit[garch]")')
