"""The one training loop: a stack of models over their windows, epoch by epoch, each with its own fate.

Nothing is copied to or from the device, and nothing waits for it, inside an epoch.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cpbkit.config import own
from cpbkit.config.experiment import Experiment, Task, Training, derive_seed, series_of
from cpbkit.errors import NO_MEMORY, CpbkitError
from cpbkit.hardware import memory
from cpbkit.models import zero_shot, zoo
from cpbkit.training.cuda_graph import capture
from cpbkit.training.not_finite import find_not_finite
from cpbkit.training.precision import precision
from cpbkit.training.stack import Stack
from cpbkit.windows.series import Series
from cpbkit.windows.splits import Splits, folds, split
from cpbkit.windows.windows import Windows

LOSS_SCALE = 1024.0  # float16 only: keeps small gradients above its smallest number
EVALUATION_WINDOWS = 4096  # windows a batch in validation and forecasts, over all models
CAPTURE_ERROR = 0.01  # of the gradients, between the captured step and the step itself
# Of the weights' move. Larger, for the first step of Adam is the sign of a gradient, however small that is.
CAPTURE_DRIFT = 0.2
PERTURBED = 0.02  # spread of what is added to all weights before they are held against each other
COMPACT_AT = 0.75  # share of live models below which a captured stack is rebuilt
POOLED = "all series"  # name of the row of one model for all of them
CURVES = ("train", "validation", "learning_rate", "gradient_norm", "clipped", "skipped")


@dataclass(frozen=True)
class Finished:
    """One model's end."""

    name: str
    status: str  # done | sick
    reason: str  # why it is sick, else why it stopped
    epochs: int
    best_epoch: int  # 1 is the first
    curve: dict[str, list[float]]
    weights: dict[str, Tensor]  # best ones, on the host
    training: Training  # its settings; of a search those that validation chose
    tried: tuple[dict[str, float | None], ...] = ()  # of a search: each trial's settings and best validation loss


@dataclass
class Fit:
    """Where a training stands. Everything a resume needs is here and in the stack."""

    stack: Stack
    epoch: int = 0  # epochs that are complete
    step: int = 0  # steps of the running epoch that are complete
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # of each row whose series is not through
    ended: dict[str, tuple[str, str, int]] = field(default_factory=dict)  # such rows that are: status, reason, epochs
    finished: list[Finished] = field(default_factory=list)  # of the last completed epoch
    hurry: str = ""  # set it, and every model leaves after the running step for this reason
    leaving: Mapping[str, str] = field(default_factory=dict)  # series that leave after the running epoch, and why
    mode: str = ""  # how a step runs: CUDA graph, or eager and why

    def __post_init__(self):
        if "validation_best" in self.stack.table:
            return
        device = self.stack.weights.device
        for name, start in START.items():
            self.stack.table[name] = torch.full((len(self.stack),), start, device=device, dtype=torch.float64)
        self.curves = {name: {curve: [] for curve in CURVES} for name in self.stack.names}


SUMS = ("loss_sum", "norm_sum", "clipped_sum", "skipped_sum")  # over the running epoch
# A model's own numbers through training, each a tensor over the stack, and how they start.
START = {
    "alive": 1.0,
    "validation_best": math.inf,
    "best_epoch": 0.0,
    "stale": 0.0,  # epochs since the best
    "plateau_best": math.inf,  # the best loss that the plateau schedule has counted
    "waited": 0.0,  # epochs since the plateau schedule last moved or improved
    **dict.fromkeys(SUMS, 0.0),
    "bad_step": -1.0,  # first step of the epoch whose loss or gradient was not finite
}


def assemble(
    experiment: Experiment,
    series: Sequence[Series],
    device: str | torch.device,
    splits: Sequence[Splits] | None = None,
) -> tuple[Windows, Stack]:
    """Put the windows of the series and an untrained stack of their models on a device.

    splits: of each series, where they are not those of the task. Of several folds each series is as many pieces,
    and the one row of a pooled training has the windows of all.
    Weights and windows are float32, or float64 where the precision is; the half precisions only compute in 16 bits.
    """
    task, training = experiment.task, experiment.training
    dtype = torch.float64 if training.precision == "float64" else torch.float32
    if training.folds > 1:
        parts = folds(task, training.folds)
        cuts = [(fold, fold.cut(one)) for one in series for fold in parts]
        splits = [split(piece, fold.task) for fold, piece in cuts]
        pieces = [piece for one in series for piece in training.pieces(one.name)]
        series = [replace(piece, name=name) for name, (_, piece) in zip(pieces, cuts, strict=True)]
    windows = Windows(series, task, torch.device(device), dtype, splits)
    if experiment.pretrained:
        zero_shot.check(windows)
    names = windows.names
    if training.pooled:
        names = training.pieces(POOLED)
        for i, name in enumerate(names):
            windows.pool(name, range(i, len(windows), len(names)))
    return windows, Stack(lambda m: zoo.build(m, task, experiment.model), names, training, windows.device, dtype)


def find_series(stack: Stack, windows: Windows) -> list[int]:
    """Return the place of each row's series among the windows' series: (M,)."""
    place = {name: m for m, name in enumerate(windows.names)}
    return [place[stack.training.of_row(row)[0]] for row in stack.names]


def loss_per_model(forecast: Tensor, truth: Tensor, weights: Tensor, loss: str | Tensor | Callable = "mse") -> Tensor:
    """Return each model's loss of each window: (M, B, H, K) twice -> (M, B).

    weights (K,): of each target, but for an own loss. loss: mse, mae, an own function (forecast, truth) -> (M, B), or
    quantiles (Q,) of a forecast (M, B, H, K, Q): twice the pinball loss, which at 0.5 is the absolute error.
    Errors: CpbkitError for a forecast, or an own loss, of another shape.
    """
    if isinstance(loss, Tensor):
        every = forecast if forecast.dim() > truth.dim() else forecast[..., None]  # a number stands for all quantiles
        error = truth[..., None] - every.to(truth.dtype)
        return 2 * torch.maximum(loss * error, (loss - 1) * error).mean((2, 4)) @ weights
    if forecast.shape != truth.shape:
        raise CpbkitError(
            f"a forecast must have the shape of the truth (models, batch, horizon, targets) = {tuple(truth.shape)}; "
            f"got {tuple(forecast.shape)}. Change the network's last layer"
        )
    forecast = forecast.to(truth.dtype)
    if callable(loss):
        found = loss(forecast, truth)
        if found.shape != truth.shape[:2]:
            raise CpbkitError(
                f"a loss must give one number for each window, (models, batch) = {tuple(truth.shape[:2])}; got "
                f"{tuple(found.shape)}. Take the mean over the last two axes alone"
            )
        return found
    error = forecast - truth
    return (error.square() if loss == "mse" else error.abs()).mean(2) @ weights


def fit(state: Fit, windows: Windows, training: Training, steps: int) -> Generator[Fit, None, None]:
    """Train until every model has left, yielding the state after each step and after the validation of each epoch.

    After that `state.step` is 0 and `state.finished` holds the models that left in it. The caller may stop
    at any yield, save the state, and go on from it later: the end is the same to the bit on the same device.
    """
    stack, task = state.stack, windows.task
    # A captured step reads the tensors it was captured with, so these keep their place while the models are the same,
    # and each epoch is copied into them.
    order: Tensor  # (M, S, B) origins of the windows of each step of the epoch
    forced: Tensor  # (S, H) whether a decoder step sees the truth
    run: Any = None  # one step: the graph, or the step itself
    now: Tensor | None = None  # the weights that `run` was made for; before the first epoch none of these are there
    i = torch.zeros(1, dtype=torch.long, device=windows.device)  # the running step, counted on the device

    def step() -> None:
        rows = order.index_select(1, i)[:, 0]
        x, last, y = windows.gather(rows)
        teacher = None
        if training.teacher_forcing:
            teacher = y, None if training.teacher_forcing == 1 else forced.index_select(0, i)[0]
        with autocast:
            forecast = stack.net(x, last, teacher)
        losses = loss_per_model(forecast, y, windows.target_weights, windows.loss)  # (M, B)
        if windows.weights is not None:
            losses = losses * windows.weights[rows]
        _move(stack, training, losses.mean(1), i)
        i.add_(1)

    def solve() -> None:
        net: Any = stack.net  # a module, which has it
        net.solve(*(_whole(windows, part, members) for part in ("train", "validation")))
        stack.table["loss_sum"] += evaluate(stack.net, windows, "train", members)

    with precision(training, windows.device) as autocast, memory.kept(windows.device):
        while len(stack):
            members = find_series(stack, windows)
            fresh = windows.order(members, training.seed, state.epoch, steps * training.batch)
            fresh = fresh.unflatten(1, (steps, training.batch))  # (M, S, B)
            draws = draw_forcing(training, state.epoch, steps, task.horizon).to(windows.device)
            if now is not stack.weights:  # models have left: the step has other tensors now
                run = None  # the last graph gives its memory back before the next one takes its own
                order, forced, now = fresh, draws, stack.weights
                i.zero_()
                solved = hasattr(stack.net, "solve")
                run, state.mode = (solve, "closed form") if solved else captured(step, stack, i)
            order.copy_(fresh)
            forced.copy_(draws)
            i.fill_(state.step)
            if state.step == 0:
                # Masks depend on the epoch alone, so a resume at any epoch draws what was drawn before; inside an epoch
                # the checkpoint brings the generator's state along.
                torch.manual_seed(derive_seed("dropout", training.seed, state.epoch))
                _set_rates(stack, training, state.epoch)
            stack.net.train()
            state.finished = []
            while state.step < steps and not (state.hurry and state.step):
                run()
                state.step += 1
                yield state
            with autocast:
                validation = evaluate(stack.net, windows, "validation", members)
                explain = functools.partial(_explain, stack, windows, order, members)
                _close_epoch(state, training, validation, explain)
            yield state


def _batches(windows: Windows, part: str, members: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through a whole split as `Windows.batches` does, in batches that suit an evaluation."""
    return windows.batches(part, members, max(1, EVALUATION_WINDOWS // len(members)))


def _whole(windows: Windows, part: str, members: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield a whole split: x (M, B, L, C), y (M, B, H, K), weight (M, B), 0 where a shorter series is padded."""
    for rows, weight in _batches(windows, part, members):
        x, _, y = windows.gather(rows)
        yield x, y, weight


def captured(step: Callable[[], None], stack: Stack, i: Tensor) -> tuple[Callable[[], None], str]:
    """Return the step as one CUDA graph that replays without the host, or as it is, and why.

    A graph is taken only when it gives the gradients and the weights that the step gives, from weights that are not
    those of the start: a head that starts at zero has no gradient for what is below it. i: the step's own count, which
    must stay inside the epoch while it warms up.
    """
    if not stack.weights.is_cuda:
        return step, "eager: no GPU"
    if not stack.parameters:
        return step, "eager: nothing is trained"
    if not getattr(stack.net, "stacked", True):
        return step, "eager: one model after another, each from the same random state, which no graph can put back"
    return _captured(step, stack, i)


def _captured(step: Callable[[], None], stack: Stack, i: Tensor) -> tuple[Callable[[], None], str]:
    stack.net.train()
    device, before = stack.weights.device, {name: tensor.clone() for name, tensor in stack.state().items()}
    random = torch.cuda.get_rng_state(device)

    def rewind() -> None:
        stack.rewind(before)
        torch.cuda.set_rng_state(random, device)
        i.zero_()

    def take(run: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Return the gradients of a step from perturbed weights, and how the weights moved."""
        rewind()
        stack.gradients.zero_()
        generator = torch.Generator(device).manual_seed(0)  # the run's own is left alone
        stack.weights.add_(torch.randn(stack.weights.shape, generator=generator, device=device), alpha=PERTURBED)
        begun = stack.weights.clone()
        run()
        return stack.gradients.clone(), stack.weights - begun

    def differs(got: Tensor, want: Tensor, share: float) -> bool:
        return not (got - want).norm() <= share * want.norm()  # a NaN differs

    try:
        run, mode = capture(step, device, rewind).replay, "CUDA graph"
        (want, moved), (got, drifted) = take(step), take(run)
        if differs(got, want, CAPTURE_ERROR):
            run, mode = step, "eager: replayed, the captured step had other gradients"
        elif differs(drifted, moved, CAPTURE_DRIFT):
            run, mode = step, "eager: replayed, the captured step moved the weights elsewhere"
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        run, mode = step, f"eager: the step could not be captured ({str(error).splitlines()[0]})"
    rewind()
    return run, mode


def try_loss(task: Task, device: torch.device) -> None:
    """Hold an own loss to what training asks of it. Errors: CpbkitError for one that cannot be trained with."""
    if not own.is_own(task.loss):
        return
    numbers = torch.Generator(device).manual_seed(0)
    forecast, truth = torch.randn(2, 2, 8, task.horizon, len(task.targets), generator=numbers, device=device)
    weights = torch.ones(len(task.targets), device=device)
    forecast.requires_grad_()
    wanted = "A loss is a function of (forecast, truth), tensors (models, batch, horizon, targets), to (models, batch)"
    with own.running(task.loss, wanted):
        loss = own.find(task.loss, "a loss")
        found = loss_per_model(forecast, truth, weights, loss)
        at_zero = loss_per_model(torch.zeros_like(truth), torch.zeros_like(truth), weights, loss)
        (gradient,) = torch.autograd.grad(found.sum(), forecast)
    if not all(tensor.isfinite().all() for tensor in (found, at_zero, gradient)):
        raise CpbkitError(f"{task.loss} must be finite for any forecast and truth, where both are 0 too; it is not")
    if not gradient.any():
        raise CpbkitError(f"{task.loss} has no gradient: it stays the same whatever is forecast, so nothing is learned")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Say whether torch means that memory is short; it has no one class for that on all devices and versions."""
    return any(words in str(error) for words in NO_MEMORY)


def draw_forcing(training: Training, epoch: int, steps: int, horizon: int) -> Tensor:
    """Draw whether each decoder step of each batch sees the truth: (S, H), the same for every model."""
    generator = torch.Generator().manual_seed(derive_seed("teacher", training.seed, epoch))
    draws = torch.rand(steps, 1 if training.forcing_draw == "batch" else horizon, generator=generator)
    return (draws < training.teacher_forcing).expand(-1, horizon).contiguous()


def _set_rates(stack: Stack, training: Training, epoch: int) -> None:
    """Write the epoch's learning rate of each model; a plateau's was written when the last epoch closed."""
    if training.schedule == "cosine":
        low, fallen = training.min_learning_rate, (1 + math.cos(math.pi * epoch / training.epochs)) / 2
        rates = [low + (high - low) * fallen for high in stack.settings("learning_rate")]
    elif training.schedule == "step":
        fallen = training.schedule_factor ** (epoch // training.schedule_epochs)
        rates = [rate * fallen for rate in stack.settings("learning_rate")]
    else:
        return
    table = stack.table["learning_rate"]
    table.copy_(torch.tensor(rates, dtype=table.dtype))


def _move(stack: Stack, training: Training, losses: Tensor, i: Tensor) -> None:
    """Move every model by its own loss (M,); a gradient that is not finite counts as zero, and as a skipped step."""
    gradients, table = stack.gradients, stack.table
    scale = LOSS_SCALE if training.precision == "float16" else 1.0
    stack.backward(losses.sum() * scale)
    if scale != 1:
        gradients.div_(scale)
    norms = gradients.norm(dim=1)  # (M,)
    finite = norms.isfinite()  # before the clamp, which would make an overflow an ordinary gradient
    if training.clip_value:
        gradients.clamp_(-training.clip_value, training.clip_value)
        norms = gradients.norm(dim=1)
    if training.clip_norm:
        gradients.mul_((stack.clip_norms / (norms + 1e-6)).clamp(max=1)[:, None])
        table["clipped_sum"] += norms > stack.clip_norms
    gradients.masked_fill_(~finite[:, None], 0)
    if scale == 1:
        stack.step()
    else:  # an overflow is part of float16: the row stands still, and its momentum does, as with a GradScaler
        own = (stack.weights, *stack.moments.values())
        before = [tensor.clone() for tensor in own]
        stack.step()
        for tensor, old in zip(own, before, strict=True):
            tensor.copy_(torch.where(finite if tensor.dim() == 1 else finite[:, None], tensor, old))
    table["bad_step"].copy_(torch.where((table["bad_step"] < 0) & ~(finite & losses.isfinite()), i, table["bad_step"]))
    table["loss_sum"] += losses.detach()
    table["norm_sum"] += torch.where(finite, norms, 0)
    table["skipped_sum"] += ~finite


def _explain(stack: Stack, windows: Windows, order: Tensor, members: list[int], row: int) -> str:
    """Name the first bad tensor of a sick model, at the step where it diverged or on its validation windows."""
    step = int(stack.table["bad_step"][row])
    batches = [order[:, step]] if step >= 0 else (rows for rows, _ in _batches(windows, "validation", members))
    found = (find_not_finite(stack.net, row, *windows.gather(rows)) for rows in batches)
    return next(filter(None, found), "only the loss or a gradient")


def _close_epoch(state: Fit, training: Training, validation: Tensor, explain: Callable[[int], str]) -> None:
    """Judge the epoch of every model on the device, look once from the host, and let go of those who are through."""
    stack, table = state.stack, state.stack.table
    steps, state.epoch, state.step = max(1, state.step), state.epoch + 1, 0
    rates = table["learning_rate"].clone()
    _judge_epoch(stack, training, validation, state.epoch)
    sums = [table[name] / steps for name in SUMS]
    seen = torch.stack([sums[0], validation, rates.double(), *sums[1:], table["alive"], table["stale"]], 1)
    for row, (name, (*numbers, alive, stale)) in enumerate(zip(stack.names, seen.tolist(), strict=True)):
        if not alive:
            continue
        for curve, number in zip(CURVES, numbers, strict=True):
            state.curves[name][curve].append(number)
        train, valid = numbers[:2]
        if not (math.isfinite(train) and math.isfinite(valid)):
            which = "training" if not math.isfinite(train) else "validation"
            reason = f"the {which} loss was not finite in epoch {state.epoch}; first bad: {explain(row)}"
            state.ended[name] = "sick", reason, state.epoch
        elif stale >= training.patience:
            state.ended[name] = "done", f"no better validation loss for {training.patience} epochs", state.epoch
        elif state.epoch >= training.epochs:
            state.ended[name] = "done", f"all {training.epochs} epochs", state.epoch
        elif state.hurry:
            state.ended[name] = "done", state.hurry, state.epoch
        elif (series := series_of(training.of_row(name)[0])) in state.leaving:
            state.ended[name] = "done", state.leaving[series], state.epoch
        if name in state.ended:
            table["alive"][row] = 0
    for series in dict.fromkeys(series_of(training.of_row(name)[0]) for name in stack.names):
        pieces = training.pieces(series)
        if all(row in state.ended for piece in pieces for row in training.rows(piece)):
            state.finished += [_finish(state, piece) for piece in pieces]
    for name in (*SUMS, "bad_step"):
        table[name].fill_(START[name])
    live = [row for row, name in enumerate(stack.names) if name in state.curves]
    if not live or len(live) < len(stack) * (COMPACT_AT if stack.weights.is_cuda else 1):
        stack.keep(live)


def _judge_epoch(stack: Stack, training: Training, validation: Tensor, epoch: int) -> None:
    """Keep the best weights of each model, count its epochs without better ones, and lower the rate of a plateau."""
    table = stack.table
    better = (validation < table["validation_best"]) & (table["alive"] > 0)
    table["validation_best"] = torch.where(better, validation, table["validation_best"])
    table["best"] = torch.where(better[:, None], stack.weights, table["best"])
    table["best_epoch"].masked_fill_(better, epoch)
    table["stale"] = torch.where(better, 0.0, table["stale"] + 1)
    if training.schedule == "plateau":
        lower_yet = validation < table["plateau_best"] - training.schedule_delta
        table["plateau_best"] = torch.where(lower_yet, validation, table["plateau_best"])
        table["waited"] = torch.where(lower_yet, 0.0, table["waited"] + 1)
        drop = table["waited"] > training.schedule_epochs
        lower = (table["learning_rate"] * training.schedule_factor).clamp(min=training.min_learning_rate)
        table["learning_rate"].copy_(torch.where(drop, lower, table["learning_rate"]))
        table["waited"].masked_fill_(drop, 0.0)


def _finish(state: Fit, series: str) -> Finished:
    """Take a series, or a piece of it, all of whose rows have ended, out of the training: of a search the best trial
    by validation.

    Trials and folds that ended early wait in the stack for the others, so that a checkpoint holds them too.
    """
    stack, training = state.stack, state.stack.training
    losses = dict(zip(stack.names, stack.table["validation_best"].tolist(), strict=True))
    rows = training.rows(series)
    best = min(rows, key=lambda row: (state.ended[row][0] != "done", losses[row]))
    tried = []
    for row in rows if training.search else ():
        settings = {name: getattr(training.of_row(row)[1], name) for name, _ in training.search}
        tried.append({**settings, "validation": losses[row] if state.ended[row][0] == "done" else None})
    status, reason, epochs = state.ended[best]
    at = stack.names.index(best)
    curves = {row: state.curves.pop(row) for row in rows}
    for row in rows:
        del state.ended[row]
    return Finished(
        series,
        status,
        reason,
        epochs,
        int(stack.table["best_epoch"][at]),
        curves[best],
        stack.export(at),
        training.of_row(best)[1],
        tuple(tried),
    )


@torch.no_grad()
def evaluate(net: nn.Module, windows: Windows, part: str, members: list[int]) -> Tensor:
    """Return each model's free-running mean loss over a split: (M,)."""
    net.eval()
    total = torch.zeros(len(members), device=windows.device, dtype=torch.float64)
    count = torch.zeros_like(total)
    for rows, mask in _batches(windows, part, members):
        x, last, y = windows.gather(rows)
        losses = loss_per_model(net(x, last), y, windows.target_weights, windows.loss)
        total += torch.where(mask > 0, losses, 0).sum(1)
        count += mask.sum(1)
    return total / count


@torch.no_grad()
def forecast(net: nn.Module, windows: Windows, part: str, members: list[int]) -> list[np.ndarray]:
    """Return each model's forecasts over a split, unscaled: (W, H, K) a model, or (W, H, K, Q) of quantiles."""
    net.eval()
    pieces = []
    for rows, _ in _batches(windows, part, members):
        x, last, _ = windows.gather(rows)
        pieces.append(net(x, last).double().cpu().numpy())
    whole = np.concatenate(pieces, axis=1)  # (M, W, H, K)
    axes = (-1, 1) if windows.task.quantiles else (-1,)
    return [
        rows[: len(windows.origins[part][m])] * windows.scalers[m].target_scale.reshape(axes)
        for m, rows in zip(members, whole, strict=True)
    ]


def median(forecast: np.ndarray, task: Task) -> np.ndarray:
    """Return the one number of each forecast: (..., K), of quantiles (..., K, Q) the middle one."""
    return forecast[..., task.quantiles.index(0.5)] if task.quantiles else forecast


def persistence_losses(windows: Windows) -> dict[str, dict[str, float]]:
    """Return the scaled loss of forecasting no change, by series, on train and validation."""
    shape = len(windows.names), 1, windows.task.horizon, len(windows.task.targets)
    return _constant_losses(windows, windows.levels.new_zeros(shape))


@torch.no_grad()
def mean_losses(windows: Windows) -> dict[str, dict[str, float]]:
    """Return the scaled loss of always forecasting the mean of the train targets, as `persistence_losses` does."""
    everyone = list(range(len(windows.names)))
    total = windows.levels.new_zeros(len(everyone), 1, windows.task.horizon, len(windows.task.targets))
    for rows, weight in _batches(windows, "train", everyone):
        total += (windows.gather(rows)[2] * weight[..., None, None]).sum(1, keepdim=True)
    counts = torch.tensor([len(windows.origins["train"][m]) for m in everyone], device=windows.device)
    return _constant_losses(windows, total / counts[:, None, None, None])


def _constant_losses(windows: Windows, value: Tensor) -> dict[str, dict[str, float]]:
    net, everyone = _Constant(value), list(range(len(windows.names)))
    losses = {part: evaluate(net, windows, part, everyone).tolist() for part in ("train", "validation")}
    return {name: {part: values[m] for part, values in losses.items()} for m, name in enumerate(windows.names)}


class _Constant(nn.Module):
    """The same forecast (M, 1, H, K) for every window."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        return self.value.expand(-1, last.shape[1], -1, -1)
