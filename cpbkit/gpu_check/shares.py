"""From looks at a thread's stack to shares of a loop's time, by phase and by line of the person's code: pure."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from types import CodeType

from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import WORDS_OF_VALIDATION, CallStack, OwnLine
from cpbkit.gpu_check.source import Span

ACCOUNTS = ("data", "forward", "backward", "optimiser", "validation", "rest", "outside")
UNPACKED = 0.2  # of the line after: then an unpacking is slow enough to have been seen itself
GRAPHS = 0.1  # of a validation's forward passes: none is seen in a model's first layer
WAITING = "waiting"
# A table that is made anew of itself and more rows, and not cut to a length.
GROWING = (
    r"^(?!.*\) *\[[^\]]*:)(?!.*(dim|axis) *= *-?[1-9])(?!.*[\])] *, *-?[1-9]).*"
    r"(?<![\w.])(?P<table>[\w.]+) *= *(torch|np|pd)\.(cat|concat\w*|append|[vh]?stack)\(.*(?<![\w.])(?P=table)\b"
)
# What a line does besides training: noun, libraries it calls, its text, and the cure.
KINDS: tuple[tuple[str, set[str], str, str], ...] = (
    ("saving", {"pickle", "json", "csv", "gzip", "zipfile", "h5py", "shutil", "sqlite3", "joblib"},
     r"torch\.save|save_pretrained|\.to_(csv|parquet|pickle|json)|pickle|json\.dump|np\.save|fsync|\.write|\bopen\(|flush|\.commit\(|\.execute",
     "save every so many minutes, not every step"),
    ("a progress bar", {"tqdm", "rich", "alive_progress"}, r"tqdm|set_postfix|\bbar\.|pbar",
     "let it draw twice a second at most: tqdm(mininterval=0.5), set_postfix(refresh=False)"),
    ("plotting", {"matplotlib", "seaborn", "plotly", "PIL"}, r"plt\.|\.plot\(|savefig|\.imshow",
     "plot every so many minutes, or after training"),
    ("logging", {"logging", "tensorboard", "wandb", "mlflow"}, r"print\(|logg|\.log\(|add_scalar|add_histogram|wandb",
     "log every hundredth step, and keep losses as tensors until then"),
    ("a copy of the model", {"copy"}, r"deepcopy|copy\.copy|\.clone\(\) for ",
     "keep the best weights so far once an epoch; an average of weights is made in place, w.lerp_(new, share)"),
    ("averaging weights", set(), r"(?<!weight_)(decay|momentum)\b.*\*|shadow|polyak|\bema\b|load_state_dict\(",
     "average them in place, torch._foreach_lerp_(shadow, weights, 1 - decay), and copy no model for it"),
    (WAITING, {"subprocess", "requests", "urllib", "urllib3", "http", "socket", "threading", "selectors"},
     r"sleep\(|requests\.|\.(join|acquire|wait|recv|result)\(\)|urlopen|subprocess|\binput\(|os\.system",
     "take it out"),
    ("collecting garbage", {"gc"}, r"gc\.collect|empty_cache", "take it out: it is never needed in a step"),
    ("growing a table", set(), GROWING + r"|\.loc\[len\(",
     "append to a list, and make one table or tensor of it after the loop: each time all of it is copied"),
    ("pandas", {"pandas"}, r"\bpd\.|\bdf\b|\.rolling\(|\.iloc|\.loc\[|\.apply\(",
     "compute such columns once, before training, and index a tensor in the loop"),
    ("a metric", {"sklearn", "scipy", "torchmetrics"}, r"roc_auc|_score\(|metrics?\b",
     "compute it once an epoch, from predictions that were kept"),
    ("making lists of tensors, or back", set(), r"torch\.(tensor|FloatTensor|LongTensor|Tensor)\(|\.tolist\(",
     "keep arrays: np.stack and torch.from_numpy, or a tensor that is written by index"),
    ("NumPy", {"numpy"}, r"\bnp\.|\.numpy\(",
     "do it with torch on the batch, or once before training; what is only looked at, every hundredth step"),
)  # fmt: skip


WRITING = {  # of libraries that compute or read, and write files too
    **dict.fromkeys(("pandas", "numpy"), KINDS[0][2]),
    "pathlib": r"\.(replace|rename|unlink|write_\w+)\(",  # as where a file is put in its place
}
VALUES = re.compile(r"\bvals?\b(?=[\w, ]*=[^=])")  # as a critic gives them, not of a validation
READING = re.compile(r"\bnp\.load\(|h5py\.File\(|torch\.load\(|\.read_(csv|parquet|pickle|json)\(|pickle\.load\(")
REPLAY = r"choice\(.*\bp ?=|zip\(\*|deque|random\.sample\(|\b(\w+\.)?(mem|memory|buffer|buf|replay)\b"
NUMBERS = re.compile(r"\.item\(|\bfloat\(|\bprint\(")  # of tensors, for a person
DRAWING = re.compile(r"\brandom\.(rand|choice|uniform|gauss|sample)(?!.*(\bp ?=|size))")  # one number at a time
MADE_OF_A_LIST = r"torch\.(as_)?tensor\(|np\.array\("
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
    (set(), r"\.i?loc\b|^[^(]*\w\[|^(?!.*\w\().*\w\[(i|j|n|k|idx|index|item)\]",
     "build windows once as one tensor, and index it with a whole batch of numbers at a time"),
)  # fmt: skip


COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")  # a part of the function around


@dataclass(frozen=True)
class Line:
    """A line of the person's own code, and the time under it."""

    file: str
    line: int
    text: str
    account: str  # of ACCOUNTS
    seconds: float = 0.0
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
    step: tuple[OwnLine, ...],
    tracked: Collection[OwnLine] = (),
    backward: tuple[OwnLine, ...] = (),
    others: Collection[int] = (),
    held: Collection[int] = (),
    moving: Collection[OwnLine] = (),
    tests: Set[OwnLine] = frozenset(),
) -> Attribution:
    """Attribute each look: its phase, whether it is within the loop over batches, and its innermost own line.

    step, backward: the own lines on the stack at an optimiser's step, and at a pass backward, innermost first.
    tracked: own lines that compute towards a loss, outside any module too.
    moving: own lines that make of gradients what is added to weights, as an optimiser.
    others, held: identities of modules that are not trained, or not any more; and of those that are.
    tests: own lines that ask a model for far more rows than it is trained on at a time.
    """
    training = _Training(seen, list(codes), step, backward, tracked, moving, others, tests)
    regions = {training.find_region(s) for s in seen if training.find_phase(s) == "validation"} - {None}
    asks = training.find_asking(seen, held)
    accounts: defaultdict[str, float] = defaultdict(float)
    lines: defaultdict[Line, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))  # seconds by library
    inside = made = graphs = forward = 0.0  # seconds; of data that the model is asked for; of a validation's forward
    backward_too = False
    for s, seconds in seen.items():
        here = training.find_line(s)
        in_region = training.find_region(s) in regions
        account = training.find_account(s, here, in_region)
        accounts[account] += seconds
        if account == "validation":
            inside += seconds * bool(here)
            forward += seconds * (s.phase == "forward")
            graphs += seconds * s.graph
        backward_too |= s.phase == "backward" and in_region
        made += seconds * (account == "data" and not s.phase and here >= asks)
        if s.own:
            lines[training.find_key(s, here, account)][s.library] += seconds
    found = tuple(training.name_lines(lines))
    builds_graphs = graphs > GRAPHS * forward and not backward_too
    return Attribution(dict(accounts), found, inside, training.loop, builds_graphs, made > 0.5 * accounts["data"])


class _Training:
    """The loop over batches, and what of a look tells which part of it is under way."""

    def __init__(self, seen, codes: list[CodeType], step, backward, tracked, moving, others, tests):
        """Take what `attribute` does."""
        self._codes, self._tracked, self._moving, self._tests = codes, tracked, moving, tests
        self._of_step = {number for number, _ in step}
        # The innermost loop around an optimiser's step that holds the pass backward too: a loop over several
        # optimisers, or over batches that are added up, holds one of the two.
        around = [(span, *at) for at in step for span in reversed(source.find_loops(codes[at[0]].co_filename, at[1]))]
        both = (x for x in around if not backward or any(n == x[1] and x[0].holds(x[0].file, at) for n, at in backward))
        self.loop: Span | None
        self.loop, self._owner, self._step = next(both, around[0] if around else (None, -1, 0))
        self._forward = self._find_forward(seen) if self.loop else 0
        learning = (s for s in seen if s.phase in ("forward", "backward") and not self._is_quiet(s))
        self._trained = {s.root for s in learning}.difference(others)

    def _find_forward(self, seen: Iterable[CallStack]) -> int:
        """Return the line up to which a body prepares its batch: of the first call of a model."""
        assert self.loop is not None
        file, head = self.loop.file, self.loop.head
        for line in range(head + 1, self._step + 1):
            if re.search(r"model\(|net\(|loss", source.read_line(file, line)):
                if not source.find_no_grad(file, line):  # there it makes its batch, as where a policy acts
                    return line
        learning = (s for s in seen if s.phase == "forward" and not s.quiet)
        lines = [line for s in learning for n, line in s.own if n == self._owner and head < line < self._step]
        return min((line for line in lines if not source.find_no_grad(file, line)), default=self._step)

    def _is_quiet(self, s: CallStack) -> bool:
        return s.quiet or any(source.find_no_grad(self._codes[n].co_filename, line) for n, line in s.own[s.inside :])

    def _is_named_validation(self, s: CallStack) -> bool:
        if any(WORDS_OF_VALIDATION.search(self._codes[n].co_name) for n, _ in s.own if n not in self._of_step):
            return True
        at = next((at for at in s.own if at[0] in self._of_step), None)
        text = VALUES.sub("", source.read_line(self._codes[at[0]].co_filename, at[1])) if at else ""
        return bool(WORDS_OF_VALIDATION.search(text)) and "backward" not in text

    def _gives_numbers(self, s: CallStack) -> bool:
        """Say whether many rows are asked for, of which numbers are told: to choose or make rows is no test."""
        if self._tests.isdisjoint(s.own[s.inside : s.inside + 1]):
            return False
        number, line = s.own[s.inside]
        file, region = self._codes[number].co_filename, self.find_region(s)
        text = source.read_span(region) if isinstance(region, Span) else source.read_function(file, line)
        return bool(NUMBERS.search(text or source.read_line(file, line)))

    def _is_in_inner_loop(self, s: CallStack) -> bool:
        loops = (span for number, line in s.own for span in source.find_loops(self._codes[number].co_filename, line))
        return any(not source.counts_only(span) for span in loops if not self._is_around(span))

    def _is_around(self, span: Span) -> bool:
        """Say whether a loop is the one over batches, or around it."""
        return self.loop is not None and span.holds(self.loop.file, self.loop.start)

    def find_phase(self, s: CallStack) -> str:
        """Return a look's phase, of which a validation is one; "" where nothing of it is known yet."""
        if s.phase == "forward" and self._is_quiet(s):
            # A frozen network that prepares inputs is another one than is trained; the trained one makes targets too.
            over_data = s.root in self._trained and (
                s.evaluating or self._is_in_inner_loop(s) or self._gives_numbers(s)
            )
            return "validation" if over_data or self._is_named_validation(s) else "forward"
        phase = s.phase
        if not phase and s.own and s.own[0] in self._tracked:
            phase = "forward"
        elif not phase and s.own and s.own[0] in self._moving:
            phase = "optimiser"
        # Forgotten no_grad() and eval(): only the name is left to tell by.
        return "validation" if phase == "forward" and self._is_named_validation(s) else phase

    def find_region(self, s: CallStack) -> object:
        """Return what stands for all of a validation: its function, or the statement in the training function."""
        around = s.own[s.inside :]  # the model itself is called in training too
        for number, _ in reversed(around):
            if number not in self._of_step:
                return self._codes[number].co_filename, self._codes[number].co_name
        if not around:
            return None
        number, line = around[0]
        file = self._codes[number].co_filename
        for node in source.find_path(file, line):
            span = source.to_span(file, node)
            apart = not isinstance(node, source.SCOPES) and not span.holds(file, self._step if self.loop else 0)
            if apart and isinstance(node, (*source.LOOPS, source.ast.With)):
                return span
        return None

    def find_line(self, s: CallStack) -> int:
        """Return the line of the loop over batches that a look is at or below, 0 where it is outside it."""
        line = next((line for number, line in s.own if number == self._owner), 0) if self.loop else 0
        return line if self.loop and self.loop.holds(self._codes[self._owner].co_filename, line) else 0

    def find_asking(self, seen: Iterable[CallStack], held: Collection[int]) -> float:
        """Return the first line of the loop at which the trained model is asked without gradients, else infinity."""
        asking: list[int] = []
        for s in seen:
            # A small model's own training may be too short to be seen beside what it is asked.
            asks = s.phase == "forward" and self._is_quiet(s) and (s.root in self._trained or s.root in held)
            if asks and self.find_phase(s) == "forward":
                asking += [line for number, line in s.own if number == self._owner and line < self._forward]
        return min(asking, default=math.inf)

    def find_account(self, s: CallStack, here: int, in_region: bool) -> str:
        """Return the account of a look; here: of `find_line`; in_region: what it is a part of validates."""
        account = self.find_phase(s)
        if account in ("", "data") and in_region:
            account = "validation"
        elif account == "":
            account = "rest"
            if self.loop and here and s.library not in KINDS[1][1]:  # a progress bar around the loader draws
                # The head of the loop makes its batch; of a loop that counts, what is before a model too.
                if here <= self.loop.head or (here < self._forward and source.counts_only(self.loop)):
                    account = "data"
        return "outside" if self.loop and not here and account in ("rest", "data") else account

    def find_key(self, s: CallStack, here: int, account: str) -> Line:
        """Return what is told as one line, without its text and seconds."""
        number, line = s.own[0]
        file = self._codes[number].co_filename
        function = next((self._codes[n].co_name for n, _ in s.own if self._codes[n].co_name not in COMPREHENSIONS), "")
        led = (self._owner, here) if here else next((at for at in s.own if at[0] in self._of_step), s.own[0])
        call = self._codes[led[0]].co_filename, led[1]
        caller_file, caller = call if call != (file, line) else ("", 0)
        return Line(file, line, "", account, caller=caller, caller_file=caller_file, function=function)

    def name_lines(self, lines: dict[Line, defaultdict[str, float]]) -> list[Line]:
        """Return the lines, the longest first."""
        total = {key: sum(libraries.values()) for key, libraries in lines.items()}
        for key in list(total):  # what a line does after its last call is seen at the next one's
            earlier = source.find_unpacking(key.file, key.line) if key.account in ("data", "rest") else 0
            moved = replace(key, line=earlier)
            if moved in total and UNPACKED * total[key] < total[moved]:
                total[moved] += total.pop(key)
        found = []
        for key, seconds in total.items():
            text = source.read_line(key.file, key.line)
            library = max(lines[key], key=lines[key].__getitem__)
            # At last the outermost of those within the loop over batches, or a function.
            loops = (span.start for span in source.find_loops(key.file, key.line) if not self._is_around(span))
            found.append(
                replace(
                    key, text=text, seconds=seconds, kind=find_kind(text, library), by_torch=library == "torch",
                    around=next(loops, 0),
                )
            )  # fmt: skip
        return sorted(found, key=lambda line: -line.seconds)


def find_kind(text: str, library: str) -> str:
    """Name what a line does besides training; "" for what may be torch's own work."""
    if library in WRITING and re.search(WRITING[library], text):
        return "saving"
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
    cures = {noun: cure for noun, _, _, cure in KINDS}
    cures["compiling"] = "give the model inputs of one shape and dtype: each new one is compiled anew"
    otherwise = "take it out of the step, do it every hundredth step, or write it with torch on the whole batch"
    return cures.get(kind, otherwise)


def cure_between_steps(line: Line) -> str:
    """Return the cure for a line outside the loop over batches."""
    if line.account == "validation":
        return "validate more rarely, or on a part; in large batches, and without gradients"
    if line.kind in ("saving", "plotting", "logging", "a copy of the model", WAITING, "collecting garbage"):
        return cure_of(line.kind)
    if line.around and not line.by_torch:
        return "write it with NumPy or torch for all rows at once, not in a loop of Python's; or do it more rarely"
    return "do it once, before the first epoch, and keep the result; or more rarely, or beside the training"


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
    if DRAWING.search(text) or (DRAWING.search(body) and re.search(rf"^(while|for)\b|{MADE_OF_A_LIST}", text)):
        return "draw a whole batch at once, torch.randint(n, (size,)), and once more what may not be among it"
    return "do it once before training and keep the result; what must differ each time goes into num_workers=2 or more"
