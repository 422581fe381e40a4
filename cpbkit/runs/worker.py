"""One job: a stack of series trained and judged, told to whoever runs it as a stream of messages."""

import dataclasses
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cpbkit import __version__
from cpbkit.config import own
from cpbkit.config.experiment import Experiment, series_of, to_json
from cpbkit.errors import RunError, Terminated
from cpbkit.evaluation.backtest import join
from cpbkit.evaluation.conformal import judge_prediction_intervals, judge_quantiles
from cpbkit.evaluation.past import past_of
from cpbkit.evaluation.pooled import Losses, losses_of, to_bytes
from cpbkit.evaluation.results import ResultLine, Running, group_heads
from cpbkit.evaluation.verdicts import OLD, evidence, judge
from cpbkit.hardware import memory
from cpbkit.models import zoo
from cpbkit.quantities import counted
from cpbkit.runs import stopping
from cpbkit.runs.clock import Clock, Moment, device_moment
from cpbkit.runs.folder import BY_HAND, OUT_OF_TIME
from cpbkit.runs.plan import job_name
from cpbkit.runs.trained import TrainedModel
from cpbkit.training import checkpoint
from cpbkit.training.loop import (
    POOLED,
    Finished,
    Fit,
    assemble,
    fit,
    forecast,
    is_out_of_memory,
    mean_losses,
    median,
    persistence_losses,
)
from cpbkit.training.stack import Stack
from cpbkit.windows.scaling import Scaler
from cpbkit.windows.series import Series, data_sha256
from cpbkit.windows.windows import Windows

PROGRESS_SECONDS = 0.5  # between two progress messages
CHECKPOINT_SECONDS = 30.0  # between two checkpoints at the least
TRAINED_SHARE = 0.95  # of a job's time after which its models leave, to be judged in the rest
SETTINGS = "settings"  # beside the series in what a checkpoint is known by; no series is named so
CHECKPOINT_SHARE = 0.01  # of the time that checkpoints may take


@dataclass(frozen=True)
class Job:
    """What one worker needs; it can be sent to another process or machine."""

    name: str
    experiment: Experiment  # with its steps stated
    series: tuple[Series, ...]
    device: str = "cpu"
    threads: int = 1
    checkpoint: bytes | None = None  # go on from here
    deadline: float | None = None  # when it must be through, with its share of the time till then, seconds since 1970
    turns: int = 1  # it and the jobs after it that share that time
    parents: Mapping[str, bytes] = field(default_factory=dict)  # of a refit: the models before it, by series
    tried: tuple[str, ...] = ()  # which larger jobs were tried before it, and how they ended


@dataclass(frozen=True)
class Progress:
    """What a job is doing."""

    job: str
    stage: str
    running: dict[str, Running] = field(default_factory=dict)  # by series
    samples: int = 0  # windows trained on since the last message
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, since the last message


@dataclass(frozen=True)
class Result:
    """A series that is through: its line of the ledger and its model, if it has one."""

    line: ResultLine
    model: bytes | None
    losses: bytes | None = None  # of each test window, which verdicts over all series are taken from


@dataclass(frozen=True)
class Checkpoint:
    """Where a job would go on from."""

    job: str
    content: bytes


@dataclass(frozen=True)
class Shrunk:
    """A job that did not fit into memory and goes on as smaller ones, from their beginning."""

    job: str
    jobs: list[list[str]]  # names of their series
    reason: str


@dataclass(frozen=True)
class Note:
    """What a person should know of a job."""

    text: str


Message = Progress | Result | Checkpoint | Shrunk | Note


def work(job: Job) -> Iterator[Message]:
    """Train and judge the series of a job, message by message; halve it where the memory does not suffice.

    A resumed job may give a result once more. Errors: Terminated after a checkpoint, when the process is asked to end.
    """
    through: set[str] = set()
    try:
        for message in _work(job):
            if isinstance(message, Result):
                through.add(message.line.series)
            yield message
        return
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
    memory.give_back()
    messages, halves = shrink(job, through, f"did not fit into the memory of {job.device}: {reason}")
    yield from messages
    for half in halves:
        yield from work(half)


def shrink(job: Job, through: Collection[str], why: str) -> tuple[list[Message], list[Job]]:
    """Return what is to be said of a job that did not end well, and the smaller jobs that go on for it.

    through: series that need no other try. A single series, which cannot be halved, has failed.
    """
    left = {series.name: series for series in job.series if series.name not in through}
    if not left:
        return [], []
    tried = (*job.tried, f"{job.name} {why}")
    if len(job.series) == 1 or job.experiment.training.pooled:  # half of the series would be another model
        said = f"{'alone ' if len(job.series) == 1 else ''}it {why}"
        lines = [ResultLine(name, "failed", said, tried=list(tried)) for name in left]
        return [Result(line, None) for line in lines], []
    halves = [names for names in (list(left)[0::2], list(left)[1::2]) if names]
    text = f"{tried[-1]}; it goes on as {counted(len(halves), 'smaller stack')}"
    jobs = []
    for i, names in enumerate(halves):
        series, turns = tuple(left[name] for name in names), len(halves) * job.turns - i
        half = dataclasses.replace(job, name=job_name(names), series=series, checkpoint=None, turns=turns)
        jobs.append(dataclasses.replace(half, tried=tried))
    return [Shrunk(job.name, halves, text)], jobs


def _work(job: Job) -> Iterator[Message]:
    torch.set_num_threads(job.threads)
    experiment, training = job.experiment, job.experiment.training
    clock = Clock(functools.partial(device_moment, job.device) if job.device.startswith("cuda") else Moment)
    begun = saved = time.monotonic()
    left = (job.deadline - time.time()) / job.turns if job.deadline else math.inf
    enough, told = begun + TRAINED_SHARE * left, -math.inf
    with clock("build"):
        parents = {name: TrainedModel.read(content, trust_code=True) for name, content in job.parents.items()}
        windows, stack = _assemble(job, parents)
        data = {series.name: data_sha256(series) for series in job.series}
        known = data | {SETTINGS: hashlib.sha256(to_json(experiment).encode()).hexdigest()}
        resumed, why = None, "it is of other bars or settings than are there now"
        try:
            resumed = job.checkpoint and checkpoint.load_fit(stack, job.checkpoint, known)
        except RunError as error:
            why = str(error)
            windows, stack = _assemble(job, parents)
        state = resumed or Fit(stack)
        persistence, mean = persistence_losses(windows), mean_losses(windows)
    if job.checkpoint and not resumed:
        yield Note(f"{job.name} begins anew, not from its checkpoint: {why}")
    pause, samples, stage = CHECKPOINT_SECONDS, 0, "first step"
    training_steps = fit(state, windows, training, training.steps)
    while True:
        with clock(stage):
            if next(training_steps, None) is None:
                break
        if state.step:
            samples += len(state.curves) * training.batch
        stage = "validation" if state.step == training.steps else "epochs"
        ended = [] if state.step else state.finished
        for name, group in itertools.groupby(ended, lambda finished: series_of(finished.name)):
            folds = list(group)
            for series in job.series:
                if series.name == name or training.pooled:
                    with clock("judging"):
                        about: dict[str, Any] = {"mode": state.mode, "data_sha256": data[series.name]}
                        about |= {"persistence": persistence[folds[-1].name], "mean": mean[folds[-1].name]}
                        about["seconds"] = round(time.monotonic() - begun, 3)
                        yield _result(job, windows, series, folds, about, parents.get(series.name))
        now = time.monotonic()
        if len(stack) and (now - saved > pause or stopping.is_asked()):
            with clock("checkpoints"):
                yield Checkpoint(job.name, checkpoint.save_fit(state, known))
            saved = time.monotonic()
            pause = max(CHECKPOINT_SECONDS, (saved - now) / CHECKPOINT_SHARE)
        if stopping.is_asked():
            raise Terminated
        one_for_all = training.pooled and not stopping.leaving().isdisjoint(data)
        state.leaving = dict.fromkeys([POOLED] if one_for_all else stopping.leaving(), BY_HAND)
        if now > enough:
            state.hurry = OUT_OF_TIME
        if now - told > PROGRESS_SECONDS:
            yield _progress(job, state, persistence, samples, clock)
            told, samples = now, 0
    yield _progress(job, state, persistence, samples, clock)


def _assemble(job: Job, parents: Mapping[str, TrainedModel]) -> tuple[Windows, Stack]:
    windows, stack = assemble(job.experiment, job.series, job.device)
    if job.experiment.training.warm_start and parents:
        weights = {name: parent.weights for name, parent in parents.items()}
        # One model for all series is kept with each of them.
        stack.begin_from({POOLED: next(iter(weights.values()))} if job.experiment.training.pooled else weights)
    return windows, stack


def _progress(job: Job, state: Fit, persistence: dict[str, dict[str, float]], samples: int, clock: Clock) -> Progress:
    training = job.experiment.training
    share = (state.epoch + state.step / training.steps) / training.epochs
    running: dict[str, Running] = {}
    for row, curve in state.curves.items():
        piece, lowest = training.of_row(row)[0], min(curve["validation"], default=math.inf)
        for name in [one.name for one in job.series] if training.pooled else [series_of(piece)]:
            # Of a search the best so far, of folds the last.
            if name not in running or lowest < min(running[name].curve["validation"], default=math.inf):
                running[name] = Running(curve, persistence[piece], share)
    return Progress(job.name, f"training, epoch {state.epoch + 1}", running, samples, clock.take())


def _result(
    job: Job,
    windows: Windows,
    series: Series,
    folds: list[Finished],
    about: dict[str, Any],
    parent: TrainedModel | None,
) -> Result:
    """Judge the finished models of a series, one for each fold, on their test splits, which are read nowhere else.

    The last of them, which is trained on the newest bars, is the one that is kept. Of a refit, which has one fold,
    the model before it is judged beside it. about: what the training alone knows of the line of the ledger.
    """
    experiment, task, name = job.experiment, job.experiment.task, job.experiment.model.name
    places = [windows.names.index(piece) for piece in experiment.training.pieces(series.name)]
    line = _begin_line(job, windows, series, folds, places, about)
    if line.status != "done":
        return Result(line, None)
    sick = dataclasses.replace(line, status="sick", reason="a forecast of the validation or test split is not finite")
    place, is_itself = task.zero_shot, bool(experiment.pretrained)
    parts = []  # of each fold, by head
    for m, finished in zip(places, folds, strict=True):  # of the last of them more is told below
        net = zoo.restore(task, experiment.model, finished.weights).to(windows.device)
        of_test = forecast(net, windows, "test", [m])[0]
        test, its = median(of_test, task), windows.splits[m]
        if not np.isfinite(test).all():
            return Result(sick, None)
        parts.append(evidence(windows.series[m], its.test, test, its.bounds["train"][1], place, is_itself))
    validation = median(forecast(net, windows, "validation", places[-1:])[0], task)
    if not np.isfinite(validation).all():
        return Result(sick, None)
    splits = windows.splits[places[-1]]
    origins = np.concatenate([windows.splits[m].test for m in places])  # a piece has the first rows of its series
    judged, losses = _judge(series, origins, {head: join(told) for head, told in group_heads(parts).items()}, name)
    held, half_widths = judge_prediction_intervals(series, splits, task.context, validation, test)
    line = dataclasses.replace(line, test=judged, prediction_intervals=held)
    shown = {head: past_of(series, splits.test, head, part, half_widths[head]) for head, part in parts[-1].items()}
    if levels := task.quantiles:
        line = dataclasses.replace(line, quantiles=judge_quantiles(series, splits, levels, of_test))
    if parent:
        validation, test = _forecast_before(parent, windows, places[-1])
        before = evidence(series, splits.test, test, splits.bounds["train"][1])
        _, half_widths = judge_prediction_intervals(series, splits, task.context, validation, test)
        judged, old_losses = _judge(series, splits.test, before, name)
        line = dataclasses.replace(line, before=judged)
        for head, part in before.items():
            losses[head + OLD] = old_losses[head]
            shown[head + OLD] = past_of(series, splits.test, head, part, half_widths[head])
    described = _describe(line, series, experiment, folds[-1], windows.scalers[places[-1]])
    return Result(line, checkpoint.save(folds[-1].weights, described), to_bytes(losses, shown))


def _begin_line(
    job: Job, windows: Windows, series: Series, folds: list[Finished], places: list[int], about: dict[str, Any]
) -> ResultLine:
    """Return the line of the ledger before its models are judged; places: of the folds among the windows."""
    last, splits = folds[-1], windows.splits[places[-1]]
    wrong = next((finished for finished in folds if finished.status != "done"), last)
    dates = [windows.splits[m].dates(windows.series[m]) for m in places]
    return ResultLine(
        series.name,
        wrong.status,
        wrong.reason,
        synthetic=series.synthetic,
        preset=job.experiment.preset,
        parameters=sum(tensor.numel() for tensor in last.weights.values()),
        search=list(last.tried),
        tried=list(job.tried),
        epochs=last.epochs,
        best_epoch=last.best_epoch,
        curve={name: [_plain(x) for x in values] for name, values in last.curve.items()},
        windows={
            "train": len(splits.train),
            "validation": len(splits.validation),
            "test": sum(len(windows.splits[m].test) for m in places),
        },
        dates=dates[-1] | {"test": [dates[0]["test"][0], dates[-1]["test"][1]]},
        folds=dates if len(folds) > 1 else [],
        **about,
    )


def _judge(
    series: Series, origins: np.ndarray, by_head: Mapping[str, Mapping], model: str
) -> tuple[dict[str, dict], dict[str, Losses]]:
    """Return the judgement of each head for the ledger, and its losses, from what `evidence` gathered."""
    judged = {head: judge(**part, unit=series.unit, model=model).to_dict() for head, part in by_head.items()}
    return judged, {head: losses_of(series, origins, part, model) for head, part in by_head.items()}


def _describe(
    line: ResultLine, series: Series, experiment: Experiment, finished: Finished, scaler: Scaler
) -> dict[str, Any]:
    """Return what it takes to use a model, and where it comes from."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "experiment": dataclasses.asdict(dataclasses.replace(experiment, training=finished.training)),
        "series": series.name,
        "synthetic": series.synthetic,
        "features": series.features,
        "targets": series.targets,
        "scaler": {name: _numbers(value) for name, value in dataclasses.asdict(scaler).items()},
        "intervals": {
            head: {name: held[name] for name in ("nominal", "coverage", "half_width")}
            for head, held in line.prediction_intervals.items()
        },
        "own": {name: own.fingerprint(name) for name in experiment.own_parts},
        "dates": line.dates,
        "data_sha256": line.data_sha256,
        "step_seconds": float(series.step_seconds),
    }


def _forecast_before(parent: TrainedModel, windows: Windows, m: int) -> Iterator[np.ndarray]:
    """Yield what the model before a refit forecasts of validation and test, scaled as it was trained: (W, H, K)."""
    one, task = parent.experiment, parent.experiment.task
    dtype = windows.inputs.dtype
    own_scale = Windows([windows.series[m]], task, windows.device, dtype, [windows.splits[m]], [parent.scaler])
    net = zoo.restore(task, one.model, parent.weights).to(windows.device)
    yield from (median(forecast(net, own_scale, part, [0])[0], task) for part in ("validation", "test"))


def _numbers(value: float | np.ndarray) -> float | list[float | None]:
    """Return a constant of the scaler fit for JSON; None is no bound."""
    return [_plain(x) for x in value.tolist()] if isinstance(value, np.ndarray) else value


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None
