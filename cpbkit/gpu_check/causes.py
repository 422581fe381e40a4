"""What costs a loop its time, or keeps it from learning: a rule for each cause, from what was seen of the loop. Pure.

Shares are of the loop's time. The cause with the largest weight is the verdict, and the others are told beside it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cpbkit.gpu_check import source
from cpbkit.gpu_check.diagnosis import SUSPICIOUS, Fix
from cpbkit.gpu_check.numbers import NAN
from cpbkit.gpu_check.seen import Seen
from cpbkit.gpu_check.shares import REPLAY, Line, cure_between_steps, cure_of, cure_of_data

TOLD = 0.10  # share below which nothing is worth a word
TAKES_MUCH = 0.20
OWN_LOADER, PLAIN_LOADER, WORKERS = 0.25, 0.45, 0.33  # of data: by an own line; torch's own, as in most small loops
VALIDATION, OUTSIDE, OPTIMIZER = 0.25, 0.30, 0.25
STARTING, STARTING_FEW = 0.70, 0.50  # of the model's time that starts operators; where a batch is small
OPERATORS = 400  # a step: below, a small model is as fast as it gets one by one
SMALL_BATCH = 8  # samples
STEPS_A_START = 200  # of workers: below, starting them is what takes the time
SLOWING, SLOWING_BY_TABLE = 1.4, 1.15  # times as long as at first; where a table is seen to grow
REPEATED = 0.15
UNUSED = 0.4  # of the gradients
ANOTHER_THREAD = 0.5  # looks at it, a look
BACKWARD = 4  # times a pass forward: two are usual
RETRACED = 0.5  # of a graph
PADDING = 0.6  # of the ids
ROWS_MOVED, NUMBERS_MOVED = 20, 1e6  # rows of an embedding for each that is read, and numbers in all
TOO_MANY = 2  # threads a core
DEVICE_BUSY = 0.85
ALL_AT_ONCE = (
    "compute all pairs at once: x[:, None] - x[None], torch.cdist(x, x), x @ x.T, or torch.triu for a mask; and choose "
    "with torch.where or a mask, not with if"
)


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with a loop."""

    weight: float  # share of the time that it costs; above 1 where it comes before all that only costs time
    verdict: str
    reason: str  # a finer name, or ""
    text: str  # a sentence, with the line
    fixes: tuple[Fix, ...] = ()


def find_causes(seen: Seen) -> list[Cause]:
    """Return all that is wrong with a loop, the worst first."""
    # A host that waits for its device may wait at any line, which costs nothing.
    rules = ALWAYS if is_held_by_device(seen) else ALWAYS + BESIDE_DEVICE
    found = (cause for rule in rules for cause in rule(seen))
    return sorted(found, key=lambda cause: -cause.weight)


def is_held_by_device(seen: Seen) -> bool:
    """Say whether the device beside the host sets the pace."""
    return seen.on_gpu and (seen.busy > DEVICE_BUSY or (math.isnan(seen.busy) and seen.behind > 0.5))


def fix(name: str, gain: float, note: str) -> tuple[Fix, ...]:
    """Return a cure with its ceiling; `gain` is the share of the time that it gives back, NaN where nobody knows."""
    ceiling = NAN if math.isnan(gain) else 1 / max(1 - gain, 1e-3)
    if ceiling > SUSPICIOUS:
        note += f"; a ceiling above {SUSPICIOUS:.0f}x is suspicious: is this the loop you meant?"
    return (Fix(name, ceiling, note, True),)


# Whatever the device does.


def _find_idle_gpu(seen: Seen) -> Iterator[Cause]:
    if seen.gpu_there and not seen.on_gpu:
        text = "No kernel ran on the GPU: the model and its batches are on the CPU."
        cure = 'model.to("cuda"), and each batch: x.to("cuda", non_blocking=True)'
        yield Cause(4.0, "NO_WORK_ON_GPU", "", text, fix("move to the GPU", NAN, cure))


def _find_debug_mode(seen: Seen) -> Iterator[Cause]:
    if seen.modes:
        text = f"A debug mode is on in the step: {seen.modes[0]}{at(seen.mode_line)}."
        yield Cause(3.0, "DEBUG_MODE_ON", seen.modes[0], text)


def _find_unsound(seen: Seen) -> Iterator[Cause]:
    for rank, (unsound, line) in enumerate(seen.unsound):
        fixes = fix("a training that learns", NAN, unsound.cure)
        yield Cause(2.0 - rank / 10, "UNSOUND_TRAINING", unsound.reason, f"{unsound.text}{at(line)}.", fixes)


def _find_hooks(seen: Seen) -> Iterator[Cause]:
    if seen.hooks:
        text = f"Hooks pile up: {seen.hooks:.2g} more on a module at each step, which then calls all of them"
        cure = "register a hook once, before the loop; or take it off again: handle = ...; handle.remove()"
        text += f"{at(seen.hooks_line)}."
        yield Cause(1.1, "PYTHON_OR_IO_IN_STEP", "hooks", text, fix("one hook", NAN, cure))


def _find_thread(seen: Seen) -> Iterator[Cause]:
    running, line = seen.thread
    if running > ANOTHER_THREAD and seen.waiting > TAKES_MUCH and line:
        text = f"Another thread runs Python beside the training, which waits for the interpreter{at(line)}."
        cure = "let it sleep between its turns, or run it as a process: one thread at a time runs Python"
        fixes = fix("no other thread", seen.waiting, cure)
        yield Cause(seen.waiting, "PYTHON_OR_IO_IN_STEP", "thread", text, fixes)


def _find_padding(seen: Seen) -> Iterator[Cause]:
    padded, in_longest = seen.padding
    if padded > PADDING and seen.model > TAKES_MUCH:
        text = f"{padded:.0%} of the ids that the model reads are padding{at(seen.padding_line)}."
        cure = "pad each batch to its own longest row: collate_fn with torch.nn.utils.rnn.pad_sequence; and batches of "
        cure += "rows of like length"
        cure += "" if in_longest else ", sorted by it, for one long row fills up all"
        weight = seen.model * padded
        yield Cause(weight, "WASTED_WORK", "PADDING", text, fix("less padding", weight, cure))


def _find_last_step(seen: Seen) -> Iterator[Cause]:
    if seen.last:
        text = f"A wide layer computes its outputs for {seen.last} steps in time, and one of them is used"
        cure = "take the step that is used first: head(h[:, -1]), in place of head(h)[:, -1]"
        weight, text = seen.model / 2, f"{text}{at(seen.last_line)}."
        yield Cause(weight, "WASTED_WORK", "LAST_STEP", text, fix("one step", weight, cure))


# Where the host has a part in the pace.


def _find_validation(seen: Seen) -> Iterator[Cause]:
    in_eval_mode = any(unsound.reason == "EVAL_MODE" for unsound, _ in seen.unsound)
    beside = seen.share("validation") - seen.inside
    graphs, no_grad = "", ""
    if seen.graphs and not in_eval_mode:  # there, what looks like a validation is the training
        graphs, no_grad = ", and builds graphs that nobody uses", "with torch.no_grad(): around it; "
    if graphs and beside > TOLD:
        text = f"A validation takes {seen.share('validation'):.0%} of the time{graphs}{at(_top(seen, 'validation'))}."
        fixes = fix("no graph", seen.share("validation") / 2, f"{no_grad}and keep loss.item(), not the loss")
        yield Cause(seen.share("outside") + beside + 0.01, "WASTED_WORK", "VALIDATION_GRAPHS", text, fixes)
    if seen.inside > VALIDATION and not in_eval_mode:
        text = f"A validation inside the loop over batches takes {seen.inside:.0%} of the time{graphs}"
        text += f"{at(_top(seen, 'validation'))}."
        cure = f"{no_grad}validate once an epoch, or every so many steps, in eval mode and without gradients"
        yield Cause(seen.inside, "VALIDATION_IN_STEP", "", text, fix("validate once an epoch", seen.inside, cure))


def _find_outside(seen: Seen) -> Iterator[Cause]:
    validation = seen.share("validation") - seen.inside
    outside = seen.share("outside") + validation
    if outside > OUTSIDE:
        account, reason = "outside", "between epochs"
        if validation > seen.share("outside"):
            account = reason = "validation"
        line = _top(seen, account)
        text = f"{outside:.0%} of the time is outside the loop over batches{at(line)}."
        cure = cure_between_steps(line) if line else "do it more rarely, or beside the training"
        yield Cause(outside, "GPU_IDLE_OUTSIDE_STEPS", reason, text, fix("less between steps", outside, cure))


def _find_data(seen: Seen) -> Iterator[Cause]:
    share, line = seen.share("data"), _top_of_data(seen)
    steps = seen.steps / seen.starts if seen.starts > 1 else math.inf  # of workers that are started again and again
    limit = OWN_LOADER if seen.loads_in_own_code else PLAIN_LOADER
    if seen.workers:
        limit = WORKERS
    if steps < STEPS_A_START / 10:
        limit = TOLD
    asked_by = f"{line.text} {source.read_line(line.caller_file, line.caller)}" if line else ""
    if share <= limit or (seen.asked and not re.search(REPLAY, asked_by)):
        return
    text = f"The loop waits for its batches {share:.0%} of the time"
    if steps < STEPS_A_START:
        line, reason = seen.starts_line or line, "WORKERS_STARTED_AGAIN"
        text += f", and starts its workers again every {steps:.0f} steps"
        cure = "one DataLoader for all epochs, with persistent_workers=True; or workers=0 for data in memory"
    elif seen.workers:
        reason, cure = "WORKERS", "workers=0, and the whole series as one tensor that is indexed by the batch"
    else:
        reason, cure = "LOADER_ON_THE_HOST", cure_of_data(line)
    yield Cause(share, "DATA_STARVED", reason, f"{text}{at(line)}.", fix("quicker batches", share, cure))


def _find_python(seen: Seen) -> Iterator[Cause]:
    python = sum(line.seconds for line in seen.python) / max(seen.seconds, 1e-9)
    lines = _largest(seen.python, lambda line: line.part)
    part = sum(line.seconds for line in lines)
    if python <= TAKES_MUCH or part <= TOLD * seen.seconds:
        return
    kinds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        kinds[line.kind] += line.seconds
    kind = max(kinds, key=kinds.__getitem__)
    what = f"{kind[:1].upper()}{kind[1:]}" if kind else "Python"
    text = f"{what} takes {part / seen.seconds:.0%} of every step{at(lines[0])}."
    nested = not kind and len(source.find_loops(lines[0].file, lines[0].line)) > 2
    cure = ALL_AT_ONCE if nested else cure_of(kind)
    if seen.slowing > SLOWING and not kind:
        text += f" A step takes {seen.slowing:.1f} times as long as it did at first."
        cure = f"what it goes through grows with every step: empty it at the end of an epoch, or keep sums; or {cure}"
    yield Cause(python, "PYTHON_OR_IO_IN_STEP", kind, text, fix("out of the step", python, cure))


def _find_taken_apart(seen: Seen) -> Iterator[Cause]:
    if _is_taken_apart(seen) and not _is_over_pairs(seen):
        taken = seen.taken[0]
        text = f"The batch is taken apart, {taken.rows} rows a step one by one: {taken.share:.0%} of the time"
        cure = "give the model the whole batch: x[i] becomes x, and a sum over samples a mean over the first axis"
        weight = min(1.0, taken.share + seen.share("backward"))  # the backward of every row comes on top
        text += f"{at(taken.line)}."
        yield Cause(weight, "SAMPLE_BY_SAMPLE", "", text, fix("the whole batch", weight, cure))


def _is_taken_apart(seen: Seen) -> bool:
    return bool(seen.taken) and seen.taken[0].share > TAKES_MUCH


def _is_over_pairs(seen: Seen) -> bool:
    return seen.pairs is not None and seen.starting > STARTING_FEW and seen.operators > OPERATORS


def _find_dense(seen: Seen) -> Iterator[Cause]:
    if not seen.dense or seen.share("optimiser") + seen.share("backward") <= OPTIMIZER:
        return
    rows, (read, moved) = seen.dense
    if rows > ROWS_MOVED * read and moved > NUMBERS_MOVED:
        text = f"The optimiser moves all {rows:,} rows of an embedding, of which a step reads {read:,} at most"
        text += f": {seen.share('optimiser'):.0%} of the time{at(seen.dense_line or _top(seen, 'optimiser'))}."
        weight = seen.share("optimiser") + seen.share("backward") / 2
        cure = "nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, which moves the rows that were read"
        yield Cause(weight, "DENSE_EMBEDDING", "", text, fix("sparse gradients", weight, cure))


def _find_threads(seen: Seen) -> Iterator[Cause]:
    if seen.on_gpu:
        return
    weight = seen.model * (1 - seen.threads)
    if seen.threads <= 0.5 and seen.threads_line and seen.starting < 0.5 and weight > TAKES_MUCH:
        text = f"Torch computes on {seen.threads:.0%} of the cores{at(seen.threads_line)}."
        fixes = fix("all cores", weight, "take it out: torch takes all cores")
        yield Cause(weight, "FEW_THREADS", "", text, fixes)
    if seen.threads >= TOO_MANY:
        text = f"Torch computes in {seen.threads:.0f} threads a core, which wait for each other{at(seen.threads_line)}."
        fixes = fix("a thread a core", NAN, "take it out: torch takes as many threads as there are cores")
        yield Cause(max(0.5, seen.model / 2), "TOO_MANY_THREADS", "", text, fixes)


def _find_unused(seen: Seen) -> Iterator[Cause]:
    weight = seen.share("backward") * seen.unused
    told = any(unsound.reason == "UNREGISTERED" for unsound, _ in seen.unsound)
    if seen.unused > UNUSED and weight > TOLD and not told:
        text = f"{seen.unused:.0%} of the gradients that backward computes are of weights that no optimiser moves"
        cure = "of a part that is not to be trained, requires_grad_(False), or run it under torch.no_grad(); else give "
        cure += "its weights to the optimiser"
        text += f"{at(seen.unused_line or seen.optimizer_line or _top(seen, 'backward'))}."
        yield Cause(weight, "WASTED_WORK", "UNUSED_GRADIENTS", text, fix("no such gradients", weight, cure))


def _find_thrown(seen: Seen) -> Iterator[Cause]:
    weight = seen.share("backward") * seen.thrown
    if weight > TOLD:
        text = "A pass backward goes on through another optimiser's model, and its gradients are thrown away"
        cure = "cut it off: discriminator(fake.detach()), or make fake under torch.no_grad()"
        text += f"{at(seen.thrown_line)}."
        yield Cause(weight, "WASTED_WORK", "THROWN", text, fix("detach", weight, cure))


def _find_denormal(seen: Seen) -> Iterator[Cause]:
    slow, line = seen.denormal
    if slow > TAKES_MUCH:
        text = f"{slow:.0%} of the operators' time goes into numbers so near 0 that a CPU computes them slowly"
        cure = "torch.set_flush_denormal(True) before training, or set what is below 1e-30 to 0"
        fixes = fix("no denormal numbers", NAN, cure)
        yield Cause(slow * seen.model, "WASTED_WORK", "DENORMAL", f"{text}{at(line)}.", fixes)


def _find_second_graph(seen: Seen) -> Iterator[Cause]:
    if seen.second_graph and seen.share("backward") > TOLD:
        gain = seen.share("backward") / 2
        text = "Each pass backward builds a graph of itself, for gradients of gradients, which nothing takes"
        cure = "loss.backward() without create_graph=True, which also keeps weights and gradients in memory for ever"
        text += f"{at(seen.second_graph)}."
        yield Cause(max(gain, 0.3), "WASTED_WORK", "CREATE_GRAPH", text, fix("no second graph", gain, cure))


def _find_retained(seen: Seen) -> Iterator[Cause]:
    again = _going_back(seen)
    if seen.retained and (seen.passes > 2 or seen.retraced > RETRACED) and again > TAKES_MUCH:
        text = f"Each of {seen.passes:.0f} passes backward a step goes through the graphs of those before it once more"
        cure = "carry a state on as state.detach(); or add up the losses, and go backward once"
        if seen.passes <= 2:
            text = f"{seen.retraced:.0%} of what a pass backward goes through was computed at earlier steps"
            cure = "carry a state on as state.detach(), and leave retain_graph=True out"
        yield Cause(again, "GRAPH_KEPT", "", f"{text}{at(seen.retained)}.", fix("each graph once", again, cure))


def _going_back(seen: Seen) -> float:
    """Return the share of the time in which passes backward go through more than what was computed since the last."""
    return seen.share("backward") - BACKWARD * seen.share("forward")


def _find_repeated(seen: Seen) -> Iterator[Cause]:
    if seen.repeated <= REPEATED:
        return
    when = "every step before has computed"
    cure = "compute it once, before the loop: in a model, in __init__ with self.register_buffer(name, tensor)"
    if seen.repeated_within:
        when = "the same step has computed before"
        cure = "keep the result in a variable and use it again, as out = model(x) for the loss and for a metric"
    text = f"{seen.repeated:.0%} of the time computes again, with the same result, what {when}"
    text += f"{at(seen.repeated_line)}."
    yield Cause(seen.repeated, "WASTED_WORK", "REPEATED", text, fix("compute it once", seen.repeated, cure))


def _find_one_hot(seen: Seen) -> Iterator[Cause]:
    lines = (line for line in seen.lines if line.account in ("forward", "rest", "data") and "one_hot(" in line.text)
    line = max(lines, key=lambda line: line.seconds, default=None)
    if line and line.seconds > TAKES_MUCH * seen.seconds:
        weight = line.seconds / seen.seconds
        text = f"Zeros and ones are multiplied with weights, {weight:.0%} of the time to make them{at(line)}."
        cure = "nn.Embedding, or indexing: it reads the rows that a product with ones and zeros would choose"
        yield Cause(weight, "WASTED_WORK", "ONE_HOT", text, fix("an embedding", weight, cure))


def _find_kept(seen: Seen) -> Iterator[Cause]:
    if not seen.kept or any(_find_retained(seen)):  # which says more of it
        return
    text = f"{seen.kept} keeps the graph of every step since the loop began."
    cure = "add numbers, not graphs: total += loss.detach(), losses.append(loss.item()); and carry a state on as "
    cure += "state.detach()"
    if re.search(r"\.(append|extend|insert|add)\((?!.*loss)", seen.kept):  # not a number, but whole tensors
        text = f"{seen.kept} keeps the tensors of every step since the loop began, and their graphs."
        cure = "keep a number of each, float(...), or write what is needed to a file: detach() alone would free the "
        cure += "graph, and leave every batch in memory"
    yield Cause(max(0.45, _going_back(seen)), "GRAPH_KEPT", "", text, fix("keep no graph", NAN, cure))


def _find_growth(seen: Seen) -> Iterator[Cause]:
    if seen.growth and seen.held and not seen.kept and not re.search(REPLAY, seen.held.text):
        text = f"Memory grows by {seen.growth / 1024:,.0f} KB a step, by what is kept of it{at(seen.held)}."
        cure = "keep a number of each step, float(...), or write what is needed to a file"
        if "cycle(" in seen.held.text:
            cure = "it keeps every batch: `while True: for batch in loader: ...`"
        elif source.KEEPING.search(seen.held.text):
            cure = "a cache has keys that come again, and an end: collections.OrderedDict with popitem(last=False)"
        yield Cause(0.12, "MEMORY_GROWTH", "", text, fix("keep numbers", NAN, cure))


def _find_growing(seen: Seen) -> Iterator[Cause]:
    if seen.growing and (seen.slowing > SLOWING_BY_TABLE or seen.growth):
        text = "A table is joined to more at every step, and what goes through it takes ever longer"
        text += f", {seen.slowing:.1f} times as long by now" if seen.slowing > SLOWING_BY_TABLE else ""
        cure = "keep the newest rows alone, torch.cat([new, old])[:size], or write into a table of one size by index"
        fixes = fix("a table of one size", NAN, cure)
        yield Cause(1.05, "MEMORY_GROWTH", "GROWING_TABLE", f"{text}{at(seen.growing)}.", fixes)


def _find_float64(seen: Seen) -> Iterator[Cause]:
    if seen.float64 > 0.5:
        text = f"{seen.float64:.0%} of the operators' time is in float64, which training rarely needs"
        text += at(_top(seen, "forward"))
        asks = seen.float64_line
        text += f"; it is asked for at {asks.place}  {asks.text[:70]}." if asks else "."
        cure = "model.float(), and float32 batches: NumPy and pandas give float64 unless told"
        yield Cause(0.4, "FLOAT64", "", text, fix("float32", seen.model / 2, cure))


def _find_waits(seen: Seen) -> Iterator[Cause]:
    if seen.on_gpu and seen.waits and seen.share("rest") + seen.share("forward") > TAKES_MUCH:
        line = seen.wait_lines[0] if seen.wait_lines else None
        text = f"The host waits for the device in every step{at(line)}."
        yield Cause(0.17, "SYNC_BOUND", f"{seen.waits} waits a step", text)


def _find_small_batch(seen: Seen) -> Iterator[Cause]:
    samples, line = seen.small_batch
    told = [cause.reason for cause in (*_find_taken_apart(seen), *_find_operators(seen))]
    one_by_one = "" in told or "CALLS" in told  # of whole batches, then
    if 0 < samples <= SMALL_BATCH and not one_by_one and seen.starting > STARTING_FEW:
        verdict = "SAMPLE_BY_SAMPLE" if samples == 1 else "HOST_BOUND"
        few = f"{samples} sample{'s' * (samples > 1)}"
        text = f"Each step trains on {few}, and starting operators is most of it{at(line)}."
        yield Cause(0.35, verdict, "SMALL_BATCH", text, fix("a batch", seen.model, "DataLoader(..., batch_size=64)"))


def _find_operators(seen: Seen) -> Iterator[Cause]:
    calls, line = seen.one_by_one
    operators = seen.operators_all if calls else seen.operators  # one sample at a time, a layer's own are in vain too
    if math.isnan(seen.operators) or (operators <= OPERATORS and not seen.every_sample):
        return
    gain = seen.model * seen.starting
    if _is_over_pairs(seen):
        text = f"A loop over pairs starts most of {seen.operators:,.0f} operators a step{at(seen.pairs)}."
        yield Cause(gain, "HOST_BOUND", "PAIRS", text, fix("all pairs at once", gain, ALL_AT_ONCE))
    elif calls and seen.starting_all > (STARTING_FEW if seen.every_sample else STARTING):
        gain = seen.model * seen.starting_all
        text = f"The model is called {calls} times a step, for one sample after another{at(line)}."
        cure = "one call for the batch: samples of one shape as torch.stack(samples); others padded, with a mask, or "
        cure += "put end to end with the number of their sample, as batches of graphs are"
        yield Cause(gain, "SAMPLE_BY_SAMPLE", "CALLS", text, fix("the whole batch", gain, cure))
    elif seen.starting > STARTING and seen.operators > OPERATORS * max(seen.passes, 1):
        reason, where = "MANY_SMALL_OPS", "forward"
        cure = "fewer and wider layers, larger batches, or models of one shape as one stack: torch.bmm, torch.func.vmap"
        if seen.gates >= 40:
            reason, cure = "RNN_NOT_CUDNN", "nn.LSTM or nn.GRU over the whole sequence, in place of a cell in a loop"
        elif seen.fused and seen.share("optimiser") > seen.model / 2:
            reason, where = "OPTIMIZER_FOR_LOOP", "optimiser"
            cure = f"torch.optim.Adam(..., fused=True); and then {cure}"
        text = f"Starting {seen.operators:,.0f} small operators a step takes {seen.starting:.0%} of the model's time"
        fixes = fix("fewer operators", gain, cure)
        yield Cause(0.15, "HOST_BOUND", reason, f"{text}{at(_top(seen, where))}.", fixes)


ALWAYS: tuple[Callable[[Seen], Iterator[Cause]], ...] = (
    _find_idle_gpu,
    _find_debug_mode,
    _find_unsound,
    _find_hooks,
    _find_thread,
    _find_padding,
    _find_last_step,
)
BESIDE_DEVICE: tuple[Callable[[Seen], Iterator[Cause]], ...] = (  # of equal weights the first is the verdict
    _find_outside,
    _find_validation,
    _find_data,
    _find_python,
    _find_taken_apart,
    _find_dense,
    _find_threads,
    _find_unused,
    _find_thrown,
    _find_denormal,
    _find_second_graph,
    _find_retained,
    _find_repeated,
    _find_one_hot,
    _find_kept,
    _find_growth,
    _find_growing,
    _find_float64,
    _find_waits,
    _find_small_batch,
    _find_operators,
)


# Which line is named.


def at(line: Line | None) -> str:
    """Return the end of a sentence that names a line: its place, its text, and where it is called."""
    if line is None:
        return ""
    called = ""
    if line.caller:
        called = f", called at {source.name_file(line.caller_file)}:{line.caller}"
    if line.around and line.around not in (line.line, line.caller):
        called = f", in the loop at {line.place.rpartition(':')[0]}:{line.around}{called}"
    text = line.text.rstrip(":") if len(line.text) <= 70 else f"{line.text[:68]}.."
    return f": {line.place}  {text}{called}"


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
