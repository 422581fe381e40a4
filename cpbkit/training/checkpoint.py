"""A training, or a trained model, as bytes: safetensors with its description and a checksum in the metadata."""

import hashlib
import json
import math

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cpbkit import foreign
from cpbkit.errors import RunError
from cpbkit.training.loop import START, Fit, is_out_of_memory
from cpbkit.training.stack import Stack

META, CHECKSUM = "cpbkit", "sha256"
HEADER = 95 << 20  # bytes of a checkpoint's description, with the curves of a whole stack; safetensors takes 100 MB
FIT = {"names": [str], "epoch": int, "step": int, "curves": dict, "data": dict, "ended?": dict}


def save_fit(state: Fit, data: dict[str, str]) -> bytes:
    """Write where a training stands, at any step; `data` is a fingerprint of each series of its job."""
    tensors = {name: tensor.detach().cpu() for name, tensor in state.stack.state().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if state.stack.weights.is_cuda:
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.stack.weights.device)
    curves = {
        # A sick trial of a search waits for the others, and JSON has no nan.
        row: {curve: [x if math.isfinite(x) else str(x) for x in numbers] for curve, numbers in of_row.items()}
        for row, of_row in state.curves.items()
    }
    about = {"names": state.stack.names, "epoch": state.epoch, "step": state.step, "curves": curves, "data": data}
    return save(tensors, about | {"ended": state.ended})


def load_fit(stack: Stack, content: bytes, data: dict[str, str]) -> Fit | None:
    """Make `stack` the saved one and return its training, ready for `fit`, or None where it was of other data.

    Errors: RunError for bytes that are damaged, or of another version; the stack may be spoiled then.
    """
    tensors, about = load(content, FIT, HEADER)
    if about["data"] != data:
        return None
    try:
        return _restore(stack, tensors, about)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise RunError(f"this checkpoint is of another version of cpbkit: {error}") from error


def _restore(stack: Stack, tensors: dict[str, Tensor], about: dict) -> Fit:
    now = stack.state()
    for name, tensor in tensors.items():  # models that ended have left it, so that it has fewer rows
        if name in now and (tensor.dtype, tensor.shape[1:]) != (now[name].dtype, now[name].shape[1:]):
            raise ValueError(f"{name} has another shape or type")
    wanted = {*now, *(f"table.{name}" for name in START)}
    if not set(about["names"]) <= set(stack.names) or not wanted <= tensors.keys():
        raise ValueError("it has other rows or columns")
    stack.restore(about["names"], {k: v for k, v in tensors.items() if not k.startswith("rng.")})
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and stack.weights.is_cuda:
        torch.cuda.set_rng_state(tensors["rng.cuda"], stack.weights.device)
    ended = {row: tuple(end) for row, end in about.get("ended", {}).items()}
    curves = {
        row: {curve: list(map(float, numbers)) for curve, numbers in of_row.items()}
        for row, of_row in about["curves"].items()
    }
    return Fit(stack, epoch=about["epoch"], step=about["step"], curves=curves, ended=ended)


def read_share(content: bytes, steps: int, epochs: int) -> float:
    """Return how much of its epochs a saved training has behind it, from 0 to 1; 0 for damaged bytes."""
    try:
        about = foreign.parse(_metadata(content, HEADER)[META], FIT, HEADER)
    except foreign.Damaged:
        return 0.0  # `load` says so, to whom goes on from there
    return min(1.0, max(0.0, (about["epoch"] + about["step"] / steps) / epochs))


def save(tensors: dict[str, Tensor], about: dict) -> bytes:
    """Write one model's tensors with what it takes to use them."""
    tensors, described = {k: v.contiguous() for k, v in tensors.items()}, json.dumps(about, allow_nan=False)
    content = safetensors.torch.save(tensors, {META: described})
    # Two entries of metadata come in a random order from the library, and the same model should have the same bytes.
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"][CHECKSUM] = _checksum(tensors, described)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors behind it are aligned
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[8 + length :]])


def _checksum(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load(content: bytes, form: object = dict, limit: int = foreign.SIZE) -> tuple[dict[str, Tensor], dict]:
    """Read what `save` or `save_fit` wrote, whose description has a form and at most `limit` bytes.

    Errors: RunError for bytes that are damaged, or have another checksum. Models of before there was one have none.
    """
    try:
        told = _metadata(content, limit)
        tensors = safetensors.torch.load(content)
        if CHECKSUM in told and told[CHECKSUM] != _checksum(tensors, told[META]):
            raise foreign.Damaged("its checksum does not hold")
        return tensors, foreign.parse(told[META], form, limit)
    except (safetensors.SafetensorError, foreign.Damaged, KeyError, ValueError) as error:
        raise RunError(f"these bytes are no model or checkpoint of cpbkit: {error}") from error


def _metadata(content: bytes, limit: int) -> dict[str, str]:
    """Read the metadata of a file. Errors: Damaged."""
    length = int.from_bytes(content[:8], "little")
    header = foreign.parse(content[8 : 8 + min(length, limit + 1)], {"__metadata__": {META: str}}, limit)
    told = header["__metadata__"]
    if unknown := told.keys() - {META, CHECKSUM}:
        raise foreign.Damaged(f"its metadata holds {sorted(unknown)[0]!r}")
    return told
