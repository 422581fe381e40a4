"""The tensors of a step: where they are, and batches of them."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cpbkit.errors import CpbkitError


def to_device(batch, device: str):
    """Move every tensor of a batch."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)


def has_axis(thing, axis: int) -> bool:
    """Say whether a leaf of a batch is a tensor with that axis."""
    return isinstance(thing, Tensor) and thing.dim() > axis


def widen(batch, times: int, axis: int = 0):
    """Repeat every tensor of a batch along the axis of its samples."""
    return tree_map(lambda t: torch.cat([t] * times, axis) if has_axis(t, axis) else t, batch)


def count_samples(batch, axis: int = 0) -> int:
    """Return the samples of a batch, by its first tensor."""
    return next((t.shape[axis] for t in tree_leaves(batch) if has_axis(t, axis)), 0)


def find_misplaced(model, batch, optimizer=None, device: str = "cuda") -> list[str]:
    """Name every tensor that is not on `device`: parameters, buffers, plain attributes, state, batch.

    Plain attributes are those that `module.to()` leaves behind. The step count of an optimiser may stay on the
    host; so may a tensor without dimensions.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules() if model is not None else ():
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.{name}".strip(".")] = value
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors.update({f"optimiser {name}": t for name, t in state.items() if isinstance(t, Tensor) and t.dim()})
    tensors.update({f"batch[{i}]": t for i, t in enumerate(tree_leaves(batch)) if isinstance(t, Tensor)})
    wanted = torch.device(device)

    def is_there(tensor: Tensor) -> bool:
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
