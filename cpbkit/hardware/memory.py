"""Memory: the most that a piece of work takes, and what it frees, kept for its next step."""

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # names of settings in glibc's malloc.h
_keepers = 0  # works under way at once: the last one to end gives the memory back


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Let memory of the host that is freed stay with the process meanwhile, then give it back.

    As it comes, glibc gives every large tensor back to the system and asks for it anew in the next step, page by page:
    a third of the time of a wide step on a CPU. Afterwards its thresholds are the most that they grow to by themselves.
    Other allocators, and steps on a GPU, are left as they are.
    """
    global _keepers
    libc = _glibc() if device.type == "cpu" else None
    if libc is None:
        yield
        return
    _keepers += 1
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        _keepers -= 1
        if not _keepers:  # glibc cannot be asked what was set before
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
        reserved = torch.cuda.memory_reserved(device)
        yield taken
        taken["bytes"] = torch.cuda.max_memory_reserved(device) - reserved
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    except OSError:
        yield taken
        return
    before = resident() if _glibc() else None  # another allocator may hold free memory, which would count
    yield taken
    most = resident(peak=True)
    if before is not None and most is not None:
        taken["bytes"] = max(0, most - before)


def resident(peak: bool = False) -> int | None:
    """Return the bytes of host memory this process holds, or held at most since `peak` began; None unseen."""
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _glibc() -> ctypes.CDLL | None:
    """Return glibc where it is the allocator; Colab preloads another one."""
    try:
        libc, used = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    own, taken = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (libc, used))
    return libc if own == taken else None
