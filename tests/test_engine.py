"""The engine inside an epoch: nothing waits, nothing is copied to the host, nothing grows."""

import gc
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import walk
from torch.utils._python_dispatch import TorchDispatchMode

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.training import loop
from cpbkit.training.cuda_graph import capture
from cpbkit.training.loop import Fit, assemble, fit

SMALL = vary(
    PRESETS["quick"], width=4, context=8, horizon=2, dropout=0.1, layers=2, teacher_forcing=0.5, epochs=3, patience=1
)
STEPS = 6
# What makes the host wait for a device: reading a number, a shape that depends on values, a copy between devices.
WAITS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._to_copy",
    "aten.equal",
    "aten.is_nonzero",
)


class Calls(TorchDispatchMode):
    """Collects the names of all operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().replace("::", "."))
        return func(*args, **(kwargs or {}))


def started(device="cpu"):
    series = [walk(f"S{i}", 200 + 30 * i, seed=i) for i in range(4)]
    windows, stack = assemble(SMALL, series, device)
    return fit(Fit(stack), windows, SMALL.training, STEPS), stack


def waits(names):
    return [name for name in names if name.startswith(WAITS)]


def test_no_step_waits_for_the_device():
    run, stack = started()
    next(run)  # the epoch's order is drawn, and the first step
    # The CPU's fused optimiser reads its learning rate and its step count; the one on a GPU takes them as tensors.
    stack.step = lambda: None
    with Calls() as calls:
        for _ in range(STEPS - 1):
            next(run)
    assert len(calls.names) > 100
    assert waits(calls.names) == []


def test_the_count_of_waits_sees_one():
    with Calls() as calls:
        torch.ones(3).sum().item()
    assert waits(calls.names)


@pytest.mark.gpu
def test_no_step_waits_on_a_gpu():
    run, _ = started("cuda")
    next(run)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS - 1):
            next(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one(monkeypatch):
    ends = {}
    for mode in ("graph", "eager"):
        if mode == "eager":
            monkeypatch.setattr(loop, "captured", lambda step, stack, i: (step, "eager"))
        run, _ = started("cuda")
        ends[mode] = {f.name: f for state in run if not state.step for f in state.finished}
    for name, one in ends["graph"].items():
        for key, tensor in one.weights.items():
            torch.testing.assert_close(tensor, ends["eager"][name].weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_memory_does_not_grow_over_two_hundred_epochs():
    experiment = vary(SMALL, epochs=210, patience=210)
    windows, stack = assemble(experiment, [walk("A", 200), walk("B", 220)], "cpu")
    held = []
    for state in fit(Fit(stack), windows, experiment.training, 2):
        if state.step == 0 and state.epoch in (10, 200):
            gc.collect()
            held.append(sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)))
    assert len(held) == 2 and held[1] <= held[0]


def test_models_of_a_stack_are_the_same_to_the_bit_whatever_the_stack():
    series = [walk(f"S{i}", 300, seed=i) for i in range(6)]
    ends = []
    for count in (2, 6):
        windows, stack = assemble(SMALL, series[:count], "cpu")
        for _ in itertools.islice(fit(Fit(stack), windows, SMALL.training, STEPS), STEPS):
            pass
        ends.append(stack.weights[:2].clone())
    assert torch.equal(*ends)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_torch_as_it_was():
    x, stream = torch.ones(8, device="cuda"), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: torch.nn.functional.dropout(x).sum().item())
    assert torch.cuda.current_stream() == stream
    torch.rand(8, device="cuda")
    torch.cuda.empty_cache()
    capture(lambda: x.add_(1)).replay()
    assert x.tolist() == [5.0] * 8, "the capture itself computes nothing"


@pytest.mark.parametrize(
    "kind, mode",
    [
        ("honest", "CUDA graph"),
        ("empty", "eager: replayed, the captured step had other gradients"),
        ("shallow", "eager: replayed, the captured step had other gradients"),
        ("unmoved", "eager: replayed, the captured step moved the weights elsewhere"),
        ("broken", "eager: the step could not be captured (it waits)"),
    ],
)
def test_a_captured_step_is_held_to_the_step_and_leaves_no_trace(monkeypatch, kind, mode):
    modes, stacks = [], []

    def capture(step, device, prepare):
        prepare()
        step()
        stack = stacks[-1]
        unseen = stack.gradients == 0  # below a head that starts at zero
        prepare()
        if kind == "broken":
            raise RuntimeError("it waits")

        def shallow():
            step()
            stack.gradients.masked_fill_(unseen, 0)

        def unmoved():
            before = stack.weights.clone()
            step()
            stack.weights.copy_(before)

        replays = {"honest": step, "empty": lambda: None, "shallow": shallow, "unmoved": unmoved}
        return SimpleNamespace(replay=replays[kind])

    def captured(step, stack, i):
        stacks.append(stack)
        run, said = loop._captured(step, stack, i)
        modes.append(said)
        return run, said

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(loop, "capture", capture)
    ends = []
    for way in (loop.captured, captured):
        monkeypatch.setattr(loop, "captured", way)
        run, stack = started()
        for _ in itertools.islice(run, STEPS):
            pass
        ends.append(stack.weights.clone())
    assert modes == [mode]
    assert torch.equal(*ends)


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("name, inside", [("tf32", "high"), ("float32", "highest")])
def test_the_precision_of_products_is_put_back_whichever_interface_set_it(name, inside, newer):
    flags = torch.backends.cuda.matmul
    if not hasattr(flags, "fp32_precision"):
        pytest.skip("this torch has the older interface alone")
    legacy = torch.get_float32_matmul_precision()
    try:
        if newer:
            flags.fp32_precision = "tf32"
        before = flags.fp32_precision
        with loop.precision(vary(SMALL, precision=name).training, torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == inside
        assert flags.fp32_precision == before
    finally:
        torch.set_float32_matmul_precision(legacy)


def test_a_weight_is_cast_to_16_bits_once_a_step():
    experiment = vary(SMALL, precision="bfloat16", context=20)
    windows, stack = assemble(experiment, [walk("A", 300)], "cpu")
    run, casts = fit(Fit(stack), windows, experiment.training, STEPS), Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                casts[args[0].data_ptr()] += 1
            return func(*args, **(kwargs or {}))

    before = stack.weights.clone()
    with Casts():
        next(run)
    assert {casts[parameter.data_ptr()] for parameter in stack.net.parameters()} <= {0, 1}
    once = stack.weights.clone()
    next(run)
    assert not torch.equal(once, before) and not torch.equal(stack.weights, once), "the next step casts them anew"


def test_a_row_that_overflows_in_float16_stands_still():
    experiment = vary(SMALL, precision="float16", clip_value=1.0)
    windows, stack = assemble(experiment, [walk("A", 200), walk("B", 220)], "cpu")
    Fit(stack)  # makes the sums of an epoch
    x, last, y = windows.gather(torch.full((2, 8), 100))

    def move(factors):
        losses = (stack.net(x, last, None) - y).square().mean((1, 2, 3))
        loop._move(stack, experiment.training, losses * torch.tensor(factors), torch.zeros(1, dtype=torch.long))
        return stack.weights.clone()

    before = move([1.0, 1.0])  # from here on both have momentum
    moments = {name: moment.clone() for name, moment in stack.moments.items()}
    after = move([1e38, 1.0])  # whose gradient is infinite, and clamped would look like any other
    assert stack.table["skipped_sum"].tolist() == [1, 0]
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
    for name, moment in stack.moments.items():
        assert torch.equal(moment[0], moments[name][0]) and not torch.equal(moment[1], moments[name][1]), name
    again = move([1.0, 1.0])
    assert not torch.equal(again[0], after[0]), "it goes on with the next batch"


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_each_row_moves_as_torchs_own_optimiser_moves_it(name, kind):
    search = ("learning_rate", (1e-2, 1e-4)), ("weight_decay", (0.0, 0.1))
    _, stack = assemble(vary(SMALL, optimizer=name, search=search), [walk("A", 200)], "cpu")
    alone = [torch.nn.Parameter(row.clone()) for row in stack.weights]
    settings = zip(alone, stack.settings("learning_rate"), stack.settings("weight_decay"), strict=True)
    optimizers = [kind([row], lr=rate, weight_decay=decay) for row, rate, decay in settings]
    for _ in range(5):
        stack.gradients.normal_()
        for row, gradient, optimizer in zip(alone, stack.gradients, optimizers, strict=True):
            row.grad = gradient.clone()
            optimizer.step()
        stack.step()
    for row, single in zip(stack.weights, alone, strict=True):
        torch.testing.assert_close(row, single.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "text, short",
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", False),
    ],
)
def test_what_counts_as_out_of_memory(text, short):
    assert loop.is_out_of_memory(RuntimeError(text)) == short


def test_deterministic_after_cublas_has_started_is_said(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with loop.precision(vary(SMALL, deterministic=True).training, torch.device("cpu")):
        assert "CUBLAS_WORKSPACE_CONFIG was set" in caplog.text
