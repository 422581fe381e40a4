"""Counting what a step asks of torch, call by call: launches, waits, FLOP, and what stays alive."""

import os
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# No kernel runs for these on a GPU: they only describe memory.
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
        aten.lift_fresh, aten.is_same_size, aten._reshape_alias, aten.set_, aten.resize_}  # fmt: skip
# The host must know a value before it goes on.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
GATES = {aten.sigmoid, aten.tanh, aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell}
LIBRARY = {aten._cudnn_rnn, aten.mkldnn_rnn_layer}
OWN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))
COUNTED = 12  # steps in which the growth of live memory is seen
OPTIMIZERS = os.path.join(OWN[0], "optim") + os.sep


class Census(TorchDispatchMode):
    """Count while active; `end_step()` after each step. Works on any device, meta included."""

    # Torch would import its compiler, seconds, to guard a method that never compiles.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.waits: list[str] = []  # file:line of the person's code
        self.flop = 0
        self.live: list[int] = []  # bytes made since the start that are alive, after each step
        self.recurrences = 0  # library layers that were called, whose FLOP nobody counts
        self.gates = 0  # sigmoids and tanhs: many of them are a recurrence written out
        self.precision = "float32"  # of the last matrix product
        self.read: set[int] = set()  # storages of the tensors that were read
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet, kwargs = function._overloadpacket, kwargs or {}
        if packet is aten._local_scalar_dense and args[0].is_meta:
            out = 0.0  # a meta tensor has no value; the step goes on with this one
        else:
            out = function(*args, **kwargs)
        made, read = (
            [t for t in tree_leaves(things) if isinstance(t, torch.Tensor)] for things in (out, (args, kwargs))
        )
        self.read.update(tensor.untyped_storage()._cdata for tensor in read)
        for storage in (tensor.untyped_storage() for tensor in made):
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        if is_wait(packet, args, out):
            self._add_wait()
        if packet is aten._local_scalar_dense or function.is_view or packet in FREE:
            return out
        self.kernels += 1
        self.gates += packet in GATES
        self.recurrences += packet in LIBRARY
        if packet in flop_registry:
            self.precision = str(read[0].dtype).removeprefix("torch.")
            self.flop += int(flop_registry[packet](*args, **kwargs, out_val=out))
        return out

    def end_step(self) -> None:
        """Close a step: note the bytes of tensors made so far that somebody still holds."""
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        self.live.append(sum(size for _, size in self._storages.values()))

    def _add_wait(self) -> None:
        # In a backward of the device's own thread there are no frames of the person.
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(OWN):
            if frame.f_code.co_filename.startswith(OPTIMIZERS):
                return  # the optimiser's step count is a tensor on the host: reading it waits for nothing
            frame = frame.f_back
        name = os.path.basename(frame.f_code.co_filename) if frame else "torch"
        self.waits.append(f"{name}:{frame.f_lineno}" if frame else name)


def is_wait(packet, args, out) -> bool:
    """Say whether a call makes the host wait, if what it reads lies on a device."""
    if packet in WAITS:
        return True
    if packet is aten.index:  # by a mask: its length is not known before the device has counted
        return any(t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor))
    if packet not in (aten._to_copy, aten.copy_):
        return False
    there = any(t.is_cuda for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    return there and isinstance(out, torch.Tensor) and out.is_cpu


def take_census(train: Callable[[], object]) -> Census:
    """Count the calls of one step, after some over which the growth of live memory is seen."""
    with Census() as living:
        for _ in range(COUNTED):
            train()
            living.end_step()
            if living.kernels > 20_000:
                break  # thousands of calls a step: few steps say enough, and more take long
    with Census() as census:
        train()
    census.live = living.live
    return census
