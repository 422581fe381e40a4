"""The calls of modules in one step of a person's loop: from which lines, with gradients or without, one by one."""

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check.call_stacks import OwnLine, Roles
from cpbkit.gpu_check.graphs import tie_mark

Own = tuple[OwnLine, ...]  # own lines of a call, the innermost first


class Called(NamedTuple):
    """A module that was called. At the end of a script it may be gone."""

    weights: dict[int, int]  # identity -> numbers
    own: Own  # where it was called first


class ModuleCalls:
    """Noted from `begin` to `end`."""

    def __init__(self, roles: Roles):
        self.roles = roles
        self.models: Counter[tuple[Own, int]] = Counter()  # calls with gradients of what is no part, by lines, identity
        self.with_gradients: dict[int, Called] = {}  # by identity
        self.without: dict[int, Called] = {}
        self.problem = ""
        self._parts: Counter[tuple[Own, int, int]] = Counter()  # calls of parts, by the identity of the whole too
        self._samples: Counter[int] = Counter()  # of the batches that a model was given, by its identity
        self._batch = 0  # samples of the last of them, if it was a tensor
        self._model: tuple[Own, int] = (), 0  # that was called last
        self._made: list[tuple[Own, weakref.ref]] = []  # by models: where, and a mark on its graph

    def begin(self) -> None:
        before, after = self._unharmed(self._note), self._unharmed(self._note_made)
        self._hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _unharmed(self, note: Callable[..., None]) -> Callable[..., None]:
        def hook(*args) -> None:
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
        counts = self._parts.items()
        return Counter({(own, part): n for (own, part, whole), n in counts if n == self._samples[whole]})

    def find_batch(self, model: int) -> float:
        """Return the samples that a model is given at a time, by its identity."""
        return self._samples[model] / max(sum(n for (_, number), n in self.models.items() if number == model), 1)

    def _note(self, module: nn.Module, args) -> None:
        stack = self.roles.read(sys._getframe(2))
        if not stack.own:
            return
        graded = torch.is_grad_enabled()
        noted = self.with_gradients if graded else self.without
        if id(module) not in noted:
            noted[id(module)] = Called({id(weight): weight.numel() for weight in module.parameters()}, stack.own)
        given: Any = args[0] if args else None
        samples = len(given) if type(given) in (list, tuple) or (_is_tensor(given) and given.dim()) else 0
        if stack.root == id(module):
            self.models[stack.own, stack.root] += graded
            self._samples[stack.root] += samples * graded
            self._batch = samples if _is_tensor(given) else 0  # in a list, a sample may be as long
            self._model = stack.own, stack.root
        elif graded and samples != self._batch and sum(map(_is_tensor, args)) < 2:
            # Given neither the batch nor, beside its input, a state.
            self._parts[stack.own, id(module), stack.root] += 1

    def _note_made(self, module: nn.Module, args, made) -> None:
        own, model = self._model
        if model == id(module):
            nodes = (x.grad_fn for x in tree_leaves(made) if _is_tensor(x) and x.grad_fn is not None)
            self._made += [(own, tie_mark(node, "cpbkit call")) for node in itertools.islice(nodes, 1)]


def _is_tensor(thing: object) -> TypeGuard[torch.Tensor]:
    return isinstance(thing, torch.Tensor)
