"""The decision tree: hand-made numbers, invariants, and its probes on a machine in virtual time."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import Launch, Machine, Workload, examine, run_calls, run_loop

from cpbkit.gpu_check.diagnosis import CURES, STOPPERS, VERDICTS, decide
from cpbkit.gpu_check.numbers import Numbers, list_ceilings, pool, predict

HEALTHY = Numbers(loop=10, cached=10, host=2, device=9.9, loader=0.5, filled=0.9)
CELL = Numbers(
    loop=61.2, cached=60.8, host=59.9, device=2.4, loader=0.4, kernels=8797, waits=2, rnn="cells",
    arithmetic=0.1, capability=(7, 5), filled=0.05,
)  # fmt: skip


def vary(numbers=HEALTHY, **changes):
    return dataclasses.replace(numbers, **changes)


CASES = {
    "NO_GPU_RUNTIME": (HEALTHY, (("NO_GPU_RUNTIME", "no GPU"),)),
    "CPU_ONLY_WHEEL": (HEALTHY, (("CPU_ONLY_WHEEL", "wheel"),)),
    "ARCH_OR_DRIVER_MISMATCH": (HEALTHY, (("ARCH_OR_DRIVER_MISMATCH", "arch"),)),
    "WRONG_ACCELERATOR": (HEALTHY, (("WRONG_ACCELERATOR", "TPU"),)),
    "MODEL_OR_DATA_ON_CPU": (vary(misplaced=("mask is on cpu",)), (("DEBUG_MODE_ON", "later"),)),
    "DEBUG_MODE_ON": (vary(CELL), (("DEBUG_MODE_ON", "anomaly"),)),
    "THROTTLED_OR_SHARED": (vary(CELL), (("THROTTLED_OR_SHARED", "heat"),)),
    "DATA_STARVED": (vary(loop=20, loader=10), ()),
    "SYNC_BOUND": (vary(loop=17, cached=17, host=8, device=9, waits=1), ()),
    "HOST_BOUND": (CELL, ()),
    "COPY_BOUND": (vary(copy=3), ()),
    "CUDNN_NOT_PERSISTENT": (vary(rnn="cudnn standard"), ()),
    "DEVICE_LATENCY_BOUND": (vary(filled=0.1), ()),
    "DEVICE_BOUND": (HEALTHY, ()),
    "INCONCLUSIVE": (vary(loop=11.5, loader=5, spread=0.05), ()),
}

OF_A_WATCH = {
    "NO_WORK_ON_GPU", "PYTHON_OR_IO_IN_STEP", "VALIDATION_IN_STEP", "SAMPLE_BY_SAMPLE", "GRAPH_KEPT", "FLOAT64",
    "DENSE_EMBEDDING", "FEW_THREADS", "TOO_MANY_THREADS", "WASTED_WORK", "MEMORY_GROWTH", "UNSOUND_TRAINING",
    "GPU_IDLE_OUTSIDE_STEPS",
}  # fmt: skip


def test_every_verdict_is_reached():
    assert set(CASES) | set(OF_A_WATCH) == set(VERDICTS)  # those are reached in test_watch.py
    for verdict, (numbers, environment) in CASES.items():
        assert decide(numbers, environment).verdict == verdict


@pytest.mark.parametrize(
    ("numbers", "verdict", "reason"),
    [
        (CELL, "HOST_BOUND", "RNN_NOT_CUDNN"),
        (vary(CELL, rnn="cudnn standard"), "HOST_BOUND", "CUDNN_NOT_PERSISTENT"),
        (vary(CELL, rnn="", optimizer_share=0.4), "HOST_BOUND", "OPTIMIZER_FOR_LOOP"),
        (vary(CELL, rnn=""), "HOST_BOUND", "MANY_SMALL_OPS"),
        (vary(loop=20, loader=10, workers=2), "DATA_STARVED", "WORKERS"),
        (vary(loop=20, loader=10), "DATA_STARVED", "LOADER_ON_THE_HOST"),
        (vary(precision="bfloat16", capability=(7, 5)), "DEVICE_BOUND", "BF16_EMULATED"),
        (vary(precision="bfloat16", capability=(8, 0), arithmetic=9), "DEVICE_BOUND", "COMPUTE"),
        (vary(arithmetic=9, capability=(7, 5)), "DEVICE_BOUND", "TENSOR_CORES_UNUSED"),
        (vary(arithmetic=9, capability=(6, 0)), "DEVICE_BOUND", "COMPUTE"),
        (vary(arithmetic=0.5, capability=(7, 5)), "DEVICE_BOUND", "BANDWIDTH"),
        (vary(filled=math.nan, doubling=1.1), "DEVICE_LATENCY_BOUND", ""),
        (vary(filled=math.nan, doubling=1.9), "DEVICE_BOUND", ""),
    ],
)
def test_the_finer_reason(numbers, verdict, reason):
    found = decide(numbers)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_ceilings_of_a_written_cell_by_hand():
    ceilings = {name: ceiling for name, (ceiling, _) in list_ceilings(CELL).items()}
    assert ceilings["library layer"] == ceilings["CUDA graph"] == pytest.approx(61.2 / 2.4)
    assert ceilings["data on the device"] == pytest.approx(61.2 / 60.8)
    assert ceilings["no waits"] == pytest.approx(61.2 / (59.9 + 0.4))
    # Arithmetic of 0.1 ms is hidden behind a host that needs 60: saving it saves nothing.
    assert ceilings["float16"] == pytest.approx(1.0)
    found = decide(CELL)
    assert {f.name for f in found.fixes if f.advised} == {"library layer", "CUDA graph", "stack of series"}
    assert all("not advised" in f.note for f in found.fixes if f.ceiling < 1.10)


def test_a_device_that_is_busy_and_empty_takes_more_series():
    latency = vary(filled=0.1)
    # The device fills a tenth: ten series side by side would take as long as one.
    assert list_ceilings(latency)["stack of series"][0] == pytest.approx(10 / (9.9 * 0.1))
    advised = [f.name for f in decide(latency).fixes if f.advised]
    assert advised == ["stack of series", "larger batch"]
    unknown = vary(filled=math.nan, doubling=1.05)
    assert math.isnan(list_ceilings(unknown)["stack of series"][0])
    found = decide(unknown)
    assert found.verdict == "DEVICE_LATENCY_BOUND" and "stack of series" in [f.name for f in found.fixes if f.advised]
    assert "twice the samples take the device 1.05 times as long" in found.evidence


def test_times_that_must_be_equal_are_pooled_within_the_noise_alone():
    known = {
        name: 1.0 for name in ("resident", "doubling", "arithmetic")
    }  # since Python 3.13 no NaN equals itself here
    exact = vary(loop=9.9, cached=9.9, copy=3, **known)
    assert pool(exact) == exact
    noisy = pool(vary(loop=10.5, cached=9.6, device=9.9, spread=0.05))
    assert noisy.cached == pytest.approx(9.75)
    assert noisy.loop == noisy.device == pytest.approx((10.5 + 9.6 + 9.9) / 3)
    # The host's loop holds the loader as well: W = H + L.
    hosted = pool(vary(loop=12.6, cached=10, host=10, device=2, loader=2, spread=0.05))
    assert hosted.host + hosted.loader == pytest.approx(hosted.loop) and 12 < hosted.loop < 12.6
    # A step that waits is slower than either, for a reason: only the loop and the cached batch are looks at one time.
    waiting = pool(vary(loop=17.4, cached=17, host=8, device=9, loader=0))
    assert (waiting.cached, waiting.device, waiting.loop) == pytest.approx((17, 9, 17.2))


def test_waits_recover_at_most_the_smaller_of_host_and_device():
    # Serialised: W = H + D. The gain is (H + D) / max(H, D), never above 2.
    for host, device in ((8, 9), (9, 9), (1, 9), (9, 1)):
        n = vary(loop=host + device, cached=host + device, host=host, device=device, loader=0, waits=1)
        assert list_ceilings(n)["no waits"][0] == pytest.approx((host + device) / max(host, device))


def test_on_a_cpu_times_add_up_and_nothing_waits():
    n = Numbers(loop=12, cached=10, host=6, device=4, loader=2, kernels=2000, serial=True)
    assert predict(n) == pytest.approx(12)
    assert predict(n, host=0) == pytest.approx(6)
    assert set(list_ceilings(n)) == {"data on the device", "stack of series", "larger batch"}
    assert decide(n).verdict == "DATA_STARVED"
    assert decide(vary(n, loop=10, loader=0)).verdict == "HOST_BOUND"
    assert decide(vary(n, loop=10, loader=0, host=4, device=6)).verdict == "DEVICE_BOUND"


def test_a_fast_loader_cannot_be_what_a_noisy_loop_waits_for():
    assert decide(vary(loop=14, loader=0.1)).verdict != "DATA_STARVED"


def test_growth_and_later_codes_are_said_beside_the_verdict():
    found = decide(vary(growth=200 * 1024), (("THROTTLED_OR_SHARED", "hot"), ("DEBUG_MODE_ON", "anomaly")))
    assert found.verdict == "DEBUG_MODE_ON" and found.text == "anomaly"
    assert any("THROTTLED_OR_SHARED: hot" in line for line in found.beside)
    assert any("200 KB a step" in line for line in found.beside)


def test_a_diagnosis_goes_to_json():
    again = json.loads(json.dumps(dataclasses.asdict(decide(CELL))))
    assert again["verdict"] == "HOST_BOUND" and again["policy"]["least_gain"] == 1.10


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="device must be a positive time in ms; got 0"):
        vary(device=0)


TIME = st.floats(0.01, 1e3)
NUMBERS = st.builds(
    Numbers, loop=TIME, cached=TIME, host=TIME, device=TIME, loader=TIME, spread=st.floats(0, 0.3),
    copy=st.floats(0, 0.005), filled=st.floats(0, 1), serial=st.booleans(), workers=st.integers(0, 2),
)  # fmt: skip


@given(NUMBERS, st.floats(0.1, 10))
@settings(max_examples=200, deadline=None)
def test_the_unit_of_time_does_not_matter(n, unit):
    times = ("loop", "cached", "host", "device", "loader", "copy")
    scaled = vary(n, **{name: getattr(n, name) * unit for name in times})
    one, other = decide(n), decide(scaled)
    assert one.verdict == other.verdict or n.copy / n.device == pytest.approx(0.15, rel=1e-6)
    assert one.verdict in VERDICTS


@given(NUMBERS)
@settings(max_examples=200, deadline=None)
def test_nothing_below_the_least_gain_is_advised(n):
    found = decide(n)
    for fix in found.fixes:
        assert not fix.advised or math.isnan(fix.ceiling) or fix.ceiling >= 1.10
        assert not fix.advised or fix.name in CURES[found.verdict]


@given(NUMBERS, st.floats(1, 5))
@settings(max_examples=200, deadline=None)
def test_more_waiting_never_turns_waits_into_data(n, factor):
    n = vary(n, serial=False)
    if decide(n).verdict == "SYNC_BOUND":
        slower = vary(n, loop=n.loop * factor, cached=n.cached * factor)
        assert decide(slower).verdict == "SYNC_BOUND"


def test_a_ceiling_too_good_to_be_true_says_so():
    found = decide(vary(loop=1000.0, loader=990.0))
    assert "suspicious" in next(f.note for f in found.fixes if f.ceiling > 50)
    assert not any("suspicious" in f.note for f in decide(HEALTHY).fixes)


def test_nothing_is_advised_where_nothing_can_run():
    for code in STOPPERS:
        assert decide(CELL, ((code, "x"),)).fixes == ()


# A machine in virtual time, under the probes of a real one.


def test_a_step_in_one_product_is_the_step_launch_by_launch():
    workload = Workload((Launch(5, 20), Launch(30, 3, waits=True), Launch(4, 50)), python=7, copy=11)
    machine, host, device = Machine(workload), 0.0, 0.0
    for _ in range(4):
        machine.train(next(machine.batches()))
        host, device, waited = run_calls(machine.calls[False], host, device)
        assert (machine.host, machine.device) == pytest.approx((host, device))
    # From a wait on: the last kernel ends after 60, then copy and two kernels with a gap each; the host comes at 54.
    assert waited == pytest.approx(60 + (1.2 + 11) + (1.2 + 20) + (1.2 + 3) - 54 + 12)


def test_simulated_loops_by_hand():
    device_bound = Workload((Launch(5, 100),) * 4)
    assert run_loop(device_bound) == pytest.approx(4 * (100 + 1.2))
    assert run_loop(Workload((Launch(50, 2),) * 4)) == pytest.approx(200)
    waits = Workload((Launch(50, 2),) * 3 + (Launch(50, 100, waits=True),))
    assert run_loop(waits) == pytest.approx(200 + 6 + 100 + 12)  # launches, latency, kernel, the wait itself
    loading = Workload((Launch(50, 2),) * 4, load=300)
    assert run_loop(loading) == pytest.approx(500) and run_loop(loading, loads=False) == pytest.approx(200)
    assert run_loop(Workload((Launch(50, 2),) * 4, period=900, receive=10)) == pytest.approx(900, rel=0.02)


def test_the_probes_find_host_and_device_times_of_a_simulated_machine():
    workload = Workload((Launch(40, 10),) * 50, load=25)
    n = examine(workload).numbers
    assert n.host == pytest.approx(50 * 40e-3, rel=0.02)
    assert n.device == pytest.approx(50 * (10 + 1.2) * 1e-3, rel=0.02)
    assert n.loader == pytest.approx(25e-3, rel=0.02)
    assert n.kernels == 50


def test_a_step_that_waits_blocks_the_plug_and_is_read_from_the_trace():
    workload = Workload((*((Launch(40, 10),) * 49), Launch(40, 900, waits=True)))
    found = examine(workload)
    assert "waits for the device" in found.method
    assert found.numbers.host == pytest.approx(50 * 40e-3, rel=0.05)
    assert found.numbers.device == pytest.approx((49 * 10 + 900 + 50) * 1e-3, rel=0.02)
    assert decide(found.numbers).verdict == "SYNC_BOUND"


def test_too_many_launches_for_the_queue_are_read_from_the_trace():
    found = examine(Workload((Launch(6, 2),) * 900))
    assert "overflow the queue" in found.method and decide(found.numbers).verdict == "HOST_BOUND"
