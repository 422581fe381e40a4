"""The last forecasts of a test split beside what happened, kept with a model's losses for who wants to look at them."""

import io
import logging
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:  # windows needs torch
    from cpbkit.windows.series import Series

LAST = 500  # windows
TOGETHER, LEAST = 24, 8  # windows whose errors are told as one, and fewest of a day that is told at all
log = logging.getLogger(__name__)
MARK = "/past "  # in the name of an array, between its head and its target


@dataclass(frozen=True)
class Past:
    """Forecasts of one target of one head, one bar ahead and the whole horizon ahead."""

    target: str
    unit: str  # of y, as that of a series
    step_seconds: float
    ahead: np.ndarray  # (A,) bars
    times: np.ndarray  # (W,) int64, milliseconds since 1970 of the origins, a bar apart
    last: np.ndarray  # (W,) the level at the origin, a price where y is a log change
    forecast: np.ndarray  # (W, A) y
    truth: np.ndarray  # (W, A) y
    half: np.ndarray  # (W, A) half widths of the interval then in force

    def levels(self, y: np.ndarray) -> np.ndarray:
        """Turn y (W, A) into levels."""
        last = self.last[:, None]
        return last * np.exp(y) if self.unit == "bp" else last + y

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the levels (W, A) between which the truth was expected."""
        return self.levels(self.forecast - self.half), self.levels(self.forecast + self.half)

    def bars(self) -> np.ndarray:
        """Return when the bars start that were forecast: (W, A) int64, milliseconds since 1970."""
        return self.times[:, None] + np.rint(1000 * self.step_seconds * self.ahead).astype(np.int64)

    def by_day(self) -> pd.DataFrame:
        """Say how large the errors were: a row per UTC day and step, with `rmse`, `persistence` and the share `inside`.

        Of long bars a row is of as many days as hold TOGETHER, so that nobody can tell what a bar was.
        """
        days = max(1, math.ceil(TOGETHER * self.step_seconds / 86_400))
        day = np.repeat(self.times // (days * 86_400_000) * days, len(self.ahead))
        error = (self.truth - self.forecast).ravel()
        frame = pd.DataFrame(
            {
                "day": pd.to_datetime(day, unit="D").strftime("%Y-%m-%d"),
                "ahead": np.tile(self.ahead, len(self.times)),
                "rmse": error**2,
                "persistence": self.truth.ravel() ** 2,
                "inside": np.abs(error) <= self.half.ravel(),
            }
        )
        groups = frame.groupby(["ahead", "day"])
        table = groups[["rmse", "persistence", "inside"]].mean()[groups.size() >= LEAST]
        return table.assign(rmse=np.sqrt(table["rmse"]), persistence=np.sqrt(table["persistence"])).reset_index()


def past_of(series: "Series", origins: np.ndarray, head: str, part: Mapping, half: np.ndarray) -> dict[str, Past]:
    """Return the last forecasts of one head by target, the close first, from what `verdicts.evidence` gathered of it.

    half: (W, H, K) of y.
    """
    horizon, first = part["truth"].shape[1], part["direction_of"]
    steps, rows = sorted({0, horizon - 1}), slice(-LAST, None)
    columns = [i for i, owner in enumerate(series.heads) if owner == head]
    found = {}
    for k in sorted(range(len(columns)), key=lambda k: k != first % len(columns)):
        anchors, target = part["anchors"][rows, k], series.targets[columns[k]]
        found[target] = Past(
            target=target,
            unit=series.unit,
            step_seconds=series.step_seconds,
            ahead=np.array(steps) + 1,
            times=series.times[origins[rows]].astype("datetime64[ms]").astype(np.int64),
            last=np.exp(anchors) if series.unit == "bp" else anchors,
            **{
                name: y[rows, :, k][:, steps].astype(np.float32)
                for name, y in (("forecast", part["forecast"]), ("truth", part["truth"]), ("half", half))
            },
        )
    return found


def arrays_of(by_head: Mapping[str, Mapping[str, Past]]) -> dict[str, np.ndarray]:
    """Return what is kept, by name."""
    return {
        f"{head}{MARK}{target}/{name}": np.asarray(value)
        for head, by_target in by_head.items()
        for target, one in by_target.items()
        for name, value in vars(one).items()
    }


def from_bytes(content: bytes | None, series: str) -> dict[str, dict[str, Past]]:
    """Read what is kept of a series by head and target, the first of a head the one whose direction counts.

    Empty for a run of an earlier version, and where it is damaged, logged.
    """
    found: dict[tuple[str, str], dict] = {}
    told: dict[str, dict[str, Past]] = {}
    try:
        with np.load(io.BytesIO(content or b""), allow_pickle=False) as file:
            for key in file.files:
                head, mark, rest = key.partition(MARK)
                if mark:
                    target, _, name = rest.rpartition("/")
                    value = file[key]
                    found.setdefault((head, target), {})[name] = value if value.ndim else value.item()
        for (head, _), values in found.items():  # earlier versions kept one target and did not name it here
            one = Past(**values)
            told.setdefault(head, {})[one.target] = one
        return told
    except (ValueError, TypeError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        log.warning("the past forecasts of %s cannot be shown: %s", series, error)
        return {}
