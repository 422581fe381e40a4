"""Counts, times and how far a sweep is, in the words that every view says them in; and numbers as JSON has them."""

import math
from dataclasses import dataclass


def duration(seconds: float) -> str:
    """Say a time the way a person does: `45 s`, `1 m 52 s`, `2 h 05 m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} m {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} m"


def counted(number: int, noun: str) -> str:
    """Say a number of things: `1 gap`, `1,204 bars`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(number: float) -> str:
    """Say a count in three digits: `840`, `11.8 k`, `1.24 M`."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{figure(number / size, 3)}{unit}"
    return f"{number:.0f}"


def figure(value: float, digits: int = 6) -> str:
    """Say a number in so many digits that count, large ones in full: `0.425049`, `106,809`, `1,773,460`."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def signed(value: float, form: str) -> str:
    """Say a number in a form such as `+.1f`, with a minus that is as wide as a plus."""
    return f"{value:{form}}".replace("-", "−")


def without_nan(value):
    """Return the same for JSON, in which null stands for a number that is not finite."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Standing:
    """Where a sweep stands, as every view and `cpbkit status` tell it."""

    done: int = 0  # series that are through
    total: int = 0
    share: float = 0.0  # of the work that is done
    seconds_left: float | None = None  # at the pace so far; None before there is one
    at_most: bool = False  # whether that is only the most there can be
    samples_per_second: float = 0.0  # windows trained on

    def words(self) -> list[str]:
        """Say it, what matters first: `3 of 4 done`, `81 %`, `1 m 52 s left`, `11.8 k samples/s`."""
        percent = math.floor(100 * self.share + 1e-9) if self.done < self.total else 100
        parts = [f"{self.done} of {self.total} done", f"{percent} %"]
        if self.done < self.total:
            # What is not timed, as the judging at the end, may outlast the time left: then there is none to tell.
            if self.seconds_left is not None and round(self.seconds_left):
                parts.append(f"{'at most ' if self.at_most else ''}{duration(self.seconds_left)} left")
            if self.samples_per_second:
                parts.append(f"{amount(self.samples_per_second)} samples/s")
        return parts


def downloaded(done: int, total: int, size: int, seconds: float) -> str:
    """Say how far a download of `size` bytes is: `30 of 960 files, 12.3 MB, 1 m 52 s`."""
    return f"{done} of {total} files, {size / 1e6:.1f} MB, {duration(seconds)}"
