"""Naive forecasts, the baselines a model has to beat: y at each origin, in closed form from the series' past.

W origins, H horizon, K targets, N rows. What is fitted sees windows that end before row `train_end` only.
"""

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cpbkit.data.klines import DAY_NS
from cpbkit.errors import check_name

if TYPE_CHECKING:  # windows needs torch, these forecasts do not
    from cpbkit.windows.series import Series

log = logging.getLogger(__name__)

LAGS = 48  # of ridge_ar
PENALTIES = (*np.logspace(-6, 2, 17), 1e6)  # of ridge_ar, a row and lag; the last leaves only the mean
LEAST_GARCH = 200  # train rows
DECAYS = (0.5, 0.7, 0.8, 0.9, 0.94, 0.97, 0.99)  # of ewma; 0.94 is RiskMetrics' daily constant

# A price or a band wanders: its seasons repeat moves. Any other level reverts: its seasons repeat
# levels, and its recent mean says something.
WANDERING = ("persistence", "drift", "seasonal_day", "seasonal_week", "ridge_ar")
REVERTING = (*WANDERING, "mean", "ewma", "har")
BASELINES_OF_HEAD: dict[str, tuple[str, ...]] = {  # each other head: REVERTING
    **{"price": WANDERING, "bands": WANDERING},
    **{"volatility": (*REVERTING, "garch"), "range": (*REVERTING, "garch")},
}


def forecast(name: str, series: "Series", origins: np.ndarray, horizon: int, train_end: int) -> np.ndarray:
    """Return a baseline's y at the origins, (W,) -> (W, H, K); persistence (logged) where it has no answer."""
    values, note = _answer(name, series, range(len(series.targets)), origins, horizon, train_end)
    if note:
        log.info(note)
    return values


def forecasts(
    series: "Series", head: str, origins: np.ndarray, horizon: int, train_end: int
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return each baseline of a head, {name: (W, H, targets of the head)}, and a sentence on each gap in them.

    A baseline without an answer at any origin is left out; its sentence stays.
    """
    columns = series.columns[check_name("head", head, series.columns)]
    found, notes = {}, []
    for name in BASELINES_OF_HEAD.get(head, REVERTING):
        values, note = _answer(name, series, columns, origins, horizon, train_end)
        if note:
            notes.append(note)
        if name == "persistence" or values.any():
            found[name] = values
    return found, tuple(notes)


def _answer(name, series, columns, origins, horizon, train_end) -> tuple[np.ndarray, str]:
    make, lacks = BASELINES[check_name("baseline", name, BASELINES)]
    origins = np.asarray(origins)
    values = np.stack([make(series, k, origins, horizon, train_end) for k in columns], axis=-1)
    lacking = int(np.isnan(values).any(axis=(1, 2)).sum())
    where = f"{lacking} of {len(origins)} origins of {series.name}"
    note = f"{name} is persistence at {where}: no {lacks}" if lacking else ""
    return np.nan_to_num(values, nan=0.0), note


def _truth(series, k, rows, horizon) -> np.ndarray:
    return series.levels[rows[:, None] + np.arange(1, horizon + 1), k] - series.anchors[rows, k][:, None]


def _train_rows(series, horizon, train_end) -> np.ndarray:
    rows = np.arange(max(0, train_end - horizon))
    return rows[series.segment[rows] == series.segment[rows + horizon]]


def _persistence(series, k, origins, horizon, train_end):
    return np.zeros((len(origins), horizon))


def _drift(series, k, origins, horizon, train_end):
    # The mean of y itself and not a slope: a high lies above the last close at every step.
    means = np.full(horizon, np.nan)
    for h in range(min(horizon, train_end - 1)):
        start, end = slice(0, train_end - 1 - h), slice(1 + h, train_end)
        whole = series.segment[start] == series.segment[end]
        if whole.any():
            means[h] = (series.levels[end, k] - series.anchors[start, k])[whole].mean()
    return np.tile(means, (len(origins), 1))


def _seasonal(days: int):
    def forecast(series, k, origins, horizon, train_end):
        period, rest = divmod(days * DAY_NS, series.step_ns)
        if rest or period < 2:
            return np.full((len(origins), horizon), np.nan)
        ahead = np.arange(1, horizon + 1)
        back = -(-ahead // period) * period  # whole seasons, enough that the bar is known at the origin
        target, known = _rows_at(series, origins, ahead - back)
        start = origins[:, None]
        if BASELINES_OF_HEAD.get(series.heads[k]) == WANDERING:
            start, start_known = _rows_at(series, origins, -back)
            known &= start_known
        return np.where(known, series.levels[target, k] - series.anchors[start, k], np.nan)

    return forecast


def _rows_at(series, origins, bars) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows `bars` (H,) bars from each origin, (W, H), and which exist; by time: gaps shift rows."""
    wanted = series.times[origins][:, None] + bars * np.timedelta64(series.step_ns, "ns")
    rows = np.searchsorted(series.times, wanted).clip(max=len(series.times) - 1)
    return rows, series.times[rows] == wanted


def _mean(series, k, origins, horizon, train_end):
    level = series.levels[:train_end, k].mean() if train_end > 1 else np.nan
    return np.tile(level - series.anchors[origins, k][:, None], horizon)


def _ewma(series, k, origins, horizon, train_end):
    """Forecast the exponentially weighted mean level, flat ahead, at the best of DECAYS in train.

    In the target's own space (log volatility), since that is where it is judged.
    """
    rows = _train_rows(series, horizon, train_end)
    if len(rows) == 0:
        return np.full((len(origins), horizon), np.nan)
    truth = _truth(series, k, rows, horizon).mean(axis=1)  # a flat forecast errs least at the mean
    pieces = np.split(series.levels[:, k], np.flatnonzero(np.diff(series.segment)) + 1)
    candidates = []
    for decay in DECAYS:
        smooth = [pd.Series(piece).ewm(alpha=1 - decay, adjust=False).mean() for piece in pieces]
        candidates.append(np.concatenate(smooth) - series.anchors[:, k])
    best = min(candidates, key=lambda y: np.mean((truth - y[rows]) ** 2))
    return np.tile(best[origins][:, None], horizon)


def _har(series, k, origins, horizon, train_end):
    """Regress each y[h] on mean levels of the recent past: heterogeneous autoregression (Corsi 2009).

    Over 1, 5 and 22 bars in place of his days, and over one day, the strongest rhythm of an intraday level.
    """
    spans = sorted({s for s in (1, 5, 22, DAY_NS // series.step_ns) if 1 <= s <= train_end // 10})
    level = series.levels[:, k]
    running = np.concatenate([[0.0], np.cumsum(level - level[:train_end].mean())])
    design = np.full((len(level), len(spans)), np.nan)
    for column, span in enumerate(spans):
        whole = series.segment[span - 1 :] == series.segment[: len(level) - span + 1]
        design[span - 1 :, column] = np.where(whole, (running[span:] - running[:-span]) / span, np.nan)
    return _regress(series, k, design, origins, horizon, train_end, [np.full(len(spans), 1e-8)])


def _garch(series, k, origins, horizon, train_end):
    """Forecast the variance of each bar to come by GARCH(1,1) (Bollerslev 1986), fitted in train by `arch`.

    A bar's own volatility or range stands for its return, of whose square the likelihood is, and which is noisier. The
    logarithm of a variance is not the mean logarithm that is judged: the difference is measured in train, step by step.
    """
    nothing = np.full((len(origins), horizon), np.nan)
    rows = _train_rows(series, horizon, train_end)
    if importlib.util.find_spec("arch") is None or len(rows) < LEAST_GARCH:
        return nothing
    import arch

    centre = series.levels[:train_end, k].mean()
    size = np.exp(np.minimum(series.levels[:, k] - centre, 50))  # whatever else a table calls a volatility
    fitted = arch.arch_model(size[:train_end], mean="Zero", rescale=False).fit(disp="off", show_warning=False)
    omega, alpha, beta = fitted.params
    if fitted.convergence_flag or alpha + beta >= 1:
        return nothing
    usual = omega / (1 - alpha - beta)
    # Of the next bar, at each row; the recursion begins at the usual variance.
    moved = np.concatenate([[usual], (omega + alpha * size**2) / (1 - beta)])
    ahead = pd.Series(moved).ewm(alpha=1 - beta, adjust=False).mean().to_numpy()[1:]
    steps = (alpha + beta) ** np.arange(horizon)
    y = np.log(usual + (ahead[:, None] - usual) * steps) / 2 + centre - series.anchors[:, [k]]
    y += (_truth(series, k, rows, horizon) - y[rows]).mean(axis=0)
    return y[origins]


def _ridge_ar(series, k, origins, horizon, train_end):
    """Regress each y[h] on the last LAGS one-bar moves of the target and, if it is another, its anchor.

    The penalty grows with the lag (as in Litterman's prior): of many lags the early ones carry most.
    """
    lags = min(LAGS, train_end // 10)  # a short series cannot feed many coefficients
    level, anchor = series.levels[:, k], series.anchors[:, k]
    columns = [level] if np.array_equal(level, anchor) else [level, anchor]
    after_gap = np.flatnonzero(np.diff(series.segment, prepend=-1))
    parts = []
    for column in columns if lags else []:
        moves = np.concatenate([np.full(lags, np.nan), column[1:] - anchor[:-1]])
        moves[after_gap + lags - 1] = np.nan
        parts.append(np.lib.stride_tricks.sliding_window_view(moves, lags))  # (N, lags), oldest first
    design = np.hstack(parts) if parts else np.empty((len(level), 0))
    age = np.tile(np.arange(lags, 0.0, -1), len(parts))
    return _regress(series, k, design, origins, horizon, train_end, [p * age for p in PENALTIES])


def _regress(series, k, design, origins, horizon, train_end, penalties) -> np.ndarray:
    """Fit y[h] on the design (N, P) in train, return its forecasts (W, H)."""
    rows = _train_rows(series, horizon, train_end)
    rows = rows[np.isfinite(design[rows]).all(axis=1)]
    cut = rows[len(rows) * 4 // 5] if len(rows) else 0
    if design.shape[1] == 0 or np.sum(rows < cut - horizon) < 2 * design.shape[1]:
        return np.full((len(origins), horizon), np.nan)
    return fit_ridge(design, lambda some: _truth(series, k, some, horizon), rows, origins, horizon, penalties)


def fit_ridge(design, truth, rows, origins, horizon, penalties) -> np.ndarray:
    """Fit truth(rows) (n, H) on the design (N, P) and an intercept, return forecasts at the origins (W, H).

    Of several penalties (P,) the best on the last fifth of the rows is taken; then all are fitted. horizon: bars that
    a truth reaches ahead.
    """
    penalty = penalties[0]
    if len(penalties) > 1:
        cut = rows[len(rows) * 4 // 5]
        early, late = rows[rows < cut - horizon], rows[rows >= cut]
        scale = _scale(design, early)
        gram, cross = _moments(design, truth, scale, late)
        early_moments = _moments(design, truth, scale, early)
        trials = [_solve(*early_moments, penalty) for penalty in penalties]
        losses = [np.sum(w * (gram @ w - 2 * cross)) for w in trials]  # the squared error less y'y
        penalty = penalties[int(np.argmin(losses))]
    centre, spread = scale = _scale(design, rows)
    weights = _solve(*_moments(design, truth, scale, rows), penalty)
    return (design[origins] - centre) / spread @ weights[1:] + weights[0]


def _scale(design, rows) -> tuple[np.ndarray, np.ndarray]:
    spread = design[rows].std(axis=0)
    return design[rows].mean(axis=0), np.where(spread > 0, spread, 1.0)


def _moments(design, truth, scale, rows) -> tuple[np.ndarray, np.ndarray]:
    """Sum X'X (P + 1, P + 1) and X'Y (P + 1, H) in pieces: memory does not grow with rows x horizon."""
    gram = cross = np.zeros(())
    for piece in np.array_split(rows, len(rows) // 8192 + 1):
        x = np.hstack([np.ones((len(piece), 1)), (design[piece] - scale[0]) / scale[1]])
        gram = gram + x.T @ x
        cross = cross + x.T @ truth(piece)
    return gram, cross


def _solve(gram, cross, penalty) -> np.ndarray:
    ridge = np.concatenate([[0.0], penalty * gram[0, 0]])  # of as many rows; the intercept is free
    return np.linalg.solve(gram + np.diag(ridge), cross)


# (series, k, origins, horizon, train_end) -> y (W, H), NaN where there is no answer; and what an origin lacks there.
BASELINES: dict[str, tuple[Callable[..., np.ndarray], str]] = {
    "persistence": (_persistence, "bar"),
    "drift": (_drift, "window in train"),
    "seasonal_day": (_seasonal(1), "bar 24 h before"),
    "seasonal_week": (_seasonal(7), "bar 7 days before"),
    "ridge_ar": (_ridge_ar, "long enough stretch of bars without a gap"),
    "mean": (_mean, "two rows in train"),
    "ewma": (_ewma, "window in train"),
    "har": (_har, "long enough stretch of bars without a gap"),
    "garch": (_garch, 'stationary fit by arch (pip install "cpbkit[garch]")'),
}
