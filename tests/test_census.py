"""Counting calls, FLOP and what stays alive; and the oracle of the recurrent paths."""

import dataclasses

import pytest
import torch
from torch import nn

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.faults import WrittenLSTM, make_toy
from cpbkit.gpu_check.numbers import Numbers
from cpbkit.gpu_check.preflight import CALL, preflight, recurrences_as_leaves
from cpbkit.gpu_check.rnn_path import Path, Recurrence, count_kernels, predict_path, read_path
from cpbkit.gpu_check.step import Step
from cpbkit.hardware.chips import CHIPS


def test_views_cost_nothing_and_products_are_counted():
    x, w = torch.randn(4, 6, 8), torch.randn(8, 5)
    with Census() as census:
        (x.view(24, 8).transpose(0, 1).t() @ w).relu()
    assert census.kernels == 2
    assert census.costs[0] == (2 * 24 * 8 * 5, 4 * (24 * 8 + 8 * 5 + 24 * 5))
    assert census.waits == []


def test_flop_of_an_lstm_step_are_the_formula():
    # 4 gates, hidden x (inputs + hidden) each, two FLOP a product, three sweeps: forward and twice back.
    formula = 3 * 2 * 4 * 64 * (8 + 64) * 64 * 120
    for device in ("cpu", "meta"):
        layer, x = nn.LSTM(8, 64, batch_first=True, device=device), torch.zeros(64, 120, 8, device=device)
        census = Census()
        with recurrences_as_leaves(census, CHIPS["T4"]), census:
            layer(x)[0].sum().backward()
        assert sum(flop for flop, _ in census.costs) == pytest.approx(formula, rel=1e-3)
        assert census.recurrences == [Recurrence("lstm", 64, 8, 1, False, "float32", False, 0, 64, 120)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("settings", [{}, {"bidirectional": True, "num_layers": 2}, {"batch_first": False}])
def test_a_leaf_has_the_shapes_of_the_layer(kind, settings):
    layer = kind(3, 5, **({"batch_first": True} | settings))
    x = torch.randn(2, 7, 3)
    expected, state = layer(x)
    census = Census()
    with recurrences_as_leaves(census, CHIPS["T4"]), census:
        out, leaf_state = layer(x)
        out.sum().backward()
    r = census.recurrences[0]
    assert (r.batch, r.length) == ((2, 7) if layer.batch_first else (7, 2))
    assert out.shape == expected.shape
    pairs = zip(state, leaf_state, strict=True) if kind is nn.LSTM else [(state, leaf_state)]
    assert all(a.shape == b.shape for a, b in pairs)
    assert all(p.grad is not None for p in layer.parameters())
    assert kind.forward is not recurrences_as_leaves and torch.equal(layer(x)[0], expected)


def test_a_written_cell_asks_hundreds_of_times_more_than_the_layer():
    counts = {}
    for layer in (nn.LSTM(8, 16, batch_first=True), WrittenLSTM(8, 16)):
        census = Census()
        with recurrences_as_leaves(census, CHIPS["T4"]), census:
            layer(torch.randn(4, 30, 8))[0].sum().backward()
        counts[type(layer)] = census.kernels
    assert counts[WrittenLSTM] > 50 * counts[nn.LSTM]


def test_what_stays_alive():
    kept = []
    with Census() as census:
        for _ in range(3):
            kept.append(torch.ones(100) * 2)
            torch.ones(1000) * 3
            census.end_step()
    assert census.live == [400, 800, 1200]


# The rules of PyTorch's RNN.cpp, case by case.
PATHS = [
    (Recurrence("lstm", 128), (7, 5), Path("persistent", "persistent", "")),
    (Recurrence("lstm", 129), (7, 5), Path("persistent", "standard", "")),
    (Recurrence("gru", 192), (8, 0), Path("persistent", "standard", "")),
    (Recurrence("gru", 193), (8, 0), Path("standard", "standard", "")),
    (Recurrence("relu", 256), (7, 5), Path("persistent", "persistent", "")),
    (Recurrence("tanh", 384), (7, 5), Path("persistent", "standard", "")),
    (Recurrence("lstm", 64, packed=True), (7, 5), Path("standard", "standard", "")),
    (Recurrence("lstm", 64, dtype="float64"), (7, 5), Path("standard", "standard", "")),
    (Recurrence("lstm", 64, projection=16), (7, 5), Path("standard", "standard", "")),
    (Recurrence("lstm", 64, dtype="bfloat16"), (7, 5), Path("native", "native", "")),
    (Recurrence("lstm", 64, dtype="bfloat16"), (9, 0), Path("persistent", "persistent", "")),
    (Recurrence("lstm", 512, 128, dtype="float16", batch=64), (8, 0), Path("persistent", "persistent", "")),
    (Recurrence("lstm", 512, 128, dtype="float16", batch=64), (7, 5), Path("standard", "standard", "")),
    (Recurrence("lstm", 512, 128, dtype="float16", batch=80), (7, 0), Path("standard", "standard", "")),
    (Recurrence("lstm", 512, 128, dtype="float16", batch=96), (7, 0), Path("persistent", "persistent", "")),
    (Recurrence("gru", 512, 128, dtype="float16", batch=64), (8, 0), Path("standard", "standard", "")),
    (Recurrence("lstm", 512, 128, 2, dtype="float16", batch=64), (8, 0), Path("standard", "standard", "")),
    (Recurrence("lstm", 512, 128, dtype="float16", batch=64), (8, 6), Path("standard", "standard", "")),
]


@pytest.mark.parametrize(("recurrence", "capability", "path"), PATHS)
def test_the_path_follows_the_rules(recurrence, capability, path):
    found = predict_path(recurrence, capability, multiprocessors=108, cudnn=91300)
    assert (found.forward, found.backward) == (path.forward, path.backward)
    assert found.reason


def test_switches_that_change_the_path():
    assert predict_path(Recurrence(), enabled=False).name == "native"
    assert predict_path(Recurrence(), cudnn=8100).name == "cudnn standard"  # the small kernels came with 8.2.1
    assert predict_path(Recurrence(), (5, 0)).name == "cudnn standard"
    assert predict_path(Recurrence(dtype="bfloat16"), (9, 0), cudnn=91002).name == "native"
    assert predict_path(Recurrence(hidden=129)).name == "cudnn standard"
    with pytest.raises(ValueError, match="mode must be one of lstm, gru, relu, tanh; got 'elman'"):
        Recurrence("elman")


def test_the_cliff_shows_in_the_launches():
    small, large = (count_kernels(r, predict_path(r)) for r in (Recurrence(hidden=128), Recurrence(hidden=129)))
    assert small < 12 and large > 100


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (("void RNN_blockPersist_fp_LSTM<float>", "void RNN_blockPersist_bp_LSTM<float>"), "cudnn persistent"),
        (("void RNN_blockPersist_fp_GRU<float>", "elemWiseRNNcell"), "cudnn standard"),
        (("void elemWiseRNNcell<float>", "ampere_sgemm_32x32"), "cudnn standard"),
        (("void at::native::lstm_cell_forward<float>",), "native"),
        (("volta_sgemm_128x64",), ""),
    ],
)
def test_the_path_is_read_from_kernel_names(kernels, name):
    assert read_path(kernels) == name


# Pre-flight.


def test_a_written_cell_is_predicted_host_bound_and_the_layer_is_not_as_bad():
    t4 = CHIPS["T4"]
    written = preflight(make_toy("cpu", WrittenLSTM(8, 16), 16), t4)
    assert (written.diagnosis.verdict, written.diagnosis.reason) == ("HOST_BOUND", "RNN_NOT_CUDNN")
    assert written.numbers.host == pytest.approx(written.numbers.kernels * CALL * 1e-3)
    layer = preflight(make_toy("cpu"), t4)
    assert layer.numbers.rnn == "cudnn persistent" and layer.numbers.kernels < written.numbers.kernels / 20
    assert preflight(make_toy("cpu", nn.LSTM(8, 129, batch_first=True), 129), t4).numbers.rnn == "cudnn standard"
    assert "predicted for the T4, not measured" in written.lines()[0]


def test_a_prediction_by_hand_and_on_meta_tensors():
    chip, n = CHIPS["T4"], 2048
    a = torch.zeros(n, n, device="meta")
    found = preflight(Step(lambda _: a @ a, device="cpu"), chip)
    assert found.flop == 2 * n**3 and found.numbers.kernels == 1
    assert found.numbers.device == pytest.approx(2 * n**3 / chip.float32 * 1e3 + 1e-3)
    assert isinstance(found.numbers, Numbers) and found.diagnosis.verdict == "DEVICE_BOUND"


def test_waits_are_predicted_on_meta_tensors():
    x = torch.zeros(10, device="meta")
    found = preflight(Step(lambda _: x.sum().item(), device="cpu"), CHIPS["T4"])
    assert found.numbers.waits == 1 and found.numbers.loop == found.numbers.host + found.numbers.device


def test_a_step_replayed_as_a_graph_is_no_matter_of_the_host_but_of_latency():
    step = dataclasses.replace(make_toy("cpu", WrittenLSTM(8, 16), 16), graph=True)
    found = preflight(step, CHIPS["T4"])
    assert found.diagnosis.verdict == "DEVICE_LATENCY_BOUND" and found.numbers.host == pytest.approx(CALL * 1e-3)
    # Every kernel is as short as a kernel can be: twice the samples take no longer.
    assert found.numbers.doubling == pytest.approx(1, abs=0.02)
    assert "as one CUDA graph" in found.lines()[1]
    waiting = preflight(dataclasses.replace(make_toy("cpu", after=torch.Tensor.item), graph=True), CHIPS["T4"])
    assert not waiting.graph, "a step that waits cannot be captured"


def test_a_slower_chip_is_predicted_slower():
    step = make_toy("cpu", nn.Sequential(nn.Flatten(1), nn.Linear(320, 2048), nn.Linear(2048, 2048)), 2048)
    times = [preflight(step, CHIPS[name]).numbers.device for name in ("H200", "A100", "V100", "T4")]
    assert times == sorted(times) and times[-1] > 2 * times[0]


def test_the_stated_constants_are_consistent():
    for chip in CHIPS.values():
        assert chip.float16 >= chip.float32 and chip.source
    # 40 multiprocessors x 64 cores x 2 FLOP x 1.59 GHz, and 5.001 GHz x 2 x 256 bit.
    assert CHIPS["T4"].float32 == pytest.approx(40 * 64 * 2 * 1.59e9, rel=0.01)
    assert CHIPS["T4"].bandwidth == pytest.approx(5.001e9 * 2 * 256 / 8, rel=0.01)
