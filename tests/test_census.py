"""Counting calls, FLOP and what stays alive; and the oracle of the recurrent paths."""

import pytest
import torch
from torch import nn
from toys import WrittenLSTM

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.rnn_path import Path, Recurrence, predict_path, read_path
from cpbkit.hardware.chips import CHIPS


def test_views_cost_nothing_and_products_are_counted():
    x, w = torch.randn(4, 6, 8), torch.randn(8, 5)
    with Census() as census:
        (x.view(24, 8).transpose(0, 1).t() @ w).relu()
    assert census.kernels == 2
    assert census.flop == 2 * 24 * 8 * 5
    assert census.waits == []


def test_a_written_cell_asks_many_times_more_than_the_layer():
    counts = {}
    for layer in (nn.LSTM(8, 16, batch_first=True), WrittenLSTM(8, 16)):
        census = Census()
        with census:
            layer(torch.randn(4, 30, 8))[0].sum().backward()
        counts[type(layer)] = census.kernels
    assert counts[WrittenLSTM] > 20 * counts[nn.LSTM]


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


def test_the_stated_constants_are_consistent():
    for chip in CHIPS.values():
        assert chip.float16 >= chip.float32 and chip.source
    # 40 multiprocessors x 64 cores x 2 FLOP x 1.59 GHz, and 5.001 GHz x 2 x 256 bit.
    assert CHIPS["T4"].float32 == pytest.approx(40 * 64 * 2 * 1.59e9, rel=0.01)
    assert CHIPS["T4"].bandwidth == pytest.approx(5.001e9 * 2 * 256 / 8, rel=0.01)
