"""The whole visit: environment, numbers, verdict, and the bill: what each fix could gain at most, and what it did."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cpbkit.errors import check_name
from cpbkit.experiment import PRESETS, Experiment
from cpbkit.gpu_check.chips import CHIPS
from cpbkit.gpu_check.diagnosis import Diagnosis, Policy, decide
from cpbkit.gpu_check.environment import Report, check_environment
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.monitor import Monitor
from cpbkit.gpu_check.preflight import Prediction, preflight
from cpbkit.gpu_check.probes import make_clock, time_block
from cpbkit.gpu_check.step import Measured, Step, StepFailed, measure, to_device, widen
from cpbkit.models import zoo
from cpbkit.stack import Stack
from cpbkit.train import loss_per_model, precision
from cpbkit.windows import Series, Windows, from_table

PAIRS = 8  # of blocks A and B; the 2nd and 7th ratio hold the median with 93 %
THROTTLED = 0.2  # share of samples
BARS = 3000  # of the made-up series a preset's step trains on
HELD = 64  # batches kept on the device in a trial
WIDEST = 6  # doublings of the batch in the search for the knee


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


@dataclass(frozen=True)
class Examination:
    """What the doctor found; `failure` says why there is no diagnosis."""

    environment: Report
    step: str
    measured: Measured | None
    diagnosis: Diagnosis | None
    gains: tuple[Gain, ...] = ()
    failure: str = ""
    predicted: Prediction | None = None  # for a T4, where no GPU is at hand

    def to_dict(self) -> dict:
        """JSON-safe."""
        gains = [dataclasses.asdict(g) | {"verdict": g.verdict} for g in self.gains]
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"gains": gains}
        return _without_nan({k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in parts.items()})


def _without_nan(value):
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def diagnose(
    step: Step,
    seconds: float = 30.0,
    nvml=None,
    environment: Report | None = None,
    policy: Policy | None = None,
    steps_share: float = 1.0,
    tries: bool = True,
) -> Examination:
    """Measure a step, decide, apply the fixes that can be applied here, and measure again, in turns.

    seconds: about how long. nvml: a module like pynvml or None. steps_share: share of the wall time of the cell or
    run that went into steps, where it is known. A step that cannot be measured is told as `failure`.
    """
    environment = environment or check_environment(nvml)
    policy = policy or Policy()
    predicted = None
    try:
        if not step.place.startswith("cuda"):
            predicted = preflight(step, CHIPS["T4"])
        with Monitor(period=0.2, nvml=nvml or False) as monitor:
            measured = measure(step, seconds=seconds / 2 if tries else seconds)
    except StepFailed as failure:
        return Examination(environment, step.name, None, None, failure=str(failure), predicted=predicted)
    codes = environment.codes
    frame = monitor.frame()
    held = frame[frame.device != "cpu"].throttle
    if len(held) and (held != "").mean() > THROTTLED:
        reasons = ", ".join(sorted(set(held) - {""}))
        codes += (
            ("THROTTLED_OR_SHARED", f"the clock was held down in {(held != '').mean():.0%} of samples: {reasons}"),
        )
    numbers = replace(measured.numbers, steps_share=steps_share)
    diagnosis = decide(numbers, codes, policy)
    gains = try_fixes(step, diagnosis, seconds / 2) if tries else ()
    return Examination(environment, step.name, measured, diagnosis, gains, predicted=predicted)


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
            except (RuntimeError, ValueError, TypeError, StepFailed) as error:
                first = (str(error).splitlines() or [""])[0]
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
    return compare(make_clock(step.place), loop_of(step), graph.replay, seconds)


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
        gain = compare(make_clock(step.place), loop_of(step), loop_of(step.stacked(count)), seconds / 2)
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


def preset_step(preset: str | Experiment, series: int = 1, device: str = "") -> Step:
    """Return the training step of a preset over made-up random walks: gather, forward, loss, backward, optimiser."""
    experiment = preset if isinstance(preset, Experiment) else PRESETS[check_name("preset", preset, PRESETS)]
    task, training = experiment.task, experiment.training
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float64 if training.precision == "float64" else torch.float32
    windows = Windows([_walk(task, f"series {m}") for m in range(series)], task, place, dtype)
    stack = Stack(
        lambda count: zoo.build(count, task, experiment.model),
        [s.name for s in windows.series],
        training,
        place,
        dtype,
    )
    weights = torch.tensor(task.target_weights, device=place, dtype=dtype)
    coins = torch.rand(task.horizon, generator=torch.Generator().manual_seed(0)) < training.teacher_forcing
    coins = coins.to(place)

    def batches() -> Iterator[Tensor]:
        steps = 20
        order = windows.order(range(series), training.seed, 0, steps * training.batch)
        yield from order.unflatten(1, (steps, training.batch)).unbind(1)

    def train(rows: Tensor) -> None:
        x, last, y = windows.gather(rows)
        teacher = (y, coins) if training.teacher_forcing else None
        with precision(training, place) as autocast, autocast:
            forecast = stack.net(x, last, teacher)
        stack.backward(loss_per_model(forecast, y, weights).mean(1).sum())
        if training.clip_norm:
            norms = stack.gradients.norm(dim=1)
            stack.gradients.mul_((training.clip_norm / (norms + 1e-6)).clamp(max=1)[:, None])
        stack.optimizer.step()

    return Step(
        train,
        batches,
        stack.net,
        stack.optimizer,
        name=experiment.preset,
        device=place.type,
        samples=training.batch * series,
        batch_axis=1,
        stacked=lambda count: preset_step(experiment, count, device),
    )


def _walk(task, name: str) -> Series:
    columns = list(dict.fromkeys([*task.features, *task.targets]))
    steps = np.random.default_rng(0).normal(size=(BARS, len(columns)))
    return from_table(name, pd.DataFrame(steps.cumsum(0) * 1e-3, columns=columns), task.features, task.targets)


def render(examination: Examination) -> str:
    """Write the examination for a terminal or a notebook."""
    e = examination
    lines = e.environment.lines()
    foreseen = ["", *e.predicted.lines()] if e.predicted else []
    if e.failure:
        return "\n".join([*lines, "", f"{e.step}: no diagnosis. {e.failure}", *foreseen])
    n, d = e.measured.numbers, e.diagnosis
    lines += ["", f"One training step of {e.step}, batch {n.batch} (spread {n.spread:.0%}; {e.measured.method})"]
    row = f"  whole loop W {n.loop:.3g} ms   cached batch N {n.cached:.3g}   host enqueue H {n.host:.3g}"
    lines += [f"{row}   device D {n.device:.3g}   kernels {n.kernels:,.0f}   waits {n.waits:.0f}"]
    lines += ["", f"{d.verdict.replace('_', '-')}   {d.text}", *(f"  {text}" for text in d.evidence[1:])]
    if d.reason:
        lines.append(f"  reason: {d.reason}")
    lines += ["", f"  {'fix':<24}{'could gain at most':<22}gained here (90 % interval)"]
    tried = {gain.fix: gain for gain in e.gains}
    for fix in d.fixes:
        ceiling = "only a trial tells" if math.isnan(fix.ceiling) else f"{fix.ceiling:.2f}x"
        lines.append(f"  {fix.name:<24}{ceiling:<22}{_result(fix, tried.pop(fix.name, None))}".rstrip())
    lines += [f"  {gain.fix:<24}{'':<22}{_result(None, gain)}" for gain in tried.values()]
    lines += (
        ["", *(f"  also: {text}" for text in (*d.beside, *e.measured.problems))]
        if d.beside or e.measured.problems
        else []
    )
    return "\n".join([*lines, *foreseen, "", "How far to trust this machine's verdicts: cpbkit doctor --inject"])


def _result(fix, gain: Gain | None) -> str:
    if gain is None:
        return fix.note if "not advised" in fix.note else f"not tried here: {fix.note}"
    if math.isnan(gain.gain):
        return gain.note
    note = f"   ({gain.note})" if gain.note else ""
    return f"{gain.gain:.2f}x  [{gain.low:.2f}, {gain.high:.2f}]   {gain.verdict}{note}"
