"""What the watch costs a loop: steps with it and without, in turns.

python -m benchmarks.watch [--quick]
"""

import math
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from cpbkit.bench.report import about, table
from cpbkit.gpu_check.call_stacks import STAGES
from cpbkit.gpu_check.watch import watch
from cpbkit.hardware import provenance
from cpbkit.hardware.device import on_threads

PAIRS, QUICK_PAIRS = 100, 30
BLOCK = 0.5  # s
COUNTED = 20  # steps before the clock starts: the watch counts operators in three of them


def bench_watch(*, quick: bool = False) -> dict:
    """Time two loops with and without the watch."""
    cost = [measure_cost(name, QUICK_PAIRS if quick else PAIRS) for name in LOOPS]
    return {"bench": "watch", **provenance.describe(), "cost": cost}


class Forecaster(nn.Module):
    """A GRU as people train it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(8, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x):
        """(B, L, C) -> (B, 1)."""
        return self.head(self.layer(x)[0][:, -1])


LOOPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # network, shape of a batch
    "a small step": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)), (64, 32)),
    "a GRU of width 64": (Forecaster, (64, 60, 8)),
}


def measure_cost(name: str, pairs: int) -> dict:
    """Return the time of a step under the watch over that without, in A B B A order: of the clock on the wall, and of
    the processor, in which other programs take less part; each with an interval that holds the median with 95 %.

    One thread: those of a CPU that wait for each other would measure what else runs on the machine.
    """
    build, shape = LOOPS[name]
    x, y, model = torch.randn(*shape), torch.randn(shape[0], 1), build()
    optimizer = torch.optim.Adam(model.parameters())

    def run(steps: int) -> tuple[float, float]:
        begun = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - begun[0]) / steps, (time.process_time() - begun[1]) / steps

    def run_watched(steps: int) -> tuple[float, float]:
        with watch(live=False, tell=False) as w:
            w.notes.sampler.stages = STAGES[-1:]  # as in a training that lasts: at first it looks more often
            run(COUNTED)
            return run(steps)

    spent: dict[str, list[tuple[float, float]]] = {"a": [], "b": []}
    with on_threads(1):
        run(COUNTED)
        steps = max(1, int(BLOCK / run(COUNTED)[1]))
        for i in range(pairs):
            for kind in ("ab", "ba")[i % 2]:
                spent[kind].append(run(steps) if kind == "a" else run_watched(steps))
    cost = {"loop": name, "steps": steps, "pairs": pairs, "ms": 1e3 * median(cpu for _, cpu in spent["a"])}
    away = round(0.98 * math.sqrt(pairs))  # places from the middle: the binomial, as a normal
    for i, clock in enumerate(("wall", "processor")):
        ratios = sorted(b[i] / a[i] for a, b in zip(spent["a"], spent["b"], strict=True))
        low, high = ratios[max(pairs // 2 - away, 0)], ratios[min(pairs // 2 + away, pairs - 1)]
        cost[clock] = {"ratio": median(ratios), "low": low, "high": high}
    return cost


def render(document: dict) -> list[str]:
    """Show what was measured as lines of text."""
    rows = []
    for cost in document["cost"]:
        ratios = (f"{c['ratio']:.3f} ({c['low']:.3f} to {c['high']:.3f})" for c in (cost["processor"], cost["wall"]))
        rows.append([cost["loop"], f"{cost['ms']:.2f}", *ratios, f"{cost['pairs']} pairs of {cost['steps']} steps"])
    return [
        "A training step under the watch, in times of one without (95 % interval of the median):",
        *table(["", "ms", "processor time", "wall time", ""], rows),
    ]


if __name__ == "__main__":
    measured = bench_watch(quick="--quick" in sys.argv[1:])
    print(*about(measured), "", *render(measured), sep="\n")
