"""From bars to windows: one series' columns, its splits by time, and batches gathered on the device by index.

M models, B batch, L context, C channels, H horizon, K targets, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from cpbkit import indicators
from cpbkit.data.klines import INTERVAL_SECONDS, Klines, split_name
from cpbkit.errors import DataError, check_name
from cpbkit.experiment import OHLC, Task, derive_seed

# What a target is: the column its level comes from, whether the origin is the last close or its own
# last value, and the head it is judged under.
TARGETS = {
    **{price: (f"log_{price}", "close", "price") for price in OHLC},
    "bb_upper": ("bb_upper", "own", "bands"),
    "bb_lower": ("bb_lower", "own", "bands"),
    "volatility": ("volatility", "own", "volatility"),
}
MIN_WINDOWS = 8  # fewer in any split make a result that means nothing


@dataclass(frozen=True)
class Series:
    """One series as columns. The target at origin t is `y[h, k] = levels[t + 1 + h, k] - anchors[t, k]`."""

    name: str  # BTCUSDT_15m
    times: np.ndarray  # (N,) datetime64[ns], UTC bar starts
    step_seconds: int  # bar length
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
        steps = np.diff(self.times).astype("timedelta64[s]").astype(np.int64)
        if len(steps) and steps.min() <= 0:
            raise DataError(f"times of {self.name} must increase; row {int(np.argmin(steps)) + 1} does not")
        object.__setattr__(self, "segment", np.concatenate([[0], np.cumsum(steps != self.step_seconds)]))

    def __len__(self) -> int:
        return len(self.times)

    def truth(self, origins: np.ndarray, horizon: int) -> np.ndarray:
        """Return y at the origins, unscaled: (W,) -> (W, H, K)."""
        ahead = origins[:, None] + np.arange(1, horizon + 1)
        return self.levels[ahead] - self.anchors[origins][:, None]


def from_klines(klines: Klines, task: Task) -> Series:
    """Build the columns of a task from klines; warm-up rows and rows that are not finite are cut.

    A feature is an indicator, or a column that the frame has besides its bars.
    Errors: DataError when no row is left, UnknownName for a feature or target that does not exist.
    """
    kinds = [TARGETS[check_name("target", target, TARGETS)] for target in task.targets]
    frame = klines.frame
    columns = list(dict.fromkeys([*task.features, *(column for column, _, _ in kinds), "log_close"]))
    own = [column for column in columns if column in frame and column not in indicators.INDICATORS]
    table = indicators.compute(frame, [column for column in columns if column not in own]).join(frame[own])
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.column_stack(
            [table[c] if c.startswith("log_") else np.log(table[c].to_numpy()) for c, _, _ in kinds]
        )
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
        times=frame.index.tz_localize(None).to_numpy("datetime64[ns]")[finite],
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

    Errors: DataError for a table without an even step, or with values that are not finite.
    """
    for column in (*features, *targets):
        check_name("column", column, table.columns)
    values = table[list(dict.fromkeys([*features, *targets]))]
    if not np.isfinite(values.to_numpy(np.float64)).all():
        bad = [c for c in values if not np.isfinite(values[c].to_numpy(np.float64)).all()]
        raise DataError(f"every value must be finite; {name} has others in {', '.join(bad)}. Fill or drop those rows")
    if isinstance(table.index, pd.DatetimeIndex):
        times = table.index.tz_localize(None).to_numpy("datetime64[ns]")
    else:
        times = np.datetime64(0, "ns") + np.arange(len(table)) * np.timedelta64(1, "s")
    step = np.diff(times).astype("timedelta64[s]").astype(np.int64)
    levels = table[list(targets)].to_numpy(np.float64)
    return Series(
        name=name,
        times=times,
        step_seconds=int(np.median(step)) if len(step) else 1,
        inputs=table[list(features)].to_numpy(np.float64),
        features=tuple(features),
        levels=levels,
        anchors=levels,
        targets=tuple(targets),
        heads=tuple(targets),
        unit="",
    )


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
    """Split the first rows as published tables do: so many rows a split, no gap, contexts reach back over the border.

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
            raise DataError(
                f"{series.name}: the {name} split needs at least {MIN_WINDOWS} windows of {task.context} + "
                f"{task.horizon} bars without a gap; got {len(rows)} from {len(series)} bars. Ask for a longer range "
                "or a shorter context"
            )
    return Splits(bounds=bounds, **parts)


def by_condition(series: Series, conditions: Sequence[tuple[str, float, float]]) -> np.ndarray:
    """Return a number a row as an origin: of the first (column, bound, number) that its next row exceeds, else 1.

    Errors: UnknownName for a column that is no feature.
    """
    numbers = np.ones(len(series))
    for column, bound, number in reversed(conditions):
        following = series.inputs[1:, series.features.index(check_name("feature", column, series.features))]
        numbers[:-1][following > bound] = number
    return numbers


@dataclass(frozen=True)
class Scaler:
    """Constants from the train split, and the ranges that the task declares."""

    input_mean: np.ndarray  # (C,) of a declared range its lowest value
    input_std: np.ndarray  # (C,) of a declared range its width
    lowest: np.ndarray  # (C,) inputs below count as it
    highest: np.ndarray  # (C,)
    target_scale: np.ndarray  # (K,) in the unit of y
    clip: float  # scaled inputs stay within +- clip

    @classmethod
    def fit(cls, series: Series, splits: Splits, task: Task) -> "Scaler":
        """Measure the constants on train rows and train windows only."""
        first, last = splits.bounds["train"]
        rows, ranges = series.inputs[first:last], {column: (low, high) for column, low, high in task.ranges}
        mean, std = rows.mean(0), rows.std(0)
        ends = np.tile([[-np.inf], [np.inf]], len(series.features))
        for c, column in enumerate(series.features):
            if column in ranges:
                low, high = ranges[column]
                mean[c], std[c] = low, high - low
                if task.clip_ranges:
                    ends[:, c] = low, high
        if task.target_scale == "persistence":
            scale = np.sqrt(np.square(series.truth(splits.train, task.horizon)).mean((0, 1)))
        elif task.target_scale == "standard":
            scale = series.levels[first:last].std(0)
        elif task.target_scale == "range":
            scale = np.array([np.ptp(ranges[target]) for target in series.targets])
        else:
            scale = np.ones(len(series.targets))
        std, scale = (np.where(size > 0, size, 1.0) for size in (std, scale))
        return cls(mean, std, *ends, scale, task.input_clip)

    def inputs(self, raw: np.ndarray) -> np.ndarray:
        """Scale and clip inputs: (N, C) -> (N, C)."""
        inside = np.clip(raw, self.lowest, self.highest)
        return np.clip((inside - self.input_mean) / self.input_std, -self.clip, self.clip)


class Windows:
    """The windows of M series on one device. Memory grows with the bars, not with bars x context."""

    def __init__(
        self,
        series: Sequence[Series],
        task: Task,
        device: torch.device,
        dtype: torch.dtype,
        splits: Sequence[Splits] | None = None,
    ):
        self.series, self.task, self.device = list(series), task, torch.device(device)
        self.splits = [split(s, task) for s in self.series] if splits is None else list(splits)
        self.scalers = [Scaler.fit(s, p, task) for s, p in zip(self.series, self.splits, strict=True)]

        def put(tables: list[np.ndarray]) -> torch.Tensor:
            return torch.as_tensor(np.concatenate(tables), dtype=dtype, device=self.device)

        scaled = list(zip(self.series, self.scalers, strict=True))
        self.inputs = put([scaler.inputs(s.inputs) for s, scaler in scaled])  # (N, C)
        # A shift common to levels and anchors leaves y as it is and keeps its digits in float32. It is not their
        # mean: that would let later rows into the rounding of the train windows.
        self.levels = put([(s.levels - s.anchors[0]) / scaler.target_scale for s, scaler in scaled])  # (N, K)
        self.anchors = put([(s.anchors - s.anchors[0]) / scaler.target_scale for s, scaler in scaled])  # (N, K)
        begins = np.cumsum([0, *(len(s) for s in self.series[:-1])])
        self.origins = {
            part: [
                torch.as_tensor(getattr(p, part) + begin, device=self.device)
                for p, begin in zip(self.splits, begins, strict=True)
            ]
            for part in ("train", "validation", "test")
        }
        self.pools = self.origins["train"]  # what an epoch's order draws from
        if task.repeats:
            times = [by_condition(s, task.repeats)[p.train].astype(int) for s, p in self._pairs()]
            self.pools = [
                pool.repeat_interleave(torch.as_tensor(count, device=self.device))
                for pool, count in zip(self.pools, times, strict=True)
            ]
        self.weights = None  # (N,) of a train window in the loss, by its origin; their mean over a series' windows is 1
        if task.weights:
            weights = [by_condition(s, task.weights) for s in self.series]
            weights = [w / w[p.train].mean() for w, (_, p) in zip(weights, self._pairs(), strict=True)]
            self.weights = put(weights)
        shares = torch.tensor(task.target_weights, dtype=dtype, device=self.device)
        self.target_weights = shares / shares.sum()  # (K,) of each target in the loss
        self.back = torch.arange(1 - task.context, 1, device=self.device)
        self.ahead = torch.arange(1, task.horizon + 1, device=self.device)

    def __len__(self) -> int:
        return len(self.series)

    def _pairs(self):
        return zip(self.series, self.splits, strict=True)

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather windows at origins: (M, B) -> x (M, B, L, C), last (M, B, K), y (M, B, H, K)."""
        anchor = self.anchors[rows]
        x = self.inputs[rows[..., None] + self.back]
        y = self.levels[rows[..., None] + self.ahead] - anchor[..., None, :]
        return x, self.levels[rows] - anchor, y

    def order(self, members: Sequence[int], seed: int, epoch: int, count: int) -> torch.Tensor:
        """Draw an epoch's train origins for some of the series: (M, count).

        Each row depends on the seed, its series' name and the epoch alone; a series with fewer windows
        wraps into its next permutation.
        """
        generator = torch.Generator(self.device)
        rows = []
        for m in members:
            pool = self.pools[m]
            generator.manual_seed(derive_seed("order", seed, self.series[m].name, epoch))
            turns = -(-count // len(pool))
            picks = [torch.randperm(len(pool), generator=generator, device=self.device) for _ in range(turns)]
            rows.append(pool[torch.cat(picks)[:count]])
        return torch.stack(rows)

    def batches(self, part: str, members: Sequence[int], batch: int):
        """Yield origins (M, B) and weights (M, B) over a whole split; weight 0 pads the shorter series."""
        pools = [self.origins[part][m] for m in members]
        longest = max(len(pool) for pool in pools)
        rows = torch.stack([torch.cat([pool, pool[-1:].expand(longest - len(pool))]) for pool in pools])
        counts = torch.tensor([len(pool) for pool in pools], device=self.device)
        weight = (torch.arange(longest, device=self.device) < counts[:, None]).to(self.inputs.dtype)
        for start in range(0, longest, batch):
            yield rows[:, start : start + batch], weight[:, start : start + batch]
