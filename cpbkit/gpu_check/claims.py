"""What people say about GPUs and small models, measured on the person's own step and device."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from cpbkit.gpu_check.census import Census
from cpbkit.gpu_check.clocks import make_clock, time_block
from cpbkit.gpu_check.faults import FEATURES, LENGTH, WrittenLSTM, make_toy, make_windows
from cpbkit.gpu_check.findings import runs_on
from cpbkit.gpu_check.guard import preserved
from cpbkit.gpu_check.preflight import predict_memory
from cpbkit.gpu_check.probes import time_recurrence
from cpbkit.gpu_check.rnn_path import Recurrence
from cpbkit.gpu_check.step import Step, measure
from cpbkit.gpu_check.tensors import count_samples
from cpbkit.gpu_check.trials import TRIALS, Gain, compare, try_variant
from cpbkit.hardware.nvml import load_nvml, nvml_handles


@dataclass(frozen=True)
class Ruling:
    """What the measurement says about a claim."""

    verdict: str  # TRUE | FALSE | NO EFFECT | NOT MEASURABLE HERE
    numbers: dict[str, float]
    text: str


@dataclass(frozen=True)
class Case:
    """Whom the claims are measured on, and the ways to do it."""

    step: Step
    seconds: float  # a claim

    @property
    def device(self) -> str:
        return self.step.place

    def race(self, a: Callable[[], object], b: Callable[[], object], what: str, least: float = 1.0) -> Ruling:
        """Rule on `b is faster than a`, at least by a factor."""
        return rule(compare(make_clock(self.device), a, b, self.seconds), what, least)

    def race_setting(self, put: Callable, before, during, what: str) -> Ruling:
        """Rule on `the step is faster under a setting of torch`; all settings come back after the claim."""
        if self.step.graph and self.device.startswith("cuda"):
            return not_here("the step is replayed as one CUDA graph, under the settings it was captured with")
        run = self.step.loop()
        put(before)
        return self.race(run, lambda: (put(during), run(), put(before)), what)

    def on_gpu(self, measurement: Callable[[], Ruling]) -> Callable[[], Ruling]:
        """Let a claim be measured on a GPU alone."""
        return measurement if self.device.startswith("cuda") else lambda: not_here("needs an NVIDIA GPU")

    def try_fix(self, name: str, what: str, least: float = 1.0) -> Ruling:
        """Rule on `this fix makes the step faster`."""
        variant = self.step.variants.get(name)
        gain = try_variant(variant, self.step, self.seconds) if variant else TRIALS[name](self.step, self.seconds)
        return rule(gain, what, least) if gain else not_here("this step cannot be changed in that way")


def rule(gain: Gain, what: str, least: float = 1.0) -> Ruling:
    """Rule on a speed-up: TRUE only above `least`, NO EFFECT where the interval holds 1."""
    if math.isnan(gain.gain):
        return Ruling("FALSE", {}, f"{what}: {gain.note}")
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


# Key -> the claim as it is made, and its measurement. C1 to C22 are of the seed documents, F of the folklore.
Claims = dict[str, tuple[str, Callable[[], Ruling]]]


def judge_claims(step: Step | None = None, seconds: float = 1.5) -> Iterator[dict]:
    """Measure the claims on a step, or on a toy where none is given; yield a row of each, JSON-safe.

    seconds: about how long a claim may take. A measurement that fails is told in `text`.
    """
    with preserved():  # the random numbers that toys are made of
        case = Case(step or make_toy("cuda" if torch.cuda.is_available() else "cpu"), seconds)
        claims = all_claims(case)
    for key, (sentence, measurement) in claims.items():
        ruling = judge_claim(case, measurement)
        numbers = {name: value for name, value in ruling.numbers.items() if math.isfinite(value)}  # JSON has no NaN
        yield {"key": key, "claim": sentence, "verdict": ruling.verdict, "numbers": numbers, "text": ruling.text}


def all_claims(case: Case) -> Claims:
    """Return the claims in the order of their numbers, those of the seed documents first."""
    claims = about_recurrences(case) | about_the_step(case) | about_data(case) | about_the_chip(case)
    return {key: claims[key] for key in sorted(claims, key=lambda key: (key[0], int(key[1:])))}


def judge_claim(case: Case, measurement: Callable[[], Ruling]) -> Ruling:
    """Measure one claim, and leave the step as it was."""
    with preserved(case.step):
        try:
            return measurement()
        except Exception as error:  # told as this claim's ruling, also what NVML refuses; the others go on
            return not_here(f"the measurement failed: {(str(error).splitlines() or [''])[0]}")


def about_recurrences(case: Case) -> Claims:
    """Claims on LSTMs, by layers of width 64."""
    device = case.device
    layer, written = nn.LSTM(FEATURES, 64, batch_first=True).to(device), WrittenLSTM(FEATURES, 64).to(device)
    attention = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    other = nn.Sequential(nn.Linear(FEATURES, 64), attention).to(device)
    x = torch.randn(32, LENGTH, FEATURES, device=device)
    packed = pack_padded_sequence(x, torch.full((len(x),), LENGTH), batch_first=True)
    lstm = both_ways(layer, x)

    def on_cudnn() -> Ruling:
        row = time_recurrence(Recurrence(hidden=64, inputs=FEATURES, length=LENGTH), device)
        waits = count_waits(lstm)  # what is computed on the host must be copied there
        ran = row["ran"] or "none with a name that is known here"
        return decide_fact(waits > 0, f"{waits} copies to the host a step; kernels on the device: {ran}", waits=waits)

    def written_out() -> Ruling:
        copy_weights(written, layer)
        torch.testing.assert_close(written(x)[0], layer(x)[0], rtol=0, atol=0.01)  # cuDNN may compute in TF32
        return case.race(lstm, both_ways(written, x), "written cell against nn.LSTM")

    def built_anew() -> Ruling:
        spent = []
        for _ in range(2):
            begun = time.perf_counter()
            both_ways(nn.LSTM(FEATURES, 64, batch_first=True).to(device), x)()
            spent.append(time.perf_counter() - begun)
        text = f"the first model takes {spent[0]:.3f} s to build and run once, the second {spent[1]:.3f} s"
        return decide_fact(spent[1] > 5, text, first=spent[0], second=spent[1])

    def wrong_features() -> Ruling:
        try:
            layer(torch.randn(2, 3, FEATURES + 1, device=device))
        except RuntimeError as error:
            return decide_fact(False, f"it raises at once: {str(error).splitlines()[0]}")
        return decide_fact(True, "a wrong number of features went through")

    def waiting() -> Ruling:
        waits = count_waits(lstm)
        return decide_fact(waits > 0, f"forward and backward of nn.LSTM wait {waits} times", waits=waits)

    def width() -> Ruling:
        times = {h: time_recurrence(Recurrence(hidden=h, inputs=FEATURES), device)["ms"] for h in (128, 150)}
        slower = times[150] / times[128]
        text = f"width 150 takes {slower:.2f} times width 128; its products are {(150 / 128) ** 2:.2f} times as large"
        return decide_fact(slower < 1.5, text, slower=slower)

    return {
        "C1": ("nn.LSTM silently falls back to the CPU", case.on_gpu(on_cudnn)),
        "C3": ("a written LSTM cell is faster than nn.LSTM", written_out),
        "C7": ("building the next model costs 5 to 10 s", built_anew),
        "C8": ("a wrong number of features goes unnoticed", wrong_features),
        "C10": ("a Transformer trains 10 to 20 times faster than an LSTM",
                lambda: case.race(lstm, both_ways(other, x), "a Transformer layer, the same batch", 10)),
        "C11": ("a recurrence makes the CPU wait at every step", waiting),
        "F6": ("torch.compile speeds up nn.LSTM", case.on_gpu(
            lambda: case.race(lstm, both_ways(torch.compile(layer), x), "compiled nn.LSTM"))),
        "F8": ("a width of 150 costs no more than 128 by its size", width),
        "F9": ("pack_padded_sequence saves time on windows of one length",
               lambda: case.race(lstm, both_ways(layer, packed), "packed windows of one length")),
        "F10": ("a TPU is faster for recurrent layers", lambda: not_here("needs a TPU")),
    }  # fmt: skip


def about_the_step(case: Case) -> Claims:
    """Claims on the loop around a model, by the person's own step."""
    step, run = case.step, case.step.loop()

    def in_halves() -> Ruling:
        batch = next(step.feed())
        half = step.on_samples(batch, (step.samples or count_samples(batch, step.batch_axis)) // 2)
        return case.race(lambda: step.train(batch), lambda: (half(), half()), "the same samples in half batches")

    def hundred_epochs() -> Ruling:
        total = measure(step, case.seconds).numbers.loop / 1e3 * 100 * 397
        return decide_fact(total <= 45, f"100 epochs of 397 steps of this step take {total:.0f} s", seconds=total)

    def coin() -> Ruling:
        waits = count_waits(lambda: torch.rand(1, device=case.device).item())
        return decide_fact(waits == 0, f"torch.rand(1, device=...).item() itself waits {waits} time(s)", waits=waits)

    def out_of_range() -> Ruling:
        toy = make_toy(case.device)
        for x, y in itertools.islice(toy.feed(), 30):
            toy.train((x * 500, y))
        left = "finite" if all(bool(p.isfinite().all()) for p in toy.model.parameters()) else "bad"
        return decide_fact(left == "bad", f"30 steps on inputs of 500 standard deviations leave {left} weights")

    def anomaly() -> Ruling:
        put = partial(torch.autograd.set_detect_anomaly, check_nan=True)
        ruling = case.race_setting(put, False, True, "anomaly detection")
        if ruling.verdict != "FALSE" and ruling.numbers["low"] < 0.9:
            return not_here(f"too noisy to tell; {ruling.text}")
        return replace(ruling, verdict="FALSE" if ruling.verdict == "FALSE" else "TRUE")

    def item() -> Ruling:
        free, waiting = make_toy(case.device), make_toy(case.device, after=Tensor.item)
        return case.race(waiting.loop(), free.loop(), "without .item() on the loss", 1.5)

    benchmark = partial(setattr, torch.backends.cudnn, "benchmark")
    return {
        "C4": ("synchronize() after forward and backward makes training faster", case.on_gpu(
            lambda: case.race(run, lambda: (run(), torch.cuda.synchronize()), "with synchronize() after each step"))),
        "C5": ("a smaller batch trains faster", in_halves),
        "C9": ("a model of 100 epochs trains in 30 to 45 s", hundred_epochs),
        "C12": ("matmul precision 'highest' is the fastest", lambda: case.race_setting(
            torch.set_float32_matmul_precision, "high", "highest", "'highest' against 'high'")),
        "C13": ("drawing the coin on the GPU with .item() avoids waiting", coin),
        "C14": ("preloading the data makes training 10 to 50 times faster",
                lambda: case.try_fix("data on the device", "batches kept on the device", 10)),
        "C19": ("inputs outside their range give NaN", out_of_range),
        "C22": ("these models forecast with 95 % success", lambda: not_here(
            "no matter of speed: `cpbkit verdict` holds each model against the best naive forecast")),
        "F2": ("cudnn.benchmark speeds up recurrent layers", case.on_gpu(
            lambda: case.race_setting(benchmark, False, True, "cudnn.benchmark"))),
        "F3": ("a larger batch gets more samples through",
               lambda: case.try_fix("larger batch", "samples a second at the knee")),
        "F4": ("float16 makes training faster", case.on_gpu(lambda: case.try_fix("float16", "float16 autocast"))),
        "F7": ("a CUDA graph makes training faster", case.on_gpu(
            lambda: case.try_fix("CUDA graph", "the whole step in one graph"))),
        "F11": ("anomaly detection may stay on: it costs nothing", anomaly),
        "F12": ("empty_cache() after each step helps", case.on_gpu(
            lambda: case.race(run, lambda: (run(), torch.cuda.empty_cache()), "with empty_cache() after each step"))),
        "F14": ("loss.item() in every step ruins the speed", item),
    }  # fmt: skip


def about_data(case: Case) -> Claims:
    """Claims on bars, windows and loaders."""

    def rsi() -> Ruling:
        moves = torch.randn(8000).tolist()
        begun, up, down = time.perf_counter(), 0.0, 0.0
        for move in moves:  # Wilder's average over 14 bars, as a plain loop
            up, down = (13 * up + max(move, 0.0)) / 14, (13 * down + max(-move, 0.0)) / 14
        spent = time.perf_counter() - begun
        return decide_fact(spent > 10, f"8,000 bars in a Python loop take {spent:.4f} s", seconds=spent)

    def less() -> Ruling:
        more, less = (
            make_toy(case.device, hidden=16, loader=DataLoader(make_windows(rows), 32, shuffle=True))
            for rows in (4096, 512)
        )
        return case.race(more.loop(), less.loop(), "steps a second with an eighth of the data")

    def workers() -> Ruling:
        windows = make_windows(32 * 40)
        loaders = DataLoader(windows, 32), DataLoader(windows, 32, num_workers=2, persistent_workers=True)
        steps = (make_toy(case.device, nn.Flatten(1), LENGTH * FEATURES, loader) for loader in loaders)
        a, b = (lambda step=step: [step.train(batch) for batch in step.batches()] for step in steps)
        return case.race(a, b, "two workers for windows in memory, a whole pass")

    return {
        "C6": ("an RSI loop wastes 20 to 30 s a coin", rsi),
        "C17": ("7,000 rows give 6,971 windows of 30 in and 10 out", lambda: decide_fact(
            7000 - 30 - 10 + 1 == 6971, f"7000 - 30 - 10 + 1 = {7000 - 30 - 10 + 1}")),
        "C18": ("less data makes more steps a second", less),
        "C20": ("10 bars ahead are 40 minutes at 15m, or one hour", lambda: decide_fact(
            10 * 15 == 40, f"10 bars are {10 * 15} minutes at 15m, and 10 hours at 1h")),
        "F1": ("workers and pinned memory speed up a loader of windows in memory", workers),
    }  # fmt: skip


def about_the_chip(case: Case) -> Claims:
    """Claims on what a GPU is and shows."""

    def memory() -> Ruling:
        parts = predict_memory(case.step)
        total = sum(parts.values()) / 1e9
        text = f"the step needs {total:.3g} GB, so little memory in use is right and proves nothing"
        return decide_fact(total > 2, text, **{name: float(size) for name, size in parts.items()})

    def p100() -> Ruling:
        wheel = torch.cuda.get_arch_list()
        if not wheel:
            return not_here("this torch is a CPU-only wheel: it carries no architectures")
        return decide_fact(runs_on(tuple(wheel), (6, 0)), f"torch {torch.__version__} carries {' '.join(wheel)}")

    def bandwidth() -> Ruling:
        a = torch.empty(1 << 26, device=case.device)
        b, timer = torch.empty_like(a), make_clock(case.device)
        rate = 2 * a.nbytes / min(time_block(timer, lambda: b.copy_(a)) for _ in range(5)) / 1e9
        clock = getattr(torch.cuda.get_device_properties(case.device), "memory_clock_rate", 0) / 1e6
        if not clock:
            return not_here(f"torch {torch.__version__} does not say the clock of the memory")
        return decide_fact(False, f"clock {clock:.1f} GHz, measured copy {rate:.0f} GB/s", copy=rate, clock=clock)

    def utilisation() -> Ruling:
        nvml, problem = load_nvml()
        if problem:
            return not_here(problem)
        one, end = torch.ones(1, device=case.device), time.perf_counter() + 2
        while time.perf_counter() < end:
            one.add_(1)
        shown = nvml.nvmlDeviceGetUtilizationRates(nvml_handles(nvml)[one.device.index]).gpu
        return decide_fact(shown < 20, f"adding 1 to one number reads as {shown} % utilisation", utilisation=shown)

    def bfloat16() -> Ruling:
        capability = torch.cuda.get_device_capability(case.device)
        text = f"is_bf16_supported() says {torch.cuda.is_bf16_supported()}, the capability is {capability}"
        return decide_fact(capability >= (8, 0), text)

    def beats_cpu() -> Ruling:
        here, there = make_toy("cpu", hidden=8), make_toy(case.device, hidden=8)
        return case.race(here.loop(), there.loop(), "a toy of width 8 on the GPU against the CPU")

    return {
        "C2": ("little GPU memory in use proves that the CPU does the work", memory),
        "C15": ("this torch runs on a P100", p100),
        "C16": ("the memory clock rate is the bandwidth", case.on_gpu(bandwidth)),
        "C21": ("utilisation shows how well the GPU is used", case.on_gpu(utilisation)),
        "F5": ("this chip computes in bfloat16", case.on_gpu(bfloat16)),
        "F13": ("a GPU always beats the CPU", case.on_gpu(beats_cpu)),
    }


def both_ways(layer: nn.Module, x) -> Callable[[], None]:
    """Return a forward and backward of a layer."""

    def run() -> None:
        layer.zero_grad()
        out = layer(x)
        while isinstance(out, tuple):  # with a state, or packed: the output comes first
            out = out[0]
        out.sum().backward()

    return run


def count_waits(run: Callable[[], object]) -> int:
    """Return how often the host waits for the device."""
    with Census() as census:
        run()
    return len(census.waits)


def copy_weights(written: WrittenLSTM, layer: nn.LSTM) -> None:
    """Give the written cell the weights of the library's."""
    with torch.no_grad():
        for linears, kind in ((written.inner, "ih"), (written.outer, "hh")):
            weights, biases = (getattr(layer, f"{part}_{kind}_l0").chunk(4) for part in ("weight", "bias"))
            for linear, weight, bias in zip(linears, weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
