"""Constants of the train split that inputs and targets are scaled by."""

from dataclasses import dataclass

import numpy as np

from cpbkit.config.experiment import Task
from cpbkit.windows.series import Series
from cpbkit.windows.splits import Splits


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
        lowest, highest = np.tile([[-np.inf], [np.inf]], len(series.features))
        for c, column in enumerate(series.features):
            if column in ranges:
                low, high = ranges[column]
                mean[c], std[c] = low, high - low
                if task.clip_ranges:
                    lowest[c], highest[c] = low, high
        if task.target_scale == "persistence":
            scale = np.sqrt(np.square(series.truth(splits.train, task.horizon)).mean((0, 1)))
        elif task.target_scale == "standard":
            scale = series.levels[first:last].std(0)
        elif task.target_scale == "range":
            scale = np.array([np.ptp(ranges[target]) for target in series.targets])
        else:
            scale = np.ones(len(series.targets))
        std, scale = (np.where(size > 0, size, 1.0) for size in (std, scale))
        return cls(mean, std, lowest, highest, scale, task.input_clip)

    def inputs(self, raw: np.ndarray) -> np.ndarray:
        """Scale and clip inputs: (N, C) -> (N, C)."""
        inside = np.clip(raw, self.lowest, self.highest)
        return np.clip((inside - self.input_mean) / self.input_std, -self.clip, self.clip)
