"""A run trained on more bars: from the weights there are, held against them on days that neither has seen."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import terminal

import cpbkit as cpb
from cpbkit.data.synthetic import make_market
from cpbkit.errors import RunError
from cpbkit.evaluation.verdicts import OLD
from cpbkit.runs import plan
from cpbkit.runs import sweep as sweeping
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.sweep import plan_refit

NAMES = "BTCUSDT_1h", "ETHUSDT_1h"
SMALL = {"context": 6, "horizon": 2, "width": 4, "epochs": 2, "steps": 10}
PLACE = {"executor": "local", "quiet": True}
WHERE = {"source": "synthetic", "symbols": ["BTCUSDT", "ETHUSDT"], "intervals": ["1h"], "start": "2025-01-01"}


@pytest.fixture(scope="module", autouse=True)
def one_stack():
    """Two timed plans may cut the series differently, and a stack of another size rounds differently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_cut", lambda names, size: [names])
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit") / "run"
    return cpb.sweep("quick", folder=folder, end="2025-02-15", **WHERE, **SMALL, **PLACE)


@pytest.fixture(scope="module")
def child(run):
    return run.refit("2025-03-10", **PLACE)


def test_old_and_new_weights_are_judged_side_by_side_on_days_that_neither_has_seen(run, child):
    assert child.folder == run.folder.with_name("run-until-2025-03-10")
    assert child.experiment.training.parent and child.experiment.training.warm_start
    table = child.verdicts().to_frame()
    assert set(table["head"]) == {"price", "price" + OLD} and len(table) == 4
    assert any(
        "price, new weights against old: " in line or "old weights against new" in line
        for line in child.verdicts().headlines
    )
    by_series = {line.series: line for line in run.results}
    for line in child.results:
        before = by_series[line.series]
        new, old = line.test["price"], line.before["price"]
        assert new["windows"] == old["windows"] and new["baselines"] == old["baselines"], "the same windows"
        assert line.dates["test"][0] > before.dates["validation"][1], "which the old weights have not seen"
    report = child.report().path.read_text()
    assert "old weights" in report and "a refit of run, begun from its weights" in report


def test_the_old_weights_err_as_their_own_forecasts_do(run, child):
    """Forecasts of the old model, asked for one by one, have the error that stands in the ledger."""
    bars = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-03-10")["BTCUSDT_1h"].frame
    line = next(line for line in child.results if line.series == "BTCUSDT_1h")
    model, close = run["BTCUSDT_1h"], np.log(bars["close"].to_numpy())
    first, last = (bars.index.get_loc(f"{day}Z") for day in line.dates["test"])
    errors = []
    for origin in range(first + 5, last - 1):
        if bars.index[origin + 2] - bars.index[origin - 5] != pd.Timedelta(hours=7):
            continue  # over a gap
        told = model.forecast(bars.iloc[origin - 20 : origin + 1])
        errors.append(np.log(told.frame["close"].to_numpy()) - close[origin + 1 : origin + 3])
    old = line.before["price"]
    assert len(errors) == old["windows"] and 1e4 * np.sqrt(np.mean(np.square(errors))) == pytest.approx(
        old["rmse"], 1e-5
    )


def test_weights_begin_where_the_old_ones_ended_or_anew(run, monkeypatch, tmp_path):
    begun = {}

    def watched(job, parents):
        windows, stack = assemble(job, parents)
        if "BTCUSDT_1h" in stack.names:  # the plan may give each series a stack of its own
            begun[job.experiment.training.warm_start] = stack.export(stack.names.index("BTCUSDT_1h"))
        return windows, stack

    assemble = sweeping.work.__globals__["_assemble"]
    monkeypatch.setitem(sweeping.work.__globals__, "_assemble", watched)
    run.refit("2025-02-25", folder=tmp_path / "warm", **PLACE)
    run.refit("2025-02-25", folder=tmp_path / "zero", from_zero=True, **PLACE)
    old = run["BTCUSDT_1h"].weights
    assert all(torch.equal(begun[True][name], old[name]) for name in old)
    assert not all(torch.equal(begun[False][name], old[name]) for name in old)
    assert RunFolder(tmp_path / "zero").results()[0].before, "held against the old ones all the same"


def test_a_refit_that_was_stopped_goes_on_and_ends_the_same(run, child, monkeypatch, tmp_path):
    keep, kept = sweeping._keep, []

    def once(*arguments):
        keep(*arguments)
        kept.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "_keep", once)
    with pytest.raises(KeyboardInterrupt):
        run.refit("2025-03-10", folder=tmp_path / "stopped", **PLACE)
    monkeypatch.setattr(sweeping, "_keep", keep)
    again = run.refit("2025-03-10", folder=tmp_path / "stopped", **PLACE)
    assert len(kept) == 1 and len(again.results) == 2
    for name in NAMES:
        assert again[name].about["sha256"] == child[name].about["sha256"]


def test_a_refit_is_watched_and_stopped_as_a_sweep_is(run, monkeypatch, tmp_path):
    seen, asked = [], []

    def live(experiment, name, stop):
        asked.append((name, stop.__self__.folder))
        return lambda state: seen.append(state.stage)

    monkeypatch.setattr("cpbkit.views.live.live", live)
    run.refit("2025-02-25", folder=tmp_path / "later", executor="local")
    assert asked == [("later", tmp_path / "later")] and seen[-1].startswith("training")


def test_what_cannot_be_refitted_is_told(run, child, tmp_path):
    with pytest.raises(RunError, match="needs more bars than the run has, up to 2025-02-15; got until 2025-02-15"):
        run.refit("2025-02-15", **PLACE)
    (tmp_path / "experiment.json").write_text((run.folder / "experiment.json").read_text())
    with pytest.raises(RunError, match="has no finished model"):
        plan_refit(RunFolder(tmp_path), "2025-03-10")
    with pytest.raises(RunError, match="name their run"):
        cpb.sweep(child.experiment, folder=tmp_path / "other", **PLACE)


def test_the_terminal_refits_and_status_names_the_parent(run, tmp_path):
    out = str(tmp_path / "out")
    done = terminal("refit", run.folder, "--until", "2025-02-25", "--run", out, "--workers", "1")
    assert done.exit_code == 0 and "price (old weights)" in done.output
    told = terminal("status", out)
    assert f"A refit of {run.folder}, begun from its weights" in told.output
    assert json.loads(terminal("status", out, "--json").stdout)["parent"] == str(run.folder)
