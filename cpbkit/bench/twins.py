"""The kit's networks as people write them: one model, plain torch.nn, the same function of the same weights.

B batch, L context, C channels, H horizon, K targets, D width. A twin is called with x (B, L, C), last (B, K), the truth
(B, H, K) and a forcing draw per step, and returns (B, H, K). What torch.nn does not offer it does not have: attention
projects its memory again at every step, and a transformer decodes its whole prefix again.
"""

import re
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpbkit.config.experiment import Experiment, Model, Task
from cpbkit.models.linear import KERNEL
from cpbkit.models.transformer import SPREAD, waves
from cpbkit.training.stack import Stack

Forced = list[bool]  # whether a step sees the truth of the step before it


def layers(kind: type[nn.GRU] | type[nn.LSTM], inputs: int, settings: Model) -> nn.RNNBase:
    """Make the recurrent layers of a network; torch warns of dropout where there is but one."""
    dropout = settings.dropout if settings.layers > 1 else 0.0
    return kind(inputs, settings.width, settings.layers, batch_first=True, dropout=dropout)


class GRUSeq2Seq(nn.Module):
    """FastSeq2Seq of cpbv2's v4_train_fast_gru.py: the context pooled once, a head over [decoder output, pooled]."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        self.horizon, width = task.horizon, settings.width
        self.encoder = layers(nn.GRU, len(task.features), settings)
        self.score = nn.Linear(width, 1, bias=False)
        self.decoder = layers(nn.GRU, len(task.targets), settings)
        self.combine = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        memory, state = self.encoder(x)
        pooled = (self.score(memory).softmax(1) * memory).sum(1, keepdim=True)  # (B, 1, D)
        steps = []
        for h in range(self.horizon):
            out, state = self.decoder(last[:, None], state)
            steps.append(self.head(torch.relu(self.combine(torch.cat([out, pooled], -1))))[:, 0])  # (B, K)
            last = truth[:, h] if forced[h] else steps[-1]
        return torch.stack(steps, 1)


class GRUDense(nn.Module):
    """The block recurrent network of darts: the encoder's last output, and a linear layer for all steps at once."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        self.shape = task.horizon, len(task.targets)
        self.encoder = layers(nn.GRU, len(task.features), settings)
        self.head = nn.Linear(settings.width, task.horizon * len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        return self.head(self.encoder(x)[0][:, -1]).unflatten(-1, self.shape)


class LSTMSeq2Seq(nn.Module):
    """Seq2SeqLSTM of cpbv2's v4_train_unified.py: attention and dropout at each step, a head over both."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        self.horizon, width = task.horizon, settings.width
        self.encoder = layers(nn.LSTM, len(task.features), settings)
        self.decoder = layers(nn.LSTM, len(task.targets), settings)
        self.attention = nn.MultiheadAttention(width, settings.heads, batch_first=True)
        self.dropout = nn.Dropout(settings.dropout)
        self.combine = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        memory, state = self.encoder(x)
        memory, steps = self.dropout(memory), []
        for h in range(self.horizon):
            out, state = self.decoder(last[:, None], state)  # (B, 1, D)
            seen, _ = self.attention(out, memory, memory, need_weights=False)
            mixed = torch.relu(self.combine(self.dropout(torch.cat([out, seen], -1))))
            steps.append(self.head(mixed)[:, 0])  # (B, K)
            last = truth[:, h] if forced[h] else steps[-1]
        return torch.stack(steps, 1)


class BiLSTMSeq2Seq(nn.Module):
    """Twin of recurrent.BiLSTMSeq2Seq; a mask of the inputs serves both directions."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        width, self.rate, self.horizon = settings.width, settings.dropout, task.horizon
        self.first = nn.LSTM(len(task.features), width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width // 2, batch_first=True, bidirectional=True)
        self.third = nn.LSTM(width, width // 4, batch_first=True)
        self.decoder = nn.LSTM(width // 4, width // 2, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in (2 * width, width, width // 4, width // 2))
        self.head = nn.Linear(width // 2, len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        x = self.norms[0](self.first(drop_channels(x, self.rate))[0])
        x = self.norms[1](self.second(drop_channels(x, self.rate))[0])
        end = self.norms[2](self.third(drop_channels(x, self.rate))[0][:, -1:])  # (B, 1, D / 4)
        out, _ = self.decoder(drop_channels(end, self.rate).expand(-1, self.horizon, -1))
        return self.head(self.norms[3](out))


class BiLSTMDense(nn.Module):
    """Twin of recurrent.BiLSTMDense; a mask of the inputs serves both directions."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        width, high = settings.width, settings.dropout
        self.middle, low = high * 2 / 3, high / 3
        self.shape = task.horizon, len(task.targets)
        self.rates = high, high, self.middle
        sizes = (len(task.features), 2 * width, width, width // 2)
        self.encoder = nn.ModuleList(
            nn.LSTM(a, b // 2, batch_first=True, bidirectional=True) for a, b in pairwise(sizes)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes[1:])
        self.end = nn.LSTM(width // 2, width // 8, batch_first=True)
        self.end_norm = nn.LayerNorm(width // 8)
        sizes = (width // 8, width // 2, width // 4, width // 8)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dense_dropouts = nn.ModuleList(nn.Dropout(rate) for rate in (self.middle, self.middle, low))
        self.head = nn.Linear(width // 8, task.horizon * len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        for layer, norm, rate in zip(self.encoder, self.norms, self.rates, strict=True):
            x = F.dropout(norm(layer(drop_channels(x, rate))[0]), rate)
        x = self.end_norm(self.end(drop_channels(x, self.middle))[0][:, -1])  # (B, D / 8)
        for dropout, dense in zip(self.dense_dropouts, self.dense, strict=True):
            x = torch.relu(dense(dropout(x)))
        return self.head(x).unflatten(-1, self.shape)


class LSTMDense(nn.Module):
    """Twin of recurrent.LSTMDense."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        width = settings.width
        self.shape = task.horizon, len(task.targets)
        self.encoder = layers(nn.LSTM, len(task.features), settings)
        self.dense = nn.ModuleList([nn.Linear(width, width // 2), nn.Linear(width // 2, width // 4)])
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(width // 4, task.horizon * len(task.targets))

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        x = self.encoder(x)[0][:, -1]
        for dense in self.dense:
            x = self.dropout(torch.relu(dense(x)))
        return self.head(x).unflatten(-1, self.shape)


class Transformer(nn.Module):
    """Twin of transformer.Transformer."""

    places: Tensor
    mask: Tensor

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        width = settings.width
        shape = (width, settings.heads, SPREAD * width, settings.dropout, "gelu")
        self.horizon = task.horizon
        self.features = nn.Linear(len(task.features), width)
        self.targets = nn.Linear(len(task.targets), width)
        blocks = range(settings.layers)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(*shape, batch_first=True) for _ in blocks)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(*shape, batch_first=True) for _ in blocks)
        self.head = nn.Linear(width, len(task.targets))
        self.register_buffer("places", waves(max(task.context, task.horizon), width), persistent=False)
        mask = nn.Transformer.generate_square_subsequent_mask(task.horizon)
        self.register_buffer("mask", mask, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # the kit's networks have none there

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        memory = self.features(x) + self.places[: x.shape[1]]
        for block in self.encoder:
            memory = block(memory)
        rows = last[:, None]  # (B, N, K), a row more at every step
        if all(forced):
            return self._write(torch.cat([rows, truth[:, :-1]], 1), memory)
        steps = []
        for h in range(self.horizon):
            steps.append(self._write(rows, memory)[:, -1])
            rows = torch.cat([rows, (truth[:, h] if forced[h] else steps[-1])[:, None]], 1)
        return torch.stack(steps, 1)

    def _write(self, rows: Tensor, memory: Tensor) -> Tensor:
        n = rows.shape[1]
        y = self.targets(rows) + self.places[:n]
        for block in self.decoder:
            y = block(y, memory, tgt_mask=self.mask[:n, :n], tgt_is_causal=True)
        return self.head(y)


class NLinear(nn.Module):
    """Twin of linear.NLinear."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        self.map = nn.Linear(task.context, task.horizon)

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        return self.map((x - x[:, -1:]).transpose(1, 2)).transpose(1, 2)


class DLinear(nn.Module):
    """Twin of linear.DLinear."""

    def __init__(self, task: Task, settings: Model):
        super().__init__()
        self.trend = nn.Linear(task.context, task.horizon)
        self.rest = nn.Linear(task.context, task.horizon)

    def forward(self, x: Tensor, last: Tensor, truth: Tensor, forced: Forced) -> Tensor:
        x = x.transpose(1, 2)  # (B, C, L)
        trend = F.avg_pool1d(F.pad(x, (KERNEL // 2, KERNEL // 2), "replicate"), KERNEL, 1)
        return (self.trend(trend) + self.rest(x - trend)).transpose(1, 2)


TWINS: dict[str, Callable[[Task, Model], nn.Module]] = {
    "gru": GRUSeq2Seq,
    "gru_dense": GRUDense,
    "lstm": LSTMSeq2Seq,
    "bilstm": BiLSTMSeq2Seq,
    "bilstm_dense": BiLSTMDense,
    "lstm_dense": LSTMDense,
    "transformer": Transformer,
    "nlinear": NLinear,
    "dlinear": DLinear,
}
# Where a part of torch.nn has another name than ours.
NAMES = (
    (r"^(encoder\.\d+)\.self_attn", r"\1.attention"),
    (r"^(decoder\.\d+)\.self_attn", r"\1.own"),
    (r"^(decoder\.\d+)\.multihead_attn", r"\1.cross"),
    (r"^((?:en|de)coder\.\d+)\.linear1", r"\1.feed_forward.wide"),
    (r"^((?:en|de)coder\.\d+)\.linear2", r"\1.feed_forward.narrow"),
    (r"^((?:en|de)coder\.\d+)\.norm1", r"\1.norms.0"),
    (r"^((?:en|de)coder\.\d+)\.norm2", r"\1.norms.1"),
    (r"^((?:en|de)coder\.\d+)\.norm3", r"\1.norms.2"),
    (r"\.out_proj$", ".out"),
)


def drop_channels(x: Tensor, rate: float) -> Tensor:
    """Drop a channel of a window (B, L, C) as a whole."""
    return x * F.dropout(torch.ones_like(x[:, :1]), rate) if rate else x


def make_twin(experiment: Experiment, stack: Stack) -> nn.Module:
    """Build the twin of the first model of a stack, with its best weights so far, on the host."""
    net = TWINS[experiment.model.name](experiment.task, experiment.model).to(stack.weights.dtype)
    load(net, stack.export(0))
    return net


@torch.no_grad()
def load(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a twin the tensors of one model of a stack: ours are (in, out), with biases (1, out)."""
    left = dict(tensors)

    def linear(place: str) -> tuple[Tensor, Tensor]:
        return left.pop(f"{place}.weight").T, left.pop(f"{place}.bias")[0]

    for own_name, module in net.named_modules():
        name = own_name
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        match module:
            case nn.LayerNorm():
                module.weight.copy_(left.pop(f"{name}.weight")[0])
                module.bias.copy_(left.pop(f"{name}.bias")[0])
            case nn.MultiheadAttention():
                weights, biases = zip(*(linear(f"{name}.{part}") for part in ("query", "key", "value")), strict=True)
                module.in_proj_weight.copy_(torch.cat(weights))
                module.in_proj_bias.copy_(torch.cat(biases))
            case nn.Linear(bias=None):
                module.weight.copy_(left.pop(name).T)
            case nn.Linear():
                weight, bias = linear(name)
                module.weight.copy_(weight)
                module.bias.copy_(bias)
            case nn.RNNBase():
                ways = {".ahead": "", ".back": "_reverse"} if module.bidirectional else {"": ""}
                for way, suffix in ways.items():
                    for layer in range(module.num_layers):
                        for ours, theirs in (("input", "ih"), ("hidden", "hh")):
                            weight, bias = linear(f"{name}{way}.{ours}.{layer}")
                            getattr(module, f"weight_{theirs}_l{layer}{suffix}").copy_(weight)
                            getattr(module, f"bias_{theirs}_l{layer}{suffix}").copy_(bias)
    if left:
        raise KeyError(f"the twin has no place for {', '.join(sorted(left))}")
