"""Leave a person's objects as they were: weights, optimiser, random numbers, flags of torch."""

import contextlib
import copy
import functools
import io
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass
class Notes:
    """What a step did besides training."""

    printed: str = ""
    moved: list[str] = field(default_factory=list)  # "weight: cpu -> cuda:0", also of dtypes


def find_belongings(*things) -> list:
    """Collect the modules, optimisers, tensors, generators and containers a callable can reach.

    Follows attributes, closures, default and partial arguments, and the globals that functions of the same module
    name. Iterators cannot be rewound and are left out.
    """
    found: dict[int, object] = {}
    queue = list(things)
    while queue:
        thing = queue.pop()
        if id(thing) in found or thing is None:
            continue
        if isinstance(thing, (nn.Module, torch.optim.Optimizer, Tensor, torch.Generator)) or _has_state(thing):
            found[id(thing)] = thing
        elif isinstance(thing, (list, set, dict, tuple)):
            found[id(thing)] = thing
            queue += thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, functools.partial):
            queue += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            queue += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            found[id(thing)] = thing
            queue += [cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell)]
            queue += thing.__defaults__ or ()
            queue += [v for v in map(thing.__globals__.get, _names(thing.__code__)) if _is_own(v, thing)]
        elif type(thing).__module__ not in sys.stdlib_module_names and hasattr(thing, "__dict__"):
            if not isinstance(thing, (type, types.ModuleType)):
                found[id(thing)] = thing
                queue += vars(thing).values()
    return list(found.values())


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_set(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_own(value, function: types.FunctionType) -> bool:
    if isinstance(value, (types.FunctionType, type)):
        return value.__module__ == function.__module__
    return not isinstance(value, types.ModuleType)


def _has_state(thing) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") and not isinstance(thing, type)


FLAGS: list[tuple[Callable, Callable]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
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
        if grad is not None:
            grad.copy_(grad_content)

    return restore


def _keep_module(module: nn.Module) -> Callable[[], None]:
    parts = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]

    def restore() -> None:
        for part, training, parameters, buffers in parts:
            part.training = training
            _refill(part._parameters, parameters)
            _refill(part._buffers, buffers)

    return restore


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(values) for parameter, values in optimizer.state.items()}

    def restore() -> None:
        del optimizer.param_groups[len(groups) :]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _refill(group, before)
        _refill(optimizer.state, {parameter: dict(values) for parameter, values in state.items()})

    return restore


def _refill(container, before) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(before)


def _keep(belongings: list, notes: Notes) -> Iterator[Callable[[], None]]:
    """Yield what restores each thing; tensors last, after what holds them."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for thing in belongings:
        if isinstance(thing, nn.Module):
            yield _keep_module(thing)
            named = (*thing.named_parameters(), *thing.named_buffers())
            tensors.update({id(tensor): (name, tensor) for name, tensor in named})
        elif isinstance(thing, torch.optim.Optimizer):
            yield _keep_optimizer(thing)
            held = tree_leaves([list(thing.state.values()), [list(g.values()) for g in thing.param_groups]])
            for tensor in held:
                tensors.setdefault(id(tensor), ("optimizer", tensor))
        elif isinstance(thing, Tensor):
            tensors.setdefault(id(thing), ("tensor", thing))
        elif isinstance(thing, torch.Generator):
            yield functools.partial(thing.set_state, thing.get_state())
        elif isinstance(thing, (list, set, dict)):
            yield functools.partial(_refill, thing, copy.copy(thing))
        elif _has_state(thing):
            yield functools.partial(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
    for name, tensor in tensors.values():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            yield _keep_tensor(name, tensor, notes)


@contextlib.contextmanager
def preserved(*things) -> Iterator[Notes]:
    """Run the body, then put back everything that `things` can reach; what it prints goes to the notes."""
    notes, out = Notes(), io.StringIO()
    restores = list(_keep(find_belongings(*things), notes))
    restores += [functools.partial(put, get()) for get, put in _flags()]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield notes
    finally:
        notes.printed = out.getvalue()
        for restore in restores:
            restore()
