"""A foundation model as a row to beat, by the real library, on a tiny checkpoint of random weights."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import walk

import cpbkit as cpb
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import zero_shot
from cpbkit.evaluation.verdicts import Judgement, advise, evidence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save a Chronos-Bolt model of one layer, and return its folder."""
    pytest.importorskip("chronos", reason="chronos-forecasting is not installed")
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, vocab_size=2, pad_token_id=0, decoder_start_token_id=0, feed_forward_proj="relu")
    patches = {"input_patch_size": 16, "input_patch_stride": 16, "use_reg_token": True}
    levels = [level / 10 for level in range(1, 10)]
    config.chronos_config = {"context_length": 64, "prediction_length": 4, "quantiles": levels, **patches}
    config.chronos_pipeline_class = "ChronosBoltPipeline"
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "chronos-bolt-random"
    ChronosBoltModelForForecasting(config).save_pretrained(folder)
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
    assert advise({"A": judged(0.5, "drift")}, "price").endswith("take the naive one, mostly drift")
    assert advise({"A": judged(0.5, "chronos-bolt-tiny")}, "price").endswith("download chronos-bolt-tiny, don't train")
