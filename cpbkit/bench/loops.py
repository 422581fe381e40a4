"""The loop that people run today, twice: as it circulates, and done well. One model at a time, step by step."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cpbkit.bench.twins import Forced, make_twin
from cpbkit.config.experiment import Experiment, Training
from cpbkit.hardware.device import wait
from cpbkit.training.loop import assemble, draw_forcing
from cpbkit.windows.series import Series
from cpbkit.windows.windows import Windows

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
ROUND = 200  # steps after which the batches come again


def loop_in_circulation(experiment: Experiment, series: Series, device: torch.device) -> Iterator[float]:
    """Train one model as cpbv2's scripts and guides do, for ever, and yield the loss of each step.

    Windows are built on the host and copied batch by batch, the device is waited for after the forward and the
    backward pass, and the loss is fetched at every step.
    """
    training = experiment.training
    windows, stack = assemble(experiment, [series], "cpu")
    pool = windows.origins["train"][0]
    inputs, lasts, truths = (tensor[0] for tensor in windows.gather(pool[None]))  # (W, L, C), (W, K), (W, H, K)
    net = make_twin(experiment, stack).to(device)
    weights = windows.target_weights.to(device)
    optimizer = OPTIMIZERS[training.optimizer](
        net.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay
    )
    net.train()
    for rows, forced in draw(windows, training, experiment.task.horizon):
        picks = torch.searchsorted(pool, rows)
        x, last, y = inputs[picks].to(device), lasts[picks].to(device), truths[picks].to(device)
        optimizer.zero_grad()
        forecast = net(x, last, y, forced)
        wait(device)
        loss = (forecast - y).square().mean((0, 1)) @ weights
        loss.backward()
        wait(device)
        clip(net, training)
        optimizer.step()
        yield loss.item()


def loop_done_well(experiment: Experiment, series: Series, device: torch.device) -> Iterator[Tensor]:
    """Train the same model with its data on the device, no waiting and a fused optimiser; yield each step's loss."""
    training = experiment.training
    windows, stack = assemble(experiment, [series], device)
    net = make_twin(experiment, stack).to(device)
    weights = windows.target_weights.to(device)
    optimizer = OPTIMIZERS[training.optimizer](
        net.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay, fused=True
    )
    net.train()
    for rows, forced in draw(windows, training, experiment.task.horizon):
        x, last, y = windows.gather(rows)
        loss = (net(x, last, y, forced) - y).square().mean((0, 1)) @ weights
        optimizer.zero_grad()
        loss.backward()
        clip(net, training)
        optimizer.step()
        yield loss.detach()


def draw(windows: Windows, training: Training, horizon: int) -> Iterator[tuple[Tensor, Forced]]:
    """Yield for ever the origins (B,) of the engine's first epoch, and which decoder steps are forced."""
    rows = windows.order([0], training.seed, 0, ROUND * training.batch)[0]
    draws = draw_forcing(training, 0, ROUND, horizon).tolist()
    while True:
        yield from zip(rows.split(training.batch), draws, strict=True)


def clip(net: torch.nn.Module, training: Training) -> None:
    """Clip gradients as the training says: each entry, then the norm."""
    if training.clip_value:
        torch.nn.utils.clip_grad_value_(net.parameters(), training.clip_value)
    if training.clip_norm:
        torch.nn.utils.clip_grad_norm_(net.parameters(), training.clip_norm)
