"""Every layer equals its torch.nn counterpart with copied weights, forward and gradients."""

import pytest
import torch
from torch import nn

from cpbkit.models import layers, scan

M, B, L, C, D = 3, 5, 7, 6, 8
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def pair_linear(models, singles):
    for m, one in enumerate(singles):
        models.weight.data[m] = one.weight.data.T
        models.bias.data[m, 0] = one.bias.data


def pair_norm(models, singles):
    for m, one in enumerate(singles):
        models.weight.data[m, 0], models.bias.data[m, 0] = one.weight.data, one.bias.data


def pair_recurrent(models, singles):
    for m, one in enumerate(singles):
        for i in range(one.num_layers):
            for mine, theirs in ((models.input[i], "ih"), (models.hidden[i], "hh")):
                mine.weight.data[m] = getattr(one, f"weight_{theirs}_l{i}").data.T
                mine.bias.data[m, 0] = getattr(one, f"bias_{theirs}_l{i}").data


def pair_bilstm(models, singles):
    for m, one in enumerate(singles):
        for mine, end in ((models.ahead, ""), (models.back, "_reverse")):
            for layer, theirs in ((mine.input[0], "ih"), (mine.hidden[0], "hh")):
                layer.weight.data[m] = getattr(one, f"weight_{theirs}_l0{end}").data.T
                layer.bias.data[m, 0] = getattr(one, f"bias_{theirs}_l0{end}").data


def one_bias_lstm():
    """The forced cell has one bias a gate: torch's other one is zero."""
    one = nn.LSTM(D, C, 2, batch_first=True)
    for i in range(2):
        nn.init.zeros_(getattr(one, f"bias_hh_l{i}"))
    return one


def pair_forced(models, singles):
    for m, one in enumerate(singles):
        for i in range(2):
            for mine, theirs in ((models.input[i], "ih"), (models.hidden[i], "hh")):
                for gate, weight in zip(mine, getattr(one, f"weight_{theirs}_l{i}").data.chunk(4), strict=True):
                    gate.weight.data[m] = weight.T
            for gate, bias in zip(models.hidden[i], getattr(one, f"bias_ih_l{i}").data.chunk(4), strict=True):
                gate.bias.data[m, 0] = bias


def pair_attention(models, singles):
    for m, one in enumerate(singles):
        for i, name in enumerate(("query", "key", "value")):
            part = slice(i * D, (i + 1) * D)
            getattr(models, name).weight.data[m] = one.in_proj_weight.data[part].T
            getattr(models, name).bias.data[m, 0] = one.in_proj_bias.data[part]
        models.out.weight.data[m], models.out.bias.data[m, 0] = (
            one.out_proj.weight.data.T,
            one.out_proj.bias.data,
        )


CASES = {
    "linear": (lambda: layers.Linear(M, D, C), lambda: nn.Linear(D, C), pair_linear),
    "norm": (lambda: layers.LayerNorm(M, D), lambda: nn.LayerNorm(D), pair_norm),
    "gru": (lambda: layers.GRU(M, D, C, 2), lambda: nn.GRU(D, C, 2, batch_first=True), pair_recurrent),
    "lstm": (lambda: layers.LSTM(M, D, C, 2), lambda: nn.LSTM(D, C, 2, batch_first=True), pair_recurrent),
    "bilstm": (
        lambda: layers.BiLSTM(M, D, C),
        lambda: nn.LSTM(D, C, batch_first=True, bidirectional=True),
        pair_bilstm,
    ),
    "forced lstm": (lambda: layers.ForcedLSTM(M, D, C, 2), one_bias_lstm, pair_forced),
    "attention": (
        lambda: layers.Attention(M, D, 2),
        lambda: nn.MultiheadAttention(D, 2, batch_first=True),
        pair_attention,
    ),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layer_equals_torch_nn(case, dtype):
    torch.manual_seed(0)
    make, make_one, copy = CASES[case]
    models, singles = make().to(dtype), [make_one().to(dtype) for _ in range(M)]
    for one in singles:
        nn.init.normal_(one.bias if case == "norm" else next(one.parameters()), std=0.3)
    copy(models, singles)
    x = torch.randn(M, B, L, D, dtype=dtype, requires_grad=True)
    args = (x, x) if case == "attention" else (x,)
    y = first(models(*args))
    grad_x = torch.autograd.grad(y.square().mean((1, 2)).sum(), [x, *models.parameters()])
    for m, one in enumerate(singles):
        x1 = x[m].detach().requires_grad_()
        y1 = first(one(x1, x1, x1) if case == "attention" else one(x1))
        grad = torch.autograd.grad(y1.square().mean((0, 1)).sum(), x1)[0]
        close = {"rtol": 10 * TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
        torch.testing.assert_close(y[m], y1, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(grad_x[0][m], grad, **close)
        y1 = first(one(x1, x1, x1) if case == "attention" else one(x1))
        y1.square().mean((0, 1)).sum().backward()
        copied = make().to(dtype)
        for p in copied.parameters():
            p.data.zero_()
        for parameter in one.parameters():
            parameter.data = parameter.grad
        copy(copied, [one] * M)
        for mine, theirs in zip(grad_x[1:], copied.parameters(), strict=True):
            torch.testing.assert_close(mine[m], theirs[m].data, **close)


@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_a_layer_scanned_step_by_step_equals_torch_model_by_model(kind):
    layer = kind(M, D, C).double()
    x = torch.randn(M, B, L, D, dtype=torch.double)
    now = tuple(torch.randn(M, B, C, dtype=torch.double) for _ in layer.start(x))
    steps, ends = layer.scan_by_steps(x, now, layer.input[0], layer.hidden[0])
    for m, run in enumerate(layer.each(x, now, layer.input[0], layer.hidden[0])):
        alone, *states = run()
        torch.testing.assert_close(steps[m], alone, rtol=0, atol=1e-12)
        for end, state in zip(ends, states, strict=True):
            torch.testing.assert_close(end[m], state[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("read", ["rows", "end", "both"])
@pytest.mark.parametrize("rows", [2, L, 70])
@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_gradients_of_rows_and_of_the_end_equal_torch_model_by_model(kind, rows, read):
    """Few rows are computed step by step, many as a whole; a decoder and a dense head read the end alone."""
    torch.manual_seed(0)
    layer = kind(M, D, C).double()
    x = torch.randn(M, B, rows, D, dtype=torch.double, requires_grad=True)
    now = tuple(torch.randn(M, B, C, dtype=torch.double, requires_grad=True) for _ in layer.start(x))
    moved = [x, *now, *layer.parameters()]

    def sum_up(out, ends):
        parts = {"rows": [out], "end": ends, "both": [out, *ends]}[read]
        return sum((part.square() * part.detach().cos()).sum() for part in parts)

    out, [ends] = layer(x, [now])
    found = torch.autograd.grad(sum_up(out, ends), moved)
    alone = [run() for run in layer.each(x, now, layer.input[0], layer.hidden[0])]
    out, *ends = (torch.stack(parts) for parts in zip(*alone, strict=True))
    expected = torch.autograd.grad(sum_up(out, [end[:, 0] for end in ends]), moved)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("onednn", "rows", "least", "torchs"),
    [
        (False, 70, 0, True),
        (False, 8, 0, False),  # few share the weights, which are packed at each call
        (True, 8, 0, True),
        (True, 70, 10_000, False),  # so narrow that the calls cost more
    ],
)
def test_an_lstm_of_many_rows_is_torchs_own_model_by_model_and_equals_itself_step_by_step(
    onednn, rows, least, torchs, monkeypatch
):
    monkeypatch.setattr(layers, "is_onednn_faster", lambda: onednn)
    monkeypatch.setattr(layers, "LEAST", least)
    layer, own = layers.LSTM(M, D, C).double(), []
    each = layer.each
    layer.each = lambda *args: own.append(args) or each(*args)
    x, now = torch.randn(M, B, rows, D, dtype=torch.double), tuple(torch.randn(2, M, B, C, dtype=torch.double))
    of_one, of_other = (way(x, now, layer.input[0], layer.hidden[0]) for way in (layer.scan, layer.scan_by_steps))
    for one, other in zip((of_one[0], *of_one[1]), (of_other[0], *of_other[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert len(own) == torchs


def test_both_directions_at_once_equal_one_after_the_other():
    layer = layers.BiLSTM(M, D, C).double()
    ahead, back = torch.randn(2, M, B, L, D, dtype=torch.double)
    for found, one, x in zip(layer.at_once(ahead, back), (layer.ahead, layer.back), (ahead, back), strict=True):
        torch.testing.assert_close(found, one(x)[0], rtol=0, atol=1e-12)


def test_dropout_mask_is_shared_by_the_models_and_off_in_evaluation():
    layer, x = layers.Dropout(0.5), torch.ones(M, 50, L, D)
    y = layer(x)
    assert (y == y[:1]).all()
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert layer.eval()(x) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gates_of_an_lstm_are_as_exact_as_one_by_one(dtype):
    torch.manual_seed(0)
    cell, given = (0.1 * torch.randn(2, 32, width) for width in (16, 64))

    def plain(gates, cell):
        input, forget, new, output = gates.chunk(4, -1)
        after = forget.sigmoid() * cell + input.sigmoid() * new.tanh()
        return output.sigmoid() * after.tanh()

    gates, cell = given.to(dtype), cell.to(dtype)
    want, naive = plain(gates.double(), cell.double()), plain(gates, cell)
    parts = scan.split_gates(gates.clone())
    parts[3].mul_(-2)
    after, shown, state = (torch.empty_like(cell) for _ in range(3))
    scan.lstm_step(parts, cell, after, shown, state)
    errors = [(one.double() - want).square().mean().sqrt().item() for one in (state, naive)]
    assert errors[0] <= (1.2 * errors[1] if dtype != torch.float32 else 1e-7)
