"""Counting calls, FLOP and what stays alive; and the oracle of the recurrent paths."""

import pytest
import torch
from torch import nn
from toys import WrittenLSTM

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.probes import predict_path
from cpbkit.gpu_check.trace import read_path
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


@pytest.mark.parametrize(
    ("hidden", "chip", "path"),
    [
        (128, {}, "cudnn persistent"),
        (129, {}, "cudnn standard"),
        (128, {"enabled": False}, "native"),
        (128, {"cudnn": 8100}, "cudnn standard"),  # the small kernels came with 8.2.1
        (128, {"capability": (5, 0)}, "cudnn standard"),
        (128, {"capability": (9, 0)}, "cudnn persistent"),
    ],
)
def test_the_path_follows_the_rules_of_pytorch(hidden, chip, path):
    assert predict_path(hidden, **chip) == path


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
