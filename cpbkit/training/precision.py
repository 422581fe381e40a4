"""How exactly torch computes, set for a while and put back."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator

import torch

from cpbkit.config.experiment import Training

logger = logging.getLogger(__name__)
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # read once, when cuBLAS starts


def keep_matmul_precision() -> Callable[[], None]:
    """Return what puts the precision of float32 products back as it is now, whichever of torch's interfaces set it."""
    try:
        return functools.partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    except RuntimeError:  # the newer one did, and the older one refuses to read it
        matmul = torch.backends.cuda.matmul
        return functools.partial(setattr, matmul, "fp32_precision", matmul.fp32_precision)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let products of float32 be TF32, or not, and put the setting back."""
    put_back = keep_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        put_back()


@contextlib.contextmanager
def precision(training: Training, device: torch.device) -> Iterator[torch.autocast]:
    """Set torch up for the precision, yield the autocast to compute under, and put everything back."""
    half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(training.precision)
    # A weight is cast once for each `with` of it; within an autocast of the caller's its casts would outlive a step.
    once = not torch.is_autocast_enabled(device.type)
    autocast = torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None, cache_enabled=once)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(training.deterministic)
    if training.deterministic:
        if torch.cuda.is_initialized() and CUBLAS not in os.environ:
            logger.warning("CUDA was in use before %s was set: reruns may differ; set it to :4096:8 first", CUBLAS)
        os.environ.setdefault(CUBLAS, ":4096:8")  # without it torch refuses products on a GPU
    try:
        with tf32(training.precision == "tf32"):
            yield autocast
    finally:
        torch.use_deterministic_algorithms(before)
