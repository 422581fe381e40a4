"""What the device and the host did over time: a sampling thread, the status line, and the test for growth."""

import contextlib
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import psutil

from cpbkit.hardware.environment import count_cores, free_memory, host_memory
from cpbkit.hardware.nvml import Ask, load_nvml, nvml_handles

COLUMNS = (
    "time",  # s since the monitor started
    "device",  # cpu | cuda:0
    "allocated",  # bytes in live tensors, as torch's allocator counts them
    "reserved",  # bytes torch's allocator holds
    "used",  # bytes in use on the device by everybody; for the cpu, of the machine
    "host",  # bytes resident: this process and its children
    "utilisation",  # % of the time in which a kernel ran; for the cpu, % of all cores used by this process
    "power",  # W
    "clock",  # MHz of the multiprocessors
    "throttle",  # why the clock is held down, or ""
    "text",  # the event given to mark(), or ""
)
POWER = "power cap"
# nvmlClocksEventReasons of NVML: the bits that mean "slower than asked for".
THROTTLES = {0x4: POWER, 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
LIMIT = 20_000  # samples held; then every second one is dropped and the period doubles
LEAK = 64 * 1024  # bytes a step
IDLE = 0.15  # share of the cores' time from which on there is room for one more program


def list_processes() -> list[psutil.Process]:
    """Return this process and its children."""
    found, tasks = [psutil.Process()], Path("/proc/self/task")
    if not tasks.exists():
        return found + found[0].children()
    for task in tasks.iterdir():  # psutil would look through all processes of the machine for them
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # a thread or a child that has just ended
            found += map(psutil.Process, map(int, (task / "children").read_text().split()))
    return found


def host_use() -> tuple[float, float]:
    """Return (bytes resident, CPU seconds so far) of this process and its children."""
    size = seconds = 0.0
    this = os.getpid()
    for process in list_processes():
        with contextlib.suppress(psutil.Error):  # a child that has just ended
            size += process.memory_info().rss
            seconds += sum(process.cpu_times()[2 if process.pid == this else 0 : 4])  # and of children it waited for
    return size, seconds + time.process_time()  # its own time last and exact: the caller's clock is read next


class Processor(NamedTuple):
    """Seconds of all cores since some moment."""

    busy: float
    idle: float
    own: float  # of the busy ones, for this process and its children

    @classmethod
    def read(cls) -> "Processor":
        """Return what it is now."""
        whole = psutil.cpu_times()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")  # a guest's stand among the user's
        busy = sum(getattr(whole, kind, 0.0) for kind in kinds)
        return cls(busy, whole.idle + getattr(whole, "iowait", 0.0), host_use()[1])

    def of_others(self, before: "Processor") -> float:
        """Return the share of the cores' time since `before` that other programs took; 0 where cores were idle too."""
        busy, idle, own = (now - then for now, then in zip(self, before, strict=True))
        total = busy + idle
        return max(0.0, busy - own) / total if total > 0 and idle < IDLE * total else 0.0


class Monitor:
    """Sample memory and utilisation in a thread while the body of a `with` runs; the thread never raises.

    period: s between samples. nvml: a module like pynvml; None loads the real one, False asks none.
    problems: what could not be seen and why, each once.
    """

    def __init__(self, period: float = 0.5, nvml=None):
        if not period > 0:
            raise ValueError(f"period must be positive seconds; got {period!r}")
        self.period = period
        self.problems: list[str] = []
        self._nvml = nvml
        self._handles: list = []
        self._samples: list[list[tuple]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> "Monitor":
        if self._nvml is None:
            self._nvml, problem = load_nvml()
            self._note(problem)
        self._ask = Ask(self._nvml, self.problems)
        if self._nvml:
            self._handles = self._ask("devices", lambda: nvml_handles(self._nvml), [])
        self._cores = count_cores()
        self._start = self._last = time.perf_counter()
        self._seconds = host_use()[1]
        self._utilisation = math.nan
        self._sample("")
        self._thread = threading.Thread(target=self._watch, name="cpbkit-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()
        self._sample("")

    def mark(self, text: str) -> None:
        """Add an event: a sample now, with this text in the row of the cpu."""
        self._sample(text)

    def frame(self) -> pd.DataFrame:
        """Return the samples so far, one row a sample and device, columns as COLUMNS; NaN is "not known"."""
        with self._lock:
            rows = [row for sample in self._samples for row in sample]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def _note(self, problem: str) -> None:
        if problem and problem not in self.problems:
            self.problems.append(problem)

    def _watch(self) -> None:
        while not self._stop.wait(self.period):
            try:
                self._sample("")
            except Exception as error:  # a thread must not end in silence, nor end the person's run
                self._note(f"a sample failed: {type(error).__name__}: {error}")

    def _sample(self, text: str) -> None:
        with self._lock:
            host, seconds = host_use()
            now = time.perf_counter()  # after it: looking at processes takes long where a thread keeps the interpreter
            if now - self._last > 0.05:  # the system counts in 10 ms ticks: a shorter gap is noise
                share = (seconds - self._seconds) / (now - self._last) / self._cores
                self._utilisation = 100 * max(share, 0.0)  # a child that ended takes its seconds along
                self._last, self._seconds = now, seconds
            at = now - self._start
            used = float(host_memory() - free_memory())
            rows = [(at, "cpu", math.nan, math.nan, used, host, self._utilisation, math.nan, math.nan, "", text)]
            rows += [self._device_row(at, i, handle, host) for i, handle in enumerate(self._handles)]
            self._samples.append(rows)
            if len(self._samples) > LIMIT:
                self._samples = [s for i, s in enumerate(self._samples) if i % 2 == 0 or s[0][-1]]
                self.period *= 2

    def _device_row(self, at: float, index: int, handle, host: float) -> tuple:
        nvml, ask = self._nvml, self._ask
        allocated, reserved = device_memory(index)
        used = ask("memory", lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used), math.nan)
        utilisation = ask("utilisation", lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), math.nan)
        power = ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, math.nan)
        clock = ask("clock", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), math.nan)
        bits = ask("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
        throttle = ", ".join(reason for bit, reason in THROTTLES.items() if bits & bit)
        return at, f"cuda:{index}", allocated, reserved, used, host, utilisation, power, clock, throttle, ""


def device_memory(index: int) -> tuple[float, float]:
    """Return (allocated, reserved) bytes of torch on a CUDA device; NaN while torch has not started CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return math.nan, math.nan
    return float(torch.cuda.memory_allocated(index)), float(torch.cuda.memory_reserved(index))


def gpu_status(label: str) -> str:
    """Return one line of torch's memory on the first device, in GB of 1e9 bytes."""
    allocated, reserved = device_memory(0)
    if allocated != allocated:
        return f"GPU Status [{label}] no CUDA in use; host memory {host_use()[0] / 1e9:.2f}GB"
    peak = sys.modules["torch"].cuda.max_memory_allocated(0)
    parts = (("Allocated", allocated), ("Reserved", reserved), ("Peak", peak))
    return f"GPU Status [{label}] " + " | ".join(f"{name}: {size / 1e9:.2f}GB" for name, size in parts)


def growth(values) -> tuple[float, bool]:
    """Return the Theil-Sen slope of memory over steps (bytes a step), and whether it is a leak.

    A leak grows by at least LEAK bytes a step, and later is more in nine of ten pairs: a plateau after
    warm-up, a saw-tooth or one big allocation is none.
    """
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return math.nan, False
    steps = np.unique(np.linspace(0, len(values) - 1, 200).astype(int))
    rise = values[steps][None, :] - values[steps][:, None]
    run = (steps[None, :] - steps[:, None]).astype(float)
    later = run > 0
    slope = float(np.median(rise[later] / run[later]))
    return slope, slope >= LEAK and float((rise[later] > 0).mean()) >= 0.9
