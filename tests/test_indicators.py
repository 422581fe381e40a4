"""Indicators against TA-Lib, exact integers, plain pandas and hand-worked answers; and that none looks ahead."""

import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpbkit import indicators
from cpbkit.config.experiment import OHLC, OHLC_RETURNS
from cpbkit.errors import CpbkitError, DataError, UnknownName
from cpbkit.indicators import INDICATORS, compute

talib = pytest.importorskip("talib", reason="TA-Lib has no wheel for Python 3.10")

WARM_UP = 400  # rows after which different starts of Wilder's average agree to 1e-10
AVERAGES = ("ema", "macd", "rsi", "atr", "adx", "plus_di", "minus_di", "keltner")


def seeded(rows=1500, seed=0, price=100.0, tick=0.01):
    """Draw bars on a tick, every 15 minutes from a Wednesday on."""
    rng = np.random.default_rng(seed)
    close = np.cumsum(rng.standard_t(4, rows)) * 0.003
    open_ = np.append(0.0, close[:-1]) + 0.0004 * rng.normal(size=rows)
    high = np.maximum(open_, close) + rng.exponential(0.002, rows)
    low = np.minimum(open_, close) - rng.exponential(0.002, rows)
    prices = np.rint(price / tick * np.exp([open_, high, low, close])).T * tick
    index = pd.date_range("2025-01-01", periods=rows, freq="15min", tz="UTC", name="open_time")
    return pd.DataFrame(prices, index, OHLC).assign(volume=rng.lognormal(3, 1, rows))


def ta_lib(frame):
    """Compute with TA-Lib what it has; price comparisons on integer ticks, where it makes no rounding error."""
    high, low, close, volume = (frame[c].to_numpy(float).copy() for c in ("high", "low", "close", "volume"))
    ticks = [np.rint(x * (1e10 if close[0] < 1e-3 else 1e8)) for x in (high, low, close)]  # whole numbers
    macd, signal, histogram = talib.MACD(close, 12, 26, 9)
    upper, middle, lower = talib.BBANDS(close, 20, 2, 2, 0)
    k, d = talib.STOCH(high, low, close, 14, 3, 0, 3, 0)
    return {
        "sma": talib.SMA(close, 20),
        "ema": talib.EMA(close, 20),
        "wma": talib.WMA(close, 20),
        "rsi": talib.RSI(close, 14),
        "macd": macd,
        "macd_signal": signal,
        "macd_histogram": histogram,
        "roc": talib.ROC(close, 12),
        "bb_upper": upper,
        "bb_lower": lower,
        "bb_width": (upper - lower) / middle,
        "atr": talib.ATR(high, low, close, 14),
        "adx": talib.ADX(*ticks, 14),
        "plus_di": talib.PLUS_DI(*ticks, 14),
        "minus_di": talib.MINUS_DI(*ticks, 14),
        "stoch_k": k,
        "stoch_d": d,
        "cci": talib.CCI(high, low, close, 20),
        "williams_r": talib.WILLR(high, low, close, 14),
        "obv": talib.OBV(close, volume),
        "mfi": talib.MFI(*ticks, volume, 14),
        "donchian_upper": talib.MAX(high, 20),
        "donchian_lower": talib.MIN(low, 20),
        "keltner_upper": talib.EMA(close, 20) + 2 * talib.ATR(high, low, close, 10),
        "keltner_lower": talib.EMA(close, 20) - 2 * talib.ATR(high, low, close, 10),
    }


def largest_error(frame):
    """Return, for each indicator, the largest distance from TA-Lib, in its own scale: price, volume or points."""
    expected = ta_lib(frame)
    got = compute(frame, expected)
    # Where nothing moved for a whole window TA-Lib gives 0; ours is the middle, tested below.
    flat = (frame.high.rolling(20).max() == frame.low.rolling(20).min()).to_numpy()
    errors = {}
    for name, values in expected.items():
        price = frame.close.rolling(20).mean()
        scale = {"price": price, "price difference": price, "volume": frame.volume.sum()}.get(
            INDICATORS[name].unit, 1.0
        )
        error = np.abs(got[name] - values) / scale
        errors[name] = error[WARM_UP:][~flat[WARM_UP:]].max(skipna=False)
    return errors


def read_market(path):
    raw = pd.read_csv(path)
    return raw.set_index(pd.to_datetime(raw.pop("open_time_ms"), unit="ms", utc=True))


@pytest.mark.parametrize("price, tick", [(100.0, 0.01), (1e-5, 1e-8), (60_000.0, 0.01)])
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_ta_lib_on_seeded_bars(price, tick, seed):
    errors = largest_error(seeded(seed=seed, price=price, tick=tick))
    assert {name: error for name, error in errors.items() if not error <= 1e-8} == {}


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["1h", "15m"])
def test_equal_to_ta_lib_on_real_bars(market, interval):
    paths = sorted((market / interval).glob("*.csv.gz"))
    assert len(paths) == 20
    wrong = {}
    for path in paths:
        errors = largest_error(read_market(path))
        wrong |= {f"{path.name} {name}": error for name, error in errors.items() if not error <= 1e-8}
    assert wrong == {}


def test_first_values_stand_where_ta_lib_has_them():
    frame = seeded(200)
    late = {"macd", "stoch_k"}  # TA-Lib holds them back until the last of its outputs is there
    for name, values in ta_lib(frame).items():
        if name not in late:
            assert np.array_equal(np.isnan(compute(frame, [name])[name]), np.isnan(values)), name


def test_directional_movement_is_exact_on_coarse_ticks():
    frame = seeded(600, price=5e-6, tick=1e-8)  # moves of a few ticks: many ties
    high, low, close = ([round(x * 1e8) for x in frame[c]] for c in ("high", "low", "close"))
    average = dict.fromkeys(("plus", "minus", "range"), 0.0)
    ties = 0
    for t in range(1, 600):
        up, down = high[t] - high[t - 1], low[t - 1] - low[t]  # whole numbers, nothing rounded
        ties += up == down and up > 0
        now = {
            "plus": up if up > down and up > 0 else 0,
            "minus": down if down > up and down > 0 else 0,
            "range": max(high[t], close[t - 1]) - min(low[t], close[t - 1]),
        }
        for key, x in now.items():  # Wilder: a plain mean of the first 14, then one fourteenth of each
            average[key] += x / 14 if t <= 14 else (x - average[key]) / 14
    assert ties > 20
    got = compute(frame, ["plus_di", "minus_di"]).iloc[-1]
    assert got["plus_di"] == pytest.approx(100 * average["plus"] / average["range"], rel=1e-12)
    assert got["minus_di"] == pytest.approx(100 * average["minus"] / average["range"], rel=1e-12)
    as_floats = talib.PLUS_DI(*(frame[c].to_numpy() for c in ("high", "low", "close")), 14)
    error = np.abs(compute(frame, ["plus_di"])["plus_di"] - as_floats)[WARM_UP:]
    assert error.max() > 0.1  # points: what the docstring of `excess` speaks of


def test_equal_to_plain_pandas_where_ta_lib_has_nothing():
    frame = seeded(700)
    log = np.log(frame)
    close, volume, n = log.close, frame.volume, 20
    typical = (frame.high + frame.low + frame.close) / 3
    body, jump = close - log.open, log.open - close.shift()
    rogers = (log.high - close) * (log.high - log.open) + (log.low - close) * (log.low - log.open)
    k = 0.34 / (1.34 + (n + 1) / (n - 1))
    middle, deviation = frame.close.rolling(n).mean(), frame.close.rolling(n).std(ddof=0)
    day = frame.index.floor("D")
    expected = {
        **{f"{c}_return": log[c] - close.shift() for c in OHLC},
        **{f"log_{c}": log[c] for c in OHLC},
        "volatility": close.diff().rolling(n).std(),
        "volatility_parkinson": np.sqrt(((log.high - log.low) ** 2).rolling(n).mean() / (4 * np.log(2))),
        "volatility_garman_klass": np.sqrt(
            (0.5 * (log.high - log.low) ** 2 - (2 * np.log(2) - 1) * body**2).rolling(n).mean()
        ),
        "volatility_rogers_satchell": np.sqrt(rogers.rolling(n).mean()),
        "volatility_yang_zhang": np.sqrt(
            jump.rolling(n).var() + k * body.rolling(n).var() + (1 - k) * rogers.rolling(n).mean()
        ),
        "true_range_mean": pd.concat(
            [frame.high - frame.low, (frame.high - frame.close.shift()).abs(), (frame.low - frame.close.shift()).abs()],
            axis=1,
        )
        .max(axis=1, skipna=False)
        .rolling(14)
        .mean(),
        "bb_position": (frame.close - middle + 2 * deviation) / (4 * deviation),
        "volume_norm": volume / volume.rolling(n).mean(),
        "volume_zscore": (volume - volume.rolling(n).mean()) / volume.rolling(n).std(ddof=0),
        "vwap": (typical * volume).rolling(n).sum() / volume.rolling(n).sum(),
        "vwap_session": (typical * volume).groupby(day).cumsum() / volume.groupby(day).cumsum(),
        "obv_rel": (np.sign(frame.close.diff()) * volume).rolling(n).sum() / volume.rolling(n).sum(),
    }
    pd.testing.assert_frame_equal(
        compute(frame, expected), pd.DataFrame(expected), rtol=1e-9, atol=1e-12, check_freq=False
    )


def test_relative_forms_are_shares_of_the_close():
    frame = seeded(300)
    all_of_them = compute(frame, INDICATORS)
    relative = [name for name in INDICATORS if name.endswith("_rel") and name != "obv_rel"]
    assert {"bb_upper_rel", "atr_rel", "macd_rel", "ema_rel", "vwap_rel"} <= set(relative)
    for name in relative:
        level = name.removesuffix("_rel")
        less = {"price": 1, "price difference": 0}[INDICATORS[level].unit]
        assert np.allclose(all_of_them[name], all_of_them[level] / frame.close - less, atol=1e-13, equal_nan=True)
    priced = [name for name, i in INDICATORS.items() if i.unit.startswith("price")]
    assert {f"{name}_rel" for name in priced} == set(relative)


def test_only_price_levels_depend_on_the_unit_of_price():
    frame = seeded(300)
    scaled = frame.copy()
    scaled[list(OHLC)] *= 1024.0
    free = [name for name, i in INDICATORS.items() if not i.unit.startswith(("price", "log price"))]
    assert len(free) >= 44
    pd.testing.assert_frame_equal(compute(frame, free), compute(scaled, free), rtol=1e-9, atol=1e-11)


def test_no_two_columns_say_the_same():
    values = compute(seeded(1200), INDICATORS).iloc[60:]
    correlation = np.abs(np.corrcoef(values.to_numpy().T))
    np.fill_diagonal(correlation, 0)
    same = np.argwhere(correlation > 1 - 1e-9)
    assert [(values.columns[i], values.columns[j]) for i, j in same] == []


@pytest.mark.parametrize("t", [0, 13, 19, 20, 27, 96, 250])
def test_no_indicator_looks_ahead(t):
    frame = seeded(300)
    before = compute(frame, INDICATORS).iloc[: t + 1]
    changed = seeded(300, seed=9, price=7.0).set_axis(frame.index)
    changed.iloc[: t + 1] = frame.iloc[: t + 1]
    for other in (changed, frame.iloc[: t + 1]):
        after = compute(other, INDICATORS).iloc[: t + 1]
        for name in INDICATORS:
            assert before[name].to_numpy().tobytes() == after[name].to_numpy().tobytes(), name


def test_rows_are_taken_as_given_across_a_gap():
    frame = seeded(300)
    holed = frame.drop(frame.index[150:160])
    own_time = ["hour_sin", "hour_cos", "week_sin", "week_cos", "vwap_session", "vwap_session_rel"]
    names = [name for name in INDICATORS if name not in own_time]
    closed_up = holed.set_axis(frame.index[: len(holed)])
    assert np.array_equal(compute(holed, names), compute(closed_up, names), equal_nan=True)
    assert compute(holed, ["close_return"]).iloc[150, 0] == np.log(frame.close.iloc[160]) - np.log(
        frame.close.iloc[149]
    )


def test_constant_prices_have_a_stated_answer():
    frame = seeded(300)
    frame[list(OHLC)] = 0.07  # not exact in binary
    got = compute(frame, INDICATORS).iloc[-1]
    middle = {"rsi": 50, "stoch_k": 50, "stoch_d": 50, "mfi": 50, "williams_r": -50, "bb_position": 0.5}
    for name, value in middle.items():
        assert got[name] == value, name
    still = ["cci", "adx", "plus_di", "minus_di", "roc", "obv_rel", "bb_width", *OHLC_RETURNS]
    still += [
        name for name in INDICATORS if name.startswith("volatility") or name in ("atr", "atr_rel", "true_range_mean")
    ]
    assert (got[still] == 0).all()
    for name in ("sma", "ema", "wma", "bb_upper", "bb_lower", "vwap", "keltner_lower", "donchian_upper"):
        assert got[name] == pytest.approx(0.07, rel=1e-14), name
    assert np.isfinite(got).all()


def test_no_volume_has_a_stated_answer():
    frame = seeded(300).assign(volume=0.0)
    got = compute(frame, INDICATORS)
    assert np.isfinite(got.iloc[60:]).all(axis=None)
    assert (got[["volume_norm", "volume_zscore", "obv", "obv_rel"]].iloc[60:] == 0).all(axis=None)
    assert (got["mfi"].iloc[60:] == 50).all()
    typical = (frame.high + frame.low + frame.close) / 3
    assert np.allclose(got["vwap"].iloc[60:], typical.iloc[60:], rtol=1e-15)
    assert np.allclose(got["vwap_session"], typical, rtol=1e-15)


def test_a_nan_stays_as_long_as_stated():
    frame = seeded(2600)
    whole = compute(frame, INDICATORS)
    frame.iloc[150] = np.nan
    got = compute(frame, INDICATORS)
    assert got.iloc[:150].equals(whole.iloc[:150])
    timeless = ["hour_sin", "hour_cos", "week_sin", "week_cos"]
    assert got.drop(columns=timeless).iloc[150].isna().all()
    for name in INDICATORS:
        if name.startswith("obv"):
            assert got[name].iloc[150:].isna().all(), name
        elif name.startswith(AVERAGES):
            assert got[name].iloc[150:660].isna().all(), name
            pd.testing.assert_series_equal(got[name].iloc[-200:], whole[name].iloc[-200:], rtol=1e-11)
        elif name.startswith("vwap_session"):
            assert got[name].iloc[150:192].isna().all() and got[name].iloc[192:].equals(whole[name].iloc[192:])
        else:
            assert got[name].iloc[175:].equals(whole[name].iloc[175:]), name


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows_are_warm_up(rows):
    got = compute(seeded(300).iloc[:rows], INDICATORS)
    assert got.shape == (rows, len(INDICATORS)) and set(got.dtypes) == {np.dtype(float)}
    at_once = got.iloc[:1].dropna(axis=1).columns
    logs, clock = {f"log_{c}" for c in OHLC}, {"hour_sin", "hour_cos", "week_sin", "week_cos"}
    if rows:
        assert set(at_once) == logs | clock | {"obv", "vwap_session", "vwap_session_rel", "bar_range", "bar_volatility"}


def test_warm_up_is_never_filled():
    first = compute(seeded(300), INDICATORS).notna().idxmax()
    rows = {name: seeded(300).index.get_loc(at) for name, at in first.items()}
    assert {name: rows[name] for name in ("close_return", "roc", "sma", "volatility", "rsi", "atr", "adx")} == {
        "close_return": 1,
        "roc": 12,
        "sma": 19,
        "volatility": 20,
        "rsi": 14,
        "atr": 14,
        "adx": 27,
    }
    assert rows["macd"] == 25 and rows["macd_signal"] == 33 and max(rows.values()) == 33


def test_the_calendar_turns_once_a_day_and_once_a_week():
    index = pd.DatetimeIndex(["2025-03-03 00:00", "2025-03-03 06:00", "2025-03-06 12:00"])  # Monday, Thursday
    frame = pd.DataFrame(index=index)
    got = compute(frame, ["hour_sin", "hour_cos", "week_sin", "week_cos"])
    assert np.allclose(got.iloc[0], [0, 1, 0, 1])
    assert np.allclose(got[["hour_sin", "hour_cos"]].iloc[1], [1, 0])
    assert np.allclose(got.iloc[2], [0, -1, 0, -1])
    taipei = frame.set_axis(index.tz_localize("UTC").tz_convert("Asia/Taipei"))
    assert np.array_equal(compute(taipei, got.columns), got)


def test_results_keep_order_index_and_input():
    frame = seeded(100)
    copy = frame.copy()
    got = compute(frame, ["rsi", "log_close", "rsi"])
    assert list(got.columns) == ["rsi", "log_close", "rsi"] and got.index.equals(frame.index)
    assert np.array_equal(got.iloc[:, 0], got.iloc[:, 2], equal_nan=True)
    pd.testing.assert_frame_equal(frame, copy)


def test_results_do_not_depend_on_what_else_is_asked_for():
    frame = seeded(300)
    together = compute(frame, INDICATORS)
    for name in INDICATORS:
        assert together[name].equals(compute(frame, [name])[name]), name


def test_errors_say_what_is_missing():
    frame = seeded(50)
    with pytest.raises(UnknownName, match=r"'rsi14' \(nearest: rsi"):
        compute(frame, ["rsi14"])
    with pytest.raises(DataError, match="mfi needs the column 'volume'; got open, high, low, close"):
        compute(frame[list(OHLC)], ["mfi"])
    with pytest.raises(DataError, match="need an index of times; got int64"):
        compute(frame.reset_index(drop=True), ["hour_sin"])


def test_each_entry_needs_exactly_the_columns_it_names():
    frame = seeded(120)
    for name, indicator in INDICATORS.items():
        alone = compute(frame[list(indicator.inputs)], [name])
        assert alone.equals(compute(frame, [name])), name
        assert indicator.description and indicator.unit


numbers = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), max_size=60)


@given(numbers, st.integers(1, 40))
def test_windows_equal_a_plain_loop(x, n):
    x = np.array(x)
    for operation, plain in ((np.add, np.sum), (np.maximum, np.max), (np.minimum, np.min)):
        expected = [plain(x[t - n + 1 : t + 1]) if t >= n - 1 else np.nan for t in range(len(x))]
        scale = 1e-9 + 1e-13 * np.abs(x).sum()
        assert np.allclose(indicators.rolling(operation, x, n), expected, rtol=0, atol=scale, equal_nan=True)
    square = [np.var(x[t - n + 1 : t + 1]) * n if t >= n - 1 else np.nan for t in range(len(x))]
    scale = 1e-9 + 1e-12 * (x**2).sum()
    assert np.allclose(indicators.rolling_square(x, n), square, rtol=1e-9, atol=scale, equal_nan=True)


def test_a_price_that_left_the_window_leaves_no_trace():
    frame = seeded(300)
    burst = frame.copy()
    burst.iloc[100] *= 1e12
    names = ["sma", "bb_width", "volatility", "mfi", "cci", "vwap", "volume_zscore", "donchian_upper"]
    assert np.array_equal(compute(frame, names).iloc[125:], compute(burst, names).iloc[125:])


def test_no_python_loop_over_bars():
    def calls(rows):
        frame, count = seeded(rows), 0

        def tick(*_):
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(tick)
        try:
            compute(frame, INDICATORS)
        finally:
            sys.setprofile(before)
        return count

    calls(300)
    assert calls(3000) == calls(300)


def test_an_own_length_is_that_of_ta_lib():
    frame = seeded(800, seed=3)
    high, low, close, volume = (frame[c].to_numpy(float).copy() for c in ("high", "low", "close", "volume"))
    oracle = {
        "rsi(21)": talib.RSI(close, 21),
        "sma(50)": talib.SMA(close, 50),
        "roc(5)": talib.ROC(close, 5),
        "atr(7)": talib.ATR(high, low, close, 7),
        "williams_r(30)": talib.WILLR(high, low, close, 30),
        "mfi(9)": talib.MFI(high, low, close, volume, 9),
    }
    found = compute(frame, oracle)
    for name, expected in oracle.items():
        np.testing.assert_allclose(found[name][100:], expected[100:], rtol=1e-6, atol=1e-6, err_msg=name)
    pd.testing.assert_series_equal(
        compute(frame, ["rsi(14)"])["rsi(14)"], compute(frame, ["rsi"])["rsi"], check_names=False
    )
    for wrong, said in (("macd(9)", "no single length.*These have one: .*rsi"), ("rsi(1)", "at least 2 bars")):
        with pytest.raises(CpbkitError, match=said):
            compute(frame, [wrong])
    for wrong in ("rsj(21)", "rsi(21", "rsi()"):
        with pytest.raises(UnknownName, match="nearest: rsi"):
            compute(frame, [wrong])
