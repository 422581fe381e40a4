"""A foundation model as a row to beat and as a preset, by the real library, on tiny checkpoints of random weights."""

import dataclasses
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import terminal, walk

import cpbkit as cpb
from cpbkit.config.experiment import OHLC, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.verdicts import Judgement, Verdict, advise, evidence
from cpbkit.hub.client import HubError
from cpbkit.models import zero_shot
from cpbkit.runs import trained
from cpbkit.runs.plan import make_plan
from cpbkit.training import loop
from cpbkit.views.account import describe
from cpbkit.windows.series import from_klines
from cpbkit.windows.splits import split

DAYS = {"source": "synthetic", "start": "2025-01-01", "end": "2025-02-28", "quiet": True, "executor": "local"}
SMALL = {"symbols": ("BTCUSDT", "ETHUSDT"), "intervals": ("1h",), "context": 64, "horizon": 3, **DAYS}
QUANTILES = [level / 10 for level in range(1, 10)]
PATCHES = {"context_length": 64, "input_patch_size": 16, "input_patch_stride": 16, "use_reg_token": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save a Chronos-Bolt model of one layer, and return its folder."""
    pytest.importorskip("chronos", reason="chronos-forecasting is not installed")
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, vocab_size=2, pad_token_id=0, decoder_start_token_id=0, feed_forward_proj="relu")
    config.chronos_config = {"prediction_length": 4, "quantiles": QUANTILES, **PATCHES}
    config.chronos_pipeline_class = "ChronosBoltPipeline"
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "chronos-bolt-random"
    ChronosBoltModelForForecasting(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Save a Chronos-2 model of one layer, and return its folder."""
    pytest.importorskip("chronos", reason="chronos-forecasting is not installed")
    from chronos.chronos2 import Chronos2CoreConfig, Chronos2Model

    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    told = {"output_patch_size": 16, "quantiles": [0.01, *QUANTILES, 0.99], "max_output_patches": 4, **PATCHES}
    config = Chronos2CoreConfig(**sizes, chronos_config=told, chronos_pipeline_class="Chronos2Pipeline")
    torch.manual_seed(0)
    model = Chronos2Model(config)
    for parameter in model.parameters():  # they start near zero
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("hub") / "chronos-2-random"
    model.save_pretrained(folder)
    return str(folder)


def test_its_row_is_what_the_library_says_and_knows_no_future(checkpoint):
    series, origins = walk("AUSDT_15m", 600, gap_at=300), np.array([310, 400, 500])
    y = zero_shot.forecast(checkpoint, series, [0], origins, 6)
    assert y.shape == (3, 6, 1) and np.isfinite(y).all() and y.std() > 0
    past = torch.tensor(series.levels[300:401, 0] - series.levels[400, 0], dtype=torch.float32)[None]
    with pytest.warns(UserWarning, match="prediction length"):
        told, _ = zero_shot.load(checkpoint).predict_quantiles(past, prediction_length=6, quantile_levels=[0.5])
    np.testing.assert_allclose(y[1, :, 0], told[0, :, 0], atol=1e-5)
    later = walk("AUSDT_15m", 600, gap_at=300)
    later.levels[401:] += 1
    np.testing.assert_array_equal(zero_shot.forecast(checkpoint, later, [0], origins[:2], 6), y[:2])
    higher = walk("AUSDT_15m", 600, gap_at=300)
    higher.levels[:300] += 1  # before the gap
    np.testing.assert_array_equal(zero_shot.forecast(checkpoint, higher, [0], origins, 6), y)
    part = evidence(series, origins, np.zeros((3, 6, 1)), 250, checkpoint)["price"]
    np.testing.assert_array_equal(part["baselines"]["chronos-bolt-random"], y)
    assert any("it may have seen" in note or "has not seen it" in note for note in part["notes"])


def test_what_is_no_such_model_is_said_before_anything_is_trained(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CpbkitError, match="zero_shot must name a folder or a repository with a Chronos model"):
        cpb.sweep("quick", zero_shot=str(tmp_path), folder=tmp_path / "run", source="synthetic", quiet=True)


def test_a_run_is_judged_beside_it(checkpoint, tmp_path):
    given = {"source": "synthetic", "symbols": ("BTCUSDT",), "intervals": ("1h",), "quiet": True, "executor": "local"}
    given |= {"start": "2025-01-01", "end": "2025-01-21", "epochs": 1, "width": 4, "context": 8, "horizon": 2}
    run = cpb.sweep("quick", folder=tmp_path / "run", zero_shot=checkpoint, **given)
    assert "chronos-bolt-random" in run.results[0].test["price"]["baselines"]


def test_what_its_dates_mean_is_said():
    series = walk("AUSDT_15m", 200)  # of 2025
    assert "before the test begins (2025-01-02): it has not seen it" in zero_shot.say_dates(
        "amazon/chronos-bolt-tiny", series, np.array([100])
    )
    assert "it may have seen such bars in training" in zero_shot.say_dates("chronos-2-small", series, np.array([100]))
    assert "it is not known here when it was trained" in zero_shot.say_dates("me/own", series, np.array([100]))


def test_where_no_model_is_better_the_advice_says_what_to_take():
    def judged(p, best):
        told = {"windows": 500, "horizon": 1, "unit": "bp", "best_baseline": best, "baselines": {best: 1.0}, "p": p}
        told |= {"skill": 0.1, "skill_low": 0.05, "skill_high": 0.2}
        told |= dict.fromkeys(("rmse_by_horizon", "baseline_rmse_by_horizon"), (1.0,))
        needed = [f.name for f in dataclasses.fields(Judgement) if f.default is dataclasses.MISSING]
        return Judgement(**dict.fromkeys(needed, 1.0) | told)

    assert advise({"A": judged(0.001, "persistence")}, "price") == ""
    ties = {"A": judged(0.5, "drift")}
    assert advise(ties, "price").endswith("take the naive one, drift")
    assert advise(ties | {"B": judged(0.5, "ewma"), "C": judged(0.5, "drift")}, "price").endswith("mostly drift")
    assert advise(ties, "price", Verdict("BEATS", 0.01, "")) == "", "all series at once are better"
    assert advise({"A": judged(0.5, "chronos-bolt-tiny")}, "price").endswith("download chronos-bolt-tiny, don't train")


def columns(experiment):
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-02-28")
    return [from_klines(klines, experiment.task) for klines in market.values()]


@pytest.mark.parametrize("family", ["checkpoint", "second"])
def test_the_preset_forecasts_what_the_row_does_from_as_many_bars(family, request):
    """Both models see 64 rows at most, so that the row's longer past is the window's."""
    place, features = request.getfixturevalue(family), tuple(f"log_{price}" for price in OHLC)
    prices = {"features": features, "targets": OHLC, "target_weights": (1.0,) * 4}
    experiment = vary(PRESETS["chronos"], zero_shot=place, context=64, horizon=6, **prices)
    series = columns(experiment)
    windows, stack = loop.assemble(experiment, series, "cpu")
    for m, y in enumerate(loop.forecast(stack.net, windows, "test", [0, 1])):
        want = zero_shot.forecast(place, series[m], [0, 1, 2, 3], windows.splits[m].test, 6)
        assert want[..., 3].std() > 1e-3
        np.testing.assert_allclose(y, want, atol=1e-4 * want.std())


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    return cpb.sweep("chronos", zero_shot=checkpoint, folder=tmp_path_factory.mktemp("runs") / "run", **SMALL)


def test_a_run_of_the_preset_is_judged_and_forecasts_as_any(run, checkpoint, monkeypatch):
    for line in run.results:
        assert (line.status, line.parameters, line.epochs) == ("done", 0, 1)
        price = line.test["price"]
        assert "persistence" in price["baselines"] and "chronos-bolt-random" not in price["baselines"]
        assert sum("chronos-bolt-random was published on 2024-11-26" in note for note in price["notes"]) == 1
        assert line.prediction_intervals["price"]["coverage"] > 0.5
    asked, ask = [], zero_shot.load(checkpoint).predict_quantiles
    told = lambda windows, **given: asked.append(len(windows)) or ask(windows, **given)  # noqa: E731
    monkeypatch.setattr(zero_shot.load(checkpoint), "predict_quantiles", told)
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-03-01", "2025-03-31")
    found = trained.forecast(run.models(), market)
    assert asked == [2], "all series are one batch"
    for name, klines in market.items():
        close = np.log(klines.frame["close"].to_numpy()[-64:])
        past = torch.tensor(close - close[-1], dtype=torch.float32)
        want, _ = ask([past], prediction_length=3, quantile_levels=[0.5])
        np.testing.assert_allclose(np.log(found[name].frame["close"]) - close[-1], want[0, :, 0], atol=1e-5)


def test_a_run_keeps_no_weights_and_names_the_model_which_is_loaded_by_consent(run, checkpoint, tmp_path, monkeypatch):
    files = list((run.folder / "models").iterdir())
    assert len(files) == 2 and all(file.stat().st_size < 10_000 for file in files)
    with pytest.raises(CpbkitError, match=r"asks for the foundation model .*chronos-bolt-random.*--trust-code"):
        cpb.open_run(run.folder)["BTCUSDT_1h"]
    with pytest.raises(HubError, match="synthetic"):
        run.publish("me/forty", dry_run=tmp_path / "out")
    bars = make_market(["BTCUSDT"], ["1h"], "2025-03-01", "2025-03-31")["BTCUSDT_1h"]
    model = cpb.open_run(run.folder, trust_code=True)["BTCUSDT_1h"]
    assert "close_low" in model.forecast(bars).frame
    gone = shutil.move(checkpoint, tmp_path / "elsewhere")
    zero_shot.load.cache_clear()
    try:
        with pytest.raises(CpbkitError, match=r"there is no folder .*chronos-bolt-random"):
            model.forecast(bars)
    finally:
        shutil.move(gone, checkpoint)


def test_what_is_published_names_no_folder_and_needs_a_model_that_others_have(checkpoint, tmp_path):
    bars = {"BTCUSDT_1h": make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-01-25")["BTCUSDT_1h"].frame}
    small = {"context": 8, "horizon": 2, "quiet": True, "executor": "local", "zero_shot": checkpoint, "data": bars}
    of_its_own = cpb.sweep("chronos", folder=tmp_path / "own", **small)
    with pytest.raises(HubError, match="others cannot load a foundation model of this machine"):
        of_its_own.publish("me/own", dry_run=tmp_path / "own-out")
    beside = cpb.sweep("ridge_ar", folder=tmp_path / "beside", **small)
    beside.publish("me/beside", dry_run=tmp_path / "out")
    told = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"chronos-bolt-random" in told and checkpoint.encode() not in told


def test_it_gives_quantiles_of_its_own_and_no_others(checkpoint):
    experiment = vary(PRESETS["chronos"], zero_shot=checkpoint, context=64, horizon=3, quantiles=(0.1, 0.3, 0.5, 0.9))
    windows, stack = loop.assemble(experiment, columns(experiment), "cpu")
    x, last, _ = windows.gather(torch.stack([origins[:5] for origins in windows.origins["test"]]))
    y = stack.net(x, last)
    assert y.shape == (2, 5, 3, 1, 4) and (y.diff(dim=-1) >= 0).all()
    own, _ = zero_shot.load(checkpoint).predict_quantiles(
        list((x[1] - x[1, :, -1:])[..., 0]), prediction_length=3, quantile_levels=[0.1, 0.3, 0.5, 0.9]
    )
    np.testing.assert_allclose(y[1, :, :, 0], own.sort(dim=-1).values, atol=1e-5)  # random weights cross
    outside = vary(experiment, quantiles=(0.05, 0.5, 0.95))
    windows, stack = loop.assemble(outside, columns(outside), "cpu")
    with pytest.raises(
        CpbkitError, match=r"must be from 0\.1 to 0\.9, which it was trained for; got 0\.05, 0\.5, 0\.95"
    ):
        stack.net(x, last)


@pytest.mark.parametrize("wrong", [{"features": ("close_return",)}, {"target_scale": "persistence"}])
def test_it_goes_on_with_the_past_of_its_target_alone(wrong):
    experiment = vary(PRESETS["chronos"], context=64, horizon=3, **wrong)
    with pytest.raises(CpbkitError, match="each feature must be its target's own past, log_close for close"):
        loop.assemble(experiment, columns(experiment), "cpu")


def test_a_run_says_which_model_it_is_and_how_long_three_forward_passes_take(checkpoint, capfd):
    experiment = vary(PRESETS["chronos"], zero_shot=checkpoint, context=64, horizon=3)
    assert describe(experiment).startswith(f"chronos, {checkpoint}; 64 bars of 1 channel in")
    zero_shot.load.cache_clear()
    series = columns(experiment)
    plan = make_plan(experiment, {one.name: one for one in series[:1]}, workers=1)
    assert "Loading" not in capfd.readouterr().err
    windows, (step,) = len(split(series[0], experiment.task).validation), re.findall(r"took ([\d.]+) ms", plan.reason)
    assert plan.seconds == pytest.approx((1 + 3 * windows / 64) * float(step) / 1000, rel=0.1)


def test_an_audit_of_the_preset_finds_no_leak(checkpoint):
    given = {"symbols": ("BTCUSDT",), "intervals": ("1h",), "context": 64, "horizon": 3, "source": "synthetic"}
    found = cpb.audit("chronos", zero_shot=checkpoint, placebos=2, **given, start=DAYS["start"], end=DAYS["end"])
    found = found.set_index("check")
    assert found.loc["training and forecasts know no future", "verdict"] == "OK"
    assert "trained elsewhere" in found.loc["overfit one batch", "evidence"]
    assert "FAIL" not in set(found["verdict"])


def test_without_the_library_the_preset_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "chronos", None)
    zero_shot.load.cache_clear()
    days = ["--source", "synthetic", "--start", "2025-01-01", "--end", "2025-01-31", "--run", str(tmp_path / "run")]
    shown = terminal("sweep", "--preset", "chronos", *days)
    assert shown.exit_code == 1 and 'pip install "cpbkit[zeroshot]"' in shown.output
