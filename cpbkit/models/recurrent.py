"""Recurrent forecasters: they read the context once and write the horizon step by step."""

import torch
from torch import Tensor, nn

from cpbkit.experiment import Model, Task
from cpbkit.models.layers import GRU, AdditiveAttention, Linear

Teacher = tuple[
    Tensor, Tensor
]  # the truth (M, B, H, K), and for each step whether the decoder sees it (H,) bool


class GRUSeq2Seq(nn.Module):
    """GRU encoder and decoder with additive attention; FastSeq2Seq of cpbv2's v4_train_fast_gru.py.

    Deviations: the decoder starts from the last observed row and forcing shifts by one step (the source fed the
    row it had to predict); the head starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, targets = settings.width, len(task.targets)
        self.horizon = task.horizon
        self.encoder = GRU(models, len(task.features), width, settings.layers, settings.dropout)
        self.decoder = GRU(models, targets, width, settings.layers, settings.dropout)
        self.attention = AdditiveAttention(models, width)
        self.head = Linear(models, width, targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        memory, state = self.encoder(x)  # (M, B, L, C) -> (M, B, L, D)
        keys = self.attention.keys(memory)
        steps = []
        for h in range(self.horizon):
            out, state = self.decoder(last[:, :, None], state)
            query = out[:, :, 0]  # (M, B, D)
            last = self.head(query + self.attention(query, keys, memory))  # (M, B, K)
            steps.append(last)
            if teacher is not None:
                truth, coins = teacher
                last = torch.where(coins[h], truth[:, :, h], last)
        return torch.stack(steps, 2)  # (M, B, H, K)
