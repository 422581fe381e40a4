"""From looks at a thread's stack to shares of a loop's time, by phase and by line of the person's code: pure."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import WORDS_OF_VALIDATION, CallStack
from cpbkit.gpu_check.source import Span

ACCOUNTS = ("data", "forward", "backward", "optimiser", "validation", "rest", "outside")
UNPACKED = 0.2  # of the line after: then an unpacking is slow enough to have been seen itself
GRAPHS = 0.1  # of a validation's forward passes: none is seen in a model's first layer
WAITING = "waiting"
# What a line does besides training: noun, libraries it calls, its text, and the cure.
KINDS: tuple[tuple[str, set[str], str, str], ...] = (
    ("saving", {"pickle", "json", "csv", "gzip", "zipfile", "h5py", "shutil", "sqlite3", "joblib"},
     r"torch\.save|save_pretrained|\.to_(csv|parquet|pickle|json)|pickle|json\.dump|np\.save|fsync|\.write|\bopen\(|flush|\.commit\(|\.execute",
     "save every so many minutes, not every step"),
    ("a progress bar", {"tqdm", "rich", "alive_progress"}, r"tqdm|set_postfix|\bbar\.|pbar",
     "let it draw twice a second at most: tqdm(mininterval=0.5), set_postfix(refresh=False)"),
    ("plotting", {"matplotlib", "seaborn", "plotly", "PIL"}, r"plt\.|\.plot\(|savefig|\.imshow",
     "plot once an epoch, or after training"),
    ("logging", {"logging", "tensorboard", "wandb", "mlflow"}, r"print\(|logg|\.log\(|add_scalar|add_histogram|wandb",
     "log every hundredth step, and keep losses as tensors until then"),
    ("a copy of the model", {"copy"}, r"deepcopy|copy\.copy|\.clone\(\) for ",
     "copy the weights when they are the best so far, at the end of an epoch"),
    (WAITING, {"subprocess", "requests", "urllib", "urllib3", "http", "socket", "threading", "selectors"},
     r"sleep\(|requests\.|\.(join|acquire|wait|recv|result)\(\)|urlopen|subprocess|\binput\(|os\.system",
     "take it out"),
    ("collecting garbage", {"gc"}, r"gc\.collect|empty_cache", "take it out: it is never needed in a step"),
    ("growing a table", set(), r"\b([\w.]+) *= *(torch|np|pd)\.(cat|concat\w*|append|[vh]?stack)\([\[(]? *\1\b",
     "append to a list, and make one table or tensor of it after the loop: each time all of it is copied"),
    ("pandas", {"pandas"}, r"\bpd\.|\bdf\b|\.rolling\(|\.iloc|\.loc\[|\.apply\(",
     "compute such columns once, before training, and index a tensor in the loop"),
    ("a metric", {"sklearn", "scipy", "torchmetrics"}, r"roc_auc|_score\(|metrics?\b",
     "compute it once an epoch, from predictions that were kept"),
    ("making lists of tensors, or back", set(), r"torch\.(tensor|FloatTensor|LongTensor|Tensor)\(|\.tolist\(",
     "keep arrays: np.stack and torch.from_numpy, or a tensor that is written by index"),
    ("NumPy", {"numpy"}, r"\bnp\.|\.numpy\(", "do it with torch on the batch, or once before training"),
)  # fmt: skip


READING = re.compile(r"\bnp\.load\(|h5py\.File\(|torch\.load\(|\.read_(csv|parquet|pickle|json)\(|pickle\.load\(")
REPLAY = r"choice\(.*\bp ?=|zip\(\*|deque|random\.sample\(|\b(\w+\.)?(mem|memory|buffer|buf|replay)\b"
CURES_OF_DATA: tuple[tuple[set[str], str, str], ...] = (
    (set(), r"next\( *iter\(", "make the iterator once, `for x, y in loader:`; each iter() shuffles and begins anew"),
    ({WAITING}, r"\bq(ueue)?\.get|\.get\(",
     "what gives the batches is slower than the loop: several of it, or batches that are made before"),
    (set(), r"choice\(.*\bp ?=|multinomial\(|choices\(.*weights",
     "a draw by weights goes through all of them: draw for many batches at once, or keep their sums (a sum tree, or "
     "np.searchsorted on a cumsum) and change those that changed"),
    ({"re"}, r"\bre\.|\.lower\(|\.split\((\)|[\"'])|tokeni[sz]e|json\.loads|strptime|literal_eval",
     "parse and tokenise once, before training, and keep the numbers"),
    (set(), REPLAY,
     "draw the numbers of the rows first, and take those rows alone; keep what was seen in arrays that are written and "
     "read by index, not in a list that is converted each time"),
    (set(), r"\.i?loc\b|^[^(]*\w\[",
     "build windows once as one tensor, and index it with a whole batch of numbers at a time"),
)  # fmt: skip


COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")  # a part of the function around


class Code(NamedTuple):
    """Where an own function's code is."""

    file: str
    name: str


@dataclass(frozen=True)
class Line:
    """A line of the person's own code, and the time under it."""

    file: str
    line: int
    text: str
    account: str  # of ACCOUNTS
    seconds: float
    kind: str = ""  # a noun of KINDS, "Python", or "" for torch's own work
    caller: int = 0  # line of the training loop, or of a function around it, that led there, where that is another line
    caller_file: str = ""
    by_torch: bool = False  # the time is under a call of a module or function of torch's
    function: str = ""  # in which it is
    around: int = 0  # line of the outermost loop around it that the loop over batches is not in

    @property
    def part(self) -> tuple[str, int]:
        """What it is a part of: a call of the training loop's, a loop, or itself."""
        return (self.caller_file, self.caller) if self.caller else (self.file, self.around or self.line)

    @property
    def place(self) -> str:
        """File and line, as editors and tracebacks name them."""
        return f"{source.name_file(self.file)}:{self.line}"


@dataclass(frozen=True)
class Attribution:
    """Seconds by account and by line; `inside` are those of a validation within the loop over batches."""

    seconds: Mapping[str, float]
    lines: tuple[Line, ...]  # the longest first
    inside: float  # seconds of validation in the loop over batches
    loop: Span | None
    graphs: bool = False  # forward passes of a validation build graphs, and no pass backward follows them
    asked: bool = False  # most of the data is made by asking the trained model, as where a policy acts


def attribute(
    seen: Mapping[CallStack, float],
    codes: Iterable[CodeType],
    step: tuple[tuple[int, int], ...],
    tracked: Collection[tuple[int, int]] = (),
    backward: tuple[tuple[int, int], ...] = (),
    others: Collection[int] = (),
    held: Collection[int] = (),
    moving: Collection[tuple[int, int]] = (),
) -> Attribution:
    """Attribute each look: its phase, whether it is within the loop over batches, and its innermost own line.

    step, backward: the own lines on the stack at an optimiser's step, and at a pass backward, innermost first.
    tracked: own lines that compute towards a loss, outside any module too.
    moving: own lines that make of gradients what is added to weights, as an optimiser.
    others, held: identities of modules that are not trained, or not any more; and of those that are.
    """
    names = [Code(code.co_filename, code.co_name) for code in codes]
    loop, owner, at = find_training_loop(step, names, seen, backward)
    trained = {s.root for s in seen if s.phase in ("forward", "backward") and not s.quiet and not _quiet(s, names)}
    trained.difference_update(others)
    of_step = {number for number, _ in step}
    regions: set[object] = set()

    def is_named_so(s: CallStack) -> bool:
        if any(WORDS_OF_VALIDATION.search(names[n].name) for n, _ in s.own if n not in of_step):
            return True
        text = next((source.read_line(names[n].file, line) for n, line in s.own if n in of_step), "")
        return bool(WORDS_OF_VALIDATION.search(text)) and "backward" not in text

    def in_own_loop(s: CallStack) -> bool:
        for number, line in s.own:
            loops = source.find_loops(names[number].file, line)
            if any(not source.counts_only(x) for x in loops if loop is None or not x.holds(loop.file, loop.start)):
                return True
        return False

    def first_phase(s: CallStack) -> str:
        if s.phase == "forward" and (s.quiet or _quiet(s, names)):
            # A frozen network that prepares inputs is another one than is trained; the trained one makes targets too.
            over_data = s.root in trained and (s.evaluating or in_own_loop(s))
            return "validation" if over_data or is_named_so(s) else "forward"
        phase = "forward" if not s.phase and s.own and s.own[0] in tracked else s.phase
        phase = "optimiser" if not phase and s.own and s.own[0] in moving else phase
        # Forgotten no_grad() and eval(): only the name is left to tell by.
        return "validation" if phase == "forward" and is_named_so(s) else phase

    for s in seen:
        if first_phase(s) == "validation":
            regions.add(_region(s, names, of_step, loop, at))
    regions.discard(None)
    asking: list[int] = []  # lines of the loop over batches at which the trained model is asked without gradients
    for s in seen:
        # A small model's own training may be too short to be seen beside what it is asked.
        is_quiet = s.phase == "forward" and (s.quiet or _quiet(s, names))
        if is_quiet and (s.root in trained or s.root in held) and first_phase(s) == "forward":
            asking += [line for number, line in s.own if number == owner and line < at.get("forward", 0)]
    asks = min(asking, default=math.inf)
    made = 0.0  # seconds of data from there on

    accounts: defaultdict[str, float] = defaultdict(float)
    lines: defaultdict[tuple, float] = defaultdict(float)
    libraries: defaultdict[tuple, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    inside = graphs = forward = 0.0
    backward_too = False
    for s, seconds in seen.items():
        here = next((line for number, line in s.own if number == owner), 0) if loop else 0
        within = loop is not None and loop.holds(names[owner].file, here)
        account = first_phase(s)
        if account in ("", "data") and _region(s, names, of_step, loop, at) in regions:
            account = "validation"
        elif account == "":
            head = loop.head if loop is not None and within else -1
            drawing = s.library in KINDS[1][1]
            header = within and here <= head
            before = loop is not None and within and head < here < at.get("forward", 0) and source.counts_only(loop)
            account = "data" if (header or before) and not drawing else "rest"
            made += seconds * (account == "data" and here >= asks)
        if loop and not within and account in ("rest", "data"):
            account = "outside"
        if account == "validation":
            inside += seconds * within
            forward += seconds * (s.phase == "forward")
            graphs += seconds * s.graph
        backward_too |= s.phase == "backward" and _region(s, names, of_step, loop, at) in regions
        accounts[account] += seconds
        if s.own:
            number, line = s.own[0]
            function = next((names[n].name for n, _ in s.own if names[n].name not in COMPREHENSIONS), "")
            called = (owner, here) if within else next((at for at in s.own if at[0] in of_step), (number, line))
            call = names[called[0]].file, called[1]
            key = (names[number].file, line, account, call if call != (names[number].file, line) else ("", 0), function)
            lines[key] += seconds
            libraries[key][s.library] += seconds
    for key in list(lines):  # what a line does after its last call is seen at the next one's
        earlier = source.find_unpacking(*key[:2]) if key[2] in ("data", "rest") else 0
        moved = (key[0], earlier, *key[2:])
        if moved in lines and UNPACKED * lines[key] < lines[moved]:
            lines[moved] += lines.pop(key)
    found = []
    for key, seconds in lines.items():
        file, line, account, (caller_file, caller), function = key
        text = source.read_line(file, line)
        library = max(libraries[key], key=libraries[key].__getitem__)
        kind, around = find_kind(text, library), 0
        for inner in reversed(source.find_loops(file, line)):
            if loop is None or not inner.holds(loop.file, loop.start):
                around = inner.start  # at last the outermost of those within the loop over batches, or a function
        by_torch = library == "torch"
        found.append(Line(file, line, text, account, seconds, kind, caller, caller_file, by_torch, function, around))
    found.sort(key=lambda line: -line.seconds)
    graphs_found = graphs > GRAPHS * forward and not backward_too
    asked = made > 0.5 * accounts["data"]
    return Attribution(dict(accounts), tuple(found), inside, loop, graphs_found, asked)


def find_training_loop(
    step, names, seen: Mapping[CallStack, float], backward=()
) -> tuple[Span | None, int, dict[str, int]]:
    """Return (the loop over batches, number of the code it is in, lines of that code by what is called there).

    It is the innermost loop around an optimiser's step that holds the pass backward too: a loop over several
    optimisers, or over batches that are added up, holds one of the two.
    """
    first: tuple[Span, int, int] | None = None
    for number, line in step:
        file = names[number].file
        for loop in reversed(source.find_loops(file, line)):
            first = first or (loop, number, line)
            if not backward or any(n == number and loop.holds(file, at) for n, at in backward):
                return loop, number, {"step": line, "forward": _find_forward(loop, line, number, seen)}
    if first:
        loop, number, line = first
        return loop, number, {"step": line, "forward": _find_forward(loop, line, number, seen)}
    return None, -1, {}


def _find_forward(loop: Span, step: int, owner: int, seen: Mapping[CallStack, float]) -> int:
    """Return the line up to which a body prepares its batch: of the first call of a model."""
    for line in range(loop.head + 1, step + 1):
        if re.search(r"model\(|net\(|loss", source.read_line(loop.file, line)):
            if not source.is_without_gradients(loop.file, line):  # there it makes its batch, as where a policy acts
                return line
    learning = (s for s in seen if s.phase == "forward" and not s.quiet)
    lines = [line for s in learning for n, line in s.own if n == owner and loop.head < line < step]
    lines = [line for line in lines if not source.is_without_gradients(loop.file, line)]
    return min(lines, default=step)


def _quiet(s: CallStack, names) -> bool:
    return any(source.is_without_gradients(names[number].file, line) for number, line in s.own[s.inside :])


def _region(s: CallStack, names, of_step: set[int], loop: Span | None, at: Mapping[str, int]) -> object:
    """Return what stands for all of a validation: its function, or the statement in the training function."""
    outer = None
    for number, line in reversed(s.own):
        if number not in of_step:
            return names[number]
        outer = number, line
    if outer is None:
        return None
    number, line = s.own[0]
    for node in source.find_path(names[number].file, line):
        if isinstance(node, source.SCOPES):
            continue
        span = source.to_span(names[number].file, node)
        if not span.holds(span.file, at.get("step", 0)) and isinstance(node, (*source.LOOPS, source.ast.With)):
            return span
    return None


def find_kind(text: str, library: str) -> str:
    """Name what a line does besides training; "" for what may be torch's own work."""
    for noun, libraries, pattern, _ in KINDS:
        if library in libraries or (not libraries and library in ("pandas", "numpy") and re.search(pattern, text)):
            return noun
    if library == "compiler":
        return "compiling"
    for noun, _, pattern, _ in KINDS:
        if re.search(pattern, text):
            return noun
    return "" if library in ("torch", "") else f"{library}"


def cure_of(kind: str) -> str:
    """Return the cure for a kind of line."""
    for noun, _, _, cure in KINDS:
        if noun == kind:
            return cure
    if kind == "compiling":
        return "give the model inputs of one shape and dtype: each new one is compiled anew"
    return "take it out of the step, do it every hundredth step, or write it with torch on the whole batch"


def cure_of_data(line: Line | None) -> str:
    """Return the cure for a line that a loop waits for its batches at."""
    text, kind, body = "", "", ""
    if line is not None:
        text, kind, body = line.text, line.kind, source.read_function(line.file, line.line)
    if READING.search(text) or (READING.search(body) and "[" in text):  # an .npz is unpacked where it is indexed
        return "open and read each file once, in __init__, and keep its arrays: here it is read anew for each sample"
    for kinds, pattern, cure in CURES_OF_DATA:
        if kind in kinds or re.search(pattern, text) or ("re" in kinds and re.search(pattern, body)):
            return cure
    return "do it once before training and keep the result; what must differ each time goes into num_workers=2 or more"
