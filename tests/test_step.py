"""Measuring a step: its numbers, its bad manners, and where its tensors are."""

import dataclasses
import itertools
import pathlib
import time

import pytest
import torch
from torch import nn
from virtual import HandClock

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check import guard
from cpbkit.gpu_check.diagnosis import decide
from cpbkit.gpu_check.step import Step, StepFailed, _time_optimizer, measure
from cpbkit.gpu_check.tensors import check_on_device, find_misplaced


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    data = [torch.randn(32, 64) for _ in range(4)]
    return Step(train, lambda: data, model, optimizer, device="cpu")


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_loop_loader_and_cached_batch_by_a_clock_that_is_known():
    clock, model = HandClock(), nn.Linear(1, 1)

    def batches():
        for _ in range(5):
            clock.spend(3e-3)
            yield torch.ones(7, 1)

    def train(batch):
        clock.spend(10e-3)
        model(batch).sum().backward()

    n = measure(Step(train, batches, model, device="cpu"), 60, clock).numbers
    assert n.loop == pytest.approx(13) and n.cached == pytest.approx(10) and n.loader == pytest.approx(3)
    assert n.batch == 7 and n.serial and n.spread < 1e-9
    assert decide(n).verdict == "DATA_STARVED"
    assert n.host + n.device == pytest.approx(n.cached)


def test_real_time_adds_up(parts):
    slow = dataclasses.replace(parts, batches=lambda: (busy(3e-3) or torch.ones(32, 64) for _ in range(50)))
    n = measure(slow, seconds=2).numbers
    assert 2.9 < n.loader and n.loop - n.cached > 1.5
    assert decide(n).verdict == "DATA_STARVED"


def test_without_a_loader_the_loop_is_the_step():
    n = measure(Step(lambda _: busy(1e-3), device="cpu"), seconds=1).numbers
    assert n.loop == n.cached and n.loader == 0


def test_the_host_share_of_a_cpu_step_by_hand():
    clock, model = HandClock(), nn.Linear(1, 1)

    def train(batch):
        clock.spend(4e-3 + len(batch) * 1e-3)  # starting, and arithmetic a sample
        model(batch).sum().backward()

    n = measure(Step(train, lambda: [torch.ones(16, 1)], model, device="cpu"), 60, clock).numbers
    assert (n.cached, n.host, n.device) == pytest.approx((20, 5, 15))

    def refusing(batch):
        if len(batch) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        train(batch)

    found = measure(Step(refusing, lambda: [torch.ones(16, 1)], model, device="cpu"), 60, clock)
    assert "Expected more than 1 value" in found.method and found.numbers.host < 5


def test_weights_and_optimiser_are_as_before(parts):
    before = parts.model.weight.clone()
    measure(parts, seconds=1)
    assert torch.equal(before, parts.model.weight) and parts.model.weight.grad is None


def test_a_wait_is_counted_with_its_line(parts):
    def train(batch):
        loss = parts.train(batch)
        return loss.item()  # the line that waits

    n = measure(dataclasses.replace(parts, train=train), seconds=1).numbers
    assert n.waits == 1
    name, line = n.wait_lines[0].split(":")
    assert name == "test_step.py"
    assert "the line that waits" in pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_a_masked_selection_waits_and_an_optimiser_does_not(parts):
    adam = torch.optim.Adam(parts.model.parameters())

    def train(batch):
        adam.zero_grad()
        parts.model(batch)[batch > 0].sum().backward()
        adam.step()

    n = measure(Step(train, parts.batches, parts.model, adam, device="cpu"), seconds=1).numbers
    assert n.waits == 1
    assert 0.02 < n.optimizer_share < 0.98  # Adam on a CPU walks tensor by tensor


def test_the_share_of_an_optimiser_is_its_time():
    """By a clock that is known: seven of ten."""
    clock, parameter = HandClock(), torch.zeros(1, requires_grad=True)

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            clock.spend(7.0)

    slow = Slow([parameter], lr=0.1)

    def train(_):
        clock.spend(3.0)
        slow.step()

    assert _time_optimizer(Step(train, optimizer=slow, device="cpu"), clock, None) == pytest.approx(0.7)
    slow.param_groups[0]["foreach"] = True
    assert _time_optimizer(Step(train, optimizer=slow, device="cpu"), clock, None) == 0


@pytest.mark.parametrize("phase", ["first batch", "first step", "warm-up", "loader"])
def test_an_error_names_its_phase(parts, phase):
    calls = itertools.count(1)

    def train(batch):
        if next(calls) == {"first step": 1, "warm-up": 5}.get(phase):
            raise KeyError("the person's own")
        return parts.train(batch)

    def batches():
        for i in itertools.count():
            if i == {"first batch": 0, "loader": 60}.get(phase):
                raise KeyError("the person's own")
            yield torch.ones(32, 64)

    expected = "loop|loader" if phase == "loader" else phase
    with pytest.raises(StepFailed, match=rf"phase '({expected})': KeyError: \"the person's own\""):
        measure(dataclasses.replace(parts, train=train, batches=batches), seconds=1)


def test_a_loss_that_is_not_finite_is_no_speed_question(parts):
    broken = dataclasses.replace(parts, batches=lambda: [torch.full((32, 64), float("nan"))])
    with pytest.raises(StepFailed, match=r"loss is not finite \(nan\), seen in the phase 'first step'"):
        measure(broken, seconds=1)
    with pytest.raises(StepFailed, match=r"loss is not finite \(nan\)"):
        measure(Step(lambda _: float("nan"), device="cpu"), seconds=1)


def test_a_step_of_minutes_is_refused_after_two():
    clock, calls = HandClock(), itertools.count()

    def train(batch):
        next(calls)
        clock.spend(90)

    with pytest.raises(StepFailed, match=r"one step takes 90.0 s.*smaller step"):
        measure(Step(train, device="cpu"), 20, clock)
    assert next(calls) == 2
    assert clock.time == 0, "the step's own clock is put back like everything else it owns"


def test_no_memory_for_a_copy_of_the_weights_is_told(parts, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(guard, "_keep_tensor", full)
    with pytest.raises(StepFailed, match="phase 'copy of what it holds': OutOfMemoryError: CUDA out of memory"):
        measure(parts, seconds=1)


def test_an_empty_loader_is_said(parts):
    with pytest.raises(StepFailed, match="no batch in a whole pass"):
        measure(dataclasses.replace(parts, batches=lambda: []), seconds=1)


def test_printing_and_moving_are_told_and_undone(parts, capsys):
    def train(batch):
        print("step!")
        parts.train(batch)
        parts.model.double().float() if parts.model.weight.dtype is torch.float64 else None

    chatty = measure(dataclasses.replace(parts, train=train), seconds=1)
    assert any("prints" in text and "step!" in text for text in chatty.problems)
    assert capsys.readouterr().out == ""

    def moving(batch):
        parts.model.double()
        parts.model(batch.double()).sum().backward()

    moved = measure(dataclasses.replace(parts, train=moving, optimizer=None), seconds=1)
    assert any("moved 2 tensors (weight: cpu torch.float32" in text for text in moved.problems)
    assert parts.model.weight.dtype is torch.float32


def test_growth_is_seen_and_steady_memory_is_not(parts):
    kept = []

    def leaking(batch):
        parts.train(batch)
        kept.append(parts.model(batch.repeat(20, 1)).relu().mean())

    n = measure(dataclasses.replace(parts, train=leaking), seconds=1).numbers
    assert n.growth > 20 * 32 * 64 * 4  # relu keeps its output
    assert kept == []
    assert measure(parts, seconds=1).numbers.growth == 0


def test_tensors_on_the_wrong_device_are_named():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2))
    model.mask = torch.ones(2)  # a plain attribute: module.to() leaves it behind
    model.scalar = torch.tensor(1.0)  # without dimensions: legal anywhere
    optimizer = torch.optim.Adam(nn.Linear(2, 1).parameters())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 2)
    optimizer.step()
    wrong = find_misplaced(model, {"x": torch.ones(1)}, optimizer, device="meta")
    assert wrong[:2] == ["mask is on cpu", "1.weight is on cpu"]
    assert {"optimiser exp_avg is on cpu", "batch[0] is on cpu", "1.running_mean is on cpu"} <= set(wrong)
    assert not any("scalar" in text or "step" in text or "0.weight" in text for text in wrong)
    with pytest.raises(CpbkitError, match=r"every tensor must be on meta; mask is on cpu.*and \d more"):
        check_on_device(model, {"x": torch.ones(1)}, optimizer, device="meta")
    check_on_device(model[0], device="meta")


@pytest.mark.parametrize("used", [True, False])
def test_a_misplaced_tensor_that_the_step_uses_is_the_verdict(parts, used):
    parts.model.mask = torch.ones(2, device="meta")
    train = parts.train

    def masked(batch):
        if used:
            parts.model.mask.neg()
        return train(batch)

    numbers = measure(dataclasses.replace(parts, train=masked), seconds=1).numbers
    assert numbers.misplaced == (("mask is on meta",) if used else ())
    found = decide(numbers)
    assert (found.verdict == "MODEL_OR_DATA_ON_CPU") == used
