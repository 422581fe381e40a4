"""From bars to windows: one series' columns, its splits by time, and batches gathered on the device by index.

M models, B batch, L context, C channels, H horizon, K targets, N rows.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cpbkit.config import own
from cpbkit.config.experiment import Task, derive_seed, series_of
from cpbkit.errors import check_name
from cpbkit.windows.scaling import Scaler
from cpbkit.windows.series import Series
from cpbkit.windows.splits import Splits, split


def by_condition(series: Series, conditions: Sequence[tuple[str, float, float]]) -> np.ndarray:
    """Return a number per origin: that of the first condition whose column exceeds its bound in the next row; else 1.

    Errors: UnknownName for a column that is no feature.
    """
    numbers = np.ones(len(series))
    for column, bound, number in reversed(conditions):
        following = series.inputs[1:, series.features.index(check_name("feature", column, series.features))]
        numbers[:-1][following > bound] = number
    return numbers


class Windows:
    """The windows of M series on one device. Memory grows with the bars, not with bars x context."""

    def __init__(
        self,
        series: Sequence[Series],
        task: Task,
        device: torch.device,
        dtype: torch.dtype,
        splits: Sequence[Splits] | None = None,
        scalers: Sequence[Scaler] | None = None,
    ):
        self.series, self.task, self.device = list(series), task, torch.device(device)
        self.names = [one.name for one in self.series]  # of what a model can be trained on, in the order of `origins`
        self.splits = [split(s, task) for s in self.series] if splits is None else list(splits)
        self.scalers = [Scaler.fit(s, p, task) for s, p in self._pairs()] if scalers is None else list(scalers)

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
        self.pools = list(self.origins["train"])  # what an epoch's order draws from
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
        # The name of a loss, an own function, or the levels of the pinball loss.
        self.loss: Callable | str | Tensor = own.find(task.loss, "a loss") if own.is_own(task.loss) else task.loss
        if task.quantiles:
            self.loss = torch.tensor(task.quantiles, dtype=dtype, device=self.device)
        # Every run of rows, as a view: to choose among these copies a window whole, and not row by row.
        self.contexts = self.inputs.unfold(0, task.context, 1).mT  # (N - L + 1, L, C)
        self.futures = self.levels.unfold(0, task.horizon, 1).mT  # (N - H + 1, H, K)

    def __len__(self) -> int:
        return len(self.series)

    def _pairs(self):
        return zip(self.series, self.splits, strict=True)

    def pool(self, name: str, members: Sequence[int]) -> None:
        """Let a model be trained, by this name, on the windows of several series at once."""
        self.names.append(name)
        self.pools.append(torch.cat([self.pools[m] for m in members]))
        for origins in self.origins.values():
            origins.append(torch.cat([origins[m] for m in members]))

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather windows at origins: (M, B) -> x (M, B, L, C), last (M, B, K), y (M, B, H, K)."""
        flat, anchor = rows.flatten(), self.anchors[rows]
        x = self.contexts.index_select(0, flat - (self.task.context - 1)).unflatten(0, rows.shape)
        y = self.futures.index_select(0, flat + 1).unflatten(0, rows.shape)
        return x, self.levels[rows] - anchor, y - anchor[..., None, :]

    def order(self, members: Sequence[int], seed: int, epoch: int, count: int) -> torch.Tensor:
        """Draw an epoch's train origins for some of the series: (M, count).

        Each row depends on the seed, its series' name and the epoch alone; a series with fewer windows
        wraps into its next permutation.
        """
        generator = torch.Generator(self.device)
        rows = []
        for m in members:
            pool = self.pools[m]
            generator.manual_seed(derive_seed("order", seed, series_of(self.names[m]), epoch))
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
