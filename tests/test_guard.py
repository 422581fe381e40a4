"""A person's objects are as they were, whatever a step did to them."""

import collections
import functools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from cpbkit.gpu_check.guard import find_belongings, preserved


class Person:
    """A training loop as people write it: a bit of everything."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.generator = torch.Generator().manual_seed(1)
        self.losses, self.seen, self.best, self.steps = [], {1}, {"loss": 9.0}, 0
        self.last, self.state = collections.deque(maxlen=3), types.SimpleNamespace(epoch=0)
        self.x = torch.randn(8, 3)

    def step(self):
        self.model.train()
        self.optimizer.zero_grad()
        noise = torch.rand(8, 3, generator=self.generator) + random.random() + np.random.rand()
        loss = self.model(self.x + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss)
        self.steps += 1
        self.last.append(loss.item())
        self.state.epoch += 1
        self.seen.add(len(self.seen) + 1)
        self.best["loss"] = loss.item()
        print("loss", loss.item())

    def photograph(self):
        tensors = [*self.model.state_dict().values()]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        tensors += [torch.zeros(0) if p.grad is None else p.grad for p in self.model.parameters()]
        tensors += [torch.get_rng_state(), self.generator.get_state()]
        plain = [m.training for m in self.model.modules()], [g["lr"] for g in self.optimizer.param_groups]
        plain += (self.schedule.last_epoch, random.getstate(), repr(np.random.get_state()), len(self.losses))
        return [t.clone() for t in tensors], (
            *plain,
            self.steps,
            list(self.last),
            self.state.epoch,
            set(self.seen),
            dict(self.best),
        )


def seed_all():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def assert_same(before, after):
    assert before[1] == after[1]
    assert len(before[0]) == len(after[0])
    assert all(torch.equal(a, b) for a, b in zip(*(p[0] for p in (before, after)), strict=True))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_everything_a_step_touches_is_put_back(steps_before):
    person = Person()
    for _ in range(steps_before):
        person.step()
    person.model.eval()
    before = person.photograph()
    with preserved(person.step) as notes:
        for _ in range(3):
            person.step()
    assert_same(before, person.photograph())
    assert notes.printed.count("loss") == 3 and notes.moved == []
    person.step()  # and training goes on


def test_a_step_that_raises_leaves_no_trace():
    person = Person()
    before = person.photograph()
    with pytest.raises(ZeroDivisionError), preserved(person.step):
        person.step()
        raise ZeroDivisionError
    assert_same(before, person.photograph())


def test_training_goes_on_as_if_nothing_had_been_measured():
    left, right = Person(), Person()
    seed_all()
    left.step()
    seed_all()
    with preserved(right.step):
        right.step()
        right.step()
    right.step()
    for a, b in zip(left.model.parameters(), right.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_views_stay_views():
    whole = torch.arange(6.0)
    model = nn.Module()
    model.weight = nn.Parameter(whole[2:5])
    with preserved(model):
        model.weight.data = torch.zeros(3)
    assert model.weight.data_ptr() == whole[2:5].data_ptr()
    with preserved(model), torch.no_grad():
        model.weight.mul_(7)
    assert torch.equal(whole, torch.arange(6.0))


def test_a_moved_model_is_back_and_it_is_said():
    model = nn.Linear(2, 2)
    with preserved(model) as notes:
        model.double()
    assert model.weight.dtype is torch.float32
    assert notes.moved == [f"{name}: cpu torch.float32 -> cpu torch.float64" for name in ("weight", "bias")]


def test_replaced_and_frozen_parameters_come_back():
    model = nn.Linear(2, 2)
    weight = model.weight
    with preserved(model):
        model.weight = nn.Parameter(torch.zeros(2, 2))
        model.bias.requires_grad_(False)
    assert model.weight is weight and model.bias.requires_grad


def test_flags_of_torch_are_put_back():
    flags = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), flags.benchmark, torch.get_default_dtype()
    with preserved():
        torch.set_float32_matmul_precision("medium" if before[0] != "medium" else "high")
        flags.benchmark = not flags.benchmark
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
    assert (torch.get_float32_matmul_precision(), flags.benchmark, torch.get_default_dtype()) == before
    assert torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one interface")
def test_a_flag_of_the_newer_interface_is_no_obstacle():
    flags = torch.backends.cuda.matmul
    before, flags.fp32_precision = flags.fp32_precision, "tf32"
    try:
        with preserved():
            torch.set_grad_enabled(False)
            torch.set_float32_matmul_precision("highest")
        assert flags.fp32_precision == "tf32" and torch.is_grad_enabled()
    finally:
        flags.fp32_precision = before


def test_an_expanded_tensor_is_left_alone():
    mask = torch.ones(1, 3).expand(4, 3)
    with preserved(lambda: mask):
        pass
    assert torch.equal(mask, torch.ones(4, 3))


GLOBAL_MODEL = nn.Linear(1, 1)
GLOBAL_LOG = []


def step_with_globals(scale=(2, [3])):
    GLOBAL_LOG.append(float(GLOBAL_MODEL(torch.ones(1, 1))))


def test_what_a_callable_can_reach():
    model, log, generator = nn.Linear(1, 1), [], torch.Generator()

    def inner():
        log.append(model)

    def outer(unused):
        return [inner() for _ in range(1)]

    found = find_belongings(functools.partial(outer, generator))
    assert {id(model), id(log), id(generator)} <= {id(thing) for thing in found}
    found = find_belongings(step_with_globals)
    assert id(GLOBAL_MODEL) in map(id, found) and id(GLOBAL_LOG) in map(id, found)
    person = Person()
    assert id(person.optimizer) in map(id, find_belongings(person.step))
