"""Counting what a step asks of torch, call by call: launches, waits, FLOP, bytes, and what stays alive."""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cpbkit.gpu_check.rnn_path import Path, Recurrence, count_kernels, predict_path

aten = torch.ops.aten
# No kernel runs for these on a GPU: they only describe memory.
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
        aten.lift_fresh, aten.is_same_size, aten._reshape_alias, aten.set_, aten.resize_}  # fmt: skip
# The host must know a value before it goes on.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
GATES = {aten.sigmoid, aten.tanh, aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell}
LIBRARY = {aten._cudnn_rnn, aten.mkldnn_rnn_layer}
OWN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))
OPTIMIZERS = os.path.join(OWN[0], "optim") + os.sep


class Census(TorchDispatchMode):
    """Count while active; `end_step()` after each step. Works on any device, meta included."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, seconds, to guard a method that never compiles

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.waits: list[str] = []  # file:line of the person's code
        self.costs: list[tuple[int, int]] = []  # (FLOP, bytes read and written) of each launch
        self.live: list[int] = []  # bytes made since the start that are alive, after each step
        self.recurrences: list[Recurrence] = []  # library layers that were called
        self.gates = 0  # sigmoids and tanhs: many of them are a recurrence written out
        self.precision = "float32"  # of the last matrix product
        self.optimizer_kernels = 0  # launches of an optimiser that walks tensor by tensor
        self.paused = True  # until entered, and within a layer that is counted as a whole
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self):
        self.paused = False
        return super().__enter__()

    def __exit__(self, *error):
        self.paused = True
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet, kwargs = function._overloadpacket, kwargs or {}
        if packet is aten._local_scalar_dense and args[0].is_meta:
            out = 0.0  # a meta tensor has no value; the step goes on with this one
        else:
            out = function(*args, **kwargs)
        if self.paused:
            return out
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self._remember(made)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if packet in WAITS or self._copies_to_host(packet, read, made, args):
            self._add_wait()
        if packet is aten._local_scalar_dense or function.is_view or packet in FREE:
            return out
        self.kernels += 1
        self.gates += packet in GATES
        if packet in LIBRARY:
            self.recurrences.append(Recurrence())
        formula = flop_registry.get(packet)
        if formula:
            self.precision = str(read[0].dtype).removeprefix("torch.")
        flop = int(formula(*args, **kwargs, out_val=out)) if formula else 0
        self.costs.append((flop, sum(t.nbytes for t in read) + sum(t.nbytes for t in made)))
        return out

    def watch(self, optimizer: torch.optim.Optimizer) -> list:
        """Count the launches of an optimiser, if it is one that walks tensor by tensor; return the hooks."""
        settings, on_gpu = optimizer.param_groups[0], optimizer.param_groups[0]["params"][0].is_cuda
        together = settings.get("foreach")
        if settings.get("fused") or together or (together is None and on_gpu):
            return []

        def begin(*_) -> None:
            self.optimizer_kernels -= self.kernels

        def end(*_) -> None:
            self.optimizer_kernels += self.kernels

        return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]

    def end_step(self) -> None:
        """Close a step: note the bytes of tensors made so far that somebody still holds."""
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        self.live.append(sum(size for _, size in self._storages.values()))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        yield
        self.paused = before

    def add(self, kernels: int, flop: int, size: int) -> None:
        """Count launches that happen inside one call."""
        if self.paused:
            return
        self.kernels += kernels
        self.costs += [(flop // kernels, size // kernels)] * kernels

    def _remember(self, made: list[torch.Tensor]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def _copies_to_host(self, packet, read, made, args) -> bool:
        if packet is aten.index:  # by a mask: its length is not known before the device has counted
            return any(t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor))
        if packet not in (aten._to_copy, aten.copy_):
            return False
        return any(t.is_cuda for t in read) and bool(made) and made[0].device.type == "cpu"

    def _add_wait(self) -> None:
        frame = sys._getframe()  # in a backward of the device's own thread there are no frames of the person
        while frame is not None and frame.f_code.co_filename.startswith(OWN):
            if frame.f_code.co_filename.startswith(OPTIMIZERS):
                return  # the optimiser's step count is a tensor on the host: reading it waits for nothing
            frame = frame.f_back
        name = os.path.basename(frame.f_code.co_filename) if frame else "torch"
        self.waits.append(f"{name}:{frame.f_lineno}" if frame else name)


class _Leaf(torch.autograd.Function):
    """A recurrent layer that computes nothing: shapes only, its launches and FLOP from the oracle."""

    @staticmethod
    def forward(ctx, census: Census, recurrence: Recurrence, path: Path, shapes, *tensors):
        ctx.census, ctx.recurrence, ctx.path, ctx.tensors = census, recurrence, path, tensors
        _count_leaf(census, recurrence, path, 1)
        with census.pause():
            return tuple(tensors[0].new_zeros(shape) for shape in shapes)

    @staticmethod
    def backward(ctx, *gradients):
        _count_leaf(ctx.census, ctx.recurrence, ctx.path, 2)
        with ctx.census.pause():
            return (None, None, None, None, *(torch.zeros_like(t) for t in ctx.tensors))


def _count_leaf(census: Census, r: Recurrence, path: Path, sweeps: int) -> None:
    gates, ways = {"lstm": 4, "gru": 3}.get(r.mode, 1), 1 + r.bidirectional
    weights = sum(gates * r.hidden * ((r.inputs if i == 0 else ways * r.hidden) + r.hidden) for i in range(r.layers))
    flop = 2 * weights * ways * r.batch * r.length * sweeps
    size = 4 * (weights * ways + r.batch * r.length * (r.inputs + r.hidden * gates * ways * r.layers))
    census.add(max(1, count_kernels(r, path) // 2), flop, size)


@contextlib.contextmanager
def recurrences_as_leaves(census: Census, capability=(7, 5), multiprocessors=40) -> Iterator[None]:
    """Let nn.LSTM, nn.GRU and nn.RNN compute nothing and count as the oracle says a GPU would run them.

    Off the GPU they decompose into thousands of calls that a GPU never sees. Their outputs are zeros, so use it
    for counting alone. A PackedSequence is left as it is.
    """
    originals = {kind: kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)}

    def forward(module, x, state=None):
        if not isinstance(x, torch.Tensor):
            return originals[type(module)](module, x, state)
        y = x if x.dim() == 3 else x.unsqueeze(0)
        batch, length = (y.shape[0], y.shape[1]) if module.batch_first else (y.shape[1], y.shape[0])
        ways, hidden = 1 + module.bidirectional, module.hidden_size
        mode = module.mode.lower().removeprefix("rnn_")
        r = Recurrence(mode, hidden, module.input_size, module.num_layers, module.bidirectional,
                       str(x.dtype).removeprefix("torch."), False, module.proj_size, batch, length)  # fmt: skip
        census.recurrences.append(r)
        carried = (ways * module.num_layers, batch, module.proj_size or hidden)
        shapes = [(*y.shape[:2], ways * (module.proj_size or hidden)), carried]
        if mode == "lstm":
            shapes.append((*carried[:2], hidden))
        path = predict_path(r, capability, multiprocessors)
        out, *states = _Leaf.apply(census, r, path, shapes, y, *module.parameters())
        if x.dim() == 2:
            out, states = out.squeeze(0), [s.squeeze(1) for s in states]
        return out, (tuple(states) if mode == "lstm" else states[0])

    try:
        for kind in originals:
            kind.forward = forward
        yield
    finally:
        for kind, original in originals.items():
            kind.forward = original
