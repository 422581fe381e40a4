"""Products of matrices of M models, (M, R, K) @ (M, K, N), by what multiplies them fastest here.

Torch multiplies float32 by MKL, which keeps to AVX2 on AMD. OneDNN, which torch brings along too, takes AVX-512: twice
the rate from Zen 5 on, whose units are as wide as that. It takes one model at a time, which costs small products more
than they gain.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpbkit.hardware.provenance import cpu_fact

ZEN_5 = 0x1A  # family of AMD's processors
LEAST = 2_000_000  # multiplications of one model


@functools.cache
def is_onednn_faster() -> bool:
    """Say whether oneDNN multiplies float32 faster than MKL on this processor; by its kind, for a trial may waver."""
    wide = cpu_fact("vendor_id") == "AuthenticAMD" and int(cpu_fact("cpu family")) >= ZEN_5
    taken = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and taken


class Multiply(NamedTuple):
    """How to multiply without gradients."""

    product: Callable[..., Tensor]  # a, b, out= -> a @ b
    add_product: Callable[[Tensor, Tensor, Tensor], Tensor]  # total, a, b -> total, to which a @ b is added in place


def choose(a: Tensor, b: Tensor) -> Multiply:
    """Return how to multiply tensors of such shapes."""
    return ONEDNN if _takes_onednn(a, b) else BMM


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b + bias (M, 1, N), with gradients."""
    if _takes_onednn(a, b) and not torch.is_autocast_enabled("cpu"):
        return _Product.apply(a, b, bias)
    return a @ b if bias is None else torch.baddbmm(bias, a, b)


def _takes_onednn(a: Tensor, b: Tensor) -> bool:
    large = a.shape[1] * a.shape[2] * b.shape[2] >= LEAST
    return large and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and is_onednn_faster()


def _product(a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    biases = [None] * len(a) if bias is None else bias[:, 0]
    linear = torch.ops.mkldnn._linear_pointwise  # x, weight (N, K), bias (N), what to do with the result
    out = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    for x, w, c, y in zip(_packed(a), _packed(b), biases, out, strict=True):
        y.copy_(linear(x, w.mT, c, "none", [], ""))  # one by one, while it is in the cache
    return out


def _packed(x: Tensor) -> Tensor:
    """Return matrices whose rows or columns lie one after another: of others oneDNN goes number by number."""
    *_, rows, columns = x.shape
    return x if x.stride()[1:] in ((columns, 1), (1, rows)) else x.contiguous()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total.add_(_product(a, b))


BMM, ONEDNN = Multiply(torch.bmm, Tensor.baddbmm_), Multiply(_product, _add_product)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.has_bias = bias is not None
        return _product(a, b, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        d_a = _product(grad, b.mT) if ctx.needs_input_grad[0] else None
        d_b = _product(a.mT, grad) if ctx.needs_input_grad[1] else None
        return d_a, d_b, grad.sum(1, keepdim=True) if ctx.has_bias else None
