"""Errors, scores and tests of forecasts: numpy in, plain numbers or arrays out."""

import math

import numpy as np
import pandas as pd
import scipy  # its `special` has Student's t too, and `stats` takes a second to load

LEVEL = 0.95  # of every interval
TURNS = 10  # of a position, at the least, for a fee: a trend that was met once is no timing


def rmse(truth, forecast, axis=None):
    """Return the root mean squared error over `axis`, in the unit of the inputs."""
    truth, forecast = _same_shape(truth, forecast)
    return np.sqrt(np.mean((truth - forecast) ** 2, axis=axis))


def mae(truth, forecast):
    """Return the mean absolute error, in the unit of the inputs."""
    truth, forecast = _same_shape(truth, forecast)
    return np.mean(np.abs(truth - forecast))


def mase(truth, forecast, scale) -> float:
    """Return the mean absolute error over all targets, in units of the mean of `scale`.

    `scale` (K,) is the mean absolute one-step error of persistence in train (Hyndman & Koehler 2006).
    """
    truth, forecast = _same_shape(truth, forecast)
    scale = np.asarray(scale, float)
    if not scale.mean() > 0:
        raise ValueError(f"the scale of MASE must be positive; got {scale.tolist()}: train never moves")
    return float(np.abs(truth - forecast).mean() / scale.mean())


def r2(truth, forecast) -> float:
    """Return the share of the variance explained; near 1 on price levels for any copy of the last price."""
    truth, forecast = _same_shape(truth, forecast)
    spread = np.sum((truth - truth.mean()) ** 2)
    if spread == 0:
        raise ValueError("R2 needs a truth that varies; got a constant")
    return float(1 - np.sum((truth - forecast) ** 2) / spread)


def mape(truth, forecast) -> float:
    """Return the mean absolute error in percent of the truth, which must have no zeros."""
    truth, forecast = _same_shape(truth, forecast)
    if (truth == 0).any():
        raise ValueError(f"MAPE needs a truth without zeros; got {int((truth == 0).sum())} of {truth.size}")
    return float(100 * np.mean(np.abs((truth - forecast) / truth)))


def skill(error, baseline_error):
    """Return 1 - error / baseline error: above 0 is better than the baseline, 1 is perfect."""
    return 1 - error / baseline_error


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a binomial share (Wilson 1927); `trials` may be fractional."""
    if trials <= 0:
        raise ValueError(f"a share needs at least one trial; got {trials!r}")
    z = scipy.special.ndtri(0.5 + LEVEL / 2)
    share = hits / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def direction(truth, forecast, overlap: int = 1) -> tuple[float, float, float] | None:
    """Return the share of right signs with its 95 % interval, or None where no pair has two signs.

    truth, forecast (N,): moves over windows of which `overlap` share each bar, so that only N / overlap are
    independent, and the interval is as wide as theirs. A zero on either side says nothing and is left out.
    """
    truth, forecast = _same_shape(truth, forecast)
    told = (truth != 0) & (forecast != 0)
    count = int(told.sum())
    if count == 0:
        return None
    share = float(np.mean(np.sign(truth[told]) == np.sign(forecast[told])))
    trials = max(1.0, count / overlap)
    return share, *wilson(share * trials, trials)


def echo_lag(levels, rows, forecast, most: int) -> int:
    """Return the lag in rows, 0 to `most`, at which forecasts for `rows` (N,) are nearest to the levels (R,).

    Forecasts that repeat the last value lag by as many rows as they look ahead; perfect ones do not lag.
    """
    forecast, rows = forecast[rows >= most], rows[rows >= most]
    return int(np.argmin([np.mean((forecast - levels[rows - lag]) ** 2) for lag in range(most + 1)]))


def pinball(truth, forecast, quantile):
    """Return the pinball loss of a forecast of the quantile, element by element."""
    error = np.asarray(truth, float) - np.asarray(forecast, float)
    quantile = np.asarray(quantile, float)
    return np.maximum(quantile * error, (quantile - 1) * error)


def prediction_interval_score(truth, lower, upper, alpha: float):
    """Return the score of a central 1 - alpha interval: its width, plus 2 / alpha of each miss.

    Element by element, in the unit of the truth; less is better (Gneiting & Raftery 2007).
    """
    truth, lower, upper = (np.asarray(a, float) for a in (truth, lower, upper))
    missed = np.maximum(lower - truth, 0) + np.maximum(truth - upper, 0)
    return (upper - lower) + 2 / alpha * missed


def crps(members, truth) -> np.ndarray:
    """Return the CRPS of a forecast that is an ensemble (V,), against truths (W,), exactly: E|X - y| - E|X - X'| / 2.

    Gneiting & Raftery 2007; from sorted members and their running sums.
    """
    members, truth = np.sort(np.asarray(members, float)), np.asarray(truth, float)
    count, running = len(members), np.concatenate([[0.0], np.cumsum(members)])
    below = np.searchsorted(members, truth)
    away = (truth * (2 * below - count) + running[-1] - 2 * running[below]) / count
    return away - np.sum((2 * np.arange(1, count + 1) - count - 1) * members) / count**2


def diebold_mariano(loss, other_loss, horizon: int) -> tuple[float, float]:
    """Return statistic and two-sided p value of equal expected loss; negative favours `loss`.

    loss, other_loss (N,): losses of two forecasts from successive origins, each up to `horizon` bars ahead.
    Diebold & Mariano 1995 with the correction and the t distribution of Harvey, Leybourne & Newbold 1997.
    Kernel: rectangular over the first horizon - 1 autocovariances, as in both papers; that sum can turn out
    negative, then Bartlett weights over the same lags, which cannot. Equal losses give (0, 1).
    """
    loss, other_loss = _same_shape(loss, other_loss)
    count = len(loss)
    if horizon < 1 or count <= horizon:
        raise ValueError(f"the test needs more origins than the horizon ({horizon}); got {count}")
    difference = loss - other_loss
    mean = difference.mean()
    centred = difference - mean
    if not centred.any():
        return (0.0, 1.0) if mean == 0 else (math.copysign(math.inf, mean), 0.0)
    covariances = np.array([centred[lag:] @ centred[: count - lag] for lag in range(horizon)]) / count
    variance = covariances[0] + 2 * covariances[1:].sum()
    if variance <= 0:
        variance = covariances[0] + 2 * (1 - np.arange(1, horizon) / horizon) @ covariances[1:]
    correction = (count + 1 - 2 * horizon + horizon * (horizon - 1) / count) / count
    statistic = float(mean / math.sqrt(variance / count) * math.sqrt(correction))
    return statistic, float(2 * scipy.special.stdtr(count - 1, -abs(statistic)))


def degrees_of_freedom(count: int, horizon: int) -> int:
    """Return how many cosines the long-run variance of `count` successive losses is taken from.

    0.41 N^(2/3) is the choice of Lazarus, Lewis, Stock & Watson (2018). Windows that share a horizon of bars are worth
    N / horizon: more cosines than a sixth of that (measured, `calibration`) say BEATS too often of trained models.
    """
    return int(max(4, min(0.41 * count ** (2 / 3), count / (6 * horizon), count - 1)))


def cosines(values: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Return means (...) and cosine transforms (..., nu) of series (..., N): the mean of their squares is the long-run
    variance, that of their products the covariance (Müller 2004).
    """
    count = values.shape[-1]
    waves = scipy.fft.dct(values, axis=-1)[..., 1 : degrees_of_freedom(count, horizon) + 1] / math.sqrt(2 * count)
    return values.mean(axis=-1), waves


def cosine_test(difference, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Return statistics and two-sided p values of means of zero: Student's t over the equal-weighted cosine variance.

    difference (..., N): of losses from successive origins, each up to `horizon` bars ahead. Unlike Diebold & Mariano's
    it keeps its size with few windows and persistent errors (Lazarus, Lewis, Stock & Watson 2018). All 0: (0, 1).
    """
    difference = np.asarray(difference, float)
    mean, waves = cosines(difference, horizon)
    constant = np.ptp(difference, axis=-1) == 0  # its variance is rounding alone
    error = np.where(constant, 0.0, np.sqrt(np.mean(waves**2, axis=-1) / difference.shape[-1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(mean == 0, 0.0, mean / error)
    return statistic, 2 * scipy.special.stdtr(waves.shape[-1], -np.abs(statistic))


def ratio_confidence_interval(above, below, horizon: int, outside=(1 - LEVEL) / 2) -> tuple[float, float]:
    """Return the confidence interval of mean(above) / mean(below): each c where `above - c below` may have mean zero.

    above, below (N,): from successive origins that share up to `horizon` bars; below has a positive mean. It is
    `cosine_test` inverted (Fieller 1954), so it holds 1 exactly where that test does not reject equal means. Where the
    mean below could be 0 as well, nothing is known of the ratio, and an end is infinite. outside: the chance of a
    ratio beyond each end, one number or two.
    """
    (a, b), waves = cosines(np.stack([above, below]).astype(float), horizon)
    spread = waves @ waves.T / waves.shape[1] / len(above)  # (2, 2), of the means
    ends = []
    for end, share in zip((-1, 1), np.broadcast_to(outside, 2), strict=True):
        t = -scipy.special.stdtrit(waves.shape[1], share)
        # (a - c b)^2 <= t^2 (v_aa - 2 c v_ab + c^2 v_bb), a quadratic in c that holds at a / b.
        aa, ab, bb = (x - t * t * v for x, v in ((a * a, spread[0, 0]), (a * b, spread[0, 1]), (b * b, spread[1, 1])))
        ends.append((ab + end * math.sqrt(max(ab * ab - aa * bb, 0.0))) / bb if bb > 0 else end * math.inf)
    return float(ends[0]), float(ends[1])


def rank_correlation(truth, forecast, horizon: int) -> tuple[float, float, float] | None:
    """Return Spearman's correlation over windows that share up to `horizon` bars, with its 95 % interval.

    truth, forecast (N,). The interval is of the influence of each window, by `cosine_test`'s variance, on Fisher's
    scale. None where one of them is constant.
    """
    x, y = (pd.Series(v).rank().to_numpy() for v in _same_shape(truth, forecast))
    if not (np.ptp(x) and np.ptp(y)):
        return None
    x, y = ((v - v.mean()) / v.std() for v in (x, y))
    share = float(np.clip(np.mean(x * y), -1, 1))
    if abs(share) == 1:
        return share, share, share
    _, waves = cosines(x * y - share * (x * x + y * y) / 2, horizon)
    half = scipy.special.stdtrit(len(waves), 0.5 + LEVEL / 2) * math.sqrt(np.mean(waves**2) / len(x)) / (1 - share**2)
    centre = math.atanh(share)
    return share, math.tanh(centre - half), math.tanh(centre + half)


def break_even_fee(moves, forecast, horizon: int) -> tuple[float, float, float] | None:
    """Return the fee, in the unit of the moves, at which following the sign of a forecast earns nothing; and 95 % ends.

    moves, forecast (N,): over `horizon` bars from successive origins. The sign is held over the horizon and traded to
    the next one; the fee is of each unit traded (1 to enter, 2 to turn around), each of the `horizon` ways to begin
    counts alike. Only timing counts: what the mean position earns by itself is taken off. None where it turns
    fewer than ten times.
    """
    moves, forecast = _same_shape(moves, forecast)
    position = np.sign(forecast)
    earned, traded = (position - position.mean()) * moves, np.abs(position - np.roll(position, horizon))
    if np.count_nonzero(traded[horizon:]) < TURNS * horizon:  # each turn is seen by every way to begin
        return None
    earned, traded = earned[horizon:], traded[horizon:]
    fee = float(earned.mean() / traded.mean())
    return fee, *ratio_confidence_interval(earned, traded, horizon)


def holm(p_values) -> np.ndarray:
    """Return p values corrected for asking many times, in the order given (Holm 1979)."""
    p_values = np.asarray(p_values, float)
    inside = (p_values >= 0) & (p_values <= 1)
    if not inside.all():
        raise ValueError(f"p values must lie in [0, 1]; got {p_values[~inside][:3].tolist()}")
    order = np.argsort(p_values, kind="stable")
    steps = np.minimum(1, (len(p_values) - np.arange(len(p_values))) * p_values[order])
    corrected = np.empty_like(p_values)
    corrected[order] = np.maximum.accumulate(steps)
    return corrected


def _same_shape(truth, forecast) -> tuple[np.ndarray, np.ndarray]:
    # (N, 1) against (N,) would broadcast to (N, N) and give a plausible wrong number.
    truth, forecast = np.asarray(truth, float), np.asarray(forecast, float)
    if truth.shape != forecast.shape:
        raise ValueError(f"truth and forecast must have one shape; got {truth.shape} and {forecast.shape}")
    if truth.size == 0:
        raise ValueError("truth and forecast must hold at least one value; got none")
    return truth, forecast
