"""The plan of a sweep: which models share a stack, where the stacks run, and how long that takes, from timed steps."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cpbkit.config.experiment import Experiment, vary
from cpbkit.errors import CpbkitError
from cpbkit.hardware import memory
from cpbkit.hardware.device import on_threads, wait
from cpbkit.hardware.environment import count_cores, free_memory
from cpbkit.models import zoo
from cpbkit.quantities import counted, figure
from cpbkit.training.loop import Fit, assemble, evaluate, find_series, fit, is_out_of_memory, try_loss
from cpbkit.windows.series import Series
from cpbkit.windows.splits import split

TIMED_STEPS = 3  # at least, after one that warms up
TIMED_SECONDS = 0.3  # for more of them where they are quick
TRIAL_SECONDS = 20.0  # unless asked otherwise; a candidate whose steps would take longer is not tried
FORWARD_SHARE = 1 / 3  # of a training step that a forward pass takes, by the count of its products
MEMORY_SHARE = 0.7  # of the free memory that stacks may fill
PROCESS_BYTES = 3.2e8  # that a process takes before it has a model: Python with torch, pandas and scipy
CONTEXT_BYTES = 5e8  # of a GPU that each process on it takes for CUDA's context and the libraries' kernels
PLANNED_SHARE = 0.85  # of a time budget that training may plan for; the rest is loading, judging and drift
LEAST_PATIENCE = 2  # epochs, however short the budget
FASTER = 1.1  # of the time of float32, from which on fewer bits are worth their rounding
COPIES = 5  # of the weights: themselves, gradients, two moments, the best ones


@dataclass(frozen=True)
class Plan:
    """How the series are shared out. A resumed sweep keeps it, but for where the jobs run."""

    jobs: list[list[str]]  # names of the series of each stack
    steps: int  # optimiser steps an epoch, the same for every model of the run
    epochs: int  # at most, of each model
    patience: int  # epochs; shorter than the experiment's where a budget of time is
    devices: list[str]  # of the processes at once; a single one is this process
    seconds: float = 0.0  # predicted for all epochs of all jobs; 0 when nothing was timed
    reason: str = ""  # why so, with the measured alternatives
    stacked: bool = False  # whether an own network is computed as a stack
    bytes: int = 0  # that the stacks at work hold at once, by their trial; 0 when nothing was timed
    precision: str = ""  # the fastest, where the experiment leaves it to the plan


@dataclass(frozen=True)
class Trial:
    """A stack of `models` models, timed on one device with one thread."""

    models: int
    seconds: float  # a step
    bytes: int  # held at most: bars, weights, optimiser, what the backward pass needs; on a GPU a validation beside it


def job_name(names: Sequence[str]) -> str:
    """Name a stack after its first series and its size: BTCUSDT_15m+19."""
    return f"{names[0]}+{len(names) - 1}"


def make_plan(
    experiment: Experiment,
    series: dict[str, Series],
    workers: int | None = None,
    minutes: float | None = None,
    *,
    trial_seconds: float = TRIAL_SECONDS,
) -> Plan:
    """Time a few steps of stacks of several sizes and choose the fastest that fits into memory.

    workers: None takes a process per core or GPU, 1 stays in this process. minutes: a budget; where it is too short for
    all epochs, patience shrinks as much, so that models which still improve get the time of those which do not. A
    cosine, which must reach its end, gets fewer epochs instead. trial_seconds: a size of stack whose steps would take
    longer is not timed. Errors: CpbkitError when not even one epoch fits.
    """
    task, training = experiment.task, experiment.training
    devices = find_places(workers, len(series))
    try_loss(task, torch.device(devices[0]))
    model, why = zoo.try_out(task, experiment.model, min(4, len(series)), training.batch, torch.device(devices[0]))
    experiment = replace(experiment, model=model)
    windows = {name: split(s, task) for name, s in series.items()}
    whole = sum if training.pooled else max  # an epoch sees the windows of all series, or of the longest
    steps = training.count_steps(whole(len(w.train) for w in windows.values()))
    devices = devices[:1] if training.pooled else devices
    places = len(devices)
    on_cpu = devices[0] == "cpu"
    share = math.ceil(len(series) / places)  # models of a worker
    wanted = (2, 4, 8, share) if on_cpu else (share // 4, share // 2, share)
    memory.give_back()  # what torch keeps for later would count as taken
    limit = MEMORY_SHARE * free_memory(devices[0])
    if (sharing := devices.count(devices[0])) > 1:  # all of them on a CPU; on GPUs those of the first, which has most
        limit = max(0.0, limit - sharing * (PROCESS_BYTES if on_cpu else CONTEXT_BYTES)) / sharing
    longest = sorted(series.values(), key=len, reverse=True)[:share]
    timed, precision, bits = vary(experiment, steps=steps), "", ""
    if training.precision == "auto":
        timed = vary(timed, precision="float32")
    if training.pooled:
        trials = [_trial(timed, longest, devices[0])]
    else:
        trials = list(_trials(timed, longest, devices[0], wanted, limit, trial_seconds))
    memory.give_back()  # what the trials held is wanted by the process that trains there, which may be another
    fitting = [t for t in trials if t.bytes <= limit] or trials[:1]
    best = min(fitting, key=lambda t: t.seconds / t.models)
    if training.precision == "auto":
        best, precision, bits = _fewer_bits(timed, longest[: best.models], devices[0], best)
    jobs = [part for i in range(places) for part in _cut(list(series)[i::places], best.models)]
    validation = whole(len(w.validation) for w in windows.values()) / training.batch
    # The step of a foundation model is a forward pass, and there are three: two of validation, one of as long a test.
    share_of_step = 3 if experiment.pretrained else FORWARD_SHARE
    epoch = (steps + share_of_step * validation) * best.seconds  # of a whole stack
    rounds = max(sum(len(job) for job in jobs[i::places]) for i in range(places)) / best.models
    if training.pooled:
        reason = f"one model for all {len(series)} series; a step took {1000 * best.seconds:.1f} ms"
    else:
        where = f"{places} process(es), one thread each" if on_cpu else f"{len(set(devices))} GPU(s)"
        timings = ", ".join(f"{1000 * t.seconds / t.models:.1f} ms in a stack of {t.models}" for t in trials)
        reason = f"stacks of {best.models} on {where}; a step of one model took {timings}" + (f"; {why}" if why else "")
    reason += bits
    epochs, patience, seconds = training.epochs, training.patience, epoch * rounds * training.epochs
    if minutes is not None and (part := 60 * minutes * PLANNED_SHARE / seconds) < 1:
        if part * epochs < 1:
            raise CpbkitError(
                f"one epoch of {counted(len(series), 'model')} takes about {epoch * rounds / 60:.1f} min here, "
                f"predicted from a few timed steps; got a budget of {figure(minutes, 3)} min. Take a smaller preset or "
                "fewer series"
            )
        if training.schedule == "cosine":
            epochs = int(part * epochs)
        else:
            patience = min(patience, max(LEAST_PATIENCE, math.ceil(part * patience)))
        reason += f"; {minutes:.3g} min are {part:.0%} of what all epochs take: at most {epochs}, patience {patience}"
        seconds *= part
    return Plan(jobs, steps, epochs, patience, devices, seconds, reason, model.stacked, places * best.bytes, precision)


def find_places(workers: int | None, series: int) -> list[str]:
    """Return the devices of the processes that this machine gives to this many series; one of them is for this process.

    workers: as many as that; None takes what is there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
    if workers is not None and workers < 1:
        raise CpbkitError(f"workers must be at least 1, which is this process; got {workers}")
    if (count := workers or min(series, gpus)) == 0:
        room = int(MEMORY_SHARE * free_memory("cpu") / PROCESS_BYTES)  # each loads torch anew
        count = max(1, min(series, count_cores(), room))
    return [names[i % len(names)] for i in range(count)]


def _trials(
    experiment: Experiment, series: list[Series], device: str, wanted: Sequence[int], limit: float, seconds: float
) -> Iterator[Trial]:
    """Time one model, then stacks of the wanted sizes as far as memory and the seconds of a trial allow."""
    one = _trial(experiment, series[:1], device)
    yield one
    quick = seconds / (one.seconds * (TIMED_STEPS + 1))
    room = limit / max(1, one.bytes) if device == "cpu" else len(series)  # a GPU says itself when it is full
    most = int(min(len(series), room, max(2, quick)))
    sizes = sorted({min(size, most) for size in wanted} - {0, 1})
    while sizes:
        size = sizes.pop(0)
        try:
            yield _trial(experiment, series[:size], device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            sizes = [size // 2] if size > 3 else []  # the larger ones do not fit either


def _fewer_bits(experiment: Experiment, series: list[Series], device: str, best: Trial) -> tuple[Trial, str, str]:
    """Time the best stack in fewer bits than float32 too: the trial to take, its precision, and what was found."""
    if device == "cpu":
        names: tuple[str, ...] = ("bfloat16",)
    else:  # the tensor cores of a T4 know float16 alone
        names = ("tf32", "bfloat16") if torch.cuda.get_device_capability(device) >= (8, 0) else ("float16",)
    trials = {"float32": best}
    for name in names:
        trials[name] = _trial(vary(experiment, precision=name), series, device)
    least = min(trials, key=lambda name: trials[name].seconds * (1 if name == "float32" else FASTER))
    times = ", ".join(f"{1000 * trial.seconds / trial.models:.1f} ms in {name}" for name, trial in trials.items())
    return trials[least], least, f"; in a stack of {best.models} {times}, so {least}"


def _trial(experiment: Experiment, series: list[Series], device: str) -> Trial:
    training = experiment.training
    held: dict[int, int] = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    random = torch.get_rng_state()
    try:
        with on_threads(1), memory.peak(torch.device(device)) as taken:
            windows, stack = assemble(experiment, series, device)
            steps = max(training.steps, TIMED_STEPS + 2)
            with contextlib.closing(fit(Fit(stack), windows, training, steps)) as run:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    next(run)
                wait(device)
                ends = [time.perf_counter()]
                while len(ends) <= TIMED_STEPS or (len(ends) < steps and ends[-1] - ends[0] < TIMED_SECONDS):
                    next(run)
                    wait(device)
                    ends.append(time.perf_counter())
                if device != "cpu":  # a validation needs memory beside that of the captured step
                    evaluate(stack.net, windows, "validation", find_series(stack, windows))
    finally:
        torch.set_rng_state(random)
    pace = min(later - earlier for earlier, later in itertools.pairwise(ends))
    held_bytes = 0 if device != "cpu" else COPIES * stack.weights.nbytes + sum(held.values())
    return Trial(len(series), pace, max(held_bytes, taken["bytes"] or 0))


def _cut(names: list[str], size: int) -> list[list[str]]:
    """Cut names into pieces of nearly equal length, none longer than `size`."""
    count = math.ceil(len(names) / size)
    return [names[i::count] for i in range(count)]
