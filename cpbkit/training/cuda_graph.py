"""A step as one CUDA graph: it replays without the host, and one that cannot be captured leaves torch as it was."""

import contextlib
from collections.abc import Callable

import torch

WARM_UP = 3  # steps before a capture


def capture(
    step: Callable[[], object], device: str | torch.device = "cuda", prepare: Callable[[], object] = lambda: None
) -> torch.cuda.CUDAGraph:
    """Warm a step up and capture it; nothing is computed while it is captured.

    prepare: runs before each step. Errors: RuntimeError for a step that cannot be captured.
    """
    with torch.cuda.device(device):
        index, graph, pool = torch.cuda.current_device(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[index]
        unharmed = generator.clone_state()
        outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(outer)
        with torch.cuda.stream(side):  # libraries choose their kernels and the optimiser makes its state
            for _ in range(WARM_UP):
                prepare()
                step()
            prepare()
        outer.wait_stream(side)
        try:
            with torch.cuda.stream(outer), torch.cuda.graph(graph, pool, side):  # a failure does not leave `side`
                step()
        except BaseException:
            generator.graphsafe_set_state(unharmed)  # the one that the broken capture drew from would refuse to draw
            # Older torches leave the allocator capturing: it empties no cache, and frees none for what is to come
            # (pytorch pull request 180395); torch 2.4 has no such call.
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(index, pool)
            raise
    return graph
