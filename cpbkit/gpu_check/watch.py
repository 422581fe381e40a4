"""A person's own training loop, watched as it runs: what it waits for, the line that costs the time, and the cure."""

import contextlib
import functools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check.call_stacks import STAGES, OwnLine, Roles, Sampler
from cpbkit.gpu_check.diagnosis import Diagnosis
from cpbkit.gpu_check.findings import check_environment
from cpbkit.gpu_check.graphs import find_weights, tie_mark
from cpbkit.gpu_check.judge import judge_loop
from cpbkit.gpu_check.notes import COUNTED, Notes
from cpbkit.gpu_check.operators import Operators
from cpbkit.gpu_check.seen import Seen
from cpbkit.gpu_check.shares import ACCOUNTS, attribute
from cpbkit.gpu_check.soundness import weights_of
from cpbkit.gpu_check.tensors import is_capturing
from cpbkit.hardware.environment import in_notebook
from cpbkit.hardware.monitor import Processor, device_memory, host_use
from cpbkit.hardware.nvml import Ask, load_nvml, nvml_handles
from cpbkit.quantities import without_nan
from cpbkit.texts import rewrite, wrapped

MOST_MARKS = 1000  # then every second one is let go
FOLLOWED = 16  # nodes of a loss's graph
TURNS = 50  # steps of other optimisers without one of the first: its training is over
# Sooner, where its own steps came one after another, as a teacher's before its student's: so many, and times its own.
SOON, FEW_STEPS, TIMES_ITS_OWN = 8, 4, 2
UNSTEPPED = 8  # passes backward without an optimiser of torch's: then each of them counts as a step, until there is one
MARKS = 0.02  # s between two losses whose graphs are followed
NOTES = 5  # looks between two steps that are noted, once the first, which come closer, are over
TICK = 0.5  # s between two looks at the memory
LIVE = 2.0  # s between two live lines, at the least

_lock = threading.Lock()
_attending: list["Watch"] = []  # those that note passes backward: one may be within another
_stand_in: "StandIn | None" = None  # the last that was put in
_told: dict[tuple[str, int], str] = {}  # place of a watch in the person's source -> the verdict it last gave


class Watch:
    """See `watch`."""

    def __init__(self, loader, optimizer, live: bool, tell: bool, place: tuple[str, int]):
        self._loader, self._optimizer = loader, optimizer
        self._draws, self._tells, self._place = live and _can_draw(), tell, place
        self._exits = contextlib.ExitStack()
        self._entered = False
        roles = Roles()
        self.notes = Notes(roles, Sampler(roles, get_ident(), self._tick), optimizer)
        self._marks_apart = MARKS
        self._turns = 0  # steps of others since the last of the optimiser whose steps count
        self._turned = 0  # steps at the last of these
        self._mixed = False  # they took turns
        self._taken: set[int] = set()  # identities of those whose steps have counted
        self._stepping: weakref.WeakSet = weakref.WeakSet()  # those that have stepped since one was taken
        self._stepped = 0  # steps at the last pass backward that was noted
        self._due = self._mark_due = True  # something is to be noted at the next step, at the next pass backward
        # Nothing is: its steps are only counted. The watch itself where weights are moved by hand.
        self._uneventful: torch.optim.Optimizer | Watch | None = None
        self._again = 1  # steps after which its lines are read again
        self._cpu_first = self._cpu_lost = 0.0  # s of the training thread's own: before the first step, while counting
        self._count: Operators | None = None  # under way
        self._began = 0.0
        self._event: torch.cuda.Event | None = None  # the end of a step that the device was not done with
        self._ticked_at = 0  # steps
        self._ticked = self._noted = self._marked = self._shown = -math.inf
        self._live, self._slot = "", None
        self._result: tuple[Seen, Diagnosis] | None = None  # once it is over

    # The two doors.

    def __enter__(self) -> "Watch":
        if self._entered:
            raise CpbkitError("a watch is entered once; make another one: with watch(model, optimizer) as w")
        self._entered = True
        self._thread = self.notes.sampler.watched = get_ident()
        self._nvml: Any = load_nvml()[0] if torch.cuda.is_available() else None
        self._exits.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._exits.callback(self._attend, False)
        self._attend(True)
        self._exits.enter_context(replaced(torch.autograd, "grad", self._follow_by_hand))
        self._exits.enter_context(replaced(DataLoader, "__iter__", self._note_loader))
        self.notes.sampler.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop_counting(whole=False)
        if self._count is not None:
            self.notes.problems.append("operators are still counted: a mode of torch's was entered, and not left")
        self.notes.sampler.stop()
        self._exits.close()
        if self._live:
            self._show("")
        try:
            self._result = self._add_up()
        except Exception as failure:  # a mistake in here must not cost a person the end of a training
            text = f"The watch itself failed: {type(failure).__name__}: {failure}."
            self._result = Seen(0.0, 0, 0, {}), Diagnosis("INCONCLUSIVE", "", text, (), (), ())
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
    def steps(self) -> int:
        return self.notes.steps

    @property
    def diagnosis(self) -> Diagnosis:
        """The verdict with what supports it; so far, while the loop runs."""
        return (self._result or self._add_up())[1]

    def _add_up(self) -> tuple[Seen, Diagnosis]:
        seen = self.notes.add_up()
        codes = tuple(c for c in check_environment().codes if c[0] not in ("NO_GPU_RUNTIME", "DEBUG_MODE_ON"))
        return seen, judge_loop(seen, codes)

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
        seen, d = self._result or self._add_up()
        rate = (self.notes.timed - 1) / self.notes.seconds if self.notes.seconds else 0.0
        lines = [
            {"place": x.place, "text": x.text, "share": x.seconds / max(seen.seconds, 1e-9), "phase": x.account}
            for x in seen.lines[:10]
        ]
        found = {
            "verdict": d.verdict,
            "reason": d.reason,
            "text": d.text,
            "steps": self.notes.steps,
            "seconds": seen.seconds,
            "steps a second": rate,
            "shares": dict(seen.shares),
            "lines": lines,
            "evidence": d.evidence,
            "fixes": [{"name": f.name, "ceiling": f.ceiling, "note": f.note} for f in d.fixes],
            "beside": d.beside,
        }
        return without_nan(found)

    # While the loop runs: in its thread.

    def _after_step(self, optimizer, args, kwargs) -> None:
        notes = self.notes
        if optimizer is self._uneventful:  # a step of less than a millisecond pays for every line here
            notes.steps += 1
            return
        if not self._is_watched():
            return
        if notes.thrown.waits:
            notes.thrown.note_step(id(optimizer))
        frame = sys._getframe(1)
        with self._unharmed("a step"):
            notes.soundness.zeroing.note_step(optimizer)
            if optimizer not in self._stepping:
                self._stepping.add(optimizer)
                notes.optimizers[id(optimizer)] = set(map(id, weights_of(optimizer)))
                notes.past -= notes.optimizers[id(optimizer)]
            if notes.by_hand:  # steps were only rare, as where gradients are added up
                notes.by_hand = False
                self._begin_anew()
            if notes.soundness.note_optimizer(optimizer, notes.main):
                notes.main = optimizer
            # Of several optimisers, as of a GAN, the first one's steps count, while it takes any.
            self._mixed |= self._turns > 0 and optimizer is notes.main
            self._turns = (self._turns if notes.steps == self._turned else 0) + (optimizer is not notes.main)
            self._turned = notes.steps
            most = TURNS
            if FEW_STEPS <= notes.steps < TURNS / TIMES_ITS_OWN and not self._mixed:
                most = max(SOON, TIMES_ITS_OWN * notes.steps)
            if notes.main is None or (self._optimizer is None and self._turns > most):
                self._take(optimizer)
            if optimizer is not notes.main:
                notes.soundness.note_other(optimizer)
            else:
                self._note_step(frame, optimizer)
                self._settle()

    def _settle(self) -> None:
        """Let steps only be counted until the next look, and passes backward go by, where nothing is to be noted."""
        notes = self.notes
        busy = self._due or self._mark_due or notes.waits or notes.steps <= COUNTED[-1]
        self._uneventful = None if busy else self if notes.by_hand else notes.main
        # Of several passes a step the first would be the one that is noted, after a while without.
        self._attend(busy or notes.by_hand or notes.passes > 1 or len(notes.optimizers) > 1)

    def _attend(self, attends: bool) -> None:
        """Note passes backward, or let them go by: a call in between is 0.5 % of a step of 0.2 ms."""
        with _lock:
            if attends == (self in _attending):
                return
            (_attending.append if attends else _attending.remove)(self)
            _put_stand_in()

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of another optimiser count; of one that trains from here on, what was seen before is over."""
        notes = self.notes
        if notes.main is not None and id(optimizer) not in self._taken:
            self._begin_anew()
        self._taken |= {id(notes.main), id(optimizer)}
        # Those of all others, as of teachers that were trained one after another, until they step again.
        self._stepping = weakref.WeakSet([optimizer])
        notes.past = (notes.past | notes.moved) - notes.optimizers[id(optimizer)]
        notes.main = optimizer

    def _begin_anew(self) -> None:
        """Forget what was seen of a training that is over, or of passes backward that were taken for its steps."""
        self._stop_counting(whole=False)
        self._again, self._turns, self._cpu_lost, self._uneventful = 1, 0, 0.0, None
        self.notes.begin_anew()

    def _is_watched(self) -> bool:
        """Say whether this is the thread that trains: that of the first step, which need not be the main one."""
        notes = self.notes
        if not notes.steps and not notes.backwards:
            self._thread = notes.sampler.watched = get_ident()
        return get_ident() == self._thread

    def _note_step(self, frame: FrameType, optimizer: torch.optim.Optimizer | None = None) -> None:
        notes = self.notes
        notes.steps += 1
        self._due = False
        seen = notes.sampler.end_step() if self._count is None else []
        if self._count is not None:
            self._stop_counting()
        if notes.steps == 1:
            notes.processor = Processor.read()
            notes.first, self._cpu_first = time.perf_counter(), time.thread_time()
            notes.sampler.restart()
        notes.last, notes.timed = time.perf_counter(), notes.steps
        if seen:  # to ask for it after every step would cost a small one 1 % of its time
            notes.cpu = time.thread_time() - self._cpu_first - self._cpu_lost
        if notes.steps >= self._again:  # ever more rarely
            self._again = 2 * notes.steps
            if (weights := notes.find_weights()) and not notes.graded:  # there, gradients are not kept with the weights
                notes.soundness.note_gradients(weights)
            notes.hooks.append((notes.steps, notes.count_hooks()))
            notes.step = notes.roles.read(frame).own  # the last one: a first step may be a trial, or of another loop
            # At the end of a function its model and its list of losses are gone.
            notes.kept = notes.find_kept() or notes.kept
            notes.wrong |= notes.find_wrong()
        if torch.cuda.is_initialized():
            self._ask_device()
        compiled = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        # A compiled step would be compiled anew under a mode.
        if notes.steps in COUNTED and self._count is None and not compiled.get("stats"):
            self._start_counting()
        self._due = self._due or self._count is not None or self._event is not None
        if optimizer is not None:
            notes.soundness.note_step(optimizer, {notes.roles.modules[look.root]() for look in seen if look.root})

    def _start_counting(self) -> None:
        self.notes.sampler.paused = True
        self._began, self._cpu_began = time.perf_counter(), time.thread_time()
        self._count = Operators(self.notes.roles, self.notes.find_weights())
        self._count.begin()

    def _stop_counting(self, whole: bool = True) -> None:
        notes = self.notes
        if self._count is None or not self._count.try_exit():
            return  # a mode of the person's is on top: at the next step perhaps
        notes.counted += [self._count] if whole else []
        self._count = None
        notes.sampler.tail, notes.sampler.paused = [], False
        notes.lost += time.perf_counter() - self._began
        self._cpu_lost += time.thread_time() - self._cpu_began

    def _follow_by_hand(self, original, tensors, *args, **kwargs):
        """Stand in for torch.autograd.grad, which is a pass backward where neither an optimiser nor another is seen."""
        notes = self.notes
        trains = notes.by_hand or not (notes.steps or notes.backwards > notes.graded)
        if not trains or kwargs.get("create_graph") or any(args[3:4]):
            return original(tensors, *args, **kwargs)
        notes.graded += 1
        return self._pass(2, original, tensors, *args, **kwargs)

    def _pass(self, flags: int, original, tensors, *args, **kwargs):
        """Stand in for a pass backward: note it, and look at the graph of a loss now and then.

        flags: the place of retain_graph among `args`, which create_graph follows.
        """
        notes = self.notes
        if not self._is_watched():
            return original(tensors, *args, **kwargs)
        if self._uneventful is self:
            notes.steps += 1
            return original(tensors, *args, **kwargs)
        frame, due = sys._getframe(1), self._mark_due
        if due or notes.waits or (notes.by_hand and not notes.reached):
            with self._unharmed("a pass backward"):
                notes.thrown.note_backward()
                if notes.soundness.zeroing.waits and not is_capturing():
                    notes.soundness.zeroing.note_backward()
                if due:
                    notes.second_graph = bool(kwargs.get("create_graph") or any(args[flags + 1 : flags + 2]))
                    kept = (kwargs.get("retain_graph") or any(args[flags : flags + 1])) and not notes.second_graph
                    notes.retained = notes.roles.own_line(frame) if kept else None
                    if kept:
                        notes.retraced.note_graph(getattr(tensors, "grad_fn", None), notes.steps, notes.by_hand)
                    self._note_loss(tensors, frame)
                # Without an optimiser nothing else tells what moves, and the first steps' operators are counted.
                if not notes.reached and notes.steps > 1:
                    weights = find_weights(getattr(tensors, "grad_fn", None))
                    notes.reached = {number: weight.numel() for number, weight in weights.items()}
                    notes.weights = [weakref.ref(weight) for weight in weights.values()]
        out = original(tensors, *args, **kwargs)
        notes.backwards += notes.steps <= COUNTED[-1]
        self._stepped = notes.steps
        if notes.steps == 0 and notes.backwards > UNSTEPPED:
            notes.by_hand = True
        if due or notes.by_hand:
            with self._unharmed("a pass backward"):
                if due and notes.main is not None and not is_capturing():
                    notes.soundness.note_end(notes.main)
                if notes.by_hand:
                    self._note_step(frame)
                    self._settle()
        return out

    @contextlib.contextmanager
    def _unharmed(self, what: str) -> Iterator[None]:
        """Tell a mistake of the watch's own in the report; the person's step goes on."""
        try:
            yield
        except Exception as error:
            problem = f"{what} was not noted: {type(error).__name__}: {error}"
            if problem not in self.notes.problems:
                self.notes.problems.append(problem)

    def _note_loss(self, loss, frame: FrameType) -> None:
        """Read a loss before its pass backward, and tie a mark to its graph."""
        notes = self.notes
        self._mark_due, self._marked = False, time.perf_counter()
        if len(notes.marks) > MOST_MARKS:
            notes.marks, self._marks_apart = notes.marks[::2], 2 * self._marks_apart
        notes.backward = notes.roles.read(frame).own
        if self._count is None and not is_capturing():
            notes.soundness.note_loss(loss)
            if notes.steps > self._stepped and len(notes.optimizers) == 1 and notes.main is not None:
                notes.soundness.note_start()
            notes.soundness.zeroing.follow(notes.optimizers)
        graph, line = getattr(loss, "grad_fn", None), next(iter(notes.backward), None)
        self._mark(graph, line)
        notes.thrown.note_graph(graph, notes.optimizers, line)

    def _mark(self, root, at: OwnLine | None) -> None:
        """Tie marks to the graph of a loss and to what it was made of: a forecast may be kept, and its loss not.

        Along the first inputs, and along the last: of a sum of losses these are its terms, the first are sums.
        """
        notes = self.notes
        marked: set[Any] = set()
        for order in (iter, reversed):
            node = root
            for _ in range(FOLLOWED):
                if node is None or not node.next_functions:
                    break
                if node not in marked:
                    notes.marks.append((notes.steps, tie_mark(node, "cpbkit"), at))
                    marked.add(node)
                inputs = (n for n, _ in order(node.next_functions))
                node = next((n for n in inputs if n is not None and n.next_functions), None)

    def _note_loader(self, original, loader):
        at = self.notes.roles.own_line(sys._getframe(1))
        if loader.num_workers and not (loader.persistent_workers and loader._iterator):
            self.notes.starts.append(at)
        iterator = original(loader)
        with self._unharmed("a loader"):
            self.notes.note_loader(loader, iterator, at)
        return iterator

    def _ask_device(self) -> None:
        """Ask without waiting whether the device is done with the step before."""
        if self._event is not None:
            self.notes.behind.append(not self._event.query())
            self._event = None
        elif not is_capturing():
            event = self._event = torch.cuda.Event()
            event.record()

    # While the loop runs: in the sampler's thread.

    def _tick(self, now: float) -> None:
        notes = self.notes
        if notes.steps != self._ticked_at:  # a later call's frame may take the place of one that is gone
            self._ticked_at, notes.roles.looked = notes.steps, 0
        stage = notes.sampler.stage
        apart = 0.0 if stage is STAGES[0] else NOTES * stage[1]
        if now - self._noted > apart:
            self._due, self._noted = True, now
        self._mark_due = self._mark_due or now - self._marked > max(self._marks_apart, apart)
        if self._due or self._mark_due:
            self._uneventful = None
        if now - self._ticked < TICK:
            return
        self._ticked = now
        memory = device_memory(0)[0]
        memory = host_use()[0] if math.isnan(memory) else memory
        notes.memory.append((notes.steps, memory))
        if self._nvml:
            ask = Ask(self._nvml, notes.problems)
            handle = ask("devices", lambda: nvml_handles(self._nvml)[torch.cuda.current_device()])
            rates = handle and ask("utilisation", lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle))
            notes.busy += [rates.gpu / 100] if rates else []
        if self._draws and now - self._shown > LIVE and notes.steps > 1:
            self._draw(now, memory)

    def _draw(self, now: float, memory: float) -> None:
        notes = self.notes
        found = attribute(dict(notes.sampler.seen), notes.roles.codes, notes.step, (), notes.backward)
        total = sum(found.seconds.values()) or 1.0
        parts = [f"{(notes.timed - 1) / max(notes.seconds, 1e-9):.1f} steps/s"]
        parts += [f"{name} {found.seconds[name] / total:.0%}" for name in ACCOUNTS if found.seconds.get(name)]
        parts += [f"device busy {notes.busy[-1]:.0%}"] if notes.busy else []
        parts += [f"{memory / 1e9:.2f} GB"]
        text = " · ".join(parts)
        self._show(text)
        self._shown = now + 200 * (time.perf_counter() - now)  # so that it takes at most half a percent

    def _show(self, text: str) -> None:
        """Put a text in the place of the last one; a notebook would show what stands on the error stream in red."""
        if not in_notebook():
            rewrite(sys.stderr, text, "" if text else "\r")
        elif self._slot:
            self._slot.update({"text/plain": text}, raw=True)
        else:
            from IPython.display import display

            self._slot = display({"text/plain": text}, raw=True, display_id=True)
        self._live = text


def watch(*things, live: bool = True, tell: bool = True) -> Watch:
    """Watch a training loop as it stands: `with watch(model, optimizer) as w:` around it, or
    `for batch in watch(loader, model, optimizer):` in place of the loader.

    At the end the verdict is written to the error stream, and is `w.verdict` and `w.report()`. Nothing of the loop is
    called twice, moved or changed; hooks of torch are put in at the start and taken out at the end.
    live: write a line on a terminal or in a notebook while it runs. tell: write the verdict at the end.
    """
    loader = optimizer = None
    for thing in things:
        if isinstance(thing, nn.Module):
            continue  # a model is found where it is called
        if isinstance(thing, torch.optim.Optimizer):
            optimizer = thing
        elif loader is None and hasattr(thing, "__iter__"):
            loader = thing
        else:
            raise TypeError(f"watch takes a loader, a model and an optimiser; got {type(thing).__name__}")
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    return Watch(loader, optimizer, live, tell, place)


class StandIn:
    """For torch.autograd.backward. An earlier one, which somebody has put another on top of, passes all on."""

    def __init__(self, original: Callable):
        self.original = original

    def __call__(self, *args, **kwargs):
        call = self.original
        for each in tuple(_attending) if self is _stand_in else ():
            call = functools.partial(each._pass, 1, call)
        return call(*args, **kwargs)


def _put_stand_in() -> None:
    """Put one in where passes backward are to be noted, and take it out where they are not."""
    global _stand_in
    here: Callable = torch.autograd.backward
    if _attending and here is not _stand_in:
        torch.autograd.backward = _stand_in = StandIn(here)
    elif not _attending and isinstance(here, StandIn):
        torch.autograd.backward = here.original


@contextlib.contextmanager
def replaced(holder, name: str, stand_in: Callable) -> Iterator[None]:
    """Call `stand_in(original, ...)` in place of a module's or a class's attribute."""
    original = getattr(holder, name)

    def call(*args, **kwargs):  # a function, so that of a class it is a method
        return stand_in(original, *args, **kwargs)

    setattr(holder, name, call)
    try:
        yield
    finally:
        if getattr(holder, name) is call:  # else somebody has put another one on top, which calls this one
            setattr(holder, name, original)


def _can_draw() -> bool:
    return sys.stderr.isatty() or in_notebook()
