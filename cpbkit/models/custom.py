"""Anybody's own network, an nn.Module of shape (B, L, C) -> (B, H, K), as M models of a stack."""

import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cpbkit.errors import CpbkitError
from cpbkit.models.layers import Teacher

Make = Callable[[], nn.Module]
PAYS = 0.95  # share of the time one by one below which stacking is worth it
TRIALS = 5  # timed steps of each way, after a first one


class Own(nn.Module):
    """M networks of one kind whose parameters carry the model axis: (M, B, L, C) -> (M, B, H, K).

    stacked: computed together by torch.func, else one by one. Both give a model the dropout masks it has alone.
    Errors: CpbkitError for tied weights, and where no weights are.
    """

    def __init__(self, models: int, make: Make, stacked: bool):
        super().__init__()
        singles = [make() for _ in range(models)]
        self.stacked = stacked
        self.net = copy.deepcopy(singles[0])
        names = [name for name, _ in self.net.named_parameters()]
        if not names:
            raise CpbkitError(f"a network to train needs weights; {type(self.net).__name__} has none")
        if len(names) < len(list(self.net.named_parameters(remove_duplicate=False))):
            raise CpbkitError(
                f"each weight must have one place; {type(self.net).__name__} ties some. Give each its own"
            )
        for name in names:
            owner, _, leaf = name.rpartition(".")
            rows = torch.stack([single.get_parameter(name).detach() for single in singles])
            setattr(self.net.get_submodule(owner), leaf, nn.Parameter(rows))

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        weights: dict[str, Tensor] = dict(self.net.named_parameters())
        if self.stacked:
            return vmap(self._one, randomness="same")(weights, x)
        numbers = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        state = numbers.get_state() if self.training else None
        forecasts = []
        for m, window in enumerate(x):
            if state is not None:
                numbers.set_state(state)
            forecasts.append(self._one({name: rows[m] for name, rows in weights.items()}, window))
        return torch.stack(forecasts)

    def _one(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.net, weights, (x,))


def try_out(make: Make, x: Tensor, horizon: int, targets: int) -> tuple[bool, str]:
    """Find out on a batch x (M, B, L, C) whether stacking is possible and pays; return that and why, in a sentence.

    Errors: CpbkitError for a network that cannot be trained here at all.
    """
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        apart = Own(len(x), make, stacked=False).to(x.device, x.dtype)
        buffers = {name: buffer.clone() for name, buffer in apart.net.named_buffers()}
        want = _check(apart, x, horizon, targets)
        if not all(tensor.isfinite().all() for tensor in want):
            name = type(apart.net).__name__
            raise CpbkitError(
                f"forecasts and gradients of a network must be finite; those of {name} are not for N(0, 1)"
            )
        for name, buffer in apart.net.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise CpbkitError(
                    f"what a network learns must be in its weights; {type(apart.net).__name__} also changes its "
                    f"buffer {name} in training. Take LayerNorm instead of BatchNorm, or track_running_stats=False"
                )
        together = copy.deepcopy(apart)
        together.stacked = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*", category=UserWarning)
            try:
                got = _check(together, x, horizon, targets)
            except RuntimeError as error:
                return False, f"one by one: torch.func cannot stack it ({str(error).splitlines()[0][:120]})"
            for one, other in zip(want, got, strict=True):
                if not torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max())):
                    return False, "one by one: stacked by torch.func it computes something else"
            fast, slow = (_milliseconds(net, x) for net in (together, apart))
    if fast > PAYS * slow:
        return False, f"one by one: {slow:.2f} ms a step of {len(x)} models, {fast:.2f} ms when stacked by torch.func"
    return True, f"stacked by torch.func: {fast:.2f} ms a step of {len(x)} models instead of {slow:.2f} ms"


def _check(net: Own, x: Tensor, horizon: int, targets: int) -> list[Tensor]:
    """Return the forecast and the gradients in evaluation mode, after a step in training mode."""
    _step(net.train(), x)
    forecast, gradients = _step(net.eval(), x)
    shape = (*x.shape[:2], horizon, targets)
    if forecast.shape != shape:
        raise CpbkitError(
            f"a network of your own maps (batch, context, features) = {tuple(x.shape[1:])} to (batch, horizon, "
            f"targets) = {shape[1:]}; got {tuple(forecast.shape[1:])}. Change its last layer"
        )
    return [forecast.detach(), *gradients]


def _step(net: Own, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    forecast = net(x, x[:, :, -1])
    return forecast, torch.autograd.grad(forecast.square().mean(), list(net.parameters()), materialize_grads=True)


def _milliseconds(net: Own, x: Tensor) -> float:
    net.train()
    times = []
    for _ in range(TRIALS + 1):
        begun = time.perf_counter()
        _step(net, x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[1:])
