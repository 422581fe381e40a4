"""Is the training sound? The first tensor that is not finite, and a table of checks over finished models."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_LOSS = 10.0  # times the loss of persistence above which a first loss is off
CLIPPED = 0.9  # share of clipped steps above which the gradient is out of hand
STUCK = 0.999  # share of its first train loss above which a model has learned nothing
COLLAPSED = 0.02  # deviation of forecasts over that of the truth below which they say nothing


@dataclass(frozen=True)
class Check:
    """One line of the health table."""

    series: str
    check: str
    verdict: str  # OK | NOTE | SICK
    evidence: str


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
    return found[0] if found else "only the loss or a gradient"


def check_results(results: Iterable[dict]) -> list[Check]:
    """Examine each line of a ledger: was its first loss of the right order, did it learn, does it say anything?"""
    return [check for line in results for check in _check(line)]


def _check(line: dict) -> Iterable[Check]:
    name = line["series"]
    if line["status"] == "failed":
        yield Check(name, "data", "SICK", line["reason"])
        return
    curve, floor = line["curve"], line["persistence"]
    train = [loss for loss in curve["train"] if loss is not None]
    if line["status"] == "sick":
        yield Check(name, "finite", "SICK", line["reason"])
        if not train:
            return
    else:
        yield Check(name, "finite", "OK", f"every loss of {line['epochs']} epochs")
    ratio = train[0] / floor["train"]
    verdict = "OK" if ratio < FIRST_LOSS else "SICK"
    yield Check(name, "first loss", verdict, f"{train[0]:.3g}, {ratio:.3g} times that of persistence")
    fall = min(train) / train[0]
    verdict = "OK" if fall < STUCK else "NOTE"
    yield Check(name, "learns", verdict, f"train loss {train[0]:.4g} to {min(train):.4g}")
    clipped = [share for share in curve["clipped"] if share is not None]
    norms = [norm for norm in curve["gradient_norm"] if norm is not None]
    if clipped and norms:
        share = sum(clipped) / len(clipped)
        text = f"norm before clipping {norms[0]:.3g} to {norms[-1]:.3g}, {share:.0%} of steps clipped"
        yield Check(name, "gradient", "OK" if share < CLIPPED and norms[-1] > 0 else "NOTE", text)
    for head, judged in line["test"].items():
        spread = judged.get("spread")
        if spread is not None and math.isfinite(spread):
            verdict = "OK" if spread > COLLAPSED else "NOTE"
            text = f"forecasts of {head} vary {spread:.2%} as much as the truth"
            yield Check(name, f"spread of {head}", verdict, text)
