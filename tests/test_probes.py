"""Reading traces, and measuring this machine."""

import contextlib
import math
import types

import pytest
import torch
from toys import make_toy
from virtual import HandClock, Launch, Machine, Workload

from cpbkit.gpu_check.clocks import CYCLES, find_middle, make_clock, measure_call, run_plug
from cpbkit.gpu_check.probes import probe_machine, time_recurrence
from cpbkit.gpu_check.trace import read_trace


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def make_trace():
    """Two steps of 100 µs: kernels of 30 and 20 that overlap by 10, a copy of 5, a wait of 15."""
    events = [{"ph": "M", "name": "process_name"}, event("kernel", "before", -50, 40)]
    for i in range(2):
        t, shares = 100.0 * i, ({"blocks per SM": 0.5}, {"blocks per SM": 4.0})
        events += [
            event("user_annotation", f"ProfilerStep#{i}", t, 100),
            event("gpu_user_annotation", f"ProfilerStep#{i}", t + 1, 99),
            event("cuda_runtime", "cudaLaunchKernel", t, 5),
            event("cuda_runtime", "cudaLaunchKernel", t + 6, 4),
            event("cuda_runtime", "cudaStreamSynchronize", t + 60, 15),
            event("kernel", "RNN_blockPersist_fp_LSTM", t + 20, 30, **shares[0]),
            event("kernel", "RNN_blockPersist_bp_LSTM", t + 40, 20, **shares[1]),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", t + 70, 5),
        ]
    return events


def test_a_trace_by_hand():
    trace = read_trace(make_trace())
    assert trace.kernels == 2 and trace.launches == 2 and trace.waits == 1
    assert trace.device == pytest.approx((30 + 20 - 10 + 5) / 1e3)
    assert trace.copy == pytest.approx(0.005) and trace.waiting == pytest.approx(0.015)
    assert trace.filled == pytest.approx((0.5 * 30 + 1.0 * 20) / 50)
    assert trace.names == ("RNN_blockPersist_bp_LSTM", "RNN_blockPersist_fp_LSTM")


def test_a_graph_is_one_launch_of_many_kernels():
    graph = [e for e in make_trace() if e["name"] != "cudaLaunchKernel"]
    graph += [event("cuda_runtime", "cudaGraphLaunch", 100.0 * i + 1, 8) for i in range(2)]
    trace = read_trace(graph)
    assert (trace.launches, trace.kernels) == (1, 2)


def test_traces_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="needs ProfilerStep annotations"):
        read_trace([event("kernel", "k", 0, 1)])
    with pytest.raises(ValueError, match="recorded no kernel"):
        read_trace([event("user_annotation", "ProfilerStep#0", 0, 1), event("cpu_op", "aten::mm", 0, 1)])


def test_a_trace_without_blocks_does_not_guess_how_full_the_chip_is():
    bare = [e | {"args": {}} if e.get("cat") == "kernel" else e for e in make_trace()]
    assert math.isnan(read_trace(bare).filled)


def test_the_middle_and_its_error():
    middle, error = find_middle([10.0, 11.0, 9.0, 10.0, 30.0])  # one outlier does not matter
    assert middle == 10 and error == pytest.approx(1.2533 * 1.4826 * 1 / 5**0.5 / 10)


def test_the_standard_error_is_that_of_a_median():
    generator = torch.Generator().manual_seed(0)
    samples = 10 + torch.randn(3000, 15, generator=generator)
    stated = sum(find_middle(row)[1] for row in samples.tolist()) / 3000 * 10
    assert stated == pytest.approx(float(samples.median(1).values.std()), rel=0.15)


def test_without_a_plug_the_reason_is_said():
    plug = run_plug(make_clock("cpu"), lambda: None, 10, 10, 1e-3)
    assert math.isnan(plug.host) and "no kernel that only waits" in plug.reason


class TwoDevices:
    """torch.cuda of two devices of which the first is the current one: a queue each, and a chip that wakes up slowly.

    A queue is the seconds at which its work ends; nothing else takes time.
    """

    rates = (2e8, 5e8, 1.5e9)  # cycles a second of the first, the second, and every later wait

    def __init__(self):
        self.ends, self.waits, self.current, self.synchronized = {"cuda:0": 0.0, "cuda:1": 0.0}, 0, "cuda:0", []

    def current_stream(self, device):
        return str(device)

    def synchronize(self, device):
        self.synchronized.append(str(device))

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, str(device)
        yield
        self.current = before

    def _sleep(self, cycles):
        self.ends[self.current] += cycles / self.rates[min(self.waits, 2)]
        self.waits += 1

    def Event(self, enable_timing):
        event = types.SimpleNamespace(record=lambda stream: setattr(event, "time", self.ends[stream]))
        event.elapsed_time = lambda end: 1e3 * (end.time - event.time)
        return event


def test_a_clock_is_that_of_its_own_device(monkeypatch):
    cuda = TwoDevices()
    for name in ("current_stream", "synchronize", "device", "_sleep", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    clock = make_clock("cuda:1")
    before = cuda.ends["cuda:1"]
    clock.plug(0.2)
    assert cuda.ends["cuda:1"] - before == pytest.approx(0.2), "the rate is that of a chip that is awake"
    assert cuda.ends["cuda:0"] == 0 and set(cuda.synchronized) == {"cuda:1"}
    start = clock.mark()
    clock._wait(CYCLES)
    assert clock.between(start, clock.mark()) == pytest.approx(CYCLES / 1.5e9)


def test_the_plug_queues_what_is_counted_and_one_step_of_what_is_not():
    steps = []
    for launches in (100, 0):
        machine, calls = Machine(Workload((Launch(5.0, 2.0),))), []
        plug = run_plug(machine, lambda calls=calls: calls.append(1), launches, launches, 1e-4)
        assert not plug.reason
        steps.append(len(calls))
    assert steps == [7, 1]


def test_this_machine_has_figures():
    found = probe_machine("cpu", seconds=0.3)
    assert 0.05 < found["launch µs"] < 1000
    assert found["launch with autograd µs"] > 0
    assert 0.1 < found["copy GB/s"] < 5000 and 1e-4 < found["matmul float32 TFLOP/s"] < 100


def test_a_call_costs_what_a_clock_says():
    clock = HandClock()
    assert measure_call(clock, lambda: clock.spend(5e-6)) == pytest.approx(5)


def test_a_wider_recurrence_takes_longer():
    small, large = (time_recurrence(h, "cpu", repeats=3) for h in (8, 256))
    assert small["ms"] < large["ms"] and small["ran"] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_the_oracle_against_the_kernels_that_run(kind, hidden):
    row = time_recurrence(hidden, "cuda", kind)
    assert row["predicted"] == row["ran"]


@pytest.mark.gpu
def test_the_plug_agrees_with_the_profiler():
    from cpbkit.gpu_check.step import measure

    measured = measure(make_toy("cuda"), seconds=10)
    assert measured.method.startswith("plug test; the profiler says")
    said = float(measured.method.split(" D ")[1].split()[0])
    assert measured.numbers.device == pytest.approx(said, rel=0.25)


@pytest.mark.gpu
def test_a_gpu_has_figures():
    found = probe_machine("cuda")
    assert found["copy GB/s"] > 50 and found["matmul float32 TFLOP/s"] > 1
