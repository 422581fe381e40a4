"""What can be forecast at all: each target of each series at each horizon, by closed-form models, refitted as they go.

N rows, W origins, P columns of a design.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from cpbkit import indicators
from cpbkit.data.klines import DAY_SECONDS, INTERVAL_SECONDS, SECOND_NS, Klines, split_name
from cpbkit.errors import CpbkitError, DataError
from cpbkit.evaluation import metrics
from cpbkit.evaluation.baselines import DECAYS, PENALTIES, fit_ridge
from cpbkit.evaluation.pooled import Losses, pool
from cpbkit.evaluation.verdicts import BEATS, TOO_FEW, compare, in_words, is_enough, known_variance

HORIZONS = (1, 4, 24)  # bars
TARGETS = ("return", "direction", "volatility", "range", "volume")
FOLDS = 5  # refits over the second half of the bars, which is the test
LEAST_BARS = 500  # half of which is a design's first train split
RECENT = 5  # last returns in the ridge's design
SPANS = (5, 22)  # bars, besides one, a day and a week: Corsi's (2009) without his days
ALL = "all series"


def forecastable(bars: Mapping[str, object], horizons: Sequence[int] = HORIZONS) -> pd.DataFrame:
    """Judge every target of every series at every horizon: a row each, and one for all series at once.

    Return and direction are forecast by a ridge regression on recent returns, volatilities and volumes; volatility,
    range and volume of the bars to come, in logarithms, by their own means over one bar to a week (HAR). Skill is
    against the best naive forecast, as in all verdicts; p is corrected for all series, targets and horizons (Holm),
    of all series at once for all targets and horizons. Errors: CpbkitError for horizons, DataError for too few bars.
    """
    if not horizons or min(horizons) < 1 or max(horizons) * 10 > LEAST_BARS:
        raise CpbkitError(f"horizons must be 1 to {LEAST_BARS // 10} bars; got {tuple(horizons)}")
    series = {name: one for name, one in bars.items() if isinstance(one, Klines)}
    if len(series) < len(bars):
        raise DataError("a map takes bars, with open, high, low, close and volume; these are tables of other columns")
    if not bars:
        raise CpbkitError("a map needs the bars of at least one series; got none")
    horizons = sorted(set(horizons))
    cells = {
        (name, target, horizon): losses
        for name, klines in series.items()
        for target, horizon, losses in _losses(klines, horizons)
    }
    singles = [_row(name, target, one) for (name, target, _), one in cells.items()]
    together = []
    for target, horizon in itertools.product(TARGETS, horizons):
        parts = {name: cells[name, target, horizon] for name in series}
        parts = {name: one for name, one in parts.items() if all(loss.any() for loss in one.baselines.values())}
        if not parts:  # such as a volume that never changes
            continue
        found = pool(parts)
        about = {"p": found.verdict.p, "against": found.baseline, "windows": found.times}
        about |= {"skill": found.skill, "skill_low": found.skill_low, "skill_high": found.skill_high}
        enough = found.verdict.word != TOO_FEW
        together.append({"series": ALL, "target": target, "bars": horizon, "enough": enough, **about})
    return pd.concat([_worded(singles), _worded(together)], ignore_index=True)


def _row(name: str, target: str, one: Losses) -> dict:
    losses = {baseline: loss / one.variance for baseline, loss in one.baselines.items()}
    best = min(losses, key=lambda baseline: losses[baseline].mean())
    found, _ = compare(one.model / one.variance, losses[best], one.horizon, len(losses))
    enough = is_enough(len(one.times), one.horizon)
    about = {"against": best, "windows": len(one.times), "enough": enough}
    return {"series": name, "target": target, "bars": one.horizon, **found, **about}


def _worded(rows: list[dict]) -> pd.DataFrame:
    """Return the rows as a table, with words corrected for as many as can have one."""
    table = pd.DataFrame(rows)
    told = table["enough"]
    table.loc[told, "p"] = metrics.holm(table.loc[told, "p"])
    table = table.join(in_words(table)).assign(p=table["p"].where(told))
    return table[["series", "target", "bars", "verdict", "skill %", "low %", "high %", "p", "against", "windows"]]


def headlines(table: pd.DataFrame) -> list[str]:
    """Say in one line per target on how many series it can be forecast, and on all at once."""
    lines = []
    for target, group in table.groupby("target", sort=False):
        single, together = group[group["series"] != ALL], group[group["series"] == ALL].set_index("bars")["verdict"]
        counts = single.groupby("bars")["verdict"].agg(lambda words: int((words == BEATS).sum()))
        said = ", ".join(f"{n} at {h} ({together[h]} over all)" for h, n in counts.items())
        lines.append(f"{target}: better than naive on so many of {single['series'].nunique()}, bars ahead: {said}")
    return lines


def _losses(klines: Klines, horizons: Sequence[int]) -> Iterator[tuple[str, int, Losses]]:
    """Yield the losses of the model and of the naive forecasts, target by target and horizon by horizon."""
    name, frame = klines.passport.series, klines.frame
    step = INTERVAL_SECONDS[split_name(name)[1]]
    count, half = len(frame), len(frame) // 2
    if count < LEAST_BARS:
        raise DataError(f"{name}: a map needs at least {LEAST_BARS} bars; got {count}. Ask for a longer range")
    times = frame.index.tz_localize(None).to_numpy("datetime64[ns]").astype(np.int64)
    segment = np.cumsum(np.diff(times, prepend=times[0]) > step * SECOND_NS)  # a gap begins another
    day = DAY_SECONDS // step
    table = indicators.compute(frame, ["bar_volatility", "bar_range"])
    moves = np.diff(np.log(frame["close"].to_numpy(float)), prepend=np.nan)
    moves[1:][np.diff(segment) > 0] = np.nan
    volume = frame["volume"].to_numpy(float)
    volume = volume + np.median(volume[:half]) / 100 + 1e-12  # a bar without trades has a logarithm too
    levels = {
        "volatility": np.log(table["bar_volatility"].to_numpy()),
        "range": np.log(table["bar_range"].to_numpy()),
        "volume": np.log(volume),
    }
    clock = times // SECOND_NS % DAY_SECONDS * (2 * np.pi / DAY_SECONDS)
    spans = sorted({1, *SPANS, *(span for span in (day, 7 * day) if 1 < span <= half // 10)})
    smooth = {target: np.column_stack([_mean(level, span) for span in spans]) for target, level in levels.items()}
    recent = np.column_stack([np.roll(moves, lag) for lag in range(RECENT)] + [_mean(moves, span) for span in spans])
    recent[: RECENT - 1] = np.nan
    designs = {target: np.column_stack([own, np.sin(clock), np.cos(clock)]) for target, own in smooth.items()}
    designs |= dict.fromkeys(("return", "direction"), np.column_stack([recent, *smooth.values()]))
    squares = np.square(moves)
    squares = np.nan_to_num(squares / (np.nanmean(squares[:half]) or 1.0), nan=1.0)
    variance = {"return": known_variance(squares)}
    high, low = (np.log(frame[column].to_numpy(float)) for column in ("high", "low"))
    for horizon in horizons:
        # The value of each target over the `horizon` bars that end with each row.
        change = _over(np.sum, moves, horizon)
        reach = _over(np.max, high, horizon) - _over(np.min, low, horizon)
        trailing = {
            "return": change,
            "direction": np.where(np.isnan(change), np.nan, (change > 0) + 0.5 * (change == 0)),
            "volatility": np.log(_over(np.mean, np.exp(2 * levels["volatility"]), horizon)) / 2,
            "range": np.log(np.hypot(reach, 1e-4)),  # at least 1 bp, as of one bar
            "volume": np.log(_over(np.mean, volume, horizon)),
        }
        whole = np.zeros(count, bool)  # rows whose next bars follow without a gap
        whole[: count - horizon] = segment[horizon:] == segment[: count - horizon]
        for target in TARGETS:
            truth = np.full(count, np.nan)
            truth[: count - horizon] = trailing[target][horizon:]
            truth[~whole] = np.nan
            naive, ewmas = _naive(target, trailing[target], levels.get(target), horizon, day)
            known = np.isfinite(np.column_stack([designs[target], *naive.values(), *ewmas, truth])).all(axis=1)
            rows = np.flatnonzero(known)
            if np.sum(rows < half - horizon) < 5 * designs[target].shape[1]:
                raise DataError(f"{name}: too few bars without a gap to fit {target}. Ask for a longer range")
            model, baselines, tested = _walk(target, truth, designs[target], naive, ewmas, rows, half, horizon)
            seconds = times[tested] // SECOND_NS
            weight = variance.get(target, np.ones(count))[tested]
            yield target, horizon, Losses(seconds, step, horizon, weight, model, baselines)


def _mean(values: np.ndarray, span: int) -> np.ndarray:
    """Return the mean of the last `span` values at each row; NaN where one is missing."""
    return pd.Series(values).rolling(span).mean().to_numpy()


def _over(take: Callable[..., np.ndarray], values: np.ndarray, span: int) -> np.ndarray:
    """Return what `take` makes of the last `span` values at each row."""
    found = np.full(len(values), np.nan)
    found[span - 1 :] = take(np.lib.stride_tricks.sliding_window_view(values, span), axis=1)
    return found


def _naive(
    target: str, trailing: np.ndarray, level: np.ndarray | None, horizon: int, day: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return what naive forecasts say at each row without any fit, and EWMAs of a level, which take an offset: (N,)."""
    if level is None:
        name, value = ("coin", 0.5) if target == "direction" else ("persistence", 0.0)
        return {name: np.full(len(trailing), value)}, []
    back = day - horizon if 1 < day and horizon <= day else 0  # bars, to what ended a day before the forecast ends
    ewmas = [pd.Series(level).ewm(alpha=1 - d, adjust=False).mean().to_numpy() for d in DECAYS]
    return {"persistence": trailing, "seasonal_day": pd.Series(trailing).shift(back).to_numpy()}, ewmas


def _walk(target, truth, design, naive, ewmas, rows, half, horizon) -> tuple[np.ndarray, dict, np.ndarray]:
    """Refit before each of FOLDS pieces of the second half; return losses (W,) of model, of baselines, and origins."""
    borders = np.linspace(half, len(truth), FOLDS + 1).astype(int)
    pieces: list[dict[str, np.ndarray]] = []
    tested, penalties = [], np.outer(PENALTIES, np.ones(design.shape[1]))
    for start, end in itertools.pairwise(borders):
        train, test = rows[rows < start - horizon], rows[(rows >= start) & (rows < end)]
        if len(test) == 0:
            continue
        model = fit_ridge(design, lambda some: truth[some, None], train, test, horizon, penalties)[:, 0]
        told = {"model": model, "mean": np.full(len(test), truth[train].mean())}
        told |= {name: y[test] for name, y in naive.items()}
        if ewmas:
            errors = [truth[train] - each[train] for each in ewmas]
            best = int(np.argmin([np.var(error) for error in errors]))
            told["ewma"] = ewmas[best][test] + np.mean(errors[best])
        if target == "direction":
            told["model"] = np.clip(told["model"], 0, 1)
        pieces.append({name: np.square(truth[test] - y) for name, y in told.items()})
        tested.append(test)
    lost = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return lost.pop("model"), lost, np.concatenate(tested)


def text(table: pd.DataFrame) -> str:
    """Show the map as a table of signs: the skill in percent where it is BEATS, and what else is said."""
    signs = {TOO_FEW: "?", "LOSES": "-", "TIES": "."}
    shown = table.assign(
        cell=[
            f"{skill:+.1f}" if word == BEATS else signs[word]
            for word, skill in zip(table["verdict"], table["skill %"], strict=True)
        ]
    )
    order = {"columns": ["target", "bars"], "values": "cell"}
    wide = shown.pivot(index="series", **order).reindex(index=list(dict.fromkeys(table["series"])))
    wide = wide.reindex(columns=list(TARGETS), level=0)
    wide.index.name = None
    legend = "skill against the best naive forecast, %, where it BEATS; . ties, - loses, ? too few windows to tell"
    return "\n".join([wide.to_string(), legend, *headlines(table)])
