"""Windows: splits by time, scaling from train alone, gathering by index."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import walk

from cpbkit.config.experiment import Task
from cpbkit.data.synthetic import make_market
from cpbkit.errors import DataError, UnknownName
from cpbkit.windows.scaling import Scaler
from cpbkit.windows.series import Series, from_klines, from_table
from cpbkit.windows.splits import MIN_WINDOWS, Splits, origins, split
from cpbkit.windows.windows import Windows

TASK = Task(context=12, horizon=3)


def test_no_window_crosses_a_gap_or_a_border_and_splits_are_purged():
    series = walk("A", 600, gap_at=200)
    splits = split(series, TASK)
    for part in ("train", "validation", "test"):
        first, last = splits.bounds[part]
        for t in getattr(splits, part):
            rows = np.arange(t - TASK.context + 1, t + TASK.horizon + 1)
            assert rows[0] >= first and rows[-1] < last
            assert (np.diff(series.times[rows]) == np.timedelta64(900, "s")).all()
    ends = [splits.bounds[part] for part in ("train", "validation", "test")]
    assert all(later[0] - earlier[1] >= TASK.horizon for earlier, later in itertools.pairwise(ends))
    assert len(splits.train) == 420 - 2 * (TASK.context + TASK.horizon - 1)  # both sides of the gap


def test_reach_back_counts_windows_as_the_published_protocol_does():
    table = from_table("t", walk_table(17_420), ["x"], ["x"])
    assert len(origins(table, 336, 96, 0, 8640)) == 8640 - 336 - 96 + 1
    assert len(origins(table, 336, 96, 8640 + 2880, 8640 + 5760, reach_back=True)) == 2880 - 96 + 1


def walk_table(rows):
    import pandas as pd

    index = pd.date_range("2020-01-01", periods=rows, freq="h")
    return pd.DataFrame({"x": np.random.default_rng(0).normal(size=rows)}, index=index)


def test_times_of_another_zone_are_read_as_utc():
    table = walk_table(24 * 366)  # over the end of summer time, when an hour comes twice
    there = from_table("t", table.tz_localize("UTC").tz_convert("America/New_York"), ["x"], ["x"])
    assert (there.times == table.index.to_numpy("M8[ns]")).all()


def test_too_short_a_series_is_refused_with_the_count():
    with pytest.raises(DataError, match=rf"validation split needs at least {MIN_WINDOWS} windows .* got \d+"):
        split(walk("A", 90), TASK)


def test_bars_of_a_market_that_closes_are_told_so_where_no_window_fits_between():
    series = walk("A", 600)
    nights = series.times + (np.arange(600) // 10 * 3600).astype("m8[s]")
    with pytest.raises(DataError, match=r"none of the 60 stretches has more than 10 bars.*--slide-over-gaps"):
        split(dataclasses.replace(series, times=nights), TASK)


def test_times_that_do_not_increase_are_refused():
    series = walk("A", 50)
    with pytest.raises(DataError, match="times of A must increase; row 3"):
        Series(**{**fields(series), "times": np.r_[series.times[:3], series.times[2:-1]]})


def fields(series):
    return {name: getattr(series, name) for name in series.__dataclass_fields__ if name != "segment"}


def test_scaler_does_not_see_past_the_train_split():
    series = walk("A", 600)
    splits = split(series, TASK)
    end = splits.bounds["train"][1]
    spoiled = {name: getattr(series, name).copy() for name in ("inputs", "levels", "anchors")}
    for column in spoiled.values():
        column[end:] *= 1000
    a, b = Scaler.fit(series, splits, TASK), Scaler.fit(Series(**{**fields(series), **spoiled}), splits, TASK)
    assert (a.input_mean == b.input_mean).all() and (a.input_std == b.input_std).all()
    assert (a.target_scale == b.target_scale).all()


def test_gather_equals_slicing_by_hand():
    series = [walk("A", 600), walk("B", 400, seed=1)]
    windows = Windows(series, TASK, "cpu", torch.float64)
    rows = torch.stack([windows.origins["test"][m][:5] for m in (0, 1)])
    x, last, y = windows.gather(rows)
    assert x.shape == (2, 5, 12, 4) and last.shape == (2, 5, 1) and y.shape == (2, 5, 3, 1)
    for m, (one, splits, scaler) in enumerate(zip(series, windows.splits, windows.scalers, strict=True)):
        for b, t in enumerate(splits.test[:5]):
            want = scaler.inputs(one.inputs[t - 11 : t + 1])
            np.testing.assert_allclose(x[m, b], want, rtol=1e-12)
            future = (one.levels[t + 1 : t + 4] - one.anchors[t]) / scaler.target_scale
            np.testing.assert_allclose(y[m, b], future, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(last[m, b], (one.levels[t] - one.anchors[t]) / scaler.target_scale, atol=1e-12)


def test_order_is_a_permutation_that_wraps_and_depends_on_the_name_alone():
    series = [walk("A", 600), walk("B", 400, seed=1)]
    windows = Windows(series, TASK, "cpu", torch.float32)
    alone = Windows(series[1:], TASK, "cpu", torch.float32)
    pool = windows.origins["train"][1]
    order = windows.order([0, 1], seed=0, epoch=3, count=2 * len(pool))
    first, second = order[1].split(len(pool))
    assert sorted(first.tolist()) == sorted(second.tolist()) == pool.tolist()
    assert (first != second).any()
    assert (order[1] - 600 == alone.order([0], seed=0, epoch=3, count=2 * len(pool))[0]).all()
    assert (order != windows.order([0, 1], seed=0, epoch=4, count=2 * len(pool))).any()


def test_batches_cover_a_split_once_with_the_padding_weighted_zero():
    windows = Windows([walk("A", 600), walk("B", 400, seed=1)], TASK, "cpu", torch.float32)
    seen = [[], []]
    for rows, weight in windows.batches("validation", [0, 1], 7):
        for m in (0, 1):
            seen[m] += rows[m][weight[m] > 0].tolist()
    assert seen == [windows.origins["validation"][m].tolist() for m in (0, 1)]


def test_memory_grows_with_the_bars_and_not_with_the_context():
    series = walk("A", 5000)
    bars = 5000 * 6 * 8  # a kline row: a time and five columns
    for context in (12, 240):
        windows = Windows([series], Task(context=context, horizon=3), "cpu", torch.float32)
        held = sum(t.nbytes for t in (windows.inputs, windows.levels, windows.anchors))
        held += sum(t.nbytes for rows in windows.origins.values() for t in rows)
        assert held <= 1.2 * bars


def test_splits_name_their_dates():
    series = walk("A", 600)
    dates = split(series, TASK).dates(series)
    assert dates["train"] == ["2025-01-01T00:00", "2025-01-05T08:45"]
    assert isinstance(split(series, TASK), Splits)


def test_a_column_beside_the_bars_can_be_a_feature():
    klines = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-02-01")["BTCUSDT_1h"]
    frame = klines.frame.assign(SPY_return=np.arange(len(klines.frame)) / 1000)
    series = from_klines(
        dataclasses.replace(klines, frame=frame), Task(context=12, horizon=3, features=("close_return", "SPY_return"))
    )
    assert (series.inputs[:, 1] == frame["SPY_return"].to_numpy()[-len(series) :]).all()
    with pytest.raises(UnknownName, match="SPY_return"):
        from_klines(klines, Task(context=12, horizon=3, features=("SPY_return",)))
