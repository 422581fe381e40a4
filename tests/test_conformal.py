"""Intervals hold what they promise, use nothing before it is known, and the ledger says what they held."""

import json

import numpy as np
import pytest
from scipy import stats
from test_baselines import make_series
from test_report import Page

from cpbkit.config.experiment import Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation.conformal import LEAST, POINTS, conformal_prediction_intervals, judge_prediction_intervals
from cpbkit.evaluation.results import ResultLine
from cpbkit.runs.sweep import sweep
from cpbkit.views.report import write_report
from cpbkit.views.verdict import coverage_figure
from cpbkit.windows.splits import split

TASK = Task(context=8, horizon=3)


def scale_of_noise(count, jump):
    """Errors whose deviation grows threefold at half-time."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 3, 2)) * np.where(np.arange(count) < count // 2, 1, jump)[:, None, None]


def test_intervals_hold_what_they_promise_through_a_change():
    errors = scale_of_noise(4000, 3)
    found = conformal_prediction_intervals(errors[:1000] * 1.0, errors[1000:], alpha=0.1)
    assert found.inside.mean() == pytest.approx(0.9, abs=0.012)
    assert found.inside[-400:].mean(axis=(0, 2)) == pytest.approx([0.9] * 3, abs=0.03)
    fixed = conformal_prediction_intervals(errors[:1000], errors[1000:], alpha=0.1, rate=0.0, memory=1000)
    assert found.inside.mean() > fixed.inside.mean()
    assert found.half[-1].mean() == pytest.approx(3 * stats.norm.ppf(0.95), rel=0.2)


def test_intervals_stay_calm_where_nothing_changes():
    errors = np.random.default_rng(1).normal(size=(3000, 2, 1))
    found = conformal_prediction_intervals(errors[:1000], errors[1000:], alpha=0.2, rate=0.01)
    assert found.inside.mean() == pytest.approx(0.8, abs=0.01)
    assert found.half.mean() == pytest.approx(stats.norm.ppf(0.9), rel=0.03)


def test_an_interval_uses_no_error_before_it_is_known():
    """The error of step h + 1 at window j is known at window j + h + 1, and not one window sooner."""
    errors = np.random.default_rng(2).normal(size=(60, 4, 1))
    before = conformal_prediction_intervals(errors[:20], errors[20:])
    changed = errors[20:].copy()
    changed[10] = 50
    after = conformal_prediction_intervals(errors[:20], changed)
    for h in range(4):
        differs = np.flatnonzero((before.level != after.level)[:, h, 0])
        assert differs[0] == 10 + h + 1


def test_the_level_adapts_by_the_papers_rule():
    calibration, errors = np.arange(1.0, 10.0)[:, None, None], np.array([0.0, 20.0, 0.0, 0.0])[:, None, None]
    found = conformal_prediction_intervals(calibration, errors, alpha=0.2, rate=0.1, memory=9)
    assert found.level[:, 0, 0] == pytest.approx([0.2, 0.22, 0.14, 0.16])
    # Ranks of 9 scores: ceil(10 x 0.8), ceil(10 x 0.78), ceil(10 x 0.86), ceil(10 x 0.84); the oldest leave the memory.
    assert found.half[:, 0, 0] == pytest.approx([8, 8, 20, 20])
    assert found.inside[:, 0, 0].tolist() == [True, False, True, True]


def test_a_level_beyond_the_memory_takes_its_last_score():
    calibration, calm, wild = np.arange(1.0, 10.0)[:, None, None], np.zeros((9, 1, 1)), np.full((9, 1, 1), 50.0)
    found = conformal_prediction_intervals(calibration, calm, alpha=0.2, rate=5.0, memory=9)
    assert found.level[1, 0, 0] > 1 and found.half[1, 0, 0] == 0  # the smallest, a zero that came in
    found = conformal_prediction_intervals(calibration, wild, alpha=0.2, rate=5.0, memory=9)
    assert found.level[1, 0, 0] < 0 and found.half[1, 0, 0] == 50


def test_a_calibration_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"calibration must be \(V, H, K\) as errors \(5, 2, 1\); got \(5, 3, 1\)"):
        conformal_prediction_intervals(np.ones((5, 3, 1)), np.ones((5, 2, 1)))


def known(share, rows=5000, seed=0):
    """A walk with calm hours and wild ones, and forecasts of validation and test that know a share of its moves."""
    rng = np.random.default_rng(seed)
    wild = np.where(np.arange(rows) % 120 < 12, 0.04, 0.01)
    series = make_series((wild * rng.normal(size=rows)).cumsum())
    splits = split(series, TASK)
    forecasts = [share * series.truth(origins, 3) for origins in (splits.validation, splits.test)]
    return series, splits, forecasts


def test_what_intervals_held_is_told_in_basis_points_beside_persistence():
    series, splits, forecasts = known(0.5)
    told = judge_prediction_intervals(series, splits, 8, *forecasts)[0]["price"]
    validation, test = (1e4 * series.truth(origins, 3) for origins in (splits.validation, splits.test))
    own = conformal_prediction_intervals(0.5 * validation, 0.5 * test)
    assert told["unit"] == "bp" and told["nominal"] == 0.9
    assert told["coverage"] == pytest.approx((np.abs(0.5 * test) <= own.half).mean())
    assert told["coverage_worst_step"] == pytest.approx(own.inside[..., 0].mean(axis=0).min())
    assert told["width"] == pytest.approx(2 * own.half.mean())
    assert told["score_persistence"] == pytest.approx(2 * told["score"])
    assert told["crps_persistence"] == pytest.approx(2 * told["crps"])
    apart = [np.abs(x[:, None] - x).mean() for x in 0.5 * validation[..., 0].T]
    away = [
        np.abs(x[:, None] - y).mean() for x, y in zip(0.5 * validation[..., 0].T, 0.5 * test[..., 0].T, strict=True)
    ]
    assert told["crps"] == pytest.approx(np.mean(away) - np.mean(apart) / 2)


def test_wild_windows_follow_wild_bars():
    """Intervals that adapt over days lag behind a wild spell of hours, and the ledger says so."""
    series, splits, forecasts = known(0.0)
    told = judge_prediction_intervals(series, splits, 8, *forecasts)[0]["price"]
    inside = conformal_prediction_intervals(
        *(series.truth(origins, 3) for origins in (splits.validation, splits.test))
    ).inside
    before = [np.abs(np.diff(series.levels[t - 7 : t + 1, 0])).mean() for t in splits.test]
    assert told["coverage_wild"] == pytest.approx(inside[before >= np.quantile(before, 0.9)].mean())
    assert told["coverage_wild"] < 0.8 < 0.87 < told["coverage"] < 0.93


def test_coverage_over_time_is_short_dated_and_json():
    series, splits, forecasts = known(0.5)
    told = json.loads(json.dumps(judge_prediction_intervals(series, splits, 8, *forecasts)[0], allow_nan=False))[
        "price"
    ]
    assert len(json.dumps(told)) < 2500
    assert len(told["dates"]) == len(told["over_time"]) == len(splits.test) // LEAST < POINTS
    assert told["dates"] == sorted(told["dates"])
    assert told["dates"][-1] == str(series.times[splits.test[-1]].astype("datetime64[m]"))
    assert np.mean(told["over_time"]) == pytest.approx(told["coverage"], abs=0.01)


def test_a_long_test_split_has_no_more_points():
    series, splits, forecasts = known(0.5, rows=9000)
    assert len(judge_prediction_intervals(series, splits, 8, *forecasts)[0]["price"]["over_time"]) == POINTS


def test_the_figure_draws_coverage_of_each_model():
    series, splits, forecasts = known(0.5)
    told, _ = judge_prediction_intervals(series, splits, 8, *forecasts)
    lines = [ResultLine(name, "done", synthetic=True, prediction_intervals=told) for name in ("A_1h", "B_1h")]
    figure = coverage_figure([*lines, ResultLine("C_1h", "failed", synthetic=True)])
    (axes,) = figure.axes
    drawn = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(drawn) == 3  # two models, and their mean
    for line in drawn[:2]:
        np.testing.assert_allclose(line.get_ydata(), 100 * np.array(told["price"]["over_time"]))
    assert drawn[2].get_ydata().mean() == pytest.approx(100 * told["price"]["coverage"], abs=2)
    assert figure.texts[0].get_text().startswith("SYNTHETIC · The 90 % intervals of 2 models held ")


def test_a_sweep_keeps_what_its_intervals_held_and_the_report_shows_it(tmp_path):
    bars = {"source": "synthetic", "symbols": ("BTCUSDT",), "intervals": ("1h",), "start": "2025-01-01"}
    experiment = vary(PRESETS["quick"], **bars, end="2025-01-31", epochs=1, steps=4)
    (line,) = sweep(experiment, tmp_path / "run", executor="local")
    told = line.prediction_intervals["price"]
    assert told["coverage"] == pytest.approx(0.9, abs=0.08) and len(told["over_time"]) <= POINTS
    assert 0 < told["crps"] < told["score"] and told["width"] > 0
    page = Page(write_report(tmp_path / "run"))
    (row,) = page.table("series", "head", "inside %")
    assert row[:3] == ["BTC 1h", "price", f"{100 * told['coverage']:.1f}"]
    assert row[5].endswith(" bp") and "calibration of the price: truth inside the interval" in page.text
    assert "close of price: forecast 4 bars before, and truth" in page.text
