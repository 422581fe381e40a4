"""Volatility and range are of bars to come: nothing is found in returns without structure, something where there is."""

import dataclasses

import numpy as np
import pytest

from cpbkit import indicators
from cpbkit.config.experiment import Task
from cpbkit.data.synthetic import make_market
from cpbkit.evaluation import baselines
from cpbkit.evaluation.verdicts import judge_heads, verdicts
from cpbkit.windows.series import from_klines
from cpbkit.windows.splits import split

HORIZON = 4
TASK = Task(
    context=8, horizon=HORIZON, features=("close_return",), targets=("volatility", "range"), target_weights=(1.0, 1.0)
)


@pytest.fixture(scope="module")
def bars():
    return make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-03-01")["BTCUSDT_1h"]


def shuffled(klines, seed):
    """Return bars whose order is drawn: each keeps its open, high and low relative to the close before it."""
    frame = klines.frame
    drawn = np.random.default_rng(seed).permutation(np.arange(1, len(frame)))
    before = frame["close"].to_numpy()[drawn - 1]
    rows = frame.iloc[drawn].reset_index(drop=True)
    shape = np.log(rows[["open", "high", "low", "close"]].to_numpy() / before[:, None])
    start = np.concatenate([[0.0], shape[:-1, 3].cumsum()])
    rows[["open", "high", "low", "close"]] = 100 * np.exp(shape + start[:, None])
    return dataclasses.replace(klines, frame=rows.set_axis(frame.index[1:]))


def judged(klines, forecaster):
    series = from_klines(klines, TASK)
    splits = split(series, TASK)
    train_end = splits.bounds["train"][1]
    return judge_heads(series, splits.test, forecaster(series, splits.test, train_end), train_end, model="har")


def har(series, origins, train_end):
    return baselines.forecast("har", series, origins, HORIZON, train_end)


def smoothed(series, origins, train_end):
    """A model of its own: ridge on the last twenty levels, which a network can do at least."""
    y = np.empty((len(origins), HORIZON, 2))
    for k in range(2):
        past = np.lib.stride_tricks.sliding_window_view(series.levels[:, k], 20)
        rows = np.arange(19, train_end - HORIZON)
        design = np.column_stack([np.ones(len(past)), past])
        gram = design[rows - 19].T @ design[rows - 19] + 3.0 * np.eye(21)
        for h in range(HORIZON):
            weights = np.linalg.solve(gram, design[rows - 19].T @ series.levels[rows + 1 + h, k])
            y[:, h, k] = design[origins - 19] @ weights - series.levels[origins, k]
    return y


@pytest.mark.parametrize("forecaster", [har, smoothed])
def test_where_returns_have_no_structure_nothing_is_found(bars, forecaster):
    found = {seed: judged(shuffled(bars, seed), forecaster) for seed in range(40)}
    for head in ("volatility", "range"):
        words = [v.word for v in verdicts({str(seed): heads[head] for seed, heads in found.items()}).values()]
        assert words.count("BEATS") == 0 and "TOO FEW TO TELL" not in words


def test_where_volatility_clusters_the_past_is_worth_something(bars):
    found = judged(bars, har)["volatility"]
    assert found.rmse < 0.95 * found.baselines["mean"] and found.persistence_skill > 0.1


def test_the_volatility_of_a_bar_knows_no_other_bar(bars):
    columns = ["bar_volatility", "bar_range"]
    frame = bars.frame.iloc[:60]
    whole = indicators.compute(frame, columns)
    assert np.array_equal(indicators.compute(frame.iloc[30:31], columns), whole.iloc[30:31])
    one = frame.iloc[30]
    spread, body = np.log(one["high"] / one["low"]), np.log(one["close"] / one["open"])
    assert whole["bar_range"].iloc[30] == pytest.approx(np.hypot(spread, 1e-4))
    expected = 0.5 * spread**2 - (2 * np.log(2) - 1) * body**2
    assert whole["bar_volatility"].iloc[30] == pytest.approx(np.sqrt(expected + 1e-8))
    still = frame.assign(open=5.0, high=5.0, low=5.0, close=5.0)
    assert np.allclose(indicators.compute(still, columns), 1e-4)
