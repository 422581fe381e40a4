"""Fixes that can be applied to a step, tried in turns with the step as it was."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check.diagnosis import Diagnosis
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.probes import make_clock, time_block
from cpbkit.gpu_check.step import Step, StepFailed
from cpbkit.gpu_check.tensors import to_device, widen

WIDEST = 6  # doublings of the batch in the search for the knee
HELD = 64  # batches kept on the device in a trial
PAIRS = 8  # of blocks A and B; the 2nd and 7th ratio hold the median with 93 %


@dataclass(frozen=True)
class Gain:
    """A fix that was tried: time before over time after."""

    fix: str
    gain: float
    low: float  # of an interval that holds the true gain with at least 90 %
    high: float
    note: str = ""

    @property
    def verdict(self) -> str:
        if math.isnan(self.gain):
            return self.note
        if self.low <= 1 <= self.high:
            return "no difference"
        return "do this" if self.low > 1 else "slower"


def compare(
    clock, a: Callable[[], object], b: Callable[[], object], seconds: float, wrap=contextlib.nullcontext
) -> Gain:
    """Time A and B in turns and return the gain of b over a; wrap: what surrounds the blocks of b."""
    with wrap():
        once = min(time_block(clock, b) for _ in range(2))
    once += max(time_block(clock, a, 2), 1e-6)
    if PAIRS * once > 3 * seconds:
        raise StepFailed(f"{PAIRS} pairs would take {PAIRS * once:.0f} s, and {seconds:.0f} were left for it")
    steps = max(1, min(50, int(seconds / (PAIRS * once))))
    ratios = []
    for i in range(PAIRS):
        spent = {}
        for kind in ("ab", "ba")[i % 2]:  # A B B A: a machine that slows down slows both
            with wrap() if kind == "b" else contextlib.nullcontext():
                spent[kind] = time_block(clock, {"a": a, "b": b}[kind], steps)
        ratios.append(spent["a"] / spent["b"])
    ratios.sort()
    return Gain("", median(ratios), ratios[1], ratios[-2])


def try_fixes(step: Step, diagnosis: Diagnosis, seconds: float) -> tuple[Gain, ...]:
    """Apply each fix whose ceiling is worth it and that can be applied to this step; put everything back."""
    worth = [f.name for f in diagnosis.fixes if math.isnan(f.ceiling) or f.ceiling >= diagnosis.policy.least_gain]
    trials = {name: trial for name, trial in TRIALS.items() if name in worth}
    trials |= {name: _try_variant for name in step.variants}
    gains = []
    for name, trial in trials.items():
        with preserved(step.train, step.batches, step.model, step.optimizer):
            try:
                gain = trial(step, name, seconds / max(len(trials), 1))
            except Exception as error:  # told as the result of this trial; the others go on
                first = (str(error).splitlines() or [type(error).__name__])[0]
                gain = Gain(name, math.nan, math.nan, math.nan, f"could not be tried: {first}")
        if gain:
            gains.append(replace(gain, fix=name))
    return tuple(gains)


def loop_of(step: Step) -> Callable[[], object]:
    """Return one turn of the person's loop, loader included."""
    batches = itertools.chain.from_iterable(
        step.batches() if step.batches else itertools.repeat(None) for _ in itertools.count()
    )
    return lambda: step.train(next(batches))


def _try_variant(step: Step, name: str, seconds: float) -> Gain:
    other = step.variants[name]
    with preserved(other.train, other.batches, other.model, other.optimizer):
        return compare(make_clock(step.place), loop_of(step), loop_of(other), seconds)


def _try_resident(step: Step, name: str, seconds: float) -> Gain | None:
    if step.batches is None:
        return None
    held = [to_device(batch, step.place) for batch in itertools.islice(step.batches(), HELD)]
    return compare(make_clock(step.place), loop_of(step), loop_of(replace(step, batches=lambda: held)), seconds)


def _try_fused(step: Step, name: str, seconds: float) -> Gain | None:
    optimizer = step.optimizer
    if optimizer is None or "fused" not in optimizer.defaults:
        return None

    @contextlib.contextmanager
    def fused() -> Iterator[None]:
        before = [(g["fused"], g["foreach"]) for g in optimizer.param_groups]
        _set_fused(optimizer, [(True, False)] * len(before))
        try:
            yield
        finally:
            _set_fused(optimizer, before)

    run = loop_of(step)
    return compare(make_clock(step.place), run, run, seconds, fused)


def _set_fused(optimizer, settings: list[tuple]) -> None:
    for group, (fused, foreach) in zip(optimizer.param_groups, settings, strict=True):
        group["fused"], group["foreach"] = fused, foreach
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):  # a fused step counts on the device
                state["step"] = state["step"].to(parameter.device if fused or group.get("capturable") else "cpu")


def _try_half(step: Step, name: str, seconds: float) -> Gain:
    def half():
        return torch.autocast(torch.device(step.place).type, dtype=torch.float16)

    run = loop_of(step)
    return compare(make_clock(step.place), run, run, seconds, half)


def _try_graph(step: Step, name: str, seconds: float) -> Gain | None:
    """Capture the step on one resident batch and replay it; needs an optimiser that can be captured."""
    if torch.device(step.place).type != "cuda":
        return None
    batch = to_device(next(iter(step.batches())) if step.batches else None, step.place)
    for group in step.optimizer.param_groups if step.optimizer else ():
        group["capturable"] = True
    if step.optimizer:
        _set_fused(step.optimizer, [(g.get("fused"), g.get("foreach")) for g in step.optimizer.param_groups])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step.train(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.train(batch)
    gain = compare(make_clock(step.place), loop_of(step), graph.replay, seconds)
    return replace(gain, note="on one batch that lies on the device")


def _try_larger(step: Step, name: str, seconds: float) -> Gain | None:
    """Double the batch until samples a second stop growing by a tenth; the gain is at that knee."""
    batch = next(iter(step.batches())) if step.batches else None
    if not any(isinstance(t, Tensor) for t in tree_leaves(batch)):
        return None
    clock, rates = make_clock(step.place), []
    for power in range(WIDEST + 1):
        try:
            wide = widen(batch, 2**power, step.batch_axis)
            step.train(wide)
            once = min(time_block(clock, lambda wide=wide: step.train(wide)) for _ in range(3))
        except torch.cuda.OutOfMemoryError:
            break
        rates.append(2**power / once)
        if once > seconds / 8 or (power and rates[-1] < 1.1 * rates[-2]):
            break
    knee = 2 ** int(np.argmax(rates))
    wide = widen(batch, knee, step.batch_axis)
    gain = compare(clock, lambda: step.train(batch), lambda: step.train(wide), seconds / 2)
    scaled = [value * knee for value in (gain.gain, gain.low, gain.high)]
    return Gain(
        "", *scaled, note=f"samples a second at {knee} times the batch, the knee; fewer updates for the same data"
    )


def _try_stack(step: Step, name: str, seconds: float) -> Gain | None:
    if step.stacked is None:
        return None
    best = None
    for count in (8, 40):
        try:
            gain = compare(make_clock(step.place), loop_of(step), loop_of(step.stacked(count)), seconds / 2)
        except (StepFailed, torch.cuda.OutOfMemoryError):
            if best is None:
                raise
            break
        scaled = Gain("", gain.gain * count, gain.low * count, gain.high * count, note=f"a series, {count} in a stack")
        if best is None or scaled.gain > best.gain:
            best = scaled
        if best.gain < 1.1:
            break
    return best


TRIALS = {
    "data on the device": _try_resident,
    "CUDA graph": _try_graph,
    "stack of series": _try_stack,
    "fused optimiser": _try_fused,
    "float16": _try_half,
    "larger batch": _try_larger,
}
