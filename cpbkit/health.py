"""Is the training sound? The first tensor that is not finite, and a table of checks over finished models."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SCALE = 0.01, 100.0  # between which the root mean square of scaled targets should lie
FIRST_LOSS = 10.0  # times the loss of persistence or the mean above which a first loss is off
CLIPPED = 0.9  # share of clipped steps above which the gradient is out of hand
STUCK = 0.999  # share of its first train loss above which a model has learned nothing
COLLAPSED = 0.02  # deviation of forecasts over that of the truth below which they say nothing
DEAD = 1e-6  # and below which they are all the same


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
    """Examine each line of a ledger: are its targets and first loss of the right order, has it learned anything?"""
    return [check for line in results for check in _check(line)]


def _check(line: dict) -> Iterable[Check]:
    name = line["series"]
    if line["status"] == "failed":
        yield Check(name, "data", "SICK", line["reason"])
        return
    curve, floors = line["curve"], {kind: line[kind] for kind in ("persistence", "mean") if kind in line}
    train, validation, norms, clipped = (
        [value for value in curve[which] if value is not None]
        for which in ("train", "validation", "gradient_norm", "clipped")
    )
    if line["status"] == "sick":
        yield Check(name, "finite", "SICK", line["reason"])
    else:
        yield Check(name, "finite", "OK", f"every loss of {line['epochs']} epochs")
    if "could not be captured" in line.get("mode", ""):
        yield Check(name, "step", "NOTE", line["mode"])
    size = math.sqrt(floors["persistence"]["train"])
    verdict = "OK" if SCALE[0] <= size <= SCALE[1] else "NOTE" if size < SCALE[0] else "SICK"
    why = "" if verdict == "OK" else ", far from 1: a step of the usual size is too large or too small; scale them"
    yield Check(name, "target scale", verdict, f"scaled targets are {size:.3g} on average{why}")
    if not train:
        return
    beside = ", ".join(f"{kind} {losses['train']:.3g}" for kind, losses in floors.items())
    verdict = "OK" if train[0] < FIRST_LOSS * max(losses["train"] for losses in floors.values()) else "SICK"
    yield Check(name, "first loss", verdict, f"{train[0]:.3g} in the first epoch; {beside}")
    fall = min(train) / train[0]
    verdict = "OK" if fall < STUCK else "NOTE"
    yield Check(name, "learns", verdict, f"train loss {train[0]:.4g} to {min(train):.4g}")
    if validation:
        least, kind = min((losses["validation"], kind) for kind, losses in floors.items())
        verdict = "OK" if min(validation) < least else "NOTE"
        yield Check(name, "holds", verdict, f"best validation loss {min(validation):.4g}, that of {kind} {least:.4g}")
    spreads = {head: judged["spread"] for head, judged in line["test"].items()}
    if norms and clipped:
        share, text = sum(clipped) / len(clipped), f"norm before clipping {norms[0]:.3g} to {norms[-1]:.3g}"
        verdict, text = "OK" if share < CLIPPED else "NOTE", f"{text}, {share:.0%} of steps clipped"
        if not max(norms):
            solved = any(spread > DEAD for spread in spreads.values())
            verdict, text = ("OK", "solved, not trained") if solved else ("SICK", "no gradient reaches the weights")
        yield Check(name, "gradient", verdict, text)
    for head, spread in spreads.items():
        verdict, text = "OK", f"forecasts of {head} vary {spread:.2%} as much as the truth"
        if spread <= COLLAPSED:
            verdict, text = ("NOTE", text) if spread > DEAD else ("SICK", f"every forecast of {head} is the same")
        yield Check(name, f"output {head}", verdict, text)
