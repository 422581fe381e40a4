"""What ends a sweep, or models of it, early: a SIGTERM, after which it ends within seconds, or a person's wish."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from cpbkit.errors import Terminated

GRACE = 3.0  # s that a step and a checkpoint may take after the signal
_asked, _patient = threading.Event(), threading.Event()


class _Wishes(threading.local):  # a thread has one sweep; another's is not meant
    end = False
    leaving: frozenset[str] = frozenset()  # series


_wishes = _Wishes()


def is_asked() -> bool:
    """Say whether the sweep of this thread is to end after a checkpoint."""
    return _asked.is_set() or _wishes.end


def leaving() -> frozenset[str]:
    """Return the series whose models are to end with the running epoch."""
    return _wishes.leaving


def wish(end: bool = False, leaving: Iterable[str] = ()) -> None:
    """Ask the sweep of this thread to end, or models of it. Errors: Terminated where nobody promised to look."""
    _wishes.end |= end
    _wishes.leaving |= frozenset(leaving)
    if _wishes.end and not _patient.is_set():
        raise Terminated


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Raise Terminated at a SIGTERM meanwhile. Only the main thread hears signals; others leave them as they are."""
    _wishes.end, _wishes.leaving = False, frozenset()
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
