"""A host, a device and a loader in virtual time: faults with a known answer, to see how far verdicts can be trusted.

One step is linear in max-plus algebra, so a step of thousands of launches costs one small product.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import NamedTuple

import torch

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.clocks import HostClock
from cpbkit.gpu_check.diagnosis import decide
from cpbkit.gpu_check.numbers import NAN, Numbers, Policy
from cpbkit.gpu_check.step import Measured, Step, measure
from cpbkit.gpu_check.trace import Trace

# In µs, of the size that is usual on a cloud machine: launch to start, between kernels, and the call of a wait.
LATENCY, GAP, WAIT = 6.0, 1.2, 12.0
CLEAR, CLEAN = 1.25, 1.05  # a fault costs at least the one; where there is none, a ratio is below the other
STEPS = 40  # after which a loop is steady, and over which it is then timed
FIX = {"DATA_STARVED": "data on the device", "SYNC_BOUND": "no waits", "HOST_BOUND": "CUDA graph",
       "COPY_BOUND": "no copies"}  # fmt: skip


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

    def count(self, train, optimizer) -> Census:
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
            steps=1,
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


def cure(w: Workload, verdict: str) -> Workload:
    """Return the workload with the cure of a verdict applied."""
    if verdict == "DATA_STARVED":
        return replace(w, load=0.0, period=0.0, receive=0.0)
    if verdict == "SYNC_BOUND":
        free = tuple(x._replace(waits=False) for x in w.launches)
        return replace(w, launches=free, copy_waits=False)
    if verdict == "HOST_BOUND":  # a graph: one launch replays them all
        whole = Launch(20.0, sum(x.kernel + GAP for x in w.launches))
        return replace(w, launches=(whole,), python=0.0, copy_waits=False)
    return replace(w, copy=0.0)


def find_truth(w: Workload, policy: Policy) -> tuple[str, float, float]:
    """Try all cures in the order of the tree: (the verdict, what its cure gains, how clear the case is).

    The clearness is the ratio of times at the verdict's own stage, 1 where an earlier stage is not quite clean:
    a loop with one clear fault, or with none, is what a verdict can be held against.
    """
    cached, free = run_loop(w, loads=False), run_loop(cure(w, "SYNC_BOUND"), loads=False)
    stages = {
        "DATA_STARVED": run_loop(w) / cached,
        "SYNC_BOUND": cached / free,
        "HOST_BOUND": free / run_loop(cure(w, "HOST_BOUND"), loads=False),
    }
    for verdict, ratio in stages.items():
        if ratio > 1 + policy.least_excess:
            return verdict, run_loop(w) / run_loop(cure(w, verdict)), ratio
        if ratio > CLEAN:
            return verdict, NAN, 1.0
    device = sum(x.kernel + GAP for x in w.launches) + w.copy
    if w.copy > policy.copy_share * device:
        return "COPY_BOUND", run_loop(w) / run_loop(cure(w, "COPY_BOUND")), device / (device - w.copy)
    filled = sum(x.filled * x.kernel for x in w.launches) / sum(x.kernel for x in w.launches)
    return ("DEVICE_LATENCY_BOUND" if filled < policy.filled_share else "DEVICE_BOUND"), NAN, CLEAR


def _small(r: random.Random, count: int, filled: float = 0.05) -> tuple[Launch, ...]:
    return tuple(Launch(r.uniform(5, 12), r.uniform(2, 5), filled=filled) for _ in range(count))


def _large(r: random.Random, count: int) -> tuple[Launch, ...]:
    return tuple(Launch(r.uniform(10, 16), r.uniform(200, 1200), filled=r.uniform(0.6, 1)) for _ in range(count))


def _persistent(r: random.Random) -> tuple[Launch, ...]:
    layers = tuple(Launch(r.uniform(60, 140), r.uniform(250, 900), filled=0.1) for _ in range(2 * r.randint(1, 2)))
    return layers + _small(r, r.randint(10, 30), 0.1)


def _waiting(launches: tuple[Launch, ...], every: int) -> tuple[Launch, ...]:
    return tuple(x._replace(waits=(i + 1) % every == 0) for i, x in enumerate(launches))


SCENARIOS = {
    "healthy": lambda r: Workload(_large(r, 30) + _small(r, 12), load=r.uniform(50, 600), copy=20),
    "cell written out": lambda r: Workload(_small(r, r.randint(1500, 4000)), load=r.uniform(100, 800), copy=15),
    "many small layers": lambda r: Workload(_small(r, r.randint(80, 400)), r.uniform(100, 800), r.uniform(20, 150)),
    "nn.LSTM, small batch": lambda r: Workload(_persistent(r), load=r.uniform(20, 80), copy=10),
    "item() every step": lambda r: Workload(
        (*_small(r, r.randint(60, 200)), *_large(r, r.randint(1, 4)), Launch(15, r.uniform(300, 900), waits=True)),
        r.uniform(0, 400),
        r.uniform(10, 60),
    ),
    "item() in the time loop": lambda r: Workload(_waiting(_small(r, 1200), 4), load=50, copy=10),
    "per-sample loader": lambda r: Workload(_persistent(r), load=r.uniform(2500, 12000), copy=15),
    "workers for bars in memory": lambda r: Workload(_persistent(r), period=r.uniform(3000, 7500), receive=150),
    "CUDA_LAUNCH_BLOCKING": lambda r: Workload(_waiting(_persistent(r) + _small(r, 80), 1), load=30, copy=10),
    "windows copied from the host": lambda r: Workload(
        _large(r, 8) + _small(r, 10), load=r.uniform(20, 60), copy=r.uniform(2000, 9000)
    ),
}


class Case(NamedTuple):
    """One simulated loop: what is wrong with it, and what was found."""

    scenario: str
    truth: str
    found: str
    error: float  # predicted over true gain, minus 1; NaN where there is none, or the verdict is wrong


@dataclass(frozen=True)
class Score:
    """How the verdicts did against the truth."""

    cases: tuple[Case, ...]

    def to_dict(self) -> dict:
        """JSON-safe: shares, and the 5 %, 50 % and 95 % points of the error of the predicted gain."""
        total, errors = len(self.cases), [c.error for c in self.cases if not math.isnan(c.error)]
        right = sum(c.found == c.truth for c in self.cases) / total
        undecided = sum(c.found == "INCONCLUSIVE" for c in self.cases) / total
        cuts = quantiles(errors, n=20)
        return {
            "loops": total,
            "right": right,
            "inconclusive": undecided,
            "wrong": 1 - right - undecided,
            "gain error": {"5%": cuts[0], "median": median(errors), "95%": cuts[-1]},
            "gain within 15 %": sum(abs(e) <= 0.15 for e in errors) / len(errors),
            "verdicts": {name: dict(Counter(c.found for c in self.cases if c.scenario == name)) for name in SCENARIOS},
        }


def jitter(n: Numbers, r: random.Random, size: float) -> Numbers:
    """Blur every measured time by a normal error of relative size `size`, and state the spread it gives."""
    times = ("loop", "cached", "host", "device", "loader", "copy")
    blurred = {name: getattr(n, name) * max(0.1, r.gauss(1, size)) for name in times}
    return replace(n, spread=size, **blurred)


def score_verdicts(loops: int = 40, size: float = 0.05, seed: int = 0) -> Score:
    """Diagnose `loops` random loops of every scenario from blurred numbers, and hold them against the truth.

    The truth comes from trying each cure in the simulator, not from the numbers the verdict is made of.
    """
    r, policy, cases = random.Random(seed), Policy(), []
    for name, draw in SCENARIOS.items():
        for _ in range(loops):
            clearness = 1.0
            while clearness < CLEAR:
                workload = draw(r)
                truth, gain, clearness = find_truth(workload, policy)
            found = decide(jitter(examine(workload).numbers, r, size), policy=policy)
            error = NAN
            if found.verdict == truth and truth in FIX:
                error = next(f.ceiling for f in found.fixes if f.name == FIX[truth]) / gain - 1
            cases.append(Case(name, truth, found.verdict, error))
    return Score(tuple(cases))
