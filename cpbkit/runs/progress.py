"""Where a sweep stands, and how long it has to go."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from cpbkit.config.experiment import Experiment
from cpbkit.evaluation.results import ResultLine, Running
from cpbkit.hardware.monitor import Monitor
from cpbkit.quantities import Standing
from cpbkit.runs.plan import Plan
from cpbkit.runs.worker import Progress


@dataclass
class Pace:
    """How fast models are trained, by the clocks of the workers: starting them and building stacks do not count."""

    workers: int = 1  # at once
    epochs: int = 1  # at most, of each model
    patience: int = 1  # epochs without a better one after which a model stops early
    deadline: float | None = None  # of a budget, seconds since 1970
    first: dict[str, float] = field(default_factory=dict)  # series -> share of its epochs when first heard of
    last: dict[str, float] = field(default_factory=dict)  # and now
    jobs: set[str] = field(default_factory=set)
    seconds: float = 0.0  # of all workers
    samples: int = 0
    begun: float | None = None

    def hear(self, message: Progress) -> None:
        """Take up the word of a worker; its first one only says where it starts."""
        if message.job in self.jobs:
            self.seconds += sum(message.seconds.values())
            self.samples += message.samples
        self.jobs.add(message.job)
        self.begun = self.begun or time.monotonic()
        for name, one in message.running.items():
            self.first.setdefault(name, one.share)
            self.last[name] = one.share

    def seconds_left(self, missing: Sequence[str], epochs: Sequence[int]) -> float | None:
        """Return the seconds until the missing series are through; None before anything was trained.

        epochs: of the models that are through, which say how far one goes before it stops early; until one has,
        all are taken to go to the end.
        """
        if not missing:
            return 0.0
        trained = sum(share - self.first[name] for name, share in self.last.copy().items())
        if not trained:
            return None
        lengths = np.sort(np.asarray(epochs, dtype=float))[::-1] / self.epochs  # the longest first
        means = np.append(1.0, lengths.cumsum() / np.arange(1, len(lengths) + 1))  # of none, one, two ... of them
        shares = np.array([self.last.get(name, 0.0) for name in missing])
        longer = np.searchsorted(-lengths, -shares, side="left")  # how many went further
        # At least an epoch each: where others have just ended, or this one is being judged, it is not through yet.
        ahead = np.maximum(means[longer] - shares, 1 / self.epochs).sum()
        left = self.seconds / trained * ahead / self.workers
        return left if self.deadline is None else max(0.0, min(left, self.deadline - time.time()))

    @property
    def samples_per_second(self) -> float:
        """Windows trained on a second, by the wall clock."""
        return self.samples / max(time.monotonic() - self.begun, 1e-9) if self.begun else 0.0


@dataclass
class State:
    """Where a sweep stands; `on_progress` gets it at every change."""

    experiment: Experiment
    total: int
    stage: str = "starting"  # what it is doing now
    results: list[ResultLine] = field(default_factory=list)  # lines of the ledger
    ended: set[str] = field(default_factory=set)  # their series
    running: dict[str, Running] = field(default_factory=dict)  # by series
    saved: dict[str, float] = field(default_factory=dict)  # series -> share done at an earlier start
    pace: Pace = field(default_factory=Pace)
    watch: Monitor | None = None
    plan: Plan | None = None  # known when the training begins, as the following are
    parameters: int = 0  # of one model
    windows: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each split: least and most of a series

    def add(self, line: ResultLine) -> None:
        """Take up a line of the ledger."""
        self.results.append(line)
        self.ended.add(line.series)
        self.running.pop(line.series, None)
        self.saved.pop(line.series, None)

    def hear(self, message: Progress) -> None:
        """Take up the word of a worker; a job that began anew may train a series once more that is through."""
        self.running |= {name: one for name, one in message.running.items() if name not in self.ended}
        self.pace.hear(message)

    @property
    def done(self) -> int:
        """How many series are through."""
        return len(self.results)

    @property
    def missing(self) -> list[str]:
        """Which series have no line in the ledger yet."""
        return [name for name in self.experiment.series if name not in self.ended]

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        begun = self.saved | {name: one.share for name, one in self.running.copy().items()}  # a view may be a thread
        return (self.done + sum(begun.values())) / self.total

    def standing(self) -> Standing:
        """Say how far it is and how long it has to go, which of a large sweep takes a moment."""
        epochs = [line.epochs for line in self.results if line.epochs]
        left = self.pace.seconds_left(self.missing, epochs)
        at_most = self.pace.patience < self.pace.epochs and not epochs  # models may stop early, and none is through yet
        return Standing(self.done, self.total, self.share, left, at_most, self.pace.samples_per_second)

    @property
    def monitor(self) -> pd.DataFrame | None:
        """The memory and utilisation since this start."""
        return self.watch.frame() if self.watch else None
