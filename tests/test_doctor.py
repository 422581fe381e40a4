"""The whole visit: measure, decide, try, and write the bill."""

import dataclasses
import json
import math
import re
import time
import types
import weakref

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from toys import FEATURES, LENGTH, PandasWindows, WrittenLSTM, make_toy
from virtual import HandClock

from cpbkit.cli.main import cpbkit
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS, TRAINED
from cpbkit.errors import UnknownName
from cpbkit.gpu_check.diagnosis import decide
from cpbkit.gpu_check.doctor import Examination, _throttling, diagnose, preset_step, render
from cpbkit.gpu_check.findings import check_environment
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.numbers import Numbers
from cpbkit.gpu_check.script import _note_variable
from cpbkit.gpu_check.step import Measured, Step, measure
from cpbkit.gpu_check.trials import TRIALS, Gain, compare, try_fixes


def test_a_gain_by_a_clock_that_is_known():
    clock = HandClock()
    gain = compare(clock, lambda: clock.spend(0.03), lambda: clock.spend(0.01), seconds=5)
    assert (gain.gain, gain.low, gain.high) == pytest.approx((3, 3, 3)) and gain.verdict == "do this"
    assert compare(clock, lambda: clock.spend(0.01), lambda: clock.spend(0.03), seconds=5).verdict == "slower"


def test_a_common_drift_of_the_machine_is_no_difference():
    clock, speed = HandClock(), [1.0]

    def spend():
        speed[0] *= 1.01  # the machine gets slower all the time
        clock.spend(0.01 * speed[0])

    gain = compare(clock, spend, spend, seconds=1)
    assert gain.gain == pytest.approx(1, abs=0.2)
    noisy = iter([0.01, 0.012] * 10_000)

    def jump():
        clock.spend(next(noisy))

    assert compare(clock, jump, jump, seconds=0.2).verdict == "no difference"


def test_a_trial_that_would_take_hours_is_not_begun():
    clock = HandClock()
    with pytest.raises(Exception, match=r"8 pairs would take 1600\.0 s, and 2\.0 were left"):
        compare(clock, lambda: clock.spend(100), lambda: clock.spend(100), seconds=2)


def test_verdicts_of_gains():
    assert Gain("x", 1.0, 0.9, 1.1).verdict == "no difference"
    assert Gain("x", math.nan, math.nan, math.nan, "could not be tried: why").verdict == "could not be tried: why"


def test_a_starved_step_is_cured_and_the_cure_is_measured():
    loader = torch.utils.data.DataLoader(PandasWindows(), 32, shuffle=True)
    step = make_toy("cpu", nn.Flatten(1), LENGTH * FEATURES, loader)
    before = [p.clone() for p in step.model.parameters()]
    found = diagnose(step, seconds=6)
    assert found.diagnosis.verdict == "DATA_STARVED"
    gain = next(g for g in found.gains if g.fix == "data on the device")
    ceiling = next(f.ceiling for f in found.diagnosis.fixes if f.name == "data on the device")
    assert gain.verdict == "do this" and gain.gain > 1.5
    assert gain.low < 1.6 * ceiling  # a ceiling holds, up to the noise of a shared machine
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    text = render(found)
    assert "DATA-STARVED" in text and "do this" in text and "could gain at most" in text
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.long
def test_a_variant_of_the_person_is_measured_beside():
    step = make_toy("cpu", WrittenLSTM(FEATURES, 16), 16)
    step = dataclasses.replace(step, variants={"nn.LSTM instead of the cell": make_toy("cpu", hidden=16)})
    gains = try_fixes(step, decide(measure(step, seconds=2).numbers), seconds=30)
    gain = next(g for g in gains if g.fix == "nn.LSTM instead of the cell")
    assert gain.verdict == "do this" and gain.low > 1.5


def test_a_fused_optimiser_is_tried_and_taken_back():
    layers = nn.Sequential(nn.Flatten(1), *(nn.Linear(320, 320) for _ in range(3)))
    step = make_toy("cpu", layers, 320, fused=None, foreach=None)
    step.train(next(iter(step.batches())))
    diagnosis = decide(measure(step, seconds=2).numbers)
    settings = [(g["fused"], g["foreach"]) for g in step.optimizer.param_groups]
    states = {p: {k: v.clone() for k, v in s.items()} for p, s in step.optimizer.state.items()}
    gain = next(gain for gain in try_fixes(step, diagnosis, seconds=4) if gain.fix == "fused optimiser")
    assert gain.low > 0, gain.note
    assert [(g["fused"], g["foreach"]) for g in step.optimizer.param_groups] == settings
    for parameter, state in step.optimizer.state.items():
        assert all(torch.equal(state[k], v) for k, v in states[parameter].items())


@pytest.mark.parametrize(
    ("held", "code"),
    [
        (["", "", "", "", "heat"], ()),
        (["power cap"] * 5, ("POWER_CAPPED",)),
        (["power cap", "power cap", "power cap", "power cap", "power cap, heat"], ("POWER_CAPPED",)),
        (["power cap, heat", "power cap, heat", "", "", ""], ("THROTTLED_OR_SHARED",)),
    ],
)
def test_a_card_at_its_power_limit_keeps_its_verdict(held, code):
    devices = ["cpu", *["cuda:0"] * 15, *["cuda:1"] * 5]
    frame = pd.DataFrame({"device": devices, "throttle": [""] * 16 + held})
    monitor = types.SimpleNamespace(frame=lambda: frame)
    found = _throttling(monitor, "cuda:1")
    assert _throttling(monitor, "cuda") == _throttling(monitor, "cpu") == ()
    assert tuple(name for name, _ in found) == code
    numbers = Numbers(loop=10, cached=10, host=1, device=10)
    diagnosis = decide(numbers, found)
    assert (diagnosis.verdict == "DEVICE_BOUND") == (code != ("THROTTLED_OR_SHARED",))
    assert any("held down in 100%" in text for text in diagnosis.beside) == (code == ("POWER_CAPPED",))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory\nand much more"), "could not be tried: CUDA out of memory"),
        (NotImplementedError("no such kernel for Half"), "could not be tried: no such kernel for Half"),
        (ValueError("more than 1 value per channel"), "could not be tried: more than 1 value per channel"),
        (TypeError("takes 3 positional arguments but 4 were given"), None),
        (AttributeError("no attribute 'feed'"), None),
    ],
)
def test_a_fix_that_cannot_be_had_is_told_and_a_mistake_in_the_program_is_raised(error, told):
    def broken(_):
        raise error

    layer = nn.Linear(8, 8)
    step = Step(lambda _: layer(torch.ones(8, 8)), device="cpu", variants={"mine": Step(broken, device="cpu")})
    diagnosis = decide(Numbers(loop=10, cached=10, host=1, device=10))
    if told:
        gain = next(gain for gain in try_fixes(step, diagnosis, seconds=0.1) if gain.fix == "mine")
        assert gain.verdict == told
    else:
        with pytest.raises(type(error), match=str(error)):
            try_fixes(step, diagnosis, seconds=0.1)


def test_what_supports_a_verdict_and_what_stands_beside_it_is_shown():
    numbers = Numbers(loop=10, cached=10, host=10, device=1, kernels=500, optimizer_share=0.5, growth=102_400.0)
    measured = Measured(numbers, "by hand", ("the step prints",))
    shown = render(Examination(check_environment(), "mine", measured, decide(numbers)))
    assert "HOST-BOUND " in shown and "\n  reason: OPTIMIZER_FOR_LOOP\n" in shown and "500 kernels" in shown
    assert "\n  also: the step prints\n" in shown and "\n  also: MEMORY_GROWTH: live memory grows by 100 KB" in shown
    bill = {line[2:22].strip(): line[22:].split() for line in shown.splitlines()}
    assert bill["fused optimiser"][:4] == ["2.00x", "not", "tried", "here:"]


def test_half_precision_is_tried_on_the_weights_of_each_step():
    layer, seen = nn.Linear(2, 1, bias=False), []
    nn.init.zeros_(layer.weight)

    def train(_):
        seen.append(layer(torch.ones(1, 2)))
        with torch.no_grad():
            layer.weight.add_(1)

    TRIALS["float16"](Step(train, device="cpu"), 0.01)
    half = [out.item() for out in seen if out.dtype is torch.float16]
    assert len(half) > 8 and len(set(half)) == len(half), "an autocast around many steps keeps its first casts"


def test_a_batch_that_does_not_fit_ends_the_search_and_gives_its_memory_back():
    alive, beside = weakref.WeakSet(), []

    class Held:
        def __init__(self, samples):
            self.samples = samples

    def make(samples):
        held = Held(samples)
        alive.add(held)

        def train(_):
            if held.samples > 32:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            time.sleep(1e-3)
            beside.append(max(other.samples for other in alive))

        return Step(train, device="cpu", samples=samples, resized=make)

    gain = TRIALS["larger batch"](make(8), 0.5)
    assert gain.gain > 3 and "4 times the batch" in gain.note and beside[-1] == 32
    assert TRIALS["larger batch"](make(64), 0.5).note == "not reached: the batch itself does not fit on the device"


def test_a_step_that_fails_is_told_not_raised():
    def broken(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    found = diagnose(Step(broken, device="cpu", name="mine"), seconds=2)
    assert found.diagnosis is None and "mat1 and mat2" in found.failure
    assert "mine: no diagnosis. the step failed in the phase" in render(found)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_has_a_step(name):
    small = dataclasses.replace(PRESETS[name], model=dataclasses.replace(PRESETS[name].model, width=16))
    step = preset_step(small, series=2, device="cpu")
    before = [p.clone() for p in step.model.parameters()]
    step.train(None)
    assert any(not torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert all(p.isfinite().all() for p in step.model.parameters())


def test_each_measurement_of_a_preset_begins_its_training_anew():
    step = preset_step(vary(PRESETS["quick"], precision="tf32"), device="cpu")
    before, ends = torch.get_float32_matmul_precision(), []
    for _ in range(2):
        with preserved(step):
            for _ in range(3):
                step.train(None)
            ends.append([p.detach().clone() for p in step.model.parameters()])
        assert torch.get_float32_matmul_precision() == before, "the training had set its own"
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], step.model.parameters(), strict=True))


def test_a_closed_form_is_measured_as_one_and_has_no_batch():
    found = diagnose(preset_step("ridge_ar", device="cpu"), seconds=2)
    assert found.failure == "" and found.measured.numbers.batch > 1000
    assert "larger batch" not in {gain.fix for gain in found.gains}


SMALL = ("width=8", "batch=8", "context=4", "horizon=1")
NETWORKS = {(PRESETS[name].task, PRESETS[name].model): name for name in TRAINED}  # two presets train another's network


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS.values())
def test_the_bill_of_every_preset_holds_gains_and_no_errors(name):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    gain = re.compile(r"\n  stack of series +only a trial tells +\d+\.\d\dx  \[\d")
    for seconds in (1, 4, 16):  # the latter on a loaded machine, where the first asks for more
        shown = CliRunner().invoke(cpbkit, ["doctor", "--preset", name, "--seconds", seconds, *settings])
        if gain.search(shown.output) or "give it more" not in shown.output:
            break
    assert shown.exit_code == 0, shown.output + repr(shown.exception)
    assert gain.search(shown.output), shown.output
    wrong = re.compile(r"could not|argument|object|Traceback|Error|error|nan|None")
    assert not wrong.search(shown.output), shown.output


@pytest.mark.gpu
def test_a_preset_is_one_launch_on_a_gpu():
    n = measure(preset_step("quick", device="cuda"), 10).numbers
    assert n.kernels > 100 and n.host < n.device / 2


def test_a_preset_is_diagnosed_and_stacked():
    found = diagnose(preset_step("quick", device="cpu"), seconds=4)
    assert found.failure == "" and found.measured.numbers.batch == 64
    assert found.measured.numbers.kernels > 100 and found.measured.numbers.loader == 0
    assert "stack of series" in {g.fix for g in found.gains}
    with pytest.raises(UnknownName, match="preset must be a known name; got 'gro'"):
        preset_step("gro")


@pytest.mark.parametrize(
    ("name", "value", "found"), [("OMP_NUM_THREADS", "1", 1), ("OMP_NUM_THREADS", "²", 7), ("A_THREAD", "1", 7)]
)
def test_only_a_number_of_threads_is_taken_over_from_the_environment(name, value, found, monkeypatch):
    threads = [7]
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.append(n))
    here = {"__name__": "__main__", "put": lambda: _note_variable(lambda *_: None, name, value)}
    exec("def script():\n    put()\nscript()", here)  # a script of which no name is torch's
    assert threads[-1] == found
