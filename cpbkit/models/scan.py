"""The step of a GRU and an LSTM, and the scan of a GRU over all steps, as operators with gradients of their own.

Recorded operator by operator, autograd adds up the gradient of each weight at every step, and joins the parts of every
gate; a scan multiplies once for each weight, and gates stay where they are computed. Shapes as in `layers`: M models,
B batch, L context, C channels, D width. A GRU's gates in torch's order: reset and update, in one tensor, and new.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input


def step(before: Tensor, gates: Tensor, new: Tensor, past: Tensor, after: Tensor) -> None:
    """Open the gates in place and write the state after them; past is what the new gate gets of the state, unreset."""
    reset, update = gates.sigmoid_().chunk(2, -1)
    new.addcmul_(reset, past).tanh_()
    torch.lerp(new, before, update, out=after)


def step_back(d_after: Tensor, before: Tensor, gates: Tensor, new: Tensor, past: Tensor) -> Tensor:
    """Write the gradients before the gates in place of what `step` left; return what of the state's passes them by.

    In place, since that is in the cache; autograd refuses a second pass over what was changed.
    """
    reset, update = gates.chunk(2, -1)
    kept = d_after * update
    sigmoid_backward((before - new).mul_(d_after), update, grad_input=update)
    tanh_backward(d_after - kept, new, grad_input=new)
    d_reset = new * past
    torch.mul(new, reset, out=past)
    sigmoid_backward(d_reset, reset, grad_input=reset)
    return kept


class GRUStep(torch.autograd.Function):
    """One step: the products of the input and of the state (M, B, 3 D) with their biases, state (M, B, D) -> state."""

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
        sizes = [2 * state.shape[-1], state.shape[-1]]
        (gates, new), (others, past) = of_input.split(sizes, -1), of_state.split(sizes, -1)
        gates, new, past, after = gates + others, new.clone(), past.clone(), torch.empty_like(state)
        step(state, gates, new, past, after)
        ctx.save_for_backward(state, gates, new, past)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        state, gates, new, past = ctx.saved_tensors
        kept = step_back(grad, state, gates, new, past)
        return torch.cat([gates, new], -1), torch.cat([gates, past], -1), kept


class LSTMStep(torch.autograd.Function):
    """One step: the products of the input and of the state (M, B, 4 D) with their biases, cell (M, B, D) -> both.

    Gates in torch's order: input, forget, new, output.
    """

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = of_input + of_state
        width = cell.shape[-1]
        gates[..., : 2 * width].sigmoid_()
        gates[..., 2 * width : 3 * width].tanh_()
        gates[..., 3 * width :].sigmoid_()
        input, forget, new, output = gates.chunk(4, -1)
        after = (forget * cell).addcmul_(input, new)
        shown = after.tanh()
        ctx.save_for_backward(gates, cell, shown)
        return output * shown, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor, d_cell: Tensor) -> tuple[Tensor, ...]:
        gates, cell, shown = ctx.saved_tensors
        input, forget, new, output = gates.chunk(4, -1)
        d_cell = d_cell + torch.ops.aten.tanh_backward(d_state * output, shown)
        sigmoid_backward(d_state * shown, output, grad_input=output)
        kept, d_input = d_cell * forget, d_cell * new
        tanh_backward(d_cell * input, new, grad_input=new)
        sigmoid_backward(d_input, input, grad_input=input)
        sigmoid_backward(d_cell * cell, forget, grad_input=forget)
        return gates, gates, kept


class GRUScan(torch.autograd.Function):
    """One layer of torch.nn.GRU for M models: x (M, L, B, C), state (M, B, D) -> (M, L, B, D), its end.

    Weights (M, C, 3 D) of the input and (M, D, 3 D) of the state, biases (M, 1, 3 D). Steps come before the batch, so
    that a step of a model lies together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a model may read the states or their end alone
        of_input, bias, of_state, state_bias = weights
        gated, steps = 2 * state.shape[-1], x.shape[1:3]
        both = torch.cat([bias[..., :gated] + state_bias[..., :gated], bias[..., gated:]], -1)
        # A column of ones takes the bias into the product, which else would first be spread over all its rows.
        x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(1, 2)
        input = torch.cat([of_input, both], 1)
        gates, news = ((x @ part).unflatten(1, steps) for part in (input[..., :gated], input[..., gated:]))
        pasts = torch.empty_like(news)
        states = torch.cat([state[:, None], torch.empty_like(news)], 1)
        to_gates, to_new = of_state[..., :gated], of_state[..., gated:]
        state_bias = state_bias[..., gated:]
        products, product = gates.new_empty(gates[:, 0].shape), torch.empty_like(state)
        rows = [each.unbind(1) for each in (states[:, :-1], gates, news, pasts, states[:, 1:])]
        for before, gate, new, past, after in zip(*rows, strict=True):
            # Into a slice they would go model by model, each with a call of its own.
            gate.add_(torch.bmm(before, to_gates, out=products))
            torch.add(torch.bmm(before, to_new, out=product), state_bias, out=past)
            step(before, gate, new, past, after)
        ctx.save_for_backward(x, states, gates, news, pasts, of_input, of_state)
        return states[:, 1:], states[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        x, states, gates, news, pasts, of_input, of_state = ctx.saved_tensors
        gated, steps = gates.shape[-1], gates.shape[1:3]
        to_gates, to_new = (part.mT.contiguous() for part in (of_state[..., :gated], of_state[..., gated:]))
        d_state = torch.zeros_like(states[:, 0]) if d_end is None else d_end
        rows = [each.unbind(1) for each in (states[:, :-1], gates, news, pasts)]
        for t, (before, gate, new, past) in reversed(list(enumerate(zip(*rows, strict=True)))):
            if grad is not None:
                d_state = d_state + grad[:, t]
            kept = step_back(d_state, before, gate, new, past)
            d_state = kept.baddbmm_(gate, to_gates).baddbmm_(past, to_new)
        gates, news, pasts, before = (each.flatten(1, 2) for each in (gates, news, pasts, states[:, :-1]))
        d_of_state = torch.cat([before.mT @ gates, before.mT @ pasts], -1)
        d_of_input, d_bias = torch.cat([x.mT @ gates, x.mT @ news], -1).split([x.shape[-1] - 1, 1], 1)
        d_state_bias = torch.cat([d_bias[..., :gated], pasts.sum(1, keepdim=True)], -1)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.baddbmm(gates @ of_input[..., :gated].mT, news, of_input[..., gated:].mT)
            d_x = d_x.unflatten(1, steps)
        return d_x, d_state, d_of_input, d_bias, d_of_state, d_state_bias
