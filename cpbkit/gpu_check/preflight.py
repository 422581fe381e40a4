"""What a step would do on a named chip, predicted without one: count its calls, FLOP and bytes, then decide."""

from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check.census import Census, recurrences_as_leaves
from cpbkit.gpu_check.chips import Chip
from cpbkit.gpu_check.diagnosis import Diagnosis, Numbers, decide
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.rnn_path import predict_path
from cpbkit.gpu_check.step import GATES, Step, phase

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
    size: int  # bytes read and written a step

    def lines(self) -> list[str]:
        """Return sentences for a person."""
        n, d = self.numbers, self.diagnosis
        math = self.flop / self.chip.float32 * 1e3
        return [
            f"predicted for the {self.chip.name}, not measured: {d.verdict} {d.reason}".rstrip(),
            f"  {n.kernels:,.0f} launches take the host about {n.host:.3g} ms ({CALL:.0f} µs each)",
            f"  the device needs about {n.device:.3g} ms; at its peak the arithmetic alone is {math:.2g} ms",
            f"  {n.waits:.0f} waits a step{': ' + ', '.join(n.wait_lines) if n.wait_lines else ''}",
        ]


def preflight(step: Step, chip: Chip) -> Prediction:
    """Predict H, D and the verdict on a chip; the step runs twice, on the CPU or on meta tensors, and is put back.

    The loader is not predicted: its time does not depend on the chip.
    """
    census = Census()
    leaves = recurrences_as_leaves(census, chip.capability, chip.multiprocessors)
    with preserved(step.train, step.batches, step.model, step.optimizer), leaves, phase("pre-flight"):
        batch = next(iter(step.batches())) if step.batches else None
        with Census():  # the optimiser makes its state; under a census because meta tensors have no item() else
            step.train(batch)
        with census:
            step.train(batch)
    device = sum(
        max(flop / chip.float32, size / chip.bandwidth, LEAST_KERNEL * 1e-6) + GAP * 1e-6 for flop, size in census.costs
    )
    on_host = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_cuda]
    copy = sum(t.nbytes for t in on_host) / chip.link
    host, device = census.kernels * CALL * 1e-3, (device + copy) * 1e3
    cached = host + device if census.waits else max(host, device)
    path = predict_path(census.recurrences[-1], chip.capability, chip.multiprocessors) if census.recurrences else None
    numbers = Numbers(
        loop=cached,
        cached=cached,
        host=max(host, 1e-6),
        device=max(device, 1e-6),
        copy=copy * 1e3,
        kernels=census.kernels,
        waits=len(census.waits),
        arithmetic=sum(flop for flop, _ in census.costs) / chip.float32 * 1e3,
        rnn=path.name if path else "cells" if census.gates >= GATES else "",
        precision=census.precision,
        capability=chip.capability,
        wait_lines=tuple(dict.fromkeys(census.waits)),
    )
    flop, size = (sum(column) for column in zip(*census.costs, strict=True)) if census.costs else (0, 0)
    return Prediction(chip, numbers, decide(numbers), flop, size)
