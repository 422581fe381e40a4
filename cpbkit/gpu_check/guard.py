"""Leave a person's objects as they were: weights, optimiser, random numbers, flags of torch."""

import argparse
import contextlib
import functools
import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cpbkit.training.precision import keep_matmul_precision


@dataclass
class Notes:
    """What a step did besides training."""

    printed: str = ""
    moved: list[str] = field(default_factory=list)  # "weight: cpu -> cuda:0", also of dtypes


@contextlib.contextmanager
def preserved(*things) -> Iterator[Notes]:
    """Run the body, then put back everything that `things` can reach; what it prints goes to the notes."""
    notes, out = Notes(), io.StringIO()
    restores = list(_keep(find_belongings(*things), notes))
    restores.append(keep_matmul_precision())
    for get, put in _flags():
        with contextlib.suppress(RuntimeError):  # torch refuses to read cuDNN's TF32 where its newer interface set it
            restores.append(functools.partial(put, get()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield notes
    finally:
        notes.printed = out.getvalue()
        for restore in restores:
            restore()


def find_belongings(*things) -> list:
    """Collect what a callable can reach: tensors, generators, containers, and the attributes of objects.

    Follows closures, default and partial arguments, and the globals that functions of the same module name.
    Iterators cannot be rewound and are left out, and so is what belongs to the standard library.
    """
    found: dict[int, object] = {}
    queue = deque(things)
    while queue:
        thing = queue.popleft()
        held = None if id(thing) in found else _reach(thing)
        if held is not None:
            found[id(thing)] = thing
            queue += held
    return list(found.values())


def _reach(thing) -> list | None:
    """Return what a thing holds; None for one without a state of its own."""
    if isinstance(thing, (Tensor, torch.Generator)):
        return []
    if isinstance(thing, (list, set, deque, tuple)):
        return list(thing)
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return [*_closure(thing), *(thing.__defaults__ or ()), *_globals(thing)]
    is_code = isinstance(thing, (type, types.ModuleType)) or hasattr(type(thing), "__next__")
    library = type(thing).__module__.partition(".")[0] in sys.stdlib_module_names
    if isinstance(thing, (types.SimpleNamespace, argparse.Namespace)):
        library = False  # of the library by type, but what is in it is the person's
    return None if is_code or library or not hasattr(thing, "__dict__") else [vars(thing)]


def _closure(function: types.FunctionType) -> Iterator:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not set yet
            yield cell.cell_contents


def _globals(function: types.FunctionType) -> Iterator:
    for value in map(function.__globals__.get, _names(function.__code__)):
        if not isinstance(value, types.FunctionType) or value.__module__ == function.__module__:
            yield value


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


FLAGS: list[tuple[Callable, Callable]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (random.getstate, random.setstate),
    (torch.get_rng_state, torch.set_rng_state),
]
FLAGS += [
    (functools.partial(getattr, torch.backends.cudnn, name), functools.partial(setattr, torch.backends.cudnn, name))
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
]


def _flags() -> Iterator[tuple[Callable, Callable]]:
    yield from FLAGS
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
        yield torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode


def _keep(belongings: list, notes: Notes) -> Iterator[Callable[[], object]]:
    """Yield what restores each thing; tensors last, after what holds them."""
    names: dict[int, str] = {}
    for module in (thing for thing in reversed(belongings) if isinstance(thing, nn.Module)):  # the whole model last
        names |= {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    for thing in belongings:
        if isinstance(thing, torch.Generator):
            yield functools.partial(thing.set_state, thing.get_state())
        elif isinstance(thing, dict):
            yield functools.partial(_refill, thing, dict(thing))
        elif isinstance(thing, (list, set, deque)):
            yield functools.partial(_refill, thing, list(thing))
    for thing in belongings:
        # An expanded tensor is one number seen many times: it cannot be written, so no step wrote it.
        if isinstance(thing, Tensor) and not thing.is_meta and 0 not in thing.stride():
            yield _keep_tensor(names.get(id(thing), "tensor"), thing, notes)


def _refill(container, before) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(before)


def _keep_tensor(name: str, tensor: Tensor, notes: Notes) -> Callable[[], None]:
    data, content, needs_grad = tensor.data, tensor.detach().clone(), tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None
    grad_content = None if grad is None else grad.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        if (tensor.device, tensor.dtype) != (data.device, data.dtype):
            notes.moved.append(f"{name}: {data.device} {data.dtype} -> {tensor.device} {tensor.dtype}")
        tensor.data = data
        data.copy_(content)
        if tensor.is_leaf:
            tensor.grad = grad
            tensor.requires_grad_(needs_grad)
        if grad is not None and grad_content is not None:
            grad.copy_(grad_content)

    return restore
