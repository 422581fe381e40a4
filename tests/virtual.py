"""Clocks that stand still: one set by hand, and a host and a device in virtual time, which stand in for a GPU.

One step is linear in max-plus algebra, so a step of thousands of launches costs one small product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.clocks import HostClock
from cpbkit.gpu_check.step import Measured, Step, measure
from cpbkit.gpu_check.trace import Trace

# In µs, of the size that is usual on a cloud machine: launch to start, between kernels, and the call of a wait.
LATENCY, GAP, WAIT = 6.0, 1.2, 12.0
STEPS = 40  # after which a loop is steady, and over which it is then timed


class Launch(NamedTuple):
    """One call of the host, and what it makes the device do; µs."""

    host: float
    kernel: float
    waits: bool = False
    filled: float = 1.0  # share of the multiprocessors


@dataclass(frozen=True)
class Workload:
    """A training loop; µs a step."""

    launches: tuple[Launch, ...]
    python: float = 0.0  # of the host, outside launches
    load: float = 0.0  # of the host for a batch, without workers
    period: float = 0.0  # of the workers for a batch
    receive: float = 0.0  # of the host for a batch of the workers
    copy: float = 0.0  # of the device for a batch
    copy_waits: bool = False


class HandClock(HostClock):
    """Time that a step itself advances."""

    def __init__(self):
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def spend(self, seconds: float) -> None:
        self.time += seconds


class Machine(HostClock):
    """The clock of `step.measure`, and the loop itself, in virtual time; a batch on "meta" lies on the device."""

    serial, can_plug = False, True

    def __init__(self, workload: Workload):
        self.workload = workload
        self.host = self.device = self.ready = 0.0  # µs until each is free, and the workers' next batch is there
        first, *others = workload.launches
        calls = (first._replace(host=first.host + workload.python), *others)
        copy = (Launch(8.0, workload.copy, workload.copy_waits),) if workload.copy else ()
        self.calls = {True: calls, False: (*copy, *calls)}  # by: the batch lies on the device
        # A step as a matrix: new (host, device) = max over old of old + entry.
        starts = (0.0, -math.inf), (-math.inf, 0.0)
        self.steps = {key: [run_calls(calls, *start)[:2] for start in starts] for key, calls in self.calls.items()}

    def now(self) -> float:
        return self.host * 1e-6

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def mark(self) -> float:
        return max(self.device, self.host)

    def between(self, start: float, end: float) -> float:
        return (end - start) * 1e-6

    def has_passed(self, mark: float) -> bool:
        return mark <= self.host

    def plug(self, seconds: float) -> None:
        self.device = max(self.device, self.host + LATENCY) + seconds * 1e6

    def batches(self) -> Iterator[torch.Tensor]:
        w = self.workload
        while True:
            self.host += w.load
            if w.period:
                self.ready = max(self.ready, self.host - 4 * w.period) + w.period  # workers run a little ahead
                self.host = max(self.host, self.ready) + w.receive
            yield torch.zeros(1)

    def train(self, batch: torch.Tensor) -> None:
        (hh, dh), (hd, dd) = self.steps[batch.is_meta]
        self.host, self.device = max(self.host + hh, self.device + hd), max(self.host + dh, self.device + dd)

    def count(self, train) -> Census:
        """Return what a census would have counted."""
        census, launches = Census(), self.workload.launches
        census.kernels = len(launches)
        census.waits = ["loop.py:1"] * (sum(x.waits for x in launches) + self.workload.copy_waits)
        return census

    def trace(self, step) -> Trace:
        """Return what the profiler would have seen of a step in the running loop."""
        step()
        step()
        calls, kernels = self.calls[False], self.workload.launches
        spent = sum(x.kernel for x in kernels)
        return Trace(
            device=sum(x.kernel for x in calls) / 1e3,
            kernels=len(kernels),
            launches=len(calls),
            copy=self.workload.copy / 1e3,
            waits=sum(x.waits for x in calls),
            waiting=run_calls(calls, self.host, self.device)[2] / 1e3,
            filled=sum(x.filled * x.kernel for x in kernels) / spent,
            names=(),
        )


def run_calls(calls: tuple[Launch, ...], host: float, device: float) -> tuple[float, float, float]:
    """Go through a step call by call; return when host and device are free, and how long the host waited."""
    waited = 0.0
    for call in calls:
        host += call.host
        device = max(host + LATENCY, device + GAP) + call.kernel
        if call.waits:
            begun, host = host, max(host, device) + WAIT
            waited += host - begun
    return host, device, waited


def examine(workload: Workload) -> Measured:
    """Measure a simulated loop with the probes of a real one."""
    machine = Machine(workload)
    step = Step(machine.train, machine.batches, device="meta", workers=2 if workload.period else 0)
    return measure(step, 1e6, machine, machine.count)


def run_loop(workload: Workload, loads: bool = True) -> float:
    """Return the exact time of a step in the steady loop, µs."""
    machine = Machine(workload)
    batches = machine.batches() if loads else None
    half = 0.0
    for i in range(2 * STEPS):
        machine.train(next(batches) if batches else torch.zeros(1))
        if i == STEPS - 1:
            half = max(machine.host, machine.device)
    return (max(machine.host, machine.device) - half) / STEPS
