"""What makes a training wrong rather than slow, looked at beside some of its steps: weights that cannot learn."""

import math
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

LEAST = 8  # looks, of which most must agree
MOST_ASKED = 64  # values of a loss that are read: each read waits for a GPU
GONE = 1e-3  # of the highest learning rate: below, nothing is learned any more
OPTIMIZER = r"\b(\w*Adam\w*|SGD|RMSprop|Adagrad|Adadelta|LBFGS|Adafactor|Muon)\("
WITHOUT = 0.1  # share of the weights that may go without a gradient, such as a head that is not used


# What an operator's arguments give away: reason -> (what was seen, cure, pattern of the line it comes from).
OF_OPERATORS = {
    "BROADCAST": (
        "The loss compares every forecast of the batch with every target: shapes (n, 1) and (n,) make (n, n)",
        "forecast.squeeze(1), or target.unsqueeze(1)", ""),
    "PROBABILITIES": (
        "The loss takes logits, and gets probabilities: a softmax or sigmoid is applied twice, and gradients fade",
        "take the softmax (sigmoid) out: CrossEntropyLoss (BCEWithLogitsLoss) applies its own",
        r"(?i)softmax\(|sigmoid\("),
    "NO_LOGARITHMS": (
        "NLLLoss takes logarithms of probabilities, which are never above 0, and gets other numbers",
        "log_softmax(x, dim=1) in place of softmax or of nothing; or CrossEntropyLoss on the logits as they are", ""),
    "ONE_CLASS": (
        "A cross entropy over one class is always 0: nothing is learned",
        "nn.BCEWithLogitsLoss for one output, or as many outputs as there are classes", ""),
}  # fmt: skip


class Unsound(NamedTuple):
    """Something that is wrong with a training."""

    reason: str
    text: str  # what was seen
    cure: str
    pattern: str  # of the person's line that it comes from; "" for the pass backward


class Soundness:
    """Notes what is seen at some steps and passes backward of one thread."""

    def __init__(self):
        self._optimizers: weakref.WeakSet = weakref.WeakSet()
        self._made = self._steps = 0  # optimisers, beyond the first, of the same weights; looks at a step
        self._losses = self._lost = 0  # read; not finite at the end of them
        self._starts = self._kept = 0  # first passes backward after a step; those with gradients of the step before
        self._rate = self._highest = 0.0
        self._rates_gone = 0  # looks
        self._of: torch.optim.Optimizer | None = None
        self._models: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # whether it is trained
        self._evaluated = self._trained = 0  # steps of a model that was in eval mode at their end, and in train mode
        self._empty: dict[int, int] | None = None  # weights without a gradient, in every look so far -> their numbers
        self._emptied = self._numbers = 0  # looks at them; numbers of all weights

    def note_optimizer(self, optimizer: torch.optim.Optimizer, main: torch.optim.Optimizer | None) -> bool:
        """Say whether an optimiser is a new one for the weights of the one whose steps count."""
        if optimizer in self._optimizers:
            return False
        self._optimizers.add(optimizer)
        remade = main is not None and set(map(id, weights_of(optimizer))) == set(map(id, weights_of(main)))
        self._made += remade and optimizer is not main
        return remade

    def note_step(self, optimizer: torch.optim.Optimizer, seen: Iterable[nn.Module | None]) -> None:
        """seen: the modules that were called since the step before; None is one that is gone."""
        self._steps += 1
        self._rate = max((float(group["lr"]) for group in optimizer.param_groups), default=0.0)
        self._highest = max(self._highest, self._rate)
        self._rates_gone = self._rates_gone + 1 if self._rate < GONE * self._highest else 0
        if optimizer is not self._of:  # another training, such as that of a student after its teacher's
            self._of, self._models = optimizer, weakref.WeakKeyDictionary()
        modes = {model.training for model in seen if model is not None and self._is_trained(model, optimizer)}
        self._evaluated += modes == {False}
        self._trained += modes == {True}

    def _is_trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether a model holds weights of the optimiser; to look through a large one takes a while."""
        if model not in self._models:
            weights = set(map(id, weights_of(optimizer)))
            self._models[model] = not weights.isdisjoint(map(id, model.parameters()))
        return self._models[model]

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it after a step of the optimiser."""
        weights = [weight for weight in weights_of(optimizer) if weight.requires_grad]
        empty = {id(weight): weight.numel() for weight in weights if weight.grad is None}
        self._empty = empty if self._empty is None else {k: n for k, n in self._empty.items() if k in empty}
        self._emptied += 1
        self._numbers = sum(weight.numel() for weight in weights)

    def note_loss(self, loss: object) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and self._losses < MOST_ASKED:
            self._losses += 1
            self._lost = 0 if math.isfinite(loss.item()) else self._lost + 1

    def note_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it before the first pass backward after a step: gradients are to be zero or none."""
        if self._starts < MOST_ASKED:
            self._starts += 1
            gradients = [weight.grad for weight in weights_of(optimizer) if weight.grad is not None]
            self._kept += bool(gradients) and bool(min(gradients, key=torch.Tensor.numel).count_nonzero())

    def find(self, wrong: Collection[str]) -> Iterator[Unsound]:
        """Yield what is wrong, the worst first. wrong: reasons of OF_OPERATORS."""
        if self._lost >= LEAST:
            text = "The loss is nan or infinite, and the training goes on: it learns nothing"
            cure = "look for nan, inf, log(0) and x / 0 in the inputs (torch.isfinite(x).all()), then for too high a "
            cure += "learning rate; and stop where math.isfinite(loss.item()) is false"
            yield Unsound("LOSS_NOT_FINITE", text, cure, "")
        for reason in OF_OPERATORS:
            if reason in wrong:
                yield Unsound(reason, *OF_OPERATORS[reason])
        if self._made >= LEAST and self._made > 0.5 * self._steps:
            text = "A new optimiser is made for every step: it begins without its moments each time"
            cure = "make it once, before the loop; a learning rate is changed by a scheduler"
            yield Unsound("OPTIMIZER_REMADE", text, cure, OPTIMIZER)
        if self._starts >= LEAST and self._kept > 0.9 * self._starts:
            text = "Gradients are added to those of the steps before, and never set to zero"
            yield Unsound("NOT_ZEROED", text, "optimizer.zero_grad() once a step, before loss.backward()", "")
        if self._emptied >= 3 and self._empty and sum(self._empty.values()) > WITHOUT * self._numbers:
            share = sum(self._empty.values()) / self._numbers
            text = f"{share:.0%} of the optimiser's weights never get a gradient: the loss does not reach them"
            cure = "take out what cuts the graph on the way: .detach(), .numpy(), .data, torch.tensor(x), no_grad()"
            cutting = r"\.detach\(|\.numpy\(|\.data\b|torch\.tensor\(|no_grad"
            yield Unsound("NO_GRADIENT", text, cure, cutting if share < 1 else "")  # of all: the loss itself is cut off
        if self._evaluated >= LEAST and self._evaluated > 0.4 * (self._evaluated + self._trained):
            text = "The model is trained in eval mode: dropout is off, and batch norm learns no statistics"
            cure = "model.train() at the start of every epoch, after each validation"
            yield Unsound("EVAL_MODE", text, cure, r"\.eval\(\)")
        if self._rates_gone >= LEAST and self._rates_gone > 0.3 * self._steps:
            text = f"The learning rate has fallen from {self._highest:.2g} to {self._rate:.2g}: nothing more is learned"
            cure = "step the scheduler once an epoch, or count its steps in batches"
            yield Unsound("RATE_GONE", text, cure, r"sched\w*\.step\(")


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimiser moves."""
    return (weight for group in optimizer.param_groups for weight in group["params"])
