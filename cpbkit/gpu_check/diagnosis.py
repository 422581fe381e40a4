"""From the numbers of one training step to a verdict and advice: pure."""

import math
from dataclasses import dataclass

from cpbkit.gpu_check.numbers import POLICY, Numbers, Policy, list_ceilings, pool


@dataclass(frozen=True)
class Fix:
    """A cure, and the most it could gain in this loop."""

    name: str
    ceiling: float  # speed now 1; NaN where only a trial can tell
    note: str  # why, or why not
    advised: bool


@dataclass(frozen=True)
class Diagnosis:
    """The verdict with what supports it; `beside` holds findings that come on top."""

    verdict: str
    reason: str  # a finer name, or ""
    text: str  # one sentence for a person
    evidence: tuple[str, ...]
    fixes: tuple[Fix, ...]
    beside: tuple[str, ...]
    policy: Policy = POLICY


STOPPERS = (  # nothing can be measured before these are cured
    "NO_GPU_RUNTIME", "CPU_ONLY_WHEEL", "ARCH_OR_DRIVER_MISMATCH", "WRONG_ACCELERATOR",
)  # fmt: skip
TEXTS = {  # of what is told from numbers alone; what is found elsewhere brings its own
    "MODEL_OR_DATA_ON_CPU": "A part of the step lies on another device than the rest.",
    "DATA_STARVED": "The loop waits for its batches.",
    "SYNC_BOUND": "Host and device take turns: the host waits for the device in every step.",
    "HOST_BOUND": "The host cannot start the work as fast as the device does it.",
    "COPY_BOUND": "A good part of the device's time is copying from the host.",
    "CUDNN_NOT_PERSISTENT": "The recurrent layers miss cuDNN's persistent kernels.",
    "DEVICE_LATENCY_BOUND": "The device is busy and mostly empty: a step gives it too little at a time.",
    "DEVICE_BOUND": "The device itself sets the pace: this is what it should look like.",
    "INCONCLUSIVE": "The differences are within the noise of this measurement.",
}
VERDICTS = (
    *STOPPERS, *TEXTS, "DEBUG_MODE_ON", "THROTTLED_OR_SHARED", "GPU_IDLE_OUTSIDE_STEPS", "NO_WORK_ON_GPU",
    "UNSOUND_TRAINING", "PYTHON_OR_IO_IN_STEP", "VALIDATION_IN_STEP", "SAMPLE_BY_SAMPLE", "GRAPH_KEPT", "MEMORY_GROWTH",
    "FLOAT64", "DENSE_EMBEDDING", "FEW_THREADS", "TOO_MANY_THREADS", "WASTED_WORK",
)  # fmt: skip
ON_CPU = {  # what the same verdict means where there is no device beside the host
    "HOST_BOUND": "Starting many small operators takes more time than their arithmetic.",
    "DEVICE_BOUND": "The arithmetic sets the pace of this CPU.",
}
SUSPICIOUS = 50.0  # a ceiling above this is more often a mistake of the measurement than a chance
CURES = {  # verdict -> the fixes that could cure it, the best first
    "DATA_STARVED": ("data on the device",),
    "SYNC_BOUND": ("no waits",),
    "HOST_BOUND": ("library layer", "CUDA graph", "stack of series", "fused optimiser"),
    "COPY_BOUND": ("no copies",),
    "CUDNN_NOT_PERSISTENT": ("persistent width",),
    "DEVICE_LATENCY_BOUND": ("larger batch", "stack of series"),
    "DEVICE_BOUND": ("float16",),
}


def decide(n: Numbers, environment: tuple[tuple[str, str], ...] = ()) -> Diagnosis:
    """Walk the tree, first match wins; environment: the codes of `findings.Report`.

    A ratio between the least excess and the noise of its two numbers leads to INCONCLUSIVE, unless a later
    and clear reason is found.
    """
    codes = dict(environment)
    verdict, reason, doubts = _find_verdict(n, codes)
    evidence = list(_evidence(n))
    if verdict == "DEVICE_BOUND" and doubts:
        verdict, reason = "INCONCLUSIVE", doubts[0]
    if doubts:
        evidence.append(f"within the noise: {', '.join(doubts)}; measure longer, or on a quiet machine")
    wanted = CURES.get(verdict, ())
    fixes = []
    if verdict not in STOPPERS:
        for name, (ceiling, why) in list_ceilings(pool(n)).items():
            reached = math.isnan(ceiling) or ceiling >= POLICY.least_gain
            note = why if reached else f"not advised: at most {ceiling:.2f}x; {why}"
            if ceiling > SUSPICIOUS:
                note += f"; a ceiling above {SUSPICIOUS:.0f}x is suspicious: is this the loop you meant?"
            fixes.append(Fix(name, ceiling, note, reached and name in wanted))
        fixes.sort(key=lambda f: (not f.advised, -f.ceiling if math.isfinite(f.ceiling) else 0))
    beside = [f"{code}: {text}" for code, text in environment if code != verdict]
    if n.growth > 0:
        cause = "a list of losses, or a state carried along without detach()?"
        beside.append(f"MEMORY_GROWTH: live memory grows by {n.growth / 1024:,.0f} KB a step: {cause}")
    text = codes.get(verdict) or (ON_CPU.get(verdict) if n.serial else None) or TEXTS[verdict]
    return Diagnosis(verdict, reason, text, tuple(evidence), tuple(fixes), tuple(beside))


def _find_verdict(n: Numbers, codes: dict[str, str]) -> tuple[str, str, list[str]]:
    doubts: list[str] = []
    for code in STOPPERS:
        if code in codes:
            return code, "", doubts
    if n.misplaced:
        return "MODEL_OR_DATA_ON_CPU", n.misplaced[0], doubts
    for code in ("DEBUG_MODE_ON", "THROTTLED_OR_SHARED"):
        if code in codes:
            return code, "", doubts

    def exceeds(ratio: float, doubt: str) -> bool:
        if ratio > n.clear_ratio:
            return True
        if ratio > 1 + POLICY.least_excess:
            doubts.append(doubt)
        return False

    # A loader cannot cost more than it takes; half as much again, because it may compete for the same cores.
    if exceeds(min(n.loop, n.cached + 1.5 * n.loader) / n.cached, "DATA_STARVED"):
        return "DATA_STARVED", "WORKERS" if n.workers else "LOADER_ON_THE_HOST", doubts
    busy = max(n.host, n.device)
    if not n.serial and exceeds(n.cached / busy, "SYNC_BOUND"):
        return "SYNC_BOUND", f"{n.waits:.3g} waits a step", doubts
    if exceeds(n.host / n.device, "HOST_BOUND"):
        return "HOST_BOUND", _host_reason(n), doubts
    if n.copy > POLICY.copy_share * n.device:
        return "COPY_BOUND", "", doubts
    if n.rnn == "cudnn standard":
        return "CUDNN_NOT_PERSISTENT", "", doubts
    empty = n.filled < POLICY.filled_share if math.isfinite(n.filled) else n.doubling < POLICY.doubling
    if empty and not n.serial:
        return "DEVICE_LATENCY_BOUND", "", doubts
    return "DEVICE_BOUND", _device_reason(n), doubts


def _host_reason(n: Numbers) -> str:
    if n.rnn in ("cells", "native"):
        return "RNN_NOT_CUDNN"
    if n.rnn == "cudnn standard":
        return "CUDNN_NOT_PERSISTENT"
    return "OPTIMIZER_FOR_LOOP" if n.optimizer_share > 0.25 else "MANY_SMALL_OPS"


def _device_reason(n: Numbers) -> str:
    if n.precision == "bfloat16" and (0, 0) < n.capability < (8, 0):
        return "BF16_EMULATED"
    if not math.isfinite(n.arithmetic) or n.capability == (0, 0):
        return ""
    if n.arithmetic < 0.3 * n.device:
        return "BANDWIDTH"  # or latency; the arithmetic is not what takes the time
    return "TENSOR_CORES_UNUSED" if n.precision == "float32" and n.capability >= (7, 0) else "COMPUTE"


def _evidence(n: Numbers):
    yield f"loop {n.loop:.3g} ms a step, on a cached batch {n.cached:.3g}, the loader alone {n.loader:.3g}"
    if n.serial:
        yield f"{n.kernels:,.0f} operator calls, about {n.host:.3g} ms to start; no GPU, so nothing overlaps"
    else:
        busy = f"busy {n.device / n.loop:.0%} at most"
        yield f"the host needs {n.host:.3g} ms to enqueue a step, the device {n.device:.3g}: {busy}"
        yield f"{n.kernels:,.0f} kernels, {n.waits:.3g} waits and {n.copy:.3g} ms of copies a step"
    if n.wait_lines:
        yield f"the host waits at {', '.join(n.wait_lines[:4])}"
    if math.isfinite(n.filled):
        yield f"the kernels fill {n.filled:.0%} of the multiprocessors"
    if math.isfinite(n.doubling):
        yield f"twice the samples take the device {n.doubling:.2f} times as long"
