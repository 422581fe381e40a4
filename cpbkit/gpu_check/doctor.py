"""The whole visit: environment, numbers, verdict, and the bill: what each fix could gain at most, and what it did."""

import dataclasses
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from cpbkit.config.experiment import Experiment, Task, vary
from cpbkit.config.presets import PRESETS, TRAINED
from cpbkit.errors import check_name, stoppable
from cpbkit.gpu_check.diagnosis import Diagnosis, Fix, decide
from cpbkit.gpu_check.findings import Report, check_environment
from cpbkit.gpu_check.step import Measured, Step, StepFailed, measure
from cpbkit.gpu_check.trials import Gain, try_fixes
from cpbkit.hardware.monitor import POWER, THROTTLES, Monitor
from cpbkit.quantities import without_nan
from cpbkit.texts import wrapped
from cpbkit.training.loop import Fit, assemble, fit
from cpbkit.windows.series import Series, from_table

THROTTLED = 0.2  # share of samples
BARS = 3000  # of the made-up series a preset's step trains on
STEPS = 2000  # an epoch of it: its validation is seldom under the stopwatch
ENDLESS = 10**9  # epochs


@dataclass(frozen=True)
class Examination:
    """What the doctor found; `failure` says why there is no diagnosis."""

    environment: Report
    step: str
    measured: Measured | None = None
    diagnosis: Diagnosis | None = None
    gains: tuple[Gain, ...] = ()
    failure: str = ""

    def to_dict(self) -> dict:
        """JSON-safe."""
        gains = [dataclasses.asdict(g) | {"verdict": g.verdict} for g in self.gains]
        return without_nan(dataclasses.asdict(self) | {"gains": gains})


@stoppable()
def diagnose(step: Step, seconds: float = 30.0) -> Examination:
    """Measure a step, decide, apply the fixes that can be applied here, and measure again, in turns.

    seconds: about how long. A step that cannot be measured is told as `failure`.
    """
    found = Examination(check_environment(), step.name)
    try:
        with Monitor(period=0.2) as monitor:
            measured = measure(step, seconds / 2)
    except StepFailed as failure:
        return replace(found, failure=str(failure))
    diagnosis = decide(measured.numbers, found.environment.codes + _throttling(monitor, step.place))
    gains = try_fixes(step, diagnosis, seconds / 2)
    return replace(found, measured=measured, diagnosis=diagnosis, gains=gains)


def _throttling(monitor: Monitor, place: str) -> tuple[tuple[str, str], ...]:
    frame, name = monitor.frame(), f"cuda:{torch.device(place).index or 0}"
    texts = frame[frame.device == name].throttle if place.startswith("cuda") else ()
    samples = [set(text.split(", ")) - {""} for text in texts]
    # A T4 under load is always at its 70 W: that is the speed it has, and no reason to hide another verdict.
    for code, reasons in (("THROTTLED_OR_SHARED", set(THROTTLES.values()) - {POWER}), ("POWER_CAPPED", {POWER})):
        share = sum(bool(held & reasons) for held in samples) / max(len(samples), 1)
        if share > THROTTLED:
            seen = ", ".join(sorted(reasons & set.union(*samples)))
            return ((code, f"the clock was held down in {share:.0%} of samples: {seen}"),)
    return ()


def preset_step(preset: str | Experiment, series: int = 1, device: str = "") -> Step:
    """Return the training step of a preset as a sweep takes it, over made-up random walks."""
    experiment = preset if isinstance(preset, Experiment) else PRESETS[check_name("preset", preset, TRAINED)]
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    step = _training_step(experiment, series, place)
    if place.startswith("cuda") and experiment.training.precision == "float32":
        half = _training_step(vary(experiment, precision="float16"), series, place)
        step = replace(step, variants={"float16": half})
    return step


def _training_step(experiment: Experiment, series: int, place: str) -> Step:
    endless = vary(experiment, epochs=ENDLESS, patience=ENDLESS)
    windows, stack = assemble(endless, [_walk(endless.task, f"series {m}") for m in range(series)], place)
    running: list = []  # is put back after a measurement: the next one begins a training anew

    def train(_) -> None:
        if not running:
            running.append(fit(Fit(stack), windows, endless.training, STEPS))
        while not next(running[0]).step:
            pass  # the validation at the end of an epoch

    step = Step(
        train,
        model=stack.net,
        name=experiment.preset,
        device=place,
        samples=experiment.training.batch * series,
        graph=True,
        stacked=lambda count: _training_step(experiment, count, place),
        resized=lambda samples: _training_step(vary(experiment, batch=max(1, samples // series)), series, place),
    )
    if hasattr(stack.net, "solve"):  # a closed form: one step takes every window, and there is no batch
        return replace(step, samples=sum(map(len, windows.origins["train"])), graph=False, resized=None)
    return step


def _walk(task: Task, name: str) -> Series:
    columns = list(dict.fromkeys([*task.features, *task.targets]))
    steps = np.random.default_rng(0).normal(size=(BARS, len(columns)))
    return from_table(name, pd.DataFrame(steps.cumsum(0) * 1e-3, columns=columns), task.features, task.targets)


def render(examination: Examination) -> str:
    """Write the examination for a terminal or a notebook."""
    e = examination
    lines = [*e.environment.lines(), ""]
    if e.measured is None or e.diagnosis is None:
        return wrapped([*lines, f"{e.step}: no diagnosis. {e.failure}"])
    n, d = e.measured.numbers, e.diagnosis
    times = f"whole loop W {n.loop:.3g} ms" + (f"   cached batch N {n.cached:.3g}" if n.loader else "")
    names = ("starting operators", "computing") if n.serial else ("host enqueue", "device")
    lines += [
        f"One training step of {e.step}, {n.batch} samples (spread {n.spread:.0%}; {e.measured.method})",
        f"  {times}   {names[0]} H {n.host:.3g}   {names[1]} D {n.device:.3g}",
        "",
        f"{d.verdict.replace('_', '-')}   {d.text}",
        *(f"  {text}" for text in d.evidence[1:]),  # the first are the times above
        *([f"  reason: {d.reason}"] if d.reason else []),
        "",
        *_render_bill(d.fixes, e.gains),
    ]
    beside = (*d.beside, *e.measured.problems)
    lines += ["", *(f"  also: {text}" for text in beside)] if beside else []
    return wrapped([*lines, "", "How far to trust this machine's verdicts: cpbkit doctor --inject"])


def _render_bill(fixes: tuple[Fix, ...], gains: tuple[Gain, ...]) -> list[str]:
    lines = [f"  {'fix':<20}{'could gain at most':<20}gained here (90 % interval)"]
    tried = {gain.fix: gain for gain in gains}
    for fix in fixes:
        ceiling = "only a trial tells" if math.isnan(fix.ceiling) else f"{fix.ceiling:.2f}x"
        untried = fix.note if "not advised" in fix.note else f"not tried here: {fix.note}"
        gain = tried.pop(fix.name, None)
        lines.append(f"  {fix.name:<20}{ceiling:<20}{_render_gain(gain) if gain else untried}")
    return [*lines, *(f"  {name:<40}{_render_gain(gain)}" for name, gain in tried.items())]


def _render_gain(gain: Gain) -> str:
    if math.isnan(gain.gain):
        return gain.note
    note = f"   ({gain.note})" if gain.note else ""
    return f"{gain.gain:.2f}x  [{gain.low:.2f}, {gain.high:.2f}]   {gain.verdict}{note}"
