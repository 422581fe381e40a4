"""Figures of the machine: launch cost, copies, matrix products, and the path and time of a recurrent layer."""

import functools
import math
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from cpbkit.gpu_check.clocks import CudaClock, make_clock, measure_call, time_block
from cpbkit.gpu_check.trace import read_path
from cpbkit.hardware.chips import find_chip

PERSISTENT = 128  # width up to which cuDNN's persistent kernels run backward too; forward it is 192


def probe_machine(device: str, seconds: float = 4.0) -> dict[str, float]:
    """Measure launches, copies and matrix products; values in µs, GB/s and TFLOP/s, named with their unit.

    Where the chip is a named one, shares of its stated peaks come along.
    """
    clock, on_gpu = make_clock(device), torch.device(device).type == "cuda"
    found: dict[str, float] = {}

    def best(run: Callable[[], object], work: float) -> float:
        """Return work a second of the fastest of a few runs."""
        run()
        budget, spent, fastest = seconds / 12, 0.0, math.inf
        while spent < budget:
            once = time_block(clock, run)
            spent, fastest = spent + once, min(fastest, once)
        return work / fastest

    one = torch.ones(1, device=device)
    found["launch µs"] = measure_call(clock, lambda: one.add_(1))
    tracked = torch.ones(1, device=device, requires_grad=True)
    found["launch with autograd µs"] = measure_call(clock, lambda: tracked.add(1))
    a = torch.ones((256 if on_gpu else 16) << 18, device=device)  # 256 MB on a GPU
    b = torch.empty_like(a)
    found["copy GB/s"] = best(lambda: b.copy_(a), 2 * a.nbytes) / 1e9
    for size in (1 << 16, 1 << 18, 1 << 26) if on_gpu else ():
        for pinned in (False, True):
            source, target = torch.ones(size // 4, pin_memory=pinned), torch.empty(size // 4, device=device)
            copy = functools.partial(target.copy_, source, non_blocking=True)
            name = f"to the device, {size >> 10} KB {'pinned' if pinned else 'pageable'} GB/s"
            found[name] = best(copy, size) / 1e9
    n = 4096 if on_gpu else 512
    for name in ("float32", "float16", "bfloat16") if on_gpu else ("float32",):
        x = torch.ones(n, n, device=device, dtype=getattr(torch, name))
        found[f"matmul {name} TFLOP/s"] = best(functools.partial(torch.matmul, x, x), 2.0 * n**3) / 1e12
    if not on_gpu:
        return found
    chip = find_chip(torch.cuda.get_device_name(device))
    if chip:
        for name, peak in (("float32", chip.float32), ("float16", chip.float16)):
            found[f"matmul {name}, share of the stated peak"] = found[f"matmul {name} TFLOP/s"] * 1e12 / peak
        found["copy, share of the stated bandwidth"] = found["copy GB/s"] * 1e9 / chip.bandwidth
    free, total = torch.cuda.mem_get_info(device)
    return found | {"memory free GB": free / 1e9, "memory GB": total / 1e9}


def predict_path(hidden: int, capability: tuple[int, int] = (7, 5), cudnn: int = 91002, enabled: bool = True) -> str:
    """Say what will run nn.LSTM or nn.GRU in float32 on a GPU: cuDNN's persistent or its standard kernels, or native.

    The rule is that of PyTorch's aten/src/ATen/native/cudnn/RNN.cpp (get_algo): read, not measured. cudnn: as
    torch.backends.cudnn.version() says it.
    """
    if not enabled:
        return "native"
    small = hidden <= PERSISTENT and capability >= (6, 0) and cudnn >= 8201
    return "cudnn persistent" if small else "cudnn standard"


def time_recurrence(hidden: int, device: str, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, repeats: int = 7) -> dict:
    """Time forward and backward of a layer; on a GPU hold the predicted path against the kernels that ran.

    Without a GPU the prediction is for a T4.
    """
    layer = kind(8, hidden, batch_first=True).to(device)
    x = torch.randn(32, 60, 8, device=device)  # (B, L, C)

    def step() -> None:
        layer.zero_grad()
        layer(x)[0].sum().backward()

    clock = make_clock(device)
    step()
    ms = median(time_block(clock, step) for _ in range(repeats)) * 1e3
    if not isinstance(clock, CudaClock):
        return {"hidden": hidden, "ms": ms, "chip": "T4", "predicted": predict_path(hidden), "ran": ""}
    p, flags = torch.cuda.get_device_properties(device), torch.backends.cudnn
    predicted = predict_path(hidden, (p.major, p.minor), flags.version() or 0, flags.enabled)
    try:
        ran = read_path(clock.trace(step).names)
    except (ValueError, RuntimeError) as error:
        ran = f"not seen: {error}"
    return {"hidden": hidden, "ms": ms, "chip": p.name, "predicted": predicted, "ran": ran}
