"""Linear forecasters that share their weights over the channels: the humble ones that are hard to beat."""

import torch.nn.functional as F
from torch import Tensor, nn

from cpbkit.errors import CpbkitError
from cpbkit.experiment import Model, Task
from cpbkit.models.layers import Linear, Teacher

KERNEL = 25  # rows of the moving average, as in the paper


def channels(task: Task) -> int:
    """Return how many channels a model of shared weights has. Errors: CpbkitError unless features pair with targets."""
    if len(task.features) != len(task.targets):
        raise CpbkitError(
            "a model that shares its weights over the channels needs the past of each target as its feature, in the "
            f"same order; got features {', '.join(task.features)} for targets {', '.join(task.targets)}"
        )
    return len(task.features)


class NLinear(nn.Module):
    """One linear map from context to horizon, less the last value; Zeng et al. 2023, arxiv.org/abs/2205.13504.

    Deviation: the map starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        channels(task)
        self.map = Linear(models, task.context, task.horizon, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = (x - x[:, :, -1:]).transpose(2, 3)  # (M, B, L, C) -> (M, B, C, L)
        return self.map(x).transpose(2, 3)  # (M, B, H, C)


class DLinear(nn.Module):
    """A linear map of the trend and one of the rest; Zeng et al. 2023, arxiv.org/abs/2205.13504.

    The change from the last value is forecast, and the last value is linear in the context, so the maps can be what
    the paper's are. Deviation: they start at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        channels(task)
        self.trend = Linear(models, task.context, task.horizon, zero=True)
        self.rest = Linear(models, task.context, task.horizon, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = x.transpose(2, 3)  # (M, B, L, C) -> (M, B, C, L)
        trend = moving_average(x)
        return (self.trend(trend) + self.rest(x - trend)).transpose(2, 3)  # (M, B, H, C)


def moving_average(x: Tensor) -> Tensor:
    """Return the centred mean of KERNEL values along the last axis, the ends repeated: same shape."""
    flat = x.flatten(0, -2)[:, None]  # (N, 1, L)
    return F.avg_pool1d(F.pad(flat, (KERNEL // 2, KERNEL // 2), "replicate"), KERNEL, 1).view_as(x)
