"""The tensors of a step: where they are, and batches of them."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cpbkit.errors import CpbkitError


def to_device(batch, device: str):
    """Move every tensor of a batch."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)


def resize(batch, samples: int):
    """Cut or repeat every tensor of a batch to so many samples."""

    def fit(thing):
        if not isinstance(thing, Tensor) or not thing.dim():
            return thing
        return thing.index_select(0, torch.arange(samples, device=thing.device) % len(thing))

    return tree_map(fit, batch)


def count_samples(batch) -> int:
    """Return the samples of a batch, by its first tensor."""
    return next((len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)


def find_misplaced(model, batch, optimizer=None, device: str = "cuda", used: set[int] | None = None) -> list[str]:
    """Name every tensor that is not on `device`: parameters, buffers, plain attributes, state, batch.

    Plain attributes are those that `module.to()` leaves behind. The step count of an optimiser may stay on the
    host; so may a tensor without dimensions. used: storages that a step reads; others decide nothing.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules() if model is not None else ():
        held = {**module._parameters, **module._buffers, **vars(module)}
        tensors |= {f"{prefix}.{name}".strip("."): t for name, t in held.items() if isinstance(t, Tensor)}
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors |= {f"optimiser {name}": t for name, t in state.items() if isinstance(t, Tensor)}
    tensors |= {f"batch[{i}]": t for i, t in enumerate(tree_leaves(batch)) if isinstance(t, Tensor)}
    wanted = torch.device(device)

    def is_there(tensor: Tensor) -> bool:
        if used is not None and tensor.untyped_storage()._cdata not in used:
            return True
        same_index = wanted.index is None or tensor.device.index in (None, wanted.index)
        return tensor.dim() == 0 or (tensor.device.type == wanted.type and same_index)

    return [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if not is_there(tensor)]


def check_on_device(model, batch=None, optimizer=None, device: str = "cuda") -> None:
    """Raise CpbkitError with the names of the tensors that are not on `device`."""
    wrong = find_misplaced(model, batch, optimizer, device)
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CpbkitError(
            f"every tensor must be on {device}; {'; '.join(wrong[:5])}{more}. "
            "Use model.to(device), register_buffer for constants, and batch.to(device)"
        )


def is_capturing() -> bool:
    """Say whether a graph of the device's is being recorded: then no value of it may be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
