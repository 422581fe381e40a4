"""The machine's own ceilings, and the memory that something takes."""

import ctypes
import gc
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cpbkit.train import tf32

MATMUL = 1024  # rows and columns of the product that says what the machine can do
MATMUL_GPU = 8192
MATMUL_SECONDS = 0.3
STATUS = Path("/proc/self/status")


def matmul_rate(device: torch.device, precision: str) -> float:
    """Measure the best rate of a large square product, on a CPU by one thread: floating-point operations a second."""
    n = MATMUL_GPU if device.type == "cuda" else MATMUL
    dtype = getattr(torch, "float32" if precision == "tf32" else precision)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tf32(precision == "tf32"):
            a, b = torch.randn(2, n, n, device=device).to(dtype)
            a @ b
            clock = time.perf_counter if device.type == "cuda" else time.thread_time  # what others do is not its time
            best, end = float("inf"), time.perf_counter() + MATMUL_SECONDS
            while time.perf_counter() < end:
                wait(device)
                begun = clock()
                a @ b
                wait(device)
                best = min(best, clock() - begun)
    finally:
        torch.set_num_threads(threads)
    return 2 * n**3 / best


def wait(device: torch.device) -> None:
    """Wait for the device, where there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident(peak: bool = False) -> int | None:
    """Return the bytes of host memory this process holds, or held at most since `peak_memory` began; None unseen."""
    if not STATUS.exists():
        return None
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict]:
    """Measure what is taken inside at most, beyond what was held before; `bytes` of the dict is None if unseen."""
    gc.collect()
    taken: dict = {"bytes": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield taken
        taken["bytes"] = torch.cuda.max_memory_allocated(device) - before
        return
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)  # else the next one reuses memory that counts as held
        except AttributeError:
            pass  # another C library keeps less
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        except OSError:
            yield taken
            return
    before = resident()
    yield taken
    if before is not None:
        taken["bytes"] = max(0, resident(peak=True) - before)
