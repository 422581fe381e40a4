"""One unit of work: a stack of series trained and judged, told to whoever runs it as a stream of messages."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from cpbkit import __version__, checkpoint
from cpbkit.clock import Clock
from cpbkit.evaluate import judge_heads
from cpbkit.experiment import Experiment
from cpbkit.models import zoo
from cpbkit.stack import Stack
from cpbkit.train import Finished, Fit, fit, forecast, persistence_losses
from cpbkit.windows import Series, Windows

DTYPES = {"float64": torch.float64}  # of the weights; every other precision keeps them in float32
PROGRESS_SECONDS = 0.5  # between two progress messages
CHECKPOINT_SECONDS = 30.0  # between two checkpoints at the least
CHECKPOINT_SHARE = 0.01  # of the time that checkpoints may take


@dataclass(frozen=True)
class Unit:
    """What one worker needs; it can be sent to another process or machine."""

    name: str
    experiment: Experiment  # with its steps stated
    series: tuple[Series, ...]
    device: str = "cpu"
    threads: int = 1
    checkpoint: bytes | None = None  # go on from here


@dataclass(frozen=True)
class Progress:
    """What a unit is doing."""

    unit: str
    stage: str
    running: dict[str, dict] = field(default_factory=dict)  # series -> curve, persistence, and share done
    samples: int = 0  # windows trained on since the last message
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, since the last message


@dataclass(frozen=True)
class Result:
    """A series that is through: its line of the ledger and its model, if it has one."""

    unit: str
    line: dict
    model: bytes | None


@dataclass(frozen=True)
class Checkpoint:
    """Where a unit would go on from."""

    unit: str
    content: bytes


Message = Progress | Result | Checkpoint


def work(unit: Unit) -> Iterator[Message]:
    """Train and judge the series of a unit, message by message; results come before the checkpoint without them."""
    torch.set_num_threads(unit.threads)
    experiment, training, clock = unit.experiment, unit.experiment.training, Clock()
    with clock("build"):
        device = torch.device(unit.device)
        windows = Windows(unit.series, experiment.task, device, DTYPES.get(training.precision, torch.float32))
        stack = Stack(
            lambda models: zoo.build(models, experiment.task, experiment.model),
            [series.name for series in unit.series],
            training,
            device,
            windows.inputs.dtype,
        )
        state = checkpoint.load_fit(stack, unit.checkpoint) if unit.checkpoint else Fit(stack)
        floor = _by_name(unit.series, persistence_losses(windows, list(range(len(windows)))))
    begun = told = saved = time.monotonic()
    pause, samples, stage = CHECKPOINT_SECONDS, 0, "first step"
    training_steps = fit(state, windows, training, training.steps)
    while True:
        with clock(stage):
            if next(training_steps, None) is None:
                break
        if state.step:
            samples += len(stack) * training.batch
        stage = "validation" if state.step == training.steps else "epochs"
        for finished in [] if state.step else state.finished:
            with clock("judging"):
                yield _result(unit, windows, finished, floor[finished.name], time.monotonic() - begun)
        now = time.monotonic()
        if len(stack) and (now - saved > pause or (state.finished and not state.step)):
            with clock("checkpoints"):
                yield Checkpoint(unit.name, checkpoint.save_fit(state))
            saved = time.monotonic()
            pause = max(CHECKPOINT_SECONDS, (saved - now) / CHECKPOINT_SHARE)
        if now - told > PROGRESS_SECONDS:
            yield _progress(unit, state, floor, samples, clock)
            told, samples = now, 0
    yield _progress(unit, state, floor, samples, clock)


def _by_name(series: tuple[Series, ...], losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {s.name: {part: values[m] for part, values in losses.items()} for m, s in enumerate(series)}


def _progress(unit: Unit, state: Fit, floor: dict[str, dict], samples: int, clock: Clock) -> Progress:
    training = unit.experiment.training
    share = (state.epoch + state.step / training.steps) / training.epochs
    running = {
        name: {"curve": curve, "persistence": floor[name], "share": share} for name, curve in state.curves.items()
    }
    return Progress(unit.name, f"training, epoch {state.epoch + 1}", running, samples, clock.take())


def _result(unit: Unit, windows: Windows, finished: Finished, floor: dict[str, float], seconds: float) -> Result:
    """Judge a finished model on the test split, which is read here and nowhere else."""
    m = next(i for i, series in enumerate(windows.series) if series.name == finished.name)
    series, splits, scaler = windows.series[m], windows.splits[m], windows.scalers[m]
    experiment = unit.experiment
    line = {
        "series": series.name,
        "status": finished.status,
        "reason": finished.reason,
        "synthetic": series.synthetic,
        "preset": experiment.preset,
        "parameters": sum(tensor.numel() for tensor in finished.weights.values()),
        "epochs": finished.epochs,
        "best_epoch": finished.best_epoch,
        "seconds": round(seconds, 3),
        "curve": {name: [_plain(x) for x in values] for name, values in finished.curve.items()},
        "persistence": floor,
        "windows": {part: len(getattr(splits, part)) for part in ("train", "validation", "test")},
        "dates": splits.dates(series),
        "test": {},
    }
    if finished.status != "done":
        return Result(unit.name, line, None)
    net = zoo.build(1, experiment.task, experiment.model).to(windows.device, windows.inputs.dtype)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter[0] = finished.weights[name]
    predicted = forecast(net, windows, "test", [m])[0]
    judged = judge_heads(series, splits.test, predicted, splits.bounds["train"][1], experiment.model.name)
    line["test"] = {head: judgement.to_dict() for head, judgement in judged.items()}
    about = {
        "version": __version__,
        "torch": torch.__version__,
        "experiment": dataclasses.asdict(experiment),
        "series": series.name,
        "synthetic": series.synthetic,
        "features": series.features,
        "targets": series.targets,
        "scaler": {f: np.asarray(v).tolist() for f, v in dataclasses.asdict(scaler).items()},
        "dates": line["dates"],
        "data_sha256": data_sha256(series),
    }
    return Result(unit.name, line, checkpoint.save(finished.weights, about))


def data_sha256(series: Series) -> str:
    """Return a fingerprint of the columns that a model was trained and judged on."""
    digest = hashlib.sha256()
    for column in (series.times, series.inputs, series.levels, series.anchors):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None
