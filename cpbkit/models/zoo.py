"""The networks by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from cpbkit.config import own
from cpbkit.config.experiment import Model, Task
from cpbkit.errors import check_name
from cpbkit.models import custom, layers, linear, recurrent, transformer, zero_shot
from cpbkit.models.quantiles import Quantiles, widen

MODELS: dict[str, Callable[[int, Task, Model], nn.Module]] = {
    "gru": recurrent.GRUSeq2Seq,
    "gru_dense": recurrent.GRUDense,
    "lstm": recurrent.LSTMSeq2Seq,
    "forced_lstm": partial(recurrent.LSTMSeq2Seq, cell=layers.ForcedLSTM),
    "bilstm": recurrent.BiLSTMSeq2Seq,
    "bilstm_dense": recurrent.BiLSTMDense,
    "lstm_dense": recurrent.LSTMDense,
    "segrnn": recurrent.SegRNN,
    "transformer": transformer.Transformer,
    "nlinear": linear.NLinear,
    "dlinear": linear.DLinear,
    "ridge_ar": linear.RidgeAR,
    "chronos": zero_shot.Chronos,
}


def build(models: int, task: Task, settings: Model) -> nn.Module:
    """Build a network for M models: (M, B, L, C), last (M, B, K) -> (M, B, H, K), or (M, B, H, K, Q) for quantiles."""
    known = MODELS.get(settings.name)
    if task.quantiles and not getattr(known, "gives_quantiles", False):
        shares = getattr(known, "shares_channels", False)
        return Quantiles(task, lambda wide: build(models, wide, settings), shares)
    if own.is_own(settings.name):
        return custom.Own(models, partial(own.find(settings.name, "a network"), task, settings), settings.stacked)
    return MODELS[check_name("model", settings.name, MODELS)](models, task, settings)


@torch.no_grad()
def restore(task: Task, settings: Model, weights: dict[str, Tensor]) -> nn.Module:
    """Build one model with weights as `Stack.export` gives them: (1, B, L, C), last (1, B, K) -> (1, B, H, K)."""
    net = build(1, task, settings)
    for name, parameter in net.named_parameters():
        parameter.data = weights[name][None].clone()
    return net.eval()


def try_out(task: Task, settings: Model, models: int, batch: int, device: torch.device) -> tuple[Model, str]:
    """Decide for a network of your own whether it is stacked, and say why; for others change and say nothing.

    Errors: CpbkitError for a network that is not found or cannot be trained here.
    """
    if not own.is_own(settings.name):
        return settings, ""
    task = widen(task) if task.quantiles else task
    numbers = torch.Generator(device).manual_seed(0)
    x = torch.randn(models, batch, task.context, len(task.features), generator=numbers, device=device)
    make = partial(own.find(settings.name, "a network"), task, settings)
    wanted = "A network is made from (task, model), and maps (batch, context, features) to (batch, horizon, targets)"
    with own.running(settings.name, wanted):
        stacked, why = custom.try_out(make, x, task.horizon, len(task.targets))
    return replace(settings, stacked=stacked), why
