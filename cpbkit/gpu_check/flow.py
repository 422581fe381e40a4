"""What moves the weights in a step: which of the person's lines go from gradients to weights."""

from collections.abc import Collection

import torch
from torch.utils._pytree import tree_leaves

from cpbkit.gpu_check.call_stacks import OwnLine


class Flow:
    """The operators of a step, by the memory that they read and write."""

    def __init__(self, weights: Collection[torch.Tensor]):
        self._weights = _places(weights)
        self._gradients = _places(weight.grad for weight in weights if weight.grad is not None)
        self._calls: list[tuple[OwnLine | None, set[int], set[int], bool]] = []

    def note(self, line: OwnLine | None, function, args, made) -> None:
        read = _places(tree_leaves(args))
        written = _places(tree_leaves(args[0])) if function._schema.is_mutable and args else _places(tree_leaves(made))
        self._calls.append((line, read, written, torch._C._current_graph_task_id() != -1))

    def find_moving(self) -> set[OwnLine]:
        """Return the lines that make something of gradients which ends in a weight: an optimiser written by hand."""
        made = set(self._gradients)
        of_gradients = []
        for _, read, written, backward in self._calls:
            is_made = backward or not made.isdisjoint(read)
            made = made | written if is_made else made - (written - read)
            of_gradients.append(is_made and not backward)
        wanted, lines = set(self._weights), set()
        for (line, read, written, _), is_made in zip(self._calls[::-1], of_gradients[::-1], strict=True):
            if wanted.isdisjoint(written):
                continue
            wanted = (wanted - (written - read)) | read  # what is written anew held something else before
            if is_made and line:
                lines.add(line)
        return lines


def _places(things) -> set[int]:
    tensors = (thing for thing in things if isinstance(thing, torch.Tensor) and thing.layout is torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
