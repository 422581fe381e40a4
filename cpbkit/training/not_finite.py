"""The first tensor of a diverged model that is not finite."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def find_not_finite(net: nn.Module, row: int, x: Tensor, last: Tensor, y: Tensor) -> str:
    """Name the first tensor of one model that is not finite, in the order of the computation, or say that none is.

    row: the model in the stack; x (M, B, L, C), last (M, B, K), y (M, B, H, K) as in training.
    """
    named = {"the scaled inputs": x, "the last observed row": last, "the scaled targets": y}
    named |= {f"weight {name}": parameter for name, parameter in net.named_parameters()}
    for name, tensor in named.items():
        if not tensor[row].isfinite().all():
            return name
    found: list[str] = []

    def look(name: str):
        def hook(module, inputs, output):
            tensor = output[0] if isinstance(output, tuple) else output
            if not found and not tensor[row].isfinite().all():
                found.append(f"the output of {name or 'the network'}")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in net.named_modules()]
    try:
        net(x, last)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""
