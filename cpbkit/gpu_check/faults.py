"""Faults put on purpose into a toy loop: what does the doctor say to each on this machine?"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cpbkit.gpu_check.clocks import make_clock, time_block
from cpbkit.gpu_check.diagnosis import decide
from cpbkit.gpu_check.findings import check_environment
from cpbkit.gpu_check.step import Step, StepFailed, measure

LENGTH, FEATURES, BATCH, ROWS = 40, 8, 32, 1500


class WrittenLSTM(nn.Module):
    """The cell in circulation: eight products a step instead of one layer of the library."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.inner = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(4))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = c = x.new_zeros(len(x), self.hidden)
        out = []
        for row in x.unbind(1):
            i, f, g, o = (a(row) + b(h) for a, b in zip(self.inner, self.outer, strict=True))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1), None  # (B, L, H)


class Toy(nn.Module):
    """A recurrent layer and a head, or layers without a recurrence: (B, L, C) -> (B, 1)."""

    def __init__(self, layer: nn.Module, hidden: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out  # (B, L, H), or (B, H) of a layer without time
        return self.head(out[:, -1] if out.dim() == 3 else out)


class PandasWindows(Dataset):
    """A window a sample, cut out of a data frame: what most tutorials do."""

    def __init__(self):
        self.frame = pd.DataFrame(np.random.default_rng(0).normal(size=(ROWS, FEATURES)))

    def __len__(self) -> int:
        return len(self.frame) - LENGTH - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.frame.iloc[i : i + LENGTH].to_numpy("float32")
        return torch.tensor(window), torch.tensor([self.frame.iloc[i + LENGTH, 0]], dtype=torch.float32)


def make_toy(
    device: str,
    layer: nn.Module | None = None,
    hidden: int = 64,
    loader: DataLoader | None = None,
    after: Callable[[Tensor], object] | None = None,
    dtype: torch.dtype = torch.float32,
    **optimizer,
) -> Step:
    """Return the step of a toy loop over windows in memory; after: what the loop does with each loss."""
    torch.manual_seed(0)
    layer = layer or nn.LSTM(FEATURES, hidden, batch_first=True)
    model = Toy(layer, hidden).to(device, dtype)
    adam = torch.optim.Adam(model.parameters(), **({"fused": True} | optimizer))
    if loader is None:
        windows = torch.randn(4 * BATCH, LENGTH, FEATURES), torch.randn(4 * BATCH, 1)
        batches = list(zip(*(t.to(device).split(BATCH) for t in windows), strict=True))
    else:
        batches = loader

    def train(batch) -> None:
        x, y = (t.to(device, dtype, non_blocking=True) for t in batch)  # a plain copy would be a fault of its own
        adam.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        adam.step()
        if after:
            after(loss)

    return Step(train, lambda: batches, model, adam, device=device, workers=getattr(loader, "num_workers", 0))


@dataclass(frozen=True)
class Fault:
    """One fault, and the verdict that is right."""

    name: str
    expected: str
    build: Callable[[str], Step]  # takes the device
    needs_gpu: bool = False
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # a mode that is on
    between: float = 0.0  # time spent between steps, as a multiple of a step


def _anomaly() -> contextlib.AbstractContextManager:
    warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
    return torch.autograd.set_detect_anomaly(True)


def _misplaced(device: str) -> Step:
    step = make_toy(device)
    step.model.mask = torch.ones(3, device="meta" if device == "cpu" else "cpu")  # an attribute, no buffer
    return step


def _leaking(device: str) -> Step:
    step, kept = make_toy(device), []

    def train(batch) -> None:
        step.train(batch)
        kept.append(step.model(batch[0].to(device)).mean())  # a validation without no_grad: its graph lives on

    return replace(step, train=train)


def _small_layers() -> nn.Module:
    deep = (part for _ in range(40) for part in (nn.Linear(FEATURES, FEATURES), nn.ReLU()))
    return nn.Sequential(nn.Flatten(1), nn.Linear(LENGTH * FEATURES, FEATURES), *deep)


def _healthy(device: str) -> Step:
    width = 256 if device == "cpu" else 4096
    return make_toy(device, nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width)), width)


def make_windows(rows: int) -> TensorDataset:
    """Draw windows that lie in memory, with a target each."""
    return TensorDataset(torch.randn(rows, LENGTH, FEATURES), torch.randn(rows, 1))


def _wide_windows() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4096, 256, FEATURES, dtype=torch.float64), torch.randn(4096, 1)) for _ in range(2)]


FAULTS = (
    Fault("none", "DEVICE_BOUND", _healthy),
    Fault("windows cut from a data frame", "DATA_STARVED", lambda d: make_toy(
        d, nn.Flatten(1), LENGTH * FEATURES, DataLoader(PandasWindows(), BATCH, shuffle=True, pin_memory=d != "cpu"))),
    Fault("two workers for windows in memory", "DATA_STARVED", lambda d: make_toy(
        d, nn.Flatten(1), LENGTH * FEATURES,
        DataLoader(make_windows(16 * BATCH), BATCH, num_workers=2, pin_memory=d != "cpu"))),
    Fault("LSTM cell written out", "HOST_BOUND", lambda d: make_toy(d, WrittenLSTM(FEATURES, 16), 16)),
    Fault("forty tiny layers", "HOST_BOUND", lambda d: make_toy(d, _small_layers(), FEATURES)),
    Fault("optimiser tensor by tensor", "HOST_BOUND", lambda d: make_toy(
        d, _small_layers(), FEATURES, foreach=False, fused=False)),
    Fault("loss.item() every step", "SYNC_BOUND", lambda d: make_toy(d, after=Tensor.item)),
    Fault("anomaly detection left on", "DEBUG_MODE_ON", make_toy, around=_anomaly),
    Fault("a constant on another device", "MODEL_OR_DATA_ON_CPU", _misplaced),
    Fault("plots between the steps", "GPU_IDLE_OUTSIDE_STEPS", make_toy, between=1.0),
    Fault("validation losses kept with their graph", "MEMORY_GROWTH", _leaking),
    Fault("small nn.LSTM, small batch", "DEVICE_LATENCY_BOUND", lambda d: make_toy(
        d, nn.LSTM(FEATURES, 64, 2, batch_first=True)), needs_gpu=True),
    Fault("nn.LSTM of width 129", "CUDNN_NOT_PERSISTENT", lambda d: make_toy(
        d, nn.LSTM(FEATURES, 129, 2, batch_first=True), 129), needs_gpu=True),
    Fault("nn.LSTM in float64", "CUDNN_NOT_PERSISTENT", lambda d: make_toy(d, dtype=torch.float64), needs_gpu=True),
    Fault("64 MB of windows copied a step", "COPY_BOUND", lambda d: make_toy(
        d, nn.Flatten(2), FEATURES, loader=_wide_windows()), needs_gpu=True),
    Fault("torch.cuda.synchronize() in the loop", "SYNC_BOUND", lambda d: make_toy(
        d, nn.LSTM(FEATURES, 256, 2, batch_first=True), 256, after=_synchronize), needs_gpu=True),
)  # fmt: skip


def _synchronize(loss: Tensor) -> None:
    torch.cuda.synchronize()


def inject(fault: Fault, device: str, seconds: float = 3.0) -> dict:
    """Diagnose one fault on this machine: a row with what was expected and what was found."""
    row = {"fault": fault.name, "expected": fault.expected, "found": "", "note": ""}
    if fault.needs_gpu and not device.startswith("cuda"):
        return row | {"note": "not injected: needs an NVIDIA GPU"}
    with warnings.catch_warnings():
        # Newer Pythons warn of every fork in a process with threads, which a loader's workers are.
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        with fault.around():
            step = fault.build(device)
            codes = tuple(c for c in check_environment().codes if c[0] == "DEBUG_MODE_ON")
            try:
                numbers = measure(step, seconds).numbers
            except StepFailed as failure:
                return row | {"note": f"not diagnosed: {failure}"}
    diagnosis = decide(replace(numbers, steps_share=_share_of_steps(step, numbers.loop / 1e3, fault.between)), codes)
    # Two findings are counted, not timed: growth is told beside a verdict, and a wait costs nothing on a CPU.
    counted = {"MEMORY_GROWTH": numbers.growth, "SYNC_BOUND": numbers.serial and numbers.waits}
    found = fault.expected if counted.get(fault.expected) else diagnosis.verdict
    return row | {"found": found, "note": diagnosis.reason}


def _share_of_steps(step: Step, each: float, between: float) -> float:
    """Run a loop that spends so many times a step's seconds elsewhere: a plot, a checkpoint, a validation."""
    if not between:
        return 1.0
    turns, run, clock = 20, step.loop(), make_clock(step.place)
    begun = time.perf_counter()
    for _ in range(turns):
        time_block(clock, run)  # a plot waits for what it shows
        time.sleep(between * each)
    return turns * each / (time.perf_counter() - begun)


def inject_all(device: str = "", seconds: float = 3.0) -> Iterator[dict]:
    """Inject every fault, one row at a time; those this machine cannot have come with the reason."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for fault in FAULTS:
        yield inject(fault, place, seconds)


def count_confusions(rows: list[dict]) -> pd.DataFrame:
    """Return the confusion matrix: a row for what was injected, a column for what was found."""
    tried = pd.DataFrame([row for row in rows if row["found"]])
    return pd.crosstab(tried.expected, tried.found)


def render_faults(rows: list[dict]) -> str:
    """Write what was found for each fault, and the share that was right."""
    lines = [f"  {'fault':<42}{'expected':<24}found"]
    for row in rows:
        mark = "   <- wrong" if row["found"] not in ("", row["expected"]) else ""
        lines.append(f"  {row['fault']:<42}{row['expected']:<24}{row['found'] or row['note']}{mark}")
    tried = [row for row in rows if row["found"]]
    right = sum(row["found"] == row["expected"] for row in tried)
    lines += [
        "",
        f"{right} of {len(tried)} right on this machine; {len(rows) - len(tried)} not injected or not diagnosed",
    ]
    return "\n".join(lines)
