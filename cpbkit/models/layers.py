"""Layers with a leading model axis: one call computes M models.

Shapes everywhere: M models, B batch, L context, C channels, H horizon, K targets, D width, G gates.
Each layer equals its torch.nn counterpart for every model; weights are (M, in, out), so `x @ w` is one batched product.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from cpbkit.models.products import is_onednn_faster, multiply
from cpbkit.models.scan import GRUScan, GRUStep, LSTMScan, LSTMStep

# The truth (M, B, H, K), and for each step whether the decoder sees it: (H,) bool, or None for always.
Teacher = tuple[Tensor, Tensor | None]
State = list[tuple[Tensor, ...]]  # a layer each: (h,) of a GRU, (h, c) of an LSTM, all (M, B, D)
# Rows of batch and steps for each unit of width, from which on a CPU torch's own LSTM, which packs the weights at each
# call, is the faster one; and likewise where oneDNN, which it is, multiplies faster than MKL.
PACKED, PACKED_BY_ONEDNN = 8, 1
LEAST = 20_000  # rows times width, below which a call for each model costs more than it gains
LONG = 4  # steps from which on a recurrent layer is faster as a whole, its weights copied; of widths 16 to 256


def uniform(models: int, rows: int, columns: int, bound: float) -> nn.Parameter:
    """Return an (M, rows, columns) parameter drawn from U(-bound, bound)."""
    return nn.Parameter(torch.empty(models, rows, columns).uniform_(-bound, bound))


class Linear(nn.Module):
    """torch.nn.Linear for M models: (M, ..., in) -> (M, ..., out)."""

    weight: nn.Parameter
    bias: nn.Parameter  # None, as torch has it, where there is none

    def __init__(self, models: int, inputs: int, outputs: int, bias: bool = True, zero: bool = False):
        super().__init__()
        bound = 0.0 if zero else 1 / math.sqrt(inputs)
        self.weight = uniform(models, inputs, outputs, bound)
        self.register_parameter("bias", uniform(models, 1, outputs, bound) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x.flatten(1, -2), self.weight, self.bias).unflatten(1, x.shape[1:-1])


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
    """Dropout with one mask for all models, so that a model's masks do not depend on its stack.

    With `all_bars` a window (M, B, L, C) keeps or loses a channel as a whole (Gal and Ghahramani 2016).
    """

    def __init__(self, rate: float, all_bars: bool = False):
        super().__init__()
        self.rate, self.all_bars = rate, all_bars

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return x
        return x * F.dropout(torch.ones_like(x[:1, :, :1] if self.all_bars else x[:1]), self.rate)


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

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Attend from x (M, B, L, D) to memory (M, B, S, D): (M, B, L, D)."""
        return self.attend(x, *self.project(memory))

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values of a memory once for many queries: two of (M * B, heads, S, D / heads)."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Tensor:
        """Attend from x (M, B, L, D) to what `project` gave of S rows: (M, B, L, D).

        causal: x is the last L of these rows, and each of them sees itself and the rows before it.
        """
        rows, seen, mask = x.shape[2], keys.shape[2], None
        if causal and 1 < rows < seen:
            mask = torch.ones(rows, seen, dtype=torch.bool, device=x.device).tril(seen - rows)
        square = causal and rows == seen
        y = F.scaled_dot_product_attention(self._split(self.query(x)), keys, values, mask, is_causal=square)
        return self.out(y.transpose(1, 2).flatten(2).unflatten(0, x.shape[:2]))  # (M * B, heads, L, D / heads) before

    def _split(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Recurrent(nn.Module):
    """Layers of a recurrent cell for M models: (M, B, L, C) -> (M, B, L, D), and the state after the last step.

    The input products of all steps are one product; only `h @ w` runs step by step.
    """

    gates: int
    parts: int  # tensors of a state
    whole: type[Function]  # a layer over all steps, as one operator
    single: Callable  # the layer of torch that it is for one model

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
        return (x.new_zeros(*x.shape[:2], self.width),) * self.parts

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        ends: State = []
        layers: Iterable[tuple[Any, Any]] = zip(self.input, self.hidden, strict=True)  # a ModuleList forgets of what
        for i, (input, hidden) in enumerate(layers):
            now = self.start(x) if state is None else state[i]
            x, now = self.scan(self.dropout(x) if i else x, now, input, hidden)  # (M, B, L, D)
            ends.append(now)
        return x, ends

    def scan(self, x: Tensor, now: tuple[Tensor, ...], input: Linear, hidden: Linear) -> tuple[Tensor, tuple]:
        """Run one layer over x (M, B, L, C) from a state: (M, B, L, D), and the state after the last step."""
        if not is_long(x):
            return self.scan_by_steps(x, now, input, hidden)
        weights = input.weight, input.bias, hidden.weight, hidden.bias
        out, *end = self.whole.apply(x.transpose(1, 2), *now, *weights)
        return out.transpose(1, 2), tuple(end)

    def scan_by_steps(self, x: Tensor, now: tuple[Tensor, ...], input: Linear, hidden: Linear) -> tuple[Tensor, tuple]:
        """Do what `scan` does, a step after the other."""
        steps = []
        for step in input(x).unbind(2):  # L of (M, B, G D)
            now = self.cell(step, hidden(now[0]), now)
            steps.append(now[0])
        return torch.stack(steps, 2), now

    def each(self, x: Tensor, now: tuple[Tensor, ...], input: Linear, hidden: Linear) -> Iterator[Callable]:
        """Yield a call per model that runs one layer by torch's own: (B, L, D), and the state (1, B, D) after it."""
        # Unbound at once: in the backward pass each `x[m]` would fill a tensor of all models.
        states = [tensor[:, None] for tensor in now]
        parts = x, *states, input.weight.mT, hidden.weight.mT, input.bias[:, 0], hidden.bias[:, 0]
        for one, *state, a, b, c, d in zip(*(part.unbind() for part in parts), strict=True):
            first = state if len(state) > 1 else state[0]
            yield partial(self.single, one, first, (a, b, c, d), True, 1, 0.0, self.training, False, True)


def is_long(x: Tensor) -> bool:
    """Say whether a layer runs over all steps of x (M, B, L, C) at once: not under autocast, and not to count FLOP."""
    return x.shape[2] >= LONG and not x.is_meta and not torch.is_autocast_enabled(x.device.type)


class GRU(Recurrent):
    """torch.nn.GRU (batch first) for M models."""

    gates, parts, whole, single = 3, 1, GRUScan, torch.gru

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (GRUStep.apply(x, h, state[0].to(x.dtype)),)  # under autocast the first state is wider


class LSTM(Recurrent):
    """torch.nn.LSTM (batch first) for M models."""

    gates, parts, whole, single = 4, 2, LSTMScan, torch.lstm

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return LSTMStep.apply(x, h, state[1].to(x.dtype))  # under autocast the first cell is wider

    def scan(self, x: Tensor, now: tuple[Tensor, ...], input: Linear, hidden: Linear) -> tuple[Tensor, tuple]:
        """Run one layer; on a CPU, where many rows share its weights, model by model with torch's own."""
        rows = x.shape[1] * x.shape[2]
        packed = PACKED_BY_ONEDNN if is_onednn_faster() else PACKED
        few = rows * self.width < LEAST or rows < packed * self.width
        if x.device.type != "cpu" or not is_long(x) or few:
            return super().scan(x, now, input, hidden)
        out, h, c = zip(*(run() for run in self.each(x, now, input, hidden)), strict=True)
        return torch.stack(out), (torch.cat(h), torch.cat(c))


class BiLSTM(nn.Module):
    """One bidirectional layer of torch.nn.LSTM for M models: (M, B, L, C) -> (M, B, L, 2 D).

    On a GPU both directions run as one LSTM of 2 M models: half the kernels. `dropout` acts on the inputs, as in Keras:
    a mask a direction, the same at every bar.
    """

    def __init__(self, models: int, inputs: int, width: int, dropout: float = 0.0):
        super().__init__()
        self.ahead, self.back = LSTM(models, inputs, width), LSTM(models, inputs, width)
        self.dropout = Dropout(dropout, all_bars=True)

    def forward(self, x: Tensor) -> Tensor:
        ahead, back = self.dropout(x), self.dropout(x).flip(2)
        if x.device.type == "cpu":
            ahead, back = self.ahead(ahead)[0], self.back(back)[0]
        else:
            ahead, back = self.at_once(ahead, back)
        return torch.cat([ahead, back.flip(2)], -1)

    def at_once(self, ahead: Tensor, back: Tensor) -> tuple[Tensor, ...]:
        """Run both LSTMs over their inputs (M, B, L, C), as one: two of (M, B, L, D)."""
        pairs = zip(self.ahead.named_parameters(), self.back.parameters(), strict=True)
        weights = {name: torch.cat([ahead, back]) for (name, ahead), back in pairs}
        both = torch.cat([ahead, back])  # (2 M, B, L, C)
        return functional_call(self.ahead, weights, (both,))[0].chunk(2)


class ForcedLSTM(nn.Module):
    """The LSTM of cpbv2's v4_model_cuda_forced_v2.py, a specimen: each gate of each step by its own small products.

    It is torch.nn.LSTM for M models, written to be slow. Deviation: dropout acts between the layers and not on
    the state that the next step gets. A gate has one bias, as in the source; torch.nn.LSTM adds two.
    """

    def __init__(self, models: int, inputs: int, width: int, layers: int = 1, dropout: float = 0.0):
        super().__init__()
        self.width = width
        sizes = [inputs] + [width] * (layers - 1)
        self.input = nn.ModuleList(
            nn.ModuleList(Linear(models, size, width, bias=False) for _ in range(4)) for size in sizes
        )
        self.hidden = nn.ModuleList(nn.ModuleList(Linear(models, width, width) for _ in range(4)) for _ in sizes)
        self.dropout = Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        zero = x.new_zeros(*x.shape[:2], self.width)
        state = [(zero, zero) for _ in self.input] if state is None else list(state)
        steps = []
        layers: list[tuple[Any, Any]] = list(zip(self.input, self.hidden, strict=True))
        for now in x.unbind(2):
            for layer, (inputs, hiddens) in enumerate(layers):
                h, c = state[layer]
                now = self.dropout(now) if layer else now
                i, f, g, o = (input(now) + hidden(h) for input, hidden in zip(inputs, hiddens, strict=True))
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                now = torch.sigmoid(o) * torch.tanh(c)
                state[layer] = now, c
            steps.append(now)
        return torch.stack(steps, 2), state


def next_input(own: Tensor, teacher: Teacher | None, step: int) -> Tensor:
    """Return what a decoder sees after it wrote `own` (M, B, K) at a step: that, or the truth of that step."""
    if teacher is None:
        return own
    truth, forced = teacher
    return truth[:, :, step] if forced is None else torch.where(forced[step], truth[:, :, step], own)


def write(decode: Callable[[Tensor], Tensor], last: Tensor, horizon: int, teacher: Teacher | None) -> Tensor:
    """Write a horizon from the row before it: last (M, B, K) -> (M, B, H, K).

    decode: goes on from rows (M, B, N, K) to the row after each of them, the same shape; called again, it continues.
    It gets as many rows at once as are known: the truth of a taught step is known before the step is computed. On a
    GPU the host does not wait to see a draw, and steps go one by one.
    """
    parts, done = [], 0
    known = _known_draws(horizon, teacher)
    while done < horizon:
        rows, first = [last[:, :, None]], done
        done += 1
        while done < horizon and known[done - 1]:
            done += 1
        if teacher is not None and done > first + 1:
            rows.append(teacher[0][:, :, first : done - 1])
        parts.append(decode(torch.cat(rows, 2)))
        last = next_input(parts[-1][:, :, -1], teacher, done - 1)
    return torch.cat(parts, 2)


def _known_draws(horizon: int, teacher: Teacher | None) -> list[bool]:
    """Return for each step whether the host knows that the next one sees its truth."""
    if teacher is None:
        return [False] * horizon
    draws = teacher[1]
    if draws is None:
        return [True] * horizon
    return draws.tolist() if draws.device.type == "cpu" else [False] * horizon
