"""From what a watch has seen of a loop to a verdict with advice: pure."""

import math
from collections.abc import Iterator

from cpbkit.gpu_check.causes import DEVICE_BUSY, OPTIMIZER, Cause, find_causes, fix
from cpbkit.gpu_check.diagnosis import Diagnosis, Fix
from cpbkit.gpu_check.numbers import NAN
from cpbkit.gpu_check.seen import Seen
from cpbkit.quantities import counted

LEAST_LOOKS, LEAST_STEPS = 30, 3
SURE = 500e6  # bytes


def judge_loop(seen: Seen, environment: tuple[tuple[str, str], ...] = ()) -> Diagnosis:
    """Name the one thing that costs most; the rest comes beside it."""
    evidence = tuple(_evidence(seen))
    if seen.steps < LEAST_STEPS or seen.looks < LEAST_LOOKS:
        text = f"Only {counted(seen.steps, 'step')} in {seen.seconds:.1f} s: watch a loop for some seconds."
        if not seen.steps:
            text = "No step of an optimiser of torch's was seen: is the loop inside the watch, and in this process?"
        return Diagnosis("INCONCLUSIVE", "", text, evidence, (), seen.problems)
    worst, *others = find_causes(seen) or [Cause(0.0, "DEVICE_BOUND", "", _say_healthy(seen))]
    beside = [f"{cause.verdict}: {cause.text}" for cause in others]
    beside += [f"{code}: {words}" for code, words in environment]
    sure = seen.on_gpu or seen.growth * seen.steps > SURE  # a process also grows by what its allocator keeps
    if seen.growth and not seen.kept and worst.verdict != "MEMORY_GROWTH" and sure:
        beside.append(f"MEMORY_GROWTH: memory grows by {seen.growth / 1024:,.0f} KB a step")
    fixes = (*worst.fixes, *(_advise_healthy(seen) if worst.verdict == "DEVICE_BOUND" else ()))
    return Diagnosis(worst.verdict, worst.reason, worst.text, evidence, fixes, (*beside, *seen.problems))


def _advise_healthy(seen: Seen) -> Iterator[Fix]:
    share = seen.share("optimiser")
    if share > OPTIMIZER and seen.fused:
        yield from fix("fused optimiser", share, f"the optimiser takes {share:.0%} of the time: fused=True")
    if seen.on_gpu and seen.busy < DEVICE_BUSY:
        yield from fix("diagnose(step)", NAN, "tells host from device, and measures what each fix gains")


def _say_healthy(seen: Seen) -> str:
    if seen.on_gpu:
        return "The device or the model itself sets the pace: nothing of the host stands out."
    if seen.asked:
        data = f"{seen.share('data'):.0%} the data that the model is asked for itself"
        return f"Training takes {seen.model:.0%} of the time, and {data}."
    return f"The model itself sets the pace: forward, backward and optimiser take {seen.model:.0%} of the time."


def _evidence(seen: Seen) -> Iterator[str]:
    parts = [f"{name} {share:.0%}" for name, share in seen.shares.items() if share >= 0.005]
    yield f"{counted(seen.steps, 'step')} in {seen.seconds:.1f} s" + (f": {', '.join(parts)}" if parts else "")
    if math.isfinite(seen.operators):
        yield f"{seen.operators:,.0f} operators a step, and {seen.starting:.0%} of the model's time is starting them"
    if math.isfinite(seen.busy):
        yield f"the device was busy {seen.busy:.0%} of the time"
    for line in seen.lines[:5]:
        share = line.seconds / max(seen.seconds, 1e-9)
        if share >= 0.03:
            yield f"{line.place}  {line.text[:60]}  {share:.0%} ({line.account})"
