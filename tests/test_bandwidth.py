"""The tools of the bandwidth preset on the network trace: ranges, weights, repeats, targets in their own unit."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import terminal

import cpbkit as cpb
from cpbkit.api import open_run
from cpbkit.config.experiment import Task, difference, from_json, to_json, vary
from cpbkit.config.presets import BANDWIDTH_CHANGES, NETWORK, PRESETS, one_change_each
from cpbkit.data.load import load_klines
from cpbkit.data.synthetic import make_network_trace
from cpbkit.data.traces import read_trace
from cpbkit.errors import CpbkitError, DataError, UnknownName
from cpbkit.evaluation.training_checks import check_results
from cpbkit.models import zoo
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.planted import tell_changes
from cpbkit.runs.worker import Job, Result, work
from cpbkit.training.loop import Fit, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.series import from_table, to_series
from cpbkit.windows.windows import Windows

TASK = PRESETS["bandwidth"].task
RAW = NETWORK[:4]


def trace(rows=3000, seed=2, task=TASK):
    return from_table(f"trace{seed}", make_network_trace(seed, rows), task.features, task.targets)


def windows_of(task, rows=3000):
    return Windows([trace(rows, task=task)], task, "cpu", torch.float64)


def test_a_declared_range_becomes_0_to_1_whatever_the_train_rows_hold():
    table, delay = make_network_trace(0, 3000), TASK.features.index("delay")
    table.loc[table.index[500], "delay"] = 455_000.0  # ms, as the source's traces have them
    series = from_table("trace", table, TASK.features, TASK.targets)
    windows = Windows([series], TASK, "cpu", torch.float64)
    assert windows.inputs.min() >= 0 and windows.inputs.max() <= 1
    assert windows.inputs[500, delay] == 1
    np.testing.assert_allclose(windows.inputs[:500, delay] * 10_000, np.clip(series.inputs[:500, delay], 0, 10_000))
    wild = Windows([series], dataclasses.replace(TASK, clip_ranges=False, input_clip=1e9), "cpu", torch.float64)
    assert wild.inputs[500, delay] == pytest.approx(45.5)


def test_a_target_is_scaled_by_its_range_and_comes_back_in_its_unit():
    windows = windows_of(TASK)
    _, _, y = windows.gather(windows.origins["test"][0][None])
    truth = windows.series[0].truth(windows.splits[0].test, TASK.horizon)
    np.testing.assert_allclose(y[0] * 10e6, truth, rtol=1e-6, atol=1e-6)
    assert windows.scalers[0].target_scale.tolist() == [10e6]


def test_weights_follow_the_first_condition_that_the_next_row_meets():
    windows, series = windows_of(TASK), trace()
    loss, delay = (series.inputs[:, series.features.index(name)] for name in ("loss_ratio", "delay"))
    train = windows.splits[0].train
    want = np.where(loss[train + 1] > 0.01, 10.0, np.where(delay[train + 1] > 300, 5.0, 1.0))
    assert set(want) == {1.0, 5.0, 10.0}
    got = windows.weights[train].numpy()
    np.testing.assert_allclose(got, want / want.mean())
    assert got.mean() == pytest.approx(1)


def test_repeats_act_on_the_train_order_alone():
    windows, series = windows_of(TASK), trace()
    loss = series.inputs[:, series.features.index("loss_ratio")][windows.splits[0].train + 1]
    want = np.select([loss > 0.2, loss > 0.01], [10, 5], 1)
    assert set(want) == {1, 5, 10}
    pool = int(want.sum())
    order = windows.order([0], seed=0, epoch=0, count=pool)[0].numpy()
    rows, times = np.unique(order, return_counts=True)
    assert rows.tolist() == windows.splits[0].train.tolist()
    assert times.tolist() == want.tolist()
    for part in ("train", "validation", "test"):
        assert windows.origins[part][0].tolist() == getattr(windows.splits[0], part).tolist()


def test_weights_change_the_loss_as_they_say():
    """A weighted step moves as an unweighted one over the windows repeated so often."""
    task = dataclasses.replace(TASK, repeats=(), weights=(("delay", 60.0, 3.0),))
    plain = dataclasses.replace(task, weights=())
    experiment = vary(
        PRESETS["bandwidth"], width=8, dropout=0.0, epochs=1, batch=64, clip_norm=0.0, precision="float64"
    )

    def gradient(task):
        windows = windows_of(task, rows=600)
        stack = Stack(
            lambda m: zoo.build(m, task, experiment.model), ["trace2"], experiment.training, "cpu", torch.float64
        )
        next(fit(Fit(stack), windows, experiment.training, 1))
        return windows, stack.gradients[0].clone()

    windows, weighted = gradient(task)
    rows = windows.order([0], 0, 0, 64)
    weight = windows.weights[rows]
    _, plainly = gradient(plain)
    assert weight.unique().numel() == 2
    # At the start the forecast is 0, so the head's bias gets -2 times the weighted mean of y.
    _, _, y = windows.gather(rows)
    bias = plainly != 0
    assert bias.any()
    head = -2 * (weight * y[:, :, 0, 0]).mean(), -2 * y.mean()
    assert any(torch.isclose(weighted, head[0], rtol=1e-9)) and any(torch.isclose(plainly, head[1], rtol=1e-9))


def test_what_is_declared_wrongly_is_refused():
    with pytest.raises(CpbkitError, match="a range runs from its lowest to its highest"):
        Task(ranges=(("delay", 1.0, 0.0),))
    with pytest.raises(CpbkitError, match=r"target_scale 'range' needs a range of each of \('close',\); got \[\]"):
        Task(target_scale="range")
    with pytest.raises(CpbkitError, match="weights must be above 0, repeats at least 1"):
        Task(weights=(("loss", 0.1, 0.0),))
    with pytest.raises(UnknownName, match="feature must be a known name; got 'los'"):
        windows_of(dataclasses.replace(TASK, weights=(("los", 0.1, 2.0),)))
    assert from_json(to_json(PRESETS["bandwidth"])).task.ranges == TASK.ranges


def test_each_change_is_made_alone():
    preset = PRESETS["bandwidth"]
    trials = one_change_each(preset, BANDWIDTH_CHANGES)
    assert len(BANDWIDTH_CHANGES) == 8 and len(trials) == 1 + 8 + 8 + 1
    assert trials["all"] == preset
    for name, before in BANDWIDTH_CHANGES.items():
        alone = trials[f"{name} alone"]
        assert vary(alone, **before) == trials["none"]
        assert vary(preset, **before) == trials[f"all but {name}"]
        changed = {line.partition(":")[0].partition(".")[2] for line in difference(trials["none"], alone)}
        assert changed == set(before)
    everything = {line.partition(":")[0].partition(".")[2] for line in difference(trials["none"], preset)}
    assert everything == {setting for before in BANDWIDTH_CHANGES.values() for setting in before}


def own_trace(folder, columns=RAW, name="home.csv", rows=1500, times=None):
    """Write a person's trace, as CSV; return its path and what is in it."""
    table = make_network_trace(3, rows)[list(columns)].reset_index(drop=True)
    if times is not None:
        table.insert(0, "time", times[:rows])
    table.to_csv(folder / name, index=False)
    return folder / name, table


def test_a_trace_of_the_sources_six_columns_is_read_with_its_target(tmp_path):
    path, table = own_trace(tmp_path, NETWORK)
    trace = read_trace(path, "home_200ms")
    assert list(trace.frame) == [*NETWORK, "bandwidth"]
    assert len(trace.frame) == len(table) - 1, "the last row's bandwidth would be told by the next"
    np.testing.assert_allclose(trace.frame["bandwidth"], table["prev_bandwidth"][1:])
    assert set(np.diff(trace.frame.index.asi8)) == {200_000_000}
    assert not trace.passport.synthetic and "prev_bandwidth of the next row" in " ".join(trace.passport.notes)


def test_what_follows_from_the_raw_columns_is_computed(tmp_path):
    path, table = own_trace(tmp_path)
    frame = read_trace(path, "home_200ms").frame
    np.testing.assert_allclose(frame["throughput"], (table.receiving_rate * (1 - table.loss_ratio))[:-1])
    np.testing.assert_allclose(frame["delay_gradient"][1:], np.diff(table["delay"])[:-1])
    assert frame["delay_gradient"].iloc[0] == 0


def test_rows_near_the_grid_are_put_on_it_and_missing_ones_stay_gaps(tmp_path):
    times = 1.7e9 + 0.2 * np.arange(1500) + np.random.default_rng(0).uniform(-0.04, 0.04, 1500)
    times[700:] += 3  # fifteen steps
    path, _ = own_trace(tmp_path, times=times)
    trace = read_trace(path, "home_200ms")
    steps = np.diff(trace.frame.index.asi8) // 200_000_000
    assert steps[699] == 16 and (np.delete(steps, 699) == 1).all()
    assert trace.passport.missing == 15 and [gap.bars for gap in trace.passport.gaps] == [15]
    series = to_series(trace, TASK)
    assert series.segment[699] == 0 and series.segment[700] == 1 and series.step_seconds == 0.2


@pytest.mark.parametrize(
    "columns, times, text",
    [
        (RAW[:3], None, r"of which .*prev_bandwidth must be there; got delay, loss_ratio, receiving_rate "),
        (RAW, 1.7e9 + np.arange(1500.0), "a row every 200 ms; got one every 1000 ms"),
        (RAW, 1.7e9 + 0.2 * np.append(np.arange(1400), 1399 + np.arange(100) / 10), "more, the first at"),
    ],
)
def test_a_trace_that_cannot_be_read_says_why(tmp_path, columns, times, text):
    path, _ = own_trace(tmp_path, columns, times=times)
    with pytest.raises(DataError, match=text):
        read_trace(path, "home_200ms")


def test_a_sweep_trains_on_a_persons_traces_with_everything_the_preset_says(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("home.csv", "train.csv"):
        own_trace(tmp_path / "mine", NETWORK, name)
    small = ["--epochs", "1", "--set", "steps=2", "--set", "width=8", "--set", "batch=16"]
    where = ["--files", str(tmp_path / "mine"), "--executor", "local", "--run", str(tmp_path / "run"), "--json"]
    told = terminal("sweep", "--preset", "bandwidth", *where, *small)
    assert told.exit_code == 0, told.output
    run = RunFolder(tmp_path / "run")
    assert sorted(line.series for line in run.results()) == ["home_200ms", "train_200ms"]
    task = run.experiment.task
    assert dataclasses.replace(TASK) == task and task.ranges and task.weights and len(task.repeats) == 4
    for line in run.results():
        assert not line.synthetic and line.passport["market"] == "network"
        assert line.test["bandwidth"]["level_mae"] > 1e3  # bit/s
        model = open_run(tmp_path / "run")[line.series]
        told = model.forecast(tmp_path / "mine" / f"{line.series.partition('_')[0]}.csv")
        assert told.frame["bandwidth"].between(1e4, 1e8).all()
        assert {check.check for check in check_results([line])} >= {"target scale", "first loss", "gradient"}


def test_no_trace_is_made_up_unasked(tmp_path):
    told = terminal("sweep", "--preset", "bandwidth", "--run", tmp_path / "run")
    assert told.exit_code == 2 and "which trace?" in told.output and "--source synthetic" in told.output
    with pytest.raises(DataError, match="comes from a file of your own"):
        load_klines(PRESETS["bandwidth"])
    one = load_klines(vary(PRESETS["bandwidth"], source="synthetic"))["trace_200ms"]
    assert one.passport.synthetic and to_series(one, TASK).synthetic
    path, _ = own_trace(tmp_path)
    assert list(load_klines(vary(PRESETS["bandwidth"], source="files", files=str(path)))) == ["trace_200ms"]


def run(target_scale, epochs):
    """Train long enough to tell: a higher rate and inputs scaled by train rows, since S4's ranges leave them small."""
    settings = {"epochs": epochs, "steps": 100, "batch": 64, "learning_rate": 1e-3, "ranges": ()}
    experiment = vary(PRESETS["bandwidth"], target_scale=target_scale, **settings)
    job = Job("trace", experiment, (trace(12_000, seed=0, task=experiment.task),))
    (line,) = [message.line for message in work(job) if isinstance(message, Result)]
    return line


@pytest.mark.slow
def test_with_scaled_targets_it_learns_and_without_it_cannot():
    line, raw = run("persistence", 4), run("none", 1)
    judged, stuck = (each.test["bandwidth"] for each in (line, raw))
    assert judged["unit"] == "" and judged["level_mae"] > 1e4  # bit/s
    assert judged["r2"] > 0.5 and judged["r2"] > judged["r2_persistence"] + 0.05
    assert raw.persistence["train"] > 1e10  # as S4 saw it
    assert stuck["r2"] == pytest.approx(stuck["r2_persistence"], abs=0.01)


def test_what_the_changes_did_is_said_from_the_trials():
    r2 = {"none": 0.1, "all": 0.8} | {f"{name} alone": 0.2 for name in BANDWIDTH_CHANGES}
    r2 |= {f"all but {name}": 0.7 for name in BANDWIDTH_CHANGES}
    r2 |= {"all but a scaled target": None, "a scaled target alone": 0.4, "all but a smaller batch": 0.9}
    told = tell_changes(pd.DataFrame({"trial": list(r2), "r2": list(r2.values())}))
    assert told == [
        "R2 is 0.10 before the eight changes and 0.80 after them.",
        "It diverges without a scaled target; that change alone gives 0.40.",
        "It is higher without a smaller batch.",
    ]
    r2 |= {name: 0.438 + 1e-5 * k for k, name in enumerate(r2)}  # too short a training moves nothing
    (told,) = tell_changes(pd.DataFrame({"trial": list(r2), "r2": list(r2.values())}))
    assert told.startswith("R2 is 0.44 with and without each change: train longer")


def test_the_front_door_takes_traces_of_files(tmp_path):
    for name in ("link", "other"):
        make_network_trace(0, 300).to_csv(tmp_path / f"{name}.csv")
    shown = cpb.window("bandwidth", files=tmp_path / "link.csv")
    left, right = (axes.get_tightbbox() for axes in shown.axes)
    assert left.x1 < right.x0, "the words of one panel leave the other's alone"
    assert shown.spoken.startswith("link 200ms as a model sees it: 6 columns of 10 rows in, bandwidth of 1 row out")
    assert cpb.window("bandwidth", files=tmp_path, series="other_200ms").spoken.startswith("other 200ms ")
