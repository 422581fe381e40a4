"""Presets: each is what its source says, and trains in a stack as it does alone."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT
from torch import nn

from cpbkit import indicators
from cpbkit.bench import twins
from cpbkit.config.experiment import Task, from_json, to_json, vary
from cpbkit.config.presets import NETWORK, PRESETS, TRAINED
from cpbkit.models import zoo
from cpbkit.training.loop import Fit, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.series import TARGETS, Series
from cpbkit.windows.windows import Windows

COUNTS = {
    "transformer": 926_852 + (4 + 1) * 128,  # the source's, and an own input layer of the decoder
    "gru": 334_597 - 1,  # the source's, less the bias under its softmax
    "gru_dense": 3 * 128 * (4 + 128 + 2 + 128 + 128 + 2) + 129 * 10 * 4,
    "seq2seq_lstm": 1_984_772,
    "forced_lstm": 1_980_676,
    "v7_classic": 359_559 - 2 * 2 * 4 * 128,  # the source's (in torch), less two columns that came twice, each way
    "v8_aligned": 359_559 - 2 * 2 * 4 * 128,
    "v7_seed": 1_414_948 + 2 * 4 * (256 + 128 + 64) + 4 * 32,  # the source's in Keras, and torch's second bias
    "v8_stable": 1_414_948 + 2 * 4 * (256 + 128 + 64) + 4 * 32,
    # No count of the source is known that its description gives: two layers of LSTM, then 128-64-32-1.
    "bandwidth": 4 * 128 * (6 + 128 + 2) + 4 * 128 * (128 + 128 + 2) + 129 * 64 + 65 * 32 + 33,
    "nlinear": 337 * 10,
    "dlinear": 2 * 337 * 10,
    "ridge_ar": (48 * 4 + 1) * 10 * 4,
    "chronos": 0,
    "segrnn": 25 * 512 + 2 * 3 * 512 * (512 + 1) + 2 * 256 + 513 * 24,
    "quick": 3 * 16 * (4 + 16 + 2) + 3 * 16 * (1 + 16 + 2) + 16 + 33 * 16 + 17,
}


def count(task, model):
    return sum(parameter.numel() for parameter in zoo.build(1, task, model).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    preset = PRESETS[name]
    assert count(preset.task, preset.model) == COUNTS[name]


def segrnn(net, x, last):
    """Channel by channel and segment by segment: torch's GRU, then one more step of it from each place."""
    gru = nn.GRU(net.rnn.width, net.rnn.width, batch_first=True).double()
    load_gru(gru, net.rnn)
    past = (x - x[:, -1:]).transpose(1, 2)[:, 0]  # of its one channel (B, L)
    embedded = nn.functional.linear(past.unflatten(1, (-1, 24)), net.embed.weight[0].T, net.embed.bias[0, 0])
    _, state = gru(embedded.relu())
    parts = []
    for place in net.place[0, 0]:
        out, _ = gru(torch.cat([place, net.channel[0, 0, 0]]).expand(len(x), 1, -1), state)
        parts.append(nn.functional.linear(out[:, 0], net.head.weight[0].T, net.head.bias[0, 0]))
    return torch.cat(parts, 1)[:, : net.horizon, None]


def load_gru(gru, ours):
    for theirs, layer in (("ih", ours.input[0]), ("hh", ours.hidden[0])):
        getattr(gru, f"weight_{theirs}_l0").data.copy_(layer.weight[0].T)
        getattr(gru, f"bias_{theirs}_l0").data.copy_(layer.bias[0, 0])


def ridge_ar(net, x, last):
    return (x.flatten(1) @ net.map.weight[0] + net.map.bias[0]).unflatten(1, (-1, last.shape[-1]))


def forced_lstm(net, preset):
    """Return what torch's LSTM calls the weights of the gate by gate one; its second bias is zero."""
    tensors = {name: tensor[0] for name, tensor in net.named_parameters()}
    for coder in ("encoder", "decoder"):
        for layer in range(preset.model.layers):
            for side in ("input", "hidden"):
                place = f"{coder}.{side}.{layer}"
                tensors[f"{place}.weight"] = torch.cat([tensors.pop(f"{place}.{gate}.weight") for gate in range(4)], 1)
            biases = [tensors.pop(f"{coder}.hidden.{layer}.{gate}.bias") for gate in range(4)]
            tensors[f"{coder}.hidden.{layer}.bias"] = torch.cat(biases, 1)
            tensors[f"{coder}.input.{layer}.bias"] = torch.zeros_like(torch.cat(biases, 1))
    return tensors


@pytest.mark.parametrize("name", TRAINED)
def test_a_preset_computes_what_plain_torch_does_with_its_weights(name):
    """At the preset's own size, without dropout; the twins are written from the sources, with torch.nn alone."""
    preset = vary(PRESETS[name], dropout=0.0)
    task, model = preset.task, preset.model
    torch.manual_seed(0)
    net = zoo.build(1, task, model).double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 3, task.context, len(task.features), dtype=torch.double)
    y = torch.randn(1, 3, task.horizon, len(task.targets), dtype=torch.double)
    mixed = torch.rand(task.horizon) < 0.5
    with torch.no_grad():
        for draws in (mixed, torch.ones_like(mixed)):
            got = net(x, y[:, :, 0], (y, draws))[0]
            if model.name in (by_hand := {"segrnn": segrnn, "ridge_ar": ridge_ar}):
                want = by_hand[model.name](net, x[0], y[0, :, 0])
            else:
                twin = twins.TWINS[model.name.removeprefix("forced_")](task, model).double().eval()
                tensors = {name: tensor[0] for name, tensor in net.named_parameters()}
                twins.load(twin, forced_lstm(net, preset) if model.name == "forced_lstm" else tensors)
                want = twin(x[0], y[0, :, 0], y[0], draws.tolist())
            assert want.std() > 1e-3
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def setting(preset, name):
    """Return a setting as docs/presets.md writes it."""
    if name == "channels":
        return str(len(preset.task.features))
    parts = (preset.task, preset.model, preset.training)
    (value,) = [getattr(part, name) for part in parts if hasattr(part, name)]
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)


def test_the_page_of_presets_says_what_the_presets_are():
    """Every preset has its section, and every number in the column `here` is the preset's."""
    told = {}
    for section in (ROOT / "docs" / "presets.md").read_text().split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
        told[name] = {row[0]: row[2].strip() for row in rows}
        assert "Source: " in text
    assert set(told) == set(PRESETS)
    for name, rows in told.items():
        assert rows == {key: setting(PRESETS[name], key) for key in rows}, name
    assert sum(map(len, told.values())) > 150


def test_parameter_count_of_dlinear_in_its_paper():
    """Table 8 of Zeng et al. gives 139.7 thousand for 96 values to 720."""
    task = Task(context=96, horizon=720, features=("x",), targets=("x",))
    assert count(task, PRESETS["dlinear"].model) == 139_680


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_knows_its_name_its_columns_and_the_way_to_json_and_back(name):
    preset = PRESETS[name]
    assert preset.preset == name
    assert from_json(to_json(preset)) == preset
    if preset.task.features != NETWORK:
        assert set(preset.task.features) <= set(indicators.INDICATORS)
        assert set(preset.task.targets) <= set(TARGETS)


@pytest.mark.parametrize("name", PRESETS)
def test_no_feature_of_a_preset_says_what_another_says(name):
    """The source had two columns twice and two that were four times another."""
    features = PRESETS[name].task.features
    if features == NETWORK:
        return
    rng = np.random.default_rng(0)
    close = 100 * np.exp(np.cumsum(rng.standard_t(4, 3000) * 0.01))
    opened = close * np.exp(rng.normal(0, 0.003, 3000))
    wick = np.exp(np.abs(rng.normal(0, 0.004, (3000, 2))))
    bars = {"open": opened, "high": np.maximum(opened, close) * wick[:, 0]}
    bars |= {"low": np.minimum(opened, close) / wick[:, 1], "close": close, "volume": rng.lognormal(0, 1, 3000)}
    frame = pd.DataFrame(bars, index=pd.date_range("2025-01-01", periods=3000, freq="15min", tz="UTC"))
    table = indicators.compute(frame, features).dropna()
    likeness = np.abs(np.atleast_2d(np.corrcoef(table.to_numpy().T))) - np.eye(len(features))
    assert likeness.max() < 0.99


def some_series(name, bars, task, seed):
    rng = np.random.default_rng(seed)
    levels = np.cumsum(rng.normal(size=(bars, len(task.targets))), 0)
    return Series(
        name=name,
        times=np.datetime64("2025-01-01", "ns") + np.arange(bars) * np.timedelta64(900, "s"),
        step_seconds=900,
        inputs=rng.normal(size=(bars, len(task.features))),
        features=task.features,
        levels=levels,
        anchors=levels,
        targets=task.targets,
        heads=("price",) * len(task.targets),
    )


def train(experiment, series):
    task, training, names = experiment.task, experiment.training, [s.name for s in series]
    windows = Windows(series, task, "cpu", torch.float64)
    stack = Stack(lambda models: zoo.build(models, task, experiment.model), names, training, "cpu", torch.float64)
    return {f.name: f for s in fit(Fit(stack), windows, training, 5) if not s.step for f in s.finished}


@pytest.mark.parametrize("name", TRAINED)
def test_a_preset_trains_in_a_stack_as_it_does_alone(name):
    """50 steps of its own optimiser and schedule with dropout, teacher forcing, both clips and early stops."""
    preset = PRESETS[name]
    experiment = vary(
        preset,
        width=16 if preset.model.name == "bilstm_dense" else 8,
        heads=2,
        dropout=0.3,
        context=8,
        train=0.7,
        validation=0.15,
        horizon=min(3, preset.task.horizon),
        epochs=10,
        batch=4,
        learning_rate=0.02,
        schedule_epochs=2,
        patience=3,
        clip_norm=0.5,
        clip_value=0.2,
        teacher_forcing=0.5,
        precision="float64",
    )
    series = [some_series(f"S{i}", 140 + 20 * i, experiment.task, i) for i in range(3)]
    together = train(experiment, series)
    one = series[1]
    alone, other = train(experiment, [one])[one.name], together[one.name]
    assert (alone.epochs, alone.best_epoch, alone.status) == (other.epochs, other.best_epoch, "done")
    for tensor, weights in alone.weights.items():
        torch.testing.assert_close(weights, other.weights[tensor], rtol=1e-10, atol=1e-10)
    for curve, values in alone.curve.items():
        assert values == pytest.approx(other.curve[curve], rel=1e-10, abs=1e-12)


def test_always_teaching_trains_like_a_coin_that_always_falls():
    experiment = vary(PRESETS["transformer"], width=8, heads=2, context=10, horizon=3, epochs=2, batch=4, dropout=0.0)
    series = [some_series("S", 200, experiment.task, 0)]
    always = train(vary(experiment, teacher_forcing=1.0, precision="float64"), series)["S"]
    nearly = train(vary(experiment, teacher_forcing=1 - 1e-12, precision="float64"), series)["S"]
    for tensor, weights in always.weights.items():
        torch.testing.assert_close(weights, nearly.weights[tensor], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale, loss", [("persistence", 1.0), ("standard", None), ("none", None)])
def test_target_scale(scale, loss):
    task = Task(context=10, horizon=3, features=("x",), targets=("y",), target_scale=scale)
    series = some_series("S", 400, task, 0)
    series = dataclasses.replace(series, levels=1e6 * series.levels, anchors=1e6 * series.anchors)
    windows = Windows([series], task, "cpu", torch.float64)
    _, _, y = windows.gather(windows.origins["train"][0][None])
    truth = series.truth(windows.splits[0].train, 3)
    want = {"persistence": np.sqrt((truth**2).mean()), "standard": series.levels[:280].std(), "none": 1.0}[scale]
    np.testing.assert_allclose(y[0] * want, truth, rtol=1e-6)
    if loss:
        assert y.square().mean() == pytest.approx(loss)
