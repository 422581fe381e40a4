"""Training: a stack equals its members alone, an oracle written with torch's own parts, and itself after a resume."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import walk
from torch import nn

from cpbkit.config.experiment import OHLC, Model, Task, Training, derive_seed
from cpbkit.errors import CpbkitError, RunError
from cpbkit.models import zoo
from cpbkit.training import checkpoint, loop
from cpbkit.training.loop import Fit, evaluate, fit, forecast, loss_per_model, persistence_losses
from cpbkit.training.stack import Stack
from cpbkit.windows.series import Series
from cpbkit.windows.windows import Windows

TASK = Task(context=10, horizon=3, targets=OHLC, target_weights=(1.0, 1.0, 1.0, 2.0))
MODEL = Model(name="gru", width=6, layers=2, dropout=0.3)
TRAINING = Training(epochs=6, batch=8, learning_rate=0.02, schedule="plateau", schedule_epochs=1, patience=2)
TRAINING = dataclasses.replace(TRAINING, teacher_forcing=0.5, clip_norm=0.5, weight_decay=0.01, precision="float64")
STEPS = 5


def some_series(count=4):
    return [walk(f"S{i}", 300 + 40 * i, seed=i, horizon_targets=4) for i in range(count)]


def start(series, training=TRAINING, task=TASK, model=MODEL, dtype=torch.float64):
    windows = Windows(series, task, "cpu", dtype)
    names = [s.name for s in series]
    return windows, Fit(Stack(lambda models: zoo.build(models, task, model), names, training, "cpu", dtype))


def run(series, training=TRAINING, **kwargs):
    windows, state = start(series, training, **kwargs)
    return {f.name: f for state in fit(state, windows, training, STEPS) if not state.step for f in state.finished}


def assert_same(a, b, tolerance):
    assert (a.status, a.epochs, a.best_epoch) == (b.status, b.epochs, b.best_epoch)
    for name, tensor in a.weights.items():
        torch.testing.assert_close(tensor, b.weights[name], rtol=tolerance, atol=tolerance)
    for curve, values in a.curve.items():
        np.testing.assert_allclose(values, b.curve[curve], rtol=tolerance or 0, atol=tolerance)


def test_a_stack_trains_each_model_as_if_it_were_alone():
    series = some_series()
    together = run(series)
    assert len({f.epochs for f in together.values()}) > 1, "some must leave before others for this to say anything"
    for one in series:
        assert_same(run([one])[one.name], together[one.name], 1e-10)


def test_the_engine_equals_a_plain_loop_with_torch_optim():
    series = some_series(1)
    training = dataclasses.replace(TRAINING, teacher_forcing=0.0, schedule="step", schedule_epochs=2, epochs=3)
    model = dataclasses.replace(MODEL, dropout=0.0)
    ours = run(series, training, model=model)["S0"]

    windows = Windows(series, TASK, "cpu", torch.float64)
    torch.manual_seed(derive_seed("weights", training.seed, "S0"))
    net = zoo.build(1, TASK, model).double()
    rate = float(np.float32(training.learning_rate))  # the engine keeps rates in float32
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    weights = torch.tensor(TASK.target_weights).double() / 5
    best, kept = float("inf"), None
    for epoch in range(3):
        order = windows.order([0], training.seed, epoch, STEPS * 8).unflatten(1, (STEPS, 8))
        for i in range(STEPS):
            x, last, y = windows.gather(order[:, i])
            optimizer.zero_grad()
            ((net(x, last) - y).square() * weights).sum(-1).mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), training.clip_norm)
            optimizer.step()
        schedule.step()
        x, last, y = windows.gather(windows.origins["validation"][0][None])
        with torch.no_grad():
            validation = ((net.eval()(x, last) - y).square() * weights).sum(-1).mean().item()
        net.train()
        if validation < best:
            best, kept = validation, {k: v.detach()[0].clone() for k, v in net.named_parameters()}
    assert min(ours.curve["validation"]) == pytest.approx(best, rel=1e-9)
    for name, tensor in kept.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-8, atol=1e-9)


def test_one_sick_model_leaves_alone_and_the_others_do_not_change_by_a_bit():
    series = some_series()
    clean = run(series)
    sick = series[1]
    inputs = sick.inputs.copy()
    inputs[100] = np.nan
    broken = {name: getattr(sick, name) for name in sick.__dataclass_fields__ if name != "segment"}
    with np.errstate(invalid="ignore"):
        series[1] = Series(**{**broken, "inputs": inputs})
        windows, state = start(series)
        windows.inputs[600:] = start(some_series())[0].inputs[600:]
    spoiled = {f.name: f for s in fit(state, windows, TRAINING, STEPS) if not s.step for f in s.finished}
    assert spoiled["S1"].status == "sick" and spoiled["S1"].reason.endswith("in epoch 1; first bad: the scaled inputs")
    for name in ("S0", "S2", "S3"):
        assert_same(spoiled[name], clean[name], 0.0)


@pytest.mark.parametrize("stop_at", [1, 3, 5, 8, 13])
def test_a_resumed_training_ends_bit_equal(stop_at):
    training = dataclasses.replace(TRAINING, precision="float32")
    series = some_series()
    whole = run(series, training, dtype=torch.float32)
    windows, state = start(series, training, dtype=torch.float32)
    ended = {}
    for count, now in enumerate(fit(state, windows, training, STEPS), start=1):
        ended |= {f.name: f for f in now.finished if not now.step}
        if count == stop_at:
            saved = checkpoint.save_fit(now, {})
            break
    torch.manual_seed(99)
    state = checkpoint.load_fit(start(series, training, dtype=torch.float32)[1].stack, saved, {})
    for now in fit(state, windows, training, STEPS):
        ended |= {f.name: f for f in now.finished if not now.step}
    assert ended.keys() == whole.keys()
    for name in whole:
        assert_same(ended[name], whole[name], 0.0)


def test_damaged_checkpoint_bytes_are_refused():
    _, state = start(some_series(1))
    saved = checkpoint.save_fit(state, {"A": "1"})
    assert checkpoint.load_fit(state.stack, saved, {"A": "2"}) is None, "of other data"
    with pytest.raises(RunError, match="no model or checkpoint"):
        checkpoint.load_fit(state.stack, saved[: len(saved) // 2], {"A": "1"})


def test_an_untrained_model_is_persistence():
    windows, state = start(some_series(2))
    untrained = forecast(state.stack.net, windows, "test", [0, 1])
    assert all((f == 0).all() for f in untrained)
    first = evaluate(state.stack.net, windows, "validation", [0, 1]).tolist()
    losses = persistence_losses(windows)
    assert first == pytest.approx([losses[name]["validation"] for name in windows.names])
    assert [losses[name]["train"] for name in windows.names] == pytest.approx([1.0, 1.0])


def test_evaluation_never_sees_the_targets():
    windows, state = start(some_series(2))
    for _ in itertools.islice(fit(state, windows, TRAINING, STEPS), 2 * STEPS):
        pass
    before = forecast(state.stack.net, windows, "test", [0, 1])[0]
    first = int(windows.origins["test"][0][0])
    windows.levels[first + 1 : len(windows.series[0])] = float("nan")
    after = forecast(state.stack.net, windows, "test", [0, 1])[0]
    assert (before[0] == after[0]).all()


def test_a_forecast_of_another_shape_is_refused():
    with pytest.raises(CpbkitError, match=r"shape of the truth .* got \(2, 5, 4\)"):
        loss_per_model(torch.zeros(2, 5, 4), torch.zeros(2, 5, 1, 4), torch.ones(4))


@pytest.mark.parametrize("delta", [0.0, 1e-4])
def test_a_plateau_lowers_the_rate_when_torchs_does(delta):
    """Losses that creep down by less than the delta are no improvement to the schedule, and still the best weights."""
    training = dataclasses.replace(TRAINING, schedule_epochs=2, schedule_delta=delta, min_learning_rate=1e-3)
    stack = Stack(lambda models: zoo.build(models, TASK, MODEL), ["A"], training, "cpu", torch.float64)
    Fit(stack)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=2, threshold=delta, threshold_mode="abs", min_lr=1e-3
    )
    losses = [1.0, 0.9, *(0.9 - 2e-5 * i for i in range(1, 12)), 0.5, *[0.6] * 9]
    rates = []
    for epoch, loss in enumerate(losses, start=1):
        loop._judge_epoch(stack, training, torch.tensor([loss], dtype=torch.double), epoch)
        theirs.step(loss)
        rates.append(stack.table["learning_rate"].item())
        assert rates[-1] == pytest.approx(optimizer.param_groups[0]["lr"]), epoch
    assert stack.table["best_epoch"].item() == 14 and len(set(rates[:13])) == (3 if delta else 1)
