"""From what a watch has seen of a loop to a verdict with advice: pure."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cpbkit.gpu_check import source
from cpbkit.gpu_check.diagnosis import SUSPICIOUS, Diagnosis, Fix
from cpbkit.gpu_check.numbers import NAN, Policy
from cpbkit.gpu_check.shares import REPLAY, Line, cure_of, cure_of_data
from cpbkit.gpu_check.soundness import Unsound

LEAST_LOOKS, LEAST_STEPS = 30, 3
ALL_AT_ONCE = (
    "compute all pairs at once: x[:, None] - x[None], torch.cdist(x, x), x @ x.T, or torch.triu for a mask; and choose "
    "with torch.where or a mask, not with if"
)


@dataclass(frozen=True)
class Taken:
    """A batch that the loop takes apart row by row."""

    line: Line
    rows: int  # a step
    share: float  # of the loop's time, under the inner loop


@dataclass(frozen=True)
class Seen:
    """What was seen of a loop. Shares are of its time between its first and last step; NaN means not known."""

    seconds: float
    steps: int
    looks: int
    shares: Mapping[str, float]  # by account
    lines: tuple[Line, ...] = ()
    inside: float = 0.0  # share of a validation within the loop over batches
    python: tuple[Line, ...] = ()  # lines in the step that are no work of torch's
    operators: float = NAN  # a step
    starting: float = NAN  # share of the model's time that goes into starting operators
    float64: float = 0.0  # share of the operators' time
    taken: tuple[Taken, ...] = ()
    pairs: Line | None = None  # a loop over the pairs of a batch, in which most operators are started
    dense: tuple[int, tuple[int, int]] | None = None  # rows of the largest embedding, (of which are read, numbers)
    dense_line: Line | None = None  # that makes one
    threads: float = 1.0  # of torch, as a share of the cores
    threads_line: Line | None = None  # that sets them
    unsound: tuple[tuple[Unsound, Line | None], ...] = ()  # the worst first
    unused: float = 0.0  # share of the gradients, in numbers, that no optimiser uses
    thrown: float = 0.0  # share of the gradients, in numbers, that are set to zero before a step uses them
    thrown_line: Line | None = None  # the pass backward that makes them
    repeated: float = 0.0  # share of the time in which the same numbers are computed again
    repeated_within: bool = False  # a step, or else from step to step
    repeated_line: Line | None = None
    second_graph: Line | None = None  # a pass backward that can be differentiated, and is not
    optimizer_line: Line | None = None  # that makes it
    float64_line: Line | None = None  # that asks for it
    small_batch: tuple[int, Line | None] = (0, None)  # samples, where they are few, and the line that says so
    gates: int = 0  # of a recurrence written out, a step
    waits: int = 0  # a step
    wait_lines: tuple[Line, ...] = ()
    modes: tuple[str, ...] = ()  # of debugging, that are on
    mode_line: Line | None = None  # that switches them on
    kept: tuple[str, ...] = ()  # variables that keep the graphs of earlier steps
    hooks: float = 0.0  # more at each step, on one module
    hooks_line: Line | None = None  # that registers one
    thread: tuple[float, Line | None] = (0.0, None)  # looks at another one that runs Python, a look; its line
    denormal: tuple[float, Line | None] = (0.0, None)  # share of the operators' time on such numbers; what makes them
    one_by_one: tuple[int, Line | None] = (0, None)  # calls of the model a step, one after another from a loop
    waiting: float = 0.0  # share of the time in which the thread that trains did not run
    padding: tuple[float, bool] = (0.0, False)  # share of the ids that a model reads; whether the longest row has some
    padding_line: Line | None = None
    last: int = 0  # steps in time of which a wide layer's outputs are computed, for one that is used
    last_line: Line | None = None
    graphs: bool = False  # a validation builds graphs, and no pass backward follows
    asked: bool = False  # the trained model makes most of its data, as where a policy acts
    fused: bool = True  # the optimiser has such an option
    growth: float = 0.0  # bytes a step, where memory grows steadily
    held: Line | None = None  # that keeps more than numbers of every step
    workers: int = 0  # of the loader
    starts: int = 0  # of workers
    starts_line: Line | None = None
    loads_in_own_code: bool = False  # the loader's time is under a line of the person's
    gpu_there: bool = False
    on_gpu: bool = False
    busy: float = NAN  # share of the time in which the device worked
    behind: float = NAN  # share of steps at whose end the device was not yet done with the step before
    problems: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Limits:
    """Shares of the time above which something is the verdict; they travel with it."""

    own_loader: float = 0.25  # data, where a line of the person's makes it
    workers: float = 0.33
    plain_loader: float = 0.45  # data by torch's own dataset: most small loops have some of it
    python: float = 0.20
    taken: float = 0.20
    validation: float = 0.25
    outside: float = 0.30
    starting: float = 0.70  # of the model's time
    starting_few: float = 0.5  # of the model's time, where a batch is small
    small_batch: float = 8  # samples
    operators: float = 400.0  # a step: below, a small model is as fast as it gets one by one
    optimizer: float = 0.25
    steps_a_start: float = 200.0  # of workers: below, starting them is what takes the time
    too_many: float = 2.0  # threads a core
    unused: float = 0.4  # of the gradients
    repeated: float = 0.15
    thread: float = 0.5  # looks at it, a look
    padding: float = 0.6  # of the ids
    rows_moved: float = 20.0  # of an embedding, for each that is read
    numbers_moved: float = 1e6
    busy: float = 0.85
    told: float = 0.10  # below, not even worth a word


def judge_loop(seen: Seen, environment: tuple[tuple[str, str], ...] = (), limits: Limits | None = None) -> Diagnosis:
    """Name the one thing that costs most; the rest comes beside it."""
    limits = limits or Limits()
    findings = sorted(_find(seen, limits), key=lambda found: -found[0])
    evidence = tuple(_evidence(seen))
    if seen.steps < LEAST_STEPS or seen.looks < LEAST_LOOKS:
        text = f"{seen.steps} steps in {seen.seconds:.1f} s were seen: watch a loop for some seconds."
        if not seen.steps:
            text = "No step of an optimiser of torch's was seen: is the loop inside the watch, and in this process?"
        return Diagnosis("INCONCLUSIVE", "", text, evidence, (), seen.problems, Policy())
    first = findings[0] if findings else (0.0, "DEVICE_BOUND", "", _say_healthy(seen), ())
    _, verdict, reason, text, fixes = first
    beside = [f"{name}: {words}" for _, name, _, words, _ in findings[1:]]
    beside += [f"{code}: {words}" for code, words in environment]
    if seen.growth and not seen.kept and verdict != "MEMORY_GROWTH":
        beside.append(f"MEMORY_GROWTH: memory grows by {seen.growth / 1024:,.0f} KB a step")
    fixes = (*fixes, *_advise_beside(seen, limits, verdict))
    return Diagnosis(verdict, reason, text, evidence, fixes, (*beside, *seen.problems), Policy())


def _find(seen: Seen, limits: Limits):
    """Yield (share of the time, or above 1 for what is said first; verdict; reason; text; fixes)."""
    share = {name: seen.shares.get(name, 0.0) for name in
             ("data", "forward", "backward", "optimiser", "validation", "rest", "outside")}  # fmt: skip
    model = share["forward"] + share["backward"] + share["optimiser"]
    device_sets_pace = seen.on_gpu and (seen.busy > limits.busy or (math.isnan(seen.busy) and seen.behind > 0.5))
    if seen.gpu_there and not seen.on_gpu:
        text = "No kernel ran on the GPU: the model and its batches are on the CPU."
        cure = 'model.to("cuda"), and each batch: x.to("cuda", non_blocking=True)'
        yield 4.0, "NO_WORK_ON_GPU", "", text, (Fix("move to the GPU", NAN, cure, True),)
    if seen.modes:
        text = f"A debug mode is on in the step: {seen.modes[0]}{_at(seen.mode_line)}."
        yield 3.0, "DEBUG_MODE_ON", seen.modes[0], text, ()
    for rank, (found, line) in enumerate(seen.unsound):
        fix = Fix("a training that learns", NAN, found.cure, True)
        yield 2.0 - rank / 10, "UNSOUND_TRAINING", found.reason, f"{found.text}{_at(line)}.", (fix,)
    if seen.hooks:
        text = f"Hooks pile up: {seen.hooks:.2g} more on a module at each step, which then calls all of them"
        cure = "register a hook once, before the loop; or take it off again: handle = ...; handle.remove()"
        yield (
            1.1,
            "PYTHON_OR_IO_IN_STEP",
            "hooks",
            f"{text}{_at(seen.hooks_line)}.",
            (Fix("one hook", NAN, cure, True),),
        )
    running, line = seen.thread
    if running > limits.thread and seen.waiting > limits.python and line:
        text = f"Another thread runs Python beside the training, which waits for the interpreter{_at(line)}."
        cure = "let it sleep between its turns, or run it as a process: one thread at a time runs Python"
        fixes = _cure("no other thread", seen.waiting, cure)
        yield seen.waiting, "PYTHON_OR_IO_IN_STEP", "thread", text, fixes
    padded, each = seen.padding
    if padded > limits.padding and model > limits.python:
        text = f"{padded:.0%} of the ids that the model reads are padding{_at(seen.padding_line)}."
        cure = "pad each batch to its own longest row: collate_fn with torch.nn.utils.rnn.pad_sequence; and batches of "
        cure += "rows of like length" if each else "rows of like length, sorted by it, for one long row fills up all"
        yield model * padded, "WASTED_WORK", "PADDING", text, _cure("less padding", model * padded, cure)
    if seen.last:
        text = f"A wide layer computes its outputs for {seen.last} steps in time, and one of them is used"
        cure = "take the step that is used first: head(h[:, -1]), in place of head(h)[:, -1]"
        yield model / 2, "WASTED_WORK", "LAST_STEP", f"{text}{_at(seen.last_line)}.", _cure("one step", model / 2, cure)
    if device_sets_pace:
        return  # the host waits: whatever line it waits at costs nothing
    outside = share["outside"] + share["validation"] - seen.inside
    in_eval_mode = any(found.reason == "EVAL_MODE" for found, _ in seen.unsound)  # what looks like one is the training
    graphs = no_grad = ""
    if seen.graphs and not in_eval_mode:
        graphs, no_grad = ", and builds graphs that nobody uses", "with torch.no_grad(): around it; "
    if graphs and share["validation"] - seen.inside > limits.told:
        text = f"A validation takes {share['validation']:.0%} of the time{graphs}{_at(_top(seen, 'validation'))}."
        fixes = _cure("no graph", share["validation"] / 2, f"{no_grad}and keep loss.item(), not the loss")
        yield outside + 0.01, "WASTED_WORK", "VALIDATION_GRAPHS", text, fixes
    if outside > limits.outside:
        line = _top(seen, "outside") or _top(seen, "validation")
        reason = "validation" if share["validation"] - seen.inside > share["outside"] else "between epochs"
        text = f"{outside:.0%} of the time is outside the loop over batches{_at(line)}."
        cure = cure_of(line.kind) if line and line.kind else "do it more rarely, or beside the training"
        yield outside, "GPU_IDLE_OUTSIDE_STEPS", reason, text, _cure("less between steps", outside, cure)
    if seen.inside > limits.validation and not in_eval_mode:
        line = _top(seen, "validation")
        text = f"A validation inside the loop over batches takes {seen.inside:.0%} of the time{graphs}{_at(line)}."
        cure = f"{no_grad}validate once an epoch, or every so many steps, in eval mode and without gradients"
        yield seen.inside, "VALIDATION_IN_STEP", "", text, _cure("validate once an epoch", seen.inside, cure)
    often = seen.starts > 2 and seen.steps < limits.steps_a_start * seen.starts / 10
    limit = limits.own_loader if seen.loads_in_own_code else limits.plain_loader
    if seen.workers:
        limit = limits.workers
    if often:
        limit = limits.told
    line = _top_of_data(seen)
    asked_by = f"{line.text} {source.read_line(line.caller_file, line.caller)}" if line else ""
    if share["data"] > limit and (not seen.asked or re.search(REPLAY, asked_by)):
        reason = "WORKERS" if seen.workers else "LOADER_ON_THE_HOST"
        cure = "workers=0, and the whole series as one tensor that is indexed by the batch"
        if not seen.workers:
            cure = cure_of_data(line)
        text = f"The loop waits for its batches {share['data']:.0%} of the time"
        if seen.starts > 2 and seen.steps < limits.steps_a_start * seen.starts:
            line, reason = seen.starts_line or line, "WORKERS_STARTED_AGAIN"
            text += f", and starts its workers again every {seen.steps / seen.starts:.0f} steps"
            cure = "one DataLoader for all epochs, with persistent_workers=True; or workers=0 for data in memory"
        text += f"{_at(line)}."
        yield share["data"], "DATA_STARVED", reason, text, _cure("quicker batches", share["data"], cure)
    python = sum(line.seconds for line in seen.python) / max(seen.seconds, 1e-9)
    lines = _largest(seen.python, lambda line: line.part)
    part = sum(line.seconds for line in lines)
    if python > limits.python and part > limits.told * seen.seconds:
        kinds: defaultdict[str, float] = defaultdict(float)
        for line in lines:
            kinds[line.kind] += line.seconds
        kind = max(kinds, key=kinds.__getitem__)
        what = f"{kind[:1].upper()}{kind[1:]}" if kind else "Python"
        text = f"{what} takes {part / seen.seconds:.0%} of every step{_at(lines[0])}."
        nested = not kind and len(source.find_loops(lines[0].file, lines[0].line)) > 2
        cure = ALL_AT_ONCE if nested else cure_of(kind)
        yield python, "PYTHON_OR_IO_IN_STEP", kind, text, _cure("out of the step", python, cure)
    for taken in seen.taken[:1]:
        if taken.share > limits.taken:
            text = f"The batch is taken apart, {taken.rows} rows a step one by one: {taken.share:.0%} of the time"
            cure = "give the model the whole batch: x[i] becomes x, and a sum over samples a mean over the first axis"
            # The backward of every row comes on top.
            weight = min(1.0, taken.share + share["backward"])
            yield weight, "SAMPLE_BY_SAMPLE", "", f"{text}{_at(taken.line)}.", _cure("the whole batch", weight, cure)
    if seen.dense and share["optimiser"] + share["backward"] > limits.optimizer:
        rows, (read, moved) = seen.dense
        if rows > limits.rows_moved * read and moved > limits.numbers_moved:
            text = f"The optimiser moves all {rows:,} rows of an embedding, of which a step reads {read:,} at most"
            text += f": {share['optimiser']:.0%} of the time{_at(seen.dense_line or _top(seen, 'optimiser'))}."
            weight = share["optimiser"] + share["backward"] / 2
            cure = "nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, which moves the rows that were read"
            yield weight, "DENSE_EMBEDDING", "", text, _cure("sparse gradients", weight, cure)
    if seen.threads <= 0.5 and seen.threads_line and not seen.on_gpu and seen.starting < 0.5:
        weight = model * (1 - seen.threads)
        text = f"Torch computes on {seen.threads:.0%} of the cores{_at(seen.threads_line)}."
        if weight > limits.python:
            yield weight, "FEW_THREADS", "", text, _cure("all cores", weight, "take it out: torch takes all cores")
    if seen.threads >= limits.too_many and not seen.on_gpu:
        text = (
            f"Torch computes in {seen.threads:.0f} threads a core, which wait for each other{_at(seen.threads_line)}."
        )
        cure = "take it out: torch takes as many threads as there are cores"
        yield max(0.5, model / 2), "TOO_MANY_THREADS", "", text, (Fix("a thread a core", NAN, cure, True),)
    if seen.unused > limits.unused and not any(found.reason == "UNREGISTERED" for found, _ in seen.unsound):
        text = f"{seen.unused:.0%} of the gradients that backward computes are of weights that no optimiser moves"
        cure = "of a part that is not to be trained, requires_grad_(False), or run it under torch.no_grad(); else give "
        cure += "its weights to the optimiser"
        weight = share["backward"] * seen.unused
        line = seen.optimizer_line or _top(seen, "backward")
        if weight > limits.told:
            yield (
                weight,
                "WASTED_WORK",
                "UNUSED_GRADIENTS",
                f"{text}{_at(line)}.",
                _cure("no such gradients", weight, cure),
            )
    if share["backward"] * seen.thrown > limits.told:
        weight = share["backward"] * seen.thrown
        text = "A pass backward goes on through another optimiser's model, and its gradients are thrown away"
        cure = "cut it off: discriminator(fake.detach()), or make fake under torch.no_grad()"
        yield weight, "WASTED_WORK", "THROWN", f"{text}{_at(seen.thrown_line)}.", _cure("detach", weight, cure)
    slow, line = seen.denormal
    if slow > limits.python:
        text = (
            f"{slow:.0%} of the operators' time goes into numbers so near 0 that a CPU computes them slowly{_at(line)}."
        )
        cure = "torch.set_flush_denormal(True) before training, or set what is below 1e-30 to 0"
        yield slow * model, "WASTED_WORK", "DENORMAL", text, (Fix("no denormal numbers", NAN, cure, True),)
    if seen.second_graph and share["backward"] > limits.told:
        weight = share["backward"] / 2
        text = "Each pass backward builds a graph of itself, for gradients of gradients, which nothing takes"
        cure = "loss.backward() without create_graph=True, which also keeps weights and gradients in memory for ever"
        fixes = _cure("no second graph", weight, cure)
        yield max(weight, 0.3), "WASTED_WORK", "CREATE_GRAPH", f"{text}{_at(seen.second_graph)}.", fixes
    if seen.repeated > limits.repeated:
        text = f"{seen.repeated:.0%} of the time computes again, with the same result, what "
        text += "the same step has computed before" if seen.repeated_within else "every step before has computed"
        cure = "compute it once, before the loop: in a model, in __init__ with self.register_buffer(name, tensor)"
        if seen.repeated_within:
            cure = "keep the result in a variable and use it again, as out = model(x) for the loss and for a metric"
        fixes = _cure("compute it once", seen.repeated, cure)
        yield seen.repeated, "WASTED_WORK", "REPEATED", f"{text}{_at(seen.repeated_line)}.", fixes
    for line in (line for line in seen.lines if line.account in ("forward", "rest", "data")):
        if "one_hot(" in line.text and line.seconds > limits.python * seen.seconds:
            weight = line.seconds / seen.seconds
            text = f"Zeros and ones are multiplied with weights, {weight:.0%} of the time to make them{_at(line)}."
            cure = "nn.Embedding, or indexing: it reads the rows that a product with ones and zeros would choose"
            yield weight, "WASTED_WORK", "ONE_HOT", text, _cure("an embedding", weight, cure)
            break
    if seen.kept:
        text = f"{seen.kept[0]} keeps the graph of every step since the loop began."
        cure = "add numbers, not graphs: total += loss.detach(), losses.append(loss.item()); and carry a state on as "
        cure += "state.detach()"
        if re.search(r"\.(append|extend|insert|add)\((?!.*loss)", seen.kept[0]):  # not a number, but whole tensors
            text = f"{seen.kept[0]} keeps the tensors of every step since the loop began, and their graphs."
            cure = "keep a number of each, float(...), or write what is needed to a file: detach() alone would free "
            cure += "the graph, and leave every batch in memory"
        yield 0.45, "GRAPH_KEPT", "", text, (Fix("keep no graph", NAN, cure, True),)
    if seen.growth and seen.held and not seen.kept and not re.search(REPLAY, seen.held.text):
        text = f"Memory grows by {seen.growth / 1024:,.0f} KB a step, by what is kept of it{_at(seen.held)}."
        cure = "keep a number of each step, float(...), or write what is needed to a file"
        if "cycle(" in seen.held.text:
            cure = "it keeps every batch: `while True: for batch in loader: ...`"
        elif source.KEEPING.search(seen.held.text):
            cure = "a cache has keys that come again, and an end: collections.OrderedDict with popitem(last=False)"
        yield 0.12, "MEMORY_GROWTH", "", text, (Fix("keep numbers", NAN, cure, True),)
    if seen.float64 > 0.5:
        line = _top(seen, "forward")
        text = f"{seen.float64:.0%} of the operators' time is in float64, which training rarely needs{_at(line)}"
        text += (
            f"; it is asked for at {seen.float64_line.place}  {seen.float64_line.text[:70]}."
            if seen.float64_line
            else "."
        )
        cure = "model.float(), and float32 batches: NumPy and pandas give float64 unless told"
        yield 0.4, "FLOAT64", "", text, _cure("float32", model / 2, cure)
    if seen.on_gpu and seen.waits and share["rest"] + share["forward"] > limits.python:
        line = seen.wait_lines[0] if seen.wait_lines else None
        yield (
            0.17,
            "SYNC_BOUND",
            f"{seen.waits} waits a step",
            f"The host waits for the device in every step{_at(line)}.",
            (),
        )
    samples, line = seen.small_batch
    apart = any(taken.share > limits.taken for taken in seen.taken)
    if 0 < samples <= limits.small_batch and not apart and seen.starting > limits.starting_few:
        verdict = "SAMPLE_BY_SAMPLE" if samples == 1 else "HOST_BOUND"
        few = f"{samples} sample{'s' * (samples > 1)}"
        text = f"Each step trains on {few}, and starting operators is most of it{_at(line)}."
        yield 0.35, verdict, "SMALL_BATCH", text, _cure("a batch", model, "DataLoader(..., batch_size=64)")
    if seen.pairs and seen.starting > limits.starting_few and seen.operators > limits.operators:
        weight = model * seen.starting
        text = f"A loop over pairs starts most of {seen.operators:,.0f} operators a step{_at(seen.pairs)}."
        yield weight, "HOST_BOUND", "PAIRS", text, _cure("all pairs at once", weight, ALL_AT_ONCE)
    elif seen.one_by_one[0] and seen.starting > limits.starting and seen.operators > limits.operators:
        calls, line = seen.one_by_one
        text = f"The model is called {calls} times a step, for one sample after another{_at(line)}."
        cure = (
            "one call for the batch: samples of one shape as torch.stack(samples); others padded, with a mask, or put "
        )
        cure += "end to end with the number of their sample, as batches of graphs are"
        weight = model * seen.starting
        yield weight, "SAMPLE_BY_SAMPLE", "CALLS", text, _cure("the whole batch", weight, cure)
    elif seen.starting > limits.starting and seen.operators > limits.operators:
        reason = "RNN_NOT_CUDNN" if seen.gates >= 40 else "MANY_SMALL_OPS"
        if reason == "MANY_SMALL_OPS" and share["optimiser"] > max(share["forward"], share["backward"]) and seen.fused:
            reason = "OPTIMIZER_FOR_LOOP"
        cure = {
            "RNN_NOT_CUDNN": "nn.LSTM or nn.GRU over the whole sequence, in place of a cell in a loop",
            "OPTIMIZER_FOR_LOOP": "torch.optim.Adam(..., fused=True)",
            "MANY_SMALL_OPS": "fewer and wider layers, larger batches, or many series as one stack",
        }[reason]
        text = f"Starting {seen.operators:,.0f} small operators a step takes {seen.starting:.0%} of the model's time"
        text += f"{_at(_top(seen, 'optimiser' if reason == 'OPTIMIZER_FOR_LOOP' else 'forward'))}."
        yield 0.15, "HOST_BOUND", reason, text, _cure("fewer operators", model * seen.starting, cure)


def _cure(name: str, share: float, note: str) -> tuple[Fix, ...]:
    ceiling = 1 / max(1 - share, 1e-3)
    if ceiling > SUSPICIOUS:
        note += f"; a ceiling above {SUSPICIOUS:.0f}x is suspicious: is this the loop you meant?"
    return (Fix(name, ceiling, note, True),)


def _advise_beside(seen: Seen, limits: Limits, verdict: str):
    share = seen.shares.get("optimiser", 0.0)
    if share > limits.optimizer and verdict == "DEVICE_BOUND" and seen.fused:
        yield Fix("fused optimiser", 1 / (1 - share), f"the optimiser takes {share:.0%} of the time: fused=True", True)
    if seen.on_gpu and seen.busy < limits.busy and verdict == "DEVICE_BOUND":
        yield Fix("diagnose(step)", NAN, "tells host from device, and measures what each fix gains", True)


def _largest(lines: Iterable[Line], whole: Callable[[Line], object]) -> list[Line]:
    """Return the lines of the whole that takes most time, the longest first; no line of many need stand out."""
    groups: defaultdict[object, list[Line]] = defaultdict(list)
    for line in lines:
        groups[whole(line)].append(line)
    found = max(groups.values(), key=lambda group: sum(line.seconds for line in group), default=[])
    return sorted(found, key=lambda line: -line.seconds)


def _top(seen: Seen, account: str) -> Line | None:
    """Return the line to name for an account: the longest of the function, or of the part, that takes most of it."""
    by_function = account in ("data", "forward")
    lines = [line for line in seen.lines if line.account == account]
    found = _largest(lines, lambda line: (line.file, line.function) if by_function else line.part)
    return found[0] if found else None


def _top_of_data(seen: Seen) -> Line | None:
    line = _top(seen, "data")
    # What the head of the loop takes itself is the loader's work; an own line that it leads to can be changed.
    below = [one for one in seen.lines if one.account == "data" and one.caller]
    return below[0] if line and not line.caller and below and 2 * below[0].seconds > line.seconds else line


def _at(line: Line | None) -> str:
    if line is None:
        return ""
    called = ""
    if line.caller:
        called = f", called at {source.name_file(line.caller_file)}:{line.caller}"
    if line.around and line.around not in (line.line, line.caller):
        called = f", in the loop at {line.place.rpartition(':')[0]}:{line.around}{called}"
    text = line.text.rstrip(":") if len(line.text) <= 70 else f"{line.text[:68]}.."
    return f": {line.place}  {text}{called}"


def _say_healthy(seen: Seen) -> str:
    model = sum(seen.shares.get(name, 0.0) for name in ("forward", "backward", "optimiser"))
    if seen.on_gpu:
        return "The device or the model itself sets the pace: nothing of the host stands out."
    if seen.asked:
        data = seen.shares.get("data", 0.0)
        return f"Training takes {model:.0%} of the time, and {data:.0%} the data that the model is asked for itself."
    return f"The model itself sets the pace: forward, backward and optimiser take {model:.0%} of the time."


def _evidence(seen: Seen):
    parts = (f"{name} {share:.0%}" for name, share in seen.shares.items() if share >= 0.005)
    yield f"{seen.steps} steps in {seen.seconds:.1f} s: {', '.join(parts)}"
    if math.isfinite(seen.operators):
        yield f"{seen.operators:,.0f} operators a step, and {seen.starting:.0%} of the model's time is starting them"
    if math.isfinite(seen.busy):
        yield f"the device was busy {seen.busy:.0%} of the time"
    for line in seen.lines[:5]:
        share = line.seconds / max(seen.seconds, 1e-9)
        if share >= 0.03:
            yield f"{line.place}  {line.text[:60]}  {share:.0%} ({line.account})"
