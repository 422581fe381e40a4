"""Linear forecasters that share their weights over the channels: the humble ones that are hard to beat."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpbkit.config.experiment import Model, Task
from cpbkit.errors import CpbkitError
from cpbkit.models.layers import Linear, Teacher

KERNEL = 25  # rows of the moving average, as in the paper
PENALTIES = (0.0, *(10.0**power for power in range(-6, 3)), 1e6)  # of RidgeAR, a window; the last leaves the mean alone
Batches = Iterable[tuple[Tensor, Tensor, Tensor]]  # x (M, B, L, C), y (M, B, H, K), weight (M, B)


def channels(task: Task) -> int:
    """Return how many channels a model of shared weights has. Errors: CpbkitError unless features pair with targets."""
    if len(task.features) != len(task.targets):
        raise CpbkitError(
            "a model that shares its weights over the channels needs the past of each target as its feature, in the "
            f"same order; got features {', '.join(task.features)} for targets {', '.join(task.targets)}. Name for "
            "each target its own column, log_close for close, of a table the target itself as the feature; or take a "
            "model without this rule, such as gru"
        )
    return len(task.features)


class NLinear(nn.Module):
    """One linear map from context to horizon, less the last value; Zeng et al. 2023, arxiv.org/abs/2205.13504.

    Deviation: the map starts at zero, so an untrained model is persistence.
    """

    shares_channels = True

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

    shares_channels = True

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        channels(task)
        self.trend = Linear(models, task.context, task.horizon, zero=True)
        self.rest = Linear(models, task.context, task.horizon, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = x.transpose(2, 3)  # (M, B, L, C) -> (M, B, C, L)
        trend = moving_average(x)
        return (self.trend(trend) + self.rest(x - trend)).transpose(2, 3)  # (M, B, H, C)


class RidgeAR(nn.Module):
    """Ridge regression of the horizon on all features of the context (Hoerl and Kennard 1970): solved, not trained.

    The penalty is a model's own: the best of PENALTIES on its validation windows.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        self.shape = task.horizon, len(task.targets)
        self.map = Linear(models, task.context * len(task.features), task.horizon * len(task.targets), zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        return self.map(x.flatten(2)).unflatten(-1, self.shape)  # (M, B, L, C) -> (M, B, H, K)

    @torch.no_grad()
    def solve(self, train: Batches, validation: Batches) -> None:
        """Set the weights to the solution on all train windows."""
        gram, cross = _moments(train)  # (M, P + 1, P + 1), (M, P + 1, H K)
        check_gram, check_cross = _moments(validation)
        ridge = gram[:, -1, -1, None] * torch.ones_like(gram[0, 0])  # as many as there are windows
        ridge[:, -1] = 0  # the intercept is free
        best = torch.full_like(gram[:, 0, 0], torch.inf)
        for penalty in PENALTIES:
            weights, info = torch.linalg.solve_ex(gram + torch.diag_embed(penalty * ridge), cross)
            loss = (weights * (check_gram @ weights - 2 * check_cross)).sum((1, 2))  # the squared error less that of 0
            better = (loss < best) & (info == 0)
            best = torch.where(better, loss, best)
            self.map.weight.copy_(torch.where(better[:, None, None], weights[:, :-1], self.map.weight))
            self.map.bias.copy_(torch.where(better[:, None, None], weights[:, -1:], self.map.bias))


def _moments(batches: Batches) -> tuple[Tensor, Tensor]:
    """Sum X'X and X'Y of each model's own windows, with a column of ones last, in float64."""
    gram = cross = torch.zeros((), dtype=torch.float64)
    for x, y, weight in batches:
        x = torch.cat([x.flatten(2), torch.ones_like(x[:, :, :1, 0])], 2).double()
        weighted = (x * weight[..., None]).mT
        gram, cross = gram + weighted @ x, cross + weighted @ y.flatten(2).double()
    return gram, cross


def moving_average(x: Tensor) -> Tensor:
    """Return the centred mean of KERNEL values along the last axis, the ends repeated: same shape."""
    flat = x.flatten(0, -2)[:, None]  # (N, 1, L)
    return F.avg_pool1d(F.pad(flat, (KERNEL // 2, KERNEL // 2), "replicate"), KERNEL, 1).view_as(x)
