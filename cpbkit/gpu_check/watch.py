"""A person's own training loop, watched as it runs: what it waits for, the line that costs the time, and the cure."""

import contextlib
import linecache
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import Roles, Sampler
from cpbkit.gpu_check.diagnosis import Diagnosis
from cpbkit.gpu_check.findings import check_environment
from cpbkit.gpu_check.numbers import Policy
from cpbkit.gpu_check.operators import Operators
from cpbkit.gpu_check.shares import ACCOUNTS, Attribution, Line, attribute
from cpbkit.gpu_check.source import INNER_LOOPS
from cpbkit.gpu_check.watched import Seen, Taken, judge_loop
from cpbkit.hardware.environment import count_cores
from cpbkit.hardware.monitor import device_memory, growth, host_use
from cpbkit.hardware.nvml import Ask, load_nvml, nvml_handles

COUNTED = (3, 8, 16)  # steps after which the next one's operators are counted
MANY = 5000  # operators a step: counting them once is enough
MOST_MARKS = 1000  # then every second one is let go
FOLLOWED = 4  # nodes of a loss's graph
UNSTEPPED = 64  # passes backward without an optimiser of torch's: then each of them counts as a step
MARKS = 0.02  # s between two losses whose graphs are followed
TICK = 0.5  # s between two looks at the memory
LIVE = 2.0  # s between two live lines, at the least
GROWN = 100e6  # bytes of the process: less is its allocators settling in
SLOW_LINE = 50e-6  # s a call of torch's: a line that takes longer, and is not computing, does something else

_told: dict[tuple[str, int], str] = {}  # place of a watch in the person's source -> the verdict it last gave


class _Mark:
    """Lives as long as the graph it is tied to."""

    __slots__ = ("__weakref__",)


class Watch:
    """See `watch`."""

    def __init__(self, loader, model: nn.Module | None, optimizer, live: bool, tell: bool, place: tuple[str, int]):
        self._loader, self._model, self._optimizer = loader, model, optimizer
        self._draws, self._tells, self._place = live and _can_draw(), tell, place
        self._exits = contextlib.ExitStack()
        self._entered = False
        self.roles = Roles()
        self.steps = self._backwards = 0
        self._kept: tuple[str, ...] = ()
        self._marks_apart = MARKS
        self._by_hand = False  # weights are moved without an optimiser of torch's
        self._first = self._last = math.nan  # time of the first and the last step
        self._lost = 0.0  # seconds of steps that were counted
        self._cpu = self._cpu_first = self._cpu_lost = 0.0  # s of the training thread's own
        self._count: Operators | None = None  # under way
        self._began = 0.0
        self._counted: list[Operators] = []
        self._step: tuple[tuple[int, int], ...] = ()  # own lines at an optimiser's step
        self._marks: list[tuple[int, weakref.ref, tuple[int, int] | None]] = []
        self._memory: list[tuple[int, float]] = []
        self._busy: list[float] = []
        self._event: torch.cuda.Event | None = None  # the end of a step that the device was not done with
        self._behind: list[bool] = []
        self._loaders: list[DataLoader] = [loader] if isinstance(loader, DataLoader) else []
        self._starts: list[tuple[int, int] | None] = []  # own lines at which workers were started
        self._problems: list[str] = []
        self._ticked = self._marked = self._shown = -math.inf
        self._live = ""
        self._diagnosis: Diagnosis | None = None

    # The two doors.

    def __enter__(self) -> "Watch":
        if self._entered:
            raise CpbkitError("a watch is entered once; make another one: with watch(model, optimizer) as w")
        self._entered = True
        self._thread = threading.get_ident()
        self._sampler = Sampler(self.roles, self._thread, self._tick)
        self._nvml: Any = load_nvml()[0] if torch.cuda.is_available() else None
        self._exits.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._exits.enter_context(_replaced(torch.autograd, "backward", self._follow))
        self._exits.enter_context(_replaced(DataLoader, "__iter__", self._note_loader))
        self._sampler.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop_counting(time.perf_counter())
        self._sampler.stop()
        self._exits.close()
        self._clear_line()
        try:
            self._diagnosis = self.diagnosis
        except Exception as failure:  # a mistake in here must not cost a person the end of a training
            text = f"The watch itself failed: {type(failure).__name__}: {failure}."
            self._diagnosis = Diagnosis("INCONCLUSIVE", "", text, (), (), (), Policy())
        # A loop over epochs makes a watch an epoch: it speaks where it has something new to say.
        if self._tells and _told.get(self._place) != self.verdict:
            _told[self._place] = self.verdict
            sys.stderr.write(self.report() + "\n")

    def __iter__(self) -> Iterator:
        """Yield the loader's batches, watching from the first to the last."""
        if self._loader is None:
            raise TypeError("to iterate over a watch, give it what to go through: watch(loader, model, optimizer)")
        with contextlib.nullcontext() if self._entered else self:
            yield from self._loader

    def __len__(self) -> int:
        return len(self._loader)

    # The result.

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last, without the steps that were counted."""
        return max(self._last - self._first - self._lost, 0.0) if self.steps > 1 else 0.0

    @property
    def diagnosis(self) -> Diagnosis:
        """The verdict with what supports it; so far, while the loop runs."""
        if self._diagnosis is None:
            codes = tuple(c for c in check_environment().codes if c[0] not in ("NO_GPU_RUNTIME", "DEBUG_MODE_ON"))
            return judge_loop(self.seen(), codes)
        return self._diagnosis

    @property
    def verdict(self) -> str:
        return self.diagnosis.verdict

    def report(self) -> str:
        """Return the verdict, where the time went, and the cures, as text."""
        d = self.diagnosis
        lines = [f"{d.verdict.replace('_', '-')}   {d.text}", *(f"  {text}" for text in d.evidence)]
        for fix in d.fixes:
            most = "" if math.isnan(fix.ceiling) else f", at most {fix.ceiling:.2g}x"
            lines.append(f"  cure: {fix.note} ({fix.name}{most})")
        return "\n".join([*lines, *(f"  also: {text}" for text in d.beside)])

    def to_dict(self) -> dict:
        """JSON-safe: what `cpbkit doctor --compare` reads."""
        seen = self.seen()
        rate = (self.steps - 1) / self.seconds if self.seconds else 0.0
        lines = [
            {"place": x.place, "text": x.text, "share": x.seconds / max(seen.seconds, 1e-9), "phase": x.account}
            for x in seen.lines[:10]
        ]
        d = self.diagnosis
        return {
            "verdict": d.verdict,
            "reason": d.reason,
            "text": d.text,
            "steps": self.steps,
            "seconds": seen.seconds,
            "steps a second": rate,
            "shares": dict(seen.shares),
            "lines": lines,
            "evidence": list(d.evidence),
            "fixes": [{"name": f.name, "ceiling": _or_none(f.ceiling), "note": f.note} for f in d.fixes],
            "beside": list(d.beside),
        }

    def seen(self) -> Seen:
        """Return what was seen so far, in shares of the time between the first and the last step."""
        tracked = {at for c in self._counted for at, calls in c.lines.items() if at is not None and calls.tracked}
        found = attribute(dict(self._sampler.seen), self.roles.codes, self._step, tracked)
        total = sum(found.seconds.values()) or 1.0
        shares = {name: found.seconds[name] / total for name in ACCOUNTS if name in found.seconds}
        counted = min(self._counted, key=lambda c: c.seconds, default=None)
        each = total / max(self.steps - 1, 1)
        on_gpu = counted is not None and "cuda" in counted.devices
        model = sum(shares.get(name, 0.0) for name in ("forward", "backward", "optimiser")) * each
        model = min(model, self._cpu / max(self.steps - 1, 1))  # on a busy machine the rest is other programs' time
        computing = min((c.estimate_computing() for c in self._counted), default=0.0)
        workers = max((loader.num_workers for loader in self._loaders), default=0)
        if torch.get_num_threads() > count_cores():
            self._problems.append(f"torch computes in {torch.get_num_threads()} threads on {count_cores()} cores")
        problems = [*self._problems, self._sampler.problem, *(c.problem for c in self._counted)]
        return Seen(
            seconds=total,
            steps=self.steps,
            looks=self._sampler.looks,
            shares=shares,
            lines=self._name_workers(found, workers),
            inside=found.inside / total,
            python=self._find_python(found, counted, each),
            operators=counted.own_count if counted else math.nan,
            starting=max(0.0, 1 - computing / model) if counted and model else math.nan,
            float64=counted.wide_seconds / counted.seconds if counted and counted.seconds else 0.0,
            taken=self._find_taken(found, counted, total) if counted else (),
            batch_of_one=self._find_batch_of_one(found, counted),
            dense=max(counted.dense.items(), key=lambda item: item[1][1], default=None) if counted else None,
            threads=torch.get_num_threads() / count_cores(),
            threads_line=self._find_text(r"set_num_threads\(|OMP_NUM_THREADS"),
            gates=counted.gates if counted and not counted.recurrences else 0,
            waits=len(counted.waits) if counted else 0,
            wait_lines=tuple(self._line(at) for at in dict.fromkeys(counted.waits)) if counted else (),
            modes=tuple(sorted(set().union(*(c.modes for c in self._counted)))),
            mode_line=self._find_text(r"detect_anomaly|\bprofile\(|emit_nvtx"),
            kept=self._find_kept() or self._kept,
            growth=self._find_growth(),
            workers=workers,
            starts=len(self._starts),
            starts_line=self._line(self._starts[-1]) if self._starts and self._starts[-1] else None,
            loads_in_own_code=_loads_in_own_code(found),
            gpu_there=torch.cuda.is_available(),
            on_gpu=on_gpu,
            busy=sum(self._busy) / len(self._busy) if self._busy else math.nan,
            behind=sum(self._behind) / len(self._behind) if self._behind else math.nan,
            problems=tuple(dict.fromkeys(filter(None, problems))),
        )

    # While the loop runs: in its thread.

    def _after_step(self, optimizer, args, kwargs) -> None:
        others = self._optimizer is not None and optimizer is not self._optimizer
        if threading.get_ident() != self._thread or others or self._by_hand:
            return
        try:
            self._note_step(time.perf_counter(), sys._getframe(1))
        except Exception as error:  # told in the report; the person's step goes on
            self._problems.append(f"a step was not noted: {type(error).__name__}: {error}")

    def _note_step(self, now: float, frame: FrameType) -> None:
        self.steps += 1
        seen = self._count is None and self._sampler.end_step()
        if self._count is not None:
            self._stop_counting(now)
        if self.steps == 1:
            self._first, self._cpu_first = now, time.thread_time()
            self._sampler.restart()
        self._last = time.perf_counter()
        if seen:  # to ask for it after every step would cost a small one 1 % of its time
            self._cpu = time.thread_time() - self._cpu_first - self._cpu_lost
        if self.steps & (self.steps - 1) == 0:  # powers of two: ever more rarely
            self._step = self._step or self.roles.read(frame).own
            self._kept = self._find_kept() or self._kept  # at the end of a function its list of losses is gone
        if torch.cuda.is_initialized():
            self._ask_device()
        if self.steps in COUNTED and self._may_count():
            self._start_counting()

    def _may_count(self) -> bool:
        if any(c.count > MANY for c in self._counted):
            return False
        compiled = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        return not compiled.get("stats")  # a compiled step would be compiled anew under a mode

    def _start_counting(self) -> None:
        self._sampler.paused = True
        self._began, self._cpu_began = time.perf_counter(), time.thread_time()
        self._count = Operators(self.roles)
        self._count.__enter__()

    def _stop_counting(self, now: float) -> None:
        if self._count is None or not self._count.try_exit():
            return  # a mode of the person's is on top: at the next step perhaps
        self._counted.append(self._count)
        self._count = None
        self._sampler.forget()
        self._sampler.paused = False
        self._lost += time.perf_counter() - self._began
        self._cpu_lost += time.thread_time() - self._cpu_began

    def _follow(self, original, tensors, *args, **kwargs):
        """Stand in for torch.autograd.backward: tie a mark to the graph of a loss now and then."""
        now = time.perf_counter()
        if now - self._marked > self._marks_apart and threading.get_ident() == self._thread:
            self._marked = now
            if len(self._marks) > MOST_MARKS:
                self._marks, self._marks_apart = self._marks[::2], 2 * self._marks_apart
            self._mark(getattr(tensors, "grad_fn", None), self.roles.own_line(sys._getframe(2)))
        out = original(tensors, *args, **kwargs)
        if threading.get_ident() == self._thread:
            self._backwards += 1
            if self.steps == 0 and self._backwards > UNSTEPPED:
                self._by_hand = True
            if self._by_hand:
                self._note_step(time.perf_counter(), sys._getframe(2))
        return out

    def _mark(self, node, at: tuple[int, int] | None) -> None:
        """Tie marks to the graph of a loss and to what it was made of: a forecast may be kept, and its loss not."""
        for _ in range(FOLLOWED):
            if node is None or not node.next_functions:
                return
            mark = _Mark()
            node.metadata["cpbkit"] = mark
            self._marks.append((self.steps, weakref.ref(mark), at))
            del mark
            node = next((n for n, _ in node.next_functions if n is not None and n.next_functions), None)

    def _note_loader(self, original, loader):
        if loader not in self._loaders:
            self._loaders.append(loader)
        if loader.num_workers and not (loader.persistent_workers and loader._iterator):
            self._starts.append(self.roles.own_line(sys._getframe(2)))
        return original(loader)

    def _ask_device(self) -> None:
        """Ask without waiting whether the device is done with the step before."""
        if self._event is not None:
            self._behind.append(not self._event.query())
            self._event = None
        elif self.steps % 8 == 0 and not torch.cuda.is_current_stream_capturing():
            event = self._event = torch.cuda.Event()
            event.record()

    # While the loop runs: in the sampler's thread.

    def _tick(self, now: float) -> None:
        if now - self._ticked < TICK:
            return
        self._ticked = now
        memory = device_memory(0)[0]
        self._memory.append((self.steps, host_use()[0] if math.isnan(memory) else memory))
        if self._nvml:
            ask = Ask(self._nvml, self._problems)
            handle = ask("devices", lambda: nvml_handles(self._nvml)[torch.cuda.current_device()])
            rates = handle and ask("utilisation", lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle))
            self._busy += [rates.gpu / 100] if rates else []
        if self._draws and now - self._shown > LIVE and self.steps > 1:
            self._draw(now)

    def _draw(self, now: float) -> None:
        found = attribute(dict(self._sampler.seen), self.roles.codes, self._step)
        total = sum(found.seconds.values()) or 1.0
        parts = [f"{(self.steps - 1) / max(self.seconds, 1e-9):.1f} steps/s"]
        parts += [f"{name} {found.seconds[name] / total:.0%}" for name in ACCOUNTS if found.seconds.get(name)]
        parts += [f"device busy {self._busy[-1]:.0%}"] if self._busy else []
        parts += [f"{self._memory[-1][1] / 1e9:.2f} GB"]
        text = " · ".join(parts)
        sys.stderr.write("\r" + text.ljust(len(self._live)))
        self._live = text
        self._shown = now + 200 * (time.perf_counter() - now)  # so that it takes at most half a percent

    def _clear_line(self) -> None:
        if self._live:
            sys.stderr.write("\r" + " " * len(self._live) + "\r")

    # What the looks add up to.

    def _line(self, at: tuple[int, int], account: str = "", seconds: float = 0.0) -> Line:
        file = self.roles.codes[at[0]].co_filename
        return Line(file, at[1], source.read_line(file, at[1]), account, seconds)

    def _find_python(self, found: Attribution, counted: Operators | None, each: float) -> tuple[Line, ...]:
        """Return lines in the step whose time is not torch's: of a known kind, or slow for the operators they call."""
        calls: dict[tuple[str, int], tuple[int, float]] = {}
        for at, c in counted.lines.items() if counted else ():
            if at:
                key = self.roles.codes[at[0]].co_filename, at[1]
                count, seconds = calls.get(key, (0, 0.0))
                calls[key] = count + c.count, seconds + c.seconds
        total = sum(found.seconds.values()) or 1.0
        # On a busy machine a line takes longer than the processor time by which its operators are timed.
        running = min(1.0, self._cpu / max(self.seconds, 1e-9))
        python = []
        for line in found.lines:
            phase = line.account in ("forward", "backward", "optimiser")
            if not (line.account == "rest" or phase) or (phase and line.by_torch and not line.kind):
                continue
            count, seconds = calls.get((line.file, line.line), (0, 0.0))
            spent = line.seconds / total * each
            computing = seconds > 0.3 * spent * running or spent < SLOW_LINE * (count + 1)
            if counted is None:
                computing = not line.kind
            if not computing and (line.account == "rest" or line.kind or count < 50) and not _only_passes(line):
                python.append(line)
        return tuple(python)

    def _find_taken(self, found: Attribution, counted: Operators, total: float) -> tuple[Taken, ...]:
        """Return loops that go through the first axis of a batch, and their share of the time."""
        taken = []
        for (at, length), rows in counted.taken.items():
            line = self._line(at)
            path = [n for n in source.find_path(line.file, line.line) if isinstance(n, INNER_LOOPS)]
            spans = [source.to_span(line.file, n) for n in path]
            # Neither the loop over batches itself, nor one around it.
            spans = [s for s in spans if found.loop is None or not s.holds(found.loop.file, found.loop.start)]
            if length < 8 or rows < 0.9 * length or not spans or _goes_through_time(line, spans[-1]):
                continue
            share = sum(self._under(spans[-1]).values()) / total
            taken.append(Taken(line, rows, share))
        return tuple(sorted(taken, key=lambda t: -t.share))

    def _under(self, span: source.Span) -> dict:
        files = [code.co_filename for code in self.roles.codes]
        return {
            s: seconds
            for s, seconds in dict(self._sampler.seen).items()
            if any(span.holds(files[number], line) for number, line in s.own)
        }

    def _find_batch_of_one(self, found: Attribution, counted: Operators | None) -> Line | None:
        loaded = any(loader.batch_size == 1 for loader in self._loaders)
        if loaded and found.loop:
            file, at = found.loop.file, found.loop.start
            return Line(file, at, source.read_line(file, at), "data", 0.0)
        ones = loaded or (counted is not None and counted.rows == 1)
        return next((line for line in found.lines if line.account == "forward"), None) if ones else None

    def _find_text(self, pattern: str) -> Line | None:
        """Return the first line with a text in the files of the person's that were seen to run."""
        for file in dict.fromkeys(code.co_filename for code in self.roles.codes):
            for at, text in enumerate(linecache.getlines(file), 1):
                if re.search(pattern, text.partition("#")[0]):
                    return Line(file, at, text.strip(), "outside", 0.0)
        return None

    def _name_workers(self, found: Attribution, workers: int) -> tuple[Line, ...]:
        """Return the lines; of a loader with workers, whose own lines are in other processes, its samples' first."""
        loader = next((x for x in self._loaders if x.num_workers), None)
        method = getattr(type(loader.dataset), "__getitem__", None) if loader is not None else None
        code = getattr(method, "__code__", None)
        if not workers or code is None or self.roles.find(code)[0] != "own":
            return found.lines
        text = source.read_line(code.co_filename, code.co_firstlineno)
        waited = Line(code.co_filename, code.co_firstlineno, text, "data", found.seconds.get("data", 0.0))
        return tuple(sorted((waited, *found.lines), key=lambda line: -line.seconds))

    def _find_kept(self) -> tuple[str, ...]:
        """Return what keeps the graphs of losses whose steps are long over."""
        old = {step: at for step, _, at in self._marks if step < self.steps - 3}
        alive = {step: at for step, ref, at in self._marks if step in old and ref() is not None}
        if len(old) < 4 or len(alive) < 0.8 * len(old):
            return ()
        at = alive[max(alive)]
        if at is None:
            return ("something",)
        file, line = self.roles.codes[at[0]].co_filename, at[1]
        match = re.search(r"([\w.]+)\.backward|backward\(\s*([\w.]+)", source.read_line(file, line))
        loss = (match[1] or match[2]) if match else "loss"
        keeping = source.find_keeping(file, line, loss) or source.find_keeping(file, line, "")
        kept = self._line((at[0], keeping)) if keeping else self._line(at)
        return (f"{kept.place}  {kept.text}",)

    def _find_growth(self) -> float:
        """Return the bytes a step by which memory grows, 0 where it does not, after a first half to settle in."""
        points = self._memory[len(self._memory) // 2 :]
        steps = points[-1][0] - points[0][0] if len(points) > 1 else 0
        if steps < len(points) or len(points) < 8 or points[-1][1] - points[0][1] < GROWN:
            return 0.0
        slope, leaks = growth([size * (len(points) - 1) / steps for _, size in points])
        return slope if leaks else 0.0


def watch(*things, live: bool = True, tell: bool = True) -> Watch:
    """Watch a training loop as it stands: `with watch(model, optimizer) as w:` around it, or
    `for batch in watch(loader, model, optimizer):` in place of the loader.

    At the end the verdict is written to the error stream, and is `w.verdict` and `w.report()`. Nothing of the loop is
    called twice, moved or changed; hooks of torch are put in at the start and taken out at the end.
    live: write a line on a terminal or in a notebook while it runs. tell: write the verdict at the end.
    """
    loader = model = optimizer = None
    for thing in things:
        if isinstance(thing, nn.Module):
            model = thing
        elif isinstance(thing, torch.optim.Optimizer):
            optimizer = thing
        elif loader is None and hasattr(thing, "__iter__"):
            loader = thing
        else:
            raise TypeError(f"watch takes a loader, a model and an optimiser; got {type(thing).__name__}")
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    return Watch(loader, model, optimizer, live, tell, place)


@contextlib.contextmanager
def _replaced(holder, name: str, stand_in: Callable) -> Iterator[None]:
    """Call `stand_in(original, ...)` in place of an attribute of torch."""
    original = getattr(holder, name)

    def call(*args, **kwargs):
        return stand_in(original, *args, **kwargs)

    setattr(holder, name, call)
    try:
        yield
    finally:
        if getattr(holder, name) is call:  # else somebody has put another one on top, which calls this one
            setattr(holder, name, original)


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _can_draw() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _only_passes(line: Line) -> bool:
    """Say whether a line only starts torch's own work, whose time is torch's whatever was counted."""
    return bool(re.search(r"\.backward\(|\.step\(|zero_grad|clip_grad", line.text)) and not line.kind


def _goes_through_time(line: Line, span: source.Span) -> bool:
    head = source.read_line(line.file, span.start)
    return bool(re.search(r"\bfor (t|step|time|ts|k)\b", head)) or bool(re.search(r"unbind\(\s*(dim=)?1", head))


def _loads_in_own_code(found: Attribution) -> bool:
    data = [line for line in found.lines if line.account == "data"]
    own = sum(line.seconds for line in data if not (found.loop and line.file == found.loop.file
                                                   and found.loop.start <= line.line <= found.loop.head))  # fmt: skip
    return own > 0.5 * sum(line.seconds for line in data)
