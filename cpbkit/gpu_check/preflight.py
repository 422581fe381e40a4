"""What a step would need and do on a named chip, predicted without one: its calls, FLOP, bytes and memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.diagnosis import Diagnosis, decide
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.numbers import Numbers
from cpbkit.gpu_check.rnn_path import Path, Recurrence, count_kernels, predict_path
from cpbkit.gpu_check.step import GATES, Step, phase
from cpbkit.hardware.chips import Chip

CALL = 7.0  # µs of the host a call, with autograd: reported for PyTorch on common hosts (pytorch issue 41383)
LEAST_KERNEL = 2.0  # µs a kernel takes however small it is
GAP = 1.0  # µs between two kernels


@dataclass(frozen=True)
class Prediction:
    """Everything here is predicted from stated constants; nothing was measured on the chip."""

    chip: Chip
    numbers: Numbers
    diagnosis: Diagnosis
    flop: int  # a step
    graph: bool  # the whole step is one launch

    def lines(self) -> list[str]:
        """Return sentences for a person."""
        n, d = self.numbers, self.diagnosis
        calls = f"{n.kernels:,.0f} launches take the host about {n.host:.3g} ms ({CALL:.0f} µs each)"
        if self.graph:
            calls = f"{n.kernels:,.0f} kernels are launched as one CUDA graph, which costs the host next to nothing"
        return [
            f"predicted for the {self.chip.name}, not measured: {d.verdict} {d.reason}".rstrip(),
            f"  {calls}",
            f"  the device needs about {n.device:.3g} ms; at its peak the arithmetic alone is {n.arithmetic:.2g} ms",
            f"  {n.waits:.0f} waits a step{': ' + ', '.join(n.wait_lines) if n.wait_lines else ''}",
        ]


def preflight(step: Step, chip: Chip) -> Prediction:
    """Predict H, D and the verdict on a chip; the step runs twice, on the CPU or on meta tensors, and is put back.

    The loader is not predicted: its time does not depend on the chip.
    """
    census = Census()
    with preserved(step), recurrences_as_leaves(census, chip), phase("pre-flight"):
        batch = next(step.feed())
        with Census():  # the optimiser makes its state; under a census because meta tensors have no item() else
            step.train(batch)
        with census:
            step.train(batch)

    def kernels(times: float) -> float:
        """Return the ms of all kernels on so many times the samples."""
        peaks = (max(flop / chip.peak(census.precision), size / chip.bandwidth) for flop, size in census.costs)
        return sum(max(times * peak * 1e3, LEAST_KERNEL * 1e-3) + GAP * 1e-3 for peak in peaks)

    on_host = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_cuda]
    copy = sum(t.nbytes for t in on_host) / chip.link * 1e3
    graph = step.graph and not census.waits
    host = (1 if graph else census.kernels) * CALL * 1e-3
    device = kernels(1) + copy
    cached = host + device if census.waits else max(host, device)
    flop = sum(flop for flop, _ in census.costs)
    path = _predict_path(census.recurrences[-1], chip) if census.recurrences else None
    numbers = Numbers(
        loop=cached,
        cached=cached,
        host=max(host, 1e-6),
        device=max(device, 1e-6),
        copy=copy,
        kernels=census.kernels,
        waits=len(census.waits),
        doubling=kernels(2) / max(kernels(1), 1e-6),
        arithmetic=flop / chip.peak(census.precision) * 1e3,
        rnn=path.name if path else "cells" if census.gates >= GATES else "",
        precision=census.precision,
        capability=chip.capability,
        wait_lines=tuple(dict.fromkeys(census.waits)),
    )
    return Prediction(chip, numbers, decide(numbers), flop, graph)


def predict_memory(step: Step) -> dict[str, int]:
    """Count the bytes a step must hold at once: weights, gradients, optimiser, what backward keeps, batch.

    What a device allocates on top is workspace, reserve of the allocator, and some hundred MB of the driver.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with preserved(step), phase("memory"):
        batch = next(step.feed())
        step.train(batch)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step.train(batch)
        parameters = list(step.model.parameters()) if step.model is not None else []
        states = step.optimizer.state.values() if step.optimizer is not None else ()
        own = {p.untyped_storage().data_ptr() for p in parameters}
        return {
            "weights": sum(p.nbytes for p in parameters),
            "gradients": sum(p.nbytes for p in parameters if p.requires_grad),
            "optimiser": sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor)),
            "kept for backward": sum(size for pointer, size in kept.items() if pointer not in own),
            "batch": sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor)),
        }


@contextlib.contextmanager
def recurrences_as_leaves(census: Census, chip: Chip) -> Iterator[None]:
    """Let nn.LSTM, nn.GRU and nn.RNN count as the oracle says the chip would run them; their gradients are zeros.

    Off the GPU they decompose into thousands of calls that a GPU never sees. A PackedSequence is left as it is.
    """

    def as_leaf(original):
        def forward(module, x, state=None):
            if not isinstance(x, Tensor):
                return original(module, x, state)
            with census.pause(), torch.no_grad():
                made, shape = tree_flatten(original(module, x, state))
            r = _describe(module, x)
            census.recurrences.append(r)
            return tree_unflatten(_Leaf.apply(census, r, chip, made, x, *module.parameters()), shape)

        return forward

    originals = {kind: kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)}
    try:
        for kind, original in originals.items():
            kind.forward = as_leaf(original)
        yield
    finally:
        for kind, original in originals.items():
            kind.forward = original


def _describe(module: nn.RNNBase, x: Tensor) -> Recurrence:
    if x.dim() == 2:
        batch, length = 1, len(x)
    else:
        batch, length = x.shape[:2] if module.batch_first else x.shape[1::-1]
    return Recurrence(
        module.mode.lower().removeprefix("rnn_"), module.hidden_size, module.input_size, module.num_layers,
        module.bidirectional, str(x.dtype).removeprefix("torch."), False, module.proj_size, batch, length,
    )  # fmt: skip


class _Leaf(torch.autograd.Function):
    """A recurrent layer that was computed uncounted: its launches and FLOP come from the oracle."""

    @staticmethod
    def forward(ctx, census: Census, recurrence: Recurrence, chip: Chip, made: list[Tensor], *tensors):
        ctx.census, ctx.recurrence, ctx.chip, ctx.tensors = census, recurrence, chip, tensors
        _count_leaf(census, recurrence, chip, 1)
        return tuple(made)

    @staticmethod
    def backward(ctx, *gradients):
        _count_leaf(ctx.census, ctx.recurrence, ctx.chip, 2)
        with ctx.census.pause():
            return (None, None, None, None, *(torch.zeros_like(t) for t in ctx.tensors))


def _count_leaf(census: Census, r: Recurrence, chip: Chip, sweeps: int) -> None:
    gates, ways = {"lstm": 4, "gru": 3}.get(r.mode, 1), 1 + r.bidirectional
    weights = sum(gates * r.hidden * ((r.inputs if i == 0 else ways * r.hidden) + r.hidden) for i in range(r.layers))
    flop = 2 * weights * ways * r.batch * r.length * sweeps
    size = 4 * (weights * ways + r.batch * r.length * (r.inputs + r.hidden * gates * ways * r.layers))
    census.add(max(1, count_kernels(r, _predict_path(r, chip)) // 2), flop, size)


def _predict_path(r: Recurrence, chip: Chip) -> Path:
    return predict_path(r, chip.capability, chip.multiprocessors)
