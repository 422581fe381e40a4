"""Where the training thread is: its stack, read some twenty times a second; phase, library and own lines of it."""

import ctypes
import gc
import math
import os
import random
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NamedTuple

import torch

# (looks, s between two on average, at the most): the first come closer, so that a short loop is seen too.
STAGES: tuple[tuple[float, float, float], ...] = ((250, 0.004, 0.012), (1500, 0.02, 0.05), (math.inf, 0.05, 0.1))
# As a part of a name between underscores: not in `value` or `latest`.
WORDS_OF_VALIDATION = re.compile(
    r"(?<![a-z])(val(id|idate|idation)?|eval(uate|uation)?|test|dev|holdout)s?(?![a-z])", re.IGNORECASE
)
COST = 0.007  # of the time that looks may take: where waking up is dear, as in a virtual machine, there are fewer
# A thread that wants the interpreter gets it after this many seconds. With Python's 5 ms a look falls where torch
# lets go of the interpreter, and a line of pure Python is hardly ever seen: 2 % where it takes 10 %. A call that lets
# go of it for some microseconds, as NumPy's do, starts the wait anew: with 100 us a loop of them is not seen either,
# and its time is put on a line after it. A thread that waits wakes up as often: with 10 us that costs more than a look.
SWITCH = 3e-5
PR_SET_TIMERSLACK = 29  # of linux/prctl.h
OWN, OTHER = "own", ""
PHASES = ("data", "forward", "backward", "optimiser")
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STANDARD = tuple(os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


# What a thread that is in it runs: the person's own, or parts of Python's library that wait, if at all, within another;
# and the functions in which `threading` waits.
RUNNING = {OWN, *sys.stdlib_module_names} - set(
    "asyncio concurrent http multiprocessing selectors socket ssl subprocess urllib".split()
)
WAITS_OF_THREADING = ("wait", "join", "_wait_for_tstate_lock")


OwnLine = tuple[int, int]  # a line of the person's: (number of its code in `Roles.codes`, line)


class CallStack(NamedTuple):
    """One state of the training thread; own lines, the innermost first."""

    phase: str  # of PHASES, or "" outside them
    library: str  # that the innermost own line calls, or ""
    root: int  # identity of the module whose call it is in, or 0
    quiet: bool  # that module is in eval mode, or is called by a function without gradients
    own: tuple[OwnLine, ...]
    inside: int = 0  # of the own lines, how many are within that module
    evaluating: bool = False  # it is in eval mode
    graph: bool = False  # what looks like a validation computes with gradients


class Roles:
    """What each function on a stack is there for: the person's own, a phase of torch's, or a library."""

    def __init__(self):
        self.codes: list[CodeType] = []  # own ones, by their number
        self.looked = 0  # identity of the frame of the call whose variables were looked at last in this step
        self._validating: list[bool] = []  # whether such a one's name says so
        self.modules: dict[int, weakref.ref] = {}  # whose calls were seen, by identity
        # By identity, for hashing a code object reads all of it; the code is kept so that the identity stays its own.
        self._known: dict[int, tuple[CodeType, str, int]] = {}

    def find(self, code: CodeType) -> tuple[str, int]:
        """Return (role, number of an own code or -1)."""
        known = self._known.get(id(code))
        if known is None:
            role, number = find_role(code.co_filename, code.co_name), -1
            if role == OWN:
                number = len(self.codes)
                self.codes.append(code)
                self._validating.append(bool(WORDS_OF_VALIDATION.search(code.co_name)))
            known = self._known[id(code)] = code, role, number
        return known[1:]

    def read(self, frame: FrameType | None) -> CallStack:
        """Read a stack from its innermost frame outwards."""
        phase = library = ""
        top, root, quiet, inside, own = frame, None, False, 0, []
        while frame is not None:
            role, number = self.find(frame.f_code)
            if role == OWN:
                own.append((number, _line_of(frame)))
            elif role in PHASES:
                phase = phase or role
                if role == "forward":
                    # The outermost call of a module stays: what is frozen within it is a part of its training.
                    root, quiet, inside = frame, False, len(own)
            elif role == "no grad":
                quiet = True
            elif not own and role:
                library = role  # the outermost library below the innermost own line is the one it calls
            frame = frame.f_back
        module = root.f_locals.get("self") if root is not None else None
        if module is not None and ((known := self.modules.get(id(module))) is None or known() is None):
            self.modules[id(module)] = weakref.ref(module)  # of one that is gone, the place may be another's
        evaluating = module is not None and not module.__dict__.get("training", True)
        validates = evaluating or any(self._validating[number] for number, _ in own)
        graph = False
        if phase == "forward" and validates and not quiet and id(root) != self.looked:
            # Once a call: to read the variables of a frame again would free what was read of it before.
            self.looked, graph = id(root), _holds_graph(top, root)
        number = id(module) if module is not None else 0
        return CallStack(phase, library, number, quiet or evaluating, tuple(own), inside, evaluating, graph)

    def alive(self) -> dict[int, torch.nn.Module]:
        """Return the modules whose calls were seen and that are there still, by identity."""
        return {number: module for number, ref in self.modules.items() if (module := ref()) is not None}

    def own_line(self, frame: FrameType | None) -> OwnLine | None:
        """Return the innermost own line of a stack."""
        while frame is not None:
            role, number = self.find(frame.f_code)
            if role == OWN:
                return number, _line_of(frame)
            frame = frame.f_back
        return None


def _line_of(frame: FrameType) -> int:
    return frame.f_lineno or frame.f_code.co_firstlineno  # between two lines there is none


def _holds_graph(frame: FrameType | None, root: FrameType | None) -> bool:
    """Say whether a variable of a frame, or of one around it up to `root`, is a part of a graph."""
    while frame is not None:
        if any(isinstance(v, torch.Tensor) and v.grad_fn is not None for v in frame.f_locals.values()):
            return True
        if frame is root:
            return False
        frame = frame.f_back
    return False


def find_role(file: str, name: str) -> str:
    """Return "own", a phase, "no grad", the name of a library, or "" for what is nobody's."""
    if file.startswith(TORCH):
        inside = file[len(TORCH) :].replace(os.sep, "/")
        if inside.startswith("utils/data/"):
            return "data"
        if inside in ("autograd/__init__.py", "autograd/graph.py") and name in ("backward", "grad"):
            return "backward"
        if inside.startswith("optim/") or inside == "nn/utils/clip_grad.py":
            return "optimiser"
        if inside == "nn/modules/module.py" and name == "_call_impl":
            return "forward"
        if inside == "utils/_contextlib.py":
            return "no grad"  # decorates a function with torch.no_grad or inference_mode
        return "compiler" if inside.startswith(("_dynamo/", "_inductor/")) else "torch"
    if file.startswith(KIT):
        return "data" if file.endswith("watch.py") and name == "__iter__" else OTHER
    if file.startswith("<frozen"):
        return OTHER
    for marker in INSTALLED:
        if marker in file:
            return file.partition(marker)[2].partition(os.sep)[0].removesuffix(".py")
    for folder in STANDARD:
        if file.startswith(folder):
            return file[len(folder) :].partition(os.sep)[0].removesuffix(".py")
    return OWN


def _wait_exactly() -> None:
    """Let what this thread waits for end on time. Linux adds up to 50 us, more than a line of Python may take: its time
    would be put on the next call that lets go of the interpreter.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns


class Sampler(threading.Thread):
    """Look at a thread's stack until stopped; `paused` looks away.

    A look counts for the time since the one before: a call that holds the interpreter for long is seen once, at its
    end. What is seen after the last step that was counted is kept apart: it may be the end of the loop.
    """

    def __init__(self, roles: Roles, watched: int, tick: Callable[[float], object]):
        super().__init__(name="cpbkit-watch", daemon=True)
        self.roles, self.watched, self.tick = roles, watched, tick
        self.seen: defaultdict[CallStack, float] = defaultdict(float)  # seconds, up to the last step
        self.looks = 0
        self.others: Counter[OwnLine] = Counter()  # own lines at which other threads were seen
        self.stages = STAGES
        self.paused = False
        self.problem = ""  # why it ended early
        self.tail: list[tuple[CallStack, float]] = []  # what was seen since the last step that was counted
        self._woken = self._fresh = 0  # times: in all, until the first step
        self._done = False

    def run(self) -> None:
        """Look; never raises into the person's program."""
        before, dice = sys.getswitchinterval(), random.Random(0)
        sys.setswitchinterval(SWITCH)
        _wait_exactly()
        last = time.perf_counter()
        try:
            # At uneven times: a step of just one period would always be seen at the same line.
            while True:
                time.sleep(self._period() * dice.uniform(0.5, 1.5))  # half of what a wait with a timeout costs
                if self._done:
                    break
                now = time.perf_counter()
                if not self.paused:
                    look = self._look(), now - last
                    self.tail.append(look)
                last = now
                self.tick(now)
                self._woken += 1
        except Exception as error:  # told in the report; the loop it looks at goes on
            self.problem = f"the sampler stopped: {type(error).__name__}: {error}"
        finally:
            sys.setswitchinterval(before)

    def _look(self) -> CallStack:
        # To free a tensor lets the other thread run on, and what is read then is of a stack that is over; or, in the
        # middle of `f_back`, a place in memory that is another's. So nothing is freed in here: no garbage is
        # collected, and no frame is held on to until the next look.
        collects = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
            frames.pop(threading.get_ident())  # this one's would hold itself, and with it all others
            stack = self.roles.read(frames.get(self.watched))
            self.others.update(at for at in map(self._running, frames.items()) if at)
        finally:
            if collects:
                gc.enable()
        return stack

    def _running(self, thread: tuple[int, FrameType]) -> OwnLine | None:
        """Return the own line that another thread is at, and not a library that it called and may wait in."""
        number, frame = thread
        role, _ = self.roles.find(frame.f_code)
        waits = role not in RUNNING or (role == "threading" and frame.f_code.co_name in WAITS_OF_THREADING)
        return None if waits or number == self.watched else self.roles.own_line(frame)

    @property
    def stage(self) -> tuple[float, float, float]:
        """The present one of STAGES."""
        return next(stage for stage in self.stages if self._woken - self._fresh < stage[0])

    def _period(self) -> float:
        """Return the seconds to the next look."""
        _, usual, most = self.stage
        dear = time.thread_time() / COST / max(self._woken, 1)  # of this thread: what its looks took so far
        return min(max(dear, usual), most)

    def end_step(self) -> list[CallStack]:
        """Count what was seen since the step before, and return it."""
        tail, self.tail = self.tail, []  # under the GIL a look of just now counts for this step, or for the next
        for stack, seconds in tail:
            self.seen[stack] += seconds
        self.looks += len(tail)
        return [stack for stack, _ in tail]

    def restart(self) -> None:
        """Drop all that was seen."""
        self.seen.clear()
        self.others.clear()
        self.tail, self.looks = [], 0
        self._fresh = self._woken

    def stop(self) -> None:
        """Stop looking, and wait for the thread."""
        self._done = True
        self.join()
