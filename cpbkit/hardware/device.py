"""The threads that torch computes on, and a device that is through with its work."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_threads(count: int | None = None) -> Iterator[None]:
    """Let this process compute on so many threads, or as many as are set meanwhile, and afterwards on those before."""
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def wait(device: torch.device | str) -> None:
    """Wait for the device, where there is one to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
