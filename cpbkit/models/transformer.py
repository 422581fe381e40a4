"""The encoder-decoder transformer: each bar of the horizon attends to the context and to the bars written before it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpbkit.config.experiment import Model, Task
from cpbkit.models.layers import Attention, Dropout, LayerNorm, Linear, Teacher, write

SPREAD = 4  # inner width of a block's two linear layers, in units of the model dimension
Memory = tuple[Tensor, Tensor]  # keys and values, each (M * B, heads, L, D / heads)


class FeedForward(nn.Module):
    """Two linear layers with GELU between, row by row."""

    def __init__(self, models: int, width: int, dropout: float):
        super().__init__()
        self.wide = Linear(models, width, SPREAD * width)
        self.narrow = Linear(models, SPREAD * width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.dropout(F.gelu(self.wide(x))))


class EncoderBlock(nn.Module):
    """torch.nn.TransformerEncoderLayer (norm last, GELU, no dropout on the attention weights) for M models."""

    def __init__(self, models: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.attention = Attention(models, width, heads)
        self.feed_forward = FeedForward(models, width, dropout)
        self.norms = nn.ModuleList(LayerNorm(models, width) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x, x)))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class DecoderBlock(nn.Module):
    """torch.nn.TransformerDecoderLayer (norms and dropout as above, causal) for M models, some rows at a time."""

    def __init__(self, models: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.own = Attention(models, width, heads)
        self.cross = Attention(models, width, heads)
        self.feed_forward = FeedForward(models, width, dropout)
        self.norms = nn.ModuleList(LayerNorm(models, width) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, memory: Memory, past: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute rows x (M, B, L, D) after the `past` ones; return them and the past of the rows that follow."""
        now = self.own.project(x)
        if past is not None:
            now = torch.cat([past[0], now[0]], 2), torch.cat([past[1], now[1]], 2)
        x = self.norms[0](x + self.dropout(self.own.attend(x, *now, causal=True)))
        x = self.norms[1](x + self.dropout(self.cross.attend(x, *memory)))
        return self.norms[2](x + self.dropout(self.feed_forward(x))), now


class Transformer(nn.Module):
    """Encoder-decoder transformer (Vaswani et al. 2017, arxiv.org/abs/1706.03762); cpbv2's v4_train_transformer.py.

    Rows whose inputs are known are one masked pass: all of them with the truth at every step; else, and in evaluation,
    the horizon is written row by row, each computed once. Deviations: evaluation never sees the truth (the source
    forced half of it); the decoder is causal (the source's earlier rows saw later ones), starts from the last observed
    row instead of zeros and has its own input layer, since targets are not the features; attention weights have no
    dropout; the head starts at zero, so an untrained model is persistence.
    """

    places: Tensor

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, targets = settings.width, len(task.targets)
        self.horizon = task.horizon
        shape = models, width, settings.heads, settings.dropout
        self.features = Linear(models, len(task.features), width)
        self.targets = Linear(models, targets, width)
        self.encoder = nn.ModuleList(EncoderBlock(*shape) for _ in range(settings.layers))
        self.decoder = nn.ModuleList(DecoderBlock(*shape) for _ in range(settings.layers))
        self.head = Linear(models, width, targets, zero=True)
        self.register_buffer("places", waves(max(task.context, task.horizon), width), persistent=False)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = self.features(x) + self.places[: x.shape[2]]  # (M, B, L, C) -> (M, B, L, D)
        for block in self.encoder:
            x = block(x)
        decoder: Iterable[Any] = self.decoder
        memories = [block.cross.project(x) for block in decoder]
        past: list[Memory | None] = [None] * len(memories)
        done = 0

        def decode(rows: Tensor) -> Tensor:
            nonlocal done
            y = self.targets(rows) + self.places[done : done + rows.shape[2]]  # (M, B, N, K) -> (M, B, N, D)
            done += rows.shape[2]
            for i, block in enumerate(self.decoder):
                y, past[i] = block(y, memories[i], past[i])
            return self.head(y)

        return write(decode, last, self.horizon, teacher)  # (M, B, H, K)


def waves(rows: int, width: int) -> Tensor:
    """Return sinusoidal places (rows, width) as in the paper, section 3.5."""
    angles = torch.arange(rows)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
