"""One series as columns: what goes in, and what is to be forecast."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from cpbkit import indicators
from cpbkit.config import own
from cpbkit.config.experiment import OHLC, Task
from cpbkit.data.klines import INTERVAL_SECONDS, SECOND_NS, Klines, split_name
from cpbkit.data.traces import Trace
from cpbkit.errors import DataError, check_name

# What a target is: the column its level comes from, whether the origin is the last close or its own
# last value, and the head it is judged under. Volatility and range are of the bars to come, each by itself: of a
# deviation over the last 20 bars nineteen are known one bar ahead.
TARGETS = {
    **{price: (f"log_{price}", "close", "price") for price in OHLC},
    "bb_upper": ("bb_upper", "own", "bands"),
    "bb_lower": ("bb_lower", "own", "bands"),
    "volatility": ("bar_volatility", "own", "volatility"),
    "range": ("bar_range", "own", "range"),
}

UNTIMED = 1.0  # seconds from row to row where a table has no times


@dataclass(frozen=True)
class Series:
    """One series as columns. The target at origin t is `y[h, k] = levels[t + 1 + h, k] - anchors[t, k]`."""

    name: str  # BTCUSDT_15m
    times: np.ndarray  # (N,) datetime64[ns], UTC bar starts
    step_seconds: float  # bar length
    inputs: np.ndarray  # (N, C) float64, unscaled
    features: tuple[str, ...]  # C names
    levels: np.ndarray  # (N, K) float64: log price, log volatility, or a table's own value
    anchors: np.ndarray  # (N, K) float64: what persistence forecasts
    targets: tuple[str, ...]  # K names
    heads: tuple[str, ...]  # K names: price, bands, volatility, or the table's own
    unit: str = "bp"  # of y: "bp" is a log change in units of 1e-4, else the table's own unit
    synthetic: bool = False  # made, not measured
    segment: np.ndarray = field(init=False)  # (N,) int64: rows without a gap between them share a number

    def __post_init__(self):
        steps = np.diff(self.times).astype("timedelta64[ns]").astype(np.int64)
        if len(steps) and steps.min() <= 0:
            raise DataError(f"times of {self.name} must increase; row {int(np.argmin(steps)) + 1} does not")
        object.__setattr__(self, "segment", np.concatenate([[0], np.cumsum(steps != self.step_ns)]))

    @property
    def step_ns(self) -> int:
        """The bar length in ns."""
        return round(self.step_seconds * SECOND_NS)

    @property
    def is_timed(self) -> bool:
        """Whether rows have times of their own; those of rows without any count from 1970."""
        return self.step_seconds != UNTIMED or self.times[-1] > np.datetime64("1971")

    @functools.cached_property
    def columns(self) -> dict[str, list[int]]:
        """The places of the targets of each head."""
        found: dict[str, list[int]] = {}
        for k, head in enumerate(self.heads):
            found.setdefault(head, []).append(k)
        return found

    def __len__(self) -> int:
        return len(self.times)

    def truth(self, origins: np.ndarray, horizon: int) -> np.ndarray:
        """Return y at the origins, unscaled: (W,) -> (W, H, K)."""
        ahead = origins[:, None] + np.arange(1, horizon + 1)
        return self.levels[ahead] - self.anchors[origins][:, None]


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a person's own, one series: its columns of numbers by time, or in even steps, as `arrange` gives."""

    name: str
    frame: pd.DataFrame


def to_series(data: Klines | Trace | Table, task: Task) -> Series:
    """Build the columns of a task from whatever holds its raw rows. Errors: DataError, UnknownName."""
    if isinstance(data, Klines):
        return from_klines(data, task)
    if isinstance(data, Trace):
        series = from_table(data.passport.series, data.frame, task.features, task.targets)
        return replace(series, synthetic=data.passport.synthetic)
    return from_table(data.name, data.frame, task.features, task.targets)


def times_of(frame: pd.DataFrame) -> np.ndarray:
    """Return the times of rows, (N,) datetime64[ns] in UTC; those of rows without any are UNTIMED apart."""
    if isinstance(frame.index, pd.DatetimeIndex):
        return frame.index.as_unit("ns").asi8.view("M8[ns]")
    return np.datetime64(0, "ns") + np.arange(len(frame)) * np.timedelta64(int(UNTIMED), "s")


def from_klines(klines: Klines, task: Task) -> Series:
    """Build the columns of a task from klines; warm-up rows and rows that are not finite are cut.

    A feature is an indicator, or a column that the frame has besides its bars.
    Errors: DataError when no row is left, UnknownName for a feature or target that does not exist.
    """
    kinds = [TARGETS[check_name("target", target, TARGETS)] for target in task.targets]
    frame = klines.frame
    columns = list(dict.fromkeys([*task.features, *(column for column, _, _ in kinds), "log_close"]))
    finished = [column for column in columns if column in frame and not indicators.is_indicator(column)]
    table = indicators.compute(frame, [column for column in columns if column not in finished]).join(frame[finished])
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.column_stack([table[c] if c.startswith("log_") else np.log(table[c]) for c, _, _ in kinds])
    close = table["log_close"].to_numpy()
    anchors = np.column_stack([close if origin == "close" else levels[:, k] for k, (_, origin, _) in enumerate(kinds)])
    inputs = table[list(task.features)].to_numpy(np.float64)
    finite = np.isfinite(inputs).all(1) & np.isfinite(levels).all(1) & np.isfinite(anchors).all(1)
    name = klines.passport.series
    if not finite.any():
        raise DataError(
            f"{name}: no row has all of {', '.join(columns)}; got {len(frame)} bars. "
            "Ask for a longer range, or for features whose source columns these bars have"
        )
    return Series(
        name=name,
        times=times_of(frame)[finite],
        step_seconds=INTERVAL_SECONDS[split_name(name)[1]],
        inputs=inputs[finite],
        features=task.features,
        levels=levels[finite],
        anchors=anchors[finite],
        targets=task.targets,
        heads=tuple(head for _, _, head in kinds),
        synthetic=klines.passport.synthetic,
    )


def from_table(name: str, table: pd.DataFrame, features: Sequence[str], targets: Sequence[str]) -> Series:
    """Build a series from any time series table; its targets are forecast in their own unit.

    A feature is a column, or a function of the table, `mine.py:name`, whose warm-up rows are cut.
    Errors: DataError for columns with values that are not finite, and for functions that give no row.
    """
    functions = [feature for feature in features if own.is_own(feature)]
    columns = [column for column in dict.fromkeys([*features, *targets]) if column not in functions]
    for column in columns:
        check_name("column", column, table.columns)
    values = table[columns]
    finite = np.isfinite(values.to_numpy(np.float64))
    if not finite.all():
        (row, column), bad = np.argwhere(~finite)[0], np.sum(~finite.all(axis=1))
        raise DataError(
            f"every value must be finite; {name} has others in {bad} of {len(values)} rows, the first in "
            f"{values.columns[column]} at {values.index[row]}. Left out, no window crosses their place: "
            "--drop-missing, in Python frame.dropna()"
        )
    times = times_of(table)
    step = np.diff(times).astype(np.int64)
    if functions:
        values = pd.concat([values, indicators.compute(table, functions)], axis=1)
        warm = np.isfinite(values.to_numpy(np.float64)).all(axis=1)
        if not warm.any():
            raise DataError(f"{name}: no row has all of {', '.join(functions)}; got {len(table)} rows")
        values, times = values[warm], times[warm]
    levels = values[list(targets)].to_numpy(np.float64)
    return Series(
        name=name,
        times=times,
        step_seconds=float(np.median(step)) / SECOND_NS if len(step) else 1,
        inputs=values[list(features)].to_numpy(np.float64),
        features=tuple(features),
        levels=levels,
        anchors=levels,
        targets=tuple(targets),
        heads=tuple(targets),
        unit="",
    )


def data_sha256(series: Series) -> str:
    """Return a fingerprint of the columns that a model was trained and judged on."""
    digest = hashlib.sha256()
    for column in (series.times, series.inputs, series.levels, series.anchors):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
