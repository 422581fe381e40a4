"""Recurrent forecasters: they read the context once, then write the horizon step by step or at once."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from cpbkit.config.experiment import Model, Task
from cpbkit.models.layers import (
    GRU,
    LSTM,
    Attention,
    BiLSTM,
    Dropout,
    LayerNorm,
    Linear,
    Teacher,
    uniform,
    write,
)
from cpbkit.models.linear import channels
from cpbkit.models.products import multiply

SEGMENT = 24  # bars a step of SegRNN, as the paper takes for a context of 96


class GRUSeq2Seq(nn.Module):
    """GRU encoder and decoder around one pooled context; FastSeq2Seq of cpbv2's v4_train_fast_gru.py.

    The context is pooled once, without a query: a score per bar, softmax over the bars, weighted sum; each step's head
    reads [decoder output, pooled context]. Deviations: the decoder starts from the last observed row (the source fed
    zeros); the score has no bias, which the softmax would not see; the head starts at zero, so an untrained model is
    persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, targets = settings.width, len(task.targets)
        self.horizon = task.horizon
        self.encoder = GRU(models, len(task.features), width, settings.layers, settings.dropout)
        self.decoder = GRU(models, targets, width, settings.layers, settings.dropout)
        self.score = uniform(models, width, 1, 1 / math.sqrt(width))
        self.combine = Linear(models, 2 * width, width)
        self.head = Linear(models, width, targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        memory, state = self.encoder(x)  # (M, B, L, C) -> (M, B, L, D)
        # As sums: a matrix product with one column is slow, and its gradient slower.
        scores = (memory * self.score.mT[:, :, None]).sum(-1)  # (M, B, L)
        pooled = (scores.softmax(-1)[:, :, None] @ memory)[:, :, 0]  # (M, B, D)
        # The part of the combining layer that reads the pooled context is the same for all steps.
        of_step, of_context = self.combine.weight.chunk(2, 1)
        known = multiply(pooled, of_context, self.combine.bias)[:, :, None]
        of_step = of_step.to(known.dtype)  # under autocast: a part of a weight would be cast anew at every step

        def decode(rows: Tensor) -> Tensor:
            nonlocal state
            out, state = self.decoder(rows, state)  # (M, B, N, K) -> (M, B, N, D)
            mixed = multiply(out.flatten(1, 2), of_step).unflatten(1, out.shape[1:3])
            return self.head(torch.relu(mixed + known))

        return write(decode, last, self.horizon, teacher)  # (M, B, H, K)


class LSTMSeq2Seq(nn.Module):
    """LSTM encoder and decoder with multi-head attention; Seq2SeqLSTM of cpbv2's v4_train_unified.py.

    With `cell` ForcedLSTM it is Seq2SeqLSTMGPUv2 of v4_model_cuda_forced_v2.py, made to run (its decoder stacked
    a tensor as if it were a list). Deviations: the decoder starts from the last observed row, where the source
    fed zeros or, where forced, the very row it had to predict and none after it; forcing shifts by one and goes on;
    the head starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model, cell: type[nn.Module] = LSTM):
        super().__init__()
        width, targets = settings.width, len(task.targets)
        self.horizon = task.horizon
        self.encoder = cell(models, len(task.features), width, settings.layers, settings.dropout)
        self.decoder = cell(models, targets, width, settings.layers, settings.dropout)
        self.attention = Attention(models, width, settings.heads)
        self.dropout = Dropout(settings.dropout)
        self.combine = Linear(models, 2 * width, width)
        self.head = Linear(models, width, targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        memory, state = self.encoder(x)  # (M, B, L, C) -> (M, B, L, D)
        keys, values = self.attention.project(self.dropout(memory))

        def decode(rows: Tensor) -> Tensor:
            nonlocal state
            out, state = self.decoder(rows, state)  # (M, B, N, K) -> (M, B, N, D)
            both = torch.cat([out, self.attention.attend(out, keys, values)], -1)
            return self.head(torch.relu(self.combine(self.dropout(both))))

        return write(decode, last, self.horizon, teacher)  # (M, B, H, K)


class BiLSTMSeq2Seq(nn.Module):
    """BiLSTM encoder, its end repeated into an LSTM decoder; trainer's V7_CLASSIC.py and V8_ALIGNED_WITH_V7.py.

    Encoder of width, half and a quarter (the third layer runs one way), decoder of half, LayerNorm after each,
    input dropout as in Keras. One linear head writes all targets: it equals the source's three side by side.
    Deviations: torch's first weights, two biases a gate and its LayerNorm epsilon; the head starts at zero, so an
    untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, dropout = settings.width, settings.dropout
        self.horizon = task.horizon
        self.first = BiLSTM(models, len(task.features), width, dropout)
        self.second = BiLSTM(models, 2 * width, width // 2, dropout)
        self.third = LSTM(models, width, width // 4)
        self.decoder = LSTM(models, width // 4, width // 2)
        self.norms = nn.ModuleList(LayerNorm(models, size) for size in (2 * width, width, width // 4, width // 2))
        self.dropout = Dropout(dropout, all_bars=True)
        self.head = Linear(models, width // 2, len(task.targets), zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = self.norms[1](self.second(self.norms[0](self.first(x))))  # (M, B, L, C) -> (M, B, L, D)
        end = self.norms[2](self.third(self.dropout(x))[0][:, :, -1:])  # (M, B, 1, D / 4)
        out, _ = self.decoder(self.dropout(end).expand(-1, -1, self.horizon, -1))
        return self.head(self.norms[3](out))  # (M, B, H, D / 2) -> (M, B, H, K)


class BiLSTMDense(nn.Module):
    """BiLSTM encoder and dense layers for the whole horizon; trainer's V8_STABLE.py and V8_FULL_V7_ALIGNED.py.

    Encoder of width, half, a quarter and an eighth (the fourth layer runs one way), LayerNorm and dropout after
    each, dense layers of half, a quarter and an eighth; dropout falls from the setting to a third of it.
    Deviations: the forecast has the shape of the truth (V8_STABLE's loss broadcast one against the other and
    pulled every forecast to the batch mean); L1 on the weights is left out; torch's first weights, two biases a
    gate and its LayerNorm epsilon; the head starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, high = settings.width, settings.dropout
        middle, low = high * 2 / 3, high / 3
        self.horizon, self.targets = task.horizon, len(task.targets)
        sizes, rates = (width, width // 2, width // 4), (high, high, middle)
        inputs = (len(task.features), 2 * width, width)
        self.encoder = nn.ModuleList(
            BiLSTM(models, channels, size, rate) for channels, size, rate in zip(inputs, sizes, rates, strict=True)
        )
        self.norms = nn.ModuleList(LayerNorm(models, 2 * size) for size in sizes)
        self.dropouts = nn.ModuleList(Dropout(rate) for rate in rates)
        self.input_dropout = Dropout(middle, all_bars=True)
        self.end = LSTM(models, width // 2, width // 8)
        self.end_norm = LayerNorm(models, width // 8)
        dense = pairwise((width // 8, width // 2, width // 4, width // 8))
        self.dense = nn.ModuleList(Linear(models, a, b) for a, b in dense)
        self.dense_dropouts = nn.ModuleList(Dropout(rate) for rate in (middle, middle, low))
        self.head = Linear(models, width // 8, self.horizon * self.targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        for layer, norm, dropout in zip(self.encoder, self.norms, self.dropouts, strict=True):
            x = dropout(norm(layer(x)))  # (M, B, L, C) -> (M, B, L, 2 D)
        x = self.end_norm(self.end(self.input_dropout(x))[0][:, :, -1])  # (M, B, D / 8)
        for dropout, dense in zip(self.dense_dropouts, self.dense, strict=True):
            x = torch.relu(dense(dropout(x)))
        return self.head(x).unflatten(-1, (self.horizon, self.targets))  # (M, B, H, K)


class LSTMDense(nn.Module):
    """LSTM encoder and dense layers for the whole horizon; BC-GCC of okoklaile/bcgcc (README_TRAINING.md).

    Dense layers of half the width and a quarter. Deviations: the last layer is linear (a ReLU there left some
    seeds with an output of zero and no gradient) and starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, targets = settings.width, len(task.targets)
        self.horizon, self.targets = task.horizon, targets
        self.encoder = LSTM(models, len(task.features), width, settings.layers, settings.dropout)
        self.dense = nn.ModuleList([Linear(models, width, width // 2), Linear(models, width // 2, width // 4)])
        self.dropout = Dropout(settings.dropout)
        self.head = Linear(models, width // 4, self.horizon * targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = self.encoder(x)[0][:, :, -1]  # (M, B, L, C) -> (M, B, D)
        for dense in self.dense:
            x = self.dropout(torch.relu(dense(x)))
        return self.head(x).unflatten(-1, (self.horizon, self.targets))  # (M, B, H, K)


class GRUDense(nn.Module):
    """GRU encoder and one linear layer for the whole horizon, as BlockRNNModel of unit8co/darts.

    Deviation: the head starts at zero, so an untrained model is persistence.
    """

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        self.horizon, self.targets = task.horizon, len(task.targets)
        self.encoder = GRU(models, len(task.features), settings.width, settings.layers, settings.dropout)
        self.head = Linear(models, settings.width, self.horizon * self.targets, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = self.encoder(x)[1][-1][0]  # (M, B, L, C) -> (M, B, D)
        return self.head(x).unflatten(-1, (self.horizon, self.targets))  # (M, B, H, K)


class SegRNN(nn.Module):
    """GRU over segments of 24 bars that decodes a horizon at once; Lin et al. 2023, arxiv.org/abs/2308.11200.

    Channels share the weights and have an embedding each. Every segment starts from the same state, so its product is
    computed once; places are the same for every window, so theirs are too. Deviations: a context that is no
    multiple of 24 is led in by its first row; the head starts at zero, so an untrained model is persistence.
    """

    shares_channels = True

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        width, count = settings.width, channels(task)
        self.horizon = task.horizon
        self.lead_in = -task.context % SEGMENT
        self.embed = Linear(models, SEGMENT, width)
        self.rnn = GRU(models, width, width)
        self.place = nn.Parameter(torch.randn(models, 1, -(-task.horizon // SEGMENT), width // 2))
        self.channel = nn.Parameter(torch.randn(models, count, 1, width - width // 2))
        self.dropout = Dropout(settings.dropout)
        self.head = Linear(models, width, SEGMENT, zero=True)

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        x = torch.cat([x[:, :, :1].expand(-1, -1, self.lead_in, -1), x], 2) - x[:, :, -1:]
        segments = x.transpose(2, 3).unflatten(-1, (-1, SEGMENT))  # (M, B, C, N, 24)
        _, [(h,)] = self.rnn(torch.relu(self.embed(segments.flatten(1, 2))))  # (M, B C, N, D) -> (M, B C, D)
        places, names = self.place.expand(-1, x.shape[3], -1, -1), self.channel.expand(-1, -1, self.place.shape[2], -1)
        where = torch.cat([places, names], -1)  # (M, C, S, D)
        shape = -1, x.shape[1], x.shape[3], self.place.shape[2], -1  # M, B, C, S
        past, h = (t.unflatten(1, x.shape[1::2])[:, :, :, None].expand(shape) for t in (self.rnn.hidden[0](h), h))
        (state,) = self.rnn.cell(self.rnn.input[0](where)[:, None].expand(shape), past, (h,))  # (M, B, C, S, D)
        y = self.head(self.dropout(state)).flatten(-2)  # (M, B, C, S 24)
        return y[..., : self.horizon].transpose(2, 3)  # (M, B, H, C)
