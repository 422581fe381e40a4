"""The front door: what a person gets from a run, and that a trained model forecasts as it did in training."""

import errno
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import terminal

import cpbkit as cpb
from cpbkit.api import Verdicts
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError, DataError, RunError, SourceError, UnknownName
from cpbkit.evaluation.results import MADE_UP, ResultLine
from cpbkit.models import zoo
from cpbkit.runs import trained
from cpbkit.runs.settle import settle
from cpbkit.training.loop import forecast
from cpbkit.windows.series import from_klines
from cpbkit.windows.windows import Windows

SETTINGS = {
    "context": 12,
    "horizon": 3,
    "width": 8,
    "epochs": 2,
    "steps": 20,
    "targets": ("close", "high"),
    "target_weights": (1.0, 1.0),
}
NAMES = "BTCUSDT_1h", "ETHUSDT_1h"
LATER = pd.Timestamp("2025-06-01", tz="UTC")


@pytest.fixture(scope="module")
def bars():
    return make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-01-31")


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    folder = tmp_path_factory.mktemp("door") / "run"
    return cpb.sweep("quick", data=bars, folder=folder, executor="local", quiet=True, **SETTINGS)


def trained_forecasts(run, klines):
    """What the network gives at every origin of the test split, by the way of the training: levels (W, H, K)."""
    model, name = run[klines.passport.series], klines.passport.series
    series = from_klines(klines, model.experiment.task)
    windows = Windows([series], model.experiment.task, "cpu", next(iter(model.weights.values())).dtype)
    net = zoo.restore(model.experiment.task, model.experiment.model, model.weights)
    y = forecast(net, windows, "test", [0])[0]
    assert series.name == name
    rows = windows.splits[0].test
    return rows, np.exp(series.anchors[rows][:, None] + y)


@pytest.mark.parametrize("name", NAMES)
def test_a_forecast_is_that_of_the_training(run, bars, name):
    rows, levels = trained_forecasts(run, bars[name])
    for i in (0, len(rows) // 2, len(rows) - 1):
        given = bars[name].frame.iloc[: rows[i] + 2]  # the first return needs a bar before it, so row 0 is bar 1
        found = run[name].forecast(given, now=LATER)
        assert found.frame[["close", "high"]].to_numpy() == pytest.approx(levels[i], rel=1e-6)
        assert found.last_bar == given.index[-1] and found.last["close"] == pytest.approx(given["close"].iloc[-1])
        assert list(found.frame.index) == list(pd.date_range(given.index[-1], periods=4, freq="1h")[1:])


def test_many_series_are_forecast_as_each_alone(run, bars):
    together = run.forecast(bars, now=LATER)
    assert tuple(together) == NAMES
    for name, found in together.items():
        pd.testing.assert_frame_equal(found.frame, run[name].forecast(bars[name], now=LATER).frame, rtol=1e-6)


def test_a_frame_has_a_row_for_each_finished_series(run):
    frame = run.frame()
    assert frame["series"].tolist() == [line.series for line in run.results] and set(frame["status"]) == {"done"}
    assert frame["best_epoch"].between(1, frame["epochs"]).all() and (frame["seconds"] > 0).all()


def test_a_ray_cluster_is_reached_at_its_address_with_the_share_of_a_gpu(monkeypatch):
    from cpbkit.runs import sweep

    asked = []
    monkeypatch.setattr(sweep.executors, "connect", lambda address: asked.append(address) or {"CPU": 8.0, "GPU": 2.0})
    place = sweep._place(cpb.Ray("first:6379", gpus=0.5), None)
    assert (asked, place.workers, place.gpus) == (["first:6379"], 4, 0.5)
    assert sweep._place("ray", 3).workers == 3 and asked[1] == ""


def test_the_interval_lies_around_the_forecast_and_says_what_it_held(run, bars):
    found = run["BTCUSDT_1h"].forecast(bars["BTCUSDT_1h"], now=LATER)
    line = next(line for line in run.results if line.series == "BTCUSDT_1h")
    held = line.prediction_intervals["price"]
    assert (found.nominal, found.coverage) == (0.9, held["coverage"])
    half = np.array(held["half_width"])  # (H, K)
    for k, target in enumerate(("close", "high")):
        frame = found.frame
        assert np.log(frame[f"{target}_high"] / frame[target]).to_numpy() == pytest.approx(half[:, k])
        assert np.log(frame[target] / frame[f"{target}_low"]).to_numpy() == pytest.approx(half[:, k])
    assert "90 % interval" in str(found) and found.verdict.split(":")[0] in str(found)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"width": 2.5}, "width must be a whole number; got 2.5"),
        ({"workers": "two"}, "workers must be a whole number from 1 on; got 'two'"),
        ({"workers": 0}, "workers must be a whole number from 1 on; got 0"),
        ({"minutes": 0}, "minutes must be a number above 0; got 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_rule(bars, tmp_path, given, said):
    with pytest.raises(CpbkitError, match=f"^{said}$"):
        cpb.sweep("quick", data=bars, folder=tmp_path / "run", **given, executor="local", quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(CpbkitError, match=r"cpb.compare\(a, b\); got list"):
        cpb.compare([tmp_path])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda frame: frame.drop(frame.index[-4]), "must be without a gap; bars are missing before"),
        (lambda frame: frame.iloc[-9:], "needs 12 bars"),
        (lambda frame: frame.iloc[::4], "1h"),
        (lambda frame: frame.drop(columns="close"), "close missing"),
    ],
)
def test_bars_that_do_not_fit_are_refused_with_the_rule(run, bars, spoil, words):
    with pytest.raises(DataError, match=words):
        run["BTCUSDT_1h"].forecast(spoil(bars["BTCUSDT_1h"].frame), now=LATER)


def test_one_series_that_does_not_fit_stops_no_other(run, bars, monkeypatch, caplog):
    given = {name: bars[name].frame for name in NAMES}
    found = run.forecast({NAMES[0]: given[NAMES[0]], NAMES[1]: given[NAMES[1]].iloc[-9:]}, now=LATER)
    assert list(found) == [NAMES[0]] and "ETHUSDT_1h: a forecast needs 12 bars" in caplog.text
    with pytest.raises(DataError, match=r"no series can be forecast:\n  BTCUSDT_1h.*\n  ETHUSDT_1h.*\n.*--bars FILE"):
        run.forecast({name: frame.iloc[-9:] for name, frame in given.items()}, now=LATER)
    with pytest.raises(DataError, match="needs at least one finished model"):
        run.forecast({})
    monkeypatch.setattr("cpbkit.runs.trained.newest_bars", lambda models, now: bars)
    with pytest.raises(DataError, match="its newest bar is of 2025-01-31 23:00 UTC; is it still traded"):
        run.forecast(now=LATER)
    wanted = run.forecast(now=pd.Timestamp("2025-02-01 00:05", tz="UTC"))
    assert set(wanted) == set(NAMES)
    for same in ("2025-02-01 00:05", pd.Timestamp("2025-02-01 01:05+01:00")):
        assert run.forecast(now=same)[NAMES[0]].last_bar == wanted[NAMES[0]].last_bar
    with pytest.raises(DataError, match="now must be a time, such as 2025-05-31 12:00; got 'soon'"):
        run.forecast(now="soon")


def test_bars_may_have_their_times_in_a_column_as_in_a_file_of_the_cache(run, bars):
    frame = bars["BTCUSDT_1h"].frame
    want = run["BTCUSDT_1h"].forecast(frame, now=LATER)
    got = run["BTCUSDT_1h"].forecast(frame.reset_index(), now=LATER)
    pd.testing.assert_frame_equal(got.frame, want.frame)


def test_a_model_is_told_in_a_line(run):
    model = run["BTCUSDT_1h"]
    assert repr(model).startswith("TrainedModel('BTCUSDT_1h'): ") and "\n" not in repr(model)
    assert "tensor" not in repr(model) and model.verdict in repr(model)


def test_a_name_stands_for_itself_where_names_are_asked_for(tmp_path):
    told = settle("quick", {"symbols": "BTC, ETHUSDT", "intervals": "1h", "targets": "close", "start": "2025-01-01",
                            "end": "2025-01-31"}).experiment  # fmt: skip
    assert told.data.symbols == ("BTCUSDT", "ETHUSDT") and told.data.intervals == ("1h",)
    columns = settle("quick", {"features": "my file.py:net", "targets": pd.Index(["close", "high"])}).experiment.task
    assert columns.features == ("my file.py:net",) and columns.targets == ("close", "high")
    assert told.task.targets == ("close",) and told.task.target_weights == (1.0,)
    with pytest.raises(CpbkitError, match=r"names the values of each setting, .*got \{'learning_rate': 0\.001\}"):
        settle("quick", {"search": {"learning_rate": 1e-3}})


def test_bars_of_another_series_and_a_bar_that_is_not_closed_are_refused(run, bars):
    with pytest.raises(DataError, match="must be of the model's series BTCUSDT_1h; got ETHUSDT_1h"):
        run["BTCUSDT_1h"].forecast(bars["ETHUSDT_1h"], now=LATER)
    last = bars["BTCUSDT_1h"].frame.index[-1]
    with pytest.raises(DataError, match="must be closed"):
        run["BTCUSDT_1h"].forecast(bars["BTCUSDT_1h"].frame, now=last + pd.Timedelta(minutes=59))
    run["BTCUSDT_1h"].forecast(bars["BTCUSDT_1h"].frame, now=last + pd.Timedelta(minutes=60))


def test_a_run_shows_what_it_found(run, tmp_path):
    found = run.verdicts()
    assert len(found.to_frame()) == 2 and "of 2" in str(found)
    page = found._repr_html_()
    assert all(name in page for name in NAMES) and "95 % interval" in page
    link = run.report(tmp_path / "out.html")
    assert "<html" in (tmp_path / "out.html").read_text() and 'href="' in link._repr_html_()
    assert not (run.folder / "report.html").exists(), "the report went elsewhere"
    assert "<svg" in run.plot()._repr_html_() and repr(run.plot()).endswith("characters of HTML>")
    assert repr(run).endswith("quick, 2 of 2 done") and list(run) == list(NAMES)


def test_a_run_is_opened_by_its_folder_and_says_what_it_lacks(run, tmp_path):
    again = cpb.open_run(run.folder)
    assert again.experiment == run.experiment and again.results == run.results
    with pytest.raises(RunError, match="is no run folder"):
        cpb.open_run(tmp_path)
    with pytest.raises(UnknownName, match="nearest: BTCUSDT_1h"):
        again["BTCUSDT"]
    model = run.folder / "models" / "ETHUSDT_1h.safetensors"
    kept = model.read_bytes()
    model.unlink()
    with pytest.raises(RunError, match="no model of ETHUSDT_1h"):
        again["ETHUSDT_1h"]
    model.write_bytes(kept[:-100])
    with pytest.raises(RunError, match="no model"):
        again["ETHUSDT_1h"]
    model.write_bytes(kept)


def test_a_change_of_settings_begins_another_run_and_a_repeat_finds_the_old(bars, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = SETTINGS | {"epochs": 1, "steps": 2}
    one = {"BTCUSDT_1h": bars["BTCUSDT_1h"].frame}
    first = cpb.sweep("quick", data=one, executor="local", quiet=True, **settings)
    again = cpb.sweep("quick", data=one, executor="local", quiet=True, **settings)
    other = cpb.sweep("quick", data=one, executor="local", quiet=True, **settings | {"steps": 3})
    assert first.folder == again.folder != other.folder
    assert first.results == again.results


def test_the_terminal_forecasts_with_the_same_words(run, bars, tmp_path):
    path = tmp_path / "BTCUSDT_1h.csv"
    bars["BTCUSDT_1h"].frame.to_csv(path)
    told = terminal("forecast", run.folder, "--symbols", "BTC", "--bars", path, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)["BTCUSDT_1h"]
    assert found["bars"][0]["time"] == "2025-02-01T00:00" and found["verdict"]
    want = run["BTCUSDT_1h"].forecast(bars["BTCUSDT_1h"], now=LATER).frame["close"].iloc[0]
    assert found["bars"][0]["close"] == pytest.approx(want, rel=1e-6)
    chosen = ["forecast", str(run.folder), "--symbols", "BTC,SOL"]
    assert "has no model of SOLUSDT; it has BTCUSDT_1h" in terminal(*chosen).output
    both = terminal("forecast", run.folder, "--intervals", "1h", "--bars", path)
    assert both.exit_code == 2 and "choose one of BTCUSDT_1h, ETHUSDT_1h" in both.output
    other = terminal("forecast", run.folder, "--symbols", "ETH", "--bars", path)
    assert other.exit_code == 1 and "ETHUSDT_1h" in other.output and "BTCUSDT" in other.output
    wrong = terminal("forecast", run.folder)
    assert wrong.exit_code == 1 and "given as frames" in wrong.output


def test_the_synthetic_market_is_forecast_from_its_last_whole_day(tmp_path):
    where = {"source": "synthetic", "symbols": ["BTCUSDT"], "intervals": ["1h"], "start": "2025-01-01"}
    run = cpb.sweep("quick", folder=tmp_path, executor="local", quiet=True, end="2025-01-31", **where, **SETTINGS)
    found = run["BTCUSDT_1h"].forecast(now=pd.Timestamp("2025-02-10 12:30", tz="UTC"))
    assert f"{found.last_bar:%Y-%m-%d %H:%M}" == "2025-02-09 23:00" and "synthetic: no market" in str(found)


def test_own_files_and_frames_name_their_series_themselves(bars, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("cpbkit.runs.sweep.sweep", lambda experiment, _, **place: begun.append((experiment, place)))
    bars["BTCUSDT_1h"].frame.to_csv(tmp_path / "BTC_USDT-1h.csv")
    cpb.sweep("quick", files=tmp_path, start="2025-01-05", folder=tmp_path / "run", quiet=True)
    frame = bars["ETHUSDT_1h"].frame.rename_axis("Date")
    cpb.sweep("quick", data={"eth-usdt": frame}, start="2025-01-05", folder=tmp_path / "run", quiet=True)
    for (experiment, place), name in zip(begun, NAMES, strict=True):
        assert experiment.series == (name,)
        (klines,) = place["klines"](experiment, print).values()
        assert klines.passport.first == "2025-01-05T00:00"


def test_settings_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    for wrong in ({"preset": "gruu"}, {"epoch": 3}, {"intervals": []}):
        with pytest.raises(CpbkitError):
            cpb.sweep(**{"preset": "quick", "source": "synthetic", "folder": tmp_path / "run", **wrong})
    assert not (tmp_path / "run").exists()


def test_the_door_is_light_and_lists_what_stands_at_it():
    code = "import sys, cpbkit; print(sorted({'torch', 'pandas', 'numpy', 'click'} & set(sys.modules)), dir(cpbkit))"
    shown = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("[] ") and "'open_run'" in shown.stdout
    assert set(cpb.presets().index) == set(PRESETS)
    with pytest.raises(AttributeError, match="at the door stand"):
        cpb.sweeep  # noqa: B018


def test_a_window_shows_what_goes_in_and_what_is_to_come(bars):
    figure = cpb.window("quick", data=bars, series="ETHUSDT_1h", quiet=True, runs="runs", **SETTINGS)
    start = "SYNTHETIC · ETH 1h as a model sees it: 4 columns of 12 bars in, close, high of 3 bars out. "
    assert figure.spoken.startswith(start)
    frame = bars["ETHUSDT_1h"].frame
    t = frame.index.get_loc(pd.Timestamp(re.search(r"newest bar is (.*) UTC", figure.spoken)[1], tz="UTC"))
    columns, ahead = figure.axes
    assert [len(line.get_xdata()) for line in columns.lines[1::2]] == [12] * 4
    for line, target in zip(ahead.lines[1:], ("close", "high"), strict=True):
        moves = 1e4 * np.log(frame[target].iloc[t : t + 4] / frame["close"].iloc[t])
        assert line.get_ydata() == pytest.approx(moves.to_numpy())
    with pytest.raises(UnknownName, match="nearest: ETHUSDT_1h"):
        cpb.window("quick", data=bars, series="ETHUSDT_2h")


def test_a_full_disk_ends_a_sweep_with_what_to_do(bars, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x")

    monkeypatch.setattr("cpbkit.runs.sweep.sweep", full)
    with pytest.raises(RunError, match=r"on device: runs/x\. Make room there.*cache remove.*goes on"):
        cpb.sweep("quick", data=bars, folder=tmp_path / "run", quiet=True)


def test_an_interrupt_ends_in_a_sentence_and_not_in_the_kit(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cpbkit.runs.settle.load_klines", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped; run the same again, it begins anew$") as told:
        cpb.map(source="synthetic", symbols=("BTCUSDT",), intervals=("1h",), start="2025-01-01", end="2025-01-31")
    assert told.traceback[-1].name == "stoppable" and told.value.__suppress_context__


def test_a_notebook_shows_what_went_wrong_and_the_switch_to_turn(monkeypatch):
    assert RunError("no run \x1b[2J here")._render_traceback_() == ["RunError: no run  here"]
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    said, step = SourceError("2 of 2 series are not available")._render_traceback_()
    assert "2 of 2" in said and "CPBKIT_ARCHIVE_URL" in step and "Internet" not in step
    assert SourceError("not there\nelsewhere: --archive-url\nagain")._render_traceback_()[:-1] == [
        "SourceError: not there",
        "again",
    ]
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert "Settings > Internet" in SourceError("")._render_traceback_()[1]


def test_any_table_gets_the_same_verdicts_and_forecasts(tmp_path):
    """One column comes back to its mean, which a model finds; the other is a walk, in which there is nothing."""
    rng = np.random.default_rng(0)
    level = np.zeros(1500)
    for t in range(1, 1500):
        level[t] = 0.3 * level[t - 1] + rng.standard_normal()
    index = pd.date_range("2025-01-01", periods=1500, freq="30min")
    table = pd.DataFrame({"load": 50 + level, "walk": rng.standard_normal(1500).cumsum()}, index)
    settings = {"context": 12, "horizon": 2, "width": 8, "epochs": 6, "executor": "local", "quiet": True}
    run = cpb.sweep("quick", data={"grid": table}, folder=tmp_path / "run", **settings)
    found = run.verdicts().to_frame().set_index("head")
    judged = run.results[0].test
    assert set(found.index) == set(judged) == {"load", "walk"}
    assert judged["load"]["rmse"] < 0.9 * judged["load"]["baselines"]["persistence"]
    assert judged["walk"]["rmse"] > 0.95 * judged["walk"]["baselines"]["persistence"]
    told = run["grid"].forecast(table)
    assert (
        list(told.frame.columns[:3]) == ["load", "load_low", "load_high"]
        and told.last["load"] == table["load"].iloc[-1]
    )
    assert run.report(tmp_path / "out.html") and "grid" in (tmp_path / "out.html").read_text()
    with pytest.raises(DataError, match="give its newest rows as a frame or a file"):
        run["grid"].forecast(7)
    holed = table.copy()
    holed.iloc[300, 0] = np.nan  # long before what the model sees
    holed.to_csv(tmp_path / "grid.csv")
    pd.testing.assert_frame_equal(run["grid"].forecast(tmp_path / "grid.csv").frame, told.frame)
    told_at = terminal("forecast", run.folder, "--bars", tmp_path / "grid.csv", "--series", "grid")
    words = run.verdicts().table.set_index("head")["verdict"]
    assert all(f"{head}: {word}: " in told_at.output for head, word in words.items())
    assert told_at.exit_code == 0 and "grid, from the bar of 2025-02-01 05:30 UTC" in told_at.output
    holed.iloc[-3, 0] = np.nan
    with pytest.raises(DataError, match="every value must be finite; grid has others in 2 of"):
        run["grid"].forecast(holed)
    asked = terminal("forecast", run.folder)
    assert asked.exit_code == 1 and "the bars of grid were given as frames" in asked.output
    with pytest.raises(UnknownName, match="column"):
        cpb.sweep("quick", data={"grid": table}, targets=["lod"], folder=tmp_path / "other", quiet=True)


def test_times_of_rows_shorter_than_a_minute_have_their_seconds():
    times = pd.date_range("2025-01-01 00:13:20", periods=3, freq="200ms", tz="UTC")
    told = trained.Forecast("link", pd.DataFrame({"rate": [1.0, 2.0]}, times[1:]), times[0], {"rate": 1.0}, None, None)
    assert "from the bar of 2025-01-01 00:13:20.000 UTC" in str(told)
    assert [bar["time"] for bar in told.to_dict()["bars"]] == ["2025-01-01T00:13:20.200", "2025-01-01T00:13:20.400"]


@pytest.mark.parametrize("data", [pd.DataFrame({"load": [1.0]}), "load.csv", {}])
def test_data_without_names_are_told_in_a_sentence(data):
    with pytest.raises(CpbkitError, match=r"data takes bars or tables by their names, data=\{\"load\": frame\}; got"):
        settle("quick", {}, data)


def test_numbers_and_days_are_checked_and_read():
    with pytest.raises(CpbkitError, match="epochs must be a number; got '3'"):
        settle("quick", {"epochs": "3"}, None)
    told = settle("quick", {"start": pd.Timestamp("2025-03-01"), "end": "2025-04-01"}, None)
    assert told.experiment.data.start == "2025-03-01"


def test_an_interval_may_be_written_otherwise():
    for written in ("15min", ["15m"], [15]):
        assert settle("quick", {"intervals": written}, None).experiment.data.intervals == ("15m",)


def test_of_bars_of_a_time_long_over_those_are_seen_that_were_closed_then(bars):
    now = pd.Timestamp("2025-02-01 00:30", tz="UTC")
    seen = trained._until(now, bars[NAMES[0]])
    assert seen.frame.index[-1] == pd.Timestamp("2025-01-31 23:00", tz="UTC")
    assert trained._until(LATER, bars[NAMES[0]]) is bars[NAMES[0]]


def test_the_same_settings_find_a_run_and_others_do_not(tmp_path):
    table = pd.DataFrame({"load": np.random.default_rng(0).standard_normal(400)})
    settings = {"context": 4, "horizon": 1, "width": 2, "epochs": 1, "steps": 2, "runs": tmp_path / "runs"}
    assert cpb.find_run("quick", data={"grid": table}, **settings) is None and not (tmp_path / "runs").exists()
    run = cpb.sweep("quick", data={"grid": table}, executor="local", quiet=True, **settings)
    found = cpb.find_run("quick", data={"grid": table}, executor="local", quiet=True, **settings)
    assert found.folder == run.folder and found.results == run.results
    assert cpb.find_run("quick", data={"grid": table}, **settings | {"epochs": 2}) is None
    assert cpb.find_run("quick", data={"grid": table + 1}, **settings) is None, "other data are another run"


def test_the_best_model_is_one_that_is_sure():
    table = pd.DataFrame({"series": ["A_1h", "B_1h", "C_1h"], "verdict": ["TIES", "BEATS", "BEATS"]})
    assert Verdicts(table, {}).best == "B_1h"
    assert Verdicts(table[:1], {}).best == "A_1h"


def test_without_days_the_last_twelve_months_are_taken_and_said(tmp_path, caplog):
    assert cpb.find_run("quick", runs=tmp_path) is None
    assert "No days were given: the last twelve whole months, 20" in caplog.text
    caplog.clear()
    assert cpb.find_run("quick", source="yahoo", start="2025-03-01", end="2025-03-02", runs=tmp_path) is None
    assert not caplog.text


def test_bars_that_only_their_passport_calls_made_up_are_told_above_the_verdicts():
    line = ResultLine("BTCUSDT_1h", "done", passport={"synthetic": True})
    assert Verdicts(pd.DataFrame(), {}, [line]).headlines == (MADE_UP,)
    assert Verdicts(pd.DataFrame(), {}, [replace(line, passport={})]).headlines == ()


def test_runs_that_do_not_compare_say_which_setting_differs(bars, tmp_path):
    given = {"data": bars, "epochs": 1, "steps": 5, "quiet": True, "executor": "local"}
    for horizon in (1, 2):
        cpb.sweep("quick", horizon=horizon, folder=tmp_path / str(horizon), **given)
    with pytest.raises(CpbkitError, match=r"same windows.* The runs differ in task\.horizon: 1 -> 2\. Sweep one anew"):
        cpb.compare(tmp_path / "1", tmp_path / "2")
