"""Clocks that know what "done" means on a device, and the ways to time a call and a step by them."""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from cpbkit.gpu_check.numbers import NAN
from cpbkit.gpu_check.trace import Trace, read_trace

QUEUE = 700  # launches that surely fit into the driver's queue, which holds about 1000
LONGEST_PLUG = 0.2  # s
TRACED = 6  # steps under the profiler
CALLS = 200  # a block of one small call
LEAD = 3  # calls before a timed block on a device
CYCLES = 10_000_000  # of the plug by which its rate is found


class HostClock:
    """Time where host and device are one processor."""

    serial = True
    can_plug = False

    def now(self) -> float:
        """Seconds, of the host."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until nothing is under way: here nothing ever is."""

    def memory(self) -> float:
        """Bytes in live tensors; NaN where nobody counts them."""
        return NAN


class CudaClock(HostClock):
    """Time on a CUDA device, the current one or another; the plug is a kernel that only waits."""

    serial = False

    def __init__(self, device: str = "cuda"):
        self.device = torch.device(device)
        # Private to torch, used by its own tests: there may be none one day.
        self._sleep: Callable[[int], None] = getattr(torch.cuda, "_sleep", None)  # type: ignore[assignment]
        self.can_plug = self._sleep is not None
        if self.can_plug:  # the first call loads the kernel, and an idle chip begins slowly: the fastest counts
            self._rate = max(self._measure_rate() for _ in range(3))

    def _measure_rate(self) -> float:
        """Cycles a second of the plug."""
        start = self.mark()
        self._wait(CYCLES)
        end = self.mark()
        self.synchronize()
        return CYCLES / max(self.between(start, end), 1e-6)

    def _wait(self, cycles: int) -> None:
        with torch.cuda.device(self.device):
            self._sleep(cycles)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> float:
        return float(torch.cuda.memory_allocated(self.device))

    def mark(self):
        """Put an event into the device's queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start, end) -> float:
        """Seconds between two events that have happened."""
        return start.elapsed_time(end) / 1e3

    def has_passed(self, event) -> bool:
        return event.query()

    def plug(self, seconds: float) -> None:
        """Occupy the device."""
        self._wait(int(seconds * self._rate))

    def trace(self, step: Callable[[], object]) -> Trace:
        """Profile some steps; raises ValueError where no kernel was recorded."""
        from torch.profiler import ProfilerActivity, profile, schedule

        plan = schedule(wait=1, warmup=2, active=TRACED, repeat=1)
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.cuda.device(self.device), profile(activities=both, schedule=plan) as profiler:
            for i in range(3 + TRACED):
                step()
                if i == 2:
                    self.synchronize()  # what the warm-up left in the queue would count as the steps' own
                profiler.step()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                return read_trace(json.load(file)["traceEvents"])


def make_clock(device: str) -> HostClock:
    """Return the clock that knows when a device is done."""
    return CudaClock(device) if torch.device(device).type == "cuda" else HostClock()


def time_block(clock, run: Callable[[], object], times: int = 1) -> float:
    """Return seconds a call, never waiting between calls.

    On a device, several calls are timed from the end of one call to the end of another on the device, after some
    that fill its queue: a wait before and after would add the shorter of host and device time once.
    """
    clock.synchronize()
    if clock.serial or times == 1:
        begun = clock.now()
        for _ in range(times):
            run()
        clock.synchronize()
        return (clock.now() - begun) / times
    for _ in range(LEAD):
        run()
    first = clock.mark()
    for _ in range(times):
        run()
    last = clock.mark()
    clock.synchronize()
    return clock.between(first, last) / times


def measure_call(clock, call: Callable[[], object]) -> float:
    """Return the host's µs a call, the least of eight blocks: short enough never to fill the queue."""

    def run() -> float:
        clock.synchronize()
        begun = clock.now()
        for _ in range(CALLS):
            call()
        return (clock.now() - begun) / CALLS

    return min(run() for _ in range(8)) * 1e6


def find_middle(values: list[float]) -> tuple[float, float]:
    """Return the median and its relative standard error, by the median absolute deviation of a normal."""
    middle = median(values)
    deviation = 1.4826 * median(abs(v - middle) for v in values)
    return middle, 1.2533 * deviation / math.sqrt(len(values)) / middle if middle > 0 else 0.0


@dataclass(frozen=True)
class Plug:
    """The plug test: all is enqueued while the device is held busy, so nothing waits for the host."""

    host: float = NAN  # H in seconds
    device: float = NAN  # D
    blocked: bool = False  # the host waited for the device: the step contains a wait
    reason: str = ""  # why the test does not hold


def run_plug(clock, step: Callable[[], object], launches: float, kernels: float, expected: float) -> Plug:
    """Measure H and D without a profiler; launches, kernels and expected seconds of the host a step.

    After NVBench's blocking kernel. It does not hold where the launches overflow the driver's queue; a graph is one
    launch, and as little as possible of its kernels is queued: one step where nobody could count them.
    """
    if not clock.can_plug:
        return Plug(reason="this torch has no kernel that only waits")
    if launches > QUEUE:
        return Plug(reason=f"{launches:,.0f} launches a step overflow the queue of the driver")
    for stretch in (3, 9):  # a host that comes back only when the plug ends, however long, was blocked
        most = LONGEST_PLUG / (stretch * max(expected, 1e-6))
        steps = max(1, min(int(QUEUE / (max(launches, kernels) or QUEUE)), int(most)))
        clock.synchronize()
        clock.plug(min(LONGEST_PLUG, max(0.002, stretch * steps * expected)))
        first, begun = clock.mark(), clock.now()
        for _ in range(steps):
            step()
        host, held, last = clock.now() - begun, not clock.has_passed(first), clock.mark()
        clock.synchronize()
        if held:
            return Plug(host / steps, clock.between(first, last) / steps)
    return Plug(blocked=True, reason="the host came back only when the plug had ended: the step waits for the device")
