"""Each planted leak is caught, its honest counterpart is not, and the kit's own way of the data passes."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import terminal
from torch import nn

from cpbkit.config.experiment import Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.klines import validate
from cpbkit.data.synthetic import make_market
from cpbkit.evaluation import leakage
from cpbkit.evaluation.leakage import Column
from cpbkit.evaluation.poison import Finding, Findings
from cpbkit.evaluation.training_checks import Check
from cpbkit.evaluation.verdicts import judge_heads
from cpbkit.runs import planted
from cpbkit.windows import windows
from cpbkit.windows.series import from_klines
from cpbkit.windows.splits import split

TASK = Task(context=16, horizon=4, features=("close_return", "rsi"))


@pytest.fixture(scope="module")
def bars():
    return make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-02-28")["BTCUSDT_1h"]


def table(rows=400, seed=0):
    frame = pd.DataFrame({"close": 100 + np.random.default_rng(seed).normal(size=rows).cumsum()})
    frame.loc[50:53, "close"] = np.nan
    return frame


def feature(function):
    """Make a pipeline of one honest column and one that is the function of the closes."""

    def pipeline(frame):
        rows = np.arange(len(frame))
        close = frame["close"]
        return {"honest": Column(close.diff().to_numpy(), rows), "suspect": Column(np.asarray(function(close)), rows)}

    return pipeline


HONEST = {
    "a trailing mean": lambda close: close.rolling(9).mean(),
    "a forward-fill": lambda close: close.ffill(),
    "a shift": lambda close: close.shift(1),
    "a mean of what has been": lambda close: close / close.expanding().mean(),
}
LEAKS = planted.LEAKS | {
    "a back-fill of a gap": lambda close: close.bfill(),
    "an interpolated gap": lambda close: close.interpolate(),
    "a roll ahead": lambda close: np.roll(close, -1),
    "a rank among all rows": lambda close: close.rank(),
}


@pytest.mark.parametrize("function", LEAKS.values(), ids=LEAKS)
def test_a_feature_that_knows_the_future_is_named(function):
    spots = np.arange(0, 399, 3)
    found = leakage.check_future(feature(function), table(), spots)
    assert found.verdict == "FAIL"
    assert found.evidence.startswith("`suspect` of row ")


@pytest.mark.parametrize("function", HONEST.values(), ids=HONEST)
def test_an_honest_feature_is_not(function):
    found = leakage.check_future(feature(function), table(), range(0, 399, 3))
    assert found == leakage.Finding("future", "OK", "2 columns are the same to the bit, at 133 spots of 400 rows")


@pytest.mark.parametrize("name", ["a centred mean", "a back-fill of the warm-up", "a roll that wraps around"])
def test_the_default_spots_find_the_common_leaks(name):
    assert leakage.check_future(feature(LEAKS[name]), table()).verdict == "FAIL"
    assert leakage.check_future(feature(HONEST["a trailing mean"]), table()).verdict == "OK"


def test_the_default_spots_find_a_back_fill_of_a_long_gap():
    frame = table()
    frame.loc[200:230, "close"] = np.nan
    assert leakage.check_future(feature(LEAKS["a back-fill of a gap"]), frame).verdict == "FAIL"


def test_a_scaler_may_know_the_train_rows_and_no_more():
    def pipeline(frame, fitted_on):
        close = frame["close"].to_numpy()
        return {"scaler": Column(np.array([np.nanmean(close[:fitted_on])]), np.array([299]))}

    assert leakage.check_future(lambda frame: pipeline(frame, 300), table()).verdict == "OK"
    found = leakage.check_future(lambda frame: pipeline(frame, 310), table())
    assert found.verdict == "FAIL" and "`scaler` of row 299" in found.evidence


def test_a_future_that_decides_which_rows_exist_is_a_leak():
    def pipeline(frame):
        rows = np.flatnonzero(frame["close"] < frame["close"].median())
        return {"rows below the median": Column(np.zeros(len(rows)), rows)}

    assert leakage.check_future(pipeline, table()).verdict == "FAIL"


def test_what_is_missing_before_and_after_is_the_same():
    def pipeline(frame):
        return {"nothing": Column(np.full(len(frame), np.nan), np.arange(len(frame)))}

    assert leakage.check_future(pipeline, table()).verdict == "OK"


@pytest.mark.parametrize(
    ("train", "test", "verdict", "words"),
    [
        (range(15, 100), range(123, 200), "OK", "no row is shared; 20 rows between"),
        (range(15, 100), range(107, 200), "NOTE", "contexts of test reach 12 rows back into train"),
        (range(15, 100), range(105, 200), "NOTE", "gap between splits is 2 rows; the horizon is 4"),
        (range(15, 100), range(102, 200), "FAIL", "train reads up to row 103, test forecasts from row 103 on"),
        (range(15, 100), range(90, 200), "FAIL", "rows in both: 13"),
        ([20, 90, 40], [60, 30], "FAIL", "train reads up to row 94, test forecasts from row 31 on"),
    ],
)
def test_overlapping_splits_are_found(train, test, verdict, words):
    found = leakage.check_splits({"train": np.array(train), "test": np.array(test)}, context=16, horizon=4)
    assert found.verdict == verdict
    assert words in found.evidence


def test_every_border_between_splits_is_looked_at():
    parts = {"train": np.arange(15, 100), "validation": np.arange(123, 150), "test": np.arange(140, 200)}
    assert "validation reads up to row 153" in leakage.check_splits(parts, 16, 4).evidence


def peeking(share):
    """Make a forecaster that is handed the test's truth and uses a share of it."""

    def forecaster(series, task, splits):
        return share * series.truth(splits.test, task.horizon)

    return forecaster


def test_the_kits_own_way_knows_no_future(bars):
    found = leakage.check_future(leakage.whole_way(bars, TASK, leakage.ridge_forecaster), bars.frame)
    assert found.verdict == "OK", found.evidence
    assert found.evidence.startswith("14 columns")


def test_targets_passed_at_evaluation_are_found(bars):
    series = from_klines(bars, TASK)
    middle = len(bars.frame) - len(split(series, TASK).test) // 2
    found = leakage.check_future(leakage.whole_way(bars, TASK, peeking(1e-6)), bars.frame, [middle])
    assert found.verdict == "FAIL" and "`forecasts` of row" in found.evidence


def test_a_scaler_of_the_kit_fitted_on_all_rows_is_found(bars, monkeypatch):
    honest = windows.Scaler.fit

    def fit(series, splits, task):
        everything = {"train": (0, len(series)), "validation": (0, 0), "test": (0, 0)}
        return honest(series, dataclasses.replace(splits, bounds=everything), task)

    monkeypatch.setattr(windows.Scaler, "fit", fit)
    found = leakage.check_future(leakage.whole_way(bars, TASK), bars.frame)
    assert found.verdict == "FAIL" and "`scaler` of row" in found.evidence


def test_a_stop_chosen_on_the_test_split_is_found(bars):
    def forecaster(series, task, splits):
        shares = np.linspace(-1, 1, 5)
        y = leakage.ridge_forecaster(series, task, splits)
        truth = series.truth(splits.test, task.horizon)
        return y * min(shares, key=lambda share: np.sum((share * y - truth) ** 2))

    series = from_klines(bars, TASK)
    middle = len(bars.frame) - len(split(series, TASK).test) // 2
    found = leakage.check_future(leakage.whole_way(bars, TASK, forecaster), bars.frame, [middle])
    assert found.verdict == "FAIL" and "`forecasts` of row" in found.evidence


@pytest.mark.parametrize("count", [200, 201])
def test_a_phase_shuffled_series_keeps_its_spectrum_and_nothing_else(count):
    values = np.random.default_rng(0).exponential(size=count) + np.sin(np.arange(count))
    placebo = leakage.phase_shuffle(values, 1)
    assert np.abs(np.fft.rfft(placebo)) == pytest.approx(np.abs(np.fft.rfft(values)))
    assert placebo.mean() == pytest.approx(values.mean()) and placebo.std() == pytest.approx(values.std())
    assert abs(np.corrcoef(values, placebo)[0, 1]) < 0.8
    assert not np.array_equal(placebo, leakage.phase_shuffle(values, 2))


def test_a_placebo_twin_is_bars_that_pass_the_door(bars):
    placebo = leakage.make_placebo(bars, 3)
    again = validate(placebo.frame, "BTCUSDT_1h")
    pd.testing.assert_frame_equal(again.frame, placebo.frame, check_names=False)
    assert placebo.passport.synthetic and len(placebo.frame) == len(bars.frame)
    assert placebo.frame["volume"].sum() == pytest.approx(bars.frame["volume"].sum())
    moves = [np.diff(np.log(f["close"])) for f in (bars.frame, placebo.frame)]
    assert moves[0].std() == pytest.approx(moves[1].std())
    assert abs(np.corrcoef(*moves)[0, 1]) < 0.1


def judged_twin(bars, forecaster):
    def judge(seed):
        series = from_klines(leakage.make_placebo(bars, seed), TASK)
        splits = split(series, TASK)
        y = forecaster(series, TASK, splits)
        return judge_heads(series, splits.test, y, splits.bounds["train"][1])["price"]

    return judge


def test_skill_on_placebos_is_found(bars):
    caught = leakage.check_placebo(judged_twin(bars, peeking(0.3)), 4)
    assert caught.verdict == "FAIL" and caught.evidence.startswith("4 of 4 placebos beaten")
    honest = leakage.check_placebo(judged_twin(bars, leakage.ridge_forecaster), 4, real=0.5)
    assert honest.verdict == "OK"
    assert honest.evidence.endswith("that of the real series +50.00 %, above 4 of them")


def test_an_echo_is_heard_and_a_forecast_is_not():
    actual = np.random.default_rng(0).normal(size=900).cumsum()
    origins = np.arange(100, 890)
    noise = 0.3 * np.random.default_rng(1).normal(size=len(origins))
    echo = leakage.check_echo(actual, origins, actual[origins] + noise, 5)
    assert echo.verdict == "NOTE" and "5 bars before: it echoes the last value" in echo.evidence
    assert leakage.check_echo(actual, origins, actual[origins + 3] + noise, 5).verdict == "OK"


@pytest.mark.long
def test_each_planted_leak_and_sickness_is_caught_and_nothing_where_none_is():
    for found, honest in ((planted.plant_leaks(), "no leak"), (planted.plant_sicknesses(), "no sickness")):
        assert [f for f in found if f.verdict != "OK"] == []
        assert found[-1].check == honest and len({f.check for f in found}) == len(found) >= 7


def test_a_check_that_sees_nothing_or_everything_fails_the_planted_ones(monkeypatch):
    blind = leakage.Finding("future", "OK", "nothing changes")
    monkeypatch.setattr(planted, "check_future", lambda *_: blind)
    assert [f.check for f in planted.plant_leaks() if f.verdict == "OK"] == ["overlapping splits", "no leak"]
    monkeypatch.setattr(planted, "check_future", lambda *_: dataclasses.replace(blind, verdict="FAIL"))
    assert [f.check for f in planted.plant_leaks() if f.verdict == "FAIL"] == ["no leak"]
    monkeypatch.setattr(planted, "train_and_judge", lambda *_: ({}, [Check("S", "finite", "OK", "every loss")]))
    assert [f.check for f in planted.plant_sicknesses() if f.verdict == "OK"] == ["no sickness"]


def test_the_command_fails_where_a_planted_one_is_missed(monkeypatch):
    missed = leakage.Finding("a centred mean", "FAIL", "nothing changes")
    dead = leakage.Finding("a dead output", "OK", "gradient SICK")
    for found, code in (([], 0), ([missed], 1)):
        monkeypatch.setattr(planted, "plant_leaks", lambda found=found: found)
        monkeypatch.setattr(planted, "plant_sicknesses", lambda: [dead])
        shown = terminal("audit", "--inject")
        assert shown.exit_code == code and "gradient SICK" in shown.stdout
        assert ("nothing changes" in shown.stdout) == bool(code)


def test_verdicts_are_calibrated():
    found = leakage.check_calibration()
    assert [f.verdict for f in found] == ["OK", "OK"], found
    assert found[1].evidence.startswith("40 of 40 with a coefficient of 0.3")


@pytest.mark.parametrize(("forecaster", "expected"), [(peeking(0.2), ["FAIL", "OK"]), (peeking(0.0), ["OK", "FAIL"])])
def test_calibration_sees_a_cheat_and_a_dullard(forecaster, expected):
    assert [f.verdict for f in leakage.check_calibration(forecaster, model="", rows=3000)] == expected


def test_the_whole_audit(bars, monkeypatch):
    monkeypatch.setattr(leakage, "check_calibration", lambda: [])
    calls = []

    def forecaster(series, task, splits):
        calls.append(series.name)
        return leakage.ridge_forecaster(series, task, splits)

    found = leakage.audit(bars, TASK, forecaster, model="ridge_ar", placebos=3)
    assert [f.verdict for f in found] == ["OK", "OK", "OK", "OK", "OK", "NOTE", "OK", "NOTE"], found
    assert len(calls) == 1 + 5 + 3
    cheat = {f.check: f.verdict for f in leakage.audit(bars, TASK, peeking(0.3), placebos=3)}
    assert cheat["training and forecasts know no future"] == cheat["placebos, price"] == "FAIL"
    assert cheat["the making of features knows no future"] == cheat["scaler and windows know no future"] == "OK"


def test_every_head_has_its_placebos_and_a_skill_that_no_market_gives_is_an_alarm(bars, monkeypatch):
    monkeypatch.setattr(leakage, "check_calibration", lambda: [])
    real = dataclasses.replace(bars, passport=dataclasses.replace(bars.passport, synthetic=False))
    task = dataclasses.replace(TASK, targets=("close", "bb_upper"), target_weights=(1.0, 1.0))
    found = {f.check: f for f in leakage.audit(real, task, peeking(0.4), placebos=2)}
    assert found["placebos, price"].verdict == found["placebos, bands"].verdict == "FAIL"
    alarm = found["believable skill, price"]
    assert alarm.verdict == "FAIL" and "above 10 %: no liquid market" in alarm.evidence
    assert found["believable skill, bands"].verdict == "NOTE"


class Blind(nn.Module):
    """A network that does not look at its inputs."""

    def __init__(self, task, model):
        super().__init__()
        self.answer = nn.Parameter(torch.zeros(task.horizon, len(task.targets)))

    def forward(self, x):
        return self.answer.expand(len(x), *self.answer.shape)


def test_a_sound_model_learns_a_batch_by_heart_and_a_blind_one_does_not():
    series = leakage.autoregression(0.0, 1500, 0)
    quick = vary(PRESETS["quick"], context=8, horizon=2, features=("close_return",), dropout=0.5, weight_decay=0.5)
    found = leakage.check_overfit(quick, series)
    assert (found.check, found.verdict) == ("overfit one batch", "OK"), found
    assert leakage.check_overfit(vary(quick, name=f"{__name__}:Blind"), series).verdict == "FAIL"
    solved = leakage.check_overfit(vary(quick, name="ridge_ar"), series)
    assert solved.verdict == "NOTE" and "solved in one step" in solved.evidence


def test_what_an_audit_found_is_printed_in_whole():
    found = Findings([Finding("a check", "FAIL", "evidence " * 30), Finding("another", "OK", "none")])
    assert str(found).split("\n")[0].startswith("FAIL  a check: evidence evidence")
    assert str(found).count("evidence") == 30 and "OK    another: none" in str(found)
    assert list(found[found["verdict"] == "OK"]["check"]) == ["another"] and "check" in str(found[["check"]])
