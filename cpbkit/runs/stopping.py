"""SIGTERM: a sweep keeps a checkpoint and ends within seconds."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from cpbkit.errors import Terminated

GRACE = 3.0  # s that a step and a checkpoint may take after the signal
_asked, _patient = threading.Event(), threading.Event()


def is_asked() -> bool:
    """Say whether the process was asked to end, and somebody promised to do so."""
    return _asked.is_set()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Raise Terminated at a SIGTERM meanwhile. Only the main thread hears signals; others leave them as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _hear)
    try:
        yield
    finally:
        _asked.clear()
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def patiently() -> Iterator[None]:
    """Promise to look at `is_asked` between steps: Terminated is raised only GRACE after the signal, or at a second."""
    _patient.set()
    try:
        yield
    finally:
        _patient.clear()


def _hear(*_) -> None:
    if not _patient.is_set() or _asked.is_set():
        raise Terminated
    _asked.set()
    timer = threading.Timer(GRACE, _remind)
    timer.daemon = True
    timer.start()


def _remind() -> None:
    if _asked.is_set() and _patient.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
