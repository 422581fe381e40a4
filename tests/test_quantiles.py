"""Quantile heads: any network that is trained, ordered, judged beside conformal intervals around persistence."""

import json

import numpy as np
import pytest
import torch
from conftest import walk
from scipy import stats

import cpbkit as cpb
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import metrics
from cpbkit.evaluation.conformal import judge_quantiles
from cpbkit.models import zoo
from cpbkit.training.loop import loss_per_model
from cpbkit.views.verdict import calibration_figure
from cpbkit.windows.splits import split

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
NETWORKS = sorted({e.model.name for e in PRESETS.values()} - {"ridge_ar", "chronos"})


@pytest.mark.parametrize("name", NETWORKS)
def test_every_trained_network_gives_quantiles_in_order(name):
    features = {"features": ("a", "b"), "targets": ("close", "high"), "target_weights": (1.0, 1.0)}
    task = vary(PRESETS["quick"], context=6, horizon=3, quantiles=LEVELS, **features).task
    model = vary(PRESETS["quick"], name=name, width=8, layers=1, heads=2).model
    torch.manual_seed(0)
    net = zoo.build(2, task, model)
    x, last = torch.randn(2, 4, 6, 2), torch.randn(2, 4, 2)
    start = net.eval()(x, last)
    assert start.shape == (2, 4, 3, 2, 5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    y = net(x, last)
    assert (y.diff(dim=-1) >= 0).all() and y.std() > 0
    loss_per_model(y, torch.randn(2, 4, 3, 2), torch.ones(2) / 2, torch.tensor(LEVELS)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_an_untrained_one_is_persistence_with_normal_errors():
    net = zoo.build(1, vary(PRESETS["quick"], quantiles=LEVELS).task, PRESETS["quick"].model)
    y = net(torch.randn(1, 2, 32, 4), torch.zeros(1, 2, 1))
    np.testing.assert_allclose(y[0, 0, 0, 0].detach(), stats.norm.ppf(LEVELS), atol=1e-6)


def test_the_loss_is_twice_the_pinball_loss_and_takes_a_number_for_all_quantiles():
    truth, forecast = torch.randn(2, 3, 4, 2), torch.randn(2, 3, 4, 2, 5)
    weights = torch.tensor([0.25, 0.75])
    got = loss_per_model(forecast, truth, weights, torch.tensor(LEVELS))
    by_hand = 2 * metrics.pinball(truth[..., None].numpy(), forecast.numpy(), np.float32(LEVELS)).mean((2, 4))
    np.testing.assert_allclose(got, by_hand @ weights.numpy(), rtol=1e-5)
    point = loss_per_model(forecast[..., 0], truth, weights, torch.tensor(LEVELS))
    np.testing.assert_allclose(point, (truth - forecast[..., 0]).abs().mean(2) @ weights, rtol=1e-5)  # levels are even


@pytest.mark.parametrize("wrong", [(0.1, 0.9), (0.5,), (0.5, 0.1), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5, 0.9)])
def test_quantiles_rise_around_a_half(wrong):
    with pytest.raises(CpbkitError, match=r"quantiles must rise from above 0 to below 1, with 0\.5 among them"):
        vary(PRESETS["quick"], quantiles=wrong)


def test_what_goes_with_no_quantiles_says_so():
    with pytest.raises(CpbkitError, match="leave out loss, which is 'mae'"):
        vary(PRESETS["quick"], quantiles=LEVELS, loss="mae")
    solved = vary(PRESETS["ridge_ar"], quantiles=LEVELS)
    with pytest.raises(CpbkitError, match="quantiles need a network that is trained"):
        zoo.build(1, solved.task, solved.model)


def test_true_quantiles_are_calibrated_and_narrow_ones_are_not():
    series = walk("AUSDT_15m", 6000)
    task = vary(PRESETS["quick"], context=8, horizon=2).task
    splits = split(series, task)
    spread = 0.01 * np.sqrt([1, 2])[:, None, None] * stats.norm.ppf(LEVELS)  # (H, K, Q)
    shape = (len(splits.test), *spread.shape)
    right = judge_quantiles(series, splits, LEVELS, np.broadcast_to(spread, shape))["price"]
    assert right["below"] == pytest.approx(LEVELS, abs=0.04)
    assert right["below_persistence"] == pytest.approx(LEVELS, abs=0.04)
    assert right["skill"] == pytest.approx(0, abs=0.02)
    assert right["skill_low"] < right["skill"] < right["skill_high"]
    narrow = judge_quantiles(series, splits, LEVELS, np.broadcast_to(0.3 * spread, shape))["price"]
    assert narrow["below"][0] > 0.2 and narrow["below"][-1] < 0.8
    assert narrow["loss"] > right["loss"] and narrow["skill_high"] < 0
    # Of a normal the expected pinball loss at the true quantile is its density there.
    expected = np.mean(2 * stats.norm.pdf(stats.norm.ppf(LEVELS))) / np.sqrt(2 / np.pi)
    assert right["loss"] == pytest.approx(expected, rel=0.05)


def test_a_run_with_quantiles_from_settings_to_forecast(tmp_path):
    given = {"source": "synthetic", "symbols": ("BTCUSDT",), "intervals": ("1h",), "quiet": True, "executor": "local"}
    given |= {"start": "2025-01-01", "end": "2025-01-25", "epochs": 1, "width": 4, "context": 8}
    run = cpb.sweep("quick", folder=tmp_path / "run", quantiles=LEVELS, **given)
    assert any("weighted quantile loss" in line for line in run.verdicts().headlines)
    told = json.loads((tmp_path / "run" / "results.jsonl").read_text())["quantiles"]["price"]
    assert told["levels"] == list(LEVELS) and len(told["below"]) == 5
    frame = run["BTCUSDT_1h"].forecast().frame
    assert (frame[[f"close_q{level:g}" for level in LEVELS]].diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert frame["close"].equals(frame["close_q0.5"].rename("close"))
    figure = calibration_figure(run.results)
    assert "quantiles of 1 forecast are off their level by" in figure.texts[0].get_text()
    assert run.calibration().axes[0].get_title(loc="left") == "price: truths below, %"
