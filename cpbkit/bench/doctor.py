"""`cpbkit bench doctor`: what the watch costs a loop, and how many loops with a known fault it names."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from cpbkit.gpu_check.inject import OWN_LOOPS, inject_all
from cpbkit.gpu_check.watch import watch
from cpbkit.hardware import provenance

PAIRS, QUICK_PAIRS = 8, 4
STEPS = 1000  # a block
COUNTED = 20  # steps before the clock starts: the watch counts operators in three of them


def bench_doctor(*, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> dict:
    """Time a loop with and without the watch in turns, and run the loops with a fault through the public door."""
    say("a loop with and without the watch")
    cost, rows = measure_cost(QUICK_PAIRS if quick else PAIRS), []
    for row in inject_all(OWN_LOOPS):
        rows.append(row)
        say(f"{row['loop']}: {row['found'] or row['note']}")
    return {"bench": "doctor", **provenance.describe(), "cost": cost, "rows": rows}


def measure_cost(pairs: int) -> dict[str, float]:
    """Return the time of a small step under the watch over that without, in A B B A order."""
    x, y = torch.randn(256, 64), torch.randn(256, 1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def run(steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - begun) / steps

    def run_watched() -> float:
        with watch(live=False):
            run(COUNTED)
            return run(STEPS)

    ratios, plain = [], []
    run(COUNTED)
    for i in range(pairs):
        spent = {}
        for kind in ("ab", "ba")[i % 2]:
            spent[kind] = run(STEPS) if kind == "a" else run_watched()
        ratios.append(spent["b"] / spent["a"])
        plain.append(spent["a"])
    ratios.sort()
    return {"ratio": median(ratios), "low": ratios[0], "high": ratios[-1], "steps": STEPS, "ms": 1e3 * median(plain)}
