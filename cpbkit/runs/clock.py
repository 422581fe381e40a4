"""Where the time goes: seconds by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by stage; the innermost stage gets them."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._stages: list[str] = []
        self._mark = time.perf_counter()

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
        now = time.perf_counter()
        if self._stages:
            self.add(self._stages[-1], now - self._mark)
        self._mark = now

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again from zero."""
        self._settle()
        seconds, self.seconds = self.seconds, {}
        return seconds
