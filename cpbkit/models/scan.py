"""The step of a GRU and an LSTM, and their scan over all steps, as operators with gradients of their own.

Recorded operator by operator, autograd adds up the gradient of each weight at every step, and joins the parts of every
gate; a scan multiplies once for each weight, and gates stay where they are computed. Shapes as in `layers`: M models,
B batch, L context, C channels, D width. Gates in torch's order, a GRU's: reset and update, in one tensor, and new; an
LSTM's, all in one: input, forget, new, output.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpbkit.models.products import choose, is_onednn_faster

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input


def tanh(x: Tensor, out: Tensor) -> Tensor:
    """Write the tanh of x, there where MKL keeps to AVX2 as 1 - 2 sigmoid(-2 x): 0.4 ns for each, not 2.1."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and is_onednn_faster():
        return torch.mul(x, -2, out=out).sigmoid_().mul_(-2).add_(1)
    return torch.tanh(x, out=out)


def gru_step(before: Tensor, gates: Tensor, new: Tensor, past: Tensor, after: Tensor) -> None:
    """Open the gates in place and write the state after them; past is what the new gate gets of the state, unreset."""
    reset, update = gates.sigmoid_().chunk(2, -1)
    tanh(new.addcmul_(reset, past), out=new)
    torch.lerp(new, before, update, out=after)


def gru_step_back(d_after: Tensor, before: Tensor, gates: Tensor, new: Tensor, past: Tensor) -> Tensor:
    """Write the gradients before the gates in place of what `gru_step` left; return what of the state's passes them by.

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


Gates = tuple[Tensor, ...]  # of an LSTM: all in one, input, forget, new, output


def split_gates(gates: Tensor) -> Gates:
    """Return views of the products (.., 4 D) of all gates."""
    return gates, *gates.chunk(4, -1)


def split_steps(gates: Tensor) -> Iterator[Gates]:
    """Yield views of the products (M, L, B, 4 D) of all gates, a step at a time; to split once costs less."""
    return zip(*(each.unbind(1) for each in split_gates(gates)), strict=True)


def lstm_step(gates: Gates, cell: Tensor, after: Tensor, shown: Tensor, state: Tensor) -> None:
    """Open the gates in place; write the cell after them, its tanh and the state.

    The product of the new gate comes times -2: its tanh is 1 - 2 sigmoid, and one sigmoid opens all gates. Of a narrow
    part of each row it would be computed number by number.
    """
    together, input, forget, new, output = gates
    if together.dtype.itemsize < 4:  # near 0 a sigmoid of 16 bit leaves few digits of a tanh
        shown_new = new.mul(-0.5).tanh_()
        together.sigmoid_()
        new.copy_(shown_new)
    else:
        together.sigmoid_()
        new.mul_(-2).add_(1)
    torch.mul(forget, cell, out=after).addcmul_(input, new)
    tanh(after, out=shown)
    torch.mul(output, shown, out=state)


def lstm_step_back(d_state: Tensor, d_cell: Tensor, gates: Gates, cell: Tensor, shown: Tensor) -> Tensor:
    """Write the gradients before the gates in place of what `lstm_step` left; return what of the cell's passes them by.

    Both gradients that it is given are used up.
    """
    _, input, forget, new, output = gates
    d_new = d_state * output
    d_cell.add_(tanh_backward(d_new, shown, grad_input=d_new))
    sigmoid_backward(d_state.mul_(shown), output, grad_input=output)
    torch.mul(d_cell, input, out=d_new)
    torch.mul(d_cell, new, out=d_state)
    tanh_backward(d_new, new, grad_input=new)
    sigmoid_backward(d_state, input, grad_input=input)
    kept = torch.mul(d_cell, forget, out=d_new)
    sigmoid_backward(d_cell.mul_(cell), forget, grad_input=forget)
    return kept


class GRUStep(torch.autograd.Function):
    """One step: the products of the input and of the state (M, B, 3 D) with their biases, state (M, B, D) -> state."""

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
        sizes = [2 * state.shape[-1], state.shape[-1]]
        (gates, new), (others, past) = of_input.split(sizes, -1), of_state.split(sizes, -1)
        gates, new, past, after = gates + others, new.clone(), past.clone(), torch.empty_like(state)
        gru_step(state, gates, new, past, after)
        ctx.save_for_backward(state, gates, new, past)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        state, gates, new, past = ctx.saved_tensors
        kept = gru_step_back(grad, state, gates, new, past)
        return torch.cat([gates, new], -1), torch.cat([gates, past], -1), kept


class LSTMStep(torch.autograd.Function):
    """One step: the products of the input and of the state (M, B, 4 D) with their biases, cell (M, B, D) -> both."""

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = of_input + of_state
        state, after, shown = (torch.empty_like(cell) for _ in range(3))
        parts = split_gates(gates)
        parts[3].mul_(-2)
        lstm_step(parts, cell, after, shown, state)
        ctx.save_for_backward(gates, cell, shown)
        return state, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor, d_cell: Tensor) -> tuple[Tensor, ...]:
        gates, cell, shown = ctx.saved_tensors
        kept = lstm_step_back(d_state.clone(), d_cell.clone(), split_gates(gates), cell, shown)
        return gates, gates, kept


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return choose(a, b).product(a, b)


def _leave_room(first: Tensor, steps: int) -> Tensor:
    """Return first (M, B, D) and room for what each step gives: (M, 1 + steps, B, D)."""
    room = first.new_empty(len(first), 1 + steps, *first.shape[1:])
    room[:, 0] = first
    return room


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
        # The gates, and beside them first what the new gate gets of the input, then what it gets of the state: so lies
        # together what is multiplied by the weights of the state in the backward pass.
        parts = _multiply(x, torch.cat([of_input, both], 1)).unflatten(1, steps)  # (M, L, B, 3 D)
        gates, pasts = parts[..., :gated], parts[..., gated:]
        news = pasts.clone()
        states = _leave_room(state, steps[0])
        product, state_bias = torch.empty_like(parts[:, 0]), state_bias[..., gated:]
        to_gates, to_new = product[..., :gated], product[..., gated:]
        multiply = choose(state, of_state).product
        rows = [each.unbind(1) for each in (states[:, :-1], gates, news, pasts, states[:, 1:])]
        for before, gate, new, past, after in zip(*rows, strict=True):
            multiply(before, of_state, out=product)  # into a slice it would go model by model, each with a call
            gate.add_(to_gates)
            torch.add(to_new, state_bias, out=past)
            gru_step(before, gate, new, past, after)
        ctx.save_for_backward(x, states, parts, news, of_input, of_state)
        return states[:, 1:], states[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        x, states, parts, news, of_input, of_state = ctx.saved_tensors
        gated, steps = parts.shape[-1] // 3 * 2, parts.shape[1:3]
        gates, pasts = parts[..., :gated], parts[..., gated:]
        d_state = torch.zeros_like(states[:, 0]) if d_end is None else d_end
        to_state = of_state.mT.contiguous()
        add_product = choose(parts[:, 0], to_state).add_product
        rows = [each.unbind(1) for each in (states[:, :-1], gates, news, pasts, parts)]
        for t, (*step, part) in reversed(list(enumerate(zip(*rows, strict=True)))):
            if grad is not None:
                d_state = d_state + grad[:, t]
            d_state = add_product(gru_step_back(d_state, *step), part, to_state)
        flat = parts.flatten(1, 2)
        d_of_state = _multiply(states[:, :-1].flatten(1, 2).mT, flat)
        d_past_bias = flat[..., gated:].sum(1, keepdim=True)
        pasts.copy_(news)  # beside the gates once more what concerns the input
        d_of_input, d_bias = _multiply(x.mT, flat).split([x.shape[-1] - 1, 1], 1)
        d_x = _multiply(flat, of_input.mT).unflatten(1, steps) if ctx.needs_input_grad[0] else None
        return d_x, d_state, d_of_input, d_bias, d_of_state, torch.cat([d_bias[..., :gated], d_past_bias], -1)


class LSTMScan(torch.autograd.Function):
    """One layer of torch.nn.LSTM for M models: x (M, L, B, C), state and cell (M, B, D) -> (M, L, B, D), their ends.

    Weights and biases as `GRUScan` takes them, of 4 D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, cell: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        of_input, bias, of_state, state_bias = weights
        steps = x.shape[1:3]
        x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(1, 2)
        scale = torch.ones_like(bias)
        scale.chunk(4, -1)[2].fill_(-2)  # as `lstm_step` takes the new gate
        gates = _multiply(x, torch.cat([of_input, bias + state_bias], 1) * scale).unflatten(1, steps)
        states, cells = (_leave_room(first, steps[0]) for first in (state, cell))
        shown, product = torch.empty_like(states[:, 1:]), torch.empty_like(gates[:, 0])
        multiply, to_gates = choose(state, of_state).product, of_state * scale
        rows = [each.unbind(1) for each in (states[:, :-1], cells[:, :-1], cells[:, 1:], shown, states[:, 1:])]
        for parts, before, *others in zip(split_steps(gates), *rows, strict=True):
            parts[0].add_(multiply(before, to_gates, out=product))
            lstm_step(parts, *others)
        ctx.save_for_backward(x, states, cells, shown, gates, of_input, of_state)
        return states[:, 1:], states[:, -1], cells[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None, d_cell: Tensor | None) -> tuple:
        x, states, cells, shown, gates, of_input, of_state = ctx.saved_tensors
        steps, to_gates = gates.shape[1:3], of_state.mT.contiguous()
        d_state, d_cell = (torch.zeros_like(states[:, 0]) if d is None else d.clone() for d in (d_end, d_cell))
        multiply = choose(gates[:, 0], to_gates).product
        rows = [each.unbind(1) for each in (cells[:, :-1], shown)]
        for t, (parts, *others) in reversed(list(enumerate(zip(split_steps(gates), *rows, strict=True)))):
            if grad is not None:
                d_state.add_(grad[:, t])
            d_cell = lstm_step_back(d_state, d_cell, parts, *others)
            multiply(parts[0], to_gates, out=d_state)
        gates, before = gates.flatten(1, 2), states[:, :-1].flatten(1, 2)
        d_of_input, d_bias = _multiply(x.mT, gates).split([x.shape[-1] - 1, 1], 1)
        d_x = _multiply(gates, of_input.mT).unflatten(1, steps) if ctx.needs_input_grad[0] else None
        return d_x, d_state, d_cell, d_of_input, d_bias, _multiply(before.mT, gates), d_bias
