"""The machine's own ceiling."""

import time

import torch

from cpbkit.hardware.device import on_threads, wait
from cpbkit.models.products import choose
from cpbkit.training.precision import tf32

MATMUL = 1024  # rows and columns of the product that says what the machine can do
MATMUL_GPU = 8192
MATMUL_SECONDS = 0.3


def matmul_rate(device: torch.device, precision: str) -> float:
    """Measure the best rate of a large square product, on a CPU by one thread: floating-point operations a second."""
    n = MATMUL_GPU if device.type == "cuda" else MATMUL
    dtype = getattr(torch, "float32" if precision == "tf32" else precision)
    with on_threads(1), tf32(precision == "tf32"):
        a, b = torch.randn(2, 1, n, n, device=device).to(dtype)
        product = choose(a, b).product  # as the models take it
        product(a, b)
        clock = time.perf_counter if device.type == "cuda" else time.thread_time  # what others do is not its time
        best, end = float("inf"), time.perf_counter() + MATMUL_SECONDS
        while time.perf_counter() < end:
            wait(device)
            begun = clock()
            product(a, b)
            wait(device)
            best = min(best, clock() - begun)
    return 2 * n**3 / best
