"""Products of all models' matrices: the same numbers and gradients by oneDNN, model by model, as by torch's own."""

import pytest
import torch

from cpbkit.models import layers, products

M, R, K, N = 3, 40, 24, 32
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)


@pytest.fixture
def onednn(monkeypatch):
    """Let oneDNN multiply whatever the size, on any processor; call it with False to take it back."""

    def choose(taken=True):
        monkeypatch.setattr(products, "is_onednn_faster", lambda: taken)
        monkeypatch.setattr(products, "LEAST", 0)

    choose()
    return choose


SHAPES = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "a part of the columns": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "a step": lambda x: torch.stack([x, x], 1)[:, 1],
}


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of_a", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("of_b", SHAPES.values(), ids=SHAPES)
def test_products_and_gradients_are_those_of_torch(of_a, of_b, bias, onednn):
    torch.manual_seed(0)
    given = torch.randn(M, R, K), torch.randn(M, K, N), torch.randn(M, 1, N)
    grad = torch.randn(M, R, N)

    def run(taken):
        onednn(taken)
        a, b, c = (x.clone().requires_grad_() for x in given)
        y = products.multiply(of_a(a), of_b(b), c if bias else None)
        y.backward(grad)
        return [y, a.grad, b.grad, *([c.grad] if bias else [])]

    for found, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@needs_onednn
@pytest.mark.parametrize("of_a", SHAPES.values(), ids=SHAPES)
def test_without_gradients_they_are_written_and_added_where_asked(of_a, onednn):
    torch.manual_seed(0)
    a, b, total = of_a(torch.randn(M, R, K)), torch.randn(M, K, N), torch.randn(M, R, N)
    way, out = products.choose(a, b), torch.empty(M, R, N)
    assert way is products.ONEDNN
    torch.testing.assert_close(way.product(a, b, out=out), a @ b, **CLOSE)
    expected = total + a @ b
    assert way.add_product(total, a, b) is total
    torch.testing.assert_close(out, a @ b, **CLOSE)
    torch.testing.assert_close(total, expected, **CLOSE)


@needs_onednn
@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_a_recurrent_layer_gives_the_same_and_each_model_what_it_gives_alone(kind, onednn, monkeypatch):
    monkeypatch.setattr(layers, "LEAST", 10**9)  # no layer of torch's own
    torch.manual_seed(0)
    layer, alone = kind(M, K, N), kind(1, K, N)
    for mine, one in zip(layer.parameters(), alone.parameters(), strict=True):
        one.data = mine.data[1:2].clone()
    x = torch.randn(M, 5, 7, K, requires_grad=True)

    def run(layer, x):
        out, _ = layer(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    found, single = run(layer, x), run(alone, x[1:2])
    for of_all, of_one in zip(found, single, strict=True):
        assert torch.equal(of_all[1:2], of_one)
    onednn(taken=False)
    for mine, theirs in zip(found, run(layer, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "faster"),
    [
        ("AuthenticAMD", "26", "AVX512", True),  # Zen 5
        ("AuthenticAMD", "26", "AVX2", False),  # held back by a setting of torch's
        ("AuthenticAMD", "25", "AVX512", False),  # Zen 4: units of 256 bits
        ("GenuineIntel", "26", "AVX512", False),
        ("", "", "DEFAULT", False),
    ],
)
def test_onednn_is_taken_where_mkl_keeps_to_half_of_the_units(vendor, family, capability, faster, monkeypatch):
    monkeypatch.setattr(products, "cpu_fact", {"vendor_id": vendor, "cpu family": family}.__getitem__)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    assert products.is_onednn_faster.__wrapped__() == (faster and known)


@pytest.mark.parametrize("case", ["small", "double", "autocast"])
def test_what_it_does_not_do_better_goes_as_ever(case, monkeypatch):
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", R * K * N + (case == "small"))
    a, b = torch.randn(M, R, K), torch.randn(M, K, N)
    a, b = (a.double(), b.double()) if case == "double" else (a, b)
    assert (products.choose(a, b) is products.BMM) == (case != "autocast")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        y = products.multiply(a.requires_grad_(), b)
    assert y.grad_fn.name() != "_ProductBackward"
    assert y.dtype == (torch.bfloat16 if case == "autocast" else a.dtype)
