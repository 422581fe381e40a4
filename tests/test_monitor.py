"""The sampling thread, with an NVML that also fails the way real ones do."""

import time
import types

import numpy as np
import pytest
import torch

from cpbkit.hardware import monitor
from cpbkit.hardware.monitor import Monitor, growth
from cpbkit.hardware.nvml import load_nvml, nvml_handles


class Refused(Exception):
    pass


def fake_nvml(**broken):
    """A module like pynvml with one device; `name="message"` makes that call fail."""

    def answer(name, value):
        def call(*_):
            if name in broken:
                raise Refused(broken[name])
            return value

        return call

    values = {
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": "handle",
        "DeviceGetMemoryInfo": types.SimpleNamespace(used=900_000_000),
        "DeviceGetUtilizationRates": types.SimpleNamespace(gpu=37),
        "DeviceGetPowerUsage": 65_500,
        "DeviceGetClockInfo": 585,
        "DeviceGetCurrentClocksThrottleReasons": 0x4 | 0x1,  # power cap; 0x1 is idle and no throttle
    }
    calls = {f"nvml{name}": answer(name, value) for name, value in values.items()}
    return types.SimpleNamespace(NVMLError=Refused, NVML_CLOCK_SM=1, **calls)


def watch(nvml, seconds=0.0):
    with Monitor(period=0.02, nvml=nvml) as watching:
        time.sleep(seconds)
    return watching


def test_without_a_gpu_host_memory_and_cpu_are_seen():
    with Monitor(period=0.05, nvml=False) as watching:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            sum(range(1000))
        watching.mark("epoch 1")
    frame = watching.frame()
    assert list(frame.columns) == list(monitor.COLUMNS)
    assert set(frame.device) == {"cpu"}
    assert frame.time.is_monotonic_increasing
    assert (frame.host > 10e6).all() and (frame.used > frame.host.max() / 2).all()
    assert 100 / watching._cores * 0.2 < frame.utilisation.max() <= 100 / watching._cores * 1.4
    assert list(frame.text[frame.text != ""]) == ["epoch 1"]


def test_a_device_gets_a_row_beside_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    frame = watch(fake_nvml()).frame()
    row = frame[frame.device == "cuda:0"].iloc[0]
    assert (row.used, row.utilisation, row.power, row.clock) == (900e6, 37, 65.5, 585)
    assert row.throttle == "power cap"
    assert np.isnan(row.allocated), "torch has not started CUDA: nothing is known, and nothing is started"


@pytest.mark.parametrize("call", ["DeviceGetPowerUsage", "DeviceGetUtilizationRates", "DeviceGetMemoryInfo"])
def test_what_is_not_supported_is_said_once_and_the_rest_is_seen(call):
    watching = watch(fake_nvml(**{call: "Not Supported"}), 0.1)
    assert len(watching.problems) == 1 and watching.problems[0].endswith("Not Supported")
    row = watching.frame().query("device == 'cuda:0'").iloc[-1]
    assert row[["used", "utilisation", "power"]].isna().sum() == 1 and row.clock == 585


def test_a_lost_gpu_and_an_old_library_do_not_stop_the_watch():
    lost = watch(fake_nvml(DeviceGetCount="GPU is lost"))
    assert lost.problems == ["devices: GPU is lost"] and set(lost.frame().device) == {"cpu"}
    old = fake_nvml()
    del old.nvmlDeviceGetCurrentClocksThrottleReasons
    assert "throttle" in watch(old).problems[0]


def test_a_missing_library_is_a_problem_and_no_error():
    nvml, problem = load_nvml()
    assert (nvml is None) == bool(problem)


def test_visible_devices_choose_the_handles(monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlDeviceGetHandleByIndex = lambda i: i
    nvml.nvmlDeviceGetHandleByUUID = lambda name: name
    nvml.nvmlDeviceGetCount = lambda: 3
    for value, expected in {"2,0": [2, 0], "GPU-7a": ["GPU-7a"], "": [], "1,-1,0": [1]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert nvml_handles(nvml) == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert nvml_handles(nvml) == [0, 1, 2]


def test_an_error_in_the_thread_is_reported_and_the_thread_goes_on(monkeypatch):
    watching = Monitor(period=0.01, nvml=False)
    with watching:
        real, calls = watching._sample, []

        def break_first(text):
            calls.append(text)
            if len(calls) == 1:
                raise OSError("disk on fire")
            real(text)

        monkeypatch.setattr(watching, "_sample", break_first)
        time.sleep(0.1)
    assert watching.problems == ["a sample failed: OSError: disk on fire"] and len(calls) > 3


def test_long_runs_are_thinned_and_events_stay(monkeypatch):
    monkeypatch.setattr(monitor, "LIMIT", 10)
    watching = Monitor(period=60, nvml=False)
    with watching:
        for i in range(40):
            watching.mark("kept" if i % 10 == 0 else "")
    frame = watching.frame()
    assert len(frame) <= 16 and (frame.text == "kept").sum() == 4 and watching.period > 60
    assert frame.time.is_monotonic_increasing


def test_watching_costs_under_one_percent():
    assert watch(False, 0.0).period == 0.02
    with Monitor(period=0.5, nvml=fake_nvml()):
        spent = time.process_time()  # by all threads; this one sleeps
        time.sleep(2.1)
        assert time.process_time() - spent < 0.01 * 2.1


def test_a_period_must_be_positive():
    with pytest.raises(ValueError, match="period must be positive seconds; got 0"):
        Monitor(period=0)


def test_status_line_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert monitor.gpu_status("before").startswith("GPU Status [before] no CUDA in use; host memory ")


STEPS = np.arange(300)
NOISE = np.random.default_rng(0).normal(size=300)


@pytest.mark.parametrize(
    ("values", "slope", "leaks"),
    [
        (1e6 + 100e3 * STEPS, 100e3, True),
        (1e6 + 100e3 * STEPS + 50e3 * NOISE, 100e3, True),
        (np.full(300, 5e8), 0, False),
        (5e8 + 1e6 * NOISE, 0, False),
        (1e6 + 30e3 * STEPS, 30e3, False),  # below 64 KB a step
        (np.where(STEPS < 20, 1e6 * STEPS, 20e6), 0, False),  # warm-up, then flat
        (1e6 * (STEPS % 25), None, False),  # a saw-tooth
        (np.where(STEPS < 150, 1e6, 9e8), None, False),  # one big allocation
    ],
)
def test_growth_is_a_steady_slope(values, slope, leaks):
    measured, verdict = growth(values)
    assert verdict is leaks or bool(verdict) == leaks
    if slope is not None:
        assert measured == pytest.approx(slope, rel=0.05, abs=2e3)


def test_growth_needs_values():
    assert growth([1, 2, 3])[1] is False


@pytest.mark.parametrize("now, share", [((10, 0, 2), 0.8), ((5, 5, 2), 0.0), ((10, 1, 10), 0.0), ((0, 0, 0), 0.0)])
def test_other_programs_are_told_where_they_leave_no_core_idle(now, share):
    before = monitor.Processor(3.0, 4.0, 1.0)
    assert monitor.Processor(*(a + b for a, b in zip(before, now, strict=True))).of_others(before) == share


def test_the_time_of_the_cores_and_of_this_process_goes_on():
    before, end = monitor.Processor.read(), time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    after = monitor.Processor.read()
    assert after.busy + after.idle > before.busy + before.idle and after.own > before.own
