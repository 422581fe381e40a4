"""Layers with a leading model axis: one call computes M models.

Shapes everywhere: M models, B batch, L context, C channels, H horizon, K targets, D width, G gates.
Each layer equals its torch.nn counterpart for every model; weights are (M, in, out), so `x @ w` is one batched product.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = list[tuple[Tensor, ...]]  # a layer each: (h,) of a GRU, (h, c) of an LSTM, all (M, B, D)


def uniform(models: int, rows: int, columns: int, bound: float) -> nn.Parameter:
    """Return an (M, rows, columns) parameter drawn from U(-bound, bound)."""
    return nn.Parameter(torch.empty(models, rows, columns).uniform_(-bound, bound))


class Linear(nn.Module):
    """torch.nn.Linear for M models: (M, ..., in) -> (M, ..., out)."""

    def __init__(self, models: int, inputs: int, outputs: int, bias: bool = True, zero: bool = False):
        super().__init__()
        bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = uniform(models, inputs, outputs, bound)
        self.bias = uniform(models, 1, outputs, bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1, -2)
        y = flat @ self.weight if self.bias is None else torch.baddbmm(self.bias, flat, self.weight)
        return y.unflatten(1, x.shape[1:-1])


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over the last axis for M models."""

    def __init__(self, models: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models, 1, width))
        self.bias = nn.Parameter(torch.zeros(models, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:]).flatten(1, -2)
        return torch.addcmul(self.bias, y, self.weight).unflatten(1, x.shape[1:-1])


class Dropout(nn.Module):
    """Dropout with one mask for all models, so that a model's masks do not depend on its stack."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return x
        return x * F.dropout(torch.ones_like(x[:1]), self.rate)


class Attention(nn.Module):
    """torch.nn.MultiheadAttention (batch first, no dropout inside) for M models."""

    def __init__(self, models: int, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got width {width}, heads {heads}")
        self.heads = heads
        self.query = Linear(models, width, width)
        self.key = Linear(models, width, width)
        self.value = Linear(models, width, width)
        self.out = Linear(models, width, width)

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        """Attend from x (M, B, L, D) to memory (M, B, S, D): (M, B, L, D)."""
        q, k, v = (self._split(t) for t in (self.query(x), self.key(memory), self.value(memory)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # (M * B, heads, L, D / heads)
        return self.out(y.transpose(1, 2).flatten(2).unflatten(0, x.shape[:2]))

    def _split(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AdditiveAttention(nn.Module):
    """Weigh a memory by tanh scores (Bahdanau, Cho, Bengio 2015): query (M, B, D), memory (M, B, L, D) -> (M, B, D)."""

    def __init__(self, models: int, width: int):
        super().__init__()
        bound = 1 / math.sqrt(2 * width)  # as one linear layer over [query, memory]
        self.query = uniform(models, width, width, bound)
        self.memory = Linear(models, width, width)
        nn.init.uniform_(self.memory.weight, -bound, bound)
        nn.init.uniform_(self.memory.bias, -bound, bound)
        self.score = Linear(models, width, 1)

    def keys(self, memory: Tensor) -> Tensor:
        """Project the memory once for all queries: (M, B, L, D) -> (M, B, L, D)."""
        return self.memory(memory)

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        scores = self.score(torch.tanh((query @ self.query)[:, :, None] + keys))[..., 0]  # (M, B, L)
        return (scores.softmax(-1)[:, :, None] @ memory)[:, :, 0]


class Recurrent(nn.Module):
    """Layers of a recurrent cell for M models: (M, B, L, C) -> (M, B, L, D), and the state after the last step.

    The input products of all steps are one product; only `h @ w` runs step by step.
    """

    gates: int

    def __init__(self, models: int, inputs: int, width: int, layers: int = 1, dropout: float = 0.0):
        super().__init__()
        self.width = width
        sizes = [inputs] + [width] * (layers - 1)
        self.input = nn.ModuleList(Linear(models, size, self.gates * width) for size in sizes)
        self.hidden = nn.ModuleList(Linear(models, width, self.gates * width) for _ in sizes)
        self.dropout = Dropout(dropout)
        bound = 1 / math.sqrt(width)  # torch.nn.RNNBase draws every tensor from this range
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Step once: x (M, B, G D) of the input, h (M, B, G D) of the state -> new state."""
        raise NotImplementedError

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the zero state for inputs x (M, B, L, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        ends: State = []
        for i, (input, hidden) in enumerate(zip(self.input, self.hidden, strict=True)):
            now = self.start(x) if state is None else state[i]
            steps = []
            for step in input(self.dropout(x) if i else x).unbind(2):  # L of (M, B, G D)
                now = self.cell(step, hidden(now[0]), now)
                steps.append(now[0])
            x = torch.stack(steps, 2)  # (M, B, L, D)
            ends.append(now)
        return x, ends


class GRU(Recurrent):
    """torch.nn.GRU (batch first) for M models."""

    gates = 3

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(*x.shape[:2], self.width),)

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (rx, zx, nx), (rh, zh, nh) = x.chunk(3, -1), h.chunk(3, -1)
        r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        n = torch.tanh(torch.addcmul(nx, r, nh))
        return (torch.lerp(n, state[0], z),)


class LSTM(Recurrent):
    """torch.nn.LSTM (batch first) for M models."""

    gates = 4

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        zero = x.new_zeros(*x.shape[:2], self.width)
        return zero, zero

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        i, f, g, o = (x + h).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
