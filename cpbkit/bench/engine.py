"""This kit's own steps under the stopwatch: a stack here, or stacks in a process each, as the sweep runs them."""

import functools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from cpbkit.bench.gauges import wait
from cpbkit.config.experiment import Experiment, vary
from cpbkit.errors import CpbkitError
from cpbkit.hardware import memory
from cpbkit.training.loop import Fit, assemble, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.series import Series


@dataclass(frozen=True)
class Job:
    """A stack to be stepped."""

    experiment: Experiment
    series: tuple[Series, ...]
    device: str = "cpu"
    threads: int = 1
    steps: int = 1000  # more than will be asked for: no epoch ends under the stopwatch


def engine(job: Job) -> Iterator[Stack]:
    """Step a stack for ever, with the sweep's own loop."""
    endless = vary(job.experiment, steps=job.steps, epochs=10**9, patience=10**9)
    windows, stack = assemble(endless, job.series, job.device)
    for state in fit(Fit(stack), windows, endless.training, job.steps):
        if state.step:
            yield state.stack


class Here:
    """Something that steps in this process. rows: models that one step moves."""

    def __init__(
        self, start: Callable[[], Iterator], rows: int, device: str | torch.device, threads: int, warm_up: int
    ):
        self.rows, self.device, self.threads = rows, torch.device(device), threads
        begun = time.perf_counter()
        with memory.peak(self.device) as taken:
            self.steps = start()
            self.run(warm_up)
        self.memory, self.seconds_to_start = taken["bytes"], time.perf_counter() - begun

    def run(self, steps: int) -> tuple[float, float]:
        """Step, and return wall and CPU seconds."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            wait(self.device)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                next(self.steps)
            wait(self.device)
            return time.perf_counter() - wall, time.process_time() - cpu
        finally:
            torch.set_num_threads(before)


class Workers:
    """Processes that each step a stack at the same time, kept for the next stacks."""

    def __init__(self, count: int):
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.busy: list[Connection] = []
        self.threads = 1
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.terminate()

    def start(self, jobs: Sequence[Job], warm_up: int) -> None:
        """Give each worker a stack, in place of the one it had."""
        self.busy = self.pipes[: len(jobs)]
        self.rows = sum(len(job.series) for job in jobs)
        begun = time.perf_counter()
        answers = self._ask([("start", job, warm_up) for job in jobs])
        self.seconds_to_start = time.perf_counter() - begun
        self.memory = None if None in answers else sum(answers)

    def run(self, steps: int) -> tuple[float, float]:
        """Step all stacks at once, and return wall seconds and the CPU seconds of all."""
        begun = time.perf_counter()
        cpu = self._ask([("run", steps)] * len(self.busy))
        return time.perf_counter() - begun, sum(cpu)

    def call(self, function: Callable, *arguments):
        """Return what a function gives in one of the processes, or in this one where there are none."""
        if not self.pipes:
            return function(*arguments)
        self.busy = self.pipes[:1]
        return self._ask([("call", function, *arguments)])[0]

    def _ask(self, questions: Sequence[tuple]) -> list:
        for pipe, question in zip(self.busy, questions, strict=True):
            pipe.send(question)
        answers = []
        for pipe in self.busy:
            answer, error = pipe.recv()
            if error:
                raise CpbkitError(f"a worker of the benchmark failed:\n{error}")
            answers.append(answer)
        return answers


def _serve(pipe) -> None:
    here: Here | None = None
    while True:
        try:
            what, *arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if what == "start":
                here = None  # before the next one: both at once would count as its memory
                job, warm_up = arguments
                here = Here(functools.partial(engine, job), len(job.series), job.device, job.threads, warm_up)
                pipe.send((here.memory, ""))
            elif what == "call":
                here = None  # and would leave less for a plan
                pipe.send((arguments[0](*arguments[1:]), ""))
            elif here:
                pipe.send((here.run(*arguments)[1], ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
