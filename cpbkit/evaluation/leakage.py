"""Is the pipeline honest? Poisoned futures, borders between splits, placebos, echoes, calibrated verdicts.

Each check takes plain callables and arrays, so that it examines the kit's own way of the data and anybody's alike.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import scipy
import torch

from cpbkit.config.experiment import Experiment, Task
from cpbkit.data.klines import Klines
from cpbkit.data.traces import Trace
from cpbkit.evaluation import baselines
from cpbkit.evaluation.backtest import Forecaster
from cpbkit.evaluation.calibration import Cell
from cpbkit.evaluation.making import check_making, check_telling, note_finished
from cpbkit.evaluation.metrics import echo_lag
from cpbkit.evaluation.poison import Column, Finding, Pipeline, check_future
from cpbkit.evaluation.verdicts import MOST_SKILL, TOO_FEW, Judgement, judge_heads, verdicts
from cpbkit.training.loop import assemble, loss_per_model
from cpbkit.windows.series import Series, Table, times_of, to_series
from cpbkit.windows.splits import Splits, split
from cpbkit.windows.windows import Windows

PLACEBO_SHARE = 0.05  # of placebos that may be beaten by chance
PLACEBOS = 20
WALKS = 40
OVERFIT = 0.95  # of the loss of one batch, which a sound model can lose
BATCH = 16  # windows of it
OVERFIT_STEPS = 2000  # at most; most models need a tenth of them
PHI = 0.3  # of the autoregressions that every verdict must find


def whole_way(data: Klines | Trace | Table, task: Task, forecaster: Forecaster | None = None) -> Pipeline:
    """Return the kit's own way of the data as a pipeline over the frame: features, scaler, windows, and forecasts."""

    def pipeline(frame: pd.DataFrame) -> dict[str, Column]:
        series = to_series(replace(data, frame=frame), task)
        rows = np.searchsorted(times_of(frame), series.times)
        splits = split(series, task)
        found = {f"feature {name}": Column(series.inputs[:, c], rows) for c, name in enumerate(series.features)}
        for k, name in enumerate(series.targets):
            found[f"target {name}"] = Column(np.stack([series.levels[:, k], series.anchors[:, k]], axis=1), rows)
        windows = Windows([series], task, torch.device("cpu"), torch.float32)
        scaler = windows.scalers[0]
        constants = np.concatenate([scaler.input_mean, scaler.input_std, scaler.target_scale])
        trained = rows[splits.bounds["train"][1] - 1]  # everything scaled may know the train split
        found["scaler"] = Column(constants[None], np.array([trained]))
        for part in ("train", "validation", "test"):
            at = getattr(splits, part)
            x, last, y = (tensor[0].numpy() for tensor in windows.gather(torch.as_tensor(at)[None]))
            found[f"{part} windows"] = Column(x, rows[at].clip(min=trained))
            found[f"{part} last values"] = Column(last, rows[at].clip(min=trained))
            found[f"{part} truths"] = Column(y, rows[at + task.horizon].clip(min=trained))
        if forecaster:
            found["forecasts"] = Column(forecaster(series, task, splits), rows[splits.test])
        return found

    return pipeline


def check_splits(windows: Mapping[str, np.ndarray], context: int, horizon: int) -> Finding:
    """Check that no split's windows hold a row that a later split forecasts, and that a purge lies between them.

    windows: origins of each split, in the order of time.
    """
    names, gaps, notes = list(windows), [], []
    for before, after in itertools.pairwise(names):
        end, start = windows[before].max() + horizon, windows[after].min() + 1
        if start <= end:
            shared = f"{before} reads up to row {end}, {after} forecasts from row {start} on"
            return Finding("splits", "FAIL", f"{shared}; rows in both: {end - start + 1}")
        gaps.append(int(start - end - 1))
        reach = int(end - (windows[after].min() - context + 1) + 1)
        if reach > 0:
            notes.append(f"contexts of {after} reach {reach} rows back into {before}")
    if min(gaps, default=horizon) < horizon:
        notes.append(f"the gap between splits is {min(gaps)} rows; the horizon is {horizon}")
    evidence = f"no row is shared; {', '.join(map(str, gaps))} rows between forecasts of one split and of the next"
    return Finding("splits", "NOTE" if notes else "OK", "; ".join([*notes, evidence]))


def phase_shuffle(values: np.ndarray, seed: int) -> np.ndarray:
    """Return a series with the same mean and spectrum and random phases (Theiler et al. 1992): (N,) -> (N,).

    It keeps what a linear autoregression can forecast, which is why ridge_ar is among the baselines, and nothing else.
    """
    spectrum = np.fft.rfft(values)
    turns = np.exp(2j * np.pi * np.random.default_rng(seed).random(len(spectrum)))
    turns[0] = 1
    if len(values) % 2 == 0:
        turns[-1] = 1  # this one has no phase
    return np.fft.irfft(spectrum * turns, len(values))


def make_placebo(data: Klines | Trace | Table, seed: int) -> Klines | Trace | Table:
    """Return data with nothing to find: of a table the same steps from row to row in another order, of bars see below.

    The closes of bars have phase-shuffled log returns; their shapes and volumes are shuffled. A table's own spectrum
    would be no placebo: a long context finds seasons in it that ridge_ar's 48 rows do not.
    """
    if isinstance(data, Klines):
        return _shuffle_bars(data, seed)
    values = data.frame.to_numpy(np.float64)
    steps = np.random.default_rng(seed).permutation(np.nan_to_num(np.diff(values, axis=0)))
    walked = np.nan_to_num(values[:1]) + np.concatenate([np.zeros_like(values[:1]), steps.cumsum(axis=0)])
    return replace(data, frame=pd.DataFrame(walked, data.frame.index, data.frame.columns))


def _shuffle_bars(klines: Klines, seed: int) -> Klines:
    frame, rng = klines.frame, np.random.default_rng(seed)
    opens, highs, lows, closes = (np.log(frame[c].to_numpy()) for c in ("open", "high", "low", "close"))
    drawn = rng.permutation(len(frame))
    close = closes[0] + np.concatenate([[0.0], phase_shuffle(np.diff(closes), seed).cumsum()])
    first = np.concatenate([[0.0], opens[1:] - closes[:-1]])[drawn]  # from the last close to the open
    open_ = np.concatenate([close[:1], close[:-1]]) + first
    high = np.maximum(open_, close) + (highs - np.maximum(opens, closes))[drawn]
    low = np.minimum(open_, close) - (np.minimum(opens, closes) - lows)[drawn]
    placebo = frame.iloc[drawn].set_axis(frame.index)
    for name, column in {"open": open_, "high": high, "low": low, "close": close}.items():
        placebo[name] = np.exp(column)
    return Klines(placebo, replace(klines.passport, synthetic=True))


def check_placebo(
    judge_placebo: Callable[[int], Judgement],
    placebos: int = PLACEBOS,
    real: float | None = None,
    check: str = "placebos",
) -> Finding:
    """Check that a model finds nothing where there is nothing: of its verdicts on placebos, few may be BEATS.

    judge_placebo: trains and judges on the placebo of a seed. real: the skill on the real series, to stand beside.
    """
    found = {str(seed): judge_placebo(seed) for seed in range(placebos)}
    words = [verdict.word for verdict in verdicts(found).values()]
    if TOO_FEW in words:
        return Finding(check, "NOTE", f"{words.count(TOO_FEW)} of {placebos} placebos have too few windows to tell")
    beaten = words.count("BEATS")
    skills = [100 * j.skill for j in found.values()]
    evidence = f"{beaten} of {placebos} placebos beaten; their skill is {min(skills):+.2f} to {max(skills):+.2f} %"
    if real is not None:
        above = sum(100 * real > skill for skill in skills)
        evidence += f", that of the real series {100 * real:+.2f} %, above {above} of them"
    return Finding(check, "FAIL" if beaten > PLACEBO_SHARE * placebos else "OK", evidence)


def check_echo(actual: np.ndarray, origins: np.ndarray, forecast: np.ndarray, ahead: int) -> Finding:
    """Say whether a forecast only repeats the last value: a NOTE and no leak.

    actual (N,): levels. forecast (W,): of the level `ahead` bars after each origin.
    """
    lag = echo_lag(actual, origins + ahead, forecast, 2 * ahead)
    what = f"the forecast {ahead} bars ahead is nearest to the truth {lag} bars before"
    if lag == ahead:
        return Finding("echo", "NOTE", f"{what}: it echoes the last value")
    return Finding("echo", "OK", what)


def check_overfit(experiment: Experiment, series: Series) -> Finding:
    """Check that the model can learn a few windows by heart: on one batch its loss must fall by 95 %.

    Dropout and weight decay, which are there to prevent that, are off.
    """
    name, training = "overfit one batch", experiment.training.trials[0]
    training = replace(training, weight_decay=0.0, precision="float32")
    model = replace(experiment.model, dropout=0.0)
    windows, stack = assemble(replace(experiment, model=model, training=training), [series], "cpu")
    if hasattr(stack.net, "solve") or not stack.parameters:
        how = "solved in one step" if stack.parameters else "a foundation model, trained elsewhere"
        return Finding(name, "NOTE", f"{model.name} is {how}: it learns nothing here")
    x, last, y = windows.gather(windows.order([0], training.seed, 0, BATCH))
    losses = []
    for _ in range(OVERFIT_STEPS):
        loss = loss_per_model(stack.net(x, last), y, windows.target_weights, windows.loss).mean(1)  # (1,)
        losses.append(loss.item())
        if losses[-1] < (1 - OVERFIT) * losses[0]:
            break
        stack.backward(loss.sum())
        stack.gradients.mul_((1 / (stack.gradients.norm() + 1e-6)).clamp(max=1))
        stack.step()
    fall = 1 - min(losses) / losses[0]
    evidence = f"the loss of {BATCH} windows falls by {fall:.1%} in {len(losses)} steps"
    return Finding(name, "OK" if fall > OVERFIT else "FAIL", evidence)


def autoregression(phi: float, rows: int, seed: int) -> Series:
    """Return hourly bars of an own making whose log price moves by an AR(1) of coefficient phi; 0 is a random walk."""
    moves = scipy.signal.lfilter([1], [1, -phi], 0.01 * np.random.default_rng(seed).normal(size=rows))
    levels = moves.cumsum()[:, None]
    return Series(
        name=f"AR{phi:g}-{seed}_1h",
        times=np.datetime64("2025-01-01", "ns") + np.arange(rows) * np.timedelta64(3600, "s"),
        step_seconds=3600,
        inputs=moves[:, None],
        features=("close_return",),
        levels=levels,
        anchors=levels,
        targets=("close",),
        heads=("price",),
        synthetic=True,
    )


def ridge_forecaster(series: Series, task: Task, splits: Splits) -> np.ndarray:
    """Forecast with ridge_ar, which fits in closed form: the quick model for trying the machinery itself."""
    return baselines.forecast("ridge_ar", series, splits.test, task.horizon, splits.bounds["train"][1])


def _judge(series: Series, task: Task, forecaster: Forecaster, model: str) -> dict[str, Judgement]:
    splits = split(series, task)
    return judge_heads(series, splits.test, forecaster(series, task, splits), splits.bounds["train"][1], model)


@functools.cache  # the same for every series that is audited
def check_calibration(
    forecaster: Forecaster = ridge_forecaster, model: str = "ridge_ar", rows: int = 7000
) -> list[Finding]:
    """Check that verdicts on 40 random walks are BEATS in 5 % at most, and on 40 autoregressions in all.

    model: the name of the baseline that the forecaster is, if it is one.
    """
    task = Task(context=8, horizon=1, features=("close_return",), purge=1)
    beaten = {}
    for phi in (0.0, PHI):
        series = [autoregression(phi, rows, seed) for seed in range(WALKS)]
        found = verdicts({one.name: _judge(one, task, forecaster, model)["price"] for one in series})
        beaten[phi] = sum(verdict.word == "BEATS" for verdict in found.values())
    walks, told = (f"{count} of {WALKS}" for count in beaten.values())
    walks += f" are said to be beaten; chance allows {PLACEBO_SHARE * WALKS:g}"
    told += f" with a coefficient of {PHI} are said to be beaten; all can be"
    return [
        Finding("random walks", "OK" if beaten[0.0] <= PLACEBO_SHARE * WALKS else "FAIL", walks),
        Finding("autoregressions", "OK" if beaten[PHI] == WALKS else "FAIL", told),
    ]


def check_skill(head: str, judgement: Judgement, is_market: bool) -> Finding:
    """Raise an alarm at a skill that no market gives; of tables and made-up bars no bound is known."""
    name, skill = f"believable skill, {head}", judgement.skill
    evidence = f"{100 * skill:+.2f} % against {judgement.best_baseline}"
    if head != "price" or not is_market or not judgement.is_enough:
        return Finding(name, "NOTE", f"{evidence}; no bound is known for it")
    if judgement.is_unbelievable:
        said = f"{evidence}, above {100 * MOST_SKILL:g} %: no liquid market leaves so much to know"
        return Finding(name, "FAIL", f"{said}; look for a leak")
    return Finding(name, "OK", f"{evidence}, below {100 * MOST_SKILL:g} %")


def check_promises(cells: Iterable[Cell]) -> list[Finding]:
    """Check size and coverage of the verdicts in every market, horizon and number of windows."""
    found = []
    for cell in cells:
        name = f"{cell.market}, {cell.horizon} ahead, {cell.windows} windows"
        verdict = "NOTE" if not cell.has_word else "OK" if cell.is_kept() else "FAIL"
        found.append(Finding(name, verdict, cell.evidence()))
    return found


def audit(
    data: Klines | Trace | Table, task: Task, forecaster: Forecaster, *, model: str = "", placebos: int = PLACEBOS
) -> list[Finding]:
    """Run every check over the kit's own way of the data, with a model that is trained anew each time it is asked.

    forecaster: as `cpbkit.evaluation.backtest.refit` makes one; it is called 6 + placebos times.
    model: the baseline that it is, if any.
    """
    series = to_series(data, task)
    splits = split(series, task)
    raw, horizon, is_market = data.frame, task.horizon, isinstance(data, Klines) and not series.synthetic
    rows = np.searchsorted(times_of(raw), series.times)
    # The end of validation, since nothing after it may touch the training; and the middle of test, where half of
    # the forecasts have been made and the truths of the last of them are garbage.
    spots = rows[[splits.bounds["validation"][1] - 1, splits.test[len(splits.test) // 2]]]
    forecast = forecaster(series, task, splits)
    real = judge_heads(series, splits.test, forecast, splits.bounds["train"][1], model)
    ahead = series.anchors[splits.test, 0] + forecast[:, -1, 0]

    judged: dict[int, dict[str, Judgement]] = {}  # by placebo, each of which is trained on once for all heads

    def judge_placebo(seed: int, head: str) -> Judgement:
        if seed not in judged:
            judged[seed] = _judge(to_series(make_placebo(data, seed), task), task, forecaster, model)
        return judged[seed][head]

    return [
        check_making(data, task),
        *note_finished(data, task),
        check_telling(data, task),
        check_future(whole_way(data, task), raw, check="scaler and windows know no future"),
        check_future(whole_way(data, task, forecaster), raw, spots, "training and forecasts know no future"),
        check_splits({p: getattr(splits, p) for p in ("train", "validation", "test")}, task.context, horizon),
        *(check_skill(head, judgement, is_market) for head, judgement in real.items()),
        *(
            check_placebo(functools.partial(judge_placebo, head=head), placebos, judgement.skill, f"placebos, {head}")
            for head, judgement in real.items()
        ),
        check_echo(series.levels[:, 0], splits.test, ahead, horizon),
        *check_calibration(),
    ]
