"""Counts, times and how far a sweep is, in the words that every view says them in."""

import math


def duration(seconds: float) -> str:
    """Say a time the way a person does: `45 s`, `1 m 52 s`, `2 h 05 m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} m {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} m"


def time_left(seconds: float, at_most: bool) -> str:
    """Say how long something still takes: `1 m 52 s left`, or `at most 1 m 52 s left`."""
    return f"{'at most ' if at_most else ''}{duration(seconds)} left"


def counted(number: int, noun: str) -> str:
    """Say a number of things: `1 gap`, `1,204 bars`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(number: float) -> str:
    """Say a count in three digits: `840`, `11.8 k`, `1.24 M`."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def figure(value: float, digits: int = 6) -> str:
    """Say a number in so many digits that count, large ones in full: `0.425049`, `106,809`, `1,773,460`."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def standing(
    done: int, total: int, share: float, seconds_left: float | None, at_most: bool, samples_per_second: float
) -> list[str]:
    """Say where a sweep stands, what matters first: `3 of 4 done`, `81 %`, `1 m 52 s left`, `11.8 k samples/s`."""
    percent = math.floor(100 * share + 1e-9) if done < total else 100
    parts = [f"{done} of {total} done", f"{percent} %"]
    if done < total:
        # What is not timed, as the judging at the end, may outlast the time left: then there is none to tell.
        parts += [time_left(seconds_left, at_most)] if seconds_left is not None and round(seconds_left) else []
        parts += [f"{amount(samples_per_second)} samples/s"] if samples_per_second else []
    return parts


def downloaded(done: int, total: int, size: int, seconds: float) -> str:
    """Say how far a download of `size` bytes is: `30 of 960 files, 12.3 MB, 1 m 52 s`."""
    return f"{done} of {total} files, {size / 1e6:.1f} MB, {duration(seconds)}"
