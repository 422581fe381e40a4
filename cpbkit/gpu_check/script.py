"""A training script of any kind, run under the watch."""

import _thread
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import torch

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check.watch import UNSTEPPED, Watch, replaced, watch
from cpbkit.hardware.device import on_threads

THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
AGAIN = 0.1  # s
STOPPED = "stopped by Ctrl-C: what follows is what was seen so far"


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield the signals of Ctrl-C that came: an error that follows one is its consequence.

    Ctrl-C ends a loader's workers as well. Python drops a KeyboardInterrupt that comes in a callback, as in `__del__`:
    then it is raised again a little later.
    """
    came: list[int] = []
    again: list[threading.Timer] = []
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number, frame):
        came.append(number)
        signal.default_int_handler(number, frame)

    def repeat(lost):
        if lost.exc_type is not KeyboardInterrupt:
            hook(lost)
            return
        again.append(threading.Timer(AGAIN, _interrupt))
        again[-1].start()

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = repeat
    try:
        yield came
    finally:
        for timer in again:
            timer.cancel()
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def _interrupt() -> None:
    """Interrupt the main thread as Ctrl-C does."""
    if hasattr(signal, "pthread_kill"):  # wakes it from a sleep too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def run_script(path: str, arguments: tuple[str, ...] = (), live: bool = True) -> tuple[Watch, str]:
    """Run a script as `python path arguments` would, and return (the watch over it, how it ended early or "").

    Ctrl-C ends the script, not the verdict on what was seen so far; a script that fails says so with its traceback.
    """
    if not Path(path).is_file():
        raise CpbkitError(f"doctor runs a training script; got {path!r}, which is no file")
    before = sys.argv[:], sys.path[:]
    sys.argv[:], sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    ended = ""
    try:
        with on_threads(), _interrupts() as interrupts, watch(live=live, tell=False) as watched:
            try:
                with replaced(os, "putenv", _note_variable):
                    runpy.run_path(path, run_name="__main__")
            except KeyboardInterrupt:
                ended = STOPPED
            except SystemExit as end:
                ended = f"the script ended with {end.code!r}" if end.code else ""
            except Exception as error:  # the person's, shown as Python would; the verdict so far is theirs too
                if interrupts:
                    ended = STOPPED
                else:
                    traceback.print_exc()
                    ended = f"the script failed: {type(error).__name__}: {error}"
    finally:
        sys.argv[:], sys.path[:] = before
    if not watched.steps:
        raise CpbkitError(
            f"no step of a torch.optim optimiser was seen in {path}, nor {UNSTEPPED} passes backward; the doctor "
            "watches training in this process" + (f" ({ended})" if ended else "")
        )
    return watched, ended


def _note_variable(original, name, value) -> None:
    """Stand in for os.putenv: threads that a script sets before it imports torch count, though here it is imported."""
    original(name, value)
    threads = int(os.fsdecode(value)) if os.fsdecode(value).isdecimal() else 0
    if os.fsdecode(name) not in THREADS or not threads:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    if frame and not any(map(_is_torch, list(frame.f_globals.values()))):
        torch.set_num_threads(threads)


def _is_torch(thing: object) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return str(name).partition(".")[0] == "torch"
