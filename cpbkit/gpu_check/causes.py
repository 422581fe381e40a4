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
from cpbkit.gpu_check.shares import REPLAY, WAITING, Line, cure_between_steps, cure_of, cure_of_data
from cpbkit.quantities import counted

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
    held = seen.on_gpu and (seen.busy > DEVICE_BUSY or (math.isnan(seen.busy) and seen.behind > 0.5))
    rules = ALWAYS if held else ALWAYS + BESIDE_DEVICE
    found = (cause for rule in rules for cause in rule(seen))
    return sorted(found, key=lambda cause: -cause.weight)


def fix(name: str, gain: float, note: str) -> tuple[Fix, ...]:
    """Return a cure with its ceiling; `gain` is the share of the time that it gives back, NaN where nobody knows."""
    ceiling = NAN if math.isnan(gain) else 1 / max(1 - gain, 1e-3)
    if ceiling > SUSPICIOUS:
        note += f"; a ceiling above {SUSPICIOUS:.0f}x is suspicious: is this the loop you meant?"
    return (Fix(name, ceiling, note, True),)


def _cause(
    weight: float, kind: str, text: str, line: Line | None, name: str = "", cure: str = "", gain: float | None = None
) -> Cause:
    """Return a cause. kind: VERDICT or VERDICT/reason; name, cure, gain: as for `fix`, the gain else the weight."""
    verdict, _, reason = kind.partition("/")
    fixes = fix(name, weight if gain is None else gain, cure) if name else ()
    return Cause(weight, verdict, reason, f"{text}{at(line)}.", fixes)


# Whatever the device does.


def _find_faults(seen: Seen) -> Iterator[Cause]:
    """Yield what is wrong before anything costs time: the device, a mode, what is learned, hooks."""
    if seen.gpu_there and not seen.on_gpu:
        text = "No kernel ran on the GPU: the model and its batches are on the CPU"
        cure = 'model.to("cuda"), and each batch: x.to("cuda", non_blocking=True)'
        yield _cause(4.0, "NO_WORK_ON_GPU", text, None, "move to the GPU", cure, NAN)
    if seen.modes:
        text = f"A debug mode is on in the step: {seen.modes[0]}"
        yield _cause(3.0, f"DEBUG_MODE_ON/{seen.modes[0]}", text, seen.mode_line)
    for rank, (unsound, line) in enumerate(seen.unsound):
        kind = f"UNSOUND_TRAINING/{unsound.reason}"
        yield _cause(2.0 - rank / 10, kind, unsound.text, line, "a training that learns", unsound.cure, NAN)
    if seen.hooks:
        steps = max(1, round(1 / seen.hooks))
        when = "at each step" if steps == 1 else f"every {steps} steps"
        text = f"Hooks pile up: {max(1, seen.hooks):.2g} more on a module {when}, which then calls all of them"
        cure = "register a hook once, before the loop; or take it off again: handle = ...; handle.remove()"
        yield _cause(1.1, "PYTHON_OR_IO_IN_STEP/hooks", text, seen.hooks_line, "one hook", cure, NAN)


def _find_thread(seen: Seen) -> Iterator[Cause]:
    running, line = seen.thread
    if running > ANOTHER_THREAD and seen.waiting > TAKES_MUCH and line:
        text = "Another thread runs Python beside the training, which waits for the interpreter"
        cure = "let it sleep between its turns, or run it as a process: one thread at a time runs Python"
        yield _cause(seen.waiting, "PYTHON_OR_IO_IN_STEP/thread", text, line, "no other thread", cure)


def _find_vain_positions(seen: Seen) -> Iterator[Cause]:
    """Yield what a model computes for padding, and for steps in time that nobody uses."""
    padded, in_longest = seen.padding
    if padded > PADDING and seen.model > TAKES_MUCH:
        text = f"{padded:.0%} of the ids that the model reads are padding"
        cure = "pad each batch to its own longest row: collate_fn with torch.nn.utils.rnn.pad_sequence; and batches of "
        cure += "rows of like length"
        cure += "" if in_longest else ", sorted by it, for one long row fills up all"
        yield _cause(seen.model * padded, "WASTED_WORK/PADDING", text, seen.padding_line, "less padding", cure)
    if seen.last:
        text = f"A wide layer computes its outputs for {seen.last} steps in time, and one of them is used"
        cure = "take the step that is used first: head(h[:, -1]), in place of head(h)[:, -1]"
        yield _cause(seen.model / 2, "WASTED_WORK/LAST_STEP", text, seen.last_line, "one step", cure)


# Where the host has a part in the pace.


def _find_outside(seen: Seen) -> Iterator[Cause]:
    """Yield what is outside the loop over batches, and what a validation costs there or within it."""
    validation = seen.share("validation")
    apart = validation - seen.inside
    outside = seen.share("outside") + apart
    if outside > OUTSIDE:
        account, reason = "outside", "between epochs"
        if apart > seen.share("outside"):
            account = reason = "validation"
        line = _top(seen, account)
        text = f"{outside:.0%} of the time is outside the loop over batches"
        cure = cure_between_steps(line) if line else "do it more rarely, or beside the training"
        yield _cause(outside, f"GPU_IDLE_OUTSIDE_STEPS/{reason}", text, line, "less between steps", cure)
    if any(unsound.reason == "EVAL_MODE" for unsound, _ in seen.unsound):
        return  # what looks like a validation is the training
    line, graphs, no_grad = _top(seen, "validation"), "", ""
    if seen.graphs:
        graphs, no_grad = ", and builds graphs that nobody uses", "with torch.no_grad(): around it; "
    if graphs and apart > TOLD:
        text = f"A validation takes {validation:.0%} of the time{graphs}"
        cure, kind = f"{no_grad}and keep loss.item(), not the loss", "WASTED_WORK/VALIDATION_GRAPHS"
        yield _cause(outside + 0.01, kind, text, line, "no graph", cure, validation / 2)
    if seen.inside > VALIDATION:
        text = f"A validation inside the loop over batches takes {seen.inside:.0%} of the time{graphs}"
        cure = f"{no_grad}validate once an epoch, or every so many steps, in eval mode and without gradients"
        yield _cause(seen.inside, "VALIDATION_IN_STEP", text, line, "validate once an epoch", cure)


def _find_data(seen: Seen) -> Iterator[Cause]:
    share, line = seen.share("data"), _top_of_data(seen)
    steps = seen.steps / seen.starts if seen.starts > 1 else math.inf  # of workers that are started again and again
    limit = OWN_LOADER if seen.loads_in_own_code else PLAIN_LOADER
    if seen.workers:
        limit = WORKERS
    if steps < STEPS_A_START / 10:
        limit = TOLD
    if seen.asked and line and line.kind == WAITING and line.seconds > TAKES_MUCH * seen.seconds:
        text = f"Waiting takes {line.seconds / seen.seconds:.0%} of the time"
        kind = f"PYTHON_OR_IO_IN_STEP/{WAITING}"
        yield _cause(line.seconds / seen.seconds, kind, text, line, "out of the loop", cure_of(WAITING))
        return
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
    yield _cause(share, f"DATA_STARVED/{reason}", text, line, "quicker batches", cure)


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
    taken = seen.taken
    if taken and taken.share > TAKES_MUCH and not _is_over_pairs(seen):
        text = f"The batch is taken apart, {taken.rows} rows a step one by one: {taken.share:.0%} of the time"
        cure = "give the model the whole batch: x[i] becomes x, and a sum over samples a mean over the first axis"
        weight = min(1.0, taken.share + seen.share("backward"))  # the backward of every row comes on top
        yield _cause(weight, "SAMPLE_BY_SAMPLE", text, taken.line, "the whole batch", cure)


def _is_over_pairs(seen: Seen) -> bool:
    return seen.pairs is not None and seen.starting > STARTING_FEW and seen.operators > OPERATORS


def _find_dense(seen: Seen) -> Iterator[Cause]:
    if not seen.dense or seen.share("optimiser") + seen.share("backward") <= OPTIMIZER:
        return
    rows, (read, moved) = seen.dense
    if rows > ROWS_MOVED * read and moved > NUMBERS_MOVED:
        text = f"The optimiser moves all {rows:,} rows of an embedding, of which a step reads {read:,} at most"
        text += f": {seen.share('optimiser'):.0%} of the time"
        weight = seen.share("optimiser") + seen.share("backward") / 2
        cure = "nn.Embedding(..., sparse=True) with torch.optim.SparseAdam, which moves the rows that were read"
        line = seen.dense_line or _top(seen, "optimiser")
        yield _cause(weight, "DENSE_EMBEDDING", text, line, "sparse gradients", cure)


def _find_threads(seen: Seen) -> Iterator[Cause]:
    if seen.on_gpu:
        return
    line, weight = seen.threads_line, seen.model * (1 - seen.threads)
    if seen.threads <= 0.5 and line and seen.starting < 0.5 and weight > TAKES_MUCH:
        text = f"Torch computes on {seen.threads:.0%} of the cores"
        yield _cause(weight, "FEW_THREADS", text, line, "all cores", "take it out: torch takes all cores")
    if seen.threads >= TOO_MANY:
        text = f"Torch computes in {seen.threads:.0f} threads a core, which wait for each other"
        cure = "take it out: torch takes as many threads as there are cores"
        yield _cause(max(0.5, seen.model / 2), "TOO_MANY_THREADS", text, line, "a thread a core", cure, NAN)


def _find_unused(seen: Seen) -> Iterator[Cause]:
    """Yield gradients that nobody uses: no optimiser moves their weights, or they are set to zero first."""
    backward = seen.share("backward")
    weight = backward * seen.unused
    told = any(unsound.reason == "UNREGISTERED" for unsound, _ in seen.unsound)
    if seen.unused > UNUSED and weight > TOLD and not told:
        text = f"{seen.unused:.0%} of the gradients that backward computes are of weights that no optimiser moves"
        cure = "of a part that is not to be trained, requires_grad_(False), or run it under torch.no_grad(); else give "
        cure += "its weights to the optimiser"
        line = seen.unused_line or seen.optimizer_line or _top(seen, "backward")
        yield _cause(weight, "WASTED_WORK/UNUSED_GRADIENTS", text, line, "no such gradients", cure)
    if backward * seen.thrown > TOLD:
        text = "A pass backward goes on through another optimiser's model, and its gradients are thrown away"
        cure = "cut it off: discriminator(fake.detach()), or make fake under torch.no_grad()"
        yield _cause(backward * seen.thrown, "WASTED_WORK/THROWN", text, seen.thrown_line, "detach", cure)


def _find_denormal(seen: Seen) -> Iterator[Cause]:
    slow, line = seen.denormal
    if slow > TAKES_MUCH:
        text = f"{slow:.0%} of the operators' time goes into numbers so near 0 that a CPU computes them slowly"
        cure = "torch.set_flush_denormal(True) before training, or set what is below 1e-30 to 0"
        yield _cause(slow * seen.model, "WASTED_WORK/DENORMAL", text, line, "no denormal numbers", cure, NAN)


def _find_graphs(seen: Seen) -> Iterator[Cause]:
    """Yield graphs that are built of a pass backward, gone through again, or kept."""
    backward = seen.share("backward")
    again = backward - BACKWARD * seen.share("forward")  # passes that go through more than was computed since the last
    if seen.second_graph and backward > TOLD:
        text = "Each pass backward builds a graph of itself, for gradients of gradients, which nothing takes"
        cure = "loss.backward() without create_graph=True, which also keeps weights and gradients in memory for ever"
        weight, kind = max(backward / 2, 0.3), "WASTED_WORK/CREATE_GRAPH"
        yield _cause(weight, kind, text, seen.second_graph, "no second graph", cure, backward / 2)
    if seen.retained and (seen.passes > 2 or seen.retraced > RETRACED) and again > TAKES_MUCH:
        text = f"Each of {seen.passes:.0f} passes backward a step goes through the graphs of those before it once more"
        cure = "carry a state on as state.detach(); or add up the losses, and go backward once"
        if seen.passes <= 2:
            text = f"{seen.retraced:.0%} of what a pass backward goes through was computed at earlier steps"
            cure = "carry a state on as state.detach(), empty lists of outputs after each step, and leave "
            cure += "retain_graph=True out"
        yield _cause(again, "GRAPH_KEPT", text, seen.retained, "each graph once", cure)
    elif seen.kept:
        text = f"{seen.kept} keeps the graph of every step since the loop began"
        cure = "add numbers, not graphs: total += loss.detach(), losses.append(loss.item()); and carry a state on as "
        cure += "state.detach()"
        if re.search(r"\.(append|extend|insert|add)\((?!.*loss)", seen.kept):  # not a number, but whole tensors
            text = f"{seen.kept} keeps the tensors of every step since the loop began, and their graphs"
            cure = "keep a number of each, float(...), or write what is needed to a file: detach() alone would free "
            cure += "the graph, and leave every batch in memory"
        yield _cause(max(0.45, again), "GRAPH_KEPT", text, None, "keep no graph", cure, NAN)


def _find_repeated(seen: Seen) -> Iterator[Cause]:
    if seen.repeated <= REPEATED:
        return
    when = "every step before has computed"
    cure = "compute it once, before the loop: in a model, in __init__ with self.register_buffer(name, tensor)"
    if seen.repeated_within:
        when = "the same step has computed before"
        cure = "keep the result in a variable and use it again, as out = model(x) for the loss and for a metric"
    text = f"{seen.repeated:.0%} of the time computes again, with the same result, what {when}"
    yield _cause(seen.repeated, "WASTED_WORK/REPEATED", text, seen.repeated_line, "compute it once", cure)


def _find_one_hot(seen: Seen) -> Iterator[Cause]:
    lines = (line for line in seen.lines if line.account in ("forward", "rest", "data") and "one_hot(" in line.text)
    line = max(lines, key=lambda line: line.seconds, default=None)
    making, multiplying = line.seconds / seen.seconds if line else 0.0, 2 * seen.one_hot * seen.model  # backward too
    weight = max(making, multiplying)
    if multiplying > making:
        line = seen.one_hot_line
    if weight > TAKES_MUCH:
        text = "Zeros and ones are multiplied with weights"
        text += f", {making:.0%} of the time to make them" if making > TAKES_MUCH else ""
        cure = "nn.Embedding, or indexing: it reads the rows that a product with ones and zeros would choose"
        yield _cause(weight, "WASTED_WORK/ONE_HOT", text, line, "an embedding", cure)


def _find_growth(seen: Seen) -> Iterator[Cause]:
    """Yield what grows with every step: memory, or a table that is gone through."""
    if seen.growth and seen.held and not seen.kept and not re.search(REPLAY, seen.held.text):
        text = f"Memory grows by {seen.growth / 1024:,.0f} KB a step, by what is kept of it"
        cure = "keep a number of each step, float(...), or write what is needed to a file"
        if "cycle(" in seen.held.text:
            cure = "it keeps every batch: `while True: for batch in loader: ...`"
        elif source.KEEPING.search(seen.held.text):
            cure = "a cache has keys that come again, and an end: collections.OrderedDict with popitem(last=False)"
        yield _cause(0.12, "MEMORY_GROWTH", text, seen.held, "keep numbers", cure, NAN)
    if seen.growing and (seen.slowing > SLOWING_BY_TABLE or seen.growth):
        text = "A table is joined to more at every step, and what goes through it takes ever longer"
        text += f", {seen.slowing:.1f} times as long by now" if seen.slowing > SLOWING_BY_TABLE else ""
        cure = "keep the newest rows alone, torch.cat([new, old])[:size], or write into a table of one size by index"
        yield _cause(1.05, "MEMORY_GROWTH/GROWING_TABLE", text, seen.growing, "a table of one size", cure, NAN)


def _find_float64(seen: Seen) -> Iterator[Cause]:
    if seen.float64 > 0.5:
        text = f"{seen.float64:.0%} of the operators' time is in float64, which training rarely needs"
        text += at(_top(seen, "forward"))
        asks = seen.float64_line
        text += f"; it is asked for at {asks.place}  {asks.text[:70]}" if asks else ""
        cure = "model.float(), and float32 batches: NumPy and pandas give float64 unless told"
        yield _cause(0.4, "FLOAT64", text, None, "float32", cure, seen.model / 2)


def _find_waits(seen: Seen) -> Iterator[Cause]:
    if seen.on_gpu and seen.waits and seen.share("rest") + seen.share("forward") > TAKES_MUCH:
        line = seen.wait_lines[0] if seen.wait_lines else None
        yield _cause(0.17, f"SYNC_BOUND/{seen.waits} waits a step", "The host waits for the device in every step", line)


def _find_small_batch(seen: Seen) -> Iterator[Cause]:
    samples, line = seen.small_batch
    told = [cause.reason for cause in (*_find_taken_apart(seen), *_find_operators(seen))]
    one_by_one = "" in told or "CALLS" in told  # of whole batches, then
    if 0 < samples <= SMALL_BATCH and not one_by_one and seen.starting > STARTING_FEW:
        kind = f"{'SAMPLE_BY_SAMPLE' if samples == 1 else 'HOST_BOUND'}/SMALL_BATCH"
        text = f"Each step trains on {counted(samples, 'sample')}, and starting operators is most of it"
        cure = "DataLoader(..., batch_size=64); of samples in a list, one step on torch.stack(samples)"
        yield _cause(0.35, kind, text, line, "a batch", cure, seen.model)


def _find_operators(seen: Seen) -> Iterator[Cause]:
    calls, line = seen.one_by_one
    operators = seen.operators_all if calls else seen.operators  # one sample at a time, a layer's own are in vain too
    if math.isnan(seen.operators) or (operators <= OPERATORS and not seen.every_sample):
        return
    gain = seen.model * seen.starting
    if _is_over_pairs(seen):
        text = f"A loop over pairs starts most of {seen.operators:,.0f} operators a step"
        yield _cause(gain, "HOST_BOUND/PAIRS", text, seen.pairs, "all pairs at once", ALL_AT_ONCE)
    elif calls and seen.starting_all > (STARTING_FEW if seen.every_sample else STARTING):
        text = f"The model is called {calls} times a step, for one sample after another"
        cure = "one call for the batch: samples of one shape as torch.stack(samples); others padded, with a mask, or "
        cure += "put end to end with the number of their sample, as batches of graphs are"
        yield _cause(seen.model * seen.starting_all, "SAMPLE_BY_SAMPLE/CALLS", text, line, "the whole batch", cure)
    elif seen.starting > STARTING and seen.operators > OPERATORS * max(seen.passes, 1):
        reason, where = "MANY_SMALL_OPS", "forward"
        cure = "fewer and wider layers, larger batches, or models of one shape as one stack: torch.bmm, torch.func.vmap"
        if seen.gates >= 40:
            reason, cure = "RNN_NOT_CUDNN", "nn.LSTM or nn.GRU over the whole sequence, in place of a cell in a loop"
        elif seen.fused and seen.share("optimiser") > seen.model / 2:
            reason, where = "OPTIMIZER_FOR_LOOP", "optimiser"
            cure = f"torch.optim.Adam(..., fused=True); and then {cure}"
        text = f"Starting {seen.operators:,.0f} small operators a step takes {seen.starting:.0%} of the model's time"
        yield _cause(0.15, f"HOST_BOUND/{reason}", text, _top(seen, where), "fewer operators", cure, gain)


ALWAYS: tuple[Callable[[Seen], Iterator[Cause]], ...] = (_find_faults, _find_thread, _find_vain_positions)
BESIDE_DEVICE: tuple[Callable[[Seen], Iterator[Cause]], ...] = (  # of equal weights the first is the verdict
    _find_outside,
    _find_data,
    _find_python,
    _find_taken_apart,
    _find_dense,
    _find_threads,
    _find_unused,
    _find_denormal,
    _find_graphs,
    _find_repeated,
    _find_one_hot,
    _find_growth,
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
