"""Where the time goes: seconds by stage, those of a device that works on after the host has left the stage too."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Moment:
    """A moment of the host, with what an event of a device has."""

    def __init__(self):
        self.time = time.perf_counter()

    def query(self) -> bool:
        """Say whether it has passed."""
        return True

    def elapsed_time(self, later: "Moment") -> float:
        """Return ms."""
        return 1e3 * (later.time - self.time)


def device_moment(device: str) -> torch.cuda.Event:
    """Return a moment that has passed when the device has done all that was given to it before; nobody waits."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Clock:
    """Adds up seconds by stage; the innermost stage gets them.

    moment: what marks the ends of stages. With those of a device each stage is charged what the device did for it: the
    host is through with an epoch long before the device, and would charge the epoch to the validation that waits.
    """

    def __init__(self, moment: Callable = Moment):
        self.seconds: dict[str, float] = {}
        self._stages: list[str] = []
        self._moment, self._mark = moment, moment()
        self._open: deque[tuple[str, Any]] = deque()  # (stage, its end) that the device may not have reached yet

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Give the seconds inside the block to `stage`."""
        self._settle()
        self._stages.append(stage)
        try:
            yield
        finally:
            self._settle()
            self._stages.pop()

    def add(self, stage: str, seconds: float) -> None:
        """Give `stage` seconds that were measured elsewhere."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def _settle(self) -> None:
        """End what runs now, and charge the stages whose end has passed."""
        self._open.append((self._stages[-1] if self._stages else "", self._moment()))
        while self._open and self._open[0][1].query():
            stage, end = self._open.popleft()
            if stage:
                self.add(stage, self._mark.elapsed_time(end) / 1e3)
            self._mark = end

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again from zero; a device's work under way is left for the next time."""
        self._settle()
        seconds, self.seconds = self.seconds, {}
        return seconds
