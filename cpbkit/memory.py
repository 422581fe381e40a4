"""Memory of a device: what a piece of work takes at most, and how it stays with the process between steps."""

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # names of settings in glibc's malloc.h


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Let memory of the host that is freed stay with the process meanwhile, then give it back.

    As it comes, glibc gives every large tensor back to the system and asks for it anew in the next step, page by page:
    a third of the time of a wide step on a CPU. Other C libraries, and steps on a GPU, are left as they are.
    """
    libc = _glibc() if device.type == "cpu" else None
    if libc:
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        if libc:  # as it comes, and as far as its thresholds would have grown by themselves
            libc.mallopt(MMAP_MAX, 1 << 16)
            libc.mallopt(MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(TRIM_THRESHOLD, 64 << 20)
            libc.malloc_trim(0)


def give_back() -> None:
    """Give the system and the other processes of a GPU back what is held but not used."""
    gc.collect()
    torch.cuda.empty_cache()
    if libc := _glibc():
        libc.malloc_trim(0)


@contextmanager
def peak(device: torch.device) -> Iterator[dict]:
    """Measure what is taken inside at most, beyond what was held before; `bytes` of the dict is None if unseen."""
    give_back()  # else what comes would reuse memory that counts as held
    taken: dict = {"bytes": None}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        yield taken
        taken["bytes"] = torch.cuda.max_memory_reserved(device) - before
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    except OSError:
        yield taken
        return
    before = resident()
    yield taken
    if before is not None:
        taken["bytes"] = max(0, resident(peak=True) - before)


def resident(peak: bool = False) -> int | None:
    """Return the bytes of host memory this process holds, or held at most since `peak` began; None unseen."""
    if not STATUS.exists():
        return None
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
