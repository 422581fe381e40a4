"""The last forecasts of a test split beside what happened, kept with a model's losses for who wants to look at them."""

import io
import logging
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cpbkit.data.unpack import check_methods

if TYPE_CHECKING:  # windows needs torch
    from cpbkit.windows.series import Series

LAST = 500  # windows
TOGETHER, LEAST = 24, 8  # windows whose errors are told as one, and fewest of a day that is told at all
log = logging.getLogger(__name__)
UNPACKED = 1 << 27  # bytes of all arrays of a series
LARGEST = 1e15  # of what they hold: times in ms reach into the year 33,000
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

    def __post_init__(self):
        wide = (len(self.times), len(self.ahead))
        for name, shape in {"times": wide[:1], "ahead": wide[1:]}.items():
            check_array(getattr(self, name), name, shape, "i")
        check_array(self.last, "last", wide[:1], "f")
        for name in ("forecast", "truth", "half"):
            check_array(getattr(self, name), name, wide, "f")
        if not (isinstance(self.target, str) and isinstance(self.unit, str) and 0 < self.step_seconds < 1e8):
            raise ValueError(f"a past is of a target, in a unit, of steps of some seconds; got {self.step_seconds!r}")
        if not wide[1] or self.ahead.min() < 1 or self.ahead.max() > 1e6 or (np.abs(self.times) > 9e12).any():
            raise ValueError("a past is of bars ahead, at times that a calendar has")

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
    columns = series.columns[head]
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
        for key, value in read_arrays(content or b"", shown=True).items():
            head, _, rest = key.partition(MARK)
            target, _, name = rest.rpartition("/")
            found.setdefault((head, target), {})[name] = value if value.ndim else value.item()
        for (head, _), values in found.items():  # earlier versions kept one target and did not name it here
            one = Past(**values)
            told.setdefault(head, {})[one.target] = one
        return told
    except (ValueError, TypeError) as error:
        log.warning("the past forecasts of %s cannot be shown: %s", series, str(error)[:300])
        return {}


def read_arrays(content: bytes, shown: bool) -> dict[str, np.ndarray]:
    """Read the arrays that are to be shown, or the others beside them, by name.

    Errors: ValueError for what numpy did not pack, or what unpacks to too much.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as box:
            check_methods(box.infolist())
            if (size := sum(member.file_size for member in box.infolist())) > UNPACKED:  # zipfile reads no more
                raise ValueError(f"it unpacks to {size:,} bytes; at most {UNPACKED:,}")
            if odd := [name for name in box.namelist() if not name.endswith(".npy")]:
                raise ValueError(f"it holds no array but {odd[0][:40]!r}")
            names = [name for name in box.namelist() if (MARK in name) == shown]
            return {name.removesuffix(".npy"): np.lib.format.read_array(box.open(name)) for name in names}
    # What garbage makes zipfile and numpy raise depends on where it is; an array may claim any size.
    except (
        *(OSError, EOFError, KeyError, TypeError, RuntimeError, MemoryError),
        *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
    ) as error:
        raise ValueError(f"it holds no arrays that can be read: {error}") from None


def check_array(array: object, name: str, shape: tuple[int, ...], kind: str) -> None:
    """Raise ValueError unless something is an array of a shape, of whole numbers (kind i) or of numbers (f)."""
    if (
        not isinstance(array, np.ndarray)
        or (array.shape, array.dtype.kind) != (shape, kind)
        or (np.abs(array[np.isfinite(array)]) > LARGEST).any()
    ):
        raise ValueError(f"{name} must be an array of {shape} numbers below {LARGEST:g}; got {str(array)[:40]!r}")
