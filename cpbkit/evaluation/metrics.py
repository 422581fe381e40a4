"""Errors, scores and tests of forecasts: numpy in, plain numbers or arrays out."""

import math

import numpy as np
import scipy

BOOTSTRAP_RESAMPLES = 1000
LEVEL = 0.95  # of every interval


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


def skill(error, floor_error):
    """Return 1 - error / floor error: above 0 is better than the floor, 1 is perfect."""
    return 1 - error / floor_error


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a binomial share (Wilson 1927); `trials` may be fractional."""
    if trials <= 0:
        raise ValueError(f"a share needs at least one trial; got {trials!r}")
    z = scipy.stats.norm.ppf(0.5 + LEVEL / 2)
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


def interval_score(truth, lower, upper, alpha: float):
    """Return the score of a central 1 - alpha interval: its width, plus 2 / alpha of each miss.

    Element by element, in the unit of the truth; less is better (Gneiting & Raftery 2007).
    """
    truth, lower, upper = (np.asarray(a, float) for a in (truth, lower, upper))
    missed = np.maximum(lower - truth, 0) + np.maximum(truth - upper, 0)
    return (upper - lower) + 2 / alpha * missed


def crps_quantiles(truth, forecasts, quantiles):
    """Return the CRPS of quantile forecasts (..., Q) against the truth (...): twice the mean pinball loss.

    Exact in the limit of quantiles that are dense and even in (0, 1); with few of them it misses the tails.
    """
    truth = np.asarray(truth, float)
    return 2 * np.mean(pinball(truth[..., None], forecasts, np.asarray(quantiles, float)), axis=-1)


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
    return statistic, float(2 * scipy.stats.t.sf(abs(statistic), count - 1))


def block_bootstrap(loss, floor_loss, block: int) -> tuple[float, float]:
    """Return the 95 % interval of the skill 1 - sqrt(mean loss / mean floor loss) by a moving-block bootstrap.

    loss, floor_loss (N,): squared errors at successive origins, `block` of which stay together (Künsch 1989).
    """
    loss, floor_loss = _same_shape(loss, floor_loss)
    count = len(loss)
    if not 1 <= block <= count:
        raise ValueError(f"a block must be between 1 and the number of origins ({count}); got {block!r}")
    # A resample is a sum of block sums, so it costs N / block reads and not N.
    running = np.concatenate([np.zeros((2, 1)), np.cumsum([loss, floor_loss], axis=1)], axis=1)
    sums = running[:, block:] - running[:, :-block]  # (2, N - block + 1)
    blocks = -(-count // block)
    starts = np.random.default_rng(0).integers(0, count - block + 1, (BOOTSTRAP_RESAMPLES, blocks))
    mine, floor = sums[:, starts].sum(axis=2)
    low, high = np.quantile(1 - np.sqrt(mine / floor), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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
