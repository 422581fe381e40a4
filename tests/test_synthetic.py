"""The seeded market and network trace: reproducible, labelled, and predictable exactly where they say."""

import numpy as np
import pandas as pd
import pytest

from cpbkit.config.experiment import OHLC, OHLC_RETURNS, SYMBOLS
from cpbkit.data import synthetic
from cpbkit.data.synthetic import make_market, make_network_trace, planted_skill, predictable_series
from cpbkit.errors import DataError, UnknownName
from cpbkit.indicators import compute

START, END = "2025-03-01", "2025-05-23"  # 8064 bars of 15m


@pytest.fixture(scope="module")
def market():
    return make_market(SYMBOLS, ("15m", "1h"), START, END, seed=3)


def ridge(x, y, train, penalty=10.0):
    """Fit on the first `train` rows, forecast the rest; a gap of the horizon lies between."""
    mean, scale = x[:train].mean(0), x[:train].std(0)
    x = (x - mean) / scale
    fitted = x[: train - y.shape[1]]
    weights = np.linalg.solve(fitted.T @ fitted + penalty * np.eye(x.shape[1]), fitted.T @ y[: train - y.shape[1]])
    return x[train:] @ weights


def skill(klines, columns, lags=8, horizon=4):
    """Return the out-of-sample RMSE skill over persistence of a ridge on the last bars, on the last 30 %."""
    x = compute(klines.frame, columns).to_numpy()
    log_close = np.log(klines.frame["close"].to_numpy())
    t = np.arange(lags, len(x) - horizon)
    y = np.stack([log_close[t + h] - log_close[t] for h in range(1, horizon + 1)], axis=1)
    train = int(0.7 * len(t))
    error = y[train:] - ridge(np.concatenate([x[t - k] for k in range(lags)], axis=1), y, train)
    return 1 - np.sqrt((error**2).mean() / (y[train:] ** 2).mean())


def test_highs_and_lows_tell_the_next_closes_in_the_named_half_only(market):
    named = predictable_series(SYMBOLS, ("15m", "1h"), seed=3)
    assert len(named) == 20 and named < set(market)
    bound = planted_skill(4)
    assert 0.05 < bound < 0.08
    longer = make_market(SYMBOLS[:8], ["1h"], "2024-06-01", END, seed=3)  # of an hour's lean much hides in its moves
    for name, klines in (longer | {n: k for n, k in market.items() if n.endswith("_15m")}).items():
        got, least = skill(klines, OHLC_RETURNS), 0.6 if name.endswith("_15m") else 0.5
        assert (least * bound < got < 1.25 * bound) if name in named else got < 0.005, name


def test_the_bound_is_met_by_who_knows_the_plant(monkeypatch):
    # A forecast that knows the wicks and the size of the next bar comes to the closed form, none comes past it.
    frames = []
    for _ in range(2):
        frames.append(make_market(["BTCUSDT"], ["15m"], "2020-01-01", "2024-12-31")["BTCUSDT_15m"].frame)
        monkeypatch.setattr(synthetic, "PLANTED_SHARE", 0.0)  # the same draws without the plant
    monkeypatch.undo()
    log_close = np.log(frames[0]["close"].to_numpy())
    shock = np.diff(np.log(frames[1]["close"].to_numpy()), prepend=np.nan)
    returns = np.diff(log_close, prepend=np.nan)
    planted = returns - np.sqrt(1 - 0.38) * shock  # what the bar before has set
    for horizon in (1, 4, 10):
        t = np.arange(1, len(returns) - horizon)
        y = np.stack([log_close[t + h] - log_close[t] for h in range(1, horizon + 1)], axis=1)
        got = 1 - np.sqrt(((y - planted[t + 1][:, None]) ** 2).mean() / (y**2).mean())
        assert got == pytest.approx(planted_skill(horizon), abs=0.012), horizon


def test_close_returns_alone_tell_nothing(market):
    skills = [skill(klines, ["close_return"]) for klines in market.values()]
    assert max(skills) < 0.015 and np.mean(skills) < 0.002
    for klines in market.values():
        returns = compute(klines.frame, ["close_return"])["close_return"].dropna()
        z = [returns.autocorr(k) * np.sqrt(len(returns)) for k in range(1, 6)]
        assert np.abs(z).max() < 4.5
        assert abs(returns.mean()) / returns.std() * np.sqrt(len(returns)) < 4  # no drift
        by_hour = returns.groupby(returns.index.hour).mean() / returns.groupby(returns.index.hour).sem()
        assert np.abs(by_hour).max() < 4.5  # no season


def test_it_looks_like_a_market(market):
    returns = pd.DataFrame({n: np.log(k.frame.close).diff() for n, k in market.items() if n.endswith("15m")})
    correlation = returns.corr().to_numpy()[np.triu_indices(20, 1)]
    assert 0.25 < correlation.min() and correlation.max() < 0.75  # coins move together
    assert (returns.kurt() > 1).all()  # fat tails
    for name, r in returns.items():
        clusters = [r.abs().autocorr(k) for k in (1, 4, 20)]
        assert min(clusters) > 0.03, name  # volatility clusters
    hourly = returns.abs().groupby(returns.index.hour).mean().mean(axis=1)
    assert hourly.idxmax() in range(13, 18) and hourly.max() > 1.3 * hourly.min()  # daily rhythm
    weekend = returns.index.day_of_week >= 5
    assert returns[weekend].abs().mean().mean() < 0.95 * returns[~weekend].abs().mean().mean()
    prices = {name: klines.frame["open"].iloc[0] for name, klines in market.items()}
    assert 2e-6 < prices["PEPEUSDT_15m"] < 5e-5 and 20_000 < prices["BTCUSDT_1h"] < 180_000


def test_gaps_and_idle_bars_are_planted_and_told(market):
    for name, klines in market.items():
        passport = klines.passport
        assert passport.synthetic and passport.source == "synthetic" and "Synthetic" in passport.notes[0]
        assert passport.series == name and passport.missing == passport.expected - len(klines.frame)
    long = [klines.passport for name, klines in market.items() if name.endswith("15m")]
    assert all(passport.missing > 0 for passport in long)  # the venue halts for all at once
    assert len({passport.gaps for passport in long}) == 1
    assert sum(passport.zero_volume for passport in long) > 40
    frame = market["ETHUSDT_15m"].frame
    idle = frame[frame["volume"] == 0]
    assert len(idle) and (idle["high"] == idle["low"]).all()


def test_the_same_seed_gives_the_same_bars_whatever_else_is_asked_for(market):
    alone = make_market(["SOLUSDT"], ["1h"], START, END, seed=3)["SOLUSDT_1h"]
    pd.testing.assert_frame_equal(alone.frame, market["SOLUSDT_1h"].frame)
    assert alone.passport == market["SOLUSDT_1h"].passport
    longer = make_market(["SOLUSDT"], ["1h"], START, "2025-06-30", seed=3)["SOLUSDT_1h"].frame
    shared = alone.frame.index
    pd.testing.assert_frame_equal(longer.loc[shared], alone.frame, rtol=1e-12)
    other = make_market(["SOLUSDT"], ["1h"], START, END, seed=4)["SOLUSDT_1h"].frame
    assert abs(np.log(alone.frame.close).diff().corr(np.log(other.close).diff())) < 0.1


def put_together(frame, freq):
    how = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    return frame.resample(freq).agg(how).dropna()


@pytest.mark.parametrize("finer, longer", [("15m", "1h"), ("1m", "15m"), ("5m", "1h"), ("1h", "1d"), ("3m", "15m")])
def test_bars_of_every_length_are_of_one_path(finer, longer):
    both = make_market(["ETHUSDT"], [finer, longer], "2025-01-01", "2025-02-15")
    frame, whole = both[f"ETHUSDT_{finer}"].frame, both[f"ETHUSDT_{longer}"].frame
    freq = longer.replace("15m", "15min").replace("d", "D")
    sums = put_together(frame, freq)
    pd.testing.assert_frame_equal(sums[list(OHLC)], whole[list(OHLC)], check_exact=True, check_freq=False)
    assert np.allclose(sums["volume"], whole["volume"], rtol=1e-12)


def test_another_start_shows_the_same_market():
    whole = make_market(["SOLUSDT"], ["5m", "15m", "1h"], "2024-11-20", "2025-02-10", seed=1)
    for start, end in (("2024-12-31", "2025-01-20"), ("2025-01-02", "2025-01-02")):
        for name, klines in make_market(["SOLUSDT", "BTCUSDT"], ["5m", "15m", "1h"], start, end, seed=1).items():
            if name in whole:
                there = whole[name].frame[start:end]
                pd.testing.assert_frame_equal(klines.frame, there, check_exact=True, check_freq=False)
    before, after = (
        make_market(["SOLUSDT"], ["1h"], day, day)["SOLUSDT_1h"].frame for day in ("1999-01-01", "2031-01-01")
    )
    assert before["close"].iloc[0] != after["close"].iloc[0]


def test_the_named_half_depends_on_coin_and_seed_only():
    both = predictable_series(SYMBOLS, ["15m"], 0), predictable_series(SYMBOLS, ["15m"], 1)
    assert len(both[0]) == len(both[1]) == 10 and not both[0] & both[1]
    assert "BTCUSDT_15m" in both[0] and predictable_series(["BTCUSDT"], ["15m"], 0) < both[0]
    own = ["ABCUSDT"]
    assert predictable_series(own, ["1h"], 0) != predictable_series(own, ["1h"], 1)
    assert "ABCUSDT_1h" in make_market(own, ["1h"], "2025-01-01", "2025-01-03")


def test_bars_are_possible_and_on_every_grid():
    market = make_market(["BTCUSDT"], ["1m", "3d", "1w"], "2025-01-01", "2025-01-31")
    weeks = market["BTCUSDT_1w"].frame
    assert (weeks.index.day_of_week == 0).all() and len(weeks) == 4
    for klines in market.values():
        f = klines.frame
        assert (f.high >= f[["open", "close"]].max(axis=1)).all()
        assert (f.low <= f[["open", "close"]].min(axis=1)).all()


def test_errors_say_the_rule():
    with pytest.raises(DataError, match=r"start must not be after end; got 2025-02-01 \.\. 2025-01-01"):
        make_market(["BTCUSDT"], ["1h"], "2025-02-01", "2025-01-01")
    with pytest.raises(DataError, match=r"made-up bars may span 20,000 days; got 2025-01-01 \.\. 9998-12-31"):
        make_market(["BTCUSDT"], ["1h"], "2025-01-01", "9998-12-31")
    with pytest.raises(UnknownName, match=r"interval .* got '7m'"):
        make_market(["BTCUSDT"], ["7m"], "2025-01-01", "2025-01-02")
    with pytest.raises(DataError, match="no 1w bar starts within"):
        make_market(["BTCUSDT"], ["1w"], "2025-01-01", "2025-01-02")


def test_the_network_trace_can_be_learnt_once_scaled():
    trace = make_network_trace(seed=0, rows=20_000)
    pd.testing.assert_frame_equal(trace.iloc[:500], make_network_trace(0, 500))
    assert trace["loss_ratio"].between(0, 1).all() and (trace.drop(columns="delay_gradient") > 0).all(axis=None)
    assert (np.diff(trace.index.asi8) == 200_000_000).all()
    assert (trace["prev_bandwidth"][1:].to_numpy() == trace["bandwidth"][:-1].to_numpy()).all()
    assert 0.002 < (trace["loss_ratio"] > 0.01).mean() < 0.05 and trace["loss_ratio"].max() > 0.2
    assert trace["bandwidth"].mean() > 1e6 and trace["delay"].max() > 10_000  # bit/s, and glitches in ms
    congested = trace["bandwidth"] < 0.4 * trace["bandwidth"].median()
    assert 0.01 < congested.mean() < 0.12
    target = trace["bandwidth"].to_numpy()
    x = np.log(trace[["delay", "receiving_rate", "prev_bandwidth"]].to_numpy())
    t = np.arange(30, len(x) - 1)
    train = int(0.8 * len(t))
    inputs = np.concatenate([x[t - k] for k in range(30)], axis=1)
    truth = np.log(target[t + 1])[:, None]
    forecast = np.exp(ridge(inputs, truth - truth[:train].mean(), train) + truth[:train].mean())[:, 0]
    future = target[t + 1][train:]

    def r2(guess):
        return 1 - ((future - guess) ** 2).sum() / ((future - future.mean()) ** 2).sum()

    assert r2(forecast) > 0.6 and r2(forecast) > r2(target[t][train:]) + 0.05  # better than the last value
    assert make_network_trace(0, 0).empty
