"""Each planted sickness shows in its own row of the health table, and a sound training in none."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import walk

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation import training_checks
from cpbkit.evaluation.results import relative
from cpbkit.runs import sweep
from cpbkit.runs.worker import Job, Result, work
from cpbkit.training.loop import mean_losses
from cpbkit.windows.splits import split
from cpbkit.windows.windows import Windows

QUICK = vary(PRESETS["quick"], context=10, horizon=2, epochs=4, steps=40, schedule="constant", patience=4)


def checks(series, **settings):
    """Train the series as a sweep does; return {check: (verdict, evidence)}."""
    job = Job("job", vary(QUICK, **settings), (series,))
    lines = [message.line for message in work(job) if isinstance(message, Result)]
    return {check.check: (check.verdict, check.evidence) for check in training_checks.check_results(lines)}


def wrong(found):
    return {check: verdict for check, (verdict, _) in found.items() if verdict != "OK"}


def sound(bars=1500):
    return walk("S", bars, phi=0.6)


def test_a_sound_training_has_no_other_row_than_ok():
    found = checks(sound())
    assert wrong(found) == {}
    assert set(found) == {"finite", "target scale", "first loss", "learns", "holds", "gradient", "output price"}
    assert "persistence 1, mean " in found["first loss"][1]


@pytest.mark.parametrize("times", [1e6, 1e-3])
def test_unscaled_targets(times):
    series = dataclasses.replace(sound(), unit="bit/s")
    for column in (series.levels, series.anchors):
        column *= times
    found = checks(series, target_scale="none")
    assert found["target scale"][0] == ("SICK" if times > 1 else "NOTE")
    assert "scale them" in found["target scale"][1]
    assert found["output price" if times > 1 else "first loss"][0] != "OK"
    assert checks(series)["target scale"][0] == "OK"


def test_a_dead_output():
    found = checks(sound(), name="cpbkit.runs.planted:Dead")
    assert found["gradient"] == ("SICK", "no gradient reaches the weights")
    assert found["output price"] == ("SICK", "every forecast of price is the same")
    assert {found[check][0] for check in ("finite", "target scale", "first loss")} == {"OK"}


def test_shuffled_targets_leave_nothing_that_holds():
    series = sound()
    shuffled = np.random.default_rng(0).permutation(np.diff(series.levels, axis=0, prepend=0.0)).cumsum(axis=0)
    series.levels[:], series.anchors[:] = shuffled, shuffled
    found = checks(series)
    assert found["holds"][0] == "NOTE"
    assert "SICK" not in wrong(found).values() and found["target scale"][0] == found["first loss"][0] == "OK"


def test_a_collapsed_output_is_noted():
    found = checks(sound(), learning_rate=1e-7)
    assert found["output price"][0] == "NOTE"
    assert found["first loss"][0] == found["gradient"][0] == "OK"


def backwards(forecast, truth):
    return -(forecast - truth).square().mean((-1, -2))


def test_a_loss_of_the_wrong_sign():
    found = checks(sound(), loss=f"{__name__}:backwards", learning_rate=1e-2)
    assert found["first loss"][0] == found["learns"][0] == "OK"
    assert found["error price"][0] == "SICK" and "the sign of an own loss wrong?" in found["error price"][1]


def test_an_exploding_learning_rate():
    found = checks(sound(), learning_rate=30.0)
    assert found["first loss"][0] == "SICK" and found["target scale"][0] == "OK"
    found = checks(sound(), learning_rate=1e38, clip_norm=0.0)
    assert found["finite"][0] == "SICK" and "was not finite" in found["finite"][1]


def test_not_a_number_in_the_data_is_named():
    series = sound()
    series.inputs[:200] = np.nan
    found = checks(series)
    assert found["finite"][0] == "SICK" and found["finite"][1].endswith("first bad: the scaled inputs")


def test_a_solved_model_needs_no_gradient():
    found = checks(sound(), name="ridge_ar", epochs=1, steps=1)
    assert found["gradient"] == ("OK", "solved, or trained elsewhere")


def test_a_ledger_of_an_older_version_is_read():
    line = next(m.line for m in work(Job("job", QUICK, (sound(600),))) if isinstance(m, Result))
    line = dataclasses.replace(line, mean={})
    assert {"first loss", "holds"} <= {check.check for check in training_checks.check_results([line])}


def test_the_loss_of_the_mean_is_that_of_the_train_mean():
    series = [walk("A", 400, horizon_targets=4), walk("B", 300, seed=1, horizon_targets=4)]
    task = vary(QUICK, targets=("open", "high", "low", "close"), target_weights=(1.0, 1.0, 1.0, 3.0)).task
    windows = Windows(series, task, "cpu", torch.float64)
    losses = mean_losses(windows)
    for m, one in enumerate(series):
        splits = split(one, task)
        truths = {
            p: one.truth(getattr(splits, p), 2) / windows.scalers[m].target_scale for p in ("train", "validation")
        }
        for part, truth in truths.items():
            errors = ((truth - truths["train"].mean(axis=0)) ** 2).mean(axis=(0, 1))
            assert losses[one.name][part] == pytest.approx(errors @ np.array([1, 1, 1, 3]) / 6)


def test_made_up_bars_are_trained_without_a_sick_row(tmp_path):
    bars = {"source": "synthetic", "symbols": ("BTCUSDT",), "intervals": ("1h",), "start": "2025-01-01"}
    results = sweep.sweep(vary(PRESETS["quick"], **bars, end="2025-01-31", epochs=2), tmp_path, executor="local")
    assert not [check for check in training_checks.check_results(results) if check.verdict == "SICK"]


def test_what_is_not_sound_is_told_beside_the_verdicts():
    job = Job("job", vary(QUICK, name="cpbkit.runs.planted:Dead"), (sound(),))
    dead = [message.line for message in work(job) if isinstance(message, Result)]
    said = training_checks.tell_unsound(dead)
    assert said.startswith("Not trained soundly: 1 of 1 model (S: gradient: no gradient reaches the weights)")
    assert training_checks.tell_unsound([dataclasses.replace(dead[0], status="sick")]) == ""


def test_a_loss_that_is_0_of_persistence_is_no_scale():
    job = Job("job", QUICK, (sound(),))
    (line,) = [message.line for message in work(job) if isinstance(message, Result)]
    odd = dataclasses.replace(line, persistence=dict.fromkeys(line.persistence, 0.0))
    found = {check.check: check.verdict for check in training_checks.check_results([odd])}
    assert found["first loss"] == "OK" and found["target scale"] == "NOTE"
    below = dataclasses.replace(line, persistence=dict.fromkeys(line.persistence, -1.0), curve={"train": [-1.0] * 3})
    found = {check.check: check.verdict for check in training_checks.check_results([below])}
    assert found["learns"] == "NOTE" and "target scale" not in found
    drawn = relative(odd, "validation")
    assert np.isfinite(drawn).all() and drawn == pytest.approx(1 + np.array(line.curve["validation"]))
