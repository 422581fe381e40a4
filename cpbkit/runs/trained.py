"""Trained models in use: from closed bars to the next ones, with the interval that held in the test split."""

import functools
import hashlib
import html
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cpbkit import foreign
from cpbkit.config import own
from cpbkit.config.experiment import OHLC, Experiment, Model, Task, from_dict, vary
from cpbkit.data import files
from cpbkit.data.klines import INTERVAL_SECONDS, Incomplete, Klines, split_name, validate
from cpbkit.data.load import load_klines
from cpbkit.data.traces import Trace, read_trace
from cpbkit.errors import CpbkitError, DataError, RunError
from cpbkit.models import zoo
from cpbkit.quantities import figure
from cpbkit.runs.settle import Bars, as_table, opened
from cpbkit.texts import one_line
from cpbkit.training import checkpoint
from cpbkit.training.loop import median
from cpbkit.windows.scaling import Scaler
from cpbkit.windows.series import UNTIMED, Series, from_table, to_series

ABOUT = {  # of a model file, as `foreign.check` takes it
    **{"series": str, "experiment": dict, "synthetic": bool, "scaler": dict},
    **{"intervals?": {"*": dict}, "own?": {"*": str}, "step_seconds?": float},
}
LARGEST, DEEPEST = 16_384, 64  # sizes and layers of a network that is read from a file
STALE = pd.Timedelta(days=2)  # after which the newest bars of a venue are the end of a listing; of long bars three
HISTORY = 600  # bars fetched before the context, so that averages with a long memory have settled


class NoForecast(DataError):
    """No series can be forecast; `reasons` holds a sentence for each."""

    def __init__(self, reasons: Mapping[str, str]):
        lines = [one_line(reason) for reason in dict.fromkeys(reasons.values())]
        more = "Newer bars can be given: `--bars FILE` with one series, forecast(klines=...) in Python"
        CpbkitError.__init__(self, "\n  ".join(["no series can be forecast:", *lines, more]))
        self.reasons = reasons


@dataclass(frozen=True)
class Forecast:
    """The next bars of one series, with a prediction interval."""

    series: str
    # H rows by bar start (UTC), of a table without times by number; of each target its level, target_low, target_high,
    # target_q0.05.
    frame: pd.DataFrame
    last_bar: pd.Timestamp | int  # start of the last closed bar that the model saw, UTC; or number of the last row
    last: dict[str, float]  # the level of each target then: what persistence forecasts
    nominal: float | None  # share of bars that the interval should hold; None where the model knows no interval
    coverage: float | None  # share that it held in the test split
    verdict: str = ""  # what the test split said of this model, in a sentence
    synthetic: bool = False
    seen: str = ""  # SHA-256 of the bars that the model saw, see `hash_bars`

    def to_dict(self) -> dict:
        """Return plain JSON types; times as `2025-03-01T00:00`, UTC."""
        last, *times = self._written()
        rows = self.frame.assign(time=times).to_dict(orient="records")
        told = {name: getattr(self, name) for name in ("series", "last", "nominal", "coverage", "verdict", "synthetic")}
        return {**told, "last_bar": last, "bars": rows}

    def _written(self) -> list[str]:
        """Write the times of the last bar and of those that are forecast, all of them alike; or the numbers of rows."""
        if not isinstance(self.last_bar, pd.Timestamp):
            return [str(row) for row in (self.last_bar, *self.frame.index)]
        times = self.frame.index.insert(0, self.last_bar).tz_localize(None)
        unit = "minutes" if (times == times.floor("min")).all() else "milliseconds"
        return [time.isoformat(timespec=unit) for time in times]

    def _around(self) -> tuple[str, list[str]]:
        """Return what is said above the table, and below it."""
        made_up = "  (synthetic: no market)" if self.synthetic else ""
        held = "no interval: this model was saved without one"
        if self.nominal is not None:
            held = f"low to high: a {100 * self.nominal:.0f} % interval"
            if self.coverage is not None:
                held += f", which held {100 * self.coverage:.1f} % of the test bars"
        last = f"row {self.last_bar}"
        if isinstance(self.last_bar, pd.Timestamp):
            last = f"the bar of {self._written()[0].replace('T', ' ')} UTC"
        head = f"{self.series}, from {last}{made_up}"
        return head, list(filter(None, [held, self.verdict]))

    def __str__(self) -> str:
        head, notes = self._around()
        return "\n".join([head, self.frame.to_string(float_format=figure), *notes])

    def _repr_html_(self) -> str:
        head, notes = self._around()
        timed = isinstance(self.last_bar, pd.Timestamp)
        bars = (self.frame.tz_localize(None) if timed else self.frame).rename_axis(None)  # of UTC, which the head says
        table = bars.style.format(figure, escape="html").to_html()
        return f"<div><b>{html.escape(head)}</b>{table}<small>{'<br>'.join(map(html.escape, notes))}</small></div>"


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """One trained model with all that a forecast needs: settings, weights, the scaler of its train split."""

    series: str  # BTCUSDT_15m
    experiment: Experiment
    weights: dict[str, Tensor]
    scaler: Scaler
    prediction_intervals: Mapping[str, Mapping] = field(default_factory=dict)  # head -> nominal, coverage, half_width
    verdict: str = ""
    synthetic: bool = False
    about: Mapping = field(default_factory=dict)  # versions, split dates, fingerprints of its bars and of its file

    def __repr__(self) -> str:
        about = f"{self.experiment.preset}, {self.experiment.model.name}{' SYNTHETIC' * self.synthetic}"
        return f"TrainedModel({self.series!r}): {'; '.join(filter(None, [about, self.verdict]))}"

    @classmethod
    def read(cls, content: bytes, verdict: str = "", trust_code: bool = False) -> "TrainedModel":
        """Read a model file of a run.

        trust_code: whether it may run the own parts (network, features) that it names, from the current folder, and
        load the foundation model that it names. Errors: RunError for bytes that are no model of the kit, and for own
        parts that have changed since the training; CpbkitError for either without consent.
        """
        weights, about = checkpoint.load(content, ABOUT)
        try:
            experiment = from_dict(about["experiment"])
            named = about.get("own", {})  # what the settings leave out would run code as well
            whose = f"the model of {about['series']}"
            own.require_consent([*experiment.own_parts, *named], trust_code, whose, experiment.pretrained)
            for name, known in named.items():
                if own.fingerprint(name) != known:
                    raise RunError(f"the source of {name} is not that of the training any more; put that one back")
            _check_weights(experiment, weights)
            raw = about["scaler"]
            ends = ((raw["lowest"], -math.inf), (raw["highest"], math.inf))
            lowest, highest = (np.array([end if x is None else x for x in row]) for row, end in ends)
            mean, std, scale = (np.array(raw[name]) for name in ("input_mean", "input_std", "target_scale"))
            clip = math.inf if raw["clip"] is None else raw["clip"]
            scaler = Scaler(mean, std, lowest, highest, scale, clip)
            _check_numbers(experiment.task, scaler, about.get("intervals", {}))
            return cls(
                about["series"],
                experiment,
                weights,
                scaler,
                about.get("intervals", {}),
                verdict,
                about["synthetic"],
                {k: v for k, v in about.items() if k in ("version", "torch", "dates", "data_sha256", "step_seconds")}
                | {"sha256": hashlib.sha256(content).hexdigest()},
            )
        except (foreign.Damaged, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"these bytes are no model of cpbkit: {error}") from error

    def forecast(self, klines: Bars | None = None, now: pd.Timestamp | None = None) -> Forecast:
        """Forecast the bars after the last closed one.

        klines: bars of this series: Klines, a frame as `fetch` gives, or a file; None fetches the newest from the
        source of the training. now: the time by which bars count as closed, of the clock by default.
        Errors: DataError for bars that do not fit, SourceError where none can be fetched.
        """
        bars = newest_bars([self], now) if klines is None else {self.series: klines}
        return forecast([self], bars, now)[self.series]


def _check_weights(experiment: Experiment, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not those of the network they claim to be, before any memory is taken for it.

    Errors: RunError.
    """
    task, model = experiment.task, experiment.model
    if max(task.context, task.horizon, model.width) > LARGEST or model.layers > DEEPEST:
        raise RunError(
            f"a model may have sizes up to {LARGEST} and {DEEPEST} layers; got a context of {task.context}, a horizon "
            f"of {task.horizon}, a width of {model.width}, and {model.layers} layers"
        )
    if own.is_own(model.name):
        return
    want = _shapes(task, model)
    got = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if got != want:
        odd = sorted(name for name in got.keys() | want.keys() if got.get(name) != want.get(name))
        raise RunError(f"these weights are not those of a {model.name} of width {model.width}: {', '.join(odd[:3])}")


@functools.lru_cache(maxsize=16)  # the models of a run are alike
def _shapes(task: Task, model: Model) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape[1:]) for name, p in zoo.build(1, task, model).named_parameters()}


def _check_numbers(task: Task, scaler: Scaler, prediction_intervals: Mapping[str, Mapping]) -> None:
    """Refuse a scaler or prediction intervals that do not fit the task. Errors: RunError."""
    shapes = dict.fromkeys(("input_mean", "input_std", "lowest", "highest"), (len(task.features),))
    shapes["target_scale"] = (len(task.targets),)
    for name, shape in shapes.items():
        if getattr(scaler, name).shape != shape:
            raise RunError(f"{name} of a scaler must have the shape {shape}; got {getattr(scaler, name).shape}")
    widths = [np.asarray(known["half_width"], np.float64) for known in prediction_intervals.values()]
    if any(half.ndim != 2 or len(half) != task.horizon for half in widths):
        raise RunError(f"prediction intervals must have a row for each of {task.horizon} bars")
    if widths and sum(half.shape[1] for half in widths) != len(task.targets):
        raise RunError(f"prediction intervals must have a column for each of {len(task.targets)} targets")


def newest_bars(models: Sequence[TrainedModel], now: pd.Timestamp | None = None) -> dict[str, Klines]:
    """Fetch the newest closed bars of models of one run, as many as a forecast needs.

    Errors: DataError for bars that came from files, which must be given; SourceError.
    """
    data, task = models[0].experiment.data, models[0].experiment.task
    now = _moment(now)
    if data.source in ("files", "given", "table") or data.market == "network":
        origin = "read from own files" if data.source == "files" else "given as frames"
        raise DataError(f"the bars of {models[0].series} were {origin}; give the newest ones too")
    names = [split_name(model.series) for model in models]
    found: dict[str, Klines] = {}
    errors: list[Incomplete] = []
    for interval in dict.fromkeys(interval for _, interval in names):
        symbols = tuple(symbol for symbol, each in names if each == interval)
        reach = pd.Timedelta(seconds=(task.context + HISTORY) * INTERVAL_SECONDS[interval])
        made = data.source == "synthetic"  # in whole days: yesterday's bars are the last that are all closed
        days = {"start": str((now - reach).date()), "end": str((now - pd.Timedelta(days=int(made))).date())}
        try:
            bars = load_klines(vary(models[0].experiment, symbols=symbols, intervals=(interval,), **days))
        except Incomplete as error:
            bars = error.klines
            errors.append(error)
        found |= {series: _until(now, klines) for series, klines in bars.items() if isinstance(klines, Klines)}
    if errors:
        raise Incomplete("\n".join(map(str, errors)), found, {k: why for e in errors for k, why in e.reasons.items()})
    return found


def _moment(now: object) -> pd.Timestamp:
    """Return the time by which bars count as closed, by default this one; UTC without a zone. Errors: DataError."""
    if now is None:
        return pd.Timestamp.now("UTC")
    try:
        time = pd.Timestamp(now)  # type: ignore[call-overload]
    except (ValueError, TypeError):
        raise DataError(f"now must be a time, such as 2025-05-31 12:00; got {now!r}") from None
    return time.tz_localize("UTC") if time.tzinfo is None else time.tz_convert("UTC")


def _until(now: pd.Timestamp, klines: Klines) -> Klines:
    """Return the bars that were closed by then, of a time long over."""
    step = pd.Timedelta(seconds=INTERVAL_SECONDS[split_name(klines.passport.series)[1]])
    closed = klines.frame.index + step <= now
    return klines if closed.all() or not closed.any() else replace(klines, frame=klines.frame[closed])


def forecast(
    models: Iterable[TrainedModel], bars: Mapping[str, Bars], now: pd.Timestamp | None = None
) -> dict[str, Forecast]:
    """Forecast the series of all models; those of one experiment are computed as one stack.

    bars: by series. Errors: DataError, with the rule, for bars that do not fit.
    """
    models, now = list(models), _moment(now)
    return _predict(models, {model.series: _look(model, bars[model.series], now) for model in models})


def reachable_bars(models: Sequence[TrainedModel], now: pd.Timestamp) -> tuple[Mapping[str, Klines], dict[str, str]]:
    """Fetch the newest bars of the series that have some, and say by series why the others have none.

    Errors: as of `newest_bars`, but for series that are not there.
    """
    try:
        bars, trouble = newest_bars(models, now), {}
    except Incomplete as error:
        bars, trouble = error.klines, dict(error.reasons)
    for name, klines in bars.items():
        last, step = klines.frame.index[-1], pd.Timedelta(seconds=INTERVAL_SECONDS[split_name(name)[1]])
        if now - last > max(STALE, 3 * step):
            trouble[name] = f"{name}: its newest bar is of {last:%Y-%m-%d %H:%M} UTC; is it still traded?"
    return {name: klines for name, klines in bars.items() if name not in trouble}, trouble


def forecast_able(
    models: Sequence[TrainedModel], bars: Mapping[str, Bars] | None = None, now: pd.Timestamp | None = None
) -> tuple[dict[str, Forecast], dict[str, str]]:
    """Forecast the series that can be, and say by series why the others cannot.

    bars: by series; None fetches the newest ones. Errors: NoForecast where no series can be forecast; SourceError.
    """
    if not models:
        raise DataError("a forecast needs at least one finished model, and bars of its series where bars are given")
    now = _moment(now)
    trouble: dict[str, str] = {}
    if bars is None:
        bars, trouble = reachable_bars(models, now)
    seen = {}
    for model in models:
        if model.series not in bars:
            trouble.setdefault(model.series, f"{model.series}: no bars of it were given")
            continue
        try:
            seen[model.series] = _look(model, bars[model.series], now)
        except DataError as error:
            trouble[model.series] = str(error)
    if not seen:
        raise NoForecast(trouble)
    return _predict([model for model in models if model.series in seen], seen), trouble


def _predict(models: Iterable[TrainedModel], seen: Mapping[str, tuple[Series, str]]) -> dict[str, Forecast]:
    """Forecast from what the models see, those of one experiment as one stack."""
    groups: dict[tuple, list[TrainedModel]] = {}
    for model in models:
        groups.setdefault((model.experiment.task, model.experiment.model), []).append(model)
    found = {}
    for group in groups.values():
        columns = [seen[model.series][0] for model in group]
        for model, series, y in zip(group, columns, _compute(group, columns), strict=True):
            found[model.series] = _in_levels(model, series, y, seen[model.series][1])
    return found


def _look(model: TrainedModel, given: Bars, now: pd.Timestamp) -> tuple[Series, str]:
    """Return the columns of bars, whose last `context` rows are what the model sees, and the hash of those bars."""
    task = model.experiment.task
    if model.experiment.data.market == "network":
        trace = read_trace(given, model.series) if isinstance(given, str | os.PathLike) else given
        if not isinstance(trace, Trace):
            raise DataError(f"{model.series} was trained on a network trace; give a Trace or its file")
        return _whole_context(to_series(trace, task), task, len(trace.frame)), ""
    if model.experiment.data.source == "table":
        given = opened(given)
        if not isinstance(given, pd.DataFrame):
            raise DataError(f"{model.series} was trained on a table; give its newest rows as a frame or a file")
        given = as_table(given, model.series, (*task.features, *task.targets))
        series = from_table(model.series, _after_holes(given, task), task.features, task.targets)
        _check_step(series, model.about.get("step_seconds"))
        return _whole_context(series, task, len(given)), ""
    klines = closed_bars(model.series, given, now)
    series = _whole_context(to_series(klines, task), task, len(klines.frame))
    return series, hash_bars(klines.frame.tail(task.context))


def _check_step(series: Series, trained: float | None) -> None:
    """Refuse rows further apart, or nearer, than those of the training; UNTIMED ones say nothing of it.

    Errors: DataError.
    """
    if trained in (None, UNTIMED) or len(series) < 2 or math.isclose(series.step_seconds, trained, rel_tol=0.01):
        return
    got = f"{figure(series.step_seconds)} s" if series.is_timed else "rows without times"
    raise DataError(
        f"{series.name}: the model was trained on rows {figure(trained)} s apart; got {got}. Give rows as the training "
        "had them, with their times"
    )


def _after_holes(table: pd.DataFrame, task: Task) -> pd.DataFrame:
    """Return the rows after the last with a missing value, where that is before all that the model sees."""
    values = table[[column for column in dict.fromkeys([*task.features, *task.targets]) if column in table]]
    holes = np.flatnonzero(values.isna().any(axis=1))
    return table[holes[-1] + 1 :] if len(holes) and holes[-1] < len(table) - task.context else table


def closed_bars(series: str, given: Bars, now: pd.Timestamp) -> Klines:
    """Return bars as Klines, all of them closed and of the series. Errors: DataError with the rule."""
    if isinstance(given, str | os.PathLike):
        klines = files.read_klines(given, series)
    elif isinstance(given, pd.DataFrame):
        if not isinstance(given.index, pd.DatetimeIndex):  # times stand in a column, as in a file of the cache
            (read,) = files.from_frames({series: given}).values()
            given = read.frame
        klines = validate(given, series, source="given", now=now)
    elif isinstance(given, Klines):
        klines = given
    else:
        raise DataError(f"{series} was trained on bars; give Klines, a frame or a file of them")
    if klines.passport.series != series:
        raise DataError(f"bars must be of the model's series {series}; got {klines.passport.series}")
    step = pd.Timedelta(seconds=INTERVAL_SECONDS[split_name(series)[1]])
    if klines.passport.unfinished or klines.frame.index[-1] + step > now:
        raise DataError(f"{series}: every bar must be closed by {now:%Y-%m-%d %H:%M} UTC; drop the last one")
    return klines


def hash_bars(frame: pd.DataFrame) -> str:
    """Return the SHA-256 of bars: their starts in seconds as 64-bit whole numbers, then open, high, low, close."""
    starts = frame.index.tz_localize(None).to_numpy("datetime64[s]").astype("<i8")
    prices = np.column_stack([frame[side].to_numpy("<f8") for side in OHLC])
    return hashlib.sha256(starts.tobytes() + prices.tobytes()).hexdigest()


def _whole_context(series: Series, task: Task, rows: int) -> Series:
    """Return the series if its last rows are a context. Errors: DataError for too few of them, or a gap."""
    together = int((series.segment == series.segment[-1]).sum())
    if len(series) < task.context:
        raise DataError(
            f"{series.name}: a forecast needs {task.context} bars after the indicators' warm-up; "
            f"got {len(series)} from {rows} bars. Give a longer range"
        )
    if together < task.context:
        gap = series.times[-together]
        raise DataError(
            f"{series.name}: the last {task.context} bars must be without a gap; "
            f"bars are missing before {gap.astype('datetime64[m]')!s}"
        )
    return series


@torch.no_grad()
def _compute(models: Sequence[TrainedModel], columns: Sequence[Series]) -> np.ndarray:
    """Return y of each model for its last origin, in the unit of the series: (M, H, K)."""
    first = models[0].experiment
    net = zoo.build(len(models), first.task, first.model)
    for name, parameter in net.named_parameters():
        parameter.data = torch.stack([model.weights[name] for model in models])
    dtype = next(net.parameters(), torch.empty(0)).dtype  # a foundation model has no weights of its own here
    scaled = [m.scaler.inputs(s.inputs[-first.task.context :]) for m, s in zip(models, columns, strict=True)]
    last = [(s.levels[-1] - s.anchors[-1]) / m.scaler.target_scale for m, s in zip(models, columns, strict=True)]
    x, ends = (torch.as_tensor(np.stack(rows)[:, None], dtype=dtype) for rows in (scaled, last))
    y = net.eval()(x, ends)[:, 0].double().numpy()  # (M, 1, L, C), (M, 1, K) -> (M, H, K), (M, H, K, Q) of quantiles
    scale = np.stack([model.scaler.target_scale for model in models])[:, None]
    return y * (scale[..., None] if first.task.quantiles else scale)


def _in_levels(model: TrainedModel, series: Series, y: np.ndarray, seen: str) -> Forecast:
    """Turn y (H, K) or (H, K, Q) of the last row into levels, prices where y is a log change, with their interval."""
    levels, every = model.experiment.task.quantiles, y
    y = median(y, model.experiment.task)
    back = np.exp if series.unit == "bp" else np.asarray
    anchor, step = series.anchors[-1], np.timedelta64(series.step_ns, "ns")
    half = np.full_like(y, np.nan)
    for head, known in model.prediction_intervals.items():
        half[:, series.columns.get(head, [])] = known["half_width"]
    times = pd.DatetimeIndex(series.times[-1] + step * np.arange(len(y) + 1), name="open_time").tz_localize("UTC")
    last, rows = times[0], times[1:]
    if not series.is_timed:
        last = int(series.times[-1].astype("datetime64[s]").astype(np.int64))
        rows = pd.RangeIndex(last + 1, last + 1 + len(y), name="row")
    table = {}
    for k, target in enumerate(series.targets):
        table[target] = back(anchor[k] + y[:, k])
        if model.prediction_intervals:
            table[f"{target}_low"] = back(anchor[k] + y[:, k] - half[:, k])
            table[f"{target}_high"] = back(anchor[k] + y[:, k] + half[:, k])
        for q, level in enumerate(levels):
            table[f"{target}_q{level:g}"] = back(anchor[k] + every[:, k, q])
    known = next(iter(model.prediction_intervals.values()), {})
    return Forecast(
        series=model.series,
        frame=pd.DataFrame(table, index=rows),
        last_bar=last,
        last=dict(zip(series.targets, back(series.levels[-1]).tolist(), strict=True)),
        nominal=known.get("nominal"),
        coverage=known.get("coverage"),
        verdict=model.verdict,
        synthetic=model.synthetic,
        seen=seen,
    )
