"""The whole visit: environment, numbers, verdict, and the bill: what each fix could gain at most, and what it did."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cpbkit.errors import check_name
from cpbkit.experiment import Experiment
from cpbkit.gpu_check.chips import CHIPS
from cpbkit.gpu_check.diagnosis import Diagnosis, decide
from cpbkit.gpu_check.environment import Report, check_environment
from cpbkit.gpu_check.monitor import Monitor
from cpbkit.gpu_check.preflight import Prediction, preflight
from cpbkit.gpu_check.step import Measured, Step, StepFailed, measure
from cpbkit.gpu_check.trials import Gain, try_fixes
from cpbkit.presets import PRESETS
from cpbkit.train import assemble, loss_per_model, precision
from cpbkit.windows import Series, from_table

THROTTLED = 0.2  # share of samples
BARS = 3000  # of the made-up series a preset's step trains on


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


def diagnose(step: Step, seconds: float = 30.0, nvml=None, steps_share: float = 1.0, tries: bool = True) -> Examination:
    """Measure a step, decide, apply the fixes that can be applied here, and measure again, in turns.

    seconds: about how long. nvml: a module like pynvml or None. steps_share: share of the wall time of the cell or
    run that went into steps, where it is known. A step that cannot be measured is told as `failure`.
    """
    environment, predicted = check_environment(nvml), None
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
    diagnosis = decide(numbers, codes)
    gains = try_fixes(step, diagnosis, seconds / 2) if tries else ()
    return Examination(environment, step.name, measured, diagnosis, gains, predicted=predicted)


def preset_step(preset: str | Experiment, series: int = 1, device: str = "") -> Step:
    """Return the training step of a preset over made-up random walks: gather, forward, loss, backward, optimiser."""
    experiment = preset if isinstance(preset, Experiment) else PRESETS[check_name("preset", preset, PRESETS)]
    task, training = experiment.task, experiment.training
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    windows, stack = assemble(experiment, [_walk(task, f"series {m}") for m in range(series)], place)
    weights = torch.tensor(task.target_weights, device=place, dtype=stack.weights.dtype)
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
