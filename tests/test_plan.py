"""The plan: every series once, as many workers as asked, epochs that fit a budget, timed and not assumed."""

import math

import pytest
from conftest import walk

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError
from cpbkit.runs import plan as module
from cpbkit.runs.plan import Trial, make_plan

EXPERIMENT = vary(PRESETS["quick"], width=4, context=12, epochs=50)
SERIES = {f"S{i}": walk(f"S{i}", 500 + 100 * i) for i in range(5)}


def fake(seconds, size=1000):
    return lambda experiment, series, device: Trial(len(series), seconds[len(series)], size * len(series))


def test_a_plan_holds_every_series_once_and_states_the_steps_of_the_longest():
    plan = make_plan(EXPERIMENT, SERIES, workers=2)
    assert sorted(name for job in plan.jobs for name in job) == sorted(SERIES)
    assert plan.devices == ["cpu"] * 2 and len(plan.jobs) >= 2
    longest = 900 * 0.7 - EXPERIMENT.task.context - EXPERIMENT.task.horizon + 1
    assert plan.steps == -(-int(longest) // EXPERIMENT.training.batch)
    assert plan.epochs == 50 and plan.seconds > 0 and "a step of one model took" in plan.reason


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [({1: 1, 2: 1, 3: 1}, [2, 3]), ({1: 1, 2: 2.5, 3: 4}, [1] * 5)],
)
def test_the_size_with_the_least_time_a_model_is_taken(monkeypatch, seconds, sizes):
    monkeypatch.setattr(module, "_trial", fake(seconds))
    assert sorted(map(len, make_plan(EXPERIMENT, SERIES, workers=2).jobs)) == sizes


@pytest.mark.parametrize(("bfloat16", "taken"), [(0.8, "bfloat16"), (0.95, "float32")])
def test_fewer_bits_are_taken_where_their_steps_were_timed_as_clearly_quicker(monkeypatch, bfloat16, taken):
    def trial(experiment, series, device):
        return Trial(len(series), {"float32": 1.0, "bfloat16": bfloat16}[experiment.training.precision], 1)

    monkeypatch.setattr(module, "_trial", trial)
    plan = make_plan(vary(EXPERIMENT, precision="auto"), SERIES, workers=1)
    assert plan.precision == taken and plan.reason.endswith(f"so {taken}") and "ms in bfloat16" in plan.reason
    assert make_plan(EXPERIMENT, SERIES, workers=1).precision == "", (
        "float32 was asked for: nothing is left to the plan"
    )


def test_a_stack_stays_within_the_free_memory(monkeypatch):
    monkeypatch.setattr(module, "_trial", fake({1: 1, 2: 1, 3: 1}))
    monkeypatch.setattr(module, "free_memory", lambda device: 3100 / module.MEMORY_SHARE)
    assert max(map(len, make_plan(EXPERIMENT, SERIES, workers=1).jobs)) <= 3


@pytest.mark.parametrize(("room", "size"), [(1000, 50), (30, 25), (20, 12)])  # models in the device's memory
def test_many_series_on_a_gpu_are_planned_from_the_stacks_that_could_be_tried(monkeypatch, room, size):
    def trial(experiment, series, device):
        if len(series) > room:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return Trial(len(series), 0.1 + 0.001 * len(series), 1000)

    monkeypatch.setattr(module, "find_places", lambda *_: ["cuda:0"])
    monkeypatch.setattr(module, "free_memory", lambda device: 1e12)
    monkeypatch.setattr(module, "_trial", trial)
    series = {f"S{i}": walk(f"S{i}", 500) for i in range(100)}
    # For stacks of 50, where a step of one model takes 0.1 s.
    jobs = make_plan(EXPERIMENT, series, trial_seconds=20.3).jobs
    assert max(map(len, jobs)) == size and sum(map(len, jobs)) == 100


def test_the_workers_of_a_gpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(module, "_trial", fake(dict.fromkeys(range(1, 25), 0.01), size=10**9))
    monkeypatch.setattr(module, "free_memory", lambda device: 9e9 / module.MEMORY_SHARE)
    series = {f"S{i}": walk(f"S{i}", 500) for i in range(24)}
    largest = {}
    for places in (["cuda:0"], ["cuda:0"] * 2, ["cuda:0", "cuda:1"]):
        monkeypatch.setattr(module, "find_places", lambda *_, places=places: places)
        largest[tuple(places)] = max(map(len, make_plan(EXPERIMENT, series).jobs))
    # 6 GB fit into 9, not into the half of 9 less what two processes take of the device.
    assert list(largest.values()) == [6, 3, 6]


def test_a_budget_shortens_patience_or_says_that_nothing_fits(monkeypatch):
    monkeypatch.setattr(module, "_trial", fake({1: 1, 2: 1, 4: 1, 5: 1}))
    experiment = vary(EXPERIMENT, schedule="plateau", patience=20)
    whole = make_plan(experiment, SERIES, workers=1)
    minutes = whole.seconds / 60 / 2
    half = make_plan(experiment, SERIES, workers=1, minutes=minutes)
    assert whole.patience == 20 and half.patience == math.ceil(20 / 2 * module.PLANNED_SHARE)
    assert half.epochs == 50, "models that still improve go on"
    assert half.seconds <= whole.seconds / 2
    cosine = make_plan(vary(experiment, schedule="cosine"), SERIES, workers=1, minutes=minutes)
    assert cosine.epochs == int(50 / 2 * module.PLANNED_SHARE) and cosine.patience == 20, "it must reach its end"
    assert make_plan(experiment, SERIES, workers=1, minutes=10 * minutes) == whole
    with pytest.raises(CpbkitError, match=r"one epoch of 5 models takes about 0\.2 min here.*got a budget of 0\.1 min"):
        make_plan(EXPERIMENT, SERIES, workers=1, minutes=0.1)
