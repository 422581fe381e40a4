"""What is noted of a person's loop while it runs, and what it adds up to."""

import dataclasses
import gc
import inspect
import itertools
import linecache
import math
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import CallStack, OwnLine, Roles, Sampler
from cpbkit.gpu_check.graphs import Retraced, ThrownAway
from cpbkit.gpu_check.operators import Operators
from cpbkit.gpu_check.seen import Seen, Taken
from cpbkit.gpu_check.shares import ACCOUNTS, GROWING, WAITING, Attribution, Line, attribute, find_kind
from cpbkit.gpu_check.soundness import OPTIMIZER, SCALES, Soundness, Unsound, weights_of
from cpbkit.gpu_check.source import INNER_LOOPS
from cpbkit.hardware.environment import count_cores
from cpbkit.hardware.monitor import Processor, growth

KEPT = 0.08  # of the graphs of earlier steps: of every tenth step, say
TAKEN = 4  # times that a line may take each row of a batch; a table that is filled by element takes them more often
SAMPLES = 8  # calls of a model in a step
COUNTED = (3, 8, 16)  # steps after which the next one's operators are counted
STEADY = 0.1  # of a rise, by which the next may be another
PROBED = 48  # steps, of which the first must have let go of what they computed
PAIRS = 200  # operators that a loop over pairs starts in a step
FEW_ROWS = 4  # of the largest product: more may be anything, such as steps in time
BESIDE = 0.35, 0.20  # share of the time above which torch's work beside the model is told: a part's, one in a loop
GROWN = 50e6  # bytes of the process: less is its allocators settling in
TIME = re.compile(  # in the head of a loop
    r"\bfor (t|step|time|ts|k|xt|\w+_t)\b|unbind\(\s*(dim=)?1|range\([^)]*(size\(1\)|shape\[1\])"
    r"|range\([^)]*\b(T|L|seq\w*|(\w+_)?steps|time\w*|length|max_len\w*|horizon)\b"
)
GIVING = re.compile(r"\b(yield|return)\b")
MAPPING = re.compile(r"\bmap\(")
PILED = 10  # hooks of one module or weight, where every so many steps bring one
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PADDING = (  # lines that fill rows up
    r"^(?!.*(Parameter|Embedding|mask)).*"
    r"(\]\s*\*\s*\(.*\blen\(|\bpad\(|(zeros|full)\(.*(?i:max)|\.ljust\()"
)
LENGTH = "max_length"  # or lines that say how far
LASTS = {"lasts": True}  # of a field: it outlives a training, of which several may come one after another
OTHERS = 0.25  # of all cores' time, above which other programs are told of
DISTURBED = "a step takes longer then, and its shares are others; watch once more on a quiet machine"
SLOW_LINE = 50e-6  # s a call of torch's: a line that takes longer, and is not computing, does something else


@dataclass(frozen=True)
class Loader:
    """What is to be known of a loader when it is gone: to hold on to it would keep its data."""

    workers: int
    batch: int  # samples, or 0: they come in batches, or one by one
    streams: bool  # it cannot shuffle
    samples: CodeType | None  # the person's own function that makes them


@dataclass
class Notes:
    """Written in the thread that trains, and for the memory and the looks in the sampler's; read in either."""

    roles: Roles
    sampler: Sampler
    main: torch.optim.Optimizer | None  # whose steps count
    steps: int = 0
    backwards: int = 0  # passes, up to the last step that is counted: later ones go by
    graded: int = 0  # of them, calls of torch.autograd.grad
    first: float = math.nan  # time of the first noted step
    last: float = math.nan  # of the last noted one
    timed: int = 0  # steps up to that one
    lost: float = 0.0  # seconds of steps that were counted
    cpu: float = 0.0  # s of the training thread's own, without these
    processor: Processor | None = None  # at the first noted step
    step: tuple[OwnLine, ...] = ()  # own lines at an optimiser's step
    backward: tuple[OwnLine, ...] = ()  # and at a pass backward
    counted: list[Operators] = field(default_factory=list)
    soundness: Soundness = field(default_factory=Soundness)
    thrown: ThrownAway = field(default_factory=ThrownAway)
    retraced: Retraced = field(default_factory=Retraced)
    optimizers: dict[int, set[int]] = field(default_factory=dict, metadata=LASTS)  # identities of the weights of each
    past: set[int] = field(default_factory=set, metadata=LASTS)  # identities of the weights whose training is over
    by_hand: bool = False  # weights are moved without an optimiser of torch's
    weights: list[weakref.ref] = field(default_factory=list)  # that backward reaches
    reached: dict[int, int] = field(default_factory=dict)  # their identities -> their numbers
    wrong: set[str] = field(default_factory=set)  # with layers that the loss reaches, as `find_wrong` tells
    second_graph: bool = False  # a pass backward builds one, as with create_graph=True
    retained: OwnLine | None = None  # a pass backward that keeps its graph, as with retain_graph=True
    collected: bool = False  # garbage, to tell it from what is kept
    kept: str = ""  # the line that keeps graphs, when it was last looked for
    marks: list[tuple[int, weakref.ref, OwnLine | None]] = field(default_factory=list)  # (steps before, mark, line)
    hooks: list[tuple[int, int]] = field(default_factory=list)  # (steps, the most hooks of one module) at these
    memory: list[tuple[int, float]] = field(default_factory=list)  # (steps, bytes)
    busy: list[float] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    loaders: dict[Loader, None] = field(default_factory=dict, metadata=LASTS)  # in the order that they were begun in
    begun: weakref.ref | None = None  # what goes through the last one that shuffles
    begun_at: OwnLine | None = None
    paired: OwnLine | None = field(default=None, metadata=LASTS)  # the line that goes through two that shuffle at once
    starts: list[OwnLine | None] = field(default_factory=list, metadata=LASTS)  # lines at which workers were started
    problems: list[str] = field(default_factory=list, metadata=LASTS)

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last, without the steps that were counted."""
        return max(self.last - self.first - self.lost, 0.0) if self.steps > 1 else 0.0

    @property
    def passes(self) -> float:
        """Passes backward a step; by hand, each is a step."""
        return 1.0 if self.by_hand else self.backwards / max(min(self.steps, COUNTED[-1] + 1), 1)

    @property
    def waits(self) -> bool:
        """Whether each step and pass backward is to be noted, until what was begun is known."""
        return self.thrown.waits or self.soundness.zeroing.waits

    def begin_anew(self) -> None:
        """Forget what was seen of a training that is over."""
        for each in dataclasses.fields(self):
            if each.default_factory is not dataclasses.MISSING and not each.metadata:
                setattr(self, each.name, each.default_factory())
            elif each.default is not dataclasses.MISSING:
                setattr(self, each.name, each.default)

    def add_up(self) -> Seen:
        """Return what was seen so far, in shares of the time between the first and the last step."""
        tracked = {at for c in self.counted for at, calls in c.lines.items() if at is not None and calls.tracked}
        moving = set().union(*(c.moving for c in self.counted)) - tracked
        others, held = self._find_others(), self._find_held()
        tests = set().union(*(c.modules.find_tests() for c in self.counted))
        known = self.roles.codes, self.step, tracked, self.backward, others, held, moving, tests
        looks = defaultdict(float, self.sampler.seen)
        found = attribute(looks, *known)
        late = self._find_late(found)
        for stack, seconds in late:
            looks[stack] += seconds
        found = attribute(looks, *known) if late else found
        total = sum(found.seconds.values()) or 1.0
        most = max((c.count for c in self.counted), default=0)  # some steps may be parts, as of several optimisers
        counted = min((c for c in self.counted if c.count >= most / 2), key=lambda c: c.seconds, default=None)
        workers = max((loader.workers for loader in self.loaders), default=0)
        threads, cores = torch.get_num_threads(), count_cores()
        crowded = f"torch computes in {threads} threads on {cores} cores" if threads > cores else ""
        thrown, thrown_at = self.thrown.find()
        starts_at, starts = next(iter(Counter(self.starts).most_common(1)), (None, 0))
        missed = (c.problem or c.modules.problem for c in self.counted)
        taken = Processor.read().of_others(self.processor) if self.processor else 0.0
        disturbed = f"other programs took {taken:.0%} of this machine's processor meanwhile: {DISTURBED}"
        problems = [*self.problems, crowded, disturbed if taken > OTHERS else "", self.sampler.problem, *missed]
        seen = Seen(
            seconds=total,
            steps=self.steps,
            looks=self.sampler.looks + len(late),
            shares={name: found.seconds[name] / total for name in ACCOUNTS if name in found.seconds},
            lines=self._name_workers(found),
            inside=found.inside / total,
            python=self._find_python(found, counted, total / max(self.timed - 1, 1)),
            threads=threads / cores,
            threads_line=self._find_text(r"set_num_threads\(|_NUM_THREADS"),
            unused=self._find_unused(),
            unused_line=self._find_unused_call(),
            thrown=thrown,
            thrown_line=thrown_at and self._line(thrown_at),
            optimizer_line=self._find_text(OPTIMIZER),
            unsound=tuple(self._find_unsound(found)),
            small_batch=self._find_small_batch(found, counted),
            hooks=_rise(self.hooks),
            hooks_line=self._find_text(r"\.register_\w*hook\("),
            thread=self._find_thread(),
            waiting=max(0.0, 1 - self.cpu / max(self.seconds, 1e-9)),
            graphs=found.graphs,
            asked=found.asked,
            fused="fused" in inspect.signature(type(self.main)).parameters if self.main else False,
            kept=self.find_kept() or self.kept,
            growth=self._find_growth(),
            slowing=self._find_slowing(),
            growing=self._find_growing(),
            held=self._find_holding(),
            second_graph=self._find_second_graph(),
            retained=self._line(self.retained) if self.retained else None,
            retraced=self.retraced.find(),
            passes=self.passes,
            workers=workers,
            starts=starts,
            starts_line=starts_at and self._line(starts_at),
            loads_in_own_code=_loads_in_own_code(found),
            gpu_there=torch.cuda.is_available(),
            busy=sum(self.busy) / len(self.busy) if self.busy else math.nan,
            behind=sum(self.behind) / len(self.behind) if self.behind else math.nan,
            problems=tuple(dict.fromkeys(filter(None, problems))),
        )
        return seen if counted is None else self._add_operators(seen, counted, found)

    def _find_late(self, found: Attribution) -> list[tuple[CallStack, float]]:
        """Return what was seen since the last step in the loop over epochs, where a loader starts or a model is tested.

        What is seen after that one is no part of the training.
        """
        epochs = source.find_loops(found.loop.file, found.loop.start)[:-1] if found.loop else []
        return self._within(list(self.sampler.tail), epochs)

    def _within(
        self, looks: Iterable[tuple[CallStack, float]], spans: Collection[source.Span]
    ) -> list[tuple[CallStack, float]]:
        """Return the looks at lines of some loops."""
        files = [code.co_filename for code in self.roles.codes]  # after what the other thread has seen
        return [
            (stack, seconds)
            for stack, seconds in looks
            if any(span.holds(files[number], line) for span in spans for number, line in stack.own)
        ]

    def _add_operators(self, seen: Seen, counted: Operators, found: Attribution) -> Seen:
        """Return what was seen with what the operators of a few steps tell, of which one stands for all."""
        steps = max(self.timed - 1, 1)
        model = min(seen.model * seen.seconds, self.cpu) / steps  # on a busy machine the rest is other programs' time
        repeated, within, repeated_at = self._find_repeated()
        calls, calls_line, every_sample = self._find_calls(found)
        padded = next((c.padding[2] for c in self.counted if c.padding), None)
        denormal = counted.denormal_line
        return dataclasses.replace(
            seen,
            operators=counted.own_count,
            starting=counted.estimate_starting(model, counted.own_count),
            operators_all=counted.whole_count,
            starting_all=counted.estimate_starting(model, counted.whole_count),
            float64=counted.wide_seconds / max(counted.seconds, 1e-9),
            float64_line=self._find_text(r"\.double\(\)|float64|set_default_dtype|from_numpy\("),
            taken=self._find_taken(found, counted, seen.seconds),
            pairs=self._find_pairs(found, counted),
            one_by_one=(calls, calls_line),
            every_sample=every_sample,
            dense=max(counted.dense.items(), key=lambda item: item[1][1], default=None),
            dense_line=self._find_text(r"\bEmbedding(Bag)?\(") or self._find_text(r"\bParameter\("),
            one_hot=counted.one_hot_seconds / max(counted.seconds, 1e-9),
            one_hot_line=counted.one_hot_line and self._line(counted.one_hot_line),
            repeated=repeated * seen.model,
            repeated_within=within,
            repeated_line=repeated_at and self._line(repeated_at),
            gates=counted.gates if counted.is_recurrent else 0,
            waits=len(counted.waits),
            wait_lines=tuple(map(self._line, dict.fromkeys(counted.waits))),
            modes=tuple(sorted(set().union(*(c.modes for c in self.counted)))),
            mode_line=self._find_text(
                r"detect_anomaly|\bprofile\(|emit_nvtx|Profile\(|setprofile|settrace|tracemalloc"
            ),
            padding=min((c.padding[:2] for c in self.counted if c.padding and not c.packed), default=(0.0, False)),
            padding_line=padded and (self._find_text(PADDING) or self._find_text(LENGTH) or self._line(padded)),
            denormal=(counted.denormal_seconds / max(counted.seconds, 1e-9), denormal and self._line(denormal)),
            last=max(c.last for c in self.counted),
            last_line=self._find_text(r"\[:, *-1"),
            on_gpu="cuda" in counted.devices,
        )

    def _line(self, at: OwnLine) -> Line:
        file = self.roles.codes[at[0]].co_filename
        return Line(file, at[1], source.read_line(file, at[1]), "")

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
        running = min(1.0, self.cpu / max(self.seconds, 1e-9))
        python = []
        parts: defaultdict[tuple[str, int], float] = defaultdict(float)  # seconds of each beside the model
        for line in found.lines:
            if line.account == "rest":
                parts[line.part] += line.seconds
        for line in found.lines:
            phase = line.account in ("forward", "backward", "optimiser")
            if not (line.account == "rest" or phase) or (phase and line.by_torch and not line.kind):
                continue
            count, seconds = calls.get((line.file, line.line), (0, 0.0))
            spent = line.seconds / total * each * running
            computing = seconds > 0.3 * spent or spent < SLOW_LINE * (count + 1)
            if counted is None:
                computing = not line.kind
            told = line.account == "rest" or line.kind or count < 50
            if computing:  # torch's work, and none that a loss comes from
                told = line.account == "rest" and parts[line.part] > BESIDE[bool(line.around)] * total
            if told and not _only_passes(line):
                python.append(line)
        return tuple(python)

    def _find_taken(self, found: Attribution, counted: Operators, total: float) -> Taken | None:
        """Return the loop through the first axis of a batch that takes the most time."""
        taken = []
        for (at, length), rows in counted.taken.items():
            line = self._line(at)
            spans = self._find_inner_loops(line, found)
            if length < 8 or not 0.9 <= rows / length <= TAKEN or not spans or _goes_through_time(spans[-1]):
                continue
            under = self._within(dict(self.sampler.seen).items(), spans[-1:])
            taken.append(Taken(line, rows, sum(seconds for _, seconds in under) / total))
        return max(taken, key=lambda t: t.share, default=None)

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
        return Line(span.file, span.start, source.read_line(span.file, span.start), "forward")

    @property
    def moved(self) -> set[int]:
        """Identities of the weights that any optimiser moves."""
        return set().union(*self.optimizers.values())

    @property
    def _moving(self) -> set[int]:
        """Of them, those whose training is not over."""
        return self.moved - self.past

    def _find_others(self) -> set[int]:
        """Return modules that are frozen or whose training is over, such as a teacher, by identity."""
        weights = {number: list(model.parameters()) for number, model in self.roles.alive().items()}
        return {
            number
            for number, held in weights.items()
            if held and all(not weight.requires_grad or id(weight) in self.past for weight in held)
        }

    def _find_held(self) -> set[int]:
        """Return modules with weights that an optimiser moves, by identity."""
        moved = self._moving
        alive = self.roles.alive().items()
        return {number for number, model in alive if not moved.isdisjoint(map(id, model.parameters()))}

    def _find_unused(self) -> float:
        """Return the share of the gradients, in numbers, that are computed for weights which no optimiser moves."""
        moved = self._moving
        if self.by_hand or not moved:
            return 0.0
        unused = sum(size for weight, size in self.reached.items() if weight not in moved)
        return unused / max(sum(self.reached.values()), 1)

    def _find_unused_call(self) -> Line | None:
        """Return the line that calls a module whose weights get gradients, and no optimiser moves any of them."""
        moved, reached = self._moving, set(self.reached)
        lines: dict[OwnLine, int] = {}
        for called in (each for c in self.counted for each in c.modules.with_gradients.values()):
            if called.weights.keys() & reached and not called.weights.keys() & moved:
                lines[called.own[0]] = max(lines.get(called.own[0], 0), sum(called.weights.values()))
        return self._line(max(lines, key=lines.__getitem__)) if lines else None

    def _find_cut(self) -> Line | None:
        """Return the line that switches gradients off around the calls of a module which never gets any."""
        for modules in (c.modules for c in self.counted):
            for called in (each for number, each in modules.without.items() if number not in modules.with_gradients):
                if called.weights and called.weights.keys() <= self.soundness.empty:
                    for number, line in called.own:
                        if cut := source.find_no_grad(self.roles.codes[number].co_filename, line):
                            return self._line((number, cut))
        return None

    def _find_repeated(self) -> tuple[float, bool, OwnLine | None]:
        """Return (share of the operators' time that makes the same numbers again, whether within one step, the line).

        The same as at the steps before, of what is made of no weight; or as before in the same step.
        """
        if len(self.counted) < 2:
            return 0.0, False, None
        same = set.intersection(*({key for key, r in c.results.items() if not r.tracked} for c in self.counted))
        found = []
        for within in (False, True):
            lines: defaultdict[OwnLine, float] = defaultdict(float)
            shares = []
            for c in self.counted:
                again = [(r, r.seconds * (r.calls - 1) / r.calls) for r in c.results.values() if r.calls > 1]
                if not within:
                    again = [(c.results[key], c.results[key].seconds) for key in same]
                for result, seconds in again:
                    lines[result.again if within else result.own[0]] += seconds
                shares.append(sum(seconds for _, seconds in again) / c.seconds if c.seconds else 0.0)
            found.append((median(shares), within, max(lines, key=lines.__getitem__, default=None)))
        return max(found, key=lambda each: each[0])

    def _find_unsound(self, found: Attribution) -> Iterator[tuple[Unsound, Line | None]]:
        backward = self._line(self.backward[0]) if self.backward else None
        wrong = {reason: at for c in self.counted for reason, at in c.wrong.items()}
        if found.asked:  # a policy's states and gains are what they are, and its loss need not fall
            wrong = {reason: at for reason, at in wrong.items() if reason not in SCALES}
        reasons = set(self.wrong)
        if self.soundness.labels.are_sorted() and len(self.optimizers) == 1:  # a critic's come kind by kind
            reasons.add("SORTED")
        if self.backward:
            wrong |= dict.fromkeys(reasons, self.backward[0])
        if self.paired and len(self.optimizers) == 1:
            wrong["UNPAIRED"] = self.paired
        for unsound in self.soundness.find(wrong):
            line = self._line(wrong[unsound.reason]) if unsound.reason in wrong else None
            if unsound.reason == "NO_GRADIENT" and (cut := self._find_cut()):
                line = cut
            elif unsound.reason == "SORTED" and (made := self._find_stream()):
                line = made
            elif unsound.pattern and not (line and re.search(unsound.pattern, line.text)):
                line = self._find_text(unsound.pattern) or line
            yield unsound, line or backward

    def find_wrong(self) -> set[str]:
        """Return what is wrong with layers that the loss reaches, of soundness.OF_OPERATORS.

        UNREGISTERED: they lie in a plain list or dictionary of a model. REPLACED: an optimiser holds weights of a
        running model, and in place of theirs some that are in none.
        """
        moved, reached, models, wrong = self.moved, set(self.reached), self.roles.alive().values(), set()
        held = (vars(part).items() for model in models for part in model.modules())
        collections = (thing for each in held for name, thing in each if not name.startswith("_"))
        things = (c.values() if isinstance(c, dict) else c for c in collections if isinstance(c, (list, tuple, dict)))
        layers = (layer for each in things for layer in each if isinstance(layer, nn.Module))
        listed = {id(weight) for layer in layers for weight in layer.parameters()}
        if moved and listed & reached and not listed & moved:
            wrong.add("UNREGISTERED")
        own = {id(weight) for model in models for weight in model.parameters()}
        if moved & own and moved - own - reached and reached & own - moved:
            wrong.add("REPLACED")
        return wrong

    def find_weights(self) -> list[torch.Tensor]:
        """Return the weights that are trained: the optimiser's, or by hand those that backward reaches."""
        if self.main and not self.by_hand:
            return list(weights_of(self.main))
        return [weight for ref in self.weights if (weight := ref()) is not None]

    def count_hooks(self) -> int:
        """Return the most hooks that one weight has, or one module of a model that was seen to run."""
        parts = {part for model in self.roles.alive().values() for part in model.modules()}
        numbers = [sum(len(getattr(part, name)) for name in HOOKS) for part in parts]
        return max([*numbers, *(len(weight._backward_hooks or ()) for weight in self.find_weights())], default=0)

    def _find_small_batch(self, found: Attribution, counted: Operators | None) -> tuple[int, Line | None]:
        """Return the samples of a batch, by its loader or the largest product of the model, and the line to change."""
        sizes = [loader.batch for loader in self.loaders if loader.batch]
        rows = counted.rows if counted and counted.rows <= FEW_ROWS else 0
        rows = min(filter(None, (rows, max(sizes, default=0))), default=0)
        line = self._find_text(rf"batch_size\s*=\s*{rows}\b") if sizes else None
        line = line or (self._find_text(r"\bDataLoader\((?!.*batch_size)") if sizes and rows == 1 else None)
        if line is None and found.loop:
            file, at = found.loop.file, found.loop.start
            line = Line(file, at, source.read_line(file, at), "data")
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
                return Line(file, at, text, "outside")
        return None

    def _name_workers(self, found: Attribution) -> tuple[Line, ...]:
        """Return the lines; of a loader with workers, whose own lines are in other processes, its samples' first."""
        code = next((loader.samples for loader in self.loaders if loader.workers and loader.samples), None)
        if code is None:
            return found.lines
        text = source.read_line(code.co_filename, code.co_firstlineno)
        waited = Line(code.co_filename, code.co_firstlineno, text, "data", found.seconds.get("data", 0.0))
        return tuple(sorted((waited, *found.lines), key=lambda line: -line.seconds))

    def note_loader(self, loader: DataLoader, iterator, at: OwnLine | None) -> None:
        """Note a loader that is begun, and the line that asks for its samples."""
        streams = isinstance(loader.dataset, IterableDataset)
        samples = self._find_samples(loader)
        self.loaders.setdefault(Loader(loader.num_workers, loader.batch_size or 0, streams, samples))
        if not isinstance(loader.sampler, RandomSampler):
            return
        waiting: Any = self.begun and self.begun()  # as where both are given to zip: nothing is asked of either yet
        # Workers that persist have one iterator for all epochs.
        if at and at == self.begun_at and waiting not in (None, iterator) and not waiting._num_yielded:
            self.paired = at
        self.begun, self.begun_at = weakref.ref(iterator), at

    def _find_samples(self, loader: DataLoader) -> CodeType | None:
        """Return the person's own function that makes a loader's samples."""
        data: Any = loader.dataset
        while data is not None:  # a Subset holds the person's own
            for name in ("__getitem__", "__iter__"):
                code = getattr(getattr(type(data), name, None), "__code__", None)
                if code is not None and self.roles.find(code)[0] == "own":
                    return code
            data = getattr(data, "dataset", None)
        return None

    def _find_stream(self) -> Line | None:
        """Return the line that gives the samples of a loader that cannot shuffle."""
        code = next((loader.samples for loader in self.loaders if loader.streams and loader.samples), None)
        if code is None:
            return None
        lines = [self._line((self.roles.find(code)[1], at)) for at in sorted({at for *_, at in code.co_lines() if at})]
        return next((line for line in lines if GIVING.search(line.text)), lines[0])

    def find_kept(self) -> str:
        """Return what keeps the graphs of losses whose steps are long over."""
        old = {made: at for made, _, at in self.marks if made < self.steps - 3}
        alive = {made: at for made, ref, at in self.marks if made in old and ref() is not None}
        # Some may be kept for a while, or until the garbage is collected; those of the beginning are kept on purpose.
        if len(alive) < 4 or len(alive) < KEPT * len(old) or min(alive) > self.steps / 4:
            return self._find_kept_probe()
        at = alive[max(alive)]
        if at is None:
            return "something"
        kept = self._line(at)
        if "retain_graph" not in kept.text:  # else a state is carried on with its graph, and nothing added
            keeping = _find_keeping(kept) or source.find_keeping(kept.file, kept.line, "")
            hook = None if keeping else self._find_text(r"\.register_\w*hook\(")
            kept = self._line((at[0], keeping)) if keeping else hook or kept
        return f"{kept.place}  {kept.text}"

    def _find_kept_probe(self) -> str:
        """Return the line that called a model whose outputs of the first counted steps are still there."""
        # A person who collects garbage at times of their own lets it wait on purpose.
        if self.steps < PROBED or len(self.counted) < 2 or not gc.isenabled():
            return ""
        kept = set.intersection(*(c.modules.find_alive() for c in self.counted))
        if kept and not self.collected:  # what waits to be collected is not kept; it takes a while, so once
            self.collected = True
            gc.collect()
            return self._find_kept_probe()
        if not kept:
            return ""
        backward = self.backward and self._line(self.backward[0])
        if backward and (keeping := _find_keeping(backward)):  # a sum of losses keeps all that these were made of
            line = self._line((self.backward[0][0], keeping))
            return f"{line.place}  {line.text}"
        own = min(kept, key=len)
        line, *around = map(self._line, own)
        called = f", called at {around[0].place}," if around else ""
        return f"{line.place}  {line.text}{called}"

    def _find_calls(self, found: Attribution) -> tuple[int, Line | None, bool]:
        """Return the calls of a module in a step, for one sample after another; their line; whether for every sample.

        One that is no part, and given whole batches, is called for something else, such as views of them.
        """
        sizes = (loader.batch for loader in self.loaders)
        batch = min((size for size in sizes if size > 1), default=math.inf)  # a validation's may be larger
        for modules in (c.modules for c in self.counted):
            small = {key: n for key, n in modules.models.items() if modules.find_batch(key) < batch}
            for calls, every_sample in ((modules.find_parts(), True), (Counter(small), False)):
                for (own, _), n in calls.most_common(1):
                    if n >= SAMPLES and self._is_in_inner_loop(own, found):
                        return n, self._line(own[0]), every_sample
        return 0, None, False

    def _is_in_inner_loop(self, own: tuple[OwnLine, ...], found: Attribution) -> bool:
        """Say whether a call comes from a loop that goes neither over batches nor through time."""
        for at in own:  # outwards, for a helper may be what is called in a loop
            line = self._line(at)
            if spans := self._find_inner_loops(line, found):
                return not _goes_through_time(spans[-1])
            if found.loop is None or found.loop.holds(line.file, line.line):
                break
        return False

    def _find_inner_loops(self, line: Line, found: Attribution) -> list[source.Span]:
        """Return the loops around a line, comprehensions too, that are neither over batches nor around that one."""
        path = source.find_path(line.file, line.line)
        looping = [n for n in path if isinstance(n, INNER_LOOPS) or (n is path[-1] and MAPPING.search(line.text))]
        spans = [source.to_span(line.file, node) for node in looping]
        return [s for s in spans if found.loop is None or not s.holds(found.loop.file, found.loop.start)]

    def _find_thread(self) -> tuple[float, Line | None]:
        """Return (looks at another thread that was running a line of the person's, a look; the line seen most)."""
        running = {
            at: n for at, n in dict(self.sampler.others).items() if find_kind(self._line(at).text, "") != WAITING
        }
        line = max(running, key=running.__getitem__, default=None)
        return sum(running.values()) / max(self.sampler.looks, 1), line and self._line(line)

    def _find_holding(self) -> Line | None:
        number, line = self.backward[0] if self.backward else (0, 0)
        kept = line and source.find_holding(self.roles.codes[number].co_filename, line)
        if kept:
            return self._line((number, kept))
        lines = (self._line(at) for at in {at for c in self.counted for at in c.lines} if at)  # as of a hook
        return next((line for line in lines if source.is_holding(line.file, line.line)), None)

    def _find_second_graph(self) -> Line | None:
        """Return the pass backward with create_graph=True, where no gradient of a gradient is asked for."""
        if not self.second_graph or self._find_text(r"autograd\.(grad|functional)\b|hessian|\bgrad\(.*create_graph"):
            return None
        return self._line(self.backward[0]) if self.backward else None

    def _find_growth(self) -> float:
        """Return the bytes a step by which memory grows, 0 where it does not, after a first half to settle in."""
        points = self.memory[len(self.memory) // 2 :]
        steps = points[-1][0] - points[0][0] if len(points) > 1 else 0
        if steps < len(points) or len(points) < 8 or points[-1][1] - points[0][1] < GROWN:
            return 0.0
        slope, leaks = growth([size * (len(points) - 1) / steps for _, size in points])
        return slope if leaks else 0.0

    def _find_growing(self) -> Line | None:
        """Return the line that joins a table to more at each step, by as much as it did at the steps before."""
        if len(self.counted) < len(COUNTED):
            return None
        for at in self.counted[0].joined:
            before, rise = _slopes(list(zip(COUNTED, (c.joined[at] for c in self.counted), strict=True)))
            line = self._line(at)
            if before > 0 and abs(rise / before - 1) < STEADY and re.search(GROWING, line.text):
                return line
        return None

    def _find_slowing(self) -> float:
        """Return how many times as long a step takes in the last third of the time as in the first."""
        at = [steps for steps, _ in self.memory if COUNTED[-1] < steps < self.steps]  # at even times, to the last step
        # Without the pauses between two epochs, which are no slow steps; the median, for they begin and end in between.
        taken = [after - before for before, after in itertools.pairwise(at) if after > before]
        third = len(taken) // 3
        return median(taken[:third]) / median(taken[-third:]) if third > 2 else 1.0


def _find_keeping(backward: Line) -> int:
    """Return the line that keeps the loss of a pass backward, 0 where none is found."""
    match = re.search(r"([\w.]+)\.backward|backward\(\s*([\w.]+)", backward.text)
    return source.find_keeping(backward.file, backward.line, (match[1] or match[2]) if match else "loss")


def _rise(points: list[tuple[int, int]]) -> float:
    """Return by how much the last of (steps, number) grows a step, where it grew as before and is many; else 0."""
    before, rise = _slopes(points[-3:]) if len(points) > 2 else (0.0, 0.0)
    return rise if min(before, rise) > 0.5 or (points[-1][1] >= PILED and before / 2 < rise < 2 * before) else 0.0


def _slopes(points: list[tuple[int, int]]) -> tuple[float, ...]:
    """Return by how much the second of a pair grows for each of the first, from each point to the next."""
    return tuple((n1 - n0) / (s1 - s0) for (s0, n0), (s1, n1) in itertools.pairwise(points))


def _only_passes(line: Line) -> bool:
    """Say whether a line only starts torch's own work, whose time is torch's whatever was counted."""
    return bool(source.ONLY_PASSES.search(line.text)) and not line.kind


def _goes_through_time(span: source.Span) -> bool:
    head = source.read_line(span.file, span.start)
    return bool(TIME.search(head))


def _loads_in_own_code(found: Attribution) -> bool:
    data = [line for line in found.lines if line.account == "data"]
    own = sum(line.seconds for line in data if not (found.loop and line.file == found.loop.file
                                                   and found.loop.start <= line.line <= found.loop.head))  # fmt: skip
    return own > 0.5 * sum(line.seconds for line in data)
