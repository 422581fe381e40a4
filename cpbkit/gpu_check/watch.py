"""A person's own training loop, watched as it runs: what it waits for, the line that costs the time, and the cure."""

import contextlib
import inspect
import itertools
import linecache
import math
import re
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import Roles, Sampler
from cpbkit.gpu_check.diagnosis import Diagnosis
from cpbkit.gpu_check.findings import check_environment
from cpbkit.gpu_check.graphs import ThrownAway, find_weights
from cpbkit.gpu_check.judge import judge_loop
from cpbkit.gpu_check.numbers import Policy
from cpbkit.gpu_check.operators import Operators, is_capturing
from cpbkit.gpu_check.seen import Seen, Taken
from cpbkit.gpu_check.shares import ACCOUNTS, WAITING, Attribution, Line, attribute, find_kind
from cpbkit.gpu_check.soundness import OPTIMIZER, Soundness, Unsound, find_sorted, weights_of
from cpbkit.gpu_check.source import INNER_LOOPS
from cpbkit.hardware.environment import count_cores, in_notebook
from cpbkit.hardware.monitor import device_memory, growth, host_use
from cpbkit.hardware.nvml import Ask, load_nvml, nvml_handles
from cpbkit.texts import wrapped

COUNTED = (3, 8, 16)  # steps after which the next one's operators are counted
MANY = 5000  # operators a step: counting them once is enough
MOST_MARKS = 1000  # then every second one is let go
KEPT = 0.08  # of the graphs of earlier steps: of every tenth step, say
FOLLOWED = 16  # nodes of a loss's graph
TURNS = 50  # steps of other optimisers without one of the first: its training is over
UNSTEPPED = 8  # passes backward without an optimiser of torch's: then each of them counts as a step, until there is one
MARKS = 0.02  # s between two losses whose graphs are followed
TICK = 0.5  # s between two looks at the memory
TAKEN = 4  # times that a line may take each row of a batch; a table that is filled by element takes them more often
SAMPLES = 8  # calls of a model in a step
PAIRS = 200  # operators that a loop over pairs starts in a step
FEW_ROWS = 4  # of the largest product: more may be anything, such as steps in time
BESIDE = 0.35, 0.20  # share of the time above which torch's work beside the model is told: a line's, one's in a loop
LIVE = 2.0  # s between two live lines, at the least
GROWN = 100e6  # bytes of the process: less is its allocators settling in
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PADDING = r"\]\s*\*\s*\(.*\blen\(|\bpad\(|max_length|(zeros|full)\(.*(?i:max)|\.ljust\("  # lines that fill rows up
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
        self._kept = ""
        self._marks_apart = MARKS
        self._main = optimizer  # whose steps count
        self._turns = 0  # steps of others since its last
        self._turned = 0  # steps at the last of these
        self._optimizers: dict[int, set[int]] = {}  # identities of the weights that each one moves
        self._past: set[int] = set()  # identities of the weights whose training is over
        self._soundness = Soundness()
        self._thrown = ThrownAway()
        self._stepped = 0  # steps at the last pass backward
        self._reached: dict[int, int] = {}  # identities of the weights that backward reaches -> their numbers
        self._unregistered = False  # layers that the loss reaches lie in a plain list
        self._second_graph = False  # a pass backward builds one, as with create_graph=True
        self._weights: list[weakref.ref] = []  # weights that backward reaches
        self._by_hand = False  # weights are moved without an optimiser of torch's
        self._first = self._last = math.nan  # time of the first and the last noted step
        self._due = self._mark_due = True  # something is to be noted at the next step, at the next pass backward
        self._again = 1  # steps after which its lines are read again
        self._hooks: list[tuple[int, int]] = []  # (steps, the most hooks of one module) at these
        self._lost = 0.0  # seconds of steps that were counted
        self._cpu = self._cpu_first = self._cpu_lost = 0.0  # s of the training thread's own
        self._count: Operators | None = None  # under way
        self._began = 0.0
        self._counted: list[Operators] = []
        self._step: tuple[tuple[int, int], ...] = ()  # own lines at an optimiser's step
        self._backward: tuple[tuple[int, int], ...] = ()  # and at a pass backward
        self._marks: list[tuple[int, weakref.ref, tuple[int, int] | None]] = []  # (pass backward, mark, line)
        self._memory: list[tuple[int, float]] = []
        self._busy: list[float] = []
        self._event: torch.cuda.Event | None = None  # the end of a step that the device was not done with
        self._behind: list[bool] = []
        # Loaders, with the own lines at which their batches were asked for.
        self._loaders: dict[DataLoader, tuple[int, int] | None] = {}
        self._starts: list[tuple[int, int] | None] = []  # own lines at which workers were started
        self._problems: list[str] = []
        self._ticked = self._marked = self._shown = -math.inf
        self._live, self._slot = "", None
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
        self._stop_counting(whole=False)
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
            if in_notebook():
                self._show(self.report())
            else:
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
    def settled(self) -> bool:
        """Whether it looks as rarely as it does from now on."""
        return self._sampler.settled

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
        lines += [f"  also: {text}" for text in d.beside]
        return wrapped(lines)

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
        moving = set().union(*(c.moving for c in self._counted)) - tracked
        others, held = self._find_others(), self._find_held()
        looks = dict(self._sampler.seen)
        found = attribute(looks, self.roles.codes, self._step, tracked, self._backward, others, held, moving)
        total = sum(found.seconds.values()) or 1.0
        shares = {name: found.seconds[name] / total for name in ACCOUNTS if name in found.seconds}
        whole = max((c.count for c in self._counted), default=0)  # some steps may be parts, as of several optimisers
        counted = min((c for c in self._counted if c.count >= whole / 2), key=lambda c: c.seconds, default=None)
        each = total / max(self.steps - 1, 1)
        on_gpu = counted is not None and "cuda" in counted.devices
        model = sum(shares.get(name, 0.0) for name in ("forward", "backward", "optimiser")) * each
        model = min(model, self._cpu / max(self.steps - 1, 1))  # on a busy machine the rest is other programs' time
        computing = counted.estimate_computing() if counted else 0.0
        workers = max((loader.num_workers for loader in self._loaders), default=0)
        if torch.get_num_threads() > count_cores():
            self._problems.append(f"torch computes in {torch.get_num_threads()} threads on {count_cores()} cores")
        thrown, thrown_at = self._thrown.find()
        repeated, within, repeated_at = self._find_repeated()
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
            starting=counted.estimate_starting(computing, model) if counted and model else math.nan,
            float64=counted.wide_seconds / counted.seconds if counted and counted.seconds else 0.0,
            taken=self._find_taken(found, counted, total) if counted else (),
            pairs=self._find_pairs(found, counted) if counted else None,
            dense=max(counted.dense.items(), key=lambda item: item[1][1], default=None) if counted else None,
            threads=torch.get_num_threads() / count_cores(),
            threads_line=self._find_text(r"set_num_threads\(|(OMP|MKL)_NUM_THREADS"),
            unused=self._find_unused(),
            dense_line=self._find_text(r"\bEmbedding(Bag)?\("),
            thrown=thrown,
            thrown_line=self._line(thrown_at) if thrown_at else None,
            repeated=repeated * sum(shares.get(name, 0.0) for name in ("forward", "backward", "optimiser")),
            repeated_within=within,
            repeated_line=self._line(repeated_at) if repeated_at else None,
            optimizer_line=self._find_text(OPTIMIZER),
            unsound=tuple(self._find_unsound(found.loop)),
            float64_line=self._find_text(r"\.double\(\)|float64|set_default_dtype|from_numpy\("),
            small_batch=self._find_small_batch(found, counted),
            gates=counted.gates if counted and not counted.recurrences else 0,
            waits=len(counted.waits) if counted else 0,
            wait_lines=tuple(self._line(at) for at in dict.fromkeys(counted.waits)) if counted else (),
            modes=tuple(sorted(set().union(*(c.modes for c in self._counted)))),
            mode_line=self._find_text(
                r"detect_anomaly|\bprofile\(|emit_nvtx|Profile\(|setprofile|settrace|tracemalloc"
            ),
            hooks=_rise(self._hooks),
            hooks_line=self._find_text(r"\.register_\w*hook\("),
            padding=min((c.padding[:2] for c in self._counted if c.padding and not c.packed), default=(0.0, False)),
            padding_line=self._find_padding_line(),
            thread=self._find_thread(),
            denormal=self._find_denormal(counted) if counted else (0.0, None),
            one_by_one=self._find_calls(found) if counted else (0, None),
            waiting=max(0.0, 1 - self._cpu / max(self.seconds, 1e-9)),
            last=max((c.last for c in self._counted), default=0),
            last_line=self._find_text(r"\[:, *-1"),
            graphs=found.graphs,
            asked=found.asked,
            fused="fused" in inspect.signature(type(self._main)).parameters if self._main else False,
            kept=self._find_kept() or self._kept,
            growth=self._find_growth(),
            held=self._find_holding(),
            second_graph=self._find_second_graph(),
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
        # A step of less than a millisecond pays for every line here: between two looks it is counted, and no more.
        if self._thrown.waits:
            self._thrown.note_step(id(optimizer))
        if not self._due and optimizer is self._main and self.steps > COUNTED[-1]:
            self.steps += 1
            return
        if not self._is_watched():
            return
        frame = sys._getframe(1)
        with self._unharmed("a step"):
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = set(map(id, weights_of(optimizer)))
            if self._by_hand:  # steps were only rare, as where gradients are added up
                self._by_hand, self.steps = False, 0
            if self._soundness.note_optimizer(optimizer, self._main):
                self._main = optimizer
            # Of several optimisers, as of a GAN, the first one's steps count, while it takes any.
            self._turns = (self._turns if self.steps == self._turned else 0) + (optimizer is not self._main)
            self._turned = self.steps
            if self._main is None or (self._optimizer is None and self._turns > TURNS):
                self._past |= self._optimizers.get(id(self._main), set())
                self._past -= self._optimizers[id(optimizer)]
                self._main = optimizer
            if optimizer is self._main:
                self._note_step(time.perf_counter(), frame, optimizer)

    def _is_watched(self) -> bool:
        """Say whether this is the thread that trains: that of the first step, which need not be the main one."""
        if not self.steps and not self._backwards:
            self._thread = self._sampler.watched = threading.get_ident()
        return threading.get_ident() == self._thread

    def _note_step(self, now: float, frame: FrameType, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.steps += 1
        self._due = False
        seen = self._sampler.end_step() if self._count is None else []
        if self._count is not None:
            self._stop_counting()
        if self.steps == 1:
            self._first, self._cpu_first = now, time.thread_time()
            self._sampler.restart()
        self._last = time.perf_counter()
        if seen:  # to ask for it after every step would cost a small one 1 % of its time
            self._cpu = time.thread_time() - self._cpu_first - self._cpu_lost
        if self.steps >= self._again:  # ever more rarely
            self._again = 2 * self.steps
            if optimizer is not None:
                self._soundness.note_gradients(weights_of(optimizer))
            elif self._reached:
                self._soundness.note_gradients(self._find_weights())
            self._hooks.append((self.steps, self._count_hooks()))
            self._step = self.roles.read(frame).own  # the last one: a first step may be a trial, or of another loop
            # At the end of a function its model and its list of losses are gone.
            self._kept = self._find_kept() or self._kept
            self._unregistered = self._unregistered or self._has_unregistered()
        if torch.cuda.is_initialized():
            self._ask_device()
        if self.steps in COUNTED and self._may_count():
            self._start_counting()
        self._due = self._due or self._count is not None or self._event is not None
        if optimizer is not None:
            self._soundness.note_step(optimizer, {self.roles.modules[look.root]() for look in seen if look.root})

    def _may_count(self) -> bool:
        if any(c.count > MANY for c in self._counted):
            return False
        compiled = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        return not compiled.get("stats")  # a compiled step would be compiled anew under a mode

    def _start_counting(self) -> None:
        self._sampler.paused = True
        self._began, self._cpu_began = time.perf_counter(), time.thread_time()
        weights = (
            list(weights_of(self._main)) if self._main else [w for ref in self._weights if (w := ref()) is not None]
        )
        self._count = Operators(self.roles, weights)
        self._count.begin()

    def _stop_counting(self, whole: bool = True) -> None:
        if self._count is None or not self._count.try_exit():
            return  # a mode of the person's is on top: at the next step perhaps
        self._counted += [self._count] if whole else []
        self._count = None
        self._sampler.forget()
        self._sampler.paused = False
        self._lost += time.perf_counter() - self._began
        self._cpu_lost += time.thread_time() - self._cpu_began

    def _follow(self, original, tensors, *args, **kwargs):
        """Stand in for torch.autograd.backward: look at the graph of a loss now and then."""
        frame = sys._getframe(2)
        due = self._mark_due and self._is_watched()
        if due or self._thrown.waits or (self._by_hand and not self._reached):
            with self._unharmed("a pass backward"):
                self._thrown.note_backward()
                if due:
                    self._second_graph = bool(kwargs.get("create_graph") or args[2:3] == (True,))
                    self._note_loss(tensors, frame)
                # Without an optimiser nothing else tells what moves, and the first steps' operators are counted.
                if not self._reached and self.steps > 1:
                    weights = find_weights(getattr(tensors, "grad_fn", None))
                    self._reached = {number: weight.numel() for number, weight in weights.items()}
                    self._weights = [weakref.ref(weight) for weight in weights.values()]
        out = original(tensors, *args, **kwargs)
        if threading.get_ident() == self._thread:
            self._backwards += 1
            self._stepped = self.steps
            if self.steps == 0 and self._backwards > UNSTEPPED:
                self._by_hand = True
            if due or self._by_hand:
                with self._unharmed("a pass backward"):
                    if due and self._main is not None and not is_capturing():
                        self._soundness.note_end(self._main)
                    if self._by_hand:
                        self._note_step(time.perf_counter(), frame)
        return out

    @contextlib.contextmanager
    def _unharmed(self, what: str) -> Iterator[None]:
        """Tell a mistake of the watch's own in the report; the person's step goes on."""
        try:
            yield
        except Exception as error:
            problem = f"{what} was not noted: {type(error).__name__}: {error}"
            if problem not in self._problems:
                self._problems.append(problem)

    def _note_loss(self, loss, frame: FrameType) -> None:
        """Read a loss before its pass backward, and tie a mark to its graph."""
        self._mark_due, self._marked = False, time.perf_counter()
        if len(self._marks) > MOST_MARKS:
            self._marks, self._marks_apart = self._marks[::2], 2 * self._marks_apart
        self._backward = self.roles.read(frame).own
        if self._count is None and not is_capturing():
            self._soundness.note_loss(loss)
            if self.steps > self._stepped and len(self._optimizers) == 1 and self._main is not None:
                self._soundness.note_start(self._main)  # of several, one's gradients wait while another's are made
        graph, line = getattr(loss, "grad_fn", None), next(iter(self._backward), None)
        self._mark(graph, line)
        self._thrown.note_graph(graph, self._optimizers, line)

    def _mark(self, node, at: tuple[int, int] | None) -> None:
        """Tie marks to the graph of a loss and to what it was made of: a forecast may be kept, and its loss not."""
        for _ in range(FOLLOWED):
            if node is None or not node.next_functions:
                return
            mark = _Mark()
            node.metadata["cpbkit"] = mark
            self._marks.append((self._backwards, weakref.ref(mark), at))
            del mark
            node = next((n for n, _ in node.next_functions if n is not None and n.next_functions), None)

    def _note_loader(self, original, loader):
        at = self._loaders[loader] = self.roles.own_line(sys._getframe(2))
        if loader.num_workers and not (loader.persistent_workers and loader._iterator):
            self._starts.append(at)
        return original(loader)

    def _ask_device(self) -> None:
        """Ask without waiting whether the device is done with the step before."""
        if self._event is not None:
            self._behind.append(not self._event.query())
            self._event = None
        elif not is_capturing():
            event = self._event = torch.cuda.Event()
            event.record()

    # While the loop runs: in the sampler's thread.

    def _tick(self, now: float) -> None:
        self._due, self._mark_due = True, self._mark_due or now - self._marked > self._marks_apart
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
        found = attribute(dict(self._sampler.seen), self.roles.codes, self._step, (), self._backward)
        total = sum(found.seconds.values()) or 1.0
        parts = [f"{(self.steps - 1) / max(self.seconds, 1e-9):.1f} steps/s"]
        parts += [f"{name} {found.seconds[name] / total:.0%}" for name in ACCOUNTS if found.seconds.get(name)]
        parts += [f"device busy {self._busy[-1]:.0%}"] if self._busy else []
        parts += [f"{self._memory[-1][1] / 1e9:.2f} GB"]
        text = " · ".join(parts)
        self._show(text)
        self._shown = now + 200 * (time.perf_counter() - now)  # so that it takes at most half a percent

    def _clear_line(self) -> None:
        if self._live:
            self._show("")
            if not in_notebook():
                sys.stderr.write("\r")

    def _show(self, text: str) -> None:
        """Put a text in the place of the last one; a notebook would show what stands on the error stream in red."""
        if not in_notebook():
            sys.stderr.write("\r" + text.ljust(len(self._live)))
        elif self._slot:
            self._slot.update({"text/plain": text}, raw=True)
        else:
            from IPython.display import display

            self._slot = display({"text/plain": text}, raw=True, display_id=True)
        self._live = text

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
            spent = line.seconds / total * each * running
            computing = seconds > 0.3 * spent or spent < SLOW_LINE * (count + 1)
            if counted is None:
                computing = not line.kind
            if (
                computing
                and line.account == "rest"
                and line.seconds > BESIDE[bool(line.around)] * total
                and not _only_passes(line)
            ):
                python.append(line)  # torch's work, and none that a loss comes from
            elif not computing and (line.account == "rest" or line.kind or count < 50) and not _only_passes(line):
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
            if length < 8 or not 0.9 <= rows / length <= TAKEN or not spans or _goes_through_time(line, spans[-1]):
                continue
            share = sum(self._under(spans[-1]).values()) / total
            taken.append(Taken(line, rows, share))
        return tuple(sorted(taken, key=lambda t: -t.share))

    def _find_pairs(self, found: Attribution, counted: Operators) -> Line | None:
        """Return the loop over pairs of a batch that most operators forward are started in."""
        loops: dict[source.Span, int] = {}
        forward = 0
        for at, calls in counted.lines.items():
            line = at and self._line(at)
            if not line or _only_passes(line):
                continue
            forward += calls.count
            span = source.find_pairs(line.file, line.line)
            if span and not (found.loop and span.holds(found.loop.file, found.loop.start)):
                loops[span] = loops.get(span, 0) + calls.count
        span = max(loops, key=loops.__getitem__, default=None)
        if span is None or loops[span] < max(PAIRS, forward / 2):
            return None
        return Line(span.file, span.start, source.read_line(span.file, span.start), "forward", 0.0)

    def _under(self, span: source.Span) -> dict:
        files = [code.co_filename for code in self.roles.codes]
        return {
            s: seconds
            for s, seconds in dict(self._sampler.seen).items()
            if any(span.holds(files[number], line) for number, line in s.own)
        }

    @property
    def _moved(self) -> set[int]:
        """Identities of the weights that any optimiser moves."""
        return set().union(*self._optimizers.values())

    def _find_others(self) -> set[int]:
        """Return modules that are frozen or whose training is over, such as a teacher, by identity."""
        weights = {number: list(model.parameters()) for number, model in self.roles.alive().items()}
        return {
            number
            for number, held in weights.items()
            if held and all(not weight.requires_grad or id(weight) in self._past for weight in held)
        }

    def _find_held(self) -> set[int]:
        """Return modules with weights that an optimiser moves, by identity."""
        moved = self._moved - self._past
        alive = self.roles.alive().items()
        return {number for number, model in alive if not moved.isdisjoint(map(id, model.parameters()))}

    def _find_unused(self) -> float:
        """Return the share of the gradients, in numbers, that are computed for weights which no optimiser moves."""
        moved = self._moved
        if self._by_hand or not moved:
            return 0.0
        unused = sum(size for weight, size in self._reached.items() if weight not in moved)
        return unused / max(sum(self._reached.values()), 1)

    def _find_repeated(self) -> tuple[float, bool, tuple[int, int] | None]:
        """Return (share of the operators' time that makes the same numbers again, whether within one step, the line).

        The same as at the steps before, of what is made of no weight; or as before in the same step.
        """
        if len(self._counted) < 2:
            return 0.0, False, None
        same = set.intersection(*({key for key, r in c.results.items() if not r.tracked} for c in self._counted))
        found = []
        for within in (False, True):
            lines: defaultdict[tuple[int, int], float] = defaultdict(float)
            shares = []
            for c in self._counted:
                again = [(r, r.seconds * (r.calls - 1) / r.calls) for r in c.results.values() if r.calls > 1]
                if not within:
                    again = [(c.results[key], c.results[key].seconds) for key in same]
                for result, seconds in again:
                    lines[result.again if within else result.line] += seconds
                shares.append(sum(seconds for _, seconds in again) / c.seconds if c.seconds else 0.0)
            found.append((median(shares), within, max(lines, key=lines.__getitem__, default=None)))
        return max(found, key=lambda each: each[0])

    def _find_unsound(self, loop: source.Span | None) -> Iterator[tuple[Unsound, Line | None]]:
        backward = self._line(self._backward[0]) if self._backward else None
        wrong = {reason: at for c in self._counted for reason, at in c.wrong.items()}
        for loader, at in self._loaders.items():
            file = self.roles.codes[at[0]].co_filename if at else ""
            if at and loop and loop.holds(file, at[1]) and at[1] <= loop.head and find_sorted(loader):
                wrong["SORTED"] = at
        if self._unregistered and self._backward:
            wrong["UNREGISTERED"] = self._backward[0]
        both = Counter(at for loader, at in self._loaders.items() if at and isinstance(loader.sampler, RandomSampler))
        if len(self._optimizers) == 1 and max(both.values(), default=0) == 2 and self._soundness.stalls:
            wrong["UNPAIRED"] = max(both, key=both.__getitem__)
        for found in self._soundness.find(wrong):
            line = self._line(wrong[found.reason]) if found.reason in wrong else None
            if found.pattern and not (line and re.search(found.pattern, line.text)):
                line = self._find_text(found.pattern) or line
            yield found, line or backward

    def _has_unregistered(self) -> bool:
        """Say whether a part of a model has layers in a plain list or dictionary, which the loss reaches."""
        moved, reached = self._moved, set(self._reached)
        held = (vars(part).items() for model in self.roles.alive().values() for part in model.modules())
        collections = (thing for each in held for name, thing in each if not name.startswith("_"))
        things = (c.values() if isinstance(c, dict) else c for c in collections if isinstance(c, (list, tuple, dict)))
        layers = (layer for each in things for layer in each if isinstance(layer, nn.Module))
        weights = {id(weight) for layer in layers for weight in layer.parameters()}
        return bool(moved) and bool(weights & reached) and not weights & moved

    def _find_padding_line(self) -> Line | None:
        at = next((c.padding[2] for c in self._counted if c.padding), None)
        return at and (self._find_text(PADDING) or self._line(at))

    def _count_hooks(self) -> int:
        """Return the most hooks that one weight has, or one module of a model that was seen to run."""
        parts = {part for model in self.roles.alive().values() for part in model.modules()}
        weights = list(weights_of(self._main)) if self._main else []
        numbers = [sum(len(getattr(part, name)) for name in HOOKS) for part in parts]
        return max([*numbers, *(len(weight._backward_hooks or ()) for weight in weights)], default=0)

    def _find_small_batch(self, found: Attribution, counted: Operators | None) -> tuple[int, Line | None]:
        """Return the samples of a batch, by its loader or the largest product of the model, and the line to change."""
        sizes = [loader.batch_size for loader in self._loaders if loader.batch_size]
        rows = counted.rows if counted and counted.rows <= FEW_ROWS else 0
        rows = min(filter(None, (rows, max(sizes, default=0))), default=0)
        line = self._find_text(rf"batch_size\s*=\s*{rows}\b") if sizes else None
        line = line or (self._find_text(r"\bDataLoader\((?!.*batch_size)") if sizes and rows == 1 else None)
        if line is None and found.loop:
            file, at = found.loop.file, found.loop.start
            line = Line(file, at, source.read_line(file, at), "data", 0.0)
        return rows, line

    def _find_text(self, pattern: str) -> Line | None:
        """Return the first line with a text in the person's functions that were seen to run, else in their files."""
        codes = self.roles.codes
        seen = ((code.co_filename, at) for code in codes for at in sorted({at for *_, at in code.co_lines() if at}))
        files = dict.fromkeys(code.co_filename for code in codes)
        rest = ((file, at) for file in files for at in range(1, len(linecache.getlines(file)) + 1))
        for file, at in itertools.chain(seen, rest):
            text = source.read_line(file, at)
            if re.search(pattern, text.partition("#")[0]) and not text.startswith(("import ", "from ")):
                return Line(file, at, text, "outside", 0.0)
        return None

    def _name_workers(self, found: Attribution, workers: int) -> tuple[Line, ...]:
        """Return the lines; of a loader with workers, whose own lines are in other processes, its samples' first."""
        loader = next((x for x in self._loaders if x.num_workers), None)
        data, code = getattr(loader, "dataset", None), None
        while data is not None and code is None:  # a Subset holds the person's own
            made = getattr(type(data), "__getitem__", None) or getattr(type(data), "__iter__", None)
            code = next((c for c in (getattr(made, "__code__", None),) if c and self.roles.find(c)[0] == "own"), None)
            data = getattr(data, "dataset", None)
        if not workers or code is None:
            return found.lines
        text = source.read_line(code.co_filename, code.co_firstlineno)
        waited = Line(code.co_filename, code.co_firstlineno, text, "data", found.seconds.get("data", 0.0))
        return tuple(sorted((waited, *found.lines), key=lambda line: -line.seconds))

    def _find_kept(self) -> str:
        """Return what keeps the graphs of losses whose steps are long over."""
        each = 1 if self._by_hand else math.ceil(self._backwards / max(self.steps, 1))  # passes backward a step
        old = {made: at for made, _, at in self._marks if made < self._backwards - 3 * each}
        alive = {made: at for made, ref, at in self._marks if made in old and ref() is not None}
        # Some may be kept for a while, or until the garbage is collected; those of the beginning are kept on purpose.
        if len(alive) < 4 or len(alive) < KEPT * len(old) or min(alive) > self._backwards / 4:
            return ""
        at = alive[max(alive)]
        if at is None:
            return "something"
        file, line = self.roles.codes[at[0]].co_filename, at[1]
        if "retain_graph" in source.read_line(file, line):  # a state is carried on with its graph, and nothing added
            kept = self._line(at)
            return f"{kept.place}  {kept.text}"
        match = re.search(r"([\w.]+)\.backward|backward\(\s*([\w.]+)", source.read_line(file, line))
        loss = (match[1] or match[2]) if match else "loss"
        keeping = source.find_keeping(file, line, loss) or source.find_keeping(file, line, "")
        kept = self._line((at[0], keeping)) if keeping else self._find_text(r"\.register_\w*hook\(") or self._line(at)
        return f"{kept.place}  {kept.text}"

    def _find_denormal(self, counted: Operators) -> tuple[float, Line | None]:
        line = counted.denormal_line
        return counted.denormal_seconds / max(counted.seconds, 1e-9), self._line(line) if line else None

    def _find_calls(self, found: Attribution) -> tuple[int, Line | None]:
        """Return the calls of a model in a step from one line of a loop that does not go through time."""
        for at, calls in max((c.calls for c in self._counted), key=Counter.total).most_common(1):
            line = self._line(at)
            loops = source.find_loops(line.file, line.line)
            inner = [x for x in loops if found.loop is None or not x.holds(found.loop.file, found.loop.start)]
            if calls >= SAMPLES and inner and not _goes_through_time(line, inner[-1]):
                return calls, line
        return 0, None

    def _find_thread(self) -> tuple[float, Line | None]:
        """Return (looks at another thread that was running a line of the person's, a look; the line seen most)."""
        running = {
            at: n for at, n in dict(self._sampler.others).items() if find_kind(self._line(at).text, "") != WAITING
        }
        line = max(running, key=running.__getitem__, default=None)
        return sum(running.values()) / max(self._sampler.looks, 1), line and self._line(line)

    def _find_weights(self) -> list[nn.Parameter]:
        return [weight for ref in self._weights if (weight := ref()) is not None]

    def _find_holding(self) -> Line | None:
        number, line = self._backward[0] if self._backward else (0, 0)
        kept = line and source.find_holding(self.roles.codes[number].co_filename, line)
        return self._line((number, kept)) if kept else None

    def _find_second_graph(self) -> Line | None:
        """Return the pass backward with create_graph=True, where no gradient of a gradient is asked for."""
        if not self._second_graph or self._find_text(r"autograd\.(grad|functional)\b|hessian|\bgrad\(.*create_graph"):
            return None
        return self._line(self._backward[0]) if self._backward else None

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


def _rise(points: list[tuple[int, int]]) -> float:
    """Return by how much the last of (steps, number) grows a step, where it grew as before; else 0."""
    if len(points) < 3:
        return 0.0
    (s0, n0), (s1, n1), (s2, n2) = points[-3:]
    before, rise = (n1 - n0) / (s1 - s0), (n2 - n1) / (s2 - s1)
    return rise if min(before, rise) > 0.5 else 0.0


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _can_draw() -> bool:
    return sys.stderr.isatty() or in_notebook()


def _only_passes(line: Line) -> bool:
    """Say whether a line only starts torch's own work, whose time is torch's whatever was counted."""
    return bool(source.ONLY_PASSES.search(line.text)) and not line.kind


def _goes_through_time(line: Line, span: source.Span) -> bool:
    head = source.read_line(line.file, span.start)
    return bool(re.search(r"\bfor (t|step|time|ts|k)\b", head)) or bool(re.search(r"unbind\(\s*(dim=)?1", head))


def _loads_in_own_code(found: Attribution) -> bool:
    data = [line for line in found.lines if line.account == "data"]
    own = sum(line.seconds for line in data if not (found.loop and line.file == found.loop.file
                                                   and found.loop.start <= line.line <= found.loop.head))  # fmt: skip
    return own > 0.5 * sum(line.seconds for line in data)
