"""This kit's own steps under the stopwatch: a stack here, or stacks in a process each, as the sweep runs them."""

import atexit
import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from cpbkit.config.experiment import Experiment, vary
from cpbkit.hardware import memory
from cpbkit.hardware.device import on_threads, wait
from cpbkit.training.loop import Fit, assemble, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.series import Series

WARM_UP = 2  # steps before the first timed one


@dataclass(frozen=True)
class Job:
    """A stack to be stepped."""

    experiment: Experiment
    series: tuple[Series, ...]
    device: str = "cpu"
    threads: int = 1
    steps: int = 1000  # more than will be asked for: no epoch ends under the stopwatch

    @property
    def rows(self) -> int:
        """Models that one step moves: of a search, each series with each setting."""
        return len(self.series) * len(self.experiment.training.trials)


def engine(job: Job) -> Iterator[Stack]:
    """Step a stack for ever, with the sweep's own loop."""
    endless = vary(job.experiment, steps=job.steps, epochs=10**9, patience=10**9)
    windows, stack = assemble(endless, job.series, job.device)
    for state in fit(Fit(stack), windows, endless.training, job.steps):
        if state.step:
            yield state.stack


class Here:
    """Something that steps in this process. rows: models that one step moves."""

    def __init__(self, start: Callable[[], Iterator], device: str | torch.device, rows: int = 1, threads: int = 1):
        self.rows, self.device, self.threads = rows, torch.device(device), threads
        begun = time.perf_counter()
        with memory.peak(self.device) as taken:
            self.steps = start()
            self.run(WARM_UP)
        self.memory, self.seconds_to_start = taken["bytes"], time.perf_counter() - begun

    @classmethod
    def of(cls, job: Job) -> "Here":
        """Step a stack."""
        return cls(functools.partial(engine, job), job.device, job.rows, job.threads)

    def run(self, steps: int) -> tuple[float, float]:
        """Step, and return wall and CPU seconds."""
        with on_threads(self.threads):
            wait(self.device)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                next(self.steps)
            wait(self.device)
            return time.perf_counter() - wall, time.process_time() - cpu


class Workers:
    """Processes that each step a stack at the same time, kept for the next stacks."""

    def __init__(self, count: int):
        context = multiprocessing.get_context("spawn")
        deaf = signal.SIGINT, signal.SIG_IGN  # an interrupt is for the process that asks, which then ends these
        # A pool each, since a stack stays in the process that has it.
        self.pools = [ProcessPoolExecutor(1, context, signal.signal, deaf) for _ in range(count)]
        self.busy: list[ProcessPoolExecutor] = []
        self.threads = 1

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)

    def start(self, jobs: Sequence[Job]) -> None:
        """Give each worker a stack, in place of the one it had."""
        self.busy = self.pools[: len(jobs)]
        self.rows = sum(job.rows for job in jobs)
        begun = time.perf_counter()
        started = [pool.submit(_start, job) for pool, job in zip(self.busy, jobs, strict=True)]
        taken: list = [answer.result() for answer in started]
        self.seconds_to_start = time.perf_counter() - begun
        self.memory = None if None in taken else sum(taken)

    def run(self, steps: int) -> tuple[float, float]:
        """Step all stacks at once, and return wall seconds and the CPU seconds of all."""
        begun = time.perf_counter()
        running = [pool.submit(_run, steps) for pool in self.busy]
        cpu = sum(answer.result() for answer in running)
        return time.perf_counter() - begun, cpu

    def call(self, function: Callable, *arguments):
        """Return what a function gives in one of the processes, or in this one where there are none."""
        return self.pools[0].submit(_call, function, *arguments).result() if self.pools else function(*arguments)


_held: list[Here] = []  # in a worker: the stack it steps, let go before anything else takes or measures memory
atexit.register(_held.clear)  # a training that ends with the interpreter cannot put torch's settings back


def _start(job: Job) -> int | None:
    _held.clear()
    _held.append(Here.of(job))
    return _held[0].memory


def _run(steps: int) -> float:
    return _held[0].run(steps)[1]


def _call(function: Callable, *arguments):
    _held.clear()
    return function(*arguments)
