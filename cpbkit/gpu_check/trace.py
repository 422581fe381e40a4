"""A profiler trace in the schema of kineto, read into the few numbers a verdict needs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cpbkit.gpu_check.numbers import NAN

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME = {"cuda_runtime", "cuda_driver"}
HOST_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Trace:
    """Per step, times in ms."""

    device: float  # union of the intervals in which the device worked
    kernels: float
    launches: float  # calls of the host that start kernels; a graph starts many with one
    copy: float  # host to device
    waits: float  # number of waits of the host
    waiting: float  # the host's time in them
    filled: float  # share of the multiprocessors with work while kernels ran
    names: tuple[str, ...]  # of the kernels


def read_trace(events: Iterable[dict]) -> Trace:
    """Read the `traceEvents` of a chrome trace; raises ValueError where no kernel was recorded.

    Steps are the `ProfilerStep#` annotations; what lies outside them is left out.
    """
    timed = [(e.get("cat"), e) for e in events if e.get("ph") == "X" and "ts" in e]
    marks = [e for kind, e in timed if kind == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    if not marks:
        raise ValueError("a trace needs ProfilerStep annotations; got none")
    first, last = min(e["ts"] for e in marks), max(e["ts"] + e["dur"] for e in marks)
    work = sorted((e for kind, e in timed if kind in DEVICE_WORK and first <= e["ts"]), key=lambda e: e["ts"])
    kernels = [e for kind, e in timed if kind == "kernel" and first <= e["ts"]]
    if not kernels:
        raise ValueError("the profiler recorded no kernel: its access to the device (CUPTI) failed, or no GPU ran")
    union, end = 0.0, 0.0
    for e in work:
        union += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
        end = max(end, e["ts"] + e["dur"])
    runtime = [e for kind, e in timed if kind in RUNTIME and first <= e["ts"] <= last]
    waits = [e["dur"] for e in runtime if e["name"] in HOST_WAITS]
    blocks = [(min(e["args"].get("blocks per SM", NAN), 1.0), e["dur"]) for e in kernels if "args" in e]
    n = len(marks)
    return Trace(
        device=union / n / 1e3,
        kernels=len(kernels) / n,
        launches=sum("Launch" in e["name"] for e in runtime) / n,
        copy=sum(e["dur"] for e in work if "HtoD" in e["name"]) / n / 1e3,
        waits=len(waits) / n,
        waiting=sum(waits) / n / 1e3,
        filled=sum(share * dur for share, dur in blocks) / sum(e["dur"] for e in kernels)
        if len(blocks) == len(kernels)
        else NAN,
        names=tuple(sorted({e["name"] for e in kernels})),
    )


def read_path(kernels: tuple[str, ...]) -> str:
    """Name what ran a recurrent layer from the kernels of a step, as `numbers.Numbers.rnn`; "" where none is seen."""
    text = "\n".join(kernels)
    persists = set(re.findall(r"[Pp]ersist\w*?_(fp|bp)", text))
    if persists == {"fp", "bp"}:
        return "cudnn persistent"
    if persists or re.search(r"elemWiseRNN|LSTM_elementWise|GRU_elementWise", text):
        return "cudnn standard"
    return "native" if re.search(r"lstm_cell|gru_cell", text) else ""
