"""What people say about GPUs and small models, measured on the person's own step and device."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.environment import runs_on
from cpbkit.gpu_check.faults import FEATURES, LENGTH, WrittenLSTM, make_toy, make_windows
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.monitor import nvml_handles
from cpbkit.gpu_check.probes import make_clock, time_block, time_recurrence
from cpbkit.gpu_check.rnn_path import Recurrence
from cpbkit.gpu_check.step import Step, StepFailed, measure, predict_memory
from cpbkit.gpu_check.trials import TRIALS, Gain, compare, loop_of

NEEDS_GPU = "needs an NVIDIA GPU"


@dataclass(frozen=True)
class Ruling:
    """What the measurement says about a claim."""

    verdict: str  # TRUE | FALSE | NO EFFECT | NOT MEASURABLE HERE
    numbers: dict[str, float]
    text: str


@dataclass
class Case:
    """Whom and where the claims are measured on."""

    step: Step
    device: str
    seconds: float  # a claim
    nvml: object = None

    @property
    def clock(self):
        return make_clock(self.device)

    @property
    def batch(self):
        return next(iter(self.step.batches())) if self.step.batches else None

    def race(self, a: Callable[[], object], b: Callable[[], object], what: str, least: float = 1.0) -> Ruling:
        """Rule on `b is faster than a`, at least by a factor."""
        return rule(compare(self.clock, a, b, self.seconds), what, least)


def rule(gain: Gain, what: str, least: float = 1.0) -> Ruling:
    """Rule on a speed-up: TRUE only above `least`, NO EFFECT where the interval holds 1."""
    numbers = {"gain": gain.gain, "low": gain.low, "high": gain.high}
    text = f"{what}: {gain.gain:.2f}x [{gain.low:.2f}, {gain.high:.2f}]"
    if gain.low <= 1 <= gain.high:
        return Ruling("NO EFFECT", numbers, text)
    return Ruling("TRUE" if gain.low > 1 and gain.gain >= least else "FALSE", numbers, text)


def decide_fact(is_true: bool, text: str, **numbers: float) -> Ruling:
    """Rule on a claim that is right or wrong."""
    return Ruling("TRUE" if is_true else "FALSE", numbers, text)


def not_here(reason: str) -> Ruling:
    """Say why a claim cannot be measured here."""
    return Ruling("NOT MEASURABLE HERE", {}, reason)


def on_gpu(measure_claim: Callable[[Case], Ruling]) -> Callable[[Case], Ruling]:
    """Let a claim be measured on a GPU alone."""
    return lambda case: measure_claim(case) if case.device == "cuda" else not_here(NEEDS_GPU)


def _forward_backward(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer.zero_grad()
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return run


def _lstm(case: Case) -> tuple[nn.LSTM, Tensor]:
    x = torch.randn(32, LENGTH, FEATURES, device=case.device)
    return nn.LSTM(FEATURES, 64, batch_first=True).to(case.device), x


def _falls_back(case: Case) -> Ruling:
    row = time_recurrence(Recurrence(hidden=64, inputs=FEATURES, length=LENGTH), case.device)
    return decide_fact(not row["ran"], f"kernels on the device: {row['ran']}", kernels=row["kernels"])


def _memory(case: Case) -> Ruling:
    parts = predict_memory(case.step)
    total = sum(parts.values()) / 1e9
    text = f"the step needs {total:.3g} GB, so little memory in use is right and proves nothing"
    return decide_fact(total > 2, text, **{name: float(size) for name, size in parts.items()})


def copy_weights(written: WrittenLSTM, layer: nn.LSTM) -> None:
    """Give the written cell the weights of the library's."""
    with torch.no_grad():
        for linears, kind in ((written.inner, "ih"), (written.outer, "hh")):
            weights, biases = (getattr(layer, f"{part}_{kind}_l0").chunk(4) for part in ("weight", "bias"))
            for linear, weight, bias in zip(linears, weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)


def _written(case: Case) -> Ruling:
    layer, x = _lstm(case)
    written = WrittenLSTM(FEATURES, 64).to(case.device)
    copy_weights(written, layer)
    torch.testing.assert_close(written(x)[0], layer(x)[0], rtol=1e-3, atol=1e-4)
    return case.race(_forward_backward(layer, x), _forward_backward(written, x), "written cell against nn.LSTM")


def _synchronise(case: Case) -> Ruling:
    run = loop_of(case.step)
    return case.race(run, lambda: (run(), torch.cuda.synchronize()), "with synchronize() after each step")


def _smaller_batch(case: Case) -> Ruling:
    batch, axis = case.batch, case.step.batch_axis
    first, second = (
        tree_map(lambda t, i=i: t.chunk(2, axis)[i] if isinstance(t, Tensor) else t, batch) for i in (0, 1)
    )
    train = case.step.train
    return case.race(lambda: train(batch), lambda: (train(first), train(second)), "the same samples in half batches")


def _rsi(case: Case) -> Ruling:
    moves = torch.randn(8000).tolist()
    begun, up, down = time.perf_counter(), 0.0, 0.0
    for move in moves:  # Wilder's average over 14 bars, as a plain loop
        up, down = (13 * up + max(move, 0.0)) / 14, (13 * down + max(-move, 0.0)) / 14
    spent = time.perf_counter() - begun
    return decide_fact(spent > 10, f"8,000 bars in a Python loop take {spent:.4f} s", seconds=spent)


def _rebuild(case: Case) -> Ruling:
    spent = []
    for _ in range(2):
        begun = time.perf_counter()
        _forward_backward(*_lstm(case))()
        spent.append(time.perf_counter() - begun)
    text = f"the first model takes {spent[0]:.3f} s to build and run once, the second {spent[1]:.3f} s"
    return decide_fact(spent[1] > 5, text, first=spent[0], second=spent[1])


def _wrong_width(case: Case) -> Ruling:
    layer, _ = _lstm(case)
    try:
        layer(torch.randn(2, 3, FEATURES + 1, device=case.device))
    except RuntimeError as error:
        return decide_fact(False, f"it raises at once: {str(error).splitlines()[0]}")
    return decide_fact(True, "a wrong number of features went through")


def _eta(case: Case) -> Ruling:
    each = measure(case.step, seconds=case.seconds).numbers.loop / 1e3
    total = each * 100 * 397
    return decide_fact(total <= 45, f"100 epochs of 397 steps of this step take {total:.0f} s", seconds=total)


def _transformer(case: Case) -> Ruling:
    layer, x = _lstm(case)
    attention = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    other = nn.Sequential(nn.Linear(FEATURES, 64), attention).to(case.device)
    return case.race(
        _forward_backward(layer, x), _forward_backward(other, x), "a Transformer layer, the same batch", 10
    )


def _count_waits(run: Callable[[], object]) -> int:
    with Census() as census:
        run()
    return len(census.waits)


def _recurrence_waits(case: Case) -> Ruling:
    waits = _count_waits(_forward_backward(*_lstm(case)))
    return decide_fact(waits > 0, f"forward and backward of nn.LSTM wait {waits} times", waits=waits)


def _coin(case: Case) -> Ruling:
    waits = _count_waits(lambda: torch.rand(1, device=case.device).item())
    return decide_fact(waits == 0, f"torch.rand(1, device=...).item() itself waits {waits} time(s)", waits=waits)


def _with_setting(case: Case, put: Callable, before, during, what: str) -> Ruling:
    run = loop_of(case.step)

    def other() -> None:
        put(during)
        try:
            run()
        finally:
            put(before)

    return case.race(run, other, what)


def _highest(case: Case) -> Ruling:
    put, before = torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    run = loop_of(case.step)
    put("high")
    try:
        return case.race(run, lambda: (put("highest"), run(), put("high")), "'highest' against 'high'")
    finally:
        put(before)


def _resident(case: Case) -> Ruling:
    gain = TRIALS["data on the device"](case.step, "", case.seconds)
    return rule(gain, "batches kept on the device", 10) if gain else not_here("this step has no loader")


def _p100(case: Case) -> Ruling:
    wheel = torch.cuda.get_arch_list()
    if not wheel:
        return not_here("this torch is a CPU-only wheel: it carries no architectures")
    return decide_fact(runs_on(tuple(wheel), (6, 0)), f"torch {torch.__version__} carries {' '.join(wheel)}")


def _bandwidth(case: Case) -> Ruling:
    a = torch.empty(1 << 26, device=case.device)
    b = torch.empty_like(a)
    rate = 2 * a.nbytes / min(time_block(case.clock, lambda: b.copy_(a)) for _ in range(5)) / 1e9
    clock = getattr(torch.cuda.get_device_properties(0), "memory_clock_rate", 0) / 1e6
    if not clock:
        return not_here(f"torch {torch.__version__} does not say the clock of the memory")
    return decide_fact(False, f"clock {clock:.1f} GHz, measured copy {rate:.0f} GB/s", copy=rate, clock=clock)


def _dataset_size(case: Case) -> Ruling:
    small, large = (
        make_toy(case.device, hidden=16, loader=DataLoader(make_windows(rows), 32, shuffle=True))
        for rows in (4096, 512)
    )
    return case.race(loop_of(small), loop_of(large), "steps a second with an eighth of the data")


def _out_of_range(case: Case) -> Ruling:
    step = make_toy(case.device)
    for x, y in itertools.islice(itertools.cycle(step.batches()), 30):
        step.train((x * 500, y))
    finite = all(bool(p.isfinite().all()) for p in step.model.parameters())
    return decide_fact(
        not finite, f"30 steps on inputs of 500 standard deviations leave {'finite' if finite else 'bad'} weights"
    )


def _utilisation(case: Case) -> Ruling:
    if case.nvml is None:
        return not_here("NVML was not at hand")
    one, end = torch.ones(1, device=case.device), time.perf_counter() + 2
    while time.perf_counter() < end:
        one.add_(1)
    shown = case.nvml.nvmlDeviceGetUtilizationRates(nvml_handles(case.nvml)[0]).gpu
    return decide_fact(shown < 20, f"adding 1 to one number reads as {shown} % utilisation", utilisation=shown)


def _workers(case: Case) -> Ruling:
    windows = make_windows(32 * 40)
    loaders = DataLoader(windows, 32), DataLoader(windows, 32, num_workers=2, persistent_workers=True)
    steps = (make_toy(case.device, nn.Flatten(1), LENGTH * FEATURES, loader) for loader in loaders)
    a, b = (lambda step=step: [step.train(batch) for batch in step.batches()] for step in steps)
    return case.race(a, b, "two workers for windows in memory, a whole pass")


def _trial(name: str, what: str) -> Callable[[Case], Ruling]:
    def run(case: Case) -> Ruling:
        gain = TRIALS[name](case.step, "", case.seconds)
        return rule(gain, what) if gain else not_here("this step cannot be changed in that way")

    return run


def _bfloat16(case: Case) -> Ruling:
    capability = torch.cuda.get_device_capability()
    text = f"is_bf16_supported() says {torch.cuda.is_bf16_supported()}, the capability is {capability}"
    return decide_fact(capability >= (8, 0), text)


def _benchmark(case: Case) -> Ruling:
    flags = torch.backends.cudnn
    return _with_setting(case, lambda on: setattr(flags, "benchmark", on), flags.benchmark, True, "cudnn.benchmark")


def _compile(case: Case) -> Ruling:
    layer, x = _lstm(case)
    return case.race(_forward_backward(layer, x), _forward_backward(torch.compile(layer), x), "compiled nn.LSTM")


def _width(case: Case) -> Ruling:
    times = {h: time_recurrence(Recurrence(hidden=h, inputs=FEATURES), case.device)["ms"] for h in (128, 150)}
    slower = times[150] / times[128]
    text = f"width 150 takes {slower:.2f} times width 128; its products are {(150 / 128) ** 2:.2f} times as large"
    return decide_fact(slower < 1.5, text, slower=slower)


def _packed(case: Case) -> Ruling:
    layer, x = _lstm(case)
    lengths = torch.full((len(x),), LENGTH)

    def packed() -> None:
        layer.zero_grad()
        layer(pack_padded_sequence(x, lengths, batch_first=True))[0].data.sum().backward()

    return case.race(_forward_backward(layer, x), packed, "packed windows of one length")


def _anomaly(case: Case) -> Ruling:
    put = torch.autograd.set_detect_anomaly
    ruling = _with_setting(
        case, lambda on: put(on, check_nan=on), torch.is_anomaly_enabled(), True, "anomaly detection"
    )
    return replace(ruling, verdict={"FALSE": "FALSE", "TRUE": "NO EFFECT"}.get(ruling.verdict, "TRUE"))


def _item(case: Case) -> Ruling:
    step = make_toy(case.device)
    waiting = make_toy(case.device, after=Tensor.item)
    ruling = case.race(loop_of(waiting), loop_of(step), "without .item() on the loss")
    return replace(ruling, verdict="TRUE" if ruling.numbers["gain"] > 1.5 else ruling.verdict.replace("TRUE", "FALSE"))


def _empty_cache(case: Case) -> Ruling:
    run = loop_of(case.step)
    return case.race(run, lambda: (run(), torch.cuda.empty_cache()), "with empty_cache() after each step")


def _gpu_beats_cpu(case: Case) -> Ruling:
    here, there = make_toy("cpu", hidden=8), make_toy(case.device, hidden=8)
    return case.race(loop_of(here), loop_of(there), "a toy of width 8 on the GPU against the CPU")


# Key, the claim as it is made, how it is measured. C1 to C22 are of the seed documents, F of the folklore.
CLAIMS: dict[str, tuple[str, Callable[[Case], Ruling]]] = {
    "C1": ("nn.LSTM silently falls back to the CPU", on_gpu(_falls_back)),
    "C2": ("little GPU memory in use proves that the CPU does the work", _memory),
    "C3": ("a written LSTM cell is faster than nn.LSTM", _written),
    "C4": ("synchronize() after forward and backward makes training faster", on_gpu(_synchronise)),
    "C5": ("a smaller batch trains faster", _smaller_batch),
    "C6": ("an RSI loop wastes 20 to 30 s a coin", _rsi),
    "C7": ("building the next model costs 5 to 10 s", _rebuild),
    "C8": ("a wrong number of features goes unnoticed", _wrong_width),
    "C9": ("a model of 100 epochs trains in 30 to 45 s", _eta),
    "C10": ("a Transformer trains 10 to 20 times faster than an LSTM", _transformer),
    "C11": ("a recurrence makes the CPU wait at every step", _recurrence_waits),
    "C12": ("matmul precision 'highest' is the fastest", _highest),
    "C13": ("drawing the coin on the GPU with .item() avoids waiting", _coin),
    "C14": ("preloading the data makes training 10 to 50 times faster", _resident),
    "C15": ("this torch runs on a P100", _p100),
    "C16": ("the memory clock rate is the bandwidth", on_gpu(_bandwidth)),
    "C17": ("7,000 rows give 6,971 windows of 30 in and 10 out", lambda case: decide_fact(
        7000 - 30 - 10 + 1 == 6971, f"7000 - 30 - 10 + 1 = {7000 - 30 - 10 + 1}")),
    "C18": ("less data makes more steps a second", _dataset_size),
    "C19": ("inputs outside their range give NaN", _out_of_range),
    "C20": ("10 bars ahead are 40 minutes at 15m, or one hour", lambda case: decide_fact(
        10 * 15 == 40, f"10 bars are {10 * 15} minutes at 15m, and 10 hours at 1h")),
    "C21": ("utilisation shows how well the GPU is used", on_gpu(_utilisation)),
    "C22": ("these models forecast with 95 % success", lambda case: not_here(
        "no matter of speed: `cpbkit verdict` holds each model against the best naive forecast")),
    "F1": ("workers and pinned memory speed up a loader of windows in memory", _workers),
    "F2": ("cudnn.benchmark speeds up recurrent layers", on_gpu(_benchmark)),
    "F3": ("a larger batch gets more samples through", _trial("larger batch", "samples a second at the knee")),
    "F4": ("float16 makes training faster", on_gpu(_trial("float16", "float16 autocast"))),
    "F5": ("this chip computes in bfloat16", on_gpu(_bfloat16)),
    "F6": ("torch.compile speeds up nn.LSTM", on_gpu(_compile)),
    "F7": ("a CUDA graph makes training faster", on_gpu(_trial("CUDA graph", "the whole step in one graph"))),
    "F8": ("a width of 150 costs no more than 128 by its size", _width),
    "F9": ("pack_padded_sequence saves time on windows of one length", _packed),
    "F10": ("a TPU is faster for recurrent layers", lambda case: not_here("needs a TPU")),
    "F11": ("anomaly detection may stay on: it costs nothing", _anomaly),
    "F12": ("empty_cache() after each step helps", on_gpu(_empty_cache)),
    "F13": ("a GPU always beats the CPU", on_gpu(_gpu_beats_cpu)),
    "F14": ("loss.item() in every step ruins the speed", _item),
}  # fmt: skip


def judge_claims(
    step: Step | None = None, seconds: float = 1.5, nvml=None, keys: tuple[str, ...] = ()
) -> Iterator[dict]:
    """Measure the claims on a step, or on a toy where none is given; yield a row of each, JSON-safe.

    seconds: about how long a claim may take. A measurement that fails is told in `text`.
    """
    device = step.place if step else "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(step or make_toy(device), device, seconds, nvml)
    for key in keys or CLAIMS:
        claim, measure_claim = CLAIMS[key]
        with preserved(case.step.train, case.step.batches, case.step.model, case.step.optimizer):
            try:
                ruling = measure_claim(case)
            except (RuntimeError, ValueError, StepFailed) as error:
                ruling = not_here(f"the measurement failed: {(str(error).splitlines() or [''])[0]}")
        numbers = {name: value for name, value in ruling.numbers.items() if math.isfinite(value)}  # JSON has no NaN
        yield {"key": key, "claim": claim, "verdict": ruling.verdict, "numbers": numbers, "text": ruling.text}
