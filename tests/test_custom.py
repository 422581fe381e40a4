"""Anybody's own network trains in a stack, together or one by one, as it does alone."""

import dataclasses

import pytest
import torch
from conftest import walk
from torch import nn

from cpbkit.config.experiment import Model, Task, Training
from cpbkit.errors import CpbkitError
from cpbkit.models import custom, zoo
from cpbkit.training.loop import Fit, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.windows import Windows

TASK = Task(context=8, horizon=3)


class Dense(nn.Module):
    """Layers that torch.func can stack."""

    def __init__(self, task, settings):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(32, settings.width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(settings.width, 3)
        )

    def forward(self, x):
        return self.layers(x)[..., None]


class Recurrent(nn.Module):
    """A layer that torch.func cannot stack."""

    def __init__(self, task, settings):
        super().__init__()
        self.gru = nn.GRU(4, settings.width, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(settings.width, 3)

    def forward(self, x):
        return self.head(self.drop(self.gru(x)[0][:, -1]))[..., None]


class Attending(nn.Module):
    """A layer that torch.func stacks on a GPU, and on a CPU with a loop of its own."""

    def __init__(self, task, settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, -1])[..., None]


class Normed(nn.Module):
    def __init__(self, task, settings):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.norm(x).flatten(1))[..., None]


class Tied(nn.Module):
    def __init__(self, task, settings):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight


class Flat(Dense):
    def forward(self, x):
        return self.layers(x)


def settings(kind, stacked=False):
    return Model(name=f"{__name__}:{kind.__name__}", width=6, stacked=stacked)


def train(model, series):
    training = Training(
        epochs=10, batch=4, learning_rate=0.005, patience=2, clip_norm=0.5, schedule="cosine", precision="float64"
    )
    windows = Windows(series, TASK, "cpu", torch.float64)
    names = [s.name for s in series]
    stack = Stack(lambda models: zoo.build(models, TASK, model), names, training, "cpu", torch.float64)
    return {f.name: f for s in fit(Fit(stack), windows, training, 5) if not s.step for f in s.finished}


@pytest.mark.parametrize("kind, stacked", [(Dense, True), (Dense, False), (Recurrent, False)])
def test_an_own_network_trains_in_a_stack_as_it_does_alone(kind, stacked):
    series = [walk(f"S{i}", 140 + 20 * i, seed=i, phi=0.4 * i) for i in range(3)]
    together = train(settings(kind, stacked), series)
    assert len({f.epochs for f in together.values()}) > 1, "some must leave early for this to say anything"
    for one in series:
        alone, other = train(settings(kind, stacked), [one])[one.name], together[one.name]
        assert (alone.epochs, alone.best_epoch, alone.status) == (other.epochs, other.best_epoch, "done")
        for tensor, weights in alone.weights.items():
            torch.testing.assert_close(weights, other.weights[tensor], rtol=1e-10, atol=1e-10)


def test_stacked_and_one_by_one_are_the_same_training():
    series = [walk(f"S{i}", 140 + 20 * i, seed=i) for i in range(2)]
    ways = [train(settings(Dense, stacked), series) for stacked in (True, False)]
    for name, finished in ways[0].items():
        for tensor, weights in finished.weights.items():
            torch.testing.assert_close(weights, ways[1][name].weights[tensor], rtol=1e-9, atol=1e-9)


def test_the_forecast_is_that_of_the_network_alone():
    net = zoo.build(3, TASK, settings(Recurrent)).double().eval()
    single = Recurrent(TASK, settings(Recurrent)).double().eval()
    x = torch.randn(3, 5, 8, 4).double()
    single.load_state_dict({name.removeprefix("net."): p.detach()[1] for name, p in net.named_parameters()})
    torch.testing.assert_close(net(x, x[:, :, -1, :1])[1], single(x[1]))


def test_a_network_that_torch_func_cannot_stack_runs_one_by_one_and_the_reason_is_said():
    model, why = zoo.try_out(TASK, settings(Recurrent), 3, 4, torch.device("cpu"))
    assert not model.stacked and why.startswith("one by one: torch.func cannot stack it (")
    assert dataclasses.replace(model, stacked=False) == settings(Recurrent)


@pytest.mark.parametrize("fast", [True, False])
def test_a_timed_trial_decides_where_both_ways_work(monkeypatch, fast):
    monkeypatch.setattr(custom, "_milliseconds", lambda net, x: 1.0 if net.stacked == fast else 2.0)
    model, why = zoo.try_out(TASK, settings(Dense), 3, 4, torch.device("cpu"))
    assert model.stacked == fast
    assert why == (
        "stacked by torch.func: 1.00 ms a step of 3 models instead of 2.00 ms"
        if fast
        else "one by one: 1.00 ms a step of 3 models, 2.00 ms when stacked by torch.func"
    )


def test_the_trial_tells_slow_from_fast_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    model, why = zoo.try_out(TASK, settings(Dense), 40, 2, torch.device("cpu"))
    assert model.stacked, why  # forty tiny networks one by one are mostly overhead
    assert torch.equal(before, torch.get_rng_state())
    _, why = zoo.try_out(TASK, settings(Attending), 3, 4, torch.device("cpu"))
    assert "torch.func" in why


def test_networks_of_the_zoo_need_no_trial():
    assert zoo.try_out(TASK, Model(), 3, 4, torch.device("cpu")) == (Model(), "")


@pytest.mark.parametrize(
    "kind, message",
    [
        (Normed, "Normed also changes its buffer norm.running_mean in training. Take LayerNorm"),
        (Tied, "Tied ties some"),
        (Flat, r"to \(batch, horizon, targets\) = \(4, 3, 1\); got \(4, 3\)"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(kind, message):
    with pytest.raises(CpbkitError, match=message):
        zoo.try_out(TASK, settings(kind), 3, 4, torch.device("cpu"))


@pytest.mark.parametrize("name", ["nowhere:Net", f"{__name__}:Nothing", "mynets.Net:"])
def test_a_network_that_is_not_there_is_named(name):
    with pytest.raises(CpbkitError, match=r"named module:name or file\.py:name"):
        zoo.build(1, TASK, Model(name=name))


class OnlyApart(Dense):
    """Not finite where torch.func stacks it, as an operator without a rule of its own may be."""

    def forward(self, x):
        stacked = torch._C._functorch.is_batchedtensor(self.layers[1].weight)
        return super().forward(x) * (torch.nan if stacked else 1.0)


def test_a_network_that_only_stacking_breaks_is_computed_one_by_one():
    stacked, why = custom.try_out(lambda: OnlyApart(TASK, Model(width=4)), torch.randn(2, 8, 8, 4), 3, 1)
    assert not stacked and why == "one by one: stacked by torch.func it computes something else"
