"""One training step of a person's loop, and its numbers: W, N, H, D, L, C, K and S."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check.census import Census, take_census
from cpbkit.gpu_check.clocks import find_middle, make_clock, measure_call, run_plug, time_block
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.numbers import NAN, Numbers
from cpbkit.gpu_check.tensors import count_samples, find_misplaced, resize, to_device
from cpbkit.gpu_check.trace import read_path
from cpbkit.hardware.chips import find_chip
from cpbkit.hardware.monitor import growth

BLOCKS = 7  # of steps of each kind, interleaved
TIMED = 5  # steps in which the optimiser is timed
LEAST_STEPS = 10  # a block on a device, where a queue must fill
AHEAD = 3  # batches a worker may have ready: PyTorch's prefetch_factor, and one in hand
KERNEL_GAP = 1e-3  # ms between two kernels, which the union of their intervals leaves out
GATES = 40  # sigmoids and tanhs a step that betray a recurrence written out


class StepFailed(CpbkitError):
    """A step that could not be measured; the message names the phase."""


@dataclass(frozen=True)
class Step:
    """One optimiser step of a person's loop."""

    train: Callable[[Any], Any]  # takes a batch as the loader gives it; may return the loss
    batches: Callable[[], Iterable] | None = None  # a fresh pass over the loader; None: train gets None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    name: str = "step"
    device: str = ""  # "" takes the GPU where there is one
    samples: int = 0  # a batch; 0 takes the length of its first tensor
    workers: int = 0  # of the loader
    graph: bool = False  # on a GPU it is replayed as one CUDA graph
    variants: dict[str, "Step"] = field(default_factory=dict)  # fix -> the step with it applied
    stacked: Callable[[int], "Step"] | None = None  # the same step for n series at once
    resized: Callable[[int], "Step"] | None = None  # the same step on n samples, where it has no loader

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def feed(self) -> Iterator:
        """Yield the loader's batches, pass after pass."""
        while True:
            count = 0
            for batch in self.batches() if self.batches else itertools.repeat(None):
                count += 1
                yield batch
            if not count:
                raise StepFailed("the loader gave no batch in a whole pass")

    def loop(self) -> Callable[[], object]:
        """Return one turn of the person's loop, loader included."""
        batches = self.feed()
        return lambda: self.train(next(batches))

    def on_samples(self, batch, samples: int) -> Callable[[], object]:
        """Return the step on so many samples: of the batch, cut or repeated, or of a step made for it."""
        if self.resized:
            return self.resized(samples).loop()
        if not count_samples(batch):
            raise ValueError("this step's batch has no tensor with an axis of samples")
        fitted = resize(batch, samples)
        return lambda: self.train(fitted)


@dataclass(frozen=True)
class Measured:
    """The numbers of a step, how H and D were had, and what was odd."""

    numbers: Numbers
    method: str
    problems: tuple[str, ...] = ()


def measure(step: Step, seconds: float = 20.0, clock=None, count=None) -> Measured:
    """Measure a step within about `seconds`, and leave what the person owns as it was.

    clock and count stand in for a device that is not there: `clocks.CudaClock`, `take_census`.
    Raises StepFailed, with the phase, for a step that raises, whose loss is not finite, or that is too slow.
    """
    with contextlib.ExitStack() as exits:
        with phase("copy of what it holds"):  # beside which there may be no memory left
            notes = exits.enter_context(preserved(step))
        measured = _measure(step, seconds, clock or make_clock(step.place), count or take_census)
    problems = list(measured.problems)
    if notes.printed.strip():
        first = notes.printed.strip().splitlines()[0][:60]
        problems.append(f"the step prints, which costs time in every loop: {first!r}")
    if notes.moved:
        problems.append(f"the step moved {len(notes.moved)} tensors ({notes.moved[0]}); they are back in place")
    return replace(measured, problems=tuple(problems))


def _measure(step: Step, seconds: float, clock, count) -> Measured:
    with phase("first batch"):
        batches = step.feed()
        batch = next(batches)
        resident = to_device(batch, step.place)
    with phase("first step"):
        once = min(time_block(clock, lambda: _check(step.train(batch))) for _ in range(2))
    if once > seconds / 8:
        raise StepFailed(
            f"one step takes {once:.1f} s, seen in the phase 'first step'; a diagnosis needs more than thirty: "
            "hand over a smaller step, or give it more time"
        )
    with phase("warm-up"):
        each = _warm_up(clock, lambda: step.train(batch), seconds / 8)
    with phase("counting"):
        census = count(lambda: step.train(batch))
    runs = {"cached": lambda: step.train(batch)}
    if step.batches:
        runs["loop"] = lambda: step.train(next(batches))
    if not clock.serial:
        runs["resident"] = lambda: step.train(resident)
    middle, memory, steps = _take_turns(step, clock, runs, each, seconds)
    with phase("loader"):
        pause = [time_block(clock, lambda: next(batches), steps) for _ in range(3 if step.batches else 0)]
    slope, leaks = growth(census.live[2:] if clock.serial else memory[len(runs) :])
    cached, spread = middle["cached"][0], max(error for _, error in middle.values())
    numbers = Numbers(
        loop=middle.get("loop", middle["cached"])[0],
        cached=cached,
        host=cached,  # until it is told from the device's
        device=cached,
        resident=middle["resident"][0] if "resident" in middle else NAN,
        loader=median(pause) * 1e3 if pause else 0.0,
        kernels=census.kernels,
        waits=len(census.waits),
        optimizer_share=_time_optimizer(step, clock, batch),
        growth=slope if leaks else 0.0,
        spread=spread,
        batch=step.samples or count_samples(batch),
        workers=step.workers,
        arithmetic=_arithmetic(census, step.place),
        precision=census.precision,
        rnn="cells" if census.gates >= GATES and not census.recurrences else "",
        capability=torch.cuda.get_device_capability(step.place) if step.place.startswith("cuda") else (0, 0),
        serial=clock.serial,
        misplaced=tuple(find_misplaced(step.model, None, step.optimizer, step.place, census.read)),
        wait_lines=tuple(dict.fromkeys(census.waits)),
    )
    with phase("enqueue"):
        split = _split_serial if clock.serial else _split_device
        return split(clock, numbers, step, batch, resident)


def _take_turns(step: Step, clock, runs: dict[str, Callable], each: float, seconds: float):
    """Time blocks of each kind in turns: (ms a step and relative error by kind, bytes over time, steps a block)."""
    turns = each * BLOCKS * len(runs)
    steps = max(1 if clock.serial else LEAST_STEPS, min(20, int(seconds * 0.4 / turns)))
    if steps * turns > 4 * seconds:
        raise StepFailed(
            f"a step takes {each:.2f} s, and {steps * BLOCKS * len(runs)} of them are needed to tell host from device: "
            "hand over a smaller step, or give it more time"
        )
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    memory = []
    for _ in range(BLOCKS):
        for kind, run in runs.items():
            with phase(kind):
                for _ in range(AHEAD * step.workers if kind == "loop" else 0):
                    run()  # batches the workers had ready from the pause: they would flatter the loop
                times[kind].append(time_block(clock, run, steps) * 1e3)
            memory.append(clock.memory() / steps)  # so that the slope is one a step
    return {kind: find_middle(values) for kind, values in times.items()}, memory, steps


def _time_optimizer(step: Step, clock, batch) -> float:
    """Return the share of the host's time in an optimiser that walks tensor by tensor; 0 for another one."""
    if step.optimizer is None or step.graph:
        return 0.0
    settings, on_gpu = step.optimizer.param_groups[0], step.optimizer.param_groups[0]["params"][0].is_cuda
    if settings.get("fused") or settings.get("foreach") or (settings.get("foreach") is None and on_gpu):
        return 0.0
    times: list[float] = []

    def note(*_) -> None:
        times.append(clock.now())

    hooks = [step.optimizer.register_step_pre_hook(note), step.optimizer.register_step_post_hook(note)]
    try:
        clock.synchronize()
        begun = clock.now()
        for _ in range(TIMED):
            step.train(batch)
        total = clock.now() - begun
    finally:
        for hook in hooks:
            hook.remove()
    return (sum(times[1::2]) - sum(times[::2])) / max(total, 1e-9)


def _split_serial(clock, n: Numbers, step: Step, batch, resident) -> Measured:
    """Share a step of a CPU between starting operators and computing: on one sample it starts as many operators."""
    try:
        if n.batch < 8:
            raise ValueError("too few samples for one of them to be next to nothing")
        runs = step.on_samples(batch, 1), lambda: step.train(batch)
        runs[0]()
        pairs = [[time_block(clock, run, 2) for run in runs] for _ in range(BLOCKS)]
        host = n.cached * median(one / whole for one, whole in pairs)  # a share: both suffer the same machine
        method = f"no GPU: on one sample a step takes {host:.3g} ms"
    except (RuntimeError, ValueError, IndexError) as error:  # a batch norm, say, refuses one sample
        tracked = torch.ones(1, requires_grad=True)
        cost = measure_call(clock, lambda: tracked.add(1))
        host = n.kernels * cost / 1e3
        method = f"no GPU: {n.kernels:,.0f} calls at {cost:.1f} µs, at the least ({error})"
    host = max(min(host, 0.95 * n.cached), 1e-6)
    return Measured(replace(n, host=host, device=max(n.cached - host, 1e-6)), method)


def _split_device(clock, n: Numbers, step: Step, batch, resident) -> Measured:
    """Measure H and D by the plug, else by the profiler, whose trace also tells copies, waits and kernels."""
    problems, launches = [], n.kernels
    try:
        trace = clock.trace(lambda: step.train(batch))
    except (ValueError, RuntimeError) as error:
        trace = None
        problems.append(f"no trace: {error}")
    if trace:
        # The census sees one call where cuDNN launches hundreds, and none in the replay of a graph.
        launches = trace.launches
        n = replace(n, kernels=trace.kernels, copy=trace.copy, filled=trace.filled, waits=max(n.waits, trace.waits))
        n = replace(n, rnn=read_path(trace.names) or n.rnn)
    elif any(isinstance(t, Tensor) for t in tree_leaves(batch)):
        n = replace(n, copy=time_block(clock, lambda: to_device(batch, step.place), 20) * 1e3)
    plug = run_plug(clock, lambda: step.train(resident), launches, n.kernels, n.resident / 1e3)
    if not plug.reason:
        n = replace(n, host=plug.host * 1e3, device=max(plug.device * 1e3 + n.copy, 1e-6))
        if trace is None:
            n = replace(n, doubling=_double(clock, step, resident, plug.device, n))
        method = "plug test" + (f"; the profiler says D {trace.device:.3g} ms" if trace else "")
    elif trace:
        device = trace.device + trace.kernels * KERNEL_GAP
        n = replace(n, host=max(n.cached - trace.waiting, 1e-6), device=device)
        method = f"profiler, because {plug.reason}"
    else:
        raise StepFailed(f"neither way to tell host from device worked: {plug.reason}; {problems[0]}")
    if plug.blocked and not n.waits:
        problems.append("the host waits for the device where torch's own list of waits shows none")
        n = replace(n, waits=1)
    return Measured(n, method, tuple(problems))


def _double(clock, step: Step, resident, device: float, n: Numbers) -> float:
    """Return the device time of twice the batch over that of one; NaN where the step does not take it."""
    try:
        run = step.on_samples(resident, 2 * n.batch)
        run()
        return run_plug(clock, run, n.kernels, n.kernels, n.resident / 1e3).device / device
    except (RuntimeError, ValueError):
        return NAN


def _arithmetic(census: Census, place: str) -> float:
    """Return the ms of the counted FLOP at the chip's stated peak; NaN without its name, or where not all is seen."""
    chip = find_chip(torch.cuda.get_device_name(place)) if place.startswith("cuda") else None
    if chip is None or census.recurrences or not census.kernels:
        return NAN
    return census.flop / chip.peak(census.precision) * 1e3


def _check(loss) -> None:
    value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss if isinstance(loss, float) else 0.0)
    if not bool(torch.isfinite(value).all()):
        said = "" if value.numel() > 1 else f" ({value.item()})"
        raise StepFailed(f"the loss is not finite{said}, seen in the phase 'first step': its speed is of no use")


def _warm_up(clock, run: Callable[[], object], seconds: float) -> float:
    """Run until the rolling median is flat within 3 %; return the seconds of a step."""
    recent: list[float] = []
    while sum(recent) < seconds:
        recent.append(time_block(clock, run))
        if len(recent) >= 10 and median(recent[-5:]) > 0.97 * median(recent[-10:-5]):
            break
    return max(median(recent[-5:]), 1e-6)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Turn any error of the body into StepFailed with the phase's name."""
    try:
        yield
    except StepFailed:
        raise
    except Exception as error:
        raise StepFailed(f"the step failed in the phase {name!r}: {type(error).__name__}: {error}") from error
