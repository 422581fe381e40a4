"""The zoo: what every network promises, whatever its name, and what only some of them do."""

import dataclasses

import pytest
import torch
from torch import nn

from cpbkit.config.experiment import OHLC, OHLC_RETURNS, Model, Task
from cpbkit.errors import CpbkitError, UnknownName
from cpbkit.models import layers, linear, transformer, zoo

M, B = 3, 5
TASK = Task(context=30, horizon=4, features=OHLC_RETURNS, targets=OHLC, target_weights=(1.0, 1.0, 1.0, 2.0))
NETWORKS = sorted(zoo.MODELS.keys() - {"chronos"})  # which has no weights here
DECODERS = ("gru", "lstm", "forced_lstm", "transformer")  # they can be taught


def small(name):
    width = 64 if name == "bilstm_dense" else 16  # its last layer has an eighth of it, and ReLU
    return Model(name=name, width=width, layers=2, heads=2, dropout=0.3)


def make(name, models=M, task=TASK, start=0.3):
    """Build a network in float64; `start` scatters its weights, so that no head is zero."""
    torch.manual_seed(0)
    net = zoo.build(models, task, small(name)).double()
    if start:
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=start)
    return net


def batch(models=M, task=TASK):
    torch.manual_seed(1)
    x = torch.randn(models, B, task.context, len(task.features)).double()
    y = torch.randn(models, B, task.horizon, len(task.targets)).double()
    return x, y[:, :, 0] / 2, y


@pytest.mark.parametrize("name", NETWORKS)
def test_forecast_has_its_shape_and_every_parameter_gets_a_gradient(name):
    net, (x, last, y) = make(name), batch()
    forecast = net(x, last)
    assert forecast.shape == y.shape
    assert forecast.isfinite().all()
    gradients = torch.autograd.grad((forecast - y).square().mean((1, 2, 3)).sum(), list(net.parameters()))
    for (parameter, _), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert gradient.isfinite().all(), parameter
        assert (gradient.flatten(1).abs().amax(1) > 0).all(), f"no gradient reaches {parameter}"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_in_16_bits_what_it_does_in_64(name):
    net, (x, last, y) = make(name).eval(), batch()
    forced = torch.tensor([True, False, True, False])
    want = net(x, last, (y, forced))
    net = net.float()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        got = net(x.float(), last.float(), (y.float(), forced))
    torch.autograd.grad(got.float().square().sum(), list(net.parameters()))
    assert (got.double() - want).square().mean() < 0.01 * want.square().mean()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_has_the_model_axis_and_an_untrained_network_is_persistence(name):
    net = make(name, start=0.0)
    assert all(len(parameter) == M for parameter in net.parameters())
    x, last, _ = batch()
    assert (net(x, last) == 0).all()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("teacher", [None, "forced"])
def test_a_stack_equals_its_rows_alone(name, teacher):
    net = make(name).eval()
    x, last, y = batch()
    forced = teacher and torch.tensor([True, False, True, True])
    forecast = net(x, last, teacher and (y, forced))
    gradients = torch.autograd.grad((forecast - y).square().mean((1, 2, 3)).sum(), list(net.parameters()))
    for m in range(M):
        alone = make(name, models=1).eval()
        with torch.no_grad():
            for one, all_of_them in zip(alone.parameters(), net.parameters(), strict=True):
                one.copy_(all_of_them[m : m + 1])
        own = alone(x[m : m + 1], last[m : m + 1], teacher and (y[m : m + 1], forced))
        torch.testing.assert_close(own[0], forecast[m], rtol=1e-12, atol=1e-12)
        own_gradients = torch.autograd.grad((own - y[m : m + 1]).square().mean(), list(alone.parameters()))
        for one, whole in zip(own_gradients, gradients, strict=True):
            torch.testing.assert_close(one[0], whole[m], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_coin_that_never_falls_teaches_nothing_and_one_that_falls_teaches_only_later_steps(name):
    net = make(name).eval()
    x, last, y = batch()
    free = net(x, last)
    assert torch.equal(net(x, last, (y, torch.zeros(TASK.horizon, dtype=torch.bool))), free)
    taught = net(x, last, (y, torch.tensor([False, True, False, False])))
    moved = ((taught - free).abs() > 1e-9).flatten(0, 1).any(-1)  # (M B, H)
    assert not moved[:, :2].any(), "the truth of a step must not reach that step"
    assert moved[:, 2:].all() == moved[:, 2:].any() == (name in DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_always_taught_equals_a_coin_that_always_falls(name):
    net = make(name).eval()
    x, last, y = batch()
    steps = net(x, last, (y, torch.ones(TASK.horizon, dtype=torch.bool)))
    torch.testing.assert_close(net(x, last, (y, None)), steps, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_forecast_depends_on_the_whole_context_but_for_nothing_else(name):
    net = make(name).eval()
    x, last, _ = batch()
    for bar in (0, TASK.context // 2, TASK.context - 1):
        other = x.clone()
        other[0, 0, bar] += 1
        moved = (net(other, last) != net(x, last)).flatten(2).any(2)
        assert moved[0, 0] and moved.sum() == 1, f"bar {bar} must move its own forecast and no other"


def test_an_unknown_model_is_named_with_the_nearest():
    with pytest.raises(UnknownName, match=r"'lsmt' \(nearest: lstm"):
        zoo.build(1, TASK, Model(name="lsmt"))


@pytest.mark.parametrize("name", ["nlinear", "dlinear", "segrnn"])
def test_shared_weights_need_the_past_of_each_target(name):
    with pytest.raises(CpbkitError, match="features close_return, rsi for targets close"):
        zoo.build(1, Task(features=("close_return", "rsi")), small(name))


def test_nlinear_is_a_linear_layer_over_the_change_from_the_last_value():
    net, one = make("nlinear"), nn.Linear(TASK.context, TASK.horizon).double()
    one.weight.data, one.bias.data = net.map.weight.data[1].T, net.map.bias.data[1, 0]
    x, last, _ = batch()
    want = one((x[1] - x[1, :, -1:]).transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(net(x, last)[1], want)


def test_dlinear_can_be_the_map_of_the_paper():
    """The paper forecasts levels from trend and rest; ours, their change from the last value."""
    net = make("dlinear", models=1)
    x, last, _ = batch(1)
    trend = linear.moving_average(x.transpose(2, 3))
    maps = [(m.weight.data[0].T, m.bias.data[0, 0]) for m in (net.trend, net.rest)]
    levels = sum(part[0] @ w.T + b for (w, b), part in zip(maps, (trend, x.transpose(2, 3) - trend), strict=True))
    for layer in (net.trend, net.rest):
        layer.weight.data[0, -1] -= 1
    torch.testing.assert_close(net(x, last)[0] + x[0, :, -1:], levels.transpose(1, 2))


def test_ridge_ar_is_the_solution_whose_penalty_does_best_in_validation():
    net = make("ridge_ar", models=2, start=0.0)
    torch.manual_seed(2)
    parts, truth = [], torch.randn(2, 120, 16).double() / 10  # context 30 x 4 features -> 4 x 4
    for windows in (400, 90):
        x = torch.randn(2, windows, 30, 4).double()
        noise = torch.tensor([0.5, 20.0])[:, None, None, None]  # the second can barely be learned
        y = 0.3 + (x.flatten(2) @ truth).unflatten(2, (4, 4)) + noise * torch.randn(2, windows, 4, 4).double()
        weight = torch.ones(2, windows).double()
        weight[1, windows // 2 :] = 0  # padding of a shorter series
        parts.append((x, y, weight))
    net.solve(*([tuple(t[:, :50] for t in part), tuple(t[:, 50:] for t in part)] for part in parts))
    chosen = []
    for m in range(2):
        (x, y), (xv, yv) = ((x[m][w[m] > 0].flatten(1), y[m][w[m] > 0].flatten(1)) for x, y, w in parts)
        found = {}
        for penalty in linear.PENALTIES:  # centred, where the intercept leaves the problem
            a, b = x - x.mean(0), y - y.mean(0)
            slope = torch.linalg.solve(a.T @ a + penalty * len(x) * torch.eye(120).double(), a.T @ b)
            intercept = y.mean(0) - x.mean(0) @ slope
            found[penalty] = (xv @ slope + intercept - yv).square().mean(), slope, intercept
        penalty = min(found, key=lambda p: found[p][0])
        chosen.append(penalty)
        torch.testing.assert_close(net.map.weight[m], found[penalty][1], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(net.map.bias[m, 0], found[penalty][2], rtol=1e-6, atol=1e-9)
    assert chosen[0] < chosen[1]


def test_moving_average_repeats_the_ends():
    x = torch.arange(40.0).double()[None]
    got = linear.moving_average(x)[0]
    assert got.shape == (40,)
    assert got[20] == pytest.approx(20)
    assert got[0] == pytest.approx(sum(range(13)) / 25)  # 13 zeros, then 1 .. 12
    assert got[39] == pytest.approx((sum(range(27, 40)) + 12 * 39) / 25)


def test_transformer_blocks_equal_torch_nn():
    torch.manual_seed(0)
    ours = transformer.EncoderBlock(1, 8, 2, 0.0).double(), transformer.DecoderBlock(1, 8, 2, 0.0).double()
    settings = {
        "dim_feedforward": 32,
        "dropout": 0.0,
        "activation": "gelu",
        "batch_first": True,
        "dtype": torch.float64,
    }
    theirs = nn.TransformerEncoderLayer(8, 2, **settings), nn.TransformerDecoderLayer(8, 2, **settings)
    for mine, torchs in zip(ours, theirs, strict=True):
        attentions = (
            [(mine.attention, torchs.self_attn)]
            if mine is ours[0]
            else [(mine.own, torchs.self_attn), (mine.cross, torchs.multihead_attn)]
        )
        for a, b in attentions:
            nn.init.normal_(b.in_proj_bias)
            for i, part in enumerate((a.query, a.key, a.value)):
                part.weight.data[0], part.bias.data[0, 0] = b.in_proj_weight[8 * i :][:8].T, b.in_proj_bias[8 * i :][:8]
            a.out.weight.data[0], a.out.bias.data[0, 0] = b.out_proj.weight.T, b.out_proj.bias
        for a, b in ((mine.feed_forward.wide, torchs.linear1), (mine.feed_forward.narrow, torchs.linear2)):
            a.weight.data[0], a.bias.data[0, 0] = b.weight.T, b.bias
    x, y = torch.randn(B, 7, 8).double(), torch.randn(B, 4, 8).double()
    torch.testing.assert_close(ours[0](x[None])[0], theirs[0].train()(x))
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    memory = ours[1].cross.project(x[None])
    torch.testing.assert_close(ours[1](y[None], memory)[0][0], theirs[1](y, x, tgt_mask=mask))


def test_waves_are_the_places_of_the_paper():
    places = transformer.waves(50, 8)
    assert places[0].tolist() == [0, 1] * 4
    for column in range(4):
        angle = torch.arange(50) / 10_000 ** (2 * column / 8)
        torch.testing.assert_close(places[:, 2 * column], angle.sin())
        torch.testing.assert_close(places[:, 2 * column + 1], angle.cos())


def test_segrnn_equals_a_torch_gru_run_segment_by_segment():
    task = dataclasses.replace(TASK, context=48, horizon=30)
    net = make("segrnn", models=1, task=task).eval()
    x, last, _ = batch(1, task)
    gru = nn.GRU(16, 16, batch_first=True).double()
    gru.weight_ih_l0.data, gru.weight_hh_l0.data = net.rnn.input[0].weight[0].T, net.rnn.hidden[0].weight[0].T
    gru.bias_ih_l0.data, gru.bias_hh_l0.data = net.rnn.input[0].bias[0, 0], net.rnn.hidden[0].bias[0, 0]
    got = net(x, last)[0]
    for channel in range(4):
        past = x[0, :, :, channel] - x[0, :, -1:, channel]
        _, state = gru(torch.relu(net.embed(past.unflatten(1, (2, 24))[None])[0]))
        forecast = []
        for segment in range(2):
            place = torch.cat([net.place[0, 0, segment], net.channel[0, channel, 0]])
            out, _ = gru(place.expand(B, 1, -1), state)
            forecast.append(net.head(out[None])[0, :, 0])
        torch.testing.assert_close(got[:, :, channel], torch.cat(forecast, 1)[:, :30])


def test_dropout_over_all_bars_loses_whole_channels():
    layer, x = layers.Dropout(0.5, all_bars=True), torch.ones(M, 50, 7, 8)
    y = layer(x)
    assert (y == y[:1, :, :1]).all()
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_the_directions_of_a_bilstm_have_their_own_masks():
    layer = layers.BiLSTM(1, 6, 4, dropout=0.5)
    torch.manual_seed(0)
    seen = []
    layer.dropout.register_forward_hook(lambda module, args, out: seen.append(out[0, :, 0] != 0))
    layer(torch.ones(1, 20, 5, 6))
    assert len(seen) == 2 and (seen[0] != seen[1]).any()


def test_next_input_follows_the_coin():
    own, truth = torch.zeros(1, 2, 3), torch.ones(1, 2, 4, 3)
    forced = torch.tensor([True, False, False, True])
    assert layers.next_input(own, None, 0) is own
    assert [layers.next_input(own, (truth, forced), h)[0, 0, 0].item() for h in range(4)] == [1, 0, 0, 1]
    assert layers.next_input(own, (truth, None), 1).sum() == 6


def test_a_horizon_is_written_in_as_few_calls_as_its_draws_allow():
    """Each call gets the row before its first step, and the truth of every step but its last."""
    truth, last = torch.arange(1.0, 7).reshape(1, 1, 6, 1), torch.zeros(1, 1, 1)
    draws = torch.tensor([False, True, True, False, False, True])
    for teacher, want in {
        None: [[0], [10], [20], [30], [40], [50]],
        (truth, None): [[0, 1, 2, 3, 4, 5]],
        (truth, draws): [[0], [10, 2, 3], [40], [50]],
    }.items():
        calls = []

        def decode(rows, calls=calls):
            done = sum(map(len, calls))
            calls.append(rows.flatten().tolist())
            return 10 * torch.arange(done + 1.0, done + 1 + len(calls[-1])).reshape(1, 1, -1, 1)

        assert layers.write(decode, last, 6, teacher).flatten().tolist() == [10, 20, 30, 40, 50, 60]
        assert calls == want


def test_the_forced_cell_is_many_small_products():
    """It is a specimen of a slow way to compute the same; should it become fast, it would show nothing."""
    x, count = torch.randn(1, 2, 5, 4), {}
    for cell in (layers.LSTM, layers.ForcedLSTM):
        net = cell(1, 4, 8)
        with torch.profiler.profile() as profile:
            net(x)
        count[cell] = sum(
            event.count for event in profile.key_averages() if event.key in ("aten::bmm", "aten::baddbmm")
        )
    assert count[layers.ForcedLSTM] > 3 * count[layers.LSTM]
