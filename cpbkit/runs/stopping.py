"""What ends a sweep, or models of it, early: a SIGTERM, after which it ends within seconds, an interrupt, or a wish."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from cpbkit.errors import Terminated

# s that a step and a checkpoint may take after the signal: batch systems soon kill, a person can ask once more.
GRACE = {signal.SIGTERM: 3.0, signal.SIGINT: 30.0}
_asked, _interrupted, _patient = threading.Event(), threading.Event(), threading.Event()
_reminders: list[threading.Timer] = []  # at most one


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
def listening(in_worker: bool = False) -> Iterator[None]:
    """Raise Terminated at a SIGTERM meanwhile, and KeyboardInterrupt at an interrupt, also where it was waited for.

    in_worker: an interrupt, of which a terminal and the parent may both send one, asks to end as often as it comes.
    Only the main thread hears signals; others leave them as they are.
    """
    _wishes.end, _wishes.leaving = False, frozenset()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Whoever started this in the background may have it ignore interrupts.
    heard = [number for number in GRACE if in_worker or signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, _hear) for number in heard}
    if in_worker:
        signal.signal(signal.SIGINT, lambda *_: _asked.set())
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came since `deaf` is heard now
    try:
        yield
    except Terminated:
        if _interrupted.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        if _reminders:
            _reminders.pop().cancel()
        _asked.clear()
        _interrupted.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Let processes that start meanwhile hear no interrupt before they are `listening`, which takes them seconds."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # where it starts with the process, it lets this one hear again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_on(worker: BaseProcess) -> None:
    """Ask a worker process to end as this one is asked: within seconds after a SIGTERM, else when it can."""
    if _asked.is_set() and not _interrupted.is_set():
        worker.terminate()
    elif worker.pid and worker.is_alive():
        os.kill(worker.pid, signal.SIGINT)


@contextlib.contextmanager
def patiently() -> Iterator[None]:
    """Promise to look at `is_asked` between steps: what a signal raises comes GRACE after it, or at a second one."""
    _patient.set()
    try:
        yield
    finally:
        _patient.clear()


def _hear(number: int, _) -> None:
    if not _patient.is_set() or _asked.is_set():
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
    if number == signal.SIGINT:
        _interrupted.set()
    _asked.set()
    timer = threading.Timer(GRACE[signal.Signals(number)], _remind)
    timer.daemon = True
    _reminders.append(timer)
    timer.start()


def _remind() -> None:
    if _asked.is_set() and _patient.is_set():
        if sys.platform == "win32":  # where a kill asks nothing
            signal.raise_signal(signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
