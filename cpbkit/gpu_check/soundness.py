"""What makes a training wrong rather than slow, looked at beside some of its steps: weights that cannot learn."""

import math
import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

LEAST = 8  # looks, of which most must agree
MOST_ASKED = 64  # values of a loss that are read: each read waits for a GPU
PASSES = 64  # backward, after which an optimiser is taken for one that steps no more
GONE = 1e-3  # of the highest learning rate: below, nothing is learned any more
OPTIMIZER = r"\b(\w*Adam\w*|SGD|RMSprop|Adagrad|Adadelta|LBFGS|Adafactor|Muon)\("
SHRINKING = 0.01  # of a weight, that decay takes in one step: all of it within some hundred steps
MOVED = 1e-6  # of a weight's size in all steps that were seen: less is nothing, but for rounding
LOW = 1e-6  # learning rate, at which weights hardly move
NODES = 16  # of a loss's graph, among which a cross entropy is looked for
MOST_LABELS = 100_000  # of a batch
MOST_KEPT = 1_000_000  # numbers of the weight that is kept to compare with
STEPPING = r"Adam|RMSprop|Lion"  # optimisers that move each weight by about the rate
ALIKE = 1e-3  # of a weight: by so much rounding may tell its outputs apart
MEASURES = "Loss|CrossEntropy"  # graph nodes of distances
WRITTEN = re.compile(r"(Mean|Sum)\w* (Abs|Pow)\w* Sub")  # nodes of one that is written out
NONE_LEFT = 0.9  # share of the weights whose gradients are 0
FEW, MANY_TIMES = 100, 100  # numbers that learn, such as weights of losses; frozen ones for each of them
WITHOUT = 0.1  # share of the weights that may go without a gradient, such as a head that is not used


TENSORS = r"from_numpy\(|torch\.(as_)?tensor\(|TensorDataset\("  # lines that make them of other numbers
OF_TARGETS = rf"(?i)\b(y|target|truth|label)\w* *=.*({TENSORS})"  # and those of targets
QUOTIENTS = r"/ *\(?[\w.]*(std|sd|sigma|norm)\b|torch\.(log|sqrt)\("  # lines that make nan or inf of 0
SCALES = ("INPUTS_NOT_SCALED", "TARGETS_NOT_SCALED")  # wrong only where nothing is learned


# What operators, loaders and modules give away: reason -> (what was seen, cure, pattern of the line it comes from).
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
    "MADE_ANEW": (
        "A layer is made anew at every step: its weights are random each time, and none of them learns",
        "make it once, in __init__ of the model (before the optimiser), and call it in forward", ""),
    "REPLACED": (
        "A layer that runs is not among the optimiser's weights, which hold one that it replaced: it never moves",
        "make the optimiser after the last change to the model: torch.optim.Adam(model.parameters())", OPTIMIZER),
    "UNREGISTERED": (
        "Layers lie in a plain list or dictionary: they are not in model.parameters(), and no optimiser trains them",
        "nn.ModuleList([...]) or nn.ModuleDict({...}), before the optimiser is made",
        r"self\.\w+ *= *[\[({].*(\bfor\b|nn\.)|\.append\(\w*nn\.|self\.\w+\.append\([A-Z]"),
    "UNPAIRED": (
        "Two loaders that shuffle apart from each other are gone through together, and the loss does not fall: "
        "inputs meet the targets of other samples",
        "one Dataset that gives both of a sample, and one DataLoader for it", ""),
    "INPUTS_NOT_SCALED": (
        "A layer reads numbers in the hundreds and more, and the loss does not fall: its outputs saturate or explode",
        "standardise each column, (x - mean) / std of the rows to train on; pixels as x / 255", TENSORS),
    "TARGETS_NOT_SCALED": (
        "The targets are in the hundreds and more, forecasts begin near 0, and the loss does not fall: no step is as "
        "large",
        "train on (y - mean) / std or log(y), and scale the forecasts back", OF_TARGETS),
    "ONE_CLASS": (
        "A cross entropy over one class is always 0: nothing is learned",
        "nn.BCEWithLogitsLoss for one output, or as many outputs as there are classes", ""),
    "ONE_OUTPUT": (
        "A softmax over one output is 1 whatever the weights are, and no gradient comes through it",
        "a sigmoid for one output (BCEWithLogitsLoss has its own), or as many outputs as there are classes", ""),
    "SORTED": (
        "The samples come in the order of their classes: each batch holds one or two, and unlearns the others",
        "DataLoader(..., shuffle=True); of a stream of one's own, shuffle what it goes through",
        r"DataLoader\((?!.*shuffle=True)|argsort|\bsort(ed|_values)?\(|groupby"),
}  # fmt: skip


class Unsound(NamedTuple):
    """Something that is wrong with a training."""

    reason: str
    text: str  # what was seen
    cure: str
    pattern: str  # of the person's line that it comes from; "" for the pass backward


class Zeroing:
    """Whether an optimiser's gradients are zero, or none, before any of the passes backward between two of its steps.

    Of several, as of a GAN, one's gradients wait while another's are made: those of one pass tell nothing.
    """

    def __init__(self) -> None:
        self._followed: dict[int, tuple[weakref.ref, int] | None] = {}  # optimiser -> (a weight, passes since its step)
        self._passes = 0  # since they are followed
        self._looks: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()  # looks that found gradients of the step before in each pass

    def follow(self, optimizers: Iterable[int]) -> None:
        """Follow optimisers, by identity, from the next step of each one to that after it."""
        if not self._followed:
            self._followed = dict.fromkeys(each for each in optimizers if self._looks[each] < MOST_ASKED)
            self._passes = 0

    @property
    def waits(self) -> bool:
        """Whether steps and passes backward are to be noted."""
        return bool(self._followed)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        number = id(optimizer)
        if number not in self._followed:
            return
        followed = self._followed[number]
        if followed is None:
            weights = [weight for weight in weights_of(optimizer) if weight.grad is not None]
            weight = min(weights, key=torch.Tensor.numel, default=None)
            if weight is None:
                self._end(number, kept=False)
            else:
                self._followed[number] = weakref.ref(weight), 0
        elif followed[1]:
            self._end(number, kept=True)

    def note_backward(self) -> None:
        """Call it before a pass backward."""
        self._passes += 1
        for number, followed in list(self._followed.items()):
            if followed is not None:
                weight = followed[0]()
                if weight is None or not _has_gradient(weight):
                    self._end(number, kept=False)
                else:
                    self._followed[number] = followed[0], followed[1] + 1
        if self._passes > PASSES:  # one that steps no more
            self._followed = {}

    def _end(self, number: int, kept: bool) -> None:
        del self._followed[number]
        self._looks[number] += 1
        self._kept[number] += kept

    def never_happens(self) -> bool:
        """Say whether the gradients of an optimiser are never set to zero."""
        return any(n >= LEAST and self._kept[number] > 0.9 * n for number, n in self._looks.items())


class Labels:
    """Whether the labels of a cross entropy come in the order of their classes."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._numbers: list[int] = []  # of classes in a batch
        self._in_order = 0  # batches whose labels of each class come one after another

    def note(self, loss: torch.Tensor) -> None:
        labels = _find_labels(loss)
        if labels is not None:
            classes, numbers = labels.unique(return_counts=True)
            self._seen.update(dict(zip(classes.tolist(), numbers.tolist(), strict=True)))
            self._numbers.append(len(classes))
            self._in_order += int(labels.diff().count_nonzero()) < len(classes)

    def are_sorted(self) -> bool:
        # A rare class makes batches of one class too, and a batch of some samples of each of many may be on purpose.
        most, batches = max(self._seen.values(), default=0), len(self._numbers)
        return (
            batches >= LEAST
            and self._in_order > 0.9 * batches
            and median(self._numbers) <= max(2, len(self._seen) / 8)
            and most < 0.75 * self._seen.total()
        )


class Soundness:
    """Notes what is seen at some steps and passes backward of one thread."""

    def __init__(self):
        self._optimizers: weakref.WeakSet = weakref.WeakSet()
        self._made = self._steps = 0  # optimisers, beyond the first, of the same weights; looks at a step
        self._losses: list[float] = []  # that were read
        self._distances = 0  # of them: of a forecast from the truth
        self._negated = 0  # of them: such a distance with a minus
        self._alike: dict[int, tuple[int, int]] = {}  # weights of equal outputs -> (looks, those with a gradient)
        self._bare: set[int] = set()  # weights of modules that are not torch's
        self.zeroing, self.labels = Zeroing(), Labels()
        self._starts = 0  # first passes backward after a step
        self._rate = self._highest = 0.0
        self._rates_gone = 0  # looks
        self._of: torch.optim.Optimizer | None = None
        self._models: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # whether it is trained
        self._others = self._own = 0  # looks at called models that hold weights: none of the optimiser's, and some
        self._evaluated = self._trained = 0  # steps of a model that was in eval mode at their end, and in train mode
        self._empty: dict[int, int] | None = None  # weights without a gradient, in every look so far -> their numbers
        self._emptied = 0  # looks at them
        self._numbers = self._frozen = 0  # of all weights that can learn; of the others that the optimiser holds
        self._matrices = False  # whether a weight of two axes or more can learn
        self._zero: dict[int, int] | None = None  # likewise, those whose gradient is 0 throughout
        self._ends = self._given = 0  # passes backward; those that left a gradient
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None  # (a weight, what it was)
        self._began: tuple[torch.Tensor, torch.Tensor] | None = None  # likewise, before a pass backward
        self._since = self._same = 0  # looks since; those at which it was the same again
        self._away = 0  # looks after a step, at which it was another
        self._ungraded: dict[int, tuple[int, set[int]]] = {}  # further optimisers without gradients: (looks, weights)
        self._graded: set[int] = set()  # those that had
        self._moved = 0, math.inf  # (looks since, share of its size by which it has moved)

    def note_optimizer(self, optimizer: torch.optim.Optimizer, main: torch.optim.Optimizer | None) -> bool:
        """Say whether an optimiser is a new one for the weights of the one whose steps count."""
        if optimizer in self._optimizers:
            return False
        self._optimizers.add(optimizer)
        remade = main is not None and set(map(id, weights_of(optimizer))) == set(map(id, weights_of(main)))
        # A step of LBFGS is a search of many, on one problem: what it remembers is not of another.
        self._made += remade and optimizer is not main and not isinstance(optimizer, torch.optim.LBFGS)
        return remade

    def note_step(self, optimizer: torch.optim.Optimizer, seen: Iterable[nn.Module | None]) -> None:
        """seen: the modules that were called since the step before; None is one that is gone."""
        self._steps += 1
        self._rate = max((float(group["lr"]) for group in optimizer.param_groups), default=0.0)
        self._highest = max(self._highest, self._rate)
        self._rates_gone = self._rates_gone + 1 if self._rate < GONE * self._highest else 0
        if optimizer is not self._of:  # another training, such as that of a student after its teacher's
            self._of, self._models = optimizer, weakref.WeakKeyDictionary()
            self._own = self._others = 0
        called = [model for model in seen if model is not None and next(model.parameters(), None) is not None]
        modes = {model.training for model in called if self._is_trained(model, optimizer)}
        self._own += bool(modes)
        self._others += bool(called) and not modes
        self._evaluated += modes == {False}
        self._trained += modes == {True}

    def note_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it after a step of one whose steps do not count."""
        number = id(optimizer)
        if number in self._graded:
            return
        weights = [weight for weight in weights_of(optimizer) if weight.requires_grad]
        if any(weight.grad is not None for weight in weights):
            self._graded.add(number)
            self._ungraded.pop(number, None)
        elif weights:  # else all are frozen for now
            looks = self._ungraded.get(number, (0, set()))[0] + 1
            self._ungraded[number] = looks, set(map(id, weights))

    def _is_trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether a model holds weights of the optimiser; to look through a large one takes a while."""
        if model not in self._models:
            weights = set(map(id, weights_of(optimizer)))
            self._models[model] = not weights.isdisjoint(map(id, model.parameters()))
            parts = [part for part in model.modules() if not _is_layer(part)]
            self._bare |= {id(weight) for part in parts for weight in part.parameters(recurse=False)}
        return self._models[model]

    def note_gradients(self, weights: Iterable[torch.Tensor]) -> None:
        """Call it after a step, with what it is to move."""
        weights = list(weights)
        self._frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
        weights = [weight for weight in weights if weight.requires_grad]
        self._matrices = any(weight.dim() > 1 for weight in weights)
        empty = {id(weight): weight.numel() for weight in weights if weight.grad is None}
        zero = {id(w): w.numel() for w in weights if w.grad is not None and not _has_gradient(w)}
        self._empty = empty if self._empty is None else {k: n for k, n in self._empty.items() if k in empty}
        self._zero = zero if self._zero is None else {k: n for k, n in self._zero.items() if k in zero}
        alike = [weight for weight in weights if weight.dim() > 1 and len(weight) >= LEAST and _is_alike(weight)]
        seen = {id(weight): self._alike.get(id(weight), (0, 0)) for weight in alike}
        self._alike = {id(w): (seen[id(w)][0] + 1, seen[id(w)][1] + _has_gradient(w)) for w in alike}
        self._emptied += 1
        self._numbers = sum(weight.numel() for weight in weights)
        if self._before is None or not any(weight is self._before[0] for weight in weights):
            sized = [weight for weight in weights if weight.numel() <= MOST_KEPT and _has_gradient(weight)]
            weight = max(sized, key=torch.Tensor.numel, default=None)
            self._before = None if weight is None else (weight, weight.detach().clone())
            self._moved = 0, math.inf
        else:
            weight, before = self._before
            moved = float((weight.detach() - before).norm() / before.norm().clamp(min=1e-30))
            self._moved = self._moved[0] + 1, moved
            if self._began is not None and self._began[0] is weight and self._starts < MOST_ASKED:
                self._away += not torch.equal(weight, self._began[1])

    def note_loss(self, loss: object) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and len(self._losses) < MOST_ASKED:
            self._losses.append(loss.item())
            self.labels.note(loss)
            node = loss.grad_fn
            self._distances += _is_distance(node)
            if node is not None and node.name() == "NegBackward0":
                (below, _), *_ = node.next_functions
                self._negated += below is not None and bool(re.search(MEASURES, below.name()))

    def note_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Call it after a pass backward."""
        if self._ends < 2 * LEAST:
            self._ends += 1
            self._given += any(map(_has_gradient, weights_of(optimizer)))

    def note_start(self) -> None:
        """Call it before the first pass backward after a step."""
        if self._starts < MOST_ASKED:
            self._starts += 1
            if self._before is not None:
                weight = self._before[0]
                if self._began is None or self._began[0] is not weight:
                    self._began = weight, weight.detach().clone()
                    self._since = self._same = self._away = 0
                else:
                    self._since += 1
                    self._same += torch.equal(weight, self._began[1])

    @property
    def stalls(self) -> bool:
        """Whether the losses that were read do not fall."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        late = sorted(losses[len(losses) // 2 :])
        return len(losses) >= 2 * LEAST and late[len(late) // 2] > 0.9 * losses[0] > 0

    def _without(self, found: dict[int, int] | None) -> float:
        """Return the share of the weights that some are."""
        return sum((found or {}).values()) / max(self._numbers, 1)

    @property
    def empty(self) -> set[int]:
        """Identities of the weights that never got a gradient."""
        others = (weights for looks, weights in self._ungraded.values() if looks >= LEAST)
        return set(self._empty or ()).union(*others)

    def _find_settings(self) -> Iterator[Unsound]:
        """Yield what is wrong with the settings of the optimiser."""
        groups = self._of.param_groups if self._of is not None else []
        shrinking = max((float(group["lr"]) * group.get("weight_decay", 0) for group in groups), default=0.0)
        if shrinking > SHRINKING:
            text = f"Weight decay takes {shrinking:.0%} of every weight at each step: more than can be learned"
            yield Unsound("DECAY", text, "a weight decay of 0.01 or less", OPTIMIZER)
        momentum = max((float(group.get("momentum") or 0) for group in groups), default=0.0)
        if momentum >= 1:
            text = f"A momentum of {momentum:g} never lets go of a step: weights swing ever further"
            yield Unsound("MOMENTUM", text, "a momentum of 0.9", OPTIMIZER)
        # A step of about the rate in each weight, where a sum over its inputs is to stay near 1.
        sizes = [w.numel() / len(w) for group in groups for w in group["params"] if w.dim() > 1 and len(w) > 1]
        steps = float(self._highest) * math.sqrt(max(sizes, default=0.0))
        if re.search(STEPPING, type(self._of).__name__) and steps >= 1 and self.stalls:
            text = (
                f"The loss does not fall, and a learning rate of {self._highest:.2g} changes all weights at each step"
            )
            yield Unsound("RATE_TOO_HIGH", text, "a learning rate of 1e-3 to begin with", OPTIMIZER)

    def _find_gradients(self) -> Iterator[Unsound]:
        """Yield why no gradient comes to the weights, or no step of theirs: one reason, for each hides the next."""
        empty, zero = self._without(self._empty), self._without(self._zero)
        # No new last layer; and of one optimiser, for another one's weights may learn.
        few = 0 < self._numbers < FEW and not self._matrices and len(self._optimizers) == 1
        if self._emptied >= 3 and few and self._frozen > MANY_TIMES * self._numbers:
            text = f"All but {self._numbers:,} of the {self._numbers + self._frozen:,} numbers that the optimiser holds"
            text += " are frozen: the model does not learn"
            cure = "freeze the part that is not to be trained, model.backbone.requires_grad_(False), before others are "
            cure += "added to it, and not the model as a whole"
            yield Unsound("FROZEN", text, cure, r"requires_grad(_\(False|\s*=\s*False)")
        elif self._emptied >= 3 and empty + zero == 1 and self._given >= LEAST:
            text = "Gradients are set to zero between loss.backward() and optimizer.step(): no weight moves"
            cure = "optimizer.zero_grad() before loss.backward(), then optimizer.step()"
            yield Unsound("ZEROED_TOO_SOON", text, cure, r"zero_grad\(")
        elif self._emptied >= 3 and empty == 1 and self._others >= LEAST and not self._own:
            text = "The optimiser holds the weights of another model: none of those that run, and none gets a gradient"
            cure = "make it after the model, of this model's weights: torch.optim.Adam(model.parameters())"
            yield Unsound("OTHER_WEIGHTS", text, cure, OPTIMIZER)
        elif self._emptied >= 3 and empty > WITHOUT:
            text = f"{empty:.0%} of the optimiser's weights never get a gradient: the loss does not reach them"
            cure = "take out what cuts the graph on the way: .detach(), .item(), .numpy(), .data, argmax(), "
            cure += "torch.tensor(x), no_grad(); what was made without gradients, as a rollout's log_prob, is computed "
            cure += "anew where its loss is"
            cutting = r"\.detach\(|\.numpy\(|\.data\b|torch\.tensor\(|no_grad"
            # Of all: the loss itself is cut off, and made to be one that has a gradient.
            again = r"requires_grad(_\(|\s*=\s*True)|loss.*(\.data\b|\bVariable\()"
            yield Unsound("NO_GRADIENT", text, cure, cutting if empty < 1 else again)
        elif self._emptied > 4 and zero > NONE_LEFT:
            text = f"The gradients of {zero:.0%} of the weights are exactly 0 at every step: nothing reaches them"
            cure = "look for ReLUs that are never above 0 (too large a negative bias or rate), for a saturated "
            cure += "sigmoid, round(), argmax() or clamp() before the loss, and for a loss that does not depend on "
            cure += "the model"
            yield Unsound("ZERO_GRADIENTS", text, cure, "")
        elif self._of is None and self._moved[0] > 2 and self._moved[1] == 0:
            text = "Gradients are computed, and no step moves the weights"
            cure = "optimizer.step(), with its parentheses, after loss.backward()"
            yield Unsound("NOT_STEPPED", text, cure, r"\.step\b(?!\()")
        elif any(looks >= LEAST for looks, _ in self._ungraded.values()):
            text = "One of the optimisers never finds a gradient in any of its weights: what it trains does not learn"
            cure = "take out what cuts the graph between these weights and their loss: no_grad(), .detach(), .item()"
            yield Unsound("NO_GRADIENT", text, cure, r"no_grad|\.detach\(")
        elif self._moved[0] > 3 and self._moved[1] == self._highest == 0:
            text = "The learning rate is 0 at every step: no weight moves"
            cure = "print scheduler.get_last_lr(): a warm-up begins above 0, and // of whole numbers makes 0"
            yield Unsound("RATE_ZERO", text, cure, r"LambdaLR|lr_lambda|[Ss]chedul\w*\(|[Ww]armup|lr *= *0\b")
        elif self._since >= LEAST and self._same == self._since and self._away > 1:
            text = "The weights are the same before every pass backward: what the optimiser does is undone"
            cure = "step on the weights themselves; averaged ones are put in their place for a validation alone"
            yield Unsound("UNDONE", text, cure, r"restore|swap|average|\.copy_\(|load_state_dict\(")
        elif self._moved[0] > 3 and self._moved[1] < MOVED:
            text = f"The weights stand still: in all steps they have moved by {self._moved[1]:.1g} of their size"
            cure = "a higher learning rate; and look for gradients that are clipped or scaled to nearly nothing"
            yield Unsound("STANDS_STILL", text, cure, r"clip_grad" if self._highest > LOW else OPTIMIZER)

    def find(self, wrong: Collection[str]) -> Iterator[Unsound]:
        """Yield what is wrong, the worst first. wrong: reasons of OF_OPERATORS."""
        infinite = len(self._losses) >= LEAST and not any(map(math.isfinite, self._losses[-LEAST:]))
        # What is no distance to a target need not fall: a policy's loss follows what it has gained.
        fails = infinite or (self.stalls and self._distances == len(self._losses))
        zero = self._without(self._zero) > NONE_LEFT
        allowed = {"UNPAIRED": self.stalls, "ONE_OUTPUT": zero, **dict.fromkeys(SCALES, fails)}
        wrong = [reason for reason in OF_OPERATORS if reason in wrong and allowed.get(reason, True)]
        if self.zeroing.never_happens():  # it ends in nan at times
            text = "Gradients are added to those of the steps before, and never set to zero"
            cure = "optimizer.zero_grad() once a step, before loss.backward(), of all weights that it moves"
            yield Unsound("NOT_ZEROED", text, cure, r"zero_grad\(")
        if infinite and not any(reason in SCALES for reason in wrong):
            text = "The loss is nan or infinite, and the training goes on: it learns nothing"
            pattern = ""
            cure = "look for nan, inf, log(0) and x / 0 in the inputs (torch.isfinite(x).all()), then for too high a "
            cure += "learning rate; and stop where math.isfinite(loss.item()) is false"
            if sum(map(math.isfinite, self._losses)) < 2:  # too soon for a rate
                cure = "look for nan and inf in the inputs (torch.isfinite(x).all()), and for a root, a norm, a "
                cure += "logarithm or a quotient of 0, whose gradients are infinite: sqrt(x + 1e-8), "
                cure += "log(x.clamp(min=1e-8))"
                pattern = QUOTIENTS
            yield Unsound("LOSS_NOT_FINITE", text, cure, pattern)
        for reason in wrong:
            yield Unsound(reason, *OF_OPERATORS[reason])
        if self._made >= LEAST and self._made > 0.5 * self._steps:
            text = "A new optimiser is made for every step: it begins without its moments each time"
            cure = "make it once, before the loop; a learning rate is changed by a scheduler"
            yield Unsound("OPTIMIZER_REMADE", text, cure, OPTIMIZER)
        yield from self._find_gradients()
        # Rows of a weight that is in no layer of torch's, such as of positions that are added up, may be alike.
        alike = [seen for number, seen in self._alike.items() if number not in self._bare]
        if any(looks > 3 and gradients > 1 for looks, gradients in alike):
            text = "All outputs of a layer are the same, and so are their gradients: it learns one feature"
            cure = "random first weights, as layers of torch's have unless told: no constant, no zeros"
            yield Unsound("ALIKE", text, cure, r"(constant_|zeros_|ones_|fill_)\((?!.*bias)|\.data\b")
        if self._negated >= LEAST and self._negated == len(self._losses) and len(self._optimizers) == 1:
            text = "The loss gets a minus sign before its pass backward: training makes it larger"
            cure = "loss.backward() on the loss as it is: an optimiser makes it smaller"
            yield Unsound("MAXIMISED", text, cure, r"= *-|\(-")
        yield from self._find_settings()
        if self._evaluated >= LEAST and self._evaluated > 0.4 * (self._evaluated + self._trained):
            text = "The model is trained in eval mode: dropout is off, and batch norm learns no statistics"
            cure = "model.train() at the start of every epoch, after each validation"
            yield Unsound("EVAL_MODE", text, cure, r"\.eval\(\)")
        if self._rates_gone >= LEAST and self._rates_gone > 0.3 * self._steps:
            text = f"The learning rate has fallen from {self._highest:.2g} to {self._rate:.2g}: nothing more is learned"
            cure = "step the scheduler once an epoch, or count its steps in batches"
            yield Unsound("RATE_GONE", text, cure, r"^(?!.*\b(opt\w*|scaler|o)\.step\().*\.step\(")


def _is_distance(node) -> bool:
    """Say whether a loss is one of torch's, or (x - y).abs().mean() and the like, which L1Loss is made of."""
    written: list[str] = []
    while node is not None and len(written) < 3:
        written.append(node.name())
        node = next((below for below, _ in node.next_functions), None)
    return bool(re.search(MEASURES, written[0]) or WRITTEN.match(" ".join(written))) if written else False


def _is_layer(module: nn.Module) -> bool:
    """Say whether a module is one of torch's, or made of one."""
    return any(kind.__module__.startswith("torch.nn.") for kind in type(module).__mro__ if kind is not nn.Module)


def _is_alike(weight: torch.Tensor) -> bool:
    return bool((weight - weight[:1]).abs().max() <= ALIKE * weight.abs().max())


def _has_gradient(weight: torch.Tensor) -> bool:
    if weight.grad is None:
        return False
    return bool((weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad).count_nonzero())


def _find_labels(loss: torch.Tensor) -> torch.Tensor | None:
    """Return the classes (batch,) that a cross entropy in the graph of a loss is held against."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:  # which grows
        if node is None or len(nodes) > NODES:
            continue
        if node.name() == "NllLossBackward0":
            labels = node._saved_target
            return labels if labels.dim() == 1 and LEAST <= len(labels) <= MOST_LABELS else None
        nodes += [following for following, _ in node.next_functions]
    return None


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimiser moves."""
    return (weight for group in optimizer.param_groups for weight in group["params"])
