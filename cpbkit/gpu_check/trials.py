"""Fixes that can be applied to a step, tried in turns with the step as it was."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from cpbkit.gpu_check.clocks import make_clock, time_block
from cpbkit.gpu_check.diagnosis import Diagnosis
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.numbers import NAN, POLICY
from cpbkit.gpu_check.step import Step, StepFailed
from cpbkit.gpu_check.tensors import count_samples, to_device
from cpbkit.training.cuda_graph import capture
from cpbkit.training.loop import is_out_of_memory

WIDEST = 6  # doublings of the batch in the search for the knee
HELD = 64  # batches kept on the device in a trial
PAIRS = 8  # of blocks A and B; the 2nd and 7th ratio hold the median with 93 %
# What says that this step or device cannot take a fix. Torch has RuntimeError alone for no memory and for what a device
# has no kernel for, and networks raise ValueError for a size they refuse; anything else is a mistake in a program.
IMPOSSIBLE = (StepFailed, RuntimeError, ValueError)


class TooSlow(StepFailed):
    """A trial that the time it is given does not allow."""


@dataclass(frozen=True)
class Gain:
    """A fix that was tried: time before over time after."""

    fix: str
    gain: float = NAN
    low: float = NAN  # of an interval that holds the true gain with at least 90 %
    high: float = NAN
    note: str = ""

    @property
    def verdict(self) -> str:
        if math.isnan(self.gain):
            return self.note
        if self.low <= 1 <= self.high:
            return "no difference"
        return "do this" if self.low > 1 else "slower"

    def times(self, factor: float, note: str) -> "Gain":
        """Return the gain counted in something of which the fix does `factor` times as much."""
        return Gain(self.fix, self.gain * factor, self.low * factor, self.high * factor, note)


def compare(
    clock, a: Callable[[], object], b: Callable[[], object], seconds: float, around_b=contextlib.nullcontext
) -> Gain:
    """Time A and B in turns and return the gain of b over a; around_b: what its blocks need, outside the stopwatch."""
    with around_b():
        once = min(time_block(clock, b) for _ in range(2))
    once += max(time_block(clock, a, 2), 1e-6)
    if PAIRS * once > 3 * seconds:
        took = f"{PAIRS} pairs would take {PAIRS * once:.1f} s"
        raise TooSlow(f"{took}, and {seconds:.1f} were left for it: give it more")
    steps = max(1, min(50, int(seconds / (PAIRS * once))))
    ratios = []
    for i in range(PAIRS):
        spent = {}
        for kind in ("ab", "ba")[i % 2]:  # A B B A: a machine that slows down slows both
            with around_b() if kind == "b" else contextlib.nullcontext():
                spent[kind] = time_block(clock, {"a": a, "b": b}[kind], steps)
        ratios.append(spent["a"] / spent["b"])
    ratios.sort()
    return Gain("", median(ratios), ratios[1], ratios[-2])


def try_fixes(step: Step, diagnosis: Diagnosis, seconds: float) -> tuple[Gain, ...]:
    """Apply each fix whose ceiling is worth it and that can be applied to this step; put everything back."""
    worth = [f.name for f in diagnosis.fixes if math.isnan(f.ceiling) or f.ceiling >= POLICY.least_gain]
    trials = {name: trial for name, trial in TRIALS.items() if name in worth}
    trials |= {name: functools.partial(try_variant, other) for name, other in step.variants.items()}
    gains = []
    for name, trial in trials.items():
        with preserved(step):
            try:
                gain = trial(step, seconds / len(trials))
            except TooSlow as error:  # told as the result of this trial, as what follows; the others go on
                gain = Gain(name, note=f"not tried here: {error}")
            except IMPOSSIBLE as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                gain = Gain(name, note=f"could not be tried: {first}")
        if gain:
            gains.append(replace(gain, fix=name))
    return tuple(gains)


def _race(step: Step, run: Callable[[], object], seconds: float, around=contextlib.nullcontext) -> Gain:
    return compare(make_clock(step.place), step.loop(), run, seconds, around)


def try_variant(other: Step, step: Step, seconds: float) -> Gain:
    """Try another step in place of the person's."""
    return _race(step, other.loop(), seconds)


def _try_resident(step: Step, seconds: float) -> Gain | None:
    """Keep some batches on the device, so that no step loads or copies one."""
    if step.batches is None:
        return None
    held = [to_device(batch, step.place) for batch in itertools.islice(step.feed(), HELD)]
    return _race(step, replace(step, batches=lambda: held).loop(), seconds)


def _try_fused(step: Step, seconds: float) -> Gain | None:
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

    return _race(step, step.loop(), seconds, fused)


def _set_fused(optimizer, settings: list[tuple]) -> None:
    for group, (fused, foreach) in zip(optimizer.param_groups, settings, strict=True):
        group["fused"], group["foreach"] = fused, foreach
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):  # a fused step counts on the device
                state["step"] = state["step"].to(parameter.device if fused or group.get("capturable") else "cpu")


def _try_half(step: Step, seconds: float) -> Gain:
    kind, run = torch.device(step.place).type, step.loop()

    def half() -> None:
        with torch.autocast(kind, dtype=torch.float16):  # anew each step: it keeps its casts of the weights to the end
            run()

    return _race(step, half, seconds)


def _try_graph(step: Step, seconds: float) -> Gain | None:
    """Capture the step on one resident batch and replay it; needs an optimiser that can be captured."""
    if step.graph or torch.device(step.place).type != "cuda":
        return None
    batch = to_device(next(step.feed()), step.place)
    if step.optimizer:
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        _set_fused(step.optimizer, [(g.get("fused"), g.get("foreach")) for g in step.optimizer.param_groups])
    graph = capture(lambda: step.train(batch), step.place)
    return replace(_race(step, graph.replay, seconds), note="on one batch that lies on the device")


def _try_larger(step: Step, seconds: float) -> Gain | None:
    """Double the batch until samples a second stop growing by a tenth; the gain is at that knee."""
    batch = next(step.feed())
    samples = step.samples or count_samples(batch)
    if not (samples and (step.resized or step.batches)):
        return None
    clock, rates, run = make_clock(step.place), [], None
    for power in range(WIDEST + 1):
        try:
            run = step.on_samples(batch, samples * 2**power)
            run()
            once = min(time_block(clock, run) for _ in range(3))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        rates.append(2**power / once)
        if once > seconds / 8 or (power and rates[-1] < 1.1 * rates[-2]):
            break
    del run  # it may fill the device
    if not rates:
        return Gain("", note="not reached: the batch itself does not fit on the device")
    knee = 2 ** rates.index(max(rates))
    if knee == 1:
        return Gain("", note="not reached: twice the batch gives no more samples a second")
    gain = compare(clock, lambda: step.train(batch), step.on_samples(batch, samples * knee), seconds / 2)
    return gain.times(knee, f"samples a second at {knee} times the batch, the knee; fewer updates for the same data")


def _try_stack(step: Step, seconds: float) -> Gain | None:
    """Train 8 and then 40 series at once; the gain is a series'."""
    best = None
    stacked = step.stacked
    if stacked is None:
        return None
    for count in (8, 40):
        try:
            gain = _race(step, stacked(count).loop(), seconds).times(count, f"a series, {count} in a stack")
        except (StepFailed, RuntimeError) as error:
            if best is None or not (isinstance(error, StepFailed) or is_out_of_memory(error)):
                raise
            break
        best = max(best or gain, gain, key=lambda g: g.gain)
        if best.gain < 1.1:
            break
    return best


TRIALS: dict[str, Callable[[Step, float], Gain | None]] = {
    "data on the device": _try_resident,
    "CUDA graph": _try_graph,
    "stack of series": _try_stack,
    "fused optimiser": _try_fused,
    "float16": _try_half,
    "larger batch": _try_larger,
}
