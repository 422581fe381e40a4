"""A training, or a trained model, as bytes: safetensors with its description in the metadata."""

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cpbkit.errors import RunError
from cpbkit.training.loop import Fit
from cpbkit.training.stack import Stack

META = "cpbkit"


def save_fit(state: Fit, data: dict[str, str]) -> bytes:
    """Write where a training stands, at any step; `data` is a fingerprint of each series of its unit."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.stack.state().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if state.stack.weights.is_cuda:
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.stack.weights.device)
    about = {"names": state.stack.names, "epoch": state.epoch, "step": state.step, "curves": state.curves, "data": data}
    about["ended"] = state.ended
    return safetensors.torch.save(tensors, {META: json.dumps(about)})


def load_fit(stack: Stack, content: bytes, data: dict[str, str]) -> Fit | None:
    """Make `stack` the saved one and return its training, ready for `fit`, or None where it was of other data.

    Errors: RunError for damaged bytes.
    """
    tensors, about = load(content)
    if about["data"] != data:
        return None
    stack.restore(about["names"], {k: v for k, v in tensors.items() if not k.startswith("rng.")})
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], stack.weights.device)
    ended = {row: tuple(end) for row, end in about.get("ended", {}).items()}
    return Fit(stack, epoch=about["epoch"], step=about["step"], curves=about["curves"], ended=ended)


def read_share(path: Path, steps: int, epochs: int) -> float:
    """Return how much of its epochs a saved training has behind it, from 0 to 1; 0 for damaged bytes."""
    try:
        with safetensors.safe_open(path, "pt") as saved:
            about = json.loads(saved.metadata()[META])
    except safetensors.SafetensorError:
        return 0.0  # `load` says so, to whom goes on from there
    return (about["epoch"] + about["step"] / steps) / epochs


def save(tensors: dict[str, Tensor], about: dict) -> bytes:
    """Write one model's tensors with what it takes to use them."""
    text = json.dumps(about, allow_nan=False)
    return safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, {META: text})


def load(content: bytes) -> tuple[dict[str, Tensor], dict]:
    """Read what `save` or `save_fit` wrote. Errors: RunError for damaged bytes."""
    try:
        tensors = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")
        about = json.loads(content[8 : 8 + length])["__metadata__"][META]
        return tensors, json.loads(about)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"these bytes are no model or checkpoint of cpbkit: {error}") from error
