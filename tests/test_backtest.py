"""Refits before each of several test periods: each model trained on its own, all windows judged together."""

import dataclasses
import math

import numpy as np
import pytest
from test_baselines import make_series, walk
from test_verdicts import autoregression

from cpbkit.config.experiment import Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError, DataError
from cpbkit.evaluation import baselines
from cpbkit.evaluation.backtest import judge_folds, refit
from cpbkit.evaluation.verdicts import judge_heads, verdicts
from cpbkit.windows.splits import folds, split

TASK = Task(context=8, horizon=2, train=0.6, validation=0.2)


def test_folds_are_test_periods_one_after_another_as_long_as_the_last():
    series = make_series(walk(2000))
    purge = 7  # 5 more than the horizon: an embargo
    parts = folds(dataclasses.replace(TASK, train=0.7, purge=purge), 4)
    for i, fold in enumerate(parts):
        piece = fold.cut(series)
        train_end, validation_end, end = 800 + 200 * i, 1200 + 200 * i, 1400 + 200 * i
        assert np.array_equal(piece.times, series.times[:end])
        assert split(piece, fold.task).bounds == {
            "train": (0, train_end),
            "validation": (train_end + purge, validation_end),
            "test": (validation_end + purge, end),
        }
    assert len(piece) == 2000


def test_one_fold_is_the_plain_split():
    series = make_series(walk(2000))
    (fold,) = folds(TASK, 1)
    assert split(fold.cut(series), fold.task).bounds == split(series, TASK).bounds


def test_a_fold_too_short_for_windows_is_refused():
    with pytest.raises(DataError, match="the test split needs at least 8 windows"):
        judge_folds(make_series(walk(100)), folds(dataclasses.replace(TASK, train=0.7), 4), lambda *_: None)


def test_judge_folds_pools_the_refits():
    series = make_series(autoregression(0.5, 3000))
    ends = []

    def forecaster(piece, task, splits):
        ends.append(splits.bounds["train"][1])
        return baselines.forecast("ridge_ar", piece, splits.test, task.horizon, splits.bounds["train"][1])

    parts = folds(TASK, 3)
    found = judge_folds(series, parts, forecaster, model="ridge_ar")["price"]
    assert ends == [600, 1200, 1800]
    windows = [len(split(fold.cut(series), fold.task).test) for fold in parts]
    assert found.windows == sum(windows)
    assert verdicts({"a": found})["a"].word == "BEATS"
    last = parts[2].cut(series)
    alone = judge_folds(series, parts[2:], forecaster, model="ridge_ar")["price"]
    splits = split(last, parts[2].task)
    expected = judge_heads(last, splits.test, forecaster(last, TASK, splits), 1800, model="ridge_ar")
    assert alone == expected["price"]


def test_a_refit_is_the_models_own_training_on_the_piece():
    series = make_series(autoregression(0.6, 1500))
    quick = vary(PRESETS["quick"], epochs=2, steps=20, context=8, horizon=2, features=("feature0",))
    parts = folds(dataclasses.replace(quick.task, train=0.6, validation=0.2), 2)
    task, piece = parts[0].task, parts[0].cut(series)
    splits = split(piece, task)
    y = refit(quick)(piece, task, splits)
    assert y.shape == (len(splits.test), 2, 1)
    assert np.array_equal(y, refit(quick)(piece, task, splits))
    changed = dataclasses.replace(piece, inputs=piece.inputs * np.where(np.arange(len(piece)) < 300, -1, 1)[:, None])
    assert not np.allclose(y, refit(quick)(changed, task, splits))  # it is trained, not only run
    enough = math.ceil(len(splits.train) / quick.training.batch)
    by_default, as_asked = (refit(vary(quick, steps=steps))(piece, task, splits) for steps in (0, enough))
    assert np.array_equal(by_default, as_asked) and not np.array_equal(by_default, y)
    found = judge_folds(series, parts, refit(quick))["price"]
    assert found.windows == sum(len(split(fold.cut(series), fold.task).test) for fold in parts)


def test_a_refit_that_falls_sick_says_so():
    series = make_series(autoregression(0.6, 900))
    wild = vary(PRESETS["quick"], epochs=1, steps=3, context=8, horizon=2, features=("feature0",))
    wild = vary(wild, learning_rate=1e38, clip_norm=0.0)
    with pytest.raises(CpbkitError, match=r"TESTUSDT_1h diverged: the .* loss was not finite"):
        judge_folds(series, folds(wild.task, 1), refit(wild))
