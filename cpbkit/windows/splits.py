"""The windows of each split, by time, with a purge gap at each border."""

from dataclasses import dataclass, replace

import numpy as np

from cpbkit.config.experiment import Task
from cpbkit.errors import DataError
from cpbkit.windows.series import Series

MIN_WINDOWS = 8  # fewer in any split make a result that means nothing


@dataclass(frozen=True)
class Splits:
    """The windows of each split, by the row of their last context bar."""

    bounds: dict[str, tuple[int, int]]  # rows [first, last) of train, validation and test
    train: np.ndarray  # (W,) int64, oldest first
    validation: np.ndarray
    test: np.ndarray

    def dates(self, series: Series) -> dict[str, list[str]]:
        """Return the first and last bar of each split: `{"train": ["2025-03-01T00:00", ...], ...}`."""
        return {
            name: [str(series.times[row].astype("datetime64[m]")) for row in (first, last - 1)]
            for name, (first, last) in self.bounds.items()
        }


@dataclass(frozen=True)
class Fold:
    """One of several test periods: the rows of every series that exist by its end, and the task that splits them."""

    end: float  # share of the rows
    task: Task

    def cut(self, series: Series) -> Series:
        """Return the piece of a series that this fold may see."""
        last = round(self.end * len(series))
        columns = {f: getattr(series, f)[:last] for f in ("times", "inputs", "levels", "anchors")}
        return replace(series, **columns)


def folds(task: Task, count: int) -> list[Fold]:
    """Return `count` test periods as long as the task's own, which is the last; each with a model trained up to it.

    A purge longer than the horizon is an embargo. Nothing that follows a test is trained on, so none is needed after.
    """
    test = 1 - task.train - task.validation
    ends = [1 - (count - i) * test for i in range(1, count + 1)]
    return [
        Fold(end, replace(task, train=1 - (task.validation + test) / end, validation=task.validation / end))
        for end in ends
    ]


def origins(series: Series, context: int, horizon: int, first: int, last: int, reach_back: bool = False) -> np.ndarray:
    """Return the origins whose horizon, and whose context unless `reach_back`, lie in rows [first, last).

    No window crosses a gap.
    """
    lowest = max(context - 1, first - 1 if reach_back else first + context - 1)
    rows = np.arange(lowest, last - horizon)
    return rows[series.segment[rows - context + 1] == series.segment[rows + horizon]]


def split(series: Series, task: Task) -> Splits:
    """Split by time into train, validation and test with a purge gap before the last two.

    Errors: DataError when a split holds fewer than MIN_WINDOWS windows.
    """
    n, purge = len(series), task.purge or task.horizon
    a, b = round(n * task.train), round(n * (task.train + task.validation))
    return _splits(series, task, {"train": (0, a), "validation": (a + purge, b), "test": (b + purge, n)}, False)


def split_rows(series: Series, task: Task, train: int, validation: int, test: int) -> Splits:
    """Split the first rows as published tables do: rows per split, no gap, contexts reach back over the border.

    Errors: DataError when the rows are not there, or a split holds fewer than MIN_WINDOWS windows.
    """
    a, b, c = np.cumsum([train, validation, test]).tolist()
    if min(train, validation, test) < 1 or c > len(series):
        raise DataError(f"{series.name} has {len(series)} rows; got splits of {train} + {validation} + {test}")
    return _splits(series, task, {"train": (0, a), "validation": (a, b), "test": (b, c)}, True)


def _splits(series: Series, task: Task, bounds: dict[str, tuple[int, int]], reach_back: bool) -> Splits:
    parts = {name: origins(series, task.context, task.horizon, *rows, reach_back) for name, rows in bounds.items()}
    for name, rows in parts.items():
        if len(rows) < MIN_WINDOWS:
            runs, window = np.bincount(series.segment), task.context + task.horizon
            in_pieces = runs.max() < window <= len(series)
            if in_pieces and series.unit == "bp":
                raise DataError(
                    f"{series.name}: a window of {task.context} + {task.horizon} bars must be without a gap; none of "
                    f"the {len(runs)} stretches has more than {runs.max()} bars, as of markets that close at "
                    "night or over weekends. Ask for a shorter context; or take the prices as a table of even steps: "
                    "cpbkit series FILE --columns Close --slide-over-gaps"
                )
            if in_pieces:
                raise DataError(
                    f"{series.name}: times must be evenly apart; {len(runs) - 1} steps of {len(series)} rows differ "
                    "from the usual one, as months, business days or jittered clocks do. Take the rows "
                    "as even steps: --slide-over-gaps, in Python frame.reset_index(drop=True), and without a column of "
                    "times"
                )
            raise DataError(
                f"{series.name}: the {name} split needs at least {MIN_WINDOWS} windows of {task.context} + "
                f"{task.horizon} bars without a gap; got {len(rows)} from {len(series)} bars. Ask for a longer range "
                "or a shorter context"
            )
    return Splits(bounds=bounds, **parts)
