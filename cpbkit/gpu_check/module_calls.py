"""The calls of modules in one step of a person's loop: from which lines, with gradients or without, one by one."""

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check.call_stacks import OwnLine, Roles
from cpbkit.gpu_check.graphs import tie_mark

Own = tuple[OwnLine, ...]  # own lines of a call, the innermost first
Model = tuple[Own, int]  # what is called and is no part: from where, identity


class Called(NamedTuple):
    """A module that was called. At the end of a script it may be gone."""

    weights: dict[int, int]  # identity -> numbers
    own: Own  # where it was called first


LARGER = 4  # times the rows that a model trains on: it is tested on these


class ModuleCalls:
    """Noted from `begin` to `end`."""

    def __init__(self, roles: Roles):
        self.roles = roles
        self.models: Counter[Model] = Counter()  # calls with gradients
        self.with_gradients: dict[int, Called] = {}  # by identity
        self.without: dict[int, Called] = {}
        self.problem = ""
        self._parts: Counter[tuple[Own, int, Model]] = Counter()  # calls of parts, by their model too
        self._rows: defaultdict[int, set[int]] = defaultdict(set)  # that parts were given, by identity
        self._samples: Counter[Model] = Counter()  # of the batches that a model was given
        self._trained_on: defaultdict[int, int] = defaultdict(int)  # samples at a time, by identity
        self._asked: Counter[tuple[OwnLine, int]] = Counter()  # and of calls without gradients, by where they are too
        self._batch = 0  # samples of the last of them, if it was a tensor
        self._model: Model = (), 0  # that was called last
        self._made_rows: dict[Model, int] = {}  # by it
        self._hooks: tuple = ()
        self._made: list[tuple[Own, weakref.ref]] = []  # by models: where, and a mark on its graph

    def begin(self) -> None:
        self._thread = threading.get_ident()
        before, after = self._unharmed(self._note), self._unharmed(self._note_made)
        self._hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _unharmed(self, note: Callable[..., None]) -> Callable[..., None]:
        def hook(*args) -> None:
            if threading.get_ident() != self._thread:  # torch calls them for every thread
                return
            try:
                note(*args)
            except Exception as error:  # told in the report; the person's step goes on
                self.problem = f"a call was not noted: {type(error).__name__}: {error}"

        return hook

    def find_alive(self) -> set[Own]:
        """Return where models were called whose graphs are still there."""
        return {own for own, mark in self._made if mark() is not None}

    def find_parts(self) -> Counter[tuple[Own, int]]:
        """Return the calls of each part that is called once for every sample of a model's batch."""
        found = {(own, part): n for (own, part, model), n in self._parts.items()
                 # Given as many rows as the model makes, it goes through time, and time comes before the batch.
                 if n == self._samples[model] and self._rows[part] != {self._made_rows.get(model, -1)}}  # fmt: skip
        return Counter(found)

    def find_tests(self) -> set[OwnLine]:
        """Return the lines that ask a model without gradients for far more samples than it is trained on at a time."""
        trained = self._trained_on
        return {at for (at, model), n in self._asked.items() if n >= LARGER * trained.get(model, math.inf)}

    def find_batch(self, model: Model) -> float:
        """Return the samples that a model is given at a time."""
        return self._samples[model] / max(self.models[model], 1)

    def _note(self, module: nn.Module, args) -> None:
        frame = sys._getframe(2)  # torch's, which gives hooks of all modules no arguments by name
        stack = self.roles.read(frame)
        if not stack.own:
            return
        graded = torch.is_grad_enabled()
        noted = self.with_gradients if graded else self.without
        if id(module) not in noted:
            noted[id(module)] = Called({id(weight): weight.numel() for weight in module.parameters()}, stack.own)
        args = (*args, *frame.f_locals.get("kwargs", {}).values())
        given: Any = args[0] if args else None
        samples = len(given) if type(given) in (list, tuple) or (isinstance(given, torch.Tensor) and given.dim()) else 0
        beside = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor)]
        if stack.root == id(module):
            self._model = stack.own, stack.root
            self._batch = samples if isinstance(given, torch.Tensor) else 0  # in a list, a sample may be as long
            if graded:
                self._trained_on[id(module)] = max(self._trained_on[id(module)], samples)
            else:
                self._asked[stack.own[0], id(module)] = max(self._asked[stack.own[0], id(module)], samples)
            if graded and all(x.grad_fn is None for x in beside):  # else a state: no sample needs the one before
                self.models[self._model] += 1
                self._samples[self._model] += samples
        elif graded and samples != self._batch and not beside:  # neither the batch, nor a state beside its input
            self._parts[stack.own, id(module), self._model] += 1
            self._rows[id(module)].add(samples)

    def _note_made(self, module: nn.Module, args, made) -> None:
        if self._model[1] != id(module):
            return
        tensor = next((x for x in tree_leaves(made) if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
        if tensor is not None:
            if tensor.dim() and len(tensor) > 1:
                self._made_rows[self._model] = len(tensor)
            self._made.append((self._model[0], tie_mark(tensor.grad_fn, "cpbkit call")))
