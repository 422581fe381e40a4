"""Quantiles of every step and target, from any network that is trained."""

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor, nn

from cpbkit.config.experiment import Task
from cpbkit.errors import CpbkitError
from cpbkit.models.layers import Teacher


def widen(task: Task, shares_channels: bool = False) -> Task:
    """Return the task of a network with an output for each quantile: as many targets more, or, where a network shares
    its weights over the targets, as many steps.
    """
    count = len(task.quantiles)
    if shares_channels:
        return replace(task, horizon=task.horizon * count, purge=0, quantiles=())
    return replace(task, targets=task.targets * count, target_weights=task.target_weights * count, quantiles=())


class Quantiles(nn.Module):
    """A network whose outputs are put in order: (M, B, L, C), last (M, B, K) -> (M, B, H, K, Q).

    Sorted, quantiles cannot cross (Chernozhukov, Fernández-Val & Galichon 2010). They start as far apart as those of
    normal errors, so that an untrained network is persistence with such errors.
    """

    def __init__(self, task: Task, build: Callable[[Task], nn.Module], shares_channels: bool):
        super().__init__()
        self.by_step, self.count = shares_channels, len(task.quantiles)
        self.net = build(widen(task, shares_channels))
        if hasattr(self.net, "solve"):
            raise CpbkitError("quantiles need a network that is trained; this one is solved for its squared error")
        self.stacked = getattr(self.net, "stacked", True)
        apart = torch.tensor([NormalDist().inv_cdf(level) for level in task.quantiles])
        self.register_buffer("apart", apart, persistent=False)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        if self.by_step:
            y = self.net(x, last).unflatten(2, (-1, self.count)).transpose(3, 4)  # (M, B, H Q, K) -> (M, B, H, K, Q)
        else:
            truth = teacher and (teacher[0].repeat(1, 1, 1, self.count), teacher[1])
            y = self.net(x, last.repeat(1, 1, self.count), truth).unflatten(3, (self.count, -1)).transpose(3, 4)
        return (y + self.apart).sort(dim=-1, stable=True).values
