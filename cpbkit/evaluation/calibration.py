"""Do verdicts keep their promises? Size, coverage and power on markets whose answer is known.

T bars, S series, N windows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy

from cpbkit.evaluation import metrics
from cpbkit.evaluation.verdicts import SIGNIFICANCE, is_enough, known_variance

MARKETS = ("iid", "GARCH-t", "stochastic volatility")
HORIZONS, WINDOWS = (1, 10, 24), (100, 300, 1000)
SERIES = 40  # of a run
RUNS = 100  # of each cell
TRAIN, BURN = 400, 200  # bars before the test, and before those
PHI = 0.3  # of the autoregression that can be found
NOISE = 0.15  # of the forecasts that are equally bad, in deviations of what they forecast
PERSISTENCE = 0.95  # of them, from one window to the next
LEAST_COVERAGE = 0.92  # of the 95 % interval
AT_ONCE = 25  # runs, so that memory stays small


@dataclass(frozen=True)
class Cell:
    """What verdicts did in one market at one horizon and number of windows. Shares are of 1."""

    market: str
    horizon: int  # bars
    windows: int
    runs: int  # of 40 series each
    has_word: bool  # else all is TOO FEW TO TELL
    any_beats: float = 0.0  # share of runs with any BEATS among forecasts that are as bad as the naive one
    any_beats_trained: float = 0.0  # the same of a model that was fitted where there is nothing to find
    pooled_beats: float = 0.0  # share of runs of the former whose pooled verdict is BEATS
    coverage: float = 1.0  # of the 95 % interval where the skill is 0
    coverage_planted: float = 1.0  # and where it is not
    found: float = 0.0  # share of planted series that are BEATS
    found_pooled: float = 0.0  # share of planted runs whose pooled verdict is BEATS

    def is_kept(self) -> bool:
        """Whether the promises hold: 5 % of runs within two standard errors, and the coverage."""
        allowed = SIGNIFICANCE + 2 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / self.runs) ** 0.5
        sizes = max(self.any_beats, self.any_beats_trained, self.pooled_beats)
        return sizes <= allowed and min(self.coverage, self.coverage_planted) >= LEAST_COVERAGE

    def evidence(self) -> str:
        """Say it in one line."""
        if not self.has_word:
            return "TOO FEW TO TELL, so nothing is promised"
        return (
            f"any BEATS of {SERIES} in {self.any_beats:.1%} of runs where nothing is, {self.any_beats_trained:.1%} "
            f"with a trained model, pooled {self.pooled_beats:.1%}; 95 % interval holds {self.coverage:.1%}, "
            f"{self.coverage_planted:.1%} of planted skills; of AR({PHI}) {self.found:.0%} found, "
            f"pooled {self.found_pooled:.0%}"
        )


def calibrate(markets=MARKETS, horizons=HORIZONS, windows=WINDOWS, runs: int = RUNS) -> Iterator[Cell]:
    """Judge runs of forty series in each market at each horizon and number of windows; yield a cell each."""
    for market, horizon, count in itertools.product(markets, horizons, windows):
        if is_enough(count, horizon):
            yield _cell(market, horizon, count, runs, np.random.default_rng([0, horizon, count]))
        else:
            yield Cell(market, horizon, count, runs, has_word=False)


def simulate(market: str, bars: int, series: int, rng: np.random.Generator) -> np.ndarray:
    """Return returns (T, S) without anything to find but, in two of the markets, their size.

    GARCH(1,1) with Student's t of 5 degrees and a persistence of 0.98; log variance as an AR(1) of 0.985.
    """
    shocks = rng.normal(size=(bars + BURN, series))
    if market == "iid":
        return shocks[BURN:]
    if market == "stochastic volatility":
        level = _autoregression(0.985, 0.15 * rng.normal(size=shocks.shape))
        return (np.exp(level / 2) * shocks)[BURN:]
    returns = np.empty_like(shocks)
    shocks = rng.standard_t(5, size=shocks.shape) / np.sqrt(5 / 3)
    variance = np.ones(series)
    for t, shock in enumerate(shocks):
        returns[t] = np.sqrt(variance) * shock
        variance = 0.02 + 0.08 * returns[t] ** 2 + 0.90 * variance
    return returns[BURN:]


def _autoregression(phi: float, news: np.ndarray) -> np.ndarray:
    """Return AR(1) series of coefficient phi that begin with their first news: (T, S) -> (T, S)."""
    return scipy.signal.lfilter([1], [1, -phi], news, axis=0)


def _cell(market: str, horizon: int, count: int, runs: int, rng: np.random.Generator) -> Cell:
    kinds: dict[str, list[np.ndarray]] = {"even": [], "trained": [], "planted": []}
    for begin in range(0, runs, AT_ONCE):
        series = SERIES * min(AT_ONCE, runs - begin)
        shocks = simulate(market, TRAIN + count + horizon, series, rng)
        kinds["even"].append(_even(shocks, horizon, count, rng))
        kinds["trained"].append(_trained(shocks, horizon, count))
        kinds["planted"].append(_trained(_autoregression(PHI, shocks), horizon, count))
    losses = {kind: np.concatenate(parts, axis=1) for kind, parts in kinds.items()}  # (2, S, N)
    planted = losses["planted"]
    true = planted[0].mean() / planted[1].mean()  # over all series and windows, as near as can be
    found = {kind: _beats(pair, horizon, SERIES) for kind, pair in losses.items()}
    together = {kind: _beats(_pool(pair), horizon, 1) for kind, pair in losses.items()}
    by_run = {kind: beats.reshape(runs, SERIES).any(axis=1).mean() for kind, beats in found.items()}
    return Cell(
        market,
        horizon,
        count,
        runs,
        has_word=True,
        any_beats=float(by_run["even"]),
        any_beats_trained=float(by_run["trained"]),
        pooled_beats=float(max(together["even"].mean(), together["trained"].mean())),
        coverage=_coverage(losses["even"], 1.0, horizon),
        coverage_planted=_coverage(planted, true, horizon),
        found=float(found["planted"].mean()),
        found_pooled=float(together["planted"].mean()),
    )


def _truth(returns: np.ndarray, horizon: int, count: int) -> Iterator[np.ndarray]:
    """Yield the move over 1 .. horizon bars from each origin, (N, S)."""
    path = np.concatenate([np.zeros((1, returns.shape[1])), returns.cumsum(axis=0)])
    start = len(returns) - horizon - count
    for ahead in range(1, horizon + 1):
        yield path[start + ahead + 1 : start + ahead + 1 + count] - path[start + 1 : start + 1 + count]


def _over_variance(losses: np.ndarray, returns: np.ndarray, horizon: int) -> np.ndarray:
    """Divide losses (2, N, S) by the variance known at their origins, as verdicts do; return (2, S, N)."""
    count = losses.shape[1]
    squares = returns**2 / np.mean(returns[:TRAIN] ** 2, axis=0)
    start = len(returns) - horizon - count
    return np.swapaxes(losses / known_variance(squares)[start : start + count], 1, 2)


def _even(returns: np.ndarray, horizon: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the losses of two forecasts of nothing but noise, persistent and of the same size."""
    size = NOISE * np.sqrt(horizon) * returns[:TRAIN].std(axis=0)
    noises = []
    for _ in range(2):
        news = rng.normal(size=(count + 1, returns.shape[1]))
        news[1:] *= np.sqrt(1 - PERSISTENCE**2)  # each window has the variance of the first
        noises.append(_autoregression(PERSISTENCE, news)[1:] * size)
    losses = np.zeros((2, count, returns.shape[1]))
    for ahead, move in enumerate(_truth(returns, horizon, count), start=1):
        losses += np.stack([(move - np.sqrt(ahead / horizon) * noise) ** 2 for noise in noises])
    return _over_variance(losses, returns, horizon)


def _trained(returns: np.ndarray, horizon: int, count: int) -> np.ndarray:
    """Return the losses of an AR(1) fitted on train rows, and of persistence."""
    x, y = returns[: TRAIN - 1], returns[1:TRAIN]
    phi = np.sum(x * y, axis=0) / np.sum(x * x, axis=0)
    start = len(returns) - horizon - count
    step, forecast = returns[start : start + count], np.zeros((count, returns.shape[1]))
    losses = np.zeros((2, count, returns.shape[1]))
    for move in _truth(returns, horizon, count):
        step = phi * step
        forecast = forecast + step
        losses += np.stack([(move - forecast) ** 2, move**2])
    return _over_variance(losses, returns, horizon)


def _beats(losses: np.ndarray, horizon: int, tried: int) -> np.ndarray:
    """Return which series (S,) are BEATS; of `tried` Holm's first step asks for the smallest p."""
    statistic, p = metrics.cosine_test(losses[0] - losses[1], horizon)
    return (statistic < 0) & (p < SIGNIFICANCE / tried)


def _pool(losses: np.ndarray) -> np.ndarray:
    """Return mean losses over the series of each run at each time, (2, R, N)."""
    share = losses / losses[1].mean(axis=-1)[None, :, None]
    return share.reshape(2, -1, SERIES, share.shape[-1]).mean(axis=2)


def _coverage(losses: np.ndarray, ratio: float, horizon: int) -> float:
    """Return how often the 95 % interval of the ratio of mean losses holds the true one, which is tested for that."""
    _, p = metrics.cosine_test(losses[0] - ratio * losses[1], horizon)
    return float(np.mean(p >= 1 - metrics.LEVEL))
