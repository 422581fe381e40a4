"""Own features: named, computed and audited by how they are made. Every planted leak is caught, no honest one is."""

import dataclasses
import textwrap

import numpy as np
import pandas as pd
import pytest

import cpbkit as cpb
from cpbkit import indicators
from cpbkit.config import own
from cpbkit.config.experiment import Task
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError, DataError
from cpbkit.evaluation import making
from cpbkit.windows.series import Table, from_klines

HONEST = """
    import numpy as np
    import cpbkit as cpb

    def log(bars): return np.log(bars["close"])

    @cpb.feature
    def mean(bars): return bars["close"].rolling(9).mean()
    @cpb.feature
    def weighted(bars): return bars["close"].ewm(span=12).mean()
    @cpb.feature
    def momentum(bars): return log(bars).diff(5)
    @cpb.feature
    def filled(bars): return bars["close"].where(bars["close"] > bars["close"].rolling(5).mean()).ffill()
    @cpb.feature
    def expanding(bars): return bars["close"] / bars["close"].expanding().mean()
    @cpb.feature
    def rank(bars): return bars["close"].rolling(24).rank(pct=True)
    @cpb.feature
    def quantile(bars): return bars["close"].rolling(24).quantile(0.9)
    @cpb.feature
    def deviation(bars): return log(bars).diff().rolling(24).std()
    @cpb.feature
    def skewness(bars): return log(bars).diff().rolling(24).skew()
    @cpb.feature
    def together(bars): return log(bars).diff().rolling(24).corr(bars["volume"].diff())
    @cpb.feature
    def drawdown(bars): return bars["close"] / bars["close"].cummax() - 1
    @cpb.feature
    def since_high(bars): return bars["high"].rolling(24).apply(lambda x: len(x) - 1 - x.argmax(), raw=True)
    @cpb.feature
    def hour(bars): return bars.index.hour
    @cpb.feature
    def weekday(bars): return bars.index.day_of_week == 5
    @cpb.feature
    def body(bars): return (bars["close"] - bars["open"]) / (bars["high"] - bars["low"] + 1e-9)
    @cpb.feature
    def convolved(bars): return np.convolve(log(bars), [0.5, 0.3, 0.2])[: len(bars)]
    @cpb.feature
    def last_full_day(bars):
        daily = bars["close"].resample("1D").last()
        return daily.shift(1).reindex(bars.index.floor("D")).to_numpy()
    @cpb.feature
    def four_hours(bars):
        closed = bars["close"].resample("4h", label="right", closed="left").last()
        return closed.reindex(bars.index, method="ffill")
    @cpb.feature
    def so_far_today(bars): return bars["volume"].groupby(bars.index.floor("D")).cumsum()
    @cpb.feature
    def change(bars): return bars["close"].pct_change(fill_method=None)
"""
LEAKS = {
    "the label": "np.log(bars['close']).shift(-1) - np.log(bars['close'])",
    "the next bar": "bars['close'].shift(-1)",
    "a zero-phase filter": "signal.filtfilt(*signal.butter(2, 0.2), bars['close'])",
    "four hours off by one": "bars['close'].resample('4h').last().reindex(bars.index, method='ffill')",
    "a daily bar at its open": "bars['close'].resample('1D').last().reindex(bars.index.floor('D')).to_numpy()",
    "gaps interpolated": "bars['close'].resample('1h').mean().interpolate().rolling(3, center=True).mean()"
    ".reindex(bars.index)",
    "a gap filled from behind": "bars['close'].where(bars.index.hour != 5).bfill()",
    "a centred mean": "bars['close'].rolling(9, center=True).mean()",
    "a back-fill of the warm-up": "bars['close'].rolling(20).mean().bfill()",
    "a scaler of all rows": "(bars['close'] - bars['close'].mean()) / bars['close'].std()",
    "a roll that wraps": "np.roll(bars['close'], 5)",
    "a rank among all rows": "bars['close'].rank()",
    "a trend line of all rows": "np.polyval(np.polyfit(range(len(bars)), bars['close'], 1), range(len(bars)))",
    "a spectrum cut off": "np.fft.irfft(np.fft.rfft(bars['close'].to_numpy())[:20], len(bars))",
    "principal components": "np.linalg.svd(bars[['open', 'close']] - bars[['open', 'close']].mean())[0][:, 0]",
    "the day's range": "bars['high'].groupby(bars.index.floor('D')).transform('max')",
    "the highest of all": "bars['close'] / bars['close'].max()",
    "a share of all rows": "np.arange(len(bars)) / len(bars)",
    "the last row alone": "np.where(np.arange(len(bars)) == len(bars) - 2, bars['close'].iloc[-1], 0.0)",
    "the first row alone": "np.where(np.arange(len(bars)) == 0, bars['close'].iloc[1], 0.0)",
    "the row before a day": "np.where(bars.index.hour == 23, bars['close'].shift(-1) > bars['close'], 0.0)",
    "what was remembered": "memory.setdefault('mean', bars['close'].mean()) + 0 * bars['close']",
    "a mean from tomorrow's end": "bars['close'][::-1].ewm(span=5).mean()[::-1]",
    "a difference ahead": "-bars['close'].diff(-1)",
}


@pytest.fixture(scope="module")
def bars():
    made = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-01-09")["BTCUSDT_1h"]
    frame = made.frame.drop(made.frame.index[[100, 101, 102, 160]])
    return dataclasses.replace(made, frame=frame)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(source, name="mine.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        own.forget([f"{name}:x"])
        return name

    yield write
    own.forget(["mine.py:x"])


def test_twenty_honest_features_raise_no_alarm(bars, file, monkeypatch):
    for name in ("SPREAD", "CLOCK", "BORDERS"):
        monkeypatch.setattr(making, name, 12)  # twenty columns at two hundred spots take their time
    names = indicators.features_in(file(HONEST))
    assert len(names) == 20 and names[0] == "mine.py:mean"
    found = making.check_making(bars, Task(features=("close_return", *names)))
    assert found.verdict == "OK", found.evidence
    assert found.evidence.startswith("22 columns are made anew")
    real = dataclasses.replace(bars, passport=dataclasses.replace(bars.passport, synthetic=False))
    assert making.check_telling(real, Task(features=names, horizon=1)).verdict == "OK"


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_each_leak_is_caught_as_a_function(bars, file, leak):
    source = f"import numpy as np\nfrom scipy import signal\nmemory = {{}}\ndef leak(bars):\n    return {leak}\n"
    found = making.check_making(bars, Task(features=("close_return", f"{file(source)}:leak")))
    assert found.verdict == "FAIL" and found.evidence.startswith("`mine.py:leak` of row ")


@pytest.mark.parametrize("name", ["the label", "the next bar", "a zero-phase filter", "a difference ahead"])
def test_a_finished_column_is_never_ok_and_one_that_tells_too_much_is_an_alarm(bars, name):
    from scipy import signal

    column = np.asarray(eval(LEAKS[name], {"bars": bars.frame, "np": np, "signal": signal}))
    frame = bars.frame.assign(mystery=column)
    real = dataclasses.replace(bars, frame=frame, passport=dataclasses.replace(bars.passport, synthetic=False))
    task = Task(features=("close_return", "mystery"), horizon=1)
    assert "mystery" not in making.check_making(real, task).evidence
    (note,) = making.note_finished(real, task)
    assert note.verdict == "NOTE" and note.evidence.startswith("mystery came finished with the bars")
    alarm = making.check_telling(real, task)
    assert alarm.verdict == "FAIL" and "`mystery` ranks moves 1 ahead" in alarm.evidence
    assert making.note_finished(bars, Task()) == []


@pytest.fixture(scope="module")
def load():
    """What a city draws each hour: it follows the temperature of the hour before, the clock and itself."""
    rng, hours = np.random.default_rng(0), np.arange(1200)
    index = pd.date_range("2025-01-01", periods=len(hours), freq="h", name="time")
    temperature, load = np.zeros((2, len(hours)))
    for t in hours[1:]:
        temperature[t] = 0.95 * temperature[t - 1] + rng.normal()
        load[t] = 0.9 * load[t - 1] + 0.3 * temperature[t - 1] + rng.normal()
    day = (hours % 24 >= 8) * (hours % 24 < 20)
    return pd.DataFrame({"load": 50 + 5 * day + load, "temperature": temperature, "day": day.astype(float)}, index)


def table_task(frame, *features):
    return Task(features=(*frame, *features), targets=("load",), target_weights=(1.0,), context=24, horizon=4)


@pytest.mark.parametrize(
    "name", ["the next bar", "a zero-phase filter", "a centred mean", "a mean from tomorrow's end"]
)
def test_a_leak_of_a_table_is_caught_as_a_function_and_as_a_column(load, file, name):
    from scipy import signal

    leak = LEAKS[name].replace("close", "load")
    source = f"import numpy as np\nfrom scipy import signal\ndef leak(bars):\n    return {leak}\n"
    task = table_task(load, f"{file(source)}:leak")
    found = making.check_making(Table("city", load), task)
    assert found.verdict == "FAIL" and found.evidence.startswith("`mine.py:leak` of row ")
    spoilt = load.assign(mystery=np.asarray(eval(leak, {"bars": load, "np": np, "signal": signal}))).dropna()
    (note,) = making.note_finished(Table("city", spoilt), table_task(spoilt))
    assert note.verdict == "NOTE" and note.evidence.startswith("load, temperature, day, mystery came finished with")
    alarm = making.check_telling(Table("city", spoilt), table_task(spoilt))
    assert alarm.verdict == "FAIL" and "`mystery` ranks what the past of `load` leaves open" in alarm.evidence


def test_each_column_of_a_table_that_tells_too_much_is_named(load):
    spoilt = load.assign(tomorrow=load["load"].shift(-1), smooth=load["load"].rolling(3, center=True).mean()).dropna()
    alarm = making.check_telling(Table("city", spoilt), table_task(spoilt))
    assert alarm.verdict == "FAIL" and "`tomorrow` ranks what the past of `load`" in alarm.evidence
    assert alarm.evidence.endswith(". Likewise `smooth` of `load`"), alarm.evidence


@pytest.mark.parametrize("lead", [2, 3, 8])
def test_a_column_that_is_the_target_some_rows_ahead_is_named_with_its_lead(lead):
    rng = np.random.default_rng(1)
    walk = pd.DataFrame({"load": rng.normal(size=1200).cumsum()})
    spoilt = walk.assign(helper=walk["load"].shift(-lead) + 0.1 * rng.normal(size=1200)).dropna()
    alarm = making.check_telling(Table("walk", spoilt), table_task(spoilt))
    assert alarm.verdict == "FAIL", alarm.evidence
    said = f"`helper` ranks the move of `load` {lead} rows ahead with a correlation of 0.9"
    assert alarm.evidence.startswith(said) and "above 0.75: it knows that row, unless" in alarm.evidence
    copied = walk.assign(helper=walk["load"].shift(lead)).dropna()
    assert making.check_telling(Table("walk", copied), table_task(copied)).verdict == "NOTE"  # its own past


def test_honest_columns_of_a_seasonal_table_know_no_later_row():
    rng, rows = np.random.default_rng(2), np.arange(1600)
    shape = 10 * rng.normal(size=96)  # of a day of quarters of an hour, longer than the past that is removed
    load = pd.Series(50 + shape[rows % 96] + 4 * (rows // 96 % 7 < 5) + rng.normal(size=len(rows)))
    clock = {
        "sine": np.sin(rows * np.pi / 48),
        "hour": rows % 96 // 4,
        "open": rows % 96 >= 48,
        "shape": shape[rows % 96],
    }
    copies = {"yesterday": load.shift(96), "yesterday, 12 on": load.shift(84), "mean": load.rolling(96).mean()}
    honest = pd.DataFrame({"load": load, **clock, **copies}).astype(float).dropna()
    told = making.check_telling(Table("city", honest), table_task(honest))
    assert told.verdict == "OK", told.evidence
    spoilt = honest.assign(helper=honest["load"].shift(-12)).dropna()
    alarm = making.check_telling(Table("city", spoilt), table_task(spoilt))
    assert alarm.verdict == "FAIL" and alarm.evidence.startswith("`helper` ranks the move of `load` 12 rows ahead")
    assert "Likewise" not in alarm.evidence


@pytest.mark.parametrize(("lead", "horizon"), [(3, 1), (8, 1), (12, 10)])
def test_a_finished_column_that_holds_a_later_close_is_an_alarm(lead, horizon):
    made = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-02-01")["BTCUSDT_1h"]
    frame = made.frame.assign(mystery=made.frame["close"].shift(-lead))
    real = dataclasses.replace(made, frame=frame, passport=dataclasses.replace(made.passport, synthetic=False))
    alarm = making.check_telling(real, Task(features=("close_return", "mystery"), horizon=horizon))
    assert alarm.verdict == "FAIL" and f"`mystery` ranks the move of the bar {lead} ahead" in alarm.evidence


def test_honest_columns_and_functions_of_a_table_raise_no_alarm(load, file):
    source = "def mean(table):\n    return table['load'].rolling(9).mean()\n"
    task = table_task(load, f"{file(source)}:mean")
    for frame in (load, load.reset_index(drop=True)):  # with times, and in even steps
        made, told = making.check_making(Table("city", frame), task), making.check_telling(Table("city", frame), task)
        assert made.verdict == "OK" and made.evidence.startswith("1 columns are made anew"), made
        assert told.verdict == "OK", told
    assert making.check_making(Table("city", load), table_task(load)).verdict == "NOTE"


def test_spots_lie_around_gaps_days_and_ends(bars):
    spots = making.choose_spots(bars.frame)
    last = len(bars.frame) - 2
    assert {0, 1, 2, 98, 99, 100, 155, 156, 157, last - 1, last} <= set(spots)  # 100 is the first row after a gap
    midnight = int(np.flatnonzero(bars.frame.index.hour == 0)[3])
    assert {midnight - 2, midnight - 1, midnight} <= set(spots)
    long = pd.date_range("2020-01-01", periods=40_000, freq="1h", tz="UTC")
    assert len(making.choose_spots(pd.DataFrame(index=long))) < 500
    assert {time for time in bars.frame.index[spots].hour} == set(range(24))


def test_own_features_are_columns_of_a_series(bars, file):
    name = f"{file(HONEST)}:momentum"
    series = from_klines(bars, Task(features=("close_return", name), context=5))
    assert series.features == ("close_return", name)
    expected = np.log(bars.frame["close"]).diff(5).to_numpy()[-100:]
    assert series.inputs[-100:, 1] == pytest.approx(expected)
    assert cpb.feature is indicators.feature


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return bars['close'].iloc[5:]", "a number for each bar, on their index"),
        ("return np.zeros(3)", r"for each of the 212 bars; got shape \(3,\)"),
    ],
)
def test_what_is_no_feature_says_so(bars, file, body, message):
    name = f"{file(f'import numpy as np{chr(10)}def wrong(bars):{chr(10)}    {body}')}:wrong"
    with pytest.raises(DataError, match=message):
        indicators.compute(bars.frame, [name])
    with pytest.raises(CpbkitError, match=r"has none\. Mark each with @cpbkit.feature"):
        indicators.features_in("mine.py")
    with pytest.raises(CpbkitError, match=r"such as mine.py; got 'gone.py'"):
        indicators.features_in("gone.py")


def test_a_sweep_takes_a_file_of_features_and_keeps_it(file, tmp_path):
    from cpbkit.config.experiment import vary
    from cpbkit.config.presets import PRESETS
    from cpbkit.runs.sweep import sweep

    source = HONEST[: HONEST.index("    @cpb.feature\n    def momentum")]
    quick = vary(PRESETS["quick"], source="synthetic", symbols=("BTCUSDT",), intervals=("1h",))
    quick = vary(quick, start="2025-01-01", end="2025-01-20", epochs=1, steps=2, context=8, horizon=2)
    experiment = vary(quick, features=(*quick.task.features, *indicators.features_in(file(source))))
    (line,) = sweep(experiment, tmp_path / "run", executor="local")
    assert line.status == "done" and experiment.own_parts == ("mine.py:mean", "mine.py:weighted")
    assert (tmp_path / "run" / "own" / "mine.py").read_text() == textwrap.dedent(source)
    assert (tmp_path / "run" / "losses" / "BTCUSDT_1h.npz").exists()
