"""Several test periods with a refit before each, and one model for all series: rows of the same stack."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import walk

import cpbkit as cpb
from cpbkit.config.experiment import Experiment, Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.backtest import judge_folds, refit
from cpbkit.evaluation.pooled import from_bytes
from cpbkit.evaluation.verdicts import judgements
from cpbkit.runs import worker
from cpbkit.runs.plan import make_plan
from cpbkit.runs.sweep import prepare
from cpbkit.runs.worker import Checkpoint, Job, Result, work
from cpbkit.training.checkpoint import load
from cpbkit.windows.splits import folds, split

QUICK = vary(PRESETS["quick"], context=8, horizon=2, width=4, epochs=3, steps=15, batch=32, patience=1)
SERIES = walk("AUSDT_15m", 900, phi=0.5), walk("BUSDT_15m", 700, gap_at=300)


def results(experiment, series=SERIES, checkpoint=None):
    job = Job("all", experiment, tuple(series), checkpoint=checkpoint)
    return {message.line.series: message for message in work(job) if isinstance(message, Result)}


def untimed(found):
    return {name: dataclasses.replace(one.line, seconds=0.0) for name, one in found.items()}


def test_folds_of_a_stack_are_refits_alone():
    experiment = vary(QUICK, folds=3)
    found = results(experiment)
    for series in SERIES:
        parts = folds(experiment.task, 3)
        alone = judge_folds(series, parts, refit(vary(QUICK, epochs=3)))["price"]
        message = found[series.name]
        together = judgements([message.line])["price"][series.name]
        assert together.windows == alone.windows == message.line.windows["test"]
        assert together.rmse == pytest.approx(alone.rmse, rel=1e-4)
        assert together.best_baseline == alone.best_baseline
        times = from_bytes(message.losses)["price"].times
        assert len(times) == together.windows and (np.diff(times) > 0).all()
        spans = message.line.folds
        assert len(spans) == 3 and message.line.dates["test"] == [spans[0]["test"][0], spans[2]["test"][1]]
        for before, after in itertools.pairwise(spans):
            assert before["train"][0] == after["train"][0]
            assert before["test"][1] < after["test"][0] and before["train"][1] < after["train"][1]


def test_the_model_that_is_kept_is_that_of_the_newest_bars():
    once, thrice = (results(vary(QUICK, folds=count)) for count in (1, 3))
    for name in once:
        (newest, about), (several, _) = load(once[name].model), load(thrice[name].model)
        for key, tensor in newest.items():
            np.testing.assert_allclose(several[key], tensor, atol=1e-5)
        assert about["series"] == name
        assert once[name].line.dates["train"] == thrice[name].line.dates["train"]
        assert not once[name].line.folds


def test_folds_that_ended_wait_in_the_checkpoint_for_the_others(monkeypatch):
    experiment = vary(QUICK, folds=2, epochs=6)
    whole = results(experiment)
    monkeypatch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "CHECKPOINT_SHARE", 1e9)
    messages = list(work(Job("all", experiment, SERIES)))
    saved = [message.content for message in messages if isinstance(message, Checkpoint)]
    middle = saved[len(saved) // 2]
    resumed = untimed(results(experiment, checkpoint=middle))
    assert resumed and resumed.items() <= untimed(whole).items()
    assert untimed({m.line.series: m for m in messages if isinstance(m, Result)}) == untimed(whole)


def test_a_fold_too_many_is_refused_before_anything_is_fetched():
    with pytest.raises(CpbkitError, match=r"5 folds of 15% of the bars leave the first too little .* at most 4"):
        vary(QUICK, folds=5)
    assert vary(QUICK, folds=4).training.folds == 4
    with pytest.raises(CpbkitError, match="folds must be at least 1; got 0"):
        vary(QUICK, folds=0)


def test_a_series_whose_first_fold_has_no_window_fails_alone(monkeypatch):
    monkeypatch.setattr("cpbkit.runs.sweep.to_series", lambda series, task: series)
    experiment = Experiment(
        data=vary(QUICK, symbols=("AUSDT", "BUSDT"), intervals=("15m",)).data, task=Task(context=40)
    )
    experiment = vary(experiment, folds=3)
    series, failed = prepare(experiment, {"AUSDT_15m": SERIES[0], "BUSDT_15m": walk("BUSDT_15m", 300)})
    assert list(series) == ["AUSDT_15m"] and "at least 8 windows" in failed["BUSDT_15m"]


def scaled(series, name, factor):
    columns = {column: factor * getattr(series, column) for column in ("inputs", "levels", "anchors")}
    return dataclasses.replace(series, name=name, **columns)


@pytest.mark.parametrize("preset", ["ridge_ar", "quick"])
def test_one_model_of_two_scales_of_one_series_is_that_of_the_series(preset):
    experiment = vary(PRESETS[preset], context=8, horizon=2, targets=("close",), target_weights=(1.0,), pooled=True)
    experiment = vary(experiment, steps=2, epochs=1)
    pair = SERIES[0], scaled(SERIES[0], "CUSDT_15m", 7.0)
    found = results(experiment, pair)
    (first, _), (second, about) = (load(found[one.name].model) for one in pair)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert about["scaler"]["target_scale"][0] == pytest.approx(
        7 * load(found["AUSDT_15m"].model)[1]["scaler"]["target_scale"][0]
    )
    a, c = (judgements([found[one.name].line])["price"][one.name] for one in pair)
    assert a.skill == pytest.approx(c.skill, abs=1e-4) and c.rmse == pytest.approx(7 * a.rmse, rel=1e-4)
    if preset == "ridge_ar":
        (alone, _) = load(results(vary(experiment, pooled=False), pair[:1])["AUSDT_15m"].model)
        for name in alone:
            np.testing.assert_allclose(first[name], alone[name], rtol=1e-4, atol=1e-6)


def test_one_model_sees_the_windows_of_all_series_and_is_planned_as_one_stack():
    experiment = vary(QUICK, pooled=True, steps=0)
    series = {one.name: one for one in SERIES}
    plan = make_plan(experiment, series, workers=2)
    counts = [len(split(one, experiment.task).train) for one in SERIES]
    assert plan.jobs == [list(series)] and len(plan.devices) == 1
    assert plan.steps == -(-sum(counts) // 32)
    assert plan.reason.startswith("one model for all 2 series")
    found = untimed(results(vary(QUICK, pooled=True, folds=2)))
    a, b = found["AUSDT_15m"], found["BUSDT_15m"]
    assert a.curve == b.curve and a.persistence == b.persistence and a.test != b.test
    assert len(a.folds) == 2


def test_a_person_asks_for_folds_and_for_one_model(tmp_path):
    given = {"source": "synthetic", "symbols": ("BTCUSDT", "ETHUSDT"), "intervals": ("1h",), "quiet": True}
    given |= {"start": "2025-01-01", "end": "2025-01-14", "epochs": 1, "width": 4, "context": 8, "executor": "local"}
    run = cpb.sweep("quick", folder=tmp_path / "run", folds=2, pooled=True, **given)
    assert len(run.verdicts().table) == 2
    assert set(run.forecast()) == {"BTCUSDT_1h", "ETHUSDT_1h"}
    assert run.experiment.training.folds == 2 and run.experiment.training.pooled
    assert all(len(line.folds) == 2 for line in run.results)
