"""The operators of one step of a person's loop, counted and timed as they run, each with its own line."""

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import TORCH, OwnLine, Roles
from cpbkit.gpu_check.census import FREE, GATES, LIBRARY, is_wait
from cpbkit.gpu_check.flow import Flow
from cpbkit.gpu_check.module_calls import ModuleCalls
from cpbkit.gpu_check.tensors import is_capturing

aten = torch.ops.aten
ALONG_FIRST = {aten.select, aten.slice, aten.unbind}  # how a batch is taken apart
PRODUCTS = {aten.mm, aten.addmm, aten.mv, aten.addmv, aten.bmm, aten.baddbmm, aten.convolution}
WITH_BIAS = {aten.addmm, aten.addmv, aten.baddbmm}  # what is multiplied comes after it
DENSE = {aten.embedding_dense_backward, aten._embedding_bag_backward}  # gradients of all rows, 0 in most
SPREAD = {
    aten.index_put: 1,
    aten.index_put_: 1,
    aten.index_add: 2,
}  # likewise of a table that is indexed: place of rows
COMPARING = {aten.sub, aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss}
AGAIN = 8  # products of one weight in a pass forward
UNSCALED = 100.0  # numbers that layers read, and targets: weights begin so that they are to be near 1
LEAST_PAIRS = 8  # samples of a batch, from which (n, 1) and (n,) are no accident
NLL = {aten.nll_loss_forward, aten.nll_loss2d_forward}
FILLING = {aten.uniform_, aten.normal_}  # with random numbers, as a new layer's weights
SQUASHING = {aten.sigmoid, aten._softmax}
ONE_OF_MANY = {aten.select_backward, aten.slice_backward}
WIDE, LARGE = 4, 1_000_000  # outputs of a layer for each input, as of a vocabulary; numbers that it makes
ROWS = 4096  # of a loss's input that are looked at
VOCABULARY = 256  # columns of a row
LONG = 16  # ids in a row, from which padding may be most of it
MOST = 4000  # operators of a step that are noted: to note one takes longer than many an operator
STARTING = 8  # times what an operator costs that computes nothing: with its line of Python and its part of autograd
SLOW = 1e-4  # s of an operator, from which it is worth to look at what it made
SAMPLED = 64  # numbers of it
DENORMAL = 0.05  # of them
SLOW_FLOPS, SLOW_POINTS = 2e10, 1e9  # a second, of a core: of products, and of numbers one by one
CALIBRATING = 30  # additions of one number, of which the fastest is what an operator costs before it computes


@dataclass(slots=True)
class Calls:
    """What one own line asks of torch in a step."""

    count: int = 0
    seconds: float = 0.0
    tracked: bool = False  # towards a loss: what is computed here is a part of the model, and no batch


@dataclass(slots=True)
class Result:
    """The same numbers, made once or more in a step."""

    own: tuple[OwnLine, ...]  # that make them, the innermost first
    again: OwnLine  # that makes them again
    calls: int = 0
    seconds: float = 0.0
    tracked: bool = False  # made of weights: the next step's are others

    def add(self, own: tuple[OwnLine, ...], seconds: float, tracked: bool) -> None:
        # Where two calls part, from the outside: of a model that is called twice, the second call.
        parted = (at for at, first in zip(own[::-1], self.own[::-1], strict=False) if at != first)
        self.again = next(parted, own[0])
        self.calls += 1
        self.seconds += seconds
        self.tracked |= tracked


class Operators(TorchDispatchMode):
    """Count while active. The step runs as ever: each operator is called once, as the person called it."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # as in census.Census

    def __init__(self, roles: Roles, weights: Collection[torch.Tensor] = ()):
        super().__init__()
        self.roles, self._flow = roles, Flow(weights)
        self._shapes = {weight.shape for weight in weights if weight.dim() > 0}
        self.moving: set[OwnLine] = set()  # own lines that make of gradients what is added to weights
        self.lines: defaultdict[OwnLine | None, Calls] = defaultdict(Calls)
        self.taken: Counter[tuple[OwnLine, int]] = Counter()  # (line, length of the axis) -> rows taken
        self.joined: Counter[OwnLine] = Counter()  # line -> numbers of the tensors that it joins
        self.waits: list[OwnLine] = []
        self.count = self.beyond = 0  # noted, and those after MOST
        self.seconds = self.wide_seconds = 0.0  # all; those that make float64
        # Kind and sizes -> [calls, fastest]: the fastest is what no other process disturbed.
        self.kinds: dict[tuple, list] = {}
        self.gates = self.recurrences = 0
        self._products: Counter[int] = Counter()  # of each weight in a pass forward, by its place in memory
        self._most_products = 0
        self.devices: Counter[str] = Counter()
        self.modes: set[str] = set()  # of debugging, that were on
        self.dense: dict[int, tuple[int, int]] = {}  # rows of an embedding -> (rows read, numbers moved for them)
        self.wrong: dict[str, OwnLine] = {}  # soundness.OF_OPERATORS that was seen -> line
        self.padding: tuple[float, bool, OwnLine] | None = None  # (share of the ids, of each row too, line)
        self.last = 0  # steps in time of which a wide layer's outputs are computed, for one that is used
        self._thin: tuple[StorageWeakRef, int] | None = None  # (a gradient that is 0 but for one step in time, steps)
        self.results: dict[tuple, Result] = {}  # of slow operators forward, by what they made
        self.modules = ModuleCalls(roles)
        self.one_hot_seconds = 0.0  # of products of rows that are 0 but for a 1
        self.one_hot_line: OwnLine | None = None
        self.denormal_seconds = 0.0  # of operators on numbers that are nearly 0, which a CPU computes slowly
        self.denormal_line: OwnLine | None = None  # the first that makes some
        self.packed = False  # a recurrent layer is told the lengths of its rows
        self._squashed: dict[int, tuple[StorageWeakRef, OwnLine]] = {}  # place in memory of a probability: line
        self.rows = 0  # of the largest product forward: 1 where the model sees one sample at a time
        # Operators forward, and those of them within nn.LSTM or nn.GRU, which on a CPU may be thousands: that is how
        # torch writes them, and no fault of the loop.
        self.forward = self.in_layers = 0
        self.problem = ""
        self.base = self._calibrate()

    def _calibrate(self) -> float:
        one, times = torch.ones(1), []
        with self:
            for _ in range(CALIBRATING):
                begun = self.seconds
                torch.add(one, 1)
                times.append(self.seconds - begun)
        for counter in (self.lines, self.devices, self.kinds):
            counter.clear()
        self.count, self.seconds = 0, 0.0
        return min(times)

    def estimate_starting(self, model: float, count: float) -> float:
        """Return the share of the model's seconds a step that goes into starting so many operators.

        What operators take beyond those that compute nothing is computing. What is not is not all starting where other
        programs hold the machine back: an operator with its part of Python and autograd costs up to some times what an
        empty one takes.
        """
        if not model:
            return math.nan
        noted = sum(calls * max(0.0, fastest - self.base) for calls, fastest in self.kinds.values())
        computing = noted * (1 + self.beyond / max(self.count, 1))
        return max(0.0, min(1 - computing / model, STARTING * count * self.base / model))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.count >= MOST:
            self.beyond += function.namespace == "aten" and not function.is_view
            return function(*args, **(kwargs or {}))
        begun = time.thread_time()  # what other processes take does not count
        out = function(*args, **(kwargs or {}))
        seconds = time.thread_time() - begun
        try:
            if function.namespace == "aten":
                self._note(function, function._overloadpacket, args, out, seconds)
        except Exception as error:  # told in the report; the person's step goes on
            self.problem = f"an operator was not counted: {type(error).__name__}: {str(error)[:120]}"
        return out

    def _note(self, function, packet, args, out, seconds: float) -> None:
        line = self.roles.own_line(sys._getframe(2))
        if torch.is_grad_enabled():
            in_layer = _is_in_layer(sys._getframe(2))
            self.forward += 1
            self.in_layers += in_layer
            along_first = packet in ALONG_FIRST and (args[1] if len(args) > 1 else 0) == 0 and args[0].dim()
            if line and along_first and not in_layer:  # a recurrent layer takes its steps in time
                self._take(line, packet, args[0].shape[0])
        if torch._C._current_graph_task_id() != -1:  # the next pass forward is another one
            self._products.clear()
        if line and torch.is_grad_enabled() and (reason := self._find_wrong(packet, args)):
            made = None if packet in COMPARING else self._find_squashed(args[0])
            self.wrong[reason] = made or line
        if line and packet in FILLING and isinstance(args[0], nn.Parameter):
            self.wrong["MADE_ANEW"] = line
        self.packed |= packet is aten._pack_padded_sequence
        if line and packet is aten.embedding and (padding := _find_padding(args[1])):
            self.padding = max(self.padding or (0.0, False, line), (*padding, line))
        if line and is_wait(packet, args, out):
            on_host = all(x.is_cpu for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.waits += [] if on_host else [line]
        if function.is_view or packet in FREE or packet is aten._local_scalar_dense:
            return
        self._flow.note(line, function, args, out)
        if packet is aten.cat and line:
            self.joined[line] += out.numel()
        calls = self.lines[line]
        calls.count += 1
        calls.seconds += seconds
        self.count += 1
        self.seconds += seconds
        self.gates += packet in GATES
        self.recurrences += packet in LIBRARY
        made = out[0] if isinstance(out, (tuple, list)) and out else out
        if torch.is_grad_enabled() and isinstance(made, torch.Tensor) and made.is_floating_point():  # argmax ends there
            calls.tracked |= any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if packet in ONE_OF_MANY and len(args[1]) == 3 and args[2] == 1 and args[1][1] >= LONG:
            steps = args[1][1] if args[0].numel() * args[1][1] == made.numel() else 0
            self._thin = StorageWeakRef(made.untyped_storage()), steps
        strided = all(x.layout is torch.strided for x in (made, *args) if isinstance(x, torch.Tensor))
        if strided and packet is aten.mm and self._thin and args[0].numel() >= LARGE:
            if StorageWeakRef(args[0].untyped_storage()) == self._thin[0] and len(args[1]) >= WIDE * args[1].shape[1]:
                self.last = max(self.last, self._thin[1])
        if isinstance(made, torch.Tensor):
            self._note_made(line, function, args, made, seconds, strided)
        self._note_modes()

    def _note_made(self, line, function, args, made: torch.Tensor, seconds: float, strided: bool) -> None:
        packet = function._overloadpacket
        if packet in SQUASHING and line and torch.is_grad_enabled():  # a loss's own runs in its pass backward
            self._squashed[made.data_ptr()] = StorageWeakRef(made.untyped_storage()), line
        shapes = (x.shape for x in (made, *args) if isinstance(x, torch.Tensor))
        kind = self.kinds.setdefault((packet, *shapes), [0, seconds])
        kind[0] += 1
        kind[1] = min(kind[1], seconds)
        self.devices[made.device.type] += 1
        if seconds > SLOW and strided and line and made.device.type == "cpu":
            self._note_result(packet, args, made, seconds)
            if any(map(_has_denormals, (made, *args))):
                self.denormal_seconds += max(0.0, seconds - _usual_seconds(function, packet, args, made))
                self.denormal_line = self.denormal_line or line
        if packet in DENSE and strided:
            self.dense[len(made)] = args[1].numel(), made.numel()
        if packet in SPREAD and made.shape in self._shapes and torch._C._current_graph_task_id() != -1:
            rows = args[SPREAD[packet]]
            first = rows[0] if isinstance(rows, (list, tuple)) else rows
            if first is not None:  # else all of them
                self.dense[len(made)] = first.numel(), made.numel()
        if made.dtype == torch.float64:
            self.wide_seconds += seconds
        if packet in PRODUCTS and torch.is_grad_enabled():
            self.rows = max(self.rows, made.shape[0] if made.dim() > 1 else 1)
            x = args[packet in WITH_BIAS]
            if packet in (aten.mm, aten.addmm):
                weight = args[-1].data_ptr()
                self._products[weight] += 1
                self._most_products = max(self._most_products, self._products[weight])
            if line and strided and not x.requires_grad and not is_capturing():
                if x.abs().max() > UNSCALED:
                    self.wrong["INPUTS_NOT_SCALED"] = line
                if seconds > SLOW and _is_one_hot(x):
                    self.one_hot_seconds += seconds
                    self.one_hot_line = line

    def _note_modes(self) -> None:
        """Ask at each operator: a mode may be on for a part of the step."""
        if torch.autograd._profiler_enabled():
            self.modes.add("a profiler of torch's is recording")
        if sys.getprofile() or sys.gettrace():
            self.modes.add("a profiler or debugger of Python's follows every call")
        if "tracemalloc" in sys.modules and sys.modules["tracemalloc"].is_tracing():
            self.modes.add("tracemalloc notes every piece of memory: tracemalloc.stop()")
        if torch.is_anomaly_enabled():
            self.modes.add("anomaly detection is on: torch.autograd.set_detect_anomaly(False)")

    def _note_result(self, packet, args, made: torch.Tensor, seconds: float) -> None:
        if not made.is_floating_point() or not args:
            return
        stack = self.roles.read(sys._getframe(4))
        texts = (source.read_line(self.roles.codes[number].co_filename, line) for number, line in stack.own)
        if stack.phase in ("backward", "optimiser") or any(map(source.ONLY_PASSES.search, texts)):
            return
        flat = made.detach().reshape(-1)
        numbers = *flat[:: max(1, len(flat) // SAMPLED)].tolist(), flat.sum().item(), flat.norm().item()
        if len(set(numbers)) > 3:  # zeros and ones are no result
            result = self.results.setdefault((packet, *numbers), Result(stack.own, stack.own[0]))
            result.add(
                stack.own, seconds, any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(args))
            )

    def _find_wrong(self, packet, args) -> str:
        """Return the reason of soundness.OF_OPERATORS for which an operator cannot be meant so, or ""."""
        if packet in COMPARING:
            return "BROADCAST" if _is_of_all_pairs(args) else "TARGETS_NOT_SCALED" if _is_far_off(args) else ""
        x = args[0] if args else None
        if not (isinstance(x, torch.Tensor) and x.requires_grad) or (x.is_cuda and is_capturing()):
            return ""
        if packet in NLL:
            rows = _to_rows(x, min(1, x.dim() - 1))
            if rows.shape[1] == 1:
                return "ONE_CLASS"
            # A row may be above 0 as a whole: logarithms times what a policy has gained.
            mixed = bool(((rows > 1e-3).any(1) & (rows < -1e-3).any(1)).any())
            return "NO_LOGARITHMS" if mixed or _are_probabilities(rows) else ""
        if packet is aten._softmax and x.dim() > 1 and x.shape[args[1]] == 1:
            return "ONE_OUTPUT"
        if packet is aten._log_softmax:
            return "PROBABILITIES" if _are_probabilities(_to_rows(x, args[1])) else ""
        if packet is aten.binary_cross_entropy_with_logits and self._find_squashed(x):
            return "PROBABILITIES" if x.numel() >= LEAST_PAIRS and bool(((x >= 0) & (x <= 1)).all()) else ""
        return ""

    def _find_squashed(self, x: torch.Tensor) -> OwnLine | None:
        """Return the line that made a probability, where it still is what lies in that place of memory."""
        storage, line = self._squashed.get(x.data_ptr(), (None, None))
        return None if storage is None or storage.expired() else line

    @property
    def whole_count(self) -> int:
        """Operators of a step."""
        return self.count + self.beyond

    @property
    def own_count(self) -> float:
        """Those that are not torch's own writing-out of a recurrent layer."""
        return self.whole_count * (1 - self.in_layers / max(self.forward, 1))

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrence is written out: the same weights at each step in time, unlike those of many models."""
        return not self.recurrences and self._most_products >= AGAIN

    def _take(self, line: OwnLine, packet, length: int) -> None:
        """Note rows that the loop itself takes; a loader takes its samples one by one, which is its task."""
        if self.roles.read(sys._getframe(3)).phase != "data":
            self.taken[line, length] += length if packet is aten.unbind else 1

    def begin(self) -> None:
        """Count until `try_exit`."""
        self.modules.begin()
        self.__enter__()

    def try_exit(self) -> bool:
        """Stop counting, unless a mode of the person's was entered since: it would be left in this one's place."""
        self.modules.end()  # else its hooks would go on
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)
        self.moving = self._flow.find_moving()
        del self._flow
        return True


def _has_denormals(x) -> bool:
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or x.numel() < SAMPLED:
        return False
    some = x.detach().flatten() if x.is_contiguous() else x.detach()[..., 0].flatten()
    # By the golden ratio, for an even stride would meet the same few columns in every row.
    some = some[(torch.arange(SAMPLED, dtype=torch.float64) * 0.6180339887 % 1 * len(some)).long()]
    return bool(((some != 0) & (some.abs() < torch.finfo(x.dtype).tiny)).float().mean() > DENORMAL)


def _is_one_hot(x: torch.Tensor) -> bool:
    """Say whether rows, of which some are looked at, are as wide as a vocabulary, and 0 but for a 1."""
    if x.dim() < 2 or x.shape[-1] < VOCABULARY:
        return False
    rows = x.detach().flatten(0, -2)
    rows = rows[:: max(1, len(rows) // 8)]
    return bool((rows.count_nonzero(1) == 1).all()) and bool((rows.amax(1) == 1).all())


def _usual_seconds(function, packet, args, made: torch.Tensor) -> float:
    """Return what an operator takes at most on numbers that are not next to zero; infinity where nobody knows."""
    if packet is aten.convolution:
        return 2 * made.numel() * args[1][0].numel() / SLOW_FLOPS
    if packet in PRODUCTS:
        return 2 * made.numel() * args[packet in WITH_BIAS].shape[-1] / SLOW_FLOPS
    return made.numel() / SLOW_POINTS if torch.Tag.pointwise in function.tags else math.inf


def _to_rows(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.detach().movedim(axis, -1).flatten(0, -2)[:ROWS].float() if x.dim() > 1 else x.detach()[None].float()


def _are_probabilities(rows: torch.Tensor) -> bool:
    """Say whether rows, or the columns of a whole batch, are above 0 and add up to 1."""
    if rows.numel() < LEAST_PAIRS or bool((rows < 0).any()):
        return False
    return any(bool((rows.sum(axis) - 1).abs().max() < 1e-3) for axis in (0, 1))


def _find_padding(ids: torch.Tensor) -> tuple[float, bool] | None:
    """Return (share of one id repeated at the end, or the start, of rows; whether each row has some of it)."""
    if ids.dim() != 2 or ids.shape[0] < 2 or ids.shape[1] < LONG or (ids.is_cuda and is_capturing()):
        return None
    found = []
    for side in (ids.flip(1), ids):
        of_row = (side == side[:, 0].mode().values).cumprod(1).sum(1)
        found.append((of_row.sum().item() / ids.numel(), bool(of_row.min() > 1)))
    return max(found)


def _is_of_all_pairs(args) -> bool:
    """Say whether two vectors of one length, one of them a column, are compared, before or after their broadcasting."""
    if len(args) < 2 or not all(isinstance(a, torch.Tensor) for a in args[:2]):
        return False
    one, two = args[:2]
    n = max(len(one) if one.dim() else 0, len(two) if two.dim() else 0)
    if {tuple(one.shape), tuple(two.shape)} == {(n, n)}:
        return n >= LEAST_PAIRS and {one.stride(), two.stride()} == {(1, 0), (0, 1)}
    return n >= LEAST_PAIRS and {tuple(one.shape), tuple(two.shape)} == {(n, 1), (n,)}


def _is_far_off(args) -> bool:
    """Say whether a target is far from 0, and what is to become like it near 0."""
    tensors = all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args[:2]) and len(args) > 1
    if not tensors or is_capturing() or args[0].requires_grad == args[1].requires_grad:
        return False
    forecast, target = sorted(args[:2], key=lambda x: not x.requires_grad)
    size = target.detach().abs().mean()
    return bool(size > UNSCALED) and bool(forecast.detach().abs().mean() < size / UNSCALED)


def _is_in_layer(frame: FrameType | None) -> bool:
    """Say whether a recurrent layer of torch's is on the stack, below the first frame that is not torch's."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.RNNBase):
            return True
        frame = frame.f_back
    return False
